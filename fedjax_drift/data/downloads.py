"""The table of the files that can be downloaded: addresses, sizes and checksums, and how they are unpacked."""

from __future__ import annotations

import functools
import gzip
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import image_files, images
from fedjax_drift.data.downloading import Download, File

ROOM, RATIO = 2**20, 16  # an archive may unpack to so many bytes, and so many times its own; ml-1m.zip, to 4 times
HEADER = 2**20  # limit in bytes of the header of a file in a tar archive


def _as_it_is(paths: Sequence[Path], new: Path) -> Path:
    for path in paths:
        os.replace(path, new / path.name)
    return new


def _unpacked(paths: Sequence[Path], new: Path, into: str = "", inside: str = "") -> Path:
    """Unpacks archives. into: the folder of `new` for their content. inside: the folder of `new` to return.

    Refuses a member that is no file or folder, or is outside of the folder, and members that exceed the limits above.
    """
    for path in paths:
        limit = ROOM + RATIO * path.stat().st_size
        room = limit
        for name, size, is_plain in (_zip_members if zipfile.is_zipfile(path) else _tar_members)(path, new / into):
            room -= size
            if room < 0:
                checks.refuse(f"{path.name} must unpack to at most {limit} bytes", f"more with {name}")
            if not is_plain or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                checks.refuse(f"{path.name} must have files and folders inside of it", name)
    return new / inside


Member = tuple[str, int, bool]
"""The name of a member of an archive, its size in bytes, and whether it is a usual file or folder."""


def _zip_members(path: Path, folder: Path) -> Iterator[Member]:
    """Yields each member, and unpacks it into the folder if the caller asks for the next one."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            # Python unpacks the other methods without a limit.
            yield member.filename, member.file_size, member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            archive.extract(member, folder)


def _tar_members(path: Path, folder: Path) -> Iterator[Member]:
    """As `_zip_members`, for a .tar.gz."""
    with _Headers(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extraction_filter = tarfile.data_filter  # type: ignore[assignment]
        for member in archive:
            yield member.name, member.size, member.isfile() or member.isdir()
            archive.extract(member, folder)


class _Headers(gzip.GzipFile):
    """A file that is read in small parts. tarfile reads a header at once, and the header itself says how long it is."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= HEADER:
            checks.refuse(f"a header must have at most {HEADER} bytes", size)
        return super().read(size)


def _npz(paths: Sequence[Path], new: Path, name: str) -> Path:
    """Writes the arrays of four idx files, in the order of `MNIST`, to the file ``name``."""
    parts = zip(("x_train", "y_train", "x_test", "y_test"), paths, (3, 1, 3, 1), strict=True)
    arrays: dict[str, Any] = {key: image_files.read_idx(path, axes) for key, path, axes in parts}
    np.savez(new / name, **arrays)
    return new


# ---------------------------------------------------------------- the table

TFDS = "tensorflow-datasets"
MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
TORONTO = "https://www.cs.toronto.edu/~kriz/"
TFF = "https://storage.googleapis.com/tff-datasets-public/"
IDX = [f"emnist-{split}-{part}-ubyte.gz" for split in images.EMNIST for part in images.IDX_PARTS]

# fmt: off
DOWNLOADS = {
    "mnist": Download((
        File(f"{MNIST}train-images-idx3-ubyte.gz", 9_912_422,
             "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", TFDS),
        File(f"{MNIST}train-labels-idx1-ubyte.gz", 28_881,
             "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", TFDS),
        File(f"{MNIST}t10k-images-idx3-ubyte.gz", 1_648_877,
             "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", TFDS),
        File(f"{MNIST}t10k-labels-idx1-ubyte.gz", 4_542,
             "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", TFDS),
    ), ("mnist.npz",), functools.partial(_npz, name="mnist.npz")),
    "fashion_mnist": Download((
        File(f"{FASHION}train-images-idx3-ubyte.gz", 26_421_880,
             "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", TFDS),
        File(f"{FASHION}train-labels-idx1-ubyte.gz", 29_515,
             "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", TFDS),
        File(f"{FASHION}t10k-images-idx3-ubyte.gz", 4_422_102,
             "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", TFDS),
        File(f"{FASHION}t10k-labels-idx1-ubyte.gz", 5_148,
             "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", TFDS),
    ), ("fashion_mnist.npz",), functools.partial(_npz, name="fashion_mnist.npz")),
    "emnist": Download((
        File("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", 561_753_746,
             "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e", TFDS),
    ), tuple(IDX), functools.partial(_unpacked, inside="gzip")),
    "cifar10": Download((
        File(f"{TORONTO}cifar-10-python.tar.gz", 170_498_071, "md5:c58f30108f718f92721af3b95e74349a", "the authors"),
    ), (images.CIFAR10,), _unpacked),
    "cifar100": Download((
        File(f"{TORONTO}cifar-100-python.tar.gz", 169_001_437, "md5:eb9058c3a382ffc7106e4002c42a8d85", "the authors"),
    ), ("cifar-100-python",), _unpacked),
    "cinic10": Download((
        File("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz", 687_544_992,
             "md5:6ee4d0c996905fe93221de577967a372", "projects that use it"),
    ), ("CINIC-10",), functools.partial(_unpacked, into="CINIC-10")),
    "tiny_imagenet": Download((
        File("http://cs231n.stanford.edu/tiny-imagenet-200.zip", 248_100_043,
             "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821", "projects that use it"),
    ), ("tiny-imagenet-200",), _unpacked),
    "femnist": Download((
        File(f"{TFF}emnist_all.sqlite.lzma", 170_507_172,
             "sha256:c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48", "one project that uses it"),
    ), ("emnist_all.sqlite.lzma",), _as_it_is),
    "shakespeare": Download((
        File(f"{TFF}shakespeare.sqlite.lzma", 1_329_828,
             "sha256:d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4", "FedJAX"),
    ), ("shakespeare.sqlite.lzma",), _as_it_is),
    "movielens": Download((
        File("https://files.grouplens.org/datasets/movielens/ml-1m.zip", 5_917_549,
             "sha256:a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20", TFDS),
    ), ("ml-1m/ratings.dat", "ml-1m/users.dat"), _unpacked),
}
# fmt: on
