"""fair_flearn (github.com/litian96/fair_flearn), by the authors of q-FedAvg.

Its servers and clients, which are in NumPy, run unchanged. Their models need TensorFlow 1: the model, its gradients and
its local steps are ours, in PyTorch. The data, the cohorts and the order of the examples are ours, too. q-FedSGD and
MAML are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from federation import CLASSES, FULL, Federation, Row, compared, difference, main, without, written
from torch import nn

import fedjax_drift as fd


def theirs(federation: Federation, name: str, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their servers."""
    without("tensorflow")
    module = importlib.import_module(f"flearn.trainers.{name}")
    rounds: list[np.ndarray] = []

    class Learner:
        """Takes the place of their models. The data of a client are its number."""

        size = flops = 0

        def __init__(self, *_: Any) -> None:
            self.network = federation.network()

        def get_params(self) -> list[np.ndarray]:
            return [leaf.detach().numpy().copy() for leaf in self.network.parameters()]

        def set_params(self, params: list[np.ndarray]) -> None:
            for leaf, value in zip(self.network.parameters(), params, strict=True):
                leaf.data = torch.tensor(value)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[list[np.ndarray], float]:
            loss = nn.functional.cross_entropy(self.network(x), y)
            gradients = torch.autograd.grad(loss, list(self.network.parameters()))
            for leaf, gradient in zip(self.network.parameters(), gradients, strict=True):
                leaf.data -= federation.lr * gradient
            return [gradient.numpy() for gradient in gradients], loss.item()

        def get_loss(self, data: Any) -> float:
            x, y = map(torch.from_numpy, federation.clients[data["x"][0]])
            return nn.functional.cross_entropy(self.network(x), y).item()
