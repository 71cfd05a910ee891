"""GHBM, LocalGHBM and FedHBM. Zaccone, Karimireddy, Masone, Ciccone, "Communication-Efficient Heterogeneous Federated
Learning with Generalized Heavy-Ball Momentum", TMLR 2025, arXiv 2311.18578.

Client i:  m = (w_{t-tau} - w_t) / tau,  0 if t < tau                        GHBM                    (1)
           m = (a_i - w) / tau_i,        0 in the first participation        LocalGHBM               (2)
           m = (a_i - theta) / tau,      0 in the first participation        FedHBM, at every step   (3)
           g <- g + beta m / (eta_t K_i)                                                             (4)
           theta <- theta - beta m / K_i before the gradient                 nesterov, without (4)   (4')
           a_i <- w                                                          LocalGHBM               (5)
           a_i <- theta_i                                                    FedHBM                  (6)
Server:    as FedAvg

m points uphill. tau_i is the number of rounds since the last participation of client i. Without clipping, the K_i steps
together move by -beta m, whatever eta_t and K_i are. So beta is the coefficient of the heavy ball.

Deviations:  the authors clip nothing; their code can clip the gradient with the momentum (4), as it is clipped here.
The server counts its updates, not the rounds: they differ if a round has no reporting client. The constant tau =
N / |S| of the authors' code is `tau` of `localghbm`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, weight
from fedjax_drift.algorithms.moon import Client as Model
from fedjax_drift.local import train
from fedjax_drift.spec import Count, Fix, Flag, NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Trained, Work, algorithm


class Server(NamedTuple):
    params: Params  # w_t, the global model
    past: Params  # the last tau models before it, leaves [tau, ...]; w_j is at j mod tau
    t: jax.Array  # int32 [], the number of updates of the model


class Client(NamedTuple):
    anchor: Params  # a_i, the global model of the client's last participation
    t: jax.Array  # int32 [], the round of its last participation, or -1


@algorithm
def ghbm(
    tau: Count = 10, beta: NonNegative = 0.9, nesterov: Flag = False, weighting: Weighting = "examples"
) -> Algorithm:
    """FedAvg with a momentum of the last tau rounds, applied in equal parts at every local step.

    Clients keep no state. The server keeps tau + 1 models, and sends the model and the momentum.

    Args:
      tau: rounds over which the momentum is taken, >= 1. About N / |S|: in that time, each client takes part once.
      beta: the coefficient of the momentum, >= 0. 0 gives FedAvg.
      nesterov: whether gradients are computed after the step of the momentum.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).
    """
    base = fedavg(weighting=weighting)

    def init_server(params: Params) -> Server:
        past = jax.tree.map(lambda w: jnp.broadcast_to(w, (tau, *w.shape)), params)
        return Server(params, past, jnp.int32(0))

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        w, t = server.params, server.t
        m = jax.tree.map(lambda past, w: jnp.where(t < tau, 0, (past[t % tau] - w) / tau), server.past, w)  # (1)
        theta, trained = with_heavy_ball(work, w, m, beta, nesterov)
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), client, trained)

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        w, t = server.params, server.t
        past = jax.tree.map(lambda past, w: past.at[t % tau].set(w), server.past, w)
        return Server(jax.tree.map(jnp.add, w, D), past, t + 1)

    return base._replace(init_server=init_server, client_update=client_update, server_update=server_update, name="ghbm")


@algorithm
def localghbm(
    tau: Annotated[Positive, Fix("None means the rounds since the last participation")] | None = None,
    beta: NonNegative = 0.9,
    nesterov: Flag = False,
    weighting: Weighting = "examples",
) -> Algorithm:
    """GHBM whose clients compute the momentum from the global model of their own last participation.

    The state of a client has the size of one model. The server sends the model only.

    Args:
      tau: the constant by which the difference of models is divided, > 0, such as N / |S|. The default None is tau_i,
        the number of rounds since the client's last participation.
      beta, nesterov, weighting: as in `ghbm`.
    """

    def init_client(params: Params) -> Client:
        return Client(params, jnp.int32(-1))

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        w, t_i = server.params, client.t
        tau_i = jnp.maximum(work.t - t_i, 1).astype(work.lr.dtype) if tau is None else tau
        m = jax.tree.map(lambda a, w: jnp.where(t_i < 0, 0, (a - w) / tau_i), client.anchor, w)  # (2)
        theta, trained = with_heavy_ball(work, w, m, beta, nesterov)
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), Client(w, work.t), trained)  # (5)

    return fedavg(weighting=weighting)._replace(init_client=init_client, client_update=client_update, name="localghbm")


@algorithm
def fedhbm(tau: Positive = 10.0, beta: NonNegative = 1.0, weighting: Weighting = "examples") -> Algorithm:
    """Local steps with a momentum that points away from the client's previous local model.

    The state of a client has the size of one model. The server sends the model only.

    Args:
      tau: the constant by which the difference of models is divided, > 0, such as N / |S|. With all clients in every
        round, tau = 1 and beta = 1 diverge.
      beta, weighting: as in `ghbm`.
    """

    def client_update(server: Any, client: Model, work: Work) -> ClientResult:
        w, a, K = server.params, client.model, work.num_steps.clip(1)
        scale = jnp.where(client.seen, beta / (tau * work.lr * K), 0)

        def heavy(g: Params, theta: Params) -> Params:
            return jax.tree.map(lambda g, a, theta: g + scale * (a - theta), g, a, theta)  # (3), (4)

        theta, trained = train(work, start=w, correct=heavy)
        client = Model(theta, jnp.array(True))  # (6)
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), client, trained)

    return fedavg(weighting=weighting)._replace(init_client=Model.unseen, client_update=client_update, name="fedhbm")


def with_heavy_ball(work: Work, w: Params, m: Params, beta: float, nesterov: bool) -> tuple[Params, Trained]:
    """Local training from w with the momentum m."""
    K = work.num_steps.clip(1)
    shift = jax.tree.map(lambda m: (beta / K) * m, m)
    per_rate = jax.tree.map(lambda s: s / work.lr, shift)
    if not nesterov:
        return train(work, start=w, correct=lambda g, theta: jax.tree.map(jnp.add, g, per_rate))  # (4)
    plus_shift = optax.stateless(lambda u, theta: jax.tree.map(jnp.add, u, per_rate))
    ahead = work._replace(optimizer=optax.chain(work.optimizer, plus_shift))
    return train(ahead, start=w, at=lambda theta: tree.subtract(theta, shift))  # (4')
