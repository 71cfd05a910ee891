"""FlexLoRA. Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources", NeurIPS 2024, arXiv 2402.11505.

An adapted matrix is W_0 + s A B, with A [in, r], B [r, out] and s = alpha / r. Client i has the rank r_i <= r.

Client i:  A_i, B_i: the local training of the base algorithm, from A[:, :r_i] and B[:r_i]           (1)
Server:    M = sum_S p_i A_i B_i                                                                     (2)
           U S V: the singular value decomposition of M
           A <- U[:, :r] sqrt(S[:r]),  B <- sqrt(S[:r]) V[:r]                                        (3)

The new product A B is the best approximation of M with rank r. It is M itself if the ranks of the clients sum to at
most r. A direction whose singular value is 0 has A = 0 and B = 0, so its gradient is 0. It stays so until M has another
direction.

Deviations:
- The paper gives ranks to clients by their resources. Here a client draws its rank.
- p_i are the weights of the base algorithm. With FedAvg these are n_i, as in the paper.

exact_lora.py says how M follows from the mean of the messages, and what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, factors, tree
from fedjax_drift.algorithms.exact_lora import Server, exact
from fedjax_drift.algorithms.rolora import Base, declared, only
from fedjax_drift.factors import Matrices, products
from fedjax_drift.message import decoded
from fedjax_drift.spec import Fix, Shape
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Work, algorithm
from fedjax_drift.wrapping import inside

RANK = 2**32 - 3  # fold_in(work.key, RANK) is the key with which a client draws its rank
Ranks = Annotated[Shape, Fix("(2, 4, 8), for example")]


class Client(NamedTuple):
    base: PyTree  # the state of the base algorithm
    rank: jax.Array  # int32 [], r_i; 0 before the first participation


@algorithm
def flexlora(base: Base | None = None, ranks: Ranks | None = None) -> Algorithm:
    """Averages the products of low-rank factors, and decomposes the mean into factors again.

    The model must be one of `fd.models.lora`. A round takes a singular value decomposition of each adapted matrix.

    Args:
      base: as in `fedex_lora`. It averages the parameters that are trained whole.
      ranks: ranks of the clients, integers in 1..r, where r is the rank of the model's adapters. A client draws one of
        them at its first participation, all with the same probability, and keeps it. It receives and trains as many
        directions, those of the largest singular values. ``info["rank"]`` [K] has them. Default: all have rank r.

    Raises:
      ValueError: as in `fedex_lora`; or a rank is larger than that of the model's adapters.
    """

    def following(M: Matrices, server: Server, trained: Params, context: Round) -> Params:
        return {**trained, **{path: decomposed(m, trained[path]["a"].shape[-1]) for path, m in M.items()}}

    whole = exact("flexlora", base, following, rest=False)
    if ranks is None:
        return whole

    def init_client(params: Params) -> Client:
        for path, adapter in factors.adapters(params).items():
            if max(ranks) > (r := adapter["a"].shape[-1]):
                checks.refuse(f"ranks must be at most {r}, the rank of the adapter of {path}", max(ranks))
        return Client(whole.init_client(params), jnp.zeros((), jnp.int32))

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        drawn = jax.random.choice(jax.random.fold_in(work.key, RANK), jnp.asarray(ranks, jnp.int32))
        r_i = jnp.where(client.rank > 0, client.rank, drawn)
        mask = {path: leading(adapter, r_i) for path, adapter in factors.adapters(server.params).items()}
        start = {
            **server.params,
            **{path: jax.tree.map(jnp.multiply, server.params[path], mask[path]) for path in mask},
        }
        work = only(work, start, mask, "flexlora")
        result = inner.client_update(server._replace(params=start), client, work)  # (1)
        trained = result.trained("flexlora") | {"rank": r_i}
        m, P = result.message
        left_out = tree.subtract(products(server.params), products(start))  # P_i is relative to the start, and (2) to 0
        P = {path: replace(part, decoded=part.decoded - left_out[path]) for path, part in P.items()}
        message = declared(m, start, mask), P
        return result._replace(message=message, state=Client(result.state.base, r_i), metrics=trained)

    inner = inside(whole, client="base", message=decoded)
    return inner._replace(init_client=init_client, client_update=client_update)


def leading(adapter: Mapping[str, jax.Array], r_i: jax.Array) -> dict[str, jax.Array]:
    """bool [..., 1, r] and [..., r, 1]: the first r_i columns of A, and rows of B."""
    stack, r = [1] * (adapter["a"].ndim - 2), adapter["a"].shape[-1]
    chosen = jnp.arange(r) < r_i
    return {"a": chosen.reshape(*stack, 1, r), "b": chosen.reshape(*stack, r, 1)}


def decomposed(M: jax.Array, r: int) -> dict[str, jax.Array]:
    """Equation (3) for M [..., in, out]: the factors [..., in, r] and [..., r, out]."""
    if M.ndim > 2:
        return jax.vmap(lambda m: decomposed(m, r))(M)
    U, S, V = svd(M)
    root = jnp.sqrt(S[:r])
    return {"a": U[:, :r] * root[None], "b": root[:, None] * V[:r]}


@jax.custom_batching.sequential_vmap
def svd(M: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The decomposition of one matrix.

    On a CPU, LAPACK's kernel divides a stack among the threads of XLA, and waits for them in one of these threads. With
    several devices all threads may wait, and none is left to compute.
    """
    U, S, V = jnp.linalg.svd(M, full_matrices=False)
    return U, S, V
