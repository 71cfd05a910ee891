"""The data sets by name: the record of one, what its loader gets, and what its loader returns.

The records themselves are in catalogue.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.data.downloading import Download
from fedjax_drift.data.federated import Pair
from fedjax_drift.data.files import Column, Spec

DataDir = str | os.PathLike[str] | None
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel of images, scaled to [0, 1]."""


class Samples(NamedTuple):
    """A data set that is not yet partitioned."""

    train: Pair
    test: Pair
    writer: np.ndarray | None = None
    """[M] the writer or user of each training example."""
    test_writer: np.ndarray | None = None
    """[M_test] the writer of each test example. Both `writer` and `test_writer` are then sorted."""
    normalisation: Normalisation | None = None
    """None: that of the record."""


@dataclass(frozen=True)
class DataSet:
    """The facts about one data set."""

    name: str
    """The name of the data set, also in tensorflow-datasets."""
    read: Callable[..., Samples]
    """``read(request, *, options of the data set)``, the loader. Its docstring documents the data set. Its annotations
    declare what the options may be."""
    classes: int
    """The number of classes."""
    files: tuple[str, ...] = ()
    """The files or folders. One of them must exist. () if the data are generated."""
    shape: tuple[int, ...] = ()
    """The shape of an image. () if the examples are no images."""
    normalisation: Normalisation | None = None
    """None if it is unknown."""
    model: str = ""
    """The model that the command line trains by default."""
    how: str = ""
    """How to get the files by hand. "" for archives that are only unpacked."""
    standardize: bool = True
    """Whether images with a mean and a standard deviation are standardised by default."""
    by_writer: bool = False
    """Whether the default partition is one client per writer, user or speaker."""
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a file or folder -> what must exist with it, relative to the folder that has it."""
    selector: str = ""
    """The option that selects one of `variants`."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Value of the selector -> the fields of this record that differ."""
    downloads: Download | None = None
    """What can be downloaded. It may give the files of some variants only."""
    tfds: bool = False
    """Whether it is also read from tensorflow-datasets."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the data set, with their defaults."""
        parameters = inspect.signature(self.read).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def variant(self, options: Mapping[str, Any]) -> DataSet:
        """Returns the record with the files and the classes for these options."""
        if not self.selector:
            return self
        return replace(self, **self.variants[(self.options | dict(options))[self.selector]])

    def spec(self, *parts: str, writers: bool = False, num_writers: int | None = None) -> Spec:
        """Returns the requirements for the images x and labels y of each part, and for their writers.

        parts: the ends of the names of the arrays, such as "_train". num_writers: None if it is unknown.
        """
        spec: dict[str, Column] = {}
        for part in parts:
            spec[f"x{part}"] = Column("uint8", self.shape, part)
            spec[f"y{part}"] = Column(table=part, classes=self.classes)
            if writers:
                spec[f"writer{part}"] = Column(table=part, classes=num_writers)
        return spec

    def find(self, data_dir: DataDir) -> Path | None:
        """Returns the first of the files that exists, or None."""
        return files.find(self.files, files.folders(data_dir))

    def is_complete(self, path: Path) -> bool:
        """Whether all parts of the data set exist. path: its first file or its folder."""
        return all((path.parent / part).exists() for part in self.parts.get(path.name, ()))

    @property
    def online(self) -> Download | None:
        """The download that gives one of the files, or None."""
        return self.downloads if self.downloads and set(self.files) & set(self.downloads.gives) else None

    @property
    def base(self) -> str:
        """The name without its variant, such as emnist for emnist/letters."""
        return self.name.partition("/")[0]

    @property
    def filename(self) -> str:
        """The name as a part of a file name, such as emnist_letters for emnist/letters."""
        return self.name.replace("/", "_")

    @property
    def by_hand(self) -> str:
        """How to get the files without `load(download=True)`."""
        if self.how or self.downloads is None:
            return self.how
        return f"download {', '.join(file.address for file in self.downloads.files)} and unpack it there"


class Request(NamedTuple):
    """What `datasets.load` asks a loader for, apart from the options."""

    dataset: DataSet
    """The record for the options."""
    data_dir: DataDir
    seed: int
    by_writer: bool
    """Whether the caller asked for ``by_writer()``, or a long tail of it. `mnist` then also reads the writers of its
    examples."""

    @property
    def folders(self) -> list[Path]:
        return files.folders(self.data_dir)

    def path(self) -> Path:
        """Returns the first of the files that exists. Raises FileNotFoundError, with instructions, if none does."""
        path = self.dataset.find(self.data_dir)
        if path is None:
            raise self.absent()
        return path

    def absent(self, why: str = "") -> FileNotFoundError:
        """Returns the error for a data set of which no file exists. why: not from another source, either."""
        fix = self.dataset.by_hand + why
        names, places = " or ".join(self.dataset.files), " or ".join(map(str, self.folders))
        if self.dataset.online:
            fix = f"pass download=True, or run `fedjax-drift data download {self.dataset.base}`, or {fix}"
        advice = "put it there"
        if self.data_dir is None:
            advice = "set FEDJAX_DRIFT_DATA to the folder that has it, or pass data_dir"
        return FileNotFoundError(
            f"{self.dataset.name} is read from {names} in {places}, which does not exist: {advice}. To get it, {fix}"
        )


def of_classes(samples: Pair, used: np.ndarray, part: str, num_classes: int) -> Pair:
    """Returns the examples for which ``used`` is True. Raises ConfigurationError if there are none."""
    if not used.any():
        got = f"{num_classes}, which leaves none"
        checks.refuse(f"num_classes must leave at least 1 {part} example", got, "use more classes")
    return samples[0][used], samples[1][used]


def pair(x: np.ndarray, y: np.ndarray) -> Pair:
    """Returns the inputs, and the labels as int32."""
    return x, y.astype(np.int32)
