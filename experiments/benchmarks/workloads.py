"""Defines the workloads of the benchmarks: networks with their necessary operations and bytes, and random images.

This module does not import JAX, so that torch_loop.py can use it without JAX.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """A convolution or a dense layer. The numbers are those for one image."""

    weights: int  # number of weights, without biases
    positions: int  # number of uses of each weight: H' * W', 1 in a dense layer
    outputs: int  # number of output values
    extra: int  # number of other parameters: biases, or the scales and biases of a norm


class Network(NamedTuple):
    """A network of convolutions followed by dense layers, as in the library's `CNN`.

    A convolution is (number of filters, size of the kernel, padding, size of the pooling window).
    """

    image: tuple[int, int, int]
    classes: int
    convolutions: tuple[tuple[int, int, str, int], ...]
    hidden: tuple[int, ...]
    dropout: tuple[float, float] = (0.0, 0.0)  # rates before the first dense layer and after each hidden layer


NETWORKS = {
    "lenet5": Network((28, 28, 1), 62, ((6, 5, "SAME", 2), (16, 5, "VALID", 2)), (120, 84)),
    "mnist_2nn": Network((28, 28, 1), 10, (), (200, 200)),
    "cifar_cnn": Network((32, 32, 3), 10, ((64, 5, "VALID", 2), (64, 5, "VALID", 2)), (384, 192)),
    "mnist_cnn": Network((28, 28, 1), 10, ((32, 5, "SAME", 2), (64, 5, "SAME", 2)), (512,)),
    "emnist_cnn": Network((28, 28, 1), 62, ((32, 3, "VALID", 1), (64, 3, "VALID", 2)), (128,), (0.25, 0.5)),
    # This is the network of pfl-research's CIFAR-10 benchmark.
    "pfl_cnn": Network((32, 32, 3), 10, ((32, 3, "VALID", 1), (64, 3, "VALID", 2)), (128,), (0.25, 0.5)),
}
RESNET = "resnet18"  # with GroupNorm(2), 3x3 stem, 32 x 32 images
RESNET_STAGES = ((64, 32), (128, 16), (256, 8), (512, 4))  # channels, height and width


def layers(name: str) -> list[Layer]:
    """Returns the layers that have weights, from the first to the last."""
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
    """Returns the number of parameters."""
    return sum(layer.weights + layer.extra for layer in layers(name))


def operations(name: str) -> int:
    """Returns the necessary operations for training on one image.

    These are the forward pass, the weight gradients, and the input gradients of all layers except the first.
    """
    products = [layer.weights * layer.positions for layer in layers(name)]
    return 2 * (3 * sum(products) - products[0])


def step_bytes(name: str, batch: int) -> int:
    """Returns the necessary bytes of one local step in float32, under the assumption that no values stay in a cache.

    Parameters are read and written once, pixels (uint8) are read once, and the outputs of each layer and their
    gradients are written and read once.
    """
    image = NETWORKS[name].image if name in NETWORKS else (32, 32, 3)
    return 8 * parameters(name) + batch * (int(np.prod(image)) + 16 * sum(layer.outputs for layer in layers(name)))


class Workload(NamedTuple):
    """A federation, a network, and the options of its training."""

    network: str
    sizes: np.ndarray  # int [N], number of examples of each client
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
    """Returns random numbers of examples per client, like those of FEMNIST, int32 [N].

    Their distribution has mean 197 and standard deviation 85, and is clipped to 19..470.
    """
    draws = np.random.default_rng(0).gamma((197 / 85) ** 2, 85**2 / 197, clients)
    return np.clip(draws, 19, 470).astype(np.int32)


def equal_sizes(clients: int, rows: int) -> np.ndarray:
    """Returns equal numbers of examples for all clients, int32 [N]."""
    return np.full(clients, rows, np.int32)


WRITERS, CIFAR = femnist_sizes(), equal_sizes(100, 500)
WORKLOADS = {
    **{f"{net} {K}": Workload(net, WRITERS, K) for net in ("lenet5", "emnist_cnn") for K in (10, 100, 500, 3400)},
    "pfl_cifar10": Workload("pfl_cnn", equal_sizes(1000, 50), 50, batch=10),
    "feddc_cifar10": Workload("cifar_cnn", CIFAR, 15, batch=50, epochs=5),
    "feddc_resnet18": Workload(RESNET, CIFAR, 15, batch=50, epochs=5),
}

PEERS = {"lenet5": Workload("lenet5", equal_sizes(500, 100), 50), RESNET: Workload(RESNET, equal_sizes(8, 40), 4)}


def tiny(workload: Workload, network: str = "mnist_2nn") -> Workload:
    """Returns the workload with a few small clients and a network that compiles fast."""
    return Workload(network, np.minimum(workload.sizes[:4], 4), cohort=2, batch=2)


def images(workload: Workload, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns random uint8 images [M, H, W, C] and labels int32 [M]. The speed does not depend on their values."""
    rng, M = np.random.default_rng(seed), int(workload.sizes.sum())
    return rng.integers(0, 256, (M, *workload.image), np.uint8), rng.integers(0, workload.classes, M, np.int32)
