"""Runs and resumes the leaderboard on a tiny federation, and checks the numbers on its page."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedjax_drift as fd
from experiments.leaderboard import entrants, report, runner

NAME = "tiny"


class Tiny(entrants.Federation):
    def data(self, seed: int) -> fd.FederatedData:
        rng = np.random.default_rng(seed)
        y = np.tile(np.arange(3), 40)
        x = (np.eye(3)[y] + rng.normal(size=(120, 3))).astype(np.float32)
        return fd.FederatedData(x, y, np.full(12, 10), x, y).with_client_tests(seed)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    for name, value in {"SETTINGS": 2, "TUNING_ROUNDS": 2, "ROUNDS": 4, "COHORT": 3, "SEEDS": ((0, 1), (2,))}.items():
        monkeypatch.setattr(entrants, name, value)
    federation = Tiny("tiny", lambda **options: fd.models.linear((3,), 3, **options), None, 0.1)
    names = ("FedAvg", "FedProx", "FedAvgM", "Ditto")
    chosen = {name: entrants.ENTRANTS[name] for name in names}
    for module in (entrants, report):
        monkeypatch.setattr(module, "FEDERATIONS", {NAME: federation})
        monkeypatch.setattr(module, "ENTRANTS", chosen)
    return tmp_path


@pytest.mark.thorough
def test_it_runs_and_resumes_and_writes_a_page(tiny, monkeypatch) -> None:
    said: list[str] = []
    for name in entrants.ENTRANTS:
        runner.run(NAME, name, tiny, False, said.append)
    file = runner.file_of(tiny, NAME, "FedProx")
    result = runner.read(file)
    assert runner.is_complete(result) and result["best"] == max(result["tried"], key=lambda t: t["score"])["setting"]
    assert [(one["partition"], one["seed"]) for one in result["runs"]] == [(0, 0), (0, 1), (1, 2)]
    assert [one["setting"]["lr"] for one in result["tried"]] == [
        one["setting"]["lr"] for one in runner.read(runner.file_of(tiny, NAME, "FedAvg"))["tried"]
    ]
    assert not runner.is_complete(result | {"runs": result["runs"][:2] * 2})  # other seeds than those wanted
    file.write_text(json.dumps(result | {"runs": result["runs"][:2]}))  # as after a kill
    monkeypatch.setattr(runner, "tune", None)
    runner.run(NAME, "FedProx", tiny, False, said.append)
    again = runner.read(file)["runs"][2]
    assert again["series"] == result["runs"][2]["series"] and again["clients"] == result["runs"][2]["clients"]

    lost = runner.read(file_of := runner.file_of(tiny, NAME, "FedAvgM"))  # as if its last run had diverged
    lost["runs"][2]["series"]["loss"][-1] = None
    file_of.write_text(json.dumps(lost))
    report.write(tiny)
    page = (tiny / "README.md").read_text()
    accuracies = [100 * np.mean(one["series"]["accuracy"][-report.LAST :]) for one in result["runs"]]
    (line,) = [line for line in page.splitlines() if line.startswith("| FedProx")]
    assert line.startswith(f"| FedProx | {np.mean(accuracies):.2f} ± ") and page.count("(1 of 3 diverged)") == 1
    assert (tiny / "ranks.png").stat().st_size > 1000 and "4 of 4 combinations" in page


def test_statistics_by_hand() -> None:
    assert report.critical_difference(10, 20) == pytest.approx(3.029, abs=0.001)  # Demsar 2006: q = 3.164


def test_settings_are_drawn_once_and_in_range() -> None:
    for entrant in entrants.ENTRANTS.values():
        settings = entrant.settings("MNIST")
        assert settings == entrant.settings("MNIST") != entrant.settings("CIFAR") and len(settings) == entrants.SETTINGS
        for name, values in {name: [s[name] for s in settings] for name in settings[0]}.items():
            interval = entrant.ranges.get(name, entrant.lr)
            assert all(0.99 * interval.low <= value <= 1.01 * interval.high for value in values)
        entrant.factory(**{name: value for name, value in settings[0].items() if name != "lr"})
