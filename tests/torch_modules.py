"""Random PyTorch modules against their translations by `Model.from_torch`.

    python tests/torch_modules.py SECONDS [SEED]

A module is a chain of layers with random options, residuals, branches, in-place changes and views, for vectors, images,
sequences or token ids. `comparison.check` compares it with its translation: logits, running statistics and gradients,
in training and in evaluation, in float32 and in float64. A refusal is counted by its reason.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch import comparison

Shape = tuple[int, ...]  # of the values between two layers, without the batch: [C], [C, H, W] or [T, C]


class Draw:
    """Random options."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def often(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)


class Applied(nn.Module):
    """A function as a layer. Its name is its text in `repr`."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: Any) -> Any:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class Both(nn.Module):
    """Two branches of equal shapes, joined."""

    def __init__(self, kind: str, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, a, b

    def forward(self, x: Any) -> Any:
        a, b = self.a(x), self.b(x)
        if self.kind == "inplace":
            a = a.clone()
            a += b
            return a.mul_(0.7)
        joins = {"add": torch.add, "mul": torch.mul, "max": torch.maximum, "gate": lambda a, b: a * b.sigmoid()}
        return joins[self.kind](a, b)

    def extra_repr(self) -> str:
        return self.kind


class Recurrent(nn.Module):
    """A recurrent layer of sequences, its outputs only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


class Stepped(nn.Module):
    """A cell, called for each position."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Any) -> Any:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


class Attention(nn.Module):
    """MultiheadAttention with a mask."""

    def __init__(self, width: int, mask: str, **options: Any) -> None:
        super().__init__()
        self.layer, self.mask = nn.MultiheadAttention(width, 2, batch_first=True, **options), mask

    def forward(self, x: Any) -> Any:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        masks = {"none": None, "bool": later, "float": torch.zeros_like(later, dtype=x.dtype).masked_fill(later, -1e4)}
        return self.layer(x, x, x, attn_mask=masks[self.mask], need_weights=False)[0]

    def extra_repr(self) -> str:
        return self.mask


class Made(NamedTuple):
    """A layer, and the shape of what it returns."""

    layer: nn.Module
    shape: Shape


# --- layers of any shape ----------------------------------------------------------------------------------------------

ACTIVATIONS: tuple[Callable[[Draw], nn.Module], ...] = (
    lambda d: nn.ReLU(d.often()),
    lambda d: nn.LeakyReLU(d.pick(0.01, 0.3, -0.2)),
    lambda d: nn.ELU(d.pick(1.0, 0.5)),
    lambda d: nn.CELU(d.pick(1.0, 0.5)),
    lambda d: nn.SELU(),
    lambda d: nn.GELU(d.pick("none", "tanh")),
    lambda d: nn.SiLU(d.often()),
    lambda d: nn.Mish(),
    lambda d: nn.Softplus(d.pick(1, 3), d.pick(20, 1)),
    lambda d: nn.Softsign(),
    lambda d: nn.Tanh(),
    lambda d: nn.Sigmoid(),
    lambda d: nn.Hardtanh(d.pick(-1.0, -0.3), d.pick(1.0, 0.4)),
    lambda d: nn.Hardswish(),
    lambda d: nn.Hardsigmoid(),
    lambda d: nn.ReLU6(),
    lambda d: nn.Softshrink(d.pick(0.5, 0.1)),
    lambda d: nn.Hardshrink(d.pick(0.5, 0.1)),
    lambda d: nn.Tanhshrink(),
    lambda d: nn.LogSigmoid(),
    lambda d: nn.Threshold(d.pick(0.1, -0.2), d.pick(0.0, 2.0)),
    lambda d: nn.RReLU(d.pick(0.1, 0.2), d.pick(0.3, 0.5)),
    lambda d: nn.Dropout(d.pick(0.0, 0.3, 0.9)),
    lambda d: nn.AlphaDropout(d.pick(0.1, 0.5)),
    lambda d: nn.Softmax(-1),
    lambda d: Applied("abs", torch.abs),
    lambda d: Applied("square", torch.square),
    lambda d: Applied("clamp", lambda x: x.clamp(-0.5, 0.8)),
    lambda d: Applied("logsumexp", lambda x: x - x.logsumexp(-1, keepdim=True)),
    lambda d: Applied("normalize", lambda x: F.normalize(x, dim=-1)),
    lambda d: Applied("standardised", lambda x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1)),
    lambda d: Applied("flip", lambda x: x.flip(-1)),
    lambda d: Applied("roll", lambda x: x.roll(1, -1)),
    lambda d: Applied("cumsum", lambda x: x.cumsum(-1) / x.shape[-1]),
    lambda d: Applied("noise", lambda x: x + 0.1 * torch.zeros_like(x).expand_as(x)),
    lambda d: Applied("chunks", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    lambda d: Applied("stopped", lambda x: x + x.detach() ** 2),
)


def activation(d: Draw, shape: Shape) -> Made:
    return Made(d.pick(*ACTIVATIONS)(d), shape)


# --- vectors ----------------------------------------------------------------------------------------------------------


def linear(d: Draw, shape: Shape) -> Made:
    n = d.pick(4, 6, 8)
    return Made(nn.Linear(shape[-1], n, d.often(0.7)), (*shape[:-1], n))


def norm_of_vectors(d: Draw, shape: Shape) -> Made:
    n = shape[0]
    options = dict(momentum=d.pick(0.1, 0.4), affine=d.often(0.7), eps=d.pick(1e-5, 1e-2))
    kinds = (
        lambda: nn.BatchNorm1d(n, **options),
        lambda: nn.LayerNorm(n, d.pick(1e-5, 1e-2), d.often(0.7)),
        lambda: nn.GroupNorm(2, n, affine=d.often()),
        lambda: nn.RMSNorm(n, d.pick(None, 1e-3)),
        lambda: nn.PReLU(d.pick(1, n)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(n, n)),
    )
    return Made(d.pick(*kinds)(), shape)


def gated(d: Draw, shape: Shape) -> Made:
    return Made(nn.Sequential(nn.Linear(shape[-1], 8), nn.GLU(-1)), (*shape[:-1], 4))


# --- images -----------------------------------------------------------------------------------------------------------


def convolution(d: Draw, shape: Shape) -> Made:
    C, H, W = shape
    n, k = d.pick(4, 6), d.pick(1, 2, 3, (3, 2))
    options: dict[str, Any] = dict(stride=d.pick(1, 2), dilation=d.pick(1, 1, 2), groups=d.pick(1, 1, 2))
    options |= dict(padding=d.pick(0, 1, 2), bias=d.often(0.7))
    options |= dict(padding_mode=d.pick("zeros", "zeros", "reflect", "circular"))
    if d.often(0.2):
        options |= dict(padding="same", stride=1)
    return _measured(nn.Conv2d(C, n, k, **options), shape)


def transposed(d: Draw, shape: Shape) -> Made:
    stride = d.pick(1, 2)
    options = dict(stride=stride, padding=d.pick(0, 1), groups=d.pick(1, 2), output_padding=d.pick(0, stride - 1))
    return _measured(nn.ConvTranspose2d(shape[0], 4, d.pick(2, 3), dilation=d.pick(1, 2), **options), shape)


def pooling(d: Draw, shape: Shape) -> Made:
    size, stride, padding, ceil = d.pick(2, 3, (2, 3)), d.pick(None, 1, 2), d.pick(0, 1), d.often()
    kinds = (
        lambda: nn.MaxPool2d(size, stride, padding, d.pick(1, 2), ceil_mode=ceil),
        lambda: nn.AvgPool2d(size, stride, padding, ceil, d.often(), d.pick(None, 3)),
        lambda: nn.AdaptiveAvgPool2d(d.pick(1, 3, (2, None))),
        lambda: nn.AdaptiveMaxPool2d(d.pick(1, 2, 3)),
        lambda: nn.LPPool2d(d.pick(2, 3), 2),
        lambda: nn.Upsample(scale_factor=d.pick(2, 1.5), mode=d.pick("nearest", "bilinear", "bicubic")),
        lambda: nn.Upsample(size=(5, 4), mode="bilinear", align_corners=True),
        lambda: nn.ZeroPad2d((1, 0, 2, 1)),
        lambda: nn.ReflectionPad2d(1),
        lambda: nn.ReplicationPad2d((0, 1, 1, 0)),
    )
    return _measured(d.pick(*kinds)(), shape)


def norm_of_images(d: Draw, shape: Shape) -> Made:
    C = shape[0]
    kinds = (
        lambda: nn.BatchNorm2d(C, affine=d.often(0.7), momentum=d.pick(0.1, 0.4)),
        lambda: nn.GroupNorm(d.pick(1, 2, C), C, affine=d.often()),
        lambda: nn.InstanceNorm2d(C, affine=d.often()),
        lambda: nn.LayerNorm(shape),
        lambda: nn.LocalResponseNorm(d.pick(2, 3)),
        lambda: nn.PReLU(C),
        lambda: nn.Dropout2d(0.3),
        lambda: Applied("channels last", lambda x: x.permute(0, 2, 3, 1).sin().permute(0, 3, 1, 2)),
        lambda: Applied("spatial softmax", lambda x: x.flatten(2).softmax(-1).view_as(x) * x),
        lambda: Applied("rows", lambda x: x.reshape(-1, x.shape[-1]).cos().reshape(x.shape)),
        lambda: Applied("row and column", lambda x: x + x.mean(2, keepdim=True) - x.amax((2, 3), keepdim=True)),
    )
    return Made(d.pick(*kinds)(), shape)


# --- sequences --------------------------------------------------------------------------------------------------------


def recurrent(d: Draw, shape: Shape) -> Made:
    T, C = shape
    n, both, layers = d.pick(4, 6), d.often(0.3), d.pick(1, 2)
    options: dict[str, Any] = dict(batch_first=True, bidirectional=both, num_layers=layers, bias=d.often(0.8))
    options |= dict(dropout=d.pick(0.0, 0.3) if layers > 1 else 0.0)
    kind = d.pick(nn.LSTM, nn.GRU, nn.RNN)
    if kind is nn.LSTM and d.often(0.3):
        options["proj_size"] = 2
    return _measured(Recurrent(kind(C, n, **options)), shape)


def cell(d: Draw, shape: Shape) -> Made:
    return Made(Stepped(d.pick(nn.LSTMCell, nn.GRUCell, nn.RNNCell)(shape[1], 4)), (shape[0], 4))


def attention(d: Draw, shape: Shape) -> Made:
    width = 2 * (shape[1] // 2)
    layer: nn.Module = Attention(width, d.pick("none", "bool", "float"), bias=d.often(), add_zero_attn=d.often(0.2))
    if d.often(0.3):
        layer = nn.TransformerEncoderLayer(width, 2, 8, d.pick(0.0, 0.2), d.pick("relu", "gelu"), batch_first=True)
    cut = Applied("cut", lambda x: x[..., :width])
    return Made(nn.Sequential(cut, layer), (shape[0], width))


def convolution_of_sequences(d: Draw, shape: Shape) -> Made:
    T, C = shape
    options = dict(stride=d.pick(1, 2), padding=d.pick(1, 2), dilation=d.pick(1, 2))
    inner = nn.Conv1d(C, 4, 3, **options)
    swap = [Applied("transpose", lambda x: x.transpose(1, 2)) for _ in range(2)]
    return _measured(nn.Sequential(swap[0], inner, nn.BatchNorm1d(4), swap[1]), shape)


def norm_of_sequences(d: Draw, shape: Shape) -> Made:
    kinds = (
        lambda: nn.LayerNorm(shape[1], elementwise_affine=d.often()),
        lambda: nn.RMSNorm(shape[1]),
        lambda: nn.Dropout(0.2),
        lambda: Applied("last", lambda x: x + x[:, -1:]),
        lambda: Applied("shifted", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1]),
        lambda: Applied("sorted", lambda x: x.sort(1).values),
        lambda: Applied("scores", lambda x: torch.einsum("bic,bjc->bij", x, x).softmax(-1) @ x),
    )
    return Made(d.pick(*kinds)(), shape)


KINDS: dict[str, tuple[Callable[[Draw, Shape], Made], ...]] = {
    "vectors": (linear, norm_of_vectors, gated, activation),
    "images": (convolution, convolution, transposed, pooling, norm_of_images, activation),
    "sequences": (recurrent, cell, attention, convolution_of_sequences, norm_of_sequences, linear, activation),
}
INPUTS: dict[str, Shape] = {"vectors": (6,), "images": (2, 8, 7), "sequences": (5, 6)}


def _measured(layer: nn.Module, shape: Shape) -> Made:
    with torch.no_grad():
        return Made(layer, tuple(layer.eval()(torch.zeros(2, *shape)).shape[1:]))


def drawn(seed: int) -> tuple[nn.Module, Shape, dict[str, Any]]:
    """A module, the shape of its inputs as `from_torch` gets it, and the options of `from_torch`."""
    torch.manual_seed(seed)
    d = Draw(seed)
    kind = d.pick(*KINDS)
    shape, layers = INPUTS[kind], []
    options: dict[str, Any] = {"channels_last": False}
    start = shape
    if kind == "sequences" and d.often(0.4):
        layers.append(nn.Embedding(11, shape[1], padding_idx=d.pick(None, 0)))
        start, options["input_dtype"] = shape[:1], np.int32
    elif kind == "images" and d.often(0.7):
        start, options["channels_last"] = (*shape[1:], shape[0]), True
    length = d.pick(2, 3, 4)
    while len(layers) < length:
        try:
            made = d.pick(*KINDS[kind])(d, shape)
        except (RuntimeError, ValueError, AssertionError):
            continue  # PyTorch does not make it: options that exclude each other, or windows larger than the image
        layer = made.layer
        if made.shape == shape and d.often(0.3):
            layer = Both(d.pick("add", "mul", "max", "gate", "inplace"), layer, d.pick(nn.Identity(), nn.Tanh()))
        if 0 not in made.shape and np.prod(made.shape) < 2000:
            layers.append(layer)
            shape = made.shape
    layers += [nn.Flatten(), nn.Linear(int(np.prod(shape)), 3)]
    module = nn.Sequential(*layers).train()
    if any(getattr(part, "running_mean", None) is not None for part in module.modules()):
        options["statistics"] = "average"
    return module, start, options


def check(seed: int, dtype: str = "float32") -> tuple[str, str, float]:
    """ "equal", "refused" or "differs", the message, and the largest relative difference of the logits."""
    module, shape, options = drawn(seed)
    found, between = [0.0], comparison._between

    def noted(ours: Any, others: Any, wide: Any) -> Any:
        found.append(comparison._relative(ours.logits, others.logits))
        return between(ours, others, wide)

    values, gradients = (1e-8, 1e-6) if dtype == "float64" else (comparison.VALUES, comparison.GRADIENTS)
    with (
        warnings.catch_warnings(),
        jax.enable_x64(dtype == "float64"),
        patch.object(comparison, "VALUES", values),
        patch.object(comparison, "GRADIENTS", gradients),
        patch.object(comparison, "_between", noted),
    ):
        warnings.simplefilter("ignore")
        if dtype == "float64":
            module.double()
            options.setdefault("input_dtype", np.float64)
        try:
            fd.Model.from_torch(module, shape, **options)
        except ConfigurationError as error:
            differs = "must compute here what it computes in PyTorch" in str(error)
            return ("differs" if differs else "refused"), str(error), max(found)
        except Exception as error:
            return "differs", f"{type(error).__name__}: {error}", max(found)
    return "equal", "", max(found)


def main(seconds: float, seed: int) -> int:
    torch.set_num_threads(1)
    end, counts, reasons, layers = time.time() + seconds, Counter(), Counter(), Counter()
    furthest = {"float32": 0.0, "float64": 0.0}
    while time.time() < end:
        dtype = "float64" if seed % 4 == 3 else "float32"
        found, why, far = check(seed, dtype)
        counts[found] += 1
        if found == "equal":
            furthest[dtype] = max(furthest[dtype], far)
            layers.update({type(part).__name__ for part in drawn(seed)[0].modules()})
        elif found == "refused":
            reasons[why.split(", got ", 1)[-1][:100]] += 1
        else:
            print(f"seed {seed} ({dtype}): {why}\n{drawn(seed)[0]}", flush=True)
        seed += 1
    print(f"modules: {dict(counts)}, the largest differences of logits: {furthest}, the next seed is {seed}")
    print(f"{len(layers)} kinds of layers: {dict(layers.most_common())}")
    for why, count in reasons.most_common():
        print(f"refused {count} times: {why}")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
