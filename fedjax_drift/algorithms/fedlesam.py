"""FedLESAM. Fan, Hu, Shen, Sun, Yang, Tao, "Locally Estimated Global Perturbations are Better than Local Perturbations
for Federated Sharpness-aware Minimization", ICML 2024, arXiv 2405.18890.

Client i:  e_i = rho (w_old_i - w) / ||w_old_i - w||, fixed in the round                             (1)
           g <- g(theta + e_i), then as the base algorithm;  w_old_i <- w                            (2)
Server:    as the base algorithm: w <- w + mean_S D_i                                                (3)

w_old_i is the global model that client i received in its last participation. The difference of two global models
estimates the global perturbation, so a step computes one gradient. The base algorithm is FedAvg with uniform weights,
SCAFFOLD (FedLESAM-S) or FedDyn (FedLESAM-D).

Deviations:
- In the first participation of a client, e_i = 0. With `first="initial"`, w_old_i is the initial model. The paper does
  not say which.
- `old="server"` uses the global model of the last round for all clients. This is what the authors' code is meant to do.
  Their code divides by the sum of the norms of the tensors, and gives each tensor a single number. In FedLESAM-S it
  multiplies the control variates by `lamb`, 0.1. Neither is implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.algorithms.feddyn import feddyn
from fedjax_drift.algorithms.fedsam import ascent
from fedjax_drift.algorithms.scaffold import scaffold
from fedjax_drift.spec import NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm
from fedjax_drift.wrapping import inside


class Server(NamedTuple):
    base: Any  # the variables of the base algorithm
    old: PyTree  # the last global model with old="server", otherwise ()

    @property
    def params(self) -> Params:
        """w, the global model."""
        return self.base.params


class Client(NamedTuple):
    base: PyTree  # the state of the base algorithm
    old: PyTree  # w_old_i with old="client", otherwise ()
    seen: PyTree  # bool [], whether the client has participated before


@algorithm
def fedlesam(
    rho: NonNegative = 0.1,
    first: Literal["none", "initial"] = "none",
    old: Literal["client", "server"] = "client",
    correction: Literal["none", "scaffold", "feddyn"] = "none",
    feddyn_alpha: Positive = 0.1,
) -> Algorithm:
    """Sharpness-aware local steps with a perturbation that is estimated from two global models.

    A client keeps one model, in addition to the state of the correction.

    Args:
      rho: size of the perturbation, >= 0. 0 gives the base algorithm.
      first: the perturbation in the first participation of a client: "none" (0, default) or "initial" (w_old_i is the
        initial model). No effect with old="server".
      old: w_old_i: "client" (the global model of the client's last participation, default) or "server" (the global
        model of the last round).
      correction: the base algorithm: "none" (FedAvg with uniform weights, default), "scaffold" or "feddyn".
      feddyn_alpha: alpha of FedDyn, > 0.
    """
    base = {"none": fedavg(weighting="uniform"), "scaffold": scaffold(), "feddyn": feddyn(feddyn_alpha)}[correction]

    def init_server(params: Params) -> Server:
        return Server(base.init_server(params), params if old == "server" else ())

    def init_client(params: Params) -> Client:
        each = old == "client"
        return Client(base.init_client(params), params if each else (), jnp.array(False) if each else ())

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        w = server.params
        w_old = server.old if old == "server" else client.old
        e = ascent(rho, tree.subtract(w_old, w))  # (1)
        if old == "client" and first == "none":
            e = jax.tree.map(lambda e: jnp.where(client.seen, e, 0), e)
        result = base.client_update(server.base, client.base, shifted(work, e))  # (2)
        seen = jnp.array(True) if old == "client" else ()
        return result._replace(state=Client(result.state, w if old == "client" else (), seen))

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        return Server(base.server_update(server.base, mean, context), server.params if old == "server" else ())  # (3)

    return inside(base, server="base", client="base")._replace(
        init_server=init_server,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        name="fedlesam",
    )


def shifted(work: Work, e: Params) -> Work:
    """The same work with a model that is evaluated at theta + e instead of theta."""
    statistics = work.model.statistics

    def plus_e(function: Callable) -> Callable:
        return lambda theta, *inputs: function(jax.tree.map(lambda theta, e: theta + e, theta, e), *inputs)

    if statistics is not None:
        statistics = statistics._replace(forward=plus_e(statistics.forward))
    return work._replace(model=work.model.with_functions(plus_e)._replace(statistics=statistics))
