"""Bad input raises ValueError before anything is compiled.

The message names the argument, the allowed values, the value received and a fix.
"""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.simulation import retries

X, Y = np.ones((4, 3), np.float32), np.array([0, 1, 2, 1])


def federation(**options) -> fd.FederatedData:
    return fd.FederatedData.from_clients([(X, Y), (X, Y)], **({"test": (X, Y)} | options))


def images(**options) -> fd.FederatedData:
    return fd.FederatedData.from_clients([(X.astype(np.uint8), Y)], **options)


def simulation(**options) -> fd.Simulation:
    options = {"model": fd.models.linear((3,), 3), "data": federation(), "algorithm": fd.algorithms.fedavg(),
               "cohort_size": 2} | options  # fmt: skip
    return fd.Simulation(options.pop("model"), options.pop("data"), options.pop("algorithm"), **options)


def clients(*pairs) -> fd.FederatedData:
    return fd.FederatedData.from_clients(pairs)


def clients_of(pairs, **options) -> fd.FederatedData:
    return fd.FederatedData.from_clients(pairs, **options)


def with_test(x, y=Y) -> fd.FederatedData:
    return fd.FederatedData.from_clients([(X.astype(x.dtype), Y)] * 2, test=(x, y))


def two_classes(y) -> fd.FederatedData:
    return fd.FederatedData.from_clients([(X, y)])


def dropped() -> fd.Model:
    """A model from an nnx module with dropout, made with ``nnx.split`` instead of `Model.from_nnx`."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.drop, self.dense = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.drop(x))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    return fd.Model(lambda key: params, lambda params, x: nnx.merge(graph, params, rest)(x))


def embedding() -> fd.Model:
    return fd.Model(lambda key: jnp.zeros((9, 3)), lambda table, x: table[x].mean(1))


def regression(loss) -> fd.Model:
    return fd.Model(lambda key: jnp.zeros(3), lambda w, x: x @ w, loss=loss)


def infinite() -> np.ndarray:
    x = X.copy()
    x[2, 1] = np.inf
    return x


DATA = [
    (lambda: clients(), "at least 1 client, got 0"),
    (lambda: clients((X, Y), (X[:0], Y[:0])), "client 1 is empty: leave it out"),
    (lambda: clients((X, Y), (X, Y[:3])), "client 1 must have as many inputs as labels, got 4 and 3"),
    (
        lambda: clients((X, Y), (X[:, :2], Y)),
        r"client 1 must have the dtypes and shapes of the first one, inputs float32\[3\] .*, got float32\[2\]",
    ),
    (lambda: clients((X, Y), (X, Y.astype("f4")), (X, Y)), r"client 1 must .* labels int64\[\], got .* float32\[\]"),
    (
        lambda: clients((X, Y), (X, Y.astype("u8") + 2**63)),
        "client 1: labels must be whole numbers in .* for int64, got 9223372036854775808 in row 0: number the classes",
    ),
    (
        lambda: clients_of({name: (X, Y[:, None] if name == "bob" else Y) for name in ("ann", "bob", "cid")}),
        r"client bob must have .* labels int64\[\], got float32\[3\] and int64\[1\]",
    ),
    (lambda: clients_of([(X, Y)], test_clients=[([], [])]), "test data must have at least 1 example, got 0"),
    (lambda: clients_of([(X, Y)], test_clients=[([], [1])]), "test client 0 must have as many inputs as labels, got 0"),
    (
        lambda: fd.FederatedData(*(np.broadcast_to(np.uint8(0), 2**31) for _ in "xy"), sizes=[2**31]),
        "sizes must be in 0..2147483647, got 2147483648..2147483648",
    ),
    (lambda: fd.FederatedData.of_shapes(2, 2**31, (1,)), "sizes must be in 0..2147483647, got 2147483648"),
    (lambda: clients((X, Y), (X.astype(np.uint8), Y)), "got uint8"),
    (lambda: clients((X, Y), (infinite(), Y)), "inputs must be finite, got NaN or infinity in example 6: correct it"),
    (lambda: clients(([[2**63 + 1, -1]], [0])), "inputs must .*integers must be smaller than 2..63, got 92233720368"),
    (lambda: clients((np.array(["a"] * 4), Y)), "inputs must be a numeric array"),
    (lambda: federation(test=(X, Y[:2])), "test data must have as many inputs as labels, got 4 inputs and 2 labels"),
    (lambda: federation(test=(X[:, :1], Y)), "test inputs must have the dtype and shape of the training inputs"),
    (lambda: federation(test_clients=[(X, Y)] * 2), "either test or test_clients"),
    (lambda: federation(test=None, test_clients=[(X, Y)]), "2 pairs, one per client, got 1"),
    (lambda: images(mean=0.5), "both mean and std"),
    (lambda: images(mean=0.5, std=0.0), "std must be > 0"),
    (lambda: images(mean=np.nan, std=1.0), "mean must be a finite number"),
    (lambda: images(mean=[0.1, 0.2], std=1.0), "3 of them, one per channel"),
    (lambda: federation(mean=0.5, std=1.0), "mean must be None unless the inputs are uint8 images, got .* float32"),
    (lambda: federation(test=(X, Y, Y)), r"test must be a pair \(inputs, labels\), got a tuple of 3"),
    (lambda: federation(test=(X, Y[:, None])), r"test labels must have the dtype .*, int64\[\] per example"),
    (lambda: fd.FederatedData.from_clients(X, Y), "one .inputs, labels. pair for each client, got a ndarray"),
    (lambda: fd.FederatedData.from_partition(X, Y, fd.partition.iid(2)), "got a function: if it is a parti.*, call it"),
    (lambda: fd.datasets.load("synthetic", partition=fd.partition.iid), "partition must be a partitioner such as"),
    (lambda: fd.models.lenet5(input_shape=(5,)), r"input_shape must be one that CNN accepts, got \(5,\)"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0, 1], []]), "client 1 is empty"),
    (lambda: fd.FederatedData.from_partition(X, Y, np.array([0, 0, 1, 1])), "pass parts=.np.flatnonzero"),
    (lambda: fd.FederatedData.from_partition(X, Y, [0, 0, 1, 1]), "pass parts=.np.flatnonzero"),
    (lambda: clients_of({"a": (X, Y), "b": (X[:0], Y[:0])}), "client b is empty|client 1 is empty"),
    (lambda: clients_of({"a": (X, Y)}, test_clients=[(X, Y)]), "test_clients must be a dict with client names"),
    (lambda: clients_of({"anna": (X, Y)}, test_clients={"ana": (X, Y)}), "got 'ana': did you mean 'anna'"),
    (lambda: clients_of([(X, Y)], test_clients={"a": (X, Y)}), "test_clients must be a list, because .*, got a dict"),
    (lambda: clients_of({1: (X, Y), "1": (X, Y)}), "2 different names, one per client, got 2, of which 1 differ"),
    (lambda: clients_of({"anna": (X, Y)}).client("ana"), "no client has the name 'ana' .*: did you mean 'anna'"),
    (lambda: federation().client("anna"), "no client has the name 'anna' .the clients have ids only"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0, 4]]), r"example indices in 0..3, got 0..4"),
    (lambda: fd.FederatedData.from_partition(X, Y, [[0.5]]), r"a list of example indices, got float64\[1\]"),
    (lambda: fd.FederatedData(X, Y, [1.9, 2.1]), r"sizes must be integers, one per client, got float64\[2\]"),
    (lambda: fd.FederatedData(X, Y, [2**32 + 4]), r"sizes must be in 0..4, the number of examples, got 4294967300"),
    (lambda: fd.FederatedData(np.ma.masked_array(X, X > 0), Y, [4]), "must be an array without masked values"),
    (lambda: fd.partition.iid(2)(np.ma.masked_array(Y, Y > 1)), "y must be an array without masked values"),
    (lambda: federation().with_validation(1e-9), "must hold out at least one example"),
    (lambda: fd.models.save_params("w", "x.npz"), "params, at its root, must be a numeric array"),
    (lambda: fd.grid(optimizer="adam"), r"optimizer must be a list .*, got 'adam': pass grid\(optimizer=\[...\]\)"),
    (lambda: fd.grid(lr=0.1), r"lr must be a list of one or more values, got 0.1: pass grid\(lr=\[...\]\)"),
    (lambda: fd.plots.curves([{"round": 1, "accuracy": "a"}]), "records' accuracy must be numbers, or lists"),
    (lambda: fd.plots.curves([{"round": 1.5, "accuracy": 1}]), "records' round must be an integer >= 0, got 1.5"),
    (lambda: fd.plots.federation(federation(), "x.nope"), "path must end in a format .*, got x.nope: Format 'nope' is"),
    (lambda: fd.FederatedData(X, Y, np.array([1, 2])), "sizes must sum to 4, the number of examples, got 3"),
    (lambda: federation().client(2), r"in 0..1, got 2"),
    (lambda: fd.datasets.load("mnits"), "did you mean 'mnist'"),
]
LOCAL = [
    ({"momentum": 0.9, "optimizer": optax.scale_by_adam()}, "momentum must be 0 when an optimizer is given, got 0.9"),
    ({"direction": "descent", "lr": 1}, "direction must be None without an optimizer, got 'descent': pass optimizer="),
    (
        {"direction": "descent", "optimizer": optax.adam(0.1)},
        'lr must be 1 with direction="descent", because the optimizer has a learning rate of its own, got 0.1',
    ),
    ({"lr": 1e-50}, "lr must be a finite number > 0 in float32, the dtype that JAX uses, got 1e-50, which becomes 0"),
]
DESCENT = "got one that maps it to a descent direction: pass optax.sca"
IDLE = 'got updates of 0 in the first 10 steps.*pass direction="ascent" for an optimi'
FAILS = "got one that fails .*: use one without"
OPTIMIZERS: list = [
    (optax.adam(0.1), "pass optax.scale_by_adam"),
    (optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 1000)), DESCENT),  # the first update is 0
    (optax.chain(optax.add_noise(1.0, 0.0, key=1), optax.sgd(0.1)), DESCENT),
    (optax.chain(optax.apply_every(5), optax.scale_by_learning_rate(0.1)), DESCENT),
    (optax.sgd(optax.linear_schedule(0.0, 1.0, 10, transition_begin=500)), IDLE),
    (optax.set_to_zero(), IDLE),
    (
        optax.masked(optax.scale(-1.0), {"classifier": {"dense": {"kernel": True, "bias": False}}}),
        "in both dir",
    ),
    (optax.stateless(lambda g, _: jax.tree.map(jnp.sum, g)), "of the optimizer must be shaped like the .*: .*float32"),
    *((make, FAILS) for make in (optax.polyak_sgd(), optax.lbfgs(), optax.contrib.sophia(0.1))),
    (optax.lookahead(optax.sgd(1), 2, 1), FAILS),
]
SIMULATION = [
    ({"cohort_size": 0}, "cohort_size must be in 1..2, got 0: the federation has 2 clients"),
    ({"cohort_size": 3}, "cohort_size must be in 1..2, got 3: the federation has 2 clients"),
    ({"cohort_size": 1.0}, "got 1.0"),
    ({"lanes": 0}, 'lanes must be an integer >= 1, got 0: or pass "auto"'),
    ({"sampling": "poisson"}, "sampling must be one of 'uniform', 'bernoulli', got 'poisson'"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
    ({"algorithm": fd.algorithms.fedavg}, "algorithm must be of type Algorithm, got function"),
    ({"local": 0.1}, "local must be of type LocalTraining, got float"),
    ({"data": [(X, Y)]}, "data must be of type FederatedData, got list"),
    ({"model": fd.models.linear((3,), 2)}, r"labels must be in 0..1 \(the model has 2 outputs\), got 0..2"),
    ({"data": clients((X, Y - 1)), "cohort_size": 1}, "got -1..1"),
    (
        {"data": clients((X, Y.astype(np.float32))), "cohort_size": 1},
        r"integers for the default loss, got float32: pass y.astype\(int\) if .*, or Model\(loss=...\)",
    ),
    ({"model": fd.models.lenet5(3)}, r"does not accept the examples of the data, float32\[3\]"),
    *(
        (
            {"model": embedding(), "data": clients((X.astype(dtype), Y)), "cohort_size": 1},
            rf"does not accept .* {dtype}\[3\] .*: it needs integers: pass ids and tokens as x.astype\(np.int32\)",
        )
        for dtype in ("uint8", "float32", "bool")
    ),
    *(({"local": fd.LocalTraining(optimizer=optimizer)}, message) for optimizer, message in OPTIMIZERS),
    *(
        ({"local": fd.LocalTraining(optimizer=optimizer, direction="descent", lr=1)}, message)
        for optimizer, message in OPTIMIZERS
        if message is FAILS
    ),
    ({"local": fd.LocalTraining(epochs=2**31)}, "fewer than 2\\*\\*31 local steps, got 2147483648"),
    ({"data": clients((X, np.eye(4, dtype=int))), "cohort_size": 1}, r"without the class axis, .*y.argmax"),
    ({"model": regression(lambda z, y: (z[:, None] - y[None]) ** 2)}, r"one number per example, .*, got \[7, 7\]"),
    ({"model": regression(lambda z, y: ((z - y) ** 2).mean())}, r"one number per example, \[7\] for 7 .*, got \[\]"),
    ({"model": regression(lambda z, y: z @ y[:3])}, r"the loss must accept logits \[7\] with labels \[7\], .*fails \("),
    ({"data": clients((X.astype(int) + 2**40, Y)), "cohort_size": 1}, "data must fit in int32"),
    ({"model": fd.Model({"w": X}, lambda w, x: x @ w)}, "Model.init must be a function, got a dict"),
    ({"model": fd.models.linear((3,), 3)._replace(cosine="no")}, "Model.cosine must be True or False, got 'no'"),
    ({"algorithm": fd.algorithms.fedavg()._replace(report=3)}, "Algorithm.report must be a function, got 3"),
    ({"data": with_test(X.astype(float) + 1e300)}, "data must fit in float32, .* got 1e.300..1e.300 in x_test"),
    ({"data": with_test(X, Y + 2**40)}, "data must fit in int32, .* in y_test: number the classes from 0"),
    (
        {
            "model": regression(lambda z, y: (z - y) ** 2),
            "data": clients((X, Y.astype(np.uint32) + 2**31)),
            "cohort_size": 1,
        },
        "data must fit in int32, .* in y: number the classes from 0",
    ),
    ({"data": with_test(X[:1], Y[:1]), "measure": "predictions"}, "needs at least 2 test examples, got 1"),
    ({"data": two_classes(2 * (Y > 0) - 1), "cohort_size": 1}, r"got -1..1: number the classes from 0, as np.unique"),
    ({"data": two_classes(Y > 0), "cohort_size": 1}, r"must be integers for the default loss, got bool: pass y.astype"),
    ({"model": dropped()}, "the model changes its own state, as nnx.Dropout .*: use fd.Model.from_nnx"),
    ({"model": fd.Model(lambda key: {"f": jnp.tanh}, lambda w, x: x)}, "a pytree of arrays only, .*eqx.partition"),
    (
        {"model": fd.Model(lambda key: {"rngs": {"count": jnp.uint32(0)}}, lambda w, x: x)},
        "at .*rngs.*use fd.Model.from_nnx",
    ),
    ({"donate": True, "on_nonfinite": "raise"}, "with donate=True, got"),
    ({"mesh": jax.make_mesh((1,), ("x",))}, 'with the axis "clients"'),
]
COHORTS = [
    (["a"], "no client has the name 'a' .the clients have ids only"),
    ([], "at least 1 integer client id"),
    ([0, 2], r"client ids in 0..1, got 2"),
    ([-1], r"client ids in 0..1, got -1"),
    ([1, 1], "each client at most once, got client 1 2 times"),
    ([0.0], "at least 1 integer client id, got float64"),
    ([[0]], "one-dimensional"),
]


@pytest.mark.parametrize(("make", "message"), DATA)
def test_bad_data(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
POWERS = [
    sign * 2**k + more for k in (0, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64) for sign in (1, -1) for more in (0, 1)
]

FLOATS = [0.5, -0.5, 1.0, -1.0, 255.0, 256.0, 65504.0, 65520.0, 2.0**31, 2.0**63, -(2.0**63), 1e39, np.inf, np.nan]


@pytest.mark.parametrize("dtype", [*INTEGERS, np.float16, np.float32, np.float64, jnp.bfloat16], ids=str)
def test_numbers_are_converted_to_another_dtype_only_if_they_fit(dtype) -> None:
    dtype = np.dtype(dtype)

    def converts(array) -> bool:
        try:
            checks.converted("x", array, dtype, "fix")
        except ValueError as error:
            assert str(error).startswith("x must be ") and str(error).endswith(f"got {array[1]} in row 1: fix")
            return False
        return True

    is_integer = dtype.kind in "iu"
    for kind in INTEGERS:
        for number in POWERS:
            if np.iinfo(kind).min <= number <= np.iinfo(kind).max:
                if is_integer:
                    fits = np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
                else:
                    fits = (
                        abs(number) <= float(jnp.finfo(dtype).max) and int(float(dtype.type(float(number)))) == number
                    )
                assert converts(np.array([0, number], kind)) == fits, (kind, number)
    for number in FLOATS:
        if is_integer:
            fits = np.isfinite(number) and number % 1 == 0 and np.iinfo(dtype).min <= int(number) <= np.iinfo(dtype).max
        else:
            with np.errstate(over="ignore"):
                fits = bool(np.isfinite(np.array(number).astype(dtype)) or not np.isfinite(number))
        assert converts(np.array([0, number])) == fits, number
    assert converts(np.array([True, False])) and checks.converted("x", Y.astype(dtype), dtype, "") is not None


EMPTY = [
    ([], []),
    (np.zeros(0), np.zeros(0)),
    (np.zeros((0, 3)), np.zeros((0, 1), bool)),
    (np.zeros((0, 7), object), np.array([], str)),
    (jnp.zeros((0, 3)), ()),
]


@pytest.mark.parametrize("empty", EMPTY, ids=lambda pair: f"{type(pair[0]).__name__} {np.shape(pair[0])}")
@pytest.mark.parametrize("place", [0, 1])
def test_clients_without_test_examples_have_empty_arrays_of_any_dtype(empty, place) -> None:
    pairs, tests = [(X, Y)] * 3, [(X[:1], Y[:1])] * 2
    tests.insert(place, empty)
    data = fd.FederatedData.from_clients(pairs, test_clients=tests)
    assert data.test_sizes.tolist() == [0 if k == place else 1 for k in range(3)]
    assert (data.x_test.dtype, data.x_test.shape, data.y_test.dtype) == (X.dtype, (2, 3), Y.dtype)
    named = fd.FederatedData.from_clients({k: (X, Y) for k in range(3)}, test_clients=dict(enumerate(tests)))
    assert named.test_sizes.tolist() == data.test_sizes.tolist()
    simulation(data=data).evaluate_clients(simulation(data=data).init(jax.random.key(0)))


@pytest.mark.parametrize(("dtypes", "wanted"), [("i4 u8 i8", "i8"), ("u1 i2", "i2"), ("? u1", "u1"), ("f4 f8", "f8")])
def test_labels_of_several_dtypes_get_an_exact_common_dtype(dtypes, wanted) -> None:
    data = fd.FederatedData.from_clients([(X, np.array([0, 1, 1, 0]).astype(dtype)) for dtype in dtypes.split()])
    assert data.y.dtype == np.dtype(wanted) and data.y.tolist() == [0, 1, 1, 0] * len(dtypes.split())


@pytest.mark.parametrize(("options", "message"), LOCAL)
def test_bad_local_training(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        fd.LocalTraining(**options)


@pytest.mark.parametrize(("options", "message"), SIMULATION)
def test_bad_simulation(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        simulation(**options)


def bce(z, y):
    return optax.sigmoid_binary_cross_entropy(z, y.astype(z.dtype))


def ce(z, y):
    return optax.softmax_cross_entropy_with_integer_labels(z, y)


def one_hot(z, y):
    return jax.nn.one_hot(y, z.shape[-1], dtype=z.dtype)


def one_hot_ce(z, y):
    loss = optax.softmax_cross_entropy(z, one_hot(z, y))
    return loss.mean(axis=tuple(range(1, loss.ndim)))


BINARY, FLOATS, COLUMN = np.array([0, 1, 1, 0]), np.array([0.5, -1, 2, 3], np.float32), (4, 1)
MIXING, OUT_OF_RANGE, OUTSIDE = (
    "must not depend on the other examples of its batch",
    "labels must be in 0..1 for the binary cross",
    "training labels must be in 0..2",
)
LOSSES: list = [  # the loss, the labels, the logits of a batch, the error
    (lambda z, y: (z - y) ** 2, FLOATS, (4,), None),
    (lambda z, y: ((z - y) ** 2).mean(-1), FLOATS, COLUMN, "the loss of an example " + MIXING),
    (lambda z, y: bce(z, y).mean(-1), BINARY, COLUMN, MIXING),
    (lambda z, y: bce(z, y[:, None])[:, 0], BINARY, COLUMN, None),
    (lambda z, y: (z - y) ** 2 / ((z - y) ** 2).sum(), FLOATS, (4,), MIXING),
    (lambda z, y: -jax.nn.log_softmax(z @ z.T).diagonal(), FLOATS, (4, 3), MIXING),
    (bce, BINARY * 2 - 1, (4,), "training " + OUT_OF_RANGE + r"-entropy, got -1..1: number the classes from 0"),
    (lambda z, y: bce(z[:, 0], y), BINARY * 255, COLUMN, OUT_OF_RANGE),
    (bce, (BINARY + 1).astype(np.float32), (4,), OUT_OF_RANGE),
    (lambda z, y: bce(z, y).sum(-1), np.eye(4)[:, :3] * 2 - 1, (4, 3), OUT_OF_RANGE),
    (lambda z, y: bce(z, y).mean(-1), np.eye(4)[:, :3], (4, 3), None),
    (bce, np.array([0.1, 0.9, 0.5, 1.0]), (4,), None),
    (lambda z, y: optax.hinge_loss(z, y.astype(z.dtype)), BINARY * 2 - 1, (4,), None),
    (lambda z, y: z - y * jnp.log(z), FLOATS, (4,), None),  # NaN for the negative ones of the random logits
    (ce, Y, (4, 3), None),
    (ce, Y + 1, (4, 3), r"training labels must be in 0..2 \(the model has 3 outputs\), got 1..3: use a model wi"),
    (ce, Y - 1, (4, 3), r"got -1..1: -1 often means that there is no label: drop these rows, x\[y != -1\] and"),
    (ce, Y - 2, (4, 3), "got -2..0: number the classes from 0"),
    (ce, BINARY * 2 - 1, (4, 3), "got -1..1: number the classes from 0"),
    (lambda z, y: jnp.where(y < 0, 0, ce(z, jnp.maximum(y, 0))), Y - 1, (4, 3), None),  # leaves out the label -1
    (lambda z, y: ce(z, y).astype(jnp.bfloat16), Y, (4, 3), None),
    (one_hot_ce, Y, (4, 3), None),
    (one_hot_ce, np.where(Y == 2, -100, Y), (4, 3), "got -100..1: -100 often means that there is no label"),
    (one_hot_ce, (Y + 1).astype(np.uint8), (4, 3), "got 1..3: use a model with more"),
    (one_hot_ce, (Y - 1).astype(np.float32), (4, 3), OUTSIDE),
    (one_hot_ce, np.stack([Y, Y - 1], 1), (4, 2, 3), "no label: mask them in the loss, as docs/models.md shows"),
    (lambda z, y: optax.softmax_cross_entropy(z, optax.smooth_labels(one_hot(z, y), 0.1)), Y - 1, (4, 3), OUTSIDE),
    (lambda z, y: optax.sigmoid_focal_loss(z, one_hot(z, y)).sum(-1), Y + 1, (4, 3), OUTSIDE),
    (lambda z, y: one_hot_ce(z, y) * jnp.arange(3.0)[y], Y - 1, (4, 3), OUTSIDE),
    (lambda z, y: (1 - jnp.exp(-ce(z, y))) ** 2 * ce(z, y), Y - 1, (4, 3), OUTSIDE),  # -1 is the last class of an index
    (lambda z, y: optax.softmax_cross_entropy(z, jnp.eye(3)[y]), Y * 100, (4, 3), OUTSIDE),  # JAX limits the index
    (lambda z, y: jnp.where(y < 0, 0, one_hot_ce(z, y)), Y - 1, (4, 3), None),
    (lambda z, y: one_hot_ce(z, y) * (y != -100), np.where(Y == 2, -100, Y), (4, 3), None),
    (lambda z, y: ce(z, jnp.clip(y, 0, 2)), Y + 1, (4, 3), None),
    (lambda z, y: bce(z, y[:, None] > jnp.arange(3)).sum(-1), Y + 1, (4, 3), None),  # ordinal regression
    (lambda z, y: (z[:, 0] - y) ** 2, Y - 1, (4, 3), None),
    (lambda z, y: jax.nn.logsumexp(z, -1), Y - 1, (4, 3), None),  # uses no label
]


@jax.numpy_rank_promotion("allow")  # JAX's default; the tests have "raise"
@pytest.mark.parametrize("loss, y, shape, message", LOSSES)
def test_losses_are_tried_with_the_labels(loss, y, shape, message) -> None:
    model = fd.Model(lambda key: jnp.zeros((3, *shape[1:])), lambda w, x: jnp.tensordot(x, w, 1), loss=loss)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        simulation(model=model, data=clients((X, y)), cohort_size=1)


@jax.numpy_rank_promotion("allow")
def test_scores_and_test_labels_are_tried_too() -> None:
    model = fd.Model(lambda key: jnp.zeros((3, 1)), lambda w, x: x @ w, loss=lambda z, y: bce(z[:, 0], y))
    mixed = model._replace(scores=lambda z, y: {"accuracy": ((z > 0) == y).mean(-1)})
    data = fd.FederatedData.from_clients([(X, BINARY)], test=(X, BINARY))
    with pytest.raises(ValueError, match="the score 'accuracy' of an example must not depend on the other examples"):
        simulation(model=mixed, data=data, cohort_size=1)
    data = fd.FederatedData.from_clients([(X, BINARY)], test=(X, BINARY * 2 - 1))
    with pytest.raises(ValueError, match="test labels must be in 0..1 for the binary cross-entropy, got -1..1"):
        simulation(model=model, data=data, cohort_size=1)
    data = fd.FederatedData.from_clients([(X, Y)], test_clients=[(X, Y - 1)])
    with pytest.raises(ValueError, match="test labels must be in 0..2 .*got -1..1: -1 often means that there is no"):
        simulation(model=fd.models.linear((3,), 3)._replace(loss=one_hot_ce), data=data, cohort_size=1)


def test_bad_arguments_of_methods() -> None:
    sim = simulation()
    state = sim.init(jax.random.key(0))
    for cohort, message in COHORTS:
        with pytest.raises(ValueError, match=message):
            sim.round_fn(state, cohort=cohort)
    momentum = simulation(algorithm=fd.algorithms.fedavgm())
    with pytest.raises(
        ValueError, match=r"of another algorithm, model or federation: \.server\.v.* missing instead of"
    ):
        momentum.round_fn(state)
    with pytest.raises(ValueError, match=r"key must be a JAX key such as jax.random.key\(0\), got 0"):
        sim.init(0)
    with pytest.raises(ValueError, match=r"params must be shaped like model.init's: .*float32\[2\] instead of"):
        sim.init(jax.random.key(0), params=jax.tree.map(lambda a: jnp.zeros(2), state.params))
    for rounds in (-1, 2.0):
        with pytest.raises(ValueError, match="rounds must be an integer >= 0"):
            sim.run(state, rounds)
    with pytest.raises(ValueError, match="evaluating needs a test set"):
        simulation(data=federation(test=None)).evaluate(state)
    assert sim.executor.programs.compiled.round._cache_size() == 0  # nothing was compiled


def test_cpu_devices_must_be_set_before_jax_starts() -> None:
    jax.devices()
    with pytest.raises(RuntimeError, match="before JAX starts its backend"):
        fd.use_cpu_devices(3)
    with pytest.raises(ValueError, match="n must be in 1..256, got 0: this process may use"):
        fd.use_cpu_devices(0)


# --- functions that JAX cannot trace ----------------------------------------------------------------------------------

FEDAVG = fd.algorithms.fedavg()


def branching(server, client, work):
    return FEDAVG.client_update(server, client, work) if work.lr > 0 else None


def with_numpy(server, mean, context):
    return FEDAVG.server_update(server, mean, context) if np.linalg.norm(jax.tree.leaves(mean)[0]) else server


def first_of(state, key, t, K, clients):
    return jnp.arange(K)[: int(t) + K], None


def updated_by(change):
    """FedAvg whose clients send ``change(D, server)`` instead of their update D."""

    def client_update(server, client, work):
        result = FEDAVG.client_update(server, client, work)
        return result._replace(message=change(result.message, server))

    return FEDAVG._replace(client_update=client_update)


KEPT: list = []
LINEAR, BOOL, NUMPY = fd.models.linear((3,), 3), "need a value: use jnp.where", "use jnp.mean instead of np.mean"
RULE = fd.participation.Participation(init=lambda key, clients: (), select=first_of, name="first", distinct=True)
UNTRACEABLE = {
    "apply, if": ({"model": LINEAR._replace(apply=lambda p, x: x if x.sum() > 0 else -x)}, BOOL),
    "loss, numpy": ({"model": LINEAR._replace(loss=lambda z, y: np.log(z).sum(-1))}, NUMPY),
    "shift, if": ({"data": federation().shifted(lambda key, t, client, x, y: (x, y) if client else (-x, y))}, BOOL),
    "client_update, if": ({"algorithm": FEDAVG._replace(client_update=branching)}, BOOL),
    "server_update, numpy": ({"algorithm": FEDAVG._replace(server_update=with_numpy)}, NUMPY),
    "select, int": ({"participation": RULE}, "need a value: compute with the array"),
    "a method of PyTorch": (
        {"algorithm": updated_by(lambda D, server: jax.tree.map(lambda a: a.mul_(2), D))},
        "not those of PyTorch",
    ),
    "an element": ({"model": LINEAR._replace(loss=lambda z, y: z.__setitem__(0, 1.0))}, "x.at[i].set(value)"),
    "a variable": ({"algorithm": updated_by(lambda D, server: KEPT.append(D) or KEPT[0])}, "has left its function"),
    "a field": ({"algorithm": updated_by(lambda D, server: setattr(server, "params", D))}, "return server._replace"),
    "dicts": ({"algorithm": updated_by(lambda D, server: D - server.params)}, "jax.tree.map(jnp.subtract, a, b)"),
    "a format": ({"algorithm": updated_by(lambda D, server: f"{jax.tree.leaves(D)[0]:.2f}")}, "jax.debug.print"),
}


@pytest.mark.parametrize(("options", "note"), UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_a_note_says_what_to_write_instead_of_what_jax_cannot_trace(options, note) -> None:
    def use() -> None:
        sim = simulation(**options)
        sim.run(sim.init(jax.random.key(0)), 1, progress=False)

    with pytest.raises((checks.ConfigurationError, *retries.UNTRACEABLE, AttributeError, TypeError)) as error:
        use()
    (added,) = (each for each in error.value.__notes__ if "fedjax_drift" in each)
    assert note in added and "Functions that JAX cannot trace" in added
    assert "input_shape" not in str(error.value), "a wrong hint"


def test_a_schedule_gets_the_note_where_it_is_written() -> None:
    with pytest.raises(checks.ConfigurationError, match="lr must be") as error:
        fd.LocalTraining(lr=lambda t: 0.1 if t < 5 else 0.01)
    assert any("jnp.where" in note for note in error.value.__notes__)


def test_a_note_says_what_the_server_received() -> None:
    sim = simulation(algorithm=updated_by(lambda D, server: (D, 1.0)))
    with pytest.raises(ValueError, match="structure") as error:
        sim.round_fn(sim.init(jax.random.key(0)))
    assert any("received this mean of the messages: ({" in note for note in error.value.__notes__)
