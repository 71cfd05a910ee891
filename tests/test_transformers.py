"""Tests of the transformers: structure, masks, precision, operations under vmap, and training."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_drift as fd
from fedjax_drift.models import num_parameters

pytestmark = pytest.mark.thorough

KEY = jax.random.key(0)
SMALL = {"width": 16, "depth": 3, "heads": 2}
IMAGES = jax.random.normal(KEY, (3, 8, 8, 1))
TOKENS = jax.random.randint(KEY, (3, 12), 1, 9)
MAKE = {
    "vit": lambda **options: (fd.models.vit(5, (8, 8, 1), 4, **SMALL, **options), IMAGES),
    "encoder": lambda **options: (fd.models.encoder(5, 9, 12, **SMALL, **options), TOKENS),
    "bert": lambda **options: (fd.models.encoder(5, 9, 12, bert=True, **SMALL, **options), TOKENS),
    "decoder": lambda **options: (fd.models.decoder(9, 12, **SMALL, **options), TOKENS),
}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def test_blocks_are_stacked_and_have_different_initial_values(make) -> None:
    model, _ = make()
    blocks = model.init(KEY)["blocks"]
    assert blocks["attention"]["query"]["kernel"].shape == (3, 16, 16)
    assert blocks["mlp"]["up"]["kernel"].shape == (3, 16, 64) and blocks["mlp"]["down"]["bias"].shape == (3, 16)
    first, second, _ = blocks["attention"]["query"]["kernel"]
    assert not np.allclose(first, second) and not np.allclose(first, blocks["attention"]["key"]["kernel"][0])


def test_deeper_networks_compile_to_programs_of_the_same_size() -> None:
    def lines(depth: int) -> int:
        model = fd.models.decoder(9, 12, 16, depth, 2)
        params = jax.eval_shape(model.init, KEY)
        return jax.jit(jax.grad(lambda p: model.apply(p, TOKENS).sum())).lower(params).as_text().count("\n")

    assert lines(2) == lines(7)


def test_remat_and_lanes_give_the_same_gradients(make) -> None:
    model, x = make()
    params = jax.vmap(model.init)(jax.random.split(KEY, 2))

    def gradient(model):
        return jax.grad(lambda p: jnp.square(model.apply(p, x)).sum())

    both = jax.jit(jax.vmap(gradient(model)))(params)
    for lane in range(2):
        alone = jax.jit(gradient(make(remat=True)[0]))(jax.tree.map(lambda leaf, i=lane: leaf[i], params))
        jax.tree.map(lambda a, b, i=lane: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4), both, alone)


def test_only_embeddings_use_gather_and_scatter(make) -> None:
    model, x = make()
    params = jax.vmap(model.init)(jax.random.split(KEY, 2))
    gradients = jax.vmap(jax.grad(lambda p: jnp.square(model.apply(p, x)).sum()))
    text = jax.jit(gradients).lower(params).as_text()
    used = [len(re.findall(rf'"stablehlo.{name}"\(', text)) for name in ("gather", "scatter")]
    assert used == ([0, 0] if x.ndim == 4 else [1, 1])


def test_reductions_are_in_float32_if_the_rest_is_in_bfloat16(make) -> None:
    model, x = make()
    params = model.init(KEY)
    half = model.computing_in(jnp.bfloat16)
    text = str(jax.make_jaxpr(half.apply)(params, x))
    reduced = re.findall(r":(\w+)\[[^\]]*\] = (?:reduce_sum|reduce_max|exp|rsqrt)\[", text)
    assert reduced and set(reduced) <= {"f32", "i32"}
    assert re.search(r":bf16\[3,\d+,16\] = dot_general", text)
    logits = model.apply(params, x)
    np.testing.assert_allclose(half.apply(params, x), logits, atol=0.05 * float(abs(logits).max()))


def test_dropout_is_used_in_training_only_and_depends_on_the_key(make) -> None:
    assert make()[0].train_apply is None
    model, x = make(dropout=0.5)
    params = model.init(KEY)
    np.testing.assert_array_equal(model.apply(params, x), model.apply(params, x))
    one, other = (model.train_apply(params, x, jax.random.key(k)) for k in (0, 1))
    assert not np.allclose(one, other)


@pytest.mark.parametrize("bert", [False, True])
def test_padding_does_not_change_the_output(bert) -> None:
    model = fd.models.encoder(5, 9, 12, **SMALL, bert=bert)
    params = model.init(KEY)
    longer, shorter = TOKENS.at[:, 7:].set(0), TOKENS[:, :7]
    np.testing.assert_allclose(model.apply(params, longer), model.apply(params, shorter), rtol=1e-4, atol=1e-5)
    assert not np.allclose(model.apply(params, TOKENS), model.apply(params, longer), atol=1e-3)
    assert jnp.isfinite(model.apply(params, jnp.zeros_like(TOKENS))).all()


def test_the_decoder_does_not_see_later_tokens() -> None:
    model, _ = MAKE["decoder"]()
    params = model.init(KEY)
    one, other = (model.apply(params, tokens) for tokens in (TOKENS, TOKENS.at[:, 7:].set(1)))
    np.testing.assert_allclose(one[:, :7], other[:, :7], rtol=1e-4, atol=1e-6)
    assert not np.allclose(one[:, 7:], other[:, 7:], atol=1e-3)


def test_patches_are_squares() -> None:
    """The output does not change if two patches and their position embeddings are exchanged."""
    model, x = MAKE["vit"]()
    params = model.init(KEY)
    swapped = x.at[:, :4, :4].set(x[:, 4:, :4]).at[:, 4:, :4].set(x[:, :4, :4])
    positions = params["positions"][jnp.array([0, 3, 2, 1, 4])]
    np.testing.assert_allclose(
        model.apply(params | {"positions": positions}, swapped), model.apply(params, x), rtol=1e-4, atol=1e-5
    )
    assert not np.allclose(model.apply(params, swapped), model.apply(params, x), atol=1e-3)


def test_classifiers_have_features_and_cosines() -> None:
    for name in ("vit", "encoder", "bert"):
        for cosine in (False, True):
            model, x = MAKE[name](cosine=cosine)
            params = model.init(KEY)
            logits = model.head(params, model.features(params, x))
            np.testing.assert_allclose(logits, model.apply(params, x), rtol=1e-5)
            assert model.cosine is cosine and (not cosine or abs(logits).max() <= 1.0001)


def test_parameter_counts_of_variants() -> None:
    assert num_parameters(fd.models.vit(depth=12)) == 5_362_762
    assert num_parameters(fd.models.vit(input_shape=(28, 28, 1), patch=7)) == 2_684_554


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fd.models.vit(patch=5), "patch must divide .* got 5 for 32x32: use patch=32, or a divisor"),
        (lambda: fd.models.vit(input_shape=(28, 28)), "input_shape must be a tuple of integers"),
        (lambda: fd.models.decoder(width=30), "heads must divide width, got 4 for width=30"),
        (lambda: fd.models.encoder(dropout=1), "dropout must be in .0, 1., got 1"),
    ],
)
def test_wrong_options_are_refused(call, said) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_vit_trains_with_moon_and_the_decoder_with_fedavg() -> None:
    rng = np.random.default_rng(0)
    images = fd.FederatedData.from_clients([(rng.normal(size=(6, 8, 8, 1)).astype("f4"), np.arange(6) % 5)] * 2)
    sim = fd.Simulation(MAKE["vit"]()[0], images, fd.algorithms.moon(), cohort_size=2)
    _, history = sim.run(sim.init(KEY), 1, eval_every=0, progress=False)
    assert np.isfinite(history[0]["train_loss"])

    data = fd.datasets.load("dialogue", num_clients=4, num_rows=40, length=16)
    local = fd.LocalTraining(epochs=2, batch_size=6, optimizer=optax.scale_by_adam(), lr=1e-2)
    sim = fd.Simulation(fd.models.decoder(length=16, **SMALL), data, fd.algorithms.fedavg(), local=local, cohort_size=4)
    _, history = sim.run(sim.init(KEY), 3, eval_every=0, progress=False)
    assert history[-1]["train_loss"] < 2.7 < 3 < history[0]["train_loss"]
