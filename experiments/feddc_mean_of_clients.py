"""Measures the rounds to a test accuracy with partial participation, as in FedDC's table 1, for two models.

    python -m experiments.feddc_mean_of_clients [--dataset mnist] [--alpha 0.3] [--target 0.98] [--seeds 3]
                                                [--rounds 160] [--algorithms feddc ...] [--output FILE.jsonl]

Two models are scored in every round:

- w, the global model, which the server sends to the clients;
- the mean of all clients' last models. The scripts of the authors plot its curve.

If the clients differ and few of them take part, w changes with each cohort, and the mean changes much less.

The 100 clients have equal numbers of examples, and the label mix of each client is drawn from Dirichlet(alpha). Each
client takes part in a round with probability 0.15. The model is 2NN. A client trains for 5 epochs with batch size 50,
learning rate 0.1 * 0.998^t, gradients clipped to norm 10, and weight decay 1e-3. As in the authors' code, the control
variates are computed with the initial learning rate eta_0 and the mean number of steps Kbar, and are scaled by q_i (1
for all clients here). All algorithms have the same data, initial model and cohorts for each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import partial
from typing import Any, NamedTuple

import jax

import fedjax_drift as fd

AUTHORS = {"scale_by_size": True, "variate_lr": "initial", "variate_steps": "mean"}
ALGORITHMS = {
    "feddc": fd.algorithms.feddc(alpha=0.1, **AUTHORS),
    "scaffold": fd.algorithms.scaffold(**AUTHORS),
    "feddyn": fd.algorithms.feddyn(alpha=0.01, scale_by_size=True),
    "fedavg": fd.algorithms.fedavg(),
    "fedprox": fd.algorithms.fedprox(mu=1e-4),
}


class Server(NamedTuple):
    params: Any
    inner: Any
    client_mean: Any  # the mean of the last models of all N clients


def scored_over_all_clients(algorithm: fd.Algorithm) -> fd.Algorithm:
    """Returns an algorithm that trains like the given one, and also scores the mean of all clients' last models.

    Each client stores its last model, and the server stores the mean of these models.
    """

    def init_server(params: Any) -> Server:
        return Server(params, algorithm.init_server(params), params)

    def client_update(server: Server, client: Any, work: fd.Work) -> fd.ClientResult:
        inner, last = client
        result = algorithm.client_update(server.inner, inner, work)
        D = result.message[0] if isinstance(result.message, tuple) else result.message
        theta = jax.tree.map(lambda w, D: w + D, server.params, D)
        change = jax.tree.map(lambda new, old: new - old, theta, last)  # all clients have weight 1
        return result._replace(message=(result.message, change), state=(result.state, theta))

    def server_update(server: Server, mean: Any, context: fd.Round) -> Server:
        inner = algorithm.server_update(server.inner, mean[0], context)
        everyone = jax.tree.map(lambda a, change: a + context.participation * change, server.client_mean, mean[1])
        return Server(inner.params, inner, everyone)

    made = fd.Algorithm(
        init_server, lambda params: (algorithm.init_client(params), params), client_update, server_update
    )
    return made._replace(models=lambda server: {"client_mean": server.client_mean})


def first(history: list[dict], name: str, target: float) -> int | None:
    """Returns the first round whose score reaches the target, or None."""
    return next((record["round"] for record in history if record.get(name, 0) >= target), None)


def thin(record: dict) -> dict:
    """Returns the round and both accuracies of a record, with five significant digits."""
    scores = ("accuracy", "client_mean_accuracy")
    return {"round": record["round"]} | {score: float(f"{record[score]:.5g}") for score in scores}


def all_reached(history: list[dict], target: float) -> bool:
    """In every tenth round: whether both models reached the target, and at least 10 rounds were run after that."""
    reached = [first(history, score, target) for score in ("accuracy", "client_mean_accuracy")]
    return len(history) % 10 == 0 and None not in reached and max(r or 0 for r in reached) + 10 <= len(history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist"), default="mnist")
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.3,
        help="parameter of the Dirichlet distribution: 0.6 for the paper's D1, 0.3 for D2, large for IID",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--target", type=float, default=0.98)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--output", help="JSONL file; after each run, one line per round is appended")
    arguments = parser.parse_args()
    fd.use_cpu_devices()
    for seed, name in itertools.product(range(arguments.seeds), arguments.algorithms):
        partition = fd.partition.dirichlet(100, alpha=arguments.alpha, seed=seed)
        sim = fd.Simulation(
            fd.models.mnist_2nn(),
            fd.datasets.load(arguments.dataset, partition=partition),
            scored_over_all_clients(ALGORITHMS[name]),
            local=fd.LocalTraining(epochs=5, batch_size=50, lr=0.1, lr_decay=0.998, clip_norm=10.0, weight_decay=1e-3),
            cohort_size=15,
            sampling="bernoulli",
        )
        started, ends = time.perf_counter(), partial(all_reached, target=arguments.target)
        state = sim.init(jax.random.key(seed))
        _, history = sim.run(state, arguments.rounds, eval_every=1, progress=False, until=ends)
        seconds = time.perf_counter() - started
        for model, score in (("w", "accuracy"), ("mean of clients", "client_mean_accuracy")):
            at = {record["round"]: f"{100 * record[score]:.2f}" for record in history}
            marks = ", ".join(f"{at[t]} % in round {t}" for t in (60, 150) if t in at)
            reached = first(history, score, arguments.target)
            print(f"seed {seed}  {name:9} {model:17}  {arguments.target:.0%} in round {reached}; {marks}", flush=True)
        print(f"{seconds:.0f} s", flush=True)
        if arguments.output:
            with open(arguments.output, "a") as file:
                file.writelines(json.dumps({"algorithm": name, "seed": seed} | thin(r)) + "\n" for r in history)


if __name__ == "__main__":
    main()
