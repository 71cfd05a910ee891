"""The arguments that `Simulation.run` and `sweep` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fedjax_drift import checks, spec
from fedjax_drift.simulation import until as rules
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.loop import Schedule
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.until import Until
from fedjax_drift.spec import Count, CountOrZero, Fix, Flag, checked
from fedjax_drift.storage.checkpoint import Checkpoints

MOST_ROUNDS = 2**31 - 1  # because a state counts them in int32


def _rule(name: str, until: Any, fix: str) -> Until:
    if any(until is getattr(rules, word) for word in rules.__all__):
        checks.refuse(f"{name} must be a rule", f"fd.until.{until.__name__} without its arguments", fix)
    return checks.function(name, until, fix, takes=1)


Rule = Annotated[
    Until, spec.Spec(_rule, "function"), Fix("pass fd.until.reaches(accuracy=0.98), for example; None means all rounds")
]


@dataclass(frozen=True)
@checked
class Asked:
    """How many rounds, and when they are evaluated and measured."""

    rounds: Annotated[int, spec.integer(0, MOST_ROUNDS)]
    eval_every: Annotated[CountOrZero, Fix("0 means never")]
    measure_every: Count
    progress: Annotated[Flag, Fix("None: in a terminal or a notebook")] | None
    until: Rule | None

    def schedule(self, setups: Iterable[Setup], last: int, checkpoints: Checkpoints | None) -> Schedule:
        """Returns the schedule of runs of these simulations until round ``last``.

        Raises ConfigurationError if ``until`` gets no evaluations.
        """
        setups = list({id(setup): setup for setup in setups}.values())
        tested = [setup for setup in setups if setup.data.x_test is not None]
        if self.until is not None and not (self.eval_every and len(tested) == len(setups)):
            missing = "eval_every=0" if len(tested) == len(setups) else "no test set"
            fix = "pass eval_every=10, and data with test=(x, y) or data.with_validation(0.1)"
            checks.refuse("until needs evaluations", missing, fix)
        if self.eval_every and tested:
            validate.warn_of_initial_statistics([setup.model for setup in tested])
        return Schedule(
            last,
            eval_every=self.eval_every if tested else 0,
            measure_every=self.measure_every if any(setup.measures for setup in setups) else 0,
            save_every=(checkpoints.every or 0) if checkpoints is not None else 0,
        )
