"""Fuzz test of the public interface, and tests of unusual numbers: underflow, NaN and NumPy integers."""

from __future__ import annotations

import abuse
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3) / 24, np.array([0, 1, 2, 1, 0, 1, 2, 1])
DATA = fd.FederatedData.from_clients([(X[:3], Y[:3]), (X[3:4], Y[3:4]), (X[4:], Y[4:])], test=(X, Y))


@pytest.mark.parametrize("cases", [10, pytest.param(80, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", abuse.FAMILIES)
def test_awkward_arguments_have_no_wrong_outcome(family, cases) -> None:
    assert not [str(outcome) for outcome in abuse.abused(family, cases) if outcome.wrong]


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [fd.algorithms.scaffold(), fd.algorithms.feddc(0.1), fd.algorithms.slowmo(0.5)])
def test_a_learning_rate_below_the_float32_range_gives_finite_states(algorithm) -> None:
    local = fd.LocalTraining(lr=0.1, lr_decay=0.5)
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, algorithm, local=local, cohort_size=2)
    state, history = sim.run(sim.init(jax.random.key(0))._replace(round=jnp.int32(300)), 2, progress=False)
    leaves = jax.tree.leaves(state._replace(key=0))
    assert all(np.isfinite(leaf).all() for leaf in leaves) and 0 < history[-1]["lr"] < 1e-37


def test_a_model_with_nan_has_accuracy_0_and_causes_a_warning() -> None:
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, fd.algorithms.fedavg(), cohort_size=2)
    state = sim.init(jax.random.key(0))
    state = state._replace(server=state.server._replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params)))
    with pytest.warns(RuntimeWarning, match="the test loss must be finite, got nan after 0 rounds"):
        assert sim.evaluate(state)["accuracy"] == 0


@pytest.mark.thorough
def test_measuring_works_with_debug_nans() -> None:
    """The measures of absent clients are NaN. This must not raise an error with ``jax_debug_nans``."""
    options = {"cohort_size": 2, "sampling": "bernoulli", "measure": "updates"}
    sim = fd.Simulation(fd.models.linear((3,), 3), DATA, fd.algorithms.scaffold(), **options)
    with jax.debug_nans(True):
        _, history = sim.run(sim.init(jax.random.key(0)), 3, progress=False)
        (run,) = sim.sweep(2, [0], progress=False)
    assert len(history) == 3 and len(run.history) == 2 and "update_norm" in run.history[0]


def test_numpy_integers_are_accepted() -> None:
    local = fd.LocalTraining(epochs=np.uint8(1), batch_size=np.uint64(2), lr=np.int64(1))
    sim = fd.Simulation(
        fd.models.linear((3,), 3), DATA, fd.algorithms.fedavg(np.int64(1)), local=local, cohort_size=np.uint8(2)
    )
    state = sim.init(jax.random.key(0))._replace(round=jnp.int32(100))
    state, history = sim.run(state, np.uint8(200), np.int64(0), progress=np.False_)
    assert len(history) == 200 and int(state.round) == 300
