"""A generated data set that resembles FEMNIST: 62 classes, thousands of writers with different handwriting styles.

No download is needed: the skeletons of the characters come from the fonts that are included in matplotlib.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedjax_drift.data import files
from fedjax_drift.data.sources import Request, Samples, of_classes, pair
from fedjax_drift.spec import Count, Fix, Seed, checked

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # LEAF's class order

_FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmti10", "cmss10", "cmtt10", "cmmi10",
)  # fmt: skip

_VERSION = 1  # a part of the names of cached files; increase it if make_glyphs generates other images
_SIDE = 28  # pixels of an image
_ZOOM = 4  # atlas cells per image pixel, so that the nearest cell is precise enough
_CELLS = _SIDE * _ZOOM
_BOX = 20.0  # pixels, the longer side of a capital letter at scale 1
_STEPS = 32  # distance levels per pixel in the atlas

# Training images per writer: a gamma distribution with FEMNIST's mean and spread (671,585 images, 3,400 writers).
_SIZE_MEAN, _SIZE_STD, _SIZE_MIN, _SIZE_MAX = 671_585 / 3400, 88.0, 19, 460
_TEST_PER_TRAIN = 77_483 / 671_585
_DIGIT_SHARE = 0.56
_LABEL_CONCENTRATION = 100.0
# Approximate relative frequency of each letter in the NIST forms, A-Z then a-z.
_LETTER_WEIGHTS = (
    6, 4, 10, 5, 5, 9, 3, 3, 12, 3, 2, 5, 9, 8, 25, 8, 3, 5, 21, 10, 13, 5, 5, 3, 5, 3,
    10, 5, 3, 10, 25, 3, 4, 9, 3, 2, 2, 15, 3, 11, 3, 2, 3, 14, 3, 18, 3, 2, 3, 3, 2, 3,
)  # fmt: skip


class Glyphs(NamedTuple):
    """Images of single characters with their writers. 0 is background, 255 is ink."""

    x: np.ndarray  # uint8 [M, 28, 28], grouped by writer
    y: np.ndarray  # uint8 [M], index into CHARACTERS
    writer: np.ndarray  # int32 [M], 0..num_writers-1, non-decreasing
    x_test: np.ndarray  # uint8 [M_test, 28, 28]
    y_test: np.ndarray  # uint8 [M_test]
    writer_test: np.ndarray  # int32 [M_test]


class _Atlas(NamedTuple):
    distance: np.ndarray  # uint8 [faces * 62 * cells * cells], to the nearest stroke; unit: 1/32 pixel, at most 255
    extent: np.ndarray  # float32 [faces, 62, 2], half width and half height in pixels


def load(request: Request, *, num_writers: Count = 3400, num_classes: Count | None = None) -> Samples:
    """Generated characters in thousands of handwriting styles, a built-in replacement for FEMNIST.

    62 classes in the order of LEAF, uint8 [28, 28, 1], 255 = ink, no mean and std. There are `num_writers` >= 1
    clients with 19 to 460 training examples each. Every client has its own test examples. The images are generated on
    the first use (one or two minutes for 3,400 writers) and kept in the cache. See `make_glyphs`.

    num_classes: use only the first num_classes classes, in 1..62. 10 gives the digits, and 36 the digits and capitals.
    Writers without a training example of these classes are left out. Default: all.
    """

    def generate() -> files.Arrays:
        return make_glyphs(num_writers, request.seed, progress=num_writers >= 500)._asdict()

    spec = request.dataset.spec("", "_test", writers=True, num_writers=num_writers)
    a = files.cached(f"glyphs_{num_writers}_{request.seed}_v{_VERSION}.npz", spec, generate)
    train, test = pair(a["x"], a["y"]), pair(a["x_test"], a["y_test"])
    writer, test_writer = a["writer"], a["writer_test"]
    if num_classes is None:
        return Samples(train, test, writer, test_writer)
    used = train[1] < num_classes
    test_used = (test[1] < num_classes) & np.isin(test_writer, writer[used])
    train = of_classes(train, used, "training", num_classes)
    test = of_classes(test, test_used, "test", num_classes)
    return Samples(train, test, writer[used], test_writer[test_used])


@checked
def make_glyphs(
    num_writers: Annotated[Count, Fix("FEMNIST has 3400")] = 3400, seed: Seed = 0, progress: bool = False
) -> Glyphs:
    """Generates images of digits and letters by `num_writers` writers.

    The sizes follow FEMNIST (Caldas et al. 2018, LEAF; split of TensorFlow Federated): about 197 training images per
    writer (standard deviation 88, 19 to 460), and a ninth as many test images, at least one. The label distribution of
    a writer is drawn from a Dirichlet distribution around a prior with 56 % digits.

    The style of a writer determines the font of each character, slant, size, aspect ratio, position, pen width, ink
    darkness and a smooth distortion. One part of the distortion is the same for all characters, another part is
    specific to each character. Every image has an additional random distortion.

    The images of a writer only depend on the seed and the number of the writer. So the first 100 of 3,400 writers are
    those of `make_glyphs(100)`. Equal calls give equal arrays if the versions of NumPy, Pillow and matplotlib are
    equal.

    Args:
        num_writers: number of writers, >= 1.
        seed: random seed, >= 0.
        progress: if True, report on stderr after each tenth of the writers.
    """
    atlas = _atlas()
    seeds = [np.random.SeedSequence(seed, spawn_key=(w,)) for w in range(num_writers)]
    rngs = [np.random.default_rng(s) for s in seeds]
    shape = (_SIZE_MEAN / _SIZE_STD) ** 2
    drawn = np.array([rng.gamma(shape, _SIZE_MEAN / shape) for rng in rngs])
    train = np.clip(np.rint(drawn), _SIZE_MIN, _SIZE_MAX).astype(np.int64)
    test = np.maximum(1, np.rint(train * _TEST_PER_TRAIN)).astype(np.int64)

    def empty(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        total, writers = int(sizes.sum()), np.arange(num_writers, dtype=np.int32)
        return np.empty((total, _SIDE, _SIDE), np.uint8), np.empty(total, np.uint8), np.repeat(writers, sizes)

    data = Glyphs(*empty(train), *empty(test))
    train_end, test_end = np.cumsum(train), np.cumsum(test)

    def fill(w: int) -> None:
        x, y = _write(rngs[w], int(train[w] + test[w]), atlas)
        rows = slice(train_end[w] - train[w], train_end[w])
        data.x[rows], data.y[rows] = x[: train[w]], y[: train[w]]
        rows = slice(test_end[w] - test[w], test_end[w])
        data.x_test[rows], data.y_test[rows] = x[train[w] :], y[train[w] :]

    # Threads are enough, because NumPy releases the interpreter lock most of the time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(fill, range(num_writers)), 1):
            if progress and done * 10 // num_writers > (done - 1) * 10 // num_writers:
                print(f"glyphs: {done} of {num_writers} writers", file=sys.stderr)
    return data


def _write(rng: np.random.Generator, n: int, atlas: _Atlas) -> tuple[np.ndarray, np.ndarray]:
    """Generates n images of one writer, uint8 [n, 28, 28], and their labels, uint8 [n]."""
    classes = len(CHARACTERS)
    # Normalised gamma samples are a Dirichlet sample. The constant keeps the sum of very small samples above zero.
    mix = rng.standard_gamma(_LABEL_CONCENTRATION * _prior()) + 1e-12
    y = rng.choice(classes, n, p=mix / mix.sum())

    # Most characters use the main font of the writer, some use other fonts.
    faces = len(_FACES)
    borrowed = rng.random(classes) < 0.35
    face = np.where(borrowed, rng.integers(faces, size=classes), rng.integers(faces))

    slant = np.clip(rng.normal(0.12, 0.22), -0.45, 0.55)
    turn = rng.normal(0.0, 0.07)
    scale = rng.uniform(0.85, 1.12)
    aspect = np.exp(np.clip(rng.normal(0.0, 0.14), -0.3, 0.3))
    place = np.clip(rng.normal(0.0, 0.6, 2), -1.2, 1.2)
    pen = rng.uniform(0.65, 1.7)  # half the stroke's width, pixels
    darkness = rng.uniform(165.0, 255.0)

    cos, sin = np.cos(turn), np.sin(turn)
    shape = np.array([[aspect, -slant], [0.0, 1.0 / aspect]]) * scale
    forward = np.array([[cos, -sin], [sin, cos]]) @ shape
    # A wide slanted letter would not fit in the image, so it is made smaller.
    reach = (atlas.extent[face, np.arange(classes)] @ np.abs(forward).T).max(axis=1)
    shrink = np.minimum(1.0, (11.8 - pen) / reach)  # [62]

    # The position in the atlas is a linear combination of functions of the pixel: 1, column, row, ...
    basis, spread = _basis()
    inverse = np.linalg.inv(forward) / shrink[:, None, None]  # [62, 2, 2]
    style = np.zeros((classes, 2, len(basis)))
    style[:, :, 0] = -inverse @ place
    style[:, :, 1:3] = inverse
    style[:, :, 3:5] = 0.5 * inverse  # bends strokes back that would leave the image
    style += spread * rng.standard_normal((2, len(basis)))
    style += 1.4 * spread * rng.standard_normal(style.shape)
    jitter = rng.standard_normal((n, 2, len(basis)), np.float32)
    warp = style[y].astype(np.float32) + 1.5 * spread * jitter
    warp *= _ZOOM
    warp[:, :, 0] += _CELLS / 2

    # One small product per image: for a large one BLAS would start threads, which compete with ours.
    cell = warp @ basis  # [n, 2, 784]
    np.clip(cell, 0, _CELLS - 1, out=cell)
    column, row = cell.astype(np.int32).swapaxes(0, 1)
    row *= _CELLS
    row += column
    row += ((face[y] * classes + y) * _CELLS**2).astype(np.int32)[:, None]
    size = (scale * shrink[y] / _STEPS).astype(np.float32)
    width = pen * np.exp(rng.normal(0.0, 0.08, n)) + 0.5  # the half pixel makes the edge soft
    ink = atlas.distance.take(row) * -size[:, None]
    ink += width.astype(np.float32)[:, None]
    np.clip(ink, 0.0, 1.0, out=ink)
    ink *= (darkness * rng.uniform(0.9, 1.0, n)).astype(np.float32)[:, None]
    return ink.astype(np.uint8).reshape(n, _SIDE, _SIDE), y.astype(np.uint8)


@functools.cache
def _prior() -> np.ndarray:
    """The expected frequency of each class over all writers, float64 [62]."""
    letters = np.array(_LETTER_WEIGHTS, np.float64)
    letters *= (1.0 - _DIGIT_SHARE) / letters.sum()
    return np.concatenate([np.full(10, _DIGIT_SHARE / 10), letters])


@functools.cache
def _basis() -> tuple[np.ndarray, np.ndarray]:
    """Basis functions over the image, float32 [20, 784], and the standard deviations of their random weights, [20]."""
    centred = np.arange(_SIDE) - (_SIDE - 1) / 2
    row, column = (a.ravel() for a in np.meshgrid(centred, centred, indexing="ij"))
    # The last two of these functions are only large near the border.
    functions = [np.ones_like(row), column, row, column * (column / 14) ** 6, row * (row / 14) ** 6]
    spread = [0.35, 0.03, 0.03, 0.0, 0.0]
    for i in range(4):
        for j in range(4):
            if i + j > 0:
                wave = np.cos(np.pi * i * (row / _SIDE + 0.5))
                functions.append(wave * np.cos(np.pi * j * (column / _SIDE + 0.5)))
                spread.append(0.8 / (i * i + j * j))  # in pixels; long waves have the largest amplitude
    return np.array(functions, np.float32), np.array(spread, np.float32)


@functools.cache
def _atlas() -> _Atlas:
    """The distance to the skeleton of every character of every font: about 10 MB, computed once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        distance, extent = zip(*pool.map(_typeface, _FACES), strict=True)
    return _Atlas(np.concatenate(distance).ravel(), np.stack(extent).astype(np.float32))


def _typeface(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The distances of one font, uint8 [62, cells, cells], and the half extents in pixels, [62, 2]."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont
    from scipy.ndimage import distance_transform_edt

    path = str(Path(get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")
    draft = ImageFont.truetype(path, 200)
    left, top, right, bottom = draft.getbbox("H")
    capital = bottom - top
    filled = np.zeros((len(CHARACTERS), _CELLS, _CELLS), np.uint8)
    extent = np.zeros((len(CHARACTERS), 2))
    for c, character in enumerate(CHARACTERS):
        left, top, right, bottom = draft.getbbox(character)
        longer = max(right - left, bottom - top)
        # Lower-case letters are enlarged, but remain smaller than capitals, which distinguishes o from O.
        factor = _BOX * _ZOOM * min(1.0, longer / capital) ** 0.3 / longer
        canvas = Image.new("L", (_CELLS, _CELLS))
        corner = [(_CELLS - factor * (a + b)) / 2 for a, b in ((left, right), (top, bottom))]
        font = ImageFont.truetype(path, 200 * factor)
        ImageDraw.Draw(canvas).text((corner[0], corner[1]), character, fill=255, font=font)
        filled[c] = np.asarray(canvas) > 127
        extent[c] = factor / _ZOOM / 2 * np.array([right - left, bottom - top])
    strokes = _skeletons(filled)
    distance = np.stack([distance_transform_edt(~stroke) for stroke in strokes])
    return np.minimum(distance * (_STEPS / _ZOOM), 255).astype(np.uint8), extent


def _skeletons(filled: np.ndarray) -> np.ndarray:
    """Thins binary shapes, uint8 [n, h, w], to strokes one cell wide, bool [n, h, w].

    Parallel thinning of Guo and Hall, "Parallel thinning with two-subiteration algorithms", CACM 32(3), 1989. Unlike
    the method of Zhang and Suen, it never removes a 2x2 block, so the dot of an i remains.
    """
    shape = np.pad(filled, ((0, 0), (1, 1), (1, 1)))
    changed = True
    while changed:
        changed = False
        for first in (True, False):
            n, ne, e, se, s, sw, w, nw = _neighbours(shape)
            crossings = (~n & (ne | e)) + (~e & (se | s)) + (~s & (sw | w)) + (~w & (nw | n))
            pairs = np.minimum(
                (nw | n) + (ne | e) + (se | s) + (sw | w),
                (n | ne) + (e | se) + (s | sw) + (w | nw),
            )
            keep = (n | ne | ~se) & e if first else (s | sw | ~nw) & w
            centre = shape[:, 1:-1, 1:-1]
            remove = (crossings == 1) & (pairs >= 2) & (pairs <= 3) & (keep == 0)
            remove &= centre == 1
            centre[remove] = 0
            changed |= bool(remove.any())
    return shape[:, 1:-1, 1:-1] == 1


def _neighbours(shape: np.ndarray) -> Iterator[np.ndarray]:
    """The eight neighbours of every cell, clockwise, starting with the upper one."""
    height, width = shape.shape[1] - 2, shape.shape[2] - 2
    for r, c in ((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)):
        yield shape[:, r : r + height, c : c + width]
