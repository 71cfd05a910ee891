"""FedEx-LoRA and FLoRA: the server averages the products of low-rank factors, and changes the frozen matrices.

FedEx-LoRA  Singhal, Ponkshe, Vepakomma, ACL 2025, arXiv 2410.09432.
FLoRA       Wang, Shen, He, Sun, Wang, Lyu, Li, NeurIPS 2024, arXiv 2409.05976.

An adapted matrix is W_0 + s A B, with A [in, r], B [r, out] and s = alpha / r.

Client i:  A_i, B_i: A and B after the local training of the base algorithm                          (1)
Server:    M = sum_S p_i A_i B_i                                                                     (2)
           FedEx-LoRA:  A, B <- the factors of the base algorithm; with FedAvg their means           (3)
           FLoRA:       A <- random numbers, B <- 0                                                  (4)
           W_0 <- W_0 + s (M - A B), with the new A and B                                            (5)

The new model is the mean of the clients' models. The server's variables have w [in, out] for each adapted matrix, which
is all that (5) has added to W_0, divided by s. The parameters of the model contain it (`factors`).

What is sent: client i sends its factors, from which a real server computes A_i B_i. Here the message also has
A_i B_i - A B, so that M follows from a mean, and ``uplink_bytes`` counts the factors alone. A server with secure
aggregation does not see the factors of one client, so this matrix would be sent. Rules of aggregation and codecs treat
it as a part of the message, and what a codec makes of it counts. ``downlink_bytes`` counts w as a matrix, because a
client may have missed rounds. One round adds a matrix of rank (|S| + 1) r at most, whose factors may be smaller.

Deviations:
- p_i are the weights of the base algorithm. The authors' code of FedEx-LoRA has equal ones.
- FLoRA's clients draw A themselves in each round, and may have different ranks. Here all clients of a round start with
  the same A: in round 0 with the first one, and then with random permutations of its entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, factors, tree
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.algorithms.rolora import Base, refuse_inside
from fedjax_drift.factors import Matrices, around, joined, products, split
from fedjax_drift.message import Coded, decoded
from fedjax_drift.types import THREEFRY, Algorithm, ClientResult, Needs, Params, PyTree, Round, Work, algorithm
from fedjax_drift.wrapping import inside


class Server(NamedTuple):
    params: Params  # the factors, and for FedEx-LoRA and FLoRA the arrays w
    base: Any  # the variables of the base algorithm, without its params
    first: Matrices  # the first A of each adapter; {} unless A starts anew


Following = Callable[[Matrices, Server, Params, Round], Params]


@algorithm
def fedex_lora(base: Base | None = None) -> Algorithm:
    """Averages low-rank factors, and adds what the product of the means lacks to the frozen matrices.

    The model must be one of `fd.models.lora`. Its new parameters have an array ``"w"`` [..., in, out] for each adapted
    matrix, so ``state.params`` has their size.

    Args:
      base: the algorithm that trains and averages the factors. Default: `fedavg()`.

    Raises:
      ValueError: the base has personal models; or, when a `Simulation` is created, the model has no adapters.
    """

    def following(M: Matrices, server: Server, trained: Params, context: Round) -> Params:
        return trained  # (3)

    return exact("fedex_lora", base, following)


@algorithm
def flora(base: Base | None = None) -> Algorithm:
    """Adds the mean product of the low-rank factors to the frozen matrices. The factors start anew in each round.

    What is learnt in several rounds may have a higher rank than one adapter. Arguments and errors as in `fedex_lora`.
    The base algorithm averages the parameters that are trained whole. Its variables of the factors, such as SCAFFOLD's
    control variates, are of little use, because they refer to another A in each round.
    """

    def following(M: Matrices, server: Server, trained: Params, context: Round) -> Params:
        key = jax.random.fold_in(jax.random.key(0, impl=THREEFRY), context.t)
        anew = {}
        for i, (path, a) in enumerate(server.first.items()):  # (4)
            permuted = jax.random.permutation(jax.random.fold_in(key, i), a.ravel()).reshape(a.shape)
            anew[path] = {"a": permuted, "b": jnp.zeros_like(trained[path]["b"])}
        return {**trained, **anew}

    return exact("flora", base, following, restarts=True)


def exact(
    name: str, base: Algorithm | None, following: Following, restarts: bool = False, rest: bool = True
) -> Algorithm:
    """The algorithm around ``base`` that averages the products.

    Args:
      following: ``following(M, server, trained, context)`` returns the new factors, from the mean product M of each
        adapter, the old variables, and the new parameters of the base algorithm.
      restarts: keep the first A.
      rest: add what M has more than the new factors to the frozen matrices, (5).
    """
    base = base or fedavg()
    if base.personal is not None or base.adapt is not None:
        checks.refuse(f"base of {name} must be an algorithm without personal models", base.name)

    def init_server(params: Params) -> Server:
        start, w = split(params)  # w: of an earlier run
        variables = base.init_server(start)
        if "params" not in getattr(variables, "_fields", ()):
            checks.refuse(
                "base must keep the global model in a field params of a NamedTuple", base.name, "use another base"
            )
        zeros = tree.zeros_like(products(start)) if rest else {}
        first = {path: adapter["a"] for path, adapter in factors.adapters(start).items()} if restarts else {}
        return Server(joined(start, zeros | w), variables._replace(params=()), first)

    def init_client(params: Params) -> PyTree:
        return base.init_client(split(params)[0])

    def of_base(server: Server) -> Any:
        return server.base._replace(params=split(server.params)[0])

    def with_base(server: Server, new: Any) -> Server:
        return server._replace(params=joined(new.params, split(server.params)[1]), base=new._replace(params=()))

    def received(server: Server, client: PyTree, work: Work) -> tuple[Any, Work]:
        w = split(server.params)[1]
        if work.part is not None and (w or any(jax.tree.leaves(work.part.personal))):
            refuse_inside(name)
        return of_base(server), around(work, w)

    def client_update(server: Server, client: PyTree, work: Work) -> ClientResult:
        result, (start, w) = inner.client_update(server, client, work), split(server.params)  # (1)
        trained = result.trained(base.name)
        P = tree.subtract(products(trained.theta), products(start))
        whole = replace(trained, start=joined(trained.start, w), theta=joined(trained.theta, w))
        message = result.message, {path: Coded(product, jnp.zeros(())) for path, product in P.items()}
        return result._replace(message=message, metrics=whole)

    def server_update(server: Server, mean: PyTree, context: Round) -> Server:
        new, start = inner.server_update(server, mean, context), split(server.params)[0]
        trained, w = split(new.params)
        M = jax.tree.map(jnp.add, products(start), mean[1])  # (2)
        params = following(M, server, trained, context)
        left = tree.subtract(M, products(params))
        return new._replace(params=joined(params, {path: w[path] + left[path] for path in w}))  # (5)

    def models(server: Server) -> dict[str, Params]:
        assert base.models is not None
        return {name: joined(params, split(server.params)[1]) for name, params in base.models(of_base(server)).items()}

    inner = inside(base, server=(of_base, with_base), received=received, message=lambda m: decoded(m[0]))
    return inner._replace(
        init_server=init_server,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        models=base.models and models,
        requires=Needs.of(base.requires) | Needs(adapters=True),
        name=name,
    )
