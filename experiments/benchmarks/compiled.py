"""Compares our networks with plain flax modules by what XLA's compiler says for a TPU or a GPU. Needs neither.

    pip install "jax[tpu]" jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    python experiments/benchmarks/compiled.py [--topology v5e:1x1] [--networks lenet5 ...] [--lanes auto 1 16 128]
                                              [--batch 20] [--bfloat16] [--top 10]
    python experiments/benchmarks/compiled.py --topology h100 [--forms ours "as on a TPU" ...]

A step computes the gradient of one minibatch and the SGD update, for L clients that train side by side (L lanes). It is
compiled for a chip that is only described (`jax.experimental.topologies`). Nothing is executed. The number of lanes
"auto" is that of a simulation with many clients. A row "16 clients" compares 16 clients as a simulation trains them, in
groups of "auto" lanes, with a plain module under `jax.vmap` over all 16. --forms compares implementations of the
convolution (forms.py) in our networks with the plain module.

- cycles (TPU): the sum of the cycles that XLA estimates for each operation. This is the compiler's own model, good for
  comparing two forms of the same step. It is not a measurement. On a v6e, libtpu 0.0.50 has no estimate for a lookup in
  an embedding; such operations do not count, and the table says how many there are.
- kernels (GPU): the operations that start a kernel.
- MB: the bytes that the operations read and write; on a TPU, including the padding of tiles.
- temp: the memory that the step needs besides its arguments.

The ratio is that of the cycles on a TPU, and that of the bytes on a GPU.

The plain modules are written with `nn.Conv`, `nn.max_pool`, `nn.GroupNorm`, `nn.Embed` and `nn.Dense`, as most people
would.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import numpy as np
from forms import FORMS, convolving, launched
from jax.sharding import Sharding, SingleDeviceSharding

import fedjax_drift as fd
from fedjax_drift.devices.described import compiler_options
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.simulation.lanes import fastest, lane_of
from fedjax_drift.simulation.program_text import NO_ESTIMATE, estimated_cycles


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


class PlainSequence(nn.Module):
    """Embeddings [B, length] -> [B, 3 * 32]: three convolutions, then the maximum over the positions."""

    kernels: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(95, 64)(x)
        for i, kernel in enumerate(self.kernels):
            x = nn.relu(nn.Conv(32 * (i + 1), (kernel,), padding="VALID")(x))
        return x.max(1)


class PlainDrugTarget(nn.Module):
    """Two encoders, then dense layers, for 100 characters of a ligand and 1,000 of a protein."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.concatenate([PlainSequence((4, 6, 8))(x[:, :100]), PlainSequence((4, 8, 12))(x[:, 100:])], -1)
        return nn.Dense(2)(nn.Dense(256)(nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(x))))))


class PlainText(nn.Module):
    """The mean embedding of the tokens, then dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        real = (x > 0)[..., None]
        x = (nn.Embed(20_000, 64)(x) * real).sum(1) / jnp.maximum(real.sum(1), 1)
        return nn.Dense(4)(nn.Dense(256)(nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(x))))))


class PlainDIN(nn.Module):
    """Attention of the candidate to the items in the history, then dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = zip((6041, 3, 8, 22, 3440, 3953), (15, 2, 3, 5, 15, 15), strict=True)
        embeddings = [nn.Embed(size, width) for size, width in sizes]
        fields = [embedding(x[:, i]) for i, embedding in enumerate(embeddings)]
        history, real = embeddings[-1](x[:, 6:]), x[:, 6:] > 0
        candidate = jnp.broadcast_to(fields[-1][:, None], history.shape)
        pairs = jnp.concatenate([candidate, history, candidate - history, candidate * history], -1)
        relevance = nn.Dense(1)(nn.relu(nn.Dense(15)(pairs)))[..., 0]
        weights = nn.softmax(jnp.where(real, relevance, -1e9)) * real
        x = jnp.concatenate([*fields, (weights[..., None] * history).sum(1)], -1)
        return nn.Dense(1)(nn.relu(nn.Dense(16)(nn.relu(nn.Dense(32)(x)))))[:, 0]


SAME, VALID, DIGITS, PHOTOS = "SAME", "VALID", (28, 28, 1), (32, 32, 3)
# The plain module of a network in `fd.models`, and the shape of an example. Examples with one axis are token ids.
PLAIN: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mnist_2nn": (Plain((), (200, 200, 10)), DIGITS),
    "text_classifier": (PlainText(), (128,)),
    "din": (PlainDIN(), (6 + 50,)),
    "drug_target": (PlainDrugTarget(), (1100,)),
    "simple_fl_lenet": (Plain(((6, 3, VALID, 2), (10, 3, VALID, 2)), (100, 62)), DIGITS),
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


def dtype_of(shape: tuple[int, ...]) -> Any:
    """Returns the dtype of the examples: images are float32, tokens int32."""
    return jnp.int32 if len(shape) == 1 else jnp.float32


def plain_model(name: str) -> fd.Model:
    """Returns the plain module of a network as a model, with the loss of our network."""
    module, shape = PLAIN[name]
    return fd.Model.from_linen(module, shape, input_dtype=dtype_of(shape), loss=getattr(fd.models, name)().loss)


class Estimate(NamedTuple):
    """What the compiler says of a step, per image."""

    cycles: float  # 0 for a GPU
    unknown: int  # the number of operations without an estimate, on a TPU
    kernels: int  # of the whole step; on a TPU, the number of operations with an estimate
    megabytes: float
    temporary: float  # MiB, of the whole step
    seconds: float  # that the compiler took
    costliest: list[tuple[int, str]]  # operations: (cycles of the whole step, name)

    def __str__(self) -> str:
        work = f"{self.cycles:,.0f} cycles" if self.cycles else f"{self.kernels} kernels a step"
        unknown = f" without {self.unknown} unknown operations" if self.unknown else ""
        return (
            f"{work}{unknown} and {self.megabytes:.2f} MB per image, temp {self.temporary:,.0f} MiB, compiled in "
            f"{self.seconds:.0f} s"
        )


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
    x, y = on_device(lanes, batch, *shape, dtype=dtype_of(shape)), on_device(lanes, batch, dtype=jnp.int32)
    compiled = jax.jit(jax.vmap(step)).lower(stacked, x, y).compile(compiler_options(mesh))
    seconds, text = time.perf_counter() - start, compiled.as_text() or ""
    costs = []
    for line in text.splitlines():
        for cycles in estimated_cycles(line):
            name = re.search(r'op_name="([^"]*)"', line)
            costs.append((cycles, f"{name[1][-60:] if name else ''} {line.split('=', 1)[1].strip()[:60]}"))
    images = lanes * batch
    accessed, operations = (compiled.cost_analysis() or {}).get("bytes accessed", 0.0), len(costs)
    if not costs:
        accessed, operations = traffic(text)
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    cycles = sum(c for c, _ in costs) / images
    unknown = text.count(str(NO_ESTIMATE))
    return Estimate(cycles, unknown, operations, accessed / 1e6 / images, temporary, seconds, sorted(costs)[::-1])


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


def lanes_of(model: fd.Model, shape: tuple[int, ...], batch: int, device: Sharding) -> tuple[int, int]:
    """Returns the number of lanes of a simulation with 3,400 clients a round, and about how many lanes fit."""
    x, y, mesh = np.zeros((1, *shape), dtype_of(shape)), np.zeros(1, int), fd.clients_mesh(list(device.device_set))
    lane = lane_of(model, lambda x: x, x, y, batch, mesh.devices.flat[0].platform)
    return fastest(3400, memory_of(mesh), lane), int(memory_of(mesh) / lane.total)


def rows(arguments: argparse.Namespace, device: Sharding) -> Iterator[measure.Row]:
    for name in arguments.networks:
        yield from rows_of(name, arguments, device)


def rows_of(name: str, arguments: argparse.Namespace, device: Sharding) -> Iterator[measure.Row]:
    shape, batch = PLAIN[name][1], arguments.batch
    precision = ", bfloat16" if arguments.bfloat16 else ""

    def model(make: Callable[[], fd.Model]) -> fd.Model:
        return make().computing_in(jnp.bfloat16) if arguments.bfloat16 else make()

    @functools.cache
    def said(form: str, lanes: int) -> Estimate:
        with nullcontext() if form in ("ours", "plain") else convolving(FORMS[form]):
            make = functools.partial(plain_model, name) if form == "plain" else getattr(fd.models, name)
            found = estimate(model(make), shape, lanes, batch, device)
        for cycles, operation in found.costliest[: arguments.top]:
            print(f"  {form} {cycles:10,}  {operation}")
        return found

    def compared(what: str, form: str, lanes: int, plain_lanes: int) -> measure.Row:
        estimates = {form: said(form, lanes), "plain": said("plain", plain_lanes)}
        of_cycles = estimates["plain"].cycles > 0
        note = "; ".join(f"{form} {e}" for form, e in estimates.items())
        mine, plain = ((e.cycles if of_cycles else e.megabytes) for e in estimates.values())
        quantity, target = ("cycles", {"at_most": 1.0}) if of_cycles else ("bytes", {})
        return measure.row(f"{what}: {quantity} of {form} / plain flax", mine / plain, **target, note=note)

    auto, most = lanes_of(model(getattr(fd.models, name)), shape, batch, device)
    numbers = dict.fromkeys(auto if wanted == "auto" else int(wanted) for wanted in arguments.lanes)
    for lanes in numbers:
        if lanes > most:
            print(f"skipped: {name}, {lanes} lanes: about {most} fit", flush=True)
            continue
        for form in arguments.forms:
            what = f"{name}{precision}, {lanes} lanes{' (auto)' * (lanes == auto)}"
            yield compared(what, form, lanes, lanes)
        if "auto" in arguments.lanes and lanes > auto:
            yield compared(f"{name}{precision}, {lanes} clients", arguments.forms[0], auto, lanes)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--topology", default="v5e:1x1", help="such as v5e:1x1, v5p:2x2x1, v6e:1x1, h100 (default: v5e:1x1)"
    )
    parser.add_argument("--networks", nargs="+", choices=PLAIN, default=list(PLAIN))
    parser.add_argument("--lanes", nargs="+", default=["auto", "1", "16", "128"])
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["ours"], metavar="FORM")
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
    kind = arguments.topology.partition(":")[0]
    compiler = measure.libtpu() if kind.startswith("v") else ""
    where = f"{kind}-compiler", f"one chip of {arguments.topology}, described{compiler}"
    name = ("forms_compiled" if arguments.forms != ["ours"] else "compiled") + "_bfloat16" * arguments.bfloat16
    few = "" if len(arguments.networks) > 1 else f"_{arguments.networks[0]}"
    measure.save(name + few, rows(arguments, device), arguments, where)


if __name__ == "__main__":
    main()
