"""Tests of the readers of other libraries' data sets: Hugging Face, Flower, pandas, PyTorch."""

from __future__ import annotations

import datetime
import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedjax_drift as fd

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


class Pairs:
    """A map-style data set like those of PyTorch."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int):
        return self.x[k], self.y[k]


# ---------------------------------------------------------------- all readers

Columns = dict[str, np.ndarray]


def by_pandas(train: Columns, test: Columns | None, **options: Any) -> fd.FederatedData:
    pandas = pytest.importorskip("pandas", reason="from_pandas needs pandas")
    frames = [None if columns is None else pandas.DataFrame(columns) for columns in (train, test)]
    return fd.datasets.from_pandas(frames[0], ["a", "b"], "y", test=frames[1], **options)


def by_huggingface(train: Columns, test: Columns | None, **options: Any) -> fd.FederatedData:
    datasets = pytest.importorskip("datasets", reason="from_huggingface needs datasets")
    parts = {"train": train} | ({"test": test} if test else {})
    splits = datasets.DatasetDict({name: datasets.Dataset.from_dict(columns) for name, columns in parts.items()})
    return fd.datasets.from_huggingface(splits, ["a", "b"], "y", **options)


def by_torch(train: Columns, test: Columns | None, client: str | None = None, **options: Any) -> fd.FederatedData:
    pairs = [c and Pairs(np.stack([c["a"], c["b"]], 1), c["y"].tolist()) for c in (train, test)]
    if client:
        options |= {"client_of": train[client]}
        options |= {"test_client_of": test[client]} if test and client in test else {}
    return fd.datasets.from_torch(pairs[0], test=pairs[1], **options)


LABEL_KINDS: dict[str, tuple[np.ndarray, np.ndarray]] = {  # the labels of a column, and those of the federation
    "integers": (LABELS, LABELS),
    "truth values": (LABELS > 1, (LABELS > 1).astype("i4")),
    "fractions": (LABELS / 3, (LABELS / 3).astype("f4")),
    "text": (np.array(["zebra", "9", "10"])[LABELS], np.array([2, 1, 0])[LABELS]),
}


@pytest.mark.parametrize("read", [by_pandas, by_huggingface, by_torch])
@pytest.mark.parametrize("kind", LABEL_KINDS)
@pytest.mark.parametrize("who", [WHO, np.where(WHO == "ann", 2**63 - 1, -7), np.array([2**63 + 1, 9, 7] * 10, "u8")])
def test_a_table_becomes_a_federation(read, kind: str, who: np.ndarray) -> None:
    given, y = LABEL_KINDS[kind]
    columns = {"a": NUMBERS[:, 0], "b": NUMBERS[:, 1], "y": given, "who": who}
    test = {name: column[[4, 0, 3]] for name, column in columns.items()}
    parts = rows_of(who)
    data = read(columns, test, client="who", name="table")
    same(data, NUMBERS, y, parts)
    assert data.name == "table" and data.client_names == tuple(map(str, np.unique(who)))
    test_rows = [row for part in parts for row in (4, 0, 3) if row in part]
    assert data.test_sizes.tolist() == [sum(row in part for row in (4, 0, 3)) for part in parts]
    np.testing.assert_array_equal(data.x_test, NUMBERS[test_rows])
    np.testing.assert_array_equal(data.y_test, y[test_rows])

    strangers = test | {"who": np.array(["eve"] * 3) if who.dtype.kind == "U" else who[:3] // 2 + 1}
    for tests, options in ((test, {"client_tests": False}), (strangers, {})):
        pooled = read(columns, tests, client="who", **options)
        assert pooled.test_sizes is None and pooled.y_test.tolist() == y[[4, 0, 3]].tolist()
    with pytest.raises(ValueError, match="are all training clients, got client"):
        read(columns, strangers, client="who", client_tests=True)
    with pytest.raises(ValueError, match="client_tests=True needs a test set, got none"):
        read(columns, None, client="who", client_tests=True)
    iid, shards = fd.partition.iid(4), fd.partition.shards(3, per_client=1)
    same(read(columns, None, partition=iid), NUMBERS, y, iid(LABELS))
    if kind != "fractions":
        same(read(columns, test, partition=shards), NUMBERS, y, shards(y))
    if kind == "text":
        with pytest.raises(ValueError, match="must only have labels of the training set, got 'cow': leave these"):
            read(columns, test | {"y": np.array(["9", "cow", "10"])}, client="who")
    for options in ({}, {"client": "who", "partition": iid}):
        with pytest.raises(ValueError, match="to say what the clients are, got (neither|both)"):
            read(columns, None, **options)
    with pytest.raises(ValueError, match="partition must be a partitioner such as"):
        read(columns, None, partition=fd.partition.iid)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lenght'"):
        read(columns, None, client="who", lenght=3)


# ---------------------------------------------------------------- Hugging Face and Flower


def test_huggingface_images_are_grouped_by_writer(images, hf) -> None:
    splits = hf.DatasetDict(train=images, test=images.select([0, 4, 3]))
    data = fd.datasets.from_huggingface(splits, x="image", y="label", client="writer", name="faces")
    same(data, GREY[..., None], LABELS, rows_of(WHO))
    assert data.test_sizes.tolist() == [1, 2, 0] and data.y_test.tolist() == LABELS[[4, 0, 3]].tolist()
    colour = images.cast_column("image", hf.Image(mode="RGB")).shuffle(seed=1)  # with an indices mapping
    data = fd.data.from_huggingface(colour, "image", "label", partition=fd.partition.iid(4))
    assert data.x.shape == (30, 5, 4, 3) and sorted(data.x[:, 0, 0, 2]) == sorted(GREY[:, 0, 0])


def test_huggingface_lists_of_several_batches_are_joined(hf) -> None:
    partition = fd.partition.dirichlet(4, alpha=0.5, seed=1)
    nested = rng.normal(size=(30, 3, 2))
    columns = {"nested": nested.tolist(), "label": LABELS, "id": LABELS + 5, "word": np.array([*"dab"])[LABELS]}
    whole = hf.Dataset.from_dict(columns)
    pieces = hf.concatenate_datasets([whole.select(range(9)), whole.select(range(9, 30))])  # with two Arrow chunks
    for dataset in (whole, pieces, pieces.select(list(range(30))[::-1]).select(list(range(30))[::-1])):
        read = {"y": "label", "partition": partition}
        same(fd.data.from_huggingface(dataset, x="nested", **read), nested.astype("f4"), LABELS, partition(LABELS))
        ids = fd.data.from_huggingface(dataset, x="id", dtype="int32", **read)
        same(ids, (LABELS + 5).astype("i4")[:, None], LABELS, partition(LABELS))
        words = fd.data.from_huggingface(dataset, x="nested", y="word", client="word")
        same(words, nested.astype("f4"), np.array([2, 0, 1])[LABELS], rows_of(np.array([2, 0, 1])[LABELS]))


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


def encoded(image: Any, size: int | None = None) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue()[:size], "path": None}


NOISE = Image.fromarray(rng.integers(0, 256, (64, 64), np.uint8))
DEEP, BLACK = Image.new("I;16", (2, 2)), Image.new("L", (2, 2))
TO_RGB = "with dataset.cast_column('x', datasets.Image(mode='RGB'))"
BYTES = np.array([[1, 200]] * 30, np.uint8)


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (TOKENS, {}, "column 'x' must have lists of one length, got 1 to 4: pass length="),
        (TOKENS, {"length": 3}, "column 'x' must have lists of at most length=3 values, got 4"),
        (TOKENS, {"x": ["x", "x"], "length": 4}, "column 'x' must have one number per example to be stacked"),
        (TOKENS, {"y": "x", "length": 4}, "partition must be fd.partition.iid for labels that are not one integer"),
        (TOKENS, {"length": 5, "padding": -(2**31) - 1}, "padding must be an integer"),
        (BYTES, {"length": 5, "padding": -1}, "padding must be whole numbers in 0..255 for uint8, got -1 in row 0"),
        (BYTES, {"length": 5, "dtype": "int8"}, "column 'x' must be whole numbers in -128..127 for int8, got 200 in r"),
        (TOKENS, {"length": 4, "dtype": "O"}, "dtype must be an integer or a float"),
        (WHO, {}, "column 'x' must be numeric, got object such as 'bob': convert it with dataset.map"),
        ([datetime.date(2026, 1, 1)] * 30, {}, "column 'x' must have numbers, texts, or lists of numbers, got date32"),
        ([None, *range(29)], {}, "column 'x' must have no missing values, got 1: fill the missing values"),
        ([float("nan")] * 30, {}, "column 'x' must have finite numbers, got NaN or infinity"),
        ([[1.0, float("nan")]] * 30, {}, "x='x', y='label': training data: inputs must be finite, got NaN or infinity"),
        (WHO, {"x": "label", "y": "lable"}, "got 'lable': did you mean 'label'?"),
        ([BLACK] * 30, {"x": "label", "client": "x", "partition": None}, "integers or strings as clients, got uint8[2"),
        ([Image.new("RGBA", (2, 2))] * 30, {}, f"row 0 must be grey or RGB .*mode 'RGBA': convert it {TO_RGB}"),
        ([BLACK, BLACK.convert("RGB")] * 15, {}, f"2, 1], got uint8[2, 2, 3]: grey .*to one mode, {TO_RGB}"),
        ([DEEP] * 30, {}, "the image in row 0 must have 8 bits per channel, got mode 'I;16': scale .*with dataset.map"),
        ([encoded(DEEP)] * 30, {"mode": "RGB"}, "the image in row 0 must have 8 bits per channel, got mode 'I;16'"),
        ([encoded(BLACK)] * 3 + [{"bytes": b"no", "path": None}] * 27, {"mode": None}, "in row 3 can't be read (canno"),
        ([encoded(NOISE)] * 4 + [encoded(NOISE, 2000)] * 26, {"mode": None}, "row 4 can't be read (image file is trun"),
        ([{"bytes": None, "path": "no/such.png"}] * 30, {"mode": None}, "row 0 can't be read ([Errno 2] No such file"),
    ],
)  # fmt: skip
def test_huggingface_errors_name_the_column(hf, column, options, message) -> None:
    dataset = hf.Dataset.from_dict({"x": column, "label": LABELS})
    if "mode" in options:
        dataset = dataset.cast_column("x", hf.Image(mode=options.pop("mode")))
    partition = fd.partition.dirichlet(2, 1.0)
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        fd.data.from_huggingface(dataset, **({"x": "x", "y": "label", "partition": partition} | options))


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


# ---------------------------------------------------------------- pandas


@pytest.fixture
def pd():
    return pytest.importorskip("pandas", reason="from_pandas needs pandas")


def test_pandas_columns_of_any_dtype_are_read(pd) -> None:
    frame = pd.DataFrame({"sparse": pd.arrays.SparseArray(LABELS > 1), "flag": LABELS > 1, "kind": pd.Categorical(WHO)})
    frame = frame.assign(sure=pd.array(range(30), dtype="Int64"))
    x, kinds = np.stack([LABELS > 1, np.arange(30)], 1), np.searchsorted(["ann", "bob", "cid"], WHO)
    partition = fd.partition.shards(3, per_client=1)
    data = fd.data.from_pandas(frame, x=["sparse", "sure"], y="flag", partition=partition, dtype="int32")
    same(data, x.astype("i4"), LABELS > 1, partition((LABELS > 1) + 0))
    data = fd.data.from_pandas(frame, x=["sparse", "sure"], y="kind", client="kind")
    same(data, x.astype("f4"), kinds, rows_of(WHO))


HUGE = [1.0] * 9 + [1e300] * 21


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ([None, *range(29)], {}, "column 'x' must have no missing values, got 1, the first in row 0"),
        ([1, 2, 3, *["?"] * 27], {}, "column 'x' must be numeric, got object such as '?': convert it with pandas.to_n"),
        ([1, 2, 3, *["?"] * 27], {"x": "a", "y": "x"}, "column 'x' must be numeric, got object such as '?'"),
        (WHO, {"x": ["a", "x"]}, "column 'x' must be numeric, got object such as 'bob': convert it"),
        (np.arange(30).astype("M8[s]"), {}, "column 'x' must be numeric, got datetime64["),
        ([1j] * 30, {}, "column 'x' must be numeric, got complex128"),
        ([np.zeros(2)] * 30, {}, "column 'x' must be numeric, got object such as array([0., 0.])"),
        (np.arange(30) + 2**32, {}, "column 'x' must be integers that float32 represents exactly, such as those up to"),
        (np.arange(30) + 2**32, {"dtype": "int32"}, "must be whole numbers in -2147483648..2147483647 for int32, got"),
        (NUMBERS[:, 0], {"x": ["x", "a"], "dtype": "int64"}, "must be whole numbers in -9223372036854775808.."),
        (np.array([1] * 7 + [2**64 - 1] * 23, "u8"), {"dtype": "int64"}, "got 18446744073709551615 in row 7: scale me"),
        (HUGE, {}, "column 'x' must be numbers up to 3.4e+38 for float32, got 1e+300 in row 9: scale"),
        (HUGE, {"dtype": "float16"}, "column 'x' must be numbers up to 6.55e+04 for float16, got 1e+300"),
        (HUGE, {"x": "a", "y": "x"}, "column 'x' must be numbers up to 3.4e+38 for float32, got 1e+300 in row 9: scal"),
        (HUGE, {"client": "x"}, "column 'x' must have integers or strings as clients, got float64"),
        (HUGE, {"x": ["a", "c"]}, "x must be one of the columns a, "),
        (HUGE, {"x": "feature_2"}, " and 7 more, got 'feature_2': did you mean 'feature_29'?"),
        (HUGE, {"x": ["a", "label"]}, "x must not have the column of the labels, got 'label'"),
        (HUGE, {"x": []}, "x must be the name of a column, or a list of names, got []"),
        (HUGE, {"frame": {"a": [1]}}, "the frame must be a pandas.DataFrame with at least 1 row, got a dict"),
        (HUGE, {"x": "a", "test": np.eye(2)}, "test: the frame must be a pandas.DataFrame with at least 1 row, got a"),
    ],
)  # fmt: skip
def test_pandas_errors_name_the_column(pd, column, options, message) -> None:
    columns = {"a": NUMBERS[:, 1], "label": LABELS, "who": WHO, "x": column}
    columns |= {f"feature_{k}{k}": 0.0 for k in range(4)} | {f"feature_{k}": 0.0 for k in range(10, 30)}
    frame = pd.DataFrame(columns)
    with pytest.raises(ValueError) as error:
        fd.data.from_pandas(**({"frame": frame, "x": "x", "y": "label", "client": "who"} | options))
    assert message in str(error.value) and len(str(error.value)) < 400
    with pytest.raises(
        ValueError, match=r"got 0: pass text; for a frame, rename its columns with frame.columns.map\(str\)"
    ):
        fd.data.from_pandas(frame.rename(columns={"a": 0}), x=[0], y="label", client="who")


def test_a_wrong_keyword_is_refused_before_a_frame_is_read(pd) -> None:
    with pytest.raises(TypeError, match=r"from_pandas\(\) .* keyword argument 'nmae': did you mean 'name'"):
        fd.data.from_pandas(pd.DataFrame(), "no column", "y", nmae="mine")


def test_integers_of_a_frame_do_not_wrap_around(pd) -> None:
    ids = np.array([2**64 - 1, 7, 2**63 + 1, 7], np.uint64)
    frame = pd.DataFrame({"id": ids, "big": ids // 4, "y": [0, 1, 0, 1]})
    data = fd.data.from_pandas(frame, "big", "y", "id", test=frame[1:2].astype({"id": "int64"}), dtype="int64")
    assert data.client_names == ("7", str(2**63 + 1), str(2**64 - 1)) and data.test_sizes.tolist() == [1, 0, 0]
    assert data.x[:, 0].tolist() == [1, 1, (2**63 + 1) // 4, (2**64 - 1) // 4]
    near = frame[1:2].assign(id=2**63 - 1)  # equal to 2**63 + 1 in float64
    assert fd.data.from_pandas(frame, "y", "y", "id", test=near).test_sizes is None


# ---------------------------------------------------------------- PyTorch


def test_torch_style_pairs_of_arrays_and_images_are_read() -> None:
    pairs = Pairs(NUMBERS.astype("f8"), LABELS.tolist())
    same(fd.data.from_torch(pairs, client_of=lambda k: WHO[k]), NUMBERS, LABELS, rows_of(WHO))
    faces = Pairs([Image.fromarray(x) for x in GREY], LABELS)
    parts = fd.partition.iid(3)(LABELS)
    same(fd.data.from_torch(faces, partition=fd.partition.iid(3)), GREY[..., None], LABELS, parts)
    scalars = fd.data.from_torch(Pairs([0.5] * 30, LABELS), partition=fd.partition.iid(3))
    assert scalars.x.shape == (30, 1) and scalars.x.dtype == np.float32


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        (Pairs([np.zeros(2), np.zeros(3)], [0, 1]), {}, "dataset[1][0] must be like the first example, float64[2], go"),
        (Pairs([0.0, 1.0], [0, 0.5]), {}, "must be like the first example, int64[], got float64[]: convert them to on"),
        (Pairs([0, 2**24 + 1], [0, 1]), {}, "dataset: the inputs must be integers that float32 represents exactly"),
        (Pairs([1e300], [0]), {}, "dataset: the inputs must be numbers up to 3.4e+38 for float32, got 1e+300 in row 0"),
        (Pairs([0.0], [-1e300]), {}, "dataset: the labels must be numbers up to 3.4e+38 for float32, got -1e+300"),
        (Pairs(["cat", "dog"], [0, 1]), {}, "dataset: the inputs must be numeric, got object such as 'cat': convert i"),
        (Pairs([0.0, 1.0], [None] * 2), {}, "dataset: the labels must be numeric, got object: convert it"),
        (Pairs(NUMBERS[:2], [0, 1]), {"partition": None, "client_of": [1, "1"]}, "all integers or all strings, got bo"),
        (Pairs(NUMBERS, LABELS), {"partition": None, "client_of": WHO[1:]}, "must be 30 integers or strings, one per"),
        (Pairs(NUMBERS, LABELS), {"channels_first": True}, "channels_first=True needs images [C, H, W], got inputs of"),
        ([(1, 2, 3)], {}, "dataset[0] must be a pair (input, label), got (1, 2, 3)"),
        (iter([]), {}, "dataset must be a map-style data set"),
    ],
)  # fmt: skip
def test_unsupported_torch_style_data_sets_are_refused(pairs, options, message) -> None:
    with pytest.raises(ValueError) as error:
        fd.data.from_torch(pairs, **({"partition": fd.partition.iid(1)} | options))
    assert message in str(error.value)


def test_torch_style_images_that_would_lose_pixels_are_refused(tmp_path) -> None:
    grey, colour = Image.new("L", (2, 2)), Image.new("RGB", (2, 2))
    Image.fromarray(rng.integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    cut = Image.open(tmp_path / "cut.png")  # its pixels are read later
    for pictures, message in (
        *(
            ([Image.new(mode, (2, 2))], f"must have 8 bits per channel, got mode {mode!r}: scale the pixels to 0")
            for mode in ("I;16", "I", "F")
        ),
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
