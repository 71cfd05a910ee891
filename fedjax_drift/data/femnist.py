"""FEMNIST, in any of the file formats of LEAF, FedJAX and TensorFlow Federated."""

from __future__ import annotations

import numpy as np

from fedjax_drift.data import federated_files, files
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import FEMNIST, GET, DataDir, Samples, absent, filenames, incomplete, pair

MEAN, STD = (0.03650044,), (0.1602474,)  # of the inverted pixels, scaled to [0, 1] (FedEve's library simple-FL)


def femnist(data_dir: DataDir, seed: int, natural: bool, *, source: str = "auto") -> Samples:
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
    names = filenames("femnist", source=source)
    path = files.find(names, files.folders(data_dir))
    if path is None:
        raise absent("femnist", names, data_dir, f"{GET['femnist']}. Or use glyphs, which needs no file")
    if path.name in FEMNIST["npz"]:
        spec = {"x": Column("uint8", (28, 28, 1)), "y": Column(classes=62), "writer": Column()}
        x, y, writer = files.read_npz(path, spec).values()
        return _hold_out(255 - x, y, writer, seed)
    try:
        a = federated_files.read_femnist(path)
    except FileNotFoundError as error:
        raise incomplete("femnist", path, error) from error
    if "x_test" not in a:
        return _hold_out(a["x"], a["y"], a["writer"], seed)
    test_writer = a["writer_test"] if np.isin(a["writer_test"], a["writer"]).all() else None
    return Samples(pair(a["x"], a["y"]), pair(a["x_test"], a["y_test"]), a["writer"], test_writer, MEAN, STD)


def _hold_out(x: np.ndarray, y: np.ndarray, writer: np.ndarray, seed: int) -> Samples:
    """Moves about 20 % of each writer's examples to the test set: at least one, but never the only one."""
    shuffled = np.lexsort((np.random.default_rng(seed).random(len(y)), writer))
    _, start, sizes = np.unique(writer[shuffled], return_index=True, return_counts=True)
    test_size = np.minimum(np.maximum(1, np.rint(0.2 * sizes).astype(np.int64)), sizes - 1)
    is_test = np.arange(len(y)) < np.repeat(start + test_size, sizes)
    train, test = shuffled[~is_test], shuffled[is_test]
    return Samples(pair(x[train], y[train]), pair(x[test], y[test]), writer[train], writer[test], MEAN, STD)
