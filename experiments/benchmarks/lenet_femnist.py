"""LeNet-5 on a FEMNIST-shaped federation: seconds a round, and the fraction of the machine's matrix-multiply rate.

500 clients x 100 images 28x28x1, 62 classes, 50 clients a round, batch 20, one local epoch, SGD 0.05, FedAvg weighted
by examples, 66,126 parameters: the workload that other simulators are compared on.

    python experiments/benchmarks/lenet_femnist.py [--rounds 30] [--devices 2] [--peer "COMMAND"]

peer_pfl.py, beside this file, is the same workload in pfl-research. With --peer the two run in turn, several times,
and the ratio of the medians is printed; COMMAND must print
``median=SECONDS`` as its seconds a round.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_drift as fd

CLIENTS, COHORT, ROWS, BATCH, CLASSES, LR = 500, 50, 100, 20, 62, 0.05
# Necessary operations of one training image: forward, weight gradients, and input gradients except the first layer's.
LAYERS = (25 * 6 * 28 * 28, 150 * 16 * 10 * 10, 400 * 120, 120 * 84, 84 * CLASSES)
FLOP_PER_IMAGE = 2 * (3 * sum(LAYERS) - LAYERS[0])


def federation(seed: int = 0) -> fd.FederatedData:
    """Noisy prototypes as uint8 images, a Dirichlet(0.5) label mix per client."""
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(128, 40, size=(CLASSES, 28, 28, 1))
    clients = []
    for _ in range(CLIENTS):
        y = rng.choice(CLASSES, size=ROWS, p=rng.dirichlet(np.full(CLASSES, 0.5)))
        clients.append((np.clip(prototypes[y] + rng.normal(0, 40, (ROWS, 28, 28, 1)), 0, 255).astype(np.uint8), y))
    return fd.FederatedData.from_clients(clients, name="femnist-shaped")


def matmul_rate(n: int = 4000) -> float:
    """GFLOP/s of XLA's own n x n float32 product on all cores."""
    a = jax.random.normal(jax.random.key(0), (n, n))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times) / 1e9


def round_times(rounds: int) -> list[float]:
    """Seconds of each round after two that compile and warm up."""
    sim = fd.Simulation(
        fd.models.lenet5(CLASSES),
        federation(),
        fd.algorithms.fedavg(),
        local=fd.LocalTraining(batch_size=BATCH, lr=LR),
        cohort_size=COHORT,
    )
    state = sim.init(jax.random.key(0))
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        state, _ = sim.round_fn(state)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=None, help="CPU devices, default one per core")
    parser.add_argument("--peer", help="another simulator's command, run in turn with ours")
    parser.add_argument("--turns", type=int, default=3, help="how often each runs with --peer")
    arguments = parser.parse_args()
    if arguments.peer:
        compare(arguments)
        return
    devices = fd.use_cpu_devices(arguments.devices)
    rate = matmul_rate()
    times = round_times(arguments.rounds)
    median = statistics.median(times)
    achieved = COHORT * ROWS * FLOP_PER_IMAGE / median / 1e9
    print(
        f"fedjax_drift {fd.__version__}, jax {jax.__version__}, {devices} CPU devices: median={median:.4f}s a round "
        f"(min {min(times):.4f}, max {max(times):.4f}), {COHORT * ROWS / median:,.0f} images/s, "
        f"{achieved:.1f} of {rate:.0f} GFLOP/s = {achieved / rate:.1%} of the matrix-multiply rate"
    )


def compare(arguments: argparse.Namespace) -> None:
    ours = [sys.executable, __file__, "--rounds", str(arguments.rounds)]
    if arguments.devices:
        ours += ["--devices", str(arguments.devices)]
    medians: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(arguments.turns):
        for name, command in (("ours", ours), ("peer", shlex.split(arguments.peer))):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{shlex.join(command)} failed:\n{done.stderr}")
            output = done.stdout
            medians[name].append(float(re.findall(r"median=([\d.]+)", output)[-1]))
            print(name, output.strip().splitlines()[-1], flush=True)
    ratios = [a / b for a, b in zip(medians["ours"], medians["peer"], strict=True)]
    print(f"ours / peer: {statistics.median(ratios):.3f} (turns: {', '.join(f'{r:.3f}' for r in ratios)})")


if __name__ == "__main__":
    main()
