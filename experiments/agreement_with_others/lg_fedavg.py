"""LG-FedAvg (github.com/pliang279/LG-FedAvg), by the authors of the algorithm.

Their main_lg.py and main_fed.py run unchanged. The model, the cohorts and the order of the examples are ours. The model
from which main_lg.py starts, in their experiments one that FedAvg has trained, is our initial model.
"""

from __future__ import annotations

import contextlib
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from federation import Federation, Network, Row, compared, difference, main, vector, without, written

import fedjax_drift as fd


def run_script(federation: Federation, words: Sequence[str], model: Callable[[Any], Network], *patches: Any) -> None:
    """Runs a script of the checkout until there are no more cohorts.

    The code of FedRep and of FedBABU has grown from that of LG-FedAvg, and runs in the same way.

    words: the name of the script, and its options. model: takes the place of their ``get_model``.
    """
    import models.Update
    import utils.train_utils

    cohorts = enumerate(federation.cohorts)
    loaders: list[Any] = []

    def choice(*_: Any, **__: Any) -> tuple[int, ...]:
        t, cohort = next(cohorts)
        loaders[:] = [federation.loader(t, i) for i in cohort]
        return cohort

    def loader(*_: Any, **__: Any) -> Any:  # FedBABU trains all clients once more to evaluate them: without batches
        return loaders.pop(0) if loaders else []

    indices = {i: np.arange(n) for i, n in enumerate(federation.sizes)}
    patches = (
        patch.object(models.Update, "DataLoader", loader),
        patch.object(utils.train_utils, "get_model", model),
        patch.object(utils.train_utils, "get_data", lambda _: (None, None, indices, indices)),
        patch.object(np.random, "choice", choice),
        patch.object(sys, "argv", [*words]),
        *patches,
    )
    federation.orders  # noqa: B018 - before the patches
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        stack.enter_context(contextlib.suppress(StopIteration))
        runpy.run_path(f"{sys.path[0]}/{words[0]}", run_name="__main__")


def theirs(federation: Federation, script: str) -> np.ndarray:
    """After every round, the global model of main_fed.py [rounds, P], or all models of main_lg.py [rounds, N, P]."""
    without("torchvision", "models.test")
    N = len(federation.sizes)
    results: list[np.ndarray] = []
    nets: list[Any] = []  # those that train, and not those of their best rounds

    def model(_: Any) -> Network:
        made = federation.network()
        made.weight_keys = [["base.0.weight", "base.0.bias"], ["head.weight", "head.bias"]]
        return made

    def test_all(models: list[Network], *_: Any, return_all: bool = False) -> tuple[Any, float]:
        if nets and models is nets[0]:
            results.append(np.array([vector(net) for net in models]))
        nets.append(models)
        return np.zeros(N) if return_all else 0.0, 0.0

    def test_one(net: Network, *_: Any) -> tuple[float, float]:
        results.append(vector(net))
        return 0.0, 0.0

    indices = {i: np.arange(n) for i, n in enumerate(federation.sizes)}
    options = {"num_users": N, "epochs": len(federation.cohorts) + 1, "frac": len(federation.cohorts[0]) / N}
    options |= {"lr": federation.lr, "lr_decay": federation.lr_decay, "local_ep": federation.epochs, "gpu": -1}
    options |= {"local_bs": federation.batch_size, "load_fed": "start.pt", "results_save": "ours", "model": "mlp"}
    folder = Path(f"save/mnist/mlp_iidFalse_num{N}_C{options['frac']}_le{federation.epochs}/shard2/ours")
    (folder / "fed").mkdir(parents=True, exist_ok=True)
    (folder / "dict_users.pkl").write_bytes(pickle.dumps((indices, indices)))
    torch.save(federation.network().state_dict(), folder / "fed/start.pt")
    tests = sys.modules["models.test"]
    tests.test_img_local_all, tests.test_img = test_all, test_one
    tests.test_img_avg_all = lambda net, *_, **options: (0.0, 0.0, *[net] * ("return_net" in options))
    words = [script, *(f"--{name}={value}" for name, value in options.items())]
    run_script(federation, words, model)
    return np.array(results)


def rows() -> Iterator[Row]:
    federation = Federation(momentum=0.5)
    train = "models/Update.py#def train"
    algorithm, setting = fd.algorithms.lg_fedavg(), "personal models; momentum 0.5"
    ours = federation.personal(algorithm)
    lines = train, "main_lg.py#w_glob[k] = torch.div"
    yield Row(written("lg_fedavg", {}), difference(ours, theirs(federation, "main_lg.py")[-1]), lines, setting)

    fixed = Federation(lr=0.1, momentum=0.5)
    lines = train, "main_fed.py#w_local, loss = local.train(net", "main_fed.py#w_glob[k] = torch.div"
    uniform = {"weighting": "uniform"}
    cause = "The call of the local training has no learning rate, so it is 0.1, the default, in every round."
    setting = "momentum 0.5; learning rate 0.1"
    models = theirs(Federation(lr=0.3, lr_decay=0.9, momentum=0.5), "main_fed.py")
    yield compared(fixed, "fedavg", uniform, models, lines, default={}, setting=setting, cause=cause)


if __name__ == "__main__":
    main(rows)
