"""The image data sets except femnist. They are read from npz files, the authors' files or tensorflow-datasets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedjax_drift.data import files, image_files, tfds
from fedjax_drift.data.federated import Pair
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import (
    EMNIST,
    FILES,
    GET,
    DataDir,
    Samples,
    absent,
    filenames,
    flat,
    folder,
    incomplete,
    of_classes,
    pair,
    prepare,
    tfds_name,
)
from fedjax_drift.errors import ConfigurationError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MNIST_ORDER = 3121080559  # crc32 of the 60,000 training labels in their official order, as bytes

Readers = Mapping[str, Callable[[Path], files.Arrays]]
"""File or folder name -> the function that reads x_train, y_train, x_test and y_test from it."""


def mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Handwritten digits: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1], 255 = ink; mean 0.1307, std 0.3081.

    `mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. `by_writer()` also needs `mnist_writers.npz` in
    the same folder, with `writer_train` [M]. It gives 539 writers with 19 to 131 examples each. The test images were
    written by other writers, so the test set is pooled. (LeCun, Cortes and Burges, "The MNIST database of handwritten
    digits"; the writers are those of QMNIST: Yadav and Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.)
    """
    samples = _samples("mnist", 10, (28, 28, 1), data_dir, (0.1307,), (0.3081,))
    if not natural:
        return samples
    y = samples.train[1]
    image_file = files.find(FILES["mnist"], files.folders(data_dir))
    if image_file is None:
        raise FileNotFoundError(
            "by_writer() needs mnist.npz in its official order and mnist_writers.npz in the same folder, because "
            "tensorflow-datasets shuffles the examples: pass this folder as data_dir, or use another partition"
        )
    writers = image_file.with_name("mnist_writers.npz")
    try:
        writer = files.read_npz(writers, {"writer_train": Column()})["writer_train"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"by_writer() reads the writers of mnist from {writers}, which does not exist: write it from the extended "
            "labels of QMNIST (numpy.savez with writer_train, one id per training example), or use another partition"
        ) from error
    if len(writer) != len(y):
        raise ConfigurationError(
            f"{writers}: writer_train must have as many rows as {image_file}, {len(y)}, got {len(writer)}: "
            "row i of both must belong to the same example"
        )
    if len(y) == 60_000 and zlib.crc32(y.astype(np.uint8).tobytes()) != MNIST_ORDER:
        raise ConfigurationError(
            f"{image_file}: by_writer() needs the examples in MNIST's official order, got another order: "
            "write the file from the original idx files"
        )
    return samples._replace(writer=writer)


def fashion_mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Zalando's articles: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1]; mean 0.2860, std 0.3530.

    `fashion_mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. (Xiao, Rasul and Vollgraf,
    arXiv 1708.07747.)
    """
    return _samples("fashion_mnist", 10, (28, 28, 1), data_dir, (0.2860,), (0.3530,))


def emnist(
    data_dir: DataDir, seed: int, natural: bool, *, split: str = "letters", num_classes: int | None = None
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
    classes_used = num_classes or EMNIST[split]

    def normalised(published: files.Arrays) -> files.Arrays:
        """Transposes the published images, and subtracts 1 from the labels of letters, which start at 1."""
        upright = {key: np.ascontiguousarray(published[key].swapaxes(1, 2)) for key in ("x_train", "x_test")}
        first = 1 if split == "letters" else 0
        return upright | {key: published[key].astype(np.int32) - first for key in ("y_train", "y_test")}

    _, idx = filenames("emnist", split=split)
    readers = {idx: lambda path: normalised(image_files.read_idx_pairs(path))}
    name = tfds_name("emnist", split=split)
    train, test = _pairs(name, EMNIST[split], (28, 28, 1), data_dir, readers, normalised)
    train = of_classes(train, train[1] < classes_used, "training", classes_used)
    test = of_classes(test, test[1] < classes_used, "test", classes_used)
    mean, std = _mean_and_std(train[0])
    return Samples(train, test, mean=(mean,), std=(std,))


def _mean_and_std(x: np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of all pixels, scaled to [0, 1]. It counts the 256 values, to save memory."""
    counts = sum(np.bincount(x[i : i + 4096].ravel(), minlength=256) for i in range(0, len(x), 4096))
    weight, value = counts / np.sum(counts), np.arange(256) / 255
    mean = float(weight @ value)
    return mean, float(np.sqrt(weight @ (value - mean) ** 2))


def cifar10(data_dir: DataDir, seed: int, natural: bool) -> Samples:
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
        spec = _spec(10, (32, 32, 3))
        return files.cached(filename, spec, lambda: image_files.decode_npz(path, path.stem.rpartition("_")[2], 10, 32))

    batches = [f"data_batch_{i}" for i in range(1, 6)]
    readers = {
        "cifar-10-batches-py": lambda path: image_files.read_cifar(path, batches, "test_batch", "labels"),
        **{f"cifar10_{kind}.npz": decoded for kind in ("png", "webp", "jpeg")},
    }
    return _samples("cifar10", 10, (32, 32, 3), data_dir, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262), readers)


def cifar100(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Small photographs: 100 (fine) classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in FedDC's code.

    Read from `cifar100.npz` (x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test) or from the authors' folder
    `cifar-100-python`. (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.)
    """
    readers = {"cifar-100-python": lambda path: image_files.read_cifar(path, ["train"], "test", "fine_labels")}
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    return _samples("cifar100", 100, (32, 32, 3), data_dir, mean, std, readers)


def cinic10(data_dir: DataDir, seed: int, natural: bool, *, valid: bool = False) -> Samples:
    """The classes of CIFAR-10, from CIFAR-10 and ImageNet: 90,000 + 90,000 uint8 [32, 32, 3]; the authors' mean, std.

    valid: if True, the 90,000 validation examples are training examples, too.

    Read from the folder `CINIC-10/{train,valid,test}/<class>/*.png`. The images are decoded on the first use (half a
    minute) and kept in the cache. (Darlow et al., arXiv 1810.03505.)
    """
    root = folder("cinic10", data_dir)

    def part(name: str) -> Pair:
        listing = image_files.list_folders(root / name, CIFAR10_CLASSES, "*.png")
        return _decoded(f"cinic10_{name}", listing, 32)

    train = part("train")
    if valid:
        x, y = (np.concatenate(columns) for columns in zip(train, part("valid"), strict=True))
        train = (x, y)
    mean, std = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    return Samples(train, part("test"), mean=mean, std=std)


def tiny_imagenet(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Photographs: 200 classes of ImageNet, 100,000 + 10,000 uint8 [64, 64, 3]; the usual mean and std.

    Read from the folder `tiny-imagenet-200`: the classes are the sorted ids in wnids.txt, the training images are
    train/<wnid>/images/*.JPEG, and the test set is val/images with the labels in val/val_annotations.txt, because the
    test images have no labels. The images are decoded on the first use (half a minute) and kept in the cache. (Le and
    Yang, "Tiny ImageNet Visual Recognition Challenge", 2015.)
    """
    root = folder("tiny_imagenet", data_dir)
    try:
        train, valid = image_files.list_tiny_imagenet(root)
        pairs = _decoded("tiny_imagenet_train", train, 64), _decoded("tiny_imagenet_val", valid, 64)
    except FileNotFoundError as error:
        raise incomplete("tiny_imagenet", root, error) from error
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return Samples(*pairs, mean=mean, std=std)


def _decoded(name: str, listing: image_files.Listing, side: int) -> Pair:
    """Returns the listed images and their labels. The pixels are kept in the cache until a file changes."""
    paths, labels = listing
    spec = {"x": Column("uint8", (side, side, 3))}
    filename = f"{name}_{files.stamp(paths)}.npz"
    return pair(files.cached(filename, spec, lambda: {"x": image_files.decode_files(paths, side)})["x"], labels)


def _samples(
    name: str,
    classes: int,
    shape: tuple[int, ...],
    data_dir: DataDir,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    readers: Readers | None = None,
) -> Samples:
    train, test = _pairs(name, classes, shape, data_dir, readers or {})
    return Samples(train, test, mean=mean, std=std)


def _pairs(
    name: str,
    classes: int,
    shape: tuple[int, ...],
    data_dir: DataDir,
    readers: Readers,
    convert: Callable[[files.Arrays], files.Arrays] = lambda arrays: arrays,
) -> tuple[Pair, Pair]:
    """Returns training and test examples from NAME.npz, from a file of `readers`, or from tensorflow-datasets."""
    spec = _spec(classes, shape)
    npz = f"{flat(name)}.npz"
    path = files.find((npz, *readers), files.folders(data_dir))
    if path is None:
        a = _from_tfds(name, (npz, *readers), data_dir, spec, convert)
    elif path.name == npz:
        a = files.read_npz(path, spec)
    else:
        try:
            a = files.check(readers[path.name](path), spec, path)
        except FileNotFoundError as error:
            raise incomplete(name, path, error) from error
    return pair(a["x_train"], a["y_train"]), pair(a["x_test"], a["y_test"])


def _spec(classes: int, shape: tuple[int, ...]) -> files.Spec:
    spec: dict[str, Column] = {}
    for split in ("train", "test"):
        spec[f"x_{split}"] = Column("uint8", shape, split)
        spec[f"y_{split}"] = Column(table=split, classes=classes)
    return spec


def _from_tfds(
    name: str,
    wanted: tuple[str, ...],
    data_dir: DataDir,
    spec: files.Spec,
    convert: Callable[[files.Arrays], files.Arrays],
) -> files.Arrays:
    """Returns the converted arrays of tensorflow-datasets, which are kept in the cache.

    Raises FileNotFoundError with instructions if there are no data.
    """
    shape = ", ".join(str(length) for length in spec["x_train"].row if length > 1)
    by_hand = f'write it with numpy.savez("{wanted[0]}", x_train=..., y_train=..., x_test=..., y_test=...), uint8 '
    by_hand += f"[M, {shape}]"
    if (download := GET.get(name.partition("/")[0])) is not None:
        by_hand = f"{download}, or {by_hand}"
    if name not in tfds.HOSTS:
        raise absent(name, wanted, data_dir, by_hand)
    if data_dir is not None:
        raise absent(name, wanted, data_dir, f"{by_hand}, or leave data_dir out to use tensorflow-datasets")
    try:
        return files.cached(f"{flat(name)}_tfds.npz", spec, lambda: convert(tfds.read(name)))
    except FileNotFoundError as error:
        online = f"on a machine with a network, {prepare(name)}"
        fix = f"{by_hand}, or, {online} (tensorflow-datasets has no data on this machine: {error})"
        raise absent(name, wanted, data_dir, fix) from None  # the message has the reason
