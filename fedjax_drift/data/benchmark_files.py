"""The files that PFLlib, FL-bench and NIID-Bench write: the examples, or the partition, of a federation.

PFLlib (github.com/TsingZ0/PFLlib, commit d832e76) and FL-bench (github.com/KarhouTam/FL-bench, 06e658b) write pickles,
which pickles.py reads without executing code. NIID-Bench (github.com/Xtra-Computing/NIID-Bench, 61b901a) writes CSV.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, joining, pickles
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.federated_files import ColumnName, FilePath, checked_client, column_pair, numbers
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import checked

AGAIN = "generate the data again, in an empty folder"


@checked
def from_pfllib(folder: FilePath) -> FederatedData:
    """Creates a federation from a data set of PFLlib: folder/train/{i}.npz, folder/test/{i}.npz and folder/config.json.

    Client i has the examples of the files i, and its own test examples, a quarter of them by default. A file has one
    pickled dict with the inputs x [n, ...] and the labels y [n]. Images [n, C, H, W] become [n, H, W, C]. They are
    float32 and already normalised, so there is no ``mean=``. Of text, x has pairs (tokens, length); only the tokens
    [n, length] are read.

    NumPy reads such files with ``allow_pickle=True``, which executes any code in them. This function does not: it
    refuses everything but arrays, lists and numbers.

    config.json may be missing, as for Shakespeare. Otherwise the number of clients and their labels must be those in
    it, so that the files of two runs are not mixed.

    Raises FileNotFoundError without folder/train/*.npz. Raises ValueError if a file is damaged, missing or belongs to
    another run, or if the examples are not numbers of one shape.
    """
    folder = Path(folder)
    train, test = (_numbered(folder / part, ".npz", "PFLlib's generate_*.py") for part in ("train", "test"))
    clients, test_clients = ([_pfllib_client(path) for path in paths] for paths in (train, test))
    with files.plain_errors(folder):
        _check_config(folder / "config.json", clients, test_clients)
        return FederatedData.from_clients(clients, test_clients=test_clients, name=folder.name)


def _numbered(folder: Path, suffix: str, source: str) -> list[Path]:
    """Returns the files folder/0suffix, 1suffix, ... in the order of their numbers. None may be missing."""
    found = {path.stem for path in folder.glob(f"*{suffix}")}
    if not found:
        raise FileNotFoundError(f"{folder} must have the files 0{suffix}, 1{suffix}, ... of {source}, got none")
    names = [str(i) for i in range(len(found))]
    if odd := sorted(found.difference(names)):
        missing = min(set(names) - found, key=int)
        what, got = f"{folder} must have 0{suffix} to {names[-1]}{suffix}", f"{odd[0]}{suffix} but no {missing}{suffix}"
        checks.refuse(what, got, f"copy the missing file, or {AGAIN}")
    return [folder / f"{name}{suffix}" for name in names]


def _pfllib_client(path: Path) -> Pair:
    with files.opened(path) as file, zipfile.ZipFile(file) as archive:
        array = io.BytesIO(archive.read("data.npy"))
        np.lib.format.read_magic(array)
        np.lib.format.read_array_header_1_0(array)
        content = pickles.read(array)
        content = content.item() if isinstance(content, np.ndarray) and content.shape == () else content
        if not isinstance(content, dict):
            checks.refuse("it must have a dict with x and y", checks.type_of(content), AGAIN)
        x, y = column_pair(content, "x", "y")
        if isinstance(x, np.ndarray) and x.dtype == object and x.shape[1:] == (2,):
            x = [tokens for tokens, _ in x]
        x, y = (numbers(values, name) for values, name in ((x, "x"), (y, "y")))
        x = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if x.ndim == 4 else x
        return next(((x, y) for _, x, y in checked_client(path.stem, x, y, len(y))), (x, y))


def _check_config(path: Path, clients: Sequence[Pair], test_clients: Sequence[Pair]) -> None:
    """The numbers of clients and their labels must be those of config.json, if it exists."""
    if len(test_clients) != len(clients):
        checks.refuse(f"test must have {len(clients)} files, as train", len(test_clients), AGAIN)
    if not path.exists() or any(len(x) == 0 for x, _ in clients):  # no examples: a clearer error follows
        return
    with files.opened_text(path) as file:
        config = json.load(file)
        if config["num_clients"] != len(clients):
            what = f"num_clients must be the number of files, {len(clients)}"
            checks.refuse(what, config["num_clients"], AGAIN)
        listed = config["Size of samples for labels in clients"]
        if len(listed) != len(clients):
            checks.refuse(f"it must have the labels of {len(clients)} clients", f"{len(listed)} lists", AGAIN)
        for i, pairs in enumerate(listed):
            if not pairs or isinstance(pairs[0], list):  # FEMNIST has one pair, without labels
                _check_labels(i, np.concatenate([clients[i][1], test_clients[i][1]]), pairs)


def _check_labels(client: int, y: np.ndarray, pairs: Iterable[tuple[Any, int]]) -> None:
    """The numbers of the labels of a client must be those that its library has written.

    pairs: each label, which is text in a JSON dict, and its number.
    """
    counts = {str(label): int((y == label).sum()) for label in np.unique(y).tolist()}
    written: Counter[str] = Counter()
    for label, number in pairs:
        written[str(label)] += number
    written += Counter()  # without zeros
    if counts != written:
        label = min(label for label in counts | written if counts.get(label) != written.get(label))
        what = f"client {client} must have {written.get(label, 0)} examples of label {label}"
        fix = f"the files are of several runs, or the examples in another order; {AGAIN}"
        checks.refuse(what, counts.get(label, 0), fix)


@checked
def from_fl_bench(
    path: FilePath,
    x: Any,
    y: Any,
    *,
    test: Literal["test", "val"] = "test",
    mean: Any = None,
    std: Any = None,
    name: str = "data",
) -> FederatedData:
    """Creates a federation from FL-bench's partition of a data set: the file partition.pkl of its generate_data.py.

    The file has the indices of each client's examples in train, val and test. They count the examples of the data set
    in FL-bench's order, which has the training set first and then the test set. If every client has its own test
    examples (`--split sample`), so has it here. Otherwise (`--split user`) the clients are those that train, and the
    test set is pooled. The file all_stats.json, if it is in the same folder, must list the labels that the examples
    have.

    Reading a pickle with Python's `pickle.load` executes any code in it. This function does not: it refuses everything
    but arrays, lists and numbers.

    Args:
      path: the file partition.pkl.
      x, y: inputs [M, ...] and labels [M] of the data set, for example both parts of Fashion-MNIST, joined with
        np.concatenate. Images must be [M, H, W, C].
      test: which examples are evaluated, "test" (default) or "val". The others are left out.
      mean, std, name: as in `FederatedData.from_partition`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or of another kind, the examples are fewer than it needs, or their labels are not
        those in all_stats.json.
    """
    path = Path(path)
    x, y = joining.checked_pair(x, y, "the data set")
    with files.opened(path) as file:
        content = pickles.read(file)
        parts, trained, tested = _fl_bench_parts(content, len(x), test)
    _check_stats(path.with_name("all_stats.json"), parts, y)
    rows, test_rows = [parts[i]["train"] for i in trained], [parts[i][test] for i in tested]
    chosen = np.concatenate([*test_rows, np.zeros(0, np.int64)])
    options: dict[str, Any] = {"test": (x[chosen], y[chosen])} if len(chosen) else {}
    if options and tested == trained:
        options = {"test": (x, y), "test_parts": test_rows}
    return FederatedData.from_partition(x, y, rows, **options, mean=mean, std=std, name=name)


def _fl_bench_parts(content: Any, M: int, test: str) -> tuple[list[dict[str, np.ndarray]], list[int], list[int]]:
    """Returns the indices of all clients, and the ids of the clients that train and of those that are evaluated.

    M: the number of examples of the data set.
    """
    if not isinstance(content, dict) or not {"data_indices", "separation"} <= content.keys():
        raise ConfigurationError(f"it must have FL-bench's data_indices and separation: {AGAIN}")
    clients, separation = content["data_indices"], content["separation"]
    if separation["total"] != len(clients):
        checks.refuse(f"it must have the indices of {separation['total']} clients", len(clients), AGAIN)
    both = f"join the training set and the test set, or {AGAIN}"
    parts = [
        {split: _indices(part[split], f"{split} of client {i}", M, both) for split in ("train", "val", "test")}
        for i, part in enumerate(clients)
    ]
    trained, tested = (_indices(separation[split], f"the clients of {split}", len(parts)) for split in ("train", test))
    for split, ids in (("train", trained), (test, tested)):
        if len(np.unique(ids)) < len(ids):
            checks.refuse(f"the clients of {split} must be different", checks.shown(ids.tolist()), AGAIN)
    return parts, trained.tolist(), tested.tolist()


def _indices(values: Any, name: str, end: int, fix: str = AGAIN) -> np.ndarray:
    """Returns integers in 0..end - 1, int64 [n]. Refuses others."""
    array = numbers(values, name)
    if array.ndim == 1 and not array.size:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        checks.refuse(f"{name} must be a list of integers", f"{array.dtype}{list(array.shape)}", AGAIN)
    if not 0 <= array.min() <= array.max() < end:
        checks.refuse(f"{name} must be in 0..{end - 1}", f"{array.min()}..{array.max()}", fix)
    return array.astype(np.int64)


def _check_stats(path: Path, parts: list[dict[str, np.ndarray]], y: np.ndarray) -> None:
    """Raises ValueError unless the clients have the labels of all_stats.json, if it exists and lists them."""
    if path.exists():
        with files.opened_text(path) as file:
            stats = json.load(file)
            listed = [client for client in stats if client.isdecimal()]
            if set(listed) != set(map(str, range(len(parts)))):
                checks.refuse(f"it must list the clients 0 to {len(parts) - 1}", checks.listed(listed), AGAIN)
            for i, part in enumerate(parts):
                rows, written = np.concatenate(list(part.values())), stats[str(i)]["y"]
                if sum(written.values()) == len(rows):  # a partition that is iid in part has zeros
                    _check_labels(i, y[rows], written.items())


@checked
def from_niid_bench(folder: FilePath, y: ColumnName = "Class", test: Pair | None = None) -> FederatedData:
    """Creates a federation from the tables that NIID-Bench's partition.py writes: folder/{i}.csv for client i.

    The first line has the names of the columns, which must be the same in all files. All values are numbers. The
    column ``y`` has the labels, which become integers if all are whole. The others are the features, float32 [M, F].

    The partition of experiments.py is in no file. It is the dict ``net_dataidx_map``, so pass
    ``[net_dataidx_map[i] for i in range(N)]`` to `FederatedData.from_partition`.

    Args:
      folder: has the files 0.csv, 1.csv, ...
      y: name of the column of the labels. Default: that of partition.py.
      test: the test set (inputs [M_test, F], labels [M_test]), float32 inputs. Default: none, as in partition.py.

    Raises:
      FileNotFoundError: the folder has no CSV files.
      ValueError: a file is damaged or missing, has other columns than 0.csv, or has no column ``y``.
    """
    folder = Path(folder)
    paths = _numbered(folder, ".csv", "NIID-Bench's partition.py")
    names: list[str] = []
    clients: list[Pair] = []
    for path in paths:
        with files.opened_text(path, "utf-8-sig") as file:
            header, *lines = file.readlines() or [""]
            columns = next(csv.reader([header]), [])
            names = names or columns
            if len(set(names)) < len(names) or "" in names:
                checks.refuse("its columns must have different names", checks.listed(names), "rename or remove columns")
            if columns != names or not "".join(lines).strip():
                got = "other columns" if columns != names else "0"
                checks.refuse(f"it must have at least 1 example with {checks.listed(names)}", got, AGAIN)
            table = np.loadtxt(lines, delimiter=",", comments=None, quotechar='"', ndmin=2)
            labels, _ = column_pair(dict(zip(names, table.T, strict=True)), y, y)
            features = table[:, np.array(names) != y]
            x = checks.converted("the features", features, np.float32, "scale the numbers")
            clients += [(x, labels) for _, x, labels in checked_client(path.stem, x, labels, len(x))]
    with files.plain_errors(folder):
        return FederatedData.from_clients(clients, test, name=folder.name)
