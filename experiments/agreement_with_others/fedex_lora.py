"""FedEx-LoRA (github.com/RaghavSinghal10/fedex-lora), by the authors of FedEx-LoRA.

Their aggregation runs unchanged. Clients train in a plain loop. The layers have the names of the library peft. The
frozen matrices are [in, out], as in GPT-2, because the aggregation adds the transpose of a matrix [out, in] to them. (A
linear layer of PyTorch has [out, in], so with one, such as RoBERTa's, their aggregation adds the transposed matrix.)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
import torch._dynamo  # before `without`, because it looks for packages
from federation import CLASSES, FEATURES, HIDDEN, Federation, Row, as_vector, difference, main, without
from torch import nn

import fedjax_drift as fd

RANK, ALPHA = 2, 3.0


class Layer(nn.Module):
    """A dense layer with an adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer, self.bias = nn.Linear(outputs, inputs, bias=False), torch.zeros(outputs)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapter = self.lora_B["default"](self.lora_A["default"](x))
        return x @ self.base_layer.weight + self.bias + ALPHA / RANK * adapter

    def merged(self) -> list[np.ndarray]:
        """The weights [out, in] and the bias."""
        product = self.lora_B["default"].weight @ self.lora_A["default"].weight
        return [(self.base_layer.weight.T + ALPHA / RANK * product).detach().numpy(), self.bias.numpy()]


def network(federation: Federation, adapters: Any) -> nn.Sequential:
    made = nn.Sequential(Layer(FEATURES, HIDDEN), nn.Tanh(), Layer(HIDDEN, CLASSES))
    with torch.no_grad():
        for layer, name in ((made[0], "base"), (made[2], "classifier")):
            layer.base_layer.weight.copy_(torch.from_numpy(federation.initial[name]["kernel"]))
            layer.bias.copy_(torch.from_numpy(federation.initial[name]["bias"]))
            for half, ours in ((layer.lora_A, "a"), (layer.lora_B, "b")):
                half["default"].weight.copy_(torch.from_numpy(np.array(adapters[f"{name}/kernel"][ours]).T))
    return made


def theirs(federation: Federation, adapters: Any) -> list[np.ndarray]:
    """The global model after every round."""
    without("transformers", "datasets", "tqdm", "peft", "data_utils", "models")
    module: Any = importlib.import_module("fed_agg")
    args = SimpleNamespace(lora_alpha=ALPHA, lora_r=RANK, rslora=False)
    model, models = network(federation, adapters), []
    for t, cohort in enumerate(federation.cohorts):
        states = [federation.trained(model, t, i).state_dict() for i in cohort]
        model = module.aggregate_models_ours(model, states, args)
        models.append(np.concatenate([leaf.ravel() for layer in (model[0], model[2]) for leaf in layer.merged()]))
    return models


def rows() -> Iterator[Row]:
    federation = Federation()
    model = fd.models.lora(federation.model, RANK, "kernel", alpha=ALPHA, base=federation.initial)
    algorithm = fd.algorithms.fedex_lora(fd.algorithms.fedavg(weighting="uniform"))
    sim, states = federation.states(algorithm, model=model)
    ours = np.array([as_vector(fd.models.merge(model, state.params)) for state in states])
    adapters = sim.init(jax.random.key(federation.seed)).params
    called = 'fedex_lora(fedavg(weighting="uniform"))'
    lines = ("fed_agg.py#def aggregate_models_ours", "fed_agg.py#residue = M")
    setting = "frozen matrices [in, out], as in GPT-2"
    cause = "Those of RoBERTa are [out, in]. To them, the aggregation adds the transpose of what is missing."
    yield Row(called, difference(ours, theirs(federation, adapters)), lines, setting, None, cause)


if __name__ == "__main__":
    main(rows)
