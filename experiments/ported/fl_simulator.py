"""FL-Simulator's FedDyn with its LeNet, on its partition of CIFAR-10: 100 clients of 500 images by Dirichlet(0.6).

Theirs, in commit 502bec6:

    python train.py --non-iid --model LeNet --method FedDyn --active-ratio 0.05 --comm-rounds 4 --local-epochs 2
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedjax_drift as fd

ROUNDS = 4


def port(folder: Path) -> fd.Simulation:
    """folder: Data/CIFAR10_100_20_Dirichlet_0.600, which their program writes."""
    x, y, x_test, y_test = (np.load(folder / f"{name}.npy") for name in ("client_x", "client_y", "test_x", "test_y"))
    clients = [(np.moveaxis(images, 1, -1), labels[:, 0]) for images, labels in zip(x, y, strict=True)]
    data = fd.FederatedData.from_clients(clients, (np.moveaxis(x_test, 1, -1), y_test[:, 0]))
    local = fd.LocalTraining(
        epochs=2, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=1e-3, clip_norm=10.0,
        augment=fd.augment.crop_and_flip(),  # they crop only half of the images
    )  # fmt: skip
    feddyn = fd.algorithms.feddyn(alpha=0.1)  # their lamb
    return fd.Simulation(fd.models.cifar_cnn(), data, feddyn, local=local, cohort_size=5, sampling="bernoulli")
