from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedjax_drift.data import datasets, dialogue, files, image_files, tfds
from fedjax_drift.data.datasets import load
from fedjax_drift.data.federated import integers_as_int32
from fedjax_drift.data.partition import by_writer, dirichlet, iid, long_tailed


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses temporary folders, so that no file of the user is touched."""
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.delenv("FEDJAX_DRIFT_DATA", raising=False)


@pytest.fixture
def real(request: pytest.FixtureRequest) -> str:
    if not REAL:
        pytest.skip("FEDJAX_DRIFT_DATA does not name the folder of the real data sets")
    return REAL


REAL = os.environ.get("FEDJAX_DRIFT_DATA", "")


def images(rows: int = 40, test_rows: int = 10, shape: tuple[int, ...] = (28, 28)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (rows, *shape), np.uint8),
        "y_train": np.arange(rows) % 10,
        "x_test": rng.integers(0, 256, (test_rows, *shape), np.uint8),
        "y_test": np.arange(test_rows) % 10,
    }


# ---------------------------------------------------------------- npz files


def test_examples_of_npz_files_reach_the_clients_unchanged(tmp_path: Path) -> None:
    arrays = images()
    np.savez(tmp_path / "mnist.npz", **arrays)
    data = load("mnist", iid(4, seed=1), str(tmp_path))
    assert data.x.dtype == np.uint8 and data.x.shape == (40, 28, 28, 1) and data.num_clients == 4
    rows = np.concatenate(iid(4, seed=1)(arrays["y_train"]))
    np.testing.assert_array_equal(data.x[..., 0], arrays["x_train"][rows])
    np.testing.assert_array_equal(data.y, arrays["y_train"][rows])
    np.testing.assert_allclose([data.mean, data.std], [[0.1307], [0.3081]])
    assert data.test_sizes is None
    assert load("mnist", iid(4), tmp_path, standardize=False).mean is None
    # Of four examples of each class, 4 / 4^(c/9) are kept. The test set keeps all.
    tail = load("mnist", long_tailed(iid(4), 4), tmp_path)
    assert np.bincount(tail.y).tolist() == [4, 3, 2, 2, 2, 1, 1, 1, 1, 1]
    np.testing.assert_array_equal(tail.x_test, data.x_test)
    np.testing.assert_array_equal(tail.y_test, arrays["y_test"])


def test_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, rows in (("given", 30), ("shared", 20), ("cache", 10)):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "mnist.npz", **images(rows))
    monkeypatch.setenv("FEDJAX_DRIFT_DATA", str(tmp_path / "shared"))
    sizes = [len(load("mnist", iid(2), folder).x) for folder in (tmp_path / "given", None)]
    monkeypatch.delenv("FEDJAX_DRIFT_DATA")
    assert [*sizes, len(load("mnist", iid(2)).x)] == [30, 20, 10]


def test_a_missing_file_is_reported_with_a_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"mnist\.npz in \S*elsewhere, .*numpy\.savez"):
        load("mnist", data_dir=tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"cifar10\.npz or .*cifar10_jpeg\.npz.*cifar10 is not prepared"
    ) as error:
        load("cifar10")
    assert "pass download=True, or run `fedjax-drift data download cifar10`, or download https://" in str(error.value)
    assert "set FEDJAX_DRIFT_DATA to the folder that has it, or pass data_dir" in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"femnist_writers\.npz"):
        load("femnist")


def _without(key: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in images().items() if k != key}


@pytest.mark.parametrize(
    "change, message",
    [
        (_without("y_test"), "add y_test"),
        (images() | {"y_train": np.arange(40)}, r"y_train must be in 0\.\.9, got 0\.\.39"),
        (images() | {"y_train": np.zeros(39, int)}, "as many rows as x_train, 40, got 39"),
        (images() | {"y_train": np.zeros(40)}, "y_train must be integer, got float64"),
        (images() | {"x_train": np.zeros((40, 28, 28), np.float32)}, "x_train must be uint8, got float32"),
        (images() | {"x_train": np.full((40, 28, 28), np.nan, np.float32)}, "x_train must be finite"),
        (images(shape=(32, 32, 3)), r"shape \[rows, 28, 28, 1\], got \[40, 32, 32, 3\]"),
        (images(test_rows=0), "x_test must have at least 1 row"),
        (images() | {"x_train": np.array([None] * 40)}, "Object arrays cannot be loaded"),
    ],
)
def test_arrays_that_do_not_fit_the_data_set_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "mnist.npz", **change)
    with pytest.raises(ValueError, match=message) as error:
        load("mnist", iid(2), tmp_path)
    assert str(tmp_path / "mnist.npz") in str(error.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, **images())
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes(b ^ 255 for b in whole[middle : middle + 64]) + whole[middle + 64 :]
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for content in (b"", b"hello", whole[:middle], whole[:-10], flipped, buffer.getvalue()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"mnist\.npz"):
            load("mnist", iid(2), tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").mkdir()
    with pytest.raises(ValueError, match="cannot read"):
        load("mnist", data_dir=tmp_path)


# ---------------------------------------------------------------- rules of individual data sets


def test_mnist_writers_must_match_the_images(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", **images(6))
    with pytest.raises(FileNotFoundError, match=r"mnist_writers\.npz"):
        load("mnist", by_writer(), tmp_path)
    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.array([7, 3, 7, 3, 3, 9], np.uint16))
    data = load("mnist", by_writer(), tmp_path)
    assert data.sizes.tolist() == [3, 2, 1] and data.y.tolist() == [1, 3, 4, 0, 2, 5] and data.test_sizes is None
    assert load("mnist", long_tailed(long_tailed(by_writer(), 9), 9), tmp_path).sizes.tolist() == [3, 2, 1]
    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.zeros(5, int))
    with pytest.raises(ValueError, match="as many rows as .* 6, got 5"):
        load("mnist", by_writer(), tmp_path)
    assert load("mnist", iid(2), tmp_path).num_clients == 2


def test_femnist_is_inverted_and_split_for_each_writer(tmp_path: Path) -> None:
    writer = np.array([4, 1, 4, 1, 4, 4, 4, 8, 4, 4, 4, 4, 4])
    x = np.zeros((13, 28, 28), np.uint8) + np.arange(13, dtype=np.uint8)[:, None, None]
    np.savez(tmp_path / "femnist_writers.npz", x=x, y=np.arange(13), writer=writer)
    data = load("femnist", data_dir=tmp_path)
    assert data.sizes.tolist() == [1, 8, 1] and data.test_sizes is not None
    assert data.test_sizes.tolist() == [1, 2, 0]  # 20 % of ten examples; a single example is for training
    assert data.x_test is not None and data.y_test is not None
    rows, test_rows = data.y, data.y_test
    assert sorted([*rows, *test_rows]) == list(range(13))
    np.testing.assert_array_equal(data.x[:, 0, 0, 0], 255 - rows)
    np.testing.assert_array_equal(data.x_test[:, 5, 5, 0], 255 - test_rows)
    assert writer[rows].tolist() == [1] + [4] * 8 + [8] and writer[test_rows].tolist() == [1, 4, 4]
    splits = {tuple(load("femnist", data_dir=tmp_path, seed=seed).y) for seed in (0, 0, 1, 2)}
    assert 2 <= len(splits) <= 3
    assert load("femnist", iid(3), tmp_path).test_sizes is None


@pytest.mark.parametrize(("kind", "error"), [("png", 0), ("webp", 0), ("jpeg", 2)])
def test_encoded_images_of_cifar10_are_decoded_again_only_if_their_content_changes(
    kind: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, file = pytest.importorskip("PIL.Image"), tmp_path / f"cifar10_{kind}.npz"

    def write(colours: list[int]) -> None:
        encoded = []
        for colour in colours:
            buffer = io.BytesIO()
            image.new("RGB", (32, 32), (colour, 0, 0)).save(buffer, kind, lossless=True, quality=95)
            encoded.append(np.frombuffer(buffer.getvalue(), np.uint8))
        offsets = np.cumsum([0, *map(len, encoded)])
        labels = np.arange(len(colours), dtype=np.uint8)
        np.savez(file, **{kind: np.concatenate(encoded)}, offsets=offsets, labels=labels, n_train=3)

    write([50, 100, 150, 200])
    first = load("cifar10", iid(1), tmp_path)
    assert first.x.shape == (3, 32, 32, 3) and first.x_test is not None and len(first.x_test) == 1
    np.testing.assert_allclose(first.x[first.y.argsort()].mean((1, 2))[:, 0], [50, 100, 150], atol=error)
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "decode_npz", None)  # must not be called again
        np.testing.assert_array_equal(load("cifar10", iid(1), tmp_path).x, first.x)
    write([10, 20, 30, 40])
    assert load("cifar10", iid(1), tmp_path).x.max() < 40
    with np.load(file) as z:
        broken = dict(z) | {kind: z[kind][::-1]}
    np.savez(file, **broken)
    with pytest.raises(ValueError, match="image 0 is not a readable image"):
        load("cifar10", iid(1), tmp_path)
    np.savez(tmp_path / "cifar10.npz", **images(20, 5, (32, 32, 3)))
    assert len(load("cifar10", iid(1), tmp_path).x) == 20


def test_glyphs_are_cached_and_generated_again_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from fedjax_drift.data import glyphs

    data = load("glyphs", num_writers=2)
    assert data.num_clients == 2 and data.x.shape[1:] == (28, 28, 1) and data.mean is None
    assert data.test_sizes is not None and data.test_sizes.min() >= 1
    kept = list((tmp_path / "cache").iterdir())
    assert len(kept) == 1 and kept[0].suffix == ".npz"
    with monkeypatch.context() as patch:
        patch.setattr(glyphs, "make_glyphs", None)  # must not be called again
        again = load("glyphs", dirichlet(3, 0.3), num_writers=2)
        digits = load("glyphs", num_writers=2, num_classes=10)
    assert again.num_clients == 3 and again.test_sizes is None and len(again.x) == len(data.x)
    np.testing.assert_array_equal(digits.label_counts(), data.label_counts()[:, :10])
    np.testing.assert_array_equal(digits.x_test, data.x_test[data.y_test < 10])
    assert digits.test_sizes.sum() == len(digits.x_test) and datasets.num_classes("glyphs", num_classes=10) == 10
    kept[0].write_bytes(kept[0].read_bytes()[:1000])
    with pytest.warns(UserWarning, match="again"):
        np.testing.assert_array_equal(load("glyphs", num_writers=2).x, data.x)


def test_a_cache_that_cannot_be_written_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "file"))
    spec = {"a": files.Column()}
    with pytest.warns(UserWarning) as warnings:
        assert files.cached("a.npz", spec, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert "FEDJAX_DRIFT_CACHE" in str(warnings[-1].message)


# ---------------------------------------------------------------- tensorflow-datasets


def test_prepared_tfds_data_are_read_without_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorflow_datasets = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")
    image = pytest.importorskip("PIL.Image")
    arrays = images()

    class Mnist(tensorflow_datasets.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tensorflow_datasets.core.Version("3.0.1")

        def _info(self):
            features = {
                "image": tensorflow_datasets.features.Image(shape=(28, 28, 1)),
                "label": tensorflow_datasets.features.ClassLabel(num_classes=10),
            }
            return tensorflow_datasets.core.DatasetInfo(
                builder=self, features=tensorflow_datasets.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in ("train", "test")}

        def _generate_examples(self, split):
            for i, (x, y) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
                yield i, {"image": image.fromarray(x), "label": int(y)}

    Mnist(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()
    assert {row["name"]: row["location"] for row in datasets.describe()}["mnist"] == "tensorflow-datasets"
    data = load("mnist", iid(1))
    shuffled, wanted = (sorted(zip(map(bytes, x), y, strict=True)) for x, y in (
        (data.x, data.y.tolist()), (arrays["x_train"], arrays["y_train"].tolist())
    ))  # fmt: skip
    assert shuffled == wanted
    with monkeypatch.context() as patch:
        patch.setattr(tfds, "read", None)  # must not be called again: the cache has an npz file
        np.testing.assert_array_equal(load("mnist", iid(1)).x, data.x)
    with pytest.raises(FileNotFoundError, match="official order"):
        load("mnist", by_writer())

    info = next((tmp_path / "tfds").glob("mnist/*/dataset_info.json"))
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match="array_record format, got tfrecord"):
        tfds.read("mnist")


# ---------------------------------------------------------------- synthetic


def labels_fit_one_model(x: np.ndarray, y: np.ndarray, classes: int) -> float:
    """Returns the training accuracy of a linear model, fitted to one-hot labels by least squares."""
    design = np.c_[x, np.ones(len(x))]
    weights = np.linalg.lstsq(design, np.eye(classes)[y], rcond=None)[0]
    return float(((design @ weights).argmax(1) == y).mean())


def test_synthetic_data_of_feddyn() -> None:
    data = datasets.synthetic()
    assert data.num_clients == 20 and (data.sizes == 200).all() and data.x.dtype == np.float32
    assert data.x.shape == (4000, 30) and data.y.max() == 4 and data.x_test is not None
    np.testing.assert_array_equal(data.x_test, data.x)
    np.testing.assert_allclose(data.x.var(0), np.arange(1, 31) ** -1.2, rtol=0.15)
    pooled = [labels_fit_one_model(d.x, d.y, 5) for d in (data, datasets.synthetic(alpha=1.0))]
    assert pooled[0] > 0.7 > pooled[1]  # one model for all with alpha = 0, one per client with alpha = 1
    centres = [
        np.stack([d.client(i)[0].mean(0) for i in range(20)]).std()
        for d in (data, datasets.synthetic(beta=1.0), datasets.synthetic(beta=1.0, iid_data=True))
    ]
    assert centres[0] < 0.1 and 1.0 < centres[1] < 2.0 and centres[2] < 0.1
    assert not np.array_equal(datasets.synthetic(seed=1).x, data.x)
    np.testing.assert_array_equal(load("synthetic").x, data.x)


def test_synthetic_data_of_fedprox() -> None:
    data = datasets.synthetic(1.0, 1.0, variant="fedprox")
    assert data.num_clients == 30 and data.x.shape[1:] == (60,) and data.y.max() == 9
    assert data.test_sizes is not None
    total = data.sizes + data.test_sizes
    assert total.min() >= 50 and total.max() > 3 * np.median(total)
    np.testing.assert_array_equal(data.sizes, (0.9 * total).astype(int))
    shared = datasets.synthetic(variant="fedprox", iid_sol=True, iid_data=True, num_rows=100)
    own = datasets.synthetic(variant="fedprox", iid_data=True, num_rows=100)  # one model per client despite alpha = 0
    assert labels_fit_one_model(shared.x, shared.y, 10) > labels_fit_one_model(own.x, own.y, 10) + 0.2
    moved = datasets.synthetic(variant="fedprox", num_rows=100)  # one mean per client despite beta = 0
    assert np.stack([moved.client(i)[0].mean(0) for i in range(30)]).std() > 0.8
    pooled = load("synthetic", iid(3), variant="fedprox", num_rows=100)
    assert pooled.num_clients == 3 and pooled.test_sizes is None and len(pooled.x) == 2700


# ---------------------------------------------------------------- the arguments of load


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("minst",), {}, "did you mean 'mnist'"),
        (("glyphs",), {"num_writer": 2}, "options of glyphs are num_writers, num_classes: did you mean 'num_writers'"),
        (("glyphs",), {"num_classes": 63}, "num_classes must be in 1..62, got 63"),
        (("mnist",), {"num_writers": 2}, "mnist has no options"),
        (("mnist", 100), {}, "partition must be a partitioner"),
        (("synthetic",), {"beta": float("nan")}, "beta must be a finite number >= 0"),
        (("synthetic",), {"variant": "fedpox"}, "did you mean 'fedprox'"),
        (("synthetic",), {"num_rows": 1}, "num_rows must be an integer >= 2, got 1"),
    ],
)
def test_bad_arguments(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(*arguments, **options)


def test_describe_lists_the_available_data_sets(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", **images())
    rows = {row["name"]: row for row in datasets.describe(tmp_path)}
    assert tuple(rows) == datasets.NAMES
    assert rows["mnist"]["location"] == str(tmp_path / "mnist.npz") and rows["mnist"]["available"]
    assert rows["cifar10"]["location"] == "no" and not rows["cifar10"]["available"]
    assert rows["glyphs"]["available"] and rows["glyphs"]["classes"] == 62
    assert "data download cifar10" in rows["cifar10"]["instructions"]


@pytest.mark.parametrize(
    ("name", "paths", "options"),
    [
        ("movielens", ["ml-1m/ratings.dat", "ml-1m/users.dat"], {}),
        ("movielens", ["movielens_latest_small.npz"], {"size": "latest-small"}),
        ("agnews", ["ag_news_csv/train.csv", "ag_news_csv/test.csv"], {}),
        ("emnist", [f"emnist-digits-{part}-ubyte.gz" for part in (
            "train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")], {"split": "digits"}),
        ("cifar10", [f"cifar-10-batches-py/{part}" for part in (
            *(f"data_batch_{i}" for i in range(1, 6)), "test_batch")], {}),
        ("cifar100", ["cifar-100-python/train", "cifar-100-python/test"], {}),
    ],
)  # fmt: skip
def test_data_are_located_if_no_file_is_missing(tmp_path: Path, name: str, paths: list[str], options: dict) -> None:
    """Without one of the files, `load` fails because it is missing, and the data set is not present."""
    for missing in paths:
        folder = tmp_path / str(paths.index(missing))
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text("nonsense")
        assert datasets.locate(name, folder, **options) != "no"
        with pytest.raises(ValueError):  # the files are there, and damaged
            load(name, data_dir=folder, **options)
        if options and name == "movielens":
            assert datasets.locate(name, folder) == "no"  # other files belong to the default size
            with pytest.raises(FileNotFoundError, match="size='latest-small'"):
                load(name, data_dir=folder)
        (folder / missing).unlink()
        assert datasets.locate(name, folder, **options) == "no"


# ---------------------------------------------------------------- the real files


@pytest.mark.parametrize(
    "name, rows, test_rows", [("mnist", 60_000, 10_000), ("fashion_mnist", 60_000, 10_000), ("femnist", None, None)]
)
def test_real_files(real: str, name: str, rows: int | None, test_rows: int | None) -> None:
    data = load(name, data_dir=real)
    assert data.x_test is not None
    if rows is not None:
        assert (len(data.x), len(data.x_test)) == (rows, test_rows)
        np.testing.assert_allclose([data.x.mean() / 255], data.mean, atol=1e-4)
        np.testing.assert_allclose([data.x.std() / 255], data.std, atol=1e-4)
    else:
        assert data.test_sizes is not None and data.test_sizes.min() >= 1
        assert data.x.mean() < 100  # 255 is ink, and most pixels are background


def test_real_mnist_writers(real: str) -> None:
    data = load("mnist", by_writer(), real)
    assert data.num_clients == 539 and data.sizes.min() == 19 and data.sizes.max() == 131


# ---------------------------------------------------------------- dialogue


def test_dialogue_has_known_words_and_next_characters_as_labels() -> None:
    data = load("dialogue", num_clients=3, num_rows=20, length=40, seed=5)
    assert data.x.shape == data.y.shape == (54, 40) and (data.test_sizes == 2).all()
    np.testing.assert_array_equal(data.x[:, 1:], data.y[:, :-1])
    counts = data.label_counts()
    assert counts.shape[0] == 3 and counts[1, 1] == (data.client(1)[1] == 1).sum() and (counts.sum(1) == 18 * 40).all()
    assert data.x.min() == 1 and data.x.max() <= 27
    text = "".join(dialogue.CHARACTERS[i - 1] for i in data.x[0])
    assert set(text.split()[1:-1]) <= set(dialogue.WORDS) and len(dialogue.WORDS) == len(set(dialogue.WORDS)) == 88
    np.testing.assert_array_equal(load("dialogue", num_clients=4, num_rows=20, length=40, seed=5).x[:54], data.x)
    assert not np.array_equal(load("dialogue", num_clients=3, num_rows=20, length=40, seed=6).x, data.x)


def test_dialogue_entropy_matches_the_generated_text() -> None:
    chain = next(dialogue.speakers(1, 1.0, 5))
    (ids,) = dialogue.passages(chain, 1, 60_000, np.random.default_rng(0))
    words = "".join(dialogue.CHARACTERS[i - 1] for i in ids).split()[1:-1]
    numbers = [dialogue.WORDS.index(word) for word in words]
    surprise = -np.log(chain[numbers[:-1], numbers[1:]]).sum()
    rate = datasets.dialogue_entropy(1, 1.0, 5)[0]
    np.testing.assert_allclose(surprise / len(" ".join(words[1:]) + " "), rate, rtol=0.02)
    assert datasets.dialogue_entropy().mean() == pytest.approx(0.562, abs=5e-4)
    assert rate < datasets.dialogue_entropy(1, 0.0, 5)[0]


@pytest.mark.parametrize("label", [2**31, 2**40, 2**63, -(2**40)])
def test_labels_that_do_not_fit_an_int32_are_refused(label: int) -> None:
    y = np.array([0, label], np.uint64 if label > 0 else np.int64)
    with pytest.raises(ValueError, match=r"labels must be smaller than 2\*\*31, got"):
        integers_as_int32(y)
    assert integers_as_int32(y[:1]).dtype == np.int32
