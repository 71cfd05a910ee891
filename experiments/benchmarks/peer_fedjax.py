"""Measures the seconds per round of FedJAX with the workload of lenet_femnist.py. lenet_femnist.py --peer runs it.

The release FedJAX 0.0.17 calls jax.tree_map, which JAX 0.6 removed. So FedJAX runs with the last version of JAX that it
works with. With JAX 0.4.30, a round takes nearly three times as long.

    python -m venv fedjax && fedjax/bin/pip install fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3
    python experiments/benchmarks/lenet_femnist.py --rounds 20 --peer \
        "fedjax/bin/python experiments/benchmarks/peer_fedjax.py"

The script uses FedJAX's federated averaging with the default backend, which compiles one step of one client.
"""

from __future__ import annotations

import argparse
import statistics
import time

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import fed_avg

CLIENTS, COHORT, ROWS, BATCH, CLASSES, LR = 500, 50, 100, 20, 62, 0.05


def lenet(x: jax.Array) -> jax.Array:
    layers = [hk.Conv2D(6, 5, padding="SAME"), jax.nn.relu, hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")]
    layers += [hk.Conv2D(16, 5, padding="VALID"), jax.nn.relu, hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")]
    dense = [hk.Linear(120), jax.nn.relu, hk.Linear(84), jax.nn.relu, hk.Linear(CLASSES)]
    return hk.Sequential([*layers, hk.Flatten(), *dense])(x)


def federation() -> fedjax.InMemoryFederatedData:
    """Returns a federation with a Dirichlet(0.5) label mix per client.

    An image is the random prototype of its class plus noise.
    """
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(CLASSES, 28, 28, 1)).astype("float32")
    clients = {}
    for i in range(CLIENTS):
        y = rng.choice(CLASSES, size=ROWS, p=rng.dirichlet(np.full(CLASSES, 0.5)))
        x = prototypes[y] + rng.normal(size=(ROWS, 28, 28, 1)).astype("float32")
        clients[b"%d" % i] = {"x": x, "y": y.astype("int32")}
    return fedjax.InMemoryFederatedData(clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="run 2 rounds only")
    arguments = parser.parse_args()
    network = hk.without_apply_rng(hk.transform(lenet))

    def loss(params: dict, batch: dict, key: jax.Array) -> jax.Array:
        logits = network.apply(params, batch["x"])
        return -(jax.nn.one_hot(batch["y"], CLASSES) * jax.nn.log_softmax(logits)).sum(-1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
    )
    state = algorithm.init(network.init(jax.random.PRNGKey(0), np.zeros((1, 28, 28, 1), "float32")))
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation(), COHORT, seed=0)
    times = []
    for _ in range(2 + (2 if arguments.quick else arguments.rounds)):
        start = time.perf_counter()
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter() - start)
    times = times[2:]
    print(
        f"FedJAX 0.0.17, jax {jax.__version__}: median={statistics.median(times):.4f}s a round (min {min(times):.4f})"
    )


if __name__ == "__main__":
    main()
