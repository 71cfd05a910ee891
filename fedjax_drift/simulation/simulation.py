"""`Simulation`: a federation, a model and an algorithm, put together and checked before anything compiles."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_drift import checks, tree
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.mesh import put
from fedjax_drift.devices.processes import leads, spans_processes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures import drift, personal
from fedjax_drift.round.aggregation import Aggregation
from fedjax_drift.round.exchange import longest_share
from fedjax_drift.round.failures import Failures
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.executor import Executor, RunTrack
from fedjax_drift.simulation.host import Fetched, prefetching
from fedjax_drift.simulation.loop import Loop, Schedule, attach_to
from fedjax_drift.simulation.placement import Placement, moved, on_host
from fedjax_drift.simulation.progress import Bar, stop_on_interrupt
from fedjax_drift.simulation.records import complaints
from fedjax_drift.simulation.setup import Setup, assemble
from fedjax_drift.simulation.sweep import Run, sweep
from fedjax_drift.storage.checkpoint import Checkpoints
from fedjax_drift.storage.client_store import ClientStore
from fedjax_drift.storage.identity import identity
from fedjax_drift.storage.saver import saving
from fedjax_drift.storage.specification import ON_DEVICES, Specification
from fedjax_drift.types import Algorithm, Model, Params, Record, ServerState


class FlatOptions(TypedDict, total=False):
    """The fields of `Failures` and of `Placement`, which are also keyword arguments of `Simulation`."""

    dropout: float
    stragglers: float
    over_selection: float
    deadline: float | None
    speed_spread: float
    lanes: int | str | None
    mesh: Mesh | None
    stream: bool | str
    shard_data: bool | str
    bank: str | os.PathLike
    donate: bool
    eval_batch_size: int


class Simulation:
    """Simulates federated learning of ``model`` on ``data`` with ``algorithm``.

    Args:
      model: the model to train.
      data: the examples of N clients, and a test set for `evaluate`.
      algorithm: a value such as ``fd.algorithms.fedavg()``.
      local: how a client trains. Default ``LocalTraining()``.
      cohort_size: K, clients a round, in 1..N; with Bernoulli sampling the expected number.
      sampling: "uniform" (exactly K clients, without replacement) or "bernoulli" (each client with probability K/N,
        drawn again while the cohort is empty).
      failures: `fd.Failures`: clients that drop out, stop early or report too late. Default: every client reports.
      aggregation: how messages become the mean that the server sees: ``fd.aggregation.clipped(norm)``,
        ``fd.aggregation.private(clip_norm, noise_multiplier)``, or your own. Default: their weighted mean.
      placement: `fd.Placement`: where examples and client states live, how many clients train side by side, the
        devices. Results do not depend on it, beyond rounding.
      on_nonfinite: what happens to a client whose update is NaN or infinite. "keep" (default): it is averaged like any
        other, and `run` warns. "drop_client": the client is dropped and keeps its state. "raise": `round_fn`
        waits for the round and raises FloatingPointError; the state that went in is still valid.
      measure: the drift measures to compute in every round, any of "updates", "gradients", "predictions", "forgetting",
        "labels" (see `Simulation.measure`). Clients are trained up to two more times for it. Without it a round costs
        nothing more.
      **options: the fields of `fd.Failures` and `fd.Placement` may also be passed by their own names:
        ``Simulation(..., dropout=0.1, lanes=16)``.

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
        sampling: str = "uniform",
        failures: Failures | None = None,
        aggregation: Aggregation | None = None,
        placement: Placement | None = None,
        on_nonfinite: str = "keep",
        measure: str | Sequence[str] = (),
        **options: Unpack[FlatOptions],
    ) -> None:
        failures = _grouped("failures", Failures, failures, options)
        placement = _grouped("placement", Placement, placement, options)
        if options:
            raise TypeError(f"Simulation() got an unexpected keyword argument {next(iter(options))!r}")
        setup = assemble(
            model, data, algorithm, local, cohort_size, sampling, failures, aggregation, placement, on_nonfinite,
            measure,
        )  # fmt: skip
        self.executor = Executor(setup, self.__repr__)

    @property
    def setup(self) -> Setup:
        """The checked and resolved options: data, model, placement, and what a round is compiled from."""
        return self.executor.setup

    @property
    def data(self) -> FederatedData:
        """The clients' rows and the test set."""
        return self.setup.data

    @property
    def model(self) -> Model:
        """The model trained."""
        return self.setup.engine.model

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm simulated."""
        return self.setup.engine.algorithm

    @property
    def local(self) -> LocalTraining:
        """How a client trains."""
        return self.setup.engine.local

    @property
    def aggregation(self) -> Aggregation:
        """How messages become the mean that the server sees."""
        return self.setup.engine.aggregation

    @property
    def sampling_rate(self) -> float:
        """The probability that a client is selected in a round; with over-selection ceil(over_selection * K) / N."""
        return self.setup.engine.clients_asked / self.data.num_clients

    @property
    def on_nonfinite(self) -> str:
        """What happens to a client whose update is not finite."""
        return self.setup.on_nonfinite

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.setup.mesh

    @property
    def lanes(self) -> int:
        """L, clients trained side by side on one device."""
        return self.setup.engine.lanes

    @property
    def bank(self) -> str:
        """Where client states are kept: "device", "sharded", "host", or a folder."""
        return self.setup.client_store

    @cached_property
    def specification(self) -> Specification:
        """A description of the simulation, with which checkpoints and client stores detect another one."""
        setup = self.setup
        return Specification(
            mesh=setup.mesh,
            num_clients=setup.data.num_clients,
            state=setup.state,
            shardings=setup.shardings,
            client_store=setup.client_store,
            identity=identity(setup.engine, setup.data, setup.on_nonfinite, setup.client_store, setup.state),
            admit=setup.admit,
            reopen=self.reopen,
        )

    # --- one round ----------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array, params: Params | None = None) -> ServerState:
        """The state before round 0. ``key`` (``jax.random.key(seed)``) decides the initial parameters, unless
        ``params`` are given, and all cohorts, shuffles and dropout to come."""
        key = validate.check_key(key)
        if params is not None:
            tree.check_layout(params, self.setup.state.params, "params must be shaped like model.init's")
        key, params = moved((key, params), self.setup.everywhere)
        state = self.executor.launch("init", key, params)
        if not self.setup.states_on_host:
            return state
        if traced(state):
            raise ConfigurationError(
                f"bank={self.bank!r} keeps client states outside JAX: not inside jax.jit, vmap or scan"
            )
        initial = jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.clients))
        folder = None if self.bank == "host" else self.bank
        store = ClientStore.create(initial, self.data.num_clients, folder, self.specification.store_identity(state))
        return state._replace(clients=store)

    def reopen(self, state: ServerState, round: int | None = None, strict: bool = True) -> ServerState:  # noqa: A002
        """Returns ``state`` with the client states that are stored in the folder ``bank=``.

        It is for a state that was saved without its client states.

        Args:
          state: a state of the last round that the folder contains, or of ``round``. Its ``clients`` are replaced.
          round: a round that has a checkpoint. Default: the last round in the folder.
          strict: if False, a different federation, algorithm, model or key only causes a warning, see
            `Checkpoints.restore`.

        Raises:
          ValueError: the folder belongs to another federation, algorithm, model, key or round; what differs is listed.
        """
        setup = self.setup
        if self.bank in (*ON_DEVICES, "host"):
            raise ConfigurationError(
                f"reopen needs client states that are kept in files, got bank={self.bank!r}: pass a path"
            )
        validate.check_state(state)
        what = "this state is of another algorithm, model or federation"
        tree.check_layout(state._replace(clients=()), setup.state._replace(clients=()), what)
        first = self.executor.launch("init", *moved((state.key, state.params), setup.everywhere))
        initial = jax.tree.map(lambda leaf: leaf[0], jax.device_get(first.clients))
        store_identity = self.specification.store_identity(state)
        store = ClientStore.open(self.bank, initial, self.data.num_clients, store_identity, round, strict)
        return setup.admit(state._replace(clients=store))

    def round_fn(
        self, state: ServerState, cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None
    ) -> tuple[ServerState, dict[str, jax.Array]]:
        """One round. Pure: the same state gives the same result, bit for bit, and stays valid (unless donated).

        It may be scanned and vmapped. Inside your own `jax.jit` the data set becomes a constant of the program, and
        compilation is slow. Call `jax.lax.scan` without an outer `jax.jit`.

        Args:
          state: from `init` or an earlier round.
          cohort: client ids, distinct and in 0..N-1, or names; default: drawn from the state's own key.

        Returns:
          The next state, and info, a dict. For each client of the cohort, [K]:

          - ``cohort``: int32, the ids of the clients that are aggregated. -1 marks a client that did not report, a
            client without examples, and an empty place of a Bernoulli cohort.
          - ``size``, ``weight``, and ``client_steps``, the local steps done.
          - ``loss``: the mean over those steps of what the algorithm minimises, its own terms included.
          - ``finite``, and ``bad_leaf``: the index of the first leaf of the update that is not finite; -1: none.
          - ``asked``: the ids of all selected clients, more than K with over-selection. Only present if clients can
            fail.

          Scalars: ``lr``; ``steps``, the local steps that the cohort needs; ``executed_steps``, the steps that the
          devices run, those of idle lanes included; ``executed_ratio``, their ratio. In addition the metrics of the
          algorithm (FedEve: ``gain``, ...) and, with ``measure=``, the results of `measure`. If no client reports, all
          weights are 0, and only ``round`` changes in the state.

        Raises:
          ValueError: the cohort is empty, or an id is out of range or repeated; or the algorithm uses the test accuracy
            (FedGVR, FedGVRGM) and the evaluation is not finite.
          FloatingPointError: with ``on_nonfinite="raise"``, an update that is not finite.
          OSError: a data file that has changed, or no room for client states; the state that went in is still valid.
          MemoryError: not even one lane fits in a device's memory. (If L > 1 lanes do not fit, L is halved, with
            a warning, until they fit.) The state is still valid, unless it was donated.
        """
        setup = self.setup
        state, cohort = setup.admit(state), self._checked_cohort(cohort)
        if setup.needs_host:
            if traced((state.key, cohort)):
                raise ConfigurationError(
                    "streamed rows and client states on the host need it in every round: call round_fn "
                    "outside jax.jit, vmap and scan"
                )
            fetched = self.executor.fetch(on_host(state.key), int(state.round), cohort)
        else:
            fetched = Fetched(setup.arrays, cohort)
        donate = setup.donate and not setup.states_on_host
        one_round = self.executor.one_round
        return self.executor.fitting(lambda: one_round(state, fetched, setup.measures, donate), state)

    def _checked_cohort(self, cohort: Any) -> jax.Array | None:
        if cohort is None or traced(cohort):
            return cohort
        if isinstance(cohort, Sequence) and any(isinstance(client, str) for client in cohort):
            cohort = [self.data.id_of(client) if isinstance(client, str) else client for client in cohort]
        ids, engine = validate.check_cohort(cohort, self.data.num_clients), self.setup.engine
        if engine.redeal is not None and engine.redeal.alpha is not None and len(ids) > engine.capacity:
            raise ConfigurationError(
                f"cohort must hold at most {engine.capacity} clients where rows are dealt anew by Dirichlet, got "
                f"{len(ids)}: raise cohort_size"
            )
        return put(ids, self.setup.everywhere) if spans_processes(self.mesh) else ids

    # --- many rounds --------------------------------------------------------------------------------------------------

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
        """Runs ``rounds`` rounds from ``state``.

        If rounds are short, several are dispatched together, about 0.1 s of work at a time. Their records arrive at the
        same time, and ``seconds`` in each is the mean duration of these rounds. Ctrl-C ends the run after the rounds in
        progress and returns what is done; a second Ctrl-C ends it at once. An exception of a round, or of ``on_round``,
        has the newest state and the history as ``error.state`` and ``error.history``, and with ``checkpoints`` these
        are saved.

        Args:
          state: from `init` or an earlier round.
          rounds: >= 0.
          eval_every: >= 0, rounds between evaluations; the last round is evaluated, too. 0, or no test set: never.
          progress: whether to show a bar with rounds per second, the time left, loss and accuracy. Default: in a
            terminal and in a notebook, and not in CI.
          on_round: ``on_round(record)`` is called for each record.
          measure_every: >= 1, rounds between measurements, with ``measure=``.
          checkpoints: `fd.Checkpoints`, or just a folder. The run is saved while it continues and at its end, and
            ``checkpoints.restore(sim)`` restores it. With checkpoints, SIGTERM stops the run like Ctrl-C and then
            raises SystemExit(143). A stopped run does not evaluate its last round, so the resumed run has the same
            records as a run that was never stopped.

        Returns:
          The last state, and the history: one record, a dict, for each round, with

          - ``round``: the number of completed rounds.
          - ``clients``: the number of aggregated clients.
          - ``seconds``: the duration of the round.
          - ``train_loss``: the mean over the cohort, weighted by the clients' numbers of examples.
          - ``lr``, ``steps``, ``executed_steps``, ``executed_ratio``, as in `round_fn`.
          - after an evaluation, what `evaluate` returns.
          - the metrics of the algorithm and the drift measures. A scalar is stored as it is. For a value per client,
            the mean over the cohort is stored. A measure with one value per local epoch is a list of length E.

          With several processes, every process returns the complete state and history and calls its own ``on_round``.
          Only the first process shows the bar. Ctrl-C or SIGTERM in any process ends the run of all after the same
          round.

        Raises:
          ValueError: before anything compiles, arguments out of range; a folder that cannot be written, is in use or
            belongs to another run. And what `round_fn` raises.
          OSError: the end of the run could not be saved. (Earlier saves that fail are warnings.)
        """
        rounds, eval_every, measure_every, progress = validate.check_run(rounds, eval_every, measure_every, progress)
        if on_round is not None:
            checks.function("on_round", on_round, "it is called with each record")
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        setup = self.setup
        state = setup.admit(state)
        t, last = int(state.round), int(state.round) + rounds
        schedule = Schedule(
            last,
            eval_every if self.data.x_test is not None else 0,
            measure_every if setup.measures else 0,
            (checkpoints.every or 0) if checkpoints is not None else 0,
            setup.one_round_a_program,
        )
        fetching: Any = nullcontext(lambda t: Fetched(setup.arrays))
        if setup.needs_host:
            key = on_host(state.key)  # the state's own is donated
            fetching = prefetching(lambda t: self.executor.fetch(key, t), last)
        with (
            stop_on_interrupt(terminate=checkpoints is not None) as stop,
            nullcontext()
            if checkpoints is None
            else saving([checkpoints], [self.specification], [state], stop.held) as savers,
            Bar(rounds, self.algorithm.name, progress if leads(self.mesh) else False) as bar,
            fetching as fetch,
        ):
            track = RunTrack(self.executor, state, fetch)
            loop = Loop(
                [track], 1, self.mesh, schedule, bar, stop, savers,
                None if on_round is None else lambda run, entry: on_round(entry),
                lambda run, t, info, entry: complaints(t, info, entry, setup.update_leaves),
            )  # fmt: skip
            (history,) = loop.histories
            loop.run(t, lambda error: attach_to(error, state=track.state, history=history))
        if loop.terminated or stop.terminated:
            raise SystemExit(143)
        return track.state, history

    def sweep(
        self,
        rounds: int,
        seeds: Iterable[int],
        eval_every: int = 10,
        *,
        params: Params | None = None,
        start: Sequence[Run] | None = None,
        together: int | str = "auto",
        progress: bool | None = None,
        on_round: Callable[[int, dict[str, Any], Record], None] | None = None,
        measure_every: int = 1,
        checkpoints: Checkpoints | str | os.PathLike | None = None,
    ) -> list[Run]:
        """Many seeds in one program: ``runs[i].state``, ``.history`` are those of ``seeds[i]``. See `fd.sweep`."""
        return sweep(
            lambda: self, rounds, seeds, eval_every=eval_every, params=params, start=start, together=together,
            progress=progress, on_round=on_round, measure_every=measure_every, checkpoints=checkpoints,
        )  # fmt: skip

    # --- what a state is worth ----------------------------------------------------------------------------------------

    def measure(
        self,
        state: ServerState,
        names: str | Sequence[str] = tuple(drift.MEASURES),
        cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """The drift of the round that follows from this state, ``round_fn(state, cohort)``. Changes nothing.

        Below, K counts the clients of the cohort S and E the local epochs. w is the global model, theta_i a local
        model, D_i = theta_i minus the model that the client was sent, and w_S the mean of the local models. F_i is the
        mean loss over the examples of client i, p_i = n_i / n, and f = sum_i p_i F_i.

        Args:
          state: from `init` or an earlier round.
          names: which measures. Default: all, which needs a classifier and a test set.
          cohort: as in `round_fn`.

        Returns:
          A dict. Values are NaN for an absent client, and for one whose update is not finite.

          - "updates": ``update_norm`` [K, E], ||D_i||; ``update_cosine`` [K, E], with the cohort's mean update.
          - "gradients": ``client_drift`` [K, E], ||grad F_i(theta_i) - grad F_i(w_S)||^2 (FedEve, eq. 4);
            ``period_drift`` [], ||mean_S grad F_i(w) - grad f(w)||^2 (FedEve, eq. 3, for this cohort);
            ``dissimilarity`` [], sum_i p_i ||grad F_i(w) - grad f(w)||^2; ``gradient_norm`` [], ||grad f(w)||. This
            computes the gradients of all N clients.
          - "predictions": ``cka`` [K, E], linear CKA of local and global logits on the test set; ``kl`` [K, E], mean
            KL(global || local) in nats.
          - "forgetting": ``lp_present``, ``lp_absent`` [K]: LP, the local model's accuracy on a class divided by the
            global model's (LfD, eq. 11), as the mean over the classes that the client has, and over those that it does
            not have. NaN if there is no such class. LP exceeds 1 where the local model is better, as in early rounds.
          - "labels": ``label_mix`` [C], share of each class in the cohort's rows.

        Raises:
          ValueError: unknown names, or no test set or labels where a measure needs them.
        """
        setup = self.setup
        names = drift.check_measures(names, setup.engine, self.data.x_test is not None, setup.streamed)
        if not names:
            return {}
        state, cohort = setup.admit(state), self._checked_cohort(cohort)
        fetched = Fetched(setup.arrays, cohort)
        if setup.needs_host:
            fetched = self.executor.fetch(on_host(state.key), int(state.round), cohort)
        state = self.executor.with_states(state, fetched)
        return self.executor.launch("measure", names, state, fetched.arrays, fetched.cohort)

    def evaluate(self, state: ServerState) -> dict[str, float]:
        """Scores of the global model on the test set: "loss", for classifiers "accuracy", and the `Model.scores`.

        Rows with a NaN logit count as misclassified. Warns of a loss that is not finite. FedDyn and FedDC also keep the
        mean of the cohort's models, whose scores are called ``client_mean_loss`` and so on. Values are floats; under
        `jax.jit` or `jax.vmap` (many seeds at once) they are arrays. Raises ValueError without a test set.
        """
        state = self.setup.admit(state)
        scores = jax.tree.map(lambda v: v if traced(v) else float(v), self.executor.scores(state.server))
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
        """Loss and accuracy of the global model on each client's own test examples. The state does not change.

        `fd.personal.summary` and `fd.plots.fairness` summarise the result.

        Args:
          state: from `init` or an earlier round.
          fine_tune: if given, each client also trains a copy of the global model on its own examples, with the learning
            rate of this round, and the copy is evaluated too. An integer is the number of epochs of this simulation's
            local training; a `LocalTraining` is used instead of it. This is plain training on the model's loss, without
            the algorithm's terms (so without LfD's temperature).

        Returns:
          ``loss``, ``accuracy`` and, fine-tuned, ``personal_loss``, ``personal_accuracy``: float [N] each, NaN for a
          client without test examples.

        Raises:
          ValueError: a test set that is not split by client (natural partitions, ``test_clients=`` and
            `FederatedData.with_client_tests` split it).
        """
        sizes = self.data.test_sizes
        if sizes is None:
            raise ConfigurationError(
                "the test set is not cut into clients: build the data with test_clients= or test_parts=, or deal it in "
                "each client's label mix by data.with_client_tests()"
            )
        if fine_tune is not None and not isinstance(fine_tune, LocalTraining):
            fix = "epochs, or a fd.LocalTraining; None does not fine-tune"
            fine_tune = replace(self.local, epochs=checks.integer("fine_tune", fine_tune, 1, fix=fix))
        state = self.setup.admit(state)
        client = np.repeat(np.arange(len(sizes)), sizes)
        rows, _ = self.executor.programs.launch_scoring("evaluate_rows", state.params, self.executor.test())
        flat = {name: np.asarray(values).reshape(-1)[: len(client)] for name, values in rows.items()}
        sums = {name: np.bincount(client, values, len(sizes)) for name, values in flat.items()}
        if fine_tune is not None:
            sums |= {f"personal_{name}": total for name, total in self._fine_tuned(state, fine_tune).items()}
        with np.errstate(invalid="ignore"):
            return {name: total / sizes for name, total in sums.items()}

    def _fine_tuned(self, state: ServerState, local: LocalTraining) -> dict[str, np.ndarray]:
        """Sums over each client's test rows, [N], of the scores of its fine-tuned copy of the global model."""
        setup, executor = self.setup, self.executor
        validate.check_local(local, state.params, setup.engine.max_size)
        validate.check_augment(local, self.data, setup.engine.decode)
        state = state._replace(clients=())
        chunks = []
        for ids, tests in personal.chunks(self.data):
            arrays, clients = executor.host.send(ids, ids, local)
            tests = put(tests, setup.everywhere)

            def call(rows: Any = arrays.rows, clients: Any = clients, tests: Any = tests) -> dict[str, jax.Array]:
                program = executor.programs.fine_tuning(local, self.data.sizes, setup.eval_batch_size)
                return program(state, rows, clients, tests)

            chunks.append(jax.device_get(executor.fitting(call, state)))
        return {name: np.concatenate([sums[name] for sums in chunks])[: self.data.num_clients] for name in chunks[0]}

    def communication(self) -> dict[str, int]:
        """Bytes that the D devices of the mesh exchange in a round, computed from shapes.

        Scalars and ids are left out, empty lanes are included.

        - "message sum": size of the sum of messages (and weights), which the devices add up in one all-reduce. On a
          ring each device sends 2 (D - 1) / D of it. It does not depend on the cohort's size.
        - "client states": what each device sends: the new states of its clients to all other devices (an all-gather)
          and, with ``bank="sharded"``, the old ones to where their clients train (a reduce-scatter, as much again).
        - "rows": what each device sends with ``shard_data=True``, else 0: D - 1 buffers, each large enough for the most
          rows that one device can be dealt.
        """
        e, D = self.setup.engine, self.mesh.size
        most = min(e.capacity, e.cohort_size) if e.clients_asked > e.cohort_size else e.capacity
        G = -(-most // (D * e.lanes))
        update, row = self.setup.any_update(), self.setup.any_row()
        share = 0 if e.rows_by_rank is None else longest_share(e.rows_by_rank, D, G, e.lanes)
        return {
            "message sum": tree.nbytes((update.message, update.weight)),
            "client states": (1 + e.sharded) * (D - 1) * G * e.lanes * tree.nbytes(update.state),
            "rows": (D - 1) * share * tree.nbytes(row),
        }

    def __repr__(self) -> str:
        e = self.setup.engine
        lanes, devices = (
            f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((e.lanes, "lane"), (e.mesh.size, "device"))
        )
        number, word = devices.split()
        return (
            f"Simulation({e.algorithm.name}, {self.data!r}, {self.local!r}, {e.cohort_size} clients a round, "
            f"{lanes} on {number} {self.mesh.devices.flat[0].platform} {word})"
        )


def _grouped(name: str, kind: Any, value: Any, options: Any) -> Any:
    """The group of options, from itself or from its flat options, which are taken out of ``options``."""
    flat = {field: options.pop(field) for field in kind.__dataclass_fields__ if field in options}
    if value is None:
        return kind(**flat)
    checks.instance(name, value, kind, f"fd.{kind.__name__}(...)")
    if flat:
        raise ConfigurationError(
            f"{name}= has the option {next(iter(flat))}, got both: pass it in fd.{kind.__name__}(...) alone"
        )
    return value
