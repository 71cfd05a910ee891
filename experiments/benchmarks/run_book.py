"""Runs all measurements that need an accelerator, the most important ones first.

    python experiments/benchmarks/accelerator.py --all [--minutes 25] [--output runs/accelerator]
    python experiments/benchmarks/run_book.py --collect runs/accelerator

Every step runs in a process of its own, and writes its results to a folder of its own after every row. No step starts
after --minutes, and a step that is still running then is stopped. The same command goes on with the steps that are not
complete. A step that failed is not repeated, unless its folder is removed.

--collect copies the results to results/ and updates the tables in the README.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
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
    Step("algorithm_cost", "algorithm_cost.py", 3),
    Step("forms_rounds", "forms.py --rounds 'lenet5 100' 'emnist_cnn 100' --forms ours bfloat16", 1.5),
    Step("forms_rounds_without_graphs", "forms.py --rounds 'lenet5 100' --forms ours --no-graphs", 0.5),
    Step("accelerator_streaming", "accelerator.py --streaming", 1.5),
    Step("sweep", "sweep.py", 1),
    Step("accelerator_bfloat16", "accelerator.py --bfloat16", 3),
    Step("all_writers", "all_writers.py", 1),
]


def run(output: Path, minutes: float, quick: bool) -> None:
    """Runs the steps that are not complete."""
    end = time.monotonic() + 60 * minutes
    for step in STEPS:
        folder, left = output / step.name, end - time.monotonic()
        if (folder / "complete").exists():
            print(f"complete: {step.name}", flush=True)
            continue
        if left <= LEAST_SECONDS:
            print(f"no time left: {step.name}", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        script, *options = shlex.split(step.command)
        command = [sys.executable, str(measure.HERE / script), *options, "--output", str(folder)]
        print(f"{step.name}, about {step.minutes:g} min", flush=True)
        started = time.monotonic()
        try:
            code = subprocess.run([*command, *["--quick"] * quick], timeout=left).returncode
        except subprocess.TimeoutExpired:
            print(f"stopped: {step.name}; the same command starts it again", flush=True)
            continue
        (folder / "complete").write_text(f"exit status {code}\n")
        print(
            f"{'ran' if code == 0 else 'FAILED'}: {step.name}, {(time.monotonic() - started) / 60:.1f} min", flush=True
        )


def collect(output: Path) -> None:
    """Copies the results of all steps to results/, and updates the tables in the README."""
    for step in STEPS:
        for file in (output / step.name).glob("*.json"):
            kind = file.name.split(".")[-2]
            shutil.copyfile(file, measure.RESULTS / f"{step.name}.{kind}.json")
            print(f"{step.name}.{kind}.json")
    measure.README.write_text(measure.with_tables(measure.README.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="DIR", required=True, help="folder of the results")
    collect(parser.parse_args().collect)


if __name__ == "__main__":
    main()
