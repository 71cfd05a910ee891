"""FedDC's table 1 with both models that could be scored: rounds to a test accuracy, partial participation.

    python experiments/feddc_mean_of_clients.py [--dataset mnist] [--alpha 0.3] [--target 0.98] [--seeds 3]
                                                [--rounds 160] [--algorithms feddc ...] [--output FILE.jsonl]

100 clients, each with a class mix from Dirichlet(alpha), equal sizes; every client takes part with probability 0.15;
2NN, 5 epochs, batch 50, lr 0.1 * 0.998^t, gradients clipped to 10, weight decay 1e-3. Variates with eta_0 and Kbar, and
scaled by q_i (all 1 here), as the authors' code has them. Algorithms of one seed share data, first model and cohorts.

Two models are scored in every round: w, the model that is sent, and the mean of all clients' last models, whose curve
the authors' scripts plot. Where clients differ and few take part, w moves with each cohort; the mean does not.
"""

from __future__ import annotations

import argparse
import json
import time
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
    client_mean: Any  # here: the mean over all N clients of their last models, which `evaluate` scores beside params


def scored_over_all_clients(algorithm: fd.Algorithm) -> fd.Algorithm:
    """The algorithm, unchanged, whose clients also keep their last model, and whose server the mean of these."""

    def init_server(params: Any) -> Server:
        return Server(params, algorithm.init_server(params), params)

    def client_update(server: Server, client: Any, work: fd.Work) -> fd.ClientResult:
        inner, last = client
        result = algorithm.client_update(server.inner, inner, work)
        D = result.message[0] if isinstance(result.message, tuple) else result.message
        theta = jax.tree.map(lambda w, D: w + D, server.params, D)
        change = jax.tree.map(lambda new, old: new - old, theta, last)  # every client has the same size and weight here
        return result._replace(message=(result.message, change), state=(result.state, theta))

    def server_update(server: Server, mean: Any, context: fd.Round) -> Server:
        inner = algorithm.server_update(server.inner, mean[0], context)
        everyone = jax.tree.map(lambda a, change: a + context.participation * change, server.client_mean, mean[1])
        return Server(inner.params, inner, everyone)

    return fd.Algorithm(
        init_server, lambda params: (algorithm.init_client(params), params), client_update, server_update
    )


def first(history: list[dict], name: str, target: float) -> int | None:
    """The first round whose score reaches the target."""
    return next((record["round"] for record in history if record.get(name, 0) >= target), None)


def thin(record: dict) -> dict:
    """What is kept of a round; five digits."""
    scores = ("accuracy", "client_mean_accuracy")
    return {"round": record["round"]} | {score: float(f"{record[score]:.5g}") for score in scores}


def all_reached(history: list[dict], target: float) -> bool:
    """Both models have been at the target for 10 rounds."""
    reached = [first(history, score, target) for score in ("accuracy", "client_mean_accuracy")]
    return None not in reached and max(r or 0 for r in reached) + 10 <= len(history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist"), default="mnist")
    parser.add_argument("--alpha", type=float, default=0.3, help="D1: 0.6, D2: 0.3, much: iid")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--target", type=float, default=0.98)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--output", help="append every round as a line of JSON, as each run ends")
    arguments = parser.parse_args()
    fd.use_cpu_devices()
    local = fd.LocalTraining(epochs=5, batch_size=50, lr=0.1, lr_decay=0.998, clip_norm=10.0, weight_decay=1e-3)
    for seed in range(arguments.seeds):
        data = fd.datasets.load(
            arguments.dataset, partition=fd.partition.dirichlet(100, alpha=arguments.alpha, seed=seed)
        )
        for name in arguments.algorithms:
            algorithm = scored_over_all_clients(ALGORITHMS[name])
            sim = fd.Simulation(
                fd.models.mnist_2nn(), data, algorithm, local=local, cohort_size=15, sampling="bernoulli"
            )
            started = time.perf_counter()
            state, history = sim.init(jax.random.key(seed)), []
            while len(history) < arguments.rounds and not (history and all_reached(history, arguments.target)):
                state, new = sim.run(state, min(10, arguments.rounds - len(history)), eval_every=1, progress=False)
                history += new
            seconds = time.perf_counter() - started
            for model, score in (("w", "accuracy"), ("all clients' mean", "client_mean_accuracy")):
                at = {record["round"]: f"{100 * record[score]:.2f}" for record in history}
                marks = ", ".join(f"{at[t]} % at {t}" for t in (60, 150) if t in at)
                reached = first(history, score, arguments.target)
                print(
                    f"seed {seed}  {name:9} {model:17}  {arguments.target:.0%} at round {reached}; {marks}", flush=True
                )
            print(f"{seconds:.0f} s", flush=True)
            if arguments.output:
                with open(arguments.output, "a") as file:
                    file.writelines(json.dumps({"algorithm": name, "seed": seed} | thin(r)) + "\n" for r in history)


if __name__ == "__main__":
    main()
