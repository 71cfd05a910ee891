"""Tests of the comparison that `Model.from_torch` makes: what differs from the module is refused with its place."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch import operations
from fedjax_drift.pytorch.network import flat

torch = pytest.importorskip("torch", reason="needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.thorough
IDS = {"input_dtype": jnp.int32}


class Net(nn.Module):
    """A function of two layers and the input."""

    def __init__(self, function: Any, width: int = 3) -> None:
        super().__init__()
        self.function, self.a, self.b, self.calls = function, nn.Linear(width, 4), nn.Linear(4, 4), 0

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, alpha: float) -> Any:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -ctx.alpha * gradient, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * (ctx.saved_tensors[0].abs() < 1)


class Both(torch.autograd.Function):
    """Two inputs, two outputs, and a context of its own function."""

    @staticmethod
    def forward(x: Any, y: Any) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        x, y = ctx.saved_tensors
        return 2 * g * y + h, (g * x + h).sum(0)


def stopped(self: Any, x: Any) -> Any:
    with torch.no_grad():
        h = self.a(x).relu()
        with torch.enable_grad():
            k = self.b(self.a(x))
    return self.b(h) + k


@torch.no_grad()
def doubled(x: Any) -> Any:
    return 2 * x


def switched(self: Any, x: Any) -> Any:
    torch.set_grad_enabled(False)
    h = self.a(x)
    torch.set_grad_enabled(True)
    return self.b(h) + doubled(self.b(h))


def own_derivatives(self: Any, x: Any) -> Any:
    u, v = Both.apply(self.b(StraightThrough.apply(Reversed.apply(self.a(x), 0.5))), self.b.bias)
    return u + 0.3 * v


def noisy(self: Any, x: Any) -> Any:
    h = F.dropout(self.a(x), 0.3, self.training)
    return self.b(h + torch.randn_like(h)) if self.training else self.b(h)


RIGHT = {
    "no_grad": stopped,
    "set_grad_enabled": switched,
    "autograd.Function": own_derivatives,
    "random numbers": noisy,
    "the same layer twice": lambda self, x: self.b(self.a(x)) * self.b(self.a(2 * x)),
    "the input is changed": lambda self, x: self.a(x.mul_(2)) + x.sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_module_stops_or_changes_is_kept(name) -> None:
    torch.manual_seed(0)
    module = Net(RIGHT[name])
    before = {path: value.clone() for path, value in module.state_dict().items()}
    model = fd.Model.from_torch(module, (3,))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    params = model.init(jax.random.key(0))
    gradient = flat(jax.grad(lambda params: (model.apply(params, x) ** 2).sum())(params))
    (module.eval()(torch.tensor(x)) ** 2).sum().backward()
    for path, parameter in module.named_parameters():
        wanted = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(gradient[path], wanted, rtol=1e-4, atol=1e-5, err_msg=path)
    assert all(torch.equal(before[path], value) for path, value in module.state_dict().items())


def hooked(self: Any, x: Any) -> Any:
    h = self.a(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: -gradient)
    return self.b(h)


def counting(self: Any, x: Any) -> Any:
    self.calls += 1
    return self.a(x) * self.calls


def of_length(condition: Any) -> Any:
    return lambda self, x: self.a(x) if condition(x.shape[0]) else 2 * self.a(x)


def written(self: Any, x: Any) -> Any:
    with torch.no_grad():
        self.a.weight.clamp_(-0.1, 0.1)
    return self.a(x)


WRONG = {
    "a hook of a tensor": (hooked, r"the gradient of a\.\w+ in training.*hooks of tensors"),
    "a counter": (counting, "computed twice.*A counter or random numbers of NumPy"),
    "NumPy": (lambda self, x: self.a(x) + float(np.random.default_rng().normal()), "computed twice"),
    "Python": (lambda self, x: self.a(x) * (random.random() if self.training else 1), "computed twice.*in training"),
    "more than 4": (of_length(lambda B: B > 4), "batches of any length B.*B <= 4"),
    "even": (of_length(lambda B: B % 2 == 0), r"batches of any length B.*B % 2"),
    "one": (of_length(lambda B: B != 1), "the logits.*a batch of 1.*depends on the batch"),
    "a parameter": (written, "must not change its parameters, got one that changes a.weight"),
    "float64": (lambda self, x: self.a(x).double().exp().float(), r"float32 or lower, got float64 in .*\.double\(\)"),
    "a large number": (lambda self, x: self.a(x) + (x.long() * 2654435761 % 7).sum(1, keepdim=True), "fit in 32 bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_translated_is_refused(name) -> None:
    function, message = WRONG[name]
    with pytest.raises(ConfigurationError, match=message):
        fd.Model.from_torch(Net(function), (3,))


def test_a_last_layer_of_zeros_hides_nothing() -> None:
    module = Net(hooked)
    nn.init.zeros_(module.b.weight)
    with pytest.raises(ConfigurationError, match="hooks of tensors"):
        fd.Model.from_torch(module, (3,))
    assert not module.b.weight.any()


class Smoothed(nn.Module):
    """Keeps a mean of its batches, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


def test_buffers_that_know_the_batch_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must not keep what it has seen, got a forward that changes mean"):
        fd.Model.from_torch(Smoothed(), (3,), statistics="average")


def test_spectral_norm_is_trained_as_in_pytorch() -> None:
    """Its two vectors change in every step, and depend on the weights alone."""
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 4))
    model = fd.Model.from_torch(module, (3,), statistics="average")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype("float32"), rng.integers(0, 4, 6)
    data = fd.FederatedData.from_clients([(x, y.astype(np.int32))], test=(x, y))
    local = fd.LocalTraining(epochs=3, batch_size=6, lr=0.5)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), local=local, cohort_size=1)
    state, _ = sim.run(sim.init(jax.random.key(0)), 2, eval_every=0, progress=False)
    optimizer = torch.optim.SGD(module.train().parameters(), 0.5)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    found = {**flat(state.params["params"]), **flat(state.params["batch_stats"])}
    assert {*found} == {*module.state_dict()}
    for path, value in module.state_dict().items():
        np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-5, err_msg=path)


def test_hooks_of_modules_and_parameters_are_named() -> None:
    module = Net(lambda self, x: self.b(self.a(x)))
    handle = module.b.register_full_backward_hook(lambda module, given, gradient: (2 * given[0],))
    with pytest.raises(ConfigurationError, match="has a backward hook of b"):
        fd.Model.from_torch(module, (3,))
    assert module.b._backward_hooks  # the module is not changed
    handle.remove()
    module.a.weight.register_hook(lambda gradient: 0.1 * gradient)
    with pytest.raises(ConfigurationError, match="has a hook of a.weight"):
        fd.Model.from_torch(module, (3,))
    assert fd.Model.from_torch(module, (3,), check=False)


def test_the_first_operation_that_differs_is_named(monkeypatch) -> None:
    """A planted fault: every translation of gelu is that of the approximate one."""
    monkeypatch.setitem(operations.ELEMENTWISE, "gelu", lambda x, approximate="none": jax.nn.gelu(x) + 0.01)
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match=r"got a difference in the logits in training, .* first in gelu of 1"):
        fd.Model.from_torch(net, (3,))


def test_large_integers_are_refused_and_ids_are_drawn_from_the_whole_table() -> None:
    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.other = nn.Embedding(50, 4), nn.Embedding(50, 4)

        def forward(self, x: Any) -> Any:
            return (self.table(x) + self.other((x * 2147480000) % 50)).mean(1)

    with pytest.raises(ConfigurationError, match="the logits in training.*embedding of other"):
        fd.Model.from_torch(Hashed(), (6,), **IDS)


def test_random_numbers_of_the_process_are_those_before() -> None:
    module = Net(noisy)
    states = torch.get_rng_state(), random.getstate()
    fd.Model.from_torch(module, (3,))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
