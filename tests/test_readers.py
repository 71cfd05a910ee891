"""Tests of the readers of other libraries' data sets: Hugging Face, Flower, pandas, PyTorch."""

from __future__ import annotations

import datetime
import decimal
import io

import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.data import tables

rng = np.random.default_rng(0)
GREY = rng.integers(0, 256, (30, 5, 4), np.uint8)
WHO = np.array(["bob", "ann", "cid"] * 10)
LABELS = rng.integers(0, 3, 30)
NUMBERS = rng.normal(size=(30, 2)).astype(np.float32)
TOKENS = [list(range(1, 2 + k % 4)) for k in range(30)]  # 1 to 4 tokens


@pytest.fixture
def hf():
    datasets = pytest.importorskip("datasets", reason="from_huggingface needs datasets")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def images(hf):
    """A data set of 30 grey images by three writers."""
    from PIL import Image

    columns = {"image": [Image.fromarray(x) for x in GREY], "label": LABELS, "writer": WHO, "tokens": TOKENS}
    features = {
        "image": hf.Image(),
        "label": hf.ClassLabel(num_classes=3),
        "writer": hf.Value("string"),
        "tokens": hf.List(hf.Value("int32")),
    }
    return hf.Dataset.from_dict(columns, hf.Features(features))


def same(data: fd.FederatedData, x: np.ndarray, y: np.ndarray, rows: list[np.ndarray]) -> None:
    """Asserts that client i has the examples rows[i] of x and y, in this order."""
    assert data.sizes.tolist() == [len(part) for part in rows]
    np.testing.assert_array_equal(data.x, x[np.concatenate(rows)])
    np.testing.assert_array_equal(data.y, y[np.concatenate(rows)])
    assert data.x.dtype == x.dtype


def rows_of(who: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(who == name) for name in np.unique(who)]


@pytest.mark.parametrize("rows", [None, np.array([7, 2, 2, 9, 0])])
@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 8]])
def test_gather_joins_blocks(rows, cuts) -> None:
    x = np.arange(20).reshape(10, 2)
    blocks = np.split(x, cuts)
    joined = tables.gather(iter(blocks), 10, rows, "x")
    np.testing.assert_array_equal(joined, x if rows is None else x[rows])
    assert np.shares_memory(joined, x) == (rows is None and not cuts)


def test_huggingface_images_are_grouped_by_writer(images, hf) -> None:
    splits = hf.DatasetDict(train=images, test=images.select([0, 4, 3]))
    data = fd.datasets.from_huggingface(splits, x="image", y="label", client="writer", name="faces")
    same(data, GREY[..., None], LABELS, rows_of(WHO))
    assert (data.client_names, data.name) == (("ann", "bob", "cid"), "faces")
    assert data.test_sizes.tolist() == [1, 2, 0] and data.y_test.tolist() == LABELS[[4, 0, 3]].tolist()
    pooled = fd.data.from_huggingface(splits, "image", "label", "writer", client_tests=False)
    assert pooled.test_sizes is None and pooled.y_test.tolist() == LABELS[[0, 4, 3]].tolist()
    others = images.select([0]).map(lambda row: {"writer": "eve"})
    assert fd.data.from_huggingface(images, "image", "label", "writer", test=others).test_sizes is None
    with pytest.raises(ValueError, match="are all training clients, got client 'eve'"):
        fd.data.from_huggingface(images, "image", "label", "writer", test=others, client_tests=True)
    colour = images.cast_column("image", hf.Image(mode="RGB")).shuffle(seed=1)  # with an indices mapping
    data = fd.data.from_huggingface(colour, "image", "label", partition=fd.partition.iid(4))
    assert data.x.shape == (30, 5, 4, 3) and sorted(data.x[:, 0, 0, 2]) == sorted(GREY[:, 0, 0])


def test_huggingface_numbers_and_lists_are_partitioned(hf) -> None:
    partition = fd.partition.dirichlet(4, alpha=0.5, seed=1)
    parts = partition(LABELS)
    nested = rng.normal(size=(30, 3, 2))
    columns = {"a": NUMBERS[:, 0], "b": NUMBERS[:, 1], "nested": nested.tolist(), "label": LABELS, "id": LABELS + 5}
    whole = hf.Dataset.from_dict(columns)
    pieces = hf.concatenate_datasets([whole.select(range(9)), whole.select(range(9, 30))])  # with two Arrow chunks
    for dataset in (whole, pieces, pieces.select(list(range(30))[::-1]).select(list(range(30))[::-1])):
        read = {"y": "label", "partition": partition}
        same(fd.data.from_huggingface(dataset, x=["a", "b"], **read), NUMBERS, LABELS, parts)
        same(fd.data.from_huggingface(dataset, x="nested", **read), nested.astype("f4"), LABELS, parts)
        ids = fd.data.from_huggingface(dataset, x="id", dtype="int32", **read)
        same(ids, (LABELS + 5).astype("i4")[:, None], LABELS, parts)
    assert fd.data.from_huggingface(whole, "nested", "a", partition=fd.partition.iid(3)).y.dtype == np.float32


def test_huggingface_token_lists_are_truncated_and_padded(images) -> None:
    expected = np.array([(tokens + [0, 0, 0])[:3] for tokens in TOKENS], np.int32)
    read = {"length": 3, "truncate": True, "partition": fd.partition.iid(2)}
    data = fd.data.from_huggingface(images, x="tokens", y="tokens", **read)
    same(data, expected, expected, fd.partition.iid(2)(LABELS))
    padded = fd.data.from_huggingface(images, "tokens", "label", length=6, padding=-1, partition=fd.partition.iid(2))
    assert sorted((padded.x >= 0).sum(1)) == sorted(map(len, TOKENS)) and (padded.x[:, 4:] == -1).all()


def test_huggingface_files_stay_memory_mapped(hf, tmp_path) -> None:
    columns = {"x": rng.normal(size=(30, 3, 2)).astype("f4"), "y": LABELS, "client": np.sort(WHO)}
    dataset = hf.Dataset.from_dict(columns).cast_column("x", hf.Array2D((3, 2), "float32"))
    dataset.save_to_disk(tmp_path)
    dataset = hf.load_from_disk(tmp_path)
    data = fd.data.from_huggingface(dataset, "x", "y", "client")
    same(data, columns["x"], LABELS, rows_of(np.sort(WHO)))
    file = dataset.data.column("x").chunk(0).storage.flatten().flatten().to_numpy()
    assert np.shares_memory(data.x, file) and not file.flags.owndata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "tokens"}, "column 'tokens' must have lists of one length, got 1 to 4: pass length="),
        ({"x": "tokens", "length": 3}, "column 'tokens' must have lists of at most length=3 values, got 4"),
        ({"x": ["unknown", "tokens"], "length": 4}, "column 'tokens' must have one number per example to be stacked"),
        ({"x": "writer"}, "column 'writer' must have numbers, or lists of numbers, got string: convert it"),
        ({"y": "writer"}, "got string: number the classes with dataset.class_encode_column('writer')"),
        ({"x": "marks"}, "'?': correct the text, or make it missing with dataset.map(lambda row: {'marks': None if"),
        ({"x": "digits"}, "got string: dataset.cast_column('digits', datasets.Value('float32'))"),
        ({"y": "grades"}, "got string: dataset.cast_column('grades', datasets.Value('int64'))"),
        ({"x": "days"}, "got date32[day]: dataset.cast_column('days', datasets.Value('int32'))"),
        ({"x": "prices"}, "got decimal128(9, 2): dataset.cast_column('prices', datasets.Value('float64'))"),
        ({"y": "lable"}, "got 'lable': did you mean 'label'?"),
        ({"y": "tokens", "length": 4}, "partition must be fd.partition.iid for labels that are not one integer"),
        ({"client": "writer"}, "pass either client= or partition= to say what the clients are, got both"),
        ({"client": "image", "partition": None}, "column 'image' must have integers or strings as clients, got struct"),
        ({"partition": fd.partition.dirichlet}, "partition must be a partitioner such as"),
        (
            {"x": "rgba"},
            "column 'rgba': the image in row 0 must be grey or RGB (mode 'L' or 'RGB'), got mode 'RGBA': convert it "
            "with dataset.cast_column('rgba', datasets.Image(mode='RGB'))",
        ),
        (
            {"x": "sizes"},
            "column 'sizes': the image in row 1 must be like the first example, uint8[2, 2, 1], got uint8[3, 2, 1]: "
            "resize images",
        ),
        (
            {"x": "mixed"},
            "column 'mixed': the image in row 1 must be like the first example, uint8[2, 2, 1], got uint8[2, 2, 3]: "
            "grey images and images in colour must be converted to one mode, with dataset.cast_column('mixed', ",
        ),
        (
            {"x": "deep"},
            "column 'deep': the image in row 0 must have 8 bits per channel, got mode 'I;16': scale the pixels to "
            "0..255 with dataset.map, such as PIL.Image.fromarray(numpy.uint8(numpy.asarray(image) // 257))",
        ),
        ({"x": "clipped"}, "column 'clipped': the image in row 0 must have 8 bits per channel, got mode 'I;16'"),
        ({"x": "broken"}, "column 'broken': the image in row 3 can't be read (cannot identify image file"),
        ({"x": "cut"}, "column 'cut': the image in row 4 can't be read (image file is truncated"),
        ({"x": "absent"}, "column 'absent': the image in row 5 can't be read ([Errno 2] No such file"),
        ({"x": "holes"}, "column 'holes' must have no missing values, got 1: fill the missing values"),
        ({"y": "unknown"}, "column 'unknown' must have classes >= 0, got -1, which stands for an unknown label"),
        ({"x": "tokens", "length": 5, "padding": -(2**31) - 1}, "padding must be an integer"),
        (
            {"x": "bytes", "length": 5, "padding": -1},
            "padding must be in the range of uint8, the dtype of column 'bytes'",
        ),
        ({"x": "halves", "length": 5, "padding": 70_000}, "padding must be in the range of float16, the dtype of"),
        ({"x": "big", "dtype": "int32"}, "2147483647 for int32, got 4294967296 in row 0: pass another dtype"),
        ({"x": ["big", "unknown"]}, "column 'big' must be integers that float32 represents exactly"),
        ({"x": "unknown", "dtype": "uint8"}, "column 'unknown' must be whole numbers in 0..255 for uint8, got -1"),
        ({"x": "bytes", "length": 5, "dtype": "int8"}, "column 'bytes' must be whole numbers in -128..127 for int8"),
        (
            {"x": "huge"},
            "column 'huge' must be numbers up to 3.4e+38 for float32, got 1e+300 in row 9: scale the numbers",
        ),
        ({"y": "huge", "partition": fd.partition.iid(2)}, "column 'huge' must be numbers up to 3.4e+38 for float32"),
        ({"x": "nan"}, "column 'nan' must have finite numbers, got NaN or infinity"),
        ({"x": "nans"}, "x='nans', y='label': training data: inputs must be finite, got NaN or infinity in"),
        ({"x": "tokens", "length": 4, "dtype": "O"}, "dtype must be an integer or a float"),
    ],
)
def test_huggingface_errors_name_the_column(images, hf, options, message) -> None:
    from PIL import Image

    def encoded(image: Image.Image, size: int | None = None) -> dict:
        file = io.BytesIO()
        image.save(file, "PNG")
        return {"bytes": file.getvalue()[:size], "path": None}

    black, deep = encoded(Image.new("L", (2, 2))), encoded(Image.fromarray(np.full((2, 2), 40_000, np.uint16)))
    large = encoded(Image.fromarray(rng.integers(0, 256, (64, 64), np.uint8)), 2000)
    odd = {
        "rgba": [Image.new("RGBA", (2, 2))] * 30,
        "mixed": [Image.new("RGB" if k % 2 else "L", (2, 2)) for k in range(30)],
        "deep": [deep] * 30,
        "clipped": [deep] * 30,
        "broken": [black] * 3 + [{"bytes": b"no image", "path": None}] * 27,
        "cut": [black] * 4 + [large] * 26,
        "absent": [black] * 5 + [{"bytes": None, "path": "no/such.png"}] * 25,
        "marks": ["1", "?", "-2.5e3"] * 10,
        "digits": ["0.5", "1", " 2"] * 10,
        "grades": ["3", "1", "2"] * 10,
        "days": [datetime.date(2026, 1, 1)] * 30,
        "prices": [decimal.Decimal("9.99")] * 30,
        "halves": [[0.5, 1.0]] * 30,
        "big": [2**32 + k for k in range(30)],
        "huge": [1.0] * 9 + [1e300] * 21,
        "sizes": [Image.new("L", (2, 2 + k % 2)) for k in range(30)],
        "holes": [None, *range(29)],
        "unknown": [-1] * 30,
        "nan": [float("nan")] * 30,
        "nans": [[1.0, float("nan")]] * 30,
        "bytes": [[1, 200]] * 30,
    }
    pictures = ("rgba", "sizes", "mixed", "deep", "broken", "cut", "absent")
    features = dict.fromkeys(pictures, hf.Image()) | {"unknown": hf.ClassLabel(num_classes=3)}
    features |= {"clipped": hf.Image(mode="RGB"), "halves": hf.List(hf.Value("float16"))}
    features |= {"days": hf.Value("date32"), "prices": hf.Value("decimal128(9, 2)")}
    features |= dict.fromkeys(("marks", "digits", "grades"), hf.Value("string"))
    features |= {"big": hf.Value("int64"), "huge": hf.Value("float64")}
    features |= {"nan": hf.Value("float32"), "nans": hf.List(hf.Value("float32")), "holes": hf.Value("int64")}
    others = hf.Dataset.from_dict(odd, hf.Features(features | {"bytes": hf.List(hf.Value("uint8"))}))
    dataset = hf.concatenate_datasets([images, others], axis=1)
    partition = fd.partition.dirichlet(2, 1.0)
    with pytest.raises(ValueError) as error:
        fd.data.from_huggingface(dataset, **({"x": "image", "y": "label", "partition": partition} | options))
    assert message in str(error.value)


def test_unsupported_huggingface_data_sets_are_refused(images, hf) -> None:
    transformed = images.with_transform(lambda rows: rows)
    for dataset, message in (
        (images.to_iterable_dataset(), "got an IterableDataset: load it without streaming=True"),
        (transformed, "dataset must have no transform"),
        (images.select([]), "dataset must have at least 1 example"),
        (hf.DatasetDict(validation=images), "split must be one of 'validation', got 'train'"),
        ([1], "dataset must be a datasets.Dataset, got a list"),
    ):
        with pytest.raises(ValueError) as error:
            fd.data.from_huggingface(dataset, "image", "label", "writer")
        assert message in str(error.value)


@pytest.fixture
def flwr(hf):
    return pytest.importorskip("flwr_datasets", reason="from_flwr needs flwr-datasets")


def test_flwr_partitions_become_clients(images, flwr) -> None:
    p = flwr.partitioner
    for partitioner in (
        p.IidPartitioner(4),
        p.DirichletPartitioner(3, "label", alpha=0.5, min_partition_size=2),
        p.LinearPartitioner(5),
        p.NaturalIdPartitioner("writer"),
        p.InnerDirichletPartitioner([20, 4, 6], "label", alpha=0.5),
    ):
        partitioner.dataset = images
        data = fd.datasets.from_flwr(partitioner, x="image", y="label", test=images.select(range(7)))
        assert data.num_clients == partitioner.num_partitions
        for i in range(data.num_clients):
            part = partitioner.load_partition(i)
            x, y = data.client(i)
            np.testing.assert_array_equal(x[..., 0], np.stack([np.asarray(image) for image in part["image"]]))
            np.testing.assert_array_equal(y, part["label"])
        assert len(data.x_test) == 7 and data.test_sizes is None
        is_natural = isinstance(partitioner, p.NaturalIdPartitioner)
        assert data.client_names == (("ann", "bob", "cid") if is_natural else None)


def test_flwr_federated_datasets_are_read_with_their_test_split(images, flwr, hf, tmp_path) -> None:
    for split, rows in (("train", range(20)), ("test", range(20, 30)), ("more", range(4))):
        images.remove_columns("image").select(rows).to_parquet(tmp_path / f"{split}.parquet")
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test", "more")}
    load = {"dataset": "parquet", "data_files": files, "cache_dir": str(tmp_path), "shuffle": False}
    read = {"x": "tokens", "y": "label", "length": 4}
    pooled = flwr.FederatedDataset(partitioners={"train": 4}, **load)
    data = fd.data.from_flwr(pooled, **read)
    assert data.sizes.tolist() == [5] * 4 and data.test_sizes is None
    assert data.y.tolist() == LABELS[:20].tolist() and data.y_test.tolist() == LABELS[20:].tolist()
    assert len(fd.data.from_flwr(pooled, test="more", **read).x_test) == 4
    each = flwr.FederatedDataset(partitioners={"train": 4, "test": 4}, **load)
    assert fd.data.from_flwr(each, **read).test_sizes.tolist() == [3, 3, 2, 2]
    for options, message in (
        ({"split": "trian"}, "split must be one of 'train', got 'trian'"),
        ({"test": "tset"}, "test must be a split of the data set, got 'tset'"),
    ):
        with pytest.raises(ValueError, match=message):
            fd.data.from_flwr(pooled, **read, **options)
    with pytest.raises(ValueError, match="a Partitioner whose dataset is set, got a IidPartitioner|got <"):
        fd.data.from_flwr(flwr.partitioner.IidPartitioner(2), **read)


@pytest.fixture
def pd():
    return pytest.importorskip("pandas", reason="from_pandas needs pandas")


@pytest.fixture
def frame(pd):
    numbers = {"a": NUMBERS[:, 0].astype("f8"), "b": NUMBERS[:, 1], "flag": LABELS > 1, "label": LABELS}
    frame = pd.DataFrame(numbers | {"who": WHO, "id": (WHO == "ann") + 7, "kind": pd.Categorical(WHO)})
    return frame.assign(maybe=pd.array([None, *range(29)], dtype="Int64"), sure=pd.array(range(30), dtype="Int64"))


def test_pandas_columns_become_examples_and_clients(pd, frame) -> None:
    data = fd.datasets.from_pandas(frame, x=["a", "b"], y="label", client="who", test=frame[:4])
    same(data, NUMBERS, LABELS, rows_of(WHO))
    assert data.client_names == ("ann", "bob", "cid") and data.test_sizes.tolist() == [1, 2, 1]
    pooled = fd.data.from_pandas(frame, "a", "label", "id", test=frame[["a", "label"]])
    assert pooled.client_names == ("7", "8") and pooled.sizes.tolist() == [20, 10] and pooled.test_sizes is None
    same(fd.data.from_pandas(frame, ["a", "b"], "label", "kind"), NUMBERS, LABELS, rows_of(WHO))
    partition = fd.partition.shards(3, per_client=1)
    twice = frame.assign(copy=frame["flag"])
    mixed = fd.data.from_pandas(twice, x=["copy", "sure"], y="flag", partition=partition, dtype="int32")
    same(mixed, np.stack([LABELS > 1, np.arange(30)], 1).astype("i4"), LABELS > 1, partition((LABELS > 1) + 0))
    assert fd.data.from_pandas(frame, "a", "b", partition=fd.partition.iid(2)).y.dtype == np.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "maybe"}, "column 'maybe' must have no missing values, got 1, the first in row 0"),
        ({"x": ["a", "kind"]}, "column 'kind' must be numeric, got categories: use their numbers"),
        ({"y": "who"}, "number its values with pandas.factorize(frame['who'])[0]"),
        ({"client": "a"}, "column 'a' must have integers or strings as clients, got floating"),
        ({"client": None}, "pass either client= or partition= to say what the clients are, got neither"),
        ({"x": ["a", "c"]}, "x must be one of the columns a, b, "),
        ({"x": "feature_2"}, " and 20 more, got 'feature_2': did you mean 'feature_29'?"),
        ({"x": "marks"}, "column 'marks' must be numeric, got numbers and '?' in row 3: correct the text, or make"),
        ({"x": "digits"}, "got numbers as object: use frame['digits'].astype(float)"),
        ({"x": "dates"}, "got dates: use the time since the first, (frame['dates'] - frame['dates'].min())"),
        ({"x": "months"}, "got periods: use their start, frame['months'].dt.start_time"),
        ({"x": "spans"}, "got durations: use frame['spans'].dt.total_seconds()"),
        ({"x": "complex"}, "got complex numbers: use one column for numpy.real(frame['complex'])"),
        ({"x": "arrays"}, "got arrays: pass them to fd.FederatedData.from_partition, as numpy.stack(frame['arrays'])"),
        ({"x": ["a", "big"], "dtype": "int64"}, "column 'a' must be whole numbers in -9223372036854775808.."),
        (
            {"x": "big", "dtype": "int32"},
            "column 'big' must be whole numbers in -2147483648..2147483647 for int32, got",
        ),
        ({"x": "big"}, "column 'big' must be integers that float32 represents exactly, such as those up to 16777216"),
        ({"x": "unsigned", "dtype": "int64"}, "got 18446744073709551615 in row 7: pass another dtype"),
        ({"x": "b", "dtype": "uint8"}, "column 'b' must be whole numbers in 0..255 for uint8"),
        ({"x": "huge"}, "column 'huge' must be numbers up to 3.4e+38 for float32, got 1e+300 in row 10: scale"),
        ({"x": "huge", "dtype": "float16"}, "column 'huge' must be numbers up to 6.55e+04 for float16, got 1e+300"),
        ({"y": "huge"}, "column 'huge' must be numbers up to 3.4e+38 for float32, got 1e+300 in row 9: scale the"),
        ({"x": ["a", "label"]}, "x must not have the column of the labels, got 'label'"),
        ({"x": []}, "x must be the name of a column, or a list of names, got []"),
        ({"frame": {"a": [1]}}, "the frame must be a pandas.DataFrame with at least 1 row, got a dict"),
        ({"test": np.eye(2)}, "test: the frame must be a pandas.DataFrame with at least 1 row, got a ndarray"),
        ({"client_tests": True}, "client_tests=True needs a test set, got none"),
    ],
)
def test_pandas_errors_name_the_column(pd, frame, options, message) -> None:
    odd = {f"feature_{k}{k}": 0.0 for k in range(4)} | {f"feature_{k}": 0.0 for k in range(10, 30)}
    odd |= {"big": np.arange(30) + 2**32, "huge": [1.0] * 9 + [1e300] * 21, "complex": [1j] * 30}
    odd |= {"marks": [*range(3), "?"] + [1] * 26, "digits": ["7.5"] * 30, "arrays": [np.zeros(2)] * 30}
    odd |= {"dates": pd.date_range("2026", periods=30), "spans": pd.to_timedelta(range(30), unit="s")}
    odd |= {"months": pd.period_range("2026", periods=30, freq="M")}
    odd |= {"unsigned": np.array([1] * 7 + [2**64 - 1] * 23, np.uint64)}
    frame = frame.assign(**odd).astype({"marks": object, "digits": object})
    with pytest.raises(ValueError) as error:
        fd.data.from_pandas(**({"frame": frame, "x": "a", "y": "label", "client": "who"} | options))
    assert message in str(error.value) and len(str(error.value)) < 400
    with pytest.raises(ValueError, match=r"got 0: rename the columns, frame.columns = frame.columns.map\(str\)"):
        fd.data.from_pandas(frame.rename(columns={"a": 0}), x=[0], y="label", client="who")


def test_integers_of_a_frame_do_not_wrap_around(pd) -> None:
    ids = np.array([2**64 - 1, 7, 2**63 + 1, 7], np.uint64)
    frame = pd.DataFrame({"id": ids, "big": ids // 4, "y": [0, 1, 0, 1]})
    data = fd.data.from_pandas(frame, "big", "y", "id", test=frame[1:2].astype({"id": "int64"}), dtype="int64")
    assert data.client_names == ("7", str(2**63 + 1), str(2**64 - 1)) and data.test_sizes.tolist() == [1, 0, 0]
    assert data.x[:, 0].tolist() == [1, 1, (2**63 + 1) // 4, (2**64 - 1) // 4]
    near = frame[1:2].assign(id=2**63 - 1)  # equal to 2**63 + 1 in float64
    assert fd.data.from_pandas(frame, "y", "y", "id", test=near).test_sizes is None


class Pairs:
    """A map-style data set like those of PyTorch."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int):
        return self.x[k], self.y[k]


def test_torch_style_pairs_of_arrays_and_images_are_read() -> None:
    from PIL import Image

    pairs = Pairs(NUMBERS.astype("f8"), LABELS.tolist())
    same(fd.datasets.from_torch(pairs, client_of=WHO), NUMBERS, LABELS, rows_of(WHO))
    by_index = fd.data.from_torch(pairs, client_of=lambda k: WHO[k], test=pairs, test_client_of=WHO)
    same(by_index, NUMBERS, LABELS, rows_of(WHO))
    assert by_index.test_sizes.tolist() == [10, 10, 10] and by_index.client_names == ("ann", "bob", "cid")
    faces = Pairs([Image.fromarray(x) for x in GREY], LABELS)
    parts = fd.partition.iid(3)(LABELS)
    same(fd.data.from_torch(faces, partition=fd.partition.iid(3)), GREY[..., None], LABELS, parts)
    scalars = fd.data.from_torch(Pairs([0.5] * 30, LABELS), partition=fd.partition.iid(3))
    assert scalars.x.shape == (30, 1) and scalars.x.dtype == np.float32


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        (
            Pairs([np.zeros(2), np.zeros(3)], [0, 1]),
            {},
            "dataset[1][0] must be like the first example, float64[2], got",
        ),
        (
            Pairs([0.0, 1.0], [0, 0.5]),
            {},
            "must be like the first example, int64[], got float64[]: convert them to one",
        ),
        (Pairs([0, 2**24 + 1], [0, 1]), {}, "dataset: the inputs must be integers that float32 represents exactly"),
        (Pairs([1e300], [0]), {}, "dataset: the inputs must be numbers up to 3.4e+38 for float32, got 1e+300 in row 0"),
        (Pairs([0.0], [-1e300]), {}, "dataset: the labels must be numbers up to 3.4e+38 for float32, got -1e+300"),
        (
            Pairs(NUMBERS[:2], [0, 1]),
            {"partition": None, "client_of": [1, "1"]},
            "all integers or all strings, got both",
        ),
        (Pairs([0.0, 1.0], ["cat", "dog"]), {}, "dataset[0][1] must be numbers, got 'cat'"),
        ([(1, 2, 3)], {}, "dataset[0] must be a pair (input, label), got (1, 2, 3)"),
        (iter([]), {}, "dataset must be a map-style data set"),
        (Pairs(NUMBERS, LABELS), {"partition": None, "client_of": WHO[1:]}, "must be 30 integers or strings, one per"),
        (Pairs(NUMBERS, LABELS), {"channels_first": True}, "channels_first=True needs images [C, H, W], got inputs of"),
    ],
)
def test_unsupported_torch_style_data_sets_are_refused(pairs, options, message) -> None:
    with pytest.raises(ValueError) as error:
        fd.data.from_torch(pairs, **({"partition": fd.partition.iid(1)} | options))
    assert message in str(error.value)


def test_torch_style_images_that_would_lose_pixels_are_refused(tmp_path) -> None:
    from PIL import Image

    grey, colour = Image.new("L", (2, 2)), Image.new("RGB", (2, 2))
    Image.fromarray(rng.integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    cut = Image.open(tmp_path / "cut.png")  # its pixels are read later
    for pictures, message in (
        ([Image.new("I;16", (2, 2))], "dataset[0][0] must have 8 bits per channel, got mode 'I;16': scale .* // 257"),
        ([Image.new("I", (2, 2))], "got mode 'I': scale the pixels to 0..255 with a transform, such as"),
        ([Image.new("F", (2, 2))], "got mode 'F': scale .*255 [*] numpy.asarray"),
        ([Image.new("LA", (2, 2))], "got mode 'LA': convert it with a transform, image.convert"),
        ([grey, colour], "dataset[1][0] must be like .*grey images and images in colour must be converted to one mode"),
        ([cut], "dataset[0][0] can't be read .*truncated"),
    ):
        with pytest.raises(ValueError, match=message.replace("[0]", r"\[0\]").replace("[1]", r"\[1\]")):
            fd.data.from_torch(Pairs(pictures, LABELS), partition=fd.partition.iid(1))


def test_torch_tensors_are_converted_to_channels_last(monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    colour = rng.random((30, 3, 5, 4)).astype("f4")
    tensors = torch.utils.data.TensorDataset(torch.tensor(colour, requires_grad=True), torch.tensor(LABELS))
    expected = np.moveaxis(colour, 1, -1)
    looped = fd.data.from_torch(torch.utils.data.Subset(tensors, range(30)), client_of=WHO, channels_first=True)
    same(looped, expected, LABELS, rows_of(WHO))
    monkeypatch.setattr(type(tensors), "__getitem__", None)  # must not be called
    same(fd.data.from_torch(tensors, client_of=WHO, channels_first=True), expected, LABELS, rows_of(WHO))


@pytest.mark.parametrize(
    ("reader", "package", "name"),
    [("from_huggingface", "datasets", "datasets"), ("from_flwr", "flwr_datasets", "flwr-datasets"),
     ("from_pandas", "pandas", "pandas")],
)  # fmt: skip
def test_a_missing_package_is_named(reader, package, name, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        getattr(fd.data, reader)(None, x="x", y="y")
