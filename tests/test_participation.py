"""Participation rules: their distributions by enumeration and against NumPy, their limits, and what does not fit."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small import assert_close, assert_equal, rounds, thorough
from test_algorithms import small

import fedjax_drift as fd
from fedjax_drift.participation import Clients
from fedjax_drift.participation.availability import Restricted
from fedjax_drift.round.cohort import select
from fedjax_drift.round.engine import round_keys
from fedjax_drift.round.selection import PARTICIPATION, available
from fedjax_drift.simulation.selection import selection_of
from fedjax_drift.testing import contract_simulation

SIZES = np.array([3, 8, 5, 12, 1, 7, 9, 4])
N, K = len(SIZES), 3
RNG = np.random.default_rng(0)
CHANCE = np.array([0.2, 0.5, 0.3, 0.7, 0.1, 0.4, 0.5, 0.3])  # for `importance`; the sum is K
AVAILABLE = RNG.random((5, N)) < 0.6
RULES = {
    "uniform": fd.participation.uniform(),
    "bernoulli": fd.participation.bernoulli(),
    "by_size": fd.participation.by_size(),
    "by_size, replace": fd.participation.by_size(replace=True),
    "importance": fd.participation.importance(CHANCE),
    "power_of_choice": fd.participation.power_of_choice(5),
    "schedule": fd.participation.schedule(RNG.integers(0, N, (4, K))),
}
ROWS = [(RNG.normal(size=(n, 4)).astype(np.float32), RNG.integers(0, 3, n)) for n in SIZES]


@pytest.fixture(scope="module")
def data() -> fd.FederatedData:
    return fd.FederatedData.from_clients(ROWS, test=ROWS[3])


MODEL, LOCAL = fd.models.linear((4,), 3), fd.LocalTraining(epochs=1, batch_size=4, lr=0.1)


def simulate(data, rule, algorithm=None, devices: int = 1, **options) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:devices])
    algorithm = fd.algorithms.scaffold() if algorithm is None else algorithm
    options = {"local": LOCAL, "cohort_size": K, "mesh": mesh} | options
    return fd.Simulation(MODEL, data, algorithm, participation=rule, **options)


def model(state: fd.ServerState) -> np.ndarray:
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])


def leaves(state: fd.ServerState) -> list[np.ndarray]:
    words = [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in jax.tree.leaves(
        (state.server, state.participation)
    )]  # fmt: skip
    return [np.asarray(a) for a in words]


def selected(rule: fd.participation.Participation, draws: int, sizes=SIZES, k: int = K) -> np.ndarray:
    """int [draws, K']: the cohorts of many keys."""
    clients = Clients(jnp.asarray(sizes, jnp.int32), lambda ids: jnp.zeros(ids.shape))

    def draw(key: jax.Array) -> jax.Array:
        return rule.select(rule.init(key, clients), key, jnp.int32(0), k, clients)[0]

    return np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), draws)))


def close_to(found: float, expected: float, draws: int) -> bool:
    """Whether a frequency is within 4 standard errors of a probability."""
    return abs(found - expected) <= 4 * (expected * (1 - expected) / draws) ** 0.5


# --- which clients ----------------------------------------------------------------------------------------------------


def test_by_size_draws_clients_one_after_another_in_proportion_to_their_sizes() -> None:
    draws, p = 20_000, SIZES / SIZES.sum()
    for replace in (False, True):
        cohorts = selected(fd.participation.by_size(replace), draws, k=2)
        for i, j in itertools.permutations(range(N), 2):
            expected = p[i] * (p[j] if replace else p[j] / (1 - p[i]))
            assert close_to((cohorts == (i, j)).all(1).mean(), expected, draws), (replace, i, j)
    assert selected(fd.participation.by_size(), 50, sizes=[0, 2, 0, 3, 1], k=5)[:, :3].min() == 1  # those with examples
    assert (selected(fd.participation.by_size(), 50, sizes=[0, 2, 0, 3, 1], k=5)[:, 3:] == 5).all()  # no client


def test_the_chance_and_the_factor_of_a_client_with_importance_sampling(data) -> None:
    draws = 20_000
    cohorts = selected(fd.participation.importance(CHANCE), draws)
    for i in range(N):
        assert close_to((cohorts == i).any(1).mean(), CHANCE[i], draws)
    _, infos = rounds(simulate(data, RULES["importance"], fd.algorithms.fedavg(weighting="uniform")), 3)
    for info in infos:
        taken = info["cohort"] >= 0
        np.testing.assert_allclose(info["weight"][taken], 1 / CHANCE[info["cohort"][taken]], rtol=1e-6)
    assert sum((info["cohort"] >= 0).sum() for info in infos) > 3


@pytest.mark.parametrize("weighting", ["examples", thorough("uniform")])
def test_importance_sampling_is_unbiased(weighting) -> None:
    """The expected model after a round, over all 2^6 cohorts of 6 clients, is that of full participation."""
    few = fd.FederatedData.from_clients(ROWS[:6])
    chance, algorithm = np.array([0.9, 0.2, 0.5, 1.0, 0.3, 0.1]), fd.algorithms.fedavg(weighting=weighting)
    rule = fd.participation.importance(chance)._replace(  # its state is the cohort
        init=lambda key, clients: jnp.zeros(6, jnp.int32),
        select=lambda ids, key, t, K, clients: (ids, 1 / jnp.asarray(chance, float).at[ids].get(mode="clip")),
        most=lambda N, K: 6,
    )
    sim = simulate(few, rule, algorithm)
    start = sim.init(jax.random.key(0))
    members = np.array([*itertools.product([False, True], repeat=6)])
    probability = np.where(members, chance, 1 - chance).prod(1)

    def after(ids: jax.Array) -> fd.Params:
        return sim.round_fn(start.with_source("participation", ids))[0].params

    models = jax.jit(jax.vmap(after))(jnp.asarray(np.where(members, np.arange(6), 6), jnp.int32))
    full, _ = simulate(few, None, algorithm, cohort_size=6).round_fn(start.with_source("participation", ()))
    for each, expected in zip(*map(jax.tree.leaves, (models, full.params)), strict=True):
        np.testing.assert_allclose(np.tensordot(probability, each, 1), expected, rtol=1e-5, atol=1e-6)


def by_own_chances() -> fd.participation.Participation:
    """A rule that uses its key directly, as `uniform` does."""
    chances = jnp.linspace(0.3, 0.9, N)
    return fd.participation.uniform()._replace(
        available=lambda state, key, t, N: jax.random.uniform(key, (N,)) < chances, name="own"
    )


RESTRICTED = {
    "cyclic, diurnal": lambda base: fd.participation.cyclic(2, base=fd.participation.diurnal(4.0, base=base)),
    "diurnal, own": lambda base: fd.participation.diurnal(
        4.0, floor=0.2, base=base._replace(available=by_own_chances().available)
    ),
    "markov": lambda base: fd.participation.markov(0.4, 0.2, base=base),
    "trace": lambda base: fd.participation.trace(AVAILABLE[2:], base=base),
}
NAMES = ["cyclic, diurnal", *map(thorough, ("diurnal, own", "markov", "trace"))]


class Server(NamedTuple):
    params: fd.Params
    participation: jax.Array


def answering() -> fd.Algorithm:
    """Client i doesn't train. It sends 1 / n_i with the weight n_i, and the server adds the mean to the model."""

    def client_update(server, client, work):
        message = jax.tree.map(lambda w: jnp.full_like(w, 1 / work.size), server.params)
        return fd.ClientResult(message, work.size.astype(work.lr.dtype), client, {})

    def server_update(server, mean, context):
        return Server(jax.tree.map(jnp.add, server.params, mean), context.participation)

    return fd.Algorithm(lambda params: Server(params, jnp.ones(())), lambda params: (), client_update, server_update)


@pytest.mark.parametrize("name", NAMES)
def test_importance_sampling_of_the_available_clients_is_unbiased(name, data) -> None:
    """The expected mean, over all 2^8 cohorts, is the mean over the available clients: A / (sum of n_i over them)."""
    rule = fd.participation.importance(CHANCE)._replace(  # its state is the cohort, before the others are left out
        init=lambda key, clients: jnp.zeros(N, bool),
        select=lambda member, key, t, K, clients: (
            jnp.where(member & clients.available, jnp.arange(N), N), jnp.asarray(1 / CHANCE, float)
        ),
        most=lambda N, K: N,
    )  # fmt: skip
    sim = simulate(data, RESTRICTED[name](rule), answering())
    members = np.array([*itertools.product([False, True], repeat=N)])
    probability = np.where(members, CHANCE, 1 - CHANCE).prod(1)

    def with_cohort(state: Any, member: jax.Array) -> Any:
        return state._replace(base=with_cohort(state.base, member)) if isinstance(state, Restricted) else member

    def after(start: fd.ServerState, member: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, _ = sim.round_fn(start.with_source("participation", with_cohort(start.participation, member)))
        return jax.tree.leaves(state.params)[0].ravel()[0], state.server.participation

    after_each = jax.jit(jax.vmap(after, (None, 0)))
    for seed in range(4):
        start = sim.init(jax.random.key(seed))
        allowed = np.asarray(available(sim.setup.engine, sim.setup.selection, start))
        mean, participation = after_each(start, jnp.asarray(members))
        expected = allowed.sum() / SIZES[allowed].sum() if allowed.any() else 0
        assert probability @ np.asarray(mean) == pytest.approx(expected, rel=1e-5)
        if allowed.any():  # the expected share of the participants, if the chances were equal
            np.testing.assert_allclose(participation, K / N * allowed.mean(), rtol=1e-6)


# The weights of the clients whose mean is the expected value of the mean of a cohort. None: it is biased on purpose.
ESTIMATES = {
    "uniform": np.ones(N), "bernoulli": np.ones(N), "by_size, replace": SIZES, "importance": SIZES,
    "by_size": None, "power_of_choice": None, "schedule": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_cohort_of_the_available_clients_estimates(name, data) -> None:
    """For 4,000 keys: the mean of a value over the cohort, minus its mean over the available clients."""
    sims, value = [simulate(data, RESTRICTED[name](RULES[base])) for base in ESTIMATES], np.sin(np.arange(N) * 2.0)

    def draw(key: jax.Array) -> list[tuple[jax.Array, ...]]:
        draws = []
        for sim in sims:
            engine, state = sim.setup.engine, sim.init(key)
            ids, factor = select(engine, state, sim.setup.arrays)
            factor = jnp.ones(ids.shape) if factor is None else factor
            draws.append((available(engine, sim.setup.selection, state), ids, factor))
        return draws

    draws = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(5), 4000))
    for (base, p), drawn in zip(ESTIMATES.items(), draws, strict=True):
        allowed, ids, factor = map(np.asarray, drawn)
        counts = np.zeros((len(ids), N + 1))
        np.add.at(counts, (np.arange(len(ids))[:, None], ids), factor)
        counts = counts[:, :N]
        assert not counts[~allowed].any(), base
        if p is None:
            continue
        some = allowed.any(1)
        counts, allowed = counts[some] * (SIZES if base == "importance" else 1), allowed[some] * p
        divisor = (allowed if base == "importance" else counts).sum(1)
        error = counts @ value / divisor - allowed @ value / allowed.sum(1)
        assert abs(error.mean()) < 5 * error.std() / len(error) ** 0.5, base


def test_importance_sampling_selects_its_cohorts_itself(data) -> None:
    """Its divisor counts all available clients, also those that over-selection, private means or the caller drop."""
    rule, needed = RULES["importance"], "importance divides by the expected weight of the clients that it selects, got "
    for options, message in (
        ({"over_selection": 1.5, "speed_spread": 1.0}, "over_selection, which drops the slowest"),
        ({"aggregation": fd.aggregation.private_ftrl(1.0, 1.0, 2)}, "private_ftrl.*, which weighs all clients by 1"),
    ):
        chance = np.full(N, 5 / N) if "over_selection" in options else CHANCE
        given = fd.participation.cyclic(2, base=fd.participation.importance(chance))
        with pytest.raises(ValueError, match=message) as error:
            simulate(data, given, fd.algorithms.fedavg(), **options)
        assert needed in str(error.value)
    sim = simulate(data, rule, fd.algorithms.fedavg())
    with pytest.raises(ValueError, match="cohort must be None with importance, which divides by the expected weight"):
        sim.round_fn(sim.init(jax.random.key(0)), cohort=[1, 2])


def test_power_of_choice_equals_a_numpy_loop(data) -> None:
    sim, candidates = simulate(data, fd.participation.power_of_choice(5)), 5
    state, known = sim.init(jax.random.key(3)), np.full(N, np.inf)
    for t in range(6):
        key, _ = round_keys(state.key, state.round)
        order = np.argsort(-(np.log(SIZES) + np.asarray(jax.random.gumbel(key, (N,)))), kind="stable")[:candidates]
        cohort = order[np.argsort(-known[order], kind="stable")[:K]]
        state, info = sim.round_fn(state)
        np.testing.assert_array_equal(info["cohort"], cohort)
        known[cohort] = info["loss"]
        np.testing.assert_array_equal(state.participation, known.astype(np.float32))
        assert t or np.isinf(known).sum() == N - K


@pytest.mark.thorough
def test_exact_power_of_choice_evaluates_the_present_model(data) -> None:
    for devices, options in ((1, {}), (2, {"lanes": 2}), (2, {"shard_data": True})):
        sim = simulate(data, fd.participation.power_of_choice(N, exact=True), devices=devices, **options)
        state, _ = rounds(sim, 1)  # the losses of the initial model are equal
        for _ in range(2):
            x, y = data.x, np.asarray(data.y)
            rows = -jax.nn.log_softmax(MODEL.apply(state.params, jnp.asarray(x)))[np.arange(len(y)), y]
            losses = np.add.reduceat(np.asarray(rows), data.offsets) / SIZES
            state, info = sim.round_fn(state)
            assert set(np.asarray(info["cohort"])) == set(np.argsort(-losses)[:K])


def test_only_rules_that_call_losses_ask_for_those_of_the_present_model() -> None:
    """Such a rule costs a forward pass over the clients, and its cohorts cannot be selected ahead."""
    of_losses = fd.participation.Participation(
        lambda state, key, t, K, clients: (lax.top_k(clients.losses(jnp.arange(N)), K)[1], None)
    )
    of_sizes = fd.participation.Participation(lambda state, key, t, K, clients: (lax.top_k(clients.sizes, K)[1], None))
    assert [selection_of(rule, N, K).asks_losses for rule in (of_losses, of_sizes)] == [True, False]


def test_cyclic_participation_equals_a_numpy_loop(data) -> None:
    groups = np.arange(N) * 3 // N
    sim = simulate(data, fd.participation.cyclic(3, shuffle=False))
    state, infos = rounds(sim, 6)
    np.testing.assert_array_equal(state.participation.own, groups)
    plain = simulate(data, None)
    same = plain.init(jax.random.key(0))
    for t, info in enumerate(infos):
        group = np.flatnonzero(groups == t % 3)
        cohort = info["cohort"][info["cohort"] >= 0]
        assert set(cohort) <= set(group) and len(cohort) == min(K, len(group)) and info["available"] == len(group)
        same, _ = plain.round_fn(same, cohort=cohort)
    assert_close(leaves(state)[:-1], leaves(same))
    shuffled, _ = rounds(simulate(data, fd.participation.cyclic(3)), 1)
    assert sorted(shuffled.participation.own) == sorted(groups) and (shuffled.participation.own != groups).any()


def test_the_availability_of_clients(data) -> None:
    many = 20_000
    clients, key = Clients(jnp.ones(many, jnp.int32), lambda ids: jnp.zeros(ids.shape)), jax.random.key(0)
    rule = fd.participation.markov(0.3, 0.1)
    state, before = rule.init(key, clients), None
    for t in range(3):  # stationary, and with the rates of the two transitions
        now = np.asarray(rule.available(state, key, t, many))
        assert close_to(now.mean(), 0.75, many)
        if before is not None:
            assert close_to(now[~before].mean(), 0.3, (~before).sum())
            assert close_to((~now)[before].mean(), 0.1, before.sum())
        before, state = now, rule.observe(state, jnp.zeros(0, jnp.int32), jnp.zeros(0))
    phases = np.tile([0.0, 0.25], many // 2)
    rule = fd.participation.diurnal(8.0, phases, floor=0.2)
    for t in (0, 2, 5):
        share = 0.2 + 0.8 * (1 + np.sin(2 * np.pi * (t / 8 + np.array([0.0, 0.25])))) / 2
        now = np.asarray(rule.available(rule.init(key, clients), jax.random.fold_in(key, t), t, many)).reshape(-1, 2)
        assert all(close_to(found, p, many // 2) for found, p in zip(now.mean(0), share, strict=True))
    _, infos = rounds(simulate(data, fd.participation.trace(AVAILABLE)), 7)
    for t, info in enumerate(infos):
        there = np.flatnonzero(AVAILABLE[t % 5])
        assert set(info["cohort"]) - {-1} <= set(there) and (info["cohort"] >= 0).sum() == min(K, len(there))


def test_a_round_in_which_nobody_is_available_changes_nothing(data) -> None:
    rule = fd.participation.trace(np.array([[True] * N, [False] * N]))
    for base in (None, fd.participation.bernoulli(), fd.participation.by_size(replace=True)):
        sim = simulate(data, rule if base is None else fd.participation.trace(np.eye(2, N, dtype=bool) * 0 == 1, base))
        state = sim.init(jax.random.key(0))
        before = sim.round_fn(state)[0] if base is None else state
        after, info = sim.round_fn(before)
        assert info["available"] == 0 and (info["cohort"] == -1).all()
        assert_equal(leaves(before), leaves(after))


def test_a_client_that_is_drawn_twice_trains_once_and_counts_twice(data) -> None:
    algorithm = fd.algorithms.fedavg(weighting="uniform")
    twice = simulate(data, fd.participation.schedule(np.array([[2, 5, 2]])), algorithm)
    start = twice.init(jax.random.key(0))
    state, info = twice.round_fn(start)
    assert info["cohort"].tolist() == [2, 5, -1] and info["weight"].tolist() == [2, 1, 0]
    one, other = (model(simulate(data, None, algorithm).round_fn(start, cohort=[i])[0]) for i in (2, 5))
    np.testing.assert_allclose(model(state), (2 * one + other) / 3, rtol=1e-5, atol=1e-7)


def test_the_mean_of_a_cohort_that_is_drawn_by_size_has_equal_weights(data) -> None:
    """Also if the weights of the algorithm are the numbers of examples."""
    for name in ("by_size", "power_of_choice"):
        _, infos = rounds(simulate(data, RULES[name], fd.algorithms.fedavg(weighting="examples")), 1)
        assert infos[0]["weight"].tolist() == [1] * K and len(set(infos[0]["size"].tolist())) > 1


def test_observe_gets_the_losses_of_those_that_report(data) -> None:
    rule = fd.participation.uniform()._replace(
        init=lambda key, clients: (jnp.zeros(K, jnp.int32), jnp.zeros(K)),
        observe=lambda state, ids, losses: (ids, losses),
    )
    state, infos = rounds(simulate(data, rule, dropout=0.5), 4)
    ids, losses = map(np.asarray, state.participation)
    np.testing.assert_array_equal(ids, infos[-1]["selected"])
    reported = infos[-1]["cohort"] >= 0
    assert 0 < reported.sum() < K
    np.testing.assert_array_equal(losses[reported], infos[-1]["loss"][reported])
    assert np.isnan(losses[~reported]).all()
    state, info = simulate(data, rule).round_fn(state, cohort=[4, 1, 0])
    np.testing.assert_array_equal(state.participation[0], [4, 1, 0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold", "feddyn", "feddc", "fedeve", "fedadamw", "fedrep"])
def test_algorithms_train_with_unequal_weights_and_empty_cohorts(name) -> None:
    given = contract_simulation(small(fd.algorithms.ALGORITHMS[name]))
    rule = fd.participation.importance(np.full(given.data.num_clients, 1 / given.data.num_clients))
    sim = fd.Simulation(given.model, given.data, given.algorithm, local=given.local, cohort_size=1, participation=rule)
    state, infos = rounds(sim, 4)
    assert min((info["weight"] > 0).sum() for info in infos) == 0
    assert np.isfinite(model(state)).all()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_rules_that_do_not_fit_a_simulation(data) -> None:
    rules = fd.participation
    two = rules.uniform()._replace(select=lambda state, key, t, K, clients: jnp.zeros(K, jnp.int32), name="mine")
    short = rules.uniform()._replace(select=lambda *_: (jnp.zeros(1, jnp.int32), None), name="mine")
    for rule, message in (
        ("cyclic", "participation must be of type Participation"),
        (rules.importance(CHANCE[:4]), f"p must have a probability for each of the {N} clients, got 4"),
        (rules.importance(CHANCE / 2), "the sum of p must be the cohort size, 3, got 1.5"),
        (rules.power_of_choice(2), r"candidates must be in 3..8"),
        (rules.cyclic(9), r"groups must be in 1..8"),
        (rules.diurnal(3.0, phases=[0.0]), "phases must have a number for each of the 8 clients, got 1"),
        (rules.trace(np.ones((2, 3), bool)), r"available must be \[T, 8\]"),
        (rules.schedule([[1, 2]]), r"ids must be \[T, 3\]"),
        (rules.schedule([[1, 2, 9]]), r"ids must be \[T, 3\] with values in 0..8"),
        (two, r"select of mine must return \(ids, factor\)"),
        (short, r"ids of mine must be integers \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(data, rule)
    with pytest.raises(ValueError, match="two names of one option"):
        simulate(data, rules.uniform(), sampling="uniform")
    with pytest.raises(ValueError, match="all examples on the devices, got a streamed data set"):
        simulate(data, rules.power_of_choice(5, exact=True), stream=True)
    for rule in (RULES["by_size"], RULES["importance"]):
        with pytest.raises(ValueError, match='keeps the weights of the clients.*pass weighting="uniform"'):
            simulate(data, rule, fd.algorithms.feddyn(0.1, weighting="examples"))
    uniform, markov = simulate(data, RULES["uniform"]), simulate(data, rules.markov(0.4, 0.2))
    with pytest.raises(
        ValueError, match="must have the state of the participation rule markov in its field participation"
    ):
        markov.round_fn(uniform.init(jax.random.key(0)))
    with pytest.raises(ValueError, match="privacy accounting"):
        simulate(data, RULES["by_size"], fd.algorithms.fedavg(), aggregation=fd.aggregation.private(1.0, 1.0))


def test_the_initial_state_of_a_rule_has_a_key_of_its_own(data) -> None:
    """It is no key of a round, so the groups are independent of the cohorts."""
    state = simulate(data, fd.participation.cyclic(3)).init(jax.random.key(0))
    key = jax.random.fold_in(jax.random.fold_in(state.key, PARTICIPATION), 0)
    np.testing.assert_array_equal(state.participation.own, jax.random.permutation(key, np.arange(N) * 3 // N))
