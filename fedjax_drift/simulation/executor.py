"""Runs the compiled programs of a simulation, of one run or of several, and replaces them if they fail (`retries`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.mesh import copied, leaf_shardings, put
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.measures.measure import Measure
from fedjax_drift.round import rows
from fedjax_drift.round.arrays import Rows, TestRows
from fedjax_drift.round.evaluate import after, other_models, shifted
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.description import title
from fedjax_drift.simulation.host import Fetched, Host
from fedjax_drift.simulation.layout import Turn
from fedjax_drift.simulation.placement import on_host
from fedjax_drift.simulation.programs import Programs
from fedjax_drift.simulation.records import nonfinite_message
from fedjax_drift.simulation.retries import UNTRACEABLE, fitting, traceable
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.types import ServerState


class Executor:
    """Runs the programs of one `Setup`. turn: the runs that they train together; None: one run."""

    def __init__(self, setup: Setup, turn: Turn | None = None, constant: bool = False) -> None:
        self.setup, self.turn, self.arrays, engine = setup, turn, setup.arrays, setup.engine
        if turn is not None and turn.layout.apart:  # each device trains other runs, and evaluates them itself
            engine, where = turn.layout.inside(engine), (setup.mesh, "devices", setup.eval_batch_size)
            self.arrays = rows.place(setup.data, *where, shifted(engine), whole_test=True)
        self.programs = Programs(engine, setup.model, setup.states_on_host, constant, turn)
        self.host = Host(setup)
        self._fits = False  # whether a round has run with the current number of lanes

    def use_constants(self) -> bool:
        """Makes the hyper-parameters constants of the programs. Returns False if they are, or if runs that share a
        program may have different ones."""
        if self.programs.constant or self.turn is not None:
            return False
        self.programs = replace(self.programs, constant=True)
        return True

    def launch(self, name: str, *arguments: Any) -> Any:
        """Calls the program of this name."""
        return traceable(lambda: self.programs.launch(name, *arguments), self.use_constants)

    def launch_round(self, name: str, measures: tuple[Measure, ...], *arguments: Any) -> Any:
        """Calls a program that runs rounds with drift measures. Those of absent clients are NaN."""
        with jax.debug_nans(False) if measures else nullcontext():
            return self.launch(name, measures, *arguments)

    def computation(self) -> str:
        """Names what a round computes, for checkpoints: the version of JAX, the kind of device, and a checksum of the
        traced updates of a client and of the server."""
        shapes = self.setup.state, Rows(*self.setup.engine.federation.row)
        try:
            checksum = self.programs.checksum(*shapes)
        except UNTRACEABLE:
            checksum = replace(self.programs, constant=True).checksum(*shapes)
        return f"jax {jax.__version__}, {self.setup.mesh.devices.flat[0].platform}, crc32 {checksum:08x}"

    def test(self, rounds: Any) -> TestRows:
        """The test set after this number of rounds."""
        if self.arrays.test is None:
            checks.refuse("evaluating needs a test set", "none", "pass test=(x, y) to FederatedData.from_clients")
        return after(self.setup.engine, self.arrays.test, rounds)

    def test_of_clients(self, rounds: Any) -> TestRows:
        """The same, if the test examples of a client are shifted like its training examples."""
        test, sizes = self.test(rounds), self.setup.data.test_sizes
        if test.owner is None or sizes is None:
            return test
        position = np.minimum(np.arange(test.owner.size), sizes.sum() - 1)
        owner = np.searchsorted(np.cumsum(sizes), position, side="right")
        number = position - (np.cumsum(sizes) - sizes)[owner]
        ids, numbers = (put(a.astype(np.int32).reshape(test.owner.shape), test.owner.sharding) for a in (owner, number))
        return test._replace(owner=ids, number=numbers)

    def scores(self, state: ServerState, rounds: Any = None) -> dict[str, jax.Array]:
        """Evaluates the global model on the test set. rounds: the round of the state, if it has a first axis of runs.

        FedDyn and FedDC also keep the mean of the cohort's models. Its scores are called ``client_mean_<name>``.
        """
        test = self.test(state.round if rounds is None else rounds)
        algorithm = self.setup.engine.algorithm
        others = {f"{name}_": params for name, params in other_models(algorithm, state.server).items()}
        return {
            prefix + name: score
            for prefix, params in {"": state.params, **others}.items()
            for name, score in self.launch("evaluate", params, test).items()
        }

    def arguments(self, state: ServerState, cohort: jax.Array | None) -> Fetched:
        """Returns the arguments of the round that starts with ``state``. cohort: its clients; None: they are drawn."""
        if not self.setup.needs_host:
            return Fetched(self.setup.arrays, cohort)
        if traced((state.key, cohort)):
            what = "state and cohort must not be traced if examples or client states are kept on the host"
            fix = 'call round_fn outside jax.jit, vmap and scan, or pass stream=False and bank="device"'
            checks.refuse(what, "traced ones", fix)
        return self.fetch(self.selects_from(state), cohort)

    def fetch(self, state: ServerState, cohort: jax.Array | None = None) -> Fetched:
        """Returns the arguments of the next round. Only needed if examples or client states are kept on the host.

        state: what `selects_from` returns, with the number of the round.
        """
        if cohort is not None:
            return self.host.fetch(np.asarray(cohort), np.ones(len(cohort)) if self.setup.selection.factors else None)
        if self.setup.selects_ahead:
            selected = self.programs.select_on_host(state, self.setup.data.sizes)
        else:
            selected = self.launch("select", state._replace(clients=()), self.setup.arrays)
        return self.host.fetch(*jax.device_get(selected))

    def selects_from(self, state: ServerState) -> ServerState:
        """Returns what a round's clients are selected from: a copy on the host, if this needs no earlier round."""
        return on_host(state) if self.setup.selects_ahead else state

    def with_states(self, state: ServerState, fetched: Fetched) -> ServerState:
        """Returns the state, with the cohort's states on the devices if a client store has the client states."""
        if not isinstance(state.clients, ClientStore) or fetched.ids is None:
            return state
        return state._replace(clients=put(state.clients.gather(fetched.ids), self.setup.everywhere))

    def one_round(
        self, state: ServerState, fetched: Fetched, measures: tuple[Measure, ...], donate: bool
    ) -> tuple[ServerState, dict]:
        """Runs one round with its drift measures. Raises an exception if the result must be rejected."""
        setup, store = self.setup, state.clients
        state = self.with_states(state, fetched)
        name = "donating_round" if donate else "round"
        new, info = self.launch_round(name, measures, state, fetched.arrays, fetched.cohort)
        if traced((new, info)):
            return new, info
        if setup.engine.algorithm.observe is not None:
            scores = jax.device_get({name: value for name, value in info.items() if name.startswith("test_")})
            validate.check_scores(setup.engine.algorithm, int(new.round) - 1, scores)
        if setup.on_nonfinite == "raise" and not np.asarray(info["finite"]).all():
            raise FloatingPointError(nonfinite_message(int(new.round) - 1, info, setup))
        if isinstance(store, ClientStore) and fetched.ids is not None:
            answered = np.isin(fetched.ids, np.asarray(info["cohort"]))
            store.commit(fetched.ids, jax.device_get(new.clients), int(new.round), keep=answered)
            new = new._replace(clients=store)
        return new, info

    def rounds(
        self, state: ServerState, n: int, fetched: Fetched, measures: tuple[Measure, ...], may_overwrite: bool
    ) -> tuple[ServerState, dict]:
        """Runs n rounds. If ``may_overwrite`` is False, the given state stays valid, because a copy is overwritten."""
        setup = self.setup

        def call() -> tuple[ServerState, dict]:
            if setup.can_be_refused and self.turn is None:  # the runs of a turn don't stop each other
                return self.one_round(state, fetched, measures, donate=False)
            start = state if may_overwrite else copied(state, leaf_shardings(setup.shardings, state))
            if setup.needs_host or fetched.cohort is not None:
                return self.one_round(start, fetched, measures, donate=True)
            return self.launch_round("rounds", measures, start, fetched.arrays, np.int32(n))

        return self.fit(call, state)

    def fit(self, call: Callable[[], Any], state: ServerState) -> Any:
        """Returns ``call()``, which runs programs on ``state``.

        If the programs do not fit in a device's memory, the number of lanes is halved, and ``call`` is called again.
        Raises MemoryError if that is impossible, for example because the failed program has overwritten the state.
        """

        def launched() -> Any:
            result = call()
            if not (self._fits or traced(result)):
                jax.block_until_ready(result)  # so that errors of the programs are raised here
                self._fits = True
            return result

        return fitting(launched, partial(self._halve_lanes, state))

    def _halve_lanes(self, state: ServerState, error: jax.errors.JaxRuntimeError) -> None:
        """Halves the number of lanes after a program with this state didn't fit in a device's memory."""
        if self.turn is not None:
            raise error  # its state was donated; the sweep starts again with less
        lanes = self.setup.engine.lanes
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
        if lanes == 1:
            kept = "the state was donated to it, and is lost" if lost else "the state is still valid"
            raise MemoryError(
                f"a round of {title(self.setup)} does not fit in a device's memory even with 1 lane: use a "
                f'smaller model, batch_size or cohort_size, or stream=True, or bank="host"; {kept}'
            ) from error
        if lost:
            raise MemoryError(
                f"{lanes} lanes do not fit in a device's memory, and the state was donated to the round that "
                f"failed: resume from an earlier state with lanes={lanes // 2}"
            ) from error
        if spans_processes(self.setup.mesh):  # the other processes may have enough memory
            raise MemoryError(
                f"{lanes} lanes do not fit in a device's memory: lower lanes= (with several processes it is "
                "not halved automatically); the state is still valid"
            ) from error
        checks.warn(f"{lanes} lanes do not fit in a device's memory: the run continues with {lanes // 2}")
        self.setup, self._fits = self.setup.with_lanes(lanes // 2), False
        self.programs = replace(self.programs, engine=self.setup.engine)
