"""What several files of tests share: the smallest problems, and the choice of cases for thorough tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.types import ServerState


def first_of_each(cases: Sequence[tuple]) -> list:
    """Returns parameters of a test. All cases of an algorithm but the first are for thorough tests."""
    first = {case[0]: i for i, case in reversed([*enumerate(cases)])}
    return [case if first[case[0]] == i else thorough(*case) for i, case in enumerate(cases)]


def thorough(*values: Any) -> Any:
    """Returns a parameter of a test that is for thorough tests."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@fd.sources.rule
def forgetting(every: int) -> fd.sources.Source:
    """A client does not report in every ``every``-th round in which it is selected."""

    def select(selected: jax.Array, cohort: Any, moment: Any) -> Any:
        return cohort.without((selected[cohort.clients.id] + 1) % every == 0)

    def after(selected: jax.Array, outcome: Any, moment: Any) -> tuple[jax.Array, dict]:
        forgot = outcome.clients.id == moment.num_clients
        return selected.at[outcome.drawn].add(1, mode="drop"), {"forgot": forgot.sum()}

    return fd.sources.Source(
        "forgetting", init=lambda moment: jnp.zeros(moment.num_clients, int), select=select, after=after
    )


def _logits(w: jax.Array, x: jax.Array) -> jax.Array:
    z = x[:, 1] * (w - x[:, 0])
    return jnp.stack([z, jnp.zeros_like(z)], 1)


# One model for all tests, so that algorithms that differ only in numbers share a program.
QUADRATIC = fd.Model(lambda key: jnp.zeros(()), _logits, loss=lambda z, y: z[:, 0] ** 2 / 2)


def rounds(sim: fd.Simulation, number: int, seed: int = 0) -> tuple[ServerState, list[dict]]:
    """The state after some rounds, and the info of each, as NumPy arrays."""
    state, infos = sim.init(jax.random.key(seed)), []
    for _ in range(number):
        state, info = sim.round_fn(state)
        infos.append(jax.device_get(info))
    return state, infos


def random_clients(sizes: Sequence[int], features: int, classes: int, seed: int = 0) -> list[tuple]:
    """Random inputs, float32 [n, features], and labels for clients of these sizes."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, features)).astype(np.float32), rng.integers(0, classes, n)) for n in sizes]


def assert_close(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def quadratics(targets, sizes=None, curvatures=None) -> tuple[fd.FederatedData, fd.Model]:
    """F_i(w) = h_i (w - a_i)^2 / 2. All examples of client i are (a_i, sqrt(h_i)), so all batches have equal gradients.

    The second logit is 0 and all labels are 0. So an example is classified correctly if w >= a_i.
    """
    N = len(targets)
    rows = zip(targets, curvatures or [1.0] * N, sizes or [1] * N, strict=True)
    clients = [(np.tile(np.float32([a, h**0.5]), (n, 1)), np.zeros(n, np.int32)) for a, h, n in rows]
    return fd.FederatedData.from_clients(clients, test=clients[0]), QUADRATIC


def federate(algorithm, data_model=None, cohort_size=None, **local) -> fd.Simulation:
    data, model = data_model or quadratics([2.0, 8.0], [1, 3])
    local = fd.LocalTraining(**{"epochs": 2, "batch_size": 10, "lr": 0.5} | local)
    one_device = fd.clients_mesh(jax.devices()[:1])  # one device compiles faster
    return fd.Simulation(
        model, data, algorithm, local=local, cohort_size=cohort_size or data.num_clients, mesh=one_device
    )


def states_after(sim: fd.Simulation, rounds: int, start: float = 0.0) -> list[ServerState]:
    states = [sim.init(jax.random.key(0), params=jnp.asarray(start))]
    for _ in range(rounds):
        states.append(sim.round_fn(states[-1])[0])
    return states


def models_after(algorithm, rounds=2, data_model=None, start=0.0, **local) -> list[float]:
    """The global models after the first rounds, from ``start``."""
    return models_of(federate(algorithm, data_model, **local), rounds, start)


def models_of(sim: fd.Simulation, rounds: int, start: float = 0.0) -> list[float]:
    return [float(state.params) for state in states_after(sim, rounds, start)[1:]]


# --- a small network, and clients of different sizes -----------------------------------------------------

FEATURES, CLASSES = 6, 4


def mlp() -> fd.Model:
    """A small network. Its `apply` counts how often it is traced."""

    def init(key: jax.Array) -> dict:
        a, b = jax.random.split(key)
        return {"a": jax.random.normal(a, (FEATURES, 8)), "b": jax.random.normal(b, (8, CLASSES))}

    def apply(params: dict, x: jax.Array) -> jax.Array:
        apply.traces += 1  # type: ignore[attr-defined]
        return jnp.tanh(x @ params["a"]) @ params["b"]

    apply.traces = 0  # type: ignore[attr-defined]
    return fd.Model(init, apply)


def of_sizes(sizes: Sequence[int], test: int) -> fd.FederatedData:
    """Clients with random examples, and this number of test examples."""
    *clients, tests = random_clients([*sizes, test], FEATURES, CLASSES)
    return fd.FederatedData.from_clients(clients, test=tests)
