"""RoLoRA. Chen, Ju, Dalal, Zhu, Khisti, "Robust Federated Finetuning of Foundation Models via Alternating Minimization
of LoRA", 2024, arXiv 2409.02346.

Client i:  t even:  A_i = A, and B_i is trained                                                      (1)
           t odd:   B_i = B, and A_i is trained
           sends the factor that it has trained                                                      (2)
Server:    as the base algorithm, FedAvg:  B <- sum_S p_i B_i,  or  A <- sum_S p_i A_i

An adapted matrix is W_0 + s A B. One factor is the same for all clients of a round, so the product of the means is the
mean of the products: sum_S p_i A B_i = A sum_S p_i B_i. With only even rounds this is FFA-LoRA. Parameters that are
trained whole are trained in all rounds.

Deviations:  none with FedAvg. Another base algorithm may send other values than updates, such as SCAFFOLD the change of
its control variates. Those of the frozen factor that are not 0 are sent, too, and count in ``uplink_bytes``. A client
receives both factors, because it may have missed the last round.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import jax

from fedjax_drift import checks, factors, spec
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.message import Coded, decoded, is_like
from fedjax_drift.model import Part
from fedjax_drift.spec import Fix
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Work, algorithm
from fedjax_drift.wrapping import inside

Base = Annotated[Algorithm, spec.instance(Algorithm), Fix("pass fd.algorithms.fedprox(0.01), for example")]
Mask = dict[str, dict[str, jax.Array]]  # path of an adapter -> {"a": bool, "b": bool}, which broadcast to the factors


@algorithm
def rolora(base: Base | None = None) -> Algorithm:
    """Trains and averages the factors B of low-rank adapters in even rounds, and A in odd ones.

    The model must be one of `fd.models.lora`. A client sends about half as much as with FedAvg.

    Args:
      base: the algorithm that trains and averages them. Default: `fedavg()`.

    Raises:
      ValueError: when a `Simulation` is created, if the model has no adapters.
    """
    base = base or fedavg()

    def client_update(server: Any, client: PyTree, work: Work) -> ClientResult:
        trains_b = work.t % 2 == 0
        mask = {path: {"a": ~trains_b, "b": trains_b} for path in factors.adapters(server.params)}
        result = inner.client_update(server, client, only(work, server.params, mask, "rolora"))  # (1)
        return result._replace(message=declared(result.message, server.params, mask))  # (2)

    inner = inside(base, message=decoded)
    needs = Needs.of(base.requires) | Needs(adapters=True)
    return inner._replace(client_update=client_update, requires=needs, name="rolora")


def only(work: Work, params: Params, mask: Mask, name: str) -> Work:
    """The work, whose steps move the factors only where the mask is True. name: of the algorithm that asks for it."""
    if work.part is not None:
        refuse_inside(name)
    nothing = jax.tree.map(lambda leaf: False, params)
    trained = {path: mask.get(path, jax.tree.map(lambda leaf: True, node)) for path, node in params.items()}
    return work._replace(part=Part(nothing, trained, lambda theta: (), lambda theta: theta))


def refuse_inside(name: str) -> NoReturn:
    """Raises ConfigurationError for an algorithm that is the base of one that trains a part of the model."""
    checks.refuse(
        f"{name} must not be inside another algorithm that trains a part of the model",
        "one inside partly_shared or rolora",
        f"call {name} without it",
    )


def declared(message: PyTree, params: Params, mask: Mask) -> PyTree:
    """The message. Of the factors in its parts that are shaped like ``params``, a client sends the numbers that the
    mask selects, and those that are not 0."""
    is_like_params = is_like(params)

    def sent(leaf: PyTree, chosen: jax.Array) -> PyTree:
        if isinstance(leaf, Coded):  # the base algorithm sends it with a codec
            return leaf
        return Coded(leaf, 8 * leaf.dtype.itemsize * (chosen | (leaf != 0)).sum(dtype=float))

    def part(value: PyTree) -> PyTree:
        if not is_like_params(value):
            return value
        return {**value, **{path: {n: sent(value[path][n], each) for n, each in mask[path].items()} for path in mask}}

    return jax.tree.map(part, message, is_leaf=is_like_params)
