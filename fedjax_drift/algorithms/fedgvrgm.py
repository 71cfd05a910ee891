"""FedGVRGM: the client update of FedGVR and the server update of FedGM (Wang et al.; we do not know the year and the
venue of the paper).

Client k:  as FedGVR;  D_k = w_k - w,  dc_k = c_k+ - c_k
Server:    mw <- beta mw + (|S| / N) mean_S D_k;  w <- w + server_lr mw                              (10)
           mc <- beta mc + (1 - beta) (1/N) sum_S dc_k;  c <- c + mc                                 (10)

Deviates:  as FedGVR and FedGM. About the momentum of c the paper only says that it is similar to that of w. The factor
(1 - beta) is ours: c must track the mean of the c_k. Without the factor, each step of c is 1 / (1 - beta) times too
large, and training diverges for eps = 1 (`literal="variate_momentum"`).

With the factor, c follows the c_k with a delay. This diverges, too, with beta = 0.9, full participation and
K eta_l L near 1 (L is the curvature). It diverges at a much smaller K eta_l L if the factor of D_k is |S| / N = 1 as
well, because the momentum then multiplies a constant update by 1 / (1 - beta) = 10. Without momentum on c
(`variate_momentum=False`, as in SCAFFOLD) it does not diverge. The paper uses 10 % participation and eta_l = 0.001.
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
    best: jax.Array  # as in FedGVR
    evaluated: jax.Array  # as in FedGVR


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
    """Variance reduction on the clients and momentum on the server.

    The state of a client is one model. A test set is needed, as for `fedgvr`.

    Args:
      mu, window, recursion: as in `fedgvr`.
      beta, server_lr, scale: as in `fedgm`.
      variate_momentum: if False, c has no momentum: c <- c + (1/N) sum_S dc_k, as in SCAFFOLD. Default True.
      literal: the names of `fedgvr` and `fedgm`, and "variate_momentum", which leaves out the factor 1 - beta of mc.

    Raises:
      ValueError: a value is out of range, an option is unknown, or there is no test set. `round_fn` raises it if the
        evaluation is not finite.
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
