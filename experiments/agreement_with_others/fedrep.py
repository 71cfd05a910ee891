"""FedRep (github.com/lgcollins/FedRep), by the authors of the algorithm.

Their main_fedrep.py runs unchanged. The model, the cohorts and the order of the examples are ours. The data set has the
name of one of theirs: with "femnist", clients have weight n_i, with "cifar10", weight 1. The scripts of their Ditto,
APFL and SCAFFOLD stop with a NameError or a TypeError: their training reads names that it does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import optax
from federation import Federation, Network, Row, difference, main, vector, without, written
from lg_fedavg import run_script

import fedjax_drift as fd

HEAD = ["head.weight", "head.bias"]
KEYS = {  # their layers, of which the code selects the shared ones by number
    "femnist": [["base.0.weight"], ["base.0.bias"], [], HEAD],
    "cifar10": [["base.0.weight"], ["base.0.bias"], HEAD, [], []],
}
LG_KEYS = {"femnist": KEYS["femnist"], "cifar10": [["base.0.weight", "base.0.bias"], [], HEAD, [], []]}


class Zeroing(Network):
    """A network whose gradients are 0, and not None, after `zero_grad`, as in PyTorch before 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def theirs(
    federation: Federation, method: str, dataset: str, network: type[Network] = Network
) -> tuple[list[np.ndarray], np.ndarray]:
    """The global model after every round, and the models of the clients that they evaluate after the last round."""
    without("torchvision", "models.test")
    import utils.train_utils

    N, rounds = len(federation.sizes), len(federation.cohorts)
    results: list[np.ndarray] = []
    personal: list[Sequence[np.ndarray]] = []
    data = {str(i): {"x": list(x), "y": list(y)} for i, (x, y) in enumerate(federation.clients)}

    def model(args: Any) -> Network:
        made = federation.network()
        made.__class__ = network
        made.weight_keys = (LG_KEYS if method == "lg" else KEYS)[dataset]
        return made

    def evaluate(net: Network, *_: Any, w_locals: Any = None, w_glob_keys: Any = (), **__: Any) -> tuple[float, float]:
        if w_locals is not None:
            results.append(vector(net))
            state = net.state_dict()
            own = [{k: state[k] if k in w_glob_keys else w_locals[i][k] for k in state} for i in range(N)]
            personal.append([vector(list(leaves.values())) for leaves in own])
        return 0.0, 0.0

    sys.modules["models.test"].test_img_local_all = evaluate
    options = {"alg": method, "dataset": dataset, "num_users": N, "epochs": rounds, "lr": federation.lr, "mu": 0.1}
    options |= {"local_ep": federation.epochs, "local_rep_ep": 1, "local_bs": federation.batch_size, "gpu": -1}
    words = ["main_fedrep.py", *(f"--{name}={value}" for name, value in options.items())]
    examples = patch.object(utils.train_utils, "read_data", lambda *_: (list(data), [], data, data))
    run_script(federation, words, model, examples)
    return results, np.array(personal[-1])


def rows() -> Iterator[Row]:
    federation = Federation(epochs=3)
    kernels = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)  # noqa: E731
    local = {"optimizer": optax.chain(optax.add_decayed_weights(1e-4, mask=kernels), optax.trace(0.5))}
    prox = {"momentum": 0.5, "weight_decay": 1e-4}
    aliased = "main_fedrep.py#w_local_dict[key] =net_glob.state_dict()[key]"
    update = "models/Update.py#def train#5", "main_fedrep.py#w_glob[k] = torch.div"
    mean = (
        "Their table of the clients' personal parts has the tensors of the global model, and not copies, until a "
        "client has trained. So a client starts with the mean of the personal parts that the last cohort has trained."
    )

    def row(
        method: str, dataset: str, name: str, arguments: dict, default: dict | None = None, **more: Any
    ) -> Iterator[Row]:
        network = more.pop("network", Network)
        models, personal = theirs(federation, method, dataset, network)
        options = {"local": prox if method == "prox" else local}

        def algorithm(arguments: dict) -> fd.Algorithm:
            return getattr(fd.algorithms, name)(**arguments)

        def to(arguments: dict) -> float:
            return difference(federation.run(algorithm(arguments), **options), models)

        def of_clients(arguments: dict) -> float:
            return difference(federation.personal(algorithm(arguments), **options), personal)

        setting = f"data set {dataset}; momentum 0.5; weight decay 1e-4" + (
            "" if method == "prox" else " of the kernels"
        )
        setting += more.pop("setting", "")
        lines = (*more.pop("lines", ()), *update)
        yield Row(written(name, arguments), to(arguments), lines, setting, **more)
        if method in ("fedrep", "fedper", "lg"):
            other = None if default is None else of_clients(default)
            yield Row(
                written(name, arguments), of_clients(arguments), lines, f"personal models; {setting}", other, **more
            )

    mean_heads = {"new_clients": "mean"}
    examples, uniform = {"weighting": "examples"}, {"weighting": "uniform"}
    yield from row("fedrep", "cifar10", "fedrep", mean_heads, {}, lines=(aliased,), cause=mean)
    yield from row("fedrep", "femnist", "fedrep", mean_heads | examples, mean_heads, lines=(aliased,), cause=mean)
    old = (
        "With the PyTorch 0.4.1 of their requirements, zero_grad leaves gradients of 0. Then momentum and weight decay "
        "still move the classifier while the other layers train."
    )
    frozen = "models/Update.py#param.requires_grad = False#2"
    yield from row(
        "fedrep",
        "cifar10",
        "fedrep",
        mean_heads,
        lines=(frozen,),
        cause=old,
        network=Zeroing,
        setting="; zero_grad to 0",
    )
    yield from row("fedper", "femnist", "fedper", mean_heads, {}, lines=(aliased,), cause=mean)
    yield from row("lg", "cifar10", "lg_fedavg", mean_heads, {}, lines=(aliased,), cause=mean)
    yield from row("fedavg", "femnist", "fedavg", {})
    yield from row("fedavg", "cifar10", "fedavg", uniform)
    yield from row("prox", "femnist", "fedprox", {"mu": 0.1}, lines=("FedProx.py#d_p.add_(self.mu",))


if __name__ == "__main__":
    main(rows)
