"""Checks the arguments of a simulation and fills in all defaults, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, recipes, tree
from fedjax_drift.algorithms.running_statistics import with_running_statistics
from fedjax_drift.data.federated import FederatedData, integers_as_int32
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.mesh import flat, leaf_shardings, num_teams, team_size
from fedjax_drift.measures import drift
from fedjax_drift.measures.measure import Measures
from fedjax_drift.model import Model
from fedjax_drift.participation import bernoulli
from fedjax_drift.round import rows
from fedjax_drift.round.arrays import Arrays, Rows
from fedjax_drift.round.engine import Engine, Federation, initial_client
from fedjax_drift.round.evaluate import at_round, evaluate, shifted
from fedjax_drift.round.exchange import rows_by_rank
from fedjax_drift.round.initial import init
from fedjax_drift.round.rehearsal import incomplete_message, results
from fedjax_drift.round.selection import Selection
from fedjax_drift.round.sources import Source
from fedjax_drift.round.traffic import summed_message
from fedjax_drift.round.train import checked
from fedjax_drift.shift.rule import shift_of
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.fit import check_model
from fedjax_drift.simulation.lanes import lane_of
from fedjax_drift.simulation.options import Options
from fedjax_drift.simulation.placement import moved, shardings_of
from fedjax_drift.simulation.selection import check_weights, selection_of
from fedjax_drift.simulation.sources import redeal_of, sources_of
from fedjax_drift.simulation.timing import check_clock
from fedjax_drift.simulation.topology import check_memory, check_topology
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.storage.specification import ON_DEVICES
from fedjax_drift.types import THREEFRY, Algorithm, ClientResult, Needs, ServerState


@dataclass(frozen=True, eq=False)
class Setup:
    """The checked arguments of a simulation, with all defaults filled in. `assemble` creates it."""

    data: FederatedData
    model: Model
    algorithm: Algorithm  # as given; that of the engine also handles running statistics
    options: Options  # with all defaults; its algorithm is that of the engine
    selection: Selection  # how the clients of a round are selected
    engine: Engine  # its model is without the arrays of frozen parameters
    arrays: Arrays  # the data set on the devices
    measures: Measures  # the drift measures to compute in every round
    on_nonfinite: str
    donate: bool
    eval_batch_size: int
    client_store: str  # "device", "sharded", "host" or a folder
    state: ServerState  # shapes and dtypes; with states on the host, ``clients`` has one client, [1, ...]
    shardings: ServerState  # the sharding of each field of a state
    selects_ahead: bool  # whether a cohort can be selected before the rounds before it have ended
    x64: bool  # whether JAX computed in 64 bits when the data were placed on the devices

    @property
    def mesh(self) -> Mesh:
        return self.engine.mesh

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of arrays that are replicated on all devices."""
        return NamedSharding(self.mesh, P())

    @property
    def states_on_host(self) -> bool:
        """Whether client states are kept in host memory or in files."""
        return self.client_store not in ON_DEVICES

    @property
    def streamed(self) -> bool:
        """Whether the training examples are kept on the host."""
        return self.arrays.rows is None

    @property
    def needs_host(self) -> bool:
        """Whether a round needs examples or client states that are kept on the host."""
        return self.streamed or self.states_on_host

    @property
    def in_files(self) -> bool:
        """Whether client states are kept in files."""
        return self.client_store not in (*ON_DEVICES, "host")

    @property
    def trains_alone(self) -> bool:
        """Whether a sweep trains the runs of this simulation one after another, each on all devices."""
        return self.needs_host or self.engine.sharded or self.engine.rows_by_rank is not None

    @property
    def can_be_refused(self) -> bool:
        """Whether a round may raise an exception after it was computed. The state before it must then stay valid."""
        # client states on the host may find a full disk
        return self.on_nonfinite == "raise" or self.engine.algorithm.observe is not None or self.states_on_host

    @property
    def one_round_a_program(self) -> bool:
        """Whether a program runs only one round, because the host has work to do in every round."""
        return self.can_be_refused or self.needs_host

    def with_lanes(self, lanes: int) -> Setup:
        return replace(self, engine=self.engine._replace(lanes=lanes))

    def client_results(self) -> list[ClientResult]:
        """The shapes and dtypes of what a client returns in each phase."""
        return jax.eval_shape(partial(results, self.engine), self.state.server, Rows(*self.engine.federation.row))

    def update_leaves(self) -> list[str]:
        """The names of the leaves of a client's update. ``info["bad_leaf"]`` has indices into this list."""
        leaves = jax.tree.leaves_with_path(checked(self.client_results()[-1]))
        return [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in leaves]  # type: ignore[attr-defined]

    def check_rules(self, state: ServerState) -> None:
        """Raises ConfigurationError if the state is of another rule, or was saved without the state of a rule."""
        switched_off = [Source(n, kind=n, title=title) for n, title in (("clock", "synchronous"), ("topology", "star"))]
        sources = {source.name: source for source in (*map(Source, state.sources), *switched_off, *self.engine.sources)}
        for name, source in sources.items():
            stored, expected = source.state_of(state), source.state_of(self.state)
            if len({jax.tree.structure(each) for each in (stored, expected)}) == 1:
                continue
            if not jax.tree.leaves(stored):
                fix = "save all fields but the client states, which is state._replace(clients=()), or start with init"
                checks.refuse(f"state must have the state of {source.described} in its field {name}", stored, fix)
            fix = f"start with init, or keep the field {name} of the state"
            checks.refuse(
                f"state must be of a simulation with {source.described}", f"one of another {source.kind}", fix
            )

    def refuse_traced(self, name: str, value: Any) -> None:
        """Raises ConfigurationError if client states, which are on the host, would depend on a traced value."""
        if traced(value):
            what = f"{name} must not be traced with bank={self.client_store!r}, which keeps client states outside JAX"
            checks.refuse(what, "a traced one", 'do not use jax.jit, vmap or scan, or pass bank="device"')

    def admit(self, state: Any) -> ServerState:
        """Returns the state on the devices of this simulation. The state may come from another simulation or a file.

        Raises ConfigurationError for a state of another algorithm, model or federation, and for a donated state.
        """
        validate.check_state(state)
        validate.check_x64(self.x64)
        clients, expected = state.clients, self.state
        if self.states_on_host:
            self.refuse_traced("state", state)
            state, expected = state._replace(clients=()), expected._replace(clients=())
        self.check_rules(state)
        tree.check_layout(state, expected, "this state is of another algorithm, model or federation")
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not traced(leaf)]
        if any(array.is_deleted() for array in arrays):
            fix = "use the state that this round returned"
            checks.refuse("state must be valid", "one that was donated to a round", fix)
        state = moved(state, leaf_shardings(self.shardings, state))
        if not self.states_on_host:
            return state
        if not isinstance(clients, ClientStore):
            what = f"state must come from a simulation with bank={self.client_store!r}"
            checks.refuse(what, "one whose client states are on the devices", "use the same bank= in both simulations")
        if clients.round != int(state.round):
            what = "state must be the newest one"
            got = f"a state of round {int(state.round)} whose client states were overwritten in round {clients.round}"
            checks.refuse(what, got, f"use the newest state (bank={self.client_store!r} keeps only that)")
        return state._replace(clients=clients)


def assemble(given: Options) -> Setup:
    """Checks the options and their combinations, resolves those that depend on others, and places the data on the
    devices."""
    model, data, algorithm, local, cohort_size, participation, failures, aggregation, clock, _, placement, *_ = given
    validate.check_types(model, data, algorithm, local)
    algorithm = algorithm._replace(requires=Needs.of(algorithm.requires))
    N = data.num_clients
    cohort_size = checks.integer("cohort_size", cohort_size, 1, N, f"the federation has {N} clients")
    clients_selected = failures.clients_selected(cohort_size, N)
    on_nonfinite = checks.choice("on_nonfinite", given.on_nonfinite, ("keep", "drop_client", "raise"))
    if placement.donate and on_nonfinite == "raise":
        fix = "pass donate=False, because a failed round would have overwritten its state"
        checks.refuse('on_nonfinite must be "keep" or "drop_client" with donate=True', '"raise"', fix)
    over_selected = clients_selected > cohort_size
    selection = selection_of(participation, N, clients_selected)
    validate.check_aggregation(aggregation, algorithm, participation, over_selected, data)
    if aggregation.poisson:  # privacy accounting assumes independent draws
        selection = selection_of(bernoulli(nonempty=False), N, clients_selected)
    check_weights(algorithm, selection)
    validate.check_requirements(algorithm, model, local, data.x_test is not None)
    if model.statistics is not None:
        validate.check_statistics(model.statistics.kept, algorithm, aggregation)
        algorithm = with_running_statistics(algorithm, model.statistics.kept)

    mesh = placement.devices()
    if team_size(mesh) > 1 and not model.frozen:
        fix = "only frozen parameters (fd.models.lora) are sharded over the devices of a client"
        checks.refuse("devices_per_client must be 1 for a model that is trained whole", team_size(mesh), fix)
    model_with_arrays, model = model, recipes.without_arrays(model)
    capacity = selection.capacity
    decoded = data.decoding
    shapes = check_model(model, data, decoded)
    redeal = redeal_of(data)
    max_size = int(data.sizes.max())
    if redeal is not None and redeal.alpha is not None:
        max_size = redeal.most_rows[capacity - 1]  # one client may get all examples of a cohort
    validate.check_local(local, shapes.params, max_size)
    validate.check_augment(local, data, decoded)
    changes = [("example", shift_of(each.example, each.name)) for each in given.sources if each.example is not None]
    if data.shifting is not None:
        changes.append(("shift", data.shifting.shift))
    for option, shift in changes:
        validate.check_shift(option, shift, data)
    rows_at = placement.rows_at(data, mesh)
    row = jax.eval_shape(lambda: (jnp.asarray(flat(data.x[:1], mesh)), jnp.asarray(integers_as_int32(data.y[:1]))))
    if selection.asks_losses and rows_at == "host":
        what = f"{participation.name} needs the losses of clients that do not train, and so all examples on the devices"
        checks.refuse(what, "a streamed data set", "pass stream=False")
    D = num_teams(mesh)
    lane = partial(lane_of, model, decoded, data.x, data.y, min(local.batch_size, max_size))
    options = given._replace(algorithm=algorithm, cohort_size=cohort_size, participation=selection.rule)
    options = options._replace(devices=check_clock(options, selection))
    check_topology(options, selection)
    most_clients = min(capacity, cohort_size) if over_selected else capacity
    engine = Engine(
        model=model,
        algorithm=algorithm,
        local=local,
        sources=sources_of(options, selection),
        mesh=mesh,
        lanes=placement.lanes_for(most_clients, mesh, lane),
        num_clients=N,
        cohort_size=cohort_size,
        capacity=capacity,
        most_clients=most_clients,
        drop_nonfinite=on_nonfinite == "drop_client",
        federation=Federation(
            mean_size=len(data.x) / N,
            max_size=max_size,
            row=row,
            example=data.x.shape[1:],
            decode=decoded,
            num_classes=shapes.num_classes,
            labels=data.num_classes if changes else None,
            test_size=0 if data.x_test is None else len(data.x_test),
            test="present" if data.shifting is None else data.shifting.test,
            row_scores=shapes.row_scores,
            set_scores=shapes.set_scores,
        ),
        state_rows=N,
        sharded=False,
        rows_by_rank=rows_by_rank(data.sizes, local.batches(data.sizes)) if rows_at == "parts" else None,
    )
    if algorithm.complete is not None:
        rows_of_one = Rows(*engine.federation.row)
        message = jax.eval_shape(partial(incomplete_message, engine), shapes.params, rows_of_one)
        engine = engine._replace(message=message)
    client_store = placement.states_at(
        jax.eval_shape(partial(initial_client, engine), shapes.params), N, capacity, mesh
    )
    if client_store == "sharded" and D > 1:
        engine = engine._replace(state_rows=-(-N // D) * D, sharded=True)
    measures = drift.chosen(options.measure, engine, streamed=rows_at == "host")
    arrays = rows.place(data, mesh, rows_at, placement.eval_batch_size, shifted(engine))
    if algorithm.requires.accuracy:
        test = at_round(engine, arrays.test, jnp.int32(0)) if arrays.test is not None else None
        scores = jax.eval_shape(partial(evaluate, engine), shapes.params, test)
        if "accuracy" not in scores:
            fix = 'use a classifier and integer labels, or a Model whose scores return an "accuracy"'
            checks.refuse(f"{algorithm.name} needs the test accuracy", "an evaluation without it", fix)

    validate.check_rule(aggregation, lambda: summed_message(engine, shapes.params), cohort_size)
    if clock.mixes == "models" and tree.layout(summed_message(engine, shapes.params)) != tree.layout(shapes.params):
        what = f'mixes must be "updates" for {algorithm.name}, whose message isn\'t the update of a model alone'
        checks.refuse(what, '"models"')
    check_memory(engine, shapes.params)
    validate.check_stack(engine, shapes.params)
    one_state = engine if client_store in ON_DEVICES else engine._replace(state_rows=1)
    return Setup(
        data=data,
        model=model_with_arrays,
        algorithm=given.algorithm,
        options=options,
        selection=selection,
        engine=engine,
        arrays=arrays,
        measures=measures,
        on_nonfinite=on_nonfinite,
        donate=placement.donate,
        eval_batch_size=placement.eval_batch_size,
        client_store=client_store,
        state=jax.eval_shape(partial(init, one_state), jax.random.key(0, impl=THREEFRY), None, arrays.sizes),
        shardings=shardings_of(engine, on_host=client_store not in ON_DEVICES),
        selects_ahead=selection.ahead and clock.concurrency is None,
        x64=validate.x64(),
    )
