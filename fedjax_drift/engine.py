"""One round of federated learning, as one pure function that compiles once.

    state.key -> cohort [K]       uniform without replacement, Bernoulli, or given
    fail      those that drop out or are too late are absent, stragglers have fewer steps
    gather    client states [N, ...] -> [K, ...]
    order     the cohort by local steps, longest first; deal it to devices and groups of L lanes
    train     scan over groups: L clients side by side (vmap), as many steps as the longest of THIS group needs
    sum       weight * message added to a running sum, then one psum over the devices
    update    server_update(server, sum / total weight, round)    or another `Aggregation`
    scatter   new client states back to [N, ...]

Memory for messages is L of them and one sum, whatever K is. A client's result depends on its id, the round's key and
its own rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import failures, fit, tree
from fedjax_drift.aggregation import Aggregation
from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.data.redeal import redeal
from fedjax_drift.exchange import back_and_forth, exchange, longest_share, mine, place_parts
from fedjax_drift.local import WATCHED, LocalTraining, shuffle
from fedjax_drift.sharding import AXIS, put
from fedjax_drift.types import Algorithm, Batch, ClientResult, Model, Params, PyTree, Round, ServerState, Work

RECORDED = {"round", "train_loss", "clients", "seconds", "accuracy", "client_mean_loss", "client_mean_accuracy"}
"""What `Simulation.run` and evaluations put into records, so no metric may have these names."""


def partitionable(function: Callable) -> Callable:
    """The function, traced with the form of threefry in which word i does not depend on how many words are drawn, as
    `local.shuffle` needs it. It is JAX's default, and a user may have changed that."""

    @wraps(function)
    def traced_so(*arguments: Any) -> Any:
        with jax.threefry_partitionable(True):
            return function(*arguments)

    return traced_so


class Rows(NamedTuple):
    """Training rows on the devices: the whole data set's, on each or cut over them, or, streamed, one cohort's."""

    x: jax.Array  # [M, ...] as stored: images stay uint8; cut over the devices, M with the padding of each part
    y: jax.Array  # [M, ...]
    offsets: jax.Array | None = None  # int32 [N], client i's first row; None when streamed
    sizes: jax.Array | None = None  # int32 [N]
    places: jax.Array | None = None  # int32 [M + P], with rows dealt anew: a client's are places[offset + ...]


class Client(NamedTuple):
    """One client of a round, or an axis of them; an absent one has id N and no rows, so no steps and no weight."""

    id: jax.Array  # int32
    size: jax.Array  # int32, n_i
    offset: jax.Array  # int32, its first row
    steps: jax.Array  # int32, local steps that it does: K_i, or fewer for a straggler
    place: jax.Array  # int32, its state's in ServerState.clients: its id, unless the states are kept on the host


class TestRows(NamedTuple):
    """The test set, cut into T batches (a multiple of the number of devices); the last ones are padded."""

    x: jax.Array  # [T, B, ...]
    y: jax.Array  # [T, B, ...]
    mask: jax.Array  # bool [T, B], False on padding


class Redeal(NamedTuple):
    """How the rows of a cohort are pooled and dealt anew (`FederatedData.redealt`)."""

    alpha: float | None  # None: evenly
    num_classes: int
    most_rows: tuple[int, ...]  # [K - 1]: the most that a cohort of K clients can have


class Arrays(NamedTuple):
    """The data set: an argument of the compiled round, never a constant captured by it."""

    rows: Rows | None  # None: streamed, each round gets its own
    test: TestRows | None


class Engine(NamedTuple):
    """What a round is compiled from: all static, no arrays."""

    model: Model
    algorithm: Algorithm
    local: LocalTraining
    mesh: Mesh
    lanes: int  # L; 1: clients one after another, no vmap
    cohort_size: int  # K
    asked: int  # clients a round asks, cohort_size or, with over-selection, more
    bernoulli: bool  # every client with probability asked / N, instead of exactly so many
    drop_nonfinite: bool  # a client whose update is not finite counts as absent
    num_clients: int  # N
    mean_size: float
    max_size: int  # most rows that a client may have in a round
    capacity: int  # most clients a sampled cohort may have
    bank_rows: int  # client states in ServerState.clients: N or, sharded over the devices, a multiple of their number
    sharded: bool  # each device keeps a part of the client states, instead of all
    rows_by_rank: np.ndarray | None  # where rows are cut over the devices: `exchange.rows_by_rank`
    decode: Callable[[jax.Array], jax.Array]  # stored rows -> what the model sees; `data.federated.decode`
    num_classes: int | None  # C, of classifiers with one integer label a row
    test_size: int  # M_test, 0 without a test set
    row_scores: tuple[str, ...]  # what `Model.scores` gives of each row
    set_scores: tuple[str, ...]  # and of the whole test set
    redeal: Redeal | None  # the cohort's rows are dealt anew every round
    failures: failures.Failures | None  # None: everybody asked answers
    aggregation: Aggregation


@partitionable
def init(engine: Engine, key: jax.Array, params: Params | None) -> ServerState:
    """The state before round 0, from ``params`` or else the model's own."""
    init_key, round_key = jax.random.split(key)
    params = engine.model.init(init_key) if params is None else params
    client = engine.algorithm.init_client(params)
    clients = jax.tree.map(lambda c: jnp.broadcast_to(c, (engine.bank_rows, *jnp.shape(c))), client)
    server, clients = jax.tree.map(strong, (engine.algorithm.init_server(params), clients))
    if not hasattr(server, "params"):
        raise ValueError(
            f"{engine.algorithm.name}: init_server must return a pytree with an attribute params, got "
            f"{type(server).__name__}: a NamedTuple with the global model, params, first"
        )
    return ServerState(jnp.zeros((), jnp.int32), round_key, server, clients)


class Shared(NamedTuple):
    """What all clients of a round are given."""

    server: Any
    rows: Rows
    key: jax.Array  # of this round's clients
    t: jax.Array
    lr: jax.Array  # float [], eta_t
    bank: PyTree  # client states, leaves [bank_rows, ...], unless sharded
    given: Any = ()  # what else the caller hands to every client


class Plan(NamedTuple):
    """Who trains where in a round, and with what."""

    shared: Shared
    asked: jax.Array  # int32 [K'], the ids drawn or given; N marks an absent client
    held: Client  # [K'], with the rows dealt to each; absent are also those that were dealt none
    cohort: Client  # [K], those that count; absent are also those that did not answer
    order: jax.Array  # int32 [D, G, L], positions in the cohort
    ragged: jax.Array  # bool [D, G, L], empty places
    dealt: Client  # [D, G, L]


def plan(engine: Engine, state: ServerState, rows: Rows | None, cohort: jax.Array | Client | None) -> Plan:
    """Draws the round's cohort, unless it is given, and deals it to devices, groups and lanes."""
    if rows is None:
        raise ValueError("a streamed data set needs the host in every round: not inside jax.jit, vmap or scan")
    cohort_key, key = round_keys(state.key, state.round)
    if not isinstance(cohort, Client):
        cohort = look_up(engine, rows, sample(engine, cohort_key) if cohort is None else cohort.astype(jnp.int32))
    asked, N = cohort.id, engine.num_clients
    if engine.redeal is not None:
        rows, cohort = deal_anew(engine, engine.redeal, jax.random.fold_in(key, N), cohort, rows)
    held = cohort
    if engine.failures is not None:
        keys = jax.random.fold_in(state.key, failures.DEVICES), jax.random.fold_in(key, N + 1)
        cohort = failures.fail(engine.failures, *keys, cohort, absent(engine), mean_steps(engine))
    lr = engine.local.rate(state.round)
    # Where rows are cut over the devices, what one of them can be dealt is bounded by sizes: see `rows_by_rank`.
    steps = cohort.steps if engine.rows_by_rank is None else engine.local.steps(cohort.size)
    order, ragged, dealt = deal_out(engine, cohort, steps)
    order, dealt = on_all(engine, (order, dealt))  # each device works it out, rather than a part of it and then asks
    bank = () if engine.sharded else state.clients
    return Plan(Shared(state.server, rows, key, state.round, lr, bank), asked, held, cohort, order, ragged, dealt)


def on_all(engine: Engine, values: PyTree) -> PyTree:
    """The values, whole on every device. Said before they are scattered, it keeps the compiler from cutting the indices
    too, and having the devices exchange those."""
    if engine.mesh.size == 1:
        return values
    return lax.with_sharding_constraint(values, NamedSharding(engine.mesh, P()))


def round_keys(key: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of round t: the key that draws its cohort, and its clients'."""
    cohort_key, clients_key = jax.random.split(jax.random.fold_in(key, t))
    return cohort_key, clients_key


@partitionable
def draw(engine: Engine, key: jax.Array, t: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids that round t draws by itself from the state's key; N where there is nobody."""
    return sample(engine, round_keys(key, t)[0])


def look_up(engine: Engine, rows: Rows, ids: jax.Array) -> Client:
    """The clients of these ids, which are absent if not in 0..N-1."""
    assert rows.sizes is not None and rows.offsets is not None, "streamed rows come with their clients"
    N = engine.num_clients
    present = (ids >= 0) & (ids < N)
    known = jnp.clip(ids, 0, N - 1)
    size, place = jnp.where(present, rows.sizes[known], 0), jnp.where(present, ids, engine.bank_rows)
    return Client(jnp.where(present, ids, N), size, rows.offsets[known], engine.local.steps(size), place)


def absent(engine: Engine) -> Client:
    """Nobody."""
    return Client(*map(jnp.int32, (engine.num_clients, 0, 0, 0, engine.bank_rows)))


def over_clients(
    engine: Engine,
    update: Callable[[Any, Client, PyTree, jax.Array], tuple[PyTree, PyTree]],
    shared: Shared,
    dealt: Client,
    states: PyTree,
) -> tuple[PyTree, PyTree]:
    """Calls ``update(shared, client, state, longest) -> (added, kept)`` for every client dealt, [D, G, L].

    longest: no client that trains beside it has more rows. Returns the sum of ``added`` over all clients, and
    ``kept`` of each, leaves [D, G, L, ...]. Memory for ``added`` is L of them and one sum, whatever K is.
    """

    cut = engine.rows_by_rank is not None

    def share(shared: Any, clients: Client, states: PyTree, everyone: Any) -> tuple[PyTree, PyTree]:
        """One device's: clients [1, G, L]; of everyone [D, G, L] where rows are cut."""
        if cut:
            shared, clients = with_own_rows(engine, shared, everyone)

        def group(total: PyTree, lanes: tuple[Client, PyTree]) -> tuple[PyTree, PyTree]:
            clients, states = lanes
            longest = clients.size.max()
            if engine.lanes == 1:
                first, state = jax.tree.map(lambda a: a[0], (clients, states))
                alone = update(shared, first, state, longest)
                added, kept = jax.tree.map(lambda a: a[None], alone)
            else:
                added, kept = jax.vmap(update, in_axes=(None, 0, 0, None))(shared, clients, states, longest)
            return jax.tree.map(lambda s, a: s + a.sum(0), total, added), kept

        clients, states = jax.tree.map(lambda a: a[0], (clients, states))  # [G, L, ...]
        first = jax.tree.map(lambda a: a[0, 0], (clients, states))
        added, _ = jax.eval_shape(update, shared, *first, clients.size[0, 0])
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), added)
        total, kept = lax.scan(group, zeros, (clients, states))
        return added_up(engine, total), jax.tree.map(lambda a: a[None], kept)

    whole: Any = P()
    part: Any = P(AXIS)
    rows: Any = Rows(part, part, whole, whole, whole) if cut else whole
    where = Shared(*[whole] * len(Shared._fields))._replace(rows=rows)
    on_devices = each_device(engine, share, (where, part, part, whole), (whole, part))
    return on_devices(shared, dealt, states, dealt if cut else ())


def each_device(engine: Engine, share: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``share``, called on every device of the mesh with its part of the arguments; on a single one with all of them,
    so that a program for one device can be a part of another, as in a sweep."""
    if engine.mesh.size == 1:
        return share
    return jax.shard_map(share, mesh=engine.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def added_up(engine: Engine, values: PyTree) -> PyTree:
    """The sum over the devices, within `each_device`."""
    return values if engine.mesh.size == 1 else lax.psum(values, AXIS)


def with_own_rows(engine: Engine, shared: Shared, everyone: Client) -> tuple[Shared, Client]:
    """On each device, of everyone [D, G, L] its clients [1, G, L] with their rows, which lay on any device."""
    assert engine.rows_by_rank is not None
    D, G, L = everyone.size.shape
    sizes, offsets = (a.reshape(D, G * L) for a in (everyone.size, everyone.offset))
    S = longest_share(engine.rows_by_rank, D, G, L)
    (x, y), begins = exchange((shared.rows.x, shared.rows.y), sizes, offsets, S)
    everyone = everyone._replace(offset=begins.reshape(D, G, L))
    clients = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, lax.axis_index(AXIS), 1), everyone)
    return shared._replace(rows=Rows(x, y)), clients


def update(engine: Engine, shared: Shared, old: PyTree, work: Work) -> ClientResult:
    """One client's update, held to the contract."""
    algorithm = engine.algorithm
    result = algorithm.client_update(shared.server, old, work)
    if not isinstance(result, ClientResult):
        raise ValueError(
            f"{algorithm.name}: client_update must return a ClientResult, got {type(result).__name__}: "
            "fd.ClientResult(message, weight, state, metrics)"
        )
    message, metrics = jax.tree.map(jnp.asarray, (result.message, dict(result.metrics)))
    weight = jnp.asarray(result.weight, shared.lr.dtype)
    one_number_each(algorithm, {"the weight": weight} | {name: v for name, v in metrics.items() if name != WATCHED})
    state = like(result.state, old, f"{algorithm.name}: a client's new state")
    return ClientResult(message, weight, state, metrics)


def one_number_each(algorithm: Algorithm, values: dict[str, Any]) -> dict[str, Any]:
    """The values; ValueError for one that has axes."""
    for name, value in values.items():
        if shape := jnp.shape(value):
            raise ValueError(
                f"{algorithm.name}: {name} must be one number, got {jnp.result_type(value)}{[*shape]}: take its mean"
            )
    return values


@partitionable
def any_update(engine: Engine, state: ServerState, rows: Rows) -> ClientResult:
    """One client's update, for its shapes; rows: as many as one client has at least."""
    zero = jnp.zeros((), jnp.int32)
    shared = Shared(state.server, rows, state.key, zero, jnp.zeros((), float), ())
    work = client_work(engine, shared, Client(zero, zero, zero, zero, zero), zero)
    return update(engine, shared, engine.algorithm.init_client(state.params), work)


def answers(engine: Engine, client: Client, result: ClientResult) -> tuple[jax.Array, jax.Array]:
    """Whether the client counts, bool [], and which leaf of what it `uploaded` is not finite, int32 [], or -1.

    An absent client has run no step, but its weight, or 0/0 in its message, must not reach a sum.
    """
    bad = tree.first_nonfinite(uploaded(result))
    present = client.id < engine.num_clients
    return present & (bad < 0) if engine.drop_nonfinite else present, bad


def uploaded(result: ClientResult) -> PyTree:
    """What of an update must be finite."""
    return {"message": result.message, "state": result.state, "weight": result.weight}


@partitionable
def round_fn(
    engine: Engine, state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> tuple[ServerState, dict]:
    """One round: ``(state, arrays, cohort [K] or None) -> (state, info)``. Pure; traced once per cohort length.

    cohort: client ids; or the clients looked up already, by a host that keeps the rows or the states.
    """
    N, algorithm = engine.num_clients, engine.algorithm
    today = plan(engine, state, arrays.rows, cohort)
    states = gather(engine, state.clients, today.dealt.place)

    def one(shared: Shared, client: Client, sent: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        old = state_of(engine, shared, client, sent)
        result = update(engine, shared, old, client_work(engine, shared, client, longest))
        answered, bad = answers(engine, client, result)
        if engine.drop_nonfinite:
            result = result._replace(state=select(answered, result.state, old))
        message, weight = engine.aggregation.contribute(result.message, result.weight)
        weight = jnp.where(answered, weight, 0)
        message = jax.tree.map(lambda m: jnp.where(answered, weight * m, 0), message)
        return (message, weight, answered.astype(weight.dtype)), (
            result.state,
            {"weight": weight, "answered": answered, "bad_leaf": bad},
            jax.tree.map(lambda m: jnp.zeros(0, m.dtype), result.message),  # empty: tells the mean its dtypes
            result.metrics,
        )

    (total, weight, count), kept = over_clients(engine, one, today.shared, today.dealt, states)
    new_states, made, sent, metrics = kept
    made, metrics = on_all(engine, (made, metrics))
    K, hidden = engine.cohort_size, engine.aggregation.noise_multiplier is not None
    mean = engine.aggregation.combine(total, weight, jax.random.fold_in(today.shared.key, N + 2), K)
    mean = jax.tree.map(lambda s, m: s.astype(m.dtype), mean, sent)  # sums are in the weights' precision
    participation = jnp.asarray(K / N, count.dtype) if hidden else count / N
    round = Round(state.round, today.shared.lr, participation, N, engine.mean_size)
    new_server = algorithm.server_update(state.server, mean, round)
    new_server = like(new_server, state.server, f"{algorithm.name}: the updated server")
    goes_on = hidden | (weight > 0)  # nobody answered: the round changes nothing
    server = select(goes_on, new_server, state.server)
    scores: dict[str, jax.Array] = {}
    if algorithm.observe is not None and arrays.test is not None:
        scores = evaluate(engine, server.params, arrays.test)
        observed = algorithm.observe(server, scores)
        server = select(goes_on, like(observed, server, f"{algorithm.name}: the server after an evaluation"), server)
    if algorithm.finish is not None:
        new_states = finish(algorithm.finish, server, made["answered"], new_states)
    clients = scatter(engine, state.clients, today.dealt.place, new_states)

    of_cohort = partial(undealt, len(today.cohort.id), today.order, today.ragged)
    present = today.cohort.id < N
    steps = today.dealt.steps  # [D, G, L]
    executed = steps.max(-1).sum() * engine.lanes
    info = {
        "cohort": jnp.where(present, today.cohort.id, -1),
        "size": today.cohort.size,
        "weight": of_cohort(made["weight"]),
        "client_steps": today.cohort.steps,
        "bad_leaf": jnp.where(present, of_cohort(made["bad_leaf"]), -1),
        "steps": steps.sum(),
        "executed_steps": executed,
        "executed_ratio": executed / jnp.maximum(steps.sum(), 1),
        "lr": today.shared.lr,
    }
    info["finite"] = info["bad_leaf"] < 0
    if engine.failures is not None:
        info["asked"] = jnp.where(today.asked < N, today.asked, -1)
    named = [jax.tree.map(of_cohort, metrics), {f"test_{name}": v for name, v in scores.items()}]
    if algorithm.report is not None:
        named.append(one_number_each(algorithm, dict(algorithm.report(state.server, mean, round))))
    for values in named:
        if clash := (info.keys() | RECORDED) & values.keys():
            taken = ", ".join(sorted(clash))
            raise ValueError(
                f"{algorithm.name}: a metric needs a name of its own, got {taken}: call it {min(clash)}_of_clients, say"
            )
        info |= values
    return ServerState(state.round + 1, state.key, server, clients), info


def rounds(engine: Engine, most: int, state: ServerState, arrays: Arrays, n: jax.Array) -> tuple[ServerState, dict]:
    """n <= most rounds in one program: the last state, and every round's info, leaves [most, ...] of which n count."""
    _, info = jax.eval_shape(partial(round_fn, engine), state, arrays, None)
    infos = jax.tree.map(lambda a: jnp.zeros((most, *a.shape), a.dtype), info)

    def one(j: jax.Array, carry: tuple[ServerState, dict]) -> tuple[ServerState, dict]:
        state, infos = carry
        state, info = round_fn(engine, state, arrays, None)
        return state, jax.tree.map(lambda all, a: all.at[j].set(a), infos, info)

    return lax.fori_loop(0, n, one, (state, infos))


def finish(how: Callable[[Any, PyTree], PyTree], server: Any, answered: jax.Array, states: PyTree) -> PyTree:
    """The states [D, G, L, ...] of the clients that answered, finished with the new server."""

    def one(answered: jax.Array, state: PyTree) -> PyTree:
        return select(answered, like(how(server, state), state, "a client's finished state"), state)

    return jax.vmap(jax.vmap(jax.vmap(one)))(answered, states)


def gather(engine: Engine, bank: PyTree, places: jax.Array) -> PyTree:
    """What the devices send each other: the client states at places [D, G, L] of a sharded bank, [D, G, L, ...].

    From a bank that every device has whole, `state_of` takes a client's state when it trains, and nothing is copied.
    """
    if not engine.sharded:
        return ()

    def share(bank: PyTree, places: jax.Array) -> PyTree:
        """One device's part of the bank, and all places: what is asked of it goes to the device that asks."""

        def leaf(s: jax.Array) -> jax.Array:
            here, at = mine(s, places)
            asked = jnp.where(here.reshape(here.shape + (1,) * (s.ndim - 1)), s[at], jnp.zeros((), s.dtype))
            wide = asked.astype(jnp.int32) if s.dtype == bool else asked
            return lax.psum_scatter(wide, AXIS, scatter_dimension=0, tiled=True).astype(s.dtype)

        return jax.tree.map(leaf, bank)

    specs = (P(AXIS), P())
    return jax.shard_map(share, mesh=engine.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)(bank, places)


def state_of(engine: Engine, shared: Shared, client: Client, sent: PyTree) -> PyTree:
    """One client's state: what `gather` has sent it, or its own in the bank."""
    if engine.sharded:
        return sent
    return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, client.place, keepdims=False), shared.bank)


def scatter(engine: Engine, bank: PyTree, places: jax.Array, new: PyTree) -> PyTree:
    """The bank with the client states ``new`` [D, G, L, ...] at places [D, G, L]; those beyond its end are left out."""
    if not engine.sharded:
        return jax.tree.map(lambda s, new: s.at[places].set(new, mode="drop"), bank, on_all(engine, new))

    def share(bank: PyTree, places: jax.Array, new: PyTree) -> PyTree:
        def leaf(s: jax.Array, new: jax.Array) -> jax.Array:
            here, at = mine(s, places)
            return s.at[jnp.where(here, at, len(s))].set(lax.all_gather(new, AXIS, tiled=True), mode="drop")

        return jax.tree.map(leaf, bank, new)

    specs = (P(AXIS), P(), P(AXIS))
    return jax.shard_map(share, mesh=engine.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)(bank, places, new)


def undealt(K: int, order: jax.Array, ragged: jax.Array, values: jax.Array) -> jax.Array:
    """[D, G, L, ...] -> [K, ...], in the order of the K clients that `deal` was given; it gave order and ragged."""
    places = jnp.where(ragged, K, order)
    return jnp.zeros((K, *values.shape[3:]), values.dtype).at[places].set(values, mode="drop")


def sample(engine: Engine, key: jax.Array) -> jax.Array:
    """int32 [capacity]: the ids of a random cohort; N fills a Bernoulli cohort up."""
    N = engine.num_clients
    if not engine.bernoulli:
        K = engine.asked
        if K == N:
            return jnp.arange(N, dtype=jnp.int32)
        if N <= 1024 or 2 * K > N:  # sorts N words
            return jax.random.choice(key, N, (K,), replace=False).astype(jnp.int32)
        return first_distinct(key, N, K)

    def draw(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, jax.random.bernoulli(use, engine.asked / N, (N,))

    first = draw((key, None))
    if engine.aggregation.noise_multiplier is not None:  # whose privacy is accounted for independent coins
        active = first[1]
    else:
        _, active = lax.while_loop(lambda carry: ~carry[1].any(), draw, first)  # again while nobody is in
    return jnp.nonzero(active, size=engine.capacity, fill_value=N)[0].astype(jnp.int32)


def first_distinct(key: jax.Array, N: int, K: int) -> jax.Array:
    """int32 [K]: K <= N / 2 of 0..N-1 without replacement, every ordered choice as likely; the work is O(K log K).

    Numbers are drawn with replacement and repetitions left out. Should 2 K + 64 draws hold fewer than K different ones
    (never seen: below 1e-9), all are drawn again, which favours no number.
    """

    def attempt(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.randint(key, (2 * K + 64,), 0, N, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        repeated = jnp.diff(drawn[order], prepend=-1) == 0
        new = jnp.ones(len(drawn), bool).at[order].set(~repeated)
        return drawn[jnp.nonzero(new, size=K, fill_value=0)[0]], new.sum() >= K

    def again(carry: tuple) -> tuple:
        key, _ = carry
        key, use = jax.random.split(key)
        return key, attempt(use)

    return lax.while_loop(lambda carry: ~carry[1][1], again, again((key, None)))[1][0]


def deal_anew(engine: Engine, how: Redeal, key: jax.Array, cohort: Client, rows: Rows) -> tuple[Rows, Client]:
    """The cohort's rows, pooled and dealt to its clients anew; who gets none is absent. Other clients keep theirs."""
    M = len(rows.x)
    places, offset, size = redeal(
        key,
        cohort.id,
        cohort.size,
        cohort.offset,
        None if how.alpha is None else rows.y,
        alpha=how.alpha,
        num_classes=how.num_classes,
        most_rows=how.most_rows[len(cohort.id) - 1],
    )
    id, place = jnp.where(
        size > 0, jnp.stack([cohort.id, cohort.place]), jnp.array([[engine.num_clients], [engine.bank_rows]])
    )
    cohort = Client(id, size, M + offset, engine.local.steps(size), place)
    return rows._replace(places=jnp.concatenate([jnp.arange(M, dtype=jnp.int32), places])), cohort


def deal(engine: Engine, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which client trains where: positions int32 [D, G, L] in the cohort, and bool [D, G, L] marking empty places.

    The cohort is sorted by local steps, longest first, so that the L lanes of a group finish together; groups are dealt
    to the D devices back and forth, so that the devices do.
    """
    K, D, L = len(steps), engine.mesh.size, engine.lanes
    order = jnp.argsort(-steps, stable=True)
    places = back_and_forth(D, -(-K // (D * L)), L)
    return order[np.minimum(places, K - 1)], jnp.asarray(places >= K)


def deal_out(engine: Engine, clients: Client, steps: jax.Array) -> tuple[jax.Array, jax.Array, Client]:
    """`deal` by these steps [K], and the clients [K] where they train, [D, G, L]; absent ones in empty places."""
    order, ragged = deal(engine, steps)
    dealt = jax.tree.map(lambda none, a: jnp.where(ragged, none, a[order]), absent(engine), clients)
    return order, ragged, dealt


def client_work(engine: Engine, shared: Shared, client: Client, longest: jax.Array) -> Work:
    """One client's work; no client that trains beside it has more than ``longest`` rows."""
    data, size = shared.rows, client.size
    B = min(engine.local.batch_size, engine.max_size)
    most_batches = -(-engine.max_size // B)

    def epoch(key: jax.Array) -> Callable[[jax.Array], Batch]:
        order = shuffle(key, size, longest, most_batches * B)

        def batch(k: jax.Array) -> Batch:
            mask = k * B + jnp.arange(B) < size
            rows = client.offset + jnp.where(mask, lax.dynamic_slice(order, (k * B,), (B,)), 0)
            rows = rows if data.places is None else data.places[rows]
            return Batch(engine.decode(data.x[rows]), data.y[rows], mask)

        return batch

    return Work(
        t=shared.t,
        size=size,
        q=size / engine.mean_size,
        num_batches=-(-size // B),
        num_steps=client.steps,
        mean_steps=mean_steps(engine),
        lr=shared.lr,
        initial_lr=engine.local.lr,
        key=jax.random.fold_in(shared.key, client.id),
        epochs=engine.local.epochs,
        most_batches=most_batches,
        optimizer=engine.local.direction(),
        epoch=epoch,
        model=engine.model,
    )


def mean_steps(engine: Engine) -> int:
    """Kbar, local steps of a client of mean size."""
    return int(engine.local.steps(engine.mean_size))


def evaluate_rows(engine: Engine, params: Params, test: TestRows) -> tuple[dict[str, jax.Array], PyTree]:
    """Of every test row its scores [T, B] (`score_rows`); and its logits [T, B, ...], or () where no score is of the
    whole test set."""

    def batch(params: Params, xy: tuple[jax.Array, jax.Array]) -> tuple[dict[str, jax.Array], PyTree]:
        x, y = xy
        logits = engine.model.apply(params, engine.decode(x))
        return score_rows(engine, logits, y), logits if engine.set_scores else ()

    on_devices = each_device(engine, lambda params, xy: lax.map(partial(batch, params), xy), (P(), P(AXIS)), P(AXIS))
    return on_devices(params, (test.x, test.y))


def score_rows(engine: Engine, logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Of each row [B] its loss, what `Model.scores` gives of a row and, for classifiers, whether it is classified
    rightly (of many labels: the share), unless accuracy is one of those scores."""
    model = engine.model
    rows = {"loss": model.loss(logits, y)}
    classifies = jnp.issubdtype(y.dtype, jnp.integer) and logits.ndim == y.ndim + 1 and logits.shape[-1] > 1
    if classifies and "accuracy" not in engine.set_scores:
        known = ~jnp.isnan(logits).any(-1)  # or argmax would make class 0 of a model that is not finite
        right = (known & (logits.argmax(-1) == y)).astype(rows["loss"].dtype)
        rows["accuracy"] = right.mean(axis=tuple(range(1, right.ndim)))
    if model.scores is not None and engine.row_scores:
        made = model.scores(logits, y)
        rows |= {name: jnp.asarray(made[name], rows["loss"].dtype) for name in engine.row_scores}
    return rows


def evaluate(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """Of the test set, scalars: means over its rows, {"loss", "accuracy", ...}, and the scores of all rows together."""
    rows, logits = evaluate_rows(engine, params, test)
    means = {}
    for name, values in rows.items():
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        means[name] = jnp.where(test.mask, values, 0).sum() / test.mask.sum()
    if engine.model.scores is None or not engine.set_scores:
        return means
    whole = on_all(engine, (logits, test.y))
    made = engine.model.scores(*(a.reshape(-1, *a.shape[2:])[: engine.test_size] for a in whole))
    return means | {name: made[name] for name in engine.set_scores}


def evaluate_server(engine: Engine, server: Any, test: TestRows) -> dict[str, jax.Array]:
    """`evaluate` of the global model and, as client_mean_..., of the mean of the cohort's models where it is kept."""
    scores = evaluate(engine, server.params, test)
    if (mean := getattr(server, "client_mean", None)) is not None:
        scores |= {f"client_mean_{name}": value for name, value in evaluate(engine, mean, test).items()}
    return scores


_PLACED: WeakKeyDictionary[FederatedData, dict[tuple, Any]] = WeakKeyDictionary()


def place(data: FederatedData, mesh: Mesh, eval_batch_size: int, streamed: bool, cut: bool = False) -> Arrays:
    """The data set on the devices, a copy on each or cut over them, unless it is streamed; the test set is always cut.

    Simulations of the same data share it, for as long as the data live.
    """
    placed = _PLACED.setdefault(data, {})
    here = (mesh, jax.dtypes.canonicalize_dtype(np.float64))
    rows, test = (*here, "cut" if cut else "whole"), (*here, eval_batch_size)
    with jax.ensure_compile_time_eval():  # a Simulation made inside jax.jit must leave no tracer here
        if rows not in placed and not streamed:
            arrays = (data.x, integers_as_int32(data.y), data.offsets.astype(np.int32), data.sizes)
            placed[rows] = Rows(*(place_parts(data, mesh) if cut else put(arrays, NamedSharding(mesh, P()))))
        if test not in placed:
            placed[test] = _place_test(data, mesh, eval_batch_size)
    return Arrays(None if streamed else placed[rows], placed[test])


def place_whole_test(data: FederatedData, mesh: Mesh, eval_batch_size: int) -> TestRows | None:
    """The test set, whole on each device."""
    placed = _PLACED.setdefault(data, {})
    key = (mesh, jax.dtypes.canonicalize_dtype(np.float64), eval_batch_size, "whole")
    if key not in placed:
        placed[key] = _place_test(data, mesh, eval_batch_size, whole=True)
    return placed[key]


def _place_test(data: FederatedData, mesh: Mesh, eval_batch_size: int, whole: bool = False) -> TestRows | None:
    if data.x_test is None or data.y_test is None:
        return None
    M, D = len(data.x_test), 1 if whole else mesh.size
    B = min(eval_batch_size, -(-M // D))
    T = -(-M // (B * D)) * D
    index = np.arange(T * B).reshape(T, B)
    padded = np.minimum(index, M - 1)
    arrays = (data.x_test[padded], integers_as_int32(data.y_test)[padded], index < M)
    return TestRows(*put(arrays, NamedSharding(mesh, P() if whole else P(AXIS))))


def strong(a: Any) -> jax.Array:
    """The array with a dtype that stays: a Python number's is weak, and would change in the first round."""
    a = jnp.asarray(a)
    return a if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else lax.convert_element_type(a, a.dtype)


def like(new: PyTree, old: PyTree, what: str) -> PyTree:
    """new in old's dtypes; ValueError unless it has old's structure and shapes, as the next round needs them, and where
    numbers with fractions would become whole."""
    fit.check_like(new, old, f"{what} must have the structure and the shapes of the one before", dtypes=False)

    def kept(path: Any, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(old.dtype, jnp.inexact):
            where = jax.tree_util.keystr(path) or "it"
            raise ValueError(
                f"{what} must keep its dtypes, got {new.dtype} instead of {old.dtype} in {where}: begin with a float, "
                "0.0 instead of 0, or round it"
            )
        return new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(kept, new, old)


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """new where the scalar condition holds, else old."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
