"""FedGVR, the local phase of FedGVRGM. Wang, Mao, He, Zhou, Wu, Wu, "Accelerating Federated Learning with Two-phase
Gradient Adjustment", IEEE (our copy does not state the year).

Client k:  w_k <- w_k - eta_l (grad F_k(w_k) + mu (w_k - w) + eps (c - c_k))                         (6)
           c_k+ = c_k - c + (w - w_k) / (K eta_l)                                                    (7), line 12
Server:    w <- w + server_lr mean_S (w_k - w)                                                       (10)
           c <- c + (1/N) sum_S (c_k+ - c_k)                                                         (10)
           sub(t) = the best test accuracy so far, in percent
           eps_t = clip((sub(t) - sub(t - h)) / h, 0, 1), and 1 until h + 1 models are evaluated     (8)

with h = `window`. With eps = 1 and mu = 0 this is SCAFFOLD, option II.

Deviations:  some equations of the paper contradict each other or look like typos. The argument `literal` of the factory
selects equations as printed in the paper, and its docstring describes their effects.

In round t, eps is computed from the test accuracies of the models before that round. So the test set influences
training.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import spec, tree
from fedjax_drift.algorithms.fedavg import weight
from fedjax_drift.algorithms.scaffold import total_rate
from fedjax_drift.local import train
from fedjax_drift.spec import Count, NonNegative, Positive
from fedjax_drift.types import Algorithm, ClientResult, Metrics, Needs, Params, PyTree, Round, Work, algorithm

LITERAL = ("step", "sign", "scale", "accuracy")


class Server(NamedTuple):
    params: Params  # w, the global model
    c: Params  # the server's control variate
    best: jax.Array  # [h + 1], sub(t - h), ..., sub(t)
    evaluated: jax.Array  # int32 [], number of models evaluated so far


class Client(NamedTuple):
    c: Params  # c_k, the client's control variate


@algorithm
def fedgvr(
    mu: NonNegative = 0.1,
    window: Count = 5,
    server_lr: Positive = 1.0,
    recursion: Literal["printed", "exact"] = "printed",
    literal: Annotated[Any, spec.words(*LITERAL)] = (),
) -> Algorithm:
    """SCAFFOLD with a proximal term and a correction that fades out when the test accuracy stops improving.

    The state of a client has the size of one model. All clients have weight 1 in the mean. The global model is
    evaluated in every round, so a test set is needed. ``info["eps"]`` is eps_t, a scalar. With local momentum or
    another optimizer, c_k is a mean update direction instead of a mean gradient.

    Args:
      mu: strength of the proximal term, >= 0.
      window: h >= 1, the number of rounds over which the improvement of the accuracy is measured.
      server_lr: learning rate of the server, > 0.
      recursion: the update rule of c_k. "printed" (default) is (7), as printed in the paper. This equation assumes that
        eps = 1. With eps < 1, c_k - c becomes too large: its fixed point is (g_k - mean g) / eps, where g_k is the mean
        gradient of client k. When eps rises again, the correction is too strong. "exact" replaces c_k - c in (7) by
        eps (c_k - c). Then c_k+ is always the mean gradient of client k, including the proximal term.
      literal: equations to use as printed in the paper: one name, several names, or True for all four.
        "step": every step of (6) starts at w. K steps then move about as far as one step, so E has almost no effect
        with plain SGD without clipping.
        "sign": (7) uses w_k - w instead of w - w_k. The correction then increases drift, and training diverges.
        "scale": (7) uses eta_l / K instead of 1 / (K eta_l). c_k is then multiplied by eta_l^2, so the correction has
        almost no effect.
        "accuracy": (8) uses the accuracy as a fraction instead of percent. eps is then at most 1 / h, and about 1e-3
        after the first h rounds.

    Raises:
      ValueError: there is no test set. `round_fn` raises it if the evaluation is not finite.
    """
    percent = 1.0 if "accuracy" in literal else 100.0

    def init_server(params: Params) -> Server:
        return Server(params, tree.zeros_like(params), jnp.zeros(window + 1), jnp.zeros((), jnp.int32))

    def init_client(params: Params) -> Client:
        return Client(tree.zeros_like(params))

    def correction_weight(server: Any) -> jax.Array:
        rise = (server.best[-1] - server.best[0]) / window
        return jnp.where(server.evaluated > window, rise.clip(0, 1), 1)  # (8)

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        w, c, c_k, eps = server.params, server.c, client.c, correction_weight(server)
        fixed = jax.tree.map(lambda w, c, c_k: eps * (c - c_k) - mu * w, w, c, c_k)

        def adjust(g: Params, theta: Params) -> Params:
            g = jax.tree.map(lambda g, theta, fixed: g + mu * theta + fixed, g, theta, fixed)  # (6)
            if "step" in literal:  # w - eta_l g = theta - eta_l (g + (theta - w) / eta_l)
                g = jax.tree.map(lambda g, theta, w: g + (theta - w) / work.lr, g, theta, w)
            return g

        theta, trained = train(work, start=w, correct=adjust)
        D = tree.subtract(theta, w)
        scale = work.lr / work.num_steps if "scale" in literal else 1 / total_rate(work)
        scale = -scale if "sign" in literal else scale
        kept = eps if recursion == "exact" else 1.0
        c_new = jax.tree.map(lambda c_k, c, D: kept * (c_k - c) - scale * D, c_k, c, D)  # (7)
        return ClientResult((D, tree.subtract(c_new, c_k)), weight(work, "uniform"), Client(c_new), trained)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        D, dc = mean
        w = jax.tree.map(lambda w, D: w + server_lr * D, server.params, D)  # (10)
        c = jax.tree.map(lambda c, dc: c + context.participation * dc, server.c, dc)  # (10)
        return server._replace(params=w, c=c)

    def observe(server: Any, metrics: Metrics) -> Any:
        best = jnp.maximum(server.best[-1], percent * metrics["accuracy"])
        return server._replace(best=jnp.append(server.best[1:], best), evaluated=server.evaluated + 1)

    def report(server: Any, mean: PyTree, context: Round) -> Metrics:
        return {"eps": correction_weight(server)}

    return Algorithm(
        init_server,
        init_client,
        client_update,
        server_update,
        observe=observe,
        report=report,
        requires=Needs(accuracy=True),
        name="fedgvr",
    )
