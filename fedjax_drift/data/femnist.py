"""FEMNIST, in any of the file formats of LEAF, FedJAX and TensorFlow Federated."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, tff_files
from fedjax_drift.data.federated_files import Client, read_fedjax, read_leaf
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import DataSet, Request, Samples, pair

FILES = {
    "npz": ("femnist_writers.npz",),
    "leaf": ("leaf_femnist",),
    "fedjax": ("federated_emnist_train.sqlite",),
    "tff": ("emnist_all.sqlite", "emnist_all.sqlite.lzma", "fed_emnist_train.h5"),
}  # source -> the files or folders; one of them must exist
NORMALISATION = ((0.03650044,), (0.1602474,))  # of the inverted pixels (FedEve's library simple-FL)


def load(request: Request, *, source: Literal["auto", "npz", "leaf", "fedjax", "tff"] = "auto") -> Samples:
    """Handwritten characters with their writers: 62 classes in LEAF's order, uint8 [28, 28, 1].

    source: the file format.
      "npz": `femnist_writers.npz` with x uint8 [M, 28, 28] (255 = background, as in LEAF), y [M] and writer [M],
        integers.
      "leaf": `leaf_femnist/{train,test}/*.json`.
      "fedjax": `federated_emnist_{train,test}.sqlite`.
      "tff": `emnist_all.sqlite`, the same file packed, `emnist_all.sqlite.lzma`, or `fed_emnist_{train,test}.h5` of
        versions before 2021. 3,400 writers, 671,585 training and 77,483 test examples.
      "auto" (default): the first of these that exists.
    All formats except npz are converted on the first use (one or two minutes for LEAF's and TFF's) and kept in the
    cache. The packed file is unpacked there first, to a temporary file of about 5 GB.

    The pixels are inverted to 255 = ink, as in mnist and glyphs, so that the zero padding of convolutions has the value
    of paper. If the source has no test set (npz), a random 20 % of each writer's examples become test examples. A
    writer then has at least one test example, except for a writer with a single example, which is used for training. If
    the test set has writers without training examples (LEAF's -t user), it is pooled. With `load(standardize=True)`,
    mean and std are those of FedEve's authors, 0.0365 and 0.1602. (Caldas et al., LEAF, arXiv 1812.01097; images of
    NIST Special Database 19.)
    """
    path = request.path()
    if path.name in FILES["npz"]:
        x, y, writer = files.read_npz(path, request.dataset.spec("", writers=True)).values()
        return _hold_out(255 - x, y, writer, request.seed)
    a = _read(path, request.dataset)
    if "x_test" not in a:
        return _hold_out(a["x"], a["y"], a["writer"], request.seed)
    test_writer = a["writer_test"] if np.isin(a["writer_test"], a["writer"]).all() else None
    return Samples(pair(a["x"], a["y"]), pair(a["x_test"], a["y_test"]), a["writer"], test_writer)


def _hold_out(x: np.ndarray, y: np.ndarray, writer: np.ndarray, seed: int) -> Samples:
    """Moves about 20 % of each writer's examples to the test set: at least one, but never the only one."""
    shuffled = np.lexsort((np.random.default_rng(seed).random(len(y)), writer))
    _, start, sizes = np.unique(writer[shuffled], return_index=True, return_counts=True)
    test_size = np.minimum(np.maximum(1, np.rint(0.2 * sizes).astype(np.int64)), sizes - 1)
    is_test = np.arange(len(y)) < np.repeat(start + test_size, sizes)
    train, test = shuffled[~is_test], shuffled[is_test]
    return Samples(pair(x[train], y[train]), pair(x[test], y[test]), writer[train], writer[test])


def _read(path: Path, dataset: DataSet) -> files.Arrays:
    """Reads x uint8 [M, 28, 28, 1] (255 = ink), y [M] and writer [M] (sorted), and x_test, y_test and writer_test.

    path: LEAF's folder with train and test; TFF's database; or the training file of FedJAX or TFF, with the test file
    in the same folder. If there is no test file, the result has no test arrays. The data are converted once and kept in
    the cache until a file changes. Raises the errors of `from_leaf`, `from_fedjax` and `from_tff`.
    """
    read: Callable[[Path], Iterator[Client]]
    train, test = path, path.with_name(path.name.replace("_train", "_test"))
    if path.suffix == "":
        read, train, test = read_leaf, path / "train", path / "test"
    else:
        read = functools.partial(read_fedjax if path.suffix == ".sqlite" else tff_files.read_h5, x="pixels", y="label")
    has_both = path.name.startswith("emnist_all.")  # TFF's database has both parts
    places = {"": train} | ({"_test": test} if has_both or test.exists() else {})
    sources = [file for place in places.values() for file in (sorted(place.glob("*.json")) or [place])]

    def convert() -> files.Arrays:
        number: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            if has_both:
                file = stack.enter_context(tff_files.opened(path))
                splits = {part: file.chosen(f"all{part or '_train'}", "all_train") for part in places}
                clients = {part: file.read("pixels", "label", split) for part, split in splits.items()}
            else:
                clients = {part: read(place) for part, place in places.items()}
            return {
                f"{key}{part}": column
                for part, rows in clients.items()
                for key, column in _by_writer(rows, places[part], number).items()
            }

    return files.cached(f"{path.stem}_{files.stamp(sources)}.npz", dataset.spec(*places, writers=True), convert)


def _by_writer(rows: Iterator[Client], place: Path, number: dict[str, int]) -> files.Arrays:
    """Returns the concatenated data, sorted by writer id. New writers get the next ids, which are added to
    ``number``."""
    pixels, labels, ids, sizes = bytearray(), bytearray(), [], []  # they grow in place, so there is one copy
    for client, x, y in rows:
        name = f"{place}: client {client!r}"
        writer = client.rpartition(":")[2]  # FedJAX prefixes LEAF's name with a hash and a colon
        files.check({"labels": y}, {"labels": Column(classes=62)}, name)
        pixels += _ink(x, name).tobytes()
        labels += y.astype(np.uint8).tobytes()
        ids.append(number.setdefault(writer, len(number)))
        sizes.append(len(y))
    if not ids:
        checks.refuse(f"{place} must have at least 1 example", "none", "copy or download it again")
    images = np.frombuffer(pixels, np.uint8).reshape(-1, 28, 28, 1)
    arrays = {"x": images, "y": np.frombuffer(labels, np.uint8), "writer": np.repeat(ids, sizes)}
    if ids == sorted(ids):
        return arrays
    order = np.argsort(arrays["writer"], kind="stable")
    return {key: array[order] for key, array in arrays.items()}


def _ink(x: np.ndarray, name: str) -> np.ndarray:
    """Converts pixels in [0, 1], where 1 is background, to uint8 [n, 28, 28, 1], where 255 is ink.

    The conversion is exact, because the published pixels are bytes / 255.
    """
    if x[0].size != 28 * 28 or not (0 <= x.min() and x.max() <= 1):
        got = f"{list(x.shape[1:])}" + (f", {x.min()}..{x.max()}" if x.size else "")
        checks.refuse(f"{name} must have images of 28 x 28 numbers in 0..1", got, "is it FEMNIST?")
    return np.rint(255 * (1 - x.reshape(-1, 28, 28, 1))).astype(np.uint8)
