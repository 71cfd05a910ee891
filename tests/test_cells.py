"""Tests of experiments/cells.py: a run that is killed continues, and the pages are those of the saved results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import cells, markdown

RESULTS = Path(__file__).parents[1] / "experiments" / "results"
CELLS = [("a", "x"), ("a", "y"), ("b", "x")]
STORED: dict[str, Any] = {
    "list": [{"cell": ["a", "x"], "sum": 7}, {"cell": ["a", "y"], "sum": 7}, {"cell": ["b", "x"], "sum": 7}],
    "objects": {"a": {"x": {"sum": 7}, "y": {"sum": 7}}, "b": {"x": {"sum": 7}}},
}


@pytest.mark.parametrize("form", STORED)
def test_a_killed_run_continues(form, tmp_path, monkeypatch, capsys) -> None:
    computed = []

    def compute(rounds: int, *cell: str) -> cells.Entry:
        if len(computed) == 2 and cell not in computed:
            computed.append(cell)
            raise KeyboardInterrupt
        computed.append(cell)
        return {"cell": cell, "sum": rounds + 3} if form == "list" else {"sum": rounds + 3}

    def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, str]:
        return {"page.md": markdown.table(["cell", "sum"], [[" ".join(c), f"{e['sum']}"] for c, e in found.items()])}

    cell_of = (lambda entry: tuple(entry["cell"])) if form == "list" else None
    experiment = cells.Experiment("toy", CELLS, compute, lambda entry: f"{entry['sum']}", report, cell_of)

    def command(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["toy", *words])
        cells.main(experiment, "A toy.", rounds=4)

    with pytest.raises(KeyboardInterrupt):
        command("--output", str(tmp_path))
    with pytest.raises(SystemExit):
        command("--draw", str(tmp_path))
    assert "toy.json lacks 1: continue with --output" in capsys.readouterr().err
    command("--output", str(tmp_path))
    assert computed == [*CELLS, CELLS[-1]]
    assert json.loads((tmp_path / "toy.json").read_text()) == STORED[form]
    page = (tmp_path / "page.md").read_text()
    assert page == "| cell | sum |\n|---|---:|\n| a x | 7 |\n| a y | 7 |\n| b x | 7 |\n"
    turned = STORED[form][::-1] if form == "list" else {name: STORED[form][name] for name in "ba"}
    (tmp_path / "toy.json").write_text(json.dumps(turned))
    (tmp_path / "page.md").unlink()
    command("--draw", str(tmp_path))
    assert (tmp_path / "page.md").read_text() == page and len(computed) == 4


def test_a_second_process_begins_at_the_other_end(tmp_path, monkeypatch) -> None:
    """The first process has the second cell when the other one adds the third and, while it trains, the first."""
    computed = []

    def compute(rounds: int, *cell: str) -> cells.Entry:
        computed.append(cell)
        if len(computed) == 1:
            for other in (CELLS[0], CELLS[2]):
                cells.add(experiment, tmp_path / "toy.json", other, {"sum": 1})
        return {"sum": 2}

    experiment = cells.Experiment("toy", CELLS, compute, lambda entry: "", lambda found: {"all": str(len(found))})
    cells.add(experiment, tmp_path / "toy.json", CELLS[2], {"sum": 0})
    monkeypatch.setattr("sys.argv", ["toy", "--output", str(tmp_path), "--backwards"])
    cells.main(experiment, None, rounds=4)
    assert computed == [CELLS[1]] and (tmp_path / "all").read_text() == "3\n"
    assert experiment.read(tmp_path / "toy.json") == {CELLS[0]: {"sum": 1}, CELLS[1]: {"sum": 2}, CELLS[2]: {"sum": 1}}


PICTURES_ONLY = [pytest.param(name, marks=pytest.mark.thorough) for name in ("failing_clients", "fedeve_figures")]


@pytest.mark.parametrize("name", ["asynchrony", "cyclic_participation", "domains", *PICTURES_ONLY])
def test_the_pages_are_those_of_the_results(name) -> None:
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    found = experiment.read(RESULTS / f"{name}.json")
    assert list(found) == experiment.cells
    for file, content in experiment.report(found).items():
        assert not isinstance(content, str) or f"{content}\n" == (RESULTS / file).read_text(), f"draw {file} again"
