"""Tests of the numbers that the benchmarks count, and of the tables that are made from their results files.

`all.py --quick` tests that the benchmarks run.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import fedjax_drift as fd

FOLDER = Path(__file__).parents[1] / "experiments" / "benchmarks"


@pytest.fixture
def shared(monkeypatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure
    import workloads

    return measure, workloads


def test_the_counted_layers_have_the_parameters_of_the_models(shared) -> None:
    measure, workloads = shared
    for name in [*workloads.NETWORKS, workloads.RESNET]:
        assert workloads.parameters(name) == fd.models.num_parameters(measure.model(name)), name


def test_necessary_operations_and_bytes_of_a_small_network(shared, monkeypatch) -> None:
    _, workloads = shared
    # A 3x3 convolution with 2 filters on an image of 4x4x1 (padding VALID, pooled to 1x1), then a dense layer 2 -> 5.
    network = workloads.Network((4, 4, 1), 5, ((2, 3, "VALID", 2),), ())
    monkeypatch.setitem(workloads.NETWORKS, "small", network)
    first, second = 9 * 2 * 4, 2 * 5
    assert workloads.operations("small") == 2 * (2 * first + 3 * second)
    d = 9 * 2 + 2 + 2 * 5 + 5
    assert workloads.step_bytes("small", 3) == 8 * d + 3 * (16 + 16 * (2 * 4 + 5))


def test_a_table_shows_its_results_file(shared, tmp_path) -> None:
    measure, _ = shared
    rows = [
        measure.row("fast", [0.3, 0.1, 0.2], "s a round", at_most=0.25, note="a note"),
        measure.row("slow", 3.0, "%", at_least=40),
    ]
    contents = {
        "command": "python experiments/benchmarks/some.py --rounds 3",
        "commit": "abc",
        "date": "2026-01-01",
        "hardware": {"cpu": "a processor", "cores": 2, "versions": "jax 1", "devices": "2 x cpu"},
        "rows": rows,
    }
    (tmp_path / "some.cpu.json").write_text(json.dumps(contents))
    before = "above\n<!-- results: some other -->\nold\n<!-- end -->\nbelow\n"
    made = measure.with_tables(before, tmp_path)
    source = "`some.py --rounds 3` on cpu: 2 x cpu, 2 cores of a processor, jax 1, commit abc, 2026-01-01"
    assert f"{source}\n\n| what" in made
    assert "| fast | 0.2 s a round (0.1 to 0.3, 3) | <= 0.25 | a note |\n| slow | 3% | >= 40, missed |  |\n" in made
    assert "old" not in made and made.startswith("above") and made.endswith("below\n")
    assert measure.with_tables(made, tmp_path) == made


def test_the_tables_in_the_readme_match_the_results_files(shared) -> None:
    measure, _ = shared
    text = measure.README.read_text()
    assert measure.with_tables(text) == text, "run experiments/benchmarks/all.py --tables"
    shown = {name for match in measure.TABLE.finditer(text) for name in match[2].split()}
    assert {path.name.split(".")[0] for path in measure.RESULTS.glob("*.json")} <= shown


def test_the_run_book_resumes_where_it_stopped(shared, tmp_path, monkeypatch, capsys) -> None:
    measure, _ = shared
    import run_book

    writes = "import sys; open(sys.argv[2] + '/some.cpu.json', 'a').write('x')\n"
    (tmp_path / "good.py").write_text(writes)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text(writes + "import time; time.sleep(600)")
    monkeypatch.setattr(measure, "HERE", tmp_path)
    good, bad, slow, late = (run_book.Step(name, f"{name}.py", 1) for name in ("good", "bad", "slow", "good"))
    monkeypatch.setattr(run_book, "STEPS", [good, bad, slow, late._replace(name="late")])
    monkeypatch.setattr(run_book, "LEAST_SECONDS", 0)

    class Process(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or "slow.py" not in str(self.args):
                return super().wait()
            while self.poll() is None and not (tmp_path / "slow" / "some.cpu.json").exists():
                time.sleep(0.01)
            clock.append(10.0**6)  # the time limit is reached as soon as the step has written its file
            raise subprocess.TimeoutExpired("slow", timeout)

    clock = [0.0]
    monkeypatch.setattr(run_book.subprocess, "Popen", Process)
    monkeypatch.setattr(run_book, "monotonic", lambda: clock[-1])
    assert run_book.run(tmp_path, 10, quick=False) == 1
    said = capsys.readouterr().out
    assert [line in said for line in ("ran: good", "FAILED: bad", "stopped: slow", "no time left: late")] == [True] * 4
    assert run_book.run(tmp_path, 0, quick=False) == 1
    said = capsys.readouterr().out
    assert [line in said for line in ("complete: good", "failed before: bad", "no time left: slow")] == [True] * 3
    assert (tmp_path / "good" / "some.cpu.json").read_text() == "x"

    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    readme.write_text("nothing to change")
    monkeypatch.setattr(measure, "RESULTS", results)
    monkeypatch.setattr(measure, "README", readme)
    run_book.collect(tmp_path)
    assert sorted(path.name for path in results.iterdir()) == ["good.cpu.json", "slow.cpu.json"]


def test_traffic_counts_the_bytes_and_the_kernels_of_a_program(shared) -> None:
    from compiled import traffic

    text = """\
%fused (p: f32[9]) -> f32[9] {
  %inside = f32[9] copy(%p)
}

ENTRY %main (a: f32[4,5], b: bf16[10]) -> f32[] {
  %a = f32[4,5]{1,0} parameter(0)
  %b = bf16[10]{0} parameter(1)
  %f = (f32[10]{0}, pred[8]{0}) fusion(%a, %b), kind=kLoop, calls=%fused
  %t = f32[10]{0} get-tuple-element(%f), index=0
  ROOT %r = f32[] reduce(%t, %b), to_apply=%sum
}
"""
    assert traffic(text) == ((40 + 8 + 80 + 20) + (4 + 40 + 20), 2)
