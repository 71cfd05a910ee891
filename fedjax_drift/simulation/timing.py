"""Checks a clock and the clients' devices, before anything is compiled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_drift import checks
from fedjax_drift.clock import Clock, Devices
from fedjax_drift.round.in_flight import Flight
from fedjax_drift.round.selection import Selection
from fedjax_drift.simulation.options import Options
from fedjax_drift.simulation.selection import selection_of


def check_clock(options: Options, selection: Selection) -> Devices | None:
    """Checks the options ``clock`` and ``devices`` and their combination with others. Returns the devices, by default
    equal ones for asynchronous rounds, and None for synchronous rounds."""
    clock, devices, K, N = options.clock, options.devices, options.cohort_size, options.data.num_clients
    failures, aggregation = options.failures, options.aggregation
    checks.instance("clock", clock, Clock, "fd.clock.asynchronous(concurrency=100), for example")
    checks.fields(clock)
    if devices is not None:
        checks.instance("devices", devices, Devices, "pass fd.Devices(speed_spread=0.5), for example")
        for name in ("up", "down", "seconds_per_step"):
            value = getattr(devices, name)
            if isinstance(value, np.ndarray) and value.shape != (N,):
                checks.refuse(f"{name} must be a number, or have a value for each of the {N} clients", [*value.shape])
        if checks.used(failures.speed_spread):
            what = "speed_spread is an option of fd.Devices if devices= is given"
            checks.refuse(what, f"failures with {failures.speed_spread}", "leave it out of the failures")
    if clock.concurrency is None:
        return devices
    if clock.starts is not None:
        fix = "a round begins with M clients that train, and K - 1 others that start in it"
        checks.integer("concurrency", clock.concurrency, 1, N - K + 1, fix)
    else:
        checks.integer("concurrency", clock.concurrency, K, N, "from the cohort size to the number of clients")
    flight = Flight(clock, selection, failures, Devices(), K)
    M = flight.slots
    rule, needs = selection.rule, "asynchronous rounds need"
    if aggregation.noise_multiplier is not None:
        what = f"the privacy accounting of {aggregation.name} needs synchronous rounds"
        checks.refuse(what, f"{clock.name} ones", "leave clock= out")
    if failures.deadline is not None or checks.used(failures.over_selection - 1):
        option = "over_selection" if failures.deadline is None else "deadline"
        what = f"{option} must be left out of asynchronous rounds, which never wait for slow clients"
        checks.refuse(what, getattr(failures, option), "pass max_staleness= to the clock, or a larger concurrency=")
    if selection.capacity != K or selection.factors or rule.expected is not None:
        what = f"{needs} a participation rule that selects a given number of different clients without factors"
        checks.refuse(what, rule.name, "pass fd.participation.uniform(), for example")
    if selection.asks_losses:
        fix = "with power_of_choice, pass exact=False"
        checks.refuse(f"{needs} a participation rule that doesn't ask for losses", rule.name, fix)
    if (first := selection_of(rule, N, M).capacity) != M:
        checks.refuse(f"{rule.name} must select {M} clients before round 0, all that train", first)
    if options.algorithm.survey is not None:
        reason = "because it asks all clients of a round before they train"
        what = f"{options.algorithm.name} needs synchronous rounds, {reason}"
        checks.refuse(what, f"{clock.name} ones", "leave clock= out")
    for source in options.sources:
        if source.one_server:
            checks.refuse(
                f"the source {source.name} needs synchronous rounds", f"{clock.name} ones", "leave clock= out"
            )
    if flight.keeps_past:
        check_versions(options)
    if options.data.redeal is not None:
        fix = "pass the data as they are"
        checks.refuse("asynchronous rounds can't pool the examples of a cohort", "data.redealt()", fix)
    return Devices() if devices is None else devices


def check_versions(options: Options) -> None:
    """Checks that messages of clients that started in different rounds have a common mean."""
    algorithm, local, needs, clock = options.algorithm, options.local, options.algorithm.requires, options.clock
    fix = f"leave clock= out, or pass concurrency={options.cohort_size}, with which all clients start together"
    if needs.one_version:
        reason = "on whose scale their messages depend"
        what = f"{algorithm.name} needs clients that start with the same variables of the server, {reason}"
        checks.refuse(what, f"{clock.name} rounds", fix)
    if needs.one_rate and (callable(local.lr) or checks.used(local.lr_decay - 1)):
        given = "a schedule" if callable(local.lr) else f"lr_decay={local.lr_decay}"
        reason = "because the mean of their updates is divided by one learning rate"
        what = f"{algorithm.name} needs a constant learning rate in {clock.name} rounds, {reason}"
        checks.refuse(what, given, f"pass a number as lr, or {fix}")
    if needs.equal_weights and (clock.mixes == "models" or clock.discount is not jnp.ones_like):
        given = "a discount" if clock.mixes == "updates" else 'mixes="models"'
        what = (
            f"{algorithm.name} needs updates with equal weights, because it makes up for clients that are away itself"
        )
        checks.refuse(what, given, f'use staleness="constant" and mixes="updates", or {fix}')
