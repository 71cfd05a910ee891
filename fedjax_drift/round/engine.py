"""The types that describe a round: `Engine`, from which the round is compiled, and the arrays that the round uses.

An `Engine` of another form is another compiled program. Its numbers, such as the learning rate, are arguments of the
program (`recipes`). Everything that changes from round to round is an array.
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

from fedjax_drift.clock import Clock, Devices
from fedjax_drift.devices.mesh import AXIS, num_teams
from fedjax_drift.local import LocalTraining
from fedjax_drift.model import Model
from fedjax_drift.participation.rule import Participation
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.failures import Failures
from fedjax_drift.shift.rule import Shifting
from fedjax_drift.types import Algorithm, Params, PyTree


class Rows(NamedTuple):
    """Training examples on the devices, one example per row.

    They are the whole data set, replicated or sharded, or the streamed examples of one cohort.
    """

    x: jax.Array
    """[M, F], every example flattened (`devices.mesh.flat`), otherwise as stored, so images stay uint8. If sharded, M
    includes the padding of every shard."""
    y: jax.Array  # [M, ...]
    offsets: jax.Array | None = None  # int32 [N], the index of client i's first example; None if streamed
    sizes: jax.Array | None = None  # int32 [N], n_i; None if streamed
    places: jax.Array | None = None
    """int32 [M + P], only if examples are redistributed. Example j of a client is then x[places[offset + j]].

    The first M entries are 0..M-1. The other P entries are the indices of the cohort's examples in their new order."""


class Client(NamedTuple):
    """One client of a round, or several clients with leading axes.

    An absent client has id N and no examples. Therefore it does no steps and has weight 0.
    """

    id: jax.Array  # int32
    size: jax.Array  # int32, n_i
    offset: jax.Array  # int32, index of its first example
    steps: jax.Array  # int32, the local steps that it does: K_i, or fewer for a straggler
    place: jax.Array
    """int32, index of its state in ServerState.clients. This is its id unless a client store (`bank=`) keeps the
    states. The personal evaluation uses it as an index of the client's test examples."""
    factor: jax.Array | None = None  # float, multiplies its weight; None if the participation rule has no factors
    version: jax.Array | None = None  # int32, the round in which it started; None if rounds are synchronous
    discount: jax.Array | None = None  # float, multiplies its update, but not its weight; None likewise


class TestRows(NamedTuple):
    """The test set in T batches. The last batches are padded. If it is sharded, T is a multiple of D."""

    x: jax.Array  # [T, B, ...]
    y: jax.Array  # [T, B, ...]
    mask: jax.Array  # bool [T, B], False for padding
    # only if the data are shifted:
    owner: jax.Array | None = None  # int32 [T, B], the client of the example, N for none
    number: jax.Array | None = None  # int32 [T, B], the number of the example among those of its owner
    t: jax.Array | None = None  # int32 [], the round whose shift the examples have


class Arrays(NamedTuple):
    """The data set. It is an argument of the compiled round, not a constant in it."""

    rows: Rows | None  # None if the data set is streamed; each round then receives the examples of its cohort
    test: TestRows | None
    sizes: jax.Array  # int32 [N], n_i of all clients


class Redeal(NamedTuple):
    """Options for pooling and redistributing the examples of a cohort (`FederatedData.redealt`)."""

    alpha: float | None  # of the Dirichlet distribution; None: the examples are split evenly
    num_classes: int
    most_rows: tuple[int, ...]  # most_rows[K - 1] is the largest number of examples of a cohort of K clients


class Engine(NamedTuple):
    """The static description from which a round is compiled."""

    model: Model
    algorithm: Algorithm
    local: LocalTraining
    mesh: Mesh
    lanes: int  # L; 1: clients train one after another, without vmap
    cohort_size: int  # K
    clients_selected: int  # the number of clients that a round selects: K, or more with over-selection
    participation: Participation  # selects them
    factors: bool  # whether selected clients have a factor, by which their weight is multiplied
    drop_nonfinite: bool  # whether a client with a non-finite update is dropped
    num_clients: int  # N
    mean_size: float  # mean of n_i
    max_size: int  # the largest number of examples that a client can have in a round
    capacity: int  # the largest number of clients that the participation rule selects
    state_rows: int  # length of the leaves of ServerState.clients: N; if sharded, rounded up to a multiple of D
    sharded: bool  # whether client states are sharded over the devices instead of replicated
    rows_by_rank: np.ndarray | None  # the result of `exchange.rows_by_rank` if the examples are sharded, otherwise None
    example: tuple[int, ...]  # the shape of one stored input
    decode: Callable[[jax.Array], jax.Array]  # stored inputs -> inputs of the model; `data.federated.decode`
    shifting: Shifting | None  # how the examples change from client to client or from round to round
    num_classes: int | None  # C, for classifiers with one integer label per example; otherwise None
    test_size: int  # the number of test examples, 0 without a test set
    row_scores: tuple[str, ...]  # names of the metrics of `Model.scores` with one value per example
    set_scores: tuple[str, ...]  # names of the metrics of `Model.scores` that are scalars of the whole test set
    redeal: Redeal | None  # not None: the cohort's examples are redistributed in every round
    failures: Failures | None  # None: every selected client reports
    aggregation: Aggregation
    clock: Clock
    devices: Devices | None  # the speeds of the clients; None: rounds have no virtual time
    row: tuple[Any, Any]  # the shapes and dtypes of one example on the devices, its input and its label
    message: PyTree = None  # shapes and dtypes of a message, if `Algorithm.complete` needs them

    @property
    def asynchronous(self) -> bool:
        """Whether the server is updated without waiting for all clients that are training."""
        return self.clock.concurrency is not None

    @property
    def slots(self) -> int:
        """The number of clients that train, or will start in this round, if rounds are asynchronous: M, or with
        ``starts="report"`` M + K - 1."""
        M = self.clock.concurrency or 0
        return M if self.clock.starts is None else M + self.cohort_size - 1

    @property
    def over_selects(self) -> bool:
        """Whether a round selects more clients than it aggregates."""
        return self.clients_selected > self.cohort_size

    @property
    def most_clients(self) -> int:
        """The largest number of clients that a round trains. Over-selected clients that come too late do not count."""
        return min(self.capacity, self.cohort_size) if self.over_selects else self.capacity


class Shared(NamedTuple):
    """The values that all clients of a round share."""

    server: Any  # the server's variables
    rows: Rows
    key: jax.Array  # the clients' key of this round; client i uses fold_in(key, i)
    t: jax.Array  # int32 [], the round
    lr: jax.Array  # float [], eta_t
    extra: Any = ()  # additional values for the function that `train.over_clients` calls, the same for all
    aggregation: PyTree = ()  # the state of the aggregation rule
    past: Any = ()  # `flight.Past`, if clients may have started in an earlier round
    surveyed: Any = None  # the mean of the messages of `Algorithm.survey`; None: not yet known


def initial_client(engine: Engine, params: Params) -> PyTree:
    """The state of one client before its first round."""
    client, complete = engine.algorithm.init_client(params), engine.algorithm.complete
    if complete is None or engine.message is None:
        return client
    return complete(client, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), engine.message))


def absent(engine: Engine) -> Client:
    """The absent client, which fills an empty place."""
    factor = jnp.zeros((), float) if engine.factors else None
    client = Client(*map(jnp.int32, (engine.num_clients, 0, 0, 0, engine.state_rows)), factor=factor)  # type: ignore
    return client._replace(**at_present(engine, ()))


def at_present(engine: Engine, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """The fields of clients that did not start in an earlier round. None of them if rounds are synchronous."""
    if not engine.asynchronous:
        return {}
    return {"version": jnp.zeros(shape, jnp.int32), "discount": jnp.ones(shape, float)}


def round_keys(key: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key for sampling the cohort of round t, and the key of the clients. key: that of the state."""
    cohort_key, clients_key = jax.random.split(jax.random.fold_in(key, t))
    return cohort_key, clients_key


def mean_steps(engine: Engine) -> int:
    """Kbar, the local steps of a client with the mean number of examples."""
    return int(engine.local.num_steps(engine.mean_size))


def partitionable(function: Callable) -> Callable:
    """The function, traced with ``jax_threefry_partitionable``.

    With this option, random number i does not depend on how many random numbers are generated. `local.shuffle` needs
    this property. The option is JAX's default, but a user may have changed it.
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
    """Maps ``function`` over the devices of the mesh with `jax.shard_map`. Each device gets its shard of the arguments.

    On a mesh of one device, the result is ``function`` itself. It can then be used inside other programs, for example
    in a sweep. If teams of several devices train a client together, each team gets a shard, and XLA divides the
    products with frozen parameters among the devices of a team. The teams never wait for each other in ``function``.
    """
    if engine.mesh.size == 1:
        return function
    # check_vma=True would reject every loop that starts from zeros, in `local.train` and in users' models. The zeros
    # are not marked as varying over the devices, but the values that the loop adds to them are.
    return jax.shard_map(
        function, mesh=engine.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )


def sum_over_devices(engine: Engine, values: PyTree) -> PyTree:
    """The sum over the devices, inside `on_each_device`."""
    return values if num_teams(engine.mesh) == 1 else lax.psum(values, AXIS)
