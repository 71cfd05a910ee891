"""Tests of the readers on small files in the published formats, written as the authors' tools write them."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import pickle
import sqlite3
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.cli.flags import DEFAULT_MODEL
from fedjax_drift.data import datasets, femnist, files, image_files, images, tfds
from fedjax_drift.data.datasets import load
from fedjax_drift.data.partition import iid

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDJAX_DRIFT_DATA", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))


def refused(path: Path, read: Callable[[], object], *changes: tuple[bytes | str, str]) -> None:
    """Asserts that a file is refused with its name and with certain words after each of the changes.

    changes: another content, or a statement of SQL that changes the database; and a pattern of the message.
    """
    whole = path.read_bytes()
    for change, said in changes:
        if isinstance(change, bytes):
            path.write_bytes(change)
        else:
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(change)
        with pytest.raises(ValueError, match=said) as error:
            read()
        assert str(path) in str(error.value) and str(error.value).count("\n") == 0
        path.write_bytes(whole)


def by_label(data: fd.FederatedData) -> np.ndarray:
    return data.x[data.y.argsort(kind="stable")]


# ---------------------------------------------------------------- missing files


@pytest.mark.parametrize(
    "name, options, said",
    [
        (
            "mnist",
            {},
            r"numpy\.savez: .* tensorflow-datasets has no data .*: \S*mnist is not prepared",
        ),
        ("emnist", {}, "gzip.zip"),
        ("emnist", {"split": "byclass"}, "read from emnist_byclass.npz or .*emnist/byclass is not prepared"),
        ("cifar10", {}, "download https://.*cifar-10-python.tar.gz and unpack it there.*not prepared"),
        ("cinic10", {"valid": True}, r"CINIC-10\.tar\.gz of Edinburgh DataShare"),
        ("tiny_imagenet", {}, r"cs231n.*tiny-imagenet-200\.zip and unpack it there$"),
        ("femnist", {}, r"preprocess\.sh.*fedjax\.datasets.*tff\.simulation.*glyphs"),
        (
            "femnist",
            {"source": "tff"},
            r"emnist_all\.sqlite or \S+ or fed_emnist_train\.h5 in \S+ or \S+, which",
        ),
        ("movielens", {}, "GroupLens"),
        ("agnews", {}, "ag_news_csv.tar.gz"),
        ("bindingdb", {}, "BindingDB as tab-separated values"),
    ],
)
def test_a_missing_data_set_names_its_download_and_folder(tmp_path, name, options, said) -> None:
    record = datasets.RECORDS[name].variant(options)
    places = f"{' or '.join(record.files)} in {tmp_path} or {tmp_path / 'cache'}, which does not exist"
    with pytest.raises(FileNotFoundError, match=said) as error:
        load(name, **options)
    assert places in str(error.value) and record.by_hand in str(error.value)
    row = {row["name"]: row for row in datasets.describe()}[name]
    assert not row["available"] and (options or record.by_hand in row["instructions"])


# ---------------------------------------------------------------- EMNIST


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def write_emnist(folder: Path, split: str = "letters", first: int = 1) -> dict[str, np.ndarray]:
    """Writes two training examples and one test example of each of 26 classes, with transposed images as published.

    Returns the upright images and the labels, which start at 0.
    """
    a = {}
    for part, rows in (("train", 52), ("test", 26)):
        a[f"x_{part}"] = RNG.integers(0, 256, (rows, 28, 28), np.uint8)
        a[f"y_{part}"] = np.arange(rows) % 26
        write_idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte.gz", a[f"x_{part}"].swapaxes(1, 2))
        write_idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte.gz", a[f"y_{part}"] + first)
    return a


def test_emnist_is_transposed_relabelled_from_0_and_limited_to_num_classes(tmp_path: Path) -> None:
    a = write_emnist(tmp_path)
    data = load("emnist", iid(1))
    np.testing.assert_array_equal(by_label(data)[..., 0], a["x_train"][a["y_train"].argsort(kind="stable")])
    few = load("emnist", iid(1), tmp_path, num_classes=10)
    assert few.y.max() == 9 and len(few.x) == 20 and few.x_test is not None and len(few.x_test) == 10
    np.testing.assert_array_equal(few.x_test[..., 0], a["x_test"][:10])
    pixels = a["x_train"][a["y_train"] < 10] / 255  # mean and std of all pixels of the loaded examples
    np.testing.assert_allclose([few.mean, few.std], [[pixels.mean()], [pixels.std()]], rtol=1e-6)
    np.savez(tmp_path / "emnist_letters.npz", **{key: value[:26] for key, value in a.items()})
    assert len(load("emnist", iid(1), tmp_path).x) == 26  # npz files have priority: upright images, labels from 0


def test_emnist_from_tensorflow_datasets_is_transposed_and_lacks_letters(monkeypatch) -> None:
    """The letters split of tensorflow-datasets is not read, because it is incomplete."""
    x = RNG.integers(0, 256, (94, 28, 28, 1), np.uint8)
    names_read = []

    def read(name: str) -> files.Arrays:
        names_read.append(name)
        return {"x_train": x, "y_train": np.arange(94) % 47, "x_test": x[:47], "y_test": np.arange(47)}

    monkeypatch.setattr(tfds, "read", read)
    data = load("emnist", iid(1), split="balanced")
    np.testing.assert_array_equal(by_label(data)[::2], x[:47].swapaxes(1, 2))
    load("emnist", iid(1), split="balanced")
    assert names_read == ["emnist/balanced"]  # the second call reads the cache
    with pytest.raises(FileNotFoundError, match="emnist_letters"):
        load("emnist")
    assert names_read == ["emnist/balanced"]


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    path = tmp_path / "emnist-letters-train-images-idx3-ubyte.gz"
    raw = gzip.decompress(path.read_bytes())
    refused(
        path,
        lambda: load("emnist", iid(1)),
        (path.read_bytes()[:500], "damaged, truncated"),
        (b"hello", "damaged, truncated"),
        (gzip.compress(raw[:-1]), "cannot reshape array of size 40767"),
        (gzip.compress(b"\0\0\x0d" + raw[3:]), "not an idx file of bytes"),
        (gzip.compress(b""), "not an idx file of bytes"),
        (gzip.compress(raw[:6]), "damaged, truncated"),
    )
    write_idx(tmp_path / "emnist-letters-train-labels-idx1-ubyte.gz", np.arange(52) % 26)  # from 0, but must start at 1
    with pytest.raises(ValueError, match=r"y_train must be in 0\.\.25, got -1\.\.24"):
        load("emnist", iid(1))
    (tmp_path / "emnist-letters-test-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="a part of it is missing.*test-labels"):
        load("emnist", iid(1))
    for options, said in (
        ({"split": "letter"}, "did you mean 'letters'"),
        ({"num_classes": 27}, r"in 1\.\.26, got 27"),
    ):
        with pytest.raises(ValueError, match=said):
            load("emnist", iid(1), **options)


# ---------------------------------------------------------------- CIFAR


class Python2(pickle._Pickler):
    """Pickles text and bytes as strings of Python 2, as in the files of CIFAR's authors."""

    def save_string(self, text: str | bytes) -> None:
        encoded = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(encoded)) + encoded)

    dispatch = pickle._Pickler.dispatch | {str: save_string, bytes: save_string}


def write_batch(path: Path, x: np.ndarray, **labels: list[int]) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        Python2(file, 2).dump({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "filenames": ["a.png"], **labels})
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def test_cifar_pickles_are_read(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (7, 32, 32, 3), np.uint8)
    folder = tmp_path / "cifar-100-python"
    write_batch(folder / "train", x[:5], fine_labels=[4, 2, 99, 0, 50], coarse_labels=[0] * 5)
    assert b"numpy.core.multiarray\n_reconstruct" in (folder / "train").read_bytes()
    write_batch(folder / "test", x[5:], fine_labels=[98, 7], coarse_labels=[0] * 2)
    data = load("cifar100", iid(1))
    np.testing.assert_array_equal(by_label(data), x[[3, 1, 0, 4, 2]])
    assert data.y_test is not None and data.y_test.tolist() == [98, 7]
    np.testing.assert_array_equal(data.x_test, x[5:])
    np.testing.assert_allclose([data.mean, data.std], [[0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]])

    for i in range(1, 6):
        write_batch(tmp_path / "cifar-10-batches-py" / f"data_batch_{i}", x[i : i + 1], labels=[i])
    write_batch(tmp_path / "cifar-10-batches-py" / "test_batch", x[:1], labels=[9])
    np.testing.assert_array_equal(by_label(load("cifar10", iid(1))), x[1:6])


def test_malicious_or_damaged_pickles_are_refused_and_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    write_batch(folder / "train", np.zeros((2, 32, 32, 3), np.uint8), fine_labels=[0, 1])
    whole = (folder / "train").read_bytes()

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return Path.touch, (tmp_path / "touched",)

    refused(
        folder / "train",
        lambda: load("cifar100", iid(1)),
        (pickle.dumps(Evil()), "is not allowed in it"),
        (whole[: len(whole) // 2], "damaged or not a pickle"),
        (b"", "damaged or not a pickle"),
        (b"\xff" + whole, "damaged or not a pickle"),
        (pickle.dumps([1]), "must have data and fine_labels"),
        (whole.replace(b"fine_labels", b"fine_babels"), "must have data and fine_labels"),
    )
    assert not (tmp_path / "touched").exists()
    write_batch(folder / "train", np.zeros((2, 16, 16, 3), np.uint8), fine_labels=[0, 1])
    with pytest.raises(ValueError, match=r"data must have shape \[rows, 3072\]"):
        load("cifar100", iid(1))
    write_batch(folder / "train", np.zeros((2, 32, 32, 3), np.uint8), fine_labels=[0])
    (folder / "test").write_bytes((folder / "train").read_bytes())
    with pytest.raises(ValueError, match="as many rows"):
        load("cifar100", iid(1))
    (folder / "train").write_bytes(whole)
    (folder / "test").unlink()
    with pytest.raises(FileNotFoundError, match="a part of it is missing"):
        load("cifar100", iid(1))


# ---------------------------------------------------------------- folders of images


def test_cinic10_is_decoded_again_only_if_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (3, 10, 2, 32, 32, 3), np.uint8)
    for part, of_part in zip(("train", "valid", "test"), pixels, strict=True):
        for name, of_class in zip(images.CIFAR10_CLASSES, of_part, strict=True):
            folder = tmp_path / "CINIC-10" / part / name
            folder.mkdir(parents=True)
            for i, x in enumerate(of_class):
                image.fromarray(x).save(folder / f"cifar10-{part}-{i}.png")
    data = load("cinic10", iid(1))
    np.testing.assert_array_equal(by_label(data), pixels[0].reshape(20, 32, 32, 3))
    np.testing.assert_array_equal(data.x_test, pixels[2].reshape(20, 32, 32, 3))
    np.testing.assert_array_equal(data.y_test, np.repeat(np.arange(10), 2))
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "decode_files", None)  # must not be called again
        np.testing.assert_array_equal(load("cinic10", iid(1)).x, data.x)
    both = load("cinic10", iid(1), valid=True)
    assert sorted(map(bytes, both.x)) == sorted(map(bytes, pixels[:2].reshape(40, 32, 32, 3)))

    changed = tmp_path / "CINIC-10" / "train" / "bird" / "cifar10-train-1.png"
    image.fromarray(pixels[2, 2, 1]).save(changed)
    np.testing.assert_array_equal(by_label(load("cinic10", iid(1)))[5], pixels[2, 2, 1])
    changed.write_bytes(changed.read_bytes()[:100])
    with pytest.raises(ValueError, match="cifar10-train-1.png is not a readable image"):
        load("cinic10", iid(1))
    image.new("I;16", (32, 32)).save(changed)
    with pytest.raises(ValueError, match="cifar10-train-1.png must have 8 bits per channel, got mode 'I;16': save it"):
        load("cinic10", iid(1))
    image.new("RGB", (32, 31)).save(changed)
    with pytest.raises(ValueError, match="must be 32 x 32, got 32 x 31"):
        load("cinic10", iid(1))
    for path in changed.parent.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="bird must have images"):
        load("cinic10", iid(1))
    with pytest.raises(ValueError, match="valid must be True or False"):
        load("cinic10", iid(1), valid=1)


def test_tiny_imagenet_gets_its_labels_from_text_files(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "tiny-imagenet-200"
    wnids = [f"n{i:08}" for i in range(200)]
    for i, wnid in enumerate(wnids):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
        shade = image.new("L", (64, 64), i) if i % 2 else image.new("RGB", (64, 64), (i, i, i))  # half are grey
        shade.save(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG")
    (folder / "wnids.txt").write_text("\n".join(wnids[::-1]) + "\n")
    (folder / "val" / "images").mkdir(parents=True)
    notes = [("val_0.JPEG", 150), ("val_1.JPEG", 3)]
    for name, label in notes:
        image.new("RGB", (64, 64), (label, 0, 255)).save(folder / "val" / "images" / name)
    lines = [f"{name}\t{wnids[label]}\t0\t0\t63\t63\n" for name, label in notes]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    data = load("tiny_imagenet", iid(1))
    assert data.x.shape == (200, 64, 64, 3) and data.y_test is not None and data.y_test.tolist() == [150, 3]
    np.testing.assert_allclose(by_label(data).mean((1, 2)), np.repeat(np.arange(200)[:, None], 3, 1), atol=1)
    assert data.x_test is not None and abs(int(data.x_test[0, 5, 5, 0]) - 150) < 4 and data.x_test[1, 5, 5, 2] > 250

    for line, said in (("val_0.JPEG n00000001\n", "line 3 must be an image"), ("a\tn9\n", "line 3 must be an image")):
        (folder / "val" / "val_annotations.txt").write_text("".join([*lines, line]))
        with pytest.raises(ValueError, match=said):
            load("tiny_imagenet", iid(1))
    (folder / "val" / "val_annotations.txt").write_text("".join([*lines, f"val_2.JPEG\t{wnids[0]}\n"]))
    with pytest.raises(FileNotFoundError, match=r"a part of it is missing.*val_2\.JPEG"):
        load("tiny_imagenet", iid(1))
    (folder / "wnids.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"a part of it is missing.*wnids\.txt"):
        load("tiny_imagenet", iid(1))


# ---------------------------------------------------------------- federated data in the formats of other projects

Clients = dict[str, tuple[np.ndarray, np.ndarray]]


def write_leaf(path: Path, clients: Clients) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "users": list(clients),
        "num_samples": [len(y) for _, y in clients.values()],
        "user_data": {name: {"x": x.tolist(), "y": y.tolist()} for name, (x, y) in clients.items()},
    }))  # fmt: skip


def write_fedjax(path: Path, clients: Clients, names: tuple[str, str] = ("pixels", "label")) -> None:
    msgpack = pytest.importorskip("msgpack")

    def packed(array: np.ndarray) -> object:
        parts = (array.shape, array.dtype.name, array.tobytes())
        return msgpack.ExtType(1, msgpack.packb(parts, use_bin_type=True))

    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, "
            "num_examples INTEGER NOT NULL);"
        )
        for name, columns in clients.items():
            data = {key: packed(column) for key, column in zip(names, columns, strict=True)}
            data["text"] = msgpack.ExtType(4, msgpack.packb(([1], [b"text"])))
            client = f"{zlib.crc32(name.encode()):016x}:{name}".encode()
            blob = zlib.compress(msgpack.packb(data, strict_types=True))
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (client, blob, len(columns[1])))
    connection.close()


def write_tff(path: Path, clients: Clients, names: tuple[str, str] = ("pixels", "label")) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, columns in clients.items():
            for key, column in zip(names, columns, strict=True):
                file.create_dataset(f"examples/{name}/{key}", data=column)


def encoded(number: int) -> bytes:
    """An integer of a protocol buffer."""
    number %= 2**64
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + encoded(number >> 7)


def field(number: int, *contents: bytes) -> bytes:
    """A field of a protocol buffer with bytes, a text or a message."""
    content = b"".join(contents)
    return encoded(number << 3 | 2) + encoded(len(content)) + content


def message(**features: object) -> bytes:
    """A message `tf.train.Example`. Its features are lists of floats, integers or texts."""
    entries = []
    for name, values in features.items():
        array = np.ravel(np.asarray(values))
        feature = field(1, *(field(1, str(value).encode()) for value in array))
        if array.dtype.kind == "f":
            feature = field(2, field(1, array.astype("<f4").tobytes()))
        elif array.dtype.kind in "iu":
            feature = field(3, field(1, *map(encoded, array.tolist())))
        entries.append(field(1, field(1, name.encode()), field(2, feature)))
    return field(1, *entries)


def write_tff_database(path: Path, splits: dict[str, Clients], names: tuple[str, str] = ("pixels", "label")) -> None:
    """Writes a database of TensorFlow Federated, with clients out of order. It is packed if the path ends in .lzma."""
    database = path.with_suffix("") if path.suffix == ".lzma" else path
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
                           "serialized_example_proto BLOB NOT NULL)")  # fmt: skip
        connection.execute("CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id)")
        connection.execute("CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, "
                           "num_examples INTEGER NOT NULL)")  # fmt: skip
        for split, clients in splits.items():
            for name, columns in reversed(clients.items()):
                connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (name, split, len(columns[1])))
                for row in zip(*columns, strict=True):
                    proto = message(text=["a", "b"], **dict(zip(names, row, strict=True)))
                    connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, name, proto))
    connection.close()
    if path != database:
        path.write_bytes(lzma.compress(database.read_bytes(), lzma.FORMAT_ALONE))
        database.unlink()


def characters(sizes: dict[str, int]) -> tuple[Clients, Clients]:
    """Returns FEMNIST clients twice: as stored, with 1 = background, and as they must be read, with 255 = ink."""
    ours: Clients = {
        name: (RNG.integers(0, 256, (rows, 28, 28), np.uint8), RNG.integers(0, 62, rows).astype(np.int32))
        for name, rows in sizes.items()
    }
    return {name: ((1 - x / 255).astype(np.float32), y) for name, (x, y) in ours.items()}, ours


def write_femnist(folder: Path, source: str, train: Clients, test: Clients | None) -> None:
    folder.mkdir(exist_ok=True)
    if source == "leaf":
        flat, flat_test = ({n: (x.reshape(-1, 784), y) for n, (x, y) in part.items()} for part in (train, test or {}))
        write_leaf(folder / "leaf_femnist" / "train" / "all_data_0.json", dict(list(flat.items())[:1]))
        write_leaf(folder / "leaf_femnist" / "train" / "all_data_1.json", dict(list(flat.items())[1:]))
        if test:
            write_leaf(folder / "leaf_femnist" / "test" / "all_data_0.json", flat_test)
        return
    if source in ("tff sqlite", "tff lzma"):
        digits = {"digits_only_train": train, "digits_only_test": {}}
        name = "emnist_all.sqlite" + (".lzma" if source == "tff lzma" else "")
        write_tff_database(folder / name, {"all_train": train, "all_test": test or {}} | digits)
        return
    write, stem, kind = {
        "fedjax": (write_fedjax, "federated_emnist", "sqlite"),
        "tff": (write_tff, "fed_emnist", "h5"),
    }[source]
    write(folder / f"{stem}_train.{kind}", train)
    if test:
        write(folder / f"{stem}_test.{kind}", test)


SOURCES = ("leaf", "fedjax", "tff")
WRITTEN = (*SOURCES, "tff sqlite", "tff lzma")


@pytest.mark.parametrize("source", WRITTEN)
def test_femnist_of_other_projects_is_inverted_and_keeps_its_writers(tmp_path: Path, source: str, monkeypatch) -> None:
    train, ours = characters({"f0000_14": 3, "f0001_41": 1, "f0005_26": 4})
    train["f0001_41"] = (train["f0001_41"][0], ours["f0001_41"][1].astype(np.float32))  # labels such as 5.0
    test, our_test = characters({"f0005_26": 2, "f0000_14": 1})
    write_femnist(tmp_path, source, train, test)
    data = load("femnist")
    assert data.x.dtype == np.uint8 and data.sizes.tolist() == [3, 1, 4] and data.mean is None
    assert data.test_sizes is not None and data.test_sizes.tolist() == [1, 0, 2]
    np.testing.assert_array_equal(data.x[..., 0], np.concatenate([x for x, _ in ours.values()]))
    np.testing.assert_array_equal(data.y, np.concatenate([y for _, y in ours.values()]))
    wanted = np.concatenate([our_test[name][0] for name in ("f0000_14", "f0005_26")])
    assert data.x_test is not None
    np.testing.assert_array_equal(data.x_test[..., 0], wanted)
    with monkeypatch.context() as patch:
        patch.setattr(femnist, "_by_writer", None)  # must not be called again
        np.testing.assert_array_equal(load("femnist", source=source.split()[0]).x, data.x)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no unpacked file is left
    assert load("femnist", iid(2)).test_sizes is None
    assert load("femnist", standardize=True).mean == pytest.approx(0.0365, abs=1e-4)
    location = {row["name"]: row for row in datasets.describe()}["femnist"]["location"]
    assert location.endswith(femnist.FILES[source.split()[0]])


@pytest.mark.parametrize("source", WRITTEN)
def test_femnist_without_a_test_set_or_with_other_test_writers(tmp_path: Path, source: str) -> None:
    train, _ = characters({"f0000_14": 10, "f0001_41": 1})
    if source in SOURCES:  # TFF's database has a test set
        write_femnist(tmp_path / "one", source, train, None)
        alone = load("femnist", data_dir=tmp_path / "one")
        assert alone.sizes.tolist() == [8, 1] and alone.test_sizes is not None and alone.test_sizes.tolist() == [2, 0]
    others, _ = characters({"f0000_14": 1, "f0002_00": 2})
    write_femnist(tmp_path / "two", source, train, others)
    pooled = load("femnist", data_dir=tmp_path / "two")
    assert pooled.sizes.tolist() == [10, 1] and pooled.test_sizes is None and len(pooled.x_test) == 3


def test_femnist_reads_the_requested_source(tmp_path: Path) -> None:
    for rows, source in enumerate(SOURCES, 2):
        write_femnist(tmp_path, source, characters({"a": rows, "b": 1})[0], characters({"a": 1})[0])
    np.savez(tmp_path / "femnist_writers.npz", x=np.zeros((9, 28, 28), np.uint8), y=np.arange(9), writer=[7] * 9)
    rows = {source: int(load("femnist", source=source).sizes.sum()) for source in ("auto", "npz", *SOURCES)}
    assert datasets.locate("femnist", source="tff").endswith("fed_emnist_train.h5")
    assert rows == {"auto": 7, "npz": 7, "leaf": 3, "fedjax": 4, "tff": 5}
    with pytest.raises(ValueError, match="did you mean 'fedjax'"):
        load("femnist", source="fedjacks")


def test_tff_databases_are_read_without_their_shapes(tmp_path: Path) -> None:
    """A database has several splits. Integers have one or more bytes, and may be negative."""
    numbers = np.array([[0, 127, 128], [-1, 2**63 - 1, -(2**63)], [300, 5, 2**31]])
    train = {"b": (numbers[:2], np.array([[0, 1], [2, 3]])), "a": (numbers[2:], np.array([[4, 5]]))}
    test = {"a": (numbers[:1], np.array([[6, 7]]))}
    path = tmp_path / "own.sqlite"
    write_tff_database(path, {"all_train": train, "all_test": test, "few_train": test}, ("image", "marks"))
    read = {"x": "image", "y": "marks"}
    data = fd.datasets.from_tff(path, **read, split="all_train")
    assert data.client_names == ("a", "b") and data.x.dtype == data.y.dtype == np.int64
    assert data.x.tolist() == numbers[[2, 0, 1]].tolist() and data.y.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert data.test_sizes.tolist() == [1, 0] and data.x_test.tolist() == numbers[:1].tolist()
    assert fd.datasets.from_tff(path, **read, split="few_train").x_test is None
    other = fd.datasets.from_tff(path, path, **read, split="all_train")
    assert other.test_sizes.tolist() == [1, 0]
    alone = tmp_path / "alone.sqlite.lzma"
    write_tff_database(alone, {"N/A": {"a": (np.array([[0.5, 1e-40, np.inf]]), np.array([3]))}})
    with pytest.raises(ValueError, match="inputs must be finite, got NaN or infinity in example 0"):
        fd.datasets.from_tff(alone)
    write_tff_database(alone, {"N/A": {"a": (np.array([[0.5, 1e-40]]), np.array([3]))}})
    data = fd.datasets.from_tff(alone)
    assert data.x.dtype == np.float32 and data.x.tolist() == [[0.5, np.float32(1e-40)]] and data.y.tolist() == [3]
    for options, said in (
        ({"split": "train"} | read, "split must be one of 'all_test', 'all_train', 'few_train', got 'train'"),
        (read, "split must be one of .*, got 'train'"),
        ({"split": "all_train"}, "it has no column 'pixels', only text, image, marks: pass the names"),
        ({"split": "all_train", "x": "imgae", "y": "marks"}, "no column 'imgae', .*: did you mean 'image'"),
        ({"split": "all_train", "x": "text", "y": "marks"}, "the inputs of client 'a' must be numbers: encode text"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            fd.datasets.from_tff(path, **options)
        assert str(error.value).count(str(path)) == 1


def test_damaged_tff_databases_are_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "emnist_all.sqlite", tmp_path / "emnist_all.sqlite.lzma"
    write_femnist(tmp_path, "tff sqlite", characters({"a": 3, "b": 2})[0], characters({"a": 1})[0])
    whole = path.read_bytes()
    proto = "UPDATE examples SET serialized_example_proto ="
    refused(
        path,
        lambda: load("femnist", source="tff"),
        (
            "UPDATE client_metadata SET num_examples = 4 WHERE split_name = 'all_train'",
            "client 'a' must have 4 rows, got",
        ),
        ("DELETE FROM examples WHERE client_id = 'b'", "the examples of client 'b' are missing"),
        ("DELETE FROM client_metadata WHERE split_name = 'all_test'", "split must be one of .*, got 'all_test'"),
        (f"{proto} substr(serialized_example_proto, 1, 99)", "an example is damaged"),
        (f"{proto} 'text'", "serialized_example_proto bytes"),
        (f"{proto} x'ff'", "damaged"),
        (
            "DROP TABLE client_metadata",
            "no such table: client_metadata.: download it again, or read FedJAX's files with from_fedjax",
        ),
        ("DROP TABLE examples", "no such table: examples.: download it again, or read FedJAX's"),
    )
    path.unlink()
    xz = lzma.compress(whole)
    packed.write_bytes(xz)
    refused(
        packed,
        lambda: load("femnist", source="tff"),
        (xz[:-40], "is damaged, .*Compressed file ended before the end-of-stream"),
        (xz[:100] + b"\0" + xz[101:], "is damaged, .*Corrupt input data"),
        (lzma.compress(whole[:-4096]), "it is damaged or of another kind .database disk image is malformed"),
        (lzma.compress(b"hello"), "it is damaged or of another kind .file is not a database"),
        (b"hello", "is damaged, .*Input format not supported"),
        (b"", "is damaged, truncated"),
    )
    assert not list((tmp_path / "cache").iterdir())
    packed.write_bytes(lzma.compress(whole[:28] + bytes(4) + whole[32:]))  # old databases do not say their size
    assert load("femnist", source="tff").sizes.tolist() == [3, 2]


@pytest.mark.parametrize("source", SOURCES)
def test_numeric_columns_of_any_name_and_shape_are_read(tmp_path: Path, source: str) -> None:
    train = {name: (RNG.normal(size=(n, 3)).astype(np.float32), np.arange(n)) for name, n in (("b", 2), ("a", 3))}
    train["c"] = (np.zeros((0, 3), np.float32), np.arange(0))
    test = {"a": (np.ones((1, 3), np.float32), np.array([5]))}
    if source == "leaf":
        write_leaf(tmp_path / "train" / "0.json", train)
        write_leaf(tmp_path / "test" / "0.json", test)
        data = fd.datasets.from_leaf(tmp_path)
    else:
        write, read, kind = {
            "fedjax": (write_fedjax, fd.datasets.from_fedjax, "sqlite"),
            "tff": (write_tff, fd.datasets.from_tff, "h5"),
        }[source]
        paths = [tmp_path / f"{part}.{kind}" for part in ("train", "test")]
        for path, clients in zip(paths, (train, test), strict=True):
            write(path, clients, ("image", "coarse_label"))
        data = read(*paths, x="image", y="coarse_label")
        assert read(paths[0], x="image", y="coarse_label").x_test is None
        with pytest.raises(ValueError, match=r"no column 'pixels', only .*pass the names of the columns as x="):
            read(paths[0])
    order = ["a", "b"] if source == "tff" else ["b", "a"]  # HDF5 sorts its groups by name
    assert data.sizes.tolist() == [len(train[name][1]) for name in order] and data.x.dtype == np.float32
    np.testing.assert_array_equal(data.x, np.concatenate([train[name][0] for name in order]))
    assert [name.rpartition(":")[2] for name in data.client_names] == order  # FedJAX prefixes a hash and a colon
    assert data.test_sizes is not None and data.test_sizes.tolist() == [int(name == "a") for name in order]
    np.testing.assert_array_equal(data.y_test, [5])


def read_clients(folder: Path, source: str, train: Clients, test: Clients | None = None) -> fd.FederatedData:
    """Writes clients in a format, and reads them."""
    if source == "leaf":
        write_leaf(folder / "train" / "0.json", train)
        if test:
            write_leaf(folder / "test" / "0.json", test)
        return fd.datasets.from_leaf(folder)
    write, read = {"fedjax": (write_fedjax, fd.datasets.from_fedjax), "tff": (write_tff, fd.datasets.from_tff)}[source]
    write(folder / "train", train)
    if test:
        write(folder / "test", test)
    return read(folder / "train", folder / "test" if test else None)


@pytest.mark.parametrize("source", SOURCES)
def test_clients_with_different_dtypes_get_a_common_one(tmp_path: Path, source: str) -> None:
    """Labels such as 5.0, as in the files of FedProx's authors, become integers."""
    whole, fractions = np.array([[1, 2], [3, 4]]), np.array([[0.5, 2.0], [0.25, 4.0]], np.float32)
    data = read_clients(tmp_path, source, {"a": (whole, np.array([5.0, 0.0])), "b": (fractions, np.array([1, 2]))})
    assert data.x.dtype == np.float32 and data.x.tolist() == [*whole.tolist(), *fractions.tolist()]
    assert data.y.dtype == np.int64 and data.y.tolist() == [5, 0, 1, 2]
    model = fd.models.linear((2,), 6)
    fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=2)

    labels = {"a": (fractions, np.array([5.0, 0.0])), "b": (fractions, np.array([1, 2]))}
    (tmp_path / "more").mkdir()
    data = read_clients(tmp_path / "more", source, labels, {"b": (whole, np.array([0.5, 1.0], np.float32))})
    assert data.y.dtype == data.y_test.dtype == data.x_test.dtype == np.float32 and data.y_test.tolist() == [0.5, 1]

    (tmp_path / "large").mkdir()
    large = {"a": (np.array([[2**24 + 1, 2]]), np.array([0])), "b": (fractions, np.array([1, 2]))}
    with pytest.raises(ValueError, match="the inputs of client .*a' must be integers .*, got 16777217") as error:
        read_clients(tmp_path / "large", source, large)
    assert str(tmp_path / "large") in str(error.value) and "damaged" not in str(error.value)
    (tmp_path / "shapes").mkdir()
    shapes = {"a": (whole, np.arange(2)), "b": (whole[:, :1], np.arange(2)), "c": (whole, np.arange(2))}
    with pytest.raises(ValueError, match=r"cannot use .*client \S*b must have .*, got int64\[1\]"):
        read_clients(tmp_path / "shapes", source, shapes)


def test_a_test_set_with_other_clients_is_pooled(tmp_path: Path) -> None:
    rows = (np.ones((2, 3)), np.arange(2))
    write_leaf(tmp_path / "train" / "0.json", {"a": rows, "b": rows})
    assert fd.datasets.from_leaf(tmp_path).x_test is None
    write_leaf(tmp_path / "test" / "0.json", {"a": (rows[0][:0], rows[1][:0])})
    assert fd.datasets.from_leaf(tmp_path).x_test is None  # no test user has examples
    write_leaf(tmp_path / "test" / "0.json", {"a": rows, "z": rows})
    data = fd.datasets.from_leaf(tmp_path)
    assert data.test_sizes is None and data.x_test is not None and data.x_test.shape == (4, 3)
    write_leaf(tmp_path / "train" / "1.json", {"a": rows})
    with pytest.raises(ValueError, match="client 'a' must be in one file"):
        fd.datasets.from_leaf(tmp_path)


def test_damaged_json_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train" / "0.json"
    with pytest.raises(FileNotFoundError, match=r"must have \*\.json"):
        fd.datasets.from_leaf(tmp_path)
    write_leaf(path, {"a": (np.ones((2, 3)), np.arange(2))})
    whole = path.read_text()
    changes = (
        (whole[:-20], "damaged, truncated"),
        ("[]", "must have LEAF's users, num_samples and user_data"),
        (whole.replace('"a": {', '"b": {'), "damaged"),
        (whole.replace('"x"', '"z"'), "damaged"),
        (whole.replace('"num_samples": [2]', '"num_samples": [3]'), r"must have 3 rows, got \[2, 3\]"),
        (whole.replace("[1.0, 1.0, 1.0]]", "[1.0]]"), "must have the same shape"),
        (whole.replace("1.0", '"word"'), "must be numbers: encode text"),
        (
            whole.replace("1.0", "1e300"),
            "x of client 'a' must be numbers up to 3.4e.38 for float32, got 1e.300 in row 0",
        ),
        (whole.replace("[0, 1]", f"[{2**63}, 1]"), "y of client 'a': integers must be smaller than 2..63, got"),
    )
    refused(path, lambda: fd.datasets.from_leaf(tmp_path), *((text.encode(), said) for text, said in changes))


def test_damaged_sqlite_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with pytest.raises(FileNotFoundError, match="a.sqlite"):
        fd.datasets.from_fedjax(path)
    write_fedjax(path, {"a": (np.ones((2, 3)), np.arange(2))})
    with pytest.raises(ValueError, match="must be numbers: encode text"):
        fd.datasets.from_fedjax(path, x="text")
    refused(
        path,
        lambda: fd.datasets.from_fedjax(path),
        (path.read_bytes()[: path.stat().st_size // 2], "damaged"),
        (
            b"hello" * 1000,
            "of another kind .file is not a database.: download it again, or read TensorFlow Federated's",
        ),
        ("UPDATE federated_data SET num_examples = 3", r"must have 3 rows, got \[2, 3\]"),
        ("UPDATE federated_data SET data = substr(data, 1, 20)", "damaged"),
        ("UPDATE federated_data SET data = x'00'", "damaged"),
        ("DROP TABLE federated_data", "no such table"),
    )


def test_damaged_hdf5_files_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with pytest.raises(FileNotFoundError, match="a.h5"):
        fd.datasets.from_tff(path)
    write_tff(path, {"a": (np.ones((2, 3)), np.arange(3))})
    with pytest.raises(ValueError, match=r"inputs of client 'a' must have 3 rows, got \[2, 3\]"):
        fd.datasets.from_tff(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="a.h5"):
        fd.datasets.from_tff(path)
    h5py.File(path, "w").close()
    with pytest.raises(ValueError, match="must have a group examples, got nothing"):
        fd.datasets.from_tff(path)


def test_arrays_that_are_not_femnist_images_are_refused(tmp_path: Path) -> None:
    for x in (np.full((1, 28, 28), 7.0), np.zeros((1, 5)), np.full((1, 28, 28), np.nan)):
        write_leaf(tmp_path / "leaf_femnist" / "train" / "0.json", {"a": (x, np.arange(1))})
        with pytest.raises(ValueError, match=r"client 'a' must have images of 28 x 28 numbers in 0\.\.1"):
            load("femnist")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for package, name in (("msgpack", "federated_emnist_train.sqlite"), ("h5py", "fed_emnist_train.h5")):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ImportError, match=f"needs {package}: pip install msgpack h5py"):
            load("femnist")
        assert cli.main(["data", "femnist", "--output", str(tmp_path / "out")]) == 2
        assert f"needs {package}" in capsys.readouterr().err
        (tmp_path / name).unlink()


# ---------------------------------------------------------------- the command line


def test_the_command_line_supports_every_data_set(tmp_path: Path) -> None:
    assert set(DEFAULT_MODEL) == set(datasets.NAMES)
    assert datasets.num_classes("emnist", split="digits") == 10 == datasets.num_classes("emnist", num_classes=10)
    assert datasets.locate("emnist") == "no"
    write_emnist(tmp_path)
    assert datasets.locate("emnist").endswith("letters-train-images-idx3-ubyte.gz")
    assert datasets.locate("emnist", split="balanced") == "no"
    run = fd.parse_run("--dataset emnist:num_classes=10 --algorithm fedavg --clients 4 --cohort 2")
    model = run.config["model"]
    assert model["name"] == "emnist_nn" and model["parameters"] == 89_610  # the network of FedDC for EMNIST-L
