"""The compiled programs of a simulation. Simulations that differ only in hyper-parameters share these programs.

The first argument of a program is the hyper-parameters, that is, the numbers that `recipes.split` separates from the
engine. So another learning rate, mu or alpha does not trigger recompilation. The second argument is the model's frozen
parameters (`recipes.Frozen`), which are empty for a model that is trained whole.

An engine describes a round. The programs of the 16 most recently used forms of engines (`recipes.Form`) are cached,
even if their simulations no longer exist. So a function that creates a simulation, runs it and returns can be called
again without recompilation.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import recipes, tree
from fedjax_drift.devices.launch import launch
from fedjax_drift.devices.mesh import any_device, is_described
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures import measure, personal
from fedjax_drift.measures.measure import Measure
from fedjax_drift.message import summed
from fedjax_drift.model import Model
from fedjax_drift.round.arrays import Arrays, Rows
from fedjax_drift.round.cohort import select
from fedjax_drift.round.engine import Engine, partitionable
from fedjax_drift.round.evaluate import evaluate, evaluate_rows
from fedjax_drift.round.exchange import rows_by_rank
from fedjax_drift.round.initial import init
from fedjax_drift.round.rehearsal import results
from fedjax_drift.simulation.layout import Layout, Turn
from fedjax_drift.simulation.placement import frozen_parameters, shardings_of
from fedjax_drift.types import Params, PyTree, Round, ServerState

# Number of engine forms whose programs are cached. On two CPU devices, the programs of a form have 500 to 1,500 memory
# maps. Linux allows a process 65,530, and XLA then says "Cannot allocate memory".
KEPT = 16
MOST_ROUNDS = 64  # the largest number of rounds in one program of `run`
# The fields of an engine that contain numbers, and those that an evaluation uses.
CONTINUOUS = ("algorithm", "local", "sources")
SCORING = ("model", "mesh", "federation", "sources", "num_clients")
SCORES = ("evaluate", "evaluate_rows")  # the evaluations among the programs
Numbers = tuple[Any, ...]
FrozenArrays = tuple[PyTree, ...]


class Compiled(NamedTuple):
    """Jitted functions, compiled when they are first called.

    ``measures`` are the drift measures that a round computes. With measures, `rounds` runs one round. In the programs
    of a sweep, numbers, keys, states, parameters and results have a first axis of runs.
    """

    init: Callable  # (numbers, frozen, key, params, sizes) -> state
    round: Callable  # (numbers, frozen, measures, state, arrays, cohort) -> (state, info)
    donating_round: Callable  # the same as `round`, but the state is overwritten
    rounds: Callable  # (numbers, frozen, measures, state, arrays, n) -> (state, infos), n <= MOST_ROUNDS; as above
    measure: Callable  # (numbers, frozen, measures, state, arrays, cohort) -> measures
    select: Callable  # (numbers, frozen, state, arrays) -> (ids, factors)
    select_on_host: Callable  # the same, on a device that is not one of the mesh
    evaluate: Callable  # (numbers of `scoring`, frozen, params, test) -> scores
    evaluate_rows: Callable  # (numbers of `scoring`, frozen, params, test) -> (scores of each example, logits)


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of one engine, and its hyper-parameters. A program is compiled when it is first called."""

    engine: Engine
    model: Model  # with the arrays of its frozen parameters, which the engine's model does not have
    one_state: bool  # whether `init` creates the state of one client only, because a client store keeps the states
    constant: bool = False  # whether hyper-parameters are constants of the programs instead of arguments
    turn: Turn | None = None  # the runs of a sweep that the programs train together; None: one run

    @cached_property
    def _split(self) -> tuple[recipes.Form, tuple[float, ...]]:
        return split(self.engine, self.constant)

    @property
    def layout(self) -> Layout | None:
        return None if self.turn is None else self.turn.layout

    @cached_property
    def _scoring_numbers(self) -> Numbers:
        return split(scoring(self.engine), self.constant)[1] if self.turn is None else self.turn.scoring

    @cached_property
    def compiled(self) -> Compiled:
        """The jitted functions. Their first argument is `numbers`."""
        form, _ = self._split
        make = _compiled.__wrapped__ if form.private else _compiled
        return make(form, self.one_state, self.layout)

    @cached_property
    def numbers(self) -> Numbers:
        """The hyper-parameters, on the devices."""
        if self.turn is not None:
            return self.turn.numbers
        form, numbers = self._split
        return _placed(self.engine, numbers, form.private)

    @cached_property
    def frozen(self) -> FrozenArrays:
        """The frozen parameters of the model, on the devices."""
        return frozen_parameters(self.model, self.mesh)

    @property
    def mesh(self) -> Mesh:
        """The devices on which the programs run."""
        return self.engine.mesh if self.turn is None else self.turn.layout.mesh

    def launch(self, name: str, *arguments: Any) -> Any:
        """Waits until the devices are ready, and calls the program of this name with the hyper-parameters."""
        numbers = self._scoring_numbers if name in SCORES else self.numbers
        return launch(self.mesh, getattr(self.compiled, name), numbers, self.frozen, *arguments)

    def select_on_host(self, state: ServerState, sizes: np.ndarray) -> tuple[jax.Array, jax.Array | None]:
        """Selects a round's clients on the device that has the state, and returns their ids and factors.

        The numbers are sent in every call, because those of `numbers` are on the devices of the mesh.
        """
        _, numbers = self._split
        return self.compiled.select_on_host(numbers, (), state, Arrays(None, None, sizes))  # type: ignore[arg-type]

    def lower(self, name: str, *arguments: Any) -> Any:
        """Returns the lowered program of this name for inspection: ``.compile()``, ``.as_text()``."""
        return getattr(self.compiled, name).lower(self.numbers, self.frozen, *arguments)

    def checksum(self, state: ServerState, rows: Rows) -> int:
        """The checksum of the traced updates of a client and of the server. It does not depend on hyper-parameters that
        are arguments of the programs. state, rows: shapes and dtypes."""
        engine = self.engine._replace(mesh=any_device(), lanes=1)  # type: ignore[arg-type]
        form, numbers = split(engine, self.constant)
        shapes = tuple(frozen.shapes for frozen in self.model.frozen)
        leaves, structure = jax.tree.flatten((shapes, state._replace(clients=()), rows))
        function = _checksum.__wrapped__ if form.private else _checksum
        return function(form, len(numbers), structure, tuple(leaves))

    def personal_models(self) -> Callable:
        """Returns the program ``(state, rows, clients) -> models``. See `personal.personal_models`."""
        form, numbers = split(_selecting_nobody(self.engine), self.constant)
        program = _program(personal.personal_models, form)
        return partial(launch, self.engine.mesh, program, _placed(self.engine, numbers), self.frozen)

    def personal(self, local: LocalTraining | None, sizes: Any, eval_batch_size: int) -> Callable:
        """Returns the program ``(state, rows, clients, tests) -> scores`` that evaluates the clients' own models.

        local: the local training of the fine-tuning; None: without fine-tuning. See `personal.personal_scores`.
        """
        engine = self.engine if local is None else with_local(self.engine, local, sizes)
        if engine.algorithm.personal is None:  # different algorithms then share the program
            engine = engine._replace(algorithm=None)  # type: ignore[arg-type]
        form, numbers = split(_selecting_nobody(engine), self.constant)
        program = _program(personal.personal_scores, form, None, local is not None, eval_batch_size)
        return partial(launch, engine.mesh, program, _placed(engine, numbers), self.frozen)

    def new_clients(self, local: LocalTraining, sizes: Any, eval_batch_size: int) -> Callable:
        """Returns the program ``(state, rows, clients, tests) -> scores`` that evaluates clients that have never taken
        part. local: their local training. See `personal.new_scores`."""
        engine = with_local(self.engine, local, sizes)
        if engine.algorithm.personal is None and engine.algorithm.adapt is None:
            engine = engine._replace(algorithm=None, message=None)  # type: ignore[arg-type]
        form, numbers = split(_selecting_nobody(engine), self.constant)
        program = _program(personal.new_scores, form, None, eval_batch_size)
        return partial(launch, engine.mesh, program, _placed(engine, numbers), self.frozen)


def with_local(engine: Engine, local: LocalTraining, sizes: Any) -> Engine:
    """The engine with another local training."""
    by_rank = None if engine.rows_by_rank is None else rows_by_rank(sizes, local.batches(sizes))
    return engine._replace(local=local, rows_by_rank=by_rank)


def rounds(
    engine: Engine, measures: tuple[Measure, ...], state: ServerState, arrays: Arrays, n: jax.Array
) -> tuple[ServerState, dict]:
    """Runs n <= MOST_ROUNDS rounds in one program, or one round with drift measures.

    Returns the last state, and the infos of the rounds, leaves [MOST_ROUNDS, ...], or [1, ...] with measures. Only the
    first n infos are valid.
    """
    round_fn = partial(measure.measured_round, engine, measures)
    _, info = jax.eval_shape(round_fn, state, arrays, None)
    most = 1 if measures else MOST_ROUNDS
    infos = jax.tree.map(lambda a: jnp.zeros((most, *a.shape), a.dtype), info)

    def one(j: jax.Array, carry: tuple[ServerState, dict]) -> tuple[ServerState, dict]:
        state, infos = carry
        state, info = round_fn(state, arrays, None)
        return state, jax.tree.map(lambda stacked, value: stacked.at[j].set(value), infos, info)

    # n is an argument, so that one program runs any number of rounds
    return lax.fori_loop(0, n, one, (state, infos))


def split(engine: Engine, constant: bool = False) -> tuple[recipes.Form, tuple[float, ...]]:
    """Returns the form and the numbers of an engine. Programs are compiled for the form.

    constant: if True, all numbers stay in the form, and no numbers are returned.
    """
    if constant:
        return recipes.split(engine, Engine._fields)
    return recipes.split(engine, [name for name in Engine._fields if name not in CONTINUOUS])


def scoring(engine: Engine) -> Engine:
    """The engine with the fields only that an evaluation uses. Different algorithms then share the evaluation."""
    shifts = [source for source in engine.sources if source.example is not None]
    unused: dict[str, Any] = dict.fromkeys(("mean_size", "max_size", "row", "example", "num_classes", "labels"))
    federation: Any = engine.federation._replace(**unused)
    N: Any = engine.num_clients if shifts else None
    return only(engine._replace(federation=federation, sources=tuple(shifts), num_clients=N), *SCORING)


def only(engine: Engine, *names: str) -> Engine:
    """The engine with these fields only."""
    return engine._replace(**{name: None for name in Engine._fields if name not in names})  # type: ignore[arg-type]


def _placed(engine: Engine, numbers: Numbers, private: bool = False) -> Numbers:
    """Returns the numbers on the devices, so that they are sent only once.

    With several processes, with devices that are only described, or if the form is private (it may contain tracers),
    the numbers are returned unchanged.
    """
    if private or spans_processes(engine.mesh) or is_described(engine.mesh):
        return numbers
    with jax.ensure_compile_time_eval():  # inside jax.jit, too, the result is an array, not a tracer
        return jax.device_put(numbers, NamedSharding(engine.mesh, P()))


@lru_cache(KEPT)
def _compiled(form: recipes.Form, one_state: bool, layout: Layout | None) -> Compiled:
    engine: Engine = form.value
    # A round returns a state with the sharding of its input, so that the next round does not trigger recompilation.
    # Results that the host reads are replicated over the processes.
    state, seen = (
        (shardings_of(engine, on_host=one_state), _seen(engine)) if layout is None else (_of_turn(layout),) * 2
    )

    def jit(function: Callable, per_run: tuple[int, ...], changes: dict[str, Any] | None = None, **options: Any) -> Any:
        """Jits ``function(engine, ...)`` as a function of the numbers and the frozen parameters.

        per_run: the positions of the arguments that the runs of a sweep do not share. changes: fields of the engine to
        replace.
        """

        def of_numbers(numbers: Numbers, frozen: FrozenArrays, *arguments: Any) -> Any:
            return function(recipes.join(form, numbers, frozen)._replace(**(changes or {})), *arguments)

        of_numbers.__name__ = function.__name__
        static = (options["static_argnums"],) if "static_argnums" in options else ()
        return jax.jit(layout.over_runs(of_numbers, per_run, static) if layout else of_numbers, **options)

    init_state = jit(init, (0, 2), changes={"state_rows": 1} if one_state else None, out_shardings=state)
    init_params = _initial(recipes.split(only(engine, "model", "mesh"), form.fixed)[0])

    def start(numbers: Numbers, frozen: FrozenArrays, key: jax.Array, params: Params | None, sizes: jax.Array) -> Any:
        params = init_params(frozen, key) if params is None else params
        return init_state(numbers, frozen, key, params, sizes)

    of_scoring = recipes.split(scoring(engine), form.fixed)[0]
    round_of, next_state = partial(jit, measure.measured_round, (0, 3), static_argnums=2), (state, seen)
    return Compiled(
        init=start if layout is None else init_state,
        round=round_of(out_shardings=next_state),
        donating_round=round_of(donate_argnums=3, out_shardings=next_state),
        rounds=jit(rounds, (0, 3), static_argnums=2, donate_argnums=3, out_shardings=next_state),
        measure=jit(measure.measure, (0, 3), static_argnums=2, out_shardings=seen),
        select=jit(select, (0, 2), out_shardings=seen),
        select_on_host=jit(select, (0, 2)),
        evaluate=_program(evaluate, of_scoring, layout),
        evaluate_rows=_program(evaluate_rows, of_scoring, layout),
    )


@lru_cache(KEPT)
def _initial(form: recipes.Form) -> Callable:
    """Returns the program of the initial parameters. Different algorithms with the same model share it, because random
    numbers take most of the time to compile a new state."""

    @partitionable
    def parameters(frozen: FrozenArrays, key: jax.Array) -> Params:
        return recipes.join(form, (), frozen).model.init(jax.random.split(key)[0])  # as in `init`

    program = partial(jax.jit, parameters, out_shardings=NamedSharding(form.value.mesh, P()))
    usual, quick = program(), program(compiler_options={"xla_backend_optimization_level": 1})

    def initial(frozen: FrozenArrays, key: jax.Array) -> Params:
        # On a CPU, `quick` compiles in a third of the time, with the same bits. JAX refuses options inside a trace.
        traced = isinstance(key, jax.core.Tracer)
        return (usual if traced or next(iter(key.devices())).platform != "cpu" else quick)(frozen, key)

    return initial


@lru_cache(4 * KEPT)
def _program(function: Callable, form: recipes.Form, layout: Layout | None = None, *static: Any) -> Callable:
    """The program ``function(engine, *static, ...)``, whose results the host reads. Simulations whose engines have this
    form share it. The runs of a turn have numbers and a first argument of their own."""

    def of_numbers(numbers: Numbers, frozen: FrozenArrays, *arguments: Any) -> Any:
        return function(recipes.join(form, numbers, frozen), *static, *arguments)

    of_numbers.__name__ = function.__name__
    if layout is None:
        return jax.jit(of_numbers, out_shardings=_seen(form.value))
    return jax.jit(layout.over_runs(of_numbers, (0, 2)), out_shardings=_of_turn(layout))


def _of_turn(layout: Layout) -> NamedSharding | None:
    """Returns the sharding of the results of a turn. None: `jax.shard_map` determines it."""
    return None if layout.apart else layout.sharding


def _selecting_nobody(engine: Engine) -> Engine:
    """The engine without what a program that evaluates clients does not use, so that simulations share the program."""
    used = [source for source in engine.sources if source.example is not None or source.receivers is not None]
    return engine._replace(sources=tuple(used))


@lru_cache(KEPT)
def _checksum(form: recipes.Form, count: int, structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> int:
    """See `Programs.checksum`. count: of the numbers. leaves: the shapes of frozen parameters, state and rows."""

    def updates(numbers: Numbers, frozen: FrozenArrays, state: ServerState, rows: Rows) -> Any:
        engine: Engine = recipes.join(form, numbers, frozen)
        *surveys, result = results(engine, state.server, rows)
        one, surveyed = jnp.ones((), result.weight.dtype), summed(surveys[0].message) if surveys else None
        context = Round(state.round, one, one, engine.num_clients, engine.federation.mean_size, surveyed, engine.model)
        return result, engine.algorithm.server_update(state.server, summed(result.message), context)

    traced = jax.make_jaxpr(updates)((1.0,) * count, *jax.tree.unflatten(structure, leaves))
    text = re.sub(r" at 0x[0-9a-f]+", "", str(traced))  # the addresses of functions differ between processes
    return tree.crc32(traced.consts, zlib.crc32(text.encode()))


def _seen(engine: Engine) -> NamedSharding | None:
    """Returns the sharding of results that the host reads. None: no constraint."""
    return NamedSharding(engine.mesh, P()) if spans_processes(engine.mesh) else None
