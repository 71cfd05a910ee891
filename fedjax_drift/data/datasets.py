"""The data sets by name: `load("mnist", partition=...)` gives a `FederatedData`.

`synthetic` and `glyphs` are made on the spot. `mnist`, `fashion_mnist`, `cifar10` and `femnist` are read from npz files
in `data_dir` (or $FEDJAX_DRIFT_DATA, or the cache); the first three otherwise from tensorflow-datasets. `movielens`,
`agnews` and `bindingdb` are read there too, from the files that their makers publish.

A data set is one function in `DATASETS`: (data_dir, seed, natural, *, its options) -> `Samples`.
"""

from __future__ import annotations

import inspect
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import bindingdb, files, movielens, text
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.files import Column
from fedjax_drift.data.partition import by_writer, dirichlet, iid, shards

GLYPHS_VERSION = 1  # of the cached files: raise it when make_glyphs draws other images
CLASSES = {"synthetic": 5, "glyphs": 62, "mnist": 10, "fashion_mnist": 10, "cifar10": 10, "femnist": 62}
CLASSES |= {"movielens": 2, "agnews": 4, "bindingdb": 2}
FILES = {
    "mnist": ("mnist.npz",),
    "fashion_mnist": ("fashion_mnist.npz",),
    "cifar10": ("cifar10.npz", "cifar10_jpeg.npz"),
    "femnist": ("femnist_writers.npz",),
    "movielens": tuple(movielens.FILENAMES.values()),
    "agnews": (text.FILENAME,),
    "bindingdb": (bindingdb.FILENAME,),
}
HOW = {"movielens": movielens.HOW, "agnews": text.HOW, "bindingdb": bindingdb.HOW}
VARIANTS = {"feddyn": (30, 5, 20), "fedprox": (60, 10, 30)}  # dimension, classes, usual number of clients
MNIST_ORDER = 3121080559  # crc32 of the 60,000 training labels in their official order, as bytes

DataDir = str | os.PathLike[str] | None
Partition = Callable[..., list[np.ndarray]]


class Samples(NamedTuple):
    """A data set before it is dealt to clients."""

    train: Pair
    test: Pair
    writer: np.ndarray | None = None
    """[M] who wrote each training row; where present, the natural partition is the default one."""
    test_writer: np.ndarray | None = None
    """[M_test] the same writers' test rows, non-decreasing as `writer` then is too."""
    mean: tuple[float, ...] | None = None
    """Per channel, of the inputs scaled to [0, 1]."""
    std: tuple[float, ...] | None = None


def load(
    name: str,
    partition: Partition | None = None,
    data_dir: DataDir = None,
    *,
    standardize: bool = True,
    seed: int = 0,
    **options: Any,
) -> FederatedData:
    """A data set, dealt to clients.

    name: one of `NAMES`; classes, rows, options and source of each are in the docstring of `DATASETS[name]`.
    partition: a recipe of `fedjax_drift.partition`, or any function of labels [M] and `writer=` (ids [M] or None) that
        returns N arrays of row numbers. Default: one client per writer for `glyphs` and `femnist`, per user for
        `movielens`, the generator's own clients for `synthetic`, `iid(100, seed)` for the others. The natural partition
        of `glyphs`, `femnist`, `movielens` and `synthetic` with variant="fedprox" also cuts the test set into clients;
        any other leaves it pooled.
    data_dir: the folder of the files. Default: $FEDJAX_DRIFT_DATA if set, then the cache ($FEDJAX_DRIFT_CACHE or
        ~/.cache/fedjax_drift), then tensorflow-datasets ($TFDS_DATA_DIR or ~/tensorflow_datasets). With `data_dir`,
        nothing else is looked at.
    standardize: let the model see images with the data set's mean and standard deviation taken out, where it has them
        (mnist, fashion_mnist, cifar10); otherwise it sees [0, 1].
    seed: >= 0, of whatever is drawn: the generated data, the default partition, femnist's and bindingdb's test rows,
        movielens' negative rows.

    Raises ValueError for an unknown data set or option, an illegal value, and a file that is damaged, foreign or
    unreadable; FileNotFoundError, naming the file and the command that makes it, when the data are not on this machine.
    """
    checks.choice("name", name, NAMES)
    make = DATASETS[name]
    known = [key for key, p in inspect.signature(make).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            listed = f"the options of {name} are {', '.join(known)}" if known else f"{name} has no options"
            raise ValueError(f"unknown option {option!r}: {listed}{checks.nearest(option, known)}")
    if partition is not None and (not callable(partition) or partition in (iid, dirichlet, shards, by_writer)):
        raise ValueError(f"partition must be a recipe such as fd.partition.iid(100, seed=0), got {partition!r}")
    checks.integer("seed", seed, 0)

    samples = make(data_dir, seed, partition == by_writer(), **options)
    natural = partition is None and samples.writer is not None
    recipe = partition or (by_writer() if natural else iid(100, seed))
    return _deal(name, samples, recipe, standardize)


def _deal(name: str, samples: Samples, recipe: Partition, standardize: bool) -> FederatedData:
    (x, y), test, writer, test_writer, mean, std = samples
    if not standardize:
        mean = std = None
    if recipe != by_writer() or writer is None or (writer[1:] < writer[:-1]).any():
        parts = recipe(y, writer=writer)
        return FederatedData.from_partition(x, y, parts, test, mean=mean, std=std, name=name)
    # The rows lie grouped by writer already: keep them in place, glyphs are half a gigabyte.
    ids, sizes = np.unique(writer, return_counts=True)
    test_sizes = None
    if test_writer is not None:
        test_sizes = np.bincount(np.searchsorted(ids, test_writer), minlength=len(ids))
    return FederatedData(x, y, sizes, test[0], test[1], test_sizes, mean, std, name)


def synthetic(
    alpha: float = 0.0,
    beta: float = 0.0,
    num_clients: int | None = None,
    num_rows: int | None = None,
    variant: str = "feddyn",
    iid_sol: bool | None = None,
    iid_data: bool | None = None,
    seed: int = 0,
) -> FederatedData:
    """Linear classification with a knob for each kind of drift; `load("synthetic", ...)` with its own clients.

    Client k labels its rows y = argmax(x W_k + b_k), without noise. x ~ N(v_k, diag(j^-1.2)), j = 1..d, float32.
    alpha: standard deviation of u_k ~ N(0, alpha), the mean of the entries of W_k and b_k (variance 1).
    beta: standard deviation of B_k ~ N(0, beta), the mean of the entries of v_k (variance 1).
    iid_sol: all clients share one W and b with standard normal entries. iid_data: v_k = 0 for all clients.
    num_clients: N >= 1. num_rows: rows of each client, training and test together, >= 2.

    variant="feddyn": d = 30, 5 classes, N = 20, 200 rows a client, all of them for training; the test set is the union
        of the training data. `iid_sol` defaults to alpha == 0 and `iid_data` to beta == 0: inferred, their example sets
        both for Synthetic(0, 0). (Acar et al., ICLR 2021, and Gao et al., CVPR 2022: their authors' code.)
    variant="fedprox": d = 60, 10 classes, N = 30, sizes 50 + floor(LogNormal(4, 2)), 90 % of a client's rows for
        training and the rest as its own test set. `iid_sol` and `iid_data` default to False, also for alpha = beta = 0;
        both True is their Synthetic IID. (Li et al., MLSys 2020, section 5.1 and appendix C.1; its authors' code, which
        takes alpha and beta as standard deviations where the paper writes N(0, alpha).)

    Raises ValueError for a negative or non-finite alpha or beta, too few clients or rows, and an unknown variant.
    """
    return load(
        "synthetic",
        alpha=alpha,
        beta=beta,
        num_clients=num_clients,
        num_rows=num_rows,
        variant=variant,
        iid_sol=iid_sol,
        iid_data=iid_data,
        seed=seed,
    )


def _synthetic(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    num_clients: int | None = None,
    num_rows: int | None = None,
    variant: str = "feddyn",
    iid_sol: bool | None = None,
    iid_data: bool | None = None,
) -> Samples:
    """Linear classification with a knob for each kind of drift: see `synthetic`."""
    checks.choice("variant", variant, VARIANTS)
    for key, spread in (("alpha", alpha), ("beta", beta)):
        checks.nonnegative(key, spread, "it is a standard deviation, 1.0 is usual")
    for key, same in (("iid_sol", iid_sol), ("iid_data", iid_data)):
        if same is not None:
            checks.flag(key, same)
    d, classes, usual_clients = VARIANTS[variant]
    n = usual_clients if num_clients is None else checks.integer("num_clients", num_clients, 1)
    if num_rows is not None:
        checks.integer("num_rows", num_rows, 2)
    fedprox = variant == "fedprox"
    iid_sol = (not fedprox and alpha == 0) if iid_sol is None else iid_sol
    iid_data = (not fedprox and beta == 0) if iid_data is None else iid_data

    rng = np.random.default_rng(seed)
    if fedprox and num_rows is None:
        sizes = 50 + rng.lognormal(4, 2, n).astype(np.int64)
    else:
        sizes = np.full(n, 200 if num_rows is None else num_rows)
    u, big_b = rng.normal(0, alpha, n), rng.normal(0, beta, n)
    v = np.zeros((n, d)) if iid_data else rng.normal(big_b[:, None], 1, (n, d))
    centre = np.zeros(1) if iid_sol else u
    w = rng.normal(centre[:, None, None], 1, (len(centre), d + 1, classes))  # the last row is the bias
    w = np.broadcast_to(w, (n, d + 1, classes))

    writer = np.repeat(np.arange(n, dtype=np.int32), sizes)
    x = rng.standard_normal((len(writer), d)) * np.arange(1, d + 1) ** -0.6 + v[writer]
    x = x.astype(np.float32)
    y = np.empty(len(x), np.int32)
    for k, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[k], end)
        y[rows] = (x[rows] @ w[k, :-1] + w[k, -1]).argmax(1)
    if not fedprox:
        return Samples((x, y), (x, y), writer)
    # Rows of a client are drawn independently: its last ones are as good a test set as random ones.
    test_size = np.maximum(1, sizes - (0.9 * sizes).astype(np.int64))
    is_test = np.arange(len(x)) >= (np.cumsum(sizes) - test_size)[writer]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])


def _glyphs(data_dir: DataDir, seed: int, natural: bool, *, num_writers: int = 3400) -> Samples:
    """Drawn characters in thousands of hands, the built-in stand-in for FEMNIST.

    62 classes in LEAF's order, uint8 [28, 28, 1], 255 = ink, no mean and std; `num_writers` >= 1 clients of 19 to 460
    training rows, each with its own test rows. Drawn on the first use (a minute or two for 3,400 writers), kept in the
    cache. See `fedjax_drift.data.glyphs.make_glyphs`.
    """

    def draw() -> files.Arrays:
        from fedjax_drift.data.glyphs import make_glyphs  # needs matplotlib and Pillow

        return make_glyphs(num_writers, seed, progress=num_writers >= 500)._asdict()

    checks.integer("num_writers", num_writers, 1)
    spec: dict[str, Column] = {}
    for part in ("", "_test"):
        spec |= {
            f"x{part}": Column("uint8", (28, 28, 1), part),
            f"y{part}": Column(table=part, classes=62),
            f"writer{part}": Column(table=part, classes=num_writers),
        }
    a = files.cached(f"glyphs_{num_writers}_{seed}_v{GLYPHS_VERSION}.npz", spec, draw)
    return Samples(_pair(a["x"], a["y"]), _pair(a["x_test"], a["y_test"]), a["writer"], a["writer_test"])


def _mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Handwritten digits: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1], 255 = ink; mean 0.1307, std 0.3081.

    `mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. With `by_writer()` also `mnist_writers.npz`
    beside it, `writer_train` [M]: 539 writers of 19 to 131 rows. The test images are other people's, so the test set is
    pooled. (LeCun, Cortes and Burges, "The MNIST database of handwritten digits"; the writers are of QMNIST: Yadav and
    Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.)
    """
    samples = _images("mnist", (28, 28, 1), data_dir, (0.1307,), (0.3081,))
    if not natural:
        return samples
    y = samples.train[1]
    image_file = files.find(FILES["mnist"], files.folders(data_dir))
    if image_file is None:
        raise FileNotFoundError(
            "by_writer() needs mnist.npz in its official order, and mnist_writers.npz beside it: tensorflow-datasets "
            "shuffles the rows. Pass data_dir, the folder of both, or choose another partition"
        )
    writers = image_file.with_name("mnist_writers.npz")
    try:
        writer = files.read_npz(writers, {"writer_train": Column()})["writer_train"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"by_writer() reads the writers of mnist from {writers}, which is not there: make it from QMNIST's "
            "extended labels (numpy.savez with writer_train, one id per training row), or choose another partition"
        ) from error
    if len(writer) != len(y):
        raise ValueError(
            f"{writers}: writer_train must have as many rows as {image_file}, {len(y)}, got {len(writer)}: "
            "the two belong row by row"
        )
    if len(y) == 60_000 and zlib.crc32(y.astype(np.uint8).tobytes()) != MNIST_ORDER:
        raise ValueError(
            f"{image_file}: by_writer() needs the rows in MNIST's official order, got another one: "
            "make the file from the original idx files"
        )
    return samples._replace(writer=writer)


def _fashion_mnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Zalando's articles: 10 classes, 60,000 + 10,000 uint8 [28, 28, 1]; mean 0.2860, std 0.3530.

    `fashion_mnist.npz`: x_train uint8 [M, 28, 28], y_train [M], x_test, y_test. (Xiao, Rasul and Vollgraf,
    arXiv 1708.07747.)
    """
    return _images("fashion_mnist", (28, 28, 1), data_dir, (0.2860,), (0.3530,))


def _cifar10(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Small photographs: 10 classes, 50,000 + 10,000 uint8 [32, 32, 3]; mean and std as in FedDC's authors' code.

    `cifar10.npz`: x_train uint8 [M, 32, 32, 3], y_train [M], x_test, y_test; or else `cifar10_jpeg.npz`, the same
    images as JPEG files (see `fedjax_drift.data.files.decode_jpegs`), decoded on the first use and kept in the cache.
    JPEG is lossy: accuracies come close to published ones, but are not comparable to the last percent. (Krizhevsky,
    "Learning Multiple Layers of Features from Tiny Images", 2009.)
    """
    return _images("cifar10", (32, 32, 3), data_dir, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262))


def _femnist(data_dir: DataDir, seed: int, natural: bool) -> Samples:
    """Handwritten characters with their writers: 62 classes in LEAF's order, uint8 [28, 28, 1], no mean and std.

    `femnist_writers.npz`: x uint8 [M, 28, 28], 255 = background as LEAF stores it, y [M], writer [M] (integers). The
    pixels are inverted, 255 = ink: zero padding in convolutions then means paper, as in mnist and glyphs. The file has
    no test set: about a fifth of each writer's rows, drawn with `seed`, at least one, are its test rows (a writer of a
    single row keeps it for training). (Caldas et al., LEAF, arXiv 1812.01097; images of NIST Special Database 19.)
    """
    path = files.find(FILES["femnist"], files.folders(data_dir))
    if path is None:
        raise FileNotFoundError(
            f"femnist is read from {_places('femnist', data_dir)}, which is not there: convert LEAF's json files with "
            'numpy.savez("femnist_writers.npz", x=x, y=y, writer=writer) (x uint8 [M, 28, 28], 255 = background) and '
            "pass its folder as data_dir, or use glyphs, which needs no file"
        )
    spec = {
        "x": Column("uint8", (28, 28, 1)),
        "y": Column(classes=62),
        "writer": Column(),
    }
    x, y, writer = files.read_npz(path, spec).values()
    shuffled = np.lexsort((np.random.default_rng(seed).random(len(y)), writer))
    _, start, sizes = np.unique(writer[shuffled], return_index=True, return_counts=True)
    test_size = np.minimum(np.maximum(1, np.rint(0.2 * sizes).astype(np.int64)), sizes - 1)
    is_test = np.arange(len(y)) < np.repeat(start + test_size, sizes)
    train, test = shuffled[~is_test], shuffled[is_test]
    return Samples(_pair(255 - x[train], y[train]), _pair(255 - x[test], y[test]), writer[train], writer[test])


def _movielens(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    size: str = "1m",
    history: int = 30,
    negatives: int = 4,
    test_negatives: int = 99,
) -> Samples:
    """Click-through prediction: 2 classes, int16 [6 + history] ids of user, gender, age, occupation, zip code,
    candidate film and the `history` films that the user rated before it (0: none, or not known). One client per user.

    Every rating is a positive row (1), with `negatives` films the user never rated (0); each user's latest rating is in
    the test set, followed by `test_negatives` different ones, so that `fd.ranking` finds it first of its block. Films
    are drawn with `seed` from those that anybody rated. For `fd.models.din`.
    size: "1m", MovieLens 1M (`ml-1m/ratings.dat` and `users.dat` as GroupLens packs them; 6,040 users), or
        "latest-small" (`movielens_latest_small.npz`: user_id, movie_id, timestamp [R]; 610 users of whom nothing is
        known). (Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 2015; the protocol is
        FedEve's.)
    """
    ratings = movielens.read(files.folders(data_dir), size)
    return Samples(*movielens.leave_latest_out(ratings, history, negatives, test_negatives, seed))


def _agnews(data_dir: DataDir, seed: int, natural: bool, *, vocabulary: int = 20_000, length: int = 64) -> Samples:
    """News by topic: 4 classes, 120,000 + 7,600 texts (title and description), int32 [length] word numbers.

    0 is padding, 1 a word that is not among the `vocabulary` - 2 most frequent of the training texts; texts are cut at
    `length` words. `ag_news_csv/train.csv` and `test.csv`: lines "class 1 to 4","title","description". (Zhang, Zhao and
    LeCun, "Character-level Convolutional Networks for Text Classification", NeurIPS 2015.)
    """
    return Samples(*text.read(files.folders(data_dir), vocabulary, length))


def _bindingdb(data_dir: DataDir, seed: int, natural: bool, *, ligand: int = 100, protein: int = 1000) -> Samples:
    """Which ligand binds which protein: 2 classes (1: Kd < 30 nM, our reading), int8 [ligand + protein] characters.

    The first `ligand` characters of the SMILES and the first `protein` of the first chain's sequence, as 1..94 in
    ASCII's order, 0 being padding; one row a pair, 20 % of them, drawn with `seed`, for the test. Some minutes for all
    of `BindingDB_All.tsv`, of which lines without a Kd are passed over. (Liu et al., "BindingDB", Nucleic Acids
    Research 2007.)
    """
    return Samples(*bindingdb.read(files.folders(data_dir), ligand, protein, seed))


DATASETS: dict[str, Callable[..., Samples]] = {
    "synthetic": _synthetic,
    "glyphs": _glyphs,
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "femnist": _femnist,
    "movielens": _movielens,
    "agnews": _agnews,
    "bindingdb": _bindingdb,
}
NAMES = tuple(DATASETS)


def describe(data_dir: DataDir = None) -> list[dict[str, Any]]:
    """What can be loaded here, one dict per data set; opens no file.

    name; classes (of synthetic's default variant); found: a path, "made on the spot", "tensorflow-datasets" or "no";
    available: bool; how: one line on how to get it. `data_dir` as in `load`.
    """
    return [_describe(name, data_dir) for name in NAMES]


def _describe(name: str, data_dir: DataDir) -> dict[str, Any]:
    found, how = "made on the spot", f'fd.datasets.load("{name}")'
    if name in FILES:
        path = files.find(FILES[name], files.folders(data_dir))
        how = HOW.get(name, f"put {' or '.join(FILES[name])} into data_dir")
        if data_dir is None and name in files.HOSTS:
            how += f", or, online: {_prepare(name)}"
            path = path or files.find((f"{name}_tfds.npz",), [files.cache_dir()])
            if path is None and any((files.tfds_dir() / name).glob("*/dataset_info.json")):
                found = "tensorflow-datasets"
        if path is not None:
            found = str(path)
        elif found == "made on the spot":
            found = "no"
    return {"name": name, "classes": CLASSES[name], "found": found, "available": found != "no", "how": how}


def _images(
    name: str, row: tuple[int, ...], data_dir: DataDir, mean: tuple[float, ...], std: tuple[float, ...]
) -> Samples:
    spec: dict[str, Column] = {}
    for split in ("train", "test"):
        spec[f"x_{split}"] = Column("uint8", row, split)
        spec[f"y_{split}"] = Column(table=split, classes=CLASSES[name])
    path = files.find(FILES[name], files.folders(data_dir))
    if path is None:
        a = _images_of_tfds(name, row, data_dir, spec)
    elif path.stem.endswith("_jpeg"):
        # Named by content, not cifar10.npz: lossy pixels must not pass for the original ones later.
        filename = f"{path.stem}_{files.fingerprint(path)}.npz"
        a = files.cached(filename, spec, lambda: files.decode_jpegs(path, CLASSES[name], row[0]))
    else:
        a = files.read_npz(path, spec)
    return Samples(_pair(a["x_train"], a["y_train"]), _pair(a["x_test"], a["y_test"]), mean=mean, std=std)


def _images_of_tfds(name: str, row: tuple[int, ...], data_dir: DataDir, spec: files.Spec) -> files.Arrays:
    missing = f"{name} is read from {_places(name, data_dir)}, which is not there"
    shape = ", ".join(str(length) for length in row if length > 1)
    by_hand = f'numpy.savez("{FILES[name][0]}", x_train=..., y_train=..., x_test=..., y_test=...), uint8 [M, {shape}]'
    if data_dir is not None:
        raise FileNotFoundError(f"{missing}: write it with {by_hand}, or leave data_dir out to use tensorflow-datasets")
    try:
        return files.cached(f"{name}_tfds.npz", spec, lambda: files.from_tfds(name))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{missing}, and tensorflow-datasets has none: {error}. Either write it with {by_hand}, and pass its "
            f"folder as data_dir, or, on a machine with a network, {_prepare(name)}"
        ) from error


def _prepare(name: str) -> str:
    load = f"import fedjax_drift as fd; fd.datasets.load('{name}')"
    return f'pip install "fedjax-drift[prepare]" && python -c "{load}"'


def _places(name: str, data_dir: DataDir) -> str:
    return " or ".join(str(folder / file) for folder in files.folders(data_dir) for file in FILES[name])


def _pair(x: np.ndarray, y: np.ndarray) -> Pair:
    return x, y.astype(np.int32)
