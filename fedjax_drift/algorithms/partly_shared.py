"""Shares only a part of the model, with any base algorithm. The rest, the personal part, stays with the client.

Client i:  start = (shared leaves of w, p_i)                                                         (1)
           the update of the base algorithm, whose message lacks the personal leaves, which are 0    (2)
           p_i <- the personal leaves of theta_i                                                     (3)
Server:    as the base algorithm;  with new_clients="mean" the personal leaves of w <- mean_S p_i    (4)

At the first participation of a client, p_i are the personal leaves of w. Without (4), these never move from the initial
model. The model of client i is (shared leaves of w, p_i), which `evaluate_clients` evaluates. `evaluate` evaluates w.
A new client, which sends nothing yet, trains p_i only, with the shared leaves of w.
The terms that the base algorithm adds to the computed gradient act on the shared leaves only (FedProx, SCAFFOLD,
FedDyn). Those in its loss, and the perturbations of SAM, act on all leaves. fedper.py has the algorithms of this kind.

Drift is measured on the shared leaves. With "alternate", the epochs that train the personal leaves are not measured.

Deviations:  none. Combinations with other algorithms than FedAvg are our own. A base that keeps its last local model
(MOON, LfD) keeps it with the personal leaves from before the training of that round.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import checks, leaves, spec
from fedjax_drift.algorithms.fedavg import fedavg
from fedjax_drift.local import train
from fedjax_drift.message import Absent, decoded, filled, is_like
from fedjax_drift.model import Part
from fedjax_drift.spec import Count, Fix
from fedjax_drift.types import Algorithm, ClientResult, Needs, Params, PyTree, Round, Trained, Work, algorithm
from fedjax_drift.wrapping import inside


class Client(NamedTuple):
    base: PyTree  # the state of the base algorithm
    personal: list[jax.Array]  # p_i, the personal leaves; [] if they are frozen
    seen: Any = ()  # bool [], whether the client has participated before, with new_clients="mean"


NewClients = Literal["initial", "mean"]


@algorithm
def partly_shared(
    base: Annotated[Algorithm, spec.instance(Algorithm), Fix("pass fd.algorithms.scaffold()")] | None = None,
    personal: leaves.Selection = "classifier",
    schedule: Literal["joint", "alternate", "frozen"] = "joint",
    base_epochs: Count = 1,
    new_clients: NewClients = "initial",
) -> Algorithm:
    """Any base algorithm, for the shared part of the model only. A client keeps its personal part.

    Args:
      base: the algorithm for the shared part. It must pass on what `local.train` returns, and its server's variables
        must be a NamedTuple with a field params. Default: `fedavg()`.
      personal: the personal leaves of the parameters. A regular expression that is searched in the path of a leaf, such
        as "classifier/dense/kernel"; or a function from this path to a bool; or a pytree with a bool for every leaf.
        Default: the classifier of the models in `fd.models`.
      schedule: "joint" (default) trains all leaves together. "alternate" first trains the personal leaves for
        E - base_epochs epochs, and then the shared leaves for base_epochs epochs, each with a new optimizer state.
        "frozen" never trains the personal leaves, and clients do not keep them.
      base_epochs: epochs of "alternate" that train the shared leaves, in 1..E - 1.
      new_clients: the personal leaves with which a client starts at its first participation. "initial" (default): those
        of the initial model. "mean": the mean of those that the last cohort has sent. Clients then upload the whole
        model, and `evaluate` evaluates it with this mean.

    Raises:
      ValueError: a regular expression selects no leaf or all leaves. Pass ``personal=lambda path: False`` to share
        everything, ``lambda path: True`` to train every client alone. A `Simulation` raises it if base_epochs is not
        less than the local epochs.
    """
    base = base or fedavg()
    averages = new_clients == "mean"
    if averages and schedule == "frozen":
        checks.refuse('new_clients must be "initial" with schedule="frozen"', '"mean"', "it trains no personal leaves")
    if base.personal is not None:
        checks.refuse("base must be an algorithm without personal models", base.name)
    if Needs.of(base.requires).adapters:  # it trains a part itself, or changes frozen matrices
        what = f"{base.name} must not be inside another algorithm that trains a part of the model"
        checks.refuse(what, "one inside partly_shared", f"call {base.name} without it")
    keeps = schedule != "frozen"

    def leaves_of(params: Params) -> list[jax.Array]:
        mask = jax.tree.leaves(leaves.select("personal", personal, params))
        return [leaf for leaf, is_own in zip(jax.tree.leaves(params), mask, strict=True) if is_own and keeps]

    def with_leaves(params: Params, values: list[jax.Array]) -> Params:
        remaining = iter(values)
        mask = leaves.select("personal", personal, params)
        return jax.tree.map(lambda leaf, is_own: next(remaining) if is_own and keeps else leaf, params, mask)

    def init_client(params: Params) -> Client:
        if isinstance(personal, str) and all(jax.tree.leaves(leaves.select("personal", personal, params))):
            checks.refuse(
                "personal must leave a part of the model to share",
                f"{personal!r}, which selects all leaves",
                "use a model with more layers, or another regular expression",
            )
        return Client(base.init_client(params), leaves_of(params), jnp.array(False) if averages else ())

    def own_leaves(params: Params, client: Client) -> list[jax.Array]:
        """p_i, and at the first participation the personal leaves of params, that is of w."""
        if not averages:
            return client.personal  # it starts with the same leaves, and they never move in w
        return [jnp.where(client.seen, p, w) for p, w in zip(client.personal, leaves_of(params), strict=True)]

    def client_update(server: Any, client: Client, work: Work) -> ClientResult:
        if "params" not in getattr(server, "_fields", ()):
            checks.refuse(
                "base must keep the global model in a field params of a NamedTuple", base.name, "use another base"
            )
        if work.part is not None:  # `local.train` treats one part, so the outer one's leaves would be trained as usual
            checks.refuse(
                "partly_shared must not be inside another algorithm that trains a part of the model",
                "partly_shared, rolora, or flexlora with ranks",
                "select the leaves of two partly_shared with one personal=",
            )
        start = with_leaves(server.params, own_leaves(server.params, client))  # (1)
        mask = leaves.select("personal", personal, start)
        shared, everything = jax.tree.map(lambda is_own: not is_own, mask), jax.tree.map(lambda is_own: True, mask)
        if schedule == "alternate":
            start, work = train_personal_first(work, start)

        def handed_over(theta: Params) -> Params:  # D_i is then 0 on the personal leaves
            return with_leaves(theta, leaves_of(start))

        part = Part(mask, everything if schedule == "joint" else shared, leaves_of, handed_over)
        work = work._replace(part=part, surveyed=filled(work.surveyed))
        result = base.client_update(server._replace(params=start), client.base, work)  # (2)
        own = result.trained(base.name).own  # (3)
        message = shared_part(server, result.message)
        if not averages:
            return result._replace(message=message, state=Client(result.state, own))
        moved = [p - w for p, w in zip(own, leaves_of(server.params), strict=True)]
        return result._replace(message=(message, moved), state=Client(result.state, own, jnp.array(True)))

    def server_update(server: Any, mean: PyTree, context: Round) -> Any:
        personal = [w + d for w, d in zip(leaves_of(server.params), mean[1], strict=True)]  # (4)
        server = inner.server_update(server, mean, context)
        return server._replace(params=with_leaves(server.params, personal))

    def adapt(server: Any, client: Client, work: Work) -> tuple[Params, Trained]:
        start = model_of_client(server, client, work)
        return train(only_personal(work, start), start)

    def only_personal(work: Work, start: Params) -> Work:
        """The work that trains the personal leaves only."""
        mask = leaves.select("personal", personal, start)
        return work._replace(part=Part(mask, mask, lambda theta: (), lambda theta: theta))

    def train_personal_first(work: Work, start: Params) -> tuple[Params, Work]:
        """The model after the epochs that train the personal leaves, and the work of the other epochs."""
        before = work.epochs - base_epochs
        # A straggler, too, does a step on the shared leaves, because algorithms divide by the number of these steps.
        steps = (before * work.num_batches).clip(max=(work.num_steps - 1).clip(0))
        mean_steps = work.mean_steps // work.epochs
        first = only_personal(work, start)._replace(epochs=before, num_steps=steps, watch=None)
        start, trained = train(first, start)
        rest = work._replace(epochs=base_epochs, num_steps=work.num_steps - steps, first_epoch=before)
        rest = rest._replace(statistics=None if work.statistics is None else trained.statistics)
        return start, rest._replace(mean_steps=base_epochs * mean_steps)

    def received(server: Any, client: Client, work: Work) -> tuple[Any, Work]:
        return server._replace(params=model_of_client(server, client, work)), work

    def shared_part(server: Any, message: PyTree) -> PyTree:
        return without_personal(message, server.params, leaves.select("personal", personal, server.params))

    def model_of_client(server: Any, client: Client, work: Work) -> Params:
        return with_leaves(server.params, own_leaves(server.params, client))

    def of_base(message: PyTree) -> PyTree:
        return filled(message[0] if averages else message)

    inner = inside(base, client="base", received=received, message=of_base, surveyed=filled, sends=shared_part)
    needs = Needs.of(base.requires) | Needs(epochs=base_epochs + 1 if schedule == "alternate" else 0)
    return inner._replace(
        init_client=init_client,
        client_update=client_update,
        server_update=server_update if averages else inner.server_update,
        personal=model_of_client if keeps else None,
        adapt=adapt if keeps else None,
        requires=needs,
        name="partly_shared",
    )


def without_personal(message: PyTree, params: Params, mask: PyTree) -> PyTree:
    """The message without the personal leaves of all its parts that are shaped like the parameters."""
    is_like_params = is_like(params)

    def absent(leaf: PyTree) -> Absent:
        array = filled(decoded(leaf))
        return Absent(array.shape, array.dtype)

    def shared(part: PyTree) -> PyTree:
        if not is_like_params(part):
            return part
        return jax.tree.map(lambda is_own, leaf: absent(leaf) if is_own else leaf, mask, part)

    return jax.tree.map(shared, message, is_leaf=is_like_params)
