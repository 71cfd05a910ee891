"""Tests of `redeal`: every example goes to one present client, and FedEve's two splits have the right distributions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedjax_drift as fd
from fedjax_drift.data.redeal import _dirichlet, drift_regimes, redeal

pytestmark = pytest.mark.thorough

rng = np.random.default_rng(0)
SIZES = rng.integers(1, 60, 40).astype(np.int32)
OFFSETS = (np.cumsum(SIZES) - SIZES).astype(np.int32)
LABELS = rng.integers(0, 7, SIZES.sum()).astype(np.int32)  # num_classes=9, but 7 and 8 have no example
COHORTS = [[40, 3, 17, 40, 0, 39, 22, 40], [5, 40, 40, 40, 40, 40, 40, 40], [40] * 8, [1, 2, 3, 4, 5, 6, 7, 8]]


def cohort(ids) -> tuple[jax.Array, ...]:
    """Returns ids, sizes and offsets, [K] each. The id 40 stands for an absent client."""
    ids, here = np.asarray(ids, np.int32), np.minimum(ids, 39)
    return jnp.asarray(ids), jnp.asarray(np.where(np.asarray(ids) < 40, SIZES[here], 0)), jnp.asarray(OFFSETS[here])


@pytest.mark.parametrize("alpha", [None, 5e-324, 0.3, 1e300])
def test_every_example_goes_to_one_present_client(alpha):
    labels = None if alpha is None else jnp.asarray(LABELS)
    traces = []

    @jax.jit
    def deal(key, ids, sizes, offsets):
        traces.append(1)
        return redeal(key, ids, sizes, offsets, labels, alpha=alpha, num_classes=9, most_rows=480)

    for seed, ids in enumerate(COHORTS * 3):
        ids, sizes, offsets = cohort(ids)
        rows, starts, dealt = map(np.asarray, deal(jax.random.key(seed), ids, sizes, offsets))
        assert rows.dtype == starts.dtype == dealt.dtype == np.int32 and rows.shape == (480,)
        pooled = [np.arange(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
        given = [rows[o : o + n] for o, n in zip(starts, dealt, strict=True)]
        np.testing.assert_array_equal(np.sort(np.concatenate(given)), np.sort(np.concatenate(pooled)))
        np.testing.assert_array_equal(starts, np.cumsum(dealt) - dealt)
        assert (dealt[np.asarray(sizes) == 0] == 0).all() and (rows[dealt.sum() :] == 0).all()
        if alpha in (None, 1e300) and (sizes > 0).any():
            shares = dealt[np.asarray(sizes) > 0]
            assert np.ptp(shares) <= (1 if alpha is None else 14)  # up to 2 examples of each of the 7 classes
    assert len(traces) == 1


def counts(cases: int, sizes: list[int], labels: np.ndarray, alpha: float | None) -> np.ndarray:
    """Returns the number of examples per client and class, [cases, K, C], after splits with different keys."""
    K, classes = len(sizes), int(labels.max()) + 1
    size = jnp.asarray(sizes, jnp.int32)
    arguments = (jnp.arange(K), size, jnp.cumsum(size) - size, None if alpha is None else jnp.asarray(labels))

    def deal(key):
        return redeal(key, *arguments, alpha=alpha, num_classes=classes, most_rows=len(labels))

    rows, _, dealt = map(np.asarray, jax.jit(jax.vmap(deal))(jax.random.split(jax.random.key(1), cases)))
    place = np.stack([np.repeat(np.arange(K), n) for n in dealt])
    table = np.zeros((cases, K, classes), int)
    np.add.at(table, (np.arange(cases)[:, None], place, labels[rows]), 1)
    return table


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_uneven_splits_follow_the_dirichlet_distribution(alpha):
    K, n = 5, 1000
    shares = counts(400, [600] * K, np.arange(K * 600) % 3, alpha) / n
    # The share of a client in a class has the distribution Beta(alpha, (K - 1) alpha), apart from rounding.
    expected = (1 / K) * (1 - 1 / K) / (K * alpha + 1)
    np.testing.assert_allclose(shares.mean((0, 2)), 1 / K, atol=4.5 * np.sqrt(expected / 1200))
    assert shares.var() == pytest.approx(expected, rel=0.1)
    if alpha >= 1:
        assert stats.kstest(shares[:, 2, 1], stats.beta(alpha, (K - 1) * alpha).cdf).pvalue > 1e-3
    # Classes are split independently. The shares of two clients in the same class are negatively correlated.
    assert abs(np.corrcoef(shares[:, 0, 0], shares[:, 0, 1])[0, 1]) < 0.2
    assert np.corrcoef(shares[:, 0, 0], shares[:, 4, 0])[0, 1] == pytest.approx(-1 / (K - 1), abs=0.16)


def test_rare_classes_favour_no_client():
    mean = counts(300, [10] * 5, np.arange(50) % 25, 1.0).sum(2).mean(0)  # two examples of each of 25 classes
    np.testing.assert_allclose(mean, 10, atol=1)


def test_large_classes_are_split_without_losing_an_example():
    """float32 rounds one class size down and the other up. The last split point must still be the class size."""
    n, present = np.repeat([2**24 + 1, 2**24 + 3], 100), jnp.arange(6) < 4
    upto = np.asarray(_dirichlet(jax.random.key(5), jnp.arange(6), present, 0.05, jnp.asarray(n)))
    assert (upto[3:] == n).all() and (np.diff(upto, axis=0, prepend=0) >= 0).all()


def test_even_splits_mix_the_clients_at_random():
    sizes = [70, 20, 10]
    origin = np.repeat(np.arange(3), sizes)
    table = counts(1500, sizes, origin, None)
    np.testing.assert_array_equal(table.sum(2), np.tile([34, 33, 33], (1500, 1)))
    for client, size in enumerate(sizes):
        law = stats.hypergeom(100, size, 33)
        held = table[:, 2, client]
        assert held.mean() == pytest.approx(law.mean(), abs=4.5 * law.std() / np.sqrt(1500))
        assert held.var() == pytest.approx(law.var(), rel=0.17)


def test_outputs_are_int32_in_double_precision():
    with jax.enable_x64(True):
        ids, sizes, offsets = cohort(COHORTS[0])
        for alpha in (None, 0.3):
            deal = partial(redeal, labels=jnp.asarray(LABELS), alpha=alpha, num_classes=9, most_rows=480)
            out = jax.eval_shape(deal, jax.random.key(0), ids, sizes, offsets)
            assert [a.dtype for a in out] == [jnp.int32] * 3


def test_the_four_drift_regimes_have_the_same_examples():
    x, y = rng.integers(0, 256, (600, 2, 2, 1), np.uint8), rng.integers(0, 3, 600)
    regimes = drift_regimes(x, y, num_clients=6, alpha=0.1, test=(x[:9], y[:9]), mean=0.1, std=0.3, name="toy")
    assert {name: data.redeal for name, data in regimes.items()} == {
        "iid": None,
        "period drift": "evenly",
        "client drift": 0.1,
        "both": None,
    }
    iid, period, client, both = regimes.values()
    assert client.x is iid.x and period.x is both.x  # the arrays are shared, not copied
    for data in (iid, both):
        assert sorted(map(bytes, data.x)) == sorted(map(bytes, x))
        assert data.mean == np.float32(0.1) and len(data.x_test) == 9
    assert (iid.sizes == 100).all() and np.ptp(both.sizes) > 1
    assert "redealt evenly" in repr(period) and "redealt by Dirichlet(0.1)" in repr(client)
    assert "redealt" not in repr(iid)
    assert period.redealt(2).redeal == 2.0


DATA = fd.FederatedData(np.zeros((4, 2), np.float32), np.arange(4), np.array([2, 2]))
FLOATS = fd.FederatedData(DATA.x, np.ones(4), DATA.sizes)
SIGNED = fd.FederatedData(DATA.x, np.arange(4) - 1, DATA.sizes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DATA.redealt(0.0), "alpha must be a finite number > 0, got 0.0: 0.01 splits very unevenly"),
        (lambda: FLOATS.redealt(1.0), r"redealt\(alpha\) needs integer labels, one per example, got float64\[4\]"),
        (lambda: SIGNED.redealt(1.0), "needs labels >= 0, got -1"),
        (lambda: drift_regimes(DATA.x, DATA.y, 5, 1.0), "needs at least 5 examples, got a data set with 4"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_even_splits_need_no_integer_labels():
    assert FLOATS.redealt().redeal == "evenly"


def test_a_given_cohort_has_at_most_the_clients_of_a_round():
    model, options = fd.models.linear((2,), 4), {"cohort_size": 1, "local": fd.LocalTraining(batch_size=2)}
    sim = fd.Simulation(model, DATA.redealt(1.0), fd.algorithms.fedavg(), **options)
    state = sim.init(jax.random.key(0))
    assert sim.round_fn(state, [1])[1]["cohort"].tolist() == [1]
    with pytest.raises(ValueError, match=r"cohort must have at most 1 clients with data.redealt\(alpha\), got 2"):
        sim.round_fn(state, [0, 1])
    fd.Simulation(model, DATA.redealt(), fd.algorithms.fedavg(), **options).round_fn(state, [0, 1])
