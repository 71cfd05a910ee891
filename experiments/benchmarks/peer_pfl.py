"""Measures the seconds per round of pfl-research with the workload of lenet_femnist.py.

    python -m venv pfl && pfl/bin/pip install torch==2.13.0 && pfl/bin/pip install "pfl[pytorch]"
    python experiments/benchmarks/lenet_femnist.py --rounds 20 --peer \
        "pfl/bin/torchrun --standalone --nproc_per_node=2 experiments/benchmarks/peer_pfl.py"

lenet_femnist.py --peer runs this script. The version of pfl-research is 0.6.0, with PyTorch. Each process has one
thread. The examples of a client are shuffled when its data set is created, as is usual with pfl-research.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

CLIENTS, COHORT, ROWS, BATCH, CLASSES, LR, ROUNDS = 500, 50, 100, 20, 62, 0.05, 10


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.dense = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.convolutions(x).flatten(1))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        return F.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = True) -> dict:  # noqa: A002
        return {"accuracy": Weighted(float((self(inputs).argmax(1) == targets).sum()), len(targets))}


class Clock(TrainingProcessCallback):
    """Measures the seconds from the end of one round to the end of the next round."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last = 0.0

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        now = time.perf_counter()
        if self.last:
            self.times.append(now - self.last)
        self.last = now
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="run 2 rounds only")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(CLASSES, 1, 28, 28)).astype("float32")
    clients = []
    for _ in range(CLIENTS):
        y = rng.choice(CLASSES, size=ROWS, p=rng.dirichlet(np.full(CLASSES, 0.5)))
        x = prototypes[y] + rng.normal(size=(ROWS, 1, 28, 28)).astype("float32")
        clients.append((torch.from_numpy(x), torch.from_numpy(y)))

    def user(name: str) -> Dataset:
        x, y = clients[int(name)]
        order = torch.randperm(ROWS)
        return Dataset([x[order], y[order]], user_id=str(name))

    federation = FederatedDataset(user, get_user_sampler("random", list(range(CLIENTS))))
    network, clock = LeNet(), Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 3,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=federation, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            model=network,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=100),
        callbacks=[clock],
    )
    times = clock.times[2:]
    if os.environ.get("RANK", "0") == "0":
        print(
            f"pfl {version('pfl')}, torch {torch.__version__}, {os.environ.get('WORLD_SIZE', 1)} processes: "
            f"median={statistics.median(times):.4f}s a round (min {min(times):.4f})"
        )


if __name__ == "__main__":
    main()
