"""What `Simulation` tells about a state: scores of the global model, of the clients' models, and drift measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np

from fedjax_drift import checks
from fedjax_drift.algorithms.fedavg import Server
from fedjax_drift.clock import synchronous
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.launch import traced
from fedjax_drift.devices.mesh import put
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.local import LocalTraining
from fedjax_drift.measures import drift, personal
from fedjax_drift.participation import uniform
from fedjax_drift.round.aggregation import mean
from fedjax_drift.round.failures import Failures
from fedjax_drift.simulation import validate
from fedjax_drift.simulation.cohorts import checked_cohort
from fedjax_drift.simulation.executor import Executor
from fedjax_drift.simulation.host import Fetched
from fedjax_drift.simulation.options import Options
from fedjax_drift.simulation.records import loss_message
from fedjax_drift.simulation.retries import traceable
from fedjax_drift.simulation.setup import assemble
from fedjax_drift.types import Params, ServerState

T = TypeVar("T")
HELD_OUT = 0.2  # the share of a new client's examples on which it is evaluated, if it has no test examples


def measure(executor: Executor, state: ServerState, names: drift.Measured, cohort: Any) -> dict[str, jax.Array]:
    """See `Simulation.measure`."""
    setup = executor.setup
    measures = drift.chosen(names, setup.engine, setup.streamed)
    if not measures:
        return {}
    state, cohort = setup.admit(state), checked_cohort(setup, cohort)
    fetched = executor.arguments(state, cohort)
    state = executor.with_states(state, fetched)
    return executor.launch_round("measure", measures, state, fetched.arrays, fetched.cohort)


def evaluate(executor: Executor, state: ServerState) -> dict[str, float]:
    """See `Simulation.evaluate`."""
    state = executor.setup.admit(state)
    validate.warn_of_initial_statistics([executor.setup.model])
    scores = jax.tree.map(lambda v: v if traced(v) else float(v), executor.scores(state))
    if isinstance(scores["loss"], float) and not math.isfinite(scores["loss"]):
        checks.warn(loss_message(f"{scores['loss']} after {int(state.round)} rounds"), RuntimeWarning)
    return scores


def evaluate_clients(
    executor: Executor, state: ServerState, fine_tune: LocalTraining | int | None
) -> dict[str, np.ndarray]:
    """See `Simulation.evaluate_clients`."""
    setup = executor.setup
    sizes = setup.data.test_sizes
    if sizes is None:
        raise ConfigurationError(
            "the test set is not split by client: build the data with test_clients= or test_parts=, or use "
            "data.with_client_tests(), which gives each client test examples with its label mix"
        )
    if fine_tune is not None and not isinstance(fine_tune, LocalTraining):
        fix = "pass a number of epochs, or a fd.LocalTraining; None means no fine-tuning"
        fine_tune = replace(setup.engine.local, steps=None, epochs=checks.integer("fine_tune", fine_tune, 1, fix=fix))
    state = setup.admit(state)
    client = np.repeat(np.arange(len(sizes)), sizes)
    test = executor.test_of_clients(state.round)
    rows, _ = executor.launch("evaluate_rows", state.params, test)
    flat = {name: np.asarray(values).reshape(-1)[: len(client)] for name, values in rows.items()}
    sums = {name: np.bincount(client, values, len(sizes)) for name, values in flat.items()}
    if fine_tune is not None or _has_own_models(executor):
        sums |= {f"personal_{name}": total for name, total in _personal_scores(executor, state, fine_tune).items()}
    return _means(sums, sizes)


def evaluate_new(
    executor: Executor, state: ServerState, clients: Any, steps: LocalTraining | int
) -> dict[str, np.ndarray]:
    """See `Simulation.evaluate_new`."""
    setup, engine = executor.setup, executor.setup.engine
    state = setup.admit(state)
    state = ServerState(state.round, state.key, state.server, ())
    data, local = _new_data(setup.data, clients), steps
    if not isinstance(local, LocalTraining):
        fix = "pass a number of local steps, or a fd.LocalTraining"
        local = replace(engine.local, epochs=1, steps=checks.integer("steps", steps, 1, fix=fix))
    needs = engine.algorithm.requires._replace(epochs=0)  # the steps of a new client are not those of a round
    validate.check_requirements(engine.algorithm._replace(requires=needs, observe=None), setup.model, local, True)
    plain = Options(
        setup.model, data, setup.algorithm, engine.local, data.num_clients, uniform(), Failures(), mean(),
        synchronous(), None, replace(setup.options.placement, bank="device"), "keep", (),
    )  # fmt: skip
    there = Executor(assemble(plain))
    validate.check_local(local, state.params, int(data.sizes.max()))
    validate.check_augment(local, data, there.setup.engine.federation.decode)
    if engine.algorithm.personal is None and engine.algorithm.adapt is None:
        state = state._replace(server=Server(state.params))

    def program() -> Callable:
        return there.programs.new_clients(local, data.sizes, there.setup.eval_batch_size)

    both = _in_chunks(there, state, local, program)
    sums = {name: total[:, 0] for name, total in both.items()}
    return _means(sums | {f"personal_{name}": total[:, 1] for name, total in both.items()}, data.test_sizes)


def _new_data(old: FederatedData, clients: Any) -> FederatedData:
    """The examples of clients that have never taken part. old: those of the federation."""
    if not isinstance(clients, FederatedData):
        pairs = FederatedData.from_clients(clients, mean=old.mean, std=old.std, name="new clients")
        clients = pairs.with_validation(HELD_OUT)
    if clients.test_sizes is None:
        raise ConfigurationError(
            "clients must have test examples of each client: build them with test_clients= or test_parts=, or use "
            "clients.with_validation(0.2), which holds out a fifth of the training examples of each client"
        )
    if clients.decoding != old.decoding:
        what = "clients must have the mean, the std and the dtype of the inputs of the federation"
        checks.refuse(what, repr(clients), f"like {old!r}")
    return replace(clients, redeal=None)


def _means(sums: dict[str, np.ndarray], sizes: Any) -> dict[str, np.ndarray]:
    """The means of scores over the test examples of each client, from their sums. Warns of losses that are not finite.

    sizes: int [N], the numbers of test examples.
    """
    with np.errstate(invalid="ignore"):
        scores = {name: total / sizes for name, total in sums.items()}
    for name in scores.keys() & {"loss", "personal_loss"}:
        if len(bad := np.flatnonzero((sizes > 0) & ~np.isfinite(scores[name]))):
            got = f"a {name} of {scores[name][bad[0]]} for client {bad[0]}, one of {len(bad)} such clients"
            checks.warn(loss_message(got), RuntimeWarning)
    return scores


def evaluate_receivers(executor: Executor, state: ServerState) -> dict[str, np.ndarray]:
    """See `Simulation.evaluate_receivers`."""
    state = executor.setup.admit(state)
    if executor.setup.engine.receivers is None:
        each = jax.tree.map(lambda a: a[None], state.params)
    else:
        each = state.sources["topology"].each.params
    test, R = executor.test(state.round), len(jax.tree.leaves(each)[0])
    models = (jax.tree.map(lambda a, r=r: a[r], each) for r in range(R))
    scores = [jax.device_get(executor.launch("evaluate", model, test)) for model in models]
    return {name: np.array([of_one[name] for of_one in scores]) for name in scores[0]}


def personal_params(executor: Executor, state: ServerState, client: int | str) -> Params:
    """See `Simulation.personal_params`."""
    state = executor.setup.admit(state)
    i = executor.setup.data.id_of(client) if isinstance(client, str) else client
    i = checks.integer("client", i, 0, executor.setup.data.num_clients - 1)
    if not _has_own_models(executor):
        return state.params
    fetched = executor.host.fetch(np.array([i], np.int32), None)

    def call() -> Params:
        now = executor.with_states(state, fetched)
        return executor.programs.personal_models()(now, fetched.arrays.rows, fetched.cohort)

    return jax.tree.map(lambda leaf: leaf[0], _launched(executor, call, state))


def _has_own_models(executor: Executor) -> bool:
    """Whether clients have models of their own, or that of their receiver in a topology."""
    engine = executor.setup.engine
    return engine.algorithm.personal is not None or engine.receivers is not None


def _personal_scores(executor: Executor, state: ServerState, local: LocalTraining | None) -> dict[str, np.ndarray]:
    """Returns the scores of each client's own model, summed over its test examples, [N].

    local: the local training of the fine-tuning; None: without fine-tuning.
    """
    setup = executor.setup
    if local is not None:
        validate.check_local(local, state.params, setup.engine.federation.max_size)
        validate.check_augment(local, setup.data, setup.engine.federation.decode)
    if setup.engine.algorithm.personal is None:
        state = state._replace(server=Server(state.params), clients=())

    def program() -> Callable:
        return executor.programs.personal(local, setup.data.sizes, setup.eval_batch_size)

    return _in_chunks(executor, state, local, program)


def _launched(executor: Executor, call: Callable[[], T], state: ServerState) -> T:
    """Returns ``call()``, which launches a program with functions of the algorithm, with fewer lanes or constants."""
    return executor.fit(lambda: traceable(call, executor.use_constants), state)


def _in_chunks(
    executor: Executor, state: ServerState, local: LocalTraining | None, program: Callable[[], Callable]
) -> dict[str, np.ndarray]:
    """Runs a program ``(state, rows, clients, tests) -> scores`` for some clients at a time. Returns the scores of all
    clients, [N, ...]. program: returns it, for the number of lanes of now."""
    setup, chunks = executor.setup, []
    for ids, tests in personal.chunks(setup.data):
        fetched = executor.host.fetch(ids, None, local)
        now, tests = executor.with_states(state, fetched), put(tests, setup.everywhere)

        def call(now: Any = now, fetched: Fetched = fetched, tests: Any = tests) -> dict[str, jax.Array]:
            return program()(now, fetched.arrays.rows, fetched.cohort, tests)

        chunks.append(jax.device_get(_launched(executor, call, now)))
    return {name: np.concatenate([sums[name] for sums in chunks])[: setup.data.num_clients] for name in chunks[0]}
