"""The reference implementation of `slow`, continued: what clients know of a class, and of examples without labels.

It was written from the equations of the papers, like `slow`, and has its notation.
"""

from __future__ import annotations

import numpy as np
from slow import Gradient, Vector, adam, derivative, label_gradient, log_softmax, logits, one_hot, softmax, tanh_layers


def feddf(fed, w, unlabelled, drawn, steps=100, lr=1e-3, batch_size=128, weighting="examples", seed=0):
    """Lin et al. 2020, algorithm 1 with AVGLOGITS, a fixed number of steps, and batches that are used again.

    drawn(t, n, seed): the order of the n unlabelled examples in round t.
    """
    U = len(unlabelled)
    b = min(U, batch_size)
    for t, S in enumerate(fed.cohorts):
        thetas = [fed.train(t, i, w) for i in S]
        w = w + fed.mean(S, [theta - w for theta in thetas], weighting)
        order, direction = drawn(t, U, seed), adam()
        for j in range(steps):
            first = (j % min(U // b, steps)) * b
            x = unlabelled[order[first : first + b]]
            ensemble = sum(logits(theta, x) for theta in thetas) / len(thetas)
            rate = lr * (1 + np.cos(np.pi * j / steps)) / 2
            w = w - rate * direction(label_gradient(w, x, softmax(ensemble)))
        yield w


def fedproto(fed, w, classes, features, lam=1.0, weighting="examples"):
    """Tan et al. 2022, algorithm 1, with the regulariser of the authors' code. The model is MOON's."""
    models = [w] * fed.num_clients
    C: dict[int, np.ndarray] = {}  # the prototypes of the classes that a client has had

    def local_gradient(C: dict[int, np.ndarray]) -> Gradient:
        def gradient(theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
            def loss(theta: Vector) -> complex:
                z, scores = tanh_layers(theta, x)
                value = -(one_hot(y, scores.shape[1]) * log_softmax(scores)).sum()
                for row, label in zip(z, y, strict=True):
                    if label in C:
                        value = value + lam * ((row - C[label]) ** 2).mean()
                return value / len(x)

            return derivative(loss, theta)

        return gradient

    for t, S in enumerate(fed.cohorts):
        for i in S:
            models[i] = fed.train(t, i, models[i], local_gradient(C))
        new = {}
        for j in range(classes):
            means, numbers = [], []
            for i in S:
                x, y = fed.clients[i]
                if (y == j).any():
                    means.append(tanh_layers(models[i], x[y == j])[0].mean(axis=0))
                    numbers.append((y == j).sum() if weighting == "examples" else 1)
            if means:
                new[j] = np.average(means, axis=0, weights=numbers)
        C = C | new
        prototypes = [C.get(j, np.zeros(features)) for j in range(classes)]
        fed.info.append({"personal": list(models), "prototypes": np.array(prototypes)})
        yield w
