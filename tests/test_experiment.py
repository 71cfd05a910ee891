"""Tests of experiments/tables: reading, running, resuming and reporting the tables of papers."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

import fedjax_drift as fd
from experiments.tables import claims, comparison, papers, report, runner, tuning
from experiments.tables.__main__ import main
from experiments.tables.papers import Printed, Score, Series
from experiments.tables.results import Result, kept_series, read_results, summary
from fedjax_drift import cli
from fedjax_drift.cli.commands import parse
from fedjax_drift.cli.flags import Parser, add_data
from fedjax_drift.cli.parsed_run import algorithm_specs, partition_text
from fedjax_drift.plots import Compared

pytestmark = pytest.mark.thorough

TINY = """
title = "A tiny table"
paper = "Nobody, table 1"
note = "What it is."
claims = [["FedProx", "FedAvg"]]
[scores]
"last (%)" = {of = "accuracy", take = "last", scale = 100}
"rounds to 1 %" = {of = "accuracy", take = "rounds_to", target = 0.01}
[methods]
FedAvg = "fedavg"
FedProx = {algorithm = "fedprox:mu=0.5", momentum = 0.5}
[common]
dataset = "synthetic:num_clients=4,num_rows=8"
cohort = 2
batch_size = 4
rounds = 8
eval_every = 4
seeds = 2
keep = ["train_loss"]
[tune]
rounds = 2
grid = {lr = [1e-4, 0.5], mu = [0.1, 1.0]}
[settings."natural, half of them"]
printed."last (%)" = {FedAvg = "50±1", FedProx = 99}
printed."rounds to 1 %" = {FedAvg = ">9", FedProx = 3}
[settings.never]
dataset = "mnist"
needs = "patience"
"""
LONG = TINY.replace("rounds = 8", "rounds = 60")
UNTIL = TINY.replace("seeds = 2", 'seeds = 2\nuntil = "rounds to 1 %"')
NEVER = UNTIL.replace("target = 0.01", "target = 2.0")  # a target that no run reaches
REFERENCE = """
title = "The same"
paper = "Nobody, figure 1"
[scores]
loss = {of = "loss", take = "at", round = 8}
[methods]
FedProx = "fedprox"
[settings.half]
runs = "tiny/table"
as = "natural, half of them"
"""


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Simulations with the same options share their programs in all tests of this file. Compiling takes nearly all of
    the time."""
    simulations: dict[str, dict[str, fd.Simulation]] = {}
    parse_run = fd.parse_run

    def parse_once(words, *, data=None, values=None):
        parsed = parse_run(words, data=data, values=values)
        if values is not None:
            return parsed
        key = " ".join(word for word in words if not word.startswith(("--seed", "--rounds")))
        return parsed._replace(simulations=simulations.setdefault(key, parsed.simulations))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fd, "parse_run", parse_once)
        yield


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two tables."""
    return with_tables(tmp_path / "tables", table=TINY, figure=REFERENCE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The results of the tiny table after an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert do(with_tables(folder / "tables", table=TINY), folder / "o") == 0
    return folder / "o"


def with_tables(place: Path, **tables: str) -> Path:
    (place / "tiny").mkdir(parents=True)
    for name, text in tables.items():
        (place / "tiny" / f"{name}.toml").write_text(text)
    return place


def do(place: Path, output: Path, *arguments: str) -> int:
    words = ["run", "tiny/table", "--rows=natural", f"--tables={place}", f"--output={output}"]
    return main([*words, "--no-progress", *arguments])


def cell_of(place: Path, method: str = "FedAvg") -> papers.Cell:
    return papers.read_table(place, "tiny/table").settings["natural, half of them"].cells[method]


def page_of(place: Path, output: Path) -> str:
    table = papers.read_table(place, "tiny/table")
    return report.page(table, output, report.results_of(table, output), [])


def read(output: Path, method: str = "FedAvg") -> dict[int, Result]:
    return read_results(output / "tiny/table/natural-half-of-them" / f"{method}.jsonl")


def series(runs: dict[int, Result]) -> dict[int, dict[str, Series]]:
    return {seed: run.series for seed, run in runs.items()}


def row(page: str, what: str) -> list[str]:
    """Returns the cells to the right of the cell ``what``, in the first row of a page that has this cell."""
    line = next(line for line in page.splitlines() if f"| {what} |" in line)
    return [cell.strip() for cell in line.split(f"| {what} |")[1].strip(" |").split("|")]


# --- a table from its file to its page --------------------------------------------------------------------------------


def test_a_table_is_run_once_and_its_page_shows_the_results(place, whole, tmp_path, capsys):
    output = Path(shutil.copytree(whole, tmp_path / "o"))
    lines = (output / "tiny/table/natural-half-of-them/FedAvg.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    every, evaluated = sorted(runs[0]["series"], key=lambda columns: -len(columns["round"]))
    assert [run["seed"] for run in runs] == [0, 1] and evaluated["round"] == [4, 8] and "accuracy" in evaluated
    assert every["round"] == list(range(1, 9)) and "train_loss" in every and "seconds" not in every
    assert not list(output.rglob("*.partial"))

    before = {path: path.read_bytes() for path in output.rglob("*.jsonl")}
    assert do(place, output) == 0 and capsys.readouterr().out.count("already done") == 2
    assert {path: path.read_bytes() for path in output.rglob("*.jsonl")} == before

    shown = [f"--tables={place}", f"--results={output}"]
    assert main(["report", "tiny/table", *shown]) == 0
    page = (output / "tiny/table.md").read_text()
    last = [100 * next(c["accuracy"] for c in run["series"] if "accuracy" in c)[-1] for run in runs]
    assert row(page, "ours")[0] == f"{np.mean(last):.2f} ± {np.std(last, ddof=1):.2f}"
    gap = np.mean(last) - 50
    alike = abs(gap) <= stats.t.ppf(0.975, 1) * math.sqrt(np.var(last, ddof=1) / 2 + 1)
    mark = "" if not np.ptp(last) else " ?" if alike else " ▲" if gap > 0 else " ▼"
    assert row(page, "paper") == ["50±1", "99"] and row(page, "difference")[0] == f"{gap:+.2f}{mark}"
    assert "reached ▲" in page and "- never: patience" in page
    assert f"| {runs[0]['hardware']} | {runs[0]['commit'] or '?'} | {runs[0]['date']} |" in page
    assert runs[0]["command"] in page and runs[0]["command"].endswith("--seed=0")
    with Image.open(output / "tiny/table.png") as picture:
        assert picture.format == "PNG" and picture.width > 500

    assert main(["report", "--all", *shown]) == 0
    index = (output / "README.md").read_text()
    orders = "0 / 0 / 0 / 2"  # two seeds are not enough for a look
    marks = "".join(line for line in page.splitlines() if line.startswith("|  | difference |"))
    marked = ", ".join(f"{mark} {marks.count(mark)}" for mark in "▲≈?▼" if mark in marks)
    assert "| Nobody | 2 | 2 | 0 |" in index and "| all | 2 | 2 | 0 |" in index
    assert (
        f"| [Nobody, table 1](tiny/table.md) | A tiny table | 2 of 4 cells | {marked} | {orders} | - | patience |"
        in index
    )
    assert "| [Nobody, figure 1](tiny/figure.md) | The same | complete | - | - | - |  |" in index
    prox = read(output, "FedProx")
    losses = [prox[seed].series["loss"].values[-1] for seed in prox]
    assert row((output / "tiny/figure.md").read_text(), "ours") == [
        f"{np.mean(losses):.3f} ± {np.std(losses, ddof=1):.3f}"
    ]
    score = papers.read_table(place, "tiny/table").scores["last (%)"]
    assert compared_runs(read(output, "FedProx"), read(output), score)[1] in (output / "orderings.md").read_text()
    capsys.readouterr()
    assert main(["list", f"--tables={place}", f"--output={output}"]) == 0
    assert "2 of 4 cells" in capsys.readouterr().out


def test_the_command_of_a_result_reproduces_its_numbers(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prox = read(whole, "FedProx")
    words = shlex.split(prox[1].command)[1:]
    assert cli.main([*words, "--output=alone", "--no-progress"]) == 0
    config = json.loads(Path("alone/config.json").read_text())
    assert json.loads(json.dumps(fd.parse_run(words[1:]).config)).items() <= config.items()
    records = [json.loads(line) for line in Path("alone/rounds.jsonl").read_text().splitlines()]
    for name in ("accuracy", "loss"):
        alone = [record[name] for record in records if name in record]
        assert prox[1].series[name].values == pytest.approx(alone, rel=1e-4)  # five digits are kept


@pytest.mark.parametrize("name", papers.table_names(papers.EXPERIMENTS))
def test_every_committed_table_is_valid(name):
    table = papers.read_table(papers.EXPERIMENTS, name)
    cells = [cell for setting in table.settings.values() for cell in setting.cells.values()]
    assert {cell.method for cell in cells} == set(table.methods)
    assert len({str(cell.file).lower() for cell in cells}) == len({(c.table, c.setting, c.method) for c in cells})
    for cell in cells:
        args = parse(["run", *cell.words(0)])
        assert algorithm_specs(args) and partition_text(args)
    for setting in table.settings.values():
        for numbers in setting.printed.values():
            assert set(numbers) <= set(setting.cells)


def test_the_committed_pages_match_the_committed_results(tmp_path):
    results = papers.EXPERIMENTS / "results"
    tables = papers.read_tables(papers.EXPERIMENTS, papers.table_names(papers.EXPERIMENTS))
    for table in tables:
        if report.has_results(table, results):
            ours, file = report.results_of(table, results), results / f"{table.name}.md"
            pictures = [file.with_suffix(".png")]
            pictures += [results / f"{table.name}-label-mix-{papers.slug(name)}.png" for name in ours]
            page = report.page(table, results, ours, [picture for picture in pictures if picture.exists()])
            assert page == file.read_text(), table.name
    shutil.copytree(results, tmp_path / "results")
    for path in report.write_index(tables, tmp_path / "results", claims.read(papers.EXPERIMENTS, tables)):
        assert path.read_text() == (results / path.name).read_text()


@pytest.mark.parametrize("file", sorted((papers.EXPERIMENTS / "tables").glob("*.py")), ids=lambda file: file.stem)
def test_the_code_of_the_tables_uses_only_public_names(file):
    text = file.read_text()
    assert set(re.findall(r"^(?:from|import) fedjax_drift.*", text, re.MULTILINE)) <= {"import fedjax_drift as fd"}
    assert set(re.findall(r"\bfd\.(\w+)", text)) <= {*fd.__all__, "__version__", "__file__"}
    assert not re.findall(r"(?<!self)\._(?!_|replace|asdict|fields)\w+", text)


# --- resuming ---------------------------------------------------------------------------------------------------------


def interrupted(sweep, rounds: list[int], at: int | None = None, number: int = signal.SIGINT):
    """Returns a sweep that appends its rounds to ``rounds``, and raises a signal when it first records ``at``."""

    def swept(*arguments, **options):
        def on_round(seed, setting, record):
            rounds.append(record["round"])
            if rounds.count(at) == 1 and record["round"] == at:
                signal.raise_signal(number)

        return sweep(*arguments, on_round=on_round, **options)

    return swept


def test_a_run_stopped_by_ctrl_c_resumes_with_the_same_results(tmp_path, monkeypatch, capsys):
    place, only = with_tables(tmp_path / "tables", table=LONG), "--methods=FedAvg"
    assert do(place, tmp_path / "whole", only) == 0
    monkeypatch.setattr(runner, "_checkpoints", lambda folder: fd.Checkpoints(folder, every=1, keep=2, best=None))
    before, after = [], []
    with monkeypatch.context() as patch:
        patch.setattr(fd.Simulation, "sweep", interrupted(fd.Simulation.sweep, before, at=3))
        assert do(place, tmp_path / "o", only) == 130
    assert "run the same command again to resume" in capsys.readouterr().out and not read(tmp_path / "o")
    saved = [fd.Checkpoints(next((tmp_path / "o").rglob(f"seed-{seed}"))) for seed in (0, 1)]
    (early, late), (_, other) = (one.rounds for one in saved)
    assert late == other == max(before) < 60

    shutil.rmtree(saved[1].place(late))  # as if it was killed between the saves of the two seeds
    monkeypatch.setattr(fd.Simulation, "sweep", interrupted(fd.Simulation.sweep, after))
    assert do(place, tmp_path / "o", only) == 0 and not list((tmp_path / "o").rglob("*.partial"))
    assert min(after) == early + 1
    assert series(read(tmp_path / "o")) == series(read(tmp_path / "whole"))


def test_seeds_with_checkpoints_resume_when_new_seeds_are_added(tmp_path, monkeypatch):
    place, only, rounds = with_tables(tmp_path / "tables", table=LONG), "--methods=FedAvg", []
    with monkeypatch.context() as patch:
        patch.setattr(fd.Simulation, "sweep", interrupted(fd.Simulation.sweep, [], at=1))
        assert do(place, tmp_path / "o", only, "--seeds=1") == 130
    monkeypatch.setattr(fd.Simulation, "sweep", interrupted(fd.Simulation.sweep, rounds))
    assert do(place, tmp_path / "o", only, "--seeds=2") == 0
    assert rounds.count(1) == 1 and [run.together for run in read(tmp_path / "o").values()] == [1, 1]


def test_a_cell_that_another_process_runs_is_skipped(place, whole, tmp_path, capsys):
    output = Path(shutil.copytree(whole, tmp_path / "o"))
    with runner.locked(runner._partial(cell_of(place), output)) as is_ours:
        assert is_ours and do(place, output) == 0
    assert (
        "FedAvg: another process is running it" in (said := capsys.readouterr().out) and "FedProx: already done" in said
    )
    assert do(place, output) == 0 and "another process" not in capsys.readouterr().out
    assert not list(output.rglob("*.partial"))


def test_rounds_and_seeds_can_be_added_and_other_options_are_refused(place, tmp_path, capsys):
    output = tmp_path / "o"
    assert do(place, output, "--methods=FedAvg", "--rounds=2") == 0
    assert {seed: run.rounds for seed, run in read(output).items()} == {0: 2, 1: 2}
    table = papers.read_table(place, "tiny/table")
    assert report.status(table, report.results_of(table, output)) == "0 of 4 cells, 1 in part"
    assert do(place, output, "--methods=FedAvg") == 0
    first = read(output)
    assert {seed: run.rounds for seed, run in first.items()} == {0: 8, 1: 8}
    capsys.readouterr()
    assert do(place, output, "--methods=FedAvg", "--seeds=4") == 0
    assert "8 rounds, seeds 2, 3" in capsys.readouterr().out
    assert sorted(read(output)) == [0, 1, 2, 3] and {seed: read(output)[seed] for seed in first} == first

    with_tables(tmp_path / "other", table=TINY.replace("batch_size = 4", "batch_size = 3"))
    with pytest.raises(ValueError, match="must have results with the options of the table, got another batch_size"):
        do(tmp_path / "other", output, "--methods=FedAvg")
    with pytest.raises(SystemExit, match="2"):
        do(place, output, "--methods=FedAvgg")
    assert "did you mean 'FedAvg'?" in capsys.readouterr().err


def test_a_target_ends_a_cell_early_and_tuning_chooses_its_values(tmp_path, capsys):
    output, text = tmp_path / "o", UNTIL.replace("seeds = 2", "seeds = 1")
    place = with_tables(tmp_path / "tables", table=text)
    table, cell = papers.read_table(place, "tiny/table"), cell_of(place, "FedProx")
    assert tuning.tuning_grid(table, cell._replace(options=cell.options | {"algorithm": "fedavg"})) == [
        {"lr": 1e-4},
        {"lr": 0.5},
    ]
    assert do(place, output, "--tune", "--methods=FedProx") == 0
    assert "FedProx: tuning 4 combinations" in capsys.readouterr().out
    tried = tuning.read_tuned(cell, output)
    best = max(tried, key=lambda each: each.score).values
    run = read(output, "FedProx")[0]
    assert run.options["lr"] == best["lr"] and run.options["algorithm"] == f"fedprox:mu={best['mu']}"
    assert f"--lr={best['lr']}" in run.command
    assert run.reached and run.rounds == 4 and run.series["accuracy"].rounds == [4]
    assert do(place, output, "--tune", "--methods=FedProx") == 0 and "already done" in capsys.readouterr().out
    chosen = f"FedProx: lr {best['lr']:g} (of 0.0001, 0.5: at its edge), mu {best['mu']:g} (of 0.1, 1: at its edge)"
    assert f"{chosen} (best of 4 combinations after 2 of 8 rounds, another seed than those reported)" in page_of(
        place, output
    )

    held_out = text.replace("[tune]", "[tune]\nvalidation = 0.25\nmethods.FedProx = {mu = [0.3]}")
    place, before = with_tables(tmp_path / "held_out", table=held_out), [each.score for each in tried]
    assert do(place, tmp_path / "p", "--tune", "--methods=FedProx") == 0
    assert "FedProx: tuning 2 combinations" in capsys.readouterr().out
    tried = tuning.read_tuned(cell, tmp_path / "p")
    assert [each.values for each in tried] == [{"lr": 1e-4, "mu": 0.3}, {"lr": 0.5, "mu": 0.3}]
    # A quarter of the 32 examples is held out, so the scores are multiples of 1/8. The run itself uses all examples.
    assert all(each.score / 12.5 == round(each.score / 12.5) for each in tried) and before != tried
    assert "validation" not in read(tmp_path / "p", "FedProx")[0].options
    with pytest.raises(ValueError, match="must have the grid and the validation of the table, got others"):
        do(with_tables(tmp_path / "other", table=text), tmp_path / "p", "--tune", "--methods=FedProx")
    only_one = held_out.replace("grid = {lr = [1e-4, 0.5], mu = [0.1, 1.0]}", "")
    table = papers.read_table(with_tables(tmp_path / "one", table=only_one), "tiny/table")
    assert tuning.tuning_grid(table, cell._replace(method="FedAvg")) == []

    untuned = with_tables(tmp_path / "untuned", table=text[: text.index("[tune]")] + text[text.index("[settings") :])
    with pytest.raises(ValueError, match="must have a grid"):
        do(untuned, output, "--tune")


def test_a_cell_with_a_target_runs_in_sections_with_the_same_results(whole, tmp_path, monkeypatch):
    place, totals = with_tables(tmp_path / "tables", table=NEVER), []
    sweep = fd.Simulation.sweep
    monkeypatch.setattr(fd.Simulation, "sweep", lambda sim, n, *a, **b: totals.append(n) or sweep(sim, n, *a, **b))
    monkeypatch.setattr(runner, "TARGET_SECONDS", 0.0)  # checks the target after every evaluation
    assert do(place, tmp_path / "o", "--methods=FedAvg") == 0 and totals == [4, 8]
    assert series(read(tmp_path / "o")) == series(read(whole)) and not read(tmp_path / "o")[0].reached


def test_a_run_to_a_target_is_the_beginning_of_a_longer_run_in_another_table(whole, tmp_path, monkeypatch, capsys):
    output = Path(shutil.copytree(whole, tmp_path / "o"))
    target = UNTIL.replace("rounds = 8", "rounds = 6")
    other = target.replace('FedAvg = "fedavg"', 'FedAvg = {algorithm = "fedavg", lr = 0.2}')
    place = with_tables(tmp_path / "tables", table=TINY, target=target, other=other)
    words = ["--rows=natural", "--methods=FedAvg", f"--tables={place}", "--no-progress"]
    ran, run_cell = [], runner._run_cell
    monkeypatch.setattr(runner, "_run_cell", lambda cell, *a: ran.append(cell.table) or run_cell(cell, *a))
    assert main(["run", "tiny/target", f"--output={output}", *words]) == 0 and not ran
    assert "the beginning of a longer run, tiny/table/natural" in capsys.readouterr().out
    assert main(["run", "tiny/target", f"--output={tmp_path / 'alone'}", *words]) == 0 and ran == ["tiny/target"]
    file = "tiny/target/natural-half-of-them/FedAvg.jsonl"
    taken, alone = (read_results(folder / file) for folder in (output, tmp_path / "alone"))
    assert series(taken) == series(alone) and {run.rounds for run in taken.values()} == {4}
    for name in ("options", "command", "reached"):
        assert [getattr(run, name) for run in taken.values()] == [getattr(run, name) for run in alone.values()]
    # Other options, or too few rounds: the cell is run.
    assert main(["run", "tiny/other", f"--output={output}", *words]) == 0 and ran[1:] == ["tiny/other"]
    (cell,) = papers.select(papers.read_table(place, "tiny/table"), ["natural"], ["FedAvg"])
    assert runner._beginning(alone[0], cell) is None


def test_the_length_of_a_section_depends_on_the_duration_of_its_rounds(tmp_path, monkeypatch):
    """Rounds overlap, so only the sum of the seconds of a section matters. Here its first record has all of them."""
    often = NEVER.replace("eval_every = 4", "eval_every = 1")
    place, totals, sweep = with_tables(tmp_path / "tables", table=often), [0], fd.Simulation.sweep

    def timed(sim, n, *arguments, **options):
        runs = sweep(sim, n, *arguments, **options)
        for record in runs[0].history[totals[-1] :]:
            record["seconds"] = n - totals[-1] if record["round"] == totals[-1] + 1 else 0.0
        totals.append(n)
        return runs

    monkeypatch.setattr(fd.Simulation, "sweep", timed)
    monkeypatch.setattr(runner, "TARGET_SECONDS", 3.0)
    assert do(place, tmp_path / "o", "--methods=FedAvg") == 0 and totals == [0, 1, 4, 7, 8]


def test_cells_share_their_data_only_if_all_data_options_are_equal():
    parser = Parser(prog="")
    add_data(parser, required=True)
    options = set(vars(parser.parse_args(["--dataset=mnist"]))) - {"seed"}
    assert set(runner.DATA_OPTIONS) == options | {"redeal"}


def test_every_seed_can_have_its_own_partition(whole, tmp_path, capsys):
    text = TINY.replace("cohort = 2\n", 'cohort = 2\ndata_seed = "seed"\n')
    place, output = with_tables(tmp_path / "tables", table=text), tmp_path / "o"
    cell = cell_of(place)
    left = output / cell.file.with_suffix(".partial") / "seed-0"
    assert do(place, output, "--methods=FedAvg", "--seeds=1") == 0
    left.mkdir(parents=True)  # as if the process had been killed after the first seed was written
    assert do(place, output, "--methods=FedAvg") == 0 and not left.exists()
    runs, same = read(output), read(whole)
    assert ["--data-seed=0" in runs[0].command, "--data-seed=1" in runs[1].command] == [True, True]
    assert runs[0].series == same[0].series and runs[1].series != same[1].series
    alone = fd.parse_run(runs[1].command.removeprefix("fedjax-drift run "))
    (sim,) = alone.simulations.values()
    (run,) = sim.sweep(alone.rounds, [1], alone.eval_every, progress=False)
    assert runs[1].series == kept_series(run.history, alone.eval_every, cell.keep)
    assert "initial models; every seed has its own partition." in page_of(place, output)


@pytest.mark.parametrize("call", [0, 1], ids=["between two sections", "at the end of a cell"])
def test_ctrl_c_in_the_last_rounds_of_a_sweep_stops_the_run(tmp_path, monkeypatch, call):
    """At this point, all rounds of the sweep are complete, so the sweep returns as usual."""
    place, totals, sweep = with_tables(tmp_path / "tables", table=NEVER), [], fd.Simulation.sweep

    def late(sim, n, *arguments, **options):
        runs = sweep(sim, n, *arguments, **options)
        totals.append(n)
        if len(totals) == call + 1:
            signal.raise_signal(signal.SIGINT)
        return runs

    monkeypatch.setattr(fd.Simulation, "sweep", late)
    monkeypatch.setattr(runner, "TARGET_SECONDS", 0.0)
    assert do(place, tmp_path / "o") == 130 and totals == [4, 8][: call + 1]
    assert do(place, tmp_path / "o") == 0 and sorted(read(tmp_path / "o", "FedProx")) == [0, 1]


def test_the_order_of_the_seeds_does_not_change_the_runs(place, whole, tmp_path):
    assert runner.run_cells(papers.read_table(place, "tiny/table"), [cell_of(place)], [1, 0], tmp_path, progress=False)
    assert series(read(tmp_path)) == series(read(whole))


def test_tuning_stopped_by_ctrl_c_resumes_with_the_same_results(tmp_path, monkeypatch, capsys):
    place = with_tables(tmp_path / "tables", table=LONG.replace("[tune]\nrounds = 2", "[tune]\nrounds = 60"))
    only = ["--tune", "--methods=FedProx"]
    assert do(place, tmp_path / "whole", *only) == 0
    with monkeypatch.context() as patch:
        patch.setattr(fd, "sweep", interrupted(fd.sweep, [], at=1))
        assert do(place, tmp_path / "o", *only) == 130
    assert "run the same command again to resume" in capsys.readouterr().out
    saved = [fd.Checkpoints(each).rounds for each in (tmp_path / "o").rglob("tuning/lr=*")]
    assert len(saved) == 4 and all(0 < rounds[-1] < 60 for rounds in saved)
    assert do(place, tmp_path / "o", *only) == 0 and not list((tmp_path / "o").rglob("*.partial"))
    tried = [next(output.rglob("*.tuning.jsonl")).read_text() for output in (tmp_path / "whole", tmp_path / "o")]
    assert tried[0] == tried[1] and len(tried[0].splitlines()) == 4


def test_tuning_for_the_rounds_to_a_target_ends_at_the_first_that_reaches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TARGET_SECONDS", 0.0)  # every evaluation ends a section
    of_target = UNTIL.replace("[tune]\nrounds = 2", '[tune]\nrounds = 60\nscore = "rounds to 1 %"')
    of_target = of_target.replace("rounds = 8", "rounds = 60").replace("target = 0.01", "target = 0.75")
    place = with_tables(tmp_path / "tables", table=of_target)
    assert do(place, tmp_path / "o", "--tune", "--methods=FedAvg") == 0
    (file,) = (tmp_path / "o").rglob("*.tuning.jsonl")
    tried = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["values"] for each in tried] == [{"lr": 1e-4}, {"lr": 0.5}]
    assert tried[0]["score"] is None and tried[0]["rounds"] == tried[1]["rounds"] == tried[1]["score"] < 60


def test_tuning_ignores_combinations_without_a_finite_score():
    tried = [tuning.Tuned({"lr": lr}, score, 5) for lr, score in ((1, math.nan), (2, 9.0), (3, 4.0), (4, math.inf))]
    assert tuning.best_of(tried, Score("s", take="rounds_to")) == {"lr": 3}
    assert tuning.best_of(tried, Score("s")) == {"lr": 2}


def test_a_tuning_result_that_did_not_reach_the_target_is_read_back(tmp_path):
    cell = papers.Cell("t", "s", "m", {"algorithm": "fedavg"})
    file = tuning.tuning_file(cell, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text('{"values": {"lr": 1}, "score": null, "rounds": 2}\n{"values": {"lr": 2}, "score": 7, "rounds": 2}')
    assert tuning.best_of(tuning.read_tuned(cell, tmp_path), Score("s", take="rounds_to")) == {"lr": 2}


def test_a_setting_whose_data_are_missing_is_skipped(place, whole, monkeypatch):
    def absent(words, **options):
        raise FileNotFoundError(next(word for word in words if word.startswith("--dataset")))

    monkeypatch.setattr(fd, "parse_run", absent)
    table, said = papers.read_table(place, "tiny/table"), []
    cells = papers.select(table, ["never", "natural"], ["FedAvg"])[::-1]
    assert runner.run_cells(table, cells, None, whole, say=said.append)
    assert said == ["1/2  never  FedAvg: 8 rounds, seeds 0, 1", "1/2  never  FedAvg: not run: --dataset=mnist",
                    "2/2  natural, half of them  FedAvg: already done"]  # fmt: skip
    assert not runner.run_cells(table, cells[:1], None, whole, say=said.append)


# --- the contents of a table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("claims =", "claim =", "got 'claim': did you mean 'claims'?"),
        ("take = ", "takes = ", "an entry of score 'last (%)' must be one of"),
        ('"last", ', '"lats", ', "take must be one of"),
        ('"FedProx", "FedAvg"', '"FedPorx", "FedAvg"', "did you mean 'FedProx'?"),
        ("{FedAvg =", "{FedAv =", "printed in natural, half of them must be one of 'FedAvg', 'FedProx', got 'FedAv'"),
        ('printed."last (%)"', 'printed."last"', "a score that is printed must be one of"),
        ("lr = [", "lrr = [", "got 'lrr': did you mean 'lr'?"),
        (
            "grid = ",
            "gird = ",
            "an entry of tune must be one of 'grid', 'methods', 'rounds', 'score', 'validation', got 'gird'",
        ),
        ("grid = {lr", "methods.FedPorx = {lr", "a method in tune.methods must be one of"),
        ("grid = {lr", "methods.FedAvg = {lr", "a name in tune.methods.FedAvg must be one of"),
        ("[tune]", "[tune]\nvalidation = 2.0", "tune.validation must be a share in (0, 1), got 2.0"),
        ("rounds = 8", "", "FedAvg needs rounds, got none"),
        ('title = "A tiny table"', "", "'title' is missing"),
        ("[settings.never]", "[settings.never]\nmethods.FedAvgg = {lr = 1}", "a method of never must be one of"),
        ('dataset = "mnist"', 'runs = "tiny/figure"\nlr = 1', "which is tiny/figure's, must be one of"),
        ('dataset = "mnist"', 'base = "mnist"', "'mnist' is missing"),
        ("[methods]", "[methods", "Expected"),
        ("50±1", "50±", "could not convert"),
    ],
)
def test_an_invalid_table_raises_an_error_that_names_the_problem(place, old, new, said):
    assert old in TINY
    (place / "tiny/table.toml").write_text(TINY.replace(old, new, 1))
    with pytest.raises(ValueError, match="table.toml: ") as error:
        papers.read_table(place, "tiny/table")
    assert said in str(error.value)


def test_an_unknown_option_is_refused_before_the_run(tmp_path):
    place = with_tables(tmp_path / "tables", table=TINY.replace("batch_size", "bach_size"))
    with pytest.raises(ValueError, match="unknown argument '--bach-size=4': did you mean '--batch-size'"):
        do(place, tmp_path / "o")
    assert not list((tmp_path / "o").rglob("*.partial"))


def test_a_setting_that_refers_to_another_table_stores_its_results_there(place, tmp_path, capsys):
    other = papers.read_table(place, "tiny/table").settings["natural, half of them"]
    assert papers.read_table(place, "tiny/figure").settings["half"].cells == {"FedProx": other.cells["FedProx"]}
    words = ["run", "tiny/figure", f"--tables={place}", f"--output={tmp_path}", "--rounds=8"]
    assert main(words) == 0 and "\n      loss: " in capsys.readouterr().out
    assert sorted(read(tmp_path, "FedProx")) == [0, 1]
    with pytest.raises(ValueError, match="did you mean 'tiny/table'"):
        papers.read_table(place, "tiny/tabel")


def test_settings_and_methods_can_be_selected(place, tmp_path):
    table = papers.read_table(place, "tiny/table")
    assert [(c.setting, c.method) for c in papers.select(table, ["NATURAL"], ["fedavg"])] == [
        ("natural, half of them", "FedAvg")
    ]
    assert len(papers.select(table, [], [])) == 4
    longer = papers.read_table(with_tables(tmp_path, table=TINY + "[settings.natural]\n"), "tiny/table")
    assert {cell.setting for cell in papers.select(longer, ["Natural"], [])} == {"natural"}
    with pytest.raises(ValueError, match="--methods must be one of .*FedAvg"):
        papers.select(table, [], ["Fed"])


@pytest.mark.parametrize("line", ["{", "3", '{"seed": 0}', '{"series": []}', '{"seed": 0, "series": {}, "x": 1}'])
def test_a_damaged_line_of_a_results_file_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="a.jsonl, line 1 is not a result .*: delete the file"):
        read_results(tmp_path / "a.jsonl")


# --- scores and their comparison --------------------------------------------------------------------------------------


CURVE = {
    "accuracy": Series([1, 2, 3, 4, 20], [0.2, 0.5, 0.9, None, 0.7]),
    "loss": Series([1, 2, 3, 4], [4.0, 1.0, 2.0, None]),
    "cka": Series([5, 10], [[0.9, 0.8, 0.7], [0.6, 0.5, 0.25]]),
    "gain": Series([1, 10, 11, 20, 100], [9.0, 9.0, 1.0, 2.0, 6.0]),
    "lp": Series([1, 2, 3, 4, 6], [0.4, 0.5, 0.6, [0.1, 0.7], 0.8]),
    "dip": Series([1, 2, 3, 5], [0.6, 0.2, None, 0.8]),
    "empty": Series([], []),
}
# "rounds to" with interpolation: from the best value so far, in the last round that has a finite value
INTERPOLATED = {("accuracy", 0.1): 1, ("accuracy", 0.35): 1.5, ("accuracy", 0.5): 2, ("accuracy", 0.91): math.inf}
INTERPOLATED |= {("dip", 0.7): 3.5, ("dip", 0.6): 1, ("loss", 3.0): 1 + 1 / 3}


@pytest.mark.parametrize(
    ("score", "value"),
    [
        ({"take": "best", "scale": 100}, 90),
        ({"take": "best", "round": 2}, 0.5),
        ({"take": "best", "of": "loss"}, 1.0),
        ({"take": "best", "of": "loss", "round": 1}, 4.0),
        ({"take": "best", "round": 1, "of": "cka"}, math.nan),  # no value up to round 1
        ({"take": "last"}, 0.7),
        ({"take": "last", "window": 2, "of": "gain"}, 4.0),
        ({"take": "last", "window": 2}, math.nan),  # one of the two values is not finite
        ({"take": "last", "of": "loss"}, math.nan),
        ({"take": "last", "of": "cka"}, 0.25),  # the value after the last local epoch
        ({"take": "last", "of": "cka", "window": 2}, 0.475),
        ({"take": "at", "round": 2, "scale": 100}, 50),
        ({"take": "at", "round": 4}, math.nan),
        ({"take": "at", "round": 7}, math.nan),
        ({"take": "at", "round": 5, "of": "cka"}, 0.7),
        ({"take": "rounds_to", "target": 0.5}, 2),
        ({"take": "rounds_to", "target": 0.9001}, math.inf),
        ({"take": "rounds_to", "target": 0.6, "round": 2}, math.inf),
        ({"take": "rounds_to", "target": 2.0, "of": "loss"}, 2),
        ({"take": "rounds_to", "target": 0.5, "of": "loss"}, math.inf),
        *(
            ({"take": "rounds_to", "interpolate": True, "of": of, "target": y}, t)
            for (of, y), t in INTERPOLATED.items()
        ),
        ({"take": "when", "of": "lp", "target": 0.5}, 0.6),  # round 3 starts with the model of round 2
        ({"take": "when", "of": "lp", "target": 0.51, "scale": 10}, 7.0),
        ({"take": "when", "of": "lp", "target": 0.95}, math.nan),
        ({"take": "when", "of": "lp", "target": 0.5, "relative": True}, 0.6 / 0.5),  # accuracy of the model of round 2
        ({"take": "median", "of": "gain"}, 2.0),
        ({"take": "median", "of": "loss"}, 2.0),
        ({"of": "empty"}, math.nan),
        ({"of": "unknown"}, math.nan),
        ({"take": "rounds_to", "of": "unknown"}, math.nan),
    ],
)
def test_scores_are_computed_from_series(score, value):
    assert Score("s", **score)(CURVE) == pytest.approx(value, nan_ok=True)


def test_signs_and_digits_of_scores():
    assert [Score("s", of=of, take=take).sign for of, take in (
        ("accuracy", "best"), ("loss", "last"), ("train_loss", "at"), ("accuracy", "rounds_to"), ("gain", "median"))
    ] == [1, -1, -1, -1, 0]  # fmt: skip
    assert [Score("s", take="rounds_to").digits, Score("s", scale=100).digits, Score("s").digits] == [0, 2, 4]


def test_printed_numbers_and_summaries(place):
    of = papers.printed_number
    assert of(98.5) == Printed(98.5, None, "98.5") and of("69.1±0.6") == Printed(69.1, 0.6, "69.1±0.6")
    assert of(">600") == Printed(math.inf, None, ">600")
    assert [summary(values, 1) for values in ([1.0, 3.0], [2.0], [2.0, math.inf], [math.inf], [math.nan])] \
        == ["2.0 ± 1.4", "2.0", "2.0 (1 of 2)", "not reached", "-"]  # fmt: skip


def runs(*values: float, seeds: range | None = None, rounds: int = 100) -> dict[int, Result]:
    """Returns runs whose accuracy is 0 in round 10 and the given value in round 50."""
    one = Result("s", "m", 0, rounds, False, 1.0, 1, "", {}, None, "", {}, "", {})
    return {
        seed: one._replace(seed=seed, series={"accuracy": Series([10, 50], [0.0, value])})
        for seed, value in zip(seeds or range(len(values)), values, strict=True)
    }


ACCURACY = Score("accuracy", take="last", scale=100)
ROUNDS = Score("rounds", take="rounds_to", target=0.5)
LOOKS = comparison.Looks((3, 6, 9, 12), False)


@pytest.mark.parametrize(
    ("ours", "printed", "score", "shown"),
    [
        (runs(0.50, 0.51, 0.52), "55.9", ACCURACY, "-4.90 ?"),  # half of the interval: 4.303 sqrt(1/3 + 1) = 4.97
        (runs(0.50, 0.51, 0.52), "56", ACCURACY, "-5.00 ▼"),
        (runs(0.50, 0.51, 0.52), "46", ACCURACY, "+5.00 ▲"),
        (runs(0.50, 0.51, 0.52), "54±0.4", ACCURACY, "-3.00 ?"),  # half of the interval: 4.303 sqrt(1/3 + 0.4^2) = 3.02
        (runs(0.50, 0.51, 0.52), "54.1±0.4", ACCURACY, "-3.10 ▼"),
        (runs(0.5001, 0.50, 0.50), "50.1", ACCURACY, "-0.10 ≈"),  # the whole interval is within a tenth of 49.9
        (runs(0.50), "47±1", ACCURACY, "+3.00"),  # the variance over seeds is unknown
        (runs(0.50, 0.50), "49", ACCURACY, "+1.00"),  # the variance over seeds is 0
        (runs(math.nan), "50", ACCURACY, "-"),
        (runs(0.7, 0.7), ">40", ROUNDS, "reached ▲"),
        (runs(0.7), ">40", ROUNDS, "reached"),
        (runs(0.7, 0.4), ">40", ROUNDS, "reached"),
        (runs(0.4, 0.4), "40", ROUNDS, "not reached ▼"),
        (runs(0.4, 0.4), "400", ROUNDS, "-"),  # our runs end after 100 rounds, before round 400
        (runs(0.4, 0.4), "80", ROUNDS._replace(round=60), "-"),  # only the first 60 rounds count
        (runs(0.4, 0.4), ">400", ROUNDS, "-"),
        (runs(0.7, 0.7, 0.4), "40", ROUNDS, "+10"),  # the mean over the seeds that reached the target
    ],
)
def test_the_difference_from_the_paper_and_its_mark(ours, printed, score, shown):
    number = papers.printed_number(printed)
    assert report._difference_text(ours, number, score, True) == shown
    assert report._difference_text(ours, number, score, False) == shown.rstrip(" ▲▼≈?")


def compared_runs(a, b, score: Score) -> tuple[str, str, int]:
    """Returns the word, the text, and the number of seeds of the look."""
    answer = comparison.compare([a], [b], score, LOOKS)
    assert math.isnan(answer.p) or 0 <= answer.p <= 1
    return answer.word, answer.text, answer.seeds


def test_a_claim_is_judged_by_a_t_interval():
    a, b = np.array([0.9, 0.8, 0.85]), np.array([0.7, 0.72, 0.74])
    low, high = (100 * x for x in stats.ttest_rel(a, b).confidence_interval(1 - 0.05 / 4))
    text = f"{100 * (a - b).mean():+.2f} [{low:+.2f}, {high:+.2f}], 3 seeds"
    assert compared_runs(runs(*a), runs(*b), ACCURACY) == ("holds" if low > 0 else "open", text, 3)
    assert compared_runs(runs(*b), runs(*(b + [0.2, 0.21, 0.2])), ACCURACY)[0] == "does not hold"
    early = {seed: run._replace(series={"accuracy": Series([10 + seed], [0.9])}) for seed, run in runs(1, 1, 1).items()}
    assert compared_runs(early, runs(0.9, 0.9, 0.9), ROUNDS) == ("holds", "+39.0 [+33.9, +44.1], 3 seeds", 3)

    # There is no interval if the methods share fewer than three seeds, if all seeds have the same difference, if a
    # method has no score, or if no run reached the target.
    assert compared_runs(runs(*a), runs(0.5, 0.6, seeds=range(7, 9)), ACCURACY) == ("open", "no seed in common", 0)
    assert compared_runs(runs(0.3), runs(0.1), ACCURACY) == ("open", "+20.00, 1 seed", 0)
    assert compared_runs(runs(0.3, 0.4), runs(0.1, 0.1), ACCURACY) == ("open", "+25.00, 2 seeds", 0)
    assert compared_runs(runs(*[0.3] * 3), runs(*[0.25] * 3), ACCURACY) == ("open", "+5.00 for each of 3 seeds", 3)
    assert compared_runs(runs(0.3, 0.3), runs(math.nan, math.nan), ACCURACY) == ("open", "not scored", 0)
    assert compared_runs(runs(0.1), runs(0.2), ROUNDS) == ("open", "neither reached the target", 0)

    # A run that never reaches the target counts as if it reached the target one round after its last round, which gives
    # a bound. The score "best" only uses the rounds that both methods have.
    bound = "+90.0 [+84.9, +95.1], 3 seeds (a bound: not all reached the target)"
    assert compared_runs(early, runs(0.1, 0.1, 0.1), ROUNDS) == ("holds", bound, 3)
    assert compared_runs(early, runs(0.1, 0.1, 0.1), ROUNDS._replace(round=60))[1].startswith("+50.0 ")
    assert compared_runs(runs(0.1, 0.1, 0.1), early, ROUNDS)[0] == "does not hold"
    assert compared_runs(runs(0.1, 0.1, 0.1, rounds=8), early, ROUNDS)[0] == "open"
    short = {seed: run._replace(rounds=20) for seed, run in early.items()}
    assert compared_runs(runs(1, 1, 1), short, Score("best", scale=100)) == (
        "open", "-90.00 for each of 3 seeds, of the first 20 rounds", 3
    )  # fmt: skip
    assert compared_runs(runs(0.3, 0.4, 9), runs(0.2, 0.2, math.nan), ACCURACY)[1].endswith(", 2 seeds")


def test_methods_are_compared_with_the_same_seeds():
    """The mean of all seeds of one method minus that of the other would be +25 points."""
    assert compared_runs(runs(0.9), runs(0.8, 0.7, 0.6, 0.5), ACCURACY) == ("open", "+10.00, 1 seed", 0)


def test_methods_are_equal_if_the_interval_is_within_the_margin():
    def word(*gaps: float, score: Score = ACCURACY) -> str:
        return compared_runs(runs(*(0.8 + np.array(gaps))), runs(*[0.8] * len(gaps)), score)[0]

    assert word(-0.0005, 0.0005, 0.0001) == "equal" and word(-0.004, 0.004, 0.0) == "open"
    assert word(0.004, 0.0041, 0.0042) == "holds" and word(0.0, 0.0, 0.0) == "equal"
    late = {seed: run._replace(series={"accuracy": Series([20], [0.9])}) for seed, run in runs(1, 1, 1).items()}
    assert compared_runs(late, late, ROUNDS)[0] == "equal"
    assert compared_runs(runs(0.1, 0.2, 0.1), runs(0.1, 0.1, 0.9), ROUNDS)[0] == "open"


def test_only_complete_looks_count():
    """With 3 to 12 seeds, the last of the looks at 3, 6, 9 and 12 seeds is the answer, and an open one asks for the
    next."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.4, 0.6, 14), rng.uniform(0.4, 0.6, 14)
    for n in range(3, 15):
        answer = comparison.compare([runs(*a[:n])], [runs(*b[:n])], ACCURACY, LOOKS)._replace(word="open")
        assert answer.seeds == min(n - n % 3, 12)
        assert answer.p == pytest.approx(min(1, 4 * stats.ttest_rel(a[: answer.seeds], b[: answer.seeds]).pvalue))
        open_one = verdict_of(answer)
        assert open_one.wanted_seeds == min(answer.seeds + 3, 12)
        decided = open_one._replace(significant=True), verdict_of(answer._replace(word="equal"))
        assert [each.wanted_seeds for each in decided] == [answer.seeds] * 2


def verdict_of(answer: comparison.Comparison, looks: comparison.Looks = LOOKS) -> comparison.Verdict:
    return comparison.Verdict("s", "score", "A", "B", "-", looks, answer, False)


def test_seeds_that_the_table_fixed_are_all_used_in_the_first_look():
    """Five fixed seeds are one look of four. With `one_look`, there is no other look, and a 95 % interval."""
    cell = papers.Cell("t", "s", "m", {}, seeds=5)
    several, one = (
        comparison.looks_of([cell, cell._replace(seeds=1)]),
        comparison.looks_of([cell._replace(one_look=True)]),
    )
    assert several.seeds == (5, 6, 9, 12) and one.seeds == (5,)
    assert comparison.looks_of([cell._replace(seeds=1)]) == LOOKS
    a, b = np.random.default_rng(0).uniform(0.4, 0.6, (2, 5))
    for n, looks, seeds, level in ((4, several, 0, 0), (5, several, 5, 0.9875), (5, one, 5, 0.95), (4, one, 0, 0)):
        answer = comparison.compare([runs(*a[:n])], [runs(*b[:n])], ACCURACY, looks)
        assert (
            answer.seeds == seeds
            and verdict_of(answer, looks).wanted_seeds == {0: 5, 5: 5 if looks is one else 6}[seeds]
        )
        if seeds:
            low, high = stats.ttest_rel(a, b).confidence_interval(level)
            assert (answer.gap.low, answer.gap.high) == pytest.approx((100 * low, 100 * high))


def test_differences_of_two_settings_are_compared():
    """FedADC's gap is larger in one setting than in another one: the sums of the two sides are compared."""
    a, b, c, d = np.random.default_rng(1).uniform(0.4, 0.6, (4, 3)) + [[0.3], [0], [0.1], [0]]
    answer = comparison.compare([runs(*a), runs(*d)], [runs(*b), runs(*c)], ACCURACY, LOOKS)
    assert answer.gap.value == pytest.approx(100 * ((a - b) - (c - d)).mean())
    assert answer.p == pytest.approx(min(1, 4 * stats.ttest_1samp((a - b) - (c - d), 0).pvalue))
    near = comparison.compare([runs(*a), runs(*b)], [runs(*b), runs(*(a + [0.001, -0.001, 0]))], ACCURACY, LOOKS)
    assert near.word == "open"  # there is no margin for sums


@pytest.mark.parametrize(
    ("score", "value", "published", "margin"),
    [
        (ACCURACY, 97.0, math.nan, 0.3),  # a tenth of the error rate
        (ACCURACY, 97.0, 0.4, 0.2),  # half of the published difference
        (ACCURACY, 97.0, -3.0, 0.3),
        (ROUNDS, 50.0, math.nan, 5.0),
        (Score("LP", of="lp", take="when", relative=True), 0.2, math.nan, 0.02),
        (Score("loss", of="loss", take="at"), 0.2, math.inf, 0.02),
    ],
)
def test_the_margin_is_a_tenth_of_the_error_or_half_of_the_published_difference(score, value, published, margin):
    assert comparison.margin(score, value, published) == pytest.approx(margin)


def test_a_claim_with_a_target_needs_all_of_three_runs():
    words = [comparison.reaches(runs(*of), ACCURACY, 80)[:2] for of in ((0.9, 0.8, 0.85), (0.9, 0.9), (0.7,) * 3)]
    assert words == [
        ("holds", "80.00 to 90.00, 3 seeds"), ("open", "90.00 to 90.00, 2 seeds"),
        ("does not hold", "70.00 to 70.00, 3 seeds"),
    ]  # fmt: skip
    assert comparison.reaches(runs(0.9, 0.9, 0.7), ACCURACY, 80).word == "open"


def test_a_smoothed_curve_reaches_its_target_later():
    series = {"accuracy": Series([1, 2, 3, 4, 5], [0.1, 0.9, 0.1, 0.8, 0.9])}
    assert Score("s", take="rounds_to", target=0.8)(series) == 2
    assert Score("s", take="rounds_to", target=0.8, smooth=2)(series) == 5
    assert Score("s", take="rounds_to", target=0.8, smooth=9)(series) == math.inf


def test_a_claim_that_the_papers_numbers_contradict_is_counted_separately():
    printed = {"A": papers.printed_number(">300"), "B": papers.printed_number(133), "C": papers.printed_number(">300")}
    orders = [report._printed_order(printed, a, b, ROUNDS) for a, b in ("BA", "AB", "AC", "AD")]
    assert orders == ["yes", "no", "equal", "-"]
    answer = comparison.Comparison("holds", "+1.0 [+0.5, +1.5], 3 seeds", 0.01, 3, fd.statistics.Mean(1.0, 0.5, 0.01))
    verdict = verdict_of(answer)._replace(score="rounds", printed="no")
    verdicts = [
        verdict, verdict._replace(printed="yes", answer=answer._replace(word="open")),
        verdict._replace(printed="-", answer=answer._replace(p=math.nan)),
    ]  # fmt: skip
    assert report._two_counts(verdicts) == [[0, 0, 0, 1], [2, 0, 0, 0]]
    cell = papers.Cell("tiny/table", "s", "A", {"dataset": "mnist"})
    table = papers.Table("t", "", "", "", {"s": papers.Setting("s", {"A": cell}, {}, {}, "")}, [], {}, [], {}, "")
    lines = list(report._verdict_lines(table, verdicts))
    assert sum(line.startswith("| s |") for line in lines) == 2
    assert lines[-1] == "- s, rounds: A over B: +1.0 [+0.5, +1.5], 3 seeds"


def test_a_setting_whose_runs_all_diverged_has_no_panel(tmp_path):
    good, bad = ([1, 2], [0.5, 0.5]), ([1, 2], [math.nan, math.nan])
    settings = [
        Compared("bad", {"A": [bad]}, {"A": [(None, 3.0)]}),
        Compared("good", {"A": [good]}, {}),
    ]
    panels = [axes for axes in fd.plots.compared(settings, "y").axes if axes.axison]
    assert [axes.get_title() for axes in panels] == ["good"]
    with pytest.raises(ValueError, match="at least 1 round"):
        fd.plots.compared(settings[:1], "y")


def test_panels_share_their_y_axis_only_if_there_is_one_method():
    def axes_of(methods):
        low, high = ([1, 2], [0.1, 0.2]), ([1, 2], [0.7, 0.9])
        settings = [Compared(name, dict.fromkeys(methods, [run]), {}) for name, run in (("x", low), ("y", high))]
        return [axes.get_ylim() for axes in fd.plots.compared(settings, "gain").axes if axes.axison]

    one, two = axes_of("A"), axes_of("AB")
    assert one[0] == one[1] == pytest.approx((0.06, 0.94)) and two[0] != two[1]


def test_the_agreement_table_marks_reruns_that_differ() -> None:
    agreement = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "agreement.py"))
    cell = {"server": 1e-7, "clients": 2e-7, "rerun equal": True}
    layouts = {f"{P} x {D}": cell for P, D in agreement["LAYOUTS"]}
    row = agreement["table"]({"fedavg": layouts | {"2 x 2": cell | {"rerun equal": False}}}).splitlines()[-1]
    assert row == "| fedavg | 2.0e-07 | 2.0e-07 | 2.0e-07 (rerun differs) | 2.0e-07 |"
