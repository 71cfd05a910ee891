"""Evaluation of a model on the test set. The batches of the test set are sharded over the devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fedjax_drift.devices.mesh import AXIS
from fedjax_drift.round.engine import Engine, TestRows, on_each_device, replicated
from fedjax_drift.types import Params, PyTree


def evaluate_rows(engine: Engine, params: Params, test: TestRows) -> tuple[dict[str, jax.Array], PyTree]:
    """Returns the scores of every test example, [T, B] each (see `score_rows`), and the logits [T, B, ...].

    The logits are () unless a metric of the whole test set needs them.
    """

    def batch(params: Params, xy: tuple[jax.Array, jax.Array]) -> tuple[dict[str, jax.Array], PyTree]:
        x, y = xy
        logits = engine.model.apply(params, engine.decode(x))
        return score_rows(engine, logits, y), logits if engine.set_scores else ()

    def one_device(params: Params, xy: tuple[jax.Array, jax.Array]) -> tuple[dict[str, jax.Array], PyTree]:
        return lax.map(partial(batch, params), xy)

    return on_each_device(engine, one_device, (P(), P(AXIS)), P(AXIS))(params, (test.x, test.y))


def score_rows(engine: Engine, logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Scores of each example, [B]: "loss", "accuracy" for classifiers, and the metrics of `Model.scores` per example.

    The accuracy of an example is 0 or 1. If an example has many labels, it is the share of correct labels. A prediction
    with a NaN logit counts as wrong. If `Model.scores` returns "accuracy", that value is used instead.
    """
    model = engine.model
    rows = {"loss": model.loss(logits, y)}
    classifies = jnp.issubdtype(y.dtype, jnp.integer) and logits.ndim == y.ndim + 1 and logits.shape[-1] > 1
    if classifies and "accuracy" not in engine.set_scores:
        finite = ~jnp.isnan(logits).any(-1)  # the argmax of NaNs would be class 0
        correct = (finite & (logits.argmax(-1) == y)).astype(rows["loss"].dtype)
        rows["accuracy"] = correct.mean(axis=tuple(range(1, correct.ndim)))
    if model.scores is not None and engine.row_scores:
        scores = model.scores(logits, y)
        rows |= {name: jnp.asarray(scores[name], rows["loss"].dtype) for name in engine.row_scores}
    return rows


def evaluate(engine: Engine, params: Params, test: TestRows) -> dict[str, jax.Array]:
    """Returns scalars: the mean of each score over the test examples, and the metrics of the whole test set."""
    rows, logits = evaluate_rows(engine, params, test)
    means = {}
    for name, values in rows.items():
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        means[name] = jnp.where(test.mask, values, 0).sum() / test.mask.sum()
    if engine.model.scores is None or not engine.set_scores:
        return means
    whole = replicated(engine, (logits, test.y))
    scores = engine.model.scores(*(a.reshape(-1, *a.shape[2:])[: engine.test_size] for a in whole))
    return means | {name: scores[name] for name in engine.set_scores}


OTHER_MODELS = ("client_mean", "last_two_mean")  # models that some algorithms keep on the server besides w


def server_scores(evaluate_params: Callable[[Params], dict[str, jax.Array]], server: Any) -> dict[str, jax.Array]:
    """The scores of the global model, and those of the other models that the server keeps, with their name as prefix.

    These are the mean of the cohort's models (FedDyn, FedDC) and the mean of the last two global models (FedExP).
    """
    scores = evaluate_params(server.params)
    for name in OTHER_MODELS:
        if (params := getattr(server, name, None)) is not None:
            scores |= {f"{name}_{score}": value for score, value in evaluate_params(params).items()}
    return scores
