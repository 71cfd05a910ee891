"""FedGVRGM. Wang et al.; title, year and venue are not known to us: FedGVR's clients, FedGM's server.

Client k:  as FedGVR;  D_k = w_k - w,  dc_k = c_k+ - c_k
Server:    mw <- beta mw + (|S| / N) mean_S D_k;  w <- w + server_lr mw                              (10)
           mc <- beta mc + (1 - beta) (1/N) sum_S dc_k;  c <- c + mc                                 (10)

Deviates:  as FedGVR and FedGM. For c the paper says only that its momentum is similar to that of w. Without the factor
1 - beta c would move 1 / (1 - beta) times too far, while it must track the mean of the c_k: it then diverges at eps = 1
(`literal="variate_momentum"`). With it c lags behind the c_k: at beta = 0.9, all clients in every round and
K eta_l L about 1 (L the curvature) that diverges too, and with |S| / N = 1 in front of D_k, a gain of 10, far earlier;
`variate_momentum=False`, SCAFFOLD's c, does not. The paper has 10 % a round and eta_l = 0.001.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from fedjax_drift import checks, tree
from fedjax_drift.algorithms.fedgm import fedgm
from fedjax_drift.algorithms.fedgvr import LITERAL, fedgvr
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.types import Algorithm, Params, PyTree, Round


class Server(NamedTuple):
    params: Params  # w, the global model
    c: Params  # the server's control variate
    mw: Params  # momentum of w
    mc: Params  # momentum of c
    best: jax.Array  # as FedGVR's
    evaluated: jax.Array


def fedgvrgm(
    mu: float = 0.1,
    beta: float = 0.9,
    window: int = 5,
    server_lr: float = 1.0,
    recursion: str = "printed",
    scale: str = "participation",
    variate_momentum: bool = True,
    literal: bool | str | Sequence[str] = (),
) -> Algorithm:
    """Variance reduction on the clients, momentum on the server. Keeps one model per client; needs a test set.

    Args:
      mu, window, recursion: as `fedgvr`.
      beta, server_lr, scale: as `fedgm`.
      variate_momentum: False: c <- c + (1/N) sum_S dc_k, as SCAFFOLD.
      literal: the printed readings of `fedgvr` and `fedgm`, and "variate_momentum": no 1 - beta in mc.

    Raises:
      ValueError: a value out of range, an unknown option; no test set; in `round_fn`, an evaluation that is not finite.
    """
    variate_momentum = checks.flag("variate_momentum", variate_momentum)
    literal = checks.choices("literal", literal, (*LITERAL, "momentum", "variate_momentum"))
    gvr = fedgvr(mu, window, server_lr, recursion, [name for name in literal if name in LITERAL])
    gm = fedgm(mu, beta, server_lr, scale, "momentum" in literal)
    if "variate_momentum" in literal and not variate_momentum:
        raise ConfigurationError(
            'variate_momentum must be True for literal="variate_momentum", got False: leave one out'
        )
    gain = 1.0 if "variate_momentum" in literal else 1 - beta

    def init_server(params: Params) -> Server:
        start = gvr.init_server(params)
        zeros = tree.zeros_like(params)
        return Server(params, zeros, zeros, zeros, start.best, start.evaluated)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc = mean
        w, mw = gm.server_update(server, D, context)
        mc = jax.tree.map(lambda dc: context.participation * dc, dc)
        if variate_momentum:
            mc = jax.tree.map(lambda old, dc: beta * old + gain * dc, server.mc, mc)
        c = jax.tree.map(lambda c, mc: c + mc, server.c, mc)
        return server._replace(params=w, c=c, mw=mw, mc=mc)

    return gvr._replace(init_server=init_server, server_update=server_update, name="fedgvrgm")
