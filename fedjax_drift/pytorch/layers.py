"""Layers of PyTorch as functions of JAX arrays. The tables at the end have their names in PyTorch.

The arguments are those of PyTorch's operation, in its order, after the mode in which the network runs. Images may come
as `Images`, which the convolutions, the pooling and the normalisations return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.batch_norm import rows
from fedjax_drift.convolution import windows
from fedjax_drift.convolution.conv import conv
from fedjax_drift.convolution.groups import normalized
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.pytorch.images import Images, as_images, plain

Array = jax.Array
Sizes = int | Sequence[int]


class Mode(NamedTuple):
    """How a network runs."""

    key: Array | None = None  # of the random numbers of this operation; None: there are none, as in evaluation
    mask: Array | None = None  # [B], the examples that are no padding; None: all
    frozen: bool = False  # BatchNorm normalises with its running statistics in training, too

    def random(self, what: str) -> Array:
        if self.key is None:
            raise ConfigurationError(
                f"the network must draw no random numbers in evaluation, got {what} there: use dropout layers, or a "
                "test of self.training"
            )
        return self.key


def sizes(value: Sizes, axes: int) -> tuple[int, ...]:
    """An option of a convolution, one number for each axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


# --- dense layers and tables ------------------------------------------------------------------------------------------


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias


def bilinear(x: Array, y: Array, weight: Array, bias: Array | None = None) -> Array:
    z = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


def embedding(table: Array, ids: Array, padding: int = -1, *_: Any) -> Array:
    """Selects rows. The row ``padding`` gets no gradient. An id outside of the table gives NaN."""
    selected = table.at[ids].get(mode="fill", fill_value=jnp.nan)
    if padding < 0:
        return selected
    return jnp.where((ids == padding)[..., None], lax.stop_gradient(selected), selected)


# --- convolutions -----------------------------------------------------------------------------------------------------


def conv2d(
    x: Images | Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    pool: int = 1,
) -> Images | Array:
    """pool: the window and the stride of a max-pooling after the convolution (`graph.pooled`)."""
    grid = as_images(x).grid
    strides, dilations = sizes(stride, 2), sizes(dilation, 2)
    around = _amounts(padding, weight.shape[2:], dilations)
    if groups == 1 and dilations == (1, 1) and strides[0] == strides[1]:
        grid = jnp.pad(grid, ((0, 0), *around, (0, 0))) if around[0] != around[1] else grid
        same: Any = "VALID" if around[0] != around[1] or around[0] == (0, 0) else around[0]
        y = conv(grid, weight.transpose(2, 3, 1, 0), strides[0], same, pool)
    else:
        axes = ("CHWN", "OIHW", "CHWN")
        y = lax.conv_general_dilated(grid, weight, strides, around, None, dilations, axes, groups)
    y = y if bias is None else y + bias[:, None, None, None]
    return Images(y) if x.ndim == 4 else y[..., 0]


def _amounts(padding: Sizes | str, window: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """How many zeros a convolution adds before and after each axis."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, window, strict=True)]
        return [(n // 2, n - n // 2) for n in totals]
    return [(n, n) for n in sizes(0 if isinstance(padding, str) else padding, len(window))]


def conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """A convolution of images [B, C, length, 1]."""
    (stride,), (dilation,) = sizes(stride, 1), sizes(dilation, 1)
    around = padding if isinstance(padding, str) else (*sizes(padding, 1), 0)
    return plain(conv2d(x[..., None], weight[..., None], bias, stride, around, (dilation, 1), groups))[..., 0]


def conv3d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    dilations = sizes(dilation, 3)
    around = _amounts(padding, weight.shape[2:], dilations)
    axes = ("NCDHW", "OIDHW", "NCDHW")
    y = lax.conv_general_dilated(x, weight, sizes(stride, 3), around, None, dilations, axes, groups)
    return y if bias is None else y + bias[:, None, None, None]


def transposed(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """A transposed convolution in any number of dimensions. weight: [in, out / groups, ...]."""
    n = weight.ndim - 2
    strides, dilations = sizes(stride, n), sizes(dilation, n)
    C, F, *window = weight.shape
    kernel = jnp.flip(weight, range(2, n + 2)).reshape(groups, C // groups, F, *window)
    kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * F, C // groups, *window)
    around = [
        (d * (k - 1) - p, d * (k - 1) - p + extra)
        for d, k, p, extra in zip(dilations, window, sizes(padding, n), sizes(output_padding, n), strict=True)
    ]
    y = lax.conv_general_dilated(x, kernel, (1,) * n, around, strides, dilations, feature_group_count=groups)
    return y if bias is None else y + bias.reshape(-1, *[1] * n)


# --- pooling ----------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """The windows of a pooling along one axis."""

    size: int
    step: int
    before: int
    after: int


def _windows(x: Any, window: Sizes, stride: Sizes, padding: Sizes, ceil: bool) -> list[Windows]:
    """One for each of the last axes. With ``ceil``, the last window may begin in the image and end after it."""
    axes = 2 if isinstance(x, Images) or x.ndim == 4 else x.ndim - 2
    found = []
    steps = sizes(stride or window, axes)
    for n, k, s, p in zip(x.shape[-axes:], sizes(window, axes), steps, sizes(padding, axes), strict=True):
        count = (n + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        count -= (count - 1) * s >= n + p
        found.append(Windows(k, s, p, (count - 1) * s + k - n - p))
    return found


def _reduce(x: Any, along: list[Windows], empty: float, combine: Callable[..., Array]) -> Any:
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(along))
    for axis, (size, step, before, after) in enumerate(along, first):
        edges = [(before, max(after, 0), 0) if i == axis else (0, 0, 0) for i in range(grid.ndim)]
        grid = lax.pad(grid, jnp.asarray(empty, grid.dtype), edges)
        count = (grid.shape[axis] - size) // step + 1
        slices = [windows.strided_slice(grid, axis, i, count, step) for i in range(size)]
        grid = slices[0]
        for each in slices[1:]:
            grid = combine(grid, each)
    return Images(grid) if isinstance(x, Images) else grid


def max_pool(
    x: Any, window: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1, ceil: bool = False
) -> Any:
    if set(sizes(dilation, 1)) != {1}:
        raise ConfigurationError(f"dilation of a max-pooling must be 1, got {dilation}")
    return _reduce(x, _windows(x, window, stride, padding, ceil), -jnp.inf, jnp.maximum)


def avg_pool(
    x: Any,
    window: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil: bool = False,
    with_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    along = _windows(x, window, stride, padding, ceil)
    total = _reduce(x, along, 0.0, jnp.add)
    if divisor:
        return _elementwise(lambda y: y / divisor, total)
    counts: list[Array] = []  # per axis: how many numbers of each window count
    for n, (size, step, before, after) in zip(x.shape[-len(along) :], along, strict=True):
        starts = jnp.arange((n + before + max(after, 0) - size) // step + 1) * step - before
        low, high = (-before, n + before) if with_padding else (0, n)
        counts.append(jnp.minimum(starts + size, high) - jnp.maximum(starts, low))
    count = counts[0].astype(x.dtype)
    for each in counts[1:]:
        count = count[..., None] * each.astype(x.dtype)
    if isinstance(total, Images):
        return Images(total.grid / count[..., None])
    return total / count


def adaptive_pool(reduce: Callable[..., Array], x: Any, size: Sequence[int]) -> Any:
    """Reduces parts of the axes, of nearly equal lengths."""
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - len(size))
    for axis, parts in enumerate(size, first):
        n = grid.shape[axis]
        if n % parts == 0:
            shape = (*grid.shape[:axis], parts, n // parts, *grid.shape[axis + 1 :])
            grid = reduce(grid.reshape(shape), axis + 1)
        else:
            edges = [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
            grid = jnp.stack([reduce(lax.slice_in_dim(grid, a, b, axis=axis), axis) for a, b in edges], axis)
    return Images(grid) if isinstance(x, Images) else grid


def adaptive_max_pool(x: Any, size: Sequence[int]) -> tuple[Any, None]:
    """The maxima, and nothing in place of PyTorch's indices."""
    return adaptive_pool(jnp.max, x, size), None


def _elementwise(function: Callable[[Array], Array], x: Any) -> Any:
    return Images(function(x.grid)) if isinstance(x, Images) else function(x)


def upsample(resize: Callable[..., Array], x: Any, size: Sequence[int] | None, factors: Sequence[float] | None) -> Any:
    """Resizes the last axes to ``size``, or by ``factors``: ``resize(grid, axis, m, scale)`` makes an axis of length n
    one of length m, with the old coordinate ``scale`` times the new one."""
    axes = len(size or factors or ())
    grid, first = (x.grid, 1) if isinstance(x, Images) else (x, x.ndim - axes)
    for i, axis in enumerate(range(first, first + axes)):
        n = grid.shape[axis]
        m, scale = (size[i], n / size[i]) if size else (int(n * factors[i]), 1 / factors[i])  # type: ignore[index]
        grid = resize(grid, axis, m, scale)
    return Images(grid) if isinstance(x, Images) else grid


def upsample_nearest(x: Any, size: Sequence[int] | None, factors: Sequence[float] | None = None) -> Any:
    def resize(grid: Array, axis: int, m: int, scale: float) -> Array:
        return jnp.take(grid, jnp.asarray([min(int(j * scale), grid.shape[axis] - 1) for j in range(m)]), axis)

    return upsample(resize, x, size, factors)


def upsample_linear(
    x: Any, size: Sequence[int] | None, corners: bool = False, factors: Sequence[float] | None = None
) -> Any:
    def resize(grid: Array, axis: int, m: int, scale: float) -> Array:
        n, j = grid.shape[axis], jnp.arange(m)
        at = j * (n - 1) / max(m - 1, 1) if corners else jnp.maximum((j + 0.5) * scale - 0.5, 0)
        low = jnp.clip(jnp.floor(at).astype(int), 0, n - 1)
        weight = (at - low).astype(grid.dtype).reshape(-1, *[1] * (grid.ndim - axis - 1))
        below, above = (jnp.take(grid, jnp.minimum(low + k, n - 1), axis) for k in (0, 1))
        return below + weight * (above - below)

    return upsample(resize, x, size, factors)


# --- normalisation ----------------------------------------------------------------------------------------------------


def batch_norm(
    mode: Mode,
    x: Any,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    momentum: float,
    eps: float,
) -> tuple[Any, None, None]:
    """BatchNorm with running statistics, in evaluation."""
    scale = lax.rsqrt(variance + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    return _scaled(x, scale, shift), None, None


def batch_norm_training(
    mode: Mode,
    x: Any,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    variance: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, None, None, Array, Array]:
    """BatchNorm in training. Returns the output and, as the last two, the new running statistics.

    The padding of a batch is left out. As in PyTorch, the running variance has n - 1 in its denominator.
    """
    if mode.frozen or not training:
        return *batch_norm(mode, x, weight, bias, mean, variance, momentum, eps), mean, variance
    grid, axis = (x.grid, 0) if isinstance(x, Images) else (x, 1)
    others = tuple(i for i in range(grid.ndim) if i != axis)
    if mode.mask is None:
        real, n = None, jnp.asarray(grid.size // grid.shape[axis], grid.dtype)
    else:
        real = rows(mode.mask, plain(x), None)
        real = real.reshape(1, 1, 1, -1) if isinstance(x, Images) else real
        n = real.sum().astype(grid.dtype) * (math.prod(x.shape[2:]))
        n = jnp.maximum(n, 1)
    average = grid.sum(others, where=real) / n
    centred = grid - jnp.expand_dims(average, others)
    spread = jnp.square(centred).sum(others, where=real) / n
    scale = lax.rsqrt(spread + eps) * (1 if weight is None else weight)
    y = centred * jnp.expand_dims(scale, others)
    y = y if bias is None else y + jnp.expand_dims(bias, others)
    unbiased = spread * n / jnp.maximum(n - 1, 1)
    new = [(1 - momentum) * old + momentum * now for old, now in ((mean, average), (variance, unbiased))]
    return Images(y) if isinstance(x, Images) else y, None, None, new[0], new[1]


def _scaled(x: Any, scale: Array, shift: Array) -> Any:
    """x * scale + shift, with one number for each channel."""
    if isinstance(x, Images):
        return Images(x.grid * scale[:, None, None, None] + shift[:, None, None, None])
    shape = (1, -1, *[1] * (x.ndim - 2))
    return x * scale.reshape(shape) + shift.reshape(shape)


def _normalised(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(dtype)
    wide = wide - wide.mean(axes, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(axes, keepdims=True) + eps)).astype(x.dtype)


def layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5, *_: Any
) -> Array:
    y = _normalised(x, tuple(range(-len(shape), 0)), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None) -> Array:
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y = x * lax.rsqrt(jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True) + eps)
    return y if weight is None else y * weight


def group_norm(
    x: Any, groups: int, weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5, *_: Any
) -> Any:
    if isinstance(x, Images):
        y: Any = Images(normalized(x.grid, groups, eps))
    else:
        y = _normalised(x.reshape(x.shape[0], groups, -1), (2,), eps).reshape(x.shape)
    C = x.shape[1]
    scale, shift = jnp.ones(C, x.dtype) if weight is None else weight, jnp.zeros(C, x.dtype) if bias is None else bias
    return _scaled(y, scale, shift)


def instance_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, own: bool, momentum: float, eps: float, *_: Any
) -> Any:
    if not own:
        raise ConfigurationError("InstanceNorm must have no running statistics: pass track_running_stats=False")
    return group_norm(x, x.shape[1], weight, bias, eps)


# --- dropout ----------------------------------------------------------------------------------------------------------


def _kept(mode: Mode, x: Array, p: float, shape: tuple[int, ...] | None = None) -> Array:
    if p == 0:
        return x
    keep = jax.random.bernoulli(mode.random("dropout"), 1 - p, shape or x.shape)
    return jnp.where(keep, x / (1 - p), 0) if p < 1 else jnp.zeros_like(x)


def dropout(mode: Mode, x: Any, p: float, training: bool) -> Any:
    return _elementwise(lambda y: _kept(mode, y, p), x) if training else x


def native_dropout(mode: Mode, x: Any, p: float, training: bool | None = True) -> tuple[Any, None]:
    return dropout(mode, x, p, training is not False), None


def feature_dropout(mode: Mode, x: Array, p: float, training: bool) -> Array:
    return _kept(mode, x, p, (*x.shape[:2], *[1] * (x.ndim - 2))) if training else x


def bernoulli(mode: Mode, x: Array, p: Any = None, **_: Any) -> Array:
    return jax.random.bernoulli(mode.random("bernoulli"), x if p is None else p, x.shape).astype(x.dtype)


def uniform(mode: Mode, shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jax.random.uniform(mode.random("rand"), tuple(shape), dtype or jnp.float32)


def normal(mode: Mode, shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
    return jax.random.normal(mode.random("randn"), tuple(shape), dtype or jnp.float32)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    mode: Mode,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """[..., length, width]. With enable_gqa, several heads of the queries share a head of the keys and values."""
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None and mask.dtype == bool:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = jax.nn.softmax(scores)
    if mask is not None and mask.dtype == bool:
        weights = jnp.where(mask, weights, 0)  # also if a position attends to nothing
    return _kept(mode, weights, dropout_p) @ value if dropout_p else weights @ value


# --- recurrent layers -------------------------------------------------------------------------------------------------
#
# A cell maps (state, W_ih x + b_ih, W_hh, b_hh) to the new state. The first part of the state is the output.

State = tuple[Array, ...]


def _lstm_cell(state: State, inputs: Array, weight: Array, bias: Array | float) -> State:
    h, c = state
    i, f, g, o = jnp.split(inputs + h @ weight.T + bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_cell(state: State, inputs: Array, weight: Array, bias: Array | float) -> State:
    (h,) = state
    r, z, n = jnp.split(inputs, 3, -1)
    hr, hz, hn = jnp.split(h @ weight.T + bias, 3, -1)
    z = jax.nn.sigmoid(z + hz)
    return ((1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h,)


def _simple_cell(activation: Callable[[Array], Array]) -> Callable[..., State]:
    return lambda state, inputs, weight, bias: (activation(inputs + state[0] @ weight.T + bias),)


def recurrent(
    cell: Callable[..., State],
    mode: Mode,
    x: Array,
    states: Array | Sequence[Array],
    weights: Sequence[Array],
    biases: bool,
    layers: int,
    *options: Any,
) -> tuple[Array, ...]:
    """Recurrent layers: the outputs of the last one, and the last states of all.

    options: dropout (between layers), training, bidirectional, batch_first.
    """
    dropout_p, training, bidirectional, batch_first = options
    starts = states if isinstance(states, list | tuple) else [states]
    directions = 2 if bidirectional else 1
    per = len(weights) // (layers * directions)
    if per != (4 if biases else 2):
        raise ConfigurationError("proj_size of an LSTM must be 0: add a linear layer instead")
    y = jnp.swapaxes(x, 0, 1) if batch_first else x
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            w_ih, w_hh, *b = weights[n * per : (n + 1) * per]
            b_ih, b_hh = b or (0.0, 0.0)
            step = partial(_step, cell, w_hh, b_hh)
            end, out = lax.scan(step, tuple(each[n] for each in starts), y @ w_ih.T + b_ih, reverse=direction == 1)
            ends.append(end)
            outputs.append(out)
        y = jnp.concatenate(outputs, -1)
        if training and dropout_p and layer < layers - 1:
            y = _kept(mode._replace(key=jax.random.fold_in(mode.random("dropout"), layer)), y, dropout_p)
    last = tuple(jnp.stack(each) for each in zip(*ends, strict=True))
    return (jnp.swapaxes(y, 0, 1) if batch_first else y, *last)


def _step(
    cell: Callable[..., State], weight: Array, bias: Array | float, state: State, inputs: Array
) -> tuple[State, Array]:
    state = cell(state, inputs, weight, bias)
    return state, state[0]


# --- operations that know images --------------------------------------------------------------------------------------


def concatenate_images(parts: Sequence[Any], dim: int = 0) -> Any:
    """Concatenates images along any axis."""
    return Images(jnp.concatenate([as_images(part).grid for part in parts], (3, 0, 1, 2)[dim]))


def flatten_images(x: Images, shape: Sequence[int]) -> Array:
    """[B, C, H, W] -> [B, C * H * W]."""
    return x.grid.reshape(-1, x.grid.shape[-1]).T


def mean_of_images(x: Images, dim: Any, keepdim: bool = False) -> Any:
    """The mean over the positions."""
    return Images(x.grid.mean((1, 2), keepdims=True)) if keepdim else x.grid.mean((1, 2)).T


# --- their names in PyTorch -------------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[..., Any]] = {
    "bilinear": bilinear,
    "conv1d": conv1d,
    "conv3d": conv3d,
    "conv_transpose1d": transposed,
    "conv_transpose2d": transposed,
    "conv_transpose3d": transposed,
    "embedding": embedding,
    "layer_norm": layer_norm,
    "linear": linear,
    "rms_norm": rms_norm,
}

# These take images as `Images` and as arrays.
OF_IMAGES: dict[str, Callable[..., Any]] = {
    "adaptive_avg_pool1d": partial(adaptive_pool, jnp.mean),
    "adaptive_avg_pool2d": partial(adaptive_pool, jnp.mean),
    "adaptive_avg_pool3d": partial(adaptive_pool, jnp.mean),
    "adaptive_max_pool1d": adaptive_max_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
    "avg_pool1d": avg_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "conv2d": conv2d,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "max_pool3d": max_pool,
    "upsample_bilinear2d": upsample_linear,
    "upsample_linear1d": upsample_linear,
    "upsample_nearest1d": upsample_nearest,
    "upsample_nearest2d": upsample_nearest,
}

# The first argument of these is the `Mode`.
IN_MODE: dict[str, Callable[..., Any]] = {
    "bernoulli": bernoulli,
    "feature_dropout": feature_dropout,
    "gru.input": partial(recurrent, _gru_cell),
    "lstm.input": partial(recurrent, _lstm_cell),
    "rand": uniform,
    "randn": normal,
    "rnn_relu.input": partial(recurrent, _simple_cell(jax.nn.relu)),
    "rnn_tanh.input": partial(recurrent, _simple_cell(jnp.tanh)),
    "scaled_dot_product_attention": attention,
}

# And these also take images as `Images`.
OF_IMAGES_IN_MODE: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit_functional": batch_norm_training,
    "_native_batch_norm_legit_no_training": batch_norm,
    "dropout": dropout,
    "native_dropout": native_dropout,
}
