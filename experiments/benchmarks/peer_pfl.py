"""Measures the seconds per round of pfl-research with the workload of lenet_femnist.py.

    python -m venv pfl && pfl/bin/pip install torch==2.13.0 && pfl/bin/pip install "pfl[pytorch]"
    python experiments/benchmarks/lenet_femnist.py --rounds 20 --peer \
        "pfl/bin/torchrun --standalone --nproc_per_node=2 experiments/benchmarks/peer_pfl.py"

lenet_femnist.py --peer runs this script. With --network resnet18, both train ResNet-18. The version of pfl-research is
0.6.0, with PyTorch. Each process has one thread. The examples of a client are shuffled when its data set is created, as
is usual with pfl-research.
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
from torch_networks import LeNet, ResNet
from workloads import PEERS

LR = 0.05


class Scored(nn.Module):
    """A network with the two methods that pfl-research calls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--network", choices=list(PEERS), default="lenet5")
    parser.add_argument("--quick", action="store_true", help="run 2 rounds only")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload, rng = PEERS[arguments.network], np.random.default_rng(0)
    height, width, channels = workload.image
    users, rows, cohort = len(workload.sizes), int(workload.sizes[0]), workload.cohort
    x = torch.from_numpy(rng.normal(size=(users, rows, channels, height, width)).astype("float32"))
    y = torch.from_numpy(rng.integers(0, workload.classes, (users, rows)))

    def user(name: str) -> Dataset:
        order = torch.randperm(rows)
        return Dataset([x[int(name)][order], y[int(name)][order]], user_id=str(name))

    federation = FederatedDataset(user, get_user_sampler("random", list(range(users))))
    network, clock = Scored(LeNet(62) if arguments.network == "lenet5" else ResNet()), Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 3,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=federation, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(
            model=network,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=workload.batch
        ),
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
