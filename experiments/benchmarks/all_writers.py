"""Measures the time and the peak memory of a round with all 3,400 writers of glyphs (LeNet-5, about 660,000 images).

    python experiments/benchmarks/all_writers.py [--writers 3400] [--rounds 3] [--lanes auto] [--model lenet5]

The first run generates the images and caches them. This takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import jax
import measure

import fedjax_drift as fd


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    data = fd.datasets.load("glyphs", num_writers=arguments.writers)
    cohort, local = arguments.cohort or arguments.writers, fd.LocalTraining(batch_size=20, lr=0.1)
    model = fd.models.MODELS[arguments.model](num_classes=62)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=cohort, lanes=arguments.lanes)
    what = f"{arguments.model}, {cohort:,} of {arguments.writers:,} writers a round"
    start = time.perf_counter()
    state, info = sim.round_fn(sim.init(jax.random.key(0)))
    jax.block_until_ready(state)
    yield measure.row(f"{what}, first round", time.perf_counter() - start, "s")
    times = []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        state, info = sim.round_fn(state)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    images, wasted = int(info["size"].sum()), int(info["executed_steps"]) / int(info["steps"])
    note = (
        f"lanes: {sim.lanes}; {images / statistics.median(times):,.0f} images/s, executed / needed steps {wasted:.3f}, "
        f"test accuracy after {int(state.round)} rounds {sim.evaluate(state)['accuracy']:.3f}"
    )
    yield measure.row(what, times, "s a round", note=note)
    host, device = measure.peak_bytes()
    yield measure.row(f"{what}, peak of the host's memory", host / 2**30, "GiB")
    if device:
        yield measure.row(f"{what}, peak of the device's memory", device / 2**30, "GiB")


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--writers", type=int, default=3400)
    parser.add_argument("--cohort", type=int, help="number of writers per round (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="number of timed rounds, after one round that compiles")
    parser.add_argument("--lanes", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--model", default="lenet5", choices=("lenet5", "emnist_cnn"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.writers, arguments.rounds = "emnist_nn", 2, 1
    fd.use_cpu_devices()
    measure.save("all_writers", rows(arguments), arguments)


if __name__ == "__main__":
    main()
