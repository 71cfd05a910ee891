"""AG News as sequences of word ids."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np

from fedjax_drift import spec
from fedjax_drift.data import files
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.spec import Count

FILENAME = "ag_news_csv/train.csv"
WORD = re.compile(r"[a-z]+|[0-9]+")
UNKNOWN = 1  # 0 is padding


def load(request: Request, *, vocabulary: Annotated[int, spec.integer(3)] = 20_000, length: Count = 64) -> Samples:
    """AG News by topic: 4 classes, 120,000 + 7,600 texts (title and description), int32 [length] word ids.

    The id 0 is padding. The id 1 stands for all words that are not among the `vocabulary` - 2 most frequent words of
    the training texts. Texts are truncated to `length` words. The files are `ag_news_csv/train.csv` and `test.csv`,
    with lines "class 1 to 4","title","description". (Zhang, Zhao and LeCun, "Character-level Convolutional Networks for
    Text Classification", NeurIPS 2015.)
    """
    path = request.path()
    (texts, y), (test_texts, y_test) = _texts(path), _texts(path.with_name("test.csv"))
    counts = Counter(word for words in texts for word in words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    numbers = {word: number for number, word in enumerate(frequent, UNKNOWN + 1)}

    def rows(texts: list[list[str]]) -> np.ndarray:
        x = np.zeros((len(texts), length), np.int32)
        for row, words in zip(x, texts, strict=True):
            ids = [numbers.get(word, UNKNOWN) for word in words[:length]]
            row[: len(ids)] = ids
        return x

    return Samples((rows(texts), y), (rows(test_texts), y_test))


def _texts(path: Path) -> tuple[list[list[str]], np.ndarray]:
    """Returns the words of each title and description in lower case, and the classes, from 0."""
    texts, classes = [], []
    with files.opened_text(path) as file:
        rows = csv.reader(file, strict=True)
        for row in rows:
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                files.wrong_line(rows.line_num, '"class 1 to 4","title","description"', ",".join(row))
            texts.append(WORD.findall(f"{row[1]} {row[2]}".lower()))
            classes.append(int(row[0]) - 1)
        if not texts:
            files.wrong_line(1, '"class 1 to 4","title","description"', "an empty file")
    return texts, np.array(classes, np.int32)
