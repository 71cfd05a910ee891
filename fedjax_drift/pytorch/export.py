"""`torch.export` of a module, for batches of any length."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import re
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch import functions
from fedjax_drift.pytorch.operations import covered
from fedjax_drift.pytorch.operations.decomposed import DECOMPOSED

LENGTHS = (*range(2, 65), 100, 127, 1000)  # of batches, for which conditions on the length must hold


def exported(module: Any, example: jax.ShapeDtypeStruct, training: bool) -> Any:
    """The exported program of a module, in training or in evaluation. The module is not changed.

    example: [2, ...]. The first axis is the batch, of any length.

    Raises ConfigurationError if the module does not accept the example, or does something that no list of operations
    can do.
    """
    import torch

    name = type(module).__name__
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    dtype = torch.int64 if example.dtype.kind in "iu" else getattr(torch, example.dtype.name)
    zeros = torch.zeros(example.shape, dtype=dtype, device=device)
    batch = torch.export.Dim.AUTO
    try:
        with unchanged(module), silent(), _without_shortcuts(), _shapes_of_recurrent_layers(), functions.traced():
            module.train(training)
            for part in module.modules():  # they cannot be exported; `comparison.py` sees what they do
                part._backward_hooks, part._backward_pre_hooks = OrderedDict(), OrderedDict()
            program = torch.export.export(logits_of(module), (zeros,), dynamic_shapes=({0: batch},), strict=False)
            _stop_gradients(program.graph_module, True)
            conditions = getattr(program, "_guards_code", None) or []
            program = program.run_decompositions(_decompositions())
    except ConfigurationError:
        raise
    except Exception as error:
        runs = _runs(module, zeros, training)
        raise ConfigurationError(_why(name, example, error, runs)) from error
    _check_lengths(name, program, conditions)
    return program


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """PyTorch's definitions of the operations in `operations.DECOMPOSED` by other operations."""
    import torch

    table = torch.export.default_decompositions().items()
    return {each: how for each, how in table if covered(str(each).removeprefix("aten.")) in DECOMPOSED}


def logits_of(module: Any) -> Any:
    """The module with one output: of a Hugging Face model, its logits."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            output = self.module(x)
            return getattr(output, "logits", output)

    return Logits()


@contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Restores the mode, the attributes and the buffers of a module, and all generators of random numbers."""
    import torch

    parts = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    values = [(each, each.detach().clone()) for each in module.buffers() if not _is_lazy(each)]
    generators = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, attributes, buffers in parts:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for each, value in values:
                each.copy_(value)
        random.setstate(generators[0])
        np.random.set_state(generators[1])  # noqa: NPY002


@contextmanager
def silent() -> Iterator[None]:
    """PyTorch prints whole graphs and warnings about its own code. The error that is raised says what is needed."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _without_shortcuts() -> Iterator[None]:
    """Transformer layers of PyTorch look whether a mask has the causal values, which no graph can do. It may only be
    a faster way to the same numbers."""
    import torch

    layers = torch.nn.modules.transformer
    found, fast = layers._detect_is_causal_mask, torch.backends.mha.get_fastpath_enabled()
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = found
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _shapes_of_recurrent_layers() -> Iterator[None]:
    """PyTorch would trace every step of a recurrent layer, several times, to know the shapes of what it returns.

    The layer stays one operation. Should it not, the graph has an operation that is not covered, and is refused.
    """
    import torch
    from torch._decomp import decompositions

    steps = getattr(decompositions, "_rnn_helper", None)

    def shapes(
        x: Any, hidden: Any, params: Any, biases: Any, layers: Any, dropout: Any, train: Any, both: Any, *_: Any
    ) -> Any:
        state = hidden[0][0] if isinstance(hidden[0], tuple) else hidden[0]
        shape = (*x.shape[:-1], state.shape[-1] * (2 if both else 1))
        return torch.empty_permuted(shape, (0, 1, 2), dtype=x.dtype, device=x.device), hidden

    if steps is not None:
        decompositions._rnn_helper = shapes
    try:
        yield
    finally:
        if steps is not None:
            decompositions._rnn_helper = steps


def _stop_gradients(part: Any, enabled: bool) -> None:
    """Detaches what is computed under ``torch.no_grad`` or ``set_grad_enabled(False)``.

    The export keeps each such block as a graph of its own until it is decomposed.
    """
    import torch

    for node in list(part.graph.nodes):
        if node.op != "call_function":
            continue
        if "set_grad_enabled" in str(node.target):
            _stop_gradients(getattr(part, node.args[1].target), node.args[0])
        elif not enabled and _is_floating(node.meta.get("val")):
            with part.graph.inserting_after(node):
                stopped = part.graph.call_function(torch.ops.aten.detach.default, (node,))
            stopped.meta = dict(node.meta)
            node.replace_all_uses_with(stopped, lambda user, stopped=stopped: user is not stopped)
    part.recompile()


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_lazy(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


# --- conditions on the length of a batch ------------------------------------------------------------------------------


def _check_lengths(name: str, program: Any, conditions: list[str]) -> None:
    """Raises ConfigurationError if the graph holds for some lengths of a batch only."""
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    length = next(node.meta["val"].shape[0] for node in program.graph.nodes if node.name in inputs)
    wrong = next((each for each in conditions if not _holds(each)), None)
    if wrong is None:
        ranges = [each for symbol, each in program.range_constraints.items() if str(symbol) == str(length)]
        wrong = next((f"a batch of at most {each.upper}" for each in ranges if str(each.upper).isdigit()), None)
    if wrong is not None or str(length).isdigit():
        found = f"code that holds for {re.sub(_SIZE, 'B', wrong)}" if wrong else "a module whose code fixes it"
        checks.refuse(
            f"{name} must accept batches of any length B",
            found,
            "reshape with -1 or x.shape[0], and not with a number or len(x), and do the same for every B",
        )


_SIZE = r"L\[[^]]*\](\[[^]]*\])*\.size\(\)\[0\]"


def _holds(condition: str) -> bool:
    """Whether a condition of the export holds for all lengths; also if it is on something else."""
    source = re.sub(_SIZE, "B", condition)
    try:
        return all(eval(source, {"__builtins__": {}}, {"B": B}) for B in LENGTHS)
    except Exception:
        return True


# --- errors -----------------------------------------------------------------------------------------------------------


def _runs(module: Any, zeros: Any, training: bool) -> bool:
    """Whether the module itself accepts the example."""
    import torch

    try:
        with unchanged(module), silent(), torch.no_grad():
            module.train(training)(zeros)
    except Exception:
        return False
    return True


def _why(name: str, example: jax.ShapeDtypeStruct, error: Exception, runs: bool) -> str:
    """What is wrong with a module that `torch.export` refuses. runs: the module itself accepts the example."""
    text, line = str(error), line_of(error)
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or "UnbackedSymInt" in text:
        return by_values(name, line)
    cause = f"{type(error).__name__}: {checks.first_line(error)}, in {line}"
    if "pack_padded" in text or "PackedSequence" in text or "_pack_padded" in line or "packed" in line:
        return f"{name} must take padded sequences, got a packed one, in {line}: call the recurrent layer without it"
    if "1 value per channel" in text:
        return f"{name} must accept a batch of 2 examples in training, got an error from it ({cause})"
    if runs:
        return (
            f"torch.export must be able to read {name}, got an error from it, although the module runs: write the line "
            f"in another way, or look the error up in PyTorch's issues ({cause})"
        )
    advice = "pass the input_shape that the module accepts. Images are [H, W, C] here and are passed to the module as "
    advice += "[C, H, W], unless channels_last=False. For token ids also pass input_dtype=jnp.int32"
    return (
        f"{name} must accept examples of shape {[*example.shape[1:]]} and dtype {example.dtype}, got an error: "
        f"{advice} ({cause})"
    )


def by_values(name: str, line: str) -> str:
    return (
        f"the operations of {name} must not depend on the values of its inputs, parameters or buffers, got {line}: use "
        "torch.where instead of if, and masks instead of selections"
    )


def check_module(module: Any) -> None:
    """Refuses what no export can read, before it is tried."""
    import torch

    name = type(module).__name__
    if any(map(_is_lazy, (*module.parameters(), *module.buffers()))):
        checks.refuse(
            f"the parameters of {name} must have shapes", "a lazy layer without", "call the module once on a batch"
        )
    wide = [n for n, each in (*module.named_parameters(), *module.named_buffers()) if each.dtype == torch.float64]
    if wide and not jax.config.read("jax_enable_x64"):
        checks.refuse(
            f"the parameters of {name} must be float32 or lower",
            f"float64 in {checks.listed(wide)}",
            "pass module.float(), or set jax_enable_x64",
        )


def line_of(error: Exception) -> str:
    """The last line of the user's code before the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_others())]
    return frames[-1].line or frames[-1].name if frames else "a layer of PyTorch"


def line_in(trace: str) -> str:
    """The last line of the user's code in the stack trace of a node, or ""."""
    lines = re.findall(r'File "([^"]+)", line \d+, in [^\n]+\n([^\n]+)', trace)
    return next((code.strip() for file, code in reversed(lines) if not file.startswith(_others())), "")


def _others() -> tuple[str, ...]:
    """The folders of code that is not the user's."""
    import sympy
    import torch

    return (*(str(Path(file).parent) for file in (torch.__file__, sympy.__file__, __file__)), contextlib.__file__)
