"""IFCA (github.com/jichan3751/ifca), by the authors of IFCA.

Their script for rotated MNIST runs unchanged: the averaging of models, with all clients in every round and gradients of
all examples of a client. The data and the first models are ours. The scripts for CIFAR-10 and FEMNIST, which need
TensorFlow 1, and that for synthetic data, which averages gradients, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from federation import FULL, Federation, Row, as_vector, difference, main, vector, without, written

import fedjax_drift as fd


def models_of(state: fd.ServerState) -> np.ndarray:
    """The models of `ifca`, [k, P]."""
    models = state.server.models
    return np.array(
        [as_vector(jax.tree.map(lambda w, j=j: w[j], models)) for j in range(len(jax.tree.leaves(models)[0]))]
    )


def theirs(federation: Federation, initial: np.ndarray) -> list[np.ndarray]:
    """All models after every round, from these ones, [k, P]."""
    without("torchvision", "torchvision.datasets")
    sys.path.insert(0, f"{sys.path[0]}/mnist")
    import train_cluster_mnist

    rounds: list[np.ndarray] = []

    class Experiment(train_cluster_mnist.TrainMNISTCluster):
        def setup_datasets(self) -> None:
            self.dataset = dict.fromkeys(("train", "test"), {"cluster_assign": [0] * self.config["m"]})

        def setup_models(self) -> None:
            self.models, self.criterion = [federation.network() for _ in initial], torch.nn.CrossEntropyLoss()
            for network, first in zip(self.models, initial, strict=True):
                torch.nn.utils.vector_to_parameters(torch.tensor(first), network.parameters())

        def load_data(self, m_i: int, train: bool = True) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.from_numpy, federation.clients[m_i]))

        def train(self, *arguments: Any, **options: Any) -> None:
            super().train(*arguments, **options)
            rounds.append(np.concatenate([vector(network) for network in self.models]))

    N = len(federation.sizes)
    config = {"m": N, "m_test": N, "p": len(initial), "tau": federation.epochs, "lr": federation.lr}
    config |= {"num_epochs": len(federation.cohorts), "project_dir": ".", "train_seed": 0, "data_seed": 0}
    experiment = Experiment(config)
    experiment.setup()
    experiment.run()
    return rounds


def rows() -> Iterator[Row]:
    fed = Federation(cohorts=FULL, batch_size=25, epochs=3)
    ifca = fd.algorithms.ifca(models=2)
    sim, states = fed.states(ifca)
    models = theirs(fed, models_of(sim.init(jax.random.key(fed.seed))))
    found = difference(np.array([models_of(state).ravel() for state in states]), models)
    path = "mnist/train_cluster_mnist.py"
    lines = f"{path}#min_p_i = np.argmin", f"{path}#def local_param_update", f"{path}#weights[name] /= len"
    yield Row(
        written("ifca", {"models": 2}), found, lines, "all clients in every round, one batch per epoch; all models"
    )


if __name__ == "__main__":
    main(rows)
