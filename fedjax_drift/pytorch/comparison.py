"""A PyTorch module against its translation, before the model is used: the module decides what is right.

`torch.export` does not see everything that a module does, and a translation can have errors. So both compute logits,
new running statistics and the gradient of a random projection of the logits. They get the same batches, and random
numbers are replaced by their means (`means.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.export import exported, line_in, line_of, logits_of, silent, unchanged
from fedjax_drift.pytorch.graph import Graph
from fedjax_drift.pytorch.means import Means
from fedjax_drift.pytorch.operations.images import Images
from fedjax_drift.pytorch.operations.mode import Mode
from fedjax_drift.pytorch.reading import array
from fedjax_drift.pytorch.run import run

BATCH = 7
SHORTER = 1, 2, 3
VALUES, GRADIENTS = 1e-4, 3e-2  # relative differences (L2) up to which nothing else is asked
ROUNDING = 30  # how many times the module's own rounding error, by float64, the translation may differ
SMALLEST = 1e-3  # the smaller gradients and statistics are held against this part of the largest
TWICE = "the logits of the same batch, computed twice by the module"
UNSEEN = (
    "The graph of torch.export computes something else than the module: look for hooks of tensors (register_hook), and "
    "for what depends on the batch, or on anything but the input, the parameters and self.training."
)
TRIALS = 2  # batches that must all differ, because a rounding error can change an argmax or the side of a kink

Named = dict[str, np.ndarray]


class Pair(NamedTuple):
    """A module and its translation, in training or in evaluation."""

    module: Any
    training: bool
    graph: Graph  # as it was read
    fast: Graph  # as it runs
    trained: tuple[str, ...]  # the parameters of which there are gradients
    values: Named  # parameters and running statistics
    images: bool  # inputs [B, C, H, W] are images
    example: jax.ShapeDtypeStruct  # [2, ...], as the module gets it

    @property
    def when(self) -> str:
        return "training" if self.training else "evaluation"

    def given(self, x: Any) -> Any:
        return Images(jnp.asarray(x).transpose(1, 2, 3, 0)) if self.images else jnp.asarray(x)


class Results(NamedTuple):
    """What a module or its translation computes of a batch."""

    logits: np.ndarray
    statistics: Named
    gradients: Named


class Difference(NamedTuple):
    """What differs, and how much."""

    what: str
    size: float
    length: int  # of the batch
    x: np.ndarray


def check(training: Pair, evaluation: Pair, vocabulary: int | None) -> None:
    """Raises ConfigurationError if a translation does not compute what its module computes.

    vocabulary: token ids are drawn below it. None: there are none, or they are not known.
    """
    for pair in (training, evaluation):
        with _cpu(), silent():
            program = _program(pair)
            for seed in range(TRIALS):
                found = _difference(pair, program, _batch(pair, vocabulary, seed), seed)
                if found is None:
                    break
                if seed == TRIALS - 1:
                    raise ConfigurationError(_message(pair, found))


@contextmanager
def without_zeros(module: Any) -> Iterator[None]:
    """Parameters that are 0, such as those of a last layer, hide what is before them: they get random values."""
    import torch

    generator = torch.Generator().manual_seed(0)
    zeros = [(each, each.data) for each in module.parameters() if each.is_floating_point() and not each.data.any()]
    try:
        for each, value in zeros:
            each.data = 0.1 * torch.randn(value.shape, generator=generator).to(value)
        yield
    finally:
        for each, value in zeros:
            each.data = value


@contextmanager
def _cpu() -> Iterator[None]:
    """Both compute in float32 on the CPU."""
    devices = jax.local_devices(backend="cpu")
    with jax.default_device(devices[0]), jax.default_matmul_precision("highest"):
        yield


def _batch(pair: Pair, vocabulary: int | None, seed: int) -> np.ndarray:
    """Of images, the last three have a mean of 100. Of ids, the first is 0 and the last is the largest."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, *pair.example.shape[1:])
    if pair.example.dtype.kind in "iu":
        for largest in (vocabulary or 100, 2):
            ids = rng.integers(0, largest, shape)
            ids.flat[0], ids.flat[-1] = 0, largest - 1
            if vocabulary or _runs(pair, ids):
                break
        return ids
    x = rng.normal(size=shape)
    x[-3:] += 100 if len(shape) == 4 else 0
    return x.astype(pair.example.dtype)


def _runs(pair: Pair, x: np.ndarray) -> bool:
    try:
        theirs(pair, x)
    except Exception:
        return False
    return True


# --- the translation --------------------------------------------------------------------------------------------------


def _ours(pair: Pair, values: Any, x: Any, mask: Any) -> tuple[Any, dict[str, Any]]:
    new = {path: each for path, each in pair.graph.updates.items() if path in pair.values}
    outputs = [pair.fast.output, *new.values()]
    results = run(pair.fast, values, (pair.fast.input, pair.given(x)), outputs, Mode(mask=mask, means=True))
    return results[0], dict(zip(new, results[1:], strict=True))


def _program(pair: Pair) -> Callable[..., Results]:
    """The translation as one compiled program for batches of `BATCH` examples. It is used once, so it is compiled fast.

    In evaluation, it computes no gradients: nothing is trained there.
    """

    def loss(trained: Any, others: Any, x: Any, r: Any, mask: Any) -> Any:
        logits, statistics = _ours(pair, {**others, **trained}, x, mask)
        return (logits * r).sum(), (logits, statistics)

    def program(trained: Any, others: Any, x: Any, r: Any, mask: Any) -> Any:
        if pair.training:
            (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(trained, others, x, r, mask)
            return *aux, gradients
        return *loss(trained, others, x, r, mask)[1], {}

    trained = {name: pair.values[name] for name in pair.trained}
    others = {name: value for name, value in pair.values.items() if name not in trained}
    options: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled: list[Any] = []

    def call(x: np.ndarray, r: np.ndarray, length: int = BATCH) -> Results:
        arguments = trained, others, jnp.asarray(x), jnp.asarray(r), jnp.arange(len(x)) < length
        if not compiled:
            compiled.append(jax.jit(program).lower(*arguments).compile(options))
        return Results(*jax.tree.map(np.asarray, compiled[0](*arguments)))

    return call


# --- the module -------------------------------------------------------------------------------------------------------


def theirs(pair: Pair, x: np.ndarray, project: Callable[..., Any] | None = None, wide: bool = False) -> Results:
    """What the module computes.

    project: from the shape of the logits to the projection; None: there are no gradients. wide: in float64.
    """
    return _called(pair, x, project, wide, 1)[0]


def _called(pair: Pair, x: np.ndarray, project: Any, wide: bool, times: int) -> list[Results]:
    """What the module computes when it is called several times with the same buffers, with gradients of the first."""
    import torch

    module = pair.module
    data = [(each, each.data) for each in module.parameters()]
    with unchanged(module):
        try:
            module.train(pair.training)
            module.to("cpu", torch.float64 if wide else None)
            buffers = [(each, each.clone()) for each in module.buffers()]
            results = []
            for i in range(times):
                for each, value in buffers:
                    each.copy_(value)
                derived = project is not None and i == 0
                with Means(), torch.set_grad_enabled(derived):
                    logits = logits_of(module).train(pair.training)(_tensor(x, wide))
                    r = project(logits.shape) if derived else None
                    gradients = {} if r is None else _gradients(module, logits, r, pair.trained)
                named = dict(module.named_buffers())
                new = {path: _numbers(named[path]) for path in pair.graph.updates if path in pair.values}
                results.append(Results(_numbers(logits), new, gradients))
            return results
        finally:
            for each, values in data:
                each.data = values


def _tensor(x: np.ndarray, wide: bool = False) -> Any:
    import torch

    given = torch.from_numpy(np.array(x))
    return given.double() if wide and x.dtype.kind == "f" else given.long() if x.dtype.kind in "iu" else given


def _gradients(module: Any, logits: Any, r: np.ndarray, trained: tuple[str, ...]) -> Named:
    import torch

    named = dict(module.named_parameters())
    projection = (logits * torch.from_numpy(r).to(logits.dtype)).sum()
    found: Any = [None] * len(trained)
    if projection.requires_grad:
        found = torch.autograd.grad(projection, [named[name] for name in trained], allow_unused=True)
    pairs = zip(trained, found, strict=True)
    return {name: np.zeros(named[name].shape) if g is None else _numbers(g) for name, g in pairs}


def _numbers(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype.itemsize == 2 else tensor).numpy().copy()


# --- the differences --------------------------------------------------------------------------------------------------


def _difference(pair: Pair, program: Callable[..., Results], x: np.ndarray, seed: int) -> Difference | None:
    """The first thing in which they differ on a batch, or None."""

    def projection(shape: Any) -> np.ndarray:
        return np.random.default_rng(seed + 100).normal(size=tuple(shape)).astype("float32")

    project = projection if pair.training else None
    try:
        module, again = _called(pair, x, project, False, 2)
    except Exception as error:
        name, cause = type(pair.module).__name__, checks.first_line(error)
        checks.refuse(
            f"{name} must run on a batch of {len(x)} random examples in {pair.when}",
            "an error",
            f"{cause} (in {line_of(error)}). Pass check=False if such inputs do not occur",
            error,
        )
    if (size := _relative(again.logits, module.logits)) > VALUES:
        return Difference(TWICE, size, len(x), x)
    wide = functools.cache(lambda: _or_none(lambda: theirs(pair, x, project, True)))
    ours = program(x, projection(module.logits.shape))
    if found := _between(ours, module, wide):
        return Difference(*found, len(x), x)
    for n in SHORTER:
        shorter = _or_none(functools.partial(theirs, pair, x[:n]))
        if shorter is None:  # BatchNorm, for instance, needs several values in training
            continue
        if found_shorter := _of_length(pair, program, x, ours, shorter, n):
            return found_shorter
        if pair.training and pair.graph.updates:
            break  # one length with other running statistics, because a mask takes a pass with a gradient
    return None


def _of_length(
    pair: Pair, program: Callable[..., Results], x: np.ndarray, whole: Results, module: Results, n: int
) -> Difference | None:
    """The same for the first n examples. The program for the whole batch is used, if it says the same with a mask."""
    masked = whole
    if pair.training and pair.graph.updates:
        masked = program(x, np.zeros(whole.logits.shape, "float32"), n)
    first = masked._replace(logits=masked.logits[:n], gradients={})
    wide = functools.cache(lambda: _or_none(lambda: theirs(pair, x[:n], None, True)))
    if first.logits.shape == module.logits.shape and not _between(first, module, wide):
        return None
    logits, statistics = jax.jit(functools.partial(_ours, pair))(pair.values, x[:n], None)
    ours = Results(np.asarray(logits), jax.tree.map(np.asarray, statistics), {})
    found = _between(ours, module, wide)
    return Difference(*found, n, x[:n]) if found else None


def _between(ours: Results, module: Results, wide: Callable[[], Results | None]) -> tuple[str, float] | None:
    """What differs by more than rounding, and how much. wide: the module in float64, if it runs there."""
    if ours.logits.shape != module.logits.shape:
        return f"logits of shape {[*ours.logits.shape]} instead of {[*module.logits.shape]}", np.inf
    parts = [("the logits", "logits", VALUES), ("the new value of", "statistics", VALUES)]
    for text, field, allowed in [*parts, ("the gradient of", "gradients", GRADIENTS)]:
        a, b = (
            each if isinstance(each, dict) else {"": each} for each in (getattr(ours, field), getattr(module, field))
        )
        floor = SMALLEST * max((_norm(each) for each in b.values()), default=0.0)
        sizes = {name: _relative(a[name], b[name], floor) for name in b}
        for name in sorted(sizes, key=lambda each: -sizes[each]):
            if sizes[name] > allowed and not _is_rounding(field, name, ours, module, wide(), floor):
                return f"{text} {name}".strip(), sizes[name]
    return None


def _is_rounding(field: str, name: str, ours: Results, module: Results, wide: Results | None, floor: float) -> bool:
    if wide is None:
        return False
    a, b, exact = (each[name] if name else each for each in (getattr(part, field) for part in (ours, module, wide)))
    return _relative(a, exact, floor) <= ROUNDING * _relative(b, exact, floor)


def _relative(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """|a - b| / |b|. Infinite and undefined numbers must be at the same places."""
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return np.inf
    with np.errstate(invalid="ignore"):  # of two infinite numbers
        distance = _norm(np.where(finite, np.subtract(a, b, dtype="float64"), 0))
    return distance / max(_norm(b), floor) if distance else 0.0


def _norm(x: np.ndarray) -> float:
    """The norm of the finite numbers."""
    x = x.ravel().astype("float64")
    norm = float(np.sqrt(x @ x))
    return norm if np.isfinite(norm) else float(np.linalg.norm(x[np.isfinite(x)]))


def _or_none(function: Callable[[], Results]) -> Results | None:
    try:
        return function()
    except Exception:
        return None


# --- the message ------------------------------------------------------------------------------------------------------


def _message(pair: Pair, found: Difference) -> str:
    name = type(pair.module).__name__
    of = f"{found.what} in {pair.when}, for a batch of {found.length}"
    size = "entirely" if np.isinf(found.size) else f"by {100 * found.size:.2g} %"
    place, hooks = _place(pair, found.x), _hooks(pair.module)
    where = f", first in {place}" if place else ""
    cause = f" {name} has {checks.listed(hooks)}." if hooks else ""
    if found.what == TWICE:
        cause = " A counter or random numbers of NumPy or Python change it: use those of PyTorch, in training only."
    elif not place and not hooks:
        cause = f" {UNSEEN}"
    return (
        f"{name} must compute here what it computes in PyTorch, got a difference in {of}: it differs {size}{where}."
        f"{cause} Change the module, or pass check=False if the difference is wanted"
    )


def _place(pair: Pair, x: np.ndarray) -> str:
    """The first operation whose translation differs, with its submodule and its line. "": they are all equal."""
    import torch

    module = pair.module
    with unchanged(module), silent():
        module.to("cpu")
        program = exported(module, pair.example, pair.training)
        recorded: dict[str, Any] = {}

        class Recorded(torch.fx.Interpreter):
            def run_node(self, node: Any) -> Any:
                recorded[node.name] = super().run_node(node)
                return recorded[node.name]

        values = {**program.state_dict, **program.constants, **dict(module.named_buffers())}
        inputs = []
        for spec in program.graph_signature.input_specs:
            target = spec.target if spec.target in values else str(spec.target).removeprefix("module.")
            inputs.append(_tensor(x) if spec.kind.name == "USER_INPUT" else values[target].detach().clone())
        with torch.no_grad(), Means():
            Recorded(program.graph_module).run(*inputs)
    arrays = {
        name: each for name, each in recorded.items() if isinstance(each, torch.Tensor) and each.is_floating_point()
    }
    nodes = [node for node in pair.graph.nodes if node.name in arrays]
    wanted = [node.name for node in nodes]
    values = jax.tree.map(jnp.asarray, pair.values)
    ours = run(pair.graph, values, (pair.graph.input, pair.given(x)), wanted, Mode(means=True))
    lines = {node.name: line_in(node.meta.get("stack_trace") or "") for node in program.graph.nodes}
    for node, value in zip(nodes, ours, strict=True):
        if _relative(np.asarray(value), array(arrays[node.name])) > VALUES:
            layer = f" of {node.layer}" if node.layer else ""
            line = f" ({lines[node.name]})" if lines.get(node.name) else ""
            return f"{node.operation}{layer}{line}"
    return ""


def _hooks(module: Any) -> list[str]:
    """The backward hooks of submodules and parameters, which no export can see."""
    found = [f"a backward hook of {path or 'the module'}" for path, part in module.named_modules() if _has_hook(part)]
    return found + [f"a hook of {name}" for name, each in module.named_parameters() if each._backward_hooks]


def _has_hook(part: Any) -> bool:
    return bool(part._backward_hooks or part._backward_pre_hooks)
