"""The networks behind the zoo, as flax.linen modules. All take [B, H, W, C] (or any rows, for `MLP`)."""

from __future__ import annotations

import flax.linen as nn
import jax

from fedjax_drift.models.layers import (
    Classifier,
    Conv,
    Dense,
    GroupNorm,
    Padding,
    flatten,
    max_pool,
    to_grid,
)


class MLP(nn.Module):
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

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.features(x))


class CNN(nn.Module):
    """Convolutions with ReLU and max-pooling, then dense layers with ReLU, then the classifier."""

    convolutions: tuple[tuple[int, int, Padding, int], ...]  # (filters, kernel size, padding, pooling window or 1)
    hidden: tuple[int, ...]
    num_classes: int
    dropout_flat: float = 0.0  # before the first dense layer
    dropout_hidden: float = 0.0  # after each
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

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return self.head(self.features(x, train))


class SimpleCNN(nn.Module):
    """MOON's simple CNN. Its representation is the output of the projection head, and so is the classifier's input."""

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

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.features(x))


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


class ResNet18(nn.Module):
    """Four stages of two blocks, 64 to 512 channels wide, mean over the positions, classifier."""

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

    def head(self, features: jax.Array) -> jax.Array:
        return self.classifier(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.features(x))
