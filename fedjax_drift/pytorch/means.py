"""Random numbers of PyTorch as their means, so that a module can be compared with its translation."""

from __future__ import annotations

from typing import Any


def Means() -> Any:
    """A context in which random operations of PyTorch return their means, as `Mode` with ``means=True`` does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            function = TABLE.get(operation._schema.name.removeprefix("aten::"))
            options = options or {}
            return operation(*arguments, **options) if function is None else function(operation, *arguments, **options)

    return Mode()


def _filled(mean: Any) -> Any:
    """An operation that overwrites its first argument. mean: of the other arguments."""
    return lambda operation, x, *arguments, generator=None: _fill(x, mean(*arguments))


def _fill(x: Any, value: Any) -> Any:
    return x.copy_(value) if hasattr(value, "shape") else x.fill_(value)


def _new(mean: float) -> Any:
    """rand and randn, and those with ``_like``: the operation itself gives the shape and the dtype."""
    return lambda operation, *arguments, **options: operation(*arguments, **options).fill_(mean)


def _bernoulli(operation: Any, x: Any, p: Any = None, generator: Any = None) -> Any:
    return x.clone() if p is None else x.clone().fill_(p)


def _normal(operation: Any, mean: Any, *arguments: Any, **options: Any) -> Any:
    return _fill(operation(mean, *arguments, **options), mean)


def _rrelu(
    operation: Any,
    x: Any,
    noise: Any,
    low: float = 1 / 8,
    high: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    import torch

    slope = (low + high) / 2
    noise.copy_(torch.where(x > 0, 1.0, slope))
    y = torch.where(x > 0, x, slope * x)
    return x.copy_(y) if operation._schema.name.endswith("_") else y


TABLE = {
    "bernoulli": _bernoulli,
    "bernoulli_": _filled(lambda p=0.5: p),
    "exponential_": _filled(lambda rate=1.0: 1 / rate),
    "normal": _normal,
    "normal_": _filled(lambda mean=0.0, deviation=1.0: mean),
    "rand": _new(0.5),
    "rand_like": _new(0.5),
    "randn": _new(0.0),
    "randn_like": _new(0.0),
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "uniform_": _filled(lambda low=0.0, high=1.0: (low + high) / 2),
}
