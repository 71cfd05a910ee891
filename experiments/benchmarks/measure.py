"""The functions that all benchmarks use: timing, limits of the machine, results files, and tables in the README.

A benchmark is a generator of table rows. `save` prints each row as soon as it is measured. It writes all rows to
results/NAME.PLATFORM.json, with the command, the commit and the hardware, and updates the tables in README.md from
these files.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from workloads import NETWORKS, Workload, images

HERE = Path(__file__).parent
RESULTS, README = HERE / "results", HERE / "README.md"
Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="run a tiny version as a test; ignore its numbers")
    made.add_argument(
        "--output", type=Path, help="folder for the results file (default: results/; with --quick: no file)"
    )
    made.add_argument("--no-results", action="store_true", help="print the results, but write no file")
    made.add_argument("--commit", help="commit to write into the results (default: that of this git checkout)")
    return made


def row(
    what: str,
    values: float | Sequence[float],
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str = "",
) -> Row:
    """Returns one row of a table.

    what: the name of the measurement.
    values: one value per repeat.
    at_most, at_least: the target for the median of the values.
    """
    values = [float(v) for v in values] if isinstance(values, Sequence) else [float(values)]
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    spread = {name: float(f"{value:.6g}") for name, value in spread.items()}
    return {
        "what": what,
        **spread,
        "repeats": len(values),
        "unit": unit,
        "at_most": at_most,
        "at_least": at_least,
        "note": note,
    }


def save(name: str, rows: Iterable[Row], arguments: argparse.Namespace, where: tuple[str, str] | None = None) -> None:
    """Prints the rows and writes NAME.PLATFORM.json. Until the last row, the file ends in .json.part.

    where: the platform ("cpu", "gpu", ...) and the name of the device. Default: the devices of JAX.
    """
    # The commit is read now, because files may change during a long benchmark.
    done: list[Row] = []
    version, folder = arguments.commit or commit(), arguments.output or RESULTS
    writes = not arguments.no_results and not (arguments.quick and arguments.output is None)
    for each in rows:
        wanted = f"   (wanted {_wanted(each)})" if _wanted(each) else ""
        note = f"   [{each['note']}]" if each["note"] else ""
        print(f"{each['what']}: {_measured(each)}{wanted}{note}", flush=True)
        done.append(each)
        if writes:
            part = _write(folder, name, done, version, where or jax_devices())
    if writes and done:
        part.rename(part.with_suffix(""))
    if writes and folder.resolve() == RESULTS.resolve():
        README.write_text(with_tables(README.read_text()))


def _write(folder: Path, name: str, rows: Sequence[Row], version: str, where: tuple[str, str]) -> Path:
    kind, devices = where
    contents = {
        "command": _command(),
        "commit": version,
        "date": datetime.date.today().isoformat(),
        "hardware": hardware() | {"devices": devices},
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.{kind}.json.part"
    file.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
    return file


# --- tables -----------------------------------------------------------------------------------------------------------

TABLE = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str, folder: Path = RESULTS) -> str:
    """Returns the text with updated tables between ``<!-- results: NAME NAME -->`` and ``<!-- end -->``."""
    return TABLE.sub(lambda match: match[1] + table(match[2].split(), folder) + match[3], text)


def table(names: Sequence[str], folder: Path = RESULTS) -> str:
    """Returns Markdown tables of the named benchmarks: one for each results file, after a line that says what it is."""
    files = [path for name in names for path in sorted(folder.glob(f"{name}.*.json"))]
    return "\n".join(_table_of(path) for path in files) or "Not measured yet.\n"


def _table_of(path: Path) -> str:
    contents = json.loads(path.read_text())
    command, hardware = contents["command"], contents["hardware"]
    command = command.removeprefix("python ").replace("experiments/benchmarks/", "")
    names = ["what", "median (min to max, repeats)", "wanted", "more"]
    cells = [(r["what"], _measured(r), _wanted(r), r["note"]) for r in contents["rows"]]
    used = [i for i in range(len(names)) if i < 2 or any(row[i] for row in cells)]
    lines = [f"| {' | '.join(row[i] for i in used)} |" for row in (names, *cells)]
    lines.insert(1, "|---" * len(used) + "|")
    source = (
        f"`{command}` on {path.suffixes[-2][1:]}: {hardware['devices']}, {hardware['cores']} cores of "
        f"{hardware['cpu']}, {hardware['versions']}, commit {contents['commit']}, {contents['date']}"
    )
    return source + "\n\n" + "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Formats a number with three significant digits, and without an exponent if it is at least 0.001."""
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1e}"


def _measured(row: Row) -> str:
    unit = row["unit"] if row["unit"] in ("", "%") else f" {row['unit']}"
    spread = f" ({number(row['min'])} to {number(row['max'])}, {row['repeats']})" if row["repeats"] > 1 else ""
    return f"{number(row['median'])}{unit}{spread}"


def _wanted(row: Row) -> str:
    low, high, value = row["at_least"], row["at_most"], row["median"]
    bounds = [f"{sign} {number(bound)}" for sign, bound in ((">=", low), ("<=", high)) if bound is not None]
    met = (low is None or value >= low) and (high is None or value <= high)
    return " and ".join(bounds) + ("" if met else ", missed")


# --- hardware and versions --------------------------------------------------------------------------------------------


def hardware() -> dict[str, Any]:
    """Returns the processor, the number of cores that this process may use, and the versions of the loaded packages."""
    names = re.findall(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    loaded = {name: sys.modules[name].__version__ for name in ("jax", "torch") if name in sys.modules}
    versions = ", ".join(f"{name} {version}" for name, version in loaded.items())
    return {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": cores} | {
        "versions": f"{versions}, Python {platform.python_version()}"
    }


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def jax_devices() -> tuple[str, str]:
    """Returns the platform of JAX's devices, and their number and name."""
    import jax

    devices = jax.local_devices()
    return devices[0].platform, f"{len(devices)} x {devices[0].device_kind}"


def libtpu() -> str:
    """Returns ", libtpu " and its version. XLA's compiler for TPUs is in this package. Returns "" if it is missing."""
    try:
        return f", libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Returns the commit of this checkout, with " with changes" if there are uncommitted changes.

    Returns "unknown" if this is not a git checkout.
    """
    made_here = [":!experiments/benchmarks/results", ":!experiments/benchmarks/README.md"]
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + (" with changes" if _git("status", "--porcelain", "--", ":/", *made_here) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = HERE.parents[1]
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _command() -> str:
    """Returns the command of this process without local folders and without --output."""
    options = re.sub(r"--output[ =]\S+", "", shlex.join(sys.argv[1:]))
    command = f"python experiments/benchmarks/{Path(sys.argv[0]).name} {options}".strip()
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)+", "", command)


# --- measuring --------------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any], repeats: int = 5, warm: int = 1) -> list[float]:
    """Returns the seconds of ``repeats`` calls, after ``warm`` untimed calls. A call ends when its result is ready."""
    import jax

    times = []
    for _ in range(warm + repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times[warm:]


def round_seconds(sim: Any, rounds: int, warm: int = 2, each: int = 1) -> list[float]:
    """Returns ``rounds`` timings in seconds per round, after ``warm`` untimed ones.

    A timing is the mean over ``each`` rounds, which are dispatched without waiting for their results.
    """
    import jax

    state = sim.init(jax.random.key(0))

    def go_on() -> Any:
        nonlocal state
        for _ in range(each):
            state, _ = sim.round_fn(state)
        return state

    return [t / each for t in seconds(go_on, rounds, warm)]


def matmul_rate(n: int = 4000, dtype: str = "float32", precision: str | None = None) -> float:
    """Returns the operations per second of XLA's n x n matrix product, on all cores of a CPU or on one accelerator."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (n, n)).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision=precision))
    return 2 * n**3 / min(seconds(lambda: product(a), 3))


def copy_rate(size: int) -> float:
    """Returns the bytes per second, read plus written, of one pass over ``size`` bytes in place."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones(size // 4, jnp.float32)
    # Without donation, the time on a CPU would include the allocation of memory.
    add = jax.jit(lambda a: a + 1, donate_argnums=0)

    def move() -> jax.Array:
        nonlocal a
        a = add(a)
        return a

    return 2 * size / min(seconds(move))


def peak_bytes() -> tuple[int, int]:
    """Returns the peak memory of this process in bytes: on the host, and on its first device (0 on a CPU)."""
    import jax

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return host, (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def simulation(workload: Workload, **options: Any) -> Any:
    """Returns a `fedjax_drift.Simulation` of the workload. By default, it has FedAvg and donated states."""
    import fedjax_drift as fd

    x, y = images(workload)
    given = {
        "model": model(workload.network),
        "data": fd.FederatedData(x, y, workload.sizes),
        "algorithm": fd.algorithms.fedavg(),
        "local": fd.LocalTraining(epochs=workload.epochs, batch_size=workload.batch, lr=0.01),
        "cohort_size": workload.cohort,
        "donate": True,
    }
    return fd.Simulation(**(given | options))


def model(name: str) -> Any:
    """Returns the model with this name, as in `fd.models.MODELS` or in `workloads.NETWORKS`."""
    import fedjax_drift as fd
    from fedjax_drift.models.networks import CNN

    if name in fd.models.MODELS:
        return fd.models.MODELS[name](NETWORKS[name].classes) if name in NETWORKS else fd.models.MODELS[name]()
    network = NETWORKS[name]
    return fd.Model.from_linen(CNN(*network[2:4], network.classes, *network.dropout), network.image)


def own_process(script: str, options: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the script in a new process with these options. Returns the JSON value in the last line of its output."""
    command = [sys.executable, script, *options, *["--quick"] * arguments.quick]
    return json.loads(run(command).splitlines()[-1])


def run(command: Sequence[str]) -> str:
    """Runs the command and returns its output. If the command fails, prints its output and exits."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout
