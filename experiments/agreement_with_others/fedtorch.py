"""FedTorch (github.com/MLOPTPSU/FedTorch), by the authors of APFL.

Its main_centered.py runs unchanged. Its networks, its data, its cohorts and the order of its examples are ours. It
does not evaluate. ``zero_grad`` keeps the gradients as zeros, which was the default of PyTorch at their time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from federation import CLASSES, EQUAL, Federation, Row, compared, difference, main, vector, without, written
from linear import LinearFederation

import fedjax_drift as fd

SIZES = (10, 24, 7, 6, 16, 14)  # no batch of one example: their code stops an epoch there


class Loader:
    """The data loader of a client for all rounds."""

    def __init__(self, federation: Federation, i: int, rounds: list[Any]) -> None:
        self.federation, self.i, self.rounds, self.dataset = federation, i, rounds, federation.clients[i][1]
        self.t, self.e = -1, 0

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.federation.batch_size)

    def __iter__(self) -> Any:
        if not self.rounds:  # before round 0, to make gradients of zero
            return iter([tuple(map(torch.from_numpy, self.federation.clients[self.i]))])
        t = len(self.rounds) - 1
        self.e = self.e + 1 if t == self.t else 0
        self.t = t
        return iter(self.federation.epoch(t, self.i, self.e))


def theirs(federation: Federation, method: str, **changes: Any) -> tuple[list[np.ndarray], Any]:
    """The global model after every round of one of their methods, and their clients after the last one."""
    without("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.datasets.utils")
    without("lmdb", "cv2", "tensorpack", "tensorpack.dataflow", "tensorpack.utils")
    without("tensorpack.utils.compatible_serialize")
    program = importlib.import_module("main_centered")
    nodes = importlib.import_module("fedtorch.nodes.nodes_centered")
    comps = importlib.import_module("fedtorch.components.comps")
    folder = "fedtorch.comms.trainings.federated.centered"
    trainings = [importlib.import_module(f"{folder}.{name}") for name in ("main", "apfl")]
    N, models, rounds, found = len(federation.sizes), [], [], {}
    arguments = {
        **{"federated": True, "federated_type": method, "data": "synthetic", "blocks": N, "num_workers": N},
        **{"num_comms": len(federation.cohorts), "online_client_rate": len(federation.cohorts[0]) / N},
        **{"num_epochs_per_comm": federation.epochs, "batch_size": federation.batch_size, "lr": federation.lr},
        **{"lr_schedule_scheme": "custom_multistep", "weight_decay": federation.weight_decay, "on_cuda": False},
        **{"is_distributed": False, "arch": "ours", "debug": True},
    } | changes

    def define_model(args: Any) -> Any:
        made = federation.network()
        made.num_classes = CLASSES
        return made

    def define_dataset(args: Any, **_: Any) -> list[Any]:
        loader = Loader(federation, args.graph.rank, rounds)
        args.num_batches_train_per_device_per_epoch = len(loader)
        return [loader, None, loader] if args.fed_personal else [loader, None]

    def online_clients(args: Any) -> list[int]:
        if rounds:
            models.append(vector(found["server"].model))
        rounds.append(None)
        return list(federation.cohorts[len(rounds) - 1])

    class Server(nodes.ServerCentered):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found["server"] = self

    class Client(nodes.ClientCentered):
        def __init__(self, args: Any, rank: int, **options: Any) -> None:
            super().__init__(args, rank, **options)
            found[rank] = self

    comps.define_model, nodes.define_dataset = define_model, define_dataset
    program.ClientCentered, program.ServerCentered = Client, Server
    for training in trainings:
        training.set_online_clients_centered = online_clients
        training.do_validate_centered = lambda *_, **__: None
    argv = ["main_centered.py", *(f"--{key}={value}" for key, value in arguments.items())]
    zero_grad = functools.partialmethod(torch.optim.Optimizer.zero_grad, set_to_none=False)
    with patch.object(sys, "argv", argv), patch.object(torch.optim.Optimizer, "zero_grad", zero_grad):
        with contextlib.redirect_stdout(io.StringIO()):
            program.main(program.get_args())
    return [*models, vector(found["server"].model)], [found[i] for i in range(N)]


def rows() -> Iterator[Row]:
    plain, equal = Federation(sizes=SIZES), Federation(sizes=EQUAL)
    linear = LinearFederation(sizes=SIZES)
    uniform, mu = {"weighting": "uniform"}, {"mu": 0.1}

    def row(method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        federation, options = more.pop("federation", plain), more.pop("options", {})
        models = theirs(federation, method, **options)[0]
        return compared(federation, name, arguments, models, tuple(f"fedtorch/comms/{line}" for line in lines), **more)

    def own(arguments: dict, *lines: str, cause: str, **options: Any) -> Row:
        """APFL, for the clients' own models."""
        models, clients = theirs(linear, "apfl", fed_personal_alpha=0.5, **options)
        shares = [client.args.fed_personal_alpha for client in clients]
        locals_ = [vector(client.model_personal) for client in clients]
        mixed = [alpha * v + (1 - alpha) * models[-1] for alpha, v in zip(shares, locals_, strict=True)]
        ours = linear.personal(fd.algorithms.apfl(**arguments))
        setting = "the clients' own models; a linear model, because theirs mixes the outputs of two models"
        lines = tuple(f"fedtorch/comms/{line}" for line in lines)
        return Row(written("apfl", arguments), difference(ours, mixed), lines, setting, cause=cause)

    centered = "algorithms/federated/centered/"
    yield row("fedavg", "fedavg", uniform, f"{centered}fedavg.py#rank_weight =  [1.0", default={})
    line = "trainings/federated/centered/main.py#fedprox_mu * (client_param"
    yield row("fedprox", "fedprox", mu | uniform, line, options={"fedprox_mu": 0.1}, default=mu)
    cause = (
        "The server changes its control variate after each client, and the next client of the round computes c_i with "
        "the changed one. With the one from before the round they agree to 2e-16."
    )
    setting = "clients of equal size: their code takes the steps of the last client for all"
    more = {"federation": equal, "setting": setting}
    yield row("scaffold", "scaffold", {}, f"{centered}scaffold.py#scp.data.add_", cause=cause, **more)
    cause = "FedGATE, by the authors of FedTorch, is VRL-SGD when nothing is compressed and the server's factor is 1."
    yield row("fedgate", "vrl_sgd", {}, f"{centered}fedgate.py#delta_param.data +=", cause=cause, **more)

    step = "trainings/federated/centered/apfl.py#loss_personal, _ ="
    yield row("apfl", "apfl", {}, step)
    cause = (
        "The gradient of v_i is computed with the theta after its step, and in the paper with the one before. With the "
        "earlier theta they agree to 1e-16."
    )
    yield own({"alpha": 0.5}, step, cause=cause)
    cause = (
        "As above. Also, the derivative with respect to alpha has the models after the step, and a factor alpha^2 + "
        "(1 - alpha)^2, because both gradients already contain alpha or 1 - alpha. With the models before the step and "
        "without the factor they agree to 2e-16."
    )
    adaptive = {"alpha": 0.5, "adaptive": True, "alpha_every": "round", "alpha_decay": 0.02}
    yield own(adaptive, step, "utils/flow_utils.py#grad = alpha * p_params", cause=cause, fed_adaptive_alpha=True)


if __name__ == "__main__":
    main(rows)
