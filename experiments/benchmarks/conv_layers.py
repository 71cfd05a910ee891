"""Measures the 3x3 convolutions of ResNet-18 on a CPU: ours, XLA's own, and PyTorch's.

    python experiments/benchmarks/conv_layers.py [--turns 7]

A measurement is the forward pass and both gradients for a batch of 20 in float32. Each core of ours and XLA's trains a
client with its own weights. PyTorch trains one client with all cores, as a loop over the clients does. The three are
measured interleaved, on one core and on all. It needs Linux, which can bind a process to cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import torch
from jax import lax
from jax.sharding import PartitionSpec as P

import fedjax_drift as fd
from fedjax_drift.convolution.conv import conv

BATCH = 20
LAYERS = (  # height and width, channels, filters, stride
    (32, 3, 64, 1), (32, 64, 64, 1), (32, 64, 128, 2), (16, 128, 128, 1), (16, 128, 256, 2), (8, 256, 256, 1),
    (8, 256, 512, 2), (4, 512, 512, 1),
)  # fmt: skip


def theirs(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=axes)


def compiled(convolution: Callable, stride: int, *arrays: np.ndarray) -> Callable[[], Any]:
    """A call of the convolution and its gradients on every device. arrays: x, the kernel, and the output's gradient."""

    def step(x: jax.Array, kernel: jax.Array, g: jax.Array) -> tuple:
        y, gradients = jax.vjp(partial(convolution, stride=stride), x[0], kernel[0])
        return jax.tree.map(lambda each: each[None], (y, gradients(g[0])))

    mesh = jax.make_mesh((jax.local_device_count(),), ("devices",))
    where = jax.sharding.NamedSharding(mesh, P("devices"))
    stacked = [jax.device_put(jnp.stack([each] * mesh.size), where) for each in arrays]
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"), check_vma=False))
    return lambda: jax.block_until_ready(mapped(*stacked))


def in_torch(stride: int, *arrays: np.ndarray) -> Callable[[], Any]:
    x, kernel, g = (torch.from_numpy(np.ascontiguousarray(each)) for each in arrays)
    for each in (x, kernel):
        each.requires_grad_()
    return lambda: torch.autograd.grad(torch.nn.functional.conv2d(x, kernel, None, stride, 1), (x, kernel), g)


def rates(turns: int) -> list[dict[str, list[float]]]:
    """GFLOP/s of ours, XLA's and PyTorch's for each layer, one number for each turn."""
    rng, devices, found = np.random.default_rng(0), jax.local_device_count(), []
    torch.set_num_threads(devices)
    for size, C, F, stride in LAYERS:
        after = -(-size // stride)
        x, kernel, g = (
            rng.normal(size=shape).astype("float32")
            for shape in ((BATCH, size, size, C), (3, 3, C, F), (BATCH, after, after, F))
        )
        first = (each.transpose(0, 3, 1, 2) for each in (x, kernel.transpose(3, 0, 1, 2), g))  # channels first
        last = x.transpose(3, 1, 2, 0), kernel, g.transpose(3, 1, 2, 0)  # the batch last
        calls = {
            "ours": (devices, compiled(partial(conv, padding=(1, 1)), stride, *last)),
            "XLA": (devices, compiled(theirs, stride, x, kernel, g)),
            "PyTorch": (1, in_torch(stride, *first)),
        }
        of_layer: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(turns + 1):
            for name, (clients, call) in calls.items():
                start = time.perf_counter()
                call()
                rate = clients * 3 * 2 * BATCH * after**2 * 9 * C * F / (time.perf_counter() - start) / 1e9
                of_layer[name] += [rate] * (turn > 0)
        found.append(of_layer)
    return found


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        found = measure.own_process(__file__, ["--cores", str(cores), "--turns", str(arguments.turns)], arguments)
        for (size, C, F, stride), of_layer in zip(LAYERS, found, strict=True):
            what = f"{size} x {size}, {C} to {F}{', stride 2' * (stride == 2)}, cores: {cores}"
            xla, pytorch = (f"{statistics.median(of_layer[name]):.0f}" for name in ("XLA", "PyTorch"))
            note = f"XLA's own {xla}, PyTorch {pytorch} GFLOP/s"
            yield measure.row(what, of_layer["ours"], "GFLOP/s", note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--cores", type=int, help="internal: measure with this number of cores, and print the rates")
    arguments = parser.parse_args()
    arguments.turns = 1 if arguments.quick else arguments.turns
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
        fd.use_cpu_devices()
        print(json.dumps(rates(arguments.turns)))
    else:
        measure.save("conv_layers", rows(arguments), arguments)


if __name__ == "__main__":
    main()
