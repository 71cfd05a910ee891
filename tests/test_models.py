"""Tests of the layers against `lax.conv` and flax, of the parameter counts of the papers, and of flax modules."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fedjax_drift as fd
from fedjax_drift import adapters
from fedjax_drift.convolution import conv, winograd
from fedjax_drift.models import MODELS, layers, num_parameters

pytestmark = pytest.mark.thorough

COUNTS = [  # a model, and the number of its parameters
    *[("linear", 155), ("mnist_2nn", 199_210), ("emnist_nn", 89_610), ("cifar_cnn", 797_962), ("mnist_cnn", 1_663_370)],
    *[("lenet5", 66_126), ("simple_fl_lenet", 31_972), ("fedadc_cnn", 2_328_746), ("emnist_cnn", 1_206_590)],
    *[("simple_cnn", 92_626), ("resnet18", 11_173_962), ("din", 205_398), ("text_classifier", 1_305_988)],
    *[("drug_target", 214_146), ("vit", 2_693_578), ("encoder", 2_965_508), ("decoder", 805_120)],
    ("text_classifier", 1_305_984, dict(cosine=True)),
    ("drug_target", 214_144, dict(cosine=True)),
    ("cifar_cnn", 815_332, dict(num_classes=100)),
    ("mnist_cnn", 582_026, dict(padding="VALID")),
    ("resnet18", 11_220_132, dict(num_classes=100)),
    ("resnet18", 11_181_642, dict(num_classes=10, input_shape=(64, 64, 3), stem=7)),
    ("resnet18", 11_279_112, dict(num_classes=200, input_shape=(64, 64, 3), stem=7)),
    ("simple_cnn", 115_756, dict(num_classes=100)),
    ("simple_cnn", 62_006, dict(projection=False)),
    ("simple_cnn", 92_616, dict(cosine=True)),
]


@pytest.mark.parametrize("row", COUNTS, ids=str)
def test_parameter_counts(row) -> None:
    name, count, options = (*row, {})[:3]
    assert num_parameters(MODELS[name](**options)) == count


def test_every_model_has_a_count() -> None:
    assert {*MODELS} == {row[0] for row in COUNTS}


@pytest.fixture(params=list(conv.FORMS))
def form(request, monkeypatch) -> str:
    """Runs a test with the convolution of each platform in turn, always on a CPU."""
    monkeypatch.setattr(conv, "FORMS", {"default": conv.FORMS[request.param]})
    return request.param


def reference_conv(x, kernel, stride, padding):
    padding = [padding, padding] if isinstance(padding, tuple) else padding
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
    )


def own_conv(x, kernel, stride, padding):
    return layers.conv(layers.to_grid(x), kernel, stride, padding).transpose(3, 1, 2, 0)


def value_and_grads(conv, x, kernels, axes=(None, 0)):
    """Every client has its own filters."""

    def summed(x, kernels):
        each = jax.vmap(conv, axes)(x, kernels)
        return (each * jnp.cos(jnp.arange(each.size).reshape(each.shape))).sum(), each

    return jax.jit(jax.grad(summed, argnums=(0, 1), has_aux=True))(x, kernels)


def assert_close(ours, theirs, rtol=1e-4, atol=1e-4) -> None:
    """atol: relative to the largest number."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * float(np.abs(b).max()))


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("padding", ["SAME", "VALID", (2, 1)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("size", "window"), [((7, 9), 3), ((8, 5), 5), ((6, 6), 1)])
def test_conv_matches_lax_conv(size, window, stride, padding) -> None:
    x, kernels = drawn((4, *size, 3), (2, window, window, 3, 5))
    convs = (lambda x, k, conv=conv: conv(x, k, stride, padding) for conv in (own_conv, reference_conv))
    assert_close(*(value_and_grads(each, x, kernels) for each in convs))


@pytest.mark.parametrize(("stride", "padding"), [(1, "VALID"), (2, "SAME")])
def test_every_form_of_conv_of_a_sequence_matches_a_one_dimensional_convolution(stride, padding, form) -> None:
    x, kernels = drawn((2, 4, 11, 3), (2, 4, 3, 5))  # two clients, four sequences of length 11

    def own(x, kernel):
        y = layers.conv(x.transpose(2, 1, 0)[:, :, None], kernel[:, None], stride, padding)
        return y[:, :, 0].transpose(2, 1, 0)

    def reference(x, kernel):
        axes = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(x, kernel, (stride,), padding, dimension_numbers=axes, precision="highest")

    assert_close(*(value_and_grads(each, x, kernels, (0, 0)) for each in (own, reference)))


@pytest.mark.parametrize("filters", [3, 20])
def test_equal_maxima_share_the_gradient_of_pooling(filters) -> None:
    kernel = jnp.ones((1, 1, 1, filters))
    g = jax.grad(lambda x: layers.conv(x, kernel, pool=2).sum())(jnp.ones((1, 4, 4, 2)))
    np.testing.assert_allclose(g, filters / 4)


@pytest.mark.parametrize(
    ("channels", "filters", "size", "window", "stride", "pool"),
    [
        (1, 6, (7, 8), 3, 1, 2),  # on a CPU: one patch for four windows
        (1, 6, (9, 12), 5, 1, 2),
        (20, 3, (5, 4), 1, 1, 1),  # on a CPU: matrix product
        (3, 5, (8, 9), 3, 1, 3),  # on a CPU: matrix product, then pooling
        (3, 20, (6, 5), 3, 2, 1),  # on a CPU: matrix product with a stride
        (3, 20, (6, 5), 3, 1, 2),  # on a CPU: XLA's convolution, then pooling
        (20, 3, (42, 41), 3, 1, 1),  # on a CPU: XLA's convolution in two chunks
        (64, 65, (13, 12), 3, 1, 1),  # on a CPU: Winograd's algorithm
        (64, 65, (5, 4), 3, 1, 1),  # on a CPU: matrix product of few patches
    ],
)
def test_values_and_derivatives_of_every_form_of_conv_match_lax_conv(
    channels, filters, size, window, stride, pool, form
) -> None:
    """The derivatives of both modes, once and twice."""
    x, kernels, dx, dkernels = drawn(*((4, *size, channels), (2, window, window, channels, filters)) * 2)
    arrays = x / window, kernels / window, dx / window, dkernels / window

    def own(x, kernel):
        return layers.conv(layers.to_grid(x), kernel, stride, (1, 0), pool).transpose(3, 1, 2, 0)

    def reference(x, kernel):
        return nn.max_pool(reference_conv(x, kernel, stride, (1, 0)), (pool, pool), (pool, pool))

    def derivatives(conv, *arrays):
        def summed(x, kernels):
            each = jax.vmap(jax.checkpoint(conv), (None, 0))(x, kernels)
            return (jnp.sin(each) * jnp.cos(jnp.arange(each.size).reshape(each.shape))).sum()

        point, direction = arrays[:2], arrays[2:]
        gradient = jax.grad(summed, (0, 1))

        def forward_slope(*point):
            return jax.jvp(summed, point, direction)[1]

        def reverse_slope(*point):
            return sum(map(jnp.vdot, gradient(*point), direction))

        slopes = forward_slope(*point), jax.linearize(summed, *point)[1](*direction), reverse_slope(*point)
        hessian_products = (
            jax.jvp(gradient, point, direction)[1],
            jax.grad(forward_slope, (0, 1))(*point),
            jax.grad(reverse_slope, (0, 1))(*point),
        )
        return jax.vmap(conv, (None, 0))(*point), slopes, hessian_products

    ours = jax.jit(partial(derivatives, own))(*arrays)
    with jax.enable_x64(True):
        theirs = jax.jit(partial(derivatives, reference))(*(a.astype(float) for a in arrays))
    assert_close(ours, theirs, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("size", "padding"),
    [((50, 51), ((1, 1), (1, 1))), ((3, 3), ((0, 0), (0, 0))), ((1, 1), ((1, 1), (1, 1))), ((4, 6), ((2, 1), (0, 3)))],
)
def test_winograds_algorithm_is_exact_in_float64(size, padding) -> None:
    """Also part by part, where tiles lie outside of the image, and with more padding than the kernel needs."""

    def own(x, kernel):
        return winograd.convolution.bind(layers.to_grid(x), kernel, padding=padding).transpose(3, 1, 2, 0)

    with jax.enable_x64(True):
        x, kernel = (jnp.asarray(each, float) for each in drawn((4, *size, 32), (3, 3, 32, 33)))
        axes = ("NHWC", "HWIO", "NHWC")
        other = partial(lax.conv_general_dilated, window_strides=(1, 1), padding=padding, dimension_numbers=axes)
        reference, gradients = jax.vjp(other, x, kernel)
        result, own_gradients = jax.vjp(own, x, kernel)
        assert result.dtype == float
        for ours, theirs in zip((result, *own_gradients(result)), (reference, *gradients(result)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * jnp.abs(theirs).max())


def test_derivatives_on_a_cpu_use_no_grouped_convolution() -> None:
    x, kernels = jnp.ones((20, 5, 5, 2)), jnp.ones((3, 3, 3, 20, 20))

    def hessian_product(kernel):
        gradient = jax.grad(lambda x, kernel: jnp.sin(layers.conv(x, kernel)).sum(), (0, 1))
        return jax.jvp(gradient, (x, kernel), (x, kernel))

    lowered = jax.jit(jax.vmap(hessian_product)).trace(kernels).lower(lowering_platforms=("cpu",))
    assert set(re.findall(r"(?:batch|feature)_group_count = (\d+)", lowered.as_text())) == {"1"}


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("size", "window", "stride"), [((7, 9), 2, 2), ((8, 6), 3, 2), ((5, 5), 2, 1)])
def test_pooling_matches_flax_pooling(size, window, stride, padding) -> None:
    x = jnp.asarray(np.random.default_rng(0).permutation(4 * size[0] * size[1] * 3).reshape(4, *size, 3), jnp.float32)
    for ours, theirs in ((layers.max_pool, nn.max_pool), (layers.avg_pool, nn.avg_pool)):

        def own(x, ours=ours):
            return ours(layers.to_grid(x), window, stride, padding).transpose(3, 1, 2, 0)

        def reference(x, theirs=theirs):
            return theirs(x, (window, window), (stride, stride), padding)

        def squares(x, f):
            pooled = f(x)
            return (pooled**2).sum(), pooled

        a, b = (jax.jit(jax.grad(partial(squares, f=f), has_aux=True))(x) for f in (own, reference))
        np.testing.assert_allclose(a[1], b[1], rtol=1e-6)
        np.testing.assert_allclose(a[0], b[0], rtol=1e-5)


def test_group_norm_matches_flax_group_norm() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (4, 5, 6, 8)), jnp.float32)
    scale, bias = jnp.arange(8.0), jnp.arange(8.0) ** 2
    variables = {"params": {"scale": scale, "bias": bias}}
    ours = layers.GroupNorm(groups=2).apply(variables, layers.to_grid(x)).transpose(3, 1, 2, 0)
    theirs = nn.GroupNorm(num_groups=2, epsilon=1e-5).apply(variables, x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_lenet_matches_the_same_network_in_flax() -> None:
    """Compares the logits and the gradient with those of flax's layers, for the same weights."""
    model = fd.models.lenet5(10)
    params = model.init(jax.random.key(0))
    x = jax.random.uniform(jax.random.key(1), (3, 28, 28, 1))

    def reference(p, x):
        for name, padding in (("convs_0", "SAME"), ("convs_1", "VALID")):
            x = nn.relu(reference_conv(x, p[name]["kernel"], 1, padding) + p[name]["bias"][None, None, None])
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.transpose(0, 3, 1, 2).reshape(3, -1)  # channels first, as PyTorch flattens
        for name in ("denses_0", "denses_1"):
            x = nn.relu(x @ p[name]["kernel"] + p[name]["bias"][None])
        dense = p["classifier"]["dense"]
        return x @ dense["kernel"] + dense["bias"][None]

    def squares(p, f):
        logits = f(p, x)
        return (logits**2).sum(), logits

    ours, theirs = (jax.jit(jax.grad(partial(squares, f=f), has_aux=True))(params) for f in (model.apply, reference))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours[0], theirs[0])


@pytest.mark.parametrize("name", ["linear", "lenet5", "simple_fl_lenet", "simple_cnn"])
def test_head_of_features_equals_apply_and_cosine_models_return_cosines(name) -> None:
    shape = {"linear": (30,), "simple_cnn": (32, 32, 3)}.get(name, (28, 28, 1))
    x = jax.random.normal(jax.random.key(1), (5, *shape))
    for cosine in (False, True):
        model = MODELS[name](cosine=cosine)
        params = jax.jit(model.init)(jax.random.key(0))
        features, logits = jax.jit(lambda p, m=model: (m.features(p, x), m.apply(p, x)))(params)
        np.testing.assert_allclose(model.head(params, features), logits, rtol=1e-5)
        assert model.cosine is cosine
    kernel = jax.tree.leaves(params["classifier"])[0]
    expected = (features @ kernel) / np.outer(np.linalg.norm(features, axis=1), np.linalg.norm(kernel, axis=0))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)
    zero = jax.grad(lambda f: fd.models.cosine_logits(f, kernel).sum())(jnp.zeros((1, kernel.shape[0])))
    assert np.isfinite(zero).all()


def test_initial_weights_have_the_distribution_of_pytorch() -> None:
    kernel = fd.models.mnist_2nn().init(jax.random.key(0))["layers_0"]["kernel"]
    assert abs(kernel).max() <= 784**-0.5 and float(kernel.std()) == pytest.approx((784 * 3) ** -0.5, rel=0.01)
    assert all(not leaf.any() for leaf in jax.tree.leaves(fd.models.linear().init(jax.random.key(0))))


def one_round(model: fd.Model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    data = fd.FederatedData.from_clients([(rng.normal(size=(6, 4)).astype("f4"), rng.integers(0, 3, 6))] * 2)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=2)
    states = [sim.round_fn(sim.init(jax.random.key(seed)))[0] for seed in (0, 1)]
    assert not np.allclose(*(jax.tree.leaves(state.params)[-1] for state in states))
    return jax.tree.leaves(states[0].params)


def test_linen_modules_become_models() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))

    assert [leaf.shape for leaf in one_round(fd.Model.from_linen(Net(), (4,)))] == [(3,), (4, 3)]

    class Deterministic(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic: bool = True):
            return nn.Dense(9)(nn.Dropout(0.5, deterministic=deterministic)(x))

    model, x = fd.Model.from_linen(Deterministic(), (9,)), jnp.ones((1, 9))
    params = model.init(jax.random.key(0))
    noisy = [model.train_apply(params, x, jax.random.key(k)) for k in range(2)]
    assert not np.array_equal(*noisy)

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))

    with pytest.raises(ValueError, match="or replace BatchNorm by GroupNorm"):
        fd.Model.from_linen(Normed(), (4,))


def test_nnx_modules_become_models() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.dropout(x))

    model = fd.Model.from_nnx(Net, (4,))
    assert sorted(leaf.shape for leaf in one_round(model)) == [(3,), (4, 3)]
    params, x = model.init(jax.random.key(0)), jnp.ones((2, 4))
    np.testing.assert_array_equal(model.apply(params, x), model.apply(params, x))
    a, b = (model.train_apply(params, x, jax.random.key(k)) for k in (0, 1))
    assert not np.array_equal(a, b)
    instance = Net(nnx.Rngs(0))
    fixed = fd.Model.from_nnx(instance)
    outputs = {float(fixed.train_apply(fixed.init(jax.random.key(0)), x, jax.random.key(k)).sum()) for k in range(6)}
    assert len(outputs) > 3  # the random streams of an instance are seeded again for every step
    np.testing.assert_array_equal(fixed.init(jax.random.key(5))["dense"]["kernel"], instance.dense.kernel[...])

    class Tokens(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed, self.dense = nnx.Embed(9, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.embed(x).mean(1))

    model = fd.Model.from_nnx(Tokens, (5,), input_dtype=jnp.int32)
    assert model.apply(model.init(jax.random.key(0)), jnp.ones((2, 5), jnp.int32)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"one that Tokens accepts, got \(5,\): .*input_dtype=jnp.int32"):
        fd.Model.from_nnx(Tokens, (5,))


class Equinox:
    """A stand-in for an Equinox module, which is recognised by the package of its class."""

    __module__ = "equinox._module"


class Haiku:
    """A stand-in for a transformed function of Haiku."""

    __module__ = "haiku._src.transform"


class Linen(nn.Module):
    def __call__(self, x):
        return x


class Nnx(nnx.Module):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fd.Model.from_linen(Linen, (3,)), "got the class Linen: pass Net"),
        (lambda: fd.Model.from_linen(Nnx(), (3,)), "got a Nnx: use Model.from_nnx"),
        (lambda: fd.Model.from_linen(lambda x: x, (3,)), "got a function: use fd.Model"),
        (
            lambda: fd.Model.from_linen(Equinox(), (3,)),
            "got an Equinox: for an Equinox module write\nstatic = eqx.partition",
        ),
        (lambda: fd.Model.from_nnx(Linen()), "got a Linen: use Model.from_linen"),
        (lambda: fd.Model.from_nnx(Equinox()), "(?s)eqx.partition.*eqx.combine"),
        (
            lambda: fd.Model.from_linen(Haiku(), (3,)),
            "got a Haiku: for a Haiku transform write, with a batch x,\nnetwork",
        ),
        (lambda: fd.Model.from_nnx(nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))), "got a tuple: .* before nnx.split"),
        (
            lambda: fd.Model.from_nnx(lambda rngs: 3),
            "module must be a function nnx.Rngs -> nnx.Module, got one that returns an int",
        ),
    ],
)
def test_errors_for_other_modules_say_how_to_use_them(make, said) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("lines", [adapters.EQUINOX, adapters.HAIKU])
def test_the_code_in_the_errors_is_also_on_the_page_about_models(lines) -> None:
    page = Path(fd.__file__).parents[1] / "docs" / "models.md"
    assert lines in page.read_text()  # the tests of the documentation run these lines
