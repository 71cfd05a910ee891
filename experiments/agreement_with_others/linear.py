"""A federation with a linear model, for code that mixes the outputs of two models.

The mean of the outputs of two linear models is the output of the mean of their parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from federation import HIDDEN, Federation, Network
from torch import nn

import fedjax_drift as fd


class First(nn.Sequential):
    """The first layers of a network, without an effect and with gradients of 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :HIDDEN] + 0 * super().forward(x)


class LinearFederation(Federation):
    """Its model is the classifier alone, on some of the inputs."""

    @property
    def model(self) -> fd.Model:
        def apply(params: Any, x: jax.Array) -> jax.Array:
            return x[:, :HIDDEN] @ params["classifier"]["kernel"] + params["classifier"]["bias"]

        return fd.Model(init=super().model.init, apply=apply)

    def network(self) -> Network:
        made = super().network()
        made.base = First(*made.base)
        return made
