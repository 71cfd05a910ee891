"""The arguments that `Simulation.run` and `sweep` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.simulation import until as rules
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.loop import Schedule
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.simulation.until import Until
from fedjax_drift.storage.checkpoint import Checkpoints

MOST_ROUNDS = 2**31 - 1  # because a state counts them in int32


class Asked(NamedTuple):
    """How many rounds, and when they are evaluated and measured."""

    rounds: int
    eval_every: int  # 0: never
    measure_every: int
    progress: bool | None
    until: Until | None

    @classmethod
    def checked(cls, rounds: Any, eval_every: Any, measure_every: Any, progress: Any, until: Any) -> Asked:
        """Checks the arguments, and returns them as Python values."""
        return cls(
            checks.integer("rounds", rounds, 0, MOST_ROUNDS),
            checks.integer("eval_every", eval_every, 0, fix="0 means never"),
            checks.integer("measure_every", measure_every, 1),
            None if progress is None else checks.flag("progress", progress, "None: in a terminal or a notebook"),
            _checked_rule(until),
        )

    def schedule(self, setups: Iterable[Setup], last: int, checkpoints: Checkpoints | None, single: bool) -> Schedule:
        """Returns the schedule of runs of these simulations until round ``last``.

        single: whether a program runs only one round. Raises ConfigurationError if ``until`` gets no evaluations.
        """
        setups = list({id(setup): setup for setup in setups}.values())
        tested = [setup for setup in setups if setup.data.x_test is not None]
        if self.until is not None and not (self.eval_every and len(tested) == len(setups)):
            missing = "eval_every=0" if len(tested) == len(setups) else "no test set"
            raise ConfigurationError(
                f"until needs evaluations, got {missing}: pass eval_every=10, and data with test=(x, y) or "
                "data.with_validation(0.1)"
            )
        if self.eval_every and tested:
            validate.warn_of_initial_statistics([setup.model for setup in tested])
        return Schedule(
            last,
            eval_every=self.eval_every if tested else 0,
            measure_every=self.measure_every if any(setup.measures for setup in setups) else 0,
            save_every=(checkpoints.every or 0) if checkpoints is not None else 0,
            one_round_a_program=single,
        )


def _checked_rule(until: Any) -> Until | None:
    if until is None:
        return None
    fix = "pass fd.until.reaches(accuracy=0.98), for example; None means all rounds"
    if any(until is getattr(rules, name) for name in rules.__all__):
        raise ConfigurationError(f"until must be a rule, got fd.until.{until.__name__} without its arguments: {fix}")
    return checks.function("until", until, fix, takes=1)
