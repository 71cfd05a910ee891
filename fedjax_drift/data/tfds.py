"""Image data sets of tensorflow-datasets, read without TensorFlow where they are prepared."""

from __future__ import annotations

import importlib.util
import os
import socket
import urllib.request
from pathlib import Path

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files

# The hosts from which tensorflow-datasets downloads. A connection is tested first, because tensorflow-datasets needs
# minutes to fail without one.
HOSTS = {
    "mnist": ("storage.googleapis.com", 443),
    "fashion_mnist": ("fashion-mnist.s3-website.eu-central-1.amazonaws.com", 80),
    "emnist/byclass": ("biometrics.nist.gov", 443),
    "emnist/balanced": ("biometrics.nist.gov", 443),
    "emnist/digits": ("biometrics.nist.gov", 443),
    "cifar10": ("www.cs.toronto.edu", 443),
    "cifar100": ("www.cs.toronto.edu", 443),
}


def default_dir() -> Path:
    """The folder of tensorflow-datasets: $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    return checks.path("$TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def read(name: str) -> files.Arrays:
    """Reads x_train uint8 [M, ...], y_train [M], x_test and y_test of an image data set of tensorflow-datasets.

    Prepared array_record data are read without TensorFlow. Other data are
    downloaded and prepared if TensorFlow is installed (tensorflow-datasets 4.9.10 needs it once, to encode the images).
    The examples have the shuffled order of tensorflow-datasets. Raises FileNotFoundError, without waiting for the
    network, if there are no data and they can't be prepared. Raises ValueError for data that only TensorFlow can read.
    """
    directory = default_dir()
    try:
        import tensorflow_datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileNotFoundError(
            f"tensorflow-datasets can't be imported ({error}): pip install tensorflow-datasets importlib_resources"
        ) from error
    can_prepare = importlib.util.find_spec("tensorflow") is not None
    unprepared = FileNotFoundError(
        f"{directory / name} is not prepared, and TensorFlow is needed once to prepare it: "
        "pip install tensorflow-datasets tensorflow"
    )
    if not can_prepare and not any((directory / name).glob("*/dataset_info.json")):
        raise unprepared  # the builder would also log a warning
    # try_gcs=False: do not query Google Cloud Storage, which waits for the network.
    with files.plain_errors(directory / name):
        for path in (directory / name).rglob("*"):
            files.must_not_wait(path)
        builder = tensorflow_datasets.builder(name, data_dir=directory, try_gcs=False)
    if not builder.is_prepared():
        if not can_prepare:
            raise unprepared
        _require_connection(name)
        builder.download_and_prepare(file_format="array_record")
    if builder.info.file_format != tensorflow_datasets.core.FileFormat.ARRAY_RECORD:
        got = f"{builder.info.file_format.value}, which only TensorFlow reads"
        fix = "move this folder, or set TFDS_DATA_DIR to another folder, and load again"
        checks.refuse(f"{builder.data_path} must be in array_record format", got, fix)
    arrays: files.Arrays = {}
    with files.plain_errors(builder.data_path):
        for split in ("train", "test"):
            rows = builder.as_data_source(split=split)
            x = np.empty((len(rows), *builder.info.features["image"].shape), np.uint8)
            y = np.empty(len(rows), np.int32)
            for i, row in enumerate(rows):
                x[i], y[i] = row["image"], row["label"]
            arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


def _require_connection(name: str) -> None:
    if name not in HOSTS or urllib.request.getproxies():
        return
    try:
        socket.create_connection(HOSTS[name], timeout=5).close()
    except OSError as error:
        raise FileNotFoundError(f"it can't be downloaded: no connection to {HOSTS[name][0]} ({error})") from error
