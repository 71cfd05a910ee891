"""The networks of `fedjax_drift.models` as flax.linen modules.

The inputs of the networks are:

- integers [B, length] for `DIN`, `MeanOfTokens` and `LigandAndTarget`
- arrays [B, ...] of any shape for `MLP`
- images [B, H, W, C] for all others
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_drift.models.layers import (
    Classifier,
    Conv,
    Dense,
    Embedding,
    GroupNorm,
    Padding,
    flatten,
    max_pool,
    to_grid,
)


class Classified(nn.Module):
    """A network with a method ``features`` and a last layer ``classifier``."""

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.features(x))


class MLP(Classified):
    """Dense layers with ReLU between them."""

    hidden: tuple[int, ...]
    num_classes: int
    zero_init: bool = False
    cosine: bool = False

    def setup(self) -> None:
        self.layers = [Dense(width) for width in self.hidden]
        self.classifier = Classifier(self.num_classes, self.cosine, self.zero_init)

    def features(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = nn.relu(layer(x))
        return x


class CNN(Classified):
    """Convolutions with max-pooling and ReLU, then dense layers with ReLU, then the classifier."""

    convolutions: tuple[tuple[int, int, Padding, int], ...]  # (filters, kernel size, padding, pooling window or 1)
    hidden: tuple[int, ...]
    num_classes: int
    dropout_flat: float = 0.0  # before the first dense layer
    dropout_hidden: float = 0.0  # after each dense layer
    cosine: bool = False

    def setup(self) -> None:
        self.convs = [Conv(filters, size, 1, padding, pool=pool) for filters, size, padding, pool in self.convolutions]
        self.denses = [Dense(width) for width in self.hidden]
        self.drop_flat, self.drop_hidden = nn.Dropout(self.dropout_flat), nn.Dropout(self.dropout_hidden)
        self.classifier = Classifier(self.num_classes, self.cosine)

    def features(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = to_grid(x)
        for conv in self.convs:
            x = nn.relu(conv(x))
        x = self.drop_flat(flatten(x), deterministic=not train)
        for dense in self.denses:
            x = self.drop_hidden(nn.relu(dense(x)), deterministic=not train)
        return x

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return self.head(self.features(x, train))


class SimpleCNN(Classified):
    """MOON's simple CNN. The features are the output of the projection head, which is the input of the classifier."""

    num_classes: int
    projection: bool = True
    cosine: bool = False

    def setup(self) -> None:
        self.convs = [Conv(6, 5, pool=2), Conv(16, 5, pool=2)]
        self.encoder = [Dense(120), Dense(84)]
        self.projector = [Dense(84), Dense(256)] if self.projection else []
        self.classifier = Classifier(self.num_classes, self.cosine)

    def extractor(self, x: jax.Array) -> jax.Array:
        x = to_grid(x)
        for conv in self.convs:
            x = nn.relu(conv(x))
        x = flatten(x)
        for dense in self.encoder:
            x = nn.relu(dense(x))
        return x

    def features(self, x: jax.Array) -> jax.Array:
        x = self.extractor(x)
        if self.projection:
            hidden, out = self.projector
            x = out(nn.relu(hidden(x)))
        return x


class Block(nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut, on [C, H, W, B]."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(GroupNorm()(Conv(self.width, 3, self.stride, (1, 1), use_bias=False)(x)))
        y = GroupNorm()(Conv(self.width, 3, 1, (1, 1), use_bias=False)(y))
        if self.stride > 1 or x.shape[0] != self.width:
            x = GroupNorm()(Conv(self.width, 1, self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet18(Classified):
    """Four stages of two blocks with 64 to 512 channels, then the mean over the positions, then the classifier."""

    num_classes: int
    stem: int = 3
    cosine: bool = False

    def setup(self) -> None:
        large = self.stem == 7
        self.conv = Conv(64, self.stem, 2 if large else 1, (3, 3) if large else (1, 1), use_bias=False)
        self.norm = GroupNorm()
        self.blocks = [Block(64 * 2**s, 2 if s and not b else 1) for s in range(4) for b in range(2)]
        self.classifier = Classifier(self.num_classes, self.cosine)

    def features(self, x: jax.Array) -> jax.Array:
        x = nn.relu(self.norm(self.conv(to_grid(x))))
        if self.stem == 7:
            x = max_pool(x, 3, 2, (1, 1))
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2)).T


class DIN(nn.Module):
    """The deep interest network: attention of the candidate to the items in the history of the user.

    An example has the ids [user, gender, age, occupation, zip, candidate, history...]. 0 in the history is padding.
    """

    sizes: tuple[int, ...]  # vocabulary sizes of the first six ids; the history uses the embedding of the candidate
    widths: tuple[int, ...] = (15, 2, 3, 5, 15, 15)

    def setup(self) -> None:
        self.embeddings = [Embedding(size, width) for size, width in zip(self.sizes, self.widths, strict=True)]
        self.attention = [Dense(15), Dense(1)]
        self.denses = [Dense(32), Dense(16), Dense(1)]

    def interest(self, candidate: jax.Array, history: jax.Array, real: jax.Array) -> jax.Array:
        """[B, W]: the sum of the history [B, H, W], weighted by the attention of the candidate [B, W].

        real: bool [B, H], False for padding. The result is 0 for an empty history.
        """
        t = jnp.broadcast_to(candidate[:, None], history.shape)
        pairs = jnp.concatenate([t, history, t - history, t * history], -1)
        hidden, out = self.attention
        relevance = out(nn.relu(hidden(pairs.reshape(-1, pairs.shape[-1])))).reshape(real.shape)
        weights = nn.softmax(jnp.where(real, relevance, -1e9)) * real
        return (weights[..., None] * history).sum(1)

    def __call__(self, x: jax.Array) -> jax.Array:
        fields = [embedding(x[:, i]) for i, embedding in enumerate(self.embeddings)]
        history = x[:, len(fields) :]
        interest = self.interest(fields[-1], self.embeddings[-1](history), history > 0)
        x = jnp.concatenate([*fields, interest], -1)
        *hidden, out = self.denses
        for dense in hidden:
            x = nn.relu(dense(x))
        return out(x)[:, 0]


class MeanOfTokens(nn.Module):
    """The mean embedding of the tokens [B, length] of a text, then a dense layer. The token 0 is padding."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        real = (x > 0)[..., None]
        embedded = Embedding(self.vocabulary, self.width)(x) * real
        mean = embedded.sum(1) / jnp.maximum(real.sum(1), 1)
        return nn.relu(Dense(self.width)(mean))


class LigandAndTarget(nn.Module):
    """Encodes two sequences of characters [B, ligand + target]: one `SequenceCNN` for each, then a dense layer."""

    ligand: int  # length of the first sequence
    vocabulary: int
    width: int
    filters: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ligand, target = jnp.split(x, [self.ligand], 1)
        parts = [
            SequenceCNN(self.vocabulary, self.width, self.filters, (4, 6, 8))(ligand),
            SequenceCNN(self.vocabulary, self.width, self.filters, (4, 8, 12))(target),
        ]
        return nn.relu(Dense(self.width)(jnp.concatenate(parts, -1)))


class SequenceCNN(nn.Module):
    """[B, length] -> [B, 3 filters]: embeddings, then three convolutions, then the maximum over the positions.

    The convolutions have 1, 2 and 3 times ``filters`` channels.
    """

    vocabulary: int
    width: int
    filters: int
    kernels: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Embedding(self.vocabulary, self.width)(x).transpose(2, 1, 0)[:, :, None]  # [C, length, 1, B]
        for i, kernel in enumerate(self.kernels):
            x = nn.relu(Conv((i + 1) * self.filters, (kernel, 1))(x))
        return x.max((1, 2)).T


class Projected(Classified):
    """An encoder, MOON's projection head and a classifier. The features are the output of the projection head."""

    encoder: nn.Module
    num_classes: int
    cosine: bool = False

    def setup(self) -> None:
        self.projector = [Dense(self.encoder.width), Dense(256)]
        self.classifier = Classifier(self.num_classes, self.cosine)

    def extractor(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)

    def features(self, x: jax.Array) -> jax.Array:
        hidden, out = self.projector
        return out(nn.relu(hidden(self.extractor(x))))
