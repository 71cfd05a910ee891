"""Robust rules and adversaries: the definitions in NumPy, rounds by hand, limits, and all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, mlp, of_sizes, quadratics, rounds, thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.robust.rule import Stack
from fedjax_drift.robust.rules import COLUMNS

A, R = fd.adversaries, fd.robust
Matrix = np.ndarray  # [n, d]


# --- the definitions, one message after another -----------------------------------------------------------------------


def near(x: Matrix, i: int, count: int) -> list[int]:
    """The ``count`` nearest messages of message i, of which it is one itself."""
    return sorted(range(len(x)), key=lambda j: (j != i, np.sum((x[i] - x[j]) ** 2)))[:count]


def krum_scores(x: Matrix, f: int, less: int = 0) -> list[float]:
    return [sum(np.sum((x[i] - x[j]) ** 2) for j in near(x, i, len(x) - f - less)) for i in range(len(x))]


def lowest(x: Matrix, scores: list[float], count: int) -> np.ndarray:
    return x[np.argsort(scores, kind="stable")[:count]].mean(0)


def meamed(x: Matrix, f: int) -> np.ndarray:
    return np.array([np.mean(sorted(c, key=lambda v: abs(v - np.median(c)))[: len(x) - f]) for c in x.T])


def weiszfeld(x: Matrix, nu: float, steps: int) -> np.ndarray:
    z = x.mean(0)
    for _ in range(steps):
        beta = [1 / max(nu, np.linalg.norm(z - row)) for row in x]
        z = sum(b * row for b, row in zip(beta, x, strict=True)) / sum(beta)
    return z


def clipped_around(x: Matrix, v: np.ndarray, tau: float, steps: int) -> np.ndarray:
    for _ in range(steps):
        v = v + np.mean([(row - v) * min(1, tau / np.linalg.norm(row - v)) for row in x], 0)
    return v


RULES: list[tuple[Any, Callable[[Matrix, int], np.ndarray]]] = [
    (lambda f: R.median(), lambda x, f: np.median(x, 0)),
    (R.trimmed_mean, lambda x, f: np.sort(x, 0)[f : len(x) - f].mean(0)),
    (R.meamed, meamed),
    (lambda f: R.geometric_median(0.3, 4), lambda x, f: weiszfeld(x, 0.3, 4)),
    (R.krum, lambda x, f: lowest(x, krum_scores(x, f), 1)),
    (R.multi_krum, lambda x, f: lowest(x, krum_scores(x, f), len(x) - f)),
    (lambda f: R.multi_krum(f, True), lambda x, f: lowest(x, krum_scores(x, f, 1), len(x) - f)),
    (R.cge, lambda x, f: lowest(x, list(np.linalg.norm(x, axis=1)), len(x) - f)),
    (lambda f: R.centered_clipping(0.7, 2), lambda x, f: clipped_around(x, np.zeros(x.shape[1]), 0.7, 2)),
]


def arc(x: Matrix, f: int) -> Matrix:
    norms, k = np.linalg.norm(x, axis=1), math.floor(2 * f * (len(x) - f) / len(x))
    return x * np.minimum(1, np.sort(norms)[::-1][k] / norms)[:, None]


BEFORE: list[tuple[Any, Callable[[Matrix, int], Matrix]]] = [
    (R.nnm, lambda x, f: np.array([x[near(x, i, len(x) - f)].mean(0) for i in range(len(x))])),
    (R.arc, arc),
]


def stack(x: Matrix, rng: np.random.Generator) -> Stack:
    """The messages as two leaves, with three absent clients, one message with NaN and one with inf between them."""
    n, d = x.shape
    rows = rng.permutation(n + 5)
    full = rng.normal(size=(n + 5, d)) * 100
    full[rows[n], 0], full[rows[n + 1], -1] = np.nan, np.inf
    full[np.sort(rows[:n])] = x
    present = np.isin(np.arange(n + 5), rows[: n + 2])
    each = {"a": jnp.asarray(full[:, :1]), "b": jnp.asarray(full[:, 1:].reshape(n + 5, -1, 2))}
    return Stack(each, jnp.asarray(present), jnp.arange(n + 5))


def aggregate(rule: Any, before: Any, given: Stack) -> np.ndarray:
    joint = fd.aggregation.robust(rule, before).joint
    message = jax.tree.map(lambda a: jnp.zeros_like(a[0]), given.each)
    combine = jax.jit(lambda *given: joint.combine(joint.init(message), Stack(*given), jax.random.key(0)))
    mean, enough, _ = combine(*given[:3])
    assert enough
    return np.concatenate([np.ravel(mean["a"]), np.ravel(mean["b"])])


@pytest.mark.parametrize("n, f", [(7, 2), (8, 3), thorough(11, 0), thorough(5, 1)])
def test_rules_are_their_definitions(n: int, f: int) -> None:
    """In float64, with clients that are absent and messages that are not finite, which must not count."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, 5)) + rng.normal(size=(n, 1)) * (np.arange(n) < f)[:, None] * 5
    x[-2:] = x[-2:] if n % 2 else x[-3]  # three equal messages
    with jax.enable_x64(True):
        given = stack(x, rng)
        for rule, want in RULES:
            got = aggregate(rule(f), [], given)
            np.testing.assert_allclose(got, want(x, f), rtol=1e-12, atol=1e-13, err_msg=repr(rule(f)))
        for before, changed in BEFORE:
            got = aggregate(R.trimmed_mean(f), [before(f)], given)
            want = np.sort(changed(x, f), 0)[f : n - f].mean(0)
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13, err_msg=repr(before(f)))


def test_messages_of_several_slices_of_coordinates() -> None:
    """Rules of coordinates take COLUMNS at a time, and the last slice overlaps the one before it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 2 * COLUMNS + 9))
    with jax.enable_x64(True):
        for rule, want in ((R.median(), np.median(x, 0)), (R.trimmed_mean(2), np.sort(x, 0)[2:4].mean(0))):
            np.testing.assert_allclose(aggregate(rule, [], stack(x, rng)), want, atol=1e-12, err_msg=repr(rule))


def test_equal_messages_and_equal_scores() -> None:
    """Ties: each rule returns what all messages are, and the median of an even number is between two of them."""
    x = np.tile(np.arange(5.0), (6, 1))
    with jax.enable_x64(True):
        given = stack(x, np.random.default_rng(0))
        for rule, want in RULES[:-1]:
            np.testing.assert_allclose(aggregate(rule(2), [R.nnm(2), R.arc(2)], given), want(x, 2), atol=1e-12)


def test_buckets_are_a_partition() -> None:
    """Each message is in one bucket of s, the last one may have fewer, and another key gives other buckets."""
    x = np.eye(7)[:, :7]
    with jax.enable_x64(True):
        given = stack(x, np.random.default_rng(1))._replace(present=jnp.ones(12, bool))
        given = given._replace(each={"a": jnp.eye(12)})
        seen = set()
        for seed in range(5):
            made = R.bucketing(5).change(given, jax.random.key(seed))
            members = np.asarray(made.each["a"]) > 0
            assert members.sum(1).tolist() == [5, 5, 2] and members.sum(0).tolist() == [1] * 12
            np.testing.assert_allclose(np.asarray(made.each["a"]).sum(1), 1)
            seen.add(members.tobytes())
        assert len(seen) == 5


# --- rounds -----------------------------------------------------------------------------------------------------------

TARGETS, SIZES = [2.0, 8.0, -4.0, 6.0, 3.0], [1, 3, 2, 2, 2]


def simulate(algorithm: Any = None, **options: Any) -> fd.Simulation:
    """Client i sends half of its distance a_i - w."""
    data, model = quadratics(TARGETS, SIZES)
    local = fd.LocalTraining(epochs=1, batch_size=10, lr=0.5)
    algorithm = fd.algorithms.fedavg() if algorithm is None else algorithm
    options = {"mesh": fd.clients_mesh(jax.devices()[:1]), "cohort_size": 5, "local": local} | options
    return fd.Simulation(model, data, algorithm, **options)


def first(**options: Any) -> tuple[float, dict]:
    state, (info,) = rounds(simulate(**options), 1)
    return float(state.params), info


ROBUST = fd.aggregation.robust


def test_a_round_with_a_robust_rule_by_hand() -> None:
    sent = np.array(TARGETS) / 2
    assert first(aggregation=ROBUST(R.median()))[0] == pytest.approx(np.median(sent))
    assert first(aggregation=ROBUST(R.krum(1)))[0] == pytest.approx(3.0)
    w, info = first(aggregation=ROBUST(R.trimmed_mean(1)))
    assert w == pytest.approx(np.sort(sent)[1:-1].mean()) and info["weight"].tolist() == [1] * 5
    state, _ = rounds(simulate(aggregation=ROBUST(R.centered_clipping(1.0))), 2)
    v = clipped_around(sent[:, None], np.zeros(1), 1.0, 1)
    second = clipped_around((sent - v / 2)[:, None], v, 1.0, 1)
    assert float(state.params) == pytest.approx((v + second).item())
    assert float(state.aggregation) == pytest.approx(second.item())


def test_a_round_in_which_too_few_report_changes_nothing() -> None:
    sim = simulate(aggregation=ROBUST(R.trimmed_mean(2)), dropout=0.5)
    state, seen = sim.init(jax.random.key(0)), set()
    for _ in range(12):
        new, info = sim.round_fn(state)
        n = int((info["cohort"] >= 0).sum())
        assert (float(new.params) != float(state.params)) == (n > 4)
        seen.add(n > 4)
        state = new
    assert seen == {True, False}


def attacked(attack: Any, rule: Any = None, **options: Any) -> tuple[float, dict]:
    """A round in which clients 1 and 3 are hostile, and clients weigh 1."""
    algorithm = fd.algorithms.fedavg(weighting="uniform")
    return first(algorithm=algorithm, sources=[A.clients([1, 3], attack)], aggregation=rule, **options)


HONEST, OWN = np.array([1.0, -2.0, 1.5]), np.array([4.0, 3.0])
MU, SIGMA = HONEST.mean(), HONEST.std()


@pytest.mark.parametrize(
    "attack, want",
    [
        (A.sign_flip(), -OWN),
        (A.sign_flip("mean"), [-MU, -MU]),
        (A.ipm(2.0), [-2 * MU] * 2),
        (A.alie(-1.5), [MU - 1.5 * SIGMA] * 2),
        (A.mimic(2), [HONEST[1]] * 2),
        (A.mimic(3), [HONEST[2]] * 2),  # client 3 is hostile
        (A.scaled(-3.0), -3 * OWN),
    ],
    ids=repr,
)
def test_attacks_by_hand(attack: Any, want: Any) -> None:
    w, info = attacked(attack)
    assert w == pytest.approx((HONEST.sum() + np.sum(want)) / 5, abs=1e-6)
    assert info["adversaries"].tolist() == [False, True, False, True, False]
    assert info["robustness"] == pytest.approx(abs(w - MU) / SIGMA, rel=1e-5)


def test_the_strength_of_alie_is_that_of_the_paper() -> None:
    """n = 5, f = 2: s = 1, so Phi(z) = 2/3."""
    z = 0.4307273
    assert attacked(A.alie())[0] == pytest.approx((HONEST.sum() + 2 * (MU - z * SIGMA)) / 5, abs=1e-5)


def test_an_attack_that_is_chosen_against_the_rule() -> None:
    """Against the median, a small z keeps the attack inside; against the mean, the largest moves most."""
    candidates = [0.1, 1.0, 50.0]
    for rule in (None, ROBUST(R.median()), ROBUST(R.multi_krum(2))):
        alone = [attacked(A.ipm(tau), rule)[0] for tau in candidates]
        best = max(alone, key=lambda w: abs(w - MU))
        assert attacked(A.ipm(best_of=candidates), rule)[0] == pytest.approx(best)


def test_noise_and_nan() -> None:
    means = [attacked(A.gaussian(2.0))[0], attacked(A.gaussian(4.0))[0]]
    small, large = (5 * w - HONEST.sum() for w in means)
    assert large == pytest.approx(2 * small, rel=1e-4) and abs(small) < 20
    assert np.isnan(attacked(A.nan())[0])
    assert attacked(A.nan(), on_nonfinite="drop_client")[0] == pytest.approx(MU)
    assert attacked(A.nan(), ROBUST(R.median()))[0] == pytest.approx(1.0)


def test_a_share_of_the_clients() -> None:
    """round(share N) of them, the same in all rounds; 0 of them change nothing but rounding."""
    sim = simulate(cohort_size=3, sources=[A.share(0.4, A.scaled(2.0))])
    _, infos = rounds(sim, 12)
    hostile = {int(i) for info in infos for i in info["cohort"][info["adversaries"]]}
    honest = {int(i) for info in infos for i in info["cohort"][~info["adversaries"]]}
    assert len(hostile) == 2 and not hostile & honest
    _, others = rounds(simulate(sources=[A.share(0.4, A.scaled(2.0), seed=3)]), 1)
    assert {int(i) for i in others[0]["cohort"][others[0]["adversaries"]]} != hostile
    assert "Source(adversaries, share=0.4, seed=0, attack=scaled)" in repr(sim) and "mean" not in repr(sim)
    assert "median" in repr(simulate(aggregation=ROBUST(R.median()), dropout=0.1))
    none = first(sources=[A.share(0, A.scaled(2.0))])[0]
    assert none == pytest.approx(first()[0], rel=1e-6)


# --- data -------------------------------------------------------------------------------------------------------------


def pictures() -> tuple[fd.FederatedData, fd.Model]:
    rng = np.random.default_rng(0)
    clients = [(rng.uniform(size=(n, 6, 6, 1)).astype(np.float32), rng.integers(0, 3, n)) for n in (4, 6, 5)]
    apply = lambda w, x: x.reshape(len(x), -1) @ w  # noqa: E731
    return fd.FederatedData.from_clients(clients, test=clients[0]), fd.Model(lambda key: jnp.zeros((36, 3)), apply)


def test_examples_of_adversaries_by_hand() -> None:
    """The same as honest training on data that were changed before."""
    data, model = pictures()
    options = {"local": fd.LocalTraining(epochs=2, batch_size=10, lr=0.1), "cohort_size": 3}
    x, y = data.x.copy(), data.y.copy()
    rows = slice(int(data.offsets[1]), int(data.offsets[1]) + 6)
    for attack, changed_x, changed_y in (
        (A.label_flip(classes=3), x, y),
        (A.label_flip([(0, 2)]), x, y),
        (A.backdoor(2, size=2, value=3.0, poisoned=1.0), x.copy(), y),
    ):
        new_y = changed_y.copy()
        if attack.name == "backdoor":
            new_y[rows], changed_x[rows, -2:, -2:] = 2, 3.0
        elif attack.recipe.arguments["classes"]:
            new_y[rows] = 2 - y[rows]
        else:
            new_y[rows] = np.where(y[rows] == 0, 2, y[rows])
        parts = [(changed_x[o : o + n], new_y[o : o + n]) for o, n in zip(data.offsets, data.sizes, strict=True)]
        honest = fd.FederatedData.from_clients(parts, test=(data.x_test, data.y_test))
        want, _ = rounds(fd.Simulation(model, honest, fd.algorithms.fedavg(), **options), 2)
        sim = fd.Simulation(model, data, fd.algorithms.fedavg(), sources=[A.clients([1], attack)], **options)
        got, (info, _) = rounds(sim, 2)
        assert_close(got.params, want.params)
        assert info["adversaries"].tolist() == [False, True, False] and "robustness" not in info
        if attack.name == "backdoor":
            triggered = data.x_test.copy()
            triggered[:, -2:, -2:] = 3.0
            hits = (triggered.reshape(4, -1) @ np.asarray(got.params)).argmax(1) == 2
            assert A.attack_success(sim, got, attack) == pytest.approx(hits[data.y_test != 2].mean())
            louder = [A.clients([1], A.backdoor(2, 2, 3.0, 1.0, factor=2.0))]
            alone = [A.clients([1], A.scaled(2.0)), fd.sources.Source("same")]
            scaled = [rounds(fd.Simulation(model, d, fd.algorithms.fedavg(), sources=s, **options), 1)[0]
                      for d, s in ((data, louder), (honest, alone))]  # fmt: skip
            assert_close(scaled[0].params, scaled[1].params)


def test_test_examples_of_adversaries_are_as_stored() -> None:
    data, model = pictures()
    data = data.with_client_tests()
    liars = [A.clients([0, 1], A.label_flip(classes=3))]
    honest, lying = (fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=3, sources=s) for s in ([], liars))
    state, _ = rounds(honest, 2)
    want, got = (sim.evaluate_clients(state) for sim in (honest, lying))
    assert {name: values.tolist() for name, values in got.items()} == {name: v.tolist() for name, v in want.items()}


# --- with everything else ---------------------------------------------------------------------------------------------

PLACES = {
    "two devices": {"mesh": lambda: fd.clients_mesh(jax.devices()[:2])},
    "lanes": {"lanes": 3},
    "host": {"stream": True, "bank": "host"},
}


@pytest.mark.parametrize("algorithm", ["scaffold", thorough("fedavg"), thorough("mime"), thorough("feddc")])
@pytest.mark.parametrize("place", [*PLACES])
def test_places_make_no_difference(algorithm: str, place: str) -> None:
    """With lying clients, a random order, failures and late updates, up to rounding."""
    data, model = of_sizes([3, 9, 14, 4, 7, 5], test=5), mlp()
    chosen = {
        "scaffold": fd.algorithms.scaffold(weighting="uniform"),
        "fedavg": fd.algorithms.fedavg(),
        "mime": fd.algorithms.mime(),
        "feddc": fd.algorithms.feddc(0.1),
    }[algorithm]
    options: dict[str, Any] = {
        "local": fd.LocalTraining(epochs=1, batch_size=4, lr=0.1),
        "cohort_size": 5,
        "dropout": 0.2,
        "sources": [A.share(0.34, A.alie(-1.0))],
        "aggregation": ROBUST(R.trimmed_mean(1), [R.nnm(1), R.bucketing(1)]),
    }
    one = fd.Simulation(model, data, chosen, mesh=fd.clients_mesh(jax.devices()[:1]), lanes=1, **options)
    other = {name: value() if callable(value) else value for name, value in PLACES[place].items()}
    two = fd.Simulation(model, data, chosen, **({"mesh": fd.clients_mesh(jax.devices()[:1])} | options | other))
    (a, infos), (b, others) = rounds(one, 3), rounds(two, 3)
    assert_close(a.params, b.params, 1e-4, 1e-6)
    for x, y in zip(infos, others, strict=True):
        assert_close(x["robustness"], y["robustness"], 1e-3, 1e-4)
        np.testing.assert_array_equal(x["adversaries"], y["adversaries"])


def test_bad_input() -> None:
    def message(**options: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            simulate(**options)
        return str(error.value)

    assert "f of krum must be less than half of 5 messages, got 3" in message(aggregation=ROBUST(R.krum(3)))
    left = message(aggregation=ROBUST(R.krum(2), [R.bucketing(2)]))
    assert "f of krum must be less than half of the 3 messages" in left
    weighted = fd.algorithms.scaffold(weighting="examples")
    assert 'pass weighting="uniform"' in message(algorithm=weighted, aggregation=ROBUST(R.median()))
    importance = fd.participation.importance([1.0] * 5)
    assert "importance" in message(participation=importance, aggregation=ROBUST(R.median()))
    groups = fd.topology.groups([0, 0, 1, 1, 1])
    assert "one server" in message(topology=groups, aggregation=ROBUST(R.median()))
    assert "one server" in message(topology=groups, sources=[A.share(0.2, A.alie())])
    centred = ROBUST(R.centered_clipping(1.0))
    assert "whose clients send two" in message(algorithm=fd.algorithms.mime(), aggregation=centred)
    for call in (
        lambda: ROBUST(R.median),
        lambda: ROBUST(R.median(), R.nnm(1)),
        lambda: ROBUST(R.median(), parts="dc"),
        lambda: A.share(1.5, A.alie()),
        lambda: A.share(0.2, R.median()),
        lambda: A.clients([-1], A.alie()),
        lambda: A.ipm(best_of=2.0),
        lambda: A.label_flip(),
        lambda: A.backdoor(-1),
    ):
        with pytest.raises(ConfigurationError):
            call()
    with pytest.raises(ConfigurationError, match="this message has"):
        simulate(aggregation=ROBUST(R.krum(1), parts=["dc"])).init(jax.random.key(0))
        sim = simulate(aggregation=ROBUST(R.krum(1), parts=["dc"]))
        sim.round_fn(sim.init(jax.random.key(0)))


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"aggregation": ROBUST(R.Rule(lambda s, stack, key: stack.each, name="own"))},
            r"return \(message, state\), got",
        ),
        (
            {"aggregation": ROBUST(R.Rule(lambda s, stack, key: (stack.each, s)))},
            "combine of rule .* shapes of a message",
        ),
        ({"sources": [A.share(0.4, A.Attack(lambda seen: jnp.zeros(3)))]}, "send of attack .* shapes of a message"),
        ({"sources": [A.clients([1, 5], A.alie())]}, r"ids of adversaries must be in 0..4, got 5"),
    ],
    ids=["a rule without a state", "a rule with all messages", "an attack", "a client that does not exist"],
)
def test_rules_and_attacks_are_checked_in_a_round(options: dict, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        rounds(simulate(**options), 1)


def test_messages_that_do_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedjax_drift.simulation import validate

    monkeypatch.setattr(validate, "memory_of", lambda mesh: 40.0)
    with pytest.raises(ConfigurationError, match="room for at most 5 clients, got 5|at most 4 clients"):
        monkeypatch.setattr(validate, "memory_of", lambda mesh: 36.0)
        simulate(aggregation=ROBUST(R.median()))
