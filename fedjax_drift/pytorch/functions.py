"""The own derivatives of a module: each `torch.autograd.Function` is exported with its forward and its backward.

`torch.export` traces only a forward. While it runs, `traced` replaces ``apply`` by a function that also calls the
backward, with a placeholder for the gradient of each output. The operation ``join`` binds the outputs, the placeholders
and the gradients of the inputs together, and `run.run` makes a `jax.custom_vjp` of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedjax_drift import checks

PLACEHOLDER, JOIN = "fedjax_drift.placeholder", "fedjax_drift.join"


class Context:
    """What a forward keeps for its backward: the ``ctx`` of PyTorch."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        import torch

        self.saved_tensors: tuple[Any, ...] = ()
        self.needs_input_grad = tuple(isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Their gradients are zeros."""

    def set_materialize_grads(self, value: bool) -> None:
        """The gradients of all outputs are given."""

    def mark_dirty(self, *tensors: Any) -> None:
        checks.refuse("a torch.autograd.Function must not change its inputs", "mark_dirty", "return a new array")


@contextmanager
def traced() -> Iterator[None]:
    """While it is open, every `torch.autograd.Function` leaves its backward in the graph."""
    import torch

    owner: Any = torch.autograd.Function
    original = owner.__dict__["apply"]
    owner.apply = classmethod(_apply)
    try:
        yield
    finally:
        owner.apply = original


def _apply(cls: Any, *inputs: Any) -> Any:
    import torch

    ctx = Context(inputs)
    with torch.no_grad():
        if cls.setup_context is torch.autograd.Function.setup_context:
            outputs = cls.forward(ctx, *inputs)
        else:
            outputs = cls.forward(*inputs)
            cls.setup_context(ctx, inputs, outputs)
        several = isinstance(outputs, tuple)
        results = list(outputs) if several else [outputs]
        _library()
        incoming = [torch.ops.fedjax_drift.placeholder(each) for each in results]
        gradients = cls.backward(ctx, *incoming)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    pairs = [(x, g) for x, g in zip(inputs, gradients, strict=True) if isinstance(x, torch.Tensor)]
    joined = torch.ops.fedjax_drift.join([x for x, _ in pairs], results, incoming, [g for _, g in pairs])
    return tuple(joined) if several else joined[0]


@functools.cache
def _library() -> Any:
    """The two operations. `torch.library.custom_op` is no way to define them: it uses `torch.autograd.Function`."""
    import torch

    library = torch.library.Library("fedjax_drift", "DEF")
    made = {
        "placeholder(Tensor x) -> Tensor": lambda x: torch.empty_like(x),
        "join(Tensor[] inputs, Tensor[] outputs, Tensor[] incoming, Tensor?[] gradients) -> Tensor[]": (
            lambda inputs, outputs, incoming, gradients: [torch.empty_like(each) for each in outputs]
        ),
    }
    for schema, function in made.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return library
