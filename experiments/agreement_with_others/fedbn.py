"""FedBN (github.com/med-air/FedBN), by the authors of the algorithm: the experiment with digits.

Their fed_digits.py runs unchanged, in float64. The model, with BatchNorm after its first layer, the examples and their
order are ours. It has five clients, which all train in every round.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from federation import CLASSES, FEATURES, HIDDEN, Federation, Row, difference, main, without, written

import fedjax_drift as fd

SIZES = (10, 26, 7, 6, 16)  # no batch of one example, for which PyTorch has no variance
STATISTICS = ("bn.running_mean", "bn.running_var")


class Normalised(torch.nn.Module):
    """The network of the federation with BatchNorm before the tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.bn = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.BatchNorm1d(HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.bn(self.base(x))))


class Module(flax.linen.Module):
    """The same in flax."""

    @flax.linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = flax.linen.Dense(HIDDEN, name="base")(x)
        x = flax.linen.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return flax.linen.Dense(CLASSES, name="classifier")(jnp.tanh(x))


class Passes:
    """Takes the place of a `DataLoader`: in every round, the batches of its epochs, and one pass to evaluate."""

    def __init__(self, federation: Federation, i: int) -> None:
        self.federation, self.i, self.passes = federation, i, 0
        self.dataset = federation.loader(0, i).dataset

    def __len__(self) -> int:
        return len(self.federation.loader(0, self.i))

    def __iter__(self) -> Any:
        t, e = divmod(self.passes, self.federation.epochs + 1)
        self.passes += 1
        return Batches(self.federation.epoch(t, self.i, e % self.federation.epochs))


class Batches:
    """An iterator that knows its length."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches, self.iterator = batches, iter(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return self.iterator

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return next(self.iterator)


def theirs(federation: Federation, mode: str, mu: float = 0.0) -> dict[str, dict[str, np.ndarray]]:
    """The models that they save after the last round."""
    without("torchvision", "torchvision.transforms", "utils", "utils.data_utils")
    import nets.models

    loaders = [
        loader for i in range(len(federation.sizes)) for loader in (Passes(federation, i), federation.loader(0, i))
    ]
    saved: list[dict[str, Any]] = []

    def model() -> Normalised:
        made, initial = Normalised(), federation.network().state_dict()
        names = {"base.weight": "base.0.weight", "base.bias": "base.0.bias"}
        made.load_state_dict({k: initial.get(names.get(k, k), v) for k, v in made.state_dict().items()})
        return made

    options = {"mode": mode, "mu": mu, "lr": federation.lr, "wk_iters": federation.epochs}
    options |= {"iters": len(federation.cohorts), "save_path": "checkpoint"}
    patches = (
        patch.object(nets.models, "DigitModel", model),
        patch.object(torch.utils.data, "DataLoader", lambda *_, **__: loaders.pop(0)),
        patch.object(torch, "save", lambda models, _: saved.append(models)),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(sys, "argv", ["fed_digits.py", *(f"--{name}={value}" for name, value in options.items())]),
    )
    federation.orders  # noqa: B018 - before the patches
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        runpy.run_path(f"{sys.path[0]}/federated/fed_digits.py", run_name="__main__")
    return {name: {key: leaf.numpy() for key, leaf in state.items()} for name, state in saved[0].items()}


def ours(federation: Federation, algorithm: fd.Algorithm, kept: str) -> list[dict[str, np.ndarray]]:
    """The global model, or with "local" all clients' own models, with the names of `Normalised`."""
    model = fd.Model.from_linen(Module(), (FEATURES,), statistics=kept, input_dtype=jnp.float64)
    norm = {"scale": jnp.ones(HIDDEN), "bias": jnp.zeros(HIDDEN)}
    statistics = {"norm": {"mean": jnp.zeros(HIDDEN), "var": jnp.ones(HIDDEN)}}
    initial = {"params": jax.tree.map(jnp.asarray, federation.initial) | {"norm": norm}, "batch_stats": statistics}
    sim, states = federation.states(algorithm, model=model._replace(init=lambda key: initial))
    own = range(len(federation.sizes)) if kept == "local" else ()
    results = [sim.personal_params(states[-1], i) for i in own] or [states[-1].params]

    def named(whole: Any) -> dict[str, np.ndarray]:
        params, norm = whole["params"], whole["batch_stats"]["norm"]
        leaves = {"bn.weight": params["norm"]["scale"], "bn.bias": params["norm"]["bias"]}
        for name, layer in (("base", "base"), ("head", "classifier")):
            leaves |= {f"{name}.weight": params[layer]["kernel"].T, f"{name}.bias": params[layer]["bias"]}
        leaves |= {"bn.running_mean": norm["mean"], "bn.running_var": norm["var"]}
        return {key: np.asarray(leaf) for key, leaf in leaves.items()}

    return [named(result) for result in results]


def rows() -> Iterator[Row]:
    everyone = (tuple(range(5)),) * 4
    federation = Federation(sizes=SIZES, cohorts=everyone)
    uniform = {"weighting": "uniform"}
    server = "federated/fed_digits.py#def communication"

    def compared(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]], part: str) -> float:
        keys = {"parameters": [key for key in ours[0] if key not in STATISTICS], "means": STATISTICS[:1]}
        keys = keys.get(part, STATISTICS[1:])
        flat = [[np.concatenate([model[key].ravel() for key in keys]) for model in models] for models in (ours, theirs)]
        return difference(np.array(flat[0]), np.array(flat[1]))

    unbiased = (
        "PyTorch's running variance is an average of unbiased variances of the batches, that of flax of biased ones. "
        "With the latter in their model, the two agree to 1e-13."
    )
    variance = "nets/models.py#nn.BatchNorm1d"
    for mode, arguments in (("fedbn", {}), ("fedavg", uniform)):
        saved = theirs(federation, mode)
        own = [saved[f"model_{i}"] for i in range(5)] if mode == "fedbn" else [saved["server_model"]]
        models, default = (
            ours(federation, getattr(fd.algorithms, mode)(**each), "local" if mode == "fedbn" else "average")
            for each in (arguments, {})
        )
        start = "personal models; " if mode == "fedbn" else ""
        for part in ("parameters", "means", "variances"):
            what = "parameters" if part == "parameters" else f"running {part} of BatchNorm"
            cause, lines = (unbiased, (server, variance)) if part == "variances" else ("", (server,))
            other = compared(default, own, part) if part == "parameters" and arguments else None
            yield Row(written(mode, arguments), compared(models, own, part), lines, start + what, other, cause)

    once = Federation(sizes=SIZES, cohorts=everyone, epochs=1)
    prox = {"mu": 0.1} | uniform
    own = [theirs(once, "fedprox", 0.1)["server_model"]]
    away = compared(ours(once, fd.algorithms.fedprox(**prox), "average"), own, "parameters")
    cause = (
        "Their first round is one of FedAvg. With its proximal term the two agree to 5e-15. The first step of every "
        "epoch has none, either, which matters if a round has more than one epoch."
    )
    lines = server, "federated/fed_digits.py#def train_fedprox", "federated/fed_digits.py#if a_iter > 0"
    yield Row(written("fedprox", prox), away, lines, "parameters; one epoch", cause=cause)


if __name__ == "__main__":
    main(rows)
