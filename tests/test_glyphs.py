from __future__ import annotations

import numpy as np
import pytest

from fedjax_drift.data.glyphs import CHARACTERS, Glyphs, make_glyphs


@pytest.fixture(scope="module")
def glyphs() -> Glyphs:
    return make_glyphs(200)


def linear(x: np.ndarray, labels: np.ndarray, x_test: np.ndarray) -> np.ndarray:
    """Returns the predictions of a ridge regression on one-hot labels for the images x_test."""

    def rows(images: np.ndarray) -> np.ndarray:
        return np.pad(images.reshape(-1, 784) / np.float32(255), ((0, 0), (0, 1)), constant_values=1)

    a, targets = rows(x), np.eye(labels.max() + 1, dtype=np.float32)[labels]
    weights = np.linalg.solve(a.T @ a + 30 * np.eye(785, dtype=np.float32), a.T @ targets)
    return np.argmax(rows(x_test) @ weights, axis=1)


def test_shapes_and_ranges(glyphs: Glyphs) -> None:
    for x, y, writer in (glyphs[:3], glyphs[3:]):
        assert x.shape == (len(y), 28, 28) and x.dtype == np.uint8
        assert y.dtype == np.uint8 and writer.dtype == np.int32 and len(writer) == len(y)
        # Every writer has training and test examples. The examples are grouped by writer.
        np.testing.assert_array_equal(np.unique(writer), np.arange(200))
        assert (np.diff(writer) >= 0).all()
        np.testing.assert_array_equal(np.unique(y), np.arange(len(CHARACTERS)))
        assert x.max() > 240
        assert x.max(axis=(1, 2)).min() > 90, "an image without ink"


def test_characters_are_inside_the_image(glyphs: Glyphs) -> None:
    ink = glyphs.x > 96
    touching = ink[:, [0, -1]].any(axis=(1, 2)) | ink[:, :, [0, -1]].any(axis=(1, 2))
    assert touching.mean() < 0.01
    rows, columns = np.asarray(ink.any(axis=2)), np.asarray(ink.any(axis=1))
    height = 28 - rows[:, ::-1].argmax(axis=1) - rows.argmax(axis=1)
    assert 16 < height.mean() < 22
    for line in (rows, columns):
        assert abs(np.average(np.arange(28), weights=line.sum(axis=0)) - 13.5) < 0.5


def test_sizes_follow_femnist(glyphs: Glyphs) -> None:
    train, test = np.bincount(glyphs.writer), np.bincount(glyphs.writer_test)
    assert abs(train.mean() - 197.5) < 20 and abs(train.std() - 88) < 15
    assert train.min() >= 19 and 350 < train.max() <= 460
    assert (np.abs(test - train / 8.67) <= 0.51).all()


def test_labels_are_mostly_digits_and_differ_between_writers(glyphs: Glyphs) -> None:
    assert abs((glyphs.y < 10).mean() - 0.56) < 0.03
    counts = np.zeros((200, 62))
    np.add.at(counts, (glyphs.writer, glyphs.y), 1)
    assert np.count_nonzero(counts, axis=1).max() < 62
    # Without label skew, the counts would be multinomial samples, and the mean of surplus would be about 1.
    n = counts.sum(axis=1, keepdims=True)
    share = counts.sum(axis=0) / n.sum()
    surplus = (counts - n * share) ** 2 / (n * share * (1 - share))
    assert surplus[:, :10].mean() > 1.5


def test_images_only_depend_on_the_seed_and_the_writer(glyphs: Glyphs) -> None:
    few = make_glyphs(7)
    for part, first in ((slice(0, 3), glyphs.writer < 7), (slice(3, 6), glyphs.writer_test < 7)):
        for a, b in zip(few[part], glyphs[part], strict=True):
            np.testing.assert_array_equal(a, b[first])
    other = make_glyphs(7, seed=1)
    assert not np.array_equal(other.x[:100], few.x[:100])


def test_writers_can_be_recognised_by_their_handwriting(glyphs: Glyphs) -> None:
    train, test = glyphs.writer < 20, glyphs.writer_test < 20
    hit = linear(glyphs.x[train], glyphs.writer[train], glyphs.x_test[test])
    assert (hit == glyphs.writer_test[test]).mean() > 0.3, "always the commonest: 0.1"


def test_characters_can_be_recognised_across_writers(glyphs: Glyphs) -> None:
    train, test = glyphs.writer < 150, glyphs.writer_test >= 150
    hit = linear(glyphs.x[train], glyphs.y[train], glyphs.x_test[test])
    assert (hit == glyphs.y_test[test]).mean() > 0.25, "always the commonest: 0.07"


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_writers must be an integer >= 1, got 0"):
        make_glyphs(0)
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        make_glyphs(1, seed=-1)
