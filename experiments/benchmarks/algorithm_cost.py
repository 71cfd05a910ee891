"""Compares each algorithm with FedAvg: the time of a round, and the size of the states.

    python experiments/benchmarks/algorithm_cost.py [--turns 5] [--rounds 3] [--model lenet5]

All algorithms have the same federation (500 clients x 100 images of 28x28, 62 classes), cohort (50 clients per round)
and local training (one epoch, batch size 20, SGD). LfD uses the model with cosine logits, and is compared with FedAvg
with the same model. States are donated, as in `run`. FedRep is left out, because it needs two local epochs, and FedBN,
because LeNet-5 has no normalisation layers.

The rounds of an algorithm and of FedAvg are interleaved: each turn runs --rounds rounds of both, and gives one ratio of
their times. Sizes are given in P, the number of bytes of one model, and B (bytes). Bytes that are sent and received are
those of a round.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Iterator

import jax
import measure
import numpy as np

import fedjax_drift as fd
from fedjax_drift import tree

REQUIRED = {
    "fedprox": {"mu": 0.1}, "fedadam": {"server_lr": 0.01}, "fedyogi": {"server_lr": 0.01},
    "fedadagrad": {"server_lr": 0.01}, "slowmo": {"beta": 0.7}, "fedadc": {"beta": 0.7}, "feddyn": {"alpha": 0.01},
    "feddc": {"alpha": 0.01}, "constrained": {"mu": 0.1}, "agnostic": {"domains": 62},
}  # fmt: skip
LEFT_OUT = ("fedrep", "fedbn", "feddf", "fedproto")


def size(tree_: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree_) if leaf.dtype != jax.random.key(0).dtype)


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    rng, clients, cohort, n = np.random.default_rng(0), *((4, 2, 4) if arguments.quick else (500, 50, 100))
    x, y = rng.integers(0, 256, (clients * n, 28, 28, 1), np.uint8), rng.integers(0, 62, clients * n)
    data = fd.FederatedData(x, y, np.full(clients, n), x[:n], y[:n])
    local = fd.LocalTraining(epochs=1, batch_size=20, lr=0.01)

    def simulate(name: str, cosine: bool = False) -> tuple[fd.Simulation, fd.ServerState, dict]:
        model = getattr(fd.models, arguments.model)(num_classes=62, cosine=cosine)
        algorithm = fd.algorithms.ALGORITHMS[name](**REQUIRED.get(name, {}))
        sim = fd.Simulation(model, data, algorithm, local=local, cohort_size=cohort, donate=True)
        return sim, *sim.round_fn(sim.init(jax.random.key(0)))

    def seconds(sim: fd.Simulation, state: fd.ServerState) -> tuple[float, fd.ServerState]:
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(arguments.rounds):
            state, _ = sim.round_fn(state)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / arguments.rounds, state

    base = {cosine: list(simulate("fedavg", cosine)[:2]) for cosine in {name == "lfd" for name in arguments.algorithms}}
    for name in arguments.algorithms:
        reference = base[name == "lfd"]
        sim, state, info = simulate(name, name == "lfd")
        client, server = size(state.clients) / data.num_clients, size(state.server)
        ratios = []
        for _ in range(arguments.turns):
            plain, reference[1] = seconds(*reference)
            own, state = seconds(sim, state)
            ratios.append(own / plain)
        one = 4 * tree.size(state.params)
        kept = f"{client / one:.0f} P" + (f" + {client % one:.0f} B" if client % one else "")
        up, down = float(info["uplink_bytes"][0]) / one, float(info["downlink_bytes"]) / one
        lines = len(inspect.getsource(inspect.getmodule(fd.algorithms.ALGORITHMS[name])).splitlines())
        note = f"a client keeps {kept}, gets {down:.1f} P, sends {up:.1f} P; the server keeps {server / one:.1f} P; "
        note += f"a file of {lines} lines"
        yield measure.row(f"{arguments.model}, {name} / fedavg", ratios, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="lenet5", choices=["lenet5", "mnist_2nn"])
    parser.add_argument(
        "--algorithms", nargs="+", default=[name for name in fd.algorithms.ALGORITHMS if name not in LEFT_OUT]
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.rounds, arguments.model = 1, 1, "mnist_2nn"
        arguments.algorithms = ["fedprox", "scaffold"]
    fd.use_cpu_devices()
    measure.save("algorithm_cost", rows(arguments), arguments)


if __name__ == "__main__":
    main()
