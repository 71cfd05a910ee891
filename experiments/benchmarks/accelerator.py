"""Measures all that only an accelerator can tell.

    python experiments/benchmarks/accelerator.py [--workloads "lenet5 100" pfl_cifar10 ...] [--rounds 20]
    python experiments/benchmarks/accelerator.py --bfloat16 [--seeds 3]
    python experiments/benchmarks/accelerator.py --correctness
    python experiments/benchmarks/accelerator.py --streaming
    python experiments/benchmarks/accelerator.py --memory
    python experiments/benchmarks/accelerator.py --all [--minutes 25]      everything; see run_book.py

By default, it measures the seconds per round, and the share of the device's limit (arithmetic or memory bandwidth), of
the workloads in workloads.py:

- LeNet-5 and the EMNIST CNN with 10, 100, 500 and all 3,400 clients per round and batch size 20. The clients have
  different numbers of examples, like the writers of FEMNIST.
- pfl-research's CIFAR-10 benchmark: 1,000 clients x 50 images, 50 clients per round, batch size 10. Its complete run
  has 1,500 rounds, with an evaluation every 10 rounds.
- FedDC's CIFAR-10 setting: 100 clients, 15 per round, 5 epochs, batch size 50, with FedDC's CNN and with ResNet-18-GN.

The images are random. The docstring of roofline.py defines the necessary operations and bytes. The limits are measured
in the same run: the rate of a matrix product in JAX's default precision for float32, and the rate of one pass over
memory.

With --bfloat16, the script compares training in bfloat16 and in float32 on glyphs with 100 writers per round. It
measures the time of interleaved rounds, and the test accuracy.

With --correctness, it compares the global model after three rounds with that of a CPU, in the precisions of a matrix
product that JAX offers. With --streaming, it times rounds whose examples are kept on the device, and rounds whose
examples are kept on the host. With --memory, it compares the peak memory of a device with `Simulation.plan`.

torch_loop.py trains the same workloads with a plain loop over clients in PyTorch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import measure
import numpy as np
import run_book
from algorithm_cost import REQUIRED
from workloads import RESNET, WORKLOADS, Workload, images, operations, step_bytes, tiny

import fedjax_drift as fd

# The targets for an H200, in seconds per round.
WANTED = {f"{net} {K}": s for net in ("lenet5", "emnist_cnn") for K, s in ((10, 0.015), (100, 0.03))}
WANTED |= {"lenet5 3400": 1, "emnist_cnn 3400": 4}
PFL_ROUNDS, PFL_SECONDS = 1500, 60


def rounds(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    accelerated = jax.default_backend() != "cpu"
    n, size = (8192, 2**32) if accelerated else (64, 2**16)
    rate, bandwidth = measure.matmul_rate(n), measure.copy_rate(size)
    yield measure.row("float32 product", rate / 1e9, "GFLOP/s")
    yield measure.row("one pass over memory, read and written", bandwidth / 1e9, "GB/s")
    for name in arguments.workloads:
        workload = tiny(WORKLOADS[name]) if arguments.quick else WORKLOADS[name]
        sim = measure.simulation(workload)
        long = workload.cohort >= 1000 or workload.network == RESNET  # a round takes seconds
        timings, each = (3, 1) if long or arguments.quick else (arguments.rounds, 5)
        times = measure.round_seconds(sim, timings, each=each)
        took = statistics.median(times)
        # These are the numbers of an average cohort, because every round has another cohort.
        trained = workload.cohort * workload.epochs * float(workload.sizes.mean())
        steps = workload.cohort * workload.epochs * float((-(-workload.sizes // workload.batch)).mean())
        needed, moved = trained * operations(workload.network), steps * step_bytes(workload.network, workload.batch)
        binds = "memory" if moved / bandwidth > needed / rate else "arithmetic"
        share = max(needed / rate, moved / bandwidth) / took
        note = (
            f"lanes: {sim.lanes}; {trained / took:,.0f} images/s; {needed / took / 1e12:.2f} TFLOP/s and "
            f"{moved / took / 1e9:.0f} GB/s necessary: {share:.1%} of the ceiling ({binds})"
        )
        if device := measure.peak_bytes()[1]:
            note += f"; at most {device / 2**30:.2f} GiB of the device so far"
        wanted = WANTED.get(name) if accelerated else None
        yield measure.row(name, times, "s a round", at_most=wanted, note=note)
        if name == "pfl_cifar10":
            yield pfl_run(workload, 2 if arguments.quick else PFL_ROUNDS)


def pfl_run(workload: Workload, rounds: int) -> measure.Row:
    """Measures the time of the complete benchmark, including compilation."""
    x, y = images(workload)
    tests = min(len(x), 10_000)
    data = fd.FederatedData(x, y, workload.sizes, x[:tests], y[:tests])
    sim = measure.simulation(workload, data=data)
    start = time.perf_counter()
    sim.run(sim.init(jax.random.key(0)), rounds, eval_every=10, progress=False)
    took = time.perf_counter() - start
    return measure.row(
        f"pfl_cifar10, {rounds:,} rounds and their evaluations", took, "s", at_most=PFL_SECONDS, note="with compilation"
    )


def bfloat16(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    data = fd.datasets.load("glyphs", num_writers=3 if arguments.quick else 3400)
    cohort, local = min(100, data.num_clients), fd.LocalTraining(batch_size=20, lr=0.1)
    networks = ("emnist_nn",) if arguments.quick else ("lenet5", "emnist_cnn")
    for network in networks:
        model = fd.models.MODELS[network](num_classes=62)
        sims = {
            name: fd.Simulation(m, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort, donate=True)
            for name, m in {"float32": model, "bfloat16": model.computing_in(jnp.bfloat16)}.items()
        }
        times: dict[str, list[float]] = {name: [] for name in sims}
        for _ in range(1 if arguments.quick else 5):
            for name, sim in sims.items():
                times[name] += measure.round_seconds(sim, 1, each=1 if arguments.quick else 10)
        for name in sims:
            yield measure.row(f"{network}, {cohort} of {data.num_clients:,} writers, {name}", times[name], "s a round")
        for name, sim in sims.items():
            accuracies = [accuracy(sim, seed, arguments.accuracy_rounds) for seed in range(arguments.seeds)]
            what = f"{network}, {name}, test accuracy after {arguments.accuracy_rounds} rounds"
            yield measure.row(what, accuracies, "%", note=f"seeds 0 to {arguments.seeds - 1}")


def accuracy(sim: fd.Simulation, seed: int, rounds: int) -> float:
    state, _ = sim.run(sim.init(jax.random.key(seed)), rounds, eval_every=0, progress=False)
    return 100 * sim.evaluate(state)["accuracy"]


PRECISIONS = {"float32": "float32", "TF32": "tensorfloat32", "the default": None, "bfloat16": "bfloat16"}


def correctness(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    """The norm of the difference to the model of a CPU, divided by the norm of what three rounds change."""
    workload = tiny(WORKLOADS["lenet5 100"]) if arguments.quick else WORKLOADS["lenet5 100"]._replace(cohort=20)
    cpu, device = jax.devices("cpu")[:1], jax.devices()[:1]

    def model_after(algorithm: str, devices: list[jax.Device], precision: str | None, rounds: int = 3) -> np.ndarray:
        chosen = getattr(fd.algorithms, algorithm)(**REQUIRED.get(algorithm, {}))
        mesh = fd.clients_mesh(devices)
        with jax.default_matmul_precision(precision):
            sim = measure.simulation(workload, algorithm=chosen, mesh=mesh, lanes=5, donate=False)
            state = sim.init(jax.random.key(0))
            for _ in range(rounds):
                state, _ = sim.round_fn(state)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))])

    for algorithm in ("fedavg",) if arguments.quick else ("fedavg", "scaffold", "feddc", "fedeve"):
        start, right = (model_after(algorithm, cpu, "float32", rounds) for rounds in (0, 3))
        for name, precision in PRECISIONS.items():
            error = np.linalg.norm(model_after(algorithm, device, precision) - right) / np.linalg.norm(right - start)
            target = {"at_most": 1e-4} if name == "float32" else {}
            yield measure.row(f"{workload.network}, {algorithm}, {name}: error after 3 rounds", error, **target)


def streaming(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for name in ("lenet5 10",) if arguments.quick else ("lenet5 100", "lenet5 3400", "emnist_cnn 100"):
        workload = tiny(WORKLOADS[name]) if arguments.quick else WORKLOADS[name]
        sims = {where: measure.simulation(workload, stream=where == "host") for where in ("device", "host")}
        times: dict[str, list[float]] = {where: [] for where in sims}
        for _ in range(1 if arguments.quick else 5):
            for where, sim in sims.items():
                times[where] += measure.round_seconds(sim, 1, each=1 if workload.cohort >= 1000 else 5)
        for where in sims:
            yield measure.row(f"{name}, examples on the {where}", times[where], "s a round")
        ratios = [host / device for host, device in zip(times["host"], times["device"], strict=True)]
        yield measure.row(f"{name}, examples on the host / on the device", ratios)


def memory(arguments: argparse.Namespace) -> tuple[list[measure.Row], tuple[str, str]]:
    """Returns the rows, and the platform and the name of the device.

    Every workload has a process of its own, because a process only reports its highest peak. This process must not use
    the device, because it would take most of its memory.
    """
    rows = []
    for name in (
        ("lenet5 10",) if arguments.quick else ("lenet5 100", "lenet5 3400", "emnist_cnn 3400", "feddc_resnet18")
    ):
        options = ["--memory", "--workloads", name]
        planned, peak, lanes, *where = measure.own_process(__file__, [*options, "--one"], arguments)
        note = f"lanes: {lanes}; planned {planned / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB"
        rows.append(measure.row(f"{name}, peak memory / plan", peak / planned, note=note))
    return rows, (where[0], where[1])


def memory_of_one(arguments: argparse.Namespace) -> None:
    """Prints the planned bytes, the peak bytes, the lanes and the device of one workload as JSON."""
    (name,) = arguments.workloads
    sim = measure.simulation(tiny(WORKLOADS[name]) if arguments.quick else WORKLOADS[name])
    planned = sim.plan().total
    jax.block_until_ready(sim.run(sim.init(jax.random.key(0)), 2, eval_every=0, progress=False)[0])
    host, device = measure.peak_bytes()
    print(json.dumps([planned, device or host, sim.lanes, *measure.jax_devices()]))


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="run all measurements that need an accelerator")
    parser.add_argument("--minutes", type=float, default=25.0, help="with --all: stop after this time (default: 25)")
    for what in ("bfloat16", "correctness", "streaming", "memory"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of timings per workload; each timing is the mean of 5 rounds"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--accuracy-rounds", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seeds, arguments.accuracy_rounds = 1, 1, 1
        arguments.workloads = ["lenet5 10", *["pfl_cifar10"] * (not arguments.one)]
    if arguments.all:
        sys.exit(run_book.run(arguments.output or run_book.OUTPUT, arguments.minutes, arguments.quick))
    fd.use_cpu_devices()
    if arguments.one:
        memory_of_one(arguments)
        return
    if arguments.memory:
        found, where = memory(arguments)
        measure.save("accelerator_memory", found, arguments, where)
        return
    modes = {"bfloat16": bfloat16, "correctness": correctness, "streaming": streaming}
    chosen = [name for name in modes if getattr(arguments, name)]
    for name in chosen:
        measure.save(f"accelerator_{name}", modes[name](arguments), arguments)
    if not chosen:
        measure.save("accelerator", rounds(arguments), arguments)


if __name__ == "__main__":
    main()
