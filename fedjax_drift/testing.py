"""Checks that an algorithm of your own keeps the contract that all algorithms of the library keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_drift import recipes, spec
from fedjax_drift.data.federated import FederatedData
from fedjax_drift.devices.mesh import clients_mesh
from fedjax_drift.local import LocalTraining
from fedjax_drift.model import Model
from fedjax_drift.models.adapted import lora
from fedjax_drift.models.layers import cosine_logits
from fedjax_drift.simulation import programs
from fedjax_drift.simulation.simulation import Simulation
from fedjax_drift.spec import Fix, checked
from fedjax_drift.types import Algorithm, Params, PyTree, ServerState

__all__ = ["CHECKS", "check_contract"]
__dir__ = __all__.copy


COHORTS = ([0, 1, 2], [3, 4, 5], [1, 3, 5], [4, 2, 0], [5, 3, 1])  # given cohorts are compiled faster than sampled ones
SEED = 3  # with it, 3, 0, 1, 2 and 3 clients report in the five rounds of `check_rounds`


@checked
def check_contract(
    algorithm: Annotated[Algorithm, spec.instance(Algorithm), Fix("call the factory, such as fd.algorithms.fedavg()")],
) -> None:
    """Checks that an algorithm keeps the contract of the library's algorithms.

    A federation with six clients of different sizes trains a small network for a few rounds, in which clients fail. The
    network has features, a head and logits that are cosines, and parameters of unusual shapes: without elements,
    without axes, and with five axes. For an algorithm that needs them, it has low-rank adapters. The checks are:

    - Shapes and dtypes of the state stay the same, and its values are finite.
    - A round is pure: it does not change its argument, and the same state gives the same bits.
    - The loss decreases.
    - The state of a client that does not report stays the same, and so does the server if no client reports.
    - If all gradients are 0, the model does not move.
    - The weight and the metrics of a client are scalars.
    - The numbers that a factory captures are arguments of the compiled round: other values change the result, and
      nothing is compiled again.

    Args:
      algorithm: with local training of plain SGD. Its weight decay, if it has one, must be 0.

    Raises:
      AssertionError: the algorithm does not keep the contract. The message says which part.
      ValueError: a `Simulation` refuses the algorithm.

    >>> from fedjax_drift.algorithms import fedavg
    >>> check_contract(fedavg())
    """
    simulation = contract_simulation(algorithm)
    for check in CHECKS:
        check(simulation)


@functools.cache
def _model(adapters: bool) -> Model:
    """The model of `contract_simulation`, with or without adapters. Simulations of the same model share programs."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key)
        hidden, classifier = jax.random.normal(keys[0], (5, 6)), jax.random.normal(keys[1], (6, 3))
        unusual = {"empty": jnp.zeros((0, 3)), "scalar": jnp.ones(()), "five axes": jnp.ones((1, 1, 3, 1, 1))}
        return {"norm": jnp.ones(6), "hidden": hidden, "classifier": classifier, **unusual}

    def features(params: Params, x: jax.Array) -> jax.Array:
        return jnp.tanh((x @ params["hidden"]) * params["norm"][None])

    def head(params: Params, z: jax.Array) -> jax.Array:
        scale = params["scalar"] * params["five axes"].reshape(1, 3)
        return cosine_logits(z, params["classifier"]) * scale

    model = Model(init, lambda p, x: head(p, features(p, x)), features=features, head=head, cosine=True)
    return lora(model, 2, "hidden|classifier", whole="norm|empty|scalar|five") if adapters else model


@functools.cache
def _data(scale: float = 1.0) -> FederatedData:
    """The data of `contract_simulation`. scale: multiplies the inputs."""
    rng = np.random.default_rng(0)
    rows = [(scale * rng.normal(size=(n, 5)).astype("f4"), rng.integers(0, 3, n)) for n in (3, 10, 7, 25, 1, 16)]
    return FederatedData.from_clients(rows, test_clients=rows)


def contract_simulation(algorithm: Algorithm, **changes: Any) -> Simulation:
    """The simulation of `check_contract`, with dropout and stragglers. It trains on one device, for which programs are
    compiled faster. changes: of its options."""
    options: dict[str, Any] = {
        "data": _data(),
        "local": LocalTraining(epochs=2, batch_size=4),
        "cohort_size": 3,
        "dropout": 0.4,
        "stragglers": 0.4,
    }
    options |= {"lanes": 2, "mesh": clients_mesh(jax.devices()[:1])}
    return Simulation(_model(getattr(algorithm.requires, "adapters", False)), algorithm=algorithm, **options | changes)


def check_rounds(simulation: Simulation) -> None:
    """Five rounds in which clients fail: what changes, and what must not. A round refuses weights and metrics that are
    no scalars."""
    start = simulation.init(jax.random.key(SEED))
    before = jax.tree.map(np.array, (start.params, start.clients))
    state, losses, reported = start, [_loss(simulation, start)], []
    for t, cohort in enumerate(COHORTS):
        old, (state, info) = state, simulation.round_fn(state, cohort)
        _require(_layout(state) == _layout(start), "the state must keep its structure, shapes and dtypes")
        leaves = jax.tree.leaves((state.server, state.clients))
        _require(all(np.isfinite(leaf).all() for leaf in leaves), f"the state must be finite after round {t}")
        absent = np.setdiff1d(np.arange(6), info["cohort"])
        for a, b in zip(jax.tree.leaves(old.clients), jax.tree.leaves(state.clients), strict=True):
            same = np.array_equal(a[absent], b[absent])
            _require(same, "the state of a client that does not report must stay the same")
        reported.append(int((info["cohort"] >= 0).sum()))
        if not reported[-1]:
            _require(_equal(old.server, state.server), "if no client reports, the server must stay the same")
        losses.append(_loss(simulation, state))
    _require({0, 3} < set(reported), f"rounds with no, some and all clients are needed, got {reported}")
    _require(min(losses[1:]) < losses[0], f"the loss must decrease, got {losses}: a message is an update, not a model")
    _require(_equal(before, (start.params, start.clients)), "a round must not change its argument")
    again, _ = simulation.round_fn(old, COHORTS[-1])
    _require(_equal(again.server, state.server), "the same state must give the same bits")


def check_zero_gradient(simulation: Simulation) -> None:
    """If the gradients of all clients are 0, the model does not move. Here they are 0 because the inputs are."""
    still = contract_simulation(simulation.algorithm, data=_data(0.0))  # it shares the programs of `simulation`
    start = state = still.init(jax.random.key(SEED))
    for cohort in COHORTS:
        state, _ = still.round_fn(state, cohort)
    merged = simulation.model.merged or (lambda params: params)  # adapters may change, but not what they add up to
    pairs = zip(*(jax.tree.leaves(merged(each.params)) for each in (start, state)), strict=True)
    moved = max(float(np.abs(np.asarray(a) - b).max(initial=0)) for a, b in pairs)
    _require(moved < 1e-7, f"if all gradients are 0, the model must not move, got a change of {moved:.1e}")


def check_hyper_parameters(simulation: Simulation) -> None:
    """Hyper-parameters are arguments of the compiled round."""
    form, numbers = programs.split(simulation.setup.engine)
    engine = recipes.join(form, [0.9 * number for number in numbers])
    failures = {source.name: source for source in engine.sources}["failures"].recipe.arguments["failures"]
    failing = {"dropout": failures.dropout, "stragglers": failures.stragglers}
    other = contract_simulation(engine.algorithm, local=engine.local, **failing)
    compiled = simulation.executor.programs, other.executor.programs
    _require(compiled[0].compiled is compiled[1].compiled, "other hyper-parameters must not compile another round")
    _require(not compiled[0].constant, "every number that the factory captures must be an argument of the round")
    passed = [float(number) for number in compiled[1].numbers]
    _require(np.allclose(passed, [0.9 * number for number in numbers], rtol=1e-6), "hyper-parameters must be passed on")
    state = simulation.init(jax.random.key(SEED))
    servers = [sim.round_fn(state, COHORTS[0])[0].server for sim in (simulation, other)]
    _require(not _equal(*servers), "other hyper-parameters must change the result")


CHECKS: tuple[Callable[[Simulation], None], ...] = (check_rounds, check_zero_gradient, check_hyper_parameters)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _loss(simulation: Simulation, state: ServerState) -> float:
    """The loss of the model that the clients use: the global model, or the mean over the personal models."""
    if simulation.algorithm.personal is None:
        return simulation.evaluate(state)["loss"]
    return float(simulation.evaluate_clients(state)["personal_loss"].mean())


def _layout(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def _equal(a: PyTree, b: PyTree) -> bool:
    """Whether all leaves have the same values."""
    return jax.tree.all(jax.tree.map(functools.partial(np.array_equal, equal_nan=True), a, b))
