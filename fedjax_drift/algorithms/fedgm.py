"""FedGM, the global phase of FedGVRGM. Wang, Mao, He, Zhou, Wu, Wu, "Accelerating Federated Learning with Two-phase
Gradient Adjustment", IEEE (our copy does not state the year).

Client k:  as FedProx;  D_k = w_k - w
Server:    mw <- beta mw + (|S| / N) mean_S D_k                                                      (10)
           w <- w + server_lr mw                                                                     (10)

Deviations:  as printed in the paper, (10) accumulates parameters instead of updates:

           wtilde = w + (|S| / N) mean_S D_k;  mw <- mw + wtilde;  w <- wtilde - beta mw

The only fixed point of these equations has wtilde = 0, so the model does not train (`literal="momentum"`). The text of
the paper speaks of "historical change states". Therefore mw accumulates updates here.

With 10 of 100 clients and beta = 0.9, the factor |S| / N equals 1 - beta, so the momentum is damped. The factor grows
with the participation, which is consistent with figure 5 of the paper.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import jax

from fedjax_drift import spec, tree
from fedjax_drift.algorithms.fedprox import fedprox
from fedjax_drift.spec import Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, Params, PyTree, Round, algorithm

Scale = Literal["participation", "one", "one_minus_beta"]


class Server(NamedTuple):
    params: Params  # w, the global model
    mw: Params  # momentum


@algorithm
def fedgm(
    mu: NonNegative = 0.1,
    beta: Fraction = 0.9,
    server_lr: Positive = 1.0,
    scale: Scale = "participation",
    literal: Annotated[Any, spec.words("momentum")] = (),
) -> Algorithm:
    """FedProx with momentum on the server. All clients have weight 1 in the mean.

    Args:
      mu: strength of the proximal term, >= 0.
      beta: momentum, in [0, 1).
      server_lr: learning rate of the server, > 0.
      scale: factor of the mean update: "participation" (|S| / N, default), "one" (undamped: a constant update is
        multiplied by 1 / (1 - beta)) or "one_minus_beta" (damped).
      literal: "momentum" uses (10) as printed in the paper. The model then does not train. Let w* be the
        model to which training without momentum converges, and g the fraction of the distance to w* that one round
        covers. The model converges to -(g / (1 - g)) w*, which is close to zero if g is small. Default: (10) as in the
        docstring of this file.
    """

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params))

    def server_update(server: Any, D: PyTree, context: Round) -> Server:
        w, mw = server.params, server.mw
        factor = {"participation": context.participation, "one": 1.0, "one_minus_beta": 1 - beta}[scale]
        if literal:
            wtilde = jax.tree.map(lambda w, D: w + factor * D, w, D)
            mw = jax.tree.map(lambda mw, wtilde: mw + wtilde, mw, wtilde)
            return Server(jax.tree.map(lambda wtilde, mw: wtilde - beta * mw, wtilde, mw), mw)
        mw = jax.tree.map(lambda mw, D: beta * mw + factor * D, mw, D)  # (10)
        return Server(jax.tree.map(lambda w, mw: w + server_lr * mw, w, mw), mw)  # (10)

    prox = fedprox(mu, weighting="uniform")
    return prox._replace(init_server=init_server, server_update=server_update, name="fedgm")
