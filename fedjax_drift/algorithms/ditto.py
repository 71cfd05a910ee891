"""Ditto. Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
arXiv 2012.04221, algorithm 1.

Client i:  theta_i and D_i as in FedAvg                                                              (1)
           v_i <- v_i - eta_t (g(v_i) + lam (v_i - w)), K_i steps on the same batches                (2)
Server:    as FedAvg

v_i is the personal model of client i. It starts at the initial global model, and is kept between participations. w is
the global model that the client received. The global model does not depend on v_i and lam. A new client does (2),
starting from the current w.

Deviations:  in the paper, clients are drawn with probability n_i / sum n, and their updates have weight 1. Here they
are drawn uniformly, and an update has weight n_i (`weighting="examples"`).
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, weight
from fedjax_drift.local import train
from fedjax_drift.spec import Count, Fix, NonNegative
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, Trained, Work, algorithm


class Client(NamedTuple):
    v: Params  # v_i, the personal model


@algorithm
def ditto(
    lam: NonNegative = 1.0,
    personal_epochs: Annotated[Count, Fix("None means the local epochs")] | None = None,
    weighting: Weighting = "examples",
) -> Algorithm:
    """FedAvg, and a personal model of every client that stays near the global model.

    The state of a client has the size of one model. A round trains two models per client.

    Args:
      lam: strength with which the global model attracts the personal models, >= 0. 0: each client trains alone. Local
        steps are stable only if eta_t (lam + curvature) < 2.
      personal_epochs: epochs of (2), >= 1. The default None is the number of epochs of the local training.
      weighting: the weight of a client in the mean: "examples" (n_i, default) or "uniform" (1).
    """
    base, requires = fedavg(weighting=weighting), Needs(one_model=True, epochs=int(personal_epochs is not None))

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        w = server.params
        theta, trained = train(work, start=w)  # (1)
        personal_work = work
        if personal_epochs is not None:
            steps = -(-work.num_steps * personal_epochs // work.epochs)  # a straggler does a part of them
            personal_work = work._replace(epochs=personal_epochs, num_steps=steps)
        v, of_personal = adapt(server, client, personal_work)
        trained = trained | {"personal_loss": of_personal["loss"]}  # drift is that of theta_i
        return ClientResult(tree.subtract(theta, w), weight(work, weighting), Client(v), trained)

    def adapt(server: Any, client: Client, work: Work) -> tuple[Params, Trained]:
        def attract(g: Params, v: Params) -> Params:
            return jax.tree.map(lambda g, v, w: g + lam * (v - w), g, v, server.params)  # (2)

        return train(work, start=client.v, correct=attract)

    def personal(server: Any, client: Client, work: Work) -> Params:
        return client.v

    made = base._replace(init_client=Client, client_update=client_update, requires=requires, name="ditto")
    return made._replace(personal=personal, adapt=adapt)
