"""What is measured of drift: the measures, and the pass over a round's clients that takes them.

`measure` trains the round's clients again, exactly as the round does (a client's training is a function of the
round's key, its id and its rows), so a simulation that does not measure is not touched by any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks, tree
from fedjax_drift.engine import (
    Arrays,
    Client,
    Engine,
    Plan,
    Shared,
    TestRows,
    answers,
    client_work,
    deal_out,
    gather,
    look_up,
    over_clients,
    partitionable,
    plan,
    state_of,
    undealt,
    update,
)
from fedjax_drift.local import WATCHED, Watched, full_gradient
from fedjax_drift.types import Params, PyTree, ServerState, Work

MEASURES = {
    "updates": "norm of each client's update and its cosine with their mean, after every local epoch",
    "gradients": "period drift, client drift (FedEve, equations 3 and 4), gradient dissimilarity (FedGVRGM, 4)",
    "predictions": "linear CKA and KL between local and global predictions on the test set, after every local epoch",
    "forgetting": "LP (LfD, equation 11) for the classes that a client has, and for those it has not",
    "labels": "share of each class in the cohort's rows",
}
TESTED = ("predictions", "forgetting")  # on the test set


def check_measures(names: str | Iterable[str], engine: Engine, has_test: bool) -> tuple[str, ...]:
    """The names as a tuple; ValueError for an unknown one, and for one that the data or the model do not allow."""
    names = checks.choices("measure", names, MEASURES)
    for name in names:
        if name in TESTED and not has_test:
            raise ValueError(f"measure={name!r} looks at predictions on test data: pass test=(x, y)")
        if name == "predictions" and engine.test_size < 2:
            raise ValueError('measure="predictions" compares how test rows differ: it needs at least 2 of them, got 1')
        if name in (*TESTED, "labels") and engine.num_classes is None:
            raise ValueError(
                f"measure={name!r} is about classes: it needs a classifier with the default loss and one integer label "
                'a row; "updates" and "gradients" need none'
            )
    return names


def allowing_nan(program: Callable) -> Callable:
    """The program, run with `jax_debug_nans` off: what is measured of absent clients is NaN."""

    @wraps(program)
    def call(*arguments: Any, **options: Any) -> Any:
        with jax.debug_nans(False):
            return program(*arguments, **options)

    return call


@allowing_nan
def of_one_round(measured: dict[str, jax.Array], *, axis: int) -> dict[str, jax.Array]:
    """What was measured of a round, with an axis of rounds."""
    return {name: jnp.expand_dims(values, axis) for name, values in measured.items()}


@partitionable
def measure(
    engine: Engine, names: Sequence[str], state: ServerState, arrays: Arrays, cohort: jax.Array | Client | None
) -> dict[str, jax.Array]:
    """What `round_fn` on the same state and cohort will show of drift; see `Simulation.measure`."""
    today = plan(engine, state, arrays.rows, cohort)
    shared = today.shared
    found: dict[str, jax.Array] = {}
    if "labels" in names:
        found["label_mix"] = label_mix(engine, shared, today)
    if "gradients" in names:
        found |= gradients(engine, shared, today)
    if set(names) - {"labels"}:
        states = gather(engine, state.clients, today.dealt.place)
        test = arrays.test if set(names) & set(TESTED) else None
        of_cohort = partial(undealt, len(today.cohort.id), today.order, today.ragged)
        found |= jax.tree.map(of_cohort, trainings(engine, names, shared, today, states, test))
    return found


def trainings(
    engine: Engine, names: Sequence[str], shared: Shared, today: Plan, states: PyTree, test: TestRows | None
) -> dict[str, jax.Array]:
    """What shows while the cohort trains, leaves [D, G, L] or [D, G, L, E]."""
    N, w = engine.num_clients, shared.server.params

    def trained(
        shared: Shared, client: Client, sent: PyTree, work: Work, probe: Callable[[Params, Params], PyTree]
    ) -> tuple[jax.Array, jax.Array, Watched]:
        """The client's weight in means, whether it is there with finite numbers, and what was watched."""
        old = state_of(engine, shared, client, sent)
        result = update(engine, shared, old, work._replace(probe=probe))
        if WATCHED not in result.metrics:
            raise ValueError(
                f"measuring drift needs clients that train with fedjax_drift.local.train and return its metrics, "
                f"but those of {engine.algorithm.name} don't"
            )
        answered, bad = answers(engine, client, result)
        return jnp.where(answered, result.weight, 0), (client.id < N) & (bad < 0), result.metrics[WATCHED]

    def model_of(shared: Shared, client: Client, sent: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        """For the means of the local models, w_S, and of the updates, as the algorithm weights them."""
        work = client_work(engine, shared, client, longest)
        weight, _, (start, theta, _) = trained(shared, client, sent, work, lambda start, theta: ())
        models = (theta, tree.subtract(theta, start))
        return (jax.tree.map(lambda a: jnp.where(weight > 0, weight * a, 0), models), weight), ()

    w_S = mean_update = w  # unless they are asked for
    if {"updates", "gradients"} & set(names):
        (sums, weight), _ = over_clients(engine, model_of, shared, today.dealt, states)
        w_S, mean_update = jax.tree.map(lambda s, w: (s / weight).astype(w.dtype), sums, (w, w))
    z_global = None if test is None else predictions(engine, w, test)

    def watch(shared: Shared, client: Client, sent: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        w_S, mean_update, test, z_global = shared.given
        work = client_work(engine, shared, client, longest)
        at_mean = full_gradient(work, w_S) if "gradients" in names else None

        def probe(start: Params, theta: Params) -> dict[str, jax.Array]:
            seen: dict[str, jax.Array] = {}
            if "updates" in names:
                D = tree.subtract(theta, start)
                seen["update_norm"] = jnp.sqrt(tree.dot(D, D))
                scale = seen["update_norm"] * jnp.sqrt(tree.dot(mean_update, mean_update))
                seen["update_cosine"] = jnp.where(scale == 0, 0, tree.dot(D, mean_update) / scale)
            if "gradients" in names:
                gap = tree.subtract(full_gradient(work, theta), at_mean)
                seen["client_drift"] = tree.dot(gap, gap)  # FedEve (4)
            if "predictions" in names:
                z, mask = predictions(engine, theta, test), test.mask.reshape(-1)
                seen["cka"] = linear_cka(z, z_global, mask)
                seen["kl"] = mean_kl(z_global, z, mask)
            return seen

        _, known, watched = trained(shared, client, sent, work, probe)
        kept = dict(watched.epochs)
        if "forgetting" in names:
            z, y, mask = predictions(engine, watched.theta, test), test.y.reshape(-1), test.mask.reshape(-1)
            local, whole = (class_accuracy(z, y, mask) for z in (z, z_global))
            present = label_counts(engine, work) > 0
            kept["lp_present"] = local_performance(local, whole, present)
            kept["lp_absent"] = local_performance(local, whole, ~present)
        return (), jax.tree.map(lambda a: jnp.where(known, a, jnp.nan), kept)

    given = (w_S, mean_update, test, z_global)
    return over_clients(engine, watch, shared._replace(given=given), today.dealt, states)[1]


def gradients(engine: Engine, shared: Shared, today: Plan) -> dict[str, jax.Array]:
    """Of all clients' gradients at w, over all their rows: how much clients differ, and how far this cohort is off.

    grad f = sum_i p_i grad F_i, p_i = n_i / n. Period drift: ||mean_S grad F_i - grad f||^2 (FedEve, 3, of this
    cohort); dissimilarity: Gamma = sum_i p_i ||grad F_i - grad f||^2.
    """
    N = engine.num_clients
    n = round(engine.mean_size * N)  # M: the rows on the devices may be padded
    chosen = jnp.zeros(N + 1, bool).at[today.cohort.id].set(True).at[N].set(False)
    everyone = look_up(engine, shared.rows, jnp.arange(N, dtype=jnp.int32))
    everyone = jax.tree.map(lambda a, own: a.at[today.asked].set(own, mode="drop"), everyone, today.held)
    _, _, dealt = deal_out(engine, everyone, everyone.steps)

    def one(shared: Shared, client: Client, sent: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        chosen, S = shared.given
        work = client_work(engine, shared, client, longest)
        g = full_gradient(work, shared.server.params)
        n_i = work.size.astype(work.lr.dtype)
        # 1 / |S| - p_i over one denominator: exactly 0 where all clients of one size are in, as the drift then is.
        excess = (jnp.where(chosen[client.id], n, 0) - n_i * S) / (S * n)
        p = n_i / n
        of_all, of_gap = (jax.tree.map(lambda g, c=c: c * g, g) for c in (p, excess))
        return (of_all, of_gap, p * tree.dot(g, g)), ()

    given = (chosen, chosen.sum().astype(shared.lr.dtype))
    (grad_f, gap, square), _ = over_clients(engine, one, shared._replace(given=given), dealt, ())
    norm2 = tree.dot(grad_f, grad_f)
    return {
        "period_drift": tree.dot(gap, gap),
        "dissimilarity": jnp.maximum(square - norm2, 0),
        "gradient_norm": jnp.sqrt(norm2),
    }


def label_mix(engine: Engine, shared: Shared, today: Plan) -> jax.Array:
    """float [C]: share of each class in the cohort's rows."""

    def one(shared: Shared, client: Client, sent: PyTree, longest: jax.Array) -> tuple[PyTree, PyTree]:
        return label_counts(engine, client_work(engine, shared, client, longest)), ()

    counts, _ = over_clients(engine, one, shared, today.dealt, ())
    return counts / counts.sum()


def predictions(engine: Engine, params: Params, test: TestRows) -> jax.Array:
    """Logits [T * B, C] on the test batches, padding included."""
    logits = lax.map(lambda x: engine.model.apply(params, engine.decode(x)), test.x)
    return logits.reshape(-1, logits.shape[-1])


def linear_cka(X: jax.Array, Y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Linear centred kernel alignment of X [M, p] and Y [M, q] over the rows where mask [M] holds, in [0, 1].

    ||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F), columns centred (Kornblith et al. 2019, arXiv 1905.00414, equation 3 and
    section 3). 1: the same up to a rotation and a scale; 0 where one is constant.
    """

    def centred(Z: jax.Array) -> jax.Array:
        Z = Z - jnp.mean(Z, 0, keepdims=True, where=None if mask is None else mask[:, None])
        return Z if mask is None else jnp.where(mask[:, None], Z, 0)

    X, Y = centred(X), centred(Y)
    # In full float32: the default of an accelerator may round its factors to 10 bits.
    xy, xx, yy = ((jnp.matmul(A.T, B, precision="highest") ** 2).sum() for A, B in ((Y, X), (X, X), (Y, Y)))
    scale = jnp.sqrt(xx) * jnp.sqrt(yy)
    return jnp.where(scale == 0, 0, xy / scale)


def mean_kl(p_logits: jax.Array, q_logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean over rows of KL(p || q) in nats, from logits [M, C]; LfD's study has p global, q local."""
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.mean((jnp.exp(log_p) * (log_p - log_q)).sum(-1), where=mask)


def class_accuracy(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Acc_c [C] over the rows of class c where mask holds; NaN for a class without rows."""
    of_class = jax.nn.one_hot(y, logits.shape[-1]) * mask[:, None]
    right = (logits.argmax(-1) == y) & ~jnp.isnan(logits).any(-1)
    return (of_class * right[:, None]).sum(0) / of_class.sum(0)


def local_performance(local: jax.Array, whole: jax.Array, classes: jax.Array) -> jax.Array:
    """LP (LfD, equation 11): mean of Acc_c(theta_i) / Acc_c(w) over the ``classes`` (bool [C]) with Acc_c(w) > 0.

    1: nothing forgotten, 0: everything. NaN without such a class.
    """
    counted = classes & (whole > 0)
    return jnp.where(counted, local / jnp.where(counted, whole, 1), 0).sum() / counted.sum()


def label_counts(engine: Engine, work: Work) -> jax.Array:
    """float [C]: the client's rows of each class."""
    C = engine.num_classes or 0  # never None: `check_measures` lets only classifiers get here
    batch = work.epoch(jax.random.fold_in(work.key, work.epochs))

    def add(k: jax.Array, counts: jax.Array) -> jax.Array:
        _, y, mask = batch(k)
        return counts + (jax.nn.one_hot(y, C) * mask[:, None]).sum(0)

    return lax.fori_loop(0, work.num_batches, add, jnp.zeros(C))
