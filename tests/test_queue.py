"""Tests of the queue of experiments/tables: what is left, its order and its minutes, and the workers that run it."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_experiment
from test_experiment import LONG, TINY, read, series, with_tables

import fedjax_drift as fd
from experiments.tables import claims, crew, papers, queue, runner, times, worker
from experiments.tables.__main__ import main
from experiments.tables.queue import Job, Question
from experiments.tables.results import Result, write_results
from experiments.tables.times import Cost, Machine, Times
from experiments.tables.worker import Done, Place, Said, Task

pytestmark = pytest.mark.thorough
compiled_once, whole = test_experiment.compiled_once, test_experiment.whole  # fixtures
PATIENCE = 300  # seconds after which a process that should end counts as one that never ends
HERE = Machine("cpu", "2 cores, Abacus")
CLAIM = """
[[claims]]
paper = "Nobody"
data = "nothing"
claim = "FedProx is better than {worse}."
table = "tiny/table"
score = "last (%)"
better = "FedProx"
worse = ["FedAvg"]
settings = ["natural, half of them"]
"""


class Inside:
    """A worker in the process of the test. It performs a task as soon as it begins."""

    def __init__(self, place: Place, output: Path) -> None:
        self.job, self.place, self.output, self.timing, self.minutes = None, place, output, False, 0.0
        self.connection, self.theirs = multiprocessing.Pipe()
        self.process = SimpleNamespace(is_alive=lambda: self.alive, kill=lambda: None)
        self.alive = True

    def begin(self, job: Job, timing: bool) -> None:
        self.job, self.timing = job, timing
        worker.perform(Task(job.table, job.cell, job.seeds, timing), self.output, self.theirs.send)

    def received(self) -> Said | Done:
        return self.connection.recv()

    def stop(self) -> None:
        self.alive = False


@pytest.fixture
def inside(monkeypatch) -> None:
    monkeypatch.setattr(crew, "Worker", Inside)
    monkeypatch.setattr("os.nice", lambda by: 0)  # the process of the tests could not restore its priority


@pytest.fixture
def queued(tmp_path: Path) -> Path:
    """A table with a setting whose data are not available, and a headline setting. It compares no methods."""
    text = TINY.replace('"patience"', '"MNIST (not available here)"')
    text = text.replace('claims = [["FedProx", "FedAvg"]]', "")
    text = text.replace("[scores]", 'headline = ["later"]\n[scores]', 1) + "[settings.later]\nrounds = 4\n"
    return with_tables(tmp_path / "tables", table=text)


def queue_of(place: Path, output: Path, *arguments: str) -> int:
    return main(["queue", "tiny/table", f"--tables={place}", f"--output={output}", *arguments])


def jobs_of(place: Path, output: Path, machine: Machine = HERE) -> list[Job]:
    return queue.missing(
        papers.read_tables(place, ["tiny/table"]), output, [], Times(output, machine, lambda text: None)
    )


# --- what is left, and in which order ---------------------------------------------------------------------------------


def test_a_claim_of_one_table_is_corrected_together_with_those_of_others(tmp_path):
    """Its p-value is significant alone, and not beside two comparisons of another table that have not been run."""
    place = with_tables(tmp_path / "tables", table=TINY, other=TINY)
    other = CLAIM.replace("tiny/table", "tiny/other").replace('half of them"]', 'half of them", "never"]')
    (place / "claims.toml").write_text(CLAIM + other)
    tables = papers.read_tables(place, ["tiny/table", "tiny/other"])
    claimed, output = claims.read(place, tables), tmp_path / "o"
    for method, values in (("FedProx", (0.8, 0.81, 0.82)), ("FedAvg", (0.70, 0.7224, 0.7076))):
        cell = tables[0].settings["natural, half of them"].cells[method]
        rest = 8, False, 1.0, 1, "", cell.options, None, "", {}, ""
        runs = [
            Result(cell.setting, method, seed, *rest, {"accuracy": papers.Series([8], [value])})
            for seed, value in enumerate(values)
        ]
        write_results(output / cell.file, runs)
    assert set(queue.answers(claimed, tables, output).values()) == {"open", "not run"}
    assert "holds" in queue.answers(claimed[:1], tables, output).values()
    left = queue.missing(tables, output, claimed, Times(output, HERE, lambda text: None), ["tiny/table"])
    assert {job.table.name for job in left} == {"tiny/table"}
    waiting = sorted((job.cell.method, job.seeds) for job in left if job.questions)
    assert waiting == [("FedAvg", (3, 4, 5)), ("FedProx", (3, 4, 5))]


def test_the_queue_of_some_tables_knows_the_claims_about_all(queued, inside, tmp_path, monkeypatch):
    (queued / "tiny/other.toml").write_text(TINY)
    (queued / "claims.toml").write_text(CLAIM.replace("tiny/table", "tiny/other"))
    given = []
    monkeypatch.setattr(crew, "listed", lambda *arguments: given.append(arguments) or "")
    assert queue_of(queued, tmp_path / "o", "--list") == 0
    ((tables, _, claimed, _, only),) = given
    assert [table.name for table in tables] == ["tiny/other", "tiny/table"] and only == ["tiny/table"]
    assert [claim.table for claim in claimed] == ["tiny/other"]


def test_the_queue_runs_headline_settings_first_until_nothing_is_left(queued, inside, tmp_path, capsys):
    output = tmp_path / "o"
    assert queue_of(queued, output, "--list") == 0
    listed = capsys.readouterr().out
    jobs = re.findall(r"~\d+\.\d min  tiny/table  (.+)", listed)
    assert [job.split("  ")[0] for job in jobs] == ["later"] * 4 + ["natural, half of them"] * 4
    assert [job.split("  ")[2] for job in jobs] == (["seed 0"] * 2 + ["seeds 1, 2"] * 2) * 2
    assert "not here (MNIST (not available here)): 4 jobs of 2 cells of tiny/table" in listed
    assert "~: estimated" in listed and not list(output.rglob("*/*.jsonl"))

    assert queue_of(queued, output, "--hours=100") == 0
    said = capsys.readouterr().out
    assert "nothing is left to run here" in said and "tiny/table  later  FedAvg  seed 0, ~" in said
    assert [sorted(read(output, method)) for method in ("FedAvg", "FedProx")] == [[0, 1, 2]] * 2
    assert (output / "tiny/table/later/FedAvg.tuning.jsonl").exists()
    assert queue_of(queued, output, "--list") == 0
    assert "0 jobs of 0 cells, about 0.0 hours" in capsys.readouterr().out


def test_the_queue_begins_with_what_open_claims_wait_for(queued, whole, tmp_path, capsys):
    """The two seeds that exist are not enough for a look. After three, the rule asks for three more."""
    (queued / "claims.toml").write_text(CLAIM)
    table = queued / "tiny/table.toml"
    table.write_text(table.read_text().replace("[scores]", 'claims = [["FedProx", "FedAvg"]]\n[scores]', 1))
    output = Path(shutil.copytree(whole, tmp_path / "o"))
    for wanted in ("seed 2", "seeds 3, 4, 5"):
        assert queue_of(queued, output, "--list") == 0
        listed = capsys.readouterr().out
        assert "for open claims: 2 jobs of 2 cells" in listed
        jobs = re.findall(r"min  tiny/table  (.+)", listed)
        served = f"  {wanted}  for Nobody: FedProx over FedAvg"
        assert sorted(jobs[:2]) == [f"natural, half of them  {method}{served}" for method in ("FedAvg", "FedProx")]
        assert jobs[2].startswith("later")
        assert re.search(r"open claims, and .*\n +0.0 h  Nobody: FedProx is better than FedAvg.", listed)
        run = ["run", "tiny/table", f"--tables={queued}", f"--output={output}", "--rows=natural", "--seeds=3"]
        assert main([*run, "--no-progress"]) == 0
        capsys.readouterr()


CLAIMED = claims.Claim("P", "C", "nothing", "tiny/table", "score", "A", ("q",), "B")


def job(name: str, minutes: float, *questions: str, **options) -> Job:
    """A job of which nobody reads the table, for the questions with these names."""
    asked = tuple(Question(CLAIMED, question) for question in questions)
    cell = papers.Cell("tiny/table", name, "A", {"dataset": name})
    table = papers.Table("tiny/table", "", "", "", {}, [], {}, [], {}, "")
    stage = 0 if questions else 3
    return Job(table, cell, (0,), stage, 60 * minutes, questions=asked)._replace(**options)


class Seconds:
    """Times of a second a round, which were measured for some cells."""

    def __init__(self, *timed: str) -> None:
        self.timed = timed

    def of_round(self, cell: papers.Cell) -> times.Seconds:
        return times.Seconds(1.0, cell.setting in self.timed)


def test_the_cheapest_question_comes_first_with_all_of_its_jobs():
    jobs = [job("a", 5), job("b", 1, "long"), job("c", 9, "long"), job("d", 4, "short"), job("e", 3, "short", "long")]
    jobs += [job("f", 1, "elsewhere"), job("g", 9, "elsewhere", obstacle="no data")]
    found = queue.ordered(jobs, Seconds())
    assert [each.cell.setting for each in found] == ["e", "d", "b", "c", "f", "a", "g"]
    assert [each.together for each in found[:5]] == [7, 7, 13, 13, math.inf]
    assert [each.minutes for each in found[:3]] == [3, 4, 1]


def test_a_job_that_may_be_shorter_is_timed_before_the_first_one_runs():
    """An estimate may be wrong by a factor of three. Short jobs are not timed, nor jobs of a later stage."""
    jobs = [job("a", 9, "q"), job("b", 2, "q"), job("c", 32, "r"), job("d", 34, "s"), job("e", 9)]
    assert [each.cell.setting for each in queue.ordered(jobs, Seconds())] == ["b", "a", "c", "d", "e"]
    timed: list[str] = []
    for _ in jobs:
        one = queue.to_time(queue.ordered(jobs, Seconds(*timed)))
        timed += [] if one is None else [one.cell.setting]
    assert timed == ["a", "c"] and queue.to_time([]) is None
    found = queue.to_time(queue.ordered(jobs, Seconds()), [times.timed_options(jobs[0].cell)])
    assert found is not None and found.cell.setting == "c"


def test_an_estimate_leaves_a_run_for_a_faster_machine_only_if_it_is_far_too_long():
    def obstacles(hours: float) -> list[bool]:
        return [bool(queue.ordered([job("a", 60 * hours)], Seconds(*timed))[0].obstacle) for timed in ([], ["a"])]

    assert [obstacles(hours) for hours in (7.9, 8.1, 23.9, 24.1)] == [
        [False, False], [False, True], [False, True], [True, True]
    ]  # fmt: skip


# --- the minutes ------------------------------------------------------------------------------------------------------


def test_an_estimate_uses_the_rate_of_earlier_results(queued, inside, tmp_path):
    """The result of two cores is that of a core that is half as fast."""
    output = tmp_path / "o"
    queue_of(queued, output)
    other, file = (output / "tiny/table" / name / "FedAvg.jsonl" for name in ("later", "natural-half-of-them"))
    other.write_text(re.sub(r'"seconds":[0-9.]+', '"seconds":0', other.read_text()))  # they have no rate
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    for rate, hardware in [
        (1, "1 core, Abacus"),
        (10, "1 core, Abacus"),
        (20, "2 cores, Abacus"),
        (0, "1 core, Other"),
    ]:
        lines = [run | {"seconds": 60.0 * rate * run["together"], "hardware": hardware} for run in runs[:2]]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (left,) = [left for left in jobs_of(queued, output) if left.cell.method == "FedAvg" and not left.obstacle]
        assert left.seeds == (2,) and not left.timed
        expected = rate * (2 if hardware.startswith("2") else 1)
        assert left.minutes == pytest.approx(expected) if rate else left.minutes < 0.01


def test_a_time_is_kept_for_this_hardware_and_the_options_that_determine_it(queued, tmp_path):
    (avg, prox, *_) = [job for job in jobs_of(queued, tmp_path) if not job.obstacle]
    known = Times(tmp_path, HERE, lambda text: None)
    assert not known.of_round(avg.cell).timed  # the cost of its data
    known.add(avg.cell, 6.0)
    known.save()
    faster = avg.cell._replace(options=avg.cell.options | {"lr": 0.5, "rounds": 2, "data_seed": "seed"})
    slower = avg.cell._replace(options=avg.cell.options | {"epochs": 9})
    again = Times(tmp_path, HERE, lambda text: pytest.fail(f"{text}, although its cost is in the file"))
    assert [again.of_round(cell) == (6.0, True) for cell in (avg.cell, faster, slower)] == [True, True, False]
    assert not Times(tmp_path, Machine("cpu", "2 cores, Other"), print).of_round(avg.cell).timed
    left = [job for job in jobs_of(queued, tmp_path) if job.cell.file == avg.cell.file]
    assert all(job.timed and job.minutes == pytest.approx(job.rounds / 10) for job in left)
    assert "  0.6 min  " not in left[0].title and left[0].shown_minutes[0] != "~"

    other = Times(tmp_path, HERE, print)  # a second process, which does not know what the first one adds
    known.add(prox.cell, 7.0)
    known.save()
    other.save()
    assert Times(tmp_path, HERE, print).of_round(prox.cell) == (7.0, True)
    (tmp_path / times.FILE).write_text('{"of": "x"}\n')
    with pytest.raises(
        ValueError, match=r"queue-times.jsonl, line 1 must be a time or a cost, got .*: delete the file"
    ):
        Times(tmp_path, HERE, print)


def test_data_that_are_not_here_are_an_obstacle_and_looked_for_again(queued, tmp_path, monkeypatch):
    found, cost_of = [], times.cost_of

    def absent(cell):
        found.append(cell)
        raise FileNotFoundError("mnist.npz: download it")

    monkeypatch.setattr(times, "cost_of", absent)
    left = [job.obstacle for job in jobs_of(queued, tmp_path) if job.cell.setting == "later"]
    assert left == ["data not found: mnist.npz"] * 4 and len(found) == 1  # one for all cells with these data
    monkeypatch.setattr(times, "cost_of", cost_of)
    assert not any(job.obstacle for job in jobs_of(queued, tmp_path) if job.cell.setting == "later")


def test_the_seconds_of_a_round_have_their_share_of_evaluations_and_measurements(monkeypatch):
    """The first round and the first evaluation do not count: they are compiled."""
    now, asked, evaluations = [0.0], [], iter([50.0, 3.0, 60.0, 3.0])

    def swept(sim, rounds, seeds, eval_every, *, measure_every, on_round, **options):
        asked.append((rounds, eval_every))
        for number in range(rounds):
            now[0] += 99.0 if not number else 4.3 if measure_every == 1 else 0.3
            on_round(0, {}, {})
        return [SimpleNamespace(state=None)]

    def evaluate(sim, state):
        now[0] += next(evaluations)

    monkeypatch.setattr(times, "time", SimpleNamespace(process_time=lambda: now[0]))
    monkeypatch.setattr(fd.Simulation, "sweep", swept)
    monkeypatch.setattr(fd.Simulation, "evaluate", evaluate)
    options = {"dataset": "synthetic:num_clients=4,num_rows=8", "algorithm": "fedavg", "cohort": 2, "rounds": 8}
    cell = papers.Cell("tiny/table", "s", "A", options | {"eval_every": 6})
    assert times.seconds_of_round(cell) == pytest.approx(0.3 + 3.0 / 6) and asked == [(2, 0), (7, 0)]
    cell = cell._replace(options=options | {"eval_every": 0, "measure": "updates", "measure_every": 2})
    assert times.seconds_of_round(cell) == pytest.approx(0.3 + 4.0 / 2) and next(evaluations) == 60


def test_a_round_is_timed_in_all_its_parts():
    options = {"dataset": "synthetic:num_clients=4,num_rows=8", "algorithm": "fedavg", "cohort": 2, "rounds": 8}
    cell = papers.Cell("tiny/table", "s", "A", options | {"eval_every": 2, "measure": "updates", "measure_every": 2})
    assert times.seconds_of_round(cell) > 0 and isinstance(times.cost_of(cell), Cost)


def test_saved_rounds_are_not_left(tmp_path, monkeypatch):
    place, output = with_tables(tmp_path / "tables", table=LONG), tmp_path / "o"

    def left() -> dict[tuple, Job]:
        jobs = [job for job in jobs_of(place, output) if job.cell.setting != "never"]
        return {job.seeds: job for job in jobs if job.cell.method == "FedAvg"}

    before = left()
    with monkeypatch.context() as patch:
        patch.setattr(fd.Simulation, "sweep", test_experiment.interrupted(fd.Simulation.sweep, [], at=1))
        assert test_experiment.do(place, output, "--methods=FedAvg", "--seeds=1") == 130
    after, saved = left(), runner.saved_round(before[0,].cell, output, 0)
    assert 0 < saved < 60 and after[0,].rounds == before[0,].rounds - saved
    assert after[1, 2].rounds == before[1, 2].rounds == 120


# --- running ----------------------------------------------------------------------------------------------------------


def test_long_jobs_are_timed_once_before_they_run(queued, inside, tmp_path, monkeypatch, capsys):
    """FedProx takes half of its estimate, so it comes first. The times are kept for the next queue."""
    monkeypatch.setattr(queue, "WORTH_MINUTES", -1.0)
    monkeypatch.setattr(runner, "run_cells", lambda table, cells, *rest, say, **options: say("run") or True)
    monkeypatch.setattr(
        times, "seconds_of_round", lambda cell: 1.0 + (cell.method == "FedAvg") + 9 * ("-" in cell.options["dataset"])
    )
    assert queue_of(queued, tmp_path) == 0
    said = capsys.readouterr().out
    assert len(re.findall("timed ", said)) == 2  # the settings differ only in their rounds
    assert re.search(r"core \d+: timed .*: 2 s a round, \d\.\d min \(estimated: 0\.0 min\)", said)
    begun = re.findall(r"core \d+: tiny/table  (\w+).*  (\w+)  seeds? [\d, ]+, \d", said)
    assert [method for setting, method in begun if setting == "later"] == ["FedProx", "FedAvg"] * 2
    assert queue_of(queued, tmp_path) == 0 and "timed" not in capsys.readouterr().out
    assert queue_of(queued, tmp_path, "--list") == 0 and "~" not in capsys.readouterr().out


def test_a_job_may_be_dropped_while_it_is_timed(tmp_path):
    said: list[str] = []
    one = crew.Crew([], tmp_path, [], Times(tmp_path, HERE, said.append), said.append)
    one._timed(job("a", 9)._replace(minutes=9.0), Done(seconds=2.0), "core 0")
    assert said == [
        "0:00  core 0: timed tiny/table  a  A  seed 0: 2 s a round, not needed any more (estimated: 9.0 min)"
    ]


def test_a_job_that_cannot_be_timed_runs(queued, inside, tmp_path, monkeypatch, capsys):
    def fails(cell):
        raise MemoryError("too large")

    monkeypatch.setattr(queue, "WORTH_MINUTES", -1.0)
    monkeypatch.setattr(times, "seconds_of_round", fails)
    assert queue_of(queued, tmp_path) == 0
    assert "could not be timed: MemoryError: too large" in capsys.readouterr().out and len(read(tmp_path)) == 3


def test_a_job_that_fails_is_reported_and_the_others_run(queued, inside, tmp_path, capsys):
    table = queued / "tiny/table.toml"
    table.write_text(table.read_text() + "batch_size = 0\n")  # of the setting that comes first
    assert queue_of(queued, tmp_path) == 1
    said = capsys.readouterr().out
    assert len(re.findall("^failed: tiny/table  later .*--batch-size: must be", said, re.MULTILINE)) == 2
    assert "nothing else is left to run here" in said and sorted(read(tmp_path)) == [0, 1, 2]
    assert len(re.findall("core .*: failed: ", said)) == 2  # the other seeds of a cell that failed are not tried


class Scripted(Inside):
    """A worker that sends the messages of a script, one for each task."""

    script: list[Done] = []

    def begin(self, job: Job, timing: bool) -> None:
        self.job, self.timing = job, timing
        message = self.script.pop(0)
        self.theirs.send(message() if callable(message) else message)


@pytest.fixture
def scripted(inside, monkeypatch, tmp_path) -> list:
    """The jobs that `queue.missing` returns, call after call; the last ones again and again."""
    each: list[list[Job]] = []
    monkeypatch.setattr(crew, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "script", [])
    monkeypatch.setattr(crew, "places", lambda machine: [Place("core 0", 0)])
    monkeypatch.setattr(queue, "missing", lambda *arguments: each.pop(0) if len(each) > 1 else each[0])
    monkeypatch.setattr(queue, "answers", lambda *arguments: {Question(CLAIMED, "q"): "holds"})
    return each


def run_scripted(tmp_path: Path, hours: float | None = None) -> tuple[int, str]:
    said: list[str] = []
    return crew.run([], tmp_path, [], hours, said.append), "\n".join(said)


def test_jobs_that_nobody_waits_for_any_more_are_dropped(scripted, tmp_path):
    jobs = queue.ordered([job("a", 1, "q"), job("b", 2, "q")], Seconds("a", "b"))
    scripted += [jobs, []]
    Scripted.script += [Done()]
    code, said = run_scripted(tmp_path)
    assert code == 0 and "b  A" not in said and "holds in q: P: C" in said and not Scripted.script


def test_a_cell_that_another_process_runs_is_tried_again(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(crew, "BUSY_SECONDS", 0.0)
    jobs = [job("a", 1, timed=True)._replace(minutes=1.0)]
    scripted += [jobs, []]
    Scripted.script += [Done(busy=True), Done(busy=True), Done()]
    code, said = run_scripted(tmp_path)
    assert code == 0 and "failed" not in said and not Scripted.script


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_queue_which_says_what_is_left(number, code, scripted, tmp_path, capsys):
    jobs = [job(name, 90)._replace(minutes=90.0, timed=True) for name in "ab"]
    scripted += [jobs]
    Scripted.script += [lambda: signal.raise_signal(number) or Said("running")]
    found, said = run_scripted(tmp_path)
    assert found == code and "the workers save their rounds and stop" in said
    assert "left, the same command continues:" in said and "2 jobs of 2 cells, about 3.0 hours" in said
    assert not (tmp_path / crew.LOCK).exists()


def test_the_queue_stops_when_its_time_is_over(scripted, tmp_path):
    scripted += [[job("a", 1)._replace(minutes=1.0)]]
    code, said = run_scripted(tmp_path, hours=1e-9)
    assert code == 0 and "left, the same command continues:" in said


def test_the_second_ctrl_c_does_not_wait_for_the_workers(scripted, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Scripted, "stop", lambda self: pytest.fail("the workers are asked"))
    scripted += [[job("a", 1)._replace(minutes=1.0)]]
    Scripted.script += [twice]
    assert run_scripted(tmp_path)[0] == 130


def test_what_runs_and_what_is_left_is_told_now_and_then(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(crew, "REPORT_SECONDS", 0.0)
    jobs = [job(name, 90)._replace(minutes=90.0, timed=True) for name in "ab"]
    scripted += [jobs, jobs[1:], []]
    Scripted.script += [Done(), Done()]
    monkeypatch.setattr(Inside, "minutes", 30.0, raising=False)
    code, said = run_scripted(tmp_path)
    assert code == 0 and "core 0: tiny/table  a  A  seed 0, 0 of 90.0 min" in said


def test_a_second_queue_is_refused(queued, inside, tmp_path, capsys):
    with runner.locked(tmp_path / "o" / crew.LOCK):
        assert queue_of(queued, tmp_path / "o") == 1
        assert queue_of(queued, tmp_path / "o", "--list") == 0
    assert "one process at a time can run the queue" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "3h", "-3", "0", "nan", "inf"])
def test_invalid_hours_are_an_error(text: str, queued, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        queue_of(queued, tmp_path, f"--hours={text}")
    assert f"--hours must be a number > 0, got {text!r}: pass 0.5 for half an hour" in capsys.readouterr().err


def test_a_list_has_no_hours_and_run_has_names(queued, tmp_path, capsys):
    for words in (["queue", "--list", "--hours=1"], ["run"]):
        with pytest.raises(SystemExit, match="2"):
            main([*words, f"--tables={queued}", f"--output={tmp_path}"])
    said = capsys.readouterr().err
    assert "not allowed with argument --list" in said and "run needs names of tables, got none" in said


# --- the processes ----------------------------------------------------------------------------------------------------


def test_a_core_has_a_worker_and_accelerators_have_one(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert [(place.name, place.core) for place in crew.places(HERE)] == [("core 3", 3), ("core 5", 5)]
    gpu = Machine("gpu", "2 x NVIDIA H200")
    assert [(place.name, place.core) for place in crew.places(gpu)] == [("2 x NVIDIA H200", None)]
    assert [machine.of_worker for machine in (HERE, gpu)] == ["1 core, Abacus", "2 x NVIDIA H200"]
    assert crew.machine().platform == "cpu"


def test_sigterm_saves_a_sweep_and_the_next_worker_has_the_same_results(tmp_path, monkeypatch):
    """A worker that stops sends SIGTERM to itself."""
    place, before, after = with_tables(tmp_path / "tables", table=LONG), [], []
    table = papers.read_table(place, "tiny/table")
    (cell,) = papers.select(table, ["natural"], ["FedAvg"])
    task, sent = Task(table._replace(tune={}), cell, (0, 1)), []
    worker.perform(task, tmp_path / "whole", sent.append)
    assert sent[-1] == Done()
    sweep = fd.Simulation.sweep
    with monkeypatch.context() as patch:
        patch.setattr(fd.Simulation, "sweep", test_experiment.interrupted(sweep, before, 1, signal.SIGTERM))
        with pytest.raises(SystemExit, match="143"):
            worker.perform(task, tmp_path / "o", sent.append)
    assert max(before) < 60 and not read(tmp_path / "o")
    monkeypatch.setattr(fd.Simulation, "sweep", test_experiment.interrupted(sweep, after))
    worker.perform(task, tmp_path / "o", sent.append)
    assert min(after) == max(before) + 1 and series(read(tmp_path / "o")) == series(read(tmp_path / "whole"))


def test_a_worker_is_a_process_that_ends_with_its_task_or_with_the_queue(tmp_path):
    """It runs on one core. One that is killed is a failed task. One without a queue ends."""
    place = with_tables(tmp_path / "tables", table=TINY)
    table = papers.read_table(place, "tiny/table")
    (cell,) = papers.select(table, ["natural"], ["FedAvg"])
    one = job("x", 1)._replace(table=table._replace(tune={}), cell=cell)
    core = crew.places(HERE)[0]
    workers = [crew.Worker(core, tmp_path / "o") for _ in range(4)]
    begun, killed, orphan, stopped = workers
    try:
        killed.process.kill()
        killed.begin(one, False)
        assert killed.connection.poll(PATIENCE)
        assert killed.received() == Done("its process has ended with exit code -9")
        orphan.connection.close()
        begun.begin(one, False)
        assert begun.received() == Said("natural, half of them  FedAvg: 8 rounds, seeds 0")
        assert begun.received().text.startswith("last (%)") and begun.received().text.startswith("rounds to 1 %")
        assert begun.received() == Done()
        assert read(tmp_path / "o")[0].hardware.startswith("1 core, ")
        begun.begin(one._replace(cell=cell._replace(options={"dataset": "nothing"})), True)
        assert "nothing" in begun.received().error
        stopped.stop()
        begun.stop()
        for each in (begun, orphan, stopped):
            each.process.join(PATIENCE)
            assert each.process.exitcode == -signal.SIGTERM
    finally:
        for each in workers:
            each.process.kill()
