"""The convolution as two GPU kernels (Pallas, Triton) that take patches from the image as they multiply.

Numbers in memory are as in the package's layers: images [C, H, W, B], kernels [h, w, C, F]. A patch's row r = (i, j, c)
and an output's position q = (y, x, b) lie at row(r) + column(q) of the image, so a tile of patches is one load. What
several programs load again comes from the caches; nothing but images, weights and outputs is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

interpret: bool | None = None  # None: on a CPU


class Tiles(NamedTuple):
    """What one program holds at once, at most, and by how many warps."""

    filters: int = 64
    positions: int = 128
    depth: int = 32  # numbers of a patch in a product; positions in the weight gradient's
    warps: int = 4


class Patches(NamedTuple):
    """The [K, N] patches of an image, K = h * w * C and N = H' * W' * B, and where they lie in it."""

    image: tuple[int, ...]
    window: tuple[int, ...]
    stride: int

    @property
    def K(self) -> int:
        return self.window[0] * self.window[1] * self.image[0]

    @property
    def out(self) -> tuple[int, ...]:
        return tuple((n - k) // self.stride + 1 for n, k in zip(self.image[1:3], self.window, strict=True))

    @property
    def N(self) -> int:
        return self.out[0] * self.out[1] * self.image[3]

    def load(self, image: Any, r: jax.Array, q: jax.Array) -> jax.Array:
        """[len(r), len(q)], zeros outside of the patches."""
        C, H, W, B = self.image
        row = (r % C * H + r // (C * self.window[1])) * W + r // C % self.window[1]
        y, x, b = q // (self.out[1] * B), q // B % self.out[1], q % B
        column = (y * W + x) * self.stride * B + b
        inside = (r < self.K)[:, None] & (q < self.N)[None]
        return gpu.load(image.at[row[:, None] * B + column[None]], mask=inside, other=0)


def load(matrix: Any, shape: tuple[int, int], r: jax.Array, q: jax.Array) -> jax.Array:
    """[len(r), len(q)] of a flat [rows, columns], zeros outside."""
    inside = (r < shape[0])[:, None] & (q < shape[1])[None]
    return gpu.load(matrix.at[r[:, None] * shape[1] + q[None]], mask=inside, other=0)


def store(
    matrix: Any, shape: tuple[int, int], r: jax.Array, q: jax.Array, values: jax.Array, start: jax.Array | int = 0
) -> None:
    inside = (r < shape[0])[:, None] & (q < shape[1])[None]
    gpu.store(matrix.at[start + r[:, None] * shape[1] + q[None]], values.astype(matrix.dtype), mask=inside)


def interpreted() -> bool:
    return jax.default_backend() == "cpu" if interpret is None else interpret


def span(block: jax.Array | int, size: int) -> jax.Array:
    return block * size + jnp.arange(size)


def tile(size: int, most: int) -> int:
    """The power of two, 16 at least as products want it, that holds ``size``."""
    return min(most, max(16, pl.next_power_of_2(size)))


def forward(x: jax.Array, kernel: jax.Array, stride: int, tiles: Tiles) -> jax.Array:
    """[F, H', W', B]; each program makes some filters of some positions."""
    h, w, _, F = kernel.shape
    p = Patches(x.shape, (h, w), stride)
    filters, positions, depth = tile(F, tiles.filters), tile(p.N, tiles.positions), tile(p.K, tiles.depth)

    def program(image: Any, weights: Any, out: Any) -> None:
        q, f = span(pl.program_id(0), positions), span(pl.program_id(1), filters)

        def add(block: jax.Array, total: jax.Array) -> jax.Array:
            r = span(block, depth)
            return total + gpu.dot(load(weights, (p.K, F), r, f), p.load(image, r, q), trans_a=True)

        total = lax.fori_loop(0, pl.cdiv(p.K, depth), add, jnp.zeros((filters, positions), jnp.float32))
        store(out, (F, p.N), f, q, total)

    out = pl.pallas_call(
        program,
        jax.ShapeDtypeStruct((F * p.N,), x.dtype),
        grid=(pl.cdiv(p.N, positions), pl.cdiv(F, filters)),
        compiler_params=gpu.CompilerParams(num_warps=tiles.warps, num_stages=3),
        interpret=interpreted(),
    )(x.reshape(-1), kernel.reshape(-1))
    return out.reshape(F, *p.out, -1)


def weight_gradient(x: jax.Array, g: jax.Array, window: tuple[int, ...], stride: int, tiles: Tiles) -> jax.Array:
    """[h, w, C, F]; each program sums some weights' gradients over a part of the positions."""
    F, C = len(g), len(x)
    p = Patches(x.shape, window, stride)
    weights, filters, positions = tile(p.K, 64), tile(F, tiles.filters), tiles.depth
    tasks = pl.cdiv(p.K, weights) * pl.cdiv(F, filters)
    parts = min(8, pl.cdiv(p.N, 8 * positions), pl.cdiv(256, tasks))  # many small tasks keep the device busy
    blocks = pl.cdiv(p.N, parts * positions)

    def program(image: Any, g: Any, out: Any) -> None:
        r, f, part = span(pl.program_id(0), weights), span(pl.program_id(1), filters), pl.program_id(2)

        def add(block: jax.Array, total: jax.Array) -> jax.Array:
            q = span(part * blocks + block, positions)
            return total + gpu.dot(p.load(image, r, q), load(g, (F, p.N), f, q), trans_b=True)

        total = lax.fori_loop(0, blocks, add, jnp.zeros((weights, filters), jnp.float32))
        store(out, (p.K, F), r, f, total, part * (p.K * F))

    out = pl.pallas_call(
        program,
        jax.ShapeDtypeStruct((parts * p.K * F,), jnp.float32),
        grid=(pl.cdiv(p.K, weights), pl.cdiv(F, filters), parts),
        compiler_params=gpu.CompilerParams(num_warps=tiles.warps, num_stages=3),
        interpret=interpreted(),
    )(x.reshape(-1), g.reshape(-1))
    return out.reshape(parts, *window, C, F).sum(0).astype(x.dtype)


def image_gradient(forward: Callable, g: jax.Array, kernel: jax.Array, stride: int, size: tuple[int, ...]) -> jax.Array:
    """As a convolution of the output's gradient with the turned weights: it gathers where ours adds in place."""
    h, w, _, _ = kernel.shape
    (H, W), (y, x) = size, ((n - 1) * stride + 1 for n in g.shape[1:3])
    edges = [(0, 0, 0), (h - 1, H - y, stride - 1), (w - 1, W - x, stride - 1), (0, 0, 0)]
    return forward(lax.pad(g, jnp.zeros((), g.dtype), edges), kernel[::-1, ::-1].transpose(0, 1, 3, 2))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv(x: jax.Array, kernel: jax.Array, stride: int, tiles: Tiles) -> jax.Array:
    """x [C, H, W, B], padded, kernel [h, w, C, F] -> [F, H', W', B]."""
    return forward(x, kernel, stride, tiles)


conv.defvjp(
    lambda x, kernel, stride, tiles: (forward(x, kernel, stride, tiles), (x, kernel)),
    lambda stride, tiles, kept, g: (
        image_gradient(partial(forward, stride=1, tiles=tiles), g, kept[1], stride, kept[0].shape[1:3]),
        weight_gradient(kept[0], g, kept[1].shape[:2], stride, tiles),
    ),
)
