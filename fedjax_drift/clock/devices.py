"""The clients' devices: how fast they compute, and how fast they receive and send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedjax_drift import checks, reprs, spec
from fedjax_drift.spec import NonNegative, checked


def _speed(endless: bool) -> spec.Spec:
    """A number > 0, or an array [N] of them. endless: whether they may be infinite."""
    each = spec.array(
        "a number > 0, or an array [N] of them",
        lambda values: values.ndim == 1 and values.size and values.dtype.kind in "fiu" and (values > 0).all()
        and (endless or np.isfinite(values).all()),
    )  # fmt: skip

    def check(name: str, value: Any, fix: str) -> Any:
        if checks.items(value) is not None:
            return each.check(name, value, fix).astype(float)
        scalar = checks.one_in(value)
        if endless and isinstance(scalar, float) and scalar == math.inf:
            return math.inf
        return spec.POSITIVE.check(name, value, fix)

    return spec.Spec(check, "speeds", (0.5, (0.5, 1)), (0, -1, (0.5, 0)))


@dataclass(frozen=True, repr=False)
@checked
class Devices:
    """The speeds of the clients' devices, for ``Simulation(devices=)``.

    In a round, client i needs this many seconds:

        bytes received / down_i + local steps * seconds_per_step_i * exp(speed_spread * z_i) + bytes sent / up_i

    z_i ~ N(0, 1) is sampled once for each client, from the state's key. The bytes are those of ``info`` in
    `Simulation.round_fn`.

    Attributes:
      speed_spread: >= 0, the standard deviation of the logarithm of the clients' speeds. Default: 0.
      up, down: > 0, bytes per second, a number or an array [N]. Default: infinity, so that messages take no time.
      seconds_per_step: > 0, the time of a local step at median speed, a number or an array [N]. Default: 1.
    """

    speed_spread: NonNegative = 0.0
    up: Annotated[float | np.ndarray, _speed(endless=True)] = math.inf
    down: Annotated[float | np.ndarray, _speed(endless=True)] = math.inf
    seconds_per_step: Annotated[float | np.ndarray, _speed(endless=False)] = 1.0

    def __repr__(self) -> str:
        return reprs.fields(self)
