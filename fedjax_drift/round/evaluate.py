"""Evaluation of a model on the test set. The batches of the test set are sharded over the devices.

If the data are shifted (`FederatedData.shifted`), the test set belongs to a round, `TestRows.t`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, tree
from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round.arrays import TestRows
from fedjax_drift.round.engine import Engine, on_each_device, replicated
from fedjax_drift.round.sources import examples, functions_of
from fedjax_drift.shift.rule import TESTING
from fedjax_drift.types import Algorithm, Params, PyTree


def evaluate_rows(engine: Engine, params: Params, test: TestRows) -> tuple[dict[str, jax.Array], PyTree]:
    """Returns the scores of every test example, [T, B] each (see `score_rows`), and the logits [T, B, ...].

    The logits are () unless a metric of the whole test set needs them.
    """

    def batch(params: Params, t: Any, rows: TestRows) -> tuple[dict[str, jax.Array], PyTree]:
        x, y = inputs(engine, rows, t)
        logits = engine.model.with_mask(rows.mask).apply(params, x)
        return score_rows(engine, logits, y, rows.mask), logits if engine.federation.set_scores else ()

    def one_device(params: Params, t: Any, rows: TestRows) -> tuple[dict[str, jax.Array], PyTree]:
        # one batch at a time: the activations of the whole test set would not fit in memory
        return lax.map(partial(batch, params, t), rows)

    whole, part = P(), P(AXIS)
    return on_each_device(engine, one_device, (whole, whole, part), part)(params, test.t, test._replace(t=None))


def shifted(engine: Engine) -> bool:
    """Whether a source of drift changes the examples, so that the test set belongs to a round."""
    return bool(functions_of(engine.sources, "example"))


def at_round(engine: Engine, test: TestRows, t: Any) -> TestRows:
    """The test set that is evaluated in round t: that of round t, or with ``test="first"`` that of round 0."""
    if not shifted(engine):
        return test
    return test._replace(t=jnp.zeros((), jnp.int32) if engine.federation.test == "first" else t)


def after(engine: Engine, test: TestRows, rounds: Any) -> TestRows:
    """The test set after this number of rounds: that of the last one."""
    return at_round(engine, test, jnp.maximum(rounds - 1, 0)) if shifted(engine) else test


def inputs(engine: Engine, rows: TestRows, t: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The inputs of the model [B, ...] and the labels [B, ...] of one batch of the test set, in round t."""
    x = engine.federation.decode(rows.x)
    if not shifted(engine):
        return x, rows.y
    assert t is not None and rows.owner is not None and rows.number is not None
    return examples(engine.sources, t, engine.owner(rows.owner), rows.number, x, rows.y, TESTING)


def score_rows(engine: Engine, logits: jax.Array, y: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Scores of each example, [B]: "loss", "accuracy" for classifiers, and the metrics of `Model.scores` per example.

    The accuracy of an example is 0 or 1. If an example has many labels, it is the share of correct labels. A prediction
    with a NaN logit counts as wrong. If `Model.scores` returns "accuracy", that value is used instead.
    """
    model = engine.model.with_mask(mask)
    rows = {"loss": model.loss(logits, y)}
    classifies = jnp.issubdtype(y.dtype, jnp.integer) and logits.ndim == y.ndim + 1 and logits.shape[-1] > 1
    if classifies and "accuracy" not in engine.federation.set_scores:
        finite = ~jnp.isnan(logits).any(-1)  # the argmax of NaNs would be class 0
        correct = (finite & (logits.argmax(-1) == y)).astype(rows["loss"].dtype)
        rows["accuracy"] = correct.mean(axis=tuple(range(1, correct.ndim)))
    if model.scores is not None and engine.federation.row_scores:
        scores = model.scores(logits, y)
        rows |= {name: jnp.asarray(scores[name], rows["loss"].dtype) for name in engine.federation.row_scores}
    return rows


def evaluate(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """Returns scalars: the mean of each score over the test examples, and the metrics of the whole test set.

    With ``test="both"`` of shifted data, the scores of the test set of round 0 have the prefix ``first_``.
    """
    scores = mean_scores(engine, params, test)
    if engine.federation.test == "both":
        first = mean_scores(engine, params, test._replace(t=jnp.zeros((), jnp.int32)))
        scores |= {f"first_{name}": value for name, value in first.items()}
    return scores


def mean_scores(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """The scores of the test set of one round, see `evaluate`."""
    rows, logits = evaluate_rows(engine, params, test)
    means = {}
    for name, values in rows.items():
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        means[name] = jnp.where(test.mask, values, 0).sum() / test.mask.sum()
    if engine.model.scores is None or not engine.federation.set_scores:
        return means
    whole = replicated(engine, (logits, labels(engine, test)))
    scores = engine.model.scores(*(a.reshape(-1, *a.shape[2:])[: engine.federation.test_size] for a in whole))
    return means | {name: scores[name] for name in engine.federation.set_scores}


def labels(engine: Engine, test: TestRows) -> jax.Array:
    """The labels of the test set, [T, B, ...]. The compiler removes the inputs."""
    if not shifted(engine):
        return test.y
    return lax.map(lambda rows: inputs(engine, rows, test.t)[1], test._replace(t=None))


def other_models(algorithm: Algorithm, server: Any) -> dict[str, Params]:
    """The models of the server besides w, by name. Raises ConfigurationError unless they are shaped like w."""
    models = {} if algorithm.models is None else algorithm.models(server)
    if not isinstance(models, Mapping):
        what = f'{algorithm.name}: models must return a dict of models such as {{"average": params}}'
        checks.refuse(what, checks.shown(models))
    for name, params in models.items():
        what = f"{algorithm.name}: the model {name!r} must have the structure and the shapes of the parameters"
        tree.check_layout(params, server.params, what, dtypes=False)
    return dict(models)
