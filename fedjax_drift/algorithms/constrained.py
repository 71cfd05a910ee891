"""FedAvg with a constraint on one part of the model. Kim, Shin, "Learning From Drift", 2023, arXiv 2309.07189,
section 3. The section studies which part of a local model should stay close to the global model.

Client i:  minimises F_i(theta) + (mu/2) dist(theta, w):
           dist = mean over the batch of ||z(theta) - z(w)||^2                             kind "feature"     (a)
           dist = sum of (theta - w)^2 over the parameters of the part                     kind "parameter"   (b)
Server:    as FedAvg.

In (a), z is the output of the part. The parts of a model are:
- the extractor, that is, the encoder;
- the header, that is, the projection head, whose output is the features;
- the classifier, which maps the features to the logits;
- all three. In this case the distances of the three parts are added, so (b) is FedProx.

Deviations:  the paper gives neither mu nor the norm. Both are our choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedavg import fedavg, trained_from
from fedjax_drift.model import Model
from fedjax_drift.spec import NonNegative
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Work, algorithm, batch_mean

PARTS = ("extractor", "header", "classifier")


@algorithm
def constrained(
    mu: NonNegative,
    kind: Literal["parameter", "feature"] = "parameter",
    part: Literal["extractor", "header", "classifier", "all"] = "all",
) -> Algorithm:
    """FedAvg with a penalty on the distance between one part of the local model and the same part of the global model.

    Args:
      mu: strength of the penalty, >= 0. The paper gives no value; we use a grid from 0.001 to 1.
      kind: "parameter" (default) penalises the distance of the weights. "feature" penalises the distance of the outputs
        of the part on the client's batches.
      part: "extractor", "header", "classifier", or "all" (default). "all" with kind "parameter" works with every model.
        "classifier", and "header" with kind "feature", need ``Model.features``. All other combinations need
        ``Model.features`` and ``Model.extractor``. `fd.models.simple_cnn` has both.

    Raises:
      ValueError: the model does not have the part.
    """

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        w = server.params

        def distance(theta: Params, batch: Batch) -> jax.Array:
            model, x = work.model.with_mask(batch.mask), batch.x
            if kind == "parameter":  # (b)
                in_part = jax.tree.map(lambda _: True, w) if part == "all" else parameters(model, w, x)[part]
                gap = jax.tree.map(lambda theta, w, use: theta - w if use else jnp.zeros_like(w), theta, w, in_part)
                return tree.dot(gap, gap)
            gaps = [output(theta, x) - output(w, x) for output in outputs(model, part)]
            return batch_mean(
                jnp.stack([(gap.reshape(len(gap), -1) ** 2).sum(1) for gap in gaps]).sum(0), batch.mask
            )  # (a)

        def loss(theta: Params, batch: Batch, key: jax.Array) -> jax.Array:
            return work.loss(theta, batch, key) + mu / 2 * distance(theta, batch)

        return trained_from(w, work, "examples", client, loss=loss)

    whole, alone = (kind, part) == ("parameter", "all"), part == "classifier" or (kind, part) == ("feature", "header")
    needed = Needs(features=not whole, extractor=not whole and not alone)
    return fedavg()._replace(client_update=client_update, requires=needed, name="constrained")


def outputs(model: Model, part: str) -> list[Callable[[Params, jax.Array], jax.Array]]:
    """The functions ``(params, x) -> output`` of the part: three functions for "all", otherwise one."""
    of_part = dict(zip(PARTS, (model.extractor, model.features, model.apply), strict=True))
    return [output for name in (PARTS if part == "all" else (part,)) if (output := of_part[name]) is not None]


def parameters(model: Model, params: Params, x: jax.Array) -> dict[str, PyTree]:
    """For each part, a tree like params that is True for the parameters of the part.

    A parameter belongs to the first part whose output depends on it.
    """
    from jax.interpreters.partial_eval import dce_jaxpr  # not in JAX's public interface; used here only

    leaves, structure = jax.tree.flatten(params)
    known = [False] * len(leaves)
    parts: dict[str, PyTree] = {}
    for name, output in zip(PARTS, (model.extractor, model.features, model.apply), strict=True):
        if output is None:
            continue
        jaxpr = jax.make_jaxpr(output)(params, x).jaxpr
        _, read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # which inputs the output depends on
        used = read[: len(leaves)]
        parts[name] = jax.tree.unflatten(structure, [new and not old for new, old in zip(used, known, strict=True)])
        known = [new or old for new, old in zip(used, known, strict=True)]
        if not any(jax.tree.leaves(parts[name])):
            checks.refuse(f"the model's {name} must have parameters of its own", "none", "choose another part")
    return parts
