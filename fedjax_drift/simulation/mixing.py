"""Checks that the outputs of a model for an example do not depend on the padding of its batch.

Most models are seen to compute each example on its own from their operations (`rowwise`). This costs a trace. The
others are computed twice for a few examples, with other examples beside them. If the model takes the mask of its batch,
those are padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, recipes
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.launch import traced
from fedjax_drift.masks import takes_mask
from fedjax_drift.model import FUNCTIONS, Model
from fedjax_drift.simulation.rowwise import BATCH, is_rowwise
from fedjax_drift.tree import PyTree

B, EXAMPLES = 7, 3  # the size of a batch, and how many of its rows are examples; the others are neighbours or padding
KEYS = 2  # one key might pair the three examples with each other in a random permutation of the batch
KEPT = 256  # models
Forward = Callable[[PyTree, Any, Any, Any], Any]  # (params, x [B, ...], key, mask [B]) -> [B, ...]


def check_mixing(model: Model, params: PyTree, data: FederatedData, decode: Callable) -> None:
    """Raises ConfigurationError if an output of the model for an example depends on padding.

    params: the shapes of the parameters. decode: as in `fit.check_model`.
    """
    x = jax.eval_shape(lambda: decode(jnp.zeros((B, *data.x.shape[1:]), jax.dtypes.canonicalize_dtype(data.x.dtype))))
    leaves, structure = jax.tree.flatten(params)
    form, _ = recipes.split(model)
    unclear: Callable = _unclear.__wrapped__ if form.private else _unclear
    outputs: Callable = _outputs.__wrapped__ if form.private else _outputs
    names = unclear(form, structure, tuple(leaves), x)
    if not names:
        return
    values = jax.tree.map(_some, (params, [frozen.shapes for frozen in model.frozen]))
    rows = np.linspace(0, len(data.x) - 1, B).astype(int)
    others = np.where(np.arange(B) < EXAMPLES, rows, (rows + len(data.x) // 2) % len(data.x))
    batches = [decode(jnp.asarray(data.x[chosen])) for chosen in (rows, others)]
    if jnp.issubdtype(x.dtype, jnp.floating):  # larger values also show in a maximum over the batch
        batches[1] = jnp.where(np.arange(B).reshape(-1, *[1] * (len(x.shape) - 1)) < EXAMPLES, 1, -3) * batches[1]
    for key in range(KEYS):
        before, after = (outputs(form, names)(*values, x, jax.random.key(key)) for x in batches)
        if traced((before, after)):  # inside jax.jit
            return
        for name in names:
            _check_same(model, name, before[name], after[name])


def _check_same(model: Model, name: str, before: jax.Array, after: jax.Array) -> None:
    """Compares the outputs of the examples, [EXAMPLES, ...]."""
    a, b = (np.asarray(each[:EXAMPLES], float) for each in (before, after))
    scale = np.abs(a).max(initial=0, where=np.isfinite(a))
    change = np.abs(np.where(np.isnan(a) & np.isnan(b), 0, a - b)).max(initial=0)
    if change <= float(jnp.finfo(jnp.result_type(before.dtype, float)).eps) ** 0.5 * scale:
        return
    field = name.split()[0]
    masked = takes_mask(getattr(model, field))
    others = "padding" if masked else "other examples"
    fix = "leave out the examples where mask is False, as jnp.mean(x, 0, where=mask[:, None]) does"
    if not masked:
        fix = (
            "short batches are padded, and the padding would take part; compute each example on its own, use the "
            f"BatchNorm of flax with statistics=, or give {field} a last argument mask, bool [B], and {fix} "
            "(docs/models.md)"
        )
    what = f"Model.{name} of an example must not depend on the {others} of its batch"
    checks.refuse(what, f"a relative change of {change / scale if scale else change:.2g} with another batch", fix)


def _some(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Values for a parameter, without an initialisation. Vectors, such as variances, are positive."""
    block = np.random.default_rng(0).normal(size=min(math.prod(leaf.shape), 4099))
    values = np.resize(block, leaf.shape)
    values = values / math.sqrt(leaf.shape[-2]) if len(leaf.shape) > 1 else 0.5 + np.abs(values)
    return values.astype(leaf.dtype)


def _forwards(model: Model) -> dict[str, Forward]:
    """The functions of the model, by their names in messages."""

    def function(name: str) -> Forward:
        def forward(params: PyTree, x: Any, key: Any, mask: Any) -> Any:
            network: Any = model.with_mask(mask)
            if name == "head":
                return network.head(params, network.features(params, x))
            return getattr(network, name)(params, x, *([key] if name == "train_apply" else []))

        return forward

    def training(method: str) -> Forward:
        def forward(params: PyTree, x: Any, key: Any, mask: Any) -> Any:
            assert model.statistics is not None
            return model.statistics.forward(params["params"], params["batch_stats"], x, key, mask, method)[0]

        return forward

    names = [name for name in FUNCTIONS if getattr(model, name) and (name != "head" or model.features)]
    forwards = {name: function(name) for name in names}
    if model.statistics is not None:
        methods = [name for name in ("apply", "features") if getattr(model, name)]
        forwards |= {f"{method} in training mode": training(method) for method in methods}
    return forwards


@lru_cache(KEPT)
def _unclear(form: recipes.Form, structure: Any, leaves: tuple, x: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """The names of the functions that are not seen to compute each example on its own."""
    params, x = jax.tree.unflatten(structure, leaves), jax.ShapeDtypeStruct((BATCH, *x.shape[1:]), x.dtype)
    key, mask = jax.eval_shape(lambda: (jax.random.key(0), jnp.ones(BATCH, bool)))

    def is_unclear(forward: Forward) -> bool:
        try:
            program = jax.make_jaxpr(forward)(params, x, key, mask)
        except Exception:  # a function that no algorithm calls may be wrong; a call of it raises the error again
            return False
        return not is_rowwise(program.jaxpr)

    return tuple(name for name, forward in _forwards(form.value).items() if is_unclear(forward))


@lru_cache(KEPT)
def _outputs(form: recipes.Form, names: tuple[str, ...]) -> Callable:
    """The jitted function (params, frozen, x, key) -> outputs, by name, of a batch in which EXAMPLES are examples."""

    @jax.jit
    def outputs(params: PyTree, frozen: PyTree, x: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        forwards = _forwards(recipes.bind(form.value, frozen))
        return {name: forwards[name](params, x, key, jnp.arange(B) < EXAMPLES) for name in names}

    return outputs
