"""FedJAX (github.com/google/fedjax), a library by Google.

Its algorithms run unchanged, with its own optimizers and its own batches for full gradients and losses. The model, the
data, the cohorts and the order of the examples in training are ours. Its other algorithms are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from federation import CLASSES, Federation, Row, as_vector, compared, difference, main, without, written
from ifca import models_of

import fedjax_drift as fd


def theirs(federation: Federation, algorithm: Any, first: Any) -> list[Any]:
    """The state after every round of one of their algorithms, from these first parameters."""
    from fedjax import ClientDataset

    class Examples(ClientDataset):
        def __init__(self, t: int, i: int) -> None:
            x, y = federation.clients[i]
            super().__init__({"x": x, "y": y, "domain_id": y})
            self.batches = federation.batches(t, i)

        def shuffle_repeat_batch(self, _: Any) -> list[dict[str, np.ndarray]]:
            return [{"x": x.numpy(), "y": y.numpy(), "domain_id": y.numpy()} for x, y in self.batches]

    state, states, key = algorithm.init(first), [], jax.random.key(0)
    for t, cohort in enumerate(federation.cohorts):
        state, _ = algorithm.apply(state, [(i, Examples(t, i), key) for i in cohort])
        states.append(state)
    return states


def rows() -> Iterator[Row]:
    without("haiku")
    from fedjax import PaddedBatchHParams, ShuffleRepeatBatchHParams, optimizers
    from fedjax.algorithms import agnostic_fed_avg, hyp_cluster, mime, mime_lite

    fed = Federation()
    training, whole = ShuffleRepeatBatchHParams(batch_size=fed.batch_size), PaddedBatchHParams(batch_size=32)
    local, server = optimizers.sgd(fed.lr), optimizers.sgd(1.0)

    def losses(params: Any, batch: dict[str, Any], key: jax.Array) -> jax.Array:
        logits = fed.model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    def params_of(algorithm: Any) -> list[np.ndarray]:
        return [as_vector(state.params) for state in theirs(fed, algorithm, fed.initial)]

    momentum, beta = optimizers.sgd(fed.lr, momentum=0.9), {"beta": 0.9}
    for name, make in (("mime", mime.mime), ("mimelite", mime_lite.mime_lite)):
        path = f"fedjax/algorithms/{make.__name__}.py"
        lines = f"{path}#base_optimizer.apply(", f"{path}#def server_update"
        models = params_of(make(losses, momentum, training, whole, 1.0))
        yield compared(fed, name, beta | {"weighting": "examples"}, models, lines, default=beta)

    weights, domains = np.full(CLASSES, 1 / CLASSES), {"domains": CLASSES, "domain_lr": 0.1, "window": 3}
    make = agnostic_fed_avg.agnostic_federated_averaging
    algorithm = make(losses, local, server, training, whole, weights, 0.1, "eg", 3)
    path = "fedjax/algorithms/agnostic_fed_avg.py"
    lines = tuple(f"{path}#{line}" for line in ("alpha = server", "loss = jnp.sum(alpha", "domain_weights = update"))
    yield compared(fed, "agnostic", domains, params_of(algorithm), lines, setting="the domain is the label")

    hypcluster = fd.algorithms.hypcluster(models=2)
    sim, states = fed.states(hypcluster)
    models = sim.init(jax.random.key(fed.seed)).server.models
    first = [jax.tree.map(lambda w, j=j: w[j], models) for j in range(2)]
    clusters = theirs(fed, hyp_cluster.hyp_cluster(losses, local, server, whole, training), first)
    vectors = [np.concatenate([as_vector(params) for params in state.cluster_params]) for state in clusters]
    found = difference(np.array([models_of(state).ravel() for state in states]), vectors)
    path = "fedjax/algorithms/hyp_cluster.py"
    lines = f"{path}#jnp.argmin(jnp.stack", f"{path}#tree_inverse_weight(delta_params_sum"
    yield Row(written("hypcluster", {"models": 2}), found, lines, "all models")


if __name__ == "__main__":
    main(rows)
