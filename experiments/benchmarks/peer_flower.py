"""Measures the seconds per round of Flower with the workload of lenet_femnist.py. lenet_femnist.py --peer runs it.

    python -m venv flower && flower/bin/pip install torch==2.13.0 && flower/bin/pip install "flwr[simulation]"
    python experiments/benchmarks/lenet_femnist.py --rounds 20 --peer \
        "flower/bin/python experiments/benchmarks/peer_flower.py"

The version of Flower is 1.41, with PyTorch and Ray. There is one actor per core, with one thread. Each actor
memory-maps the file of the images once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

CLIENTS, COHORT, ROWS, BATCH, CLASSES, LR = 500, 50, 100, 20, 62, 0.05


def lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def write_images(folder: Path) -> None:
    """Writes x.npy [N, n, 1, 28, 28] and y.npy [N, n], with a Dirichlet(0.5) label mix per client.

    An image is the random prototype of its class plus noise.
    """
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(CLASSES, 1, 28, 28)).astype("float32")
    y = np.stack([rng.choice(CLASSES, ROWS, p=rng.dirichlet(np.full(CLASSES, 0.5))) for _ in range(CLIENTS)])
    x = np.empty((CLIENTS, ROWS, 1, 28, 28), "float32")
    for i, labels in enumerate(y):
        x[i] = prototypes[labels] + rng.normal(size=x.shape[1:])
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


def client(folder: Path) -> ClientApp:
    app, opened = ClientApp(), {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not opened:
            torch.set_num_threads(1)
            opened.update({name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"})
        i = int(context.node_config["partition-id"])
        x, y = (torch.from_numpy(np.array(opened[name][i])) for name in "xy")
        network = lenet()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), LR)
        for rows in torch.randperm(ROWS).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": ROWS})
        return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)

    return app


class Timed(FedAvg):
    """FedAvg that also stores the time at which each round is aggregated."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.ends: list[float] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="run 2 rounds only")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    torch.manual_seed(0)
    # The clients only train. There is no evaluation.
    strategy = Timed(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.start(grid=grid, initial_arrays=ArrayRecord(lenet().state_dict()), num_rounds=rounds + 3)

    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        run_simulation(
            server_app=server,
            client_app=client(Path(folder)),
            num_supernodes=CLIENTS,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    times = np.diff(strategy.ends)[2:]
    print(
        f"Flower {version('flwr')}, torch {torch.__version__}, Ray {version('ray')}: "
        f"median={statistics.median(times):.4f}s a round (min {min(times):.4f})"
    )


if __name__ == "__main__":
    main()
