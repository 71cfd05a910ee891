"""FedAU. Wang, Ji, "A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging", ICLR
2024, arXiv 2306.03401, algorithms 1 and 2.

Client i:  theta_i = w, then local training;  D_i = theta_i - w;  sends omega_i D_i                  (1)
Server:    w <- w + (server_lr / N) sum_S omega_i D_i                                                (2)

omega_i is the mean length of the intervals of client i that ended before round t. An interval ends with a round in
which the client takes part, or after Kmax rounds. omega_i = 1 before the first interval has ended. With t_i, the round
of the last participation (-1 at first), and M_i, the number of intervals up to it:

           L = t - t_i,  of which (L - 1) // Kmax whole intervals have ended before round t          (3)
           omega_i = (t_i + 1 + Kmax ((L - 1) // Kmax)) / (M_i + (L - 1) // Kmax)                    (4)
           M_i <- M_i + ceil(L / Kmax);  t_i <- t                                                    (5)

(4) is the running mean of the paper: all rounds up to t_i belong to intervals that ended with t_i or before.

Deviations:  the paper counts in every round. (3) to (5) give the same when the client takes part. Its K is our Kmax.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Server, fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.spec import Count, Fix, Positive
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm


class Client(NamedTuple):
    t: jax.Array  # int32 [], t_i, the round of the client's last participation, or -1
    intervals: jax.Array  # int32 [], M_i, the number of its intervals


@algorithm
def fedau(
    cutoff: Annotated[Count, Fix("None means that no interval is cut")] | None = 50, server_lr: Positive = 1.0
) -> Algorithm:
    """FedAvg in which a client that takes part rarely has a larger weight.

    The weight omega_i estimates N / |S| for uniform cohorts, and one over the client's probability in general. The
    probabilities may be unknown and differ between the clients. The state of a client is two integers. ``info`` has
    ``omega``, the weight of each client of the round. What changes the weights is refused, as in `fedvarp`.

    Args:
      cutoff: Kmax, >= 1, the length at which an interval is cut. A small value bounds the weights, and so the variance.
        A large one has a smaller bias against clients that are away for long. Default: 50, as in the paper's
        experiments. None: no cut.
      server_lr: learning rate of the server, > 0. With 1 (default) and all clients in every round, it is FedAvg with
        uniform weights.
    """

    def init_client(params: Params) -> Client:
        return Client(jnp.int32(-1), jnp.int32(0))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        L = work.t - client.t
        Kmax = L if cutoff is None else cutoff
        cuts = (L - 1) // Kmax  # (3)
        rounds, M = client.t + 1 + Kmax * cuts, client.intervals + cuts
        omega = jnp.where(M > 0, rounds.astype(work.lr.dtype) / jnp.maximum(M, 1), 1)  # (4)
        theta, trained = train(work, start=server.params)
        D = jax.tree.map(lambda D: omega * D, tree.subtract(theta, server.params))  # (1)
        after = Client(work.t, M + 1)  # (5)
        return ClientResult(D, weight(work, "uniform"), after, trained | {"omega": omega})

    def server_update(server: Server, D: PyTree, context: Round) -> Server:
        scale = server_lr * context.participation  # |S| / N
        return Server(jax.tree.map(lambda w, D: w + scale * D, server.params, D))  # (2)

    base = fedavg()._replace(init_client=init_client, client_update=client_update, server_update=server_update)
    return base._replace(name="fedau", requires=Needs(equal_weights=True))
