"""The drift measures of the library, as values (`measure.Measure`).

Notation: K is the number of clients in the cohort S (with Bernoulli sampling the upper bound), and E the number of
local epochs. w is the global model, theta_i a local model, D_i is theta_i minus the model that was sent to client i,
and w_S is the mean of the local models. F_i is the mean loss over the examples of client i, n_i their number,
p_i = n_i / sum n_j, and f = sum_i p_i F_i. C is the number of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks, tree
from fedjax_drift.local import full_gradient
from fedjax_drift.measures.curvature import curvature, hessian, lanczos
from fedjax_drift.measures.measure import Cohort, Global, Mean, Measure, Measures, Needs, Seen, Values, curvature_key
from fedjax_drift.model import Model
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.engine import Engine, Shared, look_up
from fedjax_drift.round.places import at_places
from fedjax_drift.round.train import client_work, over_clients
from fedjax_drift.spec import Count
from fedjax_drift.types import Params, PyTree, Work

__all__ = ["class_accuracy", "linear_cka", "local_performance", "mean_confidence", "mean_kl"]
__dir__ = __all__.copy


@recorded
def updates() -> Measure:
    """Norm of each client's update and its cosine with their mean, after every local epoch.

    ``update_norm`` [K, E], ||D_i||; ``update_cosine`` [K, E], with the mean of the cohort's updates.
    """
    return Measure(
        "updates",
        epoch=lambda seen: {"update_norm": jnp.sqrt(tree.dot(seen.update, seen.update))},
        update=lambda D, mean: {"update_cosine": cosine(D, mean)},
        needs=Needs(global_model=False),
    )


@recorded
def gradients() -> Measure:
    """Period drift, client drift (FedEve, equations 3 and 4), gradient dissimilarity (FedGVRGM, equation 4).

    ``client_drift`` [K, E], ||grad F_i(theta_i) - grad F_i(w_S)||^2; ``period_drift`` [], ||sum_S n_i grad F_i(w) /
    sum_S n_i - grad f(w)||^2, for this cohort; ``period_drift_uniform`` [], the same with equal weights in the mean
    over S, as printed in the paper; ``dissimilarity`` [], sqrt(sum_i p_i ||grad F_i(w)||^2 / ||grad f(w)||^2);
    ``gradient_variance`` [], sum_i p_i ||grad F_i(w) - grad f(w)||^2; ``gradient_norm`` [], ||grad f(w)||. They
    need the gradients of all N clients.
    """

    def again(work: Work, mean: Mean) -> Callable[[Seen], Values]:
        at_mean = full_gradient(work, mean.theta)

        def after_epoch(seen: Seen) -> Values:
            gap = tree.subtract(full_gradient(work, seen.theta), at_mean)
            return {"client_drift": tree.dot(gap, gap)}  # FedEve (4)

        return after_epoch

    return Measure("gradients", again=again, cohort=of_gradients, needs=Needs(all_clients=True))


@recorded
def predictions() -> Measure:
    """Linear CKA and KL between local and global predictions on the test set, and the confidence of the local
    predictions, after every local epoch.

    ``cka`` [K, E], linear CKA of local and global logits; ``kl`` [K, E], the mean of KL(global || local) in nats;
    ``confidence`` [K, E], the mean of the largest probability that the local model predicts (LfD, figure 3).
    """

    def epoch(seen: Seen) -> Values:
        z, of_global, mask = seen.logits, seen.tested.z, seen.tested.mask
        return {
            "cka": linear_cka(z, of_global, mask),
            "kl": mean_kl(of_global, z, mask),
            "confidence": mean_confidence(z, mask),
        }

    return Measure("predictions", epoch=epoch, needs=Needs(test=2, classifier=True))


@recorded
def forgetting() -> Measure:
    """Accuracy of the local model relative to the global model (LfD, equation 11), for the classes that the client has
    and for those that it does not have; and the accuracy on these classes after every local epoch.

    ``lp_present``, ``lp_absent`` [K], the means of LP over the classes that the client has (present) and does not have
    (absent). LP of a class is the accuracy of the local model on this class divided by that of the global model. It is
    NaN if there is no such class. LP > 1 means that the local model is better, as it often is in early rounds.
    ``accuracy_present``, ``accuracy_absent`` [K, E], the means over these classes of the accuracy of the local model
    (LfD, figure 4).
    """

    def client(seen: Seen, measured: Values) -> Values:
        of_epochs = measured["class_accuracy"]  # [E, C]
        of_global = class_accuracy(seen.tested.z, seen.tested.y, seen.tested.mask)
        present = seen.work.label_counts(len(of_global)) > 0
        values = {}
        for name, classes in (("present", present), ("absent", ~present)):
            counted = classes & ~jnp.isnan(of_global)
            values[f"accuracy_{name}"] = jnp.where(counted, of_epochs, 0).sum(-1) / counted.sum()
            values[f"lp_{name}"] = local_performance(of_epochs[-1], of_global, classes)
        return values

    return Measure(
        "forgetting",
        epoch=lambda seen: {"class_accuracy": class_accuracy(seen.logits, seen.tested.y, seen.tested.mask)},
        client=client,
        needs=Needs(test=1, classifier=True),
    )


@recorded
def labels() -> Measure:
    """Share of each class in the cohort's examples.

    ``label_mix`` [C].
    """

    def cohort(cohort: Cohort) -> Values:
        C = cohort.engine.federation.num_classes or 0  # never None, because it needs a classifier
        counts = cohort.sum(lambda work: work.label_counts(C))
        return {"label_mix": counts / counts.sum()}

    return Measure("labels", cohort=cohort, needs=Needs(classifier=True, global_model=False))


@recorded
def sharpness(largest: Count = 5, steps: Count = 20, probes: Count = 10) -> Measure:
    """Largest eigenvalues, and trace, of the Hessian of the test loss at the global model; in a record, the one after
    the round.

    ``sharpness`` [largest], in descending order, fewer for a model with fewer parameters, and ``hessian_trace`` [].
    They take steps + probes products with the Hessian, each of which takes as long as about eight evaluations.

    Args:
      largest: the number of eigenvalues, >= 1.
      steps: of Lanczos' method, >= 1. There are at most so many eigenvalues.
      probes: the number of random vectors in the estimate of the trace, >= 1.
    """

    def model(model: Global) -> Values:
        assert model.test is not None
        return curvature(model.engine, model.params, model.test, model.key, largest, steps, probes)

    return Measure("sharpness", model=model, needs=Needs(test=1))


@recorded
def local_sharpness(steps: Count = 20) -> Measure:
    """Largest eigenvalue of the Hessian of the test loss at the local model of each client.

    ``local_sharpness`` [K], after the last epoch.

    Args:
      steps: of Lanczos' method, >= 1. Each takes a product with the Hessian.
    """

    def client(seen: Seen, measured: Values) -> Values:
        key = curvature_key(seen.engine, seen.round_key)
        theta, product = hessian(seen.engine, seen.theta, seen.tested.rows, on_all_devices=False)
        return {"local_sharpness": lanczos(product, theta, key, steps)[-1]}

    return Measure("local_sharpness", client=client, needs=Needs(test=1))


@recorded
def low_rank() -> Measure:
    """Aggregation drift of low-rank adapters: how far the products of the new factors are from the mean of the clients'
    products, relative to that mean.

    ``aggregation_drift`` [], ||sum_S p_i s A_i B_i - s A B|| / ||sum_S p_i s A_i B_i||, with the new A and B, for all
    adapted matrices together; ``matrix_drift`` [m], the same for each matrix, in the order of the parameters, of a
    stack one after another. It is 0 if all products are 0. What an algorithm adds to the frozen matrices (FedEx-LoRA)
    counts as a part of the products, on both sides.
    """

    def share(seen: Seen) -> Values:
        return of_adapters(seen.engine.model, seen.theta)

    def combined(mean: Values, new: Global) -> Values:
        after = of_adapters(new.engine.model, new.params)

        def squares(products: Values) -> jax.Array:
            return jnp.concatenate([(m**2).sum((-2, -1)).ravel() for m in products.values()])

        gap, norm = squares(tree.subtract(mean, after)), squares(mean)

        def relative(gap: jax.Array, norm: jax.Array) -> jax.Array:
            return jnp.where(gap == 0, 0, jnp.sqrt(gap / norm))

        return {"aggregation_drift": relative(gap.sum(), norm.sum()), "matrix_drift": relative(gap, norm)}

    return Measure("low_rank", share=share, combined=combined, needs=Needs(adapters=True))


def of_adapters(model: Model, params: Params) -> Values:
    """What the adapters of a model add to its matrices."""
    assert model.products is not None
    return model.products(params)


MEASURES: dict[str, Callable[[], Measure]] = {
    "updates": updates, "gradients": gradients, "predictions": predictions, "forgetting": forgetting,
    "labels": labels, "sharpness": sharpness, "local_sharpness": local_sharpness, "low_rank": low_rank,
}  # fmt: skip
Measured = str | Measure | Sequence[str | Measure]  # the argument ``measure``
CURVED = ("sharpness", "local_sharpness")  # these take as long as hundreds of evaluations
ADAPTED = ("low_rank",)  # these need low-rank adapters
QUICK = tuple(name for name in MEASURES if name not in (*CURVED, *ADAPTED))


def chosen(measure: Any, engine: Engine, streamed: bool) -> Measures:
    """The measures of the argument ``measure``: names, measures, True for all names that fit the model, or False.

    Raises ConfigurationError if a name is unknown, or if a measure cannot be computed with the data or the model.
    """
    several = [measure] if isinstance(measure, Measure | bool) else checks.items(measure) or [measure]
    named = [one for one in several if not isinstance(one, Measure)]
    if len(named) == 1 and isinstance(named[0], bool | np.bool) and named[0]:
        named = [name for name in MEASURES if name not in ADAPTED or engine.model.products is not None]
    names = checks.choices("measure", named[0] if len(named) == 1 else named, MEASURES)
    values = [*(MEASURES[name]() for name in dict.fromkeys(names)), *(m for m in several if isinstance(m, Measure))]
    for value in values:
        value.check(engine, streamed)
    names_of = [value.name for value in values]
    if twice := [name for name in names_of if names_of.count(name) > 1]:
        checks.refuse("measures must have different names", f"{twice[0]!r} twice", "give one of them another name")
    return Measures(values)


def cosine(D: Params, mean_update: Params) -> jax.Array:
    """The cosine of an update with the mean update, a scalar. It is 0 if one of them is 0."""
    scale = jnp.sqrt(tree.dot(D, D)) * jnp.sqrt(tree.dot(mean_update, mean_update))
    return jnp.where(scale == 0, 0, tree.dot(D, mean_update) / scale)


def of_gradients(cohort: Cohort) -> Values:
    """The measures of the gradients at the global model w, over all examples of all clients (`gradients`).

    ``period_drift`` has the weights of grad f, so it is 0 if all clients take part. ``period_drift_uniform`` is then 0
    only for clients of equal sizes. ``dissimilarity`` is at least 1, and 1 if all gradients are equal. (The paper's
    mean has weights 1 / N; they are equal for clients of equal sizes.)
    """
    engine, assigned, shared = cohort.engine, cohort.assigned, cohort.assigned.shared
    N = engine.num_clients
    n = round(engine.federation.mean_size * N)  # the number of examples, without the padding on the devices
    chosen = jnp.zeros(N + 1, bool).at[assigned.cohort.id].set(True).at[N].set(False)
    clients = look_up(engine, shared.rows, jnp.arange(N, dtype=jnp.int32))
    selected = assigned.selected._replace(factor=None, version=None, discount=None)
    clients = jax.tree.map(lambda a, new: a.at[assigned.drawn].set(new, mode="drop"), clients, selected)
    _, _, placed = at_places(engine, clients, clients.steps)

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        chosen, n_S, S = shared.extra
        work = client_work(engine, shared, client, longest)
        g = full_gradient(work, shared.server.params)
        n_i = work.size.astype(work.lr.dtype)
        p, here = n_i / n, chosen[client.id]
        # n_i / n_S - p_i and 1 / |S| - p_i, each with a common denominator. If all clients take part, the first is
        # exactly 0, and the second is if they have equal sizes.
        weighted = n_i * (jnp.where(here, n, 0) - n_S) / (n_S * n)
        uniform = (jnp.where(here, n, 0) - n_i * S) / (S * n)
        sums = tuple(jax.tree.map(lambda g, c=c: c * g, g) for c in (p, weighted, uniform))
        return (sums, p * tree.dot(g, g)), (), ()

    sizes = jnp.where(chosen[clients.id], clients.size, 0)
    extra = (chosen, *(total.sum().astype(shared.lr.dtype) for total in (sizes, chosen)))
    (sums, square), _, _ = over_clients(engine, one, shared._replace(extra=extra), placed, ())
    grad_f, weighted, uniform = sums
    norm2 = tree.dot(grad_f, grad_f)
    equal = square <= norm2  # rounding may make the sum smaller; this also covers 0 / 0
    return {
        "period_drift": tree.dot(weighted, weighted),
        "period_drift_uniform": tree.dot(uniform, uniform),
        "dissimilarity": jnp.where(equal, 1, jnp.sqrt(square / norm2)),
        "gradient_variance": jnp.maximum(square - norm2, 0),
        "gradient_norm": jnp.sqrt(norm2),
    }


def linear_cka(X: jax.Array, Y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Linear centred kernel alignment (CKA) of X [M, p] and Y [M, q], a scalar in [0, 1].

    CKA = ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F), where the columns of X and Y are centred (Kornblith et al. 2019, arXiv
    1905.00414, equation 3 and section 3). It is 1 if X and Y are equal up to a rotation and a scale, and 0 if one of
    them is constant.

    mask: bool [M], False for examples that are ignored. Default: all examples are used.
    """

    def centred(Z: jax.Array) -> jax.Array:
        Z = Z - jnp.mean(Z, 0, keepdims=True, where=None if mask is None else mask[:, None])
        return Z if mask is None else jnp.where(mask[:, None], Z, 0)

    X, Y = centred(X), centred(Y)
    # "highest" is full float32. By default, an accelerator may round the factors to 10 bits.
    xy, xx, yy = ((jnp.matmul(A.T, B, precision="highest") ** 2).sum() for A, B in ((Y, X), (X, X), (Y, Y)))
    scale = jnp.sqrt(xx) * jnp.sqrt(yy)
    return jnp.where(scale == 0, 0, xy / scale)


def mean_kl(p_logits: jax.Array, q_logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The mean of KL(p || q) over M examples, in nats, a scalar.

    In LfD's study, p are the predictions of the global model, and q are the predictions of the local model.

    Args:
      p_logits, q_logits: float [M, C].
      mask: bool [M], False for examples that are ignored. Default: all examples are used.
    """
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.mean((jnp.exp(log_p) * (log_p - log_q)).sum(-1), where=mask)


def mean_confidence(logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The mean of the largest predicted probability over M examples, a scalar in [1 / C, 1].

    LfD's figure 3 compares the confidence of local models. The probabilities are softmax(logits). The logits of a model
    with ``cosine=True`` are cosines, which are not divided by LfD's temperature. So its confidence is low.

    Args:
      logits: float [M, C].
      mask: bool [M], False for examples that are ignored. Default: all examples are used.
    """
    return jnp.mean(jax.nn.softmax(logits).max(-1), where=mask)


def class_accuracy(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """The accuracy of each class, float [C]. It is NaN for a class without examples.

    A prediction with a NaN logit counts as wrong.

    Args:
      logits: float [M, C].
      y: int [M], labels.
      mask: bool [M], False for examples that are ignored.
    """
    of_class = jax.nn.one_hot(y, logits.shape[-1]) * mask[:, None]
    right = (logits.argmax(-1) == y) & ~jnp.isnan(logits).any(-1)
    return (of_class * right[:, None]).sum(0) / of_class.sum(0)


def local_performance(local: jax.Array, whole: jax.Array, classes: jax.Array) -> jax.Array:
    """LP (LfD, equation 11): the mean of Acc_c(theta_i) / Acc_c(w) over classes c with Acc_c(w) > 0, a scalar.

    1 means that local training forgot nothing, and 0 that it forgot everything. LP is NaN if no class has
    Acc_c(w) > 0.

    Args:
      local: float [C], the accuracy Acc_c(theta_i) of the local model for each class.
      whole: float [C], the accuracy Acc_c(w) of the global model for each class.
      classes: bool [C], the classes to average over.
    """
    counted = classes & (whole > 0)
    return jnp.where(counted, local / jnp.where(counted, whole, 1), 0).sum() / counted.sum()
