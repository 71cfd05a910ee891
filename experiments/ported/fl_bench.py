"""FL-bench's FedProx with its 2NN, on its partition of 20 clients by Dirichlet(0.5).

Theirs, in commit 06e658b, with every fifth image of Fashion-MNIST:

    python generate_data.py -d fmnist -a 0.5 -cn 20
    python main.py method=fedprox fedprox.mu=0.1 dataset.name=fmnist model.name=2nn common.join_ratio=0.5 \
        common.local_epoch=2 common.global_epoch=10 common.client_side_evaluation=false \
        common.test.client.interval=-1 common.test.server.interval=1 common.test.server.test=true
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedjax_drift as fd

ROUNDS = 10


def port(folder: Path) -> fd.Simulation:
    """folder: data/fmnist, where the first command writes partition.pkl."""
    arrays = np.load(fd.datasets.locate("fashion_mnist"))
    x = np.concatenate([arrays["x_train"][::5], arrays["x_test"][::5]])[..., None]
    y = np.concatenate([arrays["y_train"][::5], arrays["y_test"][::5]])
    data = fd.data.from_fl_bench(folder / "partition.pkl", x, y, mean=0.286, std=0.3205)
    local = fd.LocalTraining(epochs=2, batch_size=32, lr=0.01)
    return fd.Simulation(fd.models.mnist_2nn(), data, fd.algorithms.fedprox(mu=0.1), local=local, cohort_size=10)
