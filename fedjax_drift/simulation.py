"""Simulation: a federation, a model and an algorithm, put together and checked before anything compiles."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import aggregation as rules
from fedjax_drift import checks, drift, engine, failures, fit, personal, programs
from fedjax_drift.bank import Bank
from fedjax_drift.checkpoint import Checkpoints, Saver
from fedjax_drift.data.federated import FederatedData, decode, integers_as_int32
from fedjax_drift.exchange import longest_share, rows_by_rank
from fedjax_drift.identity import CODE, identity
from fedjax_drift.local import LocalTraining
from fedjax_drift.progress import Bar, Record, Recorder, nonfinite_message, stop_on_interrupt
from fedjax_drift.sharding import (
    agree,
    clients_mesh,
    copied,
    launch,
    leads,
    memory_of,
    put,
    spans_processes,
    traced,
    wait_for_turn,
)
from fedjax_drift.stream import Stream
from fedjax_drift.tree import nbytes
from fedjax_drift.types import THREEFRY, Algorithm, ClientResult, Model, Params, PyTree, ServerState

if TYPE_CHECKING:
    from fedjax_drift.sweep import Run

CHUNK_SECONDS = 0.1  # how long such a program should take, and so how long Ctrl-C waits


class Fetched(NamedTuple):
    """What a round needs beside the state: the data, and its cohort if that is known beforehand."""

    arrays: engine.Arrays
    cohort: jax.Array | engine.Client | None = None
    ids: np.ndarray | None = None  # int [K], where the host has to know the cohort


class Simulation:
    """Simulates federated learning of ``model`` on ``data`` with ``algorithm``.

    Args:
      model: what is trained.
      data: N clients' rows, and a test set for `evaluate`.
      algorithm: a value such as ``fd.algorithms.fedavg()``.
      local: how a client trains. Default ``LocalTraining()``.
      cohort_size: K, clients a round, in 1..N; with Bernoulli sampling the expected number.
      dropout: probability, in 0..1, that a client does not answer: it counts as absent and keeps its old state.
      stragglers: probability, in 0..1, that a client stops after part of its K_i local steps (1..K_i - 1, each as
        likely) and sends what it has (FedProx's systems heterogeneity, arXiv 1812.06127, in steps instead of epochs).
      over_selection: >= 1; a round asks ceil(over_selection * K) clients, and the K that answer first count.
      deadline: a client that takes longer counts as absent; in units of what a client of mean size takes on a median
        device. Default None: the round waits.
      speed_spread: standard deviation, >= 0, of the logarithm of a device's speed, each client's for good. A client
        takes time in proportion to its steps and to that; it matters with ``deadline`` and ``over_selection``.
      aggregation: how messages become the mean that the server sees: ``fd.aggregation.clipped(norm)``,
        ``fd.aggregation.private(clip_norm, noise_multiplier)``, or your own. Default: their weighted mean.
      lanes: L, clients trained side by side on one device. "auto": 1 on CPU (or None: one after another, which is
        fastest there), many on an accelerator. Results don't depend on it (beyond rounding).
      sampling: "uniform" (exactly K clients, without replacement) or "bernoulli" (each client with probability K/N,
        drawn again while nobody is in).
      mesh: a mesh with the one axis "clients". Default: all devices, of all processes (`fd.distributed`).
      stream: True leaves the training rows on the host, in memory or in a memory-mapped file, and sends each round its
        cohort's, while the round before trains. "auto": if they take more than half of a device's memory, and may not
        be cut over the devices, or take more than half of all devices' memory.
      shard_data: True cuts the training rows over the devices, whole clients on one device each, which send each other
        the cohort's in every round; of several processes each reads only its own clients'. False: every device has
        all. "auto": True if they take more than half of a device's memory, but not more than half of all devices'.
      bank: where client states are kept. "device": whole on every device; "sharded": cut over the devices; "host": in
        the host's memory (of several processes: in each one's); a path: in files in that folder. On the host and in
        files only clients ever seen take space, and every round overwrites the one before (the old state is then
        invalid). "auto": the first that takes no more than half of a device's memory, or else "host".
      donate: let a round overwrite the state it is given, which saves one copy of it; the old state is then invalid.
      eval_batch_size: rows a batch in `evaluate`.
      on_nonfinite: what happens to a client whose update is NaN or infinite: "keep" (default; averaged like any
        other, `run` warns), "drop_client" (it counts as absent, and keeps its old state) or "raise" (`round_fn` waits
        for the round and raises FloatingPointError; the state that went in is still valid).
      measure: what to measure of drift in every round, any of "updates", "gradients", "predictions", "forgetting",
        "labels" (`measure` says what they are). Clients are trained up to two more times for it; the round itself
        stays as it is, and costs nothing more when this is empty.

    Raises:
      ValueError: arguments out of range, or a model that does not fit the data.
    """

    def __init__(
        self,
        model: Model,
        data: FederatedData,
        algorithm: Algorithm,
        *,
        local: LocalTraining | None = None,
        cohort_size: int,
        dropout: float = 0.0,
        stragglers: float = 0.0,
        over_selection: float = 1.0,
        deadline: float | None = None,
        speed_spread: float = 0.0,
        aggregation: rules.Aggregation | None = None,
        lanes: int | str | None = "auto",
        sampling: str = "uniform",
        mesh: Mesh | None = None,
        stream: bool | str = "auto",
        shard_data: bool | str = "auto",
        bank: str | os.PathLike = "auto",
        donate: bool = False,
        eval_batch_size: int = 500,
        on_nonfinite: str = "keep",
        measure: str | Sequence[str] = (),
    ) -> None:
        local = LocalTraining() if local is None else local
        fit.check_types(model, data, algorithm, local)
        N = data.num_clients
        cohort_size = checks.integer("cohort_size", cohort_size, 1, N, f"the federation has {N} clients")
        what, asked = failures.check(dropout, stragglers, deadline, speed_spread, over_selection, cohort_size, N)
        eval_batch_size = checks.integer("eval_batch_size", eval_batch_size, 1)
        sampling = checks.choice("sampling", sampling, ("uniform", "bernoulli"))
        on_nonfinite = checks.choice("on_nonfinite", on_nonfinite, ("keep", "drop_client", "raise"))
        donate = checks.flag("donate", donate)
        stream, shard_data = (
            value if checks.is_auto(value) else checks.flag(name, value, 'or pass "auto"')
            for name, value in (("stream", stream), ("shard_data", shard_data))
        )
        if mesh is not None and not (isinstance(mesh, Mesh) and mesh.axis_names == (engine.AXIS,)):
            raise ValueError(
                f'mesh must be a jax.sharding.Mesh with the one axis "{engine.AXIS}", got {checks.shown(mesh)}'
            )
        mesh = clients_mesh(None if mesh is None else list(mesh.devices.flat))  # with the axis type the engine needs
        if not mesh.local_devices:
            raise ValueError(
                "mesh must have a device of this process, got none: make it, and use it, where there is one"
            )
        bernoulli = sampling == "bernoulli"
        capacity = _bernoulli_capacity(N, asked) if bernoulli else asked
        aggregation = rules.mean() if aggregation is None else aggregation
        fit.check_aggregation(aggregation, sampling, asked > cohort_size, data)
        if donate and on_nonfinite == "raise":
            raise ValueError(
                'donate=True needs on_nonfinite="keep" or "drop_client", got "raise": '
                "the state that went into a failed round would be lost"
            )
        fit.check_requirements(algorithm, model, local, data.x_test is not None)
        self.data, self.local, self.on_nonfinite, self.mesh = data, local, on_nonfinite, mesh
        self._eval_batch_size = eval_batch_size
        decoded = partial(decode, mean=data.mean, std=data.std)
        shapes = fit.check_model(model, data, decoded)
        redeal = _redeal(data)
        max_size = int(data.sizes.max())
        if redeal is not None and redeal.alpha is not None:
            max_size = redeal.most_rows[capacity - 1]  # one client may get all rows of a cohort
        rows_at = _where_rows_go(shard_data, stream, data, mesh)
        self._engine = engine.Engine(
            model=model,
            algorithm=algorithm,
            local=local,
            mesh=mesh,
            lanes=_lanes(lanes, min(capacity, what.most or capacity), mesh),
            cohort_size=cohort_size,
            asked=asked,
            bernoulli=bernoulli,
            drop_nonfinite=on_nonfinite == "drop_client",
            num_clients=N,
            mean_size=len(data.x) / N,
            max_size=max_size,
            capacity=capacity,
            bank_rows=N,
            sharded=False,  # until it is known where the states fit
            rows_by_rank=rows_by_rank(data.sizes, local.steps(data.sizes)) if rows_at == "parts" else None,
            decode=decoded,
            num_classes=shapes.num_classes,
            test_size=0 if data.x_test is None else len(data.x_test),
            row_scores=shapes.row_scores,
            set_scores=shapes.set_scores,
            redeal=redeal,
            failures=what if what.any else None,
            aggregation=aggregation,
        )
        fit.check_local(local, shapes.params, self._engine.max_size)
        self._everywhere = NamedSharding(mesh, P())
        self._stream = Stream(data, self._everywhere) if rows_at == "host" else None
        self._measures = self._check_measures(measure)
        self._arrays = engine.place(data, mesh, eval_batch_size, rows_at == "host", cut=rows_at == "parts")
        if "accuracy" in algorithm.requires:
            scores = jax.eval_shape(partial(engine.evaluate, self._engine), shapes.params, self._arrays.test)
            if "accuracy" not in scores:
                raise ValueError(
                    f"{algorithm.name} follows the test accuracy: use a classifier and integer labels, or a model "
                    "whose scores have an accuracy"
                )
        self.bank = _where_states_fit(bank, jax.eval_shape(algorithm.init_client, shapes.params), N, mesh)
        self._states_on_host = self.bank not in ("device", "sharded")
        if self._states_on_host and self.bank != "host" and spans_processes(mesh):
            raise ValueError(
                f'bank must be "device", "sharded" or "host" over several processes, got the folder {self.bank}: its '
                "files are for one process"
            )
        self._needs_host = self._states_on_host or self._stream is not None
        self._donate = donate
        if self.bank == "sharded" and mesh.size > 1:
            self._engine = self._engine._replace(sharded=True, bank_rows=-(-N // mesh.size) * mesh.size)
        self._placement = programs.placement(self._engine)
        one = self._engine._replace(bank_rows=1) if self._states_on_host else self._engine
        self._expected = jax.eval_shape(partial(engine.init, one), jax.random.key(0, impl=THREEFRY), None)
        self._constant = False  # whether hyper-parameters are constants of the programs
        self._use_lanes(self._engine.lanes)

    def _use_lanes(self, lanes: int) -> None:
        self._engine = self._engine._replace(lanes=lanes)
        self._programs_made: tuple[programs.Programs, programs.Numbers] | None = None
        self._fits = False  # until a round has run

    @property
    def _programs(self) -> programs.Programs:
        """Compiled when they are first called, or by another simulation."""
        return self._programs_and_numbers[0]

    @property
    def _numbers(self) -> programs.Numbers:
        """The hyper-parameters, as the programs take them."""
        return self._programs_and_numbers[1]

    @property
    def _programs_and_numbers(self) -> tuple[programs.Programs, programs.Numbers]:
        if self._programs_made is None:
            form, numbers = programs.split(self._engine, self._constant)
            self._programs_made = programs.programs(form, self._states_on_host), self._placed(numbers, form.private)
        return self._programs_made

    def _placed(self, numbers: programs.Numbers, private: bool = False) -> programs.Numbers:
        """The numbers on the devices, once and for all; over several processes, or beside tracers, as they are."""
        if private or spans_processes(self.mesh):
            return numbers
        with jax.ensure_compile_time_eval():  # inside jax.jit, too, they are arrays that may be kept
            return jax.device_put(numbers, self._everywhere)

    def _launch(self, program: str, *arguments: Any) -> Any:
        """The program of this name with the hyper-parameters, in its turn."""
        try:
            return launch(self.mesh, getattr(self._programs, program), self._numbers, *arguments)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            if self._constant:
                raise
        # An algorithm uses a number where a program can't have an argument, as in an `if`: compiled as constants then.
        self._constant, self._programs_made = True, None
        return self._launch(program, *arguments)

    def _scores(self, server: Any) -> dict[str, jax.Array]:
        """The evaluation of the global model and, as client_mean_..., of the mean of the cohort's models, where it is
        kept."""
        test = self._test()
        scores = launch(self.mesh, self._programs.evaluate, server.params, test)
        if (mean := getattr(server, "client_mean", None)) is not None:
            of_mean = launch(self.mesh, self._programs.evaluate, mean, test)
            scores |= {f"client_mean_{name}": value for name, value in of_mean.items()}
        return scores

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm simulated."""
        return self._engine.algorithm

    @property
    def aggregation(self) -> rules.Aggregation:
        """How messages become the mean that the server sees."""
        return self._engine.aggregation

    @property
    def sampling_rate(self) -> float:
        """The probability that a client is asked in a round."""
        return self._engine.asked / self.data.num_clients

    @property
    def model(self) -> Model:
        """The model trained."""
        return self._engine.model

    @property
    def lanes(self) -> int:
        """L, clients trained side by side on one device."""
        return self._engine.lanes

    def init(self, key: jax.Array, params: Params | None = None) -> ServerState:
        """The state before round 0. ``key`` (``jax.random.key(seed)``) decides the initial parameters, unless
        ``params`` are given, and all cohorts, shuffles and dropout to come."""
        key = _typed(key)
        if params is not None:
            fit.check_like(params, self._expected.params, "params must be shaped like model.init's")
        key, params = _moved((key, params), self._everywhere)
        state = self._launch("init", key, params)
        if not self._states_on_host:
            return state
        if traced(state):
            raise ValueError(f"bank={self.bank!r} keeps client states outside JAX: not inside jax.jit, vmap or scan")
        initial = jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.clients))
        path = None if self.bank == "host" else self.bank
        return state._replace(clients=Bank.create(initial, self.data.num_clients, path, self._identity(state)))

    def reopen(self, state: ServerState, round: int | None = None) -> ServerState:
        """A state that was saved without its client states, with those of the folder ``bank=``.

        state: of the round at which the folder was left, or of ``round``, if that is pinned; whatever its ``clients``.
        Raises ValueError if the folder
        belongs to another federation, algorithm, model, key or round, and lists what differs.
        """
        if self.bank in ("device", "sharded", "host"):
            raise ValueError(f"reopen needs client states that are kept in files, got bank={self.bank!r}: pass a path")
        _check_state(state)
        what = "this state is of another algorithm, model or federation"
        fit.check_like(state._replace(clients=()), self._expected._replace(clients=()), what)
        first = self._launch("init", *_moved((state.key, state.params), self._everywhere))
        initial = jax.tree.map(lambda leaf: leaf[0], jax.device_get(first.clients))
        bank = Bank.open(self.bank, initial, self.data.num_clients, self._identity(state), round)
        return self._check(state._replace(clients=bank))

    def _identity(self, state: ServerState) -> dict[str, Any]:
        """What a folder of client states must agree on beside their shapes: what checkpoints ask for, and the key."""
        key = np.asarray(jax.random.key_data(state.key)).tolist()
        return {"key": str(key)} | {name: value for name, value in identity(self).items() if not name.endswith(CODE)}

    def round_fn(
        self, state: ServerState, cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None
    ) -> tuple[ServerState, dict[str, jax.Array]]:
        """One round. Pure: the same state gives the same result, bit for bit, and stays valid (unless donated).

        It may be scanned and vmapped. Inside a `jax.jit` of your own the data set becomes a constant of that program,
        which makes compiling slow: `jax.lax.scan` needs none around it.

        Args:
          state: from `init` or an earlier round.
          cohort: client ids, distinct and in 0..N-1, or names; default: drawn from the state's own key.

        Returns:
          The next state, and info: ``cohort`` int32 [K], the clients that count (-1 where a Bernoulli cohort is not
          filled up, a client was dealt no row, or did not answer), per-client ``size``, ``weight``, ``client_steps``
          (local steps done), ``loss`` (mean over those of what the algorithm minimises, its terms included),
          ``finite`` and ``bad_leaf`` (which leaf of the update is not finite; -1: none), all [K]; where clients may
          fail, ``asked``, the ids drawn (with over-selection more than K). If nobody answered, all weights are 0 and
          the state is the old one but for ``round``. And the scalars ``lr``,
          ``steps`` (needed by the cohort), ``executed_steps`` (run, idle lanes included) and their ratio
          ``executed_ratio``; whatever the algorithm reports (FedEve its ``gain``, ...), and with ``measure=`` what
          `measure` returns.

        Raises:
          ValueError: an empty cohort, ids out of range or twice; for an algorithm that steers by its evaluation
            (FedGVR, FedGVRGM), one that is not finite.
          FloatingPointError: with ``on_nonfinite="raise"``, an update that is not finite.
          OSError: a data file that has changed, or no room for client states; the state that went in is still valid.
          MemoryError: not even one lane fits in a device's memory (more are halved, with a warning, until they do). The
            state is still valid, unless it was donated.
        """
        state, cohort = self._check(state), self._check_cohort(cohort)
        if self._needs_host:
            if traced((state.key, cohort)):
                raise ValueError(
                    "streamed rows and client states on the host need it in every round: call round_fn "
                    "outside jax.jit, vmap and scan"
                )
            fetched = self._fetch(_on_host(state.key), int(state.round), cohort)
        else:
            fetched = Fetched(self._arrays, cohort)
        return self._fitting(lambda: self._advance(self._one_round, state, fetched, self._measures), state)

    def _fetch(self, key: jax.Array, t: int, cohort: jax.Array | None = None) -> Fetched:
        """What round t needs, where rows or states are kept on the host."""
        if cohort is None:
            cohort = self._programs.draw(key, t)
        ids = np.asarray(cohort)
        place = np.arange(len(ids)) if self._states_on_host else ids
        return Fetched(*self._send(ids, place, self.local), ids)

    def _send(self, ids: np.ndarray, place: np.ndarray, local: LocalTraining) -> tuple[engine.Arrays, engine.Client]:
        """The data set, of streamed rows those of the clients ``ids``; and these clients, their states at ``place``."""
        arrays, N, sizes = self._arrays, self.data.num_clients, self.data.sizes_of(ids)
        if arrays.rows is not None:
            offsets = np.asarray(arrays.rows.offsets)[np.minimum(ids, N - 1)]
        elif self._stream is not None:
            x, y, offsets = self._stream.fetch(ids)
            arrays = arrays._replace(rows=engine.Rows(x, y))
        columns = (ids, sizes, offsets, local.steps(sizes), np.where(ids < N, place, self._engine.bank_rows))
        return arrays, engine.Client(*put([a.astype(np.int32) for a in columns], self._everywhere))

    def _advance(
        self, program: str, state: ServerState, fetched: Fetched, measures: Sequence[str]
    ) -> tuple[ServerState, dict]:
        """One round by ``program``, with what is to be measured of it."""
        bank = state.clients
        state = self._with_states(state, fetched)
        arrays, cohort = fetched.arrays, fetched.cohort
        measured = self._launch("measure", tuple(measures), state, arrays, cohort) if measures else {}
        new, info = self._launch(program, state, arrays, cohort)
        info = self._with_measured(info, measured)
        if traced((new, info)):
            return new, info
        if self.algorithm.observe is not None:
            scores = jax.device_get({name: value for name, value in info.items() if name.startswith("test_")})
            fit.check_scores(self.algorithm, int(new.round) - 1, scores)
        if self.on_nonfinite == "raise":
            finite = np.asarray(info["finite"])
            if not finite.all():
                raise FloatingPointError(nonfinite_message(int(new.round) - 1, info, self._update_leaves))
        if isinstance(bank, Bank) and fetched.ids is not None:
            answered = np.isin(fetched.ids, np.asarray(info["cohort"]))
            bank.commit(fetched.ids, jax.device_get(new.clients), int(new.round), keep=answered)
            new = new._replace(clients=bank)
        return new, info

    def _with_states(self, state: ServerState, fetched: Fetched) -> ServerState:
        """The state with its cohort's client states on the devices, where the others are kept on the host."""
        if not isinstance(state.clients, Bank) or fetched.ids is None:
            return state
        return state._replace(clients=put(state.clients.gather(fetched.ids), self._everywhere))

    def _with_measured(self, info: dict, measured: dict) -> dict:
        if clash := info.keys() & measured.keys():
            names = ", ".join(sorted(clash))
            raise ValueError(f"{self.algorithm.name}: a metric needs a name that measure= leaves free, got {names}")
        return info | measured

    def _fitting(self, call: Callable[[], Any], state: ServerState) -> Any:
        """``call()``, which is given the state; again with half the lanes whenever a device's memory does not suffice,
        unless the state has been donated to the program that failed."""
        while True:
            try:
                found = call()
                if not (self._fits or traced(found)):
                    jax.block_until_ready(found)  # or else an error would show later, elsewhere
                    self._fits = True
                return found
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                lanes = self.lanes
                leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
                lost = any(leaf.is_deleted() for leaf in leaves)
                if lanes == 1:
                    kept = "the state was donated to it, and is lost" if lost else "the state is still valid"
                    raise MemoryError(
                        f"a round of {self!r} does not fit in a device's memory even with 1 lane: take a smaller "
                        f'model, batch_size or cohort_size, or stream=True, or bank="host"; {kept}'
                    ) from error
                if lost:
                    raise MemoryError(
                        f"{lanes} lanes do not fit in a device's memory, and the state was donated to the round that "
                        f"failed: go on from an earlier one with lanes={lanes // 2}"
                    ) from error
                if spans_processes(self.mesh):  # the others may have found room, and wait for this one
                    raise MemoryError(
                        f"{lanes} lanes do not fit in a device's memory: lower lanes= (over several processes they are "
                        "not halved by themselves); the state is still valid"
                    ) from error
                checks.warn(f"{lanes} lanes do not fit in a device's memory, going on with {lanes // 2}")
                self._use_lanes(lanes // 2)

    def _any_update(self) -> ClientResult:
        """The shapes of one client's update."""
        x, y = self._any_row()
        return jax.eval_shape(partial(engine.any_update, self._engine), self._expected, engine.Rows(x, y))

    def _any_row(self) -> tuple[Any, Any]:
        """The shapes of one row as it is on the devices."""
        return jax.eval_shape(lambda: (jnp.asarray(self.data.x[:1]), jnp.asarray(integers_as_int32(self.data.y[:1]))))

    def _update_leaves(self) -> list[str]:
        """The names of what ``bad_leaf`` counts."""
        leaves = jax.tree.leaves_with_path(engine.uploaded(self._any_update()))
        return [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in leaves]  # type: ignore[attr-defined]

    def measure(
        self,
        state: ServerState,
        names: str | Sequence[str] = tuple(drift.MEASURES),
        cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """What the round that follows from this state (``round_fn(state, cohort)``) shows of drift; changes nothing.

        names: which measures (all by default, which needs a classifier and a test set). Returns, per client of the
        cohort (K) and after every local epoch (E), with w the global model, D_i = theta_i - the model it was sent,
        and w_S the mean of the local models:

        - "updates": ``update_norm`` [K, E], ||D_i||; ``update_cosine`` [K, E], with the cohort's mean update.
        - "gradients": ``client_drift`` [K, E], ||grad F_i(theta_i) - grad F_i(w_S)||^2 (FedEve, 4); ``period_drift``
          [], ||mean_S grad F_i(w) - grad f(w)||^2 (FedEve, 3, this cohort's); ``dissimilarity`` [], Gamma =
          sum_i p_i ||grad F_i(w) - grad f(w)||^2 (FedGVRGM, 4); ``gradient_norm`` [], ||grad f(w)||. Takes the
          gradient of all N clients.
        - "predictions": ``cka`` [K, E], linear CKA of local and global logits on the test set; ``kl`` [K, E], mean
          KL(global || local) in nats.
        - "forgetting": ``lp_present``, ``lp_absent`` [K], LP (LfD, 11) over the classes that the client has, and has
          not; NaN where there is none.
        - "labels": ``label_mix`` [C], share of each class in the cohort's rows.

        NaN for an absent client, and for one whose update is not finite. LP exceeds 1 where a client knows a class
        better than w, far so in early rounds. Raises ValueError for unknown names, or without the test set or labels
        they need.
        """
        checked = self._check_measures(names)
        if not checked:
            return {}
        state, cohort = self._check(state), self._check_cohort(cohort)
        fetched = Fetched(self._arrays, cohort)
        if self._needs_host:
            fetched = self._fetch(_on_host(state.key), int(state.round), cohort)
        return self._launch("measure", checked, self._with_states(state, fetched), fetched.arrays, fetched.cohort)

    def _check_measures(self, names: str | Sequence[str]) -> tuple[str, ...]:
        checked = drift.check_measures(names, self._engine, self.data.x_test is not None)
        if self._stream is not None and "gradients" in checked:
            raise ValueError('measure="gradients" takes the rows of all clients, which stream=True leaves on the host')
        return checked

    def evaluate(self, state: ServerState) -> dict[str, float]:
        """``{"loss", "accuracy"}`` of the global model on the test set (accuracy for classifiers only), and what
        ``Model.scores`` gives, if the model has it.

        Rows with a NaN logit count as misclassified. Warns of a loss that is not finite.
        FedDyn and FedDC also keep the mean of the cohort's models: ``"client_mean_loss"``, ``"client_mean_accuracy"``
        and so on. Floats; under `jax.jit` or `jax.vmap` (many seeds at once) arrays.
        """
        state = self._check(state)
        scores = jax.tree.map(lambda v: v if traced(v) else float(v), self._scores(state.server))
        if isinstance(scores["loss"], float) and not math.isfinite(scores["loss"]):
            checks.warn(
                f"the model of round {int(state.round)} is not finite on the test set, its loss is {scores['loss']}: "
                "lower lr, or set clip_norm, and start from an earlier state",
                RuntimeWarning,
            )
        return scores

    def evaluate_clients(
        self, state: ServerState, fine_tune: LocalTraining | int | None = None
    ) -> dict[str, np.ndarray]:
        """Loss and accuracy of the global model on every client's own test rows, float [N]; NaN for one without any.

        fine_tune: also ``personal_loss`` and ``personal_accuracy``, after each client has trained its own copy of the
        global model on its own rows: for so many epochs of this simulation's local training, or for a `LocalTraining`
        of its own, at the round's rate. That is plain training on the model's loss, without the algorithm's terms (so
        without LfD's temperature). `fd.personal.summary` and `fd.plots.fairness` sum up what is returned; the state
        does not change. Raises ValueError unless the test set is cut into clients (natural partitions,
        ``test_clients=``, `FederatedData.with_client_tests`).
        """
        sizes = self.data.test_sizes
        if sizes is None:
            raise ValueError(
                "the test set is not cut into clients: build the data with test_clients= or test_parts=, or deal it in "
                "each client's label mix by data.with_client_tests()"
            )
        if fine_tune is not None and not isinstance(fine_tune, LocalTraining):
            fix = "epochs, or a fd.LocalTraining; None does not fine-tune"
            fine_tune = replace(self.local, epochs=checks.integer("fine_tune", fine_tune, 1, fix=fix))
        state = self._check(state)
        client = np.repeat(np.arange(len(sizes)), sizes)
        rows, _ = launch(self.mesh, self._programs.evaluate_rows, state.params, self._test())
        flat = {name: np.asarray(values).reshape(-1)[: len(client)] for name, values in rows.items()}
        sums = {name: np.bincount(client, values, len(sizes)) for name, values in flat.items()}
        if fine_tune is not None:
            sums |= {f"personal_{name}": total for name, total in self._fine_tuned(state, fine_tune).items()}
        with np.errstate(invalid="ignore"):
            return {name: total / sizes for name, total in sums.items()}

    def _fine_tuned(self, state: ServerState, local: LocalTraining) -> dict[str, np.ndarray]:
        """Sums over every client's own test rows, [N], of its own copy of the global model."""
        fit.check_local(local, state.params, self._engine.max_size)
        state = state._replace(clients=())
        found = []
        for ids, tests in personal.chunks(self.data):
            arrays, clients = self._send(ids, ids, local)
            tests = put(tests, self._everywhere)

            def call(rows: Any = arrays.rows, clients: Any = clients, tests: Any = tests) -> dict[str, jax.Array]:
                return launch(self.mesh, *self._tuning(local), state, rows, clients, tests)

            found.append(jax.device_get(self._fitting(call, state)))
        return {name: np.concatenate([sums[name] for sums in found])[: self.data.num_clients] for name in found[0]}

    def _tuning(self, local: LocalTraining) -> tuple[Callable, programs.Numbers]:
        """The program that fine-tunes by ``local``, and its numbers."""
        by_rank, sizes = self._engine.rows_by_rank, self.data.sizes
        by_rank = None if by_rank is None else rows_by_rank(sizes, local.steps(sizes))
        how = self._engine._replace(local=local, rows_by_rank=by_rank)
        how = how._replace(algorithm=None, failures=None, aggregation=rules.mean())  # type: ignore[arg-type]
        form, numbers = programs.split(how)
        return programs.fine_tuning(form, self._eval_batch_size), self._placed(numbers)

    def communication(self) -> dict[str, int]:
        """Bytes that the D devices of the mesh exchange in a round, from shapes alone; scalars and ids are left out.

        - "message sum": of the sum of messages (and weights), which all devices add up in one all-reduce. Going around
          a ring, each device sends 2 (D - 1) / D of it. It does not depend on the cohort's size.
        - "client states": that each device sends: the new states of its clients to all others (an all-gather), and with
          ``bank="sharded"`` before that the old ones to where their clients train (a reduce-scatter, as much again).
          Empty lanes are included.
        - "rows": that each device sends with ``shard_data=True``, else 0: (D - 1) buffers that hold the most rows one
          device can be dealt.
        """
        e, D = self._engine, self.mesh.size
        most = e.failures.most if e.failures is not None and e.failures.most is not None else e.capacity
        G = -(-min(most, e.capacity) // (D * e.lanes))
        update, row = self._any_update(), self._any_row()
        share = 0 if e.rows_by_rank is None else longest_share(e.rows_by_rank, D, G, e.lanes)
        return {
            "message sum": nbytes((update.message, update.weight)),
            "client states": (1 + e.sharded) * (D - 1) * G * e.lanes * nbytes(update.state),
            "rows": (D - 1) * share * nbytes(row),
        }

    def sweep(self, rounds: int, seeds: Iterable[int], eval_every: int = 10, **options: Any) -> list[Run]:
        """Many seeds in one program: ``runs[i].state``, ``.history`` are those of ``seeds[i]``; see `fd.sweep`."""
        from fedjax_drift.sweep import sweep

        return sweep(lambda: self, rounds, seeds, eval_every=eval_every, **options)

    def run(
        self,
        state: ServerState,
        rounds: int,
        eval_every: int = 10,
        *,
        progress: bool | None = None,
        on_round: Callable[[Record], None] | None = None,
        measure_every: int = 1,
        checkpoints: Checkpoints | str | os.PathLike | None = None,
    ) -> tuple[ServerState, list[Record]]:
        """Runs ``rounds`` rounds from ``state``; returns the last state and the history, one dict a round.

        A record holds ``round`` (rounds done so far), ``train_loss`` (mean of the cohort's, by rows), ``clients``,
        ``lr``, ``steps``, ``executed_steps`` and ``seconds``; after every ``eval_every``-th round and the last also
        what `evaluate` gives (0, or no test set: never). What the algorithm reports, and with
        ``measure=`` what is measured in every ``measure_every``-th round, are there too: scalars as they are, clients'
        values as their mean over the cohort (lists of E where there is one per epoch). ``on_round(record)`` is called
        for each. Short rounds are sent off many at a time, as many as take a tenth of a second: their records come
        together, and ``seconds`` is their mean, from record to record. Ctrl-C ends the run after the rounds in progress
        (a second one at once) and returns what is done. An error of a round (`round_fn`'s), or of ``on_round``, carries
        the newest state and the history as ``error.state`` and ``error.history``, and these are saved. ``progress``:
        whether to show a bar, with rounds a second, the time left, loss and accuracy; None (default): in a terminal and
        in a notebook, and not in CI.

        Of several processes every one returns all of it and calls its ``on_round``, and the first shows the bar. Ctrl-C
        or SIGTERM in any ends the run of all after the same round.

        With ``checkpoints`` (`fd.Checkpoints`, or just a folder) the run is saved while it goes on, and at its end;
        ``checkpoints.restore(sim)`` returns to it. A run that is stopped by Ctrl-C does not evaluate its last round
        then, so that going on gives the records of a run that was never stopped; SIGTERM ends it likewise, and then
        raises SystemExit(143). Raises ValueError, before anything compiles, for a folder that can't be written, is in
        use or belongs to another run; OSError if its end could not be saved (earlier failures are warnings).
        """
        rounds, eval_every, measure_every, progress = fit.check_run(rounds, eval_every, measure_every, progress)
        if on_round is not None:
            checks.function("on_round", on_round, "it is called with each record")
        if self.data.x_test is None:
            eval_every = 0
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        state = self._check(state)
        t, last, fresh, terminated = int(state.round), int(state.round) + rounds, True, False
        save_every = checkpoints.every or 0 if checkpoints is not None else 0

        def rounds_to(every: int) -> int:
            return every - t % every if every else last - t

        with (
            stop_on_interrupt(terminate=checkpoints is not None) as stop,
            nullcontext() if checkpoints is None else checkpoints.saving(self, state, stop.held) as saver,
            Bar(rounds, self.algorithm.name, progress if leads(self.mesh) else False) as bar,
            self._ahead(state.key, last) as fetch,
        ):
            recorder = Recorder(bar, on_round, self._update_leaves)
            with _nothing_lost(recorder, lambda: state, None if spans_processes(self.mesh) else saver):
                with suppress(KeyboardInterrupt):
                    while t < last:
                        save = saver is not None and not fresh and saver.due(t)
                        clocks = [self._rounds_at_once(recorder.seconds), int(save)]
                        (n, due), (stopped, terminated) = agree(self.mesh, clocks, [stop.asked, stop.terminated])
                        if stopped:
                            break
                        if saver is not None and due:
                            recorder.catch_up(0)
                            saver.save(state, recorder.history)
                        n = min(n, last - t, rounds_to(eval_every), rounds_to(save_every))
                        measures = self._measures if rounds_to(measure_every) == 1 else ()
                        n = 1 if measures else min(n, rounds_to(measure_every) - 1) if self._measures else n
                        needed = fetch(t)
                        wait_for_turn(self.mesh)  # here Ctrl-C may interrupt
                        with stop.held():  # between donating a state and having the next one
                            state, infos = self._rounds_from(state, n, needed, measures, fresh)
                            t, fresh = t + n, False
                            recorder.add(t, n, infos, stacked=not self._alone)
                        if scored := bool(eval_every) and t % eval_every == 0:
                            recorder.score(self._scores(state.server))
                        if saver is not None:
                            saver.confirm()
                        if scored and saver is not None and saver.checkpoints.best is not None:
                            recorder.catch_up(0)
                            saver.consider(state, recorder.history)
                        recorder.catch_up(1)  # one program in flight, so that no device ever waits
                try:  # the last round, also of a run that was stopped, unless it is to go on
                    if eval_every and recorder.unscored and (t == last or saver is None):
                        recorder.score(self._scores(state.server))
                    recorder.catch_up(0)
                except KeyboardInterrupt:  # what is done, without this evaluation
                    recorder.unscore()
                    with suppress(KeyboardInterrupt), stop.held():
                        recorder.catch_up(0)
            if saver is not None:
                with suppress(KeyboardInterrupt), stop.held():  # even then all is saved, and returned
                    saver.finish(state, recorder.history)
        if terminated or stop.terminated:
            raise SystemExit(143)
        return state, recorder.history

    @property
    def _one_round(self) -> str:
        """The program of `round_fn`."""
        return "donating_round" if self._donate and not self._states_on_host else "round"

    @property
    def _fallible(self) -> bool:
        """Whether a round may be refused after it has been computed, and the state before it is still needed then."""
        return self.on_nonfinite == "raise" or self.algorithm.observe is not None or self._states_on_host  # a full disk

    @property
    def _alone(self) -> bool:
        """Whether the host has something to do in every round, so that a program is one round."""
        return self._fallible or self._needs_host

    def _rounds_at_once(self, seconds: float) -> int:
        """Rounds in one program, for rounds that take so long."""
        return 1 if self._alone else max(1, min(programs.MOST_ROUNDS, int(CHUNK_SECONDS / seconds)))

    def _rounds_from(
        self, state: ServerState, n: int, needed: Fetched, measures: Sequence[str], fresh: bool
    ) -> tuple[ServerState, dict]:
        """n rounds, which overwrite the state they start from if they can; fresh: it is the caller's, so not that."""

        def call() -> tuple[ServerState, dict]:
            if self._fallible:
                return self._advance("round", state, needed, measures)
            own = not fresh or self._donate
            start = state if own else copied(state, self._placement_of(state))
            if self._needs_host:
                return self._advance("donating_round", start, needed, measures)
            measured = self._launch("measure", measures, start, self._arrays, None) if measures else {}
            new, infos = self._launch("rounds", start, self._arrays, np.int32(n))
            return new, self._with_measured(infos, drift.of_one_round(measured, axis=0))

        return self._fitting(call, state)

    @contextmanager
    def _ahead(self, key: jax.Array, last: int) -> Iterator[Callable[[int], Fetched]]:
        """``fetch(t)`` is what round t needs; what round t + 1 < last needs is fetched meanwhile."""
        if not self._needs_host:
            yield lambda t: Fetched(self._arrays)
            return
        key = _on_host(key)  # the state's own is donated
        with ThreadPoolExecutor(1) as pool:
            waiting: dict[int, Future[Fetched]] = {}

            def fetch(t: int) -> Fetched:
                ready = waiting.pop(t, None)
                found = self._fetch(key, t) if ready is None else ready.result()
                if t + 1 < last:
                    waiting[t + 1] = pool.submit(self._fetch, key, t + 1)
                return found

            yield fetch

    def _check_cohort(self, cohort: Any) -> jax.Array | None:
        if cohort is None or traced(cohort):
            return cohort
        if isinstance(cohort, Sequence) and any(isinstance(client, str) for client in cohort):
            cohort = [self.data.id_of(client) if isinstance(client, str) else client for client in cohort]
        ids, redeal = fit.check_cohort(cohort, self.data.num_clients), self._engine.redeal
        if redeal is not None and redeal.alpha is not None and len(ids) > self._engine.capacity:
            raise ValueError(
                f"cohort must hold at most {self._engine.capacity} clients where rows are dealt anew by Dirichlet, got "
                f"{len(ids)}: raise cohort_size"
            )
        return put(ids, self._everywhere) if spans_processes(self.mesh) else ids

    def _check(self, state: ServerState) -> ServerState:
        """The state on this simulation's devices (it may come from another's, or from a file); ValueError if it is of
        another algorithm, model or federation, or was donated."""
        _check_state(state)
        bank, expected = state.clients, self._expected
        if self._states_on_host:
            if traced(state):
                raise ValueError(
                    f"bank={self.bank!r} keeps client states outside JAX: not inside jax.jit, vmap or scan"
                )
            state, expected = state._replace(clients=()), expected._replace(clients=())
        fit.check_like(state, expected, "this state is of another algorithm, model or federation")
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not traced(leaf)]
        if any(array.is_deleted() for array in arrays):
            raise ValueError("this state was donated to a round: go on from the state which that round returned")
        state = _moved(state, self._placement_of(state))
        if not self._states_on_host:
            return state
        if not isinstance(bank, Bank):
            raise ValueError(f"this state keeps its clients on the devices, but bank={self.bank!r}: use the same bank=")
        if bank.round != int(state.round):
            raise ValueError(
                f"this state is of round {int(state.round)}, but its clients have been overwritten up to round "
                f"{bank.round}: go on from the newest state (bank={self.bank!r} keeps one)"
            )
        return state._replace(clients=bank)

    def _placement_of(self, state: ServerState) -> ServerState:
        """Where each leaf of the state belongs."""
        return ServerState(
            *[jax.tree.map(lambda _, at=at: at, part) for at, part in zip(self._placement, state, strict=True)]
        )

    def _test(self) -> engine.TestRows:
        if self._arrays.test is None:
            raise ValueError("evaluating needs a test set: pass test=(x, y) to FederatedData.from_clients")
        return self._arrays.test

    def __repr__(self) -> str:
        e = self._engine
        return (
            f"Simulation({e.algorithm.name}, {self.data!r}, {self.local!r}, {e.cohort_size} clients a round, "
            f"{e.lanes} lane{'s' * (e.lanes > 1)} on {e.mesh.size} {self.mesh.devices.flat[0].platform} "
            f"device{'s' * (e.mesh.size > 1)})"
        )


def _check_state(state: Any) -> None:
    if not isinstance(state, ServerState):
        raise ValueError(
            f"state must be a ServerState, got {type(state).__name__}: sim.init(key) makes one; round_fn and run "
            "return a pair whose first it is"
        )


@contextmanager
def _nothing_lost(recorder: Recorder, newest: Callable[[], ServerState], saver: Saver | None) -> Iterator[None]:
    """In it an error, of a round or of on_round, carries the newest state and the history, and these are saved."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # nothing more is to be had of the devices
        raise
    except Exception as error:
        recorder.catch_up(0)
        with suppress(TypeError):  # one that holds nothing
            vars(error).update(state=newest(), history=recorder.history)
        if saver is not None:
            saver.save(newest(), recorder.history)
        raise


def _redeal(data: FederatedData) -> engine.Redeal | None:
    if data.redeal is None:
        return None
    alpha = None if data.redeal == "evenly" else float(data.redeal)
    most_rows = np.cumsum(np.sort(data.sizes)[::-1], dtype=np.int64).tolist()
    return engine.Redeal(alpha, int(data.y.max()) + 1 if alpha else 1, tuple(most_rows))


def _typed(key: Any) -> jax.Array:
    """A typed key; the older uint32 [2] kind is wrapped."""
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == (2,):
        key = jax.random.wrap_key_data(key, impl=THREEFRY)
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"key must be a JAX key such as jax.random.key(0), got {checks.shown(key)}")
    if key.shape != ():
        raise ValueError(
            f"key must be one key, got {list(key.shape)} of them: jax.vmap(sim.init)(keys) makes many states"
        )
    if str(jax.random.key_impl(key)) != THREEFRY:
        raise ValueError(
            f"key must be of the {THREEFRY} generator, on which shuffles rely, got {jax.random.key_impl(key)}: "
            f'jax.random.key(0, impl="{THREEFRY}")'
        )
    return key


def _moved(tree: PyTree, placement: PyTree) -> PyTree:
    """The tree's arrays where they belong."""
    if traced(tree):
        return tree
    if not isinstance(placement, ServerState):
        placement = jax.tree.map(lambda _: placement, tree)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placement), strict=True)
    if all(getattr(leaf, "sharding", None) == at for leaf, at in pairs):
        return tree
    return put(tree, placement)


def _on_host(key: jax.Array) -> jax.Array:
    """A copy of the key on a CPU, which draws cohorts while an accelerator is busy with the round before; where JAX has
    no CPU (JAX_PLATFORMS=cuda), on the first device."""
    words = np.array(jax.random.key_data(key))
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.random.wrap_key_data(jax.device_put(words, device), impl=THREEFRY)


def _where_rows_go(shard_data: bool | str, stream: bool | str, data: FederatedData, mesh: Mesh) -> str:
    """ "devices": all on each; "parts": cut over them; "host": streamed. ValueError for what can't be."""
    if shard_data is True:
        if stream is True:
            raise ValueError("shard_data=True keeps the rows on the devices, stream=True on the host: choose one")
        if data.redeal is not None:
            raise ValueError("shard_data must be False for data.redealt(), whose cohorts pool their rows, got True")
    need, D = data.x.nbytes + data.y.nbytes, mesh.size
    # Rows are counted in int32, the padding of parts included.
    countable, in_parts = len(data.x) < 2**31, len(data.x) + D * int(data.sizes.max()) < 2**31
    if shard_data is True and not in_parts:
        raise ValueError(f"shard_data=True takes up to 2**31 rows, got {len(data.x)}: stream=True")
    if stream is True or shard_data is True:
        return "host" if stream is True else "parts" if D > 1 else "devices"
    if not (stream == "auto" or shard_data == "auto"):
        return "devices"
    room = memory_of(mesh) / 2
    if need <= room and countable:
        return "devices"
    if shard_data == "auto" and D > 1 and data.redeal is None and in_parts and (need <= room * D or stream is False):
        return "parts"
    return "host" if stream == "auto" else "devices"


def _where_states_fit(bank: Any, client: PyTree, N: int, mesh: Mesh) -> str:
    """The ``bank=`` asked for, with "auto" decided; a path as a string."""
    if not checks.is_auto(bank):
        folder = checks.path("bank", bank, '"auto", "device", "sharded", "host" or a folder')
        known = ("auto", "device", "sharded", "host")
        if (
            isinstance(bank, str)
            and os.sep not in bank
            and bank not in known
            and (meant := checks.nearest(bank, known))
        ):
            raise ValueError(
                f"bank must be one of {known}, or a folder, got {bank!r}{meant} (pathlib.Path: the folder)"
            )
        return str(folder if isinstance(bank, str) else folder.absolute())  # of a path, "host" is a folder's name
    need = N * nbytes(client)
    room = memory_of(mesh) / 2
    if need <= room:
        return "device"
    found = "sharded" if need <= room * mesh.size else "host"
    checks.warn(f"{N} client states take {need / 1e9:.1f} GB, more than half of a device's memory: bank={found!r}")
    return found


def _lanes(lanes: int | str | None, capacity: int, mesh: Mesh) -> int:
    per_device = -(-capacity // mesh.size)
    if checks.is_auto(lanes):
        if mesh.devices.flat[0].platform == "cpu":
            return 1
        # Measured on an H200: more lanes than a quarter of the cohort waste more on uneven clients than they gain.
        return min(per_device, max(16, min(128, per_device // 4)))
    if lanes is None:
        return 1
    return min(checks.integer("lanes", lanes, 1, fix='or pass "auto"'), per_device)


def _bernoulli_capacity(N: int, cohort_size: int) -> int:
    """The size that a Binomial(N, K/N) cohort exceeds with probability under 1e-12."""
    from scipy.stats import binom

    return min(N, max(1, int(binom.isf(1e-12, N, cohort_size / N))))
