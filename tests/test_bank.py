"""Client stores: `gather` returns the committed states, also after interrupts, kills and full disks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedjax_drift.errors import DamagedError, InUseError
from fedjax_drift.storage import client_files, client_store
from fedjax_drift.storage.client_store import ClientStore

pytestmark = pytest.mark.thorough

INITIAL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(-1)}


def states_of(ids: np.ndarray, t: int) -> dict:
    """Returns states [K, ...] whose values depend on the client and the round."""
    ids = np.asarray(ids)
    w = (1000 * t + ids)[:, None, None] + np.arange(6).reshape(1, 2, 3) / 8
    return {"w": w.astype(np.float32), "n": np.full(len(ids), t, np.int32)}


def check(bank: ClientStore, last: dict[int, int]) -> None:
    """Checks the states of all clients in the store.

    last: the last round of each client that has taken part. Its state must be that of `states_of` for this round. All
    other clients must have the initial state.
    """
    N = bank.num_clients
    got = bank.gather(np.arange(N + 1))
    want = jax.tree.map(lambda leaf: np.stack([leaf] * (N + 1)), INITIAL)
    for i, t in last.items():
        jax.tree.map(lambda leaf, new, i=i: leaf.__setitem__(i, new[0]), want, states_of([i], t))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert bank.seen == len(last)


@pytest.fixture(params=["memory", "file"])
def bank(request, tmp_path):
    with ClientStore.create(INITIAL, 20, None if request.param == "memory" else tmp_path / "bank") as bank:
        yield bank


MIXED = {
    "a": (np.ones((2, 3), np.float32), np.array(True)),
    "b": [np.zeros((0, 4), np.float64), np.array([1.5, -2], jax.numpy.bfloat16), np.arange(5, dtype=np.int8)],
    "c": np.uint16(7),
}


@pytest.mark.parametrize("where", ["memory", "file", "file in pieces"])
def test_a_store_equals_a_dict_over_random_operations(where, tmp_path, monkeypatch) -> None:
    if where == "file in pieces":  # as with states that one system call cannot write completely

        class InPieces(client_files.FileIO):
            def write(self, content) -> int:
                return super().write(content[:7])

        monkeypatch.setattr(client_files, "FileIO", InPieces)
    N, rng = 13, np.random.default_rng(0)
    path = None if where == "memory" else tmp_path / "bank"
    bank, model = ClientStore.create(MIXED, N, path), {}

    def random_states(K: int) -> dict:
        return jax.tree.map(lambda a: rng.integers(0, 2, (K, *np.shape(a))).astype(np.asarray(a).dtype), MIXED)

    for t in range(1, 61):
        ids = rng.permutation([*rng.choice(N, rng.integers(0, 8), replace=False), *[N] * rng.integers(0, 3)])
        ids, keep, new = ids.astype(np.int32), rng.random(len(ids)) < 0.8, random_states(len(ids))
        bank.commit(ids, new, t, keep if t % 2 else None)
        for k, i in enumerate(ids):
            if i < N and (keep[k] or not t % 2):
                model[i] = jax.tree.map(lambda leaf, k=k: leaf[k].copy(), new)
        if path is not None and t % 5 == 0:
            bank.close()
            bank = ClientStore.open(path, MIXED, N)
        asked = rng.integers(0, N + 1, 9)
        got = bank.gather(asked)
        want = jax.tree.map(lambda *leaves: np.stack(leaves), *[model.get(i, MIXED) for i in asked])
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: np.asarray(a).dtype, MIXED)
        jax.tree.map(lambda leaf: leaf.fill(1), got)  # these are copies, so the store must not change
        assert (bank.round, bank.seen) == (t, len(model))


def test_only_clients_that_have_taken_part_use_space(tmp_path) -> None:
    N, initial = 100_000, {"w": np.zeros(2_500, np.float32)}
    with ClientStore.create(initial, N) as memory, ClientStore.create(initial, N, tmp_path / "bank") as file:
        for bank in (memory, file):
            for t in range(1, 6):  # the same 50 clients in every round
                ids = np.arange(0, N, N // 50)
                bank.commit(ids, {"w": np.ones((50, 2_500), np.float32)}, t)
            assert bank.seen == 50
            assert bank.nbytes <= 4 * N + 101 * 10_004
        on_disk = sum(512 * path.stat().st_blocks for path in (tmp_path / "bank").iterdir())
        assert on_disk < 4 * N + 110 * 10_000
        assert repr(file) == f"ClientStore(100000 clients, 50 seen, round 5, 1.4 MB in {tmp_path / 'bank'})"


def test_gathered_states_are_aligned(bank) -> None:
    """JAX's CPU backend uses arrays with this alignment without copying them."""
    for leaf in jax.tree.leaves(bank.gather(np.arange(7))):
        assert leaf.ctypes.data % 64 == 0


FILES = [module.__file__ for module in (client_store, client_files)]


def test_an_interrupted_commit_stores_all_states_of_the_round_or_none(bank, tmp_path) -> None:
    """Raises KeyboardInterrupt at every line of a commit.

    A copy of the folder is checked too, because a kill would leave the folder in this condition.
    """
    last: dict[int, int] = {}
    interrupted = True
    outcomes = set()
    for moment in itertools.count():
        if not interrupted:
            break
        interrupted, before, lines = False, bank.round, itertools.count()
        ids = np.array([(before + j) % 20 for j in (0, 7, 14)])

        def trace(frame, event, arg, moment=moment, lines=lines):
            if frame.f_code.co_filename not in FILES:
                return None
            if event == "line" and next(lines) == moment:
                raise KeyboardInterrupt
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            bank.commit(ids, states_of(ids, before + 1), before + 1)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(previous)
        if (tmp_path / "bank").exists():
            shutil.copytree(tmp_path / "bank", tmp_path / "copy")
            with ClientStore.open(tmp_path / "copy", INITIAL, 20) as copy:
                assert copy.round == bank.round
                check(copy, last | (dict.fromkeys(ids.tolist(), before + 1) if copy.round > before else {}))
            shutil.rmtree(tmp_path / "copy")
        outcomes.add((interrupted, bank.round - before))
        if bank.round > before:
            last |= dict.fromkeys(ids.tolist(), before + 1)
        check(bank, last)
    assert {(True, 0), (False, 1)} <= outcomes
    assert moment > 30


# A process that has not started JAX forks children. Each child commits and pins until it is killed at a random moment.
KILLS = """
import os, random, signal, sys, time
import numpy as np
from fedjax_drift.storage.client_store import ClientStore

path, N, K, initial = sys.argv[1], 30, 6, {"a": np.zeros(3_000, np.float32), "b": np.int64(0)}

def ids_of(round):
    return np.random.default_rng(round).choice(N, K, replace=False)

def commit_for_ever(pipe):
    bank = ClientStore.open(path, initial, N)
    while True:
        round = bank.round + 1
        bank.commit(ids_of(round), {"a": np.full((K, 3_000), round, np.float32), "b": np.full(K, round)}, round)
        if round % 3 == 0:
            bank.pin()
            for old in bank.pins[:-2]:
                bank.unpin(old)
        os.write(pipe, b".")

def check(bank):
    last = np.zeros(N)
    for round in range(1, bank.round + 1):
        last[ids_of(round)] = round
    got = bank.gather(np.arange(N))
    assert (got["b"] == last).all() and (got["a"] == last[:, None]).all(), (kill, bank.round)

ClientStore.create(initial, N, path).close()
random.seed(0)
rounds = pins = 0
for kill in range(50):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        commit_for_ever(write)
    os.close(write)
    for _ in range(1 + kill % 4):
        assert os.read(read, 1) == b"."
    time.sleep(0.02 * random.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    with ClientStore.open(path, initial, N) as bank:
        check(bank)
        rounds, pinned = max(rounds, bank.round), bank.pins
        assert len(pinned) <= 3 and bank.nbytes < 6 * N * 12_012
    for round in pinned[::-1] if kill % 2 else ():  # from the newest on, as a restore that finds damage would
        with ClientStore.open(path, initial, N, round=round) as bank:
            assert bank.round == round
            check(bank)
        pins += 1
print(rounds, pins)
"""


def test_a_kill_at_any_moment_loses_no_committed_state_and_no_pin(tmp_path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLS, str(tmp_path / "bank")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rounds, pins = map(int, done.stdout.split())
    assert rounds >= 30 and pins >= 20


def test_a_store_can_return_to_a_pinned_round(tmp_path) -> None:
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        for t in range(1, 6):
            bank.commit([3, t + 3], states_of([3, t + 3], t), t)
            if t in (2, 4):
                bank.pin()
        assert bank.pins == [2, 4]
        end = bank._table.end
        bank.unpin(4)
        bank.unpin(7)  # round 7 has no pin, so this has no effect
        bank.commit([3, 9], states_of([3, 9], 6), 6)
        # The records that only the pin of round 4 used are free again.
        assert bank.pins == [2] and bank._table.end <= end + 1
    (tmp_path / "bank/index").unlink()  # not needed to return to a pin
    with ClientStore.open(tmp_path / "bank", INITIAL, 20, round=2) as bank:
        check(bank, {3: 2, 4: 1, 5: 2})
        assert bank.round == 2
        bank.commit([3], states_of([3], 3), 3)
    with ClientStore.open(tmp_path / "bank", INITIAL, 20) as bank:
        check(bank, {3: 3, 4: 1, 5: 2})
    with pytest.raises(ValueError, match="which has no index.4"):
        ClientStore.open(tmp_path / "bank", INITIAL, 20, round=4)
    pin = tmp_path / "bank/index.2"
    pin.write_bytes(pin.read_bytes()[:-1])
    with pytest.raises(ValueError, match="index.2 does not contain what was written"):
        ClientStore.open(tmp_path / "bank", INITIAL, 20, round=2)
    with ClientStore.open(tmp_path / "bank", INITIAL, 20) as bank:
        assert bank.pins == []


@contextlib.contextmanager
def no_fallocate():
    def full(file, start, size):
        os.ftruncate(file, start + size // 2)  # a part of the space was allocated
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        yield


@contextlib.contextmanager
def file_limit(most: int = 3 * 32 + 10):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full, taken", [(no_fallocate, 0), (file_limit, 0), (lambda: file_limit(230), 2 * 32)])
def test_a_full_disk_loses_nothing(full, taken, tmp_path) -> None:
    """The disk is full when the records are written, or when the index is written (230 bytes fit six records)."""
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        bank.commit([3, 4], states_of([3, 4], 1), 1)
        size = (tmp_path / "bank/states").stat().st_size
        with (
            full(),
            pytest.raises(OSError, match="round 2 could not be stored .*: the client store stays at round 1") as error,
        ):
            bank.commit([4, 5], states_of([4, 5], 2), 2)
        assert error.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert not (tmp_path / "bank/index.new").exists()
        assert (tmp_path / "bank/states").stat().st_size == size + taken
        assert bank.round == 1
        check(bank, {3: 1, 4: 1})
        bank.commit([4, 5], states_of([4, 5], 2), 2)
    with ClientStore.open(tmp_path / "bank", INITIAL, 20) as bank:
        check(bank, {3: 1, 4: 2, 5: 2})


def test_a_full_disk_while_creating_a_store_raises(tmp_path) -> None:
    with file_limit(300), pytest.raises(ValueError, match="File too large"):
        ClientStore.create(INITIAL, 1000, tmp_path / "bank")
    ClientStore.create(INITIAL, 1000, tmp_path / "bank").close()


def test_a_store_cannot_be_opened_twice(tmp_path) -> None:
    program = "import sys; from fedjax_drift.storage.client_store import ClientStore as Store; "
    program += "Store.open(sys.argv[1], {'w': 0.0}, 5)"
    with ClientStore.create({"w": 0.0}, 5, tmp_path / "bank"):
        command = [sys.executable, "-c", program, str(tmp_path / "bank")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "InUseError: path must be a client store that is not in use" in done.stderr
        with pytest.raises(InUseError, match="open already, in another process or in this one: close it"):
            ClientStore.open(tmp_path / "bank", {"w": 0.0}, 5)
    ClientStore.open(tmp_path / "bank", {"w": 0.0}, 5).close()


OTHERS = [
    ({"num_clients": 21}, "num_clients: 20 in the client store, not 21"),
    (
        {"identity": {"algorithm": "feddyn", "rows": 7}},
        """identity 'algorithm': "scaffold" in .* store, not "feddyn\"""",
    ),
    ({"identity": {"algorithm": "scaffold", "rows": "7"}}, "'rows': 7 in the client store, not \"7\""),
    ({"identity": {"algorithm": "scaffold"}}, "'rows': 7 in the client store, not nothing"),
    (
        {"initial": INITIAL | {"w": np.zeros((3, 2), "f4")}},
        r"\['w'\]: float32\[2, 3\] in the client store, not float32",
    ),
    ({"initial": INITIAL | {"w": np.zeros((2, 3))}}, r"\['w'\]: float32\[2, 3\] in the client store, not float64"),
    ({"initial": {"n": np.int32(0), "v": 1.0}}, r"\['v'\]: nothing in .*; leaf \['w'\]: float32\[2, 3\] in .* nothing"),
]


@pytest.mark.parametrize("other, message", OTHERS)
def test_a_store_of_another_simulation_is_refused(other, message, tmp_path) -> None:
    mine = {"initial": INITIAL, "num_clients": 20, "identity": {"algorithm": "scaffold", "rows": 7}}
    with ClientStore.create(path=tmp_path / "bank", **mine) as bank:
        bank.commit([3], states_of([3], 1), 1)
    with pytest.raises(ValueError, match=f"belongs to another simulation: .*{message}"):
        ClientStore.open(tmp_path / "bank", **(mine | other))
    with ClientStore.open(tmp_path / "bank", **mine) as bank:
        check(bank, {3: 1})


def test_a_reopened_store_keeps_its_initial_state(tmp_path) -> None:
    """A resumed run has later parameters, from which an algorithm may compute another initial state."""
    ClientStore.create(INITIAL, 20, tmp_path / "bank").close()
    with ClientStore.open(tmp_path / "bank", jax.tree.map(np.zeros_like, INITIAL), 20) as bank:
        check(bank, {})


def flipped(byte: int):
    return lambda b: b[:byte] + bytes([b[byte] ^ 16]) + b[byte + 1 :]


CHANGED = "is damaged, {} does not contain what was written: go back to"
WHOSE = {(0, 20, 31): "the initial state", (32, 63): "the state of client 5", (64, 95): "the state of client 3"}
DAMAGES = [
    ("index", lambda b: b[:-1], "index does not contain what was written"),
    ("index", lambda b: b.replace(b'"round": 1', b'"round": 2'), "index does not contain what was written"),
    ("index", lambda b: b[:-10] + b"\1" + b[-9:], "index does not contain what was written"),
    ("index", lambda b: b[:20], "index can't be read"),
    ("index", lambda b: b"", "index can't be read"),
    ("index", lambda b: b.replace(b'"format": 3', b'"format": 2'), "must be of format 3, got 2: use the version"),
    ("states", lambda b: b[:-1], "states must have 96 bytes, got 95"),
    ("states", lambda b: None, "which has no states"),
    ("index", lambda b: None, "which has no index"),
    # The bytes are in the initial state, or in the record of a client, or in their checksums.
    *(("states", flipped(byte), CHANGED.format(whose)) for bytes_, whose in WHOSE.items() for byte in bytes_),
    ("states", lambda b: b[:32] + b[64:] + b[32:64], CHANGED.format("the state of client 5")),
]


@pytest.mark.parametrize("name, damage, message", DAMAGES)
def test_a_damaged_store_is_refused_and_not_changed(name, damage, message, tmp_path) -> None:
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        bank.commit([5, 3], states_of([5, 3], 1), 1)
    file = tmp_path / "bank" / name
    damaged = damage(file.read_bytes())
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged)
    before = {path.name: path.read_bytes() for path in (tmp_path / "bank").iterdir()}
    with pytest.raises(ValueError if "format" in message else DamagedError, match=message):
        with ClientStore.open(tmp_path / "bank", INITIAL, 20) as bank:
            for client in (5, 3):
                assert bank.gather([client])["n"] == [1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "bank").iterdir()} == before


def test_an_unused_store_can_be_created_again(tmp_path) -> None:
    """A kill before the first save leaves an unused store. It can be created again only with the same arguments."""
    mine = {"initial": INITIAL, "num_clients": 20, "path": tmp_path / "bank", "identity": {"key": "1"}}
    with ClientStore.create(**mine) as bank:
        bank.pin()  # as for a save that was not completed
        with pytest.raises(ValueError, match="must be a client store that is not in use"):
            ClientStore.create(**mine)
    for other in ({"initial": INITIAL | {"n": np.int32(3)}}, {"num_clients": 21}, {"identity": {"key": "2"}}):
        with pytest.raises(ValueError, match="must be a new or empty folder, got .*, which has a client store"):
            ClientStore.create(**mine | other)
    with ClientStore.create(**mine) as bank:
        check(bank, {})
        bank.commit([3], states_of([3], 1), 1)
    with pytest.raises(ValueError, match="must be a new or empty folder, got .*, which has a client store"):
        ClientStore.create(**mine)
    with ClientStore.open(tmp_path / "bank", INITIAL, 20, {"key": "1"}) as bank:
        check(bank, {3: 1})


def test_a_pin_of_another_round_is_detected(tmp_path) -> None:
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        for t in (1, 2):
            bank.commit([3], states_of([3], t), t)
            bank.pin()
    shutil.copy(tmp_path / "bank/index.1", tmp_path / "bank/index.2")
    with pytest.raises(DamagedError, match=r"is damaged, its file index.2 is of round 1"):
        ClientStore.open(tmp_path / "bank", INITIAL, 20, round=2)
    (tmp_path / "bank/index.2").unlink()
    (tmp_path / "bank/index.2").mkdir()
    with ClientStore.open(tmp_path / "bank", INITIAL, 20) as bank:
        assert bank.pins == [1]


def test_truncating_an_open_store_raises(tmp_path) -> None:
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        bank.commit([3, 5], states_of([3, 5], 1), 1)
        os.truncate(tmp_path / "bank/states", 60)
        with pytest.raises(ValueError, match="states has been truncated"):
            bank.gather([5])


def test_unusable_folders_raise(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/states").write_text("mine")
    with ClientStore.create(INITIAL, 20, tmp_path / "bank") as bank:
        bank.commit([3], states_of([3], 1), 1)
    for path, message in [
        ("file", "must be a folder, got the file"),
        ("file/below", "Not a directory"),
        ("/dev/null/bank", "files can be written and locked, got /dev/null/bank"),
        ("used", "must be a new or empty folder, got .*/used, which has states: choose another folder"),
        (".", "which has bank; file; used"),
        ("bank", "which has a client store: choose another folder, or open"),
    ]:
        with pytest.raises(ValueError, match=message):
            ClientStore.create(INITIAL, 20, tmp_path / path)
    assert (tmp_path / "used/states").read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bank", "file", "used"]


def test_a_closed_store_says_so(bank) -> None:
    bank.close()
    with pytest.raises(ValueError, match="the client store is closed: open it again"):
        bank.gather([3])
