"""The 3x3 convolution with stride 1 on one core, by Winograd's algorithm F(2x2, 3x3).

Source: Lavin, Gray 2016, arXiv 1509.09308, section 4.1.

An output tile of 2 x 2 positions depends on an input tile d of 4 x 4 pixels. With a kernel w of 3 x 3,

    output tile = A^T [(G w G^T) * (B^T d B)] A

where * multiplies elementwise. Summed over the channels, it becomes 16 matrix products, one for each position in a
tile. They need 4 / 9 of the multiplications of the convolution.

x is [C, H, W, B], kernel is [3, 3, C, F], and g [F, H', W', B] is the gradient of the output. ``padding`` is the
number of rows before and after the image, and of columns. The tiles have the axes [rows, columns, B, C], so that the
innermost loops are over the channels. A few rows of tiles are processed at a time, so that they stay in the cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.convolution import bilinear

Matrix = Sequence[Sequence[float]]
Amounts = tuple[tuple[int, int], tuple[int, int]]

B_T = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
G = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
A_T = ((1, 1, 1, 0), (0, 1, -1, -1))
G_T, A = tuple(zip(*G, strict=True)), tuple(zip(*A_T, strict=True))
CACHE = 2**18  # numbers in the transformed input tiles that are processed at a time


def _convolution(x: jax.Array, kernel: jax.Array, padding: Amounts) -> jax.Array:
    """x, kernel -> [F, H', W', B], the output."""
    return _products(x, [u.T for u in between(G, lambda i, j: kernel[i, j])], padding)


def _image_gradient(g: jax.Array, kernel: jax.Array, padding: Amounts) -> jax.Array:
    """g, kernel -> [C, H, W, B]: the convolution of g with the kernel that is rotated by 180 degrees."""
    u = between(G, lambda i, j: kernel[i, j])
    rotated = [u[4 * i + j] for i in (3, 1, 2, 0) for j in (3, 1, 2, 0)]
    (top, bottom), (left, right) = padding
    return _products(g, rotated, ((2 - top, 2 - bottom), (2 - left, 2 - right)))


def _weight_gradient(x: jax.Array, g: jax.Array, padding: Amounts) -> jax.Array:
    """x, g -> [3, 3, C, F], the gradient of the kernel: G^T [sum over all tiles of (B^T d B) * (A g A^T)] G."""
    C, F = len(x), len(g)
    x, g = _padded(x, padding), _padded(g, ((0, g.shape[1] % 2), (0, g.shape[2] % 2)))
    rows, parts = _parts(x)

    def add(k: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        part = lax.dynamic_slice_in_dim(g, 2 * rows * k, 2 * rows)
        outs = between(A, lambda i, j: part[i::2, j::2])
        tiles = _tiles(x, rows, k)
        return [t + d.T @ out.reshape(-1, F) for t, d, out in zip(totals, tiles, outs, strict=True)]

    totals = lax.fori_loop(0, parts, add, [jnp.zeros((C, F), x.dtype)] * 16)
    return jnp.stack(between(G_T, lambda i, j: totals[4 * i + j])).reshape(3, 3, C, F)


def _products(x: jax.Array, kernels: list[jax.Array], padding: Amounts) -> jax.Array:
    """The output, with the transformed kernels [F, C]."""
    (_, H, W, B), F = x.shape, len(kernels[0])
    H, W = (n + sum(around) - 2 for n, around in zip((H, W), padding, strict=True))
    x = _padded(x, padding)
    rows, parts = _parts(x)
    columns = x.shape[1] // 2 - 1

    def put(k: jax.Array, out: jax.Array) -> jax.Array:
        # [F, C] times [N, C], transposed: so the output has the axes of an image, without a transposition of its own.
        pairs = zip(kernels, _tiles(x, rows, k), strict=True)
        m = [lax.dot_general(u, d, (((1,), (1,)), ((), ()))).reshape(F, rows, columns, B) for u, d in pairs]
        a, b, c, d = between(A_T, lambda i, j: m[4 * i + j])  # each [F, rows, columns, B]
        y = jnp.stack([jnp.stack([a, b], 3), jnp.stack([c, d], 3)], 2).reshape(F, 2 * rows, 2 * columns, B)
        return lax.dynamic_update_slice_in_dim(out, y, 2 * rows * k, 1)

    out = jnp.zeros((F, 2 * rows * parts, 2 * columns, B), x.dtype)
    return lax.fori_loop(0, parts, put, out)[:, :H, :W]


def between(matrix: Matrix, at: Callable[[int, int], jax.Array]) -> list[jax.Array]:
    """The entries of ``matrix`` D ``matrix``^T, row by row. The entry (i, j) of D is the array at(i, j)."""

    def combined(factors: Sequence[float], arrays: Sequence[jax.Array]) -> jax.Array:
        terms = [x if factor == 1 else factor * x for factor, x in zip(factors, arrays, strict=True) if factor]
        return reduce(operator.add, terms)

    size = range(len(matrix[0]))
    columns = [[at(i, j) for i in size] for j in size]
    rows = [[combined(left, column) for column in columns] for left in matrix]
    return [combined(right, row) for row in rows for right in matrix]


def _padded(x: jax.Array, padding: Amounts) -> jax.Array:
    """[C, H, W, B] -> [H, W, B, C], padded, and then to even numbers of rows and columns."""
    around = [
        (before, after + (n + before + after) % 2, 0) for n, (before, after) in zip(x.shape[1:3], padding, strict=True)
    ]
    return lax.pad(x.transpose(1, 2, 3, 0), jnp.zeros((), x.dtype), [*around, (0, 0, 0), (0, 0, 0)])


def _tiles(x: jax.Array, rows: int, k: jax.Array) -> list[jax.Array]:
    """The 16 entries [N, C] of the transformed input tiles in part k, a number of ``rows`` of tiles."""
    x = lax.dynamic_slice_in_dim(x, 2 * rows * k, 2 * rows + 2)
    columns = x.shape[1] - 2
    tiles = between(B_T, lambda i, j: x[i : i + 2 * rows : 2, j : j + columns : 2])
    return [d.reshape(-1, x.shape[-1]) for d in tiles]


def _parts(x: jax.Array) -> tuple[int, int]:
    """How many rows of tiles are processed at a time, and the number of such parts."""
    total, in_a_row = x.shape[0] // 2 - 1, 16 * (x.shape[1] // 2 - 1) * x.shape[2] * x.shape[3]
    rows = max(n for n in range(1, total + 1) if total % n == 0 and (n == 1 or n * in_a_row <= CACHE))
    return rows, total // rows


convolution = bilinear.primitive(_convolution, _image_gradient, _weight_gradient)
