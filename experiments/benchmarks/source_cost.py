"""Compares a round with each source of drift with a round without it, 3,400 writers.

    python experiments/benchmarks/source_cost.py [--turns 5] [--rounds 3] [--cohort 50] [--algorithm fedavg]

The federation has the sizes of the 3,400 writers of glyphs, the model is LeNet-5, and a client trains for one epoch
with batch size 20. Rounds with and without the source are interleaved: each turn runs --rounds rounds of both, and
gives one ratio of their times. Both have the same number of selected clients, but not the same clients, so the ratios
are also given for a local step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import jax
import measure
import numpy as np

import fedjax_drift as fd

Variant = Callable[[fd.FederatedData, int], tuple[fd.FederatedData, dict]]


def rule(make: Callable[[int, int], fd.participation.Participation]) -> Variant:
    return lambda data, K: (data, {"participation": make(data.num_clients, K)})


def shifted(shift: fd.shift.Shift) -> Variant:
    return lambda data, K: (data.shifted(shift), {})


def mean_steps(data: fd.FederatedData, K: int) -> tuple[fd.FederatedData, dict]:
    return data, {"local": fd.LocalTraining(steps=int(round(np.ceil(data.sizes / 20).mean())), batch_size=20, lr=0.05)}


def asynchronous(staleness: str) -> Variant:
    """Ten times as many clients in flight as an update takes, and 21 copies of the server's variables."""
    return lambda data, K: (
        data, {"clock": fd.clock.asynchronous(min(10 * K, data.num_clients), staleness), "devices": DEVICES}
    )  # fmt: skip


DEVICES = fd.Devices(speed_spread=0.5, up=1e5, down=1e6, seconds_per_step=0.05)
p, s, everyone = fd.participation, fd.shift, {"by": "all"}
SOURCES: dict[str, Variant] = {
    "bernoulli": rule(lambda N, K: p.bernoulli()),
    "by_size": rule(lambda N, K: p.by_size()),
    "importance": rule(lambda N, K: p.importance(np.full(N, K / N))),
    "power_of_choice(2 K)": rule(lambda N, K: p.power_of_choice(2 * K)),
    "power_of_choice(2 K, exact=True)": rule(lambda N, K: p.power_of_choice(2 * K, exact=True)),
    "cyclic(10)": rule(lambda N, K: p.cyclic(min(10, N))),
    "diurnal(24)": rule(lambda N, K: p.diurnal(24.0)),
    "markov(0.2, 0.1)": rule(lambda N, K: p.markov(0.2, 0.1)),
    "synchronous, with devices": lambda data, K: (data, {"devices": DEVICES}),
    "asynchronous(10 K)": asynchronous("constant"),
    "asynchronous(10 K), polynomial": asynchronous("polynomial"),
    "steps=, as many as the mean": mean_steps,
    "gaussian_noise": shifted(s.gaussian_noise(0.5)),
    "brightness": shifted(s.brightness(0.5)),
    "blur": shifted(s.blur(1.0)),
    "rotate": shifted(s.rotate(45)),
    "domains of four shifts": shifted(
        s.domains(s.none(), s.rotate(90, **everyone), s.blur(1.5, **everyone), s.brightness(0.5, **everyone))
    ),
    "sudden, permute_labels": shifted(s.sudden(2, s.permute_labels(0, [(1, 7)]))),
    "gradual, brightness": shifted(s.gradual(2, 50, s.brightness(0.5, **everyone))),
}


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    writers = 12 if arguments.quick else arguments.writers
    data, K = fd.datasets.load("glyphs", num_writers=writers), min(arguments.cohort, writers // 3)
    model, algorithm = fd.models.lenet5(num_classes=62), getattr(fd.algorithms, arguments.algorithm)()

    def simulate(data: fd.FederatedData, options: dict) -> list:
        options = {"local": fd.LocalTraining(batch_size=20, lr=0.05)} | options
        sim = fd.Simulation(model, data, algorithm, cohort_size=K, donate=True, **options)
        return [sim, sim.round_fn(sim.init(jax.random.key(0)))[0]]

    def seconds(run: list) -> tuple[float, float]:
        """Seconds a round, and seconds a local step."""
        sim, state = run
        jax.block_until_ready(state)
        infos, started = [], time.perf_counter()
        for _ in range(arguments.rounds):
            state, info = sim.round_fn(state)
            infos.append(info)
        jax.block_until_ready(state)
        run[1], taken = state, time.perf_counter() - started
        return taken / arguments.rounds, taken / sum(int(info["executed_steps"]) for info in infos)

    plain = simulate(data, {})
    for name, variant in SOURCES.items():
        if arguments.sources and not any(part in name for part in arguments.sources):
            continue
        run, ratios, of_step = simulate(*variant(data, K)), [], []
        for _ in range(arguments.turns):
            without, with_source = seconds(plain), seconds(run)
            ratios.append(with_source[0] / without[0])
            of_step.append(with_source[1] / without[1])
        note = f"a local step: {np.median(of_step):.2f}"
        if past := sum(leaf.nbytes for leaf in jax.tree.leaves(getattr(run[1].clock, "past", ()))):
            note += f"; past servers: {past / 1e6:.1f} MB"
        yield measure.row(f"{name} / without", ratios, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, default=3400)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--sources", nargs="*", help="only the sources whose names contain one of these")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.rounds, arguments.sources = 1, 1, ["markov", "gaussian_noise", "polynomial"]
    fd.use_cpu_devices()
    measure.save("source_cost", rows(arguments), arguments)


if __name__ == "__main__":
    main()
