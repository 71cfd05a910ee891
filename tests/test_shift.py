"""Shifts: what each does to an example, and that a round with a shift is the round of the shifted examples."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import assert_close, thorough
from test_algorithms import small

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.shift import Owner
from fedjax_drift.shift.rule import TESTING, TRAINING
from fedjax_drift.testing import contract_simulation

RNG = np.random.default_rng(0)
SIZES, C = (3, 5, 2, 6), 3
N = len(SIZES)
ROWS = [(RNG.random((n, 5, 5, 1), np.float32), RNG.integers(0, C, n)) for n in SIZES]
DATA = fd.FederatedData.from_clients(ROWS, test_clients=ROWS[::-1])
MODEL, LOCAL = fd.models.linear((5, 5, 1), C), fd.LocalTraining(epochs=2, batch_size=4, lr=0.1)
SWAP = fd.shift.permute_labels(0, [(0, 2)])
IMAGE = RNG.random((5, 6, 2), np.float32)


def seen(shift, t: int = 0, client: int = 1, x=IMAGE, y: int = 0, key: int = 0) -> tuple[np.ndarray, int]:
    """One example after a shift, in a federation of four clients."""
    owner = Owner(jnp.int32(client), N)
    x, y = shift.change(jax.random.key(key), jnp.int32(t), owner, jnp.asarray(x), jnp.asarray(y))
    return np.asarray(x), int(y)


def simulate(data, algorithm=None, devices: int = 1, **options) -> fd.Simulation:
    mesh = fd.clients_mesh(jax.devices()[:devices])
    options = {"local": LOCAL, "cohort_size": 3, "mesh": mesh} | options
    return fd.Simulation(MODEL, data, fd.algorithms.scaffold() if algorithm is None else algorithm, **options)


def started(sim: fd.Simulation) -> fd.ServerState:
    """The first state, with random parameters: those of a linear model are 0, and all predictions alike."""
    state, rng = sim.init(jax.random.key(0)), np.random.default_rng(5)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), state.params)
    return state._replace(server=state.server._replace(params=params))


def materialised(data: fd.FederatedData, t: int = 0, tests: fd.FederatedData | None = None) -> fd.FederatedData:
    """The federation whose stored examples are the shifted ones of round t. tests: that with the test examples."""
    clients = examples_of(data, t, TRAINING)
    return fd.FederatedData.from_clients(clients, test_clients=examples_of(tests or data, t, TESTING))


def examples_of(data: fd.FederatedData, t: int, part: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The shifted examples of every client, by one program. `FederatedData.examples` runs many for each client."""
    x, y, sizes = (data.x, data.y, data.sizes) if part == TRAINING else (data.x_test, data.y_test, data.test_sizes)
    owner, index = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes])
    owners = Owner(jnp.asarray(owner, jnp.int32), data.num_clients)
    change = jax.jit(lambda x, y: data.shifting.examples(jnp.int32(t), owners, jnp.asarray(index), x, y, part))
    cuts = np.cumsum(sizes)[:-1]
    return [*zip(*(np.split(np.asarray(a), cuts) for a in change(x, y.astype(np.int32))), strict=True)]


# --- one example ------------------------------------------------------------------------------------------------------


def test_rotations() -> None:
    square = IMAGE[:, :5]
    for quarter in range(4):
        shift = fd.shift.rotate(360, by=np.arange(N) % 4 / 4)
        np.testing.assert_allclose(seen(shift, client=quarter, x=square)[0], np.rot90(square, quarter), atol=1e-5)
    np.testing.assert_allclose(seen(fd.shift.rotate(180, by="all"))[0], IMAGE[::-1, ::-1], atol=1e-5)
    over_time = fd.shift.rotate_over_time(30, most=90)
    for t, turns in ((0, 0), (3, 1), (7, 1)):
        np.testing.assert_allclose(seen(over_time, t, x=square)[0], np.rot90(square, turns), atol=1e-5)


def test_brightness_blur_and_noise() -> None:
    np.testing.assert_allclose(seen(fd.shift.brightness(0.4), client=1)[0], IMAGE + 0.1, rtol=1e-6)
    np.testing.assert_allclose(
        seen(fd.shift.blur(1e3, by="all"))[0], IMAGE.mean((0, 1), keepdims=True) + 0 * IMAGE, 1e-4
    )
    np.testing.assert_array_equal(seen(fd.shift.blur(1.0), client=0)[0], IMAGE)
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    columns = np.exp(-(distance**2) / 2)
    columns /= columns.sum(1, keepdims=True)
    blurred = np.einsum("ih,hwc,jw->ijc", columns[:5, :5] / columns[:5, :5].sum(1, keepdims=True), IMAGE, columns)
    np.testing.assert_allclose(seen(fd.shift.blur(2.0, by=np.full(N, 0.5)))[0], blurred, rtol=1e-5)
    noisy = np.stack([seen(fd.shift.gaussian_noise(2.0), client=3, key=key)[0] - IMAGE for key in range(200)])
    assert abs(noisy.std() - 2.0 * 3 / N) < 0.02 and abs(noisy.mean()) < 0.02


def test_an_example_has_the_same_noise_in_every_round_and_another_than_its_neighbour() -> None:
    data = DATA.shifted(fd.shift.gaussian_noise(1.0), seed=3)
    first, later = data.examples(3, 0)[0], data.examples(3, 9)[0]
    np.testing.assert_array_equal(first, later)
    noise = first - ROWS[3][0]
    assert len(np.unique(noise.round(5))) == noise.size
    assert not np.allclose(noise, DATA.shifted(fd.shift.gaussian_noise(1.0), seed=4).examples(3)[0] - ROWS[3][0])
    np.testing.assert_array_equal(data.examples(0)[0], ROWS[0][0])
    twice = data.shifted(fd.shift.brightness(1.0)).examples(3)[0] - ROWS[3][0]
    assert twice.std() > 0.5 and twice.mean() > 0.5, "both shifts"


def test_labels_are_exchanged_and_restored() -> None:
    shift = fd.shift.permute_labels([2, 5], [(0, 2), (1, 3)])
    for t, labels in ((0, [0, 1, 2, 3, 4]), (2, [2, 3, 0, 1, 4]), (4, [2, 3, 0, 1, 4]), (5, [0, 1, 2, 3, 4])):
        assert [seen(shift, t, y=y)[1] for y in range(5)] == labels


def noisy_counts(shift, client: int, y: int, n: int = 20_000) -> np.ndarray:
    """How many of n labels y are of each class after a shift of a federation of two clients, for three classes."""
    owner = Owner(jnp.int32(client), 2, num_classes=C)
    keys = jax.random.split(jax.random.key(7), n)
    labels = jax.vmap(lambda key: shift.change(key, jnp.int32(3), owner, jnp.zeros(1), jnp.int32(y))[1])(keys)
    return np.bincount(labels, minlength=C)


@pytest.mark.parametrize(
    ("shift", "transition"),  # the transition matrix of each of two clients
    [
        (fd.shift.noisy_labels(0.3), [[[0.7, 0.15, 0.15], [0.15, 0.7, 0.15], [0.15, 0.15, 0.7]]] * 2),
        (fd.shift.noisy_labels([0.0, 1.0]), [np.eye(3), (1 - np.eye(3)) / 2]),
        (fd.shift.noisy_labels([0.4, 0.1], [(0, 2), (1, 2)]),
         [[[1 - r, 0, r], [0, 1 - r, r], [0, 0, 1]] for r in (0.4, 0.1)]),
        (fd.shift.noisy_labels(0.2, [(0, 1), (1, 2), (2, 0)]), [[[0.8, 0.2, 0], [0, 0.8, 0.2], [0.2, 0, 0.8]]] * 2),
    ],
    ids=["symmetric", "per client", "asymmetric", "pair flipping"],
)  # fmt: skip
def test_noisy_labels_have_the_transition_matrix_of_the_literature(shift, transition) -> None:
    n = 20_000
    for client, y in itertools.product(range(2), range(C)):
        p = np.asarray(transition[client])[y]
        counts = noisy_counts(shift, client, y)
        assert (abs(counts / n - p) <= 5 * np.sqrt(p * (1 - p) / n)).all(), (client, y, counts)


def test_only_training_labels_are_noisy_and_an_example_keeps_its_label() -> None:
    """Also in a round: the labels that a client trains on are those of `FederatedData.examples`."""
    data = DATA.shifted(fd.shift.noisy_labels(0.5), seed=2)
    labels = [data.examples(i)[1] for i in range(N)]
    wrong = np.concatenate(labels) != np.concatenate([y for _, y in ROWS])
    assert 0 < wrong.sum() < len(wrong)
    for i in range(N):
        np.testing.assert_array_equal(data.examples(i, round=7)[1], labels[i])
        np.testing.assert_array_equal(data.examples(i, test=True)[1], ROWS[::-1][i][1])
    noisy = fd.FederatedData.from_clients(
        [(x, y) for (x, _), y in zip(ROWS, labels, strict=True)], (DATA.x_test, DATA.y_test)
    )
    results = []
    for each in (data, noisy):
        sim = simulate(each)
        state = started(sim)
        for _ in range(2):
            state, _ = sim.round_fn(state)
        results.append((state.params, sim.evaluate(state)))
    assert_close(*results, rtol=1e-5, atol=1e-6)
    rates = [simulate(DATA.shifted(fd.shift.noisy_labels(rate))).executor.programs.compiled for rate in (0.1, 0.2)]
    assert rates[0] is rates[1], "another rate compiles nothing"


def test_when_a_shift_is_on() -> None:
    bright = fd.shift.brightness(1.0, by="all")

    def share(shift, t: int) -> list[bool]:
        """Which of 50 examples have the shift in round t."""
        return [bool(seen(shift, t, key=key)[0][0, 0, 0] != IMAGE[0, 0, 0]) for key in range(50)]

    sudden, gradual, recurring = (
        fd.shift.sudden(4, bright),
        fd.shift.gradual(2, 6, bright),
        fd.shift.recurring(3, bright),
    )
    assert [sum(share(sudden, t)) for t in (0, 3, 4, 9)] == [0, 0, 50, 50]
    assert [sum(share(recurring, t)) for t in (0, 2, 3, 5, 6)] == [0, 0, 50, 50, 0]
    shares = [share(gradual, t) for t in (0, 2, 3, 4, 5, 6, 9)]
    assert [sum(s) for s in shares[:2] + shares[-2:]] == [0, 0, 50, 50] and 15 <= sum(shares[3]) <= 35
    for before, after in zip(shares, shares[1:], strict=False):
        assert all(after[i] for i in range(50) if before[i])


@pytest.mark.thorough
def test_mixtures_domains_and_chains() -> None:
    bright, dark = fd.shift.brightness(1.0, by="all"), fd.shift.brightness(-1.0, by="all")

    def change(shift, **where) -> float:
        return float((seen(shift, **where)[0] - IMAGE).mean().round(4))

    mixture = fd.shift.mixture(lambda t: jnp.array([4 - t, t, 0]), fd.shift.none(), bright, dark)
    counts = {t: [change(mixture, t=t, key=key) for key in range(60)] for t in (0, 1, 4)}
    assert set(counts[0]) == {0.0} and set(counts[4]) == {1.0} and set(counts[1]) == {0.0, 1.0}
    assert 5 <= counts[1].count(1.0) <= 26  # 15 expected
    domains = fd.shift.domains(fd.shift.none(), bright, dark)
    assert [change(domains, client=i) for i in range(N)] == [0, 1, -1, 0]
    assert [change(fd.shift.domains(bright, dark, of=[1, 1, 0, 0]), client=i) for i in range(N)] == [-1, -1, 1, 1]
    assert change(fd.shift.chain(bright, bright, dark)) == 1 and change(domains, client=N) == 0


def mixed(p: float, a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    return {label: p * a.get(label, 0) + (1 - p) * b.get(label, 0) for label in a | b}


def both(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    return {i + j: p * q for i, p in a.items() for j, q in b.items()}


# Each shift around two others, and the probabilities of its results, in round 5 and for client 1.
AROUND = {
    "mixture": (lambda a, b: fd.shift.mixture([3, 7], a, b), lambda a, b: mixed(0.3, a, b)),
    "gradual": (lambda a, b: fd.shift.gradual(0, 10, a), lambda a, b: mixed(0.5, a, {0: 1.0})),
    "recurring": (lambda a, b: fd.shift.recurring(5, a), lambda a, b: a),
    "sudden": (lambda a, b: fd.shift.sudden(5, a), lambda a, b: a),
    "domains": (fd.shift.domains, lambda a, b: b),
    "chain": (fd.shift.chain, both),
}


def nested(names: tuple[str, ...], leaf: int = 0) -> tuple[fd.shift.Shift, dict[int, float]]:
    """Shifts inside each other, and the probabilities of the labels that they make of 0. Shift i inside adds 2**i."""
    if not names:
        return (lambda key, t, client, x, y: (x, y + 2**leaf)), {2**leaf: 1.0}
    (a, p), (b, q) = nested(names[1:], 2 * leaf), nested(names[1:], 2 * leaf + 1)
    around, probabilities = AROUND[names[0]]
    return around(a, b), probabilities(p, q)


def test_every_shift_inside_every_other_has_the_product_of_their_probabilities() -> None:
    names = [*itertools.product(AROUND, repeat=2), *itertools.product(("mixture", "gradual"), repeat=3)]
    shifts, expected = zip(*map(nested, names), strict=True)
    zero, owner, n = jnp.zeros(1), Owner(jnp.int32(1), N), 10_000

    def labels(key: jax.Array) -> list[jax.Array]:
        return [shift.change(key, jnp.int32(5), owner, zero, jnp.int32(0))[1] for shift in shifts]

    found = jax.jit(jax.vmap(labels))(jax.random.split(jax.random.key(0), n))
    for each, seen_labels, probabilities in zip(names, found, expected, strict=True):
        counts = np.bincount(seen_labels, minlength=256) / n
        p = np.array([probabilities.get(label, 0.0) for label in range(256)])
        assert (abs(counts - p) <= 5 * np.sqrt(p * (1 - p) / n)).all(), each


def test_the_noise_of_a_shift_does_not_depend_on_the_shifts_around_it() -> None:
    noise = fd.shift.gaussian_noise(1.0, by="all")
    for around in (fd.shift.gradual(0, 1, noise), fd.shift.mixture([1], fd.shift.mixture([1], noise))):
        np.testing.assert_array_equal(seen(around, t=2)[0], seen(noise)[0])
    twice = DATA.shifted(noise, seed=3).shifted(SWAP)
    np.testing.assert_array_equal(
        twice.examples(1)[0], DATA.shifted(fd.shift.chain(noise, SWAP), seed=3).examples(1)[0]
    )


# --- a round ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedlc", thorough("fedgvr"), thorough("ditto"), thorough("lfd"), thorough("fedrep")])
def test_a_round_is_that_of_the_shifted_examples(name) -> None:
    """Also for label counts (FedLC), and for the test set (FedGVR), which has no noise."""
    contract = contract_simulation(small(ALGORITHMS[name]))
    data = contract.data.shifted(fd.shift.gaussian_noise(0.5)).shifted(SWAP)
    plain = materialised(data, tests=contract.data.shifted(SWAP))
    states = []
    for each in (data, plain):
        local = fd.LocalTraining(epochs=2, batch_size=4)
        sim = fd.Simulation(contract.model, each, contract.algorithm, local=local, cohort_size=3, lanes=2)
        state = sim.init(jax.random.key(1))
        for _ in range(2):
            state, _ = sim.round_fn(state)
        states.append(jax.tree.leaves((state.server, state.clients)))
    assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_measures_see_the_shifted_examples() -> None:
    data = DATA.shifted(fd.shift.chain(SWAP, fd.shift.rotate(30, by="all")))
    local = fd.LocalTraining(epochs=2, batch_size=4, lr=2.0)  # so that predictions differ between classes
    shifted, plain = (simulate(each, local=local) for each in (data, materialised_with_test(data)))
    measured = [sim.measure(sim.init(jax.random.key(0))) for sim in (shifted, plain)]
    for name, values in measured[0].items():
        np.testing.assert_allclose(values, measured[1][name], rtol=1e-3, atol=1e-5, err_msg=name)


def materialised_with_test(data: fd.FederatedData, t: int = 0) -> fd.FederatedData:
    """`materialised`, and the global test set is that of round t, which depends on no client."""
    clients, tests = (examples_of(data, t, part) for part in (TRAINING, TESTING))
    return fd.FederatedData.from_clients(clients, test=tuple(map(np.concatenate, zip(*tests, strict=True))))


@pytest.mark.thorough
def test_the_test_set_is_that_of_the_last_round_or_of_the_first() -> None:
    shift = fd.shift.sudden(2, SWAP)
    histories = {}
    for test in ("present", "first", "both"):
        sim = simulate(DATA.shifted(shift, test=test))
        state, histories[test] = sim.run(sim.init(jax.random.key(0)), 4, eval_every=1, progress=False)
        assert sim.evaluate(state)["loss"] == histories[test][-1]["loss"]
    states, params = simulate(DATA.shifted(shift)), []
    state = states.init(jax.random.key(0))
    for _ in range(4):
        state, _ = states.round_fn(state)
        params.append(state.params)
    swapped = np.array([2, 1, 0])[DATA.y_test]
    for t, model in enumerate(params):
        logits = MODEL.apply(model, DATA.x_test)
        first, present = (
            float(MODEL.loss(logits, y).mean()) for y in (DATA.y_test, swapped if t >= 2 else DATA.y_test)
        )
        assert histories["present"][t]["loss"] == pytest.approx(present, rel=1e-5)
        assert histories["first"][t]["loss"] == pytest.approx(first, rel=1e-5)
        assert histories["both"][t]["loss"] == pytest.approx(present, rel=1e-5)
        assert histories["both"][t]["first_loss"] == pytest.approx(first, rel=1e-5)
    assert "first_loss" not in histories["first"][0]


def by_client(key, t, client, x, y):
    return x + 0.3 * client, y


def by_round(key, t, client, x, y):
    return x + 0.1 * t, y


ROTATED = fd.shift.domains(fd.shift.none(), *(fd.shift.rotate(degrees, by="all") for degrees in (90, 180, 270)))
OF_CLIENTS = [by_client, fd.shift.gaussian_noise(1.2), fd.shift.domains(fd.shift.none(), by_round), ROTATED]
NAMES = ["function", "noise", "domains", "rotations"]


@pytest.mark.parametrize("shift", [OF_CLIENTS[0], *map(thorough, OF_CLIENTS[1:])], ids=NAMES)
def test_clients_are_evaluated_on_their_own_shifted_examples(shift) -> None:
    """A shift that depends on the client leaves the global test set as it is."""
    sim = simulate(DATA.shifted(shift), fd.algorithms.ditto(lam=0.1))
    plain = simulate(DATA, fd.algorithms.ditto(lam=0.1))
    state = sim.init(jax.random.key(0))
    for _ in range(3):
        state, _ = sim.round_fn(state)
    assert sim.evaluate(state)["loss"] == pytest.approx(plain.evaluate(state)["loss"], rel=1e-6)
    expected = simulate(materialised(sim.data, 2), fd.algorithms.ditto(lam=0.1)).evaluate_clients(state)
    for name, values in sim.evaluate_clients(state).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_groups_of_rotated_clients_are_tested_on_images_with_their_own_rotation() -> None:
    """Also the held-out examples of a client."""
    data = DATA.shifted(ROTATED)
    other = DATA.shifted(fd.shift.rotate(360, by=np.arange(N) % 4 / 4))
    for i, (x, _) in enumerate(ROWS[::-1]):
        np.testing.assert_allclose(data.examples(i, test=True)[0], np.rot90(x, i, axes=(1, 2)), atol=1e-5)
        np.testing.assert_allclose(data.examples(i)[0], np.rot90(ROWS[i][0], i, axes=(1, 2)), atol=1e-5)
    held_out, plain = (each.with_validation(0.4).examples(3, test=True)[0] for each in (data, DATA))
    np.testing.assert_allclose(held_out, np.rot90(plain, 3, axes=(1, 2)), atol=1e-5)
    np.testing.assert_allclose(data.examples(3)[0], other.examples(3)[0], atol=1e-5)


@pytest.mark.thorough
def test_a_shift_of_the_labels_says_which_domain_an_example_has() -> None:
    """Of two domains, agnostic weighs the one with the larger loss more. The model takes the class from the label."""
    data = DATA.shifted(ROTATED).shifted(lambda key, t, client, x, y: (x, y + C * (client % 2)))
    model = MODEL._replace(
        loss=lambda logits, y: MODEL.loss(logits, y % C),
        scores=lambda logits, y: {"accuracy": logits.argmax(-1) == y % C},
    )
    agnostic = fd.algorithms.agnostic(domains=2, domain=lambda x, y: y // C, domain_lr=0.5)
    sim = fd.Simulation(model, data, agnostic, local=LOCAL, cohort_size=N)
    state, losses = started(sim), []
    for domain in range(2):
        turned = [np.rot90(ROWS[i][0], i, axes=(1, 2)) for i in (domain, domain + 2)]
        y = np.concatenate([ROWS[i][1] for i in (domain, domain + 2)])
        losses.append(float(MODEL.loss(MODEL.apply(state.params, np.concatenate(turned)), y).mean()))
    after, _ = sim.round_fn(state)
    grown = np.exp(0.5 * np.array(losses))
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)
    np.testing.assert_allclose(after.server.weights, grown / grown.sum(), rtol=1e-4)
    assert after.server.counts[-1].tolist() == [SIZES[0] + SIZES[2], SIZES[1] + SIZES[3]]
    # The same with labels that are stored, for which the domains may differ within a client.
    stored = fd.FederatedData.from_clients(examples_of(data, 0, TRAINING))
    sim_of_stored = fd.Simulation(model, stored, agnostic, local=LOCAL, cohort_size=N)
    weights = sim_of_stored.round_fn(started(sim_of_stored))[0].server.weights
    np.testing.assert_allclose(weights, after.server.weights, rtol=1e-4)
    plain = simulate(DATA.shifted(ROTATED), fd.algorithms.fedavg())
    for name, values in plain.evaluate_clients(started(plain)).items():
        np.testing.assert_allclose(sim.evaluate_clients(state)[name], values, rtol=1e-5, err_msg=name)
    assert (data.label_counts() == DATA.label_counts()).all()


def test_a_function_that_ignores_the_client_shifts_the_global_test_set() -> None:
    sim = simulate(DATA.shifted(by_round))
    state = sim.init(jax.random.key(0))._replace(round=jnp.int32(6))
    loss = MODEL.loss(MODEL.apply(state.params, DATA.x_test + 0.5), DATA.y_test).mean()
    assert sim.evaluate(state)["loss"] == pytest.approx(float(loss), rel=1e-5)


# --- combinations -----------------------------------------------------------------------------------------------------


def test_shifted_data_share_the_arrays_on_the_devices() -> None:
    plain, shifted = simulate(DATA), simulate(DATA.shifted(SWAP).redealt())
    assert plain.setup.arrays.rows is shifted.setup.arrays.rows and shifted.data.x is DATA.x


@fd.shift.rule
def darker(amount: float):
    return lambda key, t, client, x, y: (x - amount, y)


def test_a_shift_of_ones_own_with_a_recipe() -> None:
    assert repr(darker(0.25)) == "Shift(darker, amount=0.25)"
    programs = [simulate(DATA.shifted(darker(amount))).executor.programs.compiled for amount in (0.1, 0.2)]
    assert programs[0] is programs[1]
    np.testing.assert_allclose(DATA.shifted(darker(0.25)).examples(0)[0], ROWS[0][0] - np.float32(0.25))


def test_the_command_line_composes_shifts() -> None:
    command = "--dataset synthetic:num_clients=4 --algorithm fedavg --cohort 2 --shift-test both "
    gradual = fd.shift.gradual(2, 4, fd.shift.permute_labels(1, [(0, 2)]))
    for flags, shift in (
        ("--shift brightness:2", fd.shift.brightness(2.0)),
        ("--shift gaussian_noise:0.5,by=all --shift brightness:2 --shift gradual:2,4 --shift permute_labels:0-2,at=1",
         fd.shift.chain(fd.shift.gaussian_noise(0.5, "all"), fd.shift.chain(fd.shift.brightness(2.0), gradual))),
        ("--shift noisy_labels:0.1+0.2+0.3+0.4,pairs=0-1+1-2", fd.shift.noisy_labels(
            [0.1, 0.2, 0.3, 0.4], [(0, 1), (1, 2)])),
        ("--shift domains --shift none --shift brightness:1,all", fd.shift.domains(
            fd.shift.none(), fd.shift.brightness(1.0, by="all"))),
        ("--shift mixture:1+3 --shift none --shift brightness:1,all", fd.shift.mixture(
            [1, 3], fd.shift.none(), fd.shift.brightness(1.0, by="all"))),
    ):  # fmt: skip
        data = fd.parse_run(command + flags).data
        assert repr(data.shifting) == repr(data.shifting._replace(shift=shift, test="both"))
    with pytest.raises(ValueError, match="--shift sudden:3 needs a shift after it, got none"):
        fd.parse_run(command + "--shift sudden:3")


BAD = [
    (lambda: fd.shift.gradual(5, 5, SWAP), "end must be larger than begin, 5, got 5"),
    (lambda: fd.shift.permute_labels(0, [(0, 1), (1, 2)]), "pairs must have each label at most once"),
    (lambda: fd.shift.noisy_labels(1.2), "rate must be a probability in 0..1, got 1.2"),
    (lambda: fd.shift.noisy_labels([0.1, 1.2]), "rate must be a probability in 0..1, or one for each client"),
    (lambda: fd.shift.noisy_labels(0.1, [(0, 1), (0, 2)]), "pairs must map each label at most once"),
    (lambda: fd.shift.noisy_labels(0.1, [(1, 1)]), "and to another label"),
    (lambda: simulate(DATA.shifted(fd.shift.noisy_labels([0.1]))), "rate must have a probability for each of the 4 cl"),
    (lambda: simulate(DATA.shifted(fd.shift.noisy_labels(0.1, [(0, 3)]))), r"pairs must have labels in 0..2, got 3"),
    (lambda: fd.shift.mixture([1.0]), "mixture needs at least 1 shift"),
    (lambda: fd.shift.mixture([1.0, -1.0], SWAP, SWAP), "weights must be 2 numbers >= 0"),
    (lambda: fd.shift.domains(SWAP, of=[0, 1]), r"of must be int \[N\] in 0..0"),
    (lambda: simulate(DATA.shifted(fd.shift.rotate(9, by=[1.0]))), "by must have a strength for each"),
    (lambda: simulate(DATA.shifted(fd.shift.domains(SWAP, of=[0]))), "of must have a domain for each of the 4 clients"),
    (lambda: simulate(DATA.shifted(lambda key, t, client, x, y: x)), r"<lambda> must keep the .* int32\[\]; the value"),
    (lambda: simulate(DATA.shifted(lambda key, t, client, x, y: (x[0], y))), "must keep the shapes"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_shifts(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_shift_of_images_needs_images() -> None:
    flat = fd.FederatedData.from_clients([(np.ones((2, 3), np.float32), np.array([0, 1]))] * 2)
    for shift in (fd.shift.rotate(9), fd.shift.blur(1), fd.shift.rotate_over_time(1)):
        with pytest.raises(ValueError, match=r"needs images \[height, width, channels\], got examples of float32\[3\]"):
            fd.Simulation(fd.models.linear((3,), 2), flat.shifted(shift), fd.algorithms.fedavg(), cohort_size=2)
