"""The clients' devices: how fast they compute, and how fast they receive and send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_drift import checks, reprs
from fedjax_drift.devices.launch import traced
from fedjax_drift.errors import ConfigurationError


@dataclass(frozen=True, repr=False)
class Devices:
    """The speeds of the clients' devices, for ``Simulation(devices=)``.

    In a round, client i needs this many seconds:

        bytes received / down_i + local steps * seconds_per_step_i * exp(speed_spread * z_i) + bytes sent / up_i

    z_i ~ N(0, 1) is sampled once for each client, from the state's key. The bytes are those of ``info`` in
    `Simulation.round_fn`.

    Raises ValueError for values out of range.

    Attributes:
      speed_spread: >= 0, the standard deviation of the logarithm of the clients' speeds. Default: 0.
      up, down: > 0, bytes per second, a number or an array [N]. Default: infinity, so that messages take no time.
      seconds_per_step: > 0, the time of a local step at median speed, a number or an array [N]. Default: 1.
    """

    speed_spread: float = 0.0
    up: float | np.ndarray = math.inf
    down: float | np.ndarray = math.inf
    seconds_per_step: float | np.ndarray = 1.0

    def __repr__(self) -> str:
        return reprs.fields(self)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"speed_spread": checks.nonnegative("speed_spread", self.speed_spread)}
        for name, endless in (("up", True), ("down", True), ("seconds_per_step", False)):
            checked[name] = _checked(name, getattr(self, name), endless)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_number(self, N: int) -> None:
        """Checks that the arrays have a value for each of the N clients."""
        for name in ("up", "down", "seconds_per_step"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and value.shape != (N,):
                raise ConfigurationError(
                    f"{name} must be a number, or have a value for each of the {N} clients, got {[*value.shape]}"
                )


def _checked(name: str, value: Any, endless: bool) -> Any:
    """A positive number as a float, or positive numbers as an array. endless: whether they may be infinite."""
    if traced(value):
        return value
    if checks.items(value) is not None:
        values = checks.array(name, value)
        valid = values.ndim == 1 and values.size and values.dtype.kind in "fiu" and (values > 0).all()
        if not valid or not (endless or np.isfinite(values).all()):
            raise ConfigurationError(
                f"{name} must be a number > 0, or an array [N] of them, got {values.dtype}{[*values.shape]}"
                + (f" from {values.min():g} to {values.max():g}" if values.size and values.dtype.kind in "fiu" else "")
            )
        return values.astype(float)
    scalar = checks.one_in(value)
    if endless and isinstance(scalar, float) and scalar == math.inf:
        return math.inf
    return checks.positive(name, value)
