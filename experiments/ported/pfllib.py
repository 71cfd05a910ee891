"""PFLlib's FedRep with its CNN, on its partition of 20 clients by Dirichlet(0.1).

Theirs, in the folders dataset and system of commit d832e76, with every fifth image of Fashion-MNIST:

    python generate_FashionMNIST.py noniid - dir
    python main.py -data FashionMNIST -m CNN -algo FedRep -gr 3 -nc 20 -lbs 10 -lr 0.005 -ls 1 -pls 1 -dev cpu
"""

from __future__ import annotations

from pathlib import Path

import fedjax_drift as fd

ROUNDS = 3  # they train once more, after the last evaluation


def port(folder: Path) -> fd.Simulation:
    """folder: dataset/FashionMNIST, which the first command writes."""
    data = fd.data.from_pfllib(folder)
    # -pls epochs for the classifier, then -ls for the other layers
    fedrep = fd.algorithms.fedrep(base_epochs=1, weighting="examples")
    local = fd.LocalTraining(epochs=2, batch_size=10, lr=0.005)
    model = fd.models.mnist_cnn(padding="VALID")
    return fd.Simulation(model, data, fedrep, local=local, cohort_size=data.num_clients)
