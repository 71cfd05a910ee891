"""Clients that fail: which clients of a cohort report, and how many of their local steps they do.

`cohort.fail` draws it from random keys before the clients train, so a client that drops out costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedjax_drift import checks
from fedjax_drift.devices.launch import traced
from fedjax_drift.errors import ConfigurationError


@dataclass(frozen=True)
class Failures:
    """How clients fail; pass it as ``Simulation(failures=)``. By default every client reports.

    A client's round takes ``steps / mean_steps * exp(speed_spread * z_i)`` units of time, with z_i ~ N(0, 1) drawn once
    for each client. One unit is what a client of mean size needs on a device of median speed.

    Raises ValueError for values out of range, and for a ``speed_spread`` that has no effect.
    """

    dropout: float = 0.0
    """Probability, in 0..1, that a selected client drops out. It keeps its old state."""
    stragglers: float = 0.0
    """Probability, in 0..1, that a client stops early and sends what it has. It does 1 to K_i - 1 of its K_i local
    steps, each number equally likely (FedProx's systems heterogeneity, arXiv 1812.06127, in steps, not epochs)."""
    over_selection: float = 1.0
    """>= 1. A round selects ceil(over_selection * K) clients and aggregates the first K that report."""
    deadline: float | None = None
    """> 0. A client that needs more time than this is dropped. None: the round waits for all clients."""
    speed_spread: float = 0.0
    """>= 0, standard deviation of the logarithm of a device's speed. It acts through ``deadline`` and
    ``over_selection``."""

    def __post_init__(self) -> None:
        checked = {
            name: checks.number(name, getattr(self, name), "a probability in 0..1", lambda v: 0 <= v <= 1)
            for name in ("dropout", "stragglers")
        }
        checked["over_selection"] = checks.number(
            "over_selection", self.over_selection, "a number >= 1", lambda v: 1 <= v < math.inf,
            "1.3 asks 30 % more clients than are needed",
        )  # fmt: skip
        if not traced(checked["over_selection"]) and checked["over_selection"].is_integer():
            checked["over_selection"] = int(checked["over_selection"])  # 1: no over-selection, not a hyper-parameter
        checked["speed_spread"] = checks.nonnegative("speed_spread", self.speed_spread)
        if self.deadline is not None:
            why = "in units of what a client of mean size takes; None: no deadline"
            checked["deadline"] = checks.positive("deadline", self.deadline, why)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # Python's numbers: arrays of one number can't be hashed
        spread, over_selection = self.speed_spread, self.over_selection
        useless = self.deadline is None and not traced((spread, over_selection)) and spread and over_selection == 1
        if useless:
            raise ConfigurationError(
                f"speed_spread needs a deadline or over_selection, which it acts through, got {spread} alone: "
                "pass deadline=1.5, for example"
            )

    def clients_asked(self, K: int, N: int) -> int:
        """How many of the N clients a round selects in order to aggregate K."""
        asked = math.ceil(round(self.over_selection * K, 9))  # 1.1 * 50 is 55, and a little more in floating point
        if asked > N:
            raise ConfigurationError(
                f"over_selection must be in 1..{N / K:.9g} (all clients), got {self.over_selection}: "
                "1.3 asks 30 % more clients than are needed"
            )
        return asked

    @property
    def any(self) -> bool:
        """Whether any client can fail."""
        maybe = checks.used(self.dropout) or checks.used(self.stragglers)
        return maybe or self.deadline is not None or checks.used(self.over_selection - 1)
