"""FedGVRGM: the client update of FedGVR and the server update of FedGM. Wang, Mao, He, Zhou, Wu, Wu, "Accelerating
Federated Learning with Two-phase Gradient Adjustment", IEEE (our copy does not state the year).

Client k:  as FedGVR;  D_k = w_k - w,  dc_k = c_k+ - c_k
Server:    mw <- beta mw + (|S| / N) mean_S D_k;  w <- w + server_lr mw                              (10)
           mc <- beta mc + (1 - beta) (1/N) sum_S dc_k;  c <- c + mc                                 (10)

Deviations:
- Those of FedGVR and FedGM.
- About the momentum of c, the paper only says that it is similar to the momentum of w. We added the factor 1 - beta,
  because c must track the mean of the c_k. Without the factor, each step of c is 1 / (1 - beta) times too large, and
  training diverges for eps = 1 (`literal="variate_momentum"`).

Stability:  even with the factor 1 - beta, c follows the mean of the c_k with a delay. In the following, beta = 0.9, all
clients participate, and L is the curvature of the loss.
- With a damped momentum of w (`scale="one_minus_beta"`), training diverges for K eta_l L near 1.
- With the default scale |S| / N = 1, training diverges for much smaller K eta_l L, because the momentum of w multiplies
  a constant update by 1 / (1 - beta) = 10.
- Without momentum on c (`variate_momentum=False`, as in SCAFFOLD), training does not diverge.
The paper uses 10 % participation and eta_l = 0.001.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import jax

from fedjax_drift import checks, spec, tree
from fedjax_drift.algorithms.fedgm import Scale, fedgm
from fedjax_drift.algorithms.fedgvr import LITERAL, fedgvr
from fedjax_drift.spec import Count, Flag, Fraction, NonNegative, Positive
from fedjax_drift.types import Algorithm, Params, PyTree, Round, algorithm


class Server(NamedTuple):
    params: Params  # w, the global model
    c: Params  # the server's control variate
    mw: Params  # momentum of w
    mc: Params  # momentum of c
    best: jax.Array  # as in FedGVR
    evaluated: jax.Array  # as in FedGVR


@algorithm
def fedgvrgm(
    mu: NonNegative = 0.1,
    beta: Fraction = 0.9,
    window: Count = 5,
    server_lr: Positive = 1.0,
    recursion: Literal["printed", "exact"] = "printed",
    scale: Scale = "participation",
    variate_momentum: Flag = True,
    literal: Annotated[Any, spec.words(*LITERAL, "momentum", "variate_momentum")] = (),
) -> Algorithm:
    """Variance reduction on the clients and momentum on the server.

    The state of a client has the size of one model. A test set is needed, as for `fedgvr`.

    Args:
      mu, window, recursion: as in `fedgvr`.
      beta, server_lr, scale: as in `fedgm`.
      variate_momentum: if False, c has no momentum: c <- c + (1/N) sum_S dc_k, as in SCAFFOLD. Default True.
      literal: the names that `fedgvr` and `fedgm` accept, and "variate_momentum". That name leaves out the factor
        1 - beta of mc.

    Raises:
      ValueError: there is no test set. `round_fn` raises it if the evaluation is not finite.
    """
    gvr = fedgvr(mu, window, server_lr, recursion, [name for name in literal if name in LITERAL])
    gm = fedgm(mu, beta, server_lr, scale, "momentum" in literal)
    if "variate_momentum" in literal and not variate_momentum:
        checks.refuse('variate_momentum must be True for literal="variate_momentum"', "False", "leave out one of them")
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
