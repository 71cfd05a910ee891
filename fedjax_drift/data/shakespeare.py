"""Shakespeare: the lines of each role, for language models. Read from the database of TensorFlow Federated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files, tff_files
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Count

FILES = ("shakespeare.sqlite", "shakespeare.sqlite.lzma")
START, END, FIRST = 1, 2, 3  # ids; 0 is padding
# The order of the characters in the tutorial of TensorFlow Federated. So the ids are those of FedJAX.
CHARACTERS = b"dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
UNKNOWN = FIRST + len(CHARACTERS)
CLASSES = UNKNOWN + 1
IDS = np.full(256, UNKNOWN, np.int32)
IDS[list(CHARACTERS)] = FIRST + np.arange(len(CHARACTERS))


def load(request: Request, *, length: Count = 80) -> Samples:
    """The lines of 715 roles of Shakespeare's plays, for language models: 90 character ids, int32 [length].

    The labels are the characters that follow each of them, int32 [length]. A role has several passages, 16,068 for
    training and 2,356 for testing in all. The passages of a role are joined, each between a start (id 1) and an end
    (id 2), and cut into examples of `length` characters. The last example is filled with 0, inputs and labels. The ids
    3..88 are characters, and 89 is any other. (This is the data set of FedJAX, and of Reddi et al., ICLR 2021, but for
    their number of examples per role. McMahan et al., AISTATS 2017; Caldas et al., LEAF, arXiv 1812.01097.)

    The default loss and the default accuracy of a model count the padding, too: the documentation of the models says
    how to leave it out.

    Read from `shakespeare.sqlite` of TensorFlow Federated, or from the same file packed, `shakespeare.sqlite.lzma`. It
    is converted on the first use and kept in the cache.
    """
    path = request.path()

    def convert() -> files.Arrays:
        arrays, number = {}, dict[str, int]()
        with tff_files.opened(path) as file:
            if file.texts is None:
                raise ConfigurationError("it must be an SQLite database of TensorFlow Federated: download it again")
            for part in ("train", "test"):
                roles = [
                    (number.setdefault(role, len(number)), _sequences(texts, length))
                    for role, texts in file.texts("snippets", file.chosen(part, part) or part)
                ]
                roles.sort(key=lambda pair: pair[0])
                if not roles:
                    checks.refuse(f"it must have examples in the split {part}", "none", "download it again")
                arrays[f"rows_{part}"] = np.concatenate([rows for _, rows in roles])
                arrays[f"role_{part}"] = np.repeat([role for role, _ in roles], [len(rows) for _, rows in roles])
        return arrays

    spec: dict[str, Column] = {}
    for part in ("_train", "_test"):
        spec |= {f"rows{part}": Column(row=(2, length), table=part, classes=CLASSES), f"role{part}": Column(table=part)}
    a = files.cached(f"shakespeare_{length}_{files.stamp([path])}.npz", spec, convert)
    train, test = ((a[f"rows_{part}"][:, 0], a[f"rows_{part}"][:, 1]) for part in ("train", "test"))
    test_role = a["role_test"] if np.isin(a["role_test"], a["role_train"]).all() else None
    return Samples(train, test, a["role_train"], test_role)


def _sequences(texts: Sequence[bytes], length: int) -> np.ndarray:
    """Returns the inputs and the labels of a role, int32 [n, 2, length]."""
    ids = np.concatenate([[START, *IDS[list(text)], END] for text in texts]).astype(np.int32)
    rows = -(-(len(ids) - 1) // length)
    padded = np.zeros((2, rows * length), np.int32)
    padded[0, : len(ids) - 1], padded[1, : len(ids) - 1] = ids[:-1], ids[1:]
    return padded.reshape(2, rows, length).swapaxes(0, 1)
