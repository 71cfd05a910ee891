"""Transformers as flax.nnx modules: `ViT` for images, `Encoder` and `Decoder` for sequences of token ids.

The blocks of a network have parameters of the same shapes, so these are stacked: "blocks/attention/query/kernel" is
[depth, in, out], and `run` scans over the first axis. The compilation time then does not depend on the depth. Every
kernel is a matrix [in, out] on its last two axes. The softmax and the statistics of layer normalisation are computed in
float32, even if the model computes in bfloat16. Kernels are initialised with Xavier's uniform distribution, embeddings
and positions with N(0, 0.02^2).

Axis letters: B examples, T positions, W width, H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_drift.models.layers import cosine_logits

TABLE = nnx.initializers.normal(0.02)  # of embeddings and positions
OF_TABLES = {"tokens": -2, "positions": -2}  # the axes of their outputs


def dense(inputs: int, outputs: int, rngs: nnx.Rngs, use_bias: bool = True) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=use_bias, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)


def norm(width: int, epsilon: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


class Blocks(NamedTuple):
    """The sizes and options that the blocks of all three networks have."""

    width: int
    depth: int
    heads: int
    dropout: float
    remat: bool  # the backward pass computes each block again

    def stacked(self, epsilon: float, rngs: nnx.Rngs, **options: bool) -> tuple[nnx.Dropout, Block]:
        """The dropout of the embeddings, and the blocks as one `Block`, whose parameters have a first axis [depth]."""

        @nnx.split_rngs(splits=self.depth)
        @nnx.vmap
        def create(rngs: nnx.Rngs) -> Block:
            return Block(self.width, self.heads, self.dropout, epsilon, **options, rngs=rngs)

        return nnx.Dropout(self.dropout, rngs=rngs if self.dropout else None), create(rngs)


class Attention(nnx.Module):
    """Self-attention with H heads, [B, T, W] -> [B, T, W]. ``mask`` is bool [B, T], False for positions to ignore."""

    def __init__(self, width: int, heads: int, causal: bool, rngs: nnx.Rngs):
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (dense(width, width, rngs) for _ in range(4))

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        query, key, value = (
            layer(x).reshape(*x.shape[:2], self.heads, -1) for layer in (self.query, self.key, self.value)
        )
        where = None if mask is None else mask[:, None, None, :]
        mixed = jax.nn.dot_product_attention(query, key, value, mask=where, is_causal=self.causal)
        return self.out(mixed.reshape(x.shape))


class MLP(nnx.Module):
    """Two dense layers with 4 W hidden units and GELU between them."""

    def __init__(self, width: int, tanh_gelu: bool, rngs: nnx.Rngs):
        self.tanh_gelu = tanh_gelu
        self.up, self.down = dense(width, 4 * width, rngs), dense(4 * width, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x), approximate=self.tanh_gelu))


class Block(nnx.Module):
    """Attention and MLP, each with a shortcut. The norms come before them, or with ``post_norm`` after the sums."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        epsilon: float,
        *,
        causal: bool = False,
        tanh_gelu: bool = False,
        post_norm: bool = False,
        rngs: nnx.Rngs,
    ):
        self.post_norm, self.dropout = post_norm, nnx.Dropout(dropout)
        self.attention_norm, self.mlp_norm = norm(width, epsilon, rngs), norm(width, epsilon, rngs)
        self.attention, self.mlp = Attention(width, heads, causal, rngs), MLP(width, tanh_gelu, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        if self.post_norm:
            x = self.attention_norm(x + self.dropout(self.attention(x, mask), rngs=keys[0]))
            return self.mlp_norm(x + self.dropout(self.mlp(x), rngs=keys[1]))
        x = x + self.dropout(self.attention(self.attention_norm(x), mask), rngs=keys[0])
        return x + self.dropout(self.mlp(self.mlp_norm(x)), rngs=keys[1])


def run(blocks: Block, x: jax.Array, mask: jax.Array | None, dropout: nnx.Dropout, remat: bool) -> jax.Array:
    """Drops out entries of x, and applies the stacked blocks. ``remat``: the backward pass computes a block again."""
    graph, params = nnx.split(blocks)
    depth = len(jax.tree.leaves(params)[0])
    drops = dropout.rngs is not None and not dropout.deterministic
    keys = jax.random.split(dropout.rngs() if drops else jax.random.key(0), depth)  # not used without dropout

    def step(x: jax.Array, block: tuple) -> tuple[jax.Array, None]:
        params, key = block
        return nnx.merge(graph, params)(x, mask, key), None

    # a scan compiles one block, whatever the depth
    return jax.lax.scan(jax.checkpoint(step) if remat else step, dropout(x), (params, keys))[0]


class Head(nnx.Module):
    """The last layer of a classifier: logits, or with ``cosine`` the cosines between features and class weights."""

    def __init__(self, width: int, num_classes: int, cosine: bool, rngs: nnx.Rngs):
        self.cosine, self.dense = cosine, dense(width, num_classes, rngs, use_bias=not cosine)

    def __call__(self, features: jax.Array) -> jax.Array:
        return cosine_logits(features, self.dense.kernel[...]) if self.cosine else self.dense(features)


class Classified(nnx.Module):
    """A network with a method ``features`` and a last layer ``classifier``."""

    features: Any
    classifier: Head

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.features(x))


class ViT(Classified):
    """A vision transformer: patches, a class token, learned positions, blocks, and a classifier on the class token."""

    def __init__(
        self,
        num_classes: int,
        image: tuple[int, int, int],  # height, width, channels
        patch: int,
        cosine: bool,
        blocks: Blocks,
        rngs: nnx.Rngs,
    ):
        self.patch, self.remat, width = patch, blocks.remat, blocks.width
        positions = 1 + (image[0] // patch) * (image[1] // patch)
        self.patches = dense(patch * patch * image[2], width, rngs)
        self.class_token = nnx.Param(TABLE(rngs.params(), (width,)))
        self.positions = nnx.Param(TABLE(rngs.params(), (positions, width)))
        self.dropout, self.blocks = blocks.stacked(1e-12, rngs)
        self.norm = norm(width, 1e-12, rngs)
        self.classifier = Head(width, num_classes, cosine, rngs)

    def features(self, x: jax.Array) -> jax.Array:
        """[B, height, width, channels] -> [B, W]."""
        B, height, width, channels = x.shape
        p = self.patch
        x = x.reshape(B, height // p, p, width // p, p, channels).swapaxes(2, 3)
        x = self.patches(x.reshape(B, -1, p * p * channels))
        x = jnp.concatenate([jnp.broadcast_to(self.class_token[...], (B, 1, x.shape[-1])), x], 1)
        x = run(self.blocks, x + self.positions[...][None], None, self.dropout, self.remat)
        return self.norm(x[:, 0])


def embed(ids: jax.Array, tokens: nnx.Param, positions: nnx.Param) -> jax.Array:
    """int [B, T] -> [B, T, W], the sums of token and position embeddings. An id that is not in the table gives NaN."""
    rows = jnp.asarray(tokens[...]).at[ids.astype(jnp.int32)].get(mode="fill", fill_value=jnp.nan)
    return rows + positions[: ids.shape[1]][None]


class Encoder(Classified):
    """A classifier of token ids [B, T], in which id 0 is padding.

    The features are the mean of the outputs at the tokens. With ``bert`` the blocks have post-norm, and the features
    are a dense layer with tanh of the first output.
    """

    output_axes = OF_TABLES

    def __init__(
        self,
        num_classes: int,
        vocabulary: int,
        length: int,
        bert: bool,
        cosine: bool,
        blocks: Blocks,
        rngs: nnx.Rngs,
    ):
        self.bert, self.remat, width = bert, blocks.remat, blocks.width
        self.tokens = nnx.Param(TABLE(rngs.params(), (vocabulary, width)))
        self.positions = nnx.Param(TABLE(rngs.params(), (length, width)))
        self.dropout, self.blocks = blocks.stacked(1e-12, rngs, post_norm=bert)
        self.norm = norm(width, 1e-12, rngs)  # of the embeddings with ``bert``, otherwise of the last block's output
        if bert:
            self.pooler = dense(width, width, rngs)
        self.classifier = Head(width, num_classes, cosine, rngs)

    def features(self, x: jax.Array) -> jax.Array:
        """int [B, T] -> [B, W]."""
        mask = x != 0
        x = embed(x, self.tokens, self.positions)
        if self.bert:
            return jnp.tanh(self.pooler(run(self.blocks, self.norm(x), mask, self.dropout, self.remat)[:, 0]))
        x = self.norm(run(self.blocks, x, mask, self.dropout, self.remat))
        weights = mask / jnp.maximum(mask.sum(1, keepdims=True), 1)
        return jnp.einsum("btw,bt->bw", x, weights.astype(x.dtype))


class Decoder(nnx.Module):
    """A language model: token ids [B, T] -> logits [B, T, vocabulary] of the next tokens. Its architecture is GPT-2's.

    The output layer uses the table of the token embeddings.
    """

    output_axes = OF_TABLES

    def __init__(self, vocabulary: int, length: int, blocks: Blocks, rngs: nnx.Rngs):
        self.remat, width = blocks.remat, blocks.width
        self.tokens = nnx.Param(TABLE(rngs.params(), (vocabulary, width)))
        self.positions = nnx.Param(TABLE(rngs.params(), (length, width)))
        self.dropout, self.blocks = blocks.stacked(1e-5, rngs, causal=True, tanh_gelu=True)
        self.norm = norm(width, 1e-5, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = run(self.blocks, embed(x, self.tokens, self.positions), None, self.dropout, self.remat)
        return self.norm(x) @ self.tokens[...].T
