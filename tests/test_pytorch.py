"""Tests of `Model.from_torch` against PyTorch itself: values, gradients, running statistics, errors."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import recipes
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.network import flat, nested

torch = pytest.importorskip("torch", reason="needs PyTorch")
sys.path.append(str(Path(__file__).parents[1] / "experiments" / "benchmarks"))

import torch.nn.functional as F  # noqa: E402
import torch_networks as networks  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.thorough

BN = partial(nn.BatchNorm2d, momentum=0.3)
IDS = {"input_dtype": jnp.int32}
# name -> (module, input shape, options, number of ids)
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], int]] = {
    "LeNet": (networks.LeNet, (28, 28, 1), {}, 0),
    "ResNet, GroupNorm": (partial(networks.ResNet, width=8), (32, 32, 3), {}, 0),
    "ResNet, BatchNorm": (partial(networks.ResNet, BN, 8), (32, 32, 3), {"statistics": "average"}, 0),
    "ResNet, frozen": (partial(networks.ResNet, BN, 8), (32, 32, 3), {"statistics": "frozen"}, 0),
    "LSTM": (networks.Recurrent, (12,), IDS, 80),
    "GRU, both directions": (partial(networks.Recurrent, kind=nn.GRU, bidirectional=True), (12,), IDS, 80),
    "RNN": (partial(networks.Recurrent, kind=nn.RNN, nonlinearity="relu"), (12,), IDS, 80),
    "ViT": (networks.ViT, (32, 32, 3), {}, 0),
    "GPT": (networks.Decoder, (16,), IDS, 100),
}


def made(module: Any) -> Any:
    torch.manual_seed(0)
    return module()


def inputs(shape: tuple[int, ...], ids: int, count: int = 5) -> tuple[np.ndarray, Any]:
    """A batch here, and the same in PyTorch."""
    rng = np.random.default_rng(0)
    if ids:
        x = rng.integers(0, ids, (count, *shape)).astype("int32")
        return x, torch.from_numpy(x).long()
    x = rng.normal(size=(count, *shape)).astype("float32")
    return x, torch.from_numpy(np.array(x.transpose(0, 3, 1, 2) if len(shape) == 3 else x, order="C"))


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference over the largest number."""
    theirs = theirs.detach().numpy()
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_statistics_are_those_of_pytorch(name) -> None:
    make, shape, options, ids = CASES[name]
    module = made(make)
    model = fd.Model.from_torch(module, shape, **options)
    x, tensor = inputs(shape, ids)
    batch_norm = options.get("statistics") == "average"
    module.train(batch_norm)
    logits = module(tensor)
    y = np.random.default_rng(1).integers(0, logits.shape[-1], logits.shape[:-1])
    F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(y).flatten()).backward()

    def loss(params: Any) -> Any:
        if batch_norm:
            mask = jnp.ones(len(x), bool)
            out, new = model.statistics.forward(params, start["batch_stats"], x, jax.random.key(0), mask, "apply")
        else:
            out, new = model.apply(params if model.statistics is None else {**start, "params": params}, x), {}
        return model.loss(out, y).mean(), (out, new)

    start = model.init(jax.random.key(0))
    params = start if model.statistics is None else start["params"]
    gradient, (out, new) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert difference(out, logits) < 1e-5
    named, largest = dict(module.named_parameters()), max(p.grad.abs().max() for p in module.parameters())
    assert {*named} == {*flat(gradient)}
    for path, value in flat(gradient).items():
        np.testing.assert_allclose(value, named[path].grad.numpy(), atol=1e-5 * largest, rtol=1e-5, err_msg=path)
    for path, value in flat(new).items():
        assert difference(value, dict(module.named_buffers())[path]) < 1e-6, path


class Function(nn.Module):
    """A function of the input with a parameter, so that there is something to train."""

    def __init__(self, function: Any, part: Any = None) -> None:
        super().__init__()
        self.function, self.part, self.scale = function, part, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        x = x * self.scale
        y = self.part(x) if self.part is not None else x
        y = self.function(y)
        return y.flatten(1) if y.ndim > 1 else y


def assigned(x: Any) -> Any:
    x = x.clone()
    x[:, 1] = 2.0
    x[:, :, 2:4] *= 3
    x[:, 0] += x[:, 1]
    return x


FUNCTIONS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    # name -> (function, layer before it, shape of an example as the module gets it)
    "assignments": (assigned, None, (3, 4)),
    "constants": (
        lambda x: (
            x + torch.arange(4) + torch.linspace(0, 1, 4) + torch.ones(3, 1) + x.new_zeros(4) + torch.hamming_window(4)
        ),
        None,
        (3, 4),
    ),
    "attention": (
        lambda x: torch.cat(
            [
                *[F.scaled_dot_product_attention(x, x, x, is_causal=causal) for causal in (False, True)],
                *[F.scaled_dot_product_attention(x, x, x, torch.arange(3)[None] > torch.arange(3)[:, None])],
                *[F.scaled_dot_product_attention(x, x, x, torch.linspace(0, 1, 3), scale=0.3)],
            ],
            1,
        ),
        None,
        (3, 4),
    ),
    "convolution": (F.relu, nn.Conv2d(3, 4, 3, 2, 1), (3, 9, 8)),
    "convolution, padded by name": (F.relu, nn.Conv2d(3, 4, (2, 3), padding="same"), (3, 9, 8)),
    "convolution, uneven": (F.relu, nn.Conv2d(3, 4, (3, 1), (2, 1), (1, 0)), (3, 9, 8)),
    "convolution, dilated": (F.relu, nn.Conv2d(3, 4, 3, dilation=2), (3, 9, 8)),
    "convolution, groups": (F.relu, nn.Conv2d(4, 8, 3, groups=2), (4, 9, 8)),
    "convolution, pooled": (lambda x: F.max_pool2d(torch.tanh(x), 2), nn.Conv2d(3, 4, 3, 1, 1), (3, 9, 8)),
    "convolution, pooled with overlap": (lambda x: F.max_pool2d(x, 3, 2, 1), nn.Conv2d(3, 4, 3, 1, 1), (3, 9, 8)),
    "convolution, pooled and used": (
        lambda x: F.max_pool2d(F.relu(x), 2) + x[..., :4, :4],
        nn.Conv2d(3, 4, 3, 1, 1),
        (3, 8, 8),
    ),
    "convolution of sequences": (F.relu, nn.Conv1d(3, 4, 3, 2, 1), (3, 9)),
    "convolution of volumes": (F.relu, nn.Conv3d(2, 3, 3, padding=1), (2, 4, 5, 6)),
    "transposed convolution": (F.relu, nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (4, 5, 5)),
    "transposed convolution of sequences": (F.relu, nn.ConvTranspose1d(4, 3, 4, 2, 1), (4, 5)),
    "pooling": (
        lambda x: torch.cat(
            [
                *[p.flatten(1) for p in (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.max_pool2d(x, (2, 3)))],
                *[F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False).flatten(1)],
                *[F.max_pool2d(x, 3, 2, 0, ceil_mode=True).flatten(1), F.adaptive_avg_pool2d(x, (3, 2)).flatten(1)],
                *[F.adaptive_avg_pool2d(x, (3, None)).flatten(1), F.adaptive_max_pool2d(x, 2).flatten(1)],
                *[
                    x.mean((2, 3)),
                    x.mean((-1, -2), keepdim=True).flatten(1),
                    F.avg_pool2d(x, 2, divisor_override=3).flatten(1),
                ],
            ],
            1,
        ),
        nn.Conv2d(3, 4, 3, 1, 1),
        (3, 9, 8),
    ),
    "pooling of sequences": (
        lambda x: torch.cat(
            [p.flatten(1) for p in (F.max_pool1d(x, 2), F.avg_pool1d(x, 3, 2, 1), F.adaptive_avg_pool1d(x, 3))], 1
        ),
        None,
        (3, 9),
    ),
    "images": (
        lambda x: (
            torch.cat([x, x.permute(0, 1, 3, 2)], 1) * torch.arange(8.0)[:, None, None]
            + x.mean((2, 3), keepdim=True).repeat(1, 2, 1, 1)
        ),
        nn.Conv2d(3, 4, 3, 1, 1),
        (3, 8, 8),
    ),
    "larger images": (
        lambda x: torch.cat(
            [
                *[F.interpolate(x, scale_factor=2).flatten(1), F.interpolate(x, size=(5, 7)).flatten(1)],
                *[F.interpolate(x, scale_factor=2, mode="bilinear").flatten(1), F.pixel_shuffle(x, 2).flatten(1)],
                *[F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True).flatten(1)],
            ],
            1,
        ),
        nn.Conv2d(3, 4, 3, 1, 1),
        (3, 8, 8),
    ),
    "group norm": (F.relu, nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (3, 8, 8)),
    "instance norm": (F.relu, nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)), (3, 8, 8)),
    "layer norm": (F.relu, nn.Sequential(nn.LayerNorm((3, 4)), nn.LayerNorm(4, bias=False)), (3, 4)),
    "RMS norm": (F.relu, nn.RMSNorm(4), (3, 4)),
    "weight norm": (F.relu, nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), (3, 4)),
    "bilinear": (lambda x: nn.functional.bilinear(x, x, torch.ones(2, 4, 4)), None, (3, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_are_those_of_pytorch(name) -> None:
    function, layer, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    module = Function(function, layer)
    model = fd.Model.from_torch(module, shape, channels_last=False)
    x = np.random.default_rng(0).normal(size=(6, *shape)).astype("float32")
    tensor = torch.from_numpy(x).requires_grad_()
    expected = module(tensor)
    weights = np.random.default_rng(1).normal(size=expected.shape).astype("float32")
    (expected * torch.from_numpy(weights)).sum().backward()
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, x), expected.detach(), atol=1e-5, rtol=1e-4)
    gradient = jax.jit(jax.grad(lambda params, x: (model.apply(params, x) * weights).sum(), (0, 1)))(params, x)
    np.testing.assert_allclose(gradient[1], tensor.grad, atol=1e-4, rtol=1e-4)
    for path, value in flat(gradient[0]).items():
        np.testing.assert_allclose(value, dict(module.named_parameters())[path].grad, atol=1e-3, rtol=1e-4)


# --- training ---------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two layers with BatchNorm and dropout, for examples [5]."""

    def __init__(self, p: float = 0.0, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.hidden, self.norm, self.drop, self.out = nn.Linear(5, 8), norm(8), nn.Dropout(p), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.drop(torch.relu(self.norm(self.hidden(x)))))


def test_batch_norm_leaves_out_padding() -> None:
    module = made(Normed)
    model = fd.Model.from_torch(module, (5,), statistics="average")
    x, tensor = inputs((5,), 0, 6)
    module.train()
    expected = module(tensor[:4])
    start, mask = model.init(jax.random.key(0)), np.arange(6) < 4
    out, new = model.statistics.forward(
        start["params"], start["batch_stats"], x, jax.random.key(0), jnp.asarray(mask), "apply"
    )
    np.testing.assert_allclose(out[:4], expected.detach(), atol=1e-5)
    for path, value in flat(new).items():
        np.testing.assert_allclose(value, dict(module.named_buffers())[path], atol=1e-6, err_msg=path)


def test_dropout_follows_the_key() -> None:
    model = fd.Model.from_torch(partial(networks.LeNet, dropout=0.4), (28, 28, 1))
    params, (x, _) = model.init(jax.random.key(0)), inputs((28, 28, 1), 0, 400)
    first, again, other = (model.train_apply(params, x, jax.random.key(i)) for i in (0, 0, 1))
    assert (first == again).all() and (first != other).any()
    np.testing.assert_allclose(first.mean(0), model.apply(params, x).mean(0), atol=0.03)  # dropout keeps the mean
    assert fd.Model.from_torch(networks.LeNet(), (28, 28, 1)).train_apply is None  # p = 0


def test_the_module_is_not_changed() -> None:
    module = made(Normed)
    module.norm.eval()
    before, random = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    fd.Model.from_torch(module, (5,), statistics="local")
    fd.Model.from_torch(Normed, (5,), statistics="local").init(jax.random.key(0))
    assert all((value == before[name]).all() for name, value in module.state_dict().items())
    assert module.training and not module.norm.training and (random == torch.get_rng_state()).all()


def test_a_class_gives_other_parameters_for_each_key() -> None:
    model = fd.Model.from_torch(networks.LeNet, (28, 28, 1))
    one, again, other = (jax.jit(model.init)(jax.random.key(i)) for i in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (one, again)), strict=True))
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))
    bound = 1 / np.sqrt(400)
    assert 0.9 * bound < np.abs(one["fc1"]["weight"]).max() <= bound
    seeds = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
    assert seeds["fc"]["bias"].shape == (2, 10) and (seeds["fc"]["bias"][0] != seeds["fc"]["bias"][1]).any()


def test_head_features_and_extractor() -> None:
    module = made(networks.LeNet)
    model = fd.Model.from_torch(module, (28, 28, 1), head="fc", extractor="conv2")
    params, (x, tensor) = model.init(jax.random.key(0)), inputs((28, 28, 1), 0)
    seen = {}
    module.fc.register_forward_pre_hook(lambda _, given: seen.update(features=given[0]))
    module.conv2.register_forward_hook(lambda _, given, result: seen.update(extracted=result))
    module.eval()(tensor)
    np.testing.assert_allclose(model.features(params, x), seen["features"].detach(), atol=1e-5)
    np.testing.assert_allclose(model.extractor(params, x), seen["extracted"].detach(), atol=1e-5)
    np.testing.assert_allclose(model.head(params, model.features(params, x)), model.apply(params, x), atol=1e-5)


def test_only_parameters_that_require_a_gradient_are_trained() -> None:
    module = made(networks.LeNet)
    module.conv1.requires_grad_(False)
    model = fd.Model.from_torch(module, (28, 28, 1))
    params = model.init(jax.random.key(0))
    assert "conv1" not in params and (model.merged(params)["conv1"]["bias"] == module.conv1.bias.detach().numpy()).all()
    x, tensor = inputs((28, 28, 1), 0)
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), module.eval()(tensor).detach(), atol=1e-5)


def test_token_ids_are_checked_against_the_table() -> None:
    assert fd.Model.from_torch(networks.Decoder, (16,), **IDS).vocabulary == 100
    assert fd.Model.from_torch(networks.LeNet, (28, 28, 1)).vocabulary is None


def test_adapters() -> None:
    module = made(networks.Decoder)
    model = fd.Model.from_torch(module, (16,), **IDS)
    assert "lm_head" not in model.init(jax.random.key(0))  # the same parameter as wte
    adapted = fd.models.lora(model, 4, "attention/(attention|projection)/weight")
    params, (x, tensor) = adapted.init(jax.random.key(0)), inputs((16,), 100)
    assert fd.models.num_parameters(adapted) == 2 * 4 * (32 + 96 + 32 + 32)
    params = jax.tree.map(lambda a: a + 0.01, params)
    fd.models.to_torch(fd.models.merge(adapted, params), module)
    np.testing.assert_allclose(adapted.apply(params, x), module.eval()(tensor).detach(), atol=1e-5)


# --- rounds -----------------------------------------------------------------------------------------------------------


def federation(shape: tuple[int, ...], sizes: tuple[int, ...] = (4, 7, 5), classes: int = 3) -> fd.FederatedData:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, *shape)).astype("float32"), rng.integers(0, classes, n)) for n in sizes]
    return fd.FederatedData.from_clients(clients, test=clients[0])


def test_a_round_is_that_of_a_loop_in_pytorch() -> None:
    """FedAvg with BatchNorm: two local epochs, one batch each, so that the order does not matter."""
    module = made(Normed)
    model = fd.Model.from_torch(module, (5,), statistics="average")
    data, local = federation((5,)), fd.LocalTraining(epochs=2, batch_size=8, lr=0.1)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=3)
    state, _ = sim.round_fn(sim.init(jax.random.key(0)))
    start, total = {n: v.clone() for n, v in module.state_dict().items()}, {}
    for i in range(3):
        module.load_state_dict(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x, y = (np.asarray(part) for part in data.client(i))
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(module.train()(torch.from_numpy(x)), torch.from_numpy(y).long()).backward()
            optimizer.step()
        for name, value in module.state_dict().items():
            total[name] = total.get(name, 0) + len(y) / 16 * value
    got = fd.models.to_torch(state.params, module)
    assert {*got} == {name for name in total if "num_batches" not in name}
    for name, value in got.items():
        np.testing.assert_allclose(value, total[name], atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(module.state_dict()[name], value)


@pytest.mark.parametrize("algorithm", [fd.algorithms.scaffold(), fd.algorithms.moon(), fd.algorithms.fedbn()], ids=str)
def test_algorithms_and_checkpoints(algorithm, tmp_path) -> None:
    model = fd.Model.from_torch(partial(Normed, 0.2, nn.LayerNorm), (5,), head="out")
    sim = fd.Simulation(model, federation((5,)), algorithm, local=fd.LocalTraining(batch_size=4, lr=0.1), cohort_size=2)
    whole, _ = sim.run(sim.init(jax.random.key(0)), rounds=4, progress=False)
    checkpoints = fd.Checkpoints(tmp_path / "run", every=2)
    sim.run(sim.init(jax.random.key(0)), rounds=2, progress=False, checkpoints=checkpoints)
    state, _ = checkpoints.restore(sim)
    state, _ = sim.run(state, rounds=2, progress=False)
    for one, other in zip(*map(jax.tree.leaves, (whole.params, state.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_equal_modules_share_programs() -> None:
    one, other = (fd.Model.from_torch(made(Normed), (5,), statistics="local") for _ in range(2))
    assert recipes.split(one)[0] == recipes.split(other)[0]
    different = fd.Model.from_torch(made(partial(Normed, 0.3)), (5,), statistics="local")
    assert recipes.split(one)[0] != recipes.split(different)[0]


# --- errors -----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.fc(x)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.fc(x), x


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "condition": (Function(lambda x: x if x.sum() > 0 else -x), {}, "must not depend on the values.*if x.sum"),
    "selection": (Function(lambda x: x[x > 0]), {}, "must not depend on the values"),
    "buffer": (Counting(), {}, "must not keep what it has seen.*calls"),
    "outputs": (Both(), {}, "must return one array, the logits, got 2"),
    "batch": (Function(lambda x: x.reshape(2, 4)), {}, "batches of any length"),
    "length": (Function(lambda x: x.reshape(len(x), 4)), {}, "batches of any length.*x.shape"),
    "operation": (Function(torch.matrix_exp, nn.Linear(4, 4)), {"input_shape": (4, 4)}, "must be covered.*matrix_exp"),
    "where it is": (Function(lambda x: torch.special.airy_ai(x)), {}, r"airy_ai.*y = self\.function\(y\)"),
    "momentum": (nn.BatchNorm1d(4, momentum=None), {"statistics": "average"}, "momentum of BatchNorm must be a number"),
    "random": (Function(lambda x: x + torch.rand_like(x)), {}, "covered|random"),
    "shape": (networks.LeNet(), {"input_shape": (1, 28, 28)}, r"examples of shape \[28, 1, 28\].*channels_last"),
    "no statistics": (Normed(), {"input_shape": (5,)}, "statistics must say"),
    "statistics": (nn.Linear(4, 2), {"statistics": "local"}, "must be left out for Linear"),
    "kept": (Normed(), {"input_shape": (5,), "statistics": "mean"}, "statistics must be"),
    "head": (networks.LeNet(), {"input_shape": (28, 28, 1), "head": "classifier"}, "conv1.*fc.*got 'classifier'"),
    "head in the middle": (networks.LeNet(), {"input_shape": (28, 28, 1), "head": "conv2"}, "features \\[B, F\\]"),
    "no path": (networks.LeNet(), {"input_shape": (28, 28, 1), "extractor": 3}, "extractor must be"),
    "no parameters": (nn.ReLU(), {}, "must have parameters"),
    "all frozen": (frozen(nn.Linear(4, 2)), {}, "requires_grad=True, got none"),
    "kind": ("LeNet", {}, "a class or a function without arguments"),
    "arguments": (nn.Linear, {}, "lambda: Net"),
    "no module": (lambda: 3, {}, "got one that returns an int"),
    "flag": (nn.Linear(4, 2), {"channels_last": "no"}, "channels_last must be"),
    "dtype": (nn.Linear(4, 2), {"input_dtype": "float99"}, "input_dtype must be"),
    "option": (nn.Linear(4, 2), {"lose": 1}, "lose"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name) -> None:
    module, options, message = ERRORS[name]
    with pytest.raises((ConfigurationError, TypeError)) as caught:
        fd.Model.from_torch(module, **{"input_shape": (4,), **options})
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


def test_wrong_modules_for_parameters() -> None:
    params = fd.Model.from_torch(made(Normed), (5,), statistics="local").init(jax.random.key(0))
    with pytest.raises(ConfigurationError, match="must have a parameter hidden.weight of shape"):
        fd.models.to_torch(params, nn.Linear(5, 3))


def test_names() -> None:
    assert flat(nested({"a.b": 1, "a.c.d": 2, "e": 3})) == {"a.b": 1, "a.c.d": 2, "e": 3}
