"""Tests that the padding of a short batch takes no part, also if a model or a loss mixes the examples of a batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from small import thorough

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.model import cross_entropy
from fedjax_drift.models import MODELS
from fedjax_drift.round import phase
from fedjax_drift.simulation import mixing
from fedjax_drift.types import Batch, Work

FEATURES, CLASSES, SIZES, B = 5, 3, (5, 6, 7, 3), 4  # last batches of 1, 2, 3 and 3 examples
LOCAL = fd.LocalTraining(epochs=1, batch_size=B, lr=0.3)
close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)


def clients(dtype: Any = np.float32) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, FEATURES)).astype(dtype), rng.integers(0, CLASSES, n)) for n in SIZES]


def simulate(model: fd.Model, algorithm: fd.Algorithm | None = None, dtype: Any = np.float32) -> fd.Simulation:
    data = fd.FederatedData.from_clients(clients(dtype), test=clients(dtype)[2])
    return fd.Simulation(
        model, data, algorithm or fd.algorithms.fedavg(), local=LOCAL, cohort_size=3, lanes=1,
        mesh=fd.clients_mesh(jax.devices()[:1]),
    )  # fmt: skip


# --- refused ----------------------------------------------------------------------------------------------------------


def init(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (FEATURES, CLASSES))


def linear(w, x):
    return x @ w


def paired(w, x, key):
    return (x + x[jax.random.permutation(key, len(x))]) @ w / 2


class OwnBatchNorm(nn.Module):
    """Normalises with the batch twice: once with flax, which leaves out padding, and once by hand."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(CLASSES)(x - x.mean(0, keepdims=True) if train else x)


class Maximum(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.a(x / jnp.abs(x).max())


MIXING = {
    "apply": lambda: fd.Model(init, lambda w, x: (x - x.mean(0, keepdims=True)) @ w),
    "apply, a softmax": lambda: fd.Model(init, lambda w, x: jax.nn.softmax(x @ w, axis=0)),
    "apply, a batch normalisation": lambda: fd.Model(init, lambda w, x: jax.nn.standardize(x @ w, axis=0)),
    "apply, attention": lambda: fd.Model(init, lambda w, x: jax.nn.softmax(x @ x.T) @ x @ w),
    "apply, a matrix of means": lambda: fd.Model(init, lambda w, x: jnp.full((len(x), len(x)), 1 / len(x)) @ x @ w),
    "apply, a wrong reshape": lambda: fd.Model(init, lambda w, x: x.T.reshape(-1).reshape(x.shape) @ w),
    "apply, of nnx": lambda: fd.Model.from_nnx(Maximum),
    "apply, cast": lambda: fd.Model(init, lambda w, x: (x - x[::-1]) @ w).computing_in(jnp.bfloat16),
    "train_apply": lambda: fd.Model(init, linear, train_apply=paired),
    "apply in training mode": lambda: fd.Model.from_linen(OwnBatchNorm(), (FEATURES,), statistics="average"),
    "features": lambda: fd.Model(init, linear, features=lambda w, x: x - jnp.roll(x, 1, 0)),
    "extractor": lambda: fd.Model(init, linear, extractor=lambda w, x: jnp.sort(x, 0)),
    "head": lambda: fd.Model(init, linear, features=lambda w, x: x, head=lambda w, z: z @ w - z.sum()),
    "apply, which ignores its mask": lambda: fd.Model(init, lambda w, x, mask: (x - x.mean(0, keepdims=True)) @ w),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_examples_is_refused(name) -> None:
    who = "padding" if "mask" in name else "other examples"
    with pytest.raises(ConfigurationError, match=f"Model.{name.partition(',')[0]} of an example .*{who} .*mask"):
        simulate(MIXING[name]())


def test_a_loss_that_uses_the_padding_is_refused() -> None:
    for loss, message in (
        (lambda z, y: z.sum(1) - z.mean(), "other examples .*mask"),
        (lambda z, y, mask: z.sum(1) - z.mean(), "padding .*mask"),
    ):
        with pytest.raises(ConfigurationError, match=f"the loss of an example must not depend on the {message}"):
            simulate(fd.Model(init, linear, loss=loss))
    simulate(fd.Model(init, linear, loss=lambda z, y, mask: z.sum(1) - jnp.mean(z.sum(1), where=mask)))
    with pytest.raises(ConfigurationError, match="mask must be that of the batch .*got None"):
        fd.Model(init, lambda w, x, mask: x @ w).with_mask(None)


SHAPES = {
    "linear": (30,), "text_classifier": (9,), "encoder": (64,), "decoder": (64,), "din": (54,), "drug_target": (1100,),
    **dict.fromkeys(("cifar_cnn", "fedadc_cnn", "simple_cnn", "resnet18", "vit"), (32, 32, 3)),
}  # fmt: skip
CHANGES = {
    "as it is": lambda model: model,
    "bfloat16": lambda model: model.computing_in(jnp.bfloat16),
    "lora": lambda model: fd.models.lora(model, 1, where=r"kernel|table|/w"),
}


def example_of(name: str) -> jax.ShapeDtypeStruct:
    ids = name in ("text_classifier", "encoder", "decoder", "din", "drug_target")
    return jax.ShapeDtypeStruct((mixing.B, *SHAPES.get(name, (28, 28, 1))), jnp.int32 if ids else jnp.float32)


@pytest.mark.parametrize("change", ["as it is", thorough("bfloat16"), thorough("lora")])
@pytest.mark.parametrize("name", [each if each != "resnet18" else thorough(each) for each in MODELS])
def test_no_model_of_the_library_has_to_be_computed_for_the_check(name, change) -> None:
    model = CHANGES[change](MODELS[name]())
    leaves, structure = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    form, _ = fd.recipes.split(fd.recipes.without_arrays(model))
    assert mixing._unclear(form, structure, tuple(leaves), example_of(name)) == ()


def test_a_model_that_loops_over_its_examples_is_accepted() -> None:
    for apply in (
        lambda w, x: jax.lax.map(lambda row: row @ w, x),  # this one is computed
        lambda w, x: jax.vmap(lambda row: row @ w)(x),
        lambda w, x: (x.mean(0), x @ w)[1],
        lambda w, x: jax.lax.scan(lambda h, e: (jnp.tanh(h + e[:, None]), None), x @ w, x.T)[0],
        lambda w, x: jnp.take_along_axis(x, x[:, :CLASSES].argsort(1), 1) @ w[:CLASSES],
    ):
        simulate(fd.Model(init, apply))


# --- with a mask ------------------------------------------------------------------------------------------------------


def mean(h: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[:, None], h, 0).sum(0, keepdims=True) / mask.sum()


def centred(h: jax.Array, mask: jax.Array) -> jax.Array:
    return h - mean(h, mask)


def features(params, x, mask):
    return jnp.tanh(centred(x @ params["a"], mask) @ params["b"])


def apply(params, x, mask):
    return centred(features(params, x, mask), mask) @ params["c"]


def spread(z, y, mask):
    """Cross-entropy, with logits that repel each other."""
    gaps = ((z[:, None] - z[None]) ** 2).sum(-1)
    return cross_entropy(z, y) + jnp.where(mask[None], jnp.exp(-gaps), 0).sum(1) / mask.sum()


def initial(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {"a": (FEATURES, 4), "b": (4, 4), "c": (4, CLASSES)}
    return {name: jax.random.normal(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(shapes.items())}


COUPLED = fd.Model(
    initial,
    apply,
    features=features,
    extractor=lambda params, x, mask: centred(x @ params["a"], mask),
    head=lambda params, z, mask: centred(z, mask) @ params["c"],
    cosine=True,
)
WITH_LOSS = COUPLED._replace(loss=spread)


def without_padding(monkeypatch) -> set[int]:
    """Batches get the shape [n, ...] of their n examples. Loops must then be loops of Python (`jax.disable_jit`).

    Returns the sizes n of the batches, which is filled while clients train.
    """
    padded, sizes = phase.client_work, set()

    def client_work(*arguments: Any) -> Work:
        work = padded(*arguments)

        def epoch(key: jax.Array) -> Any:
            batch = work.epoch(key)
            return lambda k: real(batch(k))

        return work._replace(epoch=epoch)

    def real(batch: Batch) -> Batch:
        if isinstance(batch.mask, jax.core.Tracer):  # only shapes are needed
            return batch
        sizes.add(int(batch.mask.sum()))
        return jax.tree.map(lambda a: a[batch.mask], batch)

    monkeypatch.setattr(phase, "client_work", client_work)
    return sizes


A = fd.algorithms
CASES = {
    "moon": (WITH_LOSS, A.moon()),
    "moon, one pass": (COUPLED, A.moon()),
    "feddecorr": (WITH_LOSS, A.feddecorr()),
    "constrained, feature": (WITH_LOSS, A.constrained(0.1, "feature")),
    "constrained, classifier": (WITH_LOSS, A.constrained(0.1, "feature", "classifier")),
    "constrained, extractor": (WITH_LOSS, A.constrained(0.1, "parameter", "extractor")),
    "lfd": (COUPLED, A.lfd()),
    "fedavg": (WITH_LOSS, A.fedavg()),
    "fedntd": (COUPLED, A.fedntd()),
    "fedsol": (COUPLED, A.fedsol()),
    "fedgmt": (COUPLED, A.fedgmt()),
    "fedlc": (COUPLED, A.fedlc()),
    "fedlesam": (WITH_LOSS, A.fedlesam()),
    "agnostic": (COUPLED, A.agnostic(CLASSES)),
    "qfedavg": (WITH_LOSS, A.qfedavg(2.0)),
    "ifca": (WITH_LOSS, A.ifca(2)),
    "scaffold, full gradients": (WITH_LOSS, A.scaffold(option="I")),
    "mime": (WITH_LOSS, A.mime()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_round_equals_a_loop_over_unpadded_batches(name, monkeypatch) -> None:
    def after_two_rounds() -> Any:
        sim = simulate(*CASES[name], np.float64)
        state = sim.init(jax.random.key(0), jax.tree.map(lambda a: a.astype(float), initial(jax.random.key(0))))
        for cohort in ([0, 1, 2], [2, 0, 3]):  # clients that take part again have a previous model
            state, _ = sim.round_fn(state, cohort)
        return state.server, state.clients

    with jax.enable_x64(True):
        result = after_two_rounds()
        sizes = without_padding(monkeypatch)
        with jax.disable_jit():
            jax.tree.map(close, result, after_two_rounds())
    assert {*range(1, LOCAL.batch_size + 1)} == sizes  # otherwise padded batches were compared with themselves


@pytest.mark.thorough
def test_the_pseudo_data_of_fedreg_are_free_of_padding() -> None:
    """A client of 3 examples has batches of 3 examples, or of 3 and a padding if there is a larger client."""
    models = []
    with jax.enable_x64(True):
        (x, y), other = clients(float)[3], clients(float)[2]
        for m in (2, 7):
            data = fd.FederatedData.from_clients([(x, y), (other[0][:m], other[1][:m])])
            sim = fd.Simulation(COUPLED, data, A.fedreg(), local=LOCAL, cohort_size=1)
            start = jax.tree.map(lambda a: a.astype(float), initial(jax.random.key(0)))
            models.append(sim.round_fn(sim.init(jax.random.key(0), start), [0])[0].params)
    jax.tree.map(close, *models)


class Linen(nn.Module):
    """`COUPLED`, of linen."""

    def setup(self):
        self.a, self.b, self.c = (nn.Dense(n, use_bias=False) for n in (4, 4, CLASSES))

    def features(self, x, mask):
        return nn.tanh(self.b(centred(self.a(x), mask)))

    def __call__(self, x, mask, train: bool = False):
        return self.c(centred(self.features(x, mask), mask))


class Nnx(nnx.Module):
    """`COUPLED`, of nnx."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = (FEATURES, 4), (4, 4), (4, CLASSES)
        self.a, self.b, self.c = (nnx.Linear(*each, use_bias=False, rngs=rngs) for each in sizes)

    def features(self, x, mask):
        return nnx.tanh(self.b(centred(self.a(x), mask)))

    def __call__(self, x, mask):
        return self.c(centred(self.features(x, mask), mask))


def adapted(model: fd.Model) -> fd.Model:
    return fd.models.trainable(model.computing_in(jnp.float32), lambda path: True)


@pytest.mark.parametrize("change", [lambda model: model, adapted], ids=["as it is", "in float32, and adapted"])
@pytest.mark.parametrize("make", [partial(fd.Model.from_linen, Linen()), partial(fd.Model.from_nnx, Nnx)])
def test_a_flax_module_gets_the_mask(make, change) -> None:
    model = change(make((FEATURES,)))
    x, mask = jnp.asarray(clients()[0][0]), jnp.arange(5) < 3
    params = model.init(jax.random.key(0))
    a, b, c = jax.tree.leaves(params)
    named = {"a": a, "b": b, "c": c}
    masked, plain = model.with_mask(mask), COUPLED.with_mask(mask)
    np.testing.assert_allclose(masked.apply(params, x), plain.apply(named, x), atol=1e-6)
    np.testing.assert_allclose(masked.features(params, x), plain.features(named, x), atol=1e-6)
    if model.train_apply is not None:
        np.testing.assert_array_equal(masked.train_apply(params, x, jax.random.key(0)), masked.apply(params, x))
    simulate(model, A.moon())  # accepted


def test_an_optional_mask_of_a_module_keeps_its_default() -> None:
    class Attending(nn.Module):
        @nn.compact
        def __call__(self, x, mask=None):
            assert mask is None
            return nn.Dense(CLASSES)(x)

    model = fd.Model.from_linen(Attending(), (FEATURES,))
    assert model.with_mask(None) is model
    simulate(model)


@pytest.mark.thorough
def test_scores_leave_out_the_padding() -> None:
    """7 test examples in batches of 4 and 3, and those of the clients in batches of 4 and less."""
    start = initial(jax.random.key(0))

    def loss(x: np.ndarray, y: np.ndarray) -> float:
        total = 0.0
        for i in range(0, len(x), B):
            rows = slice(i, i + B)
            model = WITH_LOSS.with_mask(jnp.ones(len(x[rows]), bool))
            total += float(model.loss(model.apply(start, jnp.asarray(x[rows])), jnp.asarray(y[rows])).sum())
        return total / len(x)

    options: dict[str, Any] = {"cohort_size": 2, "eval_batch_size": B, "mesh": fd.clients_mesh(jax.devices()[:1])}
    data = fd.FederatedData.from_clients(clients(), test=clients()[2])
    sim = fd.Simulation(WITH_LOSS, data, A.fedavg(), **options)
    assert sim.evaluate(sim.init(jax.random.key(0), start))["loss"] == pytest.approx(loss(*clients()[2]), rel=1e-5)
    data = fd.FederatedData.from_clients(clients(), test_clients=clients())
    personal = A.fedavg()._replace(personal=lambda server, client, work: server.params)
    sim = fd.Simulation(WITH_LOSS, data, personal, **options)
    scores = sim.evaluate_clients(sim.init(jax.random.key(0), start))["personal_loss"]
    np.testing.assert_allclose(scores, [loss(*each) for each in clients()], rtol=1e-5)


# --- every model ------------------------------------------------------------------------------------------------------


def work_of(model: fd.Model, statistics: Any = None) -> Work:
    required = Work._fields[: -len(Work._field_defaults)]
    return Work(**dict.fromkeys(required) | {"model": model, "statistics": statistics})  # type: ignore[arg-type]


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x))
        return nn.Dense(CLASSES)(nn.relu(x).mean((1, 2)))


class NormalisedNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a, self.norm = nnx.Linear(28, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.c = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.c(nnx.relu(self.norm(self.a(x[..., 0]))).mean(1))


OF_BATCH_NORM = {
    f"{kind.__name__}, {kept}": partial(make, statistics=kept)
    for kind, make in (
        (Normalised, partial(fd.Model.from_linen, Normalised(), (28, 28, 1))),
        (NormalisedNnx, partial(fd.Model.from_nnx, NormalisedNnx, (28, 28, 1))),
    )
    for kept in ("average", "frozen")
}
NOT_IN_FLOAT64 = {"drug_target", "resnet18"}  # their layers have parameters of two dtypes under jax_enable_x64
EVERY = {name: make for name, make in {**MODELS, **OF_BATCH_NORM}.items() if name not in NOT_IN_FLOAT64}


@pytest.mark.parametrize("name", ["linear", *(thorough(name) for name in EVERY if name != "linear")])
def test_the_gradient_of_a_padded_batch_is_that_of_its_examples(name) -> None:
    """Last batches of 1 to B - 1 examples, in float64. Dropout is off, because its mask has the shape of the batch."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        model = EVERY[name]()._replace(train_apply=None)
        params = jax.tree.map(lambda a: a.astype(float), model.init(jax.random.key(0)))
        statistics = None if model.statistics is None else params["batch_stats"]
        theta = params if statistics is None else params["params"]
        work, example = work_of(model, statistics), example_of(name)
        wide = (B, *example.shape[1:])
        integers = jnp.issubdtype(example.dtype, jnp.integer)
        x = jnp.asarray(rng.integers(0, 3, wide, dtype=np.int32) if integers else rng.normal(size=wide))
        y = jnp.asarray(rng.integers(0, 2, (B, *jax.eval_shape(model.apply, params, x).shape[1:-1])))
        gradient = jax.jit(jax.value_and_grad(lambda theta, batch: work.loss(theta, batch, jax.random.key(0))))
        for n in range(1, B):
            padded, unpadded = Batch(x, y, jnp.arange(B) < n), Batch(x[:n], y[:n], jnp.ones(n, bool))
            jax.tree.map(close, gradient(theta, padded), gradient(theta, unpadded))


# --- the example of the page ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_contrastive_loss_of_the_page_equals_a_loop_over_unpadded_batches() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    (source,) = [block.partition("```")[0] for block in page.split("```python\n") if "def contrastive" in block]
    names: dict[str, Any] = {"np": np, "jax": jax, "jnp": jnp, "fd": fd, "optax": optax}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        exec(source, names)
        model, rng = names["model"], np.random.default_rng(1)
        params = jax.tree.map(lambda a: a.astype(float), model.init(jax.random.key(0)))
        x, y = rng.normal(size=(B, params["a"].shape[0])), rng.integers(0, 2, B)
        work = work_of(model)

        def by_loop(params: Any, n: int) -> Any:
            """The mean over the examples, each compared with the others one by one."""
            h = jnp.tanh(x[:n] @ params["a"])
            z = (h - h.mean(0)) @ params["b"]
            unit = [row / jnp.linalg.norm(row) for row in z]
            total = cross_entropy(z, y[:n]).sum()
            for i in range(n):
                others = [j for j in range(n) if j != i]
                alike = [j for j in others if y[j] == y[i]]
                if alike:
                    cosines = jnp.stack([unit[i] @ unit[j] / 0.5 for j in others])
                    log_p = cosines - jax.nn.logsumexp(cosines)
                    total -= 0.1 * sum(log_p[others.index(j)] for j in alike) / len(alike)
            return total / n

        for n in range(2, B):  # the centred output of a batch of one example is 0, which has no direction
            batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.arange(B) < n)
            ours = jax.value_and_grad(work.loss)(params, batch, jax.random.key(0))
            jax.tree.map(close, ours, jax.value_and_grad(by_loop)(params, n))
