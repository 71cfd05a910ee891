"""Checks the arrays of clients, and joins them to one array of examples that is grouped by client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.errors import ConfigurationError

Pair = tuple[np.ndarray, np.ndarray]


def aligned(test_clients: Any, clients: Any) -> Any:
    """Returns the test examples of the clients as a list. If they have names, those left out get empty arrays."""
    if isinstance(test_clients, Mapping) != isinstance(clients, Mapping):
        kind, names = ("dict", " with client names") if isinstance(clients, Mapping) else ("list", "")
        what = f"test_clients must be a {kind}{names}, because clients is a {kind}"
        checks.refuse(what, checks.type_of(test_clients), "use lists or dicts for both")
    if not isinstance(clients, Mapping):
        return test_clients
    if unknown := [name for name in test_clients if name not in clients]:
        near = checks.nearest(unknown[0], map(str, clients))
        checks.refuse("test_clients must have names of clients", f"{unknown[0]!r}{near}")
    empty = (np.zeros(0), np.zeros(0))
    return [test_clients.get(name, empty) for name in clients]


def checked_names(names: Any, num_clients: int) -> tuple[str, ...]:
    """Returns the names of the clients as strings. Raises ValueError unless there are N different ones."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str | bytes)
    is_list |= isinstance(names, np.ndarray) and names.ndim == 1
    is_list = is_list and all(isinstance(name, str | Integral) for name in names)
    texts = tuple(map(str, names)) if is_list else ()
    if len(texts) != num_clients or len(set(texts)) < len(texts):
        got = f"{len(texts)}, of which {len(set(texts))} differ" if is_list else checks.shown(names)
        checks.refuse(f"client_names must be {num_clients} different names, one per client", got)
    return texts


def normalisation(mean: Any, std: Any, x: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns the mean and the standard deviation of uint8 images, float32 [] or [C]. Refuses one without the other."""
    if (mean is None) != (std is None):
        raise ConfigurationError("standardising needs both mean and std: pass both, or neither")
    return _per_channel("mean", mean, x), _per_channel("std", std, x)


def _per_channel(name: str, value: Any, x: np.ndarray) -> np.ndarray | None:
    if value is None:
        return None
    numbers, channels = np.asarray(checks.array(name, [value])[0], np.float32), x.shape[-1]
    if x.dtype != np.uint8:
        what, got = f"{name} must be None unless the inputs are uint8 images", f"inputs of {x.dtype}"
        checks.refuse(what, got, "standardise them yourself")
    if numbers.shape not in ((), (channels,)) or not np.isfinite(numbers).all():
        checks.refuse(f"{name} must be a finite number, or {channels} of them, one per channel", value)
    if name == "std" and not (numbers > 0).all():
        checks.refuse("std must be > 0", value, "pass the standard deviation of the pixels, scaled to [0, 1]")
    return numbers


def as_pair(pair: Any, what: str) -> Pair:
    """Returns a pair of arrays. Raises ValueError unless it is one."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        checks.refuse(f"{what} must be a pair (inputs, labels)", f"{checks.type_of(pair)}{size}")
    return checks.array(f"{what}: inputs", pair[0]), checks.array(f"{what}: labels", pair[1])


def row(rows: np.ndarray) -> str:
    return f"{rows.dtype}{list(rows.shape[1:])}"


def checked_pair(x: Any, y: Any, what: str) -> Pair:
    """Returns the pair as arrays. Raises ValueError unless they are finite and have the same length, at least 1."""
    x, y = as_pair((x, y), what)
    if len(x) != len(y):
        checks.refuse(f"{what} must have as many inputs as labels", f"{len(x)} inputs and {len(y)} labels")
    if len(x) == 0:
        checks.refuse(f"{what} must have at least 1 example", 0)
    for kind, array in (("inputs", x), ("labels", y)):
        if array.dtype.kind not in "biu" and (bad := _first_nonfinite(array)) is not None:
            got = f"NaN or infinity in example {bad}"
            checks.refuse(f"{what}: {kind} must be finite", got, "correct it or leave it out")
    return x, y


def checked_test(x_test: Any, y_test: Any, x: np.ndarray, y: np.ndarray) -> Pair | tuple[None, None]:
    """Returns the test set as arrays, if there is one. Raises ValueError unless they fit to the training examples."""
    if (x_test is None) != (y_test is None):
        raise ConfigurationError("a test set needs both inputs and labels: pass test=(x, y)")
    if x_test is None:
        return None, None
    x_test, y_test = checked_pair(x_test, y_test, "test data")
    for kind, train, test in (("inputs", x, x_test), ("labels", y, y_test)):
        if test.shape[1:] != train.shape[1:] or kind == "inputs" and train.dtype != test.dtype:
            what = f"test {kind} must have the dtype and shape of the training {kind}, {row(train)} per example"
            checks.refuse(what, row(test), "convert both in the same way")
    return x_test, y_test


def counts(values: Any, name: str, total: int, length: int | None = None) -> np.ndarray:
    """Returns the number of examples of each client, int32 [N]. Raises ValueError unless they sum to ``total``.

    length: N, or None if any is allowed.
    """
    numbers = checks.array(name, values)
    numbers = numbers if numbers.size else np.zeros(0, int)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or length not in (None, len(numbers)):
        allowed = "integers" if length is None else f"{length} integers"
        checks.refuse(f"{name} must be {allowed}, one per client", f"{numbers.dtype}{list(numbers.shape)}")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= min(total, checks.LARGE):
        most = f"{total}, the number of examples" if total <= checks.LARGE else checks.LARGE
        checks.refuse(f"{name} must be in 0..{most}", f"{numbers.min()}..{numbers.max()}")
    if (counted := int(numbers.sum())) != total:
        fix = "build the federation with from_clients or from_partition"
        checks.refuse(f"{name} must sum to {total}, the number of examples", counted, fix)
    return numbers.astype(np.int32)


def _first_nonfinite(array: np.ndarray) -> int | None:
    """Returns the index of the first example with NaN or infinity. The array is read in chunks, as it may be large."""
    step = max(1, 2**22 // max(1, array[:1].size))
    for start in range(0, len(array), step):
        finite = np.isfinite(array[start : start + step])
        if not finite.all():
            return start + int(np.argmin(finite.reshape(len(finite), -1).all(1)))
    return None


def concatenate(clients: Any, what: str, names: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the inputs and the labels of all clients, and the number of examples of each.

    Integer labels of different dtypes get a common one. Other dtypes and shapes must not differ. The empty arrays of a
    client without examples may have any. names: what messages call the clients. Default: 0, 1, ...
    """
    if not isinstance(clients, Sequence) or isinstance(clients, str | bytes | range):
        checks.refuse(f"pass a list with one (inputs, labels) pair for each {what}", checks.type_of(clients))
    if not clients:
        checks.refuse(f"a federation needs at least 1 {what}", 0, "pass one (x, y) pair per client")
    titles = [f"{what} {name}" for name in (range(len(clients)) if names is None else names)]
    pairs = [as_pair(pair, title) for pair, title in zip(clients, titles, strict=True)]
    first = next((pair for pair in pairs if len(pair[0])), pairs[0])
    for title, (x, y) in zip(titles, pairs, strict=True):
        if len(x) != len(y):
            checks.refuse(f"{title} must have as many inputs as labels", f"{len(x)} and {len(y)}")
        if len(x) and _form(x, y) != _form(*first):
            others = f"the dtypes and shapes of the first one, inputs {row(first[0])} and labels {row(first[1])}"
            fix = "use the same dtype and shape per example for every client"
            checks.refuse(f"{title} must have {others}", f"{row(x)} and {row(y)}", fix)
    sizes = np.array([len(x) for x, _ in pairs])
    examples = [(title, *pair) for title, pair in zip(titles, pairs, strict=True) if len(pair[0])]
    if not examples:
        return pairs[0][0][:0], pairs[0][1][:0], sizes
    dtype = common_dtype({y.dtype for _, _, y in examples})
    labels = [checks.converted(f"{title}: labels", y, dtype, "number the classes from 0") for title, _, y in examples]
    return np.concatenate([x for _, x, _ in examples]), np.concatenate(labels), sizes


def _form(x: np.ndarray, y: np.ndarray) -> tuple:
    """What must be the same for all clients. Labels of different integer dtypes are converted."""
    return x.dtype, x.shape[1:], y.dtype.kind in "biu", y.shape[1:]


def common_dtype(dtypes: Collection[np.dtype]) -> np.dtype:
    """Returns the dtype for numbers of several dtypes: a float dtype if one of them is, otherwise an integer dtype.

    It does not hold all numbers of all dtypes, so convert with `checks.converted`.
    """
    floats = [dtype for dtype in dtypes if dtype.kind not in "biu"]
    widest = np.result_type(*(floats or dtypes))
    return widest if floats or widest.kind != "f" else np.dtype(np.int64)  # NumPy has float64 for int64 and uint64


def join_parts(parts: Any, rows: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the example indices of all clients, int64, and the number of examples of each client."""
    given, parts, allowed = parts, checks.items(parts), f"{what} must be one array of example indices per client"
    if callable(given):
        checks.refuse(allowed, "a function", f"if it is a partitioner, call it with the labels, {what}=partitioner(y)")
    if parts is None:
        checks.refuse(allowed, checks.shown(given))
    if any(isinstance(part, Integral) for part in parts):
        fix = f"if these are the clients, pass {what}=[np.flatnonzero(owner == i) for i in np.unique(owner)]"
        checks.refuse(allowed, "one number per example", fix)
    if not parts:
        checks.refuse(allowed, "none", "pass at least 1 client")
    arrays = [checks.array(f"{what}[{i}]", part) for i, part in enumerate(parts)]
    for i, part in enumerate(arrays):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            checks.refuse(f"{what}[{i}] must be a list of example indices", f"{part.dtype}{list(part.shape)}")
        if len(part) and not 0 <= part.min() <= part.max() < rows:
            checks.refuse(f"{what}[{i}] must have example indices in 0..{rows - 1}", f"{part.min()}..{part.max()}")
    return np.concatenate(arrays).astype(np.int64), np.array([len(part) for part in arrays])


def check_classes(y: np.ndarray, needs: str, several: bool = False) -> None:
    """several: whether an example may have several labels."""
    if not np.issubdtype(y.dtype, np.integer) or not (y.ndim == 1 or several):
        what = f"{needs} integer labels{'' if several else ', one per example'}"
        checks.refuse(what, f"{y.dtype}{list(y.shape)}")
    if y.min() < 0:
        checks.refuse(f"{needs} labels >= 0", y.min(), "number the classes from 0")


def label_counts(y: np.ndarray, sizes: np.ndarray, classes: int) -> np.ndarray:
    """See `FederatedData.label_counts`."""
    check_classes(y, "label counts need", several=True)
    labels = (y[end - n : end].reshape(-1) for end, n in zip(np.cumsum(sizes), sizes, strict=True))
    return np.stack([np.bincount(each.astype(np.int64), minlength=classes) for each in labels])


def owners_by_class(y: np.ndarray, counts: np.ndarray, seed: int) -> np.ndarray:
    """Splits examples over clients, each class in proportion to the clients' examples of it. Returns the owners [M].

    y: the labels [M]. counts: [N, C] examples of each class at each client. Refuses a class that no client has.
    """
    rng, owner = np.random.default_rng(seed), np.empty(len(y), np.int64)
    check_classes(y, "splitting the test set by labels needs")
    for c in np.unique(y):
        if c >= counts.shape[1] or not counts[:, c].any():
            what = "the test set must only have classes that clients have"
            checks.refuse(what, f"class {c}", "leave its examples out")
        rows = rng.permutation(np.flatnonzero(y == c))
        ends = np.cumsum(counts[:, c]) * (len(rows) / counts[:, c].sum())
        owner[rows] = np.searchsorted(np.round(ends), np.arange(len(rows)), side="right")
    return owner


def of_clients(ids: np.ndarray, x: Any, y: Any, sizes: np.ndarray) -> tuple[Any, ...]:
    """The examples of the clients ``ids`` in this order, and their numbers. sizes: [N], those of all clients."""
    ends = np.cumsum(sizes, dtype=np.int64)
    rows = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in ids])
    return x[rows], y[rows], sizes[ids]


def described(x: np.ndarray, y: np.ndarray, sizes: np.ndarray, x_test: np.ndarray | None) -> list[tuple[str, str]]:
    """What a notebook shows of a federation."""
    return [
        ("clients", f"{len(sizes):,}"),
        ("training examples", f"{len(x):,} of {x.dtype}{list(x.shape[1:])}"),
        ("examples per client", f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"),
        ("test examples", "none" if x_test is None else f"{len(x_test):,}"),
        ("labels", f"{y.dtype}{list(y.shape[1:])}"),
    ]
