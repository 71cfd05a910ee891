"""Calls flax modules with BatchNorm, whose parameters are then ``{"params": ..., "batch_stats": ...}``.

The modules are written without masks, and with the layers of flax. Two things are changed while a module is called:

- In training, BatchNorm does not see the padding of a batch. It normalises with the mean and the variance of the
  examples, and updates its running statistics with them.
- With "frozen", BatchNorm always normalises with its running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from fedjax_drift import checks
from fedjax_drift.tree import PyTree

Params = Any
Kept = Literal["average", "local", "frozen"]


class Statistics(NamedTuple):
    """The running statistics of a model with BatchNorm. `Model.from_linen` and `Model.from_nnx` create it.

    The parameters of such a model are a dict ``{"params": ..., "batch_stats": ...}`` (`whole`). An algorithm only sees
    the parameters under "params".
    """

    kept: Kept  # see `Model.from_linen`
    forward: Callable[[Params, PyTree, jax.Array, jax.Array, jax.Array, str], tuple[jax.Array, PyTree]]
    """``forward(params, statistics, x [B, ...], key, mask [B], method) -> (output, statistics)``, in training mode.
    ``params`` are those under "params". ``method`` is "apply" or "features". Examples whose mask is False do not
    influence the others, and the returned statistics do not depend on them."""


def whole(params: Params, statistics: PyTree) -> Params:
    """The parameters of a model with running statistics."""
    return {"params": params, "batch_stats": statistics}


def check(name: str, owners: Iterable[Any] | None, kept: Kept | None) -> Kept | None:
    """Checks the option ``statistics`` of `Model.from_linen` and `Model.from_nnx`, and returns it.

    name: of the module's class. owners: the objects that have running statistics; None if there are no statistics.
    """
    if owners is None and kept is not None:
        checks.refuse(f"statistics must be left out for {name}, which has no running statistics", f"{kept!r}")
    if owners is None:
        return None
    if kept is None:
        checks.refuse(
            f"{name} has running statistics (of BatchNorm or spectral_norm), so statistics must say what happens to "
            "them",
            "None",
            'pass statistics="average" (clients update and send them, the server averages them), "local" (each client '
            'keeps its own) or "frozen" (they keep their initial values, also in training); or replace BatchNorm by '
            "GroupNorm (of flax.linen, flax.nnx, torch.nn or fd.models.layers), which has none",
        )
    from flax import linen, nnx

    for owner in owners:
        if not isinstance(owner, linen.BatchNorm | nnx.BatchNorm):
            checks.refuse(
                "running statistics must be those of flax's BatchNorm",
                f"those of {type(owner).__name__} in {name}",
                "use flax.linen.BatchNorm or nnx.BatchNorm, whose batch statistics leave out the padding of a batch",
            )
        if owner.axis_name is not None:
            checks.refuse(
                "axis_name of BatchNorm must be None",
                f"{owner.axis_name!r} in {name}",
                "leave it out, because a client normalises with the statistics of its own batches",
            )
    return kept


def collections(params: Params, kept: str | None, statistics: PyTree = None) -> dict[str, PyTree]:
    """The variables of a flax module, by collection. The gradient with respect to running statistics is 0.

    statistics: None: they are a part of ``params``.
    """
    if kept is None:
        return {"params": params}
    if statistics is None:
        params, statistics = params["params"], params["batch_stats"]
    return whole(params, lax.stop_gradient(statistics))


def rows(mask: jax.Array, x: jax.Array, given: jax.Array | None) -> jax.Array:
    """The mask of BatchNorm for its input ``x [B, ...]``: True for examples, and where the module's mask is True.

    mask: bool [B]. given: the mask that the module itself passes, or None.
    """
    if x.shape[0] != len(mask):
        checks.refuse(
            f"the first axis of BatchNorm's input must be the batch, of length {len(mask)}",
            [*x.shape],
            "do not reshape or move it before BatchNorm, because the padding of a batch must be left out",
        )
    examples = mask.reshape(-1, *[1] * (x.ndim - 1))
    return examples if given is None else examples & given


# --- flax.linen -------------------------------------------------------------------------------------------------------


def noting(layers: dict[tuple[str, ...], Any]) -> Any:
    """A context in which the layers of linen modules are noted, by path, as they are called."""
    from flax import linen

    def note(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layers[context.module.path] = context.module.clone()  # without the parameters, which may be tracers
        return next_call(*args, **kwargs)

    return linen.intercept_methods(note)


def linen_call(
    module: Any,
    variables: dict[str, PyTree],
    x: jax.Array,
    kept: str | None,
    options: dict[str, Any],
    method: str | None = None,
    mask: jax.Array | None = None,
) -> Any:
    """``module.apply`` with these options. mask: the examples of the batch, if BatchNorm is in training mode."""
    from flax import linen

    def call(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        norm = context.module
        if not isinstance(norm, linen.BatchNorm) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        x = args[0] if args else kwargs["x"]
        if kept == "frozen" and norm.use_running_average is not True:  # this call comes back here, with True
            return norm.clone(parent=None, use_running_average=True).apply(norm.variables, x)
        if mask is not None and kept != "frozen":
            kwargs = kwargs | {"mask": rows(mask, x, kwargs.get("mask"))}
        return next_call(*args, **kwargs)

    with nullcontext() if kept is None else linen.intercept_methods(call):
        return module.apply(variables, x, method=method, **options)


# --- flax.nnx ---------------------------------------------------------------------------------------------------------


def nnx_owners(module: Any) -> list[Any] | None:
    """The layers that have running statistics, or None."""
    from flax import nnx

    statistics = nnx.state(module, nnx.BatchStat)
    if not statistics:
        return None
    layers = dict(nnx.iter_modules(module))
    return [layers[path[:-1]] for path, _ in nnx.to_flat_state(statistics)]


def prepare_nnx(module: Any, kept: str | None, mask: jax.Array | None) -> None:
    """Changes the BatchNorm layers of a module, which is a copy. mask: as in `linen_call`."""
    from flax import nnx

    if kept is None:
        return
    for _, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.BatchNorm):
            object.__setattr__(layer, "__class__", _prepared(type(layer)))
            object.__setattr__(layer, "call_options", {"mask": mask, "frozen": kept == "frozen"})


@cache
def _prepared(kind: type) -> type:
    """The class of BatchNorm layers with the attribute ``call_options``."""

    class Prepared(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: jax.Array, use_running_average: bool | None = None, **options: Any) -> Any:
            mask = self.call_options["mask"]
            if self.call_options["frozen"]:
                use_running_average = True
            elif mask is not None:
                options["mask"] = rows(mask, x, options.get("mask"))
            return super().__call__(x, use_running_average, **options)

    return Prepared
