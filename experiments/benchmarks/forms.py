"""Measures the time of local steps and of rounds with different implementations ("forms") of the convolution.

    python experiments/benchmarks/forms.py [--networks lenet5 emnist_cnn] [--lanes 128 25] [--forms ours rows ...]
    python experiments/benchmarks/forms.py --rounds "emnist_cnn 3400" ... [--forms ours rows] [--lanes 64 128]
    python experiments/benchmarks/forms.py --no-graphs ...     without CUDA graphs

A step computes the gradient of one minibatch and the SGD update, for L clients that are trained side by side (L lanes).
Several steps run in a loop, as in the library. For each form the script prints:

- the time in microseconds per client and step, so that different L can be compared
- the number of kernels in the compiled loop
- the error of the sum of all gradients, relative to the default form in full float32

With --rounds, the script measures the time of complete rounds.

If a form fails, a message is printed, and the next form runs. After --seconds no new measurement starts, and a message
names each measurement that is skipped.
"""

from __future__ import annotations

import argparse
import functools
import operator
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import measure
from jax import lax
from workloads import NETWORKS, RESNET, WORKLOADS, WRITERS, Workload, tiny

import fedjax_drift as fd
from fedjax_drift.convolution import conv, cpu, tpu, windows
from fedjax_drift.convolution.windows import Padding
from fedjax_drift.convolution.winograd import A_T, B_T, G, between
from fedjax_drift.models.networks import CNN
from fedjax_drift.types import Params

Form = Callable[..., jax.Array]  # arguments: x [C, H, W, B], kernel, stride, padding, pool (the window of the pooling)
STEPS = 20  # number of local steps in one program
START = time.perf_counter()

# --- the forms --------------------------------------------------------------------------------------------------------

ours = windows.convolve


def pooled(form: Form, maximum: Callable[[jax.Array, int], jax.Array]) -> Form:
    """Returns the form with ``maximum`` as its max pooling."""

    def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
        out = form(x, kernel, stride, padding, 1)
        return maximum(out, pool) if pool > 1 else out

    return convolve


def recomputed(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """Computes the default form. The backward pass computes the patches again."""
    return jax.checkpoint(lambda x, kernel: ours(x, kernel, stride, padding, pool))(x, kernel)


def columns(x: jax.Array, w: int, stride: int) -> jax.Array:
    """Returns the patches of windows with one row and w columns: [C, H, W, B] -> [w * C, H, W', B]."""
    W = (x.shape[2] - w) // stride + 1
    return jnp.concatenate([windows.strided_slice(x, 2, j, W, stride) for j in range(w)])


def total(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def rows(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """Computes the convolution from patches of windows with one row.

    One matrix product gives the contributions of all rows of the kernel. These are shifted and added.
    """
    h, w, C, F = kernel.shape
    x = windows.pad(x, (h, w), stride, padding, 0.0)
    H = (x.shape[1] - h) // stride + 1
    x = columns(x, w, stride)
    products = jnp.einsum("ikf,khwb->ifhwb", kernel.reshape(h, w * C, F), x)
    return windows.max_pool(total([windows.strided_slice(products[i], 1, i, H, stride) for i in range(h)]), pool)


def in_bfloat16(form: Form) -> Form:
    """Returns the form with patches, weights, outputs and gradients in bfloat16. Products accumulate in float32."""

    def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
        return form(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), stride, padding, pool).astype(x.dtype)

    return convolve


def lax_conv(images: str, weights: str) -> Form:
    """Returns XLA's convolution in this layout. Under vmap it becomes a grouped convolution."""
    order = [images.index(letter) for letter in "CHWN"]

    def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
        around = windows.amounts(x, kernel.shape[:2], stride, padding)
        x = x.transpose(["CHWN".index(letter) for letter in images])
        kernel = kernel.transpose(["HWIO".index(letter) for letter in weights])
        out = lax.conv_general_dilated(x, kernel, (stride, stride), around, dimension_numbers=(images, weights, images))
        return windows.max_pool(out.transpose(order), pool)

    return convolve


def winograd(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding, pool: int) -> jax.Array:
    """Winograd's algorithm F(2x2, 3x3) for all tiles at once, as 16 products. Other convolutions use the default form.

    Under vmap it becomes a batched matrix product. A CPU processes a few tiles at a time instead (winograd.py).
    """
    (C, _, _, B), (h, w, _, F) = x.shape, kernel.shape
    if (h, w, stride) != (3, 3, 1):
        return ours(x, kernel, stride, padding, pool)
    H, W = windows.positions(x, (3, 3), 1, padding)
    rows, columns = -(-H // 2), -(-W // 2)
    around = [
        (low, high + n % 2) for n, (low, high) in zip((H, W), windows.amounts(x, (3, 3), 1, padding), strict=True)
    ]
    x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    tiles = between(B_T, lambda i, j: x[:, i : i + 2 * rows : 2, j : j + 2 * columns : 2])
    weights = jnp.stack(between(G, lambda i, j: kernel[i, j]))
    products = jnp.einsum("kcf,kcn->kfn", weights, jnp.stack(tiles).reshape(16, C, -1))
    products = products.reshape(16, F, rows, columns, B)
    a, b, c, d = between(A_T, lambda i, j: products[4 * i + j])
    out = jnp.stack([jnp.stack([a, b], 3), jnp.stack([c, d], 3)], 2).reshape(F, 2 * rows, 2 * columns, B)[:, :H, :W]
    return windows.max_pool(out, pool) if pool > 1 else out


FORMS: dict[str, Form] = {
    "ours": ours,
    "Winograd": winograd,
    "bfloat16": in_bfloat16(ours),
    "as on a TPU": tpu.convolve,
    "grouped NHWC": lax_conv("NHWC", "HWIO"),
    "grouped NCHW": lax_conv("NCHW", "OIHW"),
    "rows": rows,
    "recomputed": recomputed,
    "blocks pooled": pooled(ours, cpu.pool_blocks),
}  # the most promising form is first


@contextmanager
def convolving(form: Form) -> Iterator[None]:
    """Makes the layers of the library use this form inside the ``with`` block."""
    before = dict(conv.FORMS)
    conv.FORMS.update(dict.fromkeys(before, form))
    jax.clear_caches()  # because cached programs contain the previous form
    try:
        yield
    finally:
        conv.FORMS.update(before)


# --- local steps ------------------------------------------------------------------------------------------------------


def steps(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for network in arguments.networks:
        for lanes in arguments.lanes or ((128, 25) if network in ("lenet5", "emnist_cnn") else (15,)):
            program, inputs = local_steps(network, lanes, arguments.quick)
            exact = functools.cache(partial(exactly, program, inputs))
            for form in arguments.forms:
                what = f"{network}, {lanes} lanes, {form}"
                yield from attempt(what, arguments, partial(steps_of, what, form, program, inputs, exact, arguments))


def exactly(program: Callable, inputs: tuple) -> Params:
    with convolving(ours), jax.default_matmul_precision("highest"):
        return jax.jit(program)(*inputs)


def steps_of(
    what: str, form: str, program: Callable, inputs: tuple, exact: Callable, arguments: argparse.Namespace
) -> measure.Row:
    with convolving(FORMS[form]):
        compiled = jax.jit(program).lower(*inputs).compile()
        times = measure.seconds(partial(compiled, *inputs), 1 if arguments.quick else 5)
    apart, size = norm(jax.tree.map(jnp.subtract, compiled(*inputs), exact())), norm(exact())
    x = inputs[1]
    each = [1e6 * t / (x.shape[0] * x.shape[1]) for t in times]
    note = f"{kernels(compiled.as_text() or '')} kernels; error {apart / size:.1e}"
    return measure.row(what, each, "us a client's step", note=note)


def norm(tree: Params) -> float:
    return float(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree))) ** 0.5


def attempt(what: str, arguments: argparse.Namespace, trial: Callable[[], measure.Row]) -> Iterator[measure.Row]:
    """Yields the result of the trial. If the trial fails or the time is over, prints a message and yields nothing."""
    if time.perf_counter() - START > arguments.seconds:
        print(f"skipped: {what}", flush=True)
        return
    try:
        yield trial()
    except Exception as error:  # a compiler may raise any exception, and the other forms must still run
        print(f"failed: {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if arguments.quick:
            raise


def local_steps(network: str, lanes: int, quick: bool) -> tuple[Callable, tuple]:
    """Returns a program of local steps and its arguments.

    The program returns the learning rate times the sum of the gradients.
    """
    workload = next(w for w in WORKLOADS.values() if w.network == network)
    batch, image, model = workload.batch, workload.image, measure.model(network)
    if quick:
        batch, image = 2, (10, 10, 2)
        model = fd.Model.from_linen(CNN(((3, 3, "SAME", 1), (5, 3, "VALID", 2)), (), workload.classes), image)
    keys = jax.random.split(jax.random.key(0), lanes)
    params = jax.jit(jax.vmap(model.init))(keys)
    shape = (2 if quick else STEPS, lanes, batch)
    x = jax.random.bits(keys[0], (*shape, *image), jnp.uint8)
    y = jax.random.randint(keys[0], shape, 0, workload.classes)

    def step(params: Params, x: jax.Array, y: jax.Array) -> Params:
        gradient = jax.grad(lambda p: model.loss(model.apply(p, x.astype(jnp.float32) / 255), y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    def program(params: Params, x: jax.Array, y: jax.Array) -> Params:
        after, _ = lax.scan(lambda p, batch: (jax.vmap(step)(p, *batch), None), params, (x, y))
        return jax.tree.map(jnp.subtract, params, after)

    return program, (params, x, y)


def kernels(text: str) -> int:
    """Returns the number of operations of a compiled program that start a kernel."""
    return len(launched(text))


def launched(text: str) -> list[tuple[str, list[str]]]:
    """Returns the operations of a compiled program that start a kernel, each with the names of its operands.

    Operations inside a fusion start none.
    """
    fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", re.sub(r"(?m)^.* call\(.*$", "", text)))
    kinds = "fusion|custom-call|copy|sort|reduce|scatter|transpose|concatenate|dynamic-update-slice"
    found = []
    for block in text.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.-]+) ", block)
        if name and name[1] not in fused:
            for result, operands in re.findall(rf"(?m)^\s*(?:ROOT )?(%?[\w.-]+) = .*? (?:{kinds})\((.*?)\)", block):
                found.append((result, re.findall(r"%[\w.-]+", operands)))
    return found


# --- rounds -----------------------------------------------------------------------------------------------------------


def rounds(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for name in arguments.rounds:
        for lanes in arguments.lanes or ("auto",):
            for form in arguments.forms:
                what = f"{name}, lanes: {lanes}, {form}"
                yield from attempt(what, arguments, partial(round_of, what, name, lanes, form, arguments.quick))


def round_of(what: str, name: str, lanes: int | str, form: str, quick: bool) -> measure.Row:
    network, cohort = name.rsplit(maxsplit=1) if " " in name else (name, "")
    workload = Workload(network, WRITERS, int(cohort)) if cohort else WORKLOADS[name]
    workload = tiny(workload, "lenet5") if quick else workload
    with convolving(FORMS[form]):
        sim = measure.simulation(workload, lanes=lanes)
        long = workload.cohort >= 1000 or network.endswith(RESNET)
        times = measure.round_seconds(sim, 1 if quick else 3, each=1 if quick or long else 5)
    return measure.row(what, times, "s a round", note=f"lanes: {sim.lanes}")


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, RESNET], default=["lenet5", "emnist_cnn"])
    parser.add_argument(
        "--rounds",
        nargs="+",
        metavar="WORKLOAD",
        help='measure rounds of these workloads of workloads.py, or for example "lenet5 500"',
    )
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), metavar="FORM")
    parser.add_argument("--lanes", nargs="+", type=int)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel separately, without CUDA graphs")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no new measurement after these seconds"
    )
    arguments = parser.parse_args()
    if arguments.no_graphs:  # JAX reads this variable when it first looks for devices
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    if arguments.quick:
        arguments.lanes = [2]
        arguments.networks, arguments.rounds = arguments.networks[:1], arguments.rounds and arguments.rounds[:1]
    fd.use_cpu_devices()
    name = ("forms_rounds" if arguments.rounds else "forms") + ("_without_graphs" if arguments.no_graphs else "")
    measure.save(name, rounds(arguments) if arguments.rounds else steps(arguments), arguments)


if __name__ == "__main__":
    main()
