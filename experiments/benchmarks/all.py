"""Runs all benchmarks of this folder, each in a new process, and updates the tables in the README.

    python experiments/benchmarks/all.py [--only overhead memory] [--peer "COMMAND"] [--peer ...]
    python experiments/benchmarks/all.py --quick     runs tiny versions to test the benchmarks; no file changes
    python experiments/benchmarks/all.py --tables    only updates the tables from the results files

lenet_femnist.py gets the option --peer, and compares other simulators with ours. If there is no accelerator or no
PyTorch, the benchmarks that need it are skipped with a message. Run the benchmarks on an idle machine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import measure


class Benchmark(NamedTuple):
    command: str
    needs: str = ""  # "accelerator", "torch", "libtpu", "cuda-plugin"; with --quick no accelerator is needed


BENCHMARKS = [
    Benchmark("lenet_femnist.py"),
    Benchmark("roofline.py"),
    Benchmark("compile.py"),
    Benchmark("uneven_clients.py"),
    Benchmark("uneven_clients.py --time"),
    Benchmark("accelerator.py", "accelerator"),
    Benchmark("accelerator.py --bfloat16", "accelerator"),
    Benchmark("accelerator.py --correctness", "accelerator"),
    Benchmark("accelerator.py --streaming", "accelerator"),
    Benchmark("accelerator.py --memory", "accelerator"),
    Benchmark("forms.py", "accelerator"),
    Benchmark("forms.py --rounds 'lenet5 100' --forms ours bfloat16", "accelerator"),
    Benchmark("torch_loop.py", "accelerator torch"),
    Benchmark("compiled.py", "libtpu"),
    Benchmark("compiled.py --topology h100", "cuda-plugin"),
    Benchmark("slices.py", "libtpu cuda-plugin"),
    Benchmark("slices.py --shard-data --algorithms fedavg scaffold", "libtpu cuda-plugin"),
    Benchmark("all_writers.py"),
    Benchmark("overhead.py"),
    Benchmark("sweep.py"),
    Benchmark("many_clients.py"),
    Benchmark("memory.py"),
    Benchmark("plan_memory.py"),
    Benchmark("endurance.py"),
    Benchmark("wrong_calls.py"),
    Benchmark("weak_scaling.py"),
    Benchmark("algorithm_cost.py --turns 3"),
    Benchmark("source_cost.py"),
    Benchmark("curvature.py"),
    Benchmark("from_torch.py", "torch"),
    Benchmark("conv_layers.py", "torch"),
]


def missing(benchmark: Benchmark, quick: bool) -> str:
    """Returns, as text, the needs of the benchmark that this machine does not meet."""
    have = {
        "torch": lambda: importlib.util.find_spec("torch") is not None,
        "libtpu": lambda: importlib.util.find_spec("libtpu") is not None,
        "cuda-plugin": lambda: any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
        "accelerator": lambda: quick or accelerated(),
    }
    return " and ".join(need for need in benchmark.needs.split() if not have[need]())


def accelerated() -> bool:
    """Whether JAX has an accelerator. A new process tests this, so that this one does not occupy it."""
    return measure.run([sys.executable, "-c", "import jax; print(jax.default_backend())"]).strip() != "cpu"


@functools.cache
def unoptimised() -> str:
    """Returns an XLA flag that makes compilation faster, or "" if this version of XLA does not have the flag."""
    flag, program = "--xla_backend_optimization_level=0", "import jax; jax.devices('cpu')"
    known = subprocess.run([sys.executable, "-c", program], env=os.environ | {"XLA_FLAGS": flag}, capture_output=True)
    return flag if known.returncode == 0 else ""


def run(command: str, extra: list[str], quick: bool) -> str | None:
    """Runs one benchmark. Returns its output if it failed, otherwise None."""
    environment = os.environ | ({"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {unoptimised()}"} if quick else {})
    script, *options = shlex.split(command)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(measure.HERE / script), *options, *extra],
        env=environment,
        text=True,
        stdout=subprocess.PIPE if quick else None,
        stderr=subprocess.STDOUT if quick else None,
    )
    print(
        f"{'ran' if done.returncode == 0 else 'FAILED'}: {command[:40]}, {time.perf_counter() - start:.0f} s\n",
        flush=True,
    )
    return None if done.returncode == 0 else f"{command}\n{done.stdout or ''}"


def quick(commands: list[str]) -> list[str]:
    """Runs tiny versions of all commands, in parallel on all cores. Returns the output of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--quick", "--output", folder]
        peer = shlex.join([sys.executable, "-c", "print('nobody 1.0: median=1.0s a round')"])
        commands = [f"lenet_femnist.py --peer {shlex.quote(peer)}", *commands]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
            failed = [output for output in pool.map(lambda command: run(command, extra, True), commands) if output]
        made = {path.name.split(".")[0] for path in Path(folder).glob("*.json")}
        shown = {name for match in measure.TABLE.finditer(measure.README.read_text()) for name in match[2].split()}
        measure.with_tables(measure.README.read_text(), Path(folder))
    if not failed and made - shown:
        failed.append(f"README.md has no table for {', '.join(sorted(made - shown))}")
    return failed


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the scripts to run, without .py")
    parser.add_argument("--peer", action="append", help="command of another simulator, as in lenet_femnist.py")
    parser.add_argument(
        "--tables", action="store_true", help="only update the tables in the README from the results files"
    )
    arguments = parser.parse_args()
    if arguments.tables:
        measure.README.write_text(measure.with_tables(measure.README.read_text()))
        return
    start, commands = time.perf_counter(), []
    for benchmark in BENCHMARKS:
        if arguments.only and benchmark.command.split(".py")[0] not in arguments.only:
            continue
        if lacks := missing(benchmark, arguments.quick):
            print(f"skipped: {benchmark.command} needs {lacks}", flush=True)
            continue
        commands.append(benchmark.command)
    if arguments.quick:
        failed = quick(commands)
    else:
        if arguments.peer:
            peers = " ".join(f"--peer {shlex.quote(peer)}" for peer in arguments.peer)
            commands.insert(0, f"lenet_femnist.py --rounds 20 {peers}")
        options = {"--commit": arguments.commit, "--output": arguments.output}
        extra = [word for option, value in options.items() if value for word in (option, str(value))]
        failed = [output for command in commands if (output := run(command, extra, False))]
    if measure.with_tables(measure.README.read_text()) != measure.README.read_text():
        failed.append("the tables in README.md differ from the results files: run all.py --tables")
    print(f"{len(commands)} benchmarks in {time.perf_counter() - start:.0f} s, {len(failed)} failed")
    if failed:
        sys.exit("\n\n".join(failed))


if __name__ == "__main__":
    main()
