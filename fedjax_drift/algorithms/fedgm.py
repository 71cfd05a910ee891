"""FedGM, the global phase of FedGVRGM. Wang et al.; title, year and venue are not known to us.

Client k:  as FedProx;  D_k = w_k - w
Server:    mw <- beta mw + (|S| / N) mean_S D_k                                                      (10)
           w <- w + server_lr mw                                                                     (10)

Deviates:  (10) prints a momentum of parameters, wtilde = w + (|S| / N) mean_S D_k, mw <- mw + wtilde, w <- wtilde -
beta mw, whose fixed point has wtilde = 0, so that w is 0 or beyond (`literal="momentum"`); the paper's prose,
"historical change states", is followed instead. The factor |S| / N makes this a damped momentum at 10 of 100 clients
and beta = 0.9; it grows with participation, as the paper's figure 5 has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedprox import fedprox
from fedjax_drift.types import Algorithm, Params, PyTree, Round

SCALES = ("participation", "one", "one_minus_beta")


class Server(NamedTuple):
    params: Params  # w, the global model
    mw: Params  # momentum


def fedgm(
    mu: float = 0.1,
    beta: float = 0.9,
    server_lr: float = 1.0,
    scale: str = "participation",
    literal: bool | str | Sequence[str] = (),
) -> Algorithm:
    """FedProx with momentum on the server. Clients count alike in the mean.

    Args:
      mu: proximal strength, >= 0.
      beta: momentum in [0, 1).
      server_lr: > 0.
      scale: factor of the mean update: "participation" (|S| / N, default), "one" (undamped: a steady update is
        multiplied by 1 / (1 - beta)), "one_minus_beta" (damped).
      literal: "momentum": (10) as printed; the model never trains. It ends at -g / (1 - g) times where it should, g the
        share of the way there that one round goes: near zero for small steps.

    Raises:
      ValueError: a value out of range, an unknown option.
    """
    beta = checks.fraction("beta", beta)
    server_lr = checks.positive("server_lr", server_lr)
    checks.choice("scale", scale, SCALES)
    literal = checks.choices("literal", literal, ("momentum",))

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
