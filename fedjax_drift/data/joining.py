"""Checks the arrays of clients, and joins them to one array of examples that is grouped by client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError

Pair = tuple[np.ndarray, np.ndarray]


def in_order(test_clients: Any, clients: Mapping[Any, Pair]) -> Sequence[Pair] | None:
    """Returns the test examples of named clients, in the order of the clients. Clients left out get empty arrays."""
    if test_clients is None:
        return None
    if not isinstance(test_clients, Mapping):
        raise ConfigurationError(
            f"test_clients must be a dict with client names, because clients is a dict, got a "
            f"{type(test_clients).__name__}"
        )
    if unknown := [name for name in test_clients if name not in clients]:
        near = checks.nearest(unknown[0], map(str, clients))
        raise ConfigurationError(f"test_clients must have names of clients, got {unknown[0]!r}{near}")
    empty = (np.zeros(0), np.zeros(0))
    return [test_clients.get(name, empty) for name in clients]


def _pair(pair: Pair, what: str) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        raise ConfigurationError(f"{what} must be a pair (inputs, labels), got a {type(pair).__name__}{size}")
    return checks.array(f"{what}: inputs", pair[0]), checks.array(f"{what}: labels", pair[1])


def optional_pair(pair: Pair | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    return (None, None) if pair is None else _pair(pair, "test")


def row(rows: np.ndarray) -> str:
    return f"{rows.dtype}{list(rows.shape[1:])}"


def checked_pair(x: Any, y: Any, what: str) -> Pair:
    """Returns the pair as arrays. Raises ValueError unless they are finite and have the same length, at least 1."""
    x, y = _pair((x, y), what)
    if len(x) != len(y):
        raise ConfigurationError(f"{what} must have as many inputs as labels, got {len(x)} inputs and {len(y)} labels")
    if len(x) == 0:
        raise ConfigurationError(f"{what} must have at least 1 example, got 0")
    for array, kind in ((x, "inputs"), (y, "labels")):
        if array.dtype.kind not in "biu" and (bad := _first_nonfinite(array)) is not None:
            raise ConfigurationError(
                f"{what}: {kind} must be finite, but example {bad} has NaN or infinity: correct it or leave it out"
            )
    return x, y


def counts(values: Any, name: str, total: int) -> np.ndarray:
    """Returns the number of examples of each client, int32 [N]. Raises ValueError unless they sum to ``total``."""
    numbers = checks.array(name, values)
    numbers = numbers if numbers.size else np.zeros(0, int)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ConfigurationError(f"{name} must be integers, one per client, got {numbers.dtype}{list(numbers.shape)}")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= min(total, checks.LARGE):
        most = f"{total}, the number of examples" if total <= checks.LARGE else checks.LARGE
        raise ConfigurationError(f"{name} must be in 0..{most}, got {numbers.min()}..{numbers.max()}")
    if (counted := int(numbers.sum())) != total:
        raise ConfigurationError(
            f"{name} must sum to {total}, the number of examples, got {counted}: build the federation with "
            "from_clients or from_partition"
        )
    return numbers.astype(np.int32)


def _first_nonfinite(array: np.ndarray) -> int | None:
    """Returns the index of the first example with NaN or infinity. The array is read in chunks, as it may be large."""
    step = max(1, 2**22 // max(1, array[:1].size))
    for start in range(0, len(array), step):
        finite = np.isfinite(array[start : start + step])
        if not finite.all():
            return start + int(np.argmin(finite.reshape(len(finite), -1).all(1)))
    return None


def concatenate(
    clients: Sequence[Pair], what: str, names: Sequence[Any] | None, *, allow_empty: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the inputs and the labels of all clients, and the number of examples of each.

    Integer labels of different dtypes get a common one. Other dtypes and shapes must not differ. The empty arrays of a
    client without examples may have any. names: what messages call the clients. Default: 0, 1, ...
    """
    check_list(clients, what)
    titles = [f"{what} {name}" for name in (range(len(clients)) if names is None else names)]
    pairs = [_pair(pair, title) for pair, title in zip(clients, titles, strict=True)]
    if not pairs:
        raise ConfigurationError(f"a federation needs at least 1 {what}, got 0: pass one (x, y) pair per client")
    for title, (x, y) in zip(titles, pairs, strict=True):
        if len(x) != len(y):
            raise ConfigurationError(f"{title} must have as many inputs as labels, got {len(x)} and {len(y)}")
        if len(x) == 0 and not allow_empty:
            raise ConfigurationError(f"every client needs at least 1 example, but {title} is empty: leave it out")
    sizes = np.array([len(x) for x, _ in pairs])
    filled = [(title, *pair) for title, pair in zip(titles, pairs, strict=True) if len(pair[0])]
    if not filled:
        return pairs[0][0][:0], pairs[0][1][:0], sizes
    forms = [(x.dtype, x.shape[1:], y.dtype.kind in "biu", y.shape[1:]) for _, x, y in filled]
    usual = Counter(forms).most_common(1)[0][0]
    for form, (title, x, y) in zip(forms, filled, strict=True):
        if form != usual:
            _, usual_x, usual_y = filled[forms.index(usual)]
            raise ConfigurationError(
                f"{title} must have the dtypes and shapes of the other clients, inputs {row(usual_x)} and labels "
                f"{row(usual_y)}, got {row(x)} and {row(y)}: use the same dtype and shape per example for every "
                "client"
            )
    dtype = common_dtype({y.dtype for _, _, y in filled})
    labels = [checks.converted(f"{title}: labels", y, dtype, "number the classes from 0") for title, _, y in filled]
    return np.concatenate([x for _, x, _ in filled]), np.concatenate(labels), sizes


def common_dtype(dtypes: Collection[np.dtype]) -> np.dtype:
    """Returns the dtype for numbers of several dtypes: a float dtype if one of them is, otherwise an integer dtype.

    It does not hold all numbers of all dtypes, so convert with `checks.converted`.
    """
    floats = [dtype for dtype in dtypes if dtype.kind not in "biu"]
    widest = np.result_type(*(floats or dtypes))
    return widest if floats or widest.kind != "f" else np.dtype(np.int64)  # NumPy has float64 for int64 and uint64


def check_list(clients: Any, what: str) -> None:
    if not isinstance(clients, Sequence) or isinstance(clients, str | bytes | range):
        raise ConfigurationError(
            f"pass a list with one (inputs, labels) pair for each {what}, got a {type(clients).__name__}"
        )


def join_parts(parts: Sequence[np.ndarray], rows: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    if callable(parts):
        raise ConfigurationError(
            f"{what} must be one array of example indices per client, got a function: if it is a partitioner, call it "
            f"with the labels, {what}=partitioner(y)"
        )
    no_list = isinstance(parts, str | bytes | Mapping) or isinstance(parts, np.ndarray) and parts.ndim == 0
    if no_list or not isinstance(parts, Iterable):
        raise ConfigurationError(f"{what} must be one array of example indices per client, got {checks.shown(parts)}")
    parts = list(parts)
    if any(isinstance(part, Integral) for part in parts):
        raise ConfigurationError(
            f"{what} must be one array of example indices per client, got one number per example: if these are the "
            f"clients, pass {what}=[np.flatnonzero(owner == i) for i in np.unique(owner)]"
        )
    arrays = [checks.array(f"{what}[{i}]", part) for i, part in enumerate(parts)]
    if not arrays:
        raise ConfigurationError(f"{what} must have at least 1 client, got none")
    for i, part in enumerate(arrays):
        if part.ndim != 1 or (len(part) and not np.issubdtype(part.dtype, np.integer)):
            raise ConfigurationError(
                f"{what}[{i}] must be a list of example indices, got {part.dtype}{list(part.shape)}"
            )
        if len(part) and not (0 <= part.min() and part.max() < rows):
            raise ConfigurationError(
                f"{what}[{i}] must have example indices in 0..{rows - 1}, got {part.min()}..{part.max()}"
            )
    sizes = np.array([len(part) for part in arrays])
    return np.concatenate(arrays).astype(np.int64), sizes
