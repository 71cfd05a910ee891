"""Simulation: a federation, a model and an algorithm, put together and checked before anything compiles."""

from __future__ import annotations

import shutil
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift import checks, drift, engine, fit
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.local import LocalTraining
from fedjax_drift.sharding import clients_mesh, launch, traced, wait_for_turn
from fedjax_drift.types import Algorithm, Model, Params, ServerState

Record = dict[str, Any]
THREEFRY = "threefry2x32"


class Simulation:
    """Simulates federated learning of ``model`` on ``data`` with ``algorithm``.

    Args:
      model: what is trained.
      data: N clients' rows, and a test set for `evaluate`.
      algorithm: a value such as ``fd.algorithms.fedavg()``.
      local: how a client trains. Default ``LocalTraining()``.
      cohort_size: K, clients a round, in 1..N; with Bernoulli sampling the expected number.
      lanes: L, clients trained side by side on one device. "auto": 1 on CPU (or None: one after another, which is
        fastest there), many on an accelerator. Results don't depend on it (beyond rounding).
      sampling: "uniform" (exactly K clients, without replacement) or "bernoulli" (each client with probability K/N,
        drawn again while nobody is in).
      mesh: a mesh with the one axis "clients". Default: all local devices.
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
        lanes: int | str | None = "auto",
        sampling: str = "uniform",
        mesh: Mesh | None = None,
        donate: bool = False,
        eval_batch_size: int = 500,
        on_nonfinite: str = "keep",
        measure: str | Sequence[str] = (),
    ) -> None:
        local = LocalTraining() if local is None else local
        fit.check_types(model, data, algorithm, local)
        N = data.num_clients
        cohort_size = checks.integer("cohort_size", cohort_size, 1, N, f"the federation has {N} clients")
        eval_batch_size = checks.integer("eval_batch_size", eval_batch_size, 1)
        checks.choice("sampling", sampling, ("uniform", "bernoulli"))
        checks.choice("on_nonfinite", on_nonfinite, ("keep", "drop_client", "raise"))
        checks.flag("donate", donate)
        if mesh is not None and getattr(mesh, "axis_names", None) != (engine.AXIS,):
            raise ValueError(f'mesh must be a jax.sharding.Mesh with the one axis "{engine.AXIS}", got {mesh!r}')
        mesh = clients_mesh(None if mesh is None else list(mesh.devices.flat))  # with the axis type the engine needs
        bernoulli = sampling == "bernoulli"
        capacity = _bernoulli_capacity(N, cohort_size) if bernoulli else cohort_size
        if donate and on_nonfinite == "raise":
            raise ValueError(
                'donate=True needs on_nonfinite="keep" or "drop_client", got "raise": '
                "the state that went into a failed round would be lost"
            )
        fit.check_requirements(algorithm, model, local, data.x_test is not None)
        self.data, self.local, self.on_nonfinite, self.mesh = data, local, on_nonfinite, mesh
        decode = _decoder(data)
        params, num_classes = fit.check_model(model, data, decode)
        redeal = _redeal(data)
        max_size = int(data.sizes.max())
        if redeal is not None and redeal.alpha is not None:
            max_size = redeal.most_rows[capacity - 1]  # one client may get all rows of a cohort
        self._engine = engine.Engine(
            model=model,
            algorithm=algorithm,
            local=local,
            mesh=mesh,
            lanes=_lanes(lanes, capacity, mesh),
            cohort_size=cohort_size,
            bernoulli=bernoulli,
            drop_nonfinite=on_nonfinite == "drop_client",
            num_clients=N,
            mean_size=len(data.x) / N,
            max_size=max_size,
            capacity=capacity,
            bank_rows=N,
            sharded=False,
            decode=decode,
            num_classes=num_classes,
            redeal=redeal,
        )
        self._measures = drift.check_measures(measure, self._engine, data.x_test is not None)
        fit.check_local(local, params, self._engine.max_size)
        self._arrays = engine.place(data, mesh, eval_batch_size)
        if "accuracy" in algorithm.requires:
            scores = jax.eval_shape(partial(engine.evaluate, self._engine), params, self._arrays.test)
            if "accuracy" not in scores:
                raise ValueError(f"{algorithm.name} follows the test accuracy: use a classifier and integer labels")
        # A state always leaves a round placed as it came in, so that the next round finds the program compiled.
        self._everywhere = NamedSharding(mesh, P())
        self._init = jax.jit(partial(engine.init, self._engine), out_shardings=self._everywhere)
        self._expected = jax.eval_shape(lambda: engine.init(self._engine, jax.random.key(0, impl=THREEFRY), None))
        round_fn, placed = partial(engine.round_fn, self._engine), (self._everywhere, None)
        self._donating_round = jax.jit(round_fn, donate_argnums=0, out_shardings=placed)
        self._round = self._donating_round if donate else jax.jit(round_fn, out_shardings=placed)
        self._measure = jax.jit(partial(drift.measure, self._engine), static_argnums=0)
        self._evaluate = jax.jit(partial(engine.evaluate_server, self._engine))
        self._launch, self._donate = partial(launch, mesh), donate
        self._evaluate_rows = jax.jit(partial(engine.evaluate_rows, self._engine))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm simulated."""
        return self._engine.algorithm

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
        return self._init(*self._here((key, params)))

    def round_fn(
        self, state: ServerState, cohort: Sequence[int] | np.ndarray | jax.Array | None = None
    ) -> tuple[ServerState, dict[str, jax.Array]]:
        """One round. Pure: the same state gives the same result, bit for bit, and stays valid (unless donated).

        It may be scanned and vmapped. Inside a `jax.jit` of your own the data set becomes a constant of that program,
        which makes compiling slow: `jax.lax.scan` needs none around it.

        Args:
          state: from `init` or an earlier round.
          cohort: client ids, distinct and in 0..N-1; default: drawn from the state's own key.

        Returns:
          The next state, and info: ``cohort`` int32 [K] (-1 where a Bernoulli cohort is not filled up, or a client was
          dealt no row), per-client ``size``, ``weight``, ``loss`` (mean over the local steps of what the algorithm
          minimises, its terms included), ``finite``, all [K], and the scalars ``lr``,
          ``steps`` (needed by the cohort) and ``executed_steps`` (run, idle lanes included); whatever the algorithm
          reports (FedEve its ``gain``, ...), and with ``measure=`` what `measure` returns.

        Raises:
          ValueError: an empty cohort, ids out of range or twice; for an algorithm that steers by its evaluation
            (FedGVR, FedGVRGM), one that is not finite.
          FloatingPointError: with ``on_nonfinite="raise"``, an update that is not finite.
        """
        state, cohort = self._check(state), self._check_cohort(cohort)
        measured = self._launch(self._measure, self._measures, state, self._arrays, cohort) if self._measures else {}
        return self._advance(self._round, state, cohort, measured)

    def _advance(
        self, program: Callable, state: ServerState, cohort: Any, measured: dict[str, jax.Array]
    ) -> tuple[ServerState, dict]:
        new, info = self._launch(program, state, self._arrays, cohort)
        if clash := info.keys() & measured.keys():
            names = ", ".join(sorted(clash))
            raise ValueError(f"{self.algorithm.name}: a metric needs a name that measure= leaves free, got {names}")
        info |= measured
        if traced((new, info)):
            return new, info
        if self.algorithm.observe is not None:
            scores = jax.device_get({name: value for name, value in info.items() if name.startswith("test_")})
            fit.check_scores(self.algorithm, int(new.round) - 1, scores)
        if self.on_nonfinite == "raise":
            finite = np.asarray(info["finite"])
            if not finite.all():
                ids = np.asarray(info["cohort"])[~finite]
                raise FloatingPointError(_nonfinite_message(int(new.round) - 1, ids, len(finite)))
        return new, info

    def measure(
        self,
        state: ServerState,
        names: str | Sequence[str] = tuple(drift.MEASURES),
        cohort: Sequence[int] | np.ndarray | jax.Array | None = None,
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
        checked = drift.check_measures(names, self._engine, self.data.x_test is not None)
        if not checked:
            return {}
        return self._launch(self._measure, checked, self._check(state), self._arrays, self._check_cohort(cohort))

    def evaluate(self, state: ServerState) -> dict[str, float]:
        """``{"loss", "accuracy"}`` of the global model on the test set (accuracy for classifiers only).

        FedDyn and FedDC also keep the mean of the cohort's models: ``"client_mean_loss"``, ``"client_mean_accuracy"``.
        Floats; under `jax.jit` or `jax.vmap` (many seeds at once) arrays.
        """
        scores = self._launch(self._evaluate, self._check(state).server, self._test())
        return jax.tree.map(lambda v: v if traced(v) else float(v), scores)

    def evaluate_clients(self, state: ServerState) -> dict[str, np.ndarray]:
        """The same for every client's own test rows, float [N]; NaN for a client without any.

        Raises ValueError unless the test set is cut into clients (natural partitions, ``test_clients=``).
        """
        sizes = self.data.test_sizes
        if sizes is None:
            raise ValueError("the test set is not cut into clients: build the data with test_clients= or test_parts=")
        client = np.repeat(np.arange(len(sizes)), sizes)
        rows = self._launch(self._evaluate_rows, self._check(state).params, self._test())
        flat = {name: np.asarray(values).reshape(-1)[: len(client)] for name, values in rows.items()}
        with np.errstate(invalid="ignore"):
            return {name: np.bincount(client, values, len(sizes)) / sizes for name, values in flat.items()}

    def run(
        self,
        state: ServerState,
        rounds: int,
        eval_every: int = 10,
        *,
        progress: bool = True,
        on_round: Callable[[Record], None] | None = None,
        measure_every: int = 1,
    ) -> tuple[ServerState, list[Record]]:
        """Runs ``rounds`` rounds from ``state``; returns the last state and the history, one dict a round.

        A record holds ``round`` (rounds done so far), ``train_loss`` (mean of the cohort's, by rows), ``clients``,
        ``lr``, ``steps``, ``executed_steps`` and ``seconds``; after every ``eval_every``-th round and the last also
        `evaluate`'s ``loss`` and ``accuracy`` (0, or no test set: never). What the algorithm reports, and with
        ``measure=`` what is measured in every ``measure_every``-th round, are there too: scalars as they are, clients'
        values as their mean over the cohort (lists of E where there is one per epoch). ``on_round(record)`` is called
        as each round ends. Ctrl-C ends the run after the round in progress (a second one at once) and returns what is
        done. Rounds overlap with the recording of the one before, so ``seconds`` is from record to record. An error of
        a round (`round_fn`'s) carries the state before it and the history as ``error.state`` and ``error.history``.
        """
        checks.integer("rounds", rounds, 0)
        checks.integer("eval_every", eval_every, 0, fix="0 means never")
        checks.integer("measure_every", measure_every, 1)
        if self.data.x_test is None:
            eval_every = 0
        state = self._check(state)
        history: list[Record] = []
        flying: deque[tuple] = deque()  # rounds dispatched and not yet recorded: one, so that no device ever waits
        clock = time.perf_counter()
        warned = False

        def record_oldest() -> None:
            nonlocal clock, warned
            t, info, scores = flying[0]
            info, scores = jax.device_get((info, scores))
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            record = _record(t, info) | {"seconds": seconds} | {name: float(v) for name, v in scores.items()}
            flying.popleft()
            history.append(record)
            bar.update(record)
            if not info["finite"].all() and not warned:
                warned = True
                ids = info["cohort"][~info["finite"]]
                warnings.warn(_nonfinite_message(t - 1, ids, len(info["finite"])), RuntimeWarning, stacklevel=3)
            if on_round is not None:
                on_round(record)

        last = int(state.round) + rounds
        program, fallible = self._round, self.on_nonfinite == "raise" or self.algorithm.observe is not None
        if rounds and not fallible:  # rounds overwrite their states, after a copy of the caller's
            program = self._donating_round
            state = state if self._donate else jax.device_put(state, self._everywhere, may_alias=False)
        with _stop_on_interrupt() as stop, _Bar(rounds, self.algorithm.name, progress) as bar:
            try:
                for t in range(last - rounds + 1, last + 1):
                    wanted = self._measures if t % measure_every == 0 else ()
                    measured = self._launch(self._measure, wanted, state, self._arrays, None) if wanted else {}
                    wait_for_turn(self.mesh)  # here Ctrl-C may interrupt
                    with stop.held():  # between donating a state and having the next one
                        state, info = self._advance(program, state, None, measured)
                        flying.append((t, info, {}))
                    if eval_every and t % eval_every == 0:
                        flying[-1] = (t, info, self._launch(self._evaluate, state.server, self._test()))
                    if len(flying) > 1:
                        record_oldest()
                    if stop.asked:
                        break
            except KeyboardInterrupt:
                pass
            except (FloatingPointError, ValueError) as error:
                while flying:
                    record_oldest()
                vars(error).update(state=state, history=history)
                raise
            if flying and eval_every and not flying[-1][2]:  # the last round, also of a run that was stopped
                t, info, _ = flying[-1]
                flying[-1] = (t, info, self._launch(self._evaluate, state.server, self._test()))
            while flying:
                record_oldest()
        return state, history

    def _check_cohort(self, cohort: Any) -> jax.Array | None:
        if cohort is None or traced(cohort):
            return cohort
        ids, redeal = fit.check_cohort(cohort, self.data.num_clients), self._engine.redeal
        if redeal is not None and redeal.alpha is not None and len(ids) > self._engine.capacity:
            raise ValueError(
                f"cohort must hold at most {self._engine.capacity} clients where rows are dealt anew by Dirichlet, got "
                f"{len(ids)}: raise cohort_size"
            )
        return ids

    def _check(self, state: ServerState) -> ServerState:
        """The state on this simulation's devices (it may come from another's, or from a file); ValueError if it is of
        another algorithm, model or federation, or was donated."""
        fit.check_like(state, self._expected, "this state is of another algorithm, model or federation")
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not traced(leaf)]
        if any(array.is_deleted() for array in arrays):
            raise ValueError("this state was donated to a round: go on from the state which that round returned")
        return self._here(state)

    def _here(self, tree: Any) -> Any:
        """The tree's arrays on all devices of this simulation."""
        leaves = jax.tree.leaves(tree)
        if traced(leaves):
            return tree
        if all(getattr(leaf, "sharding", None) == self._everywhere for leaf in leaves):
            return tree
        return jax.device_put(tree, self._everywhere)

    def _test(self) -> engine.TestRows:
        if self._arrays.test is None:
            raise ValueError("evaluating needs a test set: pass test=(x, y) to FederatedData.from_clients")
        return self._arrays.test

    def __repr__(self) -> str:
        e = self._engine
        return (
            f"Simulation({e.algorithm.name}, {self.data!r}, {self.local!r}, {e.cohort_size} clients a round, "
            f"{e.lanes} lanes on {e.mesh.size} {self.mesh.devices.flat[0].platform} devices)"
        )


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
        raise ValueError(f"key must be a JAX key such as jax.random.key(0), got {key!r}")
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


STANDARD = ("cohort", "size", "weight", "finite", "loss", "lr", "steps", "executed_steps")


def _record(done: int, info: dict[str, np.ndarray]) -> Record:
    counted = info["weight"] != 0  # not absent, and not dropped
    sizes = np.where(counted, info["size"], 0)
    loss = {}
    if "loss" in info:
        share = sizes / sizes.sum() if counted.any() else np.full(len(sizes), np.nan)
        loss["train_loss"] = float(np.where(counted, info["loss"], 0) @ share)
    return {
        "round": done,
        **loss,
        "clients": int(counted.sum()),
        "lr": float(str(info["lr"])),  # the shortest number that is the same in float32
        "steps": int(info["steps"]),
        "executed_steps": int(info["executed_steps"]),
        **{name: _recorded(name, value, counted) for name, value in info.items() if name not in STANDARD},
    }


def _recorded(name: str, value: np.ndarray, counted: np.ndarray) -> float | list[float]:
    """A scalar, or a client's values as their mean over the cohort, as JSON has them."""
    if value.ndim and name != "label_mix":
        value = value[counted]
        known = ~np.isnan(value)
        value = np.where(known, value, 0).sum(0) / np.maximum(known.sum(0), 1) + np.where(known.any(0), 0, np.nan)
    return value.tolist()


def _nonfinite_message(t: int, ids: np.ndarray, K: int) -> str:
    some = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
    return (
        f"round {t}: {len(ids)} of {K} client updates are not finite (clients {some}): lower lr, set clip_norm, or "
        'choose on_nonfinite="drop_client"'
    )


class _Stop:
    """The first SIGINT asks the loop to stop after its round; the second raises KeyboardInterrupt, once not held."""

    asked = insists = holding = False

    def __call__(self, signum: int, frame: Any) -> None:
        self.insists = self.asked
        if not self.asked:
            self.asked = True
            print("\nstopping after this round; press Ctrl-C again to stop at once", flush=True)
        elif not self.holding:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.insists:
            raise KeyboardInterrupt


@contextmanager
def _stop_on_interrupt() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, old)


class _Bar:
    """A progress bar with the latest loss and accuracy; tqdm is imported only if it is shown."""

    def __init__(self, rounds: int, name: str, shown: bool) -> None:
        self.rounds, self.name, self.shown = rounds, name, shown
        self.latest: dict[str, str] = {}

    def __enter__(self) -> _Bar:
        if self.shown:
            from tqdm import tqdm

            columns, rows = shutil.get_terminal_size()
            # Given a size, tqdm also shows its bar on terminals that report none.
            size = {"ncols": min(columns, 100), "nrows": max(rows, 2)}
            self.bar = tqdm(total=self.rounds, desc=self.name, unit="round", **size)
        return self

    def update(self, record: Record) -> None:
        if self.shown:
            names = {"train_loss": "loss", "accuracy": "acc"}
            self.latest |= {short: f"{record[name]:.3g}" for name, short in names.items() if name in record}
            self.bar.set_postfix(self.latest, refresh=False)
            self.bar.update(1)

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self.bar.close()


def _decoder(data: FederatedData) -> Callable[[jax.Array], jax.Array]:
    """Stored rows -> what the model sees: uint8 images as float32 in [0, 1], or standardised."""
    mean, std = data.mean, data.std

    def decode(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint8:
            x = x.astype(jnp.float32) / 255
        if mean is not None and std is not None:
            shape = (1,) * (x.ndim - mean.ndim) + mean.shape
            x = (x - mean.reshape(shape)) / std.reshape(shape)
        return x

    return decode


def _lanes(lanes: int | str | None, capacity: int, mesh: Mesh) -> int:
    per_device = -(-capacity // mesh.size)
    if lanes == "auto":
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
