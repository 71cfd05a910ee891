"""Damaged and unusual files raise a ValueError that names the file.

They never cause a hang or a crash. If a format has checksums, changed data are never loaded.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import damage
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.data import datasets
from fedjax_drift.spec import Declared

pytestmark = pytest.mark.thorough


def test_a_hundred_damaged_files_have_no_bad_outcome() -> None:
    quick = [name for name in damage.FORMATS if "tfds" not in name]  # importing TFDS takes seconds in every child
    if importlib.util.find_spec("safetensors") is None:
        quick.remove("parameters safetensors")
    command = [sys.executable, "-W", "ignore", damage.__file__, "100", *quick]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["files"] >= 100 and not found["bad"], found["bad"]


MESSAGES = [
    ("images npz", "huge shape", r"is damaged, truncated, too large .*Unable to allocate .*: copy or write it again"),
    ("images npz", "small shape", r"x_train.npy must end after its array of shape \[1, 2, 5\], got more: write"),
    ("images npz", "objects", "is damaged, .*Object arrays cannot be loaded when allow_pickle=False.: copy or write"),
    ("images npz", "unclosed header", "is damaged, truncated, too large or of another kind .*: copy or write it again"),
    ("jpeg npz", "offsets that wrap", "offsets must increase from 0"),
    ("idx gz", "three bytes", "is not an idx file of bytes with 3 axes: copy the original file again"),
    ("cinic png", "gif", "is not a readable image"),
    ("tiny_imagenet wnids", "not UTF-8", r"wnids\.txt is damaged.*'utf-8' codec can't decode"),
    ("tiny_imagenet wnids", "twice", "must be different ids"),
    ("leaf json", "deep", "is damaged.*recursion"),
    ("tff sqlite", "a number without end", "is damaged, .*index out of range.: copy or write it again"),
    ("tff sqlite, own", "pixels of another length", "must have as many values in each example, got 1 and others"),
    ("tff sqlite.lzma", "a header of 16 TiB", "damaged or of another kind .database disk image is malformed"),
    ("fedjax sqlite", "a folder", "Is a directory: check the file and its permissions"),
    ("movielens ratings", "cut within the last line", "line 9 must be user::movie::stars::seconds as in ML-1M, got"),
    ("movielens ratings", "a field cut off", "line 9 must be user::movie::stars::seconds"),
    ("movielens users", "twice", "user 1 must have one line, got several"),
    ("bindingdb tsv", "an infinite Kd", "line 2 must be a Kd such as"),
    ("parameters npz", "text", "bias must be real numbers, got <U1: write it with save_params"),
    ("log", "not UTF-8", r"rounds\.jsonl is damaged"),
    ("log", "no round", "records' round must be an integer >= 0, got None"),
    ("run folder", "another model", r"config\.json can't be read: .*linaer"),
]  # fmt: skip


@pytest.mark.parametrize("file_format, change, message", MESSAGES)
def test_message_for_a_damaged_file(tmp_path: Path, monkeypatch, file_format: str, change: str, message: str) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    one, path = damage.FORMATS[file_format], damage.example(file_format, tmp_path)
    (one.crafted | damage.EVERYWHERE)[change](path)
    with pytest.raises(ValueError, match=message) as error:
        one.load(tmp_path)
    assert damage.ours(error.value, tmp_path, path)


def test_a_damaged_cache_is_computed_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    one, path = damage.FORMATS["cache npz"], damage.example("cache npz", tmp_path)
    whole = damage.digest(one.load(tmp_path))
    for change in (one.crafted["huge shape"], one.crafted["deep header"], lambda path: path.write_bytes(b"")):
        change(path)
        with pytest.warns(UserWarning, match="the cached data are computed again: .*" + path.name):
            assert damage.digest(one.load(tmp_path)) == whole


def test_the_command_line_reports_a_damaged_file_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    damage.FORMATS["images npz"].crafted["unclosed header"](damage.example("images npz", tmp_path))
    here = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out")]
    for command in (["data", "mnist"], ["run", "--dataset", "mnist", "--algorithm", "fedavg"]):
        assert cli.main([*command, *here]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "mnist.npz is damaged" in said
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- arguments

LEGAL = {
    option: argument.spec.right[0]
    for record in datasets.RECORDS.values()
    for option, argument in Declared(record.read).arguments.items()
    if argument.spec
}
OPTIONS = [(name, option) for name, record in datasets.RECORDS.items() for option in record.options]


@pytest.mark.parametrize("name, option", OPTIONS)
def test_options_are_checked_before_any_file_is_read(tmp_path: Path, monkeypatch, name: str, option: str) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setitem(datasets.DATASETS, name, read)
    wrong: list[object] = [[1], {}, "12", -1, np.nan, object()]
    wrong += [] if option in ("valid", "iid_sol", "iid_data") else [True]
    wrong += [None] if datasets.RECORDS[name].options[option] is not None else []
    for value in wrong:
        for call in (fd.datasets.load, fd.datasets.locate, fd.datasets.num_classes):
            with pytest.raises(ValueError, match=f"^{option} must be "):
                call(name, **{option: value})
    with pytest.raises(AssertionError, match="it was read"):
        fd.datasets.load(name, **{option: LEGAL[option]})


def test_arguments_are_checked_before_any_file_is_read(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    for data_dir in (3, b"folder", ["a"], True, tmp_path / "file", "\0"):
        calls = [lambda d: fd.datasets.load("mnist", data_dir=d), fd.datasets.describe]
        for call in (
            *calls,
            lambda d: fd.datasets.locate("mnist", d),
            lambda d: fd.datasets.load("synthetic", None, d),
        ):
            with pytest.raises(ValueError, match="^data_dir must be"):
                call(data_dir)
    for name in ("minst", None, 3, ["mnist"], {}):
        for named in (fd.datasets.load, fd.datasets.locate, fd.datasets.num_classes):
            with pytest.raises(ValueError, match="^name must be one of"):
                named(name)
    for wrong in (3, None, [], "\0"):
        for call in (fd.datasets.from_leaf, fd.datasets.from_fedjax, fd.datasets.from_tff):
            with pytest.raises(ValueError, match="^(folder|train) must be a path, got"):
                call(wrong)
        with pytest.raises(ValueError, match="^x must be the name of a column|^test must be a path"):
            fd.datasets.from_tff("a", test=wrong, x=wrong)
    for seed in (-1, 0.5, "0", None, True, [1]):
        with pytest.raises(ValueError, match="^seed must be an integer >= 0"):
            fd.datasets.load("synthetic", seed=seed)
    with pytest.raises(ValueError, match="^standardize must be True or False, got 1"):
        fd.datasets.load("synthetic", standardize=1)
    with pytest.raises(ValueError, match="unknown option 'hisotry': the options of movielens .*did you mean 'history'"):
        fd.datasets.locate("movielens", hisotry=3)
    with pytest.raises(ValueError, match=r"num_classes must be in 1\.\.10, got 11: these are the classes of digits"):
        fd.datasets.num_classes("emnist", split="digits", num_classes=11)


def test_numpy_integers_are_accepted() -> None:
    plain = fd.datasets.load("synthetic", seed=200, num_clients=3, num_rows=200)
    for kind in (np.int64, np.uint8):
        same = fd.datasets.load("synthetic", seed=kind(200), num_clients=kind(3), num_rows=kind(200))
        np.testing.assert_array_equal(same.x, plain.x)
    assert type(fd.datasets.num_classes("emnist", num_classes=np.uint8(7))) is int
