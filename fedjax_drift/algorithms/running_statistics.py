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

from fedjax_drift import tree
from fedjax_drift.local import train
from fedjax_drift.types import Algorithm, ClientResult, Metrics, Params, PyTree, Round, Work, algorithm, whole


class Server(NamedTuple):
    base: Any  # the variables of the base algorithm
    statistics: PyTree  # s

    @property
    def params(self) -> Params:
        """The global model with its running statistics."""
        return whole(self.base.params, self.statistics)

    @property
    def client_mean(self) -> Params | None:
        """The mean of the cohort's models, if the base algorithm has it (FedDyn)."""
        return self._other("client_mean")

    @property
    def last_two_mean(self) -> Params | None:
        """The mean of the last two global models, if the base algorithm has it (FedExP)."""
        return self._other("last_two_mean")

    @property
    def average(self) -> Params | None:
        """The mean of all global models, if the base algorithm has it (agnostic federated averaging)."""
        return self._other("average")

    def _other(self, name: str) -> Params | None:
        params = getattr(self.base, name, None)
        return None if params is None else whole(params, self.statistics)


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

    def client_update(server: Server, client: Client, work: Work) -> ClientResult:
        s = client.statistics if local else server.statistics
        work = separated(work, s)
        result = base.client_update(server.base, client.base, work)
        s_i = result.trained(base.name).statistics
        message = Message(result.message, tree.subtract(s_i, s) if averaged else ())
        return result._replace(message=message, state=Client(result.state, s_i if local else ()))

    def server_update(server: Server, mean: Message, context: Round) -> Server:
        s = jax.tree.map(jnp.add, server.statistics, mean.change) if averaged else server.statistics  # (1)
        return Server(base.server_update(server.base, mean.base, context), s)

    def observe(server: Server, metrics: Metrics) -> Server:
        assert base.observe is not None
        return server._replace(base=base.observe(server.base, metrics))

    def complete(client: Client, message: Message) -> Client:
        assert base.complete is not None
        return client._replace(base=base.complete(client.base, message.base))

    def finish(server: Server, client: Client) -> Client:
        assert base.finish is not None
        return client._replace(base=base.finish(server.base, client.base))

    def report(server: Server, mean: Message, context: Round) -> Metrics:
        assert base.report is not None
        return base.report(server.base, mean.base, context)

    def personal(server: Server, client: Client, work: Work) -> Params:
        s = client.statistics if local else server.statistics
        if base.personal is None:
            return whole(server.base.params, s)
        return whole(base.personal(server.base, client.base, separated(work, s)), s)

    def survey(server: Server, client: Client, work: Work) -> ClientResult:
        assert base.survey is not None
        s = client.statistics if local else server.statistics
        return base.survey(server.base, client.base, separated(work, s))._replace(state=client)

    return base._replace(
        init_server=init_server,
        init_client=init_client,
        client_update=client_update,
        server_update=server_update,
        observe=observe if base.observe else None,
        complete=complete if base.complete else None,
        finish=finish if base.finish else None,
        report=report if base.report else None,
        personal=personal if base.personal or local else None,
        survey=survey if base.survey else None,
    )


def separated(work: Work, statistics: PyTree) -> Work:
    """The work with a model whose parameters are those under "params", and that starts with these statistics."""
    model = work.model

    def of_params(function: Any) -> Any:
        return lambda params, *inputs: function(whole(params, statistics), *inputs)

    model = model.with_functions(of_params)._replace(init=lambda key: work.model.init(key)["params"])
    return work._replace(model=model, statistics=statistics)


def fine_tuned(work: Work, model: Params) -> Params:
    """A whole model after plain local training, with its running statistics."""
    if work.model.statistics is None:
        return train(work, model)[0]
    _, trained = train(separated(work, model["batch_stats"]), model["params"])
    return trained.theta
