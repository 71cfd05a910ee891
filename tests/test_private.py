"""Private means with a state: a clip that adapts, and the noise of trees over the rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import rounds
from test_participation import K, N, model
from test_participation import data as data
from test_participation import simulate as simulated

import fedjax_drift as fd
from fedjax_drift.round.accounting import trees_of_a_client

a, p = fd.aggregation, fd.participation
LIKE = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


def simulate(data, rule, participation=None, algorithm=None, devices=1, **options) -> fd.Simulation:
    participation = p.bernoulli() if participation is None else participation
    algorithm = fd.algorithms.fedavg() if algorithm is None else algorithm
    return simulated(data, participation, algorithm, devices, aggregation=rule, **options)


def combined(rule: fd.aggregation.Aggregation, n: int, total, cohort_size: int = K, keys: int = 4000) -> list:
    """The means of n rounds with this sum of contributions, leaves [keys, ...]."""

    def one(key: jax.Array) -> list:
        state, means = rule.init(), []
        for t in range(n):
            mean, state = rule.combine(state, total, jnp.ones(()), jax.random.fold_in(key, t), cohort_size)
            means.append(mean)
        return means

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), keys))


def variance_is(values, expected: float) -> None:
    """Whether the variance of normal numbers is within 4 standard errors of a value."""
    values = np.ravel(values)
    assert abs(values.var() / expected - 1) < 4 * (2 / len(values)) ** 0.5, (values.var(), expected)


# --- a clip that adapts -----------------------------------------------------------------------------------------------


def test_the_clip_follows_a_quantile_by_hand(data) -> None:
    """Without noise, with clients of different sizes, and with cohorts of different sizes."""
    gamma, lr, C = 0.7, 0.4, 0.05
    sim = simulate(data, a.private(C, 0.0, target_quantile=gamma, clip_lr=lr))
    alone = simulated(data, p.uniform(), fd.algorithms.fedavg(weighting="uniform"))
    state, clipped = sim.init(jax.random.key(1)), 0
    for _ in range(6):
        w, new_state = model(state), sim.round_fn(state)
        cohort = [int(i) for i in new_state[1]["cohort"] if i >= 0]
        mean, signs = np.zeros_like(w), 0.0
        for i in cohort:
            D = model(alone.round_fn(state._replace(sources={}), cohort=[i])[0]) - w
            norm = np.linalg.norm(D)
            mean += D * min(1, C / norm) / K
            signs += 0.5 if norm <= C else -0.5
            clipped += norm > C
        state, info = new_state
        np.testing.assert_allclose(model(state) - w, mean, rtol=1e-4, atol=1e-7)
        b = 0.5 + signs / K
        C *= np.exp(-lr * (b - gamma))
        np.testing.assert_allclose([info["clip_norm"], info["within_clip"]], [C, b], rtol=1e-5)
    assert 0 < clipped < 18


def test_the_clip_ends_at_the_quantile() -> None:
    norms, rule, gamma = jnp.arange(1.0, 101.0), a.private(1.0, 0.0, target_quantile=0.3), 0.3

    def one_round(state, _):
        contribute = jax.vmap(lambda norm: rule.contribute(state, {"w": norm[None]}, jnp.ones(()))[0])
        _, state = rule.combine(state, jax.tree.map(lambda v: v.sum(0), contribute(norms)), 1.0, jax.random.key(0), 100)
        return state, state.norm

    _, C = jax.lax.scan(one_round, rule.init(), length=300)
    assert abs(float(C[-1]) - 100 * gamma) < 1.5


def test_the_noise_is_split_between_messages_and_count() -> None:
    """Theorem 1 of Andrew et al. 2021."""
    C, z, stddev = 0.5, 1.2, 0.9
    rule = a.private(C, z, target_quantile=0.5, count_stddev=stddev)
    (mean,) = combined(rule, 1, (LIKE, jnp.zeros(())))
    of_messages = (z**-2 - (2 * stddev) ** -2) ** -0.5
    variance_is(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mean)]), (of_messages * C / K) ** 2)

    def within(key: jax.Array) -> jax.Array:
        return rule.combine(rule.init(), (LIKE, jnp.zeros(())), jnp.ones(()), key, K)[1].within

    seen = jax.vmap(within)(jax.random.split(jax.random.key(2), 20_000))
    variance_is(seen, (stddev / K) ** 2)
    assert abs(float(seen.mean()) - 0.5) < 4 * stddev / K / 20_000**0.5
    (mean,) = combined(a.private(C, z, target_quantile=0.5), 1, (LIKE, jnp.zeros(())), cohort_size=40)  # stddev 2
    variance_is(mean["w"], ((z**-2 - 4**-2) ** -0.5 * C / 40) ** 2)


def test_a_message_that_is_not_finite_says_nothing_about_the_clip() -> None:
    rule = a.private(1.0, 0.0, target_quantile=0.5)
    for value, sign in ((jnp.nan, 0.0), (jnp.inf, 0.0), (0.1, 0.5), (3.0, -0.5)):
        (message, found), weight = rule.contribute(rule.init(), {"w": jnp.array([value])}, jnp.asarray(7.0))
        assert (float(found), float(weight)) == (sign, 1.0)
        assert float(message["w"][0]) == pytest.approx(min(value, 1.0) if np.isfinite(value) else 0.0)


# --- trees ------------------------------------------------------------------------------------------------------------


def test_the_noise_of_a_sum_is_that_of_a_tree() -> None:
    """After t rounds of a tree, the sum has as many nodes as t has bits that are 1. Trees are independent."""
    C, z, R = 0.5, 1.5, 5
    means = combined(a.private_ftrl(C, z, R), 8, LIKE)
    steps = np.stack([np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mean)]) for mean in means])
    node = (z * C / K) ** 2
    for t in range(1, R + 1):
        variance_is(steps[:t].sum(0), node * bin(t).count("1"))
    sums = np.cumsum(steps[:R], 0)
    # Sums share the nodes that their binary numbers share: 2 = 10, 3 = 11, 4 = 100, 5 = 101.
    for t, other, shared in ((1, 2, 0), (2, 3, 1), (1, 3, 0), (3, 4, 0), (4, 5, 1)):
        assert abs((sums[t - 1] * sums[other - 1]).mean() / node - shared) < 6 * 2 / steps.shape[1] ** 0.5, (t, other)
    for t in range(1, 4):  # the next tree
        variance_is(steps[R : R + t].sum(0), node * bin(t).count("1"))
    correlation = np.corrcoef(steps[R], steps[0])[0, 1]
    assert abs(correlation) < 4 / steps.shape[1] ** 0.5


@pytest.mark.thorough
def test_without_noise_a_tree_is_the_clipped_mean(data) -> None:
    options = {"participation": p.uniform(), "cohort_size": N}
    plain, _ = rounds(simulate(data, a.private_ftrl(0.1, 0.0, 4), **options), 3)
    clipped, _ = rounds(
        simulate(data, a.clipped(0.1), algorithm=fd.algorithms.fedavg(weighting="uniform"), **options), 3
    )
    np.testing.assert_allclose(model(plain), model(clipped), rtol=1e-5, atol=1e-7)


# --- accounting -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_epsilon_of_trees(data) -> None:
    dp = pytest.importorskip("dp_accounting")
    z, R, n = 3.0, 4, 10

    def spent(rule, rounds: int, noise: float = z) -> float:
        return a.epsilon(simulate(data, a.private_ftrl(0.1, noise, R), rule, cohort_size=2), rounds, 1e-5)

    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    for _ in range(3):
        accountant.compose(dp.SingleEpochTreeAggregationDpEvent(z, R))
    assert spent(p.cyclic(4), n) == pytest.approx(accountant.get_epsilon(1e-5))
    assert spent(p.cyclic(4), 4) < spent(p.cyclic(4), 5) == spent(p.cyclic(4), 8)
    assert spent(p.cyclic(8), 8) == spent(p.cyclic(4), 4)  # every client is in one of the two trees
    assert spent(p.cyclic(4), n, noise=0.0) == np.inf
    leaky = p.cyclic(4, base=p.power_of_choice(2))  # its choice depends on the data of the clients
    for rule in (p.cyclic(3), p.uniform(), p.cyclic(4)._replace(name="mine"), leaky):
        with pytest.raises(ValueError, match="at most once in 4 rounds"):
            spent(rule, n)
    adaptive = simulate(data, a.private(1.0, 0.2, target_quantile=0.5))
    fixed = simulate(data, a.private(1.0, 0.2))
    assert a.epsilon(adaptive, 3, 1e-5) == a.epsilon(fixed, 3, 1e-5)  # z is the total


def test_in_how_many_trees_a_client_takes_part() -> None:
    rows = [[0, 1], [2, 3], [4, 0], [1, 2]]
    for ids, R, n, trees in (
        (rows, 2, 4, 2),  # 0, 1 and 2 are in both
        (rows, 2, 3, 2),
        (rows, 2, 2, 1),
        (rows, 2, 8, 4),
        (rows, 3, 3, None),  # 0 twice
        (rows[:2], 2, 9, 5),
        (rows[:2], 3, 2, 1),
        (rows[:2], 3, 9, None),
        ([[0, 0]], 1, 1, 1),  # trains once
        ([[0, 5], [1, 5]], 2, 9, 5),  # 5 marks unused entries
    ):
        if trees is None:
            with pytest.raises(ValueError, match=f"at most once in {R} rounds"):
                trees_of_a_client(p.schedule(ids), 5, n, R)
        else:
            assert trees_of_a_client(p.schedule(ids), 5, n, R) == trees, (ids, R, n)
    assert trees_of_a_client(p.cyclic(5), 9, 100, 5) == 20 and trees_of_a_client(p.cyclic(10), 12, 101, 5) == 11


# --- rules of users, and what does not fit ----------------------------------------------------------------------------


def test_rules_that_do_not_fit_are_refused(data) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be less than 0.3, twice count_stddev, got 0.5"):
        simulate(data, a.private(1.0, 0.5, target_quantile=0.5))
    with pytest.raises(ValueError, match='sampling must be "bernoulli"'):
        simulate(data, a.private(1.0, 0.1, target_quantile=0.5), p.uniform())
    with pytest.raises(ValueError, match="count_stddev has no effect on a fixed clip"):
        a.private(1.0, 0.5, count_stddev=1.0)
    two_functions = a.Aggregation(
        lambda message, weight: (message, weight), lambda total, weight, key, K: total, name="mine"
    )
    with pytest.raises(ValueError, match="Aggregation.contribute must be a function of 3 arguments"):
        simulate(data, two_functions)
    keeps = a.mean()._replace(combine=lambda state, total, weight, key, K: (weight, state))
    with pytest.raises(ValueError, match="mean has the structure of a message"):
        simulate(data, keeps)
    state, _ = rounds(simulate(data, a.private_ftrl(0.2, 0.3, 3), p.cyclic(3)), 1)
    with pytest.raises(ValueError, match="aggregation rule"):
        simulate(data, a.private_ftrl(0.1, 0.1, 3), p.cyclic(3)).round_fn(state.with_source("aggregation", ()))


def test_the_share_of_clients_that_an_algorithm_uses_is_k_of_n(data) -> None:
    """SCAFFOLD adds the sum of the changes over N to c. A private mean is the sum over K, so the share is K / N."""
    scaffold, rules = fd.algorithms.scaffold(), (a.mean(), a.private(1e6, 1e-12))
    plain, private = (simulate(data, rule, algorithm=scaffold) for rule in rules)
    state, sizes = plain.init(jax.random.key(0)), set()
    for _ in range(4):
        (after, info), (got, _) = plain.round_fn(state), private.round_fn(state)
        sizes.add(int((info["cohort"] >= 0).sum()))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got.server.c, after.server.c)
        state = after
    assert len(sizes) > 1, sizes


@pytest.mark.thorough
def test_without_answers_a_rule_that_is_not_private_keeps_its_state(data) -> None:
    counting = a.mean()._replace(
        init=lambda: jnp.zeros(()), combine=lambda state, total, weight, key, K: (total, state + 1), name="counting"
    )
    state, _ = rounds(simulate(data, counting, p.uniform(), dropout=1.0), 2)
    assert float(state.aggregation) == 0
    state, _ = rounds(simulate(data, counting, p.uniform()), 2)
    assert float(state.aggregation) == 2


@pytest.mark.thorough
def test_a_rule_of_a_user_has_a_state(data) -> None:
    """The mean of the last means, with a number that is an argument of the program."""

    @a.rule
    def smoothed(beta: float) -> fd.aggregation.Aggregation:
        def combine(state, total, weight, key, K):
            mean = jax.tree.map(lambda s: s / weight, total)
            new = beta * state + (1 - beta) * weight
            return mean, new

        return a.mean()._replace(
            combine=combine, init=lambda: jnp.zeros(()), report=lambda s: {"smoothed": s}, name="s"
        )

    sim = simulate(data, smoothed(0.5), p.uniform())
    state, infos = rounds(sim, 3)
    expected = 0.0
    for info in infos:
        expected = 0.5 * expected + 0.5 * info["weight"].sum()
        np.testing.assert_allclose(info["smoothed"], expected, rtol=1e-6)
    assert simulate(data, smoothed(0.3), p.uniform()).executor.programs.compiled is sim.executor.programs.compiled


def test_the_command_line_has_private_means() -> None:
    words = "--dataset synthetic:num_clients=12 --algorithm fedavg --cohort 3 --clip-updates 0.5 --noise-multiplier 0.2"
    (sim,) = fd.parse_run(f"{words} --sampling bernoulli --target-quantile 0.5").simulations.values()
    assert "target_quantile=0.5" in sim.aggregation.name
    (sim,) = fd.parse_run(f"{words} --restart-every 4 --participation cyclic:4").simulations.values()
    assert sim.aggregation.restart_every == 4 and sim.participation.name == "cyclic"
    with pytest.raises(ValueError, match="--target-quantile .* --noise-multiplier"):
        fd.parse_run("--dataset synthetic:num_clients=12 --algorithm fedavg --target-quantile 0.5")
