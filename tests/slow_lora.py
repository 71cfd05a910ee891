"""The reference implementation of `slow`, continued: low-rank adapters of logistic regression.

It was written from the papers' equations. The model is x (W + s A B) + c, with A [p, r], B [r, C] and a frozen bias c.
An algorithm is a generator, which yields a `Round` after every round. Means are weighted by n_i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from slow import Federation, Vector, log_softmax, one_hot

Matrix = np.ndarray


class Problem(NamedTuple):
    fed: Federation
    bias: Vector
    scale: float  # s

    def train(self, t: int, i: int, W: Matrix, A: Matrix, B: Matrix, which: str = "ab") -> tuple[Matrix, Matrix]:
        """A_i and B_i, after training both or one of them."""

        def factors(theta: Vector) -> tuple[Matrix, Matrix]:
            a = theta[: A.size].reshape(A.shape) if "a" in which else A
            b = theta[-B.size :].reshape(B.shape) if "b" in which else B
            return a, b

        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            a, b = factors(theta)
            z = x @ (W + self.scale * a @ b) + self.bias
            of_w = x.T @ (np.exp(log_softmax(z)) - one_hot(y, z.shape[1])) / len(x)
            both = {"a": self.scale * of_w @ b.T, "b": self.scale * a.T @ of_w}
            return np.concatenate([both[name].ravel() for name in which])

        start = np.concatenate([{"a": A, "b": B}[name].ravel() for name in which])
        return factors(self.fed.train(t, i, start, gradient))

    def mean(self, t: int, matrices: list[Matrix]) -> Matrix:
        return self.fed.mean(self.fed.cohorts[t], matrices, "examples")


class Round(NamedTuple):
    """What holds after a round."""

    W: Matrix  # of the global model, with the product
    mean: Matrix  # the mean of the clients' matrices
    base: Matrix  # the first W
    A: Matrix
    B: Matrix
    own: dict[int, Matrix] = {}  # the matrices of the clients that have one of their own

    @property
    def drift(self) -> float:
        return float(np.linalg.norm(self.W - self.mean) / np.linalg.norm(self.mean - self.base))


def after(of: Problem, t: int, W: Matrix, A: Matrix, B: Matrix, trained: list, base: Matrix, old: Matrix) -> Round:
    """W: the frozen matrix after the round. old: the one with which the clients have trained."""
    local = of.mean(t, [old + of.scale * a @ b for a, b in trained])
    return Round(W + of.scale * A @ B, local, base, A, B)


def fedavg(of: Problem, W: Matrix, A: Matrix, B: Matrix, which: Callable[[int], str] = lambda t: "ab"):
    """Zhang et al. 2023 (FedIT): the means of the factors."""
    for t, S in enumerate(of.fed.cohorts):
        trained = [of.train(t, i, W, A, B, which(t)) for i in S]
        A, B = (of.mean(t, [pair[j] for pair in trained]) for j in range(2))
        yield after(of, t, W, A, B, trained, W, W)


def rolora(of: Problem, W: Matrix, A: Matrix, B: Matrix):
    """Chen et al. 2024: B in even rounds, A in odd ones."""
    yield from fedavg(of, W, A, B, lambda t: "ba"[t % 2])


def fedsa_lora(of: Problem, W: Matrix, A: Matrix, B: Matrix):
    """Guo et al. 2025: the mean of A, and each client keeps its B."""
    own: dict[int, Matrix] = {}
    for t, S in enumerate(of.fed.cohorts):
        trained = [of.train(t, i, W, A, own.get(i, B)) for i in S]
        A = of.mean(t, [a for a, _ in trained])
        own |= {i: b for i, (_, b) in zip(S, trained, strict=True)}
        models = {i: W + of.scale * A @ own.get(i, B) for i in range(of.fed.num_clients)}
        yield after(of, t, W, A, B, trained, W, W)._replace(own=models)


def fedex_lora(of: Problem, W: Matrix, A: Matrix, B: Matrix):
    """Singhal et al. 2025: the means of the factors, and what their product lacks goes into W."""
    base = W
    for t, S in enumerate(of.fed.cohorts):
        trained, old = [of.train(t, i, W, A, B) for i in S], W
        A, B = (of.mean(t, [pair[j] for pair in trained]) for j in range(2))
        W = W + of.scale * (of.mean(t, [a @ b for a, b in trained]) - A @ B)
        yield after(of, t, W, A, B, trained, base, old)


def flora(of: Problem, W: Matrix, A: Matrix, B: Matrix, anew: Callable[[int], Matrix]):
    """Wang et al. 2024: the stacked factors are multiplied and added to W. anew(t): A after round t."""
    base = W
    for t, S in enumerate(of.fed.cohorts):
        trained, old = [of.train(t, i, W, A, B) for i in S], W
        sizes = np.array([of.fed.size(i) for i in S])
        stacked_a = np.concatenate([p * a for p, (a, _) in zip(sizes / sizes.sum(), trained, strict=True)], axis=1)
        W = W + of.scale * stacked_a @ np.concatenate([b for _, b in trained])
        A, B = anew(t), np.zeros_like(B)
        yield after(of, t, W, A, B, trained, base, old)


def flexlora(of: Problem, W: Matrix, A: Matrix, B: Matrix, ranks: Any = None):
    """Bai et al. 2024: the best factors of the mean product. ranks: of the clients."""
    r = len(B)
    for t, S in enumerate(of.fed.cohorts):
        cut = [r if ranks is None else ranks[i] for i in S]
        trained = [of.train(t, i, W, A[:, :k], B[:k]) for i, k in zip(S, cut, strict=True)]
        U, values, V = np.linalg.svd(of.mean(t, [a @ b for a, b in trained]))
        root = np.sqrt(values[:r])
        A, B = U[:, :r] * root, root[:, None] * V[:r]
        yield after(of, t, W, A, B, trained, W, W)
