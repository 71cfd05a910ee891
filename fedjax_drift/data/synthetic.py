"""Synthetic linear classification: every client has a linear model of its own, and inputs around a mean of its own."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from fedjax_drift import spec
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.spec import AmountOrZero, Count, Flag

VARIANTS = {"feddyn": (30, 20), "fedprox": (60, 30)}  # dimension, default number of clients


def load(
    request: Request,
    *,
    alpha: AmountOrZero = 0.0,
    beta: AmountOrZero = 0.0,
    num_clients: Count | None = None,
    num_rows: Annotated[int, spec.integer(2)] | None = None,
    variant: Literal["feddyn", "fedprox"] = "feddyn",
    iid_sol: Flag | None = None,
    iid_data: Flag | None = None,
) -> Samples:
    """Synthetic linear classification. See `datasets.synthetic`."""
    (d, default_clients), classes = VARIANTS[variant], request.dataset.classes
    n = default_clients if num_clients is None else num_clients
    fedprox = variant == "fedprox"
    iid_sol = (not fedprox and alpha == 0) if iid_sol is None else iid_sol
    iid_data = (not fedprox and beta == 0) if iid_data is None else iid_data

    rng = np.random.default_rng(request.seed)
    if fedprox and num_rows is None:
        sizes = 50 + rng.lognormal(4, 2, n).astype(np.int64)
    else:
        sizes = np.full(n, 200 if num_rows is None else num_rows)
    u, big_b = rng.normal(0, alpha, n), rng.normal(0, beta, n)
    v = np.zeros((n, d)) if iid_data else rng.normal(big_b[:, None], 1, (n, d))
    centre = np.zeros(1) if iid_sol else u
    w = rng.normal(centre[:, None, None], 1, (len(centre), d + 1, classes))  # the last row is the bias
    w = np.broadcast_to(w, (n, d + 1, classes))

    writer = np.repeat(np.arange(n, dtype=np.int32), sizes)
    x = rng.standard_normal((len(writer), d)) * np.arange(1, d + 1) ** -0.6 + v[writer]
    x = x.astype(np.float32)
    y = np.empty(len(x), np.int32)
    for k, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[k], end)
        y[rows] = (x[rows] @ w[k, :-1] + w[k, -1]).argmax(1)
    if not fedprox:
        return Samples((x, y), (x, y), writer)
    # The examples of a client are independent, so its last ones are a random test set.
    test_size = np.maximum(1, sizes - (0.9 * sizes).astype(np.int64))
    is_test = np.arange(len(x)) >= (np.cumsum(sizes) - test_size)[writer]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])
