"""What the benchmarks train: networks with their necessary operations and bytes, and federations of random images.

No JAX here, so that torch_loop.py can do the same work where there is none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """One convolution or dense layer, for one image."""

    weights: int  # without biases
    positions: int  # how often each weight is used: H' * W', 1 in a dense layer
    outputs: int  # values made
    extra: int  # parameters that are no weights: biases, or the scales and biases of a norm


class Network(NamedTuple):
    """Convolutions (filters, kernel, padding, pooling window), then dense layers; the form of the package's `CNN`."""

    image: tuple[int, int, int]
    classes: int
    convolutions: tuple[tuple[int, int, str, int], ...]
    hidden: tuple[int, ...]
    dropout: tuple[float, float] = (0.0, 0.0)  # before the first dense layer, after each


NETWORKS = {
    "lenet5": Network((28, 28, 1), 62, ((6, 5, "SAME", 2), (16, 5, "VALID", 2)), (120, 84)),
    "mnist_2nn": Network((28, 28, 1), 10, (), (200, 200)),
    "cifar_cnn": Network((32, 32, 3), 10, ((64, 5, "VALID", 2), (64, 5, "VALID", 2)), (384, 192)),
    "mnist_cnn": Network((28, 28, 1), 10, ((32, 5, "SAME", 2), (64, 5, "SAME", 2)), (512,)),
    "emnist_cnn": Network((28, 28, 1), 62, ((32, 3, "VALID", 1), (64, 3, "VALID", 2)), (128,), (0.25, 0.5)),
    # The network of pfl's CIFAR-10 benchmark.
    "pfl_cnn": Network((32, 32, 3), 10, ((32, 3, "VALID", 1), (64, 3, "VALID", 2)), (128,), (0.25, 0.5)),
}
RESNET = "resnet18"  # with GroupNorm(2), 3x3 stem, 32 x 32 images
RESNET_STAGES = ((64, 32), (128, 16), (256, 8), (512, 4))  # channels, height and width


def layers(name: str) -> list[Layer]:
    """The layers with weights, in order."""
    return _resnet_layers() if name == RESNET else _cnn_layers(NETWORKS[name])


def _cnn_layers(network: Network) -> list[Layer]:
    size, _, channels = network.image
    made = []
    for filters, kernel, padding, window in network.convolutions:
        size = size if padding == "SAME" else size - kernel + 1
        made.append(Layer(kernel**2 * channels * filters, size**2, size**2 * filters, filters))
        size, channels = size // window, filters
    width = size**2 * channels
    for after in (*network.hidden, network.classes):
        made.append(Layer(width * after, 1, after, after))
        width = after
    return made


def _resnet_layers() -> list[Layer]:
    def conv(kernel: int, before: int, after: int, size: int) -> Layer:
        return Layer(kernel**2 * before * after, size**2, size**2 * after, 2 * after)

    made, before = [conv(3, 3, 64, 32)], 64
    for width, size in RESNET_STAGES:
        made += [conv(3, before, width, size), conv(3, width, width, size)]
        made += [conv(1, before, width, size)] if before != width else []
        made += [conv(3, width, width, size)] * 2
        before = width
    return [*made, Layer(512 * 10, 1, 10, 10)]


def parameters(name: str) -> int:
    """d."""
    return sum(layer.weights + layer.extra for layer in layers(name))


def operations(name: str) -> int:
    """Necessary operations of training on one image: forward, weight gradients, input gradients except the first's."""
    products = [layer.weights * layer.positions for layer in layers(name)]
    return 2 * (3 * sum(products) - products[0])


def step_bytes(name: str, batch: int) -> int:
    """Necessary bytes of one local step in float32 that keeps nothing in a cache.

    Parameters are read and written once, pixels (uint8) read once, and each layer's outputs and their gradients
    written and read once.
    """
    image = NETWORKS[name].image if name in NETWORKS else (32, 32, 3)
    return 8 * parameters(name) + batch * (int(np.prod(image)) + 16 * sum(layer.outputs for layer in layers(name)))


class Workload(NamedTuple):
    """A federation, a network, and how it trains."""

    network: str
    sizes: np.ndarray  # int [N], rows of each client
    cohort: int
    batch: int = 20
    epochs: int = 1

    @property
    def image(self) -> tuple[int, int, int]:
        return NETWORKS[self.network].image if self.network in NETWORKS else (32, 32, 3)

    @property
    def classes(self) -> int:
        return NETWORKS[self.network].classes if self.network in NETWORKS else 10


def femnist_sizes(clients: int = 3400) -> np.ndarray:
    """int32 [N]: FEMNIST-like, clipped to 19..470 rows, mean 197, spread 85."""
    draws = np.random.default_rng(0).gamma((197 / 85) ** 2, 85**2 / 197, clients)
    return np.clip(draws, 19, 470).astype(np.int32)


def equal_sizes(clients: int, rows: int) -> np.ndarray:
    """int32 [N]."""
    return np.full(clients, rows, np.int32)


WRITERS, CIFAR = femnist_sizes(), equal_sizes(100, 500)
WORKLOADS = {
    **{f"{net} {K}": Workload(net, WRITERS, K) for net in ("lenet5", "emnist_cnn") for K in (10, 100, 3400)},
    "pfl_cifar10": Workload("pfl_cnn", equal_sizes(1000, 50), 50, batch=10),
    "feddc_cifar10": Workload("cifar_cnn", CIFAR, 15, batch=50, epochs=5),
    "feddc_resnet18": Workload(RESNET, CIFAR, 15, batch=50, epochs=5),
}


def tiny(workload: Workload, network: str = "mnist_2nn") -> Workload:
    """A few clients of a few rows, and a network that compiles fast."""
    return Workload(network, np.minimum(workload.sizes[:4], 4), cohort=2, batch=2)


def images(workload: Workload, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random uint8 images [M, H, W, C] and labels int32 [M]: speed does not depend on what is on them."""
    rng, M = np.random.default_rng(seed), int(workload.sizes.sum())
    return rng.integers(0, 256, (M, *workload.image), np.uint8), rng.integers(0, workload.classes, M, np.int32)
