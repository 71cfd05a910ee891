"""Tests of the readers of PFLlib's, FL-bench's and NIID-Bench's files, on small files that are written as they do."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift.data import pickles

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 2, 4, 3)).astype(np.float32)  # [M, C, H, W]
Y = np.arange(40) % 3
LAST = np.moveaxis(X, 1, -1)
ROWS = [np.arange(0, 8), np.arange(8, 24), np.arange(24, 40)]  # a quarter of each is tested


def write_pfllib(folder: Path, x: Any = X, y: Any = Y) -> Path:
    """Writes the files of three clients, with plain lists as some of the generators, and returns the folder."""
    for i, rows in enumerate(ROWS):
        for part, these in (("train", rows[len(rows) // 4 :]), ("test", rows[: len(rows) // 4])):
            (folder / part).mkdir(parents=True, exist_ok=True)
            content = {"x": x[these], "y": y[these] if i else y[these].tolist()}
            np.savez_compressed(folder / part / f"{i}.npz", data=content)
    labels = [sorted(Counter(y[rows].tolist()).items()) for rows in ROWS]
    config = {"num_clients": 3, "num_classes": 3, "Size of samples for labels in clients": labels}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_clients_of_pfllib_have_their_own_test_examples(tmp_path: Path) -> None:
    data = fd.data.from_pfllib(write_pfllib(tmp_path / "digits"))
    assert (data.name, data.sizes.tolist(), data.test_sizes.tolist()) == ("digits", [6, 12, 12], [2, 4, 4])
    for i, rows in enumerate(ROWS):
        quarter = len(rows) // 4
        for test, these in ((False, rows[quarter:]), (True, rows[:quarter])):
            x, y = data.examples(i, test=test)
            np.testing.assert_array_equal(x, LAST[these])
            np.testing.assert_array_equal(y, Y[these])
    assert data.x.flags.c_contiguous and data.mean is None
    model = fd.models.linear((4, 3, 2), 3)
    sim = fd.Simulation(model, data, fd.algorithms.fedavg(), cohort_size=3)
    state, _ = sim.run(sim.init(jax.random.key(0)), 1, progress=False)
    scores = sim.evaluate_clients(state)["accuracy"]
    np.testing.assert_allclose(np.average(scores, weights=data.test_sizes), sim.evaluate(state)["accuracy"], rtol=1e-6)


@pytest.mark.thorough
def test_the_ported_experiment_of_pfllib_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    from experiments.ported import __main__ as ported

    folder = write_pfllib(tmp_path / "digits", rng.normal(size=(40, 1, 28, 28)).astype(np.float32))
    monkeypatch.setattr("sys.argv", ["ported", "pfllib", str(folder), "--seeds", "1"])
    ported.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and len(lines[1].split()) == 1 + 3 and "CPU seconds per round" in lines[2]


def test_other_inputs_of_pfllib_keep_their_axes(tmp_path: Path) -> None:
    np.testing.assert_array_equal(fd.data.from_pfllib(write_pfllib(tmp_path / "a", X[:, 0])).x_test[:2], X[:2, 0])
    text = np.array([([k, k + 1, 0], 2) for k in range(40)], dtype=object)  # tokens and length, as for AG News
    data = fd.data.from_pfllib(write_pfllib(tmp_path / "b", text))
    assert data.x_test[:2].tolist() == [[0, 1, 0], [1, 2, 0]] and data.x.dtype.kind == "i"
    (tmp_path / "b" / "config.json").unlink()  # Shakespeare has none
    assert fd.data.from_pfllib(tmp_path / "b").num_clients == 3
    config = {"num_clients": 3, "Size of samples for labels in clients": [[0, 8], [1, 16], [2, 16]]}  # FEMNIST
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert fd.data.from_pfllib(tmp_path / "b").num_clients == 3


def swap(folder: Path) -> None:
    """The clients 0 and 1 change places."""
    for part in ("train", "test"):
        for old, new in (("0", "keep"), ("1", "0"), ("keep", "1")):
            (folder / part / f"{old}.npz").rename(folder / part / f"{new}.npz")


def config(old: str, new: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        text = (folder / "config.json").read_text()
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: shutil.copy(f / "train" / "0.npz", f / "train" / "2.npz"), "client 2 must have 6 examples of label"),
        (lambda f: [shutil.copy(f / part / "2.npz", f / part / "3.npz") for part in ("train", "test")],
         r"config.json: num_clients must be the number of files, 4, got 3: generate the data again"),
        (swap, r"client 0 must have 3 examples of label 0, got 5: the files are of several runs"),
        (lambda f: (f / "test" / "2.npz").unlink(), "test must have 3 files, as train, got 2"),
        (lambda f: (f / "train" / "1.npz").unlink(), "train must have 0.npz to 1.npz, got 2.npz but no 1.npz: copy"),
        (lambda f: (f / "config.json").write_text('{"num_clients": 3'), "config.json is damaged"),
        (config("[[[", "[[], [["), "it must have the labels of 3 clients, got 4 lists: generate the data again"),
        (config(", [[0, 5], [1, 5], [2, 6]]", ""), "it must have the labels of 3 clients, got 2 lists"),
        (config("[[0, 3], [1, 3], [2, 2]]", "[]"), "client 0 must have 0 examples of label 0, got 3"),
        (config("[[[0, 3]", "[[[0, 2], [0, 3]"), "client 0 must have 5 examples of label 0, got 3"),
        (config("[[[0, 3]", "[[[0.7, 3]"), "client 0 must have 0 examples of label 0, got 3"),
    ],
)  # fmt: skip
def test_files_of_pfllib_of_several_runs_are_not_mixed(tmp_path: Path, change, said: str) -> None:
    change(write_pfllib(tmp_path / "digits"))
    with pytest.raises(ValueError, match=said):
        fd.data.from_pfllib(tmp_path / "digits")
    with pytest.raises(FileNotFoundError, match="must have the files 0.npz, 1.npz, ... of PFLlib's generate"):
        fd.data.from_pfllib(tmp_path)


def test_damaged_files_and_code_in_files_of_pfllib_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (tmp_path / "touched",)

    path = write_pfllib(tmp_path / "digits") / "train" / "1.npz"
    whole = path.read_bytes()
    x, y = X[:4], Y[:4]
    for content, said in (
        ({"x": x, "y": Evil()}, "is not allowed in it"),
        ({"x": x, "z": y}, "it has no column 'y', only x, z"),
        (np.array([{"x": x}]), "must have a dict with x and y"),
        ({"x": x, "y": y[:3]}, r"must have 3 rows, got \[4, 4, 3, 2\]"),
        ({"x": x, "y": ["a"] * 4}, "must be numbers"),
        ({"x": x[:0], "y": y[:0]}, "client 1 is empty"),
    ):
        np.savez_compressed(path, data=content)
        with pytest.raises(ValueError, match=said):
            fd.data.from_pfllib(tmp_path / "digits")
    np.savez(path, data={"x": X, "y": Y})  # not compressed, so that only the checksum shows a changed pixel
    stored = path.read_bytes()
    path.write_bytes(stored.replace(X.tobytes()[800:840], bytes(40)))
    with pytest.raises(ValueError, match="Bad CRC-32"):
        fd.data.from_pfllib(tmp_path / "digits")
    np.savez_compressed(path, x=x)
    with pytest.raises(ValueError, match=r"1.npz is damaged.*no item named 'data.npy'"):
        fd.data.from_pfllib(tmp_path / "digits")
    for damaged in (whole[:-40], whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="1.npz"):
            fd.data.from_pfllib(tmp_path / "digits")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("protocol", range(3, 6))
def test_pickles_of_plain_values_are_read(tmp_path: Path, protocol: int) -> None:
    values = {"a": X, "b": [Y[0], {"c": (1, "d", 2.5)}], "e": np.asfortranarray(X[0, 0]), "f": Y.astype(">i4")}
    (tmp_path / "file").write_bytes(pickle.dumps(values, protocol))
    with open(tmp_path / "file", "rb") as file:
        read = pickles.read(file)
    for key in "aef":
        np.testing.assert_array_equal(read[key], values[key])
    assert read["b"] == values["b"]


# ---------------------------------------------------------------- FL-bench


def write_fl_bench(folder: Path, split: str = "sample", **changes: Any) -> Path:
    """Writes the partition of ROWS: half of each client's examples are trained, and a quarter each validated and
    tested. With the split "user", the clients 0 and 1 train, and 2 is tested."""
    indices, own = [], split == "sample"
    for i, rows in enumerate(ROWS):
        cuts = np.split(rows.astype(np.int32), [len(rows) // 4, len(rows) // 2])
        parts = {"test": cuts[0], "val": cuts[1], "train": cuts[2]}
        if not own:
            parts = {name: rows if (name == "test") == (i == 2) and name != "val" else [] for name in parts}
        indices.append(parts)
    clients = [0, 1, 2] if own else [0, 1]
    separation = {"train": clients, "val": clients if own else [], "test": clients if own else [2], "total": 3}
    folder.mkdir()
    stats = {i: {"x": len(rows), "y": Counter(Y[rows].tolist())} for i, rows in enumerate(ROWS)}
    (folder / "all_stats.json").write_text(json.dumps(stats | {"samples_per_client": {"mean": 13.3, "stddev": 3.8}}))
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": indices} | changes))
    return folder / "partition.pkl"


def test_partitions_of_fl_bench_are_read(tmp_path: Path) -> None:
    path = write_fl_bench(tmp_path / "sample")
    for test, start in (("test", 0), ("val", 1)):
        data = fd.data.from_fl_bench(path, LAST, Y, test=test, name="digits")
        assert data.sizes.tolist() == [4, 8, 8] and data.test_sizes.tolist() == [2, 4, 4]
        for i, rows in enumerate(ROWS):
            np.testing.assert_array_equal(data.client(i)[0], LAST[rows[len(rows) // 2 :]])
            quarter = len(rows) // 4
            np.testing.assert_array_equal(data.examples(i, test=True)[1], Y[rows[start * quarter :][:quarter]])
    users = write_fl_bench(tmp_path / "user", "user")
    data = fd.data.from_fl_bench(users, LAST, Y)
    assert data.sizes.tolist() == [8, 16] and data.test_sizes is None
    np.testing.assert_array_equal(data.x_test, LAST[ROWS[2]])
    assert fd.data.from_fl_bench(users, LAST, Y, test="val").x_test is None
    bytes_ = np.arange(40 * 12, dtype=np.uint32).astype(np.uint8).reshape(40, 4, 3, 1)
    np.testing.assert_allclose(fd.data.from_fl_bench(path, bytes_, Y, mean=0.5, std=0.25).mean, [0.5])


def indices(rows: Any) -> dict[str, Any]:
    return {"data_indices": [{"train": rows, "val": [], "test": []}] * 3}


def clients(*ids: Any) -> dict[str, Any]:
    return {"separation": {"train": list(ids), "test": [0, 1, 2], "total": 3}}


def test_wrong_partitions_of_fl_bench_are_refused(tmp_path: Path) -> None:
    path = write_fl_bench(tmp_path / "sample")
    with pytest.raises(ValueError, match=r"train of client 2 must be in 0\.\.29, got 32\.\.39: join the training set"):
        fd.data.from_fl_bench(path, LAST[:30], Y[:30])
    with pytest.raises(ValueError, match="all_stats.json: client 0 must have 3 examples of label 0, got 0: the files"):
        fd.data.from_fl_bench(path, LAST, Y + 1)
    path.with_name("all_stats.json").unlink()
    fd.data.from_fl_bench(path, LAST, Y + 1)
    for k, (changes, said) in enumerate((
        ({"separation": {"train": [0], "test": [0], "total": 4}}, "must have the indices of 4 clients, got 3"),
        ({"data_indices": [{"train": [0]}] * 3}, "damaged, truncated, too large or of another kind"),
        ({"data_indices": [Path("a")] * 3}, "PosixPath is not allowed in it"),
        (indices([-1]), r"train of client 0 must be in 0\.\.39, got -1"),
        (indices([0.7]), "train of client 0 must be a list of integers, got float64.1.: generate the data again"),
        (indices(["1"]), "train of client 0 must be numbers: encode text"),
        (indices([[1]]), r"must be a list of integers, got int64\[1, 1\]"),
        (indices([True]), "must be a list of integers, got bool"),
        (indices(3), "must be a list of integers"),
        (indices([2**70]), "must be numbers"),
        (clients(3), r"the clients of train must be in 0\.\.2, got 3"),
        (clients(0, 0), r"the clients of train must be different, got \[0, 0\]"),
    )):  # fmt: skip
        wrong = write_fl_bench(tmp_path / str(k), **changes)
        with pytest.raises(ValueError, match=said):
            fd.data.from_fl_bench(wrong, LAST, Y)
    for content in ([1], {"data_indices": []}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match="must have FL-bench's data_indices and separation"):
            fd.data.from_fl_bench(path, LAST, Y)
    path.write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="damaged or not a pickle"):
        fd.data.from_fl_bench(path, LAST, Y)
    with pytest.raises(ValueError, match="test must be"):
        fd.data.from_fl_bench(path, LAST, Y, test="train")
    with pytest.raises(FileNotFoundError):
        fd.data.from_fl_bench(tmp_path / "none.pkl", LAST, Y)


# ---------------------------------------------------------------- NIID-Bench


def write_niid_bench(folder: Path, names: tuple[str, ...] = ("Time", "Class", "V1")) -> Path:
    folder.mkdir()
    for i, rows in enumerate(ROWS):
        with open(folder / f"{i}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(np.stack([rows, Y[rows], X[rows, 0, 0, 0]], 1))
    return folder


def test_tables_of_niid_bench_are_read(tmp_path: Path) -> None:
    data = fd.data.from_niid_bench(write_niid_bench(tmp_path / "card"), test=(np.zeros((2, 2), np.float32), [0, 1]))
    assert data.sizes.tolist() == [8, 16, 16] and data.name == "card" and len(data.x_test) == 2
    np.testing.assert_array_equal(data.x, np.stack([np.arange(40), X[:, 0, 0, 0]], 1, dtype=np.float32))
    np.testing.assert_array_equal(data.y, Y)
    assert data.x.dtype == np.float32 and data.y.dtype.kind == "i"
    by_time = fd.data.from_niid_bench(tmp_path / "card", y="Time")
    np.testing.assert_array_equal(by_time.y, np.arange(40))
    np.testing.assert_array_equal(by_time.x[:, 0], Y)


def test_wrong_tables_of_niid_bench_are_refused(tmp_path: Path) -> None:
    folder = write_niid_bench(tmp_path / "card")
    with pytest.raises(ValueError, match="it has no column 'class'.*did you mean 'Class'"):
        fd.data.from_niid_bench(folder, y="class")
    path = folder / "1.csv"
    text = path.read_text()
    wanted = "1.csv: it must have at least 1 example with Time, Class, V1, got"
    for content, said in (
        (text.replace("Time,Class", "Class,Time"), f"{wanted} other columns"),
        ("", f"{wanted} other columns"),
        ("Time,Class,V1\n\n", f"{wanted} 0"),
        (text + "1,1,inf\n", "card: training data: inputs must be finite"),
        *((text + line, "1.csv is damaged") for line in ("1,2\n", "a,1,1\n", "1_000,1,1\n", "\u0661,1,1\n", "1,,1\n")),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            fd.data.from_niid_bench(folder)
    path.write_text(text)
    first = folder / "0.csv"
    for names in ("Class,Class,V1", "Class,,V1"):
        first.write_text(text.replace("Time,Class,V1", names))
        with pytest.raises(
            ValueError, match=f"0.csv: its columns must have different names, got {names.split(',')[0]}"
        ):
            fd.data.from_niid_bench(folder)
    first.write_text(text, "utf-8-sig")  # as a spreadsheet writes it
    assert fd.data.from_niid_bench(folder, y="Time").num_clients == 3
    path.unlink()
    with pytest.raises(ValueError, match=r"must have 0.csv to 1.csv, got 2.csv but no 1.csv"):
        fd.data.from_niid_bench(folder)
    with pytest.raises(FileNotFoundError, match="NIID-Bench's partition.py, got none"):
        fd.data.from_niid_bench(tmp_path)
