"""The loss on the plane through three models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from fedjax_drift import checks, reprs, spec, tree
from fedjax_drift.data import joining
from fedjax_drift.devices.mesh import put
from fedjax_drift.measures.measure import trained
from fedjax_drift.round.arrays import TestRows
from fedjax_drift.round.evaluate import shifted
from fedjax_drift.round.rows import place_test
from fedjax_drift.spec import AmountOrZero, checked
from fedjax_drift.types import Params, ServerState

FLAT = 1e-4  # three models lie on a line if their triangle is flatter than this


class LossPlane(NamedTuple):
    """The loss on a grid in the plane through three models. `fd.plots.loss_plane` draws it."""

    x: np.ndarray  # [X], the coordinates of the columns: distances in the space of the parameters
    y: np.ndarray  # [Y], those of the rows
    loss: np.ndarray  # [Y, X], the mean loss over the examples
    accuracy: np.ndarray | None  # [Y, X], in 0..1; None if the model is not a classifier
    models: np.ndarray  # [3, 2], the coordinates (x, y) of the models; the first model is at the origin
    names: tuple[str, ...]  # of the three models

    def __repr__(self) -> str:
        return reprs.fields(self)


Points = Annotated[int, spec.integer(2)]  # on an axis


@checked
def loss_plane(
    sim: Any, states: Any, *, examples: Any = None, points: Points = 21, margin: AmountOrZero = 0.3
) -> LossPlane:
    """Evaluates the model at the points of a grid in the plane through three models.

    The x axis goes from the first model to the second, and the y axis is orthogonal to it (Garipov et al. 2018, arXiv
    1802.10026, figure 1). So distances in the plane are Euclidean distances of the trained parameters. Running
    statistics are interpolated like the parameters. Every grid point takes one evaluation.

    Args:
      sim: the `Simulation` of the models.
      states: three models, each a `ServerState`, also of another algorithm, or the parameters: a list, or a dict from a
        name to each.
      examples: a pair (x [n, ...], y [n, ...]) of stored examples, such as ``(data.x, data.y)`` for the training set,
        or ``data.client(3)``. Default: the test set. If the data are shifted, that of the latest state.
      points: the number of grid points on each axis, >= 2. Default: 21.
      margin: how far the grid goes beyond the models on each side, >= 0, relative to their extent. Default: 0.3.

    Raises:
      ValueError: there are not three models of the same shapes, or they lie on a line; or ``examples`` do not fit to
        the data or the data are shifted.

    >>> plane = loss_plane(sim, {"start": a, "FedAvg": b, "SCAFFOLD": c})  # doctest: +SKIP
    """
    if not hasattr(sim, "executor"):
        checks.refuse("sim must be a Simulation", checks.shown(sim), "pass fd.Simulation(...)")
    named = named_models(states)
    models = [parameters(sim, f"states[{name!r}]", state) for name, state in named.items()]
    corners = coordinates([trained(sim.setup.engine, model) for model in models])
    rows, count = evaluated(sim, named, examples)
    low, high = corners.min(0), corners.max(0)
    room = margin * (high - low)
    x, y = np.linspace(low - room, high + room, points).T
    scores = []
    for place in np.stack(np.meshgrid(x, y), -1).reshape(-1, 2):
        # (a, b) solves place = a * corners[1] + b * corners[2]. The first corner is the origin.
        a, b = np.linalg.solve(corners[1:].T, place)
        of_rows, _ = sim.executor.launch("evaluate_rows", combined(models, np.array([1 - a - b, a, b])), rows)
        kept = {name: of_rows[name] for name in ("loss", "accuracy") if name in of_rows}
        scores.append({name: np.asarray(v, float).reshape(-1)[:count].mean() for name, v in kept.items()})
    grids = {name: np.reshape([score[name] for score in scores], (points, points)) for name in scores[0]}
    return LossPlane(x, y, grids["loss"], grids.get("accuracy"), corners, tuple(named))


def named_models(states: Any) -> dict[str, Any]:
    """The three models by name."""
    if isinstance(states, Sequence) and not isinstance(states, str | ServerState):
        states = {f"model {i + 1}": state for i, state in enumerate(states)}
    if not isinstance(states, Mapping) or len(states) != 3:
        fix = "pass [state_1, state_2, state_3], or a dict from a name to each"
        checks.refuse("states must be three models", checks.shown(states), fix)
    return {str(name): state for name, state in states.items()}


def parameters(sim: Any, name: str, state: Any) -> Params:
    """The parameters of one of the models, on the devices of the simulation."""
    params = state.params if isinstance(state, ServerState) else state
    tree.check_layout(params, sim.setup.state.params, f"{name} must be shaped like the model's parameters")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(params)):
        checks.refuse(f"{name} must be valid", "one that was donated to a round", "keep jax.device_get(it)")
    return put(params, sim.setup.everywhere)


def coordinates(models: Sequence[Params]) -> np.ndarray:
    """The coordinates of the models in their plane, [3, 2]: (0, 0), (length, 0) and (along, height)."""
    u, v = (tree.subtract(model, models[0]) for model in models[1:])
    length, share = float(tree.dot(u, u)) ** 0.5, float(tree.dot(u, v) / tree.dot(u, u))
    rest = jax.tree.map(lambda u, v: v - share * u, u, v)
    height = float(tree.dot(rest, rest)) ** 0.5
    if not height > FLAT * max(length, abs(share) * length):
        what = "states must be three models that do not lie on a line"
        got = f"a distance of {length:.3g} between the first two, and of {height:.3g} from their line to the third"
        checks.refuse(what, got, "pass models of other rounds, or of other runs")
    return np.array([[0, 0], [length, 0], [share * length, height]])


@jax.jit
def combined(models: Sequence[Params], shares: jax.Array) -> Params:
    """The sum of shares[i] * models[i]."""

    def leaf(*of_models: jax.Array) -> jax.Array:
        return sum(s * a for s, a in zip(shares, of_models, strict=True)).astype(of_models[0].dtype)  # type: ignore

    return jax.tree.map(leaf, *models)


def evaluated(sim: Any, named: Mapping[str, Any], examples: Any) -> tuple[TestRows, int]:
    """The examples on the devices, and their number."""
    if examples is None:
        states = {name: state for name, state in named.items() if isinstance(state, ServerState)}
        rounds = [checks.integer(f"the round of states[{name!r}]", state.round, 0) for name, state in states.items()]
        return sim.executor.test(max(rounds, default=0)), sim.setup.engine.federation.test_size
    if shifted(sim.setup.engine):
        what = "examples must be left out if the data are shifted, because they depend on the client and the round"
        fix = "pass a Simulation of the data before .shifted(...), without a source that changes examples"
        checks.refuse(what, checks.shown(examples), fix)
    x, y = joining.checked_pair(*joining.as_pair(examples, "examples"), "examples")
    data = replace(sim.data, x_test=x, y_test=y, test_sizes=None)
    rows = place_test(data, sim.mesh, sim.setup.eval_batch_size, whole=False, shifted=False)
    assert rows is not None
    return rows, len(x)
