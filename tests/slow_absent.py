"""The reference implementation of `slow`, continued: algorithms for clients that are away.

It was written from the pseudo-code of the papers. So the server keeps what each client last sent, and every interval
between participations is counted round by round, also in the rounds in which the client is away.

    d_i     D_i / eta_t                  y_i     d_i of client i's last participation, 0 before it
    omega   the weight of a client in FedAU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def fedvarp(fed, w, server_lr=1.0):
    """Jhunjhunwala et al. 2022, algorithm 2: v = mean over S of (d_i - y_i) + mean over all of y_i, then y_i = d_i."""
    y = np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        d = {i: (fed.train(t, i, w) - w) / fed.lr(t) for i in S}
        v = sum(d[i] - y[i] for i in S) / len(S) + y.sum(axis=0) / len(y)
        w = w + server_lr * fed.lr(t) * v
        for i in S:
            y[i] = d[i]
        yield w


def mifa(fed, w, server_lr=1.0):
    """Gu et al. 2021, algorithm 1: y_i = d_i for the clients of S, and then a step along the mean of all y_i."""
    y = np.zeros((fed.num_clients, len(w)))
    for t, S in enumerate(fed.cohorts):
        for i in S:
            y[i] = (fed.train(t, i, w) - w) / fed.lr(t)
        w = w + server_lr * fed.lr(t) * y.sum(axis=0) / len(y)
        yield w


def weights(N: int, cohorts: Iterable[Sequence[int]], cutoff: float) -> Iterator[np.ndarray]:
    """Wang, Ji 2024, algorithm 2: omega [N] of every round, of which only the rounds before are known."""
    omega, length, intervals = np.ones(N), np.zeros(N, int), [[] for _ in range(N)]
    for S in cohorts:
        yield omega.copy()
        for n in range(N):
            length[n] += 1
            if n in S or length[n] == cutoff:
                intervals[n].append(length[n])
                omega[n], length[n] = np.mean(intervals[n]), 0


def fedau(fed, w, cutoff=50, server_lr=1.0):
    """Wang, Ji 2024, algorithm 1: w moves by server_lr / N times the sum over S of omega_i D_i."""
    rounds = weights(fed.num_clients, fed.cohorts, np.inf if cutoff is None else cutoff)
    for t, omega in enumerate(rounds):
        S = fed.cohorts[t]
        fed.info.append({"omega": [omega[i] for i in S]})
        w = w + server_lr * sum(omega[i] * (fed.train(t, i, w) - w) for i in S) / fed.num_clients
        yield w
