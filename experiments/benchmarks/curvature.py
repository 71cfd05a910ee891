"""Compares the time of measure="sharpness" and "local_sharpness" with that of one evaluation on the same test set.

    python experiments/benchmarks/curvature.py [--turns 5] [--model lenet5] [--test 2000]

The test set has --test images of 28x28. "sharpness" takes 20 products with the Hessian for the eigenvalues and 10 for
the trace. "local_sharpness" takes 20 for each of 2 clients, and also trains them, for one step. Evaluations and
measurements are interleaved: each turn gives one ratio of their times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import jax
import measure
import numpy as np

import fedjax_drift as fd

CLIENTS, IMAGES = 2, 20


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    rng, M = np.random.default_rng(0), CLIENTS * IMAGES
    x, y = rng.integers(0, 256, (M + arguments.test, 28, 28, 1), np.uint8), rng.integers(0, 62, M + arguments.test)
    data = fd.FederatedData(x[:M], y[:M], np.full(CLIENTS, IMAGES), x[M:], y[M:])
    model = getattr(fd.models, arguments.model)(num_classes=62)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=CLIENTS)
    state = sim.init(jax.random.key(0))

    def seconds(call: Callable) -> float:
        started = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - started

    def evaluate() -> object:
        return sim.evaluate(state)

    for name, of in (("sharpness", 1), ("local_sharpness", CLIENTS)):

        def measured(name: str = name) -> object:
            return sim.measure(state, name)

        evaluations, ratios = [], []
        for turn in range(1 + arguments.turns):
            once, many = seconds(evaluate), seconds(measured)
            if turn:  # the first one compiles
                evaluations.append(once)
                ratios.append(many / once / of)
        what = f"{arguments.model}, {name}{' of one client' if of > 1 else ''} / evaluation"
        note = f"an evaluation of {arguments.test:,} images takes {1e3 * min(evaluations):.3g} ms"
        yield measure.row(what, ratios, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--model", default="lenet5", choices=["lenet5", "mnist_2nn"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.test, arguments.model = 1, 100, "mnist_2nn"
    fd.use_cpu_devices()
    measure.save("curvature", rows(arguments), arguments)


if __name__ == "__main__":
    main()
