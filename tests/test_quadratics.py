"""Quadratics with different optima and curvatures: the bias that theory has, and the optimum where it is corrected."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

experiment = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "quadratics.py")))
QUADRATICS = experiment.draw()
OPTIMUM = QUADRATICS.optimum
BIAS = np.linalg.norm(QUADRATICS.fixed_point(experiment.LR, experiment.STEPS) - OPTIMUM)


def test_theory_by_hand() -> None:
    # Two clients on a line, two steps of rate 1/2: P = 1 - (1 - H/2)^2 = 1 and 3/4; with mu = 1, A = 3 and 2 and
    # P = (1 - 1/4) 2/3 = 1/2 and (1 - 0) 1/2 = 1/2.
    line = experiment.Quadratics(np.array([[[2.0]], [[1.0]]]), np.array([[0.0], [7.0]]))
    assert line.optimum == pytest.approx(7 / 3)
    assert line.fixed_point(0.5, 1) == pytest.approx(7 / 3)  # a single step has no bias
    assert line.fixed_point(0.5, 2) == pytest.approx(3)
    assert line.fixed_point(0.5, 2, mu=1.0) == pytest.approx(3.5)


@pytest.mark.parametrize(("name", "mu"), [("FedAvg", 0.0), ("FedProx, mu = 1", 1.0), ("FedADC, beta = 0.6", 0.0)])
def test_fixed_points_are_biased_as_theory_says(name, mu) -> None:
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS[name], 20, 60)[-1]
    assert np.linalg.norm(w - QUADRATICS.fixed_point(experiment.LR, experiment.STEPS, mu)) < 1e-4
    assert np.linalg.norm(w - OPTIMUM) > 0.25


def test_a_sampled_fedavg_scatters_about_the_same_fixed_point() -> None:
    # The standard error of the mean of 5,000 rounds, from the means of 250 of them, is 0.04.
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS["FedAvg"], 4, 5000)[50:]
    mean, fixed_point = w.mean(0), QUADRATICS.fixed_point(experiment.LR, experiment.STEPS)
    assert np.linalg.norm(mean - fixed_point) < 0.12
    assert np.linalg.norm(mean - OPTIMUM) > 0.25
    assert np.linalg.norm(w - fixed_point, axis=1).mean() > 1


def test_sharpness_aware_correctors_end_at_a_distance_proportional_to_rho() -> None:
    far, near = (
        experiment.distances(experiment.models(QUADRATICS, experiment.NEWER[name], 4, 200)[-20:], OPTIMUM)
        for name in ("FedSpeed, rho = 0.1", "FedSpeed, rho = 0.01")
    )
    assert far.mean() == pytest.approx(10 * near.mean(), rel=0.05) and far.mean() < 0.05 * BIAS
    w = experiment.models(QUADRATICS, experiment.NEWER["FedNova"], 20, 60)[-1]
    assert np.linalg.norm(w - QUADRATICS.fixed_point(experiment.LR, experiment.STEPS)) < 1e-4


@pytest.mark.parametrize(("cohort_size", "rounds"), [(20, 40), (4, 200)])
@pytest.mark.parametrize("name", ["SCAFFOLD", "VRL-SGD", "FedDyn, alpha = 1", "FedDC, alpha = 1"])
def test_correctors_reach_the_optimum(name, cohort_size, rounds) -> None:
    w = experiment.models(QUADRATICS, experiment.ALGORITHMS[name], cohort_size, rounds)
    assert (experiment.distances(w[-10:], OPTIMUM) < 1e-3 * BIAS).all()
