"""Runs all measurements that need an accelerator, the most important ones first.

    python experiments/benchmarks/accelerator.py --all [--minutes 25] [--output runs/accelerator]
    python experiments/benchmarks/run_book.py --collect runs/accelerator

Every step runs in a process of its own, and writes its results to a folder of its own after every row. After --minutes,
no step starts, and a step that is still running is stopped. The same command continues with the steps that are not
complete. A step that failed is only repeated if its folder is removed.

--collect copies the results to results/ and updates the tables in the README.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import measure

OUTPUT = Path("runs/accelerator")
LEAST_SECONDS = 20.0  # no step starts with less time left


class Step(NamedTuple):
    name: str  # of the file with its results
    command: str
    minutes: float  # on an H200, with compilation; an estimate


STEPS = [
    Step("accelerator_correctness", "accelerator.py --correctness", 1.5),
    Step("accelerator", "accelerator.py", 4),
    Step("accelerator_memory", "accelerator.py --memory", 2),
    Step(
        "forms_rounds_lanes", "forms.py --rounds 'lenet5 3400' 'emnist_cnn 3400' --forms ours --lanes 32 64 128 256", 2
    ),
    Step("forms", "forms.py --seconds 200", 3.5),
    Step("forms_resnet18", "forms.py --networks resnet18 --forms ours 'grouped NHWC' Winograd --seconds 60", 3),
    Step("algorithm_cost", "algorithm_cost.py", 3),
    Step("forms_rounds", "forms.py --rounds 'lenet5 100' 'emnist_cnn 100' --forms ours bfloat16", 1.5),
    Step("forms_rounds_without_graphs", "forms.py --rounds 'lenet5 100' --forms ours --no-graphs", 0.5),
    Step("accelerator_streaming", "accelerator.py --streaming", 1.5),
    Step("sweep", "sweep.py", 1),
    Step("accelerator_bfloat16", "accelerator.py --bfloat16", 3),
    Step("all_writers", "all_writers.py", 1),
]


def run(output: Path, minutes: float, quick: bool) -> int:
    """Runs the steps that are not complete. Returns 1 if one of them failed, now or before, and otherwise 0."""
    end, failed = monotonic() + 60 * minutes, False
    output = output / "quick" if quick else output
    for step in STEPS:
        folder, left = output / step.name, end - monotonic()
        if (folder / "complete").exists():
            print(f"complete: {step.name}", flush=True)
            continue
        if (folder / "failed").exists():
            print(f"failed before: {step.name}; to repeat it, remove {folder}", flush=True)
            failed = True
            continue
        if left <= LEAST_SECONDS:
            print(f"no time left: {step.name}", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        script, *options = shlex.split(step.command)
        command = [sys.executable, str(measure.HERE / script), *options, "--output", str(folder)]
        print(f"{step.name}, about {step.minutes:g} min", flush=True)
        started = monotonic()
        process = subprocess.Popen([*command, *["--quick"] * quick], start_new_session=True)
        try:
            code = process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            print(f"stopped: {step.name}; the same command starts it again", flush=True)
            continue
        finally:  # its own child processes, too, because they occupy the device
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        (folder / ("failed" if code else "complete")).write_text(f"exit status {code}\n")
        failed |= code != 0
        print(f"{'FAILED' if code else 'ran'}: {step.name}, {(monotonic() - started) / 60:.1f} min", flush=True)
    return int(failed)


def collect(output: Path) -> None:
    """Copies the results of all steps to results/, and updates the tables in the README."""
    for step in STEPS:
        for file in sorted((output / step.name).glob("*.json*"), reverse=True):  # a complete file replaces a part
            kind = file.name.split(".")[1]
            shutil.copyfile(file, measure.RESULTS / f"{step.name}.{kind}.json")
            print(f"{step.name}.{kind}.json")
    measure.README.write_text(measure.with_tables(measure.README.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="DIR", required=True, help="folder of the results")
    collect(parser.parse_args().collect)


if __name__ == "__main__":
    main()
