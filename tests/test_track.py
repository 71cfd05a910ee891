"""Tests of trackers. The files that a tracker has written are read back."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small import thorough
from test_bank import file_limit

import fedjax_drift as fd
from fedjax_drift import cli, track
from fedjax_drift.errors import MissingPackageError

TRACKERS = [*track.TRACKERS]
TINY = ["run", "--dataset", "synthetic:num_clients=6,num_rows=20", "--cohort", "3", "--rounds", "2", "--no-progress"]
ENDED = {  # how each tracker says that a run has finished, failed or been killed
    "wandb": {"finished": 0, "failed": 1, "killed": 130},
    "mlflow": {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"},
    "tensorboard": {"finished": "finished", "failed": "failed", "killed": "killed"},
}


class Tracked(NamedTuple):
    """What a tracked run has in its files."""

    config: dict[str, str]
    rounds: list[tuple[int, dict[str, float]]]
    summary: dict[str, str]
    status: Any
    group: str = ""

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(t, numbers[name]) for t, numbers in self.rounds if name in numbers]


NOTHING = Tracked({}, [], {}, None)


def tracked(tracker: str, folder: Path) -> dict[str, Tracked]:
    """Returns the tracked runs of a folder by name, when they are closed."""
    if tracker == "wandb":
        wait(lambda: all(run.status is not None for run in of_wandb(folder).values()))
    return {"wandb": of_wandb, "mlflow": of_mlflow, "tensorboard": of_tensorboard}[tracker](folder)


def wait(done: Callable[[], bool]) -> None:
    """Waits for the process of W&B, which writes its files a little later."""
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def of_wandb(folder: Path) -> dict[str, Tracked]:
    """Reads W&B's log, which is in the format of LevelDB's: pieces with a checksum, a length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        data, at, piece = path.read_bytes(), 7, b""
        config, rounds, summary, status, name, group = {}, [], {}, None, path.name, ""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            piece, at = piece + data[at + 7 : at + 7 + size], at + 7 + size
            if kind not in (1, 4):  # a whole record, or its last piece
                continue
            record, piece = Record.FromString(piece), b""
            if record.HasField("run"):
                name, group = record.run.display_name, record.run.run_group
                config |= {item.key: str(json.loads(item.value_json)) for item in record.run.config.update}
            items = {key_of(item): json.loads(item.value_json) for item in record.history.item}
            if items:
                rounds.append((items["_step"], {key: x for key, x in items.items() if not key.startswith("_")}))
            summary |= {key_of(item): str(json.loads(item.value_json)) for item in record.summary.update}
            status = record.exit.exit_code if record.HasField("exit") else status
        assert name not in found, "two files have the same run"
        found[name] = Tracked(config, rounds, summary, status, group)
    return found


def key_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def of_mlflow(folder: Path) -> dict[str, Tracked]:
    from mlflow import MlflowClient

    client, found = MlflowClient(f"sqlite:///{folder}/mlflow.db"), {}
    experiment = client.get_experiment_by_name("fedjax_drift")
    for run in client.search_runs([experiment.experiment_id]):
        history = [point for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)]
        keys = [(point.step, point.key) for point in history]
        assert len(keys) == len(set(keys)), "a round is there twice"
        rounds: dict[int, dict[str, float]] = {}
        for point in sorted(history, key=lambda point: point.step):
            rounds.setdefault(point.step, {})[point.key] = point.value
        tags = run.data.tags
        summary = {name.removeprefix("summary/"): value for name, value in tags.items() if name.startswith("summary/")}
        entry = Tracked(run.data.params, [*rounds.items()], summary, run.info.status, tags["group"])
        assert found.setdefault(run.info.run_name, entry) is entry
    return found


def of_tensorboard(folder: Path) -> dict[str, Tracked]:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which reads its files")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in sorted((folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        rounds: dict[int, dict[str, float]] = {}
        for name in events.Tags()["scalars"]:
            points = events.Scalars(name)
            assert len({point.step for point in points}) == len(points), "a round is there twice"
            for point in points:
                rounds.setdefault(point.step, {})[name] = point.value
        texts = [events.Tensors(f"{name}/text_summary") for name in ("config", "summary") if name in texts_of(events)]
        config, summary = (cells(text[-1]) for text in (*texts, *[[None]] * (2 - len(texts))))
        found[place.name] = Tracked(config, sorted(rounds.items()), summary, summary.get("status"), folder.name)
    return found


def texts_of(events: Any) -> set[str]:
    return {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}


def cells(text: Any) -> dict[str, str]:
    if text is None:
        return {}
    rows = text.tensor_proto.string_val[0].decode().splitlines()[2:]
    return dict(row.strip("| ").split(" | ") for row in rows)


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """A database of MLflow without runs. To create one takes seconds."""
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(params=TRACKERS)
def tracker(request, monkeypatch) -> str:
    """The name of a tracker, whose runs stay on this machine."""
    package = track.TRACKERS[request.param].package
    pytest.importorskip(package, reason=f"needs {package}")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return request.param


@pytest.fixture
def folder(tracker, tmp_path, request) -> Path:
    (tmp_path / "run").mkdir()
    if tracker == "mlflow":
        shutil.copy(request.getfixturevalue("database"), tmp_path / "run" / "mlflow.db")
    return tmp_path / "run"


def line(t: int, **more: Any) -> dict[str, Any]:
    return {"round": t, "loss": 1 / t, "accuracy": 0.5 if t == 2 else 0.25, **more}


def small() -> fd.Simulation:
    rows = [(np.eye(3, dtype=np.float32), np.arange(3))] * 4
    data = fd.FederatedData.from_clients(rows, test=rows[0])
    return fd.Simulation(fd.models.linear((3,), 3), data, fd.algorithms.fedprox(mu=0.5), cohort_size=2)


def test_a_run_is_tracked_with_its_settings_records_and_summary(tracker, folder) -> None:
    sim = small()
    with fd.logs.Track(tracker, folder, {**sim.settings, "own": {"a": [1, 2], "b=": None}}) as send:
        _, history = sim.run(sim.init(jax.random.key(0)), 3, 1, on_round=send, progress=False)
    ((name, run),) = tracked(tracker, folder).items()
    assert name == "run" and run.status == ENDED[tracker]["finished"] and run.group == "run"
    assert run.config["algorithm"] == "fedprox" and run.config["mu"] == "0.5" and run.config["own/a"] == "[1, 2]"
    for key in ("loss", "accuracy", "train_loss", "seconds", "uplink_bytes"):
        assert run.of(key) == [(record["round"], pytest.approx(record[key])) for record in history]
    assert float(run.summary["accuracy"]) == history[-1]["accuracy"] and run.summary["folder"] == str(folder)
    assert float(run.summary["best_accuracy"]) == max(record["accuracy"] for record in history)


def test_nested_values_are_flat_and_arrays_are_left_out(tracker, folder) -> None:
    with fd.logs.Track(tracker, folder) as send:
        send(line(1, mine={"deep": {"x": 2.5}}, cka=[0.5, 0.75], label_mix=[1.0], array=np.ones(3), who="a"))
    ((t, numbers),) = tracked(tracker, folder)["run"].rounds
    numbers.pop("round", None)  # MLflow's own
    assert t == 1 and numbers == {"loss": 1.0, "accuracy": 0.25, "mine/deep/x": 2.5, "cka": 0.75}


def test_every_seed_and_setting_of_a_sweep_is_a_tracked_run(tracker, folder) -> None:
    sim = small()
    with fd.logs.Track(tracker, folder, name="sweep", config={"lr": 9}) as send:
        send.start(1)
        runs = sim.sweep(2, seeds=[0, 1], on_round=send, eval_every=1, progress=False)
        send(0, {"lr": 0.5}, line(1))
    found = tracked(tracker, folder)
    assert sorted(found) == ["sweep-lr=0.5-seed-0", "sweep-seed-0", "sweep-seed-1"]
    for run in runs:
        losses = [(record["round"], pytest.approx(record["loss"])) for record in run.history]
        assert found[f"sweep-seed-{run.seed}"].of("loss") == losses
        assert found[f"sweep-seed-{run.seed}"].config["seed"] == str(run.seed)
    assert found["sweep-lr=0.5-seed-0"].config["lr"] == "0.5" and {run.group for run in found.values()} == {"run"}


def test_a_resumed_run_continues_and_has_no_round_twice(tracker, folder) -> None:
    """The first process tracked a round more than its newest checkpoint has. Then a new run has the same name."""
    first = fd.logs.Track(tracker, folder)
    for t in (1, 2, 3):
        first(line(t))
    first.close("killed")
    with fd.logs.Track(tracker, folder, before=[line(1), line(2)]) as again:
        for t in (3, 4):
            again(line(t))
    ((_, run),) = tracked(tracker, folder).items()
    assert run.of("loss") == [(t, pytest.approx(1 / t)) for t in (1, 2, 3, 4)]
    assert run.status == ENDED[tracker]["finished"] and float(run.summary["best_accuracy"]) == 0.5
    if tracker != "tensorboard":
        before = json.loads((folder / "tracked.json").read_text())
        with fd.logs.Track(tracker, folder) as other:
            other(line(1))
        assert json.loads((folder / "tracked.json").read_text()) != before


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_an_exception_closes_the_tracked_run_with_its_status(tracker, folder, error, status) -> None:
    with pytest.raises(error), fd.logs.Track(tracker, folder) as send:
        send(line(1))
        raise error
    run = tracked(tracker, folder)["run"]
    assert run.status == ENDED[tracker][status] and run.of("loss") == [(1, 1)]


def test_ctrl_c_closes_the_tracked_run_as_killed(tracker, folder) -> None:
    """`Simulation.run` returns normally after Ctrl-C."""
    sim = small()
    with fd.logs.Track(tracker, folder) as send:
        send.start()

        def stop(record: dict[str, Any]) -> None:
            send(record)
            signal.raise_signal(signal.SIGINT)

        _, history = sim.run(
            sim.init(jax.random.key(0)), 500, 0, on_round=lambda r: None if r["round"] > 1 else stop(r)
        )
    assert 1 <= len(history) < 500 and tracked(tracker, folder)["run"].status == ENDED[tracker]["killed"]


@pytest.mark.parametrize("tracker", ["tensorboard", *map(thorough, ("wandb", "mlflow"))], indirect=True)
def test_a_killed_process_leaves_its_rounds(tracker, folder) -> None:
    program = f"""
import time, fedjax_drift as fd
send = fd.logs.Track({tracker!r}, {str(folder)!r})
for t in (1, 2):
    send({{"round": t, "loss": 1 / t}})
print("sent", flush=True)
time.sleep(600)"""
    env = os.environ | {"PYTHONPATH": str(Path(fd.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "sent\n"
            wait(lambda: tracker != "wandb" or len(of_wandb(folder).get("run", NOTHING).rounds) == 2)
        finally:
            child.kill()
    run = of_wandb(folder)["run"] if tracker == "wandb" else tracked(tracker, folder)["run"]
    assert run.of("loss") == [(1, 1), (2, 0.5)] and run.status in (None, "RUNNING")


@pytest.mark.parametrize("again", [True, False])
def test_an_error_of_the_tracker_does_not_end_the_training(tracker, folder, monkeypatch, again) -> None:
    """The tracker fails in round 2. It is asked once more, at the end, and then takes the missing rounds or not."""
    kind, sim = track.TRACKERS[tracker], small()
    log, broken, asked = kind.log, [True], []

    def fails(self: Any, t: int, numbers: Any) -> None:
        asked.append(t)
        if t >= 2 and broken:
            raise ConnectionError("no route to host")
        log(self, t, numbers)

    monkeypatch.setattr(kind, "log", fails)
    with pytest.warns(UserWarning, match=r"not take the run run \(no route to host\): the training") as said:
        with fd.logs.Track(tracker, folder) as send:
            _, history = sim.run(sim.init(jax.random.key(0)), 4, 1, on_round=send, progress=False)
            if again:
                broken.clear()
    assert len(history) == 4 and asked == [1, 2, *([2, 3, 4] if again else [2])]
    assert sum("does not take" in str(warning.message) for warning in said) == 1
    run, sent = tracked(tracker, folder)["run"], history if again else history[:1]
    assert run.of("loss") == [(record["round"], pytest.approx(record["loss"])) for record in sent]
    assert run.status == ENDED[tracker]["finished"]


@pytest.mark.parametrize("tracker", ["wandb", *map(thorough, ("tensorboard", "mlflow"))], indirect=True)
def test_the_command_line_tracks_every_algorithm_and_seed_and_resumes(tracker, folder, monkeypatch, capsys) -> None:
    words = [*TINY, "--algorithm", "fedavg", "--algorithm", "fedprox:mu=0.5", "--seeds", "2", "--force"]
    assert cli.main([*words, "--track", tracker, "--output", str(folder)]) == 0
    first = tracked(tracker, folder)
    names = [f"{name}-seed-{seed}" for name in ("fedavg", "fedprox:mu=0.5") for seed in (0, 1)]
    assert sorted(first) == names and {run.status for run in first.values()} == {ENDED[tracker]["finished"]}
    config = first["fedprox:mu=0.5-seed-1"].config
    assert config["algorithm/mu"] == "0.5" and config["local/lr"] == "0.1" and config["seed"] == "1"
    assert config["dataset/num_clients"] == "6"
    assert cli.main(["run", "--resume", str(folder), "--rounds", "3"]) == 0
    again = tracked(tracker, folder)
    for name, run in again.items():
        assert [t for t, _ in run.rounds] == [1, 2, 3] and run.rounds[:2] == first[name].rounds
    capsys.readouterr()


@pytest.mark.parametrize("tracker", ["wandb", *map(thorough, ("tensorboard", "mlflow"))], indirect=True)
def test_the_command_line_closes_a_run_that_ctrl_c_or_an_error_ends(tracker, folder, monkeypatch, capsys) -> None:
    run = fd.Simulation.run

    def interrupted(self, *args: Any, on_round: Any, **options: Any) -> Any:
        def stop(record: dict[str, Any]) -> None:
            on_round(record)
            if self.algorithm.name == "fedprox":
                raise FloatingPointError("diverged")
            if record["round"] == 1:
                signal.raise_signal(signal.SIGINT)

        return run(self, *args, on_round=stop, **options)

    monkeypatch.setattr(fd.Simulation, "run", interrupted)
    words = [*TINY[:-3], "--rounds", "500", "--no-progress", "--algorithm", "fedprox:mu=0.5", "--algorithm", "fedavg"]
    assert cli.main([*words, "--force", "--track", tracker, "--output", str(folder)]) == 130
    found = tracked(tracker, folder)
    assert found["fedprox:mu=0.5"].status == ENDED[tracker]["failed"]
    assert found["fedavg"].status == ENDED[tracker]["killed"]
    capsys.readouterr()


# --- without a tracker ------------------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_compiled(tmp_path, monkeypatch, capsys) -> None:
    """Not even W&B's folder of runs, which has the name of its package, is taken for the package."""
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(track.TRACKERS["wandb"], "package", "no_such_tracker")
    monkeypatch.setattr(fd.Simulation, "run", lambda *_, **__: pytest.fail("the training starts"))
    with pytest.raises(MissingPackageError, match="wandb needs the package no_such_tracker: pip install no_such_tra"):
        fd.logs.Track("wandb", tmp_path / "o")
    words = [*TINY, "--algorithm", "fedavg", "--track", "wandb", "--output", str(tmp_path / "o")]
    assert cli.main(words) == 2 and "pip install no_such_tracker" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_full_disk_loses_no_event_of_tensorboard(tmp_path) -> None:
    """In round 2, the file can grow by only 20 bytes. The event is written at the end, and is whole."""
    pytest.importorskip("tensorboardX", reason="needs tensorboardX")
    file = tmp_path / "tensorboard" / "a" / "events.out.tfevents"
    with fd.logs.Track("tensorboard", tmp_path, name="a") as send:
        send(line(1))
        size = file.stat().st_size
        with file_limit(size + 20), pytest.warns(UserWarning, match="does not take the run a .*File too large"):
            send(line(2))
        assert file.stat().st_size == size
        send(line(3, cka=[0.5, math.inf]))
    run = tracked("tensorboard", tmp_path)["a"]  # TensorBoard reads up to the first damaged event
    assert run.of("loss") == [(t, pytest.approx(1 / t)) for t in (1, 2, 3)] and run.status == "finished"
    assert math.isinf(run.rounds[2][1]["cka"]) and "round" not in run.rounds[0][1]


def test_no_tracker_is_imported_unless_it_is_used() -> None:
    program = (
        "import sys, fedjax_drift as fd; print({'wandb', 'mlflow', 'tensorboardX'} & {*sys.modules}, fd.logs.Track)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set()")


def test_bad_input(tmp_path) -> None:
    pytest.importorskip("tensorboardX", reason="needs tensorboardX")
    (tmp_path / "file").write_text("")
    good: dict[str, Any] = {"tracker": "tensorboard", "folder": tmp_path / "o"}
    for wrong, message in [
        ({"tracker": "tensorbord"}, "tracker must be one of .*, got 'tensorbord': did you mean 'tensorboard'"),
        ({"folder": tmp_path / "file"}, "folder must be a folder, got the file .*: choose another name"),
        ({"before": [5]}, "a record must be a dict with a round, got 5"),
        ({"mode": "online"}, "the options of tensorboard must be left out, got 'mode'"),
    ]:
        with pytest.raises(ValueError, match=message):
            fd.logs.Track(**good | wrong)
    with fd.logs.Track(**good) as send, pytest.raises(ValueError, match="a record must be a dict with a round"):
        send({"loss": 1.0})
