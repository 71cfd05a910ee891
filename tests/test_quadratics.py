"""Simulations of quadratics whose optima and curvatures differ between clients.

Algorithms without correction converge to the biased fixed points that theory predicts. Algorithms that correct drift
converge to the optimum.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small import thorough

import fedjax_drift as fd

experiment = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "quadratics.py")))
QUADRATICS = experiment.draw()
OPTIMUM = QUADRATICS.optimum
BIAS = np.linalg.norm(QUADRATICS.fixed_point(experiment.LR, experiment.STEPS) - OPTIMUM)


def test_fixed_points_by_hand() -> None:
    # Two clients in one dimension, with H = 2 and 1, and two steps with learning rate 1/2. Without a proximal term,
    # P = 1 - (1 - H/2)^2 = 1 and 3/4. With mu = 1, A = 3 and 2, so P = (1 - 1/4) 2/3 = 1/2 and (1 - 0) 1/2 = 1/2.
    line = experiment.Quadratics(np.array([[[2.0]], [[1.0]]]), np.array([[0.0], [7.0]]))
    assert line.optimum == pytest.approx(7 / 3)
    assert line.fixed_point(0.5, 1) == pytest.approx(7 / 3)  # a single step has no bias
    assert line.fixed_point(0.5, 2) == pytest.approx(3)
    assert line.fixed_point(0.5, 2, mu=1.0) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("name", "mu"), [("FedAvg", 0.0), thorough("FedProx, mu = 1", 1.0), thorough("FedADC, beta = 0.6", 0.0)]
)
def test_fixed_points_have_the_bias_that_theory_predicts(name, mu) -> None:
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS[name], 20, 60)[-1]
    assert np.linalg.norm(w - QUADRATICS.fixed_point(experiment.LR, experiment.STEPS, mu)) < 1e-4
    assert np.linalg.norm(w - OPTIMUM) > 0.25


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*not finite")
def test_scaffold_with_local_momentum_needs_its_correction_outside_of_the_momentum() -> None:
    def distance(algorithm: fd.Algorithm) -> float:
        w = experiment.models(QUADRATICS, algorithm, 20, 200, epochs=100, lr=experiment.LR / 10, momentum=0.9)
        return np.linalg.norm(w[-1] - OPTIMUM)

    assert distance(fd.algorithms.scaffold(corrects="model")) < 0.02 and distance(fd.algorithms.fedavg()) > 0.7
    assert not distance(fd.algorithms.scaffold()) < 1e3  # it diverges


@pytest.mark.thorough
def test_fedavg_with_sampled_clients_scatters_about_the_same_fixed_point() -> None:
    # The standard error of the mean over 5,000 rounds is 0.04. It was estimated from the means of blocks of 250 rounds.
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS["FedAvg"], 4, 5000)[50:]
    mean, fixed_point = w.mean(0), QUADRATICS.fixed_point(experiment.LR, experiment.STEPS)
    assert np.linalg.norm(mean - fixed_point) < 0.12
    assert np.linalg.norm(mean - OPTIMUM) > 0.25
    assert np.linalg.norm(w - fixed_point, axis=1).mean() > 1


@pytest.mark.thorough
def test_fedspeed_ends_at_a_distance_proportional_to_rho_and_fednova_at_the_fixed_point_of_fedavg() -> None:
    far, near = (
        experiment.distances(experiment.models(QUADRATICS, experiment.NEWER[name], 4, 200)[-20:], OPTIMUM)
        for name in ("FedSpeed, rho = 0.1", "FedSpeed, rho = 0.01")
    )
    assert far.mean() == pytest.approx(10 * near.mean(), rel=0.05) and far.mean() < 0.05 * BIAS
    w = experiment.models(QUADRATICS, experiment.NEWER["FedNova"], 20, 60)[-1]
    assert np.linalg.norm(w - QUADRATICS.fixed_point(experiment.LR, experiment.STEPS)) < 1e-4


@pytest.mark.thorough
def test_the_fixed_points_of_the_baselines() -> None:
    def last(algorithm, rounds=60):
        return experiment.models(QUADRATICS, algorithm, 20, rounds)[-1]

    biased = QUADRATICS.fixed_point(experiment.LR, experiment.STEPS)
    assert np.linalg.norm(last(experiment.BASELINES["GHBM, tau = 5"], 200) - biased) < 1e-4
    # AdaBest: the optimum of f(w) + (1 - beta) mu / 2 ||w||^2, because w_0 = 0
    H, Ha = QUADRATICS.H.mean(0), np.einsum("nij,nj->i", QUADRATICS.H, QUADRATICS.a) / len(QUADRATICS.a)
    wanted = np.linalg.solve(H + (1 - 0.8) * 0.5 * np.eye(len(H)), Ha)
    assert np.linalg.norm(last(fd.algorithms.adabest(mu=0.5, beta=0.8), 200) - wanted) < 1e-4
    assert np.linalg.norm(wanted - OPTIMUM) > 0.3
    assert np.linalg.norm(last(experiment.BASELINES["Mime, beta = 0"]) - OPTIMUM) < 1e-5
    near, far = (np.linalg.norm(last(fd.algorithms.fedgamma(rho=rho)) - OPTIMUM) for rho in (0.01, 0.1))
    assert far == pytest.approx(10 * near, rel=0.05) and far < 0.05 * BIAS
    assert np.linalg.norm(last(experiment.BASELINES["FedMoSWA"], 300) - OPTIMUM) < 1e-4


@pytest.mark.parametrize(("cohort_size", "rounds"), [thorough(20, 40), (4, 200)])
@pytest.mark.parametrize("name", ["SCAFFOLD", *map(thorough, ("VRL-SGD", "FedDyn, alpha = 1", "FedDC, alpha = 1"))])
def test_drift_correction_converges_to_the_optimum(name, cohort_size, rounds) -> None:
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS[name], cohort_size, rounds)
    assert (experiment.distances(w[-10:], OPTIMUM) < 1e-3 * BIAS).all()
