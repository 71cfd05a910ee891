"""Tests of the FedNova that notebooks/03_own_algorithm.ipynb defines.

Its cell must be short, and its results must be equal to those computed by hand. The notebook itself runs the contract
tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from small import models_after, quadratics

import fedjax_drift as fd

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "03_own_algorithm.ipynb"


def cell() -> str:
    """Returns the source of the cell that defines the algorithm. There must be one such cell."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (source,) = [text for c in cells if "def fednova(" in (text := "".join(c["source"]))]
    return source


@pytest.fixture(scope="module")
def fednova():
    scope: dict = {"fd": fd}
    exec(compile(cell(), NOTEBOOK.name, "exec"), scope)
    return scope["fednova"]


def test_the_cell_is_short() -> None:
    assert len(cell().splitlines()) <= 40


def one_round(algorithm) -> tuple[float, dict]:
    """Runs one round from w = 0 and returns w and info. The targets are 2 and 8.

    The clients have 1 and 3 examples, and batches have one example. So they make 1 and 3 steps with learning rate 1/2,
    and D = 1 and 7.
    """
    data, model = quadratics([2.0, 8.0], [1, 3])
    sim = fd.Simulation(model, data, algorithm, local=fd.LocalTraining(batch_size=1, lr=0.5), cohort_size=2)
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    return float(state.params), info


def test_one_round_by_hand(fednova) -> None:
    w, info = one_round(fednova())
    assert info["tau"].tolist() == [1, 3] and float(info["tau_eff"]) == pytest.approx((1 + 3 * 3) / 4)
    assert w == pytest.approx(2.5 * (1 / 1 + 3 * 7 / 3) / 4)
    assert one_round(fednova(server_lr=0.5))[0] == pytest.approx(w / 2)


def test_with_equal_numbers_of_steps_it_equals_fedavg(fednova) -> None:
    assert models_after(fednova()) == pytest.approx(models_after(fd.algorithms.fedavg()))


def test_bad_input(fednova) -> None:
    with pytest.raises(ValueError, match="server_lr must be a finite number > 0, got 0"):
        fednova(server_lr=0)
    with pytest.raises(ValueError, match="fednova needs plain local SGD"):
        models_after(fednova(), momentum=0.9)
