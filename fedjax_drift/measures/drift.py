"""Drift measures, and their computation in a round.

Most measures of a client are computed while it trains. Its cosine with the mean update is only known after all clients
have trained. So the updates are kept until then, if they fit in `KEPT_BYTES`. If they don't fit, and for the client
drift of FedEve, the clients train a second time, with the same keys and therefore the same local models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.devices.mesh import num_teams
from fedjax_drift.local import full_gradient
from fedjax_drift.measures.curvature import curvature, largest_eigenvalue
from fedjax_drift.round.cohort import CURVATURE, Assignment, look_up
from fedjax_drift.round.engine import Arrays, Client, Engine, Shared, TestRows, partitionable, round_keys
from fedjax_drift.round.evaluate import after, at_round, inputs, labels
from fedjax_drift.round.flight import as_started
from fedjax_drift.round.info import with_metrics
from fedjax_drift.round.observer import Observer, unobserved
from fedjax_drift.round.places import at_places, in_cohort_order
from fedjax_drift.round.round import observed_round, round_fn
from fedjax_drift.round.train import check_finite, client_work, over_clients, update
from fedjax_drift.types import ClientResult, Params, PyTree, ServerState, Work

__all__ = ["class_accuracy", "linear_cka", "local_performance", "mean_confidence", "mean_kl"]


def __dir__() -> list[str]:
    return __all__


MEASURES = {
    "updates": "norm of each client's update and its cosine with their mean, after every local epoch",
    "gradients": "period drift, client drift (FedEve, equations 3 and 4), gradient dissimilarity "
    "(FedGVRGM, equation 4)",
    "predictions": "linear CKA and KL between local and global predictions on the test set, and the confidence of the "
    "local predictions, after every local epoch",
    "forgetting": "accuracy of the local model relative to the global model (LfD, equation 11), for the classes that "
    "the client has and for those that it does not have; and the accuracy on these classes after every local epoch",
    "labels": "share of each class in the cohort's examples",
    "sharpness": "largest eigenvalues, and trace, of the Hessian of the test loss at the global model; in a "
    "record, the one after the round",
    "local_sharpness": "largest eigenvalue of the Hessian of the test loss at the local model of each client",
}
KEPT_BYTES = 2**30  # the most memory on each device for the updates of the clients of a measured round
CLASSIFIED = ("predictions", "forgetting")  # these compare predictions on the test set
CURVED = ("sharpness", "local_sharpness")  # these take as long as hundreds of evaluations
QUICK = tuple(name for name in MEASURES if name not in CURVED)


def check_measures(names: str | Iterable[str], engine: Engine, has_test: bool, streamed: bool) -> tuple[str, ...]:
    """Returns the names of the measures as a tuple.

    Raises ConfigurationError if a name is unknown, or if a measure cannot be computed with the data or the model.

    has_test: whether there is a test set. streamed: whether the training examples are kept on the host.
    """
    names = checks.choices("measure", names, MEASURES)
    for name in names:
        local = engine.model.statistics is not None and engine.model.statistics.kept == "local"
        if local and name not in ("updates", "labels"):
            got = 'a model with statistics="local", whose running statistics only the clients have'
            checks.refuse(f"measure={name!r} evaluates the global model", got, 'use "updates", or statistics="average"')
        if name in (*CLASSIFIED, *CURVED) and not has_test:
            checks.refuse(f"measure={name!r} needs a test set", "none", "pass test=(x, y) with the data")
        if name == "predictions" and engine.test_size < 2:
            checks.refuse('measure="predictions" needs at least 2 test examples', "1", "use a larger test set")
        if name in (*CLASSIFIED, "labels") and engine.num_classes is None:
            what = f"measure={name!r} needs a classifier with the default loss and one integer label per example"
            fix = 'use "updates" or "gradients", which work with every model'
            checks.refuse(what, "a different model or different labels", fix)
    if streamed and "gradients" in names:
        what = 'measure="gradients" needs the examples of all clients on the devices'
        checks.refuse(what, "a streamed data set", "pass stream=False")
    return names


def nan_allowed(names: Sequence[str]) -> AbstractContextManager:
    """Switches `jax_debug_nans` off for a program with measures, because those of absent clients are NaN."""
    return jax.debug_nans(False) if names else nullcontext()


def trained(engine: Engine, params: Params) -> Params:
    """The leaves of the model that are trained: all but its running statistics."""
    return params if engine.model.statistics is None else params["params"]


def measure(
    engine: Engine, names: Sequence[str], state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> dict[str, jax.Array]:
    """Measures the drift of the round that `round_fn` would run from this state with this cohort.

    See `Simulation.measure`.
    """
    measured = observed_round(engine, state, arrays, cohort, observer(engine, names, cohort))[2]
    return measured | of_model(engine, names, state, arrays, state.round)


def measured_round(
    engine: Engine, names: Sequence[str], state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> tuple[ServerState, dict]:
    """`round_fn`, whose ``info`` also has the measures ``names``. Those of the global model are those of the new one,
    which is evaluated after the round."""
    new, info = round_fn(engine, state, arrays, cohort, observer(engine, names, cohort))
    return new, with_metrics(engine, info, of_model(engine, names, new, arrays, state.round))


@partitionable
def of_model(
    engine: Engine, names: Sequence[str], state: ServerState, arrays: Arrays, t: jax.Array
) -> dict[str, jax.Array]:
    """The measures of the global model of a state, with the test set that `evaluate` uses. They are none of a round.

    t: the round with whose key the random vectors are drawn.
    """
    if "sharpness" not in names:
        return {}
    assert arrays.test is not None
    key = curvature_key(engine, round_keys(state.key, t)[1])
    return curvature(engine, state.params, after(engine, arrays.test, state.round), key)


def observer(engine: Engine, names: Sequence[str], cohort: jax.Array | Client | None) -> Observer:
    """Computes the measures of a round while its clients train. cohort: as for `round_fn`."""
    if not names:
        return unobserved(engine)
    K = engine.most_clients
    if cohort is not None and not engine.over_selects:
        K = len(cohort.id if isinstance(cohort, Client) else cohort)
    places = -(-K // (num_teams(engine.mesh) * engine.lanes)) * engine.lanes  # on each device
    return Observer(
        before=partial(shared_values, engine, names),
        update=partial(update_and_measure, engine, names, places),
        after=partial(measures, engine, names),
    )


class Tested(NamedTuple):
    """What the measures of a round need of the test set."""

    rows: TestRows  # of this round
    y: PyTree = ()  # [T * B], the labels, if a measure compares predictions
    z: PyTree = ()  # [T * B, C], the logits of the global model, if a measure compares predictions


def shared_values(engine: Engine, names: Sequence[str], assigned: Assignment, arrays: Arrays) -> PyTree:
    """The test examples and their global predictions, if a measure needs them."""
    if not {*CLASSIFIED, "local_sharpness"} & {*names}:
        return ()
    assert arrays.test is not None
    test = at_round(engine, arrays.test, assigned.shared.t)
    if not {*CLASSIFIED} & {*names}:
        return Tested(test)
    return Tested(test, labels(engine, test).reshape(-1), predictions(engine, assigned.shared.server.params, test))


def update_and_measure(
    engine: Engine, names: Sequence[str], places: int, shared: Shared, client: Client, old: PyTree, work: Work
) -> tuple[ClientResult, PyTree, PyTree]:
    """Trains one client. Returns its result, its terms of the sums over the cohort, and its measures.

    places: the number of clients that its device trains in this round, with empty places.
    """

    def after_epoch(start: Params, theta: Params) -> dict[str, Any]:
        measured: dict[str, Any] = {}
        if "updates" in names:
            D = trained(engine, tree.subtract(theta, start))
            measured["update_norm"] = jnp.sqrt(tree.dot(D, D))
            if places * engine.local.parts * tree.nbytes(D) <= KEPT_BYTES:
                measured["update"] = D
        if {*CLASSIFIED} & {*names}:
            z, mask = predictions(engine, theta, tested.rows), tested.rows.mask.reshape(-1)
        if "predictions" in names:
            measured["cka"] = linear_cka(z, tested.z, mask)
            measured["kl"] = mean_kl(tested.z, z, mask)
            measured["confidence"] = mean_confidence(z, mask)
        if "forgetting" in names:
            measured["class_accuracy"] = class_accuracy(z, tested.y, mask)
        return measured

    tested = shared.extra  # () if no measure needs the test set
    if not {*names} - {"labels", "sharpness"}:
        return update(engine, shared, client, old, work), (), {}
    result = update(engine, shared, client, old, work._replace(watch=after_epoch))
    training = result.trained(engine.algorithm.name)
    aggregated, bad_leaf = check_finite(engine, client, result)
    measured = {**training.measured, "valid": (client.id < engine.num_clients) & (bad_leaf < 0)}
    if "local_sharpness" in names:
        key = curvature_key(engine, shared.key)
        measured["local_sharpness"] = largest_eigenvalue(engine, training.theta, tested.rows, key)
    if "forgetting" in names:
        of_epochs = measured.pop("class_accuracy")  # [E, C]
        of_global = class_accuracy(tested.z, tested.y, tested.rows.mask.reshape(-1))
        present = label_counts(engine, work) > 0
        for name, classes in (("present", present), ("absent", ~present)):
            tested = classes & ~jnp.isnan(of_global)
            measured[f"accuracy_{name}"] = jnp.where(tested, of_epochs, 0).sum(-1) / tested.sum()
            measured[f"lp_{name}"] = local_performance(of_epochs[-1], of_global, classes)
    if not with_means(names):
        return result, (), measured
    weight = jnp.where(aggregated, result.weight, 0)
    models = training.theta, trained(engine, tree.subtract(training.theta, training.start))
    return result, (jax.tree.map(lambda a: jnp.where(weight > 0, weight * a, 0), models), weight), measured


def curvature_key(engine: Engine, key: jax.Array) -> jax.Array:
    """The key for the random vectors of a round. It is the same for all models, so that they differ in nothing else.

    key: the clients' key of the round.
    """
    return jax.random.fold_in(key, engine.num_clients + CURVATURE)


def with_means(names: Sequence[str]) -> set[str]:
    """Those of the measures that compare a client with a mean over the cohort."""
    return {"updates", "gradients"} & {*names}


def cosine(D: Params, mean_update: Params) -> jax.Array:
    """The cosine of an update with the mean update, a scalar. It is 0 if one of them is 0."""
    scale = jnp.sqrt(tree.dot(D, D)) * jnp.sqrt(tree.dot(mean_update, mean_update))
    return jnp.where(scale == 0, 0, tree.dot(D, mean_update) / scale)


def measures(
    engine: Engine, names: Sequence[str], assigned: Assignment, states: PyTree, sums: PyTree, of_clients: dict[str, Any]
) -> dict[str, jax.Array]:
    """The measures of a round, after its clients have trained.

    assigned: with the result of `shared_values` in `Shared.extra`. states: the client states before the round. sums,
    of_clients: what `update_and_measure` returned for all clients.
    """
    w, of_clients = assigned.shared.server.params, dict(of_clients)
    measured: dict[str, jax.Array] = {}
    if "labels" in names:
        measured["label_mix"] = label_mix(engine, assigned.shared, assigned)
    if "gradients" in names:
        measured |= gradients(engine, assigned.shared, assigned)
    if left := with_means(names):
        models, weight = sums
        means = jax.tree.map(lambda s, like: (s / weight).astype(like.dtype), models, (w, trained(engine, w)))
        if "update" in of_clients:
            left -= {"updates"}
            of_all = cosine
            for _ in range(4):  # [D, G, L, E]
                of_all = jax.vmap(of_all, (0, None))
            of_clients["update_cosine"] = of_all(of_clients.pop("update"), means[1])
        if left:
            of_clients |= second_training(engine, left, assigned, states, *means)
    if of_clients:
        valid = of_clients.pop("valid")
        of_cohort = partial(in_cohort_order, len(assigned.cohort.id), assigned.order, assigned.empty)
        for name, values in of_clients.items():
            seen = valid.reshape(*valid.shape, *[1] * (values.ndim - 3))
            measured[name] = of_cohort(jnp.where(seen, values, jnp.nan))
    return measured


def second_training(
    engine: Engine, names: set[str], assigned: Assignment, states: PyTree, w_S: Params, mean_update: Params
) -> dict[str, jax.Array]:
    """The measures that compare a model of every epoch with a mean over the cohort, leaves [D, G, L, E].

    The mean is only known after all clients have trained, so they train again. w_S: the mean of their models.
    """

    def one(shared: Shared, client: Client, old: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        w_S, mean_update = shared.extra
        shared = as_started(engine, shared, client)
        work = client_work(engine, shared, client, longest)
        at_mean = full_gradient(work, w_S) if "gradients" in names else None

        def after_epoch(start: Params, theta: Params) -> dict[str, jax.Array]:
            measured = {}
            if "updates" in names:
                measured["update_cosine"] = cosine(trained(engine, tree.subtract(theta, start)), mean_update)
            if "gradients" in names:
                gap = tree.subtract(full_gradient(work, theta), at_mean)
                measured["client_drift"] = tree.dot(gap, gap)  # FedEve (4)
            return measured

        result = update(engine, shared, client, old, work._replace(watch=after_epoch))
        return (), result.trained(engine.algorithm.name).measured, ()

    shared = assigned.shared._replace(extra=(w_S, mean_update))
    return over_clients(engine, one, shared, assigned.placed, states)[1]


def gradients(engine: Engine, shared: Shared, assigned: Assignment) -> dict[str, jax.Array]:
    """The measures of the gradients at the global model w, over all examples of all clients.

    With grad f = sum_i p_i grad F_i and p_i = n_i / n:

    - ``period_drift``: ||sum_S n_i grad F_i / sum_S n_i - grad f||^2, FedEve's equation 3 for the cohort S of this
      round, with the weights of grad f. It is 0 if all clients take part.
    - ``period_drift_uniform``: ||mean_S grad F_i - grad f||^2, the equation as printed. If all clients take part, it is
      0 only for clients of equal sizes.
    - ``dissimilarity``: Gamma = sqrt(sum_i p_i ||grad F_i||^2 / ||grad f||^2), FedGVRGM's equation 4. It is at least 1,
      and 1 if all gradients are equal. (The paper's mean has weights 1 / N; they are equal for clients of equal sizes.)
    - ``gradient_variance``: sum_i p_i ||grad F_i - grad f||^2.
    - ``gradient_norm``: ||grad f||.
    """
    N = engine.num_clients
    n = round(engine.mean_size * N)  # the number of examples, without the padding on the devices
    chosen = jnp.zeros(N + 1, bool).at[assigned.cohort.id].set(True).at[N].set(False)
    clients = look_up(engine, shared.rows, jnp.arange(N, dtype=jnp.int32))
    clients = jax.tree.map(lambda a, new: a.at[assigned.drawn].set(new, mode="drop"), clients, assigned.selected)
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


def label_mix(engine: Engine, shared: Shared, assigned: Assignment) -> jax.Array:
    """float [C]: the share of each class in the cohort's examples."""

    def one(shared: Shared, client: Client, state: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        return label_counts(engine, client_work(engine, shared, client, longest)), (), ()

    counts, _, _ = over_clients(engine, one, shared._replace(extra=()), assigned.placed, ())
    return counts / counts.sum()


def predictions(engine: Engine, params: Params, test: TestRows) -> jax.Array:
    """Logits [T * B, C] of the test examples, including the padding."""

    def batch(rows: TestRows) -> jax.Array:
        return engine.model.with_mask(rows.mask).apply(params, inputs(engine, rows, test.t)[0])

    logits = lax.map(batch, test._replace(t=None))
    return logits.reshape(-1, logits.shape[-1])


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


def label_counts(engine: Engine, work: Work) -> jax.Array:
    """float [C]: the number of the client's examples in each class."""
    C = engine.num_classes or 0  # never None: `check_measures` only allows classifiers
    batch = work.epoch(jax.random.fold_in(work.key, work.epochs))

    def add(k: jax.Array, counts: jax.Array) -> jax.Array:
        _, y, mask = batch(k)
        return counts + (jax.nn.one_hot(y, C) * mask[:, None]).sum(0)

    return lax.fori_loop(0, work.num_batches, add, jnp.zeros(C))
