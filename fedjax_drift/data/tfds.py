"""Image data sets of tensorflow-datasets, read without TensorFlow where they are prepared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files


def default_dir() -> Path:
    """The folder of tensorflow-datasets: $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    return checks.path("$TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def is_prepared(name: str) -> bool:
    """Whether the folder has the data set. No file is opened."""
    return any((default_dir() / name).glob("*/dataset_info.json"))


def read(name: str) -> files.Arrays:
    """Reads x_train uint8 [M, ...], y_train [M], x_test and y_test of an image data set of tensorflow-datasets.

    TensorFlow is not needed. The data must be prepared, in the format array_record. The examples have the shuffled
    order of tensorflow-datasets. Raises FileNotFoundError if there are no data, and ValueError for data that only
    TensorFlow can read.
    """
    directory = default_dir()
    if not is_prepared(name):
        raise FileNotFoundError(f"{directory / name} is not prepared")
    try:
        import tensorflow_datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileNotFoundError(
            f"tensorflow-datasets can't be imported ({error}): pip install tensorflow-datasets importlib_resources"
        ) from error
    # try_gcs=False: do not query Google Cloud Storage, which waits for the network.
    with files.plain_errors(directory / name):
        builder = tensorflow_datasets.builder(name, data_dir=directory, try_gcs=False)
    if not builder.is_prepared():
        raise FileNotFoundError(f"{builder.data_path} is not prepared")
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
