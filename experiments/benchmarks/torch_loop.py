"""Measures the seconds per round of a plain PyTorch loop over clients, with the workloads of accelerator.py.

    python experiments/benchmarks/torch_loop.py [--workloads "lenet5 100" ...] [--rounds 5]

The loop is a simple implementation of federated averaging. It trains one client after another and one batch after
another, and computes the weighted mean of the models. The images are on the device. float32 products use TF32 if the
device supports it, which is also the default of JAX.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import measure
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from workloads import NETWORKS, RESNET_STAGES, WORKLOADS, Workload, images, parameters, tiny


def network(name: str) -> nn.Module:
    if name not in NETWORKS:
        return ResNet18()
    shape = NETWORKS[name]
    parts: list[nn.Module] = []
    channels = shape.image[-1]
    for filters, kernel, padding, window in shape.convolutions:
        parts += [nn.Conv2d(channels, filters, kernel, padding=kernel // 2 if padding == "SAME" else 0), nn.ReLU()]
        parts += [nn.MaxPool2d(window)] if window > 1 else []
        channels = filters
    parts += [nn.Flatten(), nn.Dropout(shape.dropout[0])]
    for width in shape.hidden:
        parts += [nn.LazyLinear(width), nn.ReLU(), nn.Dropout(shape.dropout[1])]
    made = nn.Sequential(*parts, nn.LazyLinear(shape.classes))
    made(torch.zeros(1, shape.image[-1], *shape.image[:2]))  # the first call sets the sizes of the dense layers
    return made


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.GroupNorm(2, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(2, width),
        )  # fmt: skip
        changed = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(2, width))
        self.shortcut = nn.Identity() if before == width else changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for 32 x 32 images and 10 classes, with a 3x3 stem and GroupNorm(2)."""

    def __init__(self) -> None:
        parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
        before = 64
        for width, _ in RESNET_STAGES:
            parts += [Block(before, width, 1 if before == width else 2), Block(width, width, 1)]
            before = width
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Loop:
    """Trains one workload with federated averaging."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        x, y = images(workload)
        self.workload, self.device = workload, device
        self.x = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous().to(device)
        self.y = torch.from_numpy(y).long().to(device)
        self.offsets = np.cumsum(workload.sizes) - workload.sizes
        self.rng = np.random.default_rng(0)
        self.model = network(workload.network).to(device)
        assert sum(p.numel() for p in self.model.parameters()) == parameters(workload.network)

    def round(self) -> None:
        w = [p.detach().clone() for p in self.model.parameters()]
        total, weight = [torch.zeros_like(p) for p in w], 0
        for i in self.rng.choice(len(self.workload.sizes), self.workload.cohort, replace=False):
            self.train(int(i), w)
            n = int(self.workload.sizes[i])
            torch._foreach_add_(total, [p.detach() for p in self.model.parameters()], alpha=n)
            weight += n
        torch._foreach_div_(total, weight)
        self.load(total)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self, i: int, start: list[torch.Tensor]) -> None:
        self.load(start)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        for _ in range(self.workload.epochs):
            order = self.offsets[i] + torch.randperm(int(self.workload.sizes[i]), device=self.device)
            for rows in order.split(self.workload.batch):
                optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[rows].float() / 255), self.y[rows]).backward()
                optimizer.step()

    @torch.no_grad()
    def load(self, values: list[torch.Tensor]) -> None:
        torch._foreach_copy_(list(self.model.parameters()), values)


def rows(arguments: argparse.Namespace, device: torch.device) -> Iterator[measure.Row]:
    for name in arguments.workloads:
        workload = tiny(WORKLOADS[name], WORKLOADS[name].network) if arguments.quick else WORKLOADS[name]
        loop, times = Loop(workload, device), []
        for _ in range(1 + (1 if workload.cohort >= 1000 else arguments.rounds)):
            start = time.perf_counter()
            loop.round()
            times.append(time.perf_counter() - start)
        yield measure.row(f"PyTorch loop, {name}", times[1:] if workload.cohort < 1000 else times, "s a round")


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of timed rounds, after one warm-up round; with 3,400 clients, 2 rounds run and both are timed",
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workloads, arguments.rounds = ["lenet5 10", "feddc_resnet18"], 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    kind = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    where = ("gpu" if device.type == "cuda" else "cpu", f"1 x {kind}" if device.type == "cuda" else kind)
    measure.save("torch_loop", rows(arguments, device), arguments, where)


if __name__ == "__main__":
    main()
