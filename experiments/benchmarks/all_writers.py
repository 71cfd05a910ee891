"""Every one of 3,400 glyph writers in one round (about 660,000 images), LeNet-5: seconds a round and peak memory.

    python experiments/benchmarks/all_writers.py [--writers 3400] [--rounds 3] [--lanes auto] [--model lenet5]

The first run draws the images (under a minute on two cores) and caches them.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time

import jax

import fedjax_drift as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=3400)
    parser.add_argument("--cohort", type=int, help="writers a round, default all")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that compiles")
    parser.add_argument("--lanes", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--model", default="lenet5", choices=("lenet5", "emnist_cnn"))
    arguments = parser.parse_args()
    fd.use_cpu_devices()
    data = fd.datasets.load("glyphs", num_writers=arguments.writers)
    cohort_size = arguments.cohort or arguments.writers
    local = fd.LocalTraining(batch_size=20, lr=0.1)
    model = getattr(fd.models, arguments.model)()
    sim = fd.Simulation(
        model, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort_size, lanes=arguments.lanes
    )
    print(sim)
    start = time.perf_counter()
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    jax.block_until_ready(state)
    print(f"first round, with compilation: {time.perf_counter() - start:.2f} s")
    times = []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        state, info = sim.round_fn(state)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    images = int(info["size"].sum())
    median = statistics.median(times)
    print(
        f"median={median:.4f}s a round of {cohort_size:,} writers and {images:,} images "
        f"(min {min(times):.4f}, max {max(times):.4f}), {images / median:,.0f} images/s, "
        f"executed / needed steps {int(info['executed_steps']) / int(info['steps']):.3f}"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    print(f"peak memory: {peak:.2f} GiB of the host" + (f", {device / 2**30:.2f} GiB of the device" if device else ""))
    print(f"test accuracy after {int(state.round)} rounds: {sim.evaluate(state)['accuracy']:.3f}")


if __name__ == "__main__":
    main()
