"""FedExP (github.com/Divyansh03/FedExP), by the authors of FedExP.

Their script runs unchanged. It has fixed learning rates, 20 local steps, clipping at norm 10 and weight decay 1e-4. The
data, the cohorts and the order of the examples are ours. Images are not augmented.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from federation import Federation, Row, as_vector, compared, difference, main, vector, without

import fedjax_drift as fd

DECAY = 0.998
SIZES = (11, 20, 15, 12, 18, 13)  # two batches of an epoch


class Steep(Federation):
    """Inputs that are five times as large. With these, eta_g is larger than 1 in every round."""

    @functools.cached_property
    def clients(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(5 * x, y) for x, y in Federation(self.sizes, seed=self.seed).clients]


def federation(lr: float = 0.1, sizes: tuple[int, ...] = SIZES, kind: type = Federation, **more: Any) -> Federation:
    """The local training of their script. Their learning rate already decays before the first round."""
    local = {"epochs": 10, "batch_size": 10, "lr": DECAY * lr, "lr_decay": DECAY}
    return kind(sizes=sizes, **local, weight_decay=1e-4, clip_norm=10.0, **more)


def theirs(federation: Federation, algorithm: str, dataset: str = "EMNIST") -> list[np.ndarray]:
    """The global model after every round. The data set only selects learning rates and other constants."""
    without("torchvision", "torchvision.models")
    import util_data
    import util_general
    import util_models

    get_grad, choice, to = util_general.get_grad, np.random.choice, (torch.Tensor.to, torch.nn.Module.to)
    cohorts = iter(federation.cohorts)
    turns = [(t, i) for t, cohort in enumerate(federation.cohorts) for i in cohort]
    turn, starts = iter(turns), []

    def recorded(network: torch.nn.Module, *rest: Any) -> torch.Tensor:
        starts.append(vector(network))
        return get_grad(network, *rest)

    torch.Tensor.to = lambda self, *where, **options: self if where == ("cuda",) else to[0](self, *where, **options)
    torch.nn.Module.to = lambda self, _: self
    np.random.choice = lambda *_, **__: np.array(next(cohorts))
    util_data.get_dataset = lambda *_: ([federation.loader(0, i).dataset for i in range(len(federation.sizes))], None)
    util_models.get_model = lambda *_: federation.network()
    util_general.get_grad, util_general.test_img = recorded, lambda *_: (0.0, 0.0)
    util_general.DataLoader = lambda *_, **__: federation.loader(*next(turn))
    util_general.transforms.Compose = lambda _: lambda images: images
    clients, rounds, size = len(federation.sizes), len(federation.cohorts), len(federation.cohorts[0])
    options = {"seed": 0, "algorithm": algorithm, "dataset": dataset, "model": "ours", "alpha": 0.3}
    options |= {"num_clients": clients, "num_participating_clients": size, "num_rounds": rounds - 1}
    try:
        sys.argv[1:] = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        last = runpy.run_path(str(Path(util_data.__file__).parent / "main.py"))["net_glob"]
    finally:
        util_general.get_grad, np.random.choice, (torch.Tensor.to, torch.nn.Module.to) = get_grad, choice, to
    return [*starts[size::size], vector(last)]


def with_their_eps(federation: Federation, eps: float) -> np.ndarray:
    """FedExP with an eps that is multiplied by DECAY^2 in every round."""
    models, state = [], None
    for cohort in federation.cohorts:
        eps *= DECAY**2
        sim = federation.simulation(fd.algorithms.fedexp(eps=eps, weighting="examples"))
        state, _ = sim.round_fn(sim.init(jax.random.key(federation.seed)) if state is None else state, cohort=cohort)
        models.append(as_vector(state.params))
    return np.array(models)


def rows() -> Iterator[Row]:
    emnist, equal = federation(), federation(sizes=(15,) * 6)
    local = "util_general.py#class LocalUpdate(object)"
    yield compared(emnist, "fedavg", {}, theirs(emnist, "fedavg"), (local, "main.py#grad_avg = grad_avg/p_sum"))
    steep = federation(0.01, kind=Steep, cohorts=(tuple(range(6)),) * 8)
    exp = theirs(steep, "fedexp", "CIFAR10")
    arguments = {"eps": 0.006, "weighting": "examples"}
    apart = difference(with_their_eps(steep, 6 * 0.001), exp)
    cause = (
        "Their eps, 0.001, is multiplied by |S| and, in every round, by the square of the decay of the learning rate. "
        f"With the eps of every round the two agree to {apart:.0e}."
    )
    lines = ("main.py#if(eta_g == 'adaptive')", "main.py#epsilon = decay*decay*epsilon")
    setting = "inputs times 5 and all clients in every round, so that eta_g is larger than 1"
    yield compared(steep, "fedexp", arguments, exp, lines, setting=setting, cause=cause)
    cifar = federation(0.01)
    lines = ("util_general.py#class LocalUpdate_fedprox",)
    yield compared(cifar, "fedprox", {"mu": 0.1}, theirs(cifar, "fedprox", "CIFAR10"), lines)
    lines = ("util_general.py#class LocalUpdate_scaffold", "main.py#c = c+ p[i]*mem_mat[i]")
    yield compared(equal, "scaffold", {}, theirs(equal, "scaffold"), lines, setting="clients of equal size")
    cause = "Their c is the mean of c_i with weights n_i. With this mean the two agree to 3e-16."
    yield compared(emnist, "scaffold", {"weighting": "examples"}, theirs(emnist, "scaffold"), lines, cause=cause)
    momentum = federation(0.316)
    lines = ("main.py#if(alg=='fedavgm'",)
    yield compared(momentum, "fedavgm", {"beta": 0.9}, theirs(momentum, "fedavgm"), lines)
    adaptive = {"server_lr": 0.316}
    arguments = adaptive | {"tau": 1e-30, "v_0": 0.0316}
    lines = ("main.py#if(alg=='fedadagrad')",)
    default = adaptive | {"tau": 0.0316}
    cause = "Their epsilon is inside the square root, like our v_0."
    yield compared(emnist, "fedadagrad", arguments, theirs(emnist, "fedadagrad"), lines, default=default, cause=cause)
    lines = ("main.py#if(alg=='fedadam')", "main.py#delta = 0.01*grad_avg**2")
    cause = (
        "Their v averages the squares of m, and ours, like the paper, those of D. Their epsilon is inside the square "
        "root, and the divisions by 0.1 and 0.01 divide it by 100. With their formulas the two agree to 4e-16."
    )
    arguments = adaptive | {"tau": 0.0316}
    yield compared(emnist, "fedadam", arguments, theirs(emnist, "fedadam"), lines, cause=cause)


if __name__ == "__main__":
    main(rows)
