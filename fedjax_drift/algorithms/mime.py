"""Mime and MimeLite. Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Mime: Mimicking Centralized Stochastic
Algorithms in Federated Learning", NeurIPS 2021, arXiv 2008.03606, with SGD with momentum as the base optimizer.

Phase 1:   c = mean_S grad F_i(w)                                                                    (1)
Client i:  g <- g(theta) - g(w) + c                    both gradients on the same batch, Mime        (2)
           g <- g(theta)                               MimeLite, which has no phase 1                (2')
           theta <- theta - eta_t (beta m + kappa u);  u = clip(g) + weight_decay theta              (3)
Server:    w <- w + server_lr mean_S D_i;  m <- beta m + kappa c                                     (4)

with m_0 = 0. m does not change during a round. kappa = 1, or 1 - beta if damped.

Deviations:  the paper's table of base optimizers is damped; the code of FedJAX and of the first author is not. Damped
at the learning rate eta is the same as undamped at (1 - beta) eta. The paper weights all clients equally, FedJAX by n_i
(`weighting="examples"`). The paper also mimics Adam, which is not implemented here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, weight
from fedjax_drift.local import full_gradient, train, train_with
from fedjax_drift.spec import Flag, Fraction, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    m: Params  # the momentum


@algorithm
def mime(
    beta: Fraction = 0.9, server_lr: Positive = 1.0, damped: Flag = False, weighting: Weighting = "uniform"
) -> Algorithm:
    """Local steps that mimic those of a server with momentum. Their gradients are corrected by that of the cohort.

    Clients keep no state. A round has two phases: before the clients train, they send their gradients at w, and receive
    the mean. A step computes two gradients.

    Args:
      beta: momentum, in [0, 1). 0 only corrects the gradients.
      server_lr: factor of the mean update, > 0.
      damped: whether kappa is 1 - beta instead of 1.
      weighting: the weight of a client in both means: "uniform" (1, default) or "examples" (n_i).

    Raises:
      ValueError: local training uses momentum or another optimizer. A `Simulation` refuses asynchronous rounds and
        private means.
    """

    def survey(server: Server, client: PyTree, work: Work) -> ClientResult:
        return ClientResult(full_gradient(work, server.params), weight(work, weighting), client, {})  # (1)

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w, c = server.params, work.surveyed

        def gradient(theta: Params, batch: Batch, key: jax.Array, carry: PyTree) -> tuple[jax.Array, Params, PyTree]:
            value, g = jax.value_and_grad(work.loss)(theta, batch, key)
            at_w = jax.grad(work.loss)(w, batch, key)
            return value, jax.tree.map(lambda g, at_w, c: g - at_w + c, g, at_w, c), carry  # (2)

        theta, _, trained = train_with(with_momentum(work, server.m, beta, damped), w, gradient, ())
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), client, trained)

    base = mimelite(beta, server_lr, damped, weighting)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        return base.server_update(server, (D, context.surveyed), context)

    return base._replace(survey=survey, client_update=client_update, server_update=server_update, name="mime")


@algorithm
def mimelite(
    beta: Fraction = 0.9, server_lr: Positive = 1.0, damped: Flag = False, weighting: Weighting = "uniform"
) -> Algorithm:
    """Local steps with a momentum of the server, which does not change during a round.

    Clients keep no state. They send their update and their gradient at w, which costs one more pass over their
    examples.

    Args:
      beta: momentum, in [0, 1). 0 gives FedAvg.
      server_lr, damped, weighting: as in `mime`.

    Local training must be plain SGD, without momentum.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w = server.params
        theta, trained = train(with_momentum(work, server.m, beta, damped), start=w)  # (2')
        message = tree.subtract(theta, w), full_gradient(work, w)
        return ClientResult(message, weight(work, weighting), client, trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, c = mean
        w = jax.tree.map(lambda w, D: w + server_lr * D, server.params, D)
        return Server(w, jax.tree.map(lambda m, c: beta * m + kappa(beta, damped) * c, server.m, c))  # (4)

    none, requires = (lambda params: ()), Needs(optimizer="sgd")
    return Algorithm(init_server, none, client_update, server_update, requires=requires, name="mimelite")


def kappa(beta: float, damped: bool) -> float:
    return 1 - beta if damped else 1.0


def with_momentum(work: Work, m: Params, beta: float, damped: bool) -> Work:
    """The work with steps along beta m + kappa u, equation (3)."""

    def direction(u: Params, theta: Params) -> Params:
        return jax.tree.map(lambda u, m: beta * m + kappa(beta, damped) * u, u, m)  # (3)

    return work._replace(optimizer=optax.chain(work.optimizer, optax.stateless(direction)))
