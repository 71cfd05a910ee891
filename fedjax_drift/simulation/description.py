"""Descriptions of a simulation: its title for people, and its settings for logs."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedjax_drift import reprs
from fedjax_drift.clock import Clock
from fedjax_drift.devices.mesh import num_teams, team_size
from fedjax_drift.participation import Participation
from fedjax_drift.participation.cohorts import short_name
from fedjax_drift.simulation.setup import Setup


def title(setup: Setup) -> str:
    """The text of a simulation in messages and notebooks."""
    e, together = setup.engine, team_size(setup.mesh)
    teams = f"{_counted(num_teams(setup.mesh), 'team')} of " if together > 1 else ""
    number = together if teams else setup.mesh.size
    devices = _counted(number, f"{setup.mesh.devices.flat[0].platform} device")
    return (
        f"Simulation({setup.algorithm!r}, {setup.data!r}, {e.local!r}, {e.cohort_size} clients a round"
        f"{f' of {M} in flight' if (M := setup.options.clock.concurrency) else ''}, "
        f"{_counted(e.lanes, 'lane')} on {teams}{devices})"
    )


def settings(setup: Setup) -> dict[str, Any]:
    """See `Simulation.settings`."""
    options, local = setup.options, dataclasses.asdict(setup.engine.local)
    recipe = setup.algorithm.recipe
    of_algorithm = reprs.plain(recipe.arguments) if recipe else {}
    if setup.engine.local.optimizer is not None:
        local["optimizer"] = reprs.function_name(setup.engine.local.optimizer.update)
    of_local = {f"local_{name}" if name in of_algorithm else name: value for name, value in local.items()}
    data = {"data": setup.data.name, "clients": setup.data.num_clients, "cohort_size": options.cohort_size}
    sampling = {**_settings_of(options.participation), "aggregation": options.aggregation.name}
    failures = dataclasses.asdict(options.failures) if options.failures.any else {}
    timing = {**_clock_of(options.clock), **(dataclasses.asdict(options.devices) if options.devices else {})}
    if not options.topology.is_star:
        timing["topology"] = options.topology.name
    for source in options.sources:
        arguments = reprs.plain(source.recipe.arguments) if source.recipe else {}
        timing |= {source.name: True, **{f"{source.name}_{name}": value for name, value in arguments.items()}}
    settings = {"algorithm": setup.algorithm.name, **of_algorithm, **of_local, **data, **sampling, **failures}
    settings |= timing
    return {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}


def _settings_of(rule: Participation) -> dict[str, Any]:
    """The settings of a participation rule: "sampling" for the two that have a short form, else with a prefix."""
    if short := short_name(rule):
        return {"sampling": short}
    arguments = reprs.plain(rule.recipe.arguments) if rule.recipe else {}
    return {"participation": rule.name, **{f"participation_{name}": value for name, value in arguments.items()}}


def _clock_of(clock: Clock) -> dict[str, Any]:
    """The settings of asynchronous rounds. {} if rounds are synchronous."""
    if clock.concurrency is None:
        return {}
    return {"clock": clock.name, **(reprs.plain(clock.recipe.arguments) if clock.recipe else {})}


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"
