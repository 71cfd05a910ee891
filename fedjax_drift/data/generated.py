"""The generated data sets: synthetic linear classification, characters and text. They need no files."""

from __future__ import annotations

import numpy as np

from fedjax_drift.data import dialogue as text
from fedjax_drift.data import federated_files, files
from fedjax_drift.data.sources import DataDir, Samples, of_classes, pair

GLYPHS_VERSION = 1  # a part of the names of cached files; increase it if make_glyphs generates other images
VARIANTS = {"feddyn": (30, 5, 20), "fedprox": (60, 10, 30)}  # dimension, classes, default number of clients


def synthetic(
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
    """Synthetic linear classification. See `datasets.synthetic`."""
    d, classes, default_clients = VARIANTS[variant]
    n = default_clients if num_clients is None else num_clients
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
    # The examples of a client are independent, so its last ones are a random test set.
    test_size = np.maximum(1, sizes - (0.9 * sizes).astype(np.int64))
    is_test = np.arange(len(x)) >= (np.cumsum(sizes) - test_size)[writer]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])


def glyphs(
    data_dir: DataDir, seed: int, natural: bool, *, num_writers: int = 3400, num_classes: int | None = None
) -> Samples:
    """Generated characters in thousands of handwriting styles, a built-in replacement for FEMNIST.

    62 classes in the order of LEAF, uint8 [28, 28, 1], 255 = ink, no mean and std. There are `num_writers` >= 1
    clients with 19 to 460 training examples each. Every client has its own test examples. The images are generated on
    the first use (one or two minutes for 3,400 writers) and kept in the cache. See
    `fedjax_drift.data.glyphs.make_glyphs`.

    num_classes: use only the first num_classes classes, in 1..62. 10 gives the digits, and 36 the digits and capitals.
    Writers without a training example of these classes are left out. Default: all.
    """

    def generate() -> files.Arrays:
        from fedjax_drift.data.glyphs import make_glyphs  # needs matplotlib and Pillow

        return make_glyphs(num_writers, seed, progress=num_writers >= 500)._asdict()

    spec = federated_files.writers_spec(("", "_test"), num_writers)
    a = files.cached(f"glyphs_{num_writers}_{seed}_v{GLYPHS_VERSION}.npz", spec, generate)
    train, test = pair(a["x"], a["y"]), pair(a["x_test"], a["y_test"])
    writer, test_writer = a["writer"], a["writer_test"]
    if num_classes is None:
        return Samples(train, test, writer, test_writer)
    used = train[1] < num_classes
    test_used = (test[1] < num_classes) & np.isin(test_writer, writer[used])
    train = of_classes(train, used, "training", num_classes)
    test = of_classes(test, test_used, "test", num_classes)
    return Samples(train, test, writer[used], test_writer[test_used])


def dialogue(
    data_dir: DataDir,
    seed: int,
    natural: bool,
    *,
    num_clients: int = 100,
    num_rows: int = 50,
    length: int = 64,
    alpha: float = 1.0,
) -> Samples:
    """Generated text of `num_clients` speakers, for language models such as `fd.models.decoder`: 28 character ids.

    An example is a passage of `length` characters, int32 [length]. Its labels are the characters that follow each of
    them, int32 [length]. The ids are 1 for a space and 2..27 for a..z. The id 0 does not occur. A speaker has
    `num_rows` >= 2 passages, of which 10 %, at least one, are the speaker's test examples.

    Speakers use the same 88 words, and order them by Markov chains. The log-odds that word j follows word i are
    2 G_ij + alpha S_ij with standard normal entries, where G is the same for all speakers and S belongs to one.
    alpha >= 0 makes speakers differ. `fd.datasets.dialogue_entropy` gives the entropy rates, which no model's loss can
    be below.
    """
    rng = np.random.default_rng([seed, 1])
    said = [text.passages(chain, num_rows, length + 1, rng) for chain in text.speakers(num_clients, alpha, seed)]
    rows = np.concatenate(said)
    writer = np.repeat(np.arange(num_clients, dtype=np.int32), num_rows)
    is_test = np.arange(len(rows)) % num_rows < max(1, num_rows // 10)
    x, y = rows[:, :-1], rows[:, 1:]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])
