"""Tests of downloads, from a server in this process, of small files in the published forms."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import shutil
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_files import RNG, characters, write_batch, write_emnist, write_femnist, write_idx, write_tff_database

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.data import datasets, downloading, images, shakespeare
from fedjax_drift.data.catalogue import RECORDS, TFDS
from fedjax_drift.data.datasets import load
from fedjax_drift.data.partition import iid
from fedjax_drift.errors import DamagedError

DOCS = Path(__file__).parents[1] / "docs"
DOWNLOADS = {name: record.downloads for name, record in RECORDS.items() if record.downloads}


class Site:
    """A server of files, with the faults of real ones."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.address = f"http://127.0.0.1:{server.server_port}"
        self.files: dict[str, bytes] = {}
        self.log: list[tuple[str, str | None]] = []  # the path and the range of each request
        self.cuts: list[int] = []  # the next responses end after so many bytes
        self.moved: dict[str, str] = {}  # path -> another path
        self.has_ranges, self.has_lengths, self.packs = True, True, False
        self.length: str | None = None  # a wrong length of all responses
        self.left = threading.Event()  # the client closed a connection before its end
        self.waits: threading.Event | None = None  # a response that is cut stays open until then

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted, path = request.headers.get("Range"), request.path
        self.log.append((path, wanted))
        if path in self.moved:
            request.send_response(302)
            request.send_header("Location", self.moved[path])
            return request.end_headers()
        if path not in self.files:
            return request.send_error(404)
        start = int(wanted[len("bytes=") : -1]) if wanted and self.has_ranges else 0
        body = self.files[path][start:]
        request.send_response(206 if start else 200)
        if self.has_lengths:
            request.send_header("Content-Length", str(len(body)) if self.length is None else self.length)
        if self.packs:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        cut = self.cuts.pop(0) if self.cuts else None
        try:
            request.wfile.write(body[:cut])
            if cut is not None and self.waits:
                request.wfile.flush()
                self.waits.wait()
        except ConnectionError:
            self.left.set()


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDJAX_DRIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(downloading, "STEP", 1000)


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site = Site(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield site
    if site.waits:
        site.waits.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def offer(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that puts files on the server, in place of the published files of a data set."""

    def put(name: str, files: list[Path], address: str = site.address) -> None:
        rows, record = [], datasets.RECORDS[name]
        for file in files:
            content = site.files[f"/{file.name}"] = file.read_bytes()
            checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
            rows.append(downloading.File(f"{address}/{file.name}", len(content), checksum, "this test"))
        monkeypatch.setitem(
            datasets.RECORDS, name, replace(record, downloads=DOWNLOADS[name]._replace(files=tuple(rows)))
        )

    return put


def same(ours: fd.FederatedData, theirs: fd.FederatedData) -> None:
    for array in ("x", "y", "sizes", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(ours, array), getattr(theirs, array))


# ---------------------------------------------------------------- each of the forms


def tar_gz(path: Path, folder: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for inside in folder.iterdir():
            archive.add(inside, inside.name)
    return path


def zipped(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for inside in sorted(folder.rglob("*")):
            archive.write(inside, inside.relative_to(folder))
    return path


def mnist(origin: Path, packed: Path, name: str = "mnist") -> list[Path]:
    """Writes the files for the reader in `origin`, and returns the files as they are published, in `packed`."""
    arrays, paths = {}, []
    for split, part, rows in (("train", "train", 30), ("test", "t10k", 10)):
        arrays[f"x_{split}"] = RNG.integers(0, 256, (rows, 28, 28), np.uint8)
        arrays[f"y_{split}"] = np.arange(rows) % 10
        for kind, key in (("images-idx3", "x"), ("labels-idx1", "y")):
            paths.append(packed / f"{part}-{kind}-ubyte.gz")
            write_idx(paths[-1], arrays[f"{key}_{split}"])
    np.savez(origin / f"{name}.npz", **arrays)
    return paths


def fashion_mnist(origin: Path, packed: Path) -> list[Path]:
    return mnist(origin, packed, "fashion_mnist")


def emnist(origin: Path, packed: Path) -> list[Path]:
    (packed / "archive" / "gzip").mkdir(parents=True)
    for split in images.EMNIST:
        write_emnist(origin, split)
    for path in origin.iterdir():
        shutil.copy(path, packed / "archive" / "gzip")
    (packed / "archive" / "gzip" / "emnist-mnist-mapping.txt").write_text("0 48\n")
    return [zipped(packed / "gzip.zip", packed / "archive")]


def cifar10(origin: Path, packed: Path) -> list[Path]:
    x = RNG.integers(0, 256, (7, 32, 32, 3), np.uint8)
    for i, batch in enumerate((*images.BATCHES, "test_batch")):
        write_batch(origin / images.CIFAR10 / batch, x[i : i + 1], labels=[i])
    return [tar_gz(packed / "cifar-10-python.tar.gz", origin)]


def cifar100(origin: Path, packed: Path) -> list[Path]:
    x = RNG.integers(0, 256, (7, 32, 32, 3), np.uint8)
    write_batch(origin / "cifar-100-python" / "train", x[:5], fine_labels=[4, 2, 99, 0, 50])
    write_batch(origin / "cifar-100-python" / "test", x[5:], fine_labels=[98, 7])
    return [tar_gz(packed / "cifar-100-python.tar.gz", origin)]


def draw(path: Path, side: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(RNG.integers(0, 256, (side, side, 3), np.uint8)).save(path)


def cinic10(origin: Path, packed: Path) -> list[Path]:
    """The archive has no folder with its name."""
    for part in ("train", "valid", "test"):
        for name in images.CIFAR10_CLASSES:
            draw(origin / "CINIC-10" / part / name / "a.png", 32)
    return [tar_gz(packed / "CINIC-10.tar.gz", origin / "CINIC-10")]


def tiny_imagenet(origin: Path, packed: Path) -> list[Path]:
    folder, wnids = origin / "tiny-imagenet-200", ["n01", "n02"]
    for wnid in wnids:
        draw(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", 64)
    draw(folder / "val" / "images" / "val_0.JPEG", 64)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t63\t63\n")
    return [zipped(packed / "tiny-imagenet-200.zip", origin)]


def femnist(origin: Path, packed: Path) -> list[Path]:
    (train, _), (test, _) = characters({"f0000_14": 3, "f0001_41": 2}), characters({"f0000_14": 1, "f0001_41": 1})
    write_femnist(origin, "tff lzma", train, test)
    return [origin / "emnist_all.sqlite.lzma"]


PLAYS = {
    "train": {"JULIET": ["O Romeo", "Ay me!"], "ROMEO": ["It is the east, and Juliet is the sun."]},
    "test": {"JULIET": ["Good night"], "ROMEO": ["I"]},
}


def shakespeare_(origin: Path, packed: Path) -> list[Path]:
    splits: Any = {part: {r: (t, [0] * len(t)) for r, t in roles.items()} for part, roles in PLAYS.items()}
    write_tff_database(origin / "shakespeare.sqlite.lzma", splits, ("snippets", "label"))
    return [origin / "shakespeare.sqlite.lzma"]


def movielens(origin: Path, packed: Path) -> list[Path]:
    (origin / "ml-1m").mkdir()
    users = [f"{user}::M::25::{user}::48067" for user in (1, 2)]
    ratings = [f"{user}::{movie}::5::{10**9 + movie}" for user in (1, 2) for movie in range(user, user + 5)]
    (origin / "ml-1m" / "users.dat").write_text("\n".join(users) + "\n")
    (origin / "ml-1m" / "ratings.dat").write_text("\n".join(ratings) + "\n")
    return [zipped(packed / "ml-1m.zip", origin)]


FORMS: dict[str, Callable[[Path, Path], list[Path]]] = {
    form.__name__.strip("_"): form
    for form in (
        mnist, fashion_mnist, emnist, cifar10, cifar100, cinic10, tiny_imagenet, femnist, shakespeare_, movielens
    )
}  # fmt: skip


def write(name: str, tmp_path: Path) -> tuple[Path, list[Path]]:
    """Returns the folder with the files as the readers need them, and the files as they are published."""
    origin, packed = tmp_path / "origin", tmp_path / "packed"
    origin.mkdir()
    packed.mkdir()
    return origin, FORMS[name](origin, packed)


@pytest.mark.parametrize("name", FORMS)
def test_the_readers_read_each_of_the_forms(tmp_path: Path, site: Site, offer: Callable, name: str) -> None:
    origin, paths = write(name, tmp_path)
    offer(name, paths)
    options: dict[str, Any] = {"partition": iid(2)} if name in ("emnist", "mnist", "fashion_mnist") else {}
    options |= {} if datasets.RECORDS[name].by_writer or options else {"partition": iid(1)}
    options |= {"test_negatives": 1} if name == "movielens" else {}
    data = load(name, download=True, **options)
    same(data, load(name, data_dir=origin, **options))
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(
        {given.partition("/")[0] for given in DOWNLOADS[name].gives}
    )
    asked = len(site.log)
    assert asked == len(paths)
    same(load(name, download=True, **options), data)
    assert str(datasets.download(name)) == datasets.locate(name) and len(site.log) == asked


def test_every_download_has_a_form() -> None:
    assert FORMS.keys() == DOWNLOADS.keys()


def test_emnist_has_all_splits_after_one_download(tmp_path: Path, site: Site, offer: Callable) -> None:
    origin, paths = write("emnist", tmp_path)
    offer("emnist", paths)
    datasets.download("emnist")
    for split in images.EMNIST:
        assert datasets.locate("emnist", split=split) != "no"
        assert datasets.download("emnist", split=split).name == f"emnist-{split}-train-images-idx3-ubyte.gz"
    assert len(site.log) == 1


# ---------------------------------------------------------------- Shakespeare


def test_shakespeare_has_the_next_characters_as_labels(tmp_path: Path) -> None:
    """As in FedJAX: with the length 3, ABCD and E become ^AB, CD$ and ^E0, with the labels ABC, D$^ and E$0."""
    origin, _ = write("shakespeare", tmp_path)
    data = load("shakespeare", data_dir=origin, length=5)
    assert data.sizes.tolist() == [-(-(9 + 8 - 1) // 5), -(-39 // 5)]
    ids = [1, *(3 + shakespeare.CHARACTERS.index(c) for c in b"O Romeo"), 2, 1]
    x, y = data.client(0)
    assert x.dtype == np.int32 and x.ravel()[:10].tolist() == ids and y.ravel()[:9].tolist() == ids[1:]
    assert x[-1].tolist()[1:] == y[-1].tolist()[1:] == [0] * 4 and y[-1, 0] == 2  # 16 characters in four rows of five
    assert data.y_test is not None and data.y_test.max() < datasets.num_classes("shakespeare") == 90
    assert data.test_sizes is not None and data.test_sizes.tolist() == [3, 1]
    assert shakespeare.IDS[ord("~")] == shakespeare.IDS[200] == 89
    run = fd.parse_run(f"--dataset shakespeare:length=5 --data-dir {origin} --algorithm fedavg --cohort 1")
    assert run.config["model"]["name"] == "decoder" and run.config["model"]["vocabulary"] == 90


def test_another_database_is_not_shakespeare(tmp_path: Path) -> None:
    femnist(tmp_path, tmp_path)
    (tmp_path / "emnist_all.sqlite.lzma").rename(tmp_path / "shakespeare.sqlite.lzma")
    with pytest.raises(ValueError, match=r"shakespeare\.sqlite\.lzma: split must be one of 'all_test', .* got 'train'"):
        load("shakespeare", data_dir=tmp_path)
    numbers: Any = {part: {"ROMEO": ([0.5], [0])} for part in PLAYS}
    for names in (("pixels", "label"), ("snippets", "label")):  # no such column, and one of numbers
        (tmp_path / "shakespeare.sqlite").unlink(missing_ok=True)
        write_tff_database(tmp_path / "shakespeare.sqlite", numbers, names)
        with pytest.raises(ValueError, match=r"shakespeare\.sqlite: its examples must have the text snippets, got "):
            load("shakespeare", data_dir=tmp_path)


# ---------------------------------------------------------------- servers with faults


@pytest.fixture
def cifar(tmp_path: Path, offer: Callable) -> fd.FederatedData:
    """The data that the server has as cifar100."""
    origin, paths = write("cifar100", tmp_path)
    offer("cifar100", paths)
    return load("cifar100", iid(1), origin)


FILE = "/cifar-100-python.tar.gz"


def downloaded() -> fd.FederatedData:
    return load("cifar100", iid(1), download=True)


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path, site: Site, cifar: fd.FederatedData) -> None:
    right = site.files[FILE]
    site.files[FILE] = right[:500] + bytes([right[500] ^ 1]) + right[501:]
    with pytest.raises(DamagedError, match=r"cifar-100-python\.tar\.gz must have the checksum sha256:\w{64}, got"):
        downloaded()
    assert [path.name for path in (tmp_path / "data").rglob("*") if path.is_file()] == ["lock"]
    site.files[FILE] = right
    same(downloaded(), cifar)


def test_a_download_that_broke_off_continues(tmp_path: Path, site: Site, cifar: fd.FederatedData) -> None:
    site.cuts = [10_000, 2_000, 0]  # the third response is empty, so the download stops
    with pytest.raises(ConnectionError, match="127.0.0.1:.* failed: .*cifar-100-python.tar.gz, save it in"):
        downloaded()
    assert site.log == [(FILE, None), (FILE, "bytes=10000-"), (FILE, "bytes=12000-")]
    part = tmp_path / "data" / "downloads" / "cifar100" / "cifar-100-python.tar.gz.part"
    assert part.read_bytes() == site.files[FILE][:12_000]
    same(downloaded(), cifar)
    assert site.log[3:] == [(FILE, "bytes=12000-")]


@pytest.mark.parametrize(
    ("faults", "ranges"),
    [
        ({"has_ranges": False, "cuts": [10_000]}, [None, "bytes=10000-"]),  # the whole file is sent again
        ({"waits": True, "cuts": [10_000]}, [None, "bytes=10000-"]),  # the server is silent
        ({"packs": True}, [None]),  # some servers declare a .gz file as a packed response
    ],
)
def test_a_server_with_a_fault_is_understood(site: Site, cifar, monkeypatch, faults: dict, ranges: list) -> None:
    monkeypatch.setattr(downloading, "TIMEOUT", (10.0, 0.2))
    for name, value in faults.items():
        setattr(site, name, threading.Event() if name == "waits" else value)
    same(downloaded(), cifar)
    assert site.log == [(FILE, wanted) for wanted in ranges]


def test_redirections_are_followed(site: Site, cifar: fd.FederatedData) -> None:
    site.files["/elsewhere"] = site.files.pop(FILE)
    site.moved, site.cuts = {FILE: "/elsewhere"}, [10_000]
    same(downloaded(), cifar)
    assert site.log == [(FILE, None), ("/elsewhere", None), (FILE, "bytes=10000-"), ("/elsewhere", "bytes=10000-")]


def test_a_missing_file_and_one_of_another_size_are_named(tmp_path: Path, site: Site, cifar: fd.FederatedData) -> None:
    right = site.files.pop(FILE)
    with pytest.raises(ConnectionError, match=r"\(the server answers 404 Not Found\)"):
        downloaded()
    for wrong in (right + b"!", b"<html>Please log in</html>"):
        site.files[FILE] = wrong
        with pytest.raises(ConnectionError, match=f"must send {len(right)}, but has {len(wrong)}"):
            downloaded()
    assert len(site.log) == 3 and not (tmp_path / "data" / "cifar-100-python").exists()


def test_an_endless_response_is_refused(site: Site, cifar: fd.FederatedData) -> None:
    site.has_lengths = False
    same(downloaded(), cifar)
    shutil.rmtree(datasets.download("cifar100"))
    site.files[FILE] += bytes(2**26)  # more than fits into the buffers of a connection
    with pytest.raises(DamagedError, match="checksum"):
        downloaded()
    assert site.left.wait(20)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"has_ranges": False, "cuts": [10_000] * 9}, "cifar100 cannot be downloaded"),
        ({"length": "abc"}, "the server must send .*, but has abc"),
        ({"moved": {FILE: "http://[::1"}}, "cifar100 cannot be downloaded"),
        ({"moved": {FILE: "ftp://127.0.0.1/a"}}, "cifar100 cannot be downloaded"),
    ],
)
def test_a_server_without_the_file_is_given_up(site: Site, cifar: fd.FederatedData, faults: dict, said: str) -> None:
    for name, value in faults.items():
        setattr(site, name, value)
    with pytest.raises(ConnectionError, match=said):
        downloaded()
    assert len(site.log) <= 2


# ---------------------------------------------------------------- archives


def tar(*names: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 9999
            archive.addfile(member, io.BytesIO(bytes(range(200)) * 50))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tar("a"), "they must have cifar-100-python, got a"),
        (tar(), "they must have cifar-100-python, got nothing"),
        (tar("a")[:-50], ""),
        (b"<html>", ""),
        (tar("../a"), "outside"),
    ],
)
def test_archives_without_the_files_are_refused(tmp_path: Path, offer: Callable, content: bytes, said: str) -> None:
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(content)
    offer("cifar100", [tmp_path / "cifar-100-python.tar.gz"])
    with pytest.raises(DamagedError, match=f"the files of cifar100 in .* cannot be unpacked .*{said}") as error:
        downloaded()
    assert "make room" not in str(error.value)
    left = [path.name for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert sorted(left) == ["cifar-100-python.tar.gz", "lock"] and not (tmp_path / "a").exists()


# ---------------------------------------------------------------- without a network


@pytest.fixture
def offline(tmp_path: Path, offer: Callable) -> str:
    """The address of mnist, where no server is."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    _, paths = write("mnist", tmp_path)
    offer("mnist", paths, address)
    return address


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, offline: str, capsys) -> None:
    folder, names = tmp_path / "data" / "downloads" / "mnist", [path.name for path in (tmp_path / "packed").iterdir()]
    assert cli.main(["data", "download", "mnist"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "Connection refused" in err and "Traceback" not in err
    assert all(f"{offline}/{name}" in err for name in names) and f"save them in {folder}" in err
    with pytest.raises(ConnectionError) as error:
        load("mnist", download=True)
    assert f"fedjax-drift: error: {error.value}\n" == err

    # What the line says works.
    shutil.copy(tmp_path / "packed" / names[0], folder)
    with pytest.raises(ConnectionError) as error:
        load("mnist", download=True)
    assert names[0] not in str(error.value) and names[1] in str(error.value)
    shutil.copytree(tmp_path / "packed", folder, dirs_exist_ok=True)
    assert cli.main(["data", "download", "mnist"]) == 0
    assert capsys.readouterr().out == f"mnist: {tmp_path / 'data' / 'mnist.npz'}\n"
    same(load("mnist", iid(2)), load("mnist", iid(2), tmp_path / "origin"))


def test_a_damaged_copy_is_not_used(tmp_path: Path, offline: str) -> None:
    folder = tmp_path / "data" / "downloads" / "mnist"
    shutil.copytree(tmp_path / "packed", folder)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(ConnectionError, match=r"download \S*/t10k-labels-idx1-ubyte.gz, save it in"):
        load("mnist", download=True)
    assert not (tmp_path / "data" / "mnist.npz").exists()


# ---------------------------------------------------------------- folders and options


def test_an_interrupted_unpacking_leaves_nothing_and_is_repeated(
    tmp_path: Path, site: Site, cifar: fd.FederatedData, monkeypatch
) -> None:
    record = datasets.RECORDS["cifar100"]
    assert record.downloads is not None

    def full(paths: list[Path], new: Path) -> Path:
        (new / "cifar-100-python").mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        broken = replace(record, downloads=record.downloads._replace(unpack=full))
        patch.setitem(datasets.RECORDS, "cifar100", broken)
        with pytest.raises(ValueError, match=r"room for the files of cifar100, .* \(No space left on device\)"):
            downloaded()
    assert not (tmp_path / "data" / "cifar-100-python").exists()
    same(downloaded(), cifar)
    assert len(site.log) == 1


def test_an_incomplete_folder_is_not_touched(tmp_path: Path, cifar: fd.FederatedData) -> None:
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    (folder / "train").write_text("mine")
    with pytest.raises(ValueError, match=r"cifar-100-python must not exist .*, got an incomplete folder: rename"):
        downloaded()
    assert (folder / "train").read_text() == "mine"
    folder.rename(tmp_path / "mine")
    same(downloaded(), cifar)


def test_two_downloads_of_a_data_set_do_not_disturb_each_other(tmp_path: Path, cifar: fd.FederatedData) -> None:
    with fd.data.downloading.lock_folder(tmp_path / "data" / "downloads" / "cifar100", "this test"):
        with pytest.raises(ValueError, match="the folder of a download must be used by one run at a time"):
            downloaded()


def test_other_files_of_the_data_set_are_not_downloaded_again(
    tmp_path: Path, site: Site, cifar: fd.FederatedData, capsys
) -> None:
    """`load` uses what is there. The command downloads the published files, and says which ones are read."""
    arrays = {"x_train": cifar.x[:1], "y_train": cifar.y[:1], "x_test": cifar.x_test, "y_test": cifar.y_test}
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "cifar100.npz", **arrays)  # type: ignore[arg-type]
    assert len(downloaded().x) == 1 and not site.log
    assert cli.main(["data", "download", "cifar100"]) == 0
    data = tmp_path / "data"
    out = capsys.readouterr().out
    assert out == f"cifar100: {data / 'cifar-100-python'} ({data / 'cifar100.npz'} is read in place of it)\n"


def test_the_first_folder_is_used(tmp_path: Path, cifar: fd.FederatedData, monkeypatch, capsys) -> None:
    given = tmp_path / "given"
    assert cli.main(["data", "download", "cifar100", "--data-dir", str(given)]) == 0
    assert capsys.readouterr().out == f"cifar100: {given / 'cifar-100-python'}\n"
    monkeypatch.delenv("FEDJAX_DRIFT_DATA")
    assert datasets.download("cifar100") == tmp_path / "cache" / "cifar-100-python"


@pytest.mark.parametrize(
    "words, said",
    [
        ("download", "must have NAME, or download and one or more names, got 'download'"),
        ("mnist cifar10", "must have NAME, or download and one or more names, got 'mnist cifar10'"),
        ("mnist download", "must have NAME, or download and one or more names, got 'mnist download'"),
        ("download download", "must have NAME, or download and one or more names, got 'download download'"),
        ("download mnits", "got 'mnits': did you mean 'mnist'?"),
        ("download glyphs", "must be one of mnist, .*, got glyphs: load makes it"),
        ("download agnews", r"must be one of mnist, .*, got agnews: download AG's News"),
        ("download femnist:source=leaf", r"emnist_all\.sqlite\.lzma'?, got femnist: run LEAF's"),
        ("download movielens:size=latest-small", r"ml-1m/ratings\.dat.*, got movielens: "),
    ],
)
def test_wrong_commands_are_refused(words: str, said: str, capsys) -> None:
    assert cli.main(["data", *words.split()]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_load_refuses_what_cannot_be_downloaded() -> None:
    with pytest.raises(ValueError, match="the download must be one of .* got agnews"):
        load("agnews", download=True)
    with pytest.raises(ValueError, match="download must be True or False, got 1"):
        load("mnist", download=1)  # type: ignore[arg-type]
    assert len(load("synthetic", download=True).x)
    with pytest.raises(FileNotFoundError, match="pass download=True, or run `fedjax-drift data download emnist`, or "):
        load("emnist", split="balanced")


# ---------------------------------------------------------------- the table


def test_the_listing_shows_what_can_be_downloaded(tmp_path: Path, capsys) -> None:
    assert cli.main(["data"]) == 0
    listed = capsys.readouterr().out
    for name, wanted in DOWNLOADS.items():
        size = f"{wanted.size / 1e6:,.1f} MB from {wanted.host}"
        assert re.search(rf"^{name} +\d+  no \(download: {re.escape(size)}\)$", listed, re.MULTILINE)
        assert f"fedjax-drift data download {name}," in listed
    described = {row["name"]: row for row in datasets.describe()}
    assert described["cifar10"]["download"] == 170_498_071 and described["cifar10"]["server"] == "www.cs.toronto.edu"
    assert described["agnews"]["download"] is None is described["agnews"]["server"]
    (tmp_path / "data" / "cifar-100-python").mkdir(parents=True)
    for part in ("train", "test"):
        (tmp_path / "data" / "cifar-100-python" / part).touch()
    assert cli.main(["data"]) == 0
    assert f"{tmp_path / 'data' / 'cifar-100-python'}\n" in capsys.readouterr().out


def test_the_table_is_complete_and_documented() -> None:
    page = (DOCS / "data.md").read_text()
    for name, wanted in DOWNLOADS.items():
        assert set(wanted.gives) & {file for variant in variants(name) for file in variant.files}
        assert len({file.name for file in wanted.files}) == len(wanted.files)
        for file in wanted.files:
            kind, digits = file.checksum.split(":")
            assert re.fullmatch({"sha256": "[0-9a-f]{64}", "md5": "[0-9a-f]{32}"}[kind], digits)
            assert f"| `{name}` | <{file.address}> | {file.size:,} | {kind} `{digits}` | {file.source} |" in page


def variants(name: str) -> list[Any]:
    record = datasets.RECORDS[name]
    return [record.variant({record.selector: value}) for value in record.variants] or [record]


def test_checksums_are_those_of_tensorflow_datasets() -> None:
    spec = importlib.util.find_spec("tensorflow_datasets")
    if spec is None or spec.origin is None:
        pytest.skip("tensorflow-datasets is not installed")
    known = {}
    for path in (Path(spec.origin).parent / "url_checksums").glob("*.txt"):
        for line in path.read_text().splitlines():
            address, size, digits, *_ = re.split(r"\s+", line)
            known[address] = (int(size), f"sha256:{digits}")
    rows = [file for wanted in DOWNLOADS.values() for file in wanted.files if file.source == TFDS]
    assert len(rows) == 10 and all(known[file.address] == (file.size, file.checksum) for file in rows)
