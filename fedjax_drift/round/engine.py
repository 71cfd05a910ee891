"""The types that describe a round: `Engine`, from which the round is compiled, and what its clients share.

An `Engine` of another form is another compiled program. Its numbers, such as the learning rate, are arguments of the
program (`recipes`). Everything that changes from round to round is an array.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, tree
from fedjax_drift.devices.mesh import AXIS, num_teams
from fedjax_drift.local import LocalTraining
from fedjax_drift.model import Model
from fedjax_drift.round.arrays import Arrays, Client, Rows
from fedjax_drift.round.sources import Moment, Receivers, Source, Start
from fedjax_drift.shift.rule import Owner
from fedjax_drift.types import Algorithm, Params, PyTree, ServerState

# fold_in(clients_key, i) is the key of client i in a round, for i < N. fold_in(clients_key, N + n) is the key for other
# random numbers of the round, with the numbers n of the sources, and these:
NUMBERS = {"redeal": 0, "failures": 1, "aggregation": 2}
FINE_TUNING, CURVATURE = 3, 4
SURVEY = 2**32 - 1  # fold_in(key of a source, SURVEY) is its key in the first phase of the round


class Federation(NamedTuple):
    """What a round knows of the data set and of its scores before it runs."""

    mean_size: float  # mean of n_i
    max_size: int  # the largest number of examples that a client can have in a round
    row: tuple[Any, Any]  # the shapes and dtypes of one example on the devices, its input and its label
    example: tuple[int, ...]  # the shape of one stored input
    decode: Callable[[jax.Array], jax.Array]  # stored inputs -> inputs of the model; `data.federated.decode`
    num_classes: int | None  # C, for classifiers with one integer label per example; otherwise None
    labels: int | None  # C of the data, if a source of drift changes examples; otherwise None
    test_size: int  # the number of test examples, 0 without a test set
    test: str  # whose test set is evaluated if it changes with the rounds: "present", "first" or "both"
    row_scores: tuple[str, ...]  # names of the metrics of `Model.scores` with one value per example
    set_scores: tuple[str, ...]  # names of the metrics of `Model.scores` that are scalars of the whole test set


class Engine(NamedTuple):
    """The static description from which a round is compiled."""

    model: Model
    algorithm: Algorithm
    local: LocalTraining
    sources: tuple[Source, ...]  # of drift, in the order in which a round calls them
    mesh: Mesh
    lanes: int  # L; 1: clients train one after another, without vmap
    num_clients: int  # N
    cohort_size: int  # K
    capacity: int  # the largest number of clients that the participation rule selects
    most_clients: int  # the largest number of clients that a round trains
    drop_nonfinite: bool  # whether a client with a non-finite update is dropped
    federation: Federation
    state_rows: int  # length of the leaves of ServerState.clients: N; if sharded, rounded up to a multiple of D
    sharded: bool  # whether client states are sharded over the devices instead of replicated
    rows_by_rank: np.ndarray | None  # the result of `exchange.rows_by_rank` if the examples are sharded, otherwise None
    message: PyTree = None  # shapes and dtypes of a message, if `Algorithm.complete` needs them

    @property
    def receivers(self) -> Receivers | None:
        """The servers of a topology; None for a single one."""
        return next((source.receivers for source in self.sources if source.receivers is not None), None)

    def owner(self, ids: jax.Array) -> Owner:
        """The clients with these ids, as owners of examples."""
        return Owner(ids, self.num_clients, num_classes=self.federation.labels)

    @property
    def over_selects(self) -> bool:
        """Whether a round selects more clients than it trains."""
        return self.most_clients < self.capacity


class Shared(NamedTuple):
    """The values that all clients of a round share."""

    server: Any  # the server's variables
    rows: Rows
    key: jax.Array  # the clients' key of this round; client i uses fold_in(key, i)
    t: jax.Array  # int32 [], the round
    lr: jax.Array  # float [], eta_t
    extra: Any = ()  # additional values for the function that `train.over_clients` calls, the same for all
    sources: Any = None  # the states of the sources with functions of one client, by name; None outside of a round
    run_key: Any = None  # the key of the state; None outside of a round
    surveyed: Any = None  # the mean of the messages of `Algorithm.survey`; None: not yet known


def initial_client(engine: Engine, params: Params) -> PyTree:
    """The state of one client before its first round."""
    client, complete = engine.algorithm.init_client(params), engine.algorithm.complete
    if complete is None or engine.message is None:
        return client
    return complete(client, tree.zeros_like(engine.message))


def initial_server(engine: Engine, params: Params) -> Any:
    """The variables of the server before round 0."""
    server = engine.algorithm.init_server(params)
    if not hasattr(server, "params"):
        what = f"{engine.algorithm.name}: init_server must return a pytree with an attribute params"
        checks.refuse(what, type(server).__name__, "return a NamedTuple whose field params is the global model")
    return server


def moment(
    engine: Engine, before: ServerState, arrays: Arrays, source: Source, key: jax.Array, survey: bool = False
) -> Moment:
    """What a function of a source can use in the round after the state ``before``.

    key: the clients' key of the round. survey: whether it is the first phase of the round.
    """
    make_key = partial(key_of, engine, source, key, survey)
    return Moment(before.round, make_key, engine, before.server, before.key, arrays, before)


def client_moment(
    engine: Engine, shared: Shared, source: Source, client: Client, start: Start | None = None, survey: bool = False
) -> Moment:
    """What a function of one client can use. start: what this client has started with."""

    def key() -> jax.Array:
        return jax.random.fold_in(key_of(engine, source, shared.key, survey), client.id)

    return Moment(shared.t, key, engine, shared.server, shared.run_key, start=start)


def key_of(engine: Engine, source: Source, key: jax.Array, survey: bool) -> jax.Array:
    """The key of a source in a round. That of a source of one's own depends on its name. key, survey: see `moment`."""
    number = NUMBERS.get(source.name, 2**30 + zlib.crc32(source.name.encode()) % 2**30)
    key = jax.random.fold_in(key, engine.num_clients + number)
    return jax.random.fold_in(key, SURVEY) if survey else key


def round_keys(key: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key for sampling the cohort of round t, and the key of the clients. key: that of the state."""
    cohort_key, clients_key = jax.random.split(jax.random.fold_in(key, t))
    return cohort_key, clients_key


def look_up(engine: Engine, rows: Rows, ids: jax.Array) -> Client:
    """The clients with these ids. An id outside 0..N-1 gives an absent client."""
    assert rows.sizes is not None and rows.offsets is not None, "with streamed examples, the caller passes `Client`s"
    N = engine.num_clients
    present = (ids >= 0) & (ids < N)
    known = jnp.clip(ids, 0, N - 1)
    size, place = jnp.where(present, rows.sizes[known], 0), jnp.where(present, ids, engine.state_rows)
    return Client(jnp.where(present, ids, N), size, rows.offsets[known], engine.local.num_steps(size), place)


def mean_steps(engine: Engine) -> int:
    """Kbar, the local steps of a client with the mean number of examples."""
    return int(engine.local.num_steps(engine.federation.mean_size))


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
