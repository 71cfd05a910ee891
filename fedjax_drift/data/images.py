"""The image data sets except femnist. They are read from npz files, the authors' files or tensorflow-datasets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, image_files, tfds
from fedjax_drift.data.federated import Pair
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import Request, Samples, of_classes, pair
from fedjax_drift.spec import Count, Flag

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IDX_PARTS = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
EMNIST = {"letters": 26, "byclass": 62, "balanced": 47, "digits": 10}  # split -> number of classes
CIFAR10, BATCHES = "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6))
TINY_IMAGENET = ("wnids.txt", "train", "val/images", "val/val_annotations.txt")
SPLITS = "_train", "_test"
MNIST_ORDER = 3121080559  # crc32 of the 60,000 training labels in their official order, as bytes

Readers = Mapping[str, Callable[[Path], files.Arrays]]
"""File or folder name -> the function that reads x_train, y_train, x_test and y_test from it."""


def mnist(request: Request) -> Samples:
    """Handwritten digits: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1], 255 = ink; mean 0.1307, std 0.3081.

    `mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. `by_writer()` also needs `mnist_writers.npz` in
    the same folder, with `writer_train` [M]. It gives 539 writers with 19 to 131 examples each. The test images were
    written by other writers, so the test set is pooled. (LeCun, Cortes and Burges, "The MNIST database of handwritten
    digits"; the writers are those of QMNIST: Yadav and Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.)
    """
    train, test = _pairs(request)
    return Samples(train, test, _mnist_writers(request, train[1]) if request.by_writer else None)


def _mnist_writers(request: Request, y: np.ndarray) -> np.ndarray:
    """Returns the writer of each training example, [M]."""
    path = request.dataset.find(request.data_dir)
    if path is None:
        raise FileNotFoundError(
            "by_writer() needs mnist.npz in its official order and mnist_writers.npz in the same folder, because "
            "tensorflow-datasets shuffles the examples: pass this folder as data_dir, or use another partition"
        )
    writers = path.with_name("mnist_writers.npz")
    try:
        writer = files.read_npz(writers, {"writer_train": Column()})["writer_train"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"by_writer() reads the writers of mnist from {writers}, which does not exist: write it from the extended "
            "labels of QMNIST (numpy.savez with writer_train, one id per training example), or use another partition"
        ) from error
    files.check(
        {"y_train": y, "writer_train": writer},
        {"y_train": Column(), "writer_train": Column()},
        f"{path} and {writers.name}",
    )
    if len(y) == 60_000 and zlib.crc32(y.astype(np.uint8).tobytes()) != MNIST_ORDER:
        what = f"{path}: by_writer() needs the examples in MNIST's official order"
        checks.refuse(what, "another order", "write the file from the original idx files")
    return writer


def fashion_mnist(request: Request) -> Samples:
    """Zalando's articles: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1]; mean 0.2860, std 0.3530.

    `fashion_mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. (Xiao, Rasul and Vollgraf,
    arXiv 1708.07747.)
    """
    return Samples(*_pairs(request))


def emnist(
    request: Request,
    *,
    split: Literal["letters", "byclass", "balanced", "digits"] = "letters",
    num_classes: Count | None = None,
) -> Samples:
    """Handwritten characters: uint8 [28, 28, 1], 255 = ink, upright; mean and std of the loaded training pixels.

    split: "letters" (26 classes, upper and lower case in one class, 124,800 + 20,800 examples), "byclass" (62 classes,
        697,932 + 116,323), "balanced" (47 classes, 112,800 + 18,800) or "digits" (10 classes, 240,000 + 40,000).
    num_classes: use only the first num_classes classes. Default: all. The letters split with 10 classes is EMNIST-L of
        FedDyn and FedDC, 48,000 + 8,000.

    Read from `emnist_SPLIT.npz` (x_train uint8 [M, 28, 28], upright; y_train [M], from 0; x_test, y_test) or from
    NIST's idx files. Images of the idx files are transposed, and the labels of letters are reduced by 1 to start at 0.
    The letters split is not read from tensorflow-datasets, which only has its first 88,800 training and 14,800 test
    examples. (Cohen et al., arXiv 1702.05373.)
    """

    def normalised(published: files.Arrays) -> files.Arrays:
        """Transposes the published images, and subtracts 1 from the labels of letters, which start at 1."""
        upright = {key: np.ascontiguousarray(published[key].swapaxes(1, 2)) for key in ("x_train", "x_test")}
        first = 1 if split == "letters" else 0
        return upright | {key: published[key].astype(np.int32) - first for key in ("y_train", "y_test")}

    idx = request.dataset.files[1]
    train, test = _pairs(request, {idx: lambda path: normalised(image_files.read_idx_pairs(path))}, normalised)
    if num_classes is not None:
        train = of_classes(train, train[1] < num_classes, "training", num_classes)
        test = of_classes(test, test[1] < num_classes, "test", num_classes)
    mean, std = _mean_and_std(train[0])
    return Samples(train, test, normalisation=((mean,), (std,)))


def emnist_split(split: str) -> dict[str, Any]:
    """Returns the fields of the record of emnist that depend on the split."""
    first, *others = (idx_file(split, part) for part in IDX_PARTS)
    files = (f"emnist_{split}.npz", first)
    fields = {"name": f"emnist/{split}", "classes": EMNIST[split], "files": files, "parts": {first: tuple(others)}}
    return fields | {"tfds": split != "letters"}  # there, the letters are incomplete


def idx_file(split: str, part: str) -> str:
    """The name of one of the files of EMNIST."""
    return f"emnist-{split}-{part}-ubyte.gz"


def _mean_and_std(x: np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of all pixels, scaled to [0, 1]. It counts the 256 values, to save memory."""
    counts = sum(np.bincount(x[i : i + 4096].ravel(), minlength=256) for i in range(0, len(x), 4096))
    weight, value = counts / np.sum(counts), np.arange(256) / 255
    mean = float(weight @ value)
    return mean, float(np.sqrt(weight @ (value - mean) ** 2))


def cifar10(request: Request) -> Samples:
    """Small photographs: 10 classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in the code of FedDC's authors.

    Read from `cifar10.npz` (x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test), from the authors' folder
    `cifar-10-batches-py`, or from `cifar10_png.npz`, `cifar10_webp.npz` or `cifar10_jpeg.npz`, which have the images as
    files of this format (see `fedjax_drift.data.image_files.decode_npz`). They are decoded on the first use and kept in
    the cache. JPEG is lossy: accuracies are close to published ones, but not comparable to the last percent.
    (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)
    """

    def decoded(path: Path) -> files.Arrays:
        # The name is not cifar10.npz, so that lossy pixels are never used in place of the original ones.
        filename = f"{path.stem}_{files.fingerprint(path)}.npz"
        kind = path.stem.rpartition("_")[2]
        return files.cached(filename, request.dataset.spec(*SPLITS), lambda: image_files.decode_npz(path, kind, 10, 32))

    readers = {
        CIFAR10: lambda path: image_files.read_cifar(path, BATCHES, "test_batch", "labels"),
        **{f"cifar10_{kind}.npz": decoded for kind in ("png", "webp", "jpeg")},
    }
    return Samples(*_pairs(request, readers))


def cifar100(request: Request) -> Samples:
    """Small photographs: 100 (fine) classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in FedDC's code.

    Read from `cifar100.npz` (x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test) or from the authors' folder
    `cifar-100-python`. (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)
    """
    read = {"cifar-100-python": lambda path: image_files.read_cifar(path, ["train"], "test", "fine_labels")}
    return Samples(*_pairs(request, read))


def cinic10(request: Request, *, valid: Flag = False) -> Samples:
    """The classes of CIFAR-10, from CIFAR-10 and ImageNet: 90,000 + 90,000 uint8 [32, 32, 3]; the authors' mean, std.

    valid: if True, the 90,000 validation examples are training examples, too.

    Read from the folder `CINIC-10/{train,valid,test}/<class>/*.png`. The images are decoded on the first use (half a
    minute) and kept in the cache. (Darlow et al., arXiv 1810.03505.)
    """
    root = request.path()

    def part(name: str) -> Pair:
        listing = image_files.list_folders(root / name, CIFAR10_CLASSES, "*.png")
        return _decoded(f"cinic10_{name}", listing, 32)

    train = part("train")
    if valid:
        x, y = (np.concatenate(columns) for columns in zip(train, part("valid"), strict=True))
        train = (x, y)
    return Samples(train, part("test"))


def tiny_imagenet(request: Request) -> Samples:
    """Photographs: 200 classes of ImageNet, 100,000 + 10,000 uint8 [64, 64, 3]; the usual mean and std.

    Read from the folder `tiny-imagenet-200`: the classes are the sorted ids in wnids.txt, the training images are
    train/<wnid>/images/*.JPEG, and the test set is val/images with the labels in val/val_annotations.txt, because the
    test images have no labels. The images are decoded on the first use (half a minute) and kept in the cache. (Le and
    Yang, "Tiny ImageNet Visual Recognition Challenge", 2015.)
    """
    train, valid = image_files.list_tiny_imagenet(request.path())
    return Samples(_decoded("tiny_imagenet_train", train, 64), _decoded("tiny_imagenet_val", valid, 64))


def _decoded(name: str, listing: image_files.Listing, side: int) -> Pair:
    """Returns the listed images and their labels. The pixels are kept in the cache until a file changes."""
    paths, labels = listing
    spec = {"x": Column("uint8", (side, side, 3))}
    filename = f"{name}_{files.stamp(paths)}.npz"
    return pair(files.cached(filename, spec, lambda: {"x": image_files.decode_files(paths, side)})["x"], labels)


def _pairs(
    request: Request,
    readers: Readers | None = None,
    convert: Callable[[files.Arrays], files.Arrays] = lambda arrays: arrays,
) -> tuple[Pair, Pair]:
    """Returns training and test examples from NAME.npz, from a file of `readers`, or from tensorflow-datasets.

    convert: a function of the arrays of tensorflow-datasets.
    """
    dataset = request.dataset
    path = dataset.find(request.data_dir)
    if path is None:
        a = _from_tfds(request, convert)
    elif path.name == f"{dataset.filename}.npz":
        a = files.read_npz(path, dataset.spec(*SPLITS))
    else:
        a = files.check((readers or {})[path.name](path), dataset.spec(*SPLITS), path)
    return pair(a["x_train"], a["y_train"]), pair(a["x_test"], a["y_test"])


def _from_tfds(request: Request, convert: Callable[[files.Arrays], files.Arrays]) -> files.Arrays:
    """Returns the converted arrays of tensorflow-datasets, which are kept in the cache.

    Raises FileNotFoundError with instructions if there are no data.
    """
    dataset = request.dataset
    if not dataset.tfds or request.data_dir is not None:
        raise request.absent()
    try:
        name, spec = f"{dataset.filename}_tfds.npz", dataset.spec(*SPLITS)
        return files.cached(name, spec, lambda: convert(tfds.read(dataset.name)))
    except FileNotFoundError as error:
        raise request.absent(f". tensorflow-datasets has no data on this machine, either: {error}") from None
