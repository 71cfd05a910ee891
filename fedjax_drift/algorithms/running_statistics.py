"""Running statistics (BatchNorm) with any base algorithm, which only sees the other leaves of the model.

Client i:  the update of the base algorithm; every step of `local.train` updates s, starting from
           the received s       "average", "frozen"
           its own s_i          "local"
Server:    as the base algorithm;  s <- mean_S s_i  "average" only                                   (1)

The weights of the mean are those of the base algorithm's messages. No server optimizer, no control variate, no
proximal term and no perturbation acts on the statistics. They change in the forward pass for the gradient (of two
gradients, the first). Passes in evaluation mode inside a round use the statistics with which the client starts.

`Simulation` applies this to a model with `Model.statistics`. Li et al., "FedBN", ICLR 2021, arXiv 2102.07623, keeps all
of BatchNorm with the client: ``fedbn()`` with "local". Andreux et al., "Siloed Federated Learning for Multi-Centric
Histopathology Datasets", DCL 2020, arXiv 2008.07424 (SiloBN), keeps only the statistics: ``fedavg()`` with "local".

Deviations:  SiloBN estimates the statistics of a new client on its data. Here a new client starts with the initial
ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import factors, tree
from fedjax_drift.local import train
from fedjax_drift.model import Model
from fedjax_drift.types import Algorithm, ClientResult, Params, PyTree, Round, Trained, Work, algorithm, whole
from fedjax_drift.wrapping import inside


class Server(NamedTuple):
    base: Any  # the variables of the base algorithm
    statistics: PyTree  # s

    @property
    def params(self) -> Params:
        """The global model with its running statistics."""
        return whole(self.base.params, self.statistics)


class Client(NamedTuple):
    base: PyTree  # the state of the base algorithm
    statistics: PyTree  # s_i with "local", otherwise ()


class Message(NamedTuple):
    base: PyTree  # the message of the base algorithm
    change: PyTree  # s_i - s with "average", otherwise ()


@algorithm
def with_running_statistics(base: Algorithm, kept: str) -> Algorithm:
    """The base algorithm for a model with running statistics. kept: "average", "local" or "frozen"."""
    averaged, local = kept == "average", kept == "local"

    def init_server(model: Params) -> Server:
        return Server(base.init_server(model["params"]), model["batch_stats"])

    def init_client(model: Params) -> Client:
        return Client(base.init_client(model["params"]), model["batch_stats"] if local else ())

    def start(server: Server, client: Client) -> PyTree:
        """The running statistics with which a client starts."""
        return client.statistics if local else server.statistics

    def received(server: Server, client: Client, work: Work) -> tuple[Any, Work]:
        return server.base, separated(work, start(server, client))

    inner = inside(base, server="base", client="base", received=received, message=lambda m: m.base)

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        s = start(server, client)
        result = inner.client_update(server, client, work)
        s_i = result.trained(base.name).statistics
        message = Message(result.message, tree.subtract(s_i, s) if averaged else ())
        return result._replace(message=message, state=Client(result.state.base, s_i if local else ()))

    def server_update(server: Server, mean: Message, context: Round) -> Server:
        s = jax.tree.map(jnp.add, server.statistics, mean.change) if averaged else server.statistics  # (1)
        return inner.server_update(server, mean, seen_by_base(context, s))._replace(statistics=s)

    def personal(server: Server, client: Client, work: Work) -> Params:
        params = server.base.params if inner.personal is None else inner.personal(server, client, work)
        return whole(params, start(server, client))

    def adapt(server: Server, client: Client, work: Work) -> tuple[Params, Trained]:
        assert inner.adapt is not None
        theta, trained = inner.adapt(server, client, work)
        return whole(theta, trained.statistics), trained

    def models(server: Server) -> dict[str, Params]:
        assert inner.models is not None
        return {name: whole(params, server.statistics) for name, params in inner.models(server).items()}

    return inner._replace(
        init_server=init_server,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        personal=personal if inner.personal or local else None,
        adapt=adapt if inner.adapt else None,
        models=models if inner.models else None,
    )


def separated(work: Work, statistics: PyTree) -> Work:
    """The work with a model whose parameters are those under "params", and that starts with these statistics."""
    return work._replace(model=of_parameters(work.model, statistics), statistics=statistics)


def seen_by_base(context: Round, statistics: PyTree) -> Round:
    """The round of the base algorithm's server, whose model has these statistics."""
    return context if context.model is None else context._replace(model=of_parameters(context.model, statistics))


def of_parameters(model: Model, statistics: PyTree) -> Model:
    """The model whose parameters are those under "params"."""

    def of_params(function: Any) -> Any:
        return lambda params, *inputs: function(whole(params, statistics), *inputs)

    return model.with_functions(of_params)._replace(init=lambda key: model.init(key)["params"])


def fine_tuned(work: Work, model: Params) -> Params:
    """A whole model after plain local training, with its running statistics."""
    if work.model.statistics is None:
        start, w = factors.split(model)  # w is not trained, and weight decay must not move it
        return factors.joined(train(factors.around(work, w), start)[0], w)
    _, trained = train(separated(work, model["batch_stats"]), model["params"])
    return trained.theta
