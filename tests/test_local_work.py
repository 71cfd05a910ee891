"""A given number of local steps, and learning rates that are functions of the round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import assert_close, thorough
from small import rounds as several

import fedjax_drift as fd

SIZES, K, STEPS = [3, 10, 7, 25, 1, 16], 4, 7
RNG = np.random.default_rng(0)
ROWS = [(RNG.normal(size=(n, 4)).astype(np.float32), RNG.integers(0, 3, n)) for n in SIZES]
DATA, MODEL = fd.FederatedData.from_clients(ROWS, test=ROWS[3]), fd.models.linear((4,), 3)


def simulate(algorithm=None, devices: int = 1, **options) -> fd.Simulation:
    options = {"local": fd.LocalTraining(steps=STEPS, batch_size=4, lr=0.2)} | options
    algorithm = fd.algorithms.scaffold() if algorithm is None else algorithm
    mesh = fd.clients_mesh(jax.devices()[:devices])
    return fd.Simulation(MODEL, DATA, algorithm, cohort_size=K, mesh=mesh, **options)


def rounds(sim: fd.Simulation, n: int = 3) -> tuple[tuple, dict]:
    """The variables of server and clients after some rounds, and the last info."""
    state, infos = several(sim, n)
    return (state.server, state.clients), infos[-1]


def test_a_number_of_steps_is_so_many_steps_of_enough_epochs() -> None:
    """Seven epochs have at least seven steps for every client. Stopped after seven, they are the same steps."""
    scaffold = fd.algorithms.scaffold()

    def stopped(server, client, work: fd.Work):
        return scaffold.client_update(server, client, work._replace(num_steps=jnp.minimum(STEPS, work.num_steps)))

    by_epochs = fd.LocalTraining(epochs=STEPS, batch_size=4, lr=0.2)
    expected, _ = rounds(simulate(scaffold._replace(client_update=stopped), local=by_epochs))
    state, info = rounds(simulate())
    assert_close(state, expected)
    assert info["client_steps"].tolist() == [STEPS] * K
    assert info["steps"] == info["executed_steps"] == K * STEPS


def test_stragglers_stop_before_the_last_step() -> None:
    _, info = rounds(simulate(stragglers=0.6))
    assert ((info["client_steps"] >= 1) & (info["client_steps"] <= STEPS)).all()
    assert (info["client_steps"] < STEPS).any()


@pytest.mark.parametrize(("steps", "parts"), [(3, 3), thorough(25, 10)])
def test_drift_is_measured_after_every_tenth_of_the_steps(steps, parts) -> None:
    local = fd.LocalTraining(steps=steps, batch_size=4, lr=0.2)
    _, info = rounds(simulate(fd.algorithms.fedavg(), local=local, measure="updates"), 1)
    assert info["update_norm"].shape == (K, parts)
    sim = simulate(fd.algorithms.fedavg(), local=local)
    start = sim.init(jax.random.key(0))
    for part in (0, parts - 1):  # the norm is that of the model after so many steps
        done = steps * (part + 1) // parts
        short = simulate(fd.algorithms.fedavg(), local=fd.LocalTraining(steps=done, batch_size=4, lr=0.2))
        one, _ = short.round_fn(start, cohort=info["cohort"][:1])
        D = jax.tree.map(jnp.subtract, one.params, start.params)
        np.testing.assert_allclose(optax.tree.norm(D), info["update_norm"][0, part], rtol=1e-5)


@pytest.mark.parametrize("variate_lr", ["current", thorough("initial")])
def test_a_schedule_of_the_learning_rate(variate_lr) -> None:
    schedule = optax.cosine_decay_schedule(0.2, 10)
    local = fd.LocalTraining(lr=schedule, batch_size=4)
    algorithm = fd.algorithms.scaffold(variate_lr=variate_lr)
    sim = simulate(algorithm, local=local)
    state = sim.init(jax.random.key(0))
    for t in range(3):
        constant = simulate(algorithm, local=fd.LocalTraining(lr=float(schedule(t)), batch_size=4))
        expected, _ = constant.round_fn(state)
        state, info = sim.round_fn(state)
        assert float(info["lr"]) == pytest.approx(float(schedule(t)))
        if t == 0 or variate_lr == "current":
            assert_close(state.server, expected.server, atol=1e-7)
    other = simulate(local=fd.LocalTraining(lr=optax.cosine_decay_schedule(0.2, 10), batch_size=4))
    same = simulate(local=local)
    assert other.executor.programs.compiled is same.executor.programs.compiled
    identities = [simulate(local=fd.LocalTraining(lr=lr)).specification.identity["local.lr"] for lr in (
        schedule, optax.cosine_decay_schedule(0.2, 10), optax.cosine_decay_schedule(0.2, 11)
    )]  # fmt: skip
    assert identities[0] == identities[1] != identities[2]
    assert "cosine_decay_schedule" in repr(local) and "lr" not in same.settings


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (fd.algorithms.fedavg, {}),
        thorough(fd.algorithms.fedeve, {}),  # its clients use the server learning rate, too
        thorough(fd.algorithms.fedexp, {"eps": optax.linear_schedule(0.1, 0.01, 3)}),  # which is reported
        thorough(fd.algorithms.fedprox, {"mu": lambda t: 0.1 / (1.0 + t)}),
        thorough(fd.algorithms.partly_shared, {}),
    ],
)
def test_numbers_of_an_algorithm_may_be_schedules(make, options) -> None:
    """A round is that of the algorithm with the values of this round."""
    if make is fd.algorithms.partly_shared:
        make = lambda server_lr: fd.algorithms.partly_shared(fd.algorithms.fedavg(server_lr), "bias")  # noqa: E731
    schedules = options or {"server_lr": optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 10)}
    sim = simulate(make(**schedules))
    state = sim.init(jax.random.key(0))
    for t in range(4):
        values = {name: float(schedule(t)) or 1e-30 for name, schedule in schedules.items()}
        expected, other = simulate(make(**values)).round_fn(state)
        state, info = sim.round_fn(state)
        assert_close((state.server, state.clients), (expected.server, expected.clients))
        assert info.keys() == other.keys()


def test_bad_local_work() -> None:
    for make, message in (
        (lambda: fd.LocalTraining(steps=3, epochs=2), "epochs must be left out if steps are given, got 2 epochs"),
        (lambda: fd.LocalTraining(lr=lambda t: "a"), "a function of the round that returns a number"),
        (lambda: fd.LocalTraining(lr=lambda: 1.0), "got one that fails"),
        (lambda: fd.LocalTraining(lr=lambda t: jnp.ones(2)), r"a floating scalar for every round, got float32\[2\]"),
        (lambda: fd.LocalTraining(lr=lambda t: t), "a floating scalar for every round, got int32"),
        (lambda: fd.algorithms.fedavg(server_lr=lambda t: "a"), "server_lr must be a number, or a function of the"),
        (lambda: fd.algorithms.fedavg(server_lr=lambda t: -1.0 + 0 * t), "server_lr must be a finite number > 0"),
        (lambda: simulate(fd.algorithms.fedrep()), "fedrep needs at least 2 epochs, got 7 steps"),
        (lambda: simulate(fd.algorithms.ditto(personal_epochs=2)), "ditto needs at least 1 epochs, got 7 steps"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.thorough
def test_optimizers_by_name() -> None:
    run = "--dataset synthetic:num_clients=4 --algorithm fedavg --cohort 2 --rounds 2 --lr 0.01"
    for name in ("sgd:momentum=0.5", "adamw:weight_decay=0.1", "muon"):
        (sim,) = fd.parse_run(f"{run} --steps 3 --optimizer {name}").simulations.values()
        assert sim.local.steps == 3
        state, _ = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
        before = sim.evaluate(sim.init(jax.random.key(0)))["loss"]
        assert sim.evaluate(state)["loss"] < before


def test_schedules_by_name() -> None:
    run = "--dataset synthetic:num_clients=4 --algorithm fedavg --cohort 2 --rounds 4 --lr 0.4 --lr-schedule"
    for name, rates in (
        ("step:every=2,factor=0.5", [0.4, 0.4, 0.2, 0.2]),
        ("cosine:decay_steps=2", [0.4, 0.2, 0.0, 0.0]),
        ("warmup_cosine:1,3", [0.0, 0.4, 0.2, 0.0]),
    ):
        parsed = fd.parse_run(f"{run} {name}")
        (sim,) = parsed.simulations.values()
        assert [float(sim.local.rate(jnp.int32(t))) for t in range(4)] == pytest.approx(rates, abs=1e-6)
        assert (parsed.config["local"]["lr"], parsed.config["local"]["lr_schedule"]) == (0.4, name)
    state, history = sim.run(sim.init(jax.random.key(0)), 2, progress=False)
    assert [record["lr"] for record in history] == pytest.approx([0.0, 0.4])
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        fd.parse_run(f"{run} step:every=0")
