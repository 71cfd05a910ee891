"""Image files in the published formats: idx files, Python pickles, and files that Pillow decodes."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, pickles
from fedjax_drift.data.files import Arrays, Column
from fedjax_drift.errors import ConfigurationError

FORMATS = ("PNG", "WEBP", "JPEG")  # Pillow decodes no other: fewer decoders for damaged files to reach
Listing = tuple[list[str], np.ndarray]
"""The paths of M image files, and their labels [M]."""


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads a gzip-compressed idx file (the format of MNIST and EMNIST) as a read-only uint8 array with ``axes`` axes.

    Raises FileNotFoundError if there is no file, and ValueError if it is damaged, truncated or of another kind.
    """
    with files.opened(path) as packed, gzip.open(packed) as file:
        content = file.read()
        if content[:4] != bytes([0, 0, 8, axes]):  # two zeros, then the type: 8 is unsigned bytes
            raise ConfigurationError(f"it is not an idx file of bytes with {axes} axes: copy the original file again")
        shape = np.frombuffer(content, ">u4", axes, 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def read_idx_pairs(train_images: Path) -> Arrays:
    """Reads x_train, y_train, x_test and y_test from four idx files with names like those of MNIST and EMNIST."""

    def part(split: str, kind: str) -> np.ndarray:
        name = train_images.name.replace("train-images-idx3", f"{split}-{kind}")
        return read_idx(train_images.with_name(name), axes=int(kind[-1]))

    return {
        f"{key}_{split}": part(split, kind)
        for split in ("train", "test")
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1"))
    }


def read_cifar(folder: Path, train: Sequence[str], test: str, labels: str) -> Arrays:
    """Reads x_train uint8 [M, 32, 32, 3], y_train [M], x_test and y_test from CIFAR's "Python version".

    folder: the unpacked archive. train, test: names of its files. labels: the key of the labels in the files. Raises
    FileNotFoundError if a file is missing, and ValueError if one is damaged or contains anything but plain arrays.
    """
    batches = [_read_cifar_batch(folder / name, labels) for name in train]
    x_test, y_test = _read_cifar_batch(folder / test, labels)
    x_train, y_train = (np.concatenate(column) for column in zip(*batches, strict=True))
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _read_cifar_batch(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    with files.opened(path) as file:
        content = pickles.read(file, "bytes")  # strings of Python 2 are bytes
        if not isinstance(content, dict) or not {b"data", labels.encode()} <= content.keys():
            why = f"it must have data and {labels}: unpack the Python version of the archive again"
            raise ConfigurationError(why)
        x, y = content[b"data"], content[labels.encode()]
    spec = {"data": Column("uint8", (3 * 32 * 32,)), labels: Column()}
    x, y = files.check({"data": x, labels: np.array(y)}, spec, path).values()
    return np.ascontiguousarray(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), y


def decode_npz(path: Path, key: str, classes: int, side: int) -> Arrays:
    """Decodes x_train uint8 [M, side, side, 3], y_train [M], x_test and y_test from an npz of encoded images.

    The npz has an array with the name ``key``, uint8 [bytes], which is the concatenation of PNG, WebP or JPEG files;
    `offsets` [M + M_test + 1]; `labels` [M + M_test]; and `n_train` = M. Image i is
    bytes[offsets[i] : offsets[i + 1]]. The training images are first. Raises ValueError for a damaged file, and
    ImportError without Pillow.
    """
    spec = {
        key: Column("uint8", table="bytes"),
        "offsets": Column(table="bounds"),
        "labels": Column(classes=classes),
        "n_train": Column(table=None),
    }
    encoded, offsets, labels, n_train = files.read_npz(path, spec).values()
    m, n = len(labels), int(n_train)
    steps = np.diff(offsets.astype(np.int64))  # signed, so that a difference can be negative
    if len(offsets) != m + 1 or offsets[0] != 0 or offsets[-1] != len(encoded) or (steps <= 0).any():
        why = f"offsets must increase from 0 to {len(encoded)} in {m} steps: copy or write the file again"
        raise ConfigurationError(f"{path}: {why}")
    if not 0 < n < m:
        checks.refuse(f"{path}: n_train must be in 1..{m - 1}", n, "leave examples for the test set")
    x = np.empty((m, side, side, 3), np.uint8)
    for i in range(m):
        x[i] = _decode(encoded[offsets[i] : offsets[i + 1]].tobytes(), side, f"{path}: image {i}")
    return {"x_train": x[:n], "y_train": labels[:n], "x_test": x[n:], "y_test": labels[n:]}


def decode_files(paths: Sequence[str], side: int) -> np.ndarray:
    """Decodes image files of side x side pixels to uint8 [M, side, side, 3]. Grey images become RGB.

    Raises FileNotFoundError for a missing file, ValueError for a damaged image or an image of another size, and
    ImportError without Pillow.
    """
    x = np.empty((len(paths), side, side, 3), np.uint8)
    for i, path in enumerate(paths):
        with files.opened(path) as file:
            content = file.read()
        x[i] = _decode(content, side, path)
    return x


def is_deep(image: Any) -> bool:
    """Whether an image of Pillow has 16 or 32 bits per pixel. Pillow clips them to 255 when it changes the mode."""
    return image.mode.startswith(("I", "F"))


def _decode(content: bytes, side: int, name: str) -> np.ndarray:
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            size, mode, deep = image.size, image.mode, is_deep(image)
            if size == (side, side) and not deep:
                image.verify()  # checks PNG's checksums, which decoding ignores; afterwards the image is unusable
                return np.asarray(Image.open(io.BytesIO(content), formats=FORMATS).convert("RGB"))
    except Exception as error:  # Pillow raises SyntaxError, struct.error and others for a broken image
        why = files.one_line(error)
        raise ConfigurationError(f"{name} is not a readable image ({why}): copy or write the file again") from error
    if deep:
        checks.refuse(f"{name} must have 8 bits per channel", f"mode {mode!r}", "save it with 8 bits")
    checks.refuse(f"{name} must be {side} x {side}", f"{size[0]} x {size[1]}", "resize it")


def list_folders(folder: Path, classes: Sequence[str], pattern: str) -> Listing:
    """Lists the images folder/<class>/<pattern>, sorted by class and then by name.

    Raises ValueError for a class without images.
    """
    of_class = [sorted(glob.glob(os.path.join(glob.escape(str(folder / name)), pattern))) for name in classes]
    for name, paths in zip(classes, of_class, strict=True):
        if not paths:
            checks.refuse(f"{folder / name} must have images {pattern}", "none", "unpack the archive again")
    return [path for paths in of_class for path in paths], np.repeat(np.arange(len(classes)), list(map(len, of_class)))


def list_tiny_imagenet(folder: Path) -> tuple[Listing, Listing]:
    """Lists the training and the validation images of the unpacked archive.

    A label is the index of a WordNet id in the sorted wnids.txt. Raises FileNotFoundError if the text files are
    missing, and ValueError if they do not match the images.
    """
    with files.opened_text(folder / "wnids.txt") as file:
        classes = sorted(file.read().split())
        label = {wnid: i for i, wnid in enumerate(classes)}
        if not label or len(label) < len(classes) or not all(re.fullmatch(r"\w+", wnid) for wnid in classes):
            checks.refuse("its lines must be different ids of letters and digits", "others", "unpack it again")

    def annotation(line: str) -> tuple[str, int] | None:
        name, wnid = (*line.split("\t"), "")[:2]
        return (name, label[wnid]) if wnid in label and re.fullmatch(r"\w+\.JPEG", name) else None

    wanted = "an image, a tab and an id of wnids.txt"
    names, labels = zip(*files.parsed_lines(folder / "val" / "val_annotations.txt", annotation, wanted), strict=True)
    train = list_folders(folder / "train", classes, os.path.join("images", "*.JPEG"))
    return train, ([str(folder / "val" / "images" / name) for name in names], np.array(labels, np.int32))
