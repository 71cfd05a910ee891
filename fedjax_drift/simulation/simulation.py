"""`Simulation`: a federation, a model and an algorithm. Arguments are checked before anything is compiled."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_drift import checks
from fedjax_drift.clock import Clock, Devices, synchronous
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures import drift
from fedjax_drift.model import Model
from fedjax_drift.participation import Participation
from fedjax_drift.round.aggregation import Aggregation, mean
from fedjax_drift.round.failures import Failures
from fedjax_drift.round.info import Info
from fedjax_drift.round.sources import Source
from fedjax_drift.simulation import description, evaluation, starting
from fedjax_drift.simulation.asked import Asked
from fedjax_drift.simulation.cohorts import Cohorts, checked_cohort
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.options import FlatOptions, Options, grouped, unexpected
from fedjax_drift.simulation.placement import Placement
from fedjax_drift.simulation.plan import Plan, device_traffic, plan_of
from fedjax_drift.simulation.runner import run_alone
from fedjax_drift.simulation.runs import Run
from fedjax_drift.simulation.selection import rule_of
from fedjax_drift.simulation.setup import Setup, assemble
from fedjax_drift.simulation.sources import check_sources
from fedjax_drift.simulation.sweep import sweep
from fedjax_drift.simulation.until import Until
from fedjax_drift.storage.checkpoint import Checkpoints
from fedjax_drift.storage.specification import Specification
from fedjax_drift.topology import Topology, star
from fedjax_drift.types import Algorithm, Params, Record, ServerState
from fedjax_drift.untraceable import explained


class Simulation:
    """Simulates federated learning of ``model`` on ``data`` with ``algorithm``.

    Args:
      model: the model to train.
      data: the examples of N clients, and a test set for `evaluate`.
      algorithm: a value such as ``fd.algorithms.fedavg()``.
      local: how a client trains. Default ``LocalTraining()``.
      cohort_size: K, the number of clients per round, in 1..N. With Bernoulli sampling it is the expected number, and
        with a rule of availability the largest.
      participation: the rule that selects the clients of a round, such as ``fd.participation.cyclic(groups=4)``.
        Default: ``fd.participation.uniform()``, exactly K clients without replacement. ``sampling="uniform"`` and
        ``sampling="bernoulli"`` are short forms. A Bernoulli cohort that is empty is drawn again, except with
        ``fd.aggregation.private``.
      failures: `fd.Failures`: clients that drop out, stop early or report too late. Default: every client reports.
      aggregation: how the server averages the clients' messages: ``fd.aggregation.clipped(norm)``,
        ``fd.aggregation.private(clip_norm, noise_multiplier)``, ``fd.aggregation.private_ftrl(...)``, or your own rule.
        Default: the weighted mean.
      clock: whether the server waits for all clients of a round: ``fd.clock.synchronous()`` (default), or
        ``fd.clock.asynchronous(concurrency=1000)``, with which a round is one update of the server.
      devices: `fd.Devices`: the speeds of the clients' devices. ``info["time"]`` is then the virtual time, and a
        ``deadline`` is in seconds. Default: one second for a step in asynchronous rounds, no virtual time in others.
      placement: `fd.Placement`: the accelerators, where examples and client states are kept, and how many clients train
        side by side on one device. It does not change the results, except for rounding errors.
      on_nonfinite: what happens if the update or the loss of a client is NaN or infinite. "keep" (default): the update
        is averaged like any other, and `run` warns. "drop_client": the client is dropped from the round and keeps its
        state. "raise": `round_fn` raises FloatingPointError. The state before the round stays valid.
      measure: the drift measures to compute in every round, any of "updates", "gradients", "predictions", "forgetting",
        "labels", "sharpness", "local_sharpness" (see `Simulation.measure`), or values such as
        ``fd.measures.sharpness(largest=1)`` and your own `fd.measures.Measure`. They are computed while clients train,
        except for "gradients", for which they train a second time. Default: none, at no cost.
      sources: sources of drift of your own, a list of `fd.sources.Source`.
      topology: who averages with whom: ``fd.topology.star()`` (default), ``fd.topology.groups(of, every=)`` with edge
        servers and a cloud, or ``fd.topology.graph(W)`` without a server.
      **options: the fields of `fd.Failures` and `fd.Placement` can also be passed directly as keyword arguments:
        ``Simulation(..., dropout=0.1, lanes=16)``.

    Raises:
      ValueError: options that exclude each other, or a model that does not fit the data.
    """

    def __init__(
        self,
        model: Model,
        data: FederatedData,
        algorithm: Algorithm,
        *,
        local: LocalTraining | None = None,
        cohort_size: int,
        participation: Participation | None = None,
        failures: Failures | None = None,
        aggregation: Aggregation | None = None,
        clock: Clock | None = None,
        devices: Devices | None = None,
        placement: Placement | None = None,
        on_nonfinite: Literal["keep", "drop_client", "raise"] = "keep",
        measure: drift.Measured = (),
        sources: Sequence[Source] = (),
        topology: Topology | None = None,
        **options: Unpack[FlatOptions],
    ) -> None:
        rule = rule_of(participation, options)  # type: ignore[arg-type]
        failures = grouped("failures", Failures, failures, options)
        placement = grouped("placement", Placement, placement, options)
        if options:
            raise TypeError(unexpected(next(iter(options)), inspect.signature(Simulation).parameters))
        given = Options(
            model, data, algorithm, LocalTraining() if local is None else local, cohort_size, rule,
            failures, mean() if aggregation is None else aggregation, synchronous() if clock is None else clock,
            devices, placement, on_nonfinite, measure, check_sources(sources), star() if topology is None else topology,
        )  # fmt: skip
        with explained():
            self.executor = Executor(assemble(given))

    @property
    def setup(self) -> Setup:
        """The checked and resolved options: data, model, placement, and what a round is compiled from."""
        return self.executor.setup

    @property
    def data(self) -> FederatedData:
        """The clients' training examples and the test set."""
        return self.setup.data

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.setup.model

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that is simulated."""
        return self.setup.algorithm

    @property
    def local(self) -> LocalTraining:
        """How a client trains."""
        return self.setup.engine.local

    @property
    def settings(self) -> dict[str, Any]:
        """What identifies a run in a log: names, numbers and strings, such as {"algorithm": "feddyn", "alpha": 0.1}.

        An option of local training has the prefix "local_" if the algorithm has an option of the same name. Functions
        are left out, except for the name of the local optimizer.
        """
        return description.settings(self.setup)

    @property
    def aggregation(self) -> Aggregation:
        """How the server averages the clients' messages."""
        return self.setup.options.aggregation

    @property
    def participation(self) -> Participation:
        """The rule that selects the clients of a round."""
        return self.setup.options.participation

    @property
    def sampling_rate(self) -> float:
        """The probability that a client is selected: K / N, or with over-selection ceil(over_selection * K) / N."""
        return self.setup.selection.selects / self.data.num_clients

    @property
    def on_nonfinite(self) -> str:
        """What happens if the update of a client is not finite: "keep", "drop_client" or "raise"."""
        return self.setup.on_nonfinite

    @property
    def mesh(self) -> Mesh:
        """The devices, as a mesh with the single axis "clients"."""
        return self.setup.mesh

    @property
    def lanes(self) -> int:
        """L, the number of clients that are trained side by side (vmap) on one device."""
        return self.setup.engine.lanes

    @property
    def bank(self) -> str:
        """Where client states are kept: "device", "sharded", "host", or a folder."""
        return self.setup.client_store

    @cached_property
    def specification(self) -> Specification:
        """What checkpoints and folders store to detect a different simulation."""
        return starting.specification(self.executor)

    # --- one round ----------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array, params: Params | None = None) -> ServerState:
        """Returns the state before round 0.

        Args:
          key: ``jax.random.key(seed)``. It determines the cohorts, the shuffles, the failures and the dropout of all
            rounds. It also determines the initial parameters, unless ``params`` is given.
          params: the initial global model. Default: ``model.init``.

        Raises ValueError if ``key`` is not a JAX key, or if ``params`` have other shapes than those of ``model.init``.
        """
        return starting.start(self.executor, key, params, lambda: self.specification)

    def reopen(self, state: ServerState, round: int | None = None, strict: bool = True) -> ServerState:  # noqa: A002
        """Returns ``state`` with the client states that are stored in the folder ``bank=``, for a state that was saved
        without them, ``jax.device_get(state._replace(clients=()))``. `Checkpoints` does all of this.

        Args:
          state: a state of round ``round``. Its ``clients`` are replaced. All other fields must be those of that round.
          round: a round that has a checkpoint, to which the folder is set back. Default: its last round.
          strict: if False, differences only cause a warning, see `Checkpoints.restore`.

        Raises:
          ValueError: the folder belongs to another federation, algorithm, model, key or round. The message lists the
            differences. Or a field of the state is missing.
        """
        return starting.reopen(self.executor, lambda: self.specification, state, round, strict)

    def round_fn(
        self, state: ServerState, cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None
    ) -> tuple[ServerState, Info]:
        """Runs one round.

        The function is pure: the same state always gives the same result, bit for bit. The state stays valid, unless
        it was donated or its client states are kept on the host (`Placement`). The function can be used in
        `jax.lax.scan` and `jax.vmap`. Call `jax.lax.scan` without an outer `jax.jit`: inside your own `jax.jit` the
        data set becomes a constant of the program, and compilation is slow.

        Args:
          state: from `init` or an earlier round.
          cohort: client ids, all different and in 0..N-1, or client names. Default: drawn from the state's key. Not
            allowed with asynchronous rounds and with importance sampling.

        Returns:
          The next state, and what the round reports, a dict (`round.info.Info` lists its entries).

        Raises:
          ValueError: the cohort is empty, or an id is out of range or repeated; or the algorithm uses the test accuracy
            (FedGVR, FedGVRGM) and the evaluation is not finite.
          FloatingPointError: with ``on_nonfinite="raise"``, an update is not finite.
          OSError: a data file was truncated, or the disk has no room for client states. The given state is still valid.
          MemoryError: the round does not fit in a device's memory, even with L = 1. (A larger L is halved, with a
            warning, until it fits.) The given state is still valid, unless it was donated.
        """
        setup, executor = self.setup, self.executor
        state, cohort = setup.admit(state), checked_cohort(setup, cohort)
        fetched, donate = executor.arguments(state, cohort), setup.donate and not setup.states_on_host
        return executor.fit(lambda: executor.one_round(state, fetched, setup.measures, donate), state)

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
        until: Until | None = None,
        cohort: Cohorts | None = None,
    ) -> tuple[ServerState, list[Record]]:
        """Runs ``rounds`` rounds from ``state``, or fewer with ``until``.

        If rounds are short, several rounds are dispatched together, about 0.1 s of work at a time. Their records are
        made at the same time, and ``seconds`` in each record is the mean duration of these rounds.

        - Ctrl-C ends the run after the rounds in progress, and `run` returns normally. A second one ends it at once.
        - An exception of a round or of ``on_round`` has the newest state and the history as ``error.state`` and
          ``error.history``. ``checkpoints`` saves both. The state is None if the failed round had overwritten it.

        Args:
          state: from `init` or an earlier round.
          rounds: the number of rounds, >= 0.
          eval_every: number of rounds between evaluations, >= 0. The last round is always evaluated. 0 means never.
            Without a test set nothing is evaluated. Default: 10.
          progress: whether to show a bar. Default: in a terminal or a notebook, but not in CI. Elsewhere a run that
            takes more than a minute prints a line on stderr after every tenth of its rounds.
          on_round: ``on_round(record)`` is called for each record.
          measure_every: number of rounds between measurements, >= 1, for simulations with ``measure=``. Default: 1.
          checkpoints: `fd.Checkpoints`, or a folder. The run is saved during the run and at its end, and
            ``checkpoints.restore(sim)`` restores it. With checkpoints, SIGTERM stops the run like Ctrl-C and then
            raises SystemExit(143). A stopped run does not evaluate its last round, so the resumed run has the same
            records as a run that was never stopped.
          until: a rule that ends the run early, such as ``fd.until.reaches(accuracy=0.98)`` (`fd.until`).
            ``until(history)`` is called after each evaluation, with the records of this call of `run`, and before them
            those that ``checkpoints`` has. The run ends with this round if it returns True. If it has returned True for
            the records of ``checkpoints``, no round is run. ``checkpoints.restore(sim, "best")`` is the best state.
          cohort: the clients of every round, if they are not to be drawn from the state's key: an array [T, K] or a
            list of T lists, of which row t is the cohort of the round that starts with ``state.round == t``, or a
            function ``cohort(t)`` that returns it. A round with another number of clients compiles another program.

        Returns:
          The last state, and the history: a list of dicts, one for each round (`simulation.records.record` lists their
          entries). With several processes, every process returns them and calls its own ``on_round``. Only the first
          process shows the bar. Ctrl-C or SIGTERM in any process ends the run of all after the same round.

        Raises:
          ValueError: the folder cannot be written, is in use or belongs to another run.
          OSError: the end of the run could not be saved. (If an earlier save fails, there is only a warning.)
          Exception: those of `round_fn`.
        """
        asked = Asked(rounds, eval_every, measure_every, progress, until)
        return run_alone(self.executor, lambda: self.specification, state, asked, on_round, checkpoints, cohort)

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
        until: Until | None = None,
    ) -> list[Run]:
        """Runs this simulation with many seeds. See `fd.sweep` for the arguments.

        Returns one `Run` per seed, in their order.
        """
        return sweep(
            lambda: self, rounds, seeds, eval_every=eval_every, params=params, start=start, together=together,
            progress=progress, on_round=on_round, measure_every=measure_every, checkpoints=checkpoints, until=until,
        )  # fmt: skip

    # --- measurements and evaluation ----------------------------------------------------------------------------------

    def measure(
        self,
        state: ServerState,
        names: drift.Measured = drift.QUICK,
        cohort: Sequence[int] | Sequence[str] | np.ndarray | jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Measures the drift of the round ``round_fn(state, cohort)``. The state does not change.

        Args:
          state: from `init` or an earlier round.
          names: the measures to compute: names, or values such as `fd.measures.sharpness`. Default: all names but
            "sharpness" and "local_sharpness", which take long. This requires a classifier and a test set.
          cohort: as in `round_fn`.

        Returns:
          A dict, see `fd.measures.updates` and so on. The values of a client that does not report, or whose update is
          not finite, are NaN. "sharpness" belongs to ``evaluate(state)``, so in ``info`` and in the history to the
          model after the round, like "loss". All others belong to the clients of the round and their model w.

        Raises ValueError if a measure needs a test set or labels that the data do not have.
        """
        return evaluation.measure(self.executor, state, names, cohort)

    def evaluate(self, state: ServerState) -> dict[str, float]:
        """Evaluates the global model on the test set.

        Returns a dict with "loss", for classifiers "accuracy", and the metrics of `Model.scores`: floats, or arrays
        under `jax.jit` and `jax.vmap`. An example with a NaN logit counts as misclassified. FedDyn and FedDC also keep
        the mean of the cohort's models, whose scores have the prefix ``client_mean_``. Warns if the loss is not finite,
        or if only the clients have running statistics. Raises ValueError if there is no test set.
        """
        return evaluation.evaluate(self.executor, state)

    def evaluate_clients(
        self, state: ServerState, fine_tune: LocalTraining | int | None = None
    ) -> dict[str, np.ndarray]:
        """Evaluates the global model, and the clients' own models, on the test examples of each client.

        Clients have models of their own if the algorithm says so (Ditto, FedPer), if they fine-tune, or if a topology
        has several models. `fd.personal.summary` and `fd.plots.fairness` summarise the result.

        Args:
          state: from `init` or an earlier round.
          fine_tune: if given, each client also trains a copy of its model on its own training examples, with the
            learning rate of this round, and the copy is evaluated. It is plain training on the model's loss, without
            the terms of the algorithm: a `LocalTraining`, or an integer E >= 1, which is that of this simulation with
            E epochs. Default: no fine-tuning.

        Returns:
          A dict with ``loss`` and ``accuracy`` of the global model, float [N], NaN for a client without test examples.
          If clients have models of their own, also ``personal_loss`` and ``personal_accuracy``.

        Raises:
          ValueError: the test set is not split by client. (Natural partitions, ``test_clients=`` and
            `FederatedData.with_client_tests` split it.)
        """
        return evaluation.evaluate_clients(self.executor, state, fine_tune)

    def evaluate_new(self, state: ServerState, clients: Any, steps: LocalTraining | int) -> dict[str, np.ndarray]:
        """Evaluates clients that have never taken part, before and after they train. The state does not change.

        A new client does what the algorithm says (`Algorithm.adapt`): Per-FedAvg its inner steps, FedRep the training
        of the head, Ditto that of a personal model. Otherwise it trains the global model on the model's loss.

        Args:
          state: from `init` or an earlier round. Its round determines the learning rate.
          clients: a `FederatedData` whose test set is split by client, such as ``data.only(range(90, 100))``; or pairs
            (x, y), as in `FederatedData.from_clients`. A fifth of each client's examples is then held out for the test.
          steps: k >= 1, the number of local steps, with the local training of this simulation; or a `LocalTraining`.

        Returns:
          A dict of float [C], NaN without test examples: ``loss`` and ``accuracy`` before the first step, and with the
          prefix ``personal_`` after the last one. Raises ValueError if the clients do not fit, or have no tests.
        """
        return evaluation.evaluate_new(self.executor, state, clients, steps)

    def evaluate_receivers(self, state: ServerState) -> dict[str, np.ndarray]:
        """Evaluates the model of each receiver of a topology on the test set: edge servers, or the clients of a graph.

        Returns the scores of `evaluate`, float [R] each. Without a topology, R is 1."""
        return evaluation.evaluate_receivers(self.executor, state)

    def personal_params(self, state: ServerState, client: int | str) -> Params:
        """Returns the parameters of the model that a client uses itself, which `evaluate_clients` evaluates: its own
        (Ditto, FedPer), at first the initial one; that of its edge server in a topology; or the global model. With
        ``statistics="local"`` it has the client's running statistics. client: an id in 0..N-1, or a client name.
        """
        return evaluation.personal_params(self.executor, state, client)

    def plan(self) -> Plan:
        """Compiles a round, and returns what it needs: memory, collective operations, seconds to compile. The devices
        may be a TPU slice that is not here (`fd.plan`). Raises ValueError if examples or states are on the host."""
        return plan_of(self.setup, self.executor.programs, self.device_traffic())

    def device_traffic(self) -> dict[str, int]:
        """Returns the number of bytes that the D devices of the mesh exchange in a round, computed from shapes. Those
        between server and clients are in `round.info.Info`.

        - "message sum": the size of the sum of the messages and weights, which the devices compute in one all-reduce.
        - "client states": the bytes of new client states that each device sends to all others, and with
          ``bank="sharded"`` those of the old states. If the algorithm has `finish` (VRL-SGD), both travel twice.
        - "rows": the bytes of examples that each device sends with ``shard_data=True``, otherwise 0, an upper bound.
        """
        return device_traffic(self.setup)

    def communication(self) -> dict[str, int]:
        """The former name of `device_traffic`."""
        checks.warn("communication is now called device_traffic: use sim.device_traffic()", DeprecationWarning)
        return self.device_traffic()

    def __repr__(self) -> str:
        return description.title(self.setup)
