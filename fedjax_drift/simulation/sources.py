"""The sources of drift of a simulation, in the order in which a round calls them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.clock import Devices
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.recipes import recorded
from fedjax_drift.round.averaging import averaging
from fedjax_drift.round.failures import failing
from fedjax_drift.round.in_flight import Flight, in_flight, ticking
from fedjax_drift.round.receivers import decentralised, hierarchy
from fedjax_drift.round.redealing import Redeal, redealing
from fedjax_drift.round.selection import Selection, participating
from fedjax_drift.round.sources import Source
from fedjax_drift.shift.rule import Shifting, shift_of
from fedjax_drift.simulation.options import Options

# names of the library's sources
RESERVED = ("participation", "topology", "clock", "redeal", "failures", "shift", "aggregation")


def sources_of(options: Options, selection: Selection) -> tuple[Source, ...]:
    """The library's sources that are switched on, and those of one's own. options: checked, with all defaults.

    The aggregation rule is the last one.
    """
    data, clock, devices, K = options.data, options.clock, options.devices, options.cohort_size
    failures = options.failures if options.failures.any else None
    sources = [participating(selection, draws=clock.concurrency is None)]
    if options.topology.groups is not None:
        sources.append(hierarchy(options.topology))
    if options.topology.weights is not None:
        sources.append(decentralised(options.topology))
    if clock.concurrency is not None:
        sources.append(in_flight(Flight(clock, selection, failures, devices or Devices(), K)))
    elif devices is not None:
        sources.append(ticking(failures, devices))
    if (redeal := redeal_of(data)) is not None:
        sources.append(redealing(redeal))
    if failures is not None:
        sources.append(failing(failures, devices))
    if data.shifting is not None:
        sources.append(shifting(data.shifting))
    return (*sources, *options.sources, averaging(options.aggregation))


@recorded
def shifting(options: Shifting) -> Source:
    """Shifted data as a source of drift."""
    return Source("shift", example=options.shift, seed=options.seed)


def redeal_of(data: FederatedData) -> Redeal | None:
    """How the data are redealt. None: they aren't."""
    if data.redeal is None:
        return None
    alpha = None if data.redeal == "evenly" else float(data.redeal)
    most_rows = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64).tolist()
    return Redeal(alpha, int(data.y.max()) + 1 if alpha else 1, tuple(most_rows))


def check_sources(sources: Any) -> tuple[Source, ...]:
    """The option ``sources`` of a simulation: sources of one's own."""
    if isinstance(sources, Source) or not isinstance(sources, tuple | list):
        checks.refuse("sources must be a list of fd.sources.Source", checks.shown(sources), "pass sources=[my_source]")
    seen = set(RESERVED)
    for i, each in enumerate(sources):
        checks.instance(f"sources[{i}]", each, Source, "create an fd.sources.Source, or call its factory")
        checks.fields(each, "see fd.sources.Source")
        name = checks.text("name of a source", each.name)
        if name in seen:
            checks.refuse("names of sources must be different, and not those of the library", repr(name), "rename it")
        seen.add(name)
        if each.example is not None:
            shift_of(each.example, f"example of the source {name}")
    return tuple(sources)
