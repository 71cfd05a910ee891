"""Compares our networks with plain flax modules by what XLA's compiler says for a TPU or a GPU. Needs neither.

    pip install "jax[tpu]" jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python experiments/benchmarks/compiled.py [--topology v5e:1x1] [--networks lenet5 ...] [--lanes auto 1 16 128]
                                              [--batch 20] [--bfloat16] [--top 10]
    python experiments/benchmarks/compiled.py --topology h100

A step computes the gradient of one minibatch and the SGD update, for L clients that train side by side (L lanes). It is
compiled for a chip that is only described (`jax.experimental.topologies`). Nothing is executed. The number of lanes
"auto" is that of a simulation with many clients.

- cycles (TPU): the sum of the cycles that XLA estimates for each operation. This is the compiler's own model, good for
  comparing two forms of the same step. It is not a measurement.
- kernels (GPU): the operations that start a kernel.
- MB: the bytes that the operations read and write; on a TPU, including the padding of tiles.
- temp: the memory that the step needs besides its arguments.

The ratio is that of the cycles on a TPU, and that of the bytes on a GPU.

The plain modules are written with `nn.Conv`, `nn.max_pool`, `nn.GroupNorm` and `nn.Dense`, as most people would.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import numpy as np
from forms import launched
from jax.sharding import Sharding, SingleDeviceSharding

import fedjax_drift as fd
from fedjax_drift.devices.described import compiler_options
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.simulation.lanes import fastest, lane_of


class Plain(nn.Module):
    """Convolutions with ReLU, some of them with pooling, then dense layers, as in flax's documentation."""

    convolutions: tuple[tuple[int, int, str, int], ...]  # (filters, kernel size, padding, pooling window or 1)
    dense: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for filters, size, padding, pool in self.convolutions:
            x = nn.relu(nn.Conv(filters, (size, size), padding=padding)(x))
            x = nn.max_pool(x, (pool, pool), (pool, pool)) if pool > 1 else x
        x = x.reshape(x.shape[0], -1)
        for width in self.dense[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.dense[-1])(x)


class PlainResNet(nn.Module):
    """ResNet-18 with group normalisation."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, width: int, size: int = 3, stride: int = 1) -> jax.Array:
            padding = [(size // 2, size // 2)] * 2
            return nn.GroupNorm(2)(nn.Conv(width, (size, size), stride, padding, use_bias=False)(x))

        x = conv(x, 64)
        for stage in range(4):
            for block in range(2):
                width, stride = 64 * 2**stage, 2 if stage and not block else 1
                y = conv(nn.relu(conv(x, width, stride=stride)), width)
                x = conv(x, width, 1, stride) if stride > 1 or x.shape[-1] != width else x
                x = nn.relu(x + y)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


SAME, VALID, DIGITS, PHOTOS = "SAME", "VALID", (28, 28, 1), (32, 32, 3)
PLAIN: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mnist_2nn": (Plain((), (200, 200, 10)), DIGITS),
    "lenet5": (Plain(((6, 5, SAME, 2), (16, 5, VALID, 2)), (120, 84, 62)), DIGITS),
    "mnist_cnn": (Plain(((32, 5, SAME, 2), (64, 5, SAME, 2)), (512, 10)), DIGITS),
    "emnist_cnn": (Plain(((32, 3, VALID, 1), (64, 3, VALID, 2)), (128, 62)), DIGITS),
    "simple_cnn": (Plain(((6, 5, VALID, 2), (16, 5, VALID, 2)), (120, 84, 84, 256, 10)), PHOTOS),
    "cifar_cnn": (Plain(((64, 5, VALID, 2), (64, 5, VALID, 2)), (384, 192, 10)), PHOTOS),
    "fedadc_cnn": (
        Plain(tuple((n, 3, SAME, pool) for n, pool in ((32, 1), (32, 2), (64, 1), (64, 2))), (512, 256, 128, 10)),
        PHOTOS,
    ),
    "resnet18": (PlainResNet(), PHOTOS),
}


class Estimate(NamedTuple):
    """What the compiler says of a step, per image."""

    cycles: float  # 0 for a GPU
    kernels: int  # of the whole step; on a TPU, the number of operations with an estimate
    megabytes: float
    temporary: float  # MiB, of the whole step
    seconds: float  # that the compiler took
    costliest: list[tuple[int, str]]  # operations: (cycles of the whole step, name)


def estimate(model: fd.Model, shape: tuple[int, ...], lanes: int, batch: int, device: Sharding) -> Estimate:
    """Compiles one local step of ``lanes`` clients for the device."""

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        gradient = jax.grad(lambda p: model.loss(model.apply(p, x), y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    def on_device(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    params = jax.eval_shape(model.init, jax.random.key(0))
    stacked = jax.tree.map(lambda a: on_device(lanes, *a.shape, dtype=a.dtype), params)
    start, mesh = time.perf_counter(), fd.clients_mesh(list(device.device_set))
    x, y = on_device(lanes, batch, *shape), on_device(lanes, batch, dtype=jnp.int32)
    compiled = jax.jit(jax.vmap(step)).lower(stacked, x, y).compile(compiler_options(mesh))
    seconds, text = time.perf_counter() - start, compiled.as_text() or ""
    costs = []
    for line in text.splitlines():
        if found := re.search(r'estimated_cycles":"?(\d+)', line):
            name = re.search(r'op_name="([^"]*)"', line)
            costs.append((int(found[1]), f"{name[1][-60:] if name else ''} {line.split('=', 1)[1].strip()[:60]}"))
    images = lanes * batch
    accessed, operations = (compiled.cost_analysis() or {}).get("bytes accessed", 0.0), len(costs)
    if not costs:
        accessed, operations = traffic(text)
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    cycles = sum(c for c, _ in costs) / images
    return Estimate(cycles, operations, accessed / 1e6 / images, temporary, seconds, sorted(costs)[::-1])


def traffic(text: str) -> tuple[float, int]:
    """Returns the bytes that the kernels of a program for a GPU read and write, and the number of kernels."""
    size, moved, kernels = {}, 0.0, launched(text)
    for name, result in re.findall(r"(?m)^\s*(?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ", text):
        size[name] = sum(_bytes(*found) for found in re.findall(r"([a-z]+\d+|pred)\[([\d,]*)\]", result))
    for name, operands in kernels:
        moved += size[name] + sum(size.get(operand, 0.0) for operand in operands)
    return moved, len(kernels)


def _bytes(dtype: str, shape: str) -> float:
    width = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) / 8
    return width * float(np.prod([int(n) for n in shape.split(",") if n]))


def auto_lanes(model: fd.Model, shape: tuple[int, ...], batch: int, device: Sharding) -> int:
    """Returns the number of lanes of a simulation with 3,400 clients a round."""
    x, y, mesh = np.zeros((1, *shape)), np.zeros(1, int), fd.clients_mesh(list(device.device_set))
    return fastest(3400, memory_of(mesh), lane_of(model, lambda x: x, x, y, batch, mesh.devices.flat[0].platform))


def rows(arguments: argparse.Namespace, device: Sharding) -> Iterator[measure.Row]:
    for name in arguments.networks:
        network, shape = PLAIN[name]
        forms: dict[str, Callable[[], fd.Model]] = {
            "ours": getattr(fd.models, name),
            "plain": lambda network=network, shape=shape: fd.Model.from_linen(network, shape),
        }
        for wanted in arguments.lanes:
            auto = wanted == "auto"
            model = forms["ours"]().computing_in(jnp.bfloat16) if arguments.bfloat16 else forms["ours"]()
            lanes = auto_lanes(model, shape, arguments.batch, device) if auto else int(wanted)
            said = {}
            for form, make in forms.items():
                model = make().computing_in(jnp.bfloat16) if arguments.bfloat16 else make()
                said[form] = estimate(model, shape, lanes, arguments.batch, device)
                for cycles, operation in said[form].costliest[: arguments.top]:
                    print(f"  {form} {cycles:10,}  {operation}")
            of_cycles = said["ours"].cycles > 0
            note = "; ".join(
                (f"{form} {e.cycles:,.0f} cycles" if of_cycles else f"{form} {e.kernels} kernels a step")
                + f" and {e.megabytes:.2f} MB per image, temp {e.temporary:,.0f} MiB, compiled in {e.seconds:.0f} s"
                for form, e in said.items()
            )
            ours, plain = ((e.cycles if of_cycles else e.megabytes) for e in said.values())
            precision = ", bfloat16" if arguments.bfloat16 else ""
            quantity = "cycles" if of_cycles else "bytes"
            what = f"{name}, {lanes} lanes{' (auto)' * auto}, batch {arguments.batch}{precision}"
            target = {"at_most": 1.0} if of_cycles else {}
            yield measure.row(f"{what}: {quantity} of ours / plain flax", ours / plain, **target, note=note)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--topology", default="v5e:1x1", help="such as v5e:1x1, v5p:2x2x1, v6e:1x1, h100 (default: v5e:1x1)"
    )
    parser.add_argument("--networks", nargs="+", choices=PLAIN, default=list(PLAIN))
    parser.add_argument("--lanes", nargs="+", default=["auto", "1", "16", "128"])
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--top", type=int, default=0, help="print this many of the costliest operations")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.networks, arguments.lanes, arguments.batch = ["mnist_2nn"], [1], 4
    jax.config.update("jax_platforms", "cpu")
    try:
        device = SingleDeviceSharding(fd.described_mesh(arguments.topology).devices.flat[0])
    except (fd.errors.ConfigurationError, fd.errors.MissingPackageError) as error:
        sys.exit(str(error))
    generation, precision = arguments.topology.partition(":")[0], "_bfloat16" if arguments.bfloat16 else ""
    where = f"{generation}-compiler", f"one chip of {arguments.topology}, described"
    measure.save(f"compiled{precision}", rows(arguments, device), arguments, where)


if __name__ == "__main__":
    main()
