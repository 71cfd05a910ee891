"""What a person sees of a run: a record of every round, a progress bar, and Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks

Record = dict[str, Any]


class Flight(NamedTuple):
    """A program on its way: n rounds, the last of which is round ``done``."""

    done: int
    n: int
    infos: dict[str, Any]
    stacked: bool  # leaves [most >= n, ...], else of one round
    scores: dict[str, Any]  # of the last


class Recorder:
    """Makes the records of a run from what its programs return, some programs behind the devices."""

    def __init__(
        self, bar: Bar, on_round: Callable[[Record], None] | None, leaves: Callable[[], Sequence[str]]
    ) -> None:
        self.bar, self.on_round, self.leaves = bar, on_round, leaves
        self.history: list[Record] = []
        self.seconds = float("inf")  # that a round took lately
        self._flying: deque[Flight] = deque()
        self._landed: deque[tuple] = deque()  # rounds fetched and not yet recorded
        self._clock = time.perf_counter()
        self._warned: set[str] = set()  # each kind of trouble is said once

    def add(self, done: int, n: int, infos: dict[str, Any], stacked: bool) -> None:
        """A program has been dispatched."""
        self._flying.append(Flight(done, n, infos, stacked, {}))

    def score(self, scores: dict[str, Any]) -> None:
        """The newest state's evaluation has been dispatched."""
        self._flying[-1] = self._flying[-1]._replace(scores=scores)

    def unscore(self) -> None:
        """The newest state's evaluation is not waited for."""
        if self._flying:
            self.score({})

    @property
    def unscored(self) -> bool:
        """Whether the newest program is still on its way, and its state is not evaluated."""
        return bool(self._flying) and not self._flying[-1].scores

    def catch_up(self, behind: int) -> None:
        """Waits until only ``behind`` programs are on their way, and records the rounds of the others."""
        while len(self._flying) > behind:
            flight = self._flying[0]
            infos, scores = jax.device_get((flight.infos, flight.scores))
            self.seconds, self._clock = (time.perf_counter() - self._clock) / flight.n, time.perf_counter()
            self._flying.popleft()
            for j in range(flight.n):
                info = {name: values[j] for name, values in infos.items()} if flight.stacked else infos
                last = j == flight.n - 1
                self._landed.append((flight.done - flight.n + 1 + j, info, scores if last else {}, self.seconds))
        while self._landed:
            self._record(*self._landed.popleft())

    def _record(self, done: int, info: dict[str, np.ndarray], scores: dict[str, Any], seconds: float) -> None:
        made = record(done, info) | {"seconds": seconds} | {name: float(value) for name, value in scores.items()}
        self.history.append(made)
        self.bar.update(made)
        if not info["finite"].all():
            self._warn("not finite", lambda: nonfinite_message(done - 1, info, self.leaves))
        if not made["clients"]:
            self._warn("nobody", lambda: f"round {done - 1}: no client answered, and there was nothing to average")
        if self.on_round is not None:
            try:
                self.on_round(made)
            except Exception:  # it is not called again for what is still to be recorded
                self.on_round = None
                raise

    def _warn(self, kind: str, message: Callable[[], str]) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            checks.warn(message(), RuntimeWarning)


STANDARD = (
    "cohort",
    "size",
    "weight",
    "finite",
    "loss",
    "lr",
    "steps",
    "executed_steps",
    "client_steps",
    "bad_leaf",
    "asked",
)


def record(done: int, info: dict[str, np.ndarray]) -> Record:
    counted = info["weight"] != 0  # not absent, and not dropped
    sizes = np.where(counted, info["size"], 0)
    loss = {}
    if "loss" in info:
        share = sizes / sizes.sum() if counted.any() else np.full(len(sizes), np.nan)
        loss["train_loss"] = float(np.where(counted, info["loss"], 0) @ share)
    return {
        "round": done,
        **loss,
        "clients": int(counted.sum()),
        "lr": float(str(info["lr"])),  # the shortest number that is the same in float32
        "steps": int(info["steps"]),
        "executed_steps": int(info["executed_steps"]),
        **{name: _recorded(name, value, counted) for name, value in info.items() if name not in STANDARD},
    }


def _recorded(name: str, value: np.ndarray, counted: np.ndarray) -> float | list[float]:
    """A scalar, or a client's values as their mean over the cohort, as JSON has them."""
    if value.ndim and name != "label_mix":
        value = value[counted]
        known = ~np.isnan(value)
        value = np.where(known, value, 0).sum(0) / np.maximum(known.sum(0), 1) + np.where(known.any(0), 0, np.nan)
    return value.tolist()


def nonfinite_message(t: int, info: Mapping[str, Any], leaves: Callable[[], Sequence[str]]) -> str:
    """Which clients of round t, and in which leaf of the update each first shows."""
    cohort, bad = np.asarray(info["cohort"]), np.asarray(info["bad_leaf"])
    names, where = leaves(), np.flatnonzero(bad >= 0)
    some = ", ".join(f"client {cohort[k]} in {names[bad[k]]}" for k in where[:5]) + ", ..." * (len(where) > 5)
    return (
        f"round {t}: {len(where)} of {len(bad)} client updates are not finite ({some}): lower lr, set clip_norm, or "
        'choose on_nonfinite="drop_client"'
    )


class Stop:
    """The first SIGINT asks the loop to stop after its round; the second raises KeyboardInterrupt, once not held.

    So does SIGTERM where it is handled, however often it comes: whoever sends it expects the process to end soon.
    """

    asked = insists = holding = terminated = False

    def __call__(self, signum: int, frame: Any) -> None:
        if signum == signal.SIGTERM:
            self.asked = self.terminated = True
            return
        self.insists = self.asked
        if not self.asked:
            self.asked = True
            said = "\nstopping after the rounds in progress; press Ctrl-C again to stop at once"
            print(said, file=sys.stderr, flush=True)
        elif not self.holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Here the second SIGINT waits for the end, also of what holds around this."""
        within, self.holding = self.holding, True
        try:
            yield
        finally:
            self.holding = within
        if self.insists and not within:
            self.insists = False
            raise KeyboardInterrupt


@contextmanager
def stop_on_interrupt(terminate: bool = False) -> Iterator[Stop]:
    """terminate: on SIGTERM, too. Within another, the same `Stop`: what is around is to know, and to end, too."""
    around = signal.getsignal(signal.SIGINT)
    stop = around if isinstance(around, Stop) else Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {which: signal.signal(which, stop) for which in (signal.SIGINT, *[signal.SIGTERM] * terminate)}
    try:
        yield stop
    finally:
        for which, handler in old.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


def watched() -> bool:
    """Whether somebody looks at a bar: in a notebook, or where stderr is a terminal; never in CI."""
    return not os.environ.get("CI") and (in_notebook() or sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Bar:
    """A progress bar with rounds a second, the time left, and the latest loss and accuracy.

    shown: None means where somebody looks (`watched`). tqdm is imported only if it is shown; in notebooks that have
    ipywidgets it is drawn by them.
    """

    def __init__(self, rounds: int, name: str, shown: bool | None) -> None:
        self.rounds, self.name, self.shown = rounds, name, watched() if shown is None else shown
        self.latest: dict[str, str] = {}

    def __enter__(self) -> Bar:
        if self.shown:
            how: dict[str, Any] = {"total": self.rounds, "desc": self.name, "unit": "round"}
            if in_notebook() and importlib.util.find_spec("ipywidgets"):
                from tqdm.notebook import tqdm

                self.bar = tqdm(**how)
            else:
                from tqdm import tqdm

                columns, rows = shutil.get_terminal_size()
                # Given a size, tqdm also shows its bar on terminals that report none.
                how |= {"ncols": min(columns, 100), "nrows": max(rows, 2)}
                self.bar = tqdm(**how, file=sys.stdout if in_notebook() else None)  # stderr would be on red
        return self

    def update(self, record: Record) -> None:
        if self.shown:
            names = {"train_loss": "loss", "accuracy": "acc"}
            self.latest |= {short: f"{record[name]:.3g}" for name, short in names.items() if name in record}
            self.bar.set_postfix(self.latest, refresh=False)
            self.bar.update(1)

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.bar.close()
