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
    "small shape": header(of_shape("(1, 2, 5)")),
    "unclosed header": header(b"{'descr': '|u1', 'shape': ("),
    "deep header": header(b"[" * 90),
    "objects": header(of_shape("(1,)", "|O")),
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


def make_pfllib(folder: Path) -> None:
    write_pfllib(folder / "digits")


def make_fl_bench(folder: Path) -> None:
    write_fl_bench(folder / "partition")


def make_niid_bench(folder: Path) -> None:
    write_niid_bench(folder / "card")


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


SQLITE: dict[str, Change] = {
    "no text as name": sql("UPDATE federated_data SET client_id = num_examples + 0.5 WHERE rowid = 1"),
    "no rows": sql("DELETE FROM federated_data"),
}


def protos(data: bytes) -> Change:
    return lambda path: sql(f"UPDATE examples SET serialized_example_proto = x'{data.hex()}'")(path)


def message_of(**features: bytes) -> bytes:
    """A message `tf.train.Example` with these messages `tf.train.Feature`."""
    return field(1, *(field(1, field(1, name.encode()), field(2, value)) for name, value in features.items()))


LABEL = field(3, field(1, b"\1"))
TFF: dict[str, Change] = {
    "no split": sql("UPDATE client_metadata SET split_name = ''"),
    "a number without end": protos(b"\xff" * 50),
    "a group": protos(b"\x0b" * 20),
    "a cut integer": protos(message_of(pixels=LABEL, label=field(3, field(1, b"\1\x80")))),
    "an integer of 11 bytes": protos(message_of(pixels=LABEL, label=field(3, field(1, b"\x80" * 10 + b"\1")))),
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


LZMA = {
    "a header of 16 TiB": packed_again(
        edited(lambda content: content[:28] + struct.pack(">I", 2**32 - 1) + content[32:])
    )
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
    "images npz": Format(*as_npz("mnist.npz", **images()), dataset("mnist"), True, NPZ),
    "images npz, packed": Format(*as_npz("fashion_mnist.npz", True, **images()), dataset("fashion_mnist"), True),
    "femnist npz": Format(
        *as_npz("femnist_writers.npz", x=images()["x_train"], y=np.arange(6), writer=np.arange(6) // 2),
        dataset("femnist"), True,
    ),
    **{f"{kind} npz": Format(*as_npz(f"cifar10_{kind}.npz", **encoded(kind)), dataset("cifar10"), True, {
        "offsets that wrap": npz(
            **encoded(kind) | {"offsets": encoded(kind)["offsets"][[0, 2, 1, 3, 4, 5, 6]].astype(np.uint64)}
        ),
    }) for kind in ("jpeg", "webp")},
    "movielens npz": Format(
        *as_npz("movielens_latest_small.npz", **RATED),
        dataset("movielens", size="latest-small", **SMALL), True,
    ),
    "idx gz": Format("emnist-letters-train-images-idx3-ubyte.gz", write_emnist, dataset("emnist"), True, {
        "three bytes": idx(b"\0\0\x08"),
    }),
    "cifar10 pickle": Format(
        "cifar-10-batches-py/data_batch_2", published("cifar10"), dataset("cifar10")),
    "cifar100 pickle": Format("cifar-100-python/train", published("cifar100"), dataset("cifar100")),
    "pfllib npz": Format("digits/train/1.npz", make_pfllib, own_rows(fd.data.from_pfllib, "digits"), True),
    "pfllib config": Format("digits/config.json", make_pfllib, own_rows(fd.data.from_pfllib, "digits")),
    "fl-bench pickle": Format("partition/partition.pkl", make_fl_bench, load_fl_bench),
    "fl-bench stats": Format("partition/all_stats.json", make_fl_bench, load_fl_bench),
    "niid-bench csv": Format("card/1.csv", make_niid_bench, own_rows(fd.data.from_niid_bench, "card")),
    "cinic png": Format("CINIC-10/train/bird/a.png", published("cinic10"), dataset("cinic10"), True, {
        "gif": another_image("GIF"),
    }),
    "tiny_imagenet jpeg": Format(TINY + "/train/n02/images/n02_0.JPEG", *TINY_IMAGENET),
    "tiny_imagenet text": Format(TINY + "/val/val_annotations.txt", *TINY_IMAGENET),
    "tiny_imagenet wnids": Format(TINY + "/wnids.txt", *TINY_IMAGENET, False, {
        "not UTF-8": replaced("n02", "\xff"), "twice": replaced("n02", "n01"),
    }),
    "leaf json": Format(LEAF, make_femnist("leaf"), dataset("femnist"), False, {"deep": written("[" * 100_000)}),
    "leaf json, own": Format(LEAF, make_femnist("leaf"), own_rows(fd.datasets.from_leaf, "leaf_femnist")),
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
    "tff h5": Format(TFF_H5, make_femnist("tff"), dataset("femnist")),
    "tff h5, own": Format(TFF_H5, make_femnist("tff"), own_rows(fd.datasets.from_tff, TFF_H5)),
    "movielens ratings": Format("ml-1m/ratings.dat", make_movielens, dataset("movielens", **SMALL), False, {
        "cut within the last line": edited(lambda content: content[:-2]),
        "a field cut off": edited(lambda content: content[:-12]),
        "one rating each": written("".join(f"{u}::{u}::1::{SECOND}\n" for u in (1, 2, 3))),
    }),
    "movielens users": Format("ml-1m/users.dat", make_movielens, dataset("movielens", **SMALL), False, {
        "twice": replaced("2::F", "1::F"),
    }),
    "agnews csv": Format(
        "ag_news_csv/train.csv", make_agnews, dataset("agnews"), False, {"unclosed": written('"1","a","b')},
    ),
    "bindingdb tsv": Format("BindingDB_All.tsv", make_bindingdb, dataset("bindingdb", ligand=4, protein=4), False, {
        "an infinite Kd": replaced("12.5", "1e999"),
        "one pair": written("Ligand SMILES\tKd (nM)\tBindingDB Target Chain Sequence\nC\t5\tM\n"),
    }),
    "cache npz": Format("cache/*", make_cache, again(dataset("femnist")), True, NPZ),
    "parameters npz": Format(*as_npz("params.npz", **PARAMS), load_params, True, NPZ | {
        "text": npz(**PARAMS | {"classifier/dense/bias": np.array(["a", "b"])}),
    }, warm=True),
    "parameters safetensors": Format("params.safetensors", make_safetensors, load_safetensors, warm=True),
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
