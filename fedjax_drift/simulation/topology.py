"""Checks a topology, before anything is compiled."""

from __future__ import annotations

import jax

from fedjax_drift import checks
from fedjax_drift.devices.memory import memory_of
from fedjax_drift.round.engine import Engine
from fedjax_drift.round.selection import Selection
from fedjax_drift.simulation.options import Options
from fedjax_drift.topology import Topology
from fedjax_drift.tree import nbytes
from fedjax_drift.types import Params


def check_topology(options: Options, selection: Selection) -> None:
    """Checks the option ``topology`` and its combination with others."""
    topology, N, K = options.topology, options.data.num_clients, options.cohort_size
    checks.instance("topology", topology, Topology, "pass fd.topology.groups(edge_of_client), for example")
    if topology.is_star:
        return
    algorithm, aggregation, rule, name = options.algorithm, options.aggregation, selection.rule, topology.name
    clients = topology.receivers if topology.groups is None else len(topology.groups)
    if clients != N:
        checks.refuse(f"topology must have the {N} clients of the federation", f"{clients} clients", "pass another one")
    if topology.weights is not None and K != N:
        fix = f"pass cohort_size={N}; clients that do not take part are those of a rule of availability, or dropout="
        checks.refuse(f"cohort_size must be {N} with the topology {name}, in which all clients train", K, fix)
    one = "a topology with one server, fd.topology.star(), is needed by"
    if algorithm.requires.one_server or algorithm.observe is not None:
        checks.refuse(f"{one} {algorithm.name}, whose server keeps an estimate of the whole federation", name)
    if selection.factors or rule.expected is not None:
        fix = "pass fd.participation.uniform(), for example"
        checks.refuse(f"{one} {rule.name}, because it fixes the divisor of the mean", name, fix)
    if aggregation.noise_multiplier is not None or jax.tree.leaves(jax.eval_shape(aggregation.init)):
        checks.refuse(f"{one} {aggregation.name}, which has a state of one server", name, "leave aggregation= out")
    for source in options.sources:
        if source.one_server or source.combine is not None and source.init is not None:
            checks.refuse(f"{one} the source {source.name}, which has a state of one server", name)
    if options.clock.concurrency is not None:
        checks.refuse("rounds must be synchronous with several servers", options.clock.name, "leave clock= out")


def check_memory(engine: Engine, params: Params) -> None:
    """Warns if the variables of all receivers take more than half of the memory of a device."""
    if engine.receivers is None:
        return
    R, of_one = engine.receivers.number, nbytes(jax.eval_shape(engine.algorithm.init_server, params))
    room = memory_of(engine.mesh) / 2
    if R * of_one > room:
        checks.warn(
            f"the topology keeps {R} models, {R * of_one / 2**30:.1f} GiB on every device, of which half of its memory "
            f"is {room / 2**30:.1f} GiB: use fewer receivers, or a smaller model"
        )
