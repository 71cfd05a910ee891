"""Tests of logs, which are written during a run and can be read back, and of the progress bar."""

from __future__ import annotations

import csv
import io
import json
import math
import sys

import jax
import numpy as np
import pytest
from test_bank import file_limit

import fedjax_drift as fd
from fedjax_drift import logs, plots
from fedjax_drift.simulation import progress

FIRST = {"round": 1, "train_loss": 2.5, "gain": math.nan}
SECOND = {"round": 2, "train_loss": 1.5, "gain": 0.25, "cka": [0.5, math.inf], "accuracy": 0.75}


def table(folder) -> list[dict[str, str]]:
    with (folder / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_json_and_csv_are_written_line_by_line(tmp_path) -> None:
    with logs.Log(tmp_path / "a" / "b") as log:
        folder = log.folder
        log(FIRST)  # the record is on disk at once
        assert json.loads((folder / "rounds.jsonl").read_text()) == FIRST | {"gain": None}
        assert table(folder) == [{"round": "1", "train_loss": "2.5", "gain": ""}]
        log(SECOND)
        both = table(folder)
        assert both[0] == {"round": "1", "train_loss": "2.5", "gain": "", "cka[0]": "", "cka[1]": "", "accuracy": ""}
        assert both[1] | {} == {
            "round": "2", "train_loss": "1.5", "gain": "0.25", "cka[0]": "0.5", "cka[1]": "", "accuracy": "0.75"
        }  # fmt: skip
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "tra')  # the process was killed while it wrote this line
    read = logs.read(folder)
    assert read[1]["cka"][0] == 0.5 and math.isnan(read[1]["cka"][1]) and math.isnan(read[0]["gain"]) and len(read) == 2

    with pytest.raises(ValueError, match="which has one: pass before=history"):
        logs.Log(folder)
    with logs.Log(folder, before=[FIRST]) as log:
        log({"round": 2, "train_loss": 0.5})
    assert [record["train_loss"] for record in logs.read(folder / "rounds.jsonl")] == [2.5, 0.5]
    assert [row["train_loss"] for row in table(folder)] == ["2.5", "0.5"]


def test_a_full_disk_causes_one_warning_and_no_line_is_lost(tmp_path) -> None:
    """In some rounds, one of them with a new column, the file can grow by only 20 bytes, which is less than a line."""
    history = [{"round": i, "train_loss": 1 / i} | ({"accuracy": 0.5} if i % 3 == 0 else {}) for i in range(1, 9)]
    folder = tmp_path / "log"
    with (
        logs.Log(folder) as log,
        pytest.warns(UserWarning, match="/log could not be written .*: the run continues") as warned,
    ):
        for record in history:
            if full := record["round"] in (2, 3, 4, 7):
                limit = file_limit((folder / "rounds.jsonl").stat().st_size + 20)
                limit.__enter__()
            log(record)
            if full:
                limit.__exit__(None, None, None)
            assert logs.read(folder) == history[: {2: 1, 3: 1, 4: 1, 7: 6}.get(record["round"], record["round"])]
            assert (folder / "rounds.jsonl").read_text().endswith("\n")
    assert len(warned) == 1
    assert logs.read(folder) == history
    assert [row["round"] for row in table(tmp_path / "log")] == [str(record["round"]) for record in history]
    assert [bool(row["accuracy"]) for row in table(tmp_path / "log")] == ["accuracy" in record for record in history]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["rounds.csv", "rounds.jsonl"]


def test_bad_input(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for folder, message in [
        (tmp_path / "file", "must be a folder, got the file"),
        (tmp_path / "file/below", r"must be where files can be written, got .*/below \(Not a directory\)"),
        ("/dev/null/log", r"must be where files can be written, got /dev/null/log \("),
    ]:
        with pytest.raises(ValueError, match=message):
            logs.Log(folder)
    for record, message in [
        (5, "a record must be a dict, got 5"),
        ({"x": KeyError}, "must only contain values that JSON has, got"),
    ]:
        with logs.Log(tmp_path / "log", before=[]) as log, pytest.raises(ValueError, match=message):
            log(record)
        with pytest.raises(ValueError, match=message):
            logs.Log(tmp_path / "log", before=[record])
    for history in ([{"accuracy": 0.5}], [{"round": 1, "accuracy": "high"}], [{"round": 1, "accuracy": [1, [2]]}]):
        with pytest.raises(ValueError, match="records' (round|accuracy) must be"):
            fd.rounds_to_target(history, 0.5)
    (tmp_path / "log/rounds.jsonl").write_bytes(b"\xff\xfe")
    for path, message in [
        (tmp_path / "log", "rounds.jsonl is damaged"),
        (tmp_path, "path must be a log"),
    ]:
        with pytest.raises(ValueError, match=message):
            logs.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]\n", "line 1: a record must be a JSON object"), ("{}\nx\n", "line 2: a record must be one")],
)
def test_reading_a_file_that_is_not_a_log_is_an_error(tmp_path, text, message) -> None:
    with pytest.raises(ValueError, match="must be a log"):
        logs.read(tmp_path)
    (tmp_path / "rounds.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        logs.read(tmp_path)


def test_a_run_can_be_plotted_from_its_log(tmp_path) -> None:
    rows = [(np.eye(3, dtype=np.float32), np.arange(3))] * 4
    data = fd.FederatedData.from_clients(rows, test=rows[0])
    sim = fd.Simulation(fd.models.linear((3,), 3), data, fd.algorithms.fedavg(), cohort_size=2, measure="labels")
    with fd.logs.Log(tmp_path) as log:
        _, history = sim.run(sim.init(jax.random.key(0)), 3, eval_every=1, on_round=log)
    assert fd.logs.read(tmp_path) == history
    for picture in (plots.curves, plots.label_mix):
        drawn = [[line.get_xydata().tolist() for line in axes.lines] for axes in picture(tmp_path).axes]
        assert drawn == [[line.get_xydata().tolist() for line in axes.lines] for axes in picture(history).axes]


def test_the_progress_bar_is_shown_in_a_terminal_but_not_in_ci(monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("CI", raising=False)

    def drawn(shown: bool | None) -> str:
        screen.seek(0)
        screen.truncate()
        with progress.Bar(2, "fedavg", shown) as bar:
            for accuracy in (0.5, 0.75):
                bar.update({"train_loss": 1.5, "accuracy": accuracy})
        return screen.getvalue()

    assert not drawn(None) and not drawn(False)
    monkeypatch.setattr(screen, "isatty", lambda: True)
    last = drawn(None).rstrip().rpartition("\r")[2]
    assert last.startswith("fedavg: 100%") and "2/2" in last and "round/s" in last and "loss=1.5, acc=0.75" in last
    monkeypatch.setenv("CI", "true")
    assert not drawn(None) and drawn(True)


def test_a_long_run_prints_ten_lines_where_no_bar_is_shown(monkeypatch, capsys) -> None:
    """The first round takes 50 s, because it is compiled. The lines of short runs are not printed."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("CI", "true")

    def printed(seconds: float, restored: int = 0, shown: bool | None = None) -> list[str]:
        clock[0] = 0.0
        with progress.Bar(30, "fedavg", shown) as bar:
            for t in range(30):
                clock[0] += 0 if t < restored else 50 if t == restored else seconds
                bar.update({"train_loss": 1.5}, restored=t < restored)
        return capsys.readouterr().err.splitlines()

    lines = printed(2)
    assert lines[0] == "fedavg: 3 of 30 rounds (10 %), 54 s, about 54 s left, loss 1.5" and len(lines) == 10
    assert lines[-1] == "fedavg: 30 of 30 rounds (100 %), 108 s, about 0 s left, loss 1.5"
    assert printed(2, restored=10)[0] == "fedavg: 12 of 30 rounds (40 %), 52 s, about 36 s left, loss 1.5"
    assert not printed(0.3) and not printed(9, shown=False)
