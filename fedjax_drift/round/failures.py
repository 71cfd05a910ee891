"""Failures of clients: which clients of a cohort report, and the number of local steps that they do.

Failures are sampled before local training starts (`cohort.fail`). So a client that drops out costs no computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fedjax_drift import checks, spec
from fedjax_drift.devices.launch import traced
from fedjax_drift.spec import Fix, NonNegative, Positive, Probability, checked

SELECTS = "1.3 selects 30 % more clients than are aggregated"
AT_LEAST_1 = spec.number("a number >= 1", lambda v: 1 <= v < math.inf, (1, 1.5), (0.5,), off=1)


@dataclass(frozen=True)
@checked
class Failures:
    """Options for simulated client failures, for ``Simulation(failures=)``. By default every client reports.

    A client needs ``steps / mean_steps * exp(speed_spread * z_i)`` units of time for a round. z_i ~ N(0, 1) is sampled
    once for each client. One unit is the time of a client with the mean number of examples and median speed. With
    ``Simulation(devices=)``, times are in seconds, and ``speed_spread`` is an option of `fd.Devices`.

    Raises ValueError for a ``speed_spread`` that has no effect.

    Attributes:
      dropout: Probability, in 0..1, that a selected client drops out. It keeps its old state.
      stragglers: Probability, in 0..1, that a client stops early and sends its current model. It does 1 to K_i - 1 of
        its K_i local steps, and each number is equally likely. This is the systems heterogeneity of FedProx (arXiv
        1812.06127), in steps instead of epochs.
      over_selection: >= 1. A round selects ceil(over_selection * K) clients and aggregates the first K that report.
      deadline: > 0. A client that needs more units of time than this is dropped. None: the round waits for all clients.
      speed_spread: >= 0, the standard deviation of the logarithm of the clients' speeds. It only has an effect together
        with ``deadline`` or ``over_selection``.
    """

    dropout: Probability = 0.0
    stragglers: Probability = 0.0
    over_selection: Annotated[float, AT_LEAST_1, Fix(SELECTS)] = 1.0
    deadline: Annotated[Positive, Fix("1.5 is 1.5 times the time of a mean client, None means no deadline")] | None = (
        None
    )
    speed_spread: NonNegative = 0.0

    def __post_init__(self) -> None:
        spread, over_selection = self.speed_spread, self.over_selection
        useless = self.deadline is None and not traced((spread, over_selection)) and spread and over_selection == 1
        if useless:
            fix = "pass deadline=1.5, for example"
            checks.refuse("speed_spread has no effect without deadline or over_selection", spread, fix)

    def clients_selected(self, K: int, N: int) -> int:
        """The number of clients that a round selects in order to aggregate K of the N clients."""
        selected = math.ceil(round(self.over_selection * K, 9))  # 1.1 * 50 is 55, and a little more in floating point
        if selected > N:
            checks.refuse(f"over_selection must be in 1..{N / K:.9g} (all clients)", self.over_selection, SELECTS)
        return selected

    @property
    def any(self) -> bool:
        """Whether any client can fail."""
        maybe = checks.used(self.dropout) or checks.used(self.stragglers)
        return maybe or self.deadline is not None or checks.used(self.over_selection - 1)
