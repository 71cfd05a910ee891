"""The low-rank adapters among the parameters of a model of `fd.models.lora`.

An adapter is a dict with the factors ``"a"`` [..., in, r] and ``"b"`` [..., r, out]. It adds s A B to a frozen matrix
W_0, with s = alpha / r. An algorithm that changes the frozen matrix adds a third array, ``"w"`` [..., in, out]. The
matrix is then W_0 + s (w + A B). The models of `fd.models.lora` accept both. They never train w.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fedjax_drift.types import Params, Work

Matrices = dict[str, jax.Array]  # path of an adapted matrix -> [..., in, out]


def is_adapter(node: Any) -> bool:
    """Whether a node of a pytree is an adapter, with or without w."""
    if not isinstance(node, Mapping) or not {"a", "b"} <= set(node) <= {"a", "b", "w"}:
        return False
    shapes: list[tuple[int, ...]] = [getattr(node[name], "shape", ()) for name in ("a", "b")]
    return len(shapes[0]) == len(shapes[1]) >= 2 and shapes[0][-1] == shapes[1][-2]


def adapters(params: Params) -> dict[str, Mapping[str, jax.Array]]:
    """The adapters among the parameters, by path; none for a model without them."""
    return {path: node for path, node in params.items() if is_adapter(node)} if isinstance(params, Mapping) else {}


def products(params: Params) -> Matrices:
    """A B of every adapter."""
    return {path: adapter["a"] @ adapter["b"] for path, adapter in adapters(params).items()}


def split(params: Params) -> tuple[Params, Matrices]:
    """The parameters without the arrays w, and these arrays, which are few or none."""
    of_adapters = adapters(params)
    w = {path: adapter["w"] for path, adapter in of_adapters.items() if "w" in adapter}
    factors = {path: {name: adapter[name] for name in ("a", "b")} for path, adapter in of_adapters.items()}
    return {**params, **factors} if w else params, w


def joined(params: Params, w: Matrices) -> Params:
    """The parameters with the arrays w; the inverse of `split`."""
    return {**params, **{path: {**params[path], "w": w[path]} for path in w}} if w else params


def around(work: Work, w: Matrices) -> Work:
    """The work with a model whose parameters are those without the arrays w. It adds them."""
    if not w:
        return work
    model, watch = work.model.with_functions(lambda f: lambda params, *x: f(joined(params, w), *x)), work.watch
    watched = watch and (lambda start, theta: watch(joined(start, w), joined(theta, w)))
    return work._replace(model=model, watch=watched)
