"""Compares the FedAvg family with the NumPy reference of `slow` after every round.

The clients have different numbers of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import slow
from small import first_of_each

import fedjax_drift as fd
from fedjax_drift.local import shuffle

SIZES, FEATURES, CLASSES = (3, 10, 7, 25, 1, 16), 5, 3
COHORTS = [(5, 1, 4), (0, 3, 2), (3, 1, 0), (4, 2, 5), (1, 3, 5), (0, 4, 3)]  # given cohorts compile faster
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.2, "lr_decay": 0.9}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # algorithm, hyper-parameters, changes to LOCAL
CASES: list[Case] = [
    ("fedavg", {}, {}),
    ("fedavg", {"weighting": "uniform", "server_lr": 0.7}, {"momentum": 0.9, "lr": 0.1}),
    ("fedprox", {"mu": 0.3}, {}),
    ("fedprox", {"mu": 1.0, "server_lr": 1.3}, {"momentum": 0.5, "weight_decay": 0.1, "clip_norm": 0.5}),
    ("fedavgm", {"server_lr": 0.5}, {}),
    ("fedavgm", {"beta": 0.7, "damped": True, "weighting": "uniform"}, {"weight_decay": 0.1, "clip_norm": 0.5}),
    ("fedadam", {"server_lr": 0.1, "tau": 1e-2}, {}),
    ("fedyogi", {"server_lr": 0.1, "tau": 1e-2, "b1": 0.5, "b2": 0.8, "weighting": "uniform"}, {}),
    ("fedadagrad", {"server_lr": 0.1, "tau": 1e-2}, {"optimizer": optax.scale_by_adam(), "lr": 0.02}),
]


def case_id(case: Case) -> str:
    algorithm, hyperparameters, changes = case
    shown = hyperparameters | changes | ({"optimizer": "adam"} if "optimizer" in changes else {})
    return "-".join([algorithm, *(f"{key}={value}" for key, value in shown.items())])


RUNS = [(*case, np.float64, 1e-9) for case in CASES] + [(*case, np.float32, 1e-5) for case in CASES[::3]]


def label_skewed_clients(dtype: type) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    mix = rng.dirichlet(np.full(CLASSES, 0.5), len(SIZES))
    centres = rng.normal(size=(CLASSES, FEATURES))
    labels = [rng.choice(CLASSES, size=n, p=p) for n, p in zip(SIZES, mix, strict=True)]
    return [((centres[y] + rng.normal(size=(len(y), FEATURES))).astype(dtype), y) for y in labels]


def library_order(key: jax.Array, t: int, i: int, epoch: int, sizes: Sequence[int] = SIZES) -> np.ndarray:
    """Returns the order in which client i reads its examples.

    The NumPy reference takes nothing else from the library.
    """
    _, round_key = jax.random.split(jax.random.fold_in(key, t))
    client_key = jax.random.fold_in(round_key, i)
    shuffle_key, _ = jax.random.split(jax.random.fold_in(client_key, epoch))
    return np.asarray(shuffle(shuffle_key, jnp.int32(sizes[i]), jnp.int32(max(sizes)), max(sizes)))[: sizes[i]]


def rounds_of(sim: fd.Simulation, cohorts: Sequence[Sequence[int]]) -> tuple[jax.Array, list[Any], list[Any]]:
    """Runs rounds with these cohorts. Returns the key, and the global models and the infos of all rounds."""
    state = sim.init(jax.random.key(0))
    key, models, infos = state.key, [], []
    for cohort in cohorts:
        state, info = sim.round_fn(state, cohort=cohort)
        models.append(jax.device_get(state.params))
        infos.append(info)
    return key, models, infos


@pytest.mark.parametrize(
    "algorithm, hyperparameters, changes, dtype, tolerance",
    first_of_each(RUNS),
    ids=[f"{case_id(run[:3])}-{run[3].__name__}" for run in RUNS],
)
def test_the_global_model_matches_the_numpy_reference(
    algorithm: str, hyperparameters: dict[str, Any], changes: dict[str, Any], dtype: type, tolerance: float
) -> None:
    options = LOCAL | changes
    with jax.enable_x64(dtype == np.float64):
        clients = label_skewed_clients(dtype)
        rng = np.random.default_rng(1)
        params: dict[str, np.ndarray] = {
            "w": rng.normal(size=(FEATURES, CLASSES)).astype(dtype),
            "b": rng.normal(size=CLASSES).astype(dtype),
        }
        sim = fd.Simulation(
            fd.Model(init=lambda key: jax.tree.map(jnp.asarray, params), apply=lambda p, x: x @ p["w"] + p["b"][None]),
            fd.FederatedData.from_clients(clients),
            getattr(fd.algorithms, algorithm)(**hyperparameters),
            local=fd.LocalTraining(**options),
            cohort_size=len(COHORTS[0]),
            mesh=fd.clients_mesh(jax.devices()[:1]),
        )
        key, models, _ = rounds_of(sim, COHORTS)
        assert models[-1]["w"].dtype == dtype

        local = slow.Local(**options | ({"optimizer": slow.adam} if "optimizer" in options else {}))
        federation = slow.Federation(clients, COHORTS, lambda *which: library_order(key, *which), local)
        wanted = slow.simulate(getattr(slow, algorithm), params, federation, **hyperparameters)

    for t, (model, want) in enumerate(zip(models, wanted, strict=True)):
        error = np.linalg.norm(slow.pack(model) - slow.pack(want)) / np.linalg.norm(slow.pack(want))
        assert error < tolerance, f"after round {t}, cohort {COHORTS[t]}: relative error {error:.1e}"
