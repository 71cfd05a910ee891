"""Trackers: runs in Weights & Biases, MLflow and TensorBoard. `fedjax_drift.logs` makes `Track` public.

Each tracker is a class with `id` (None if it needs none), `log`, which sends the numbers of a round, and `close`. It is
created with the `Track`, the name of the run, its settings, and the id if the run continues. The package of a tracker
is imported when its first run is created.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fedjax_drift import checks, spec
from fedjax_drift.devices.distributed import is_first
from fedjax_drift.disk import replace_file, write_all
from fedjax_drift.errors import MissingPackageError
from fedjax_drift.simulation.progress import Stop
from fedjax_drift.spec import CountOrZero, Fix, Spec, Text, checked
from fedjax_drift.types import Record

IDS = "tracked.json"  # the ids of the tracked runs in a folder
Status = Literal["finished", "failed", "killed"]
Setting = Annotated[Mapping[str, Any], spec.instance(Mapping), Fix('pass {"lr": 0.1}, for example')]


def _history(name: str, value: Any, fix: str) -> Any:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        checks.refuse(f"{name} must be a history, or None", checks.shown(value), fix)
    return value


Before = Annotated[Sequence[Record], Spec(_history, "history")]
Config = Annotated[Mapping[str, Any], spec.instance(Mapping, "a dict, or None"), Fix("pass sim.settings, for example")]


class Track:
    """Sends each record to Weights & Biases, MLflow or TensorBoard as soon as its round has ended.

    Pass it as ``on_round=`` to `Simulation.run`, `Simulation.sweep` or `fedjax_drift.sweep`. A sweep has one tracked
    run for each seed and setting. The step is the round. The values are those of `scalars`. At the end, the summary
    has the last value of each, the best accuracy, and the folder.

    By default nothing leaves this machine:

    - "wandb" writes to ``FOLDER/wandb``, and ``wandb sync`` uploads it. The environment variable WANDB_MODE, or
      ``mode="online"``, uploads at once. The runs of a folder are a group.
    - "mlflow" writes to ``FOLDER/mlflow.db``, or to MLFLOW_TRACKING_URI if that is set. The runs of a folder have the
      same tag ``group``.
    - "tensorboard" writes to ``FOLDER/tensorboard``, one folder for each run.

    At the end of a ``with`` block the tracked runs are closed: as finished, as killed after Ctrl-C and SIGTERM, or as
    failed after another exception. If the process is killed, the rounds so far can be read.

    If the tracker raises an error, there is one warning and the training continues. The rounds from there on are sent
    by `close`, if that is possible then. With several processes, only the first process sends.

    Args:
      tracker: "wandb", "mlflow" or "tensorboard".
      folder: the folder of the files. It is created if it does not exist. ``tracked.json`` in it has the ids of the
        runs.
      config: the settings of the run, such as ``sim.settings``. Nested dicts get names with a slash. Default: none.
      before: the records of earlier rounds, for example the history that `Checkpoints.restore` returns. The tracked
        run in the folder continues, and has no round twice. The records of a sweep also have ``seed`` and, if it has
        settings, ``setting``. Default None: a new tracked run.
      name: the name of the run, to which a sweep adds the setting and the seed. Default: the name of the folder.
      options: for "wandb" the arguments ``mode``, ``project``, ``entity``, ``group``, ``tags`` and ``notes`` of
        wandb.init; for "mlflow" ``tracking_uri`` and ``experiment``. The project and the experiment are "fedjax_drift"
        unless these, WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME say otherwise.

    Raises:
      ImportError: the package of the tracker is not installed.
    """

    @checked
    def __init__(
        self,
        tracker: str,
        folder: Annotated[str | os.PathLike[str], spec.FOLDER, Fix('pass "runs/mine", for example')],
        config: Config | None = None,
        before: Annotated[Before, Fix("pass that of Checkpoints.restore")] | None = None,
        *,
        name: Text | None = None,
        **options: Any,
    ) -> None:
        needs_tracker(tracker)
        for option in options:
            allowed = TRACKERS[tracker].options
            if option not in allowed:
                checks.refuse(f"the options of {tracker} must be {checks.listed(allowed) or 'left out'}", repr(option))
        self.folder, self.tracker, self.config, self.options = Path(folder), tracker, dict(config or {}), options
        self.name = self.folder.name if name is None else name
        self.continues, self._stop = before is not None, signal.getsignal(signal.SIGINT)
        self._runs: dict[str, _Run] = {}
        for record in before or ():
            self(record)

    def __call__(self, *call: Any) -> None:
        """Sends one record: ``track(record)``, or ``track(seed, setting, record)`` as `fedjax_drift.sweep` does."""
        if len(call) not in (1, 3):
            checks.refuse("a call must be track(record) or track(seed, setting, record)", f"{len(call)} arguments")
        *labels, record = call
        record = _checked(record)
        self._stop = signal.getsignal(signal.SIGINT)  # that of `Simulation.run`, which returns normally after Ctrl-C
        record = dict(zip(("seed", "setting"), labels, strict=False)) | record
        self.start(record.pop("seed", None), record.pop("setting", None), record)

    @checked
    def start(self, seed: CountOrZero | None = None, setting: Setting | None = None, *records: Record) -> None:
        """Creates the tracked run of a seed and setting now, and sends it records.

        Otherwise the first record creates it, and the ``seconds`` of the second round include the time of that.
        """
        labels = dict(setting or {}) | ({} if seed is None else {"seed": seed})
        sent = [_checked(record) for record in records]
        parts = [f"seed-{value}" if key == "seed" else f"{key}={value}" for key, value in labels.items()]
        name = "-".join([self.name, *parts])
        if is_first():
            run = self._runs.setdefault(name, _Run(self, name, self.config | labels))
            run.pending += sent
            if not run.failed:
                run.send()

    @checked
    def close(self, status: Status = "finished") -> None:
        """Closes the tracked runs as "finished", "failed" or "killed". The end of a ``with`` block calls it."""
        stopped = isinstance(self._stop, Stop) and self._stop.requested
        while self._runs:
            self._runs.popitem()[1].close("killed" if stopped and status == "finished" else status)

    def __enter__(self) -> Track:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "failed" if issubclass(kind, Exception) else "killed")


def _checked(record: Any) -> Record:
    """The record. Raises ValueError unless it is a dict with a round."""
    number = record.get("round") if isinstance(record, Mapping) else None
    if not isinstance(number, int) or isinstance(number, bool):
        checks.refuse("a record must be a dict with a round", checks.shown(record), "pass one record of a history")
    return dict(record)


class _Run:
    """A tracked run, with the records that the tracker does not have yet."""

    def __init__(self, track: Track, name: str, config: Mapping[str, Any]) -> None:
        self.track, self.name, self.config = track, name, config
        self.pending: list[Record] = []
        self.failed = False
        self.sent: Any = None  # the run of the tracker
        self.summary: dict[str, Any] = {}

    def send(self) -> None:
        """Sends the pending records."""
        self._try(self._send)

    def close(self, status: Status) -> None:
        """Sends the records that are still pending, and closes the run, also if the tracker does not take them."""
        self.send()
        if self.sent is not None:
            self._try(self.sent.close, status, self.summary | {"folder": str(self.track.folder)})

    def _try(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as error:  # of another package, or of the network: the training must not end with it
            if not self.failed:
                checks.warn(
                    f"{self.track.tracker} does not take the run {self.name} ({checks.first_line(error)}): the "
                    "training continues. The missing rounds are sent at its end, if that is possible then"
                )
            self.failed = True

    def _send(self) -> None:
        self.sent = self.sent or self._open()
        while self.pending:
            numbers = scalars(self.pending[0])
            self.sent.log(numbers["round"], {name: value for name, value in numbers.items() if name != "round"})
            self.summary |= numbers
            if "accuracy" in numbers:
                self.summary["best_accuracy"] = max(numbers["accuracy"], self.summary.get("best_accuracy", 0))
            self.pending.pop(0)

    def _open(self) -> Any:
        """Creates or continues the run of the tracker. ``tracked.json`` keeps its id."""
        track, name = self.track, self.name
        track.folder.mkdir(parents=True, exist_ok=True)
        file, key = track.folder / IDS, f"{track.tracker} {name}"
        ids = json.loads(file.read_text()) if file.exists() else {}
        run = TRACKERS[track.tracker](track, name, dict(_flat(self.config)), ids.get(key) if track.continues else None)
        if run.id is not None and ids.get(key) != run.id:
            replace_file(file, json.dumps(ids | {key: run.id}, indent=2) + "\n")
        return run


class _Wandb:
    package, options = "wandb", ("mode", "project", "entity", "group", "tags", "notes")

    def __init__(self, track: Track, name: str, config: Mapping[str, Any], known: str | None) -> None:
        import wandb

        for old in (track.folder / "wandb").glob(f"offline-run-*-{known}"):  # its rounds are sent again
            shutil.rmtree(old)
        default = {"mode": os.environ.get("WANDB_MODE", "offline"), "group": track.folder.name}
        default["project"] = os.environ.get("WANDB_PROJECT", "fedjax_drift")
        settings = wandb.Settings(silent=True, console="off")
        if hasattr(settings, "x_transaction_log_flush_interval"):
            settings.x_transaction_log_flush_interval = 1  # s; a killed run would lose 15 by default
        self.id = known or secrets.token_hex(4)
        self._run: Any = wandb.init(
            dir=track.folder, id=self.id, name=name, config=dict(config), resume="allow" if known else None,
            reinit="create_new", settings=settings, **default | track.options,
        )  # fmt: skip

    def log(self, t: int, numbers: Mapping[str, float]) -> None:
        if t >= self._run.step:  # otherwise the server has this round
            self._run.log(dict(numbers), step=t, commit=True)

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 130}[status])


class _Mlflow:
    package, options = "mlflow", ("tracking_uri", "experiment")

    def __init__(self, track: Track, name: str, config: Mapping[str, Any], known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = track.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client = MlflowClient(uri or f"sqlite:///{track.folder}/mlflow.db")
        self.id, self._done = known, 0
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._done = max((metric.step for metric in client.get_metric_history(known, "round")), default=0)
            return
        experiment = track.options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedjax_drift")
        found, place = client.get_experiment_by_name(experiment), None if uri else f"{track.folder}/mlruns"
        where = found.experiment_id if found else client.create_experiment(experiment, place)
        self.id = client.create_run(where, run_name=name, tags={"group": track.folder.name}).info.run_id
        params = [Param(self._key(name), str(value)[:500]) for name, value in config.items()]
        for i in range(0, len(params), 100):  # the most that MLflow takes at once
            client.log_batch(self.id, params=params[i : i + 100])

    def log(self, t: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if t > self._done:
            now = int(1000 * time.time())
            values = {**numbers, "round": t}.items()
            self._client.log_batch(str(self.id), [Metric(self._key(name), float(x), now, t) for name, x in values])

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        for name, value in summary.items():
            self._client.set_tag(str(self.id), self._key(f"summary/{name}"), value)
        self._client.set_terminated(str(self.id), status.upper())

    def _key(self, name: str) -> str:
        return re.sub(r"[^\w.\-/ :]", "_", name)  # other characters are an error


class _TensorBoard:
    package, options = "tensorboardX", ()

    def __init__(self, track: Track, name: str, config: Mapping[str, Any], known: str | None) -> None:
        folder, self.id = track.folder / "tensorboard" / re.sub(r"[^\w.\-=:]", "_", name), None
        shutil.rmtree(folder, ignore_errors=True)  # its rounds are sent again
        folder.mkdir(parents=True)
        self._file = (folder / "events.out.tfevents").open("ab", buffering=0)
        self._text("config", config)

    def log(self, t: int, numbers: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        self._write(t, Summary(value=[Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]))

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        with self._file:
            self._text("summary", {"status": status, **summary})

    def _text(self, tag: str, values: Mapping[str, Any]) -> None:
        from tensorboardX.summary import text

        lines = [f"| {name} | {value} |" for name, value in values.items()]
        self._write(values.get("round", 0), text(tag, "\n".join(["| name | value |", "|---|---|", *lines])))

    def _write(self, t: int, summary: Any) -> None:
        """Appends an event in TensorBoard's file format: length, checksum, event, checksum."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        event = Event(wall_time=time.time(), step=t, summary=summary).SerializeToString()
        length, end = struct.pack("<Q", len(event)), self._file.tell()
        parts = (length, struct.pack("<I", masked_crc32c(length)), event, struct.pack("<I", masked_crc32c(event)))
        try:
            write_all(self._file, b"".join(parts))
        except OSError:  # the disk is full
            self._file.truncate(end)
            self._file.seek(end)
            raise


TRACKERS: dict[str, Any] = {"wandb": _Wandb, "mlflow": _Mlflow, "tensorboard": _TensorBoard}


def needs_tracker(tracker: Any) -> None:
    """Raises ValueError if there is no such tracker, and ImportError if its package is not installed."""
    package = TRACKERS[checks.choice("tracker", tracker, TRACKERS)].package
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:  # W&B's folder of runs, `wandb`, has the name of the package
        raise MissingPackageError(f"tracking with {tracker} needs the package {package}: pip install {package}")


def scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a record, for trackers, which accept nothing else.

    Drift measures have one value per local epoch. They get the value after the last epoch, which is that of the round.
    ``sharpness`` gets the largest eigenvalue, which is the first. A number in a nested dict gets a name with a slash.
    Names, such as that of the algorithm, are left out, and so are arrays and ``label_mix``, which is a distribution.

    >>> scalars({"round": 2, "algorithm": "fedavg", "client_drift": [0.5, 0.75], "mine": {"a": 1.5}})
    {'round': 2, 'client_drift': 0.75, 'mine/a': 1.5}
    """
    one = {
        name: value[0 if name == "sharpness" else -1] if isinstance(value, list) and value else value
        for name, value in _flat(record)
    }
    return {name: value for name, value in one.items() if name != "label_mix" and isinstance(value, int | float)}


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts, with names such as "local/lr"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}/")
        else:
            yield f"{within}{name}", value
