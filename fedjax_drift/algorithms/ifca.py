"""IFCA and HypCluster. Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020, arXiv 2006.04088; Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
Federated Learning", 2020, arXiv 2002.10619.

Client i:  j_i = argmin_j F_i(w_j), of equals the lowest                                             (1)
           local training from w_(j_i);  D_i = theta_i - w_(j_i)                                     (2)
Server:    w_j <- w_j + server_lr (sum of p_i D_i) / (sum of p_i) over the clients of S with j_i = j (3)

F_i(w_j) is the mean loss over all training examples of the client, before it trains. w_j stays the same if no client
has chosen it. p_i is 1 (IFCA) or n_i (HypCluster). The model of a client is the w_j of its lowest training loss.

Deviations:  the variant of the IFCA paper that averages gradients is not implemented, nor are the server optimizers of
FedJAX's HypCluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, spec, tree
from fedjax_drift.algorithms.fedavg import Weighting, weight
from fedjax_drift.local import full_loss, train
from fedjax_drift.spec import Fix, Positive
from fedjax_drift.types import (
    THREEFRY,
    Algorithm,
    ClientResult,
    Metrics,
    Needs,
    Params,
    PyTree,
    Round,
    Row,
    Work,
    algorithm,
)


class Server(NamedTuple):
    params: Params  # w_0; `evaluate` evaluates it
    models: Params  # w_0, w_1, ..., leaves [k, ...]


def _models(name: str, value: Any, fix: str) -> Any:
    number = len(value) if isinstance(value, list | tuple) else value
    k = checks.integer(name if number is value else "the number of models", number, 1, fix=fix)
    return k if number is value else value


Models = Annotated[
    int | Sequence[Params], spec.Spec(_models, "models", (1,), (0,)), Fix("pass their number, or a list of parameters")
]


@algorithm
def ifca(models: Models = 2, weighting: Weighting = "uniform", server_lr: Positive = 1.0) -> Algorithm:
    """Several global models. In each round, a client trains the one that fits its examples best.

    Clients keep no state. They compute the losses of all k models, which costs k forward passes over their examples.
    ``info["clients_of_model_0"]`` etc. is the number of clients in the cohort that have chosen a model. `evaluate`
    evaluates w_0; use `evaluate_clients`, which evaluates each client with its own model.

    Args:
      models: k, the number of models, >= 1; or a list with the first models, such as ``[model.init(key) for key in
        keys]``, which must differ. The models of a number are the initial model, and random permutations of the
        entries in each of its leaves. If these are all constant, as in a linear model that starts at 0, normal random
        numbers with standard deviation 0.1 are added to the others.
      weighting: p_i: "uniform" (1, default) or "examples" (n_i).
      server_lr: factor of the mean updates, > 0.

    Raises:
      ValueError: a model does not have the structure and the shapes of the parameters. A `Simulation` refuses running
        statistics that clients update.
    """
    k = len(models) if isinstance(models, Sequence) else models

    def init_server(params: Params) -> Server:
        if isinstance(models, list | tuple):
            for j, each in enumerate(models):
                what = f"model {j} of ifca must have the structure and the shapes of the parameters"
                tree.check_layout(each, params, what, dtypes=False)
            return server_of(jax.tree.map(lambda w, *each: jnp.stack(each).astype(w.dtype), params, *models))
        each = [another(params, j) if j else params for j in range(k)]
        return server_of(jax.tree.map(lambda *w: jnp.stack(w), *each))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        j = best(server, work)  # (1)
        start = jax.tree.map(lambda w: w[j], server.models)
        theta, trained = train(work, start=start)
        D = tree.subtract(theta, start)  # (2)
        n = weight(work, weighting)
        value = (D,) if weighting == "uniform" else (jax.tree.map(lambda D: (n * D).astype(D.dtype), D), n)
        return ClientResult(Row(value, j, k), weight(work, "uniform"), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        rows, p = (*mean[0], mean[1])[:2]  # p_i is 1 with uniform weights

        def move(w: jax.Array, total: jax.Array) -> jax.Array:
            weights = p.reshape(k, *[1] * (w.ndim - 1))
            return w + server_lr * total / jnp.where(weights > 0, weights, 1)  # (3)

        return server_of(jax.tree.map(move, server.models, rows))

    def best(server: Server, work: Work) -> jax.Array:
        return jnp.argmin(jax.vmap(lambda w: full_loss(work, w))(server.models))

    def personal(server: Server, client: PyTree, work: Work) -> Params:
        j = best(server, work)
        return jax.tree.map(lambda w: w[j], server.models)

    def report(server: Server, mean: PyTree, context: Round) -> Metrics:
        chosen = mean[1] * context.participation * context.num_clients
        return {f"clients_of_model_{j}": chosen[j] for j in range(k)}

    made = Algorithm(init_server, lambda params: (), client_update, server_update, name="ifca")
    return made._replace(report=report, personal=personal, requires=Needs(one_model=True))


@algorithm
def hypcluster(models: Models = 2, server_lr: Positive = 1.0) -> Algorithm:
    """`ifca` whose means are weighted by the clients' numbers of examples.

    Args:
      models, server_lr: as in `ifca`.

    Raises:
      ValueError: as `ifca`.
    """
    return ifca(models, "examples", server_lr)._replace(name="hypcluster")


def server_of(models: Params) -> Server:
    return Server(jax.tree.map(lambda w: w[0], models), models)


def another(params: Params, j: int) -> Params:
    """Other first parameters of the same scale: the entries of each leaf in another order. If all leaves are constant,
    normal random numbers with standard deviation 0.1 are added instead."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(j, impl=THREEFRY), max(len(leaves), 1))
    constant = jnp.stack([(w.ravel()[1:] == w.ravel()[:-1]).all() for w in leaves]).all()

    def leaf(w: jax.Array, key: jax.Array) -> jax.Array:
        permuted = jax.random.permutation(key, w.ravel()).reshape(w.shape)
        return jnp.where(constant, w + 0.1 * jax.random.normal(key, w.shape, w.dtype), permuted)

    return jax.tree.unflatten(structure, list(map(leaf, leaves, keys)))
