"""The progress bar of a run, and stopping a run with Ctrl-C or SIGTERM."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedjax_drift.types import Record


class Stop:
    """A signal handler that lets a loop stop between rounds.

    The first signal requests the stop, and the loop ends after the rounds in progress. A later SIGINT raises
    KeyboardInterrupt immediately. Inside a `held` block, it does so at the end of the block. A later SIGTERM has no
    effect. A signal that the process ignored before stays ignored.
    """

    requested = False  # by SIGINT, SIGTERM or `request`
    insists = False  # a SIGINT has arrived after the request
    holding = False  # inside `held`
    terminated = False  # a SIGTERM has arrived

    def __init__(self) -> None:
        signals = (signal.SIGINT, signal.SIGTERM)
        self.ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]

    def __call__(self, signum: int, frame: Any) -> None:
        if signum in self.ignored:  # for example the SIGINT of a job in the background of a script
            return
        if signum == signal.SIGTERM:
            self.requested = self.terminated = True
        else:
            self.request()

    def request(self) -> None:
        """Does what Ctrl-C does."""
        self.insists = self.requested
        if not self.requested:
            self.requested = True
            again = "press Ctrl-C again to stop immediately"
            if in_notebook():  # `run` returns, so Jupyter goes on with the cells that wait
                again = "the next cells then run; interrupt again to stop immediately, and these cells with it"
            print(f"\nstopping after the rounds in progress; {again}", file=sys.stderr, flush=True)
        elif not self.holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays a KeyboardInterrupt to the end of the block. If such blocks are nested, the outermost one counts."""
        nested, self.holding = self.holding, True
        try:
            yield
        finally:
            self.holding = nested
        if self.insists and not nested:
            self.insists = False
            raise KeyboardInterrupt


@contextmanager
def stop_on_interrupt(terminate: bool = False) -> Iterator[Stop]:
    """Delays Ctrl-C inside the block, so that a loop can stop between two rounds. Yields a `Stop`.

    `Simulation.run` and `fd.sweep` use it. Use it yourself around a loop that calls them several times. The first
    Ctrl-C makes the current call return early, or as usual if it is in its last rounds, and sets ``requested``. Then
    end your loop:

        with fd.stop_on_interrupt() as stop:
            while not stop.requested and int(state.round) < 1000:
                state, history = sim.run(state, 10)

    ``stop.request()`` does the same as Ctrl-C. A second Ctrl-C raises KeyboardInterrupt immediately. A nested block
    uses the `Stop` of the outer block. In threads other than the main thread nothing is delayed, because Python does
    not allow it. In a process that ignores SIGINT, as the background jobs of scripts do, Ctrl-C has no effect.

    terminate: also handle SIGTERM.
    """
    current = signal.getsignal(signal.SIGINT)
    stop = current if isinstance(current, Stop) else Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM) if terminate else (signal.SIGINT,)
    old = {number: signal.signal(number, stop) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed by Python


def watched() -> bool:
    """Whether a progress bar would be seen: in a notebook, or if stderr is a terminal, but never in CI."""
    return not os.environ.get("CI") and (in_notebook() or sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


LONG = 60.0  # seconds; only longer runs print lines


class Bar:
    """A progress bar with rounds per second, the remaining time, and the latest loss and accuracy.

    tqdm is imported only if the bar is shown. In a notebook the bar is a widget if ipywidgets is installed.

    Where no bar would be seen (`watched`), a run that takes longer than `LONG` prints a line on stderr after every
    tenth of its rounds.

    shown: whether to show the bar. False: neither bar nor lines. None: the bar or the lines.
    """

    def __init__(self, rounds: int, name: str, shown: bool | None) -> None:
        self.rounds, self.name, self.shown = rounds, name, watched() if shown is None else shown
        self.lines = shown is None and not self.shown
        self.done = self.restored = 0  # rounds, and those of them that an earlier process ran
        self.latest: dict[str, str] = {}

    def __enter__(self) -> Bar:
        self.started = self.first_ended = time.monotonic()
        if self.shown:
            options: dict[str, Any] = {"total": self.rounds, "desc": self.name, "unit": "round"}
            if in_notebook() and importlib.util.find_spec("ipywidgets"):
                from tqdm.notebook import tqdm

                self.bar = tqdm(**options)
            else:
                from tqdm import tqdm

                columns, rows = shutil.get_terminal_size()
                # With an explicit size, tqdm also shows its bar in terminals that do not report their size.
                options |= {"ncols": min(columns, 100), "nrows": max(rows, 2)}
                # A notebook shows stderr on a red background.
                self.bar = tqdm(**options, file=sys.stdout if in_notebook() else None)
        return self

    def update(self, record: Record, restored: bool = False) -> None:
        """Counts a round. restored: an earlier process ran it."""
        self.done += 1
        self.restored += restored
        if not self.shown and not self.lines:
            return
        names = {"train_loss": "loss", "accuracy": "acc"}
        self.latest |= {short: f"{record[name]:.3g}" for name, short in names.items() if name in record}
        if self.shown:
            self.bar.set_postfix(self.latest, refresh=False)
            self.bar.update(1)
        elif not restored:
            self._print_line()

    def _print_line(self) -> None:
        """Prints the line of a tenth of the rounds, if the whole run takes longer than `LONG`."""
        now = time.monotonic()
        ran = self.done - self.restored
        if ran == 1:
            self.first_ended = now  # the first round includes the compilation, so it says little about the others
        if 10 * self.done // self.rounds == 10 * (self.done - 1) // self.rounds:
            return
        left = (self.rounds - self.done) * (now - self.first_ended) / max(1, ran - 1)
        if now - self.started + left > LONG:
            shown = "".join(f", {name} {value}" for name, value in self.latest.items())
            percent = f"{100 * self.done // self.rounds} %"
            print(
                f"{self.name}: {self.done} of {self.rounds} rounds ({percent}), {now - self.started:.0f} s, about "
                f"{left:.0f} s left{shown}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.bar.close()
