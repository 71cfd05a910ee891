"""Loads damaged and unusual files of every format that the library reads. Prints the outcomes as JSON.

    python tests/damage.py [FILES] [FORMAT ...]

Each format has a small valid example. The example is damaged by crafted changes, and by random changes with a fixed
seed. Each damaged file is loaded in a forked child process. So a crash or an endless loop in the C code of another
library ends only the child. Outcomes:

    refused       the library raised ValueError, FileNotFoundError or OSError, with a one-line message that names the
                  file or its folder
    same          loaded, and equal to the example
    undetectable  loaded, but not equal to the example; the format has no checksums
    SILENT        loaded, but not equal to the example, although the format has checksums
    RAW           any other exception
    HANG          loading took more than 20 seconds of CPU time, or 120 seconds
    MEMORY        loading needed more than 300 MB
    CRASH         a signal ended the child
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from test_benchmark_files import LAST, Y, write_fl_bench, write_niid_bench, write_pfllib
from test_data_files import characters, field, write_emnist, write_femnist
from test_download import FORMS

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError, DamagedError

SECONDS, CPU_SECONDS, MEMORY = 120, 20, 300_000_000
BAD = ("RAW", "HANG", "MEMORY", "CRASH")
NAMES = [f"f{i:04}_{i:02}" for i in range(3)]

Change = Callable[[Path], object]


class Format(NamedTuple):
    file: str
    """The file to damage, as a pattern in the folder of the example."""
    make: Callable[[Path], object]
    """Writes a small valid example into a folder."""
    load: Callable[[Path], Any]
    """Returns the contents of the folder as arrays and plain values."""
    checked: bool = False
    """Whether the format has checksums. If it has, every change must be detected."""
    crafted: dict[str, Change] = {}
    """Changes that are mistakes in the format of the file."""
    warm: bool = False
    """Whether the valid example is loaded first, because memory of other packages and of a device is not counted."""


# ---------------------------------------------------------------- damage


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def flip(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def block(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.randint(1, 512))


def zero(content: bytes, rng: random.Random) -> bytes:
    start, end = block(content, rng)
    return content[:start] + bytes(end - start) + content[end:]


def double(content: bytes, rng: random.Random) -> bytes:
    start, end = block(content, rng)
    return content[:end] + content[start:]


def noise(content: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 2000))


def empty(content: bytes, rng: random.Random) -> bytes:
    return b""


def swapped(content: bytes, rng: random.Random) -> bytes:
    return content[len(content) // 2 :] + content[: len(content) // 2]


def encoded(content: bytes, rng: random.Random) -> bytes:
    return content.decode("latin-1").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]))


WAYS = (cut, flip, zero, double, cut, flip, zero, noise, swapped, encoded, empty)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


EVERYWHERE: dict[str, Change] = {"a folder": a_folder, "gone": gone}


# ---------------------------------------------------------------- formats


def dataset(name: str, **options: Any) -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        os.environ["FEDJAX_DRIFT_CACHE"] = str(folder / "cache")
        return values(fd.datasets.load(name, fd.partition.iid(1), folder, **options))

    return load


def values(data: fd.FederatedData) -> list[Any]:
    return [data.x, data.y, data.sizes, data.x_test, data.y_test, data.client_names]


def edited(edit: Callable[[bytes], bytes]) -> Change:
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def written(text: str | bytes) -> Change:
    return lambda path: path.write_bytes(text.encode("latin-1") if isinstance(text, str) else text)


def replaced(old: str, new: str) -> Change:
    def edit(content: bytes) -> bytes:
        assert old.encode("latin-1") in content, old
        return content.replace(old.encode("latin-1"), new.encode("latin-1"), 1)

    return edited(edit)


def npz(packed: bool = False, **arrays: Any) -> Change:
    return lambda path: (np.savez_compressed if packed else np.savez)(path, **arrays)


def images(side: int = 28, rows: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (rows, side, side) + (3,) * (side == 32), np.uint8)
    y = np.arange(rows) % 10
    return {"x_train": x, "y_train": y, "x_test": x[:2] + 1, "y_test": y[:2]}


def header(text: bytes) -> Change:
    """Returns a change that writes an npz file, in which x_train has this npy header and 100 bytes of data."""

    def change(path: Path) -> None:
        np.savez(path, **{key: array for key, array in images().items() if key != "x_train"})
        with zipfile.ZipFile(path, "a") as archive:
            text_ = text.ljust(117) + b"\n"
            archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text_)) + text_ + bytes(100))

    return change


def of_shape(shape: str, dtype: str = "|u1") -> bytes:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()


NPZ: dict[str, Change] = {
    "huge shape": header(of_shape("(10000000000000,)")),
    "negative shape": header(of_shape("(-4, 28, 28)")),
    "small shape": header(of_shape("(1, 2, 5)")),
    "unclosed header": header(b"{'descr': '|u1', 'shape': ("),
    "header of code": header(b"__import__('os').abort()"),
    "deep header": header(b"[" * 90),
    "header of no dict": header(b"3"),
    "objects": header(of_shape("(1,)", "|O")),
    "no header": written(b"PK\x03\x04"),
}


def as_npz(name: str, packed: bool = False, **arrays: Any) -> tuple[str, Change]:
    """The file of a `Format`, and the function that makes it."""
    return name, lambda folder: npz(packed, **arrays)(folder / name)


def encoded(kind: str) -> dict[str, Any]:
    parts = []
    for x in images(32)["x_train"]:
        buffer = io.BytesIO()
        Image.fromarray(x).save(buffer, kind, lossless=True)
        parts.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, parts)])
    data = np.frombuffer(b"".join(parts), np.uint8)
    return {kind: data, "offsets": offsets, "labels": np.arange(6), "n_train": 4}


def idx(raw: bytes, times: int = 1) -> Change:
    return written(gzip.compress(raw) * times)


def published(name: str) -> Change:
    """Returns a function that writes the unpacked files of a download."""

    def make(folder: Path) -> None:
        (folder / "packed").mkdir()
        FORMS[name](folder, folder / "packed")

    return make


PICKLES: dict[str, Change] = {
    "code": written(pickle.dumps(os.getcwd, 2)),
    "a set": written(pickle.dumps({"data": {1}, "labels": [1]})),
    "no labels": replaced("labels", "babels"),
    "protocol 5": written(pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}, 5)),
}
PFLLIB = {
    "no member": npz(x=np.zeros(3)),
    "numbers": npz(data=np.zeros(3)),
    "fractions as labels": npz(data={"x": LAST[:9], "y": np.full(9, 0.5)}),
    "labels of two axes": npz(data={"x": LAST[:9], "y": np.zeros((9, 2), int)}),
    "pairs of three": npz(data={"x": np.array([[[1], 2], [[1, 2], 3]], object), "y": [0, 1]}),
}


def make_pfllib(folder: Path) -> None:
    write_pfllib(folder / "digits")


def make_fl_bench(folder: Path) -> None:
    write_fl_bench(folder / "partition")


def make_niid_bench(folder: Path) -> None:
    write_niid_bench(folder / "card")


def partition(**changes: Any) -> Change:
    """Returns a change of the entries of FL-bench's pickle."""
    return edited(lambda content: pickle.dumps(pickle.loads(content) | changes))


def of_first_client(rows: Any) -> Change:
    """Returns a change of the training examples of client 0 in FL-bench's pickle."""

    def edit(content: bytes) -> bytes:
        entries = pickle.loads(content)
        entries["data_indices"][0]["train"] = rows
        return pickle.dumps(entries)

    return edited(edit)


def of_clients(*ids: Any) -> Change:
    return partition(separation={"train": list(ids), "val": [], "test": [0, 1, 2], "total": 3})


FL_BENCH = {
    **{f"clients {ids}": of_clients(*ids) for ids in ((-1,), (0.7,), ("0",), ([7],), (3,), (0, 0), (None,), (2**70,))},
    **{f"indices {rows!r}": of_first_client(rows) for rows in (
        [0.7], [-1], [40], ["1"], [[1]], 3, "12", {1: 2}, [None], [2**70], [True, False], [float("nan")],
    )},
    "clients of another kind": partition(data_indices={0: 1}),
    "no test": partition(separation={"train": [0], "total": 3}),
    "a separation of another kind": partition(separation=[1]),
}  # fmt: skip


def png(side: int) -> Change:
    """Returns a change that writes another width and height into the header of a PNG file."""

    def edit(content: bytes) -> bytes:
        header = content[12:16] + struct.pack(">II", side, side) + content[24:29]
        return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]

    return edited(edit)


def another_image(kind: str) -> Change:
    return lambda path: Image.new("RGB", (32, 32)).save(path, kind)


def make_femnist(source: str) -> Change:
    train, test = characters(dict.fromkeys(NAMES, 2))[0], characters({NAMES[0]: 1})[0]
    return lambda folder: write_femnist(folder, source, train, test)


def make_cache(folder: Path) -> None:
    make_femnist("leaf")(folder)
    dataset("femnist")(folder)


def again(load: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Returns a function that loads twice: the first load replaces a damaged cache, and the second reads it."""

    def twice(folder: Path) -> Any:
        load(folder)
        return load(folder)

    return twice


def leaf(**change: Any) -> Change:
    return edited(lambda content: json.dumps(json.loads(content) | change).encode())


def sql(*statements: str) -> Change:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return change


def blob(data: bytes) -> Change:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE federated_data SET data = ?", (data,))

    return change


SQLITE: dict[str, Change] = {
    "msgpack of lists": blob(zlib.compress(b"\x91" * 100_000)),
    "msgpack of no text": blob(zlib.compress(b"\x81\x01\x02")),
    "no blob": sql("UPDATE federated_data SET data = 'text'"),
    "no text as name": sql("UPDATE federated_data SET client_id = num_examples + 0.5 WHERE rowid = 1"),
    "name not in UTF-8": sql("UPDATE federated_data SET client_id = x'ff' WHERE rowid = 1"),
    "no rows": sql("DELETE FROM federated_data"),
}


def protos(data: bytes) -> Change:
    return lambda path: sql(f"UPDATE examples SET serialized_example_proto = x'{data.hex()}'")(path)


def message_of(**features: bytes) -> bytes:
    """A message `tf.train.Example` with these messages `tf.train.Feature`."""
    return field(1, *(field(1, field(1, name.encode()), field(2, value)) for name, value in features.items()))


LABEL = field(3, field(1, b"\1"))
TFF: dict[str, Change] = {
    "without rowid": sql(
        "DROP TABLE examples",
        "CREATE TABLE examples(split_name, client_id, serialized_example_proto, PRIMARY KEY(client_id)) WITHOUT ROWID",
        "INSERT INTO examples SELECT split_name, client_id, x'0a' FROM client_metadata GROUP BY client_id",
    ),
    "no blob": sql("UPDATE examples SET serialized_example_proto = 'text'"),
    "no text as name": sql("UPDATE examples SET client_id = x'ff'"),
    "name not in UTF-8": sql("UPDATE examples SET client_id = CAST(x'ff' AS TEXT)"),
    "a negative count": sql("UPDATE client_metadata SET num_examples = -1"),
    "a count of text": sql("UPDATE client_metadata SET num_examples = 'two'"),
    "no rows": sql("DELETE FROM examples"),
    "no split": sql("UPDATE client_metadata SET split_name = ''"),
    "an empty message": protos(b""),
    "a field of 2**63 bytes": protos(b"\n" + b"\xff" * 9 + b"\1"),
    "a number without end": protos(b"\xff" * 50),
    "a group": protos(b"\x0b" * 20),
    "a name not in UTF-8": protos(field(1, field(1, field(1, b"\xff"), field(2, LABEL)))),
    "no name": protos(field(1, field(1, field(2, LABEL)))),
    "text": protos(message_of(pixels=field(1, field(1, b"abc")), label=LABEL)),
    "no pixels": protos(message_of(pixels=b"", label=LABEL)),
    "pixels of 3 bytes": protos(message_of(pixels=field(2, field(1, b"abc")), label=LABEL)),
    "a cut integer": protos(message_of(pixels=LABEL, label=field(3, field(1, b"\1\x80")))),
    "an integer of 11 bytes": protos(message_of(pixels=LABEL, label=field(3, field(1, b"\x80" * 10 + b"\1")))),
    "pixels of nested messages": protos(message_of(pixels=field(2, field(2, field(1, LABEL))), label=LABEL)),
}


def packed_again(change: Change) -> Change:
    """Returns a change of the database in a packed file."""

    def change_packed(path: Path) -> None:
        database = path.with_suffix("")
        database.write_bytes(lzma.decompress(path.read_bytes()))
        change(database)
        path.write_bytes(lzma.compress(database.read_bytes()))
        database.unlink()

    return change_packed


def with_header(pages: int) -> Change:
    """Returns a change of the number of pages in the header of a packed database."""
    return packed_again(edited(lambda content: content[:28] + struct.pack(">I", pages) + content[32:]))


LZMA = {name: packed_again(TFF[name]) for name in ("no rows", "a field of 2**63 bytes", "no split")}
LZMA |= {
    "a header of 16 TiB": with_header(2**32 - 1),
    "a header of no pages": with_header(0),
    "a dictionary of 4 GiB": edited(lambda content: b"]" + b"\xff" * 4 + content[5:]),
    "no database": written(lzma.compress(bytes(1000))),
    "nothing": written(lzma.compress(b"")),
    "xz": packed_again(lambda path: None),
    "unpacked": edited(lzma.decompress),
}


def h5(**columns: Any) -> Change:
    """Returns a change that writes an HDF5 file with one client.

    columns: the options of ``create_dataset`` for each column.
    """

    def change(path: Path) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for name, options in columns.items():
                file.create_dataset(f"examples/{NAMES[0]}/{name}", **options)

    return change


LABELS: dict[str, Any] = {"data": np.arange(2)}


HDF5: dict[str, Change] = {
    "text": h5(pixels={"data": ["a", "b"]}, label=LABELS),
    "a number": h5(pixels={"data": 3.0}, label={"data": 1}),
    "no numbers": h5(pixels={"data": None, "dtype": "f4"}, label=LABELS),
    "a group": h5(**{"pixels/a": LABELS, "label": LABELS}),
    "labels of two axes": h5(pixels={"data": np.zeros((2, 28, 28))}, label={"data": np.zeros((2, 2), int)}),
}


def own_rows(read: Callable[..., fd.FederatedData], *parts: str) -> Callable[[Path], Any]:
    return lambda folder: values(read(*(folder / part for part in parts)))


def load_fl_bench(folder: Path) -> Any:
    return values(fd.data.from_fl_bench(folder / "partition" / "partition.pkl", LAST, Y))


def own_tff(name: str) -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        os.environ["FEDJAX_DRIFT_CACHE"] = str(folder / "cache")
        return values(fd.datasets.from_tff(folder / name, split="all_train"))

    return load


SECOND = 978_300_000  # a typical time of a rating in ML-1M


def make_movielens(folder: Path) -> None:
    (folder / "ml-1m").mkdir()
    ratings = [f"{u}::{10 * u + f}::{f}::{SECOND + 100 * f + u}\n" for u in (1, 2, 3) for f in (1, 2, 3)]
    (folder / "ml-1m" / "ratings.dat").write_text("".join(ratings))
    (folder / "ml-1m" / "users.dat").write_text("".join(f"{u}::F::25::{u}::5506{u}\n" for u in (1, 2, 3)))


RATED = {"user_id": np.repeat([7, 9], 3), "movie_id": np.arange(6) + 20, "timestamp": SECOND + np.arange(6)}
SMALL = {"history": 2, "negatives": 1, "test_negatives": 2}


def make_agnews(folder: Path) -> None:
    (folder / "ag_news_csv").mkdir()
    for name in ("train.csv", "test.csv"):
        (folder / "ag_news_csv" / name).write_text(
            '"3","Oil up, up","Oil ""rose"" \\$40"\n"1","Up!","xé"\n"2","Oil","four"\n', "utf-8"
        )


def make_bindingdb(folder: Path) -> None:
    rows = [("CCO", "12.5", "MKV"), ("CCC", "99", "MKV"), ("C=O", ">10000", "MKV"), ("O", "<1e1", "MMM")]
    lines = ["Id\tLigand SMILES\tKd (nM)\tBindingDB Target Chain Sequence\n"]
    lines += [f"{i}\t{smiles}\t{kd}\t{protein}\n" for i, (smiles, kd, protein) in enumerate(rows)]
    (folder / "BindingDB_All.tsv").write_text("".join(lines))


MODEL = fd.models.linear((4,), num_classes=2)
PARAMS = {"classifier/dense/bias": np.ones(2, "f4"), "classifier/dense/kernel": np.ones((4, 2), "f4")}


def make_safetensors(folder: Path) -> None:
    from safetensors import numpy

    numpy.save_file(PARAMS, folder / "params.safetensors")


def load_params(folder: Path, name: str = "params.npz") -> Any:
    params = fd.models.load_params(MODEL, folder / name)
    return [params["classifier"]["dense"][name] for name in ("bias", "kernel")]


load_safetensors = functools.partial(load_params, name="params.safetensors")


def safetensors(length: int, text: bytes) -> Change:
    return written(struct.pack("<Q", length) + text + bytes(64))


RECORDS = [
    {"round": t, "algorithm": "a", "seed": 0, "train_loss": 1 / t, "accuracy": 0.25 * t, "update": [0.5, t]}
    for t in (1, 2, 3)
]


def make_log(folder: Path) -> None:
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))


def load_log(folder: Path) -> Any:
    read = fd.logs.read(folder)
    measured = any("accuracy" in record for record in read)
    return [json.dumps(read), measured and str(fd.plots.rounds_to_target(folder, 0.5))]


def make_run(folder: Path) -> None:
    make_log(folder)
    model = {"name": "linear", "parameters": 10, "num_classes": 2, "input_shape": [4]}
    (folder / "config.json").write_text(json.dumps({"algorithms": ["a"], "seeds": [0], "model": model}))
    (folder / "a").mkdir()
    np.savez(folder / "a" / "model.npz", **PARAMS)


def load_run(folder: Path) -> Any:
    run = fd.load_run(folder)
    dense = run.params["classifier"]["dense"]
    return [run.algorithm, run.seed, json.dumps(run.settings), json.dumps(run.history), dense["bias"], dense["kernel"]]


def make_tfds(folder: Path) -> None:
    import tensorflow_datasets as tfds

    arrays = images()

    class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("3.0.1")

        def _info(self) -> Any:
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager: Any) -> Any:
            return {split: self._generate_examples(split) for split in ("train", "test")}

        def _generate_examples(self, split: str) -> Iterator[Any]:
            for i, (x, y) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
                yield i, {"image": Image.fromarray(x), "label": int(y)}

    Mnist(data_dir=folder / "tfds", file_format="array_record").download_and_prepare()


def load_tfds(folder: Path) -> Any:
    os.environ |= {"TFDS_DATA_DIR": str(folder / "tfds"), "FEDJAX_DRIFT_CACHE": str(folder / "cache")}
    os.environ["FEDJAX_DRIFT_DATA"] = str(folder)
    return values(fd.datasets.load("mnist", fd.partition.iid(1)))


TINY, TINY_IMAGENET = "tiny-imagenet-200", (published("tiny_imagenet"), dataset("tiny_imagenet"))
LEAF, FEDJAX = "leaf_femnist/train/all_data_1.json", "federated_emnist_train.sqlite"
TFF_H5, TFF_DATABASE = "fed_emnist_train.h5", "emnist_all.sqlite"
FORMATS = {
    "images npz": Format(*as_npz("mnist.npz", **images()), dataset("mnist"), True, NPZ | {
        "labels of text": npz(**images() | {"y_train": np.array(["a"] * 6)}),
        "labels of 2**64": npz(**images() | {"y_train": np.full(6, 2**64 - 1, np.uint64)}),
        "labels of no axis": npz(**images() | {"y_train": np.array(3)}),
        "records": npz(**images() | {"x_train": np.zeros(6, [("a", "u1"), ("b", "u1")])}),
    }),
    "images npz, packed": Format(*as_npz("fashion_mnist.npz", True, **images()), dataset("fashion_mnist"), True),
    "femnist npz": Format(
        *as_npz("femnist_writers.npz", x=images()["x_train"], y=np.arange(6), writer=np.arange(6) // 2),
        dataset("femnist"), True,
    ),
    **{f"{kind} npz": Format(*as_npz(f"cifar10_{kind}.npz", **encoded(kind)), dataset("cifar10"), True, {
        "offsets that wrap": npz(
            **encoded(kind) | {"offsets": encoded(kind)["offsets"][[0, 2, 1, 3, 4, 5, 6]].astype(np.uint64)}
        ),
        "no image": npz(**encoded(kind) | {kind: np.zeros_like(encoded(kind)[kind])}),
        "n_train": npz(**encoded(kind) | {"n_train": np.uint64(2**64 - 1)}),
    }) for kind in ("jpeg", "webp")},
    "movielens npz": Format(
        *as_npz("movielens_latest_small.npz", **RATED),
        dataset("movielens", size="latest-small", **SMALL), True, {
            "a negative user": npz(**RATED | {"user_id": -RATED["user_id"]}),
            "a negative film": npz(**RATED | {"movie_id": RATED["movie_id"] - 25}),
            "a negative time": npz(**RATED | {"timestamp": -RATED["timestamp"]}),
            "a user of 2**63": npz(**RATED | {"user_id": RATED["user_id"].astype("u8") + 2**63}),
        },
    ),
    "idx gz": Format("emnist-letters-train-images-idx3-ubyte.gz", write_emnist, dataset("emnist"), True, {
        "three bytes": idx(b"\0\0\x08"),
        "huge": idx(b"\0\0\x08\x03" + b"\xff" * 12),
        "255 axes": idx(b"\0\0\x08\xff" + struct.pack(">I", 1) * 255 + b"\0"),
        "no axis": idx(b"\0\0\x08\0\0"),
        "uncompressed": edited(gzip.decompress),
    }),
    "cifar10 pickle": Format(
        "cifar-10-batches-py/data_batch_2", published("cifar10"), dataset("cifar10"), False, PICKLES,
    ),
    "cifar100 pickle": Format("cifar-100-python/train", published("cifar100"), dataset("cifar100"), False, PICKLES),
    "pfllib npz": Format("digits/train/1.npz", make_pfllib, own_rows(fd.data.from_pfllib, "digits"), True, PFLLIB),
    "pfllib config": Format("digits/config.json", make_pfllib, own_rows(fd.data.from_pfllib, "digits"), False, {
        "more clients": replaced('"num_clients": 3', '"num_clients": 4'),
        "no lists": replaced("[[[0", "[], [[[0"), "an empty list": replaced("[[0, 3], [1, 3], [2, 2]]", "[]"),
        "more lists": replaced("[[[0", "[[[0, 1]], [[0"), "a label of 0.7": replaced("[[[0, ", "[[[0.7, "),
        "a label twice": replaced("[[[0, ", "[[[0, 1], [0, "), "no dict": written("[3]"),
    }),
    "fl-bench pickle": Format("partition/partition.pkl", make_fl_bench, load_fl_bench, False, FL_BENCH),
    "fl-bench stats": Format("partition/all_stats.json", make_fl_bench, load_fl_bench, False, {
        "no dict": written("[3]"), "a label of text": replaced('"y": {"0"', '"y": {"a"'),
        "a label of 0.7": replaced('"y": {"0"', '"y": {"0.7"'), "no labels": replaced('"y"', '"z"'),
        "a client of text": replaced('"2": {"x"', '"a": {"x"'),
    }),
    "niid-bench csv": Format("card/1.csv", make_niid_bench, own_rows(fd.data.from_niid_bench, "card"), False, {
        "a column twice": replaced("Time", "Class"), "no name": replaced("Time", ""), "1_0": replaced("10.0", "1_0.0"),
        "other digits": replaced("10.0", "\u0661\u0660.0".encode().decode("latin-1")),
        "a byte-order mark": edited(lambda content: content.decode().encode("utf-8-sig")),
        "not UTF-8": replaced("Time", "\xff"), "a short row": replaced("10.0,", ""), "NUL": replaced("10.0", "\0"),
        "a long field": replaced("10.0", "1" * 200_000), "an empty field": replaced("10.0", ""),
        "infinity": replaced("10.0", "inf"),
        "one number": written("3"),
    }),
    "cinic png": Format("CINIC-10/train/bird/a.png", published("cinic10"), dataset("cinic10"), True, {
        "larger": png(12_000), "wider": png(33), "eps": another_image("EPS"),
        "gif": another_image("GIF"),
    }),
    "tiny_imagenet jpeg": Format(TINY + "/train/n02/images/n02_0.JPEG", *TINY_IMAGENET),
    "tiny_imagenet text": Format(TINY + "/val/val_annotations.txt", *TINY_IMAGENET, False, {
        "out of the folder": replaced("val_0", "../../../../../etc/passwd"),
        "NUL": replaced("val_0", "\0"),
        "not UTF-8": replaced("n02", "\xff"),
    }),
    "tiny_imagenet wnids": Format(TINY + "/wnids.txt", *TINY_IMAGENET, False, {
        "not UTF-8": replaced("n02", "\xff"), "NUL": replaced("n02", "\0"), "parent": replaced("n02", ".."),
        "twice": replaced("n02", "n01"),
    }),
    "leaf json": Format(LEAF, make_femnist("leaf"), dataset("femnist"), False, {
        "not UTF-8": replaced("users", "\xff"),
        "deep": written("[" * 100_000),
        "deep rows": leaf(
            users=["a"], num_samples=[1], user_data={"a": {"x": json.loads("[" * 90 + "]" * 90), "y": 0}}
        ),
        "users of numbers": leaf(users=[3, 4]),
        "users of lists": leaf(users=[[3], [4]]),
        "too few counts": leaf(num_samples=[2]),
        "counts of text": leaf(num_samples=["2", "2"]),
        "one user twice": leaf(users=[NAMES[1]] * 2),
        "no users": leaf(users=[], num_samples=[], user_data={}),
        "number of 5,000 digits": replaced("1.0", "1" * 5000),
        "1e999": replaced("1.0", "1e999"),
        "NaN": replaced("1.0", "NaN"),
        "labels of lists": leaf(users=["a"], num_samples=[1], user_data={"a": {"x": [[0] * 784], "y": [[1]]}}),
        "labels of fractions": leaf(users=["a"], num_samples=[1], user_data={"a": {"x": [[0] * 784], "y": [0.5]}}),
    }),
    "leaf json, own": Format(
        LEAF, make_femnist("leaf"), lambda folder: values(fd.datasets.from_leaf(folder / "leaf_femnist")), False, {
            "another row": leaf(users=["a"], num_samples=[1], user_data={"a": {"x": [[0] * 7], "y": [1]}}),
            "labels of 1e999": leaf(users=["a"], num_samples=[1], user_data={"a": {"x": [[0.0] * 784], "y": [1e999]}}),
        },
    ),
    "fedjax sqlite": Format(FEDJAX, make_femnist("fedjax"), dataset("femnist"), False, SQLITE),
    "fedjax sqlite, own": Format(
        FEDJAX, make_femnist("fedjax"), own_rows(fd.datasets.from_fedjax, FEDJAX), False, SQLITE,
    ),
    "tff sqlite": Format(TFF_DATABASE, make_femnist("tff sqlite"), dataset("femnist"), False, TFF),
    "tff sqlite, own": Format(
        TFF_DATABASE, make_femnist("tff sqlite"), own_tff(TFF_DATABASE), False, TFF | {
            "pixels of another length": sql(
                "UPDATE examples SET serialized_example_proto = "
                f"x'{message_of(pixels=LABEL, label=LABEL).hex()}' WHERE rowid = 1"
            ),
        },
    ),
    "tff sqlite.lzma": Format(TFF_DATABASE + ".lzma", make_femnist("tff lzma"), dataset("femnist"), False, LZMA),
    "tff sqlite.lzma, own": Format(
        TFF_DATABASE + ".lzma", make_femnist("tff lzma"), own_tff(TFF_DATABASE + ".lzma"), False, LZMA,
    ),
    "tff h5": Format(TFF_H5, make_femnist("tff"), dataset("femnist"), False, HDF5),
    "tff h5, own": Format(TFF_H5, make_femnist("tff"), own_rows(fd.datasets.from_tff, TFF_H5), False, HDF5),
    "movielens ratings": Format("ml-1m/ratings.dat", make_movielens, dataset("movielens", **SMALL), False, {
        "user 0": replaced("2::21", "0::21"),
        "a negative user": replaced("2::21", "-2::21"),
        "a negative film": replaced("2::21", "2::-21"),
        "film 0": replaced("2::21", "2::0"),
        "a negative time": replaced("::978", "::-978"),
        "a time of 1970": replaced("::978300", "::9"),
        "cut within the last line": edited(lambda content: content[:-2]),
        "a field cut off": edited(lambda content: content[:-12]),
        "one rating each": written("".join(f"{u}::{u}::1::{SECOND}\n" for u in (1, 2, 3))),
        "other digits": replaced("2::21", "\xb2::21"),
    }),
    "movielens users": Format("ml-1m/users.dat", make_movielens, dataset("movielens", **SMALL), False, {
        "user 0": replaced("2::F", "0::F"), "twice": replaced("2::F", "1::F"),
    }),
    "agnews csv": Format("ag_news_csv/train.csv", make_agnews, dataset("agnews"), False, {
        "not UTF-8": edited(lambda content: content.decode().encode("latin-1")),
        "a long field": written('"1","' + "a" * 200_000 + '","b"\n'),
        "unclosed": written('"1","a","b'),
        "NUL": written('"1","a","\0"\n"7"'),
    }),
    "bindingdb tsv": Format("BindingDB_All.tsv", make_bindingdb, dataset("bindingdb", ligand=4, protein=4), False, {
        "a huge Kd": replaced("12.5", "9" * 5000),
        "an infinite Kd": replaced("12.5", "1e999"),
        "a negative Kd": replaced("12.5", "-3"),
        "one pair": written("Ligand SMILES\tKd (nM)\tBindingDB Target Chain Sequence\nC\t5\tM\n"),
    }),
    "cache npz": Format("cache/*", make_cache, again(dataset("femnist")), True, NPZ),
    "parameters npz": Format(*as_npz("params.npz", **PARAMS), load_params, True, NPZ | {
        "text": npz(**PARAMS | {"classifier/dense/bias": np.array(["a", "b"])}),
        "complex": npz(**PARAMS | {"classifier/dense/bias": np.ones(2, complex)}),
        "safetensors": safetensors(2, b"{}"), "long safetensors": safetensors(2**63, b"{}"),
    }, warm=True),
    "parameters safetensors": Format("params.safetensors", make_safetensors, load_safetensors, False, {
        "no header": safetensors(2, b"{}"), "a long header": safetensors(2**63, b"{}"), "empty": written(""),
        "a huge array": replaced('"shape":[2]', '"shape":[9]'), "an unknown dtype": replaced('"F32"', '"F99"'),
        "complex": replaced('"F32","shape":[4,2]', '"C64","shape":[2,2]'), "an array twice": replaced("kernel", "bias"),
    }, warm=True),
    "log": Format("rounds.jsonl", make_log, load_log, False, {
        "not UTF-8": replaced("round", "\xff"), "deep": written("[" * 100_000 + "\n"),
        "no round": replaced('"round": 2, ', ""), "a round of text": replaced('"round": 2', '"round": "b"'),
        "an accuracy of text": replaced('"accuracy": 0.5', '"accuracy": "b"'),
        "an accuracy of lists": replaced('"accuracy": 0.5', '"accuracy": [[1], [2, 3]]'),
        "a seed of text": replaced('"seed": 0', '"seed": "b"'), "a seed of lists": replaced('"seed": 0', '"seed": []'),
        "a number of 5,000 digits": replaced('"round": 2', '"round": ' + "2" * 5000),
    }),
    "run folder": Format("config.json", make_run, load_run, False, {
        "not UTF-8": replaced("seeds", "\xff"), "deep": written("[" * 100_000),
        "another model": replaced("linear", "linaer"), "another option": replaced("num_classes", "mun_classes"),
        "classes of text": replaced('"num_classes": 2', '"num_classes": "b"'),
        "a seed of no list": replaced("[0]", "0"), "a name of no text": replaced('"linear"', "[]"),
        "no algorithms": replaced('["a"]', "[]"), "an algorithm of no text": replaced('["a"]', "[3]"),
    }, warm=True),
    "run folder, model": Format("a/model.npz", make_run, load_run, True, warm=True),
    "tfds array_record": Format("tfds/mnist/*/*train.array_record*", make_tfds, load_tfds, True, warm=True),
    "tfds info": Format("tfds/mnist/*/dataset_info.json", make_tfds, load_tfds, warm=True),
}  # fmt: skip


# ---------------------------------------------------------------- one file


def digest(found: Any) -> str:
    total = hashlib.sha256()
    for one in found:
        total.update(
            f"{one.dtype}{one.shape}".encode() + one.tobytes() if hasattr(one, "tobytes") else repr(one).encode()
        )
    return total.hexdigest()


def ours(error: BaseException, folder: Path, path: Path) -> bool:
    """Whether the library raised the error, with a one-line message that names the file or its folder."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_us = frames[-1].f_globals["__name__"].startswith("fedjax_drift")
    # Messages about records name no file, because records need not come from a file.
    named = path.name in str(error) or str(folder) in str(error) or str(error).startswith("records")
    return (
        by_us
        and type(error) in (ConfigurationError, DamagedError, FileNotFoundError, OSError)
        and named
        and "\n" not in str(error)
        and len(str(error)) < 1500
    )


def outcome(file_format: Format, folder: Path, path: Path, wanted: str) -> tuple[str, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = digest(file_format.load(folder))
    except MemoryError as error:
        return "MEMORY", str(error)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        return ("refused" if ours(error, folder, path) else "RAW"), said
    return ("same" if found == wanted else "different"), ""


def example(name: str, folder: Path) -> Path:
    """Writes the valid example of a format. Returns the file to damage."""
    FORMATS[name].make(folder)
    return next(folder.glob(FORMATS[name].file))


def in_child(work: Callable[[], tuple[str, str]], before: Callable[[], Any] = tuple) -> tuple[str, str]:
    """Calls both in a child process. Time and memory are limited after ``before``."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the child, even in C code
        signal.alarm(SECONDS)
        before()
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS, int(used) + CPU_SECONDS + 1))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        try:
            os.write(write, json.dumps(work()).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        is_late = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
        return "HANG" if is_late else "CRASH", f"signal {os.WTERMSIG(status)}"
    return tuple(json.loads(text)) if text else ("RAW", "said nothing")


@contextlib.contextmanager
def copied(pristine: Path) -> Iterator[Path]:
    folder = pristine.with_name("damaged")
    shutil.copytree(pristine, folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def cases(file_format: Format, count: int, rng: random.Random) -> Iterator[tuple[str, Change]]:
    """Yields the names and functions of ``count`` changes: first the crafted ones, then random ones.

    If ``count`` is small, some crafted changes are left out, so that there are also random ones.
    """
    crafted = list((file_format.crafted | EVERYWHERE).items())
    yield from crafted[: max(count // 2, count - 60)]
    for i in range(count - min(len(crafted), max(count // 2, count - 60))):
        way = WAYS[i % len(WAYS)]

        def change(path: Path, way: Any = way) -> None:
            path.write_bytes(way(path.read_bytes(), rng))

        yield way.__name__, change


def tried(name: str, count: int, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (damage, outcome, error message) for each damaged file of a format."""
    file_format, rng = FORMATS[name], random.Random(name)
    pristine = folder / "pristine"
    pristine.mkdir()
    # In a child process, because the example's writer may start threads, and a fork does not copy threads.
    result, made = in_child(lambda: ("made", str(example(name, pristine))))
    assert result == "made", f"{name}: {made}"
    relative = Path(made).relative_to(pristine)
    warm = functools.partial(file_format.load, pristine) if file_format.warm else tuple
    with copied(pristine) as whole:
        result, wanted = in_child(lambda: ("loaded", digest(file_format.load(whole))), warm)
        assert result == "loaded", f"{name}: the valid example: {wanted}"
    for damage, change in cases(file_format, count, rng):
        with copied(pristine) as damaged:
            path = damaged / relative
            before = path.read_bytes()
            change(path)
            if path.is_file() and path.read_bytes() == before:
                continue
            load = functools.partial(outcome, file_format, damaged, path, wanted)
            yield damage, *in_child(load, warm)
    shutil.rmtree(pristine)


def main(count: int, names: list[str]) -> None:
    table: dict[str, dict[str, int]] = {}
    bad = []
    for name in names:
        found = collections.Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            for damage, result, said in tried(name, max(1, -(-count // len(names))), Path(folder)):
                if os.environ.get("DAMAGE_SAID"):
                    print(f"{name}, {damage}: {result} {said}", file=sys.stderr)
                silent = result == "different" and FORMATS[name].checked
                found["SILENT" if silent else "undetectable" if result == "different" else result] += 1
                if silent or result in BAD:
                    bad.append(f"{name}, {damage}: {result} {said}"[:400])
        table[name] = dict(found)
    total = sum(map(collections.Counter, table.values()), collections.Counter[str]())
    print(json.dumps({"formats": table, "total": dict(total), "files": total.total(), "bad": bad}, indent=1))


if __name__ == "__main__":
    here = [name for name in FORMATS if "tfds" not in name or importlib.util.find_spec("array_record")]
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2:] or here)
