"""What a round is compiled from, and the arrays that it works on.

`Engine` is static: it decides which program is compiled. Everything that changes from round to round is an array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.local import LocalTraining
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.failures import Failures
from fedjax_drift.types import Algorithm, Model, PyTree


class Rows(NamedTuple):
    """Training rows on the devices: the whole data set, replicated or sharded, or the streamed rows of one cohort."""

    x: jax.Array  # [M, ...] as stored, so images stay uint8; if sharded, M includes the padding of every part
    y: jax.Array  # [M, ...]
    offsets: jax.Array | None = None  # int32 [N], client i's first row; None when streamed
    sizes: jax.Array | None = None  # int32 [N]
    places: jax.Array | None = None  # int32 [M + P], only with rows dealt anew: a client's are places[offset + ...]


class Client(NamedTuple):
    """One client of a round, or an axis of them. An absent client has id N and no rows, hence no steps and weight 0."""

    id: jax.Array  # int32
    size: jax.Array  # int32, n_i
    offset: jax.Array  # int32, index of its first row
    steps: jax.Array  # int32, the local steps that it does: K_i, or fewer for a straggler
    place: jax.Array  # int32, index of its state in ServerState.clients: its id, unless a client store keeps the states


class TestRows(NamedTuple):
    """The test set in T batches, a multiple of the number of devices; the last ones are padded."""

    x: jax.Array  # [T, B, ...]
    y: jax.Array  # [T, B, ...]
    mask: jax.Array  # bool [T, B], False on padding


class Arrays(NamedTuple):
    """The data set: an argument of the compiled round, never a constant that it captures."""

    rows: Rows | None  # None: streamed, so every round is given its own
    test: TestRows | None


class Redeal(NamedTuple):
    """How the rows of a cohort are pooled and dealt anew (`FederatedData.redealt`)."""

    alpha: float | None  # None: evenly
    num_classes: int
    most_rows: tuple[int, ...]  # [K - 1]: the most rows that a cohort of K clients can have


class Engine(NamedTuple):
    """What a round is compiled from. Everything here is static."""

    model: Model
    algorithm: Algorithm
    local: LocalTraining
    mesh: Mesh
    lanes: int  # L; 1: clients train one after another, without vmap
    cohort_size: int  # K
    clients_asked: int  # clients a round asks: K, or more with over-selection
    bernoulli: bool  # each client is asked with probability clients_asked / N, instead of exactly so many
    drop_nonfinite: bool  # a client whose update is not finite counts as absent
    num_clients: int  # N
    mean_size: float  # mean of n_i
    max_size: int  # most rows that a client can have in a round
    capacity: int  # most clients that a sampled cohort can have
    state_rows: int  # rows of ServerState.clients: N or, sharded over the devices, a multiple of their number
    sharded: bool  # client states are sharded over the devices instead of replicated
    rows_by_rank: np.ndarray | None  # only where rows are sharded over the devices: `exchange.rows_by_rank`
    decode: Callable[[jax.Array], jax.Array]  # stored rows -> what the model sees; `data.federated.decode`
    num_classes: int | None  # C, for classifiers with one integer label a row
    test_size: int  # M_test, 0 without a test set
    row_scores: tuple[str, ...]  # names of the scores that `Model.scores` gives for each row
    set_scores: tuple[str, ...]  # and of those for the whole test set
    redeal: Redeal | None  # not None: the cohort's rows are dealt anew every round
    failures: Failures | None  # None: every client that is asked answers
    aggregation: Aggregation


class Shared(NamedTuple):
    """What all clients of a round have in common."""

    server: Any
    rows: Rows
    key: jax.Array  # of this round's clients
    t: jax.Array  # int32 [], the round
    lr: jax.Array  # float [], eta_t
    states: PyTree  # client states, leaves [state_rows, ...]; () if sharded
    extra: Any = ()  # whatever else the caller passes to every client


def absent(engine: Engine) -> Client:
    """The client that stands in an empty place."""
    return Client(*map(jnp.int32, (engine.num_clients, 0, 0, 0, engine.state_rows)))


def mean_steps(engine: Engine) -> int:
    """Kbar, the local steps of a client of mean size."""
    return int(engine.local.steps(engine.mean_size))


def partitionable(function: Callable) -> Callable:
    """The function, traced with threefry's partitionable form, in which word i does not depend on how many are drawn.

    `local.shuffle` needs that. It is JAX's default, which a user may have changed.
    """

    @wraps(function)
    def traced(*arguments: Any) -> Any:
        with jax.threefry_partitionable(True):
            return function(*arguments)

    return traced


def replicated(engine: Engine, values: PyTree) -> PyTree:
    """The values, replicated on every device.

    Replicate indices before a scatter, so that XLA does not shard them and exchange them between devices.
    """
    if engine.mesh.size == 1:
        return values
    return lax.with_sharding_constraint(values, NamedSharding(engine.mesh, P()))


def on_each_device(engine: Engine, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``function``, mapped over the devices of the mesh, each of which is given its part of the arguments.

    On a mesh of one device it is the function itself, so that its program can be a part of another, as in a sweep.
    """
    if engine.mesh.size == 1:
        return function
    # check_vma=True would refuse every loop that starts from zeros, in `local.train` and in users' models: they are not
    # marked as varying over the devices, and what the loop adds to them is.
    return jax.shard_map(function, mesh=engine.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_over_devices(engine: Engine, values: PyTree) -> PyTree:
    """The sum over the devices, inside `on_each_device`."""
    return values if engine.mesh.size == 1 else lax.psum(values, AXIS)
