"""pFedMe. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, arXiv 2006.08848,
algorithm 1.

Client i:  w_i = x = w;  for each batch:
           x <- x - inner_lr (g(x) + lam (x - w_i))           inner_steps times                      (1)
           w_i <- w_i - eta_t lam (w_i - x)                                                          (2)
           v_i = x, the personal model
Server:    w <- w + beta mean_S (w_i - w)                                                            (3)

(1) approximately minimises F_i(x) + (lam/2) ||x - w_i||^2 on the batch. (2) is a step on its minimum, the Moreau
envelope of F_i, whose gradient at w_i is lam (w_i - x).

Deviations:
- In the paper and in the authors' code, all N clients train in every round, and the server averages |S| of them. Here
  only the cohort trains.
- (1) starts at the x of the last batch, as in the authors' code. With `inner_start="local"`, it starts at w_i.
- The authors' code adds 1e-3 x to the gradient in (1): use a `weight_decay` of 1e-3. It evaluates w_i of (2) as the
  personal model, because its list of personal parameters refers to the parameters that are overwritten with w_i after
  the round. So the published numbers are those of w_i. Here the personal model is v_i, as in the paper.
- The weight of a client is 1, as in the paper. The authors' code uses n_i (`weighting="examples"`).
- Clipping acts on g(x) + lam (x - w_i) in (1). Weight decay is then added. inner_lr does not decay.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fedjax_drift import tree
from fedjax_drift.algorithms.fedavg import Weighting, fedavg, weight
from fedjax_drift.local import train_with
from fedjax_drift.spec import Count, NonNegative, Positive
from fedjax_drift.types import Algorithm, Batch, ClientResult, Needs, Params, Trained, Work, algorithm


class Client(NamedTuple):
    v: Params  # v_i, the personal model


@algorithm
def pfedme(
    lam: NonNegative = 15.0,
    inner_steps: Count = 5,
    inner_lr: Positive = 0.1,
    beta: Positive = 1.0,
    inner_start: Literal["warm", "local"] = "warm",
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Personal models that minimise the client's loss near the global model. The state of a client is one model.

    Args:
      lam: strength of the proximal term, >= 0. With 0, the global model does not move. Use a local learning rate with
        lr * lam <= 1 (the authors use 0.005), and an inner_lr with inner_lr * lam < 2.
      inner_steps: gradient steps per batch, >= 1.
      inner_lr: learning rate of (1), > 0.
      beta: factor of the mean update, > 0.
      inner_start: the start of (1): "warm" (the x of the last batch, default) or "local" (w_i).
      weighting: the weight of a client in the mean: "uniform" (1, default) or "examples" (n_i).

    Local training must be plain SGD, without momentum.
    """
    base = fedavg(beta, weighting)  # (3)

    def trained_on(w: Params, work: Work) -> tuple[Params, Params, Trained]:
        """w_i, x and the metrics after the local training."""

        def gradient(w_i: Params, batch: Batch, key: jax.Array, x: Params) -> tuple[jax.Array, Params, Params]:
            def step(_: int, state: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
                x, _unused = state
                value, g = jax.value_and_grad(work.loss)(x, batch, key)
                g = jax.tree.map(lambda g, x, w_i: (g + lam * (x - w_i)).astype(g.dtype), g, x, w_i)
                u, _ = work.optimizer.update(g, work.optimizer.init(x), x)  # clipping and weight decay
                x = jax.tree.map(lambda x, u: (x - inner_lr * u).astype(x.dtype), x, u)  # (1)
                return x, value.astype(work.lr.dtype)

            begin = x if inner_start == "warm" else w_i
            x, value = lax.fori_loop(0, inner_steps, step, (begin, jnp.zeros_like(work.lr)))
            return value, jax.tree.map(lambda w_i, x: (lam * (w_i - x)).astype(x.dtype), w_i, x), x  # (2)

        return train_with(work._replace(optimizer=optax.identity()), w, gradient, w)

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        w = server.params
        w_i, x, trained = trained_on(w, work)
        return ClientResult(tree.subtract(w_i, w), weight(work, weighting), Client(x), trained)

    def personal(server: Any, client: Client, work: Work) -> Params:
        return client.v

    def adapt(server: Any, client: Client, work: Work) -> tuple[Params, Trained]:
        _, x, trained = trained_on(server.params, work)
        return x, trained

    return base._replace(
        init_client=Client,
        client_update=client_update,
        personal=personal,
        adapt=adapt,
        requires=Needs(optimizer="sgd", one_model=True),
        name="pfedme",
    )
