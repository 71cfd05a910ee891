"""Compares `Model.from_torch` with PyTorch: values, gradients, and seconds per round.

    python experiments/benchmarks/from_torch.py [--networks LeNet ...] [--turns 5] [--topologies v5e:2x2 h100]

For each network of torch_networks.py:

- operations: the different operations of its graph, all of which are covered.
- forward, gradient: the largest difference between our float32 values and those of PyTorch, over the largest value.
- loop: a round of FedAvg in the library over the same round in a plain PyTorch loop. The loop trains one client after
  another, with all cores.
- ours: a round with the module over a round with our own network of the same shape, if there is one.

The three are interleaved, and each turn gives a ratio. The last row is the rate of XLA's matrix product over that of
PyTorch's. Machines differ in it: it was 1.7 on two cores of AMD's EPYC, and 0.8 on two of Intel's Xeon.

With --topologies, nothing runs. The round is compiled for devices that are not here: the memory it needs, and for a TPU
the cycles of a local step that the compiler estimates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
import torch
import torch.nn.functional as F
import torch_networks as networks
from torch import nn

import fedjax_drift as fd
from fedjax_drift.pytorch import reading
from fedjax_drift.pytorch.network import flat


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an example
    classes: int
    ours: Callable[[], fd.Model] | None = None
    ids: int = 0  # the number of token ids, if the examples are ids
    per_position: bool = False  # a label for each position
    clients: int = 10  # in a round
    rows: int = 100  # examples of a client
    statistics: str | None = None


CASES = {
    "LeNet": Case(partial(networks.LeNet, 62), (28, 28, 1), 62, partial(fd.models.lenet5, 62), clients=50),
    "ResNet-18, GroupNorm": Case(networks.ResNet, (32, 32, 3), 10, fd.models.resnet18, clients=2, rows=20),
    "ResNet-18, BatchNorm": Case(
        partial(networks.ResNet, nn.BatchNorm2d), (32, 32, 3), 10, clients=2, rows=20, statistics="average"
    ),
    "LSTM": Case(partial(networks.Recurrent, hidden=128), (80,), 80, ids=80),
    "ViT": Case(
        partial(networks.ViT, 192, 6, 3), (32, 32, 3), 10,
        partial(fd.models.vit, 10, (32, 32, 3), patch=4, width=192, depth=6, heads=3), clients=2, rows=40,
    ),
    "GPT": Case(
        partial(networks.Decoder, 100, 64, 128, 4, 4), (64,), 100,
        partial(fd.models.decoder, 100, 64, width=128, depth=4, heads=4), 100, per_position=True,
    ),
}  # fmt: skip
BATCH, LR = 20, 0.05


def arrays(case: Case, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random examples and labels of all clients, [clients, rows, ...]."""
    rng = np.random.default_rng(seed)
    shape = (case.clients, rows, *case.shape)
    x = rng.integers(0, case.ids, shape).astype("int32") if case.ids else rng.normal(size=shape).astype("float32")
    return x, rng.integers(0, case.classes, shape if case.per_position else shape[:2])


def as_tensor(case: Case, x: np.ndarray) -> torch.Tensor:
    """The examples, with the channels of images first."""
    return torch.from_numpy(x).long() if case.ids else torch.from_numpy(np.array(np.moveaxis(x, -1, -3), order="C"))


def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), y.flatten())


class Loop:
    """FedAvg as a plain PyTorch loop over the clients."""

    def __init__(self, case: Case, x: np.ndarray, y: np.ndarray) -> None:
        torch.manual_seed(0)
        self.module = case.make().train()
        self.x, self.y = as_tensor(case, x), torch.from_numpy(y)

    def round(self) -> None:
        start = [value.detach().clone() for value in self.module.state_dict().values()]
        total = [torch.zeros_like(value, dtype=torch.float32) for value in start]
        for x, y in zip(self.x, self.y, strict=True):
            with torch.no_grad():
                for value, first in zip(self.module.state_dict().values(), start, strict=True):
                    value.copy_(first)
            optimizer = torch.optim.SGD(self.module.parameters(), LR)
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                loss(self.module, x[rows], y[rows]).backward()
                optimizer.step()
            for each, value in zip(total, self.module.state_dict().values(), strict=True):
                each += value.detach() / len(self.x)
        with torch.no_grad():
            for value, each in zip(self.module.state_dict().values(), total, strict=True):
                value.copy_(each)


def simulation(model: fd.Model, case: Case, x: np.ndarray, y: np.ndarray, **options: Any) -> fd.Simulation:
    data = fd.FederatedData.from_clients(list(zip(x, y, strict=True)))
    local = fd.LocalTraining(epochs=1, batch_size=BATCH, lr=LR)
    return fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=case.clients, **options)


def translated(case: Case, module: Any) -> fd.Model:
    options = {"input_dtype": jnp.int32} if case.ids else {}
    return fd.Model.from_torch(module, case.shape, statistics=case.statistics, **options)


def differences(model: fd.Model, module: nn.Module, case: Case) -> tuple[float, float]:
    """The largest difference of the logits, and that of the gradients, relative to the largest value.

    The logits are those of evaluation. The gradients are those of training, with the statistics of the batch.
    """
    x, y = (part[0] for part in arrays(case, 5, seed=1))
    tensor, start = as_tensor(case, x), model.init(jax.random.key(0))
    logits = module.eval()(tensor).detach().numpy()

    def ours(params: Any) -> Any:
        if model.statistics is None:
            return model.loss(model.apply(params, x), y).mean()
        mask = jnp.ones(len(x), bool)
        out, _ = model.statistics.forward(params, start["batch_stats"], x, jax.random.key(0), mask, "apply")
        return model.loss(out, y).mean()

    gradient = flat(jax.jit(jax.grad(ours))(start if model.statistics is None else start["params"]))
    loss(module.train(), tensor, torch.from_numpy(y)).backward()
    theirs = {name: each.grad.numpy() for name, each in module.named_parameters()}
    largest = max(np.abs(each).max() for each in theirs.values())
    forward = np.abs(jax.jit(model.apply)(start, x) - logits).max() / np.abs(logits).max()
    return float(forward), float(max(np.abs(gradient[name] - each).max() for name, each in theirs.items()) / largest)


def rounds(sim: fd.Simulation) -> Callable[[], None]:
    """A function that runs the next round."""
    states = [sim.init(jax.random.key(0))]

    def run() -> None:
        state, _ = sim.round_fn(states.pop())
        states.append(jax.block_until_ready(state))

    return run


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    torch.set_num_threads(jax.local_device_count())
    for name in arguments.networks:
        case = CASES[name]
        torch.manual_seed(0)
        module = case.make()
        model = translated(case, module)
        used = {node.operation for node in reading.traced(module, example(case), True).nodes}
        forward, gradient = differences(model, module, case)
        note = f"{len(used)} operations; differences: forward {forward:.0e}, gradient {gradient:.0e}"
        x, y = arrays(case, BATCH if arguments.quick else case.rows)
        runs = {"from_torch": rounds(simulation(translated(case, module), case, x, y)), "loop": Loop(case, x, y).round}
        if case.ours:
            runs["ours"] = rounds(simulation(case.ours(), case, x, y))
        for run in runs.values():
            run()
        times: dict[str, list[float]] = {each: [] for each in runs}
        for _ in range(1 if arguments.quick else arguments.turns):
            for each, run in runs.items():
                times[each].append(seconds(run))
        what = f"{name}: {case.clients} clients x {x.shape[1]} examples"
        yield measure.row(what, times["from_torch"], "s a round", note=note)
        for other, what in {"loop": "PyTorch's loop", "ours": "our network of the same shape"}.items():
            if other in times:
                ratios = [a / b for a, b in zip(times["from_torch"], times[other], strict=True)]
                limit = 1.3 if (name, other) == ("LeNet", "ours") else None
                yield measure.row(f"- time over that of {what}", ratios, at_most=limit)

    n = 64 if arguments.quick else 4000
    a = torch.randn(n, n)
    pairs = [(measure.matmul_rate(n), 2 * n**3 / seconds(lambda: a @ a)) for _ in range(arguments.turns)]
    note = f"PyTorch's {max(theirs for _, theirs in pairs) / 1e9:.0f} GFLOP/s"
    yield measure.row(f"{n} x {n} product, XLA's rate over PyTorch's", [x / y for x, y in pairs], note=note)


def plans(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for name in arguments.networks:
        case = CASES[name]
        for topology in arguments.topologies:
            for what, make in {"": lambda case=case: translated(case, case.make), ", ours": case.ours}.items():
                if make is None:
                    continue
                x, y = arrays(case, case.rows)
                plan = simulation(make(), case, x, y, mesh=fd.described_mesh(topology)).plan()
                cycles = f"{plan.cycles:,} cycles a local step, " if plan.cycles else ""
                note = f"{plan.lanes} lanes, {cycles}compiled in {plan.compile_seconds:.0f} s"
                yield measure.row(f"{name}{what}, {topology}", plan.temporary / 2**20, "MiB temporary", note=note)


def example(case: Case) -> jax.ShapeDtypeStruct:
    """A batch of 2, as the module gets it."""
    shape = case.shape if case.ids else (case.shape[2], *case.shape[:2])
    return jax.ShapeDtypeStruct((2, *shape), jnp.int32 if case.ids else jnp.float32)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--turns", type=int, default=5, help="how often each of the three is timed")
    parser.add_argument("--topologies", nargs="*", default=[], help="devices to compile for, such as v5e:2x2 and h100")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.networks, arguments.topologies = ["LeNet", "LSTM"], []
    if arguments.topologies:
        measure.save("from_torch_compiled", plans(arguments), arguments)
    else:
        fd.use_cpu_devices()
        measure.save("from_torch", rows(arguments), arguments)


if __name__ == "__main__":
    main()
