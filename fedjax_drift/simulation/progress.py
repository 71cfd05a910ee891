"""How a person follows a run and stops it: a progress bar, Ctrl-C and SIGTERM."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedjax_drift.types import Record


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
