"""NIID-Bench's FedNova with its simple CNN: 10 clients by Dirichlet(0.5), which all take part in every round.

Theirs, in commit 61b901a, with every fifth image of Fashion-MNIST:

    python experiments.py --model=simple-cnn --dataset=fmnist --alg=fednova --lr=0.01 --batch-size=64 --epochs=2 \
        --n_parties=10 --rho=0.9 --comm_round=8 --partition=noniid-labeldir --beta=0.5 --device=cpu

It writes no partition, so ours is another draw with the same rule.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedjax_drift as fd

ROUNDS = 8


def port(_: Path) -> fd.Simulation:
    arrays = np.load(fd.datasets.locate("fashion_mnist"))
    x, y = arrays["x_train"][::5, ..., None], arrays["y_train"][::5]
    test = arrays["x_test"][::5, ..., None], arrays["y_test"][::5]
    parts = fd.partition.dirichlet(10, alpha=0.5, prior="class")(y)
    data = fd.FederatedData.from_partition(x, y, parts, test)
    model = fd.models.simple_cnn(10, (28, 28, 1), projection=False)
    local = fd.LocalTraining(epochs=2, batch_size=64, lr=0.01, momentum=0.9, weight_decay=1e-5)
    return fd.Simulation(model, data, fd.algorithms.fednova(), local=local, cohort_size=10)
