"""FedDyn (github.com/alpemreacar/FedDyn), by the authors of FedDyn.

Its functions run in float64: in their source, "float32" is replaced. They clip at norm 10. The data, the cohorts and
the order of the examples are ours.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from federation import Federation, Row, compared, main, vector

RAGGED = Federation(lr_decay=0.9, weight_decay=1e-3, clip_norm=10.0)
SAME = replace(RAGGED, sizes=(13, 16, 14, 15, 13, 16))  # four batches in an epoch of every client
EQUAL = replace(RAGGED, sizes=(16,) * 6)


def load(*names: str) -> None:
    """Imports modules of the checkout, in float64. Each of them imports everything from the modules before."""
    libs = {"np": np, "os": os, "copy": copy, "torch": torch}
    for name in ("utils_libs", "utils_dataset", "utils_models", *names):
        module = sys.modules[name] = ModuleType(name)
        if name == "utils_libs":
            vars(module).update(libs, Dataset=lambda *_, **__: None, data=SimpleNamespace())
        if name in names:
            path = Path(sys.path[0]) / f"{name}.py"
            exec(compile(path.read_text().replace("float32", "float64"), str(path), "exec"), vars(module))
            module.get_acc_loss = lambda *_, **__: (0.0, 0.0)


def theirs(federation: Federation, module: str, function: str, index: int, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their functions. ``index`` is where it is in what they return."""
    cohorts, chosen = iter(federation.cohorts), np.random.uniform
    turn = ((t, i) for t, cohort in enumerate(federation.cohorts) for i in sorted(cohort))
    sys.modules["utils_libs"].data.DataLoader = lambda *_, **__: federation.loader(*next(turn))
    os.makedirs("Output", exist_ok=True)
    name = Path(tempfile.mkdtemp(dir="Output")).name  # a new one, because they continue what they find
    x, y = zip(*federation.clients, strict=True)
    data = {
        "n_client": len(x),
        "clnt_x": x,
        "clnt_y": y,
        "tst_x": x[0],
        "tst_y": y[0],
        "name": name,
        "dataset": "ours",
    }
    arguments = {
        **{"data_obj": SimpleNamespace(**data), "act_prob": 0.5, "learning_rate": federation.lr, "print_per": 10**6},
        **{"batch_size": federation.batch_size, "com_amount": len(federation.cohorts), "save_period": 1},
        **{
            "weight_decay": federation.weight_decay,
            "model_func": federation.network,
            "init_model": federation.network(),
        },
        **{"lr_decay_per_round": federation.lr_decay, "epoch": federation.epochs},
    } | changes
    if "n_minibatch" in changes and "alpha_coef" not in changes:
        del arguments["epoch"]
    np.random.uniform = lambda size: 1.0 - np.isin(np.arange(size), next(cohorts))
    try:
        results = getattr(sys.modules[module], function)(**arguments)
    finally:
        np.random.uniform = chosen
    return [vector(model) for model in results[index]]


def rows() -> Iterator[Row]:
    load("utils_general", "utils_methods")

    def row(federation: Federation, function: str, arguments: dict, lines: tuple, index: int = 0, **more: Any) -> Row:
        changes = more.pop("changes", {})
        made = theirs(federation, "utils_methods", f"train_{function}", index, **changes)
        return compared(federation, function.lower(), arguments, made, lines, **more)

    alpha = {"alpha": 0.1}
    lines = (
        "utils_methods.py#alpha_coef_adpt = ",
        "utils_methods.py#local_param_list[clnt] +=",
        "utils_general.py#loss_algo = alpha_coef",
    )
    options = {"default": alpha, "changes": {"alpha_coef": 0.1}}
    yield row(RAGGED, "FedDyn", alpha | {"scale_by_size": True}, lines, -1, **options)
    yield row(RAGGED, "FedAvg", {}, ("utils_methods.py#avg_model = set_client_from_params(model_func(), np.sum",))
    lines = ("utils_general.py#loss_algo += -mu",)
    yield row(RAGGED, "FedProx", {"mu": 0.1}, lines, changes={"mu": 0.1})
    yield from scaffold_rows(row)


def scaffold_rows(row: Callable[..., Row]) -> Iterator[Row]:
    """The rows of their SCAFFOLD, which FedDC's repository has copied."""
    lines = "utils_methods.py#state_params_diff_curr =", "utils_methods.py#new_c ="
    scaled, options = {"scale_by_size": True, "variate_lr": "initial"}, {"changes": {"n_minibatch": 8}}
    number = "as many batches for all clients, because their code takes the same number of steps for all"
    yield row(
        EQUAL, "SCAFFOLD", {"variate_lr": "initial"}, lines, setting="clients of equal size", default={}, **options
    )
    cause = "Their c_i+ subtracts c, and ours c / q_i, as in the step. With c the two agree to 3e-16."
    yield row(SAME, "SCAFFOLD", scaled, lines, setting=number, cause=cause, **options)


if __name__ == "__main__":
    main(rows)
