"""Checkpoints: a restored state is bitwise identical to the saved one, or `restore` raises. So runs survive kills."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import thorough
from test_bank import file_limit

import fedjax_drift as fd
from fedjax_drift import cli, disk
from fedjax_drift.errors import InUseError, OtherRunError
from fedjax_drift.simulation import loop, progress
from fedjax_drift.simulation.description import by_name
from fedjax_drift.storage import checkpoint, client_files, client_store, contents, saver
from fedjax_drift.storage.identity import differences

KEY = jax.random.key(3)
ROWS = np.random.default_rng(0)
CLIENTS = [(ROWS.normal(size=(4, 30)).astype(np.float32), ROWS.integers(0, 2, 4)) for _ in range(5)]
DATA = fd.FederatedData.from_clients(CLIENTS, test=CLIENTS[0])
MODEL = fd.Model(init=lambda key: jax.random.normal(key, (30, 20)), apply=lambda w, x: x @ w)


def arrays(state: fd.ServerState) -> list[np.ndarray]:
    clients = state.clients
    if isinstance(clients, client_store.ClientStore):
        clients = clients.gather(np.arange(5))
    clients = jax.tree.map(lambda leaf: leaf[:5], clients)  # sharded client states may have padding
    return jax.tree.leaves(jax.device_get((state.round, jax.random.key_data(state.key), state.server, clients)))


def bits(state: fd.ServerState) -> list[bytes]:
    return [array.tobytes() for array in arrays(state)]


def close(state: fd.ServerState) -> None:
    if isinstance(state.clients, client_store.ClientStore):
        state.clients.close()


def simulation(algorithm: fd.Algorithm | None = None, data: fd.FederatedData = DATA, **options) -> fd.Simulation:
    # With aggregation="paper", a client's initial state depends on the parameters. So a resumed run would differ if it
    # computed the initial state from its later parameters.
    algorithm = fd.algorithms.feddc(0.1, aggregation="paper") if algorithm is None else algorithm
    return fd.Simulation(MODEL, data, algorithm, **({"cohort_size": 2} | options))


def run(sim: fd.Simulation, state: fd.ServerState, rounds: int, checkpoints=None, **options):
    return sim.run(state, rounds, 2, progress=False, checkpoints=checkpoints, **options)


def told(history: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def same(a: fd.ServerState, b: fd.ServerState) -> bool:
    return bits(a) == bits(b)


@pytest.fixture(scope="module")
def device() -> fd.Simulation:
    return simulation()


@pytest.fixture(scope="module")
def sharded() -> fd.Simulation:
    return simulation(bank="sharded")


@pytest.fixture(scope="module")
def uninterrupted(device):
    return run(device, device.init(KEY), 8)


@pytest.fixture
def saved(device, tmp_path) -> fd.Checkpoints:
    """The checkpoints of a run after rounds 2, 4 and 5."""
    checkpoints = fd.Checkpoints(tmp_path / "saved", every=2, best=None)
    run(device, device.init(KEY), 5, checkpoints)
    return checkpoints


@pytest.mark.as_users
@pytest.mark.parametrize("bank", ["device", *map(thorough, ("sharded", "host", "files"))])
def test_a_resumed_run_is_bitwise_identical(bank, uninterrupted, tmp_path, request) -> None:
    where = str(tmp_path / "bank") if bank == "files" else bank
    sim = request.getfixturevalue(bank) if bank in ("device", "sharded") else simulation(bank=where)
    checkpoints = fd.Checkpoints(tmp_path / "run", every=3)
    state, history = run(sim, sim.init(KEY), 7, checkpoints)
    close(state)
    # The second time, the newest round is restored, although the first time has set the client states back to round 3.
    for kept in (3, None):
        state, before = checkpoints.restore(sim, kept)
        assert int(state.round) == (kept or 7) and told(before) == told(history)[: kept or 7]
        if kept == 3:
            state, after = run(sim, state, 5)
            assert same(state, uninterrupted[0])
            assert told(before + after)[:6] == told(uninterrupted[1])[:6]
            close(state)
    state, after = run(sim, state, 1, checkpoints)
    assert same(state, uninterrupted[0])
    assert told(checkpoints.about(8).history) == told(before + after)
    assert told(before + after)[-1] == told(uninterrupted[1])[-1]
    if bank == "files":
        assert state.clients.pins == [r for r in checkpoints.rounds]


def test_a_run_resumes_with_another_number_of_devices_and_another_bank(sharded, uninterrupted, tmp_path) -> None:
    one = simulation(mesh=fd.clients_mesh(jax.local_devices()[:1]))
    run(sharded, sharded.init(KEY), 4, tmp_path)
    state, _ = fd.Checkpoints(tmp_path).restore(one)
    state, _ = run(one, state, 2, tmp_path)
    for a in jax.tree.leaves(state.clients):
        assert len(a) == 5
    state, _ = fd.Checkpoints(tmp_path).restore(sharded)
    for a in jax.tree.leaves(state.clients):
        assert len(a) == 6
    state, _ = run(sharded, state, 2)
    for a, b in zip(arrays(state), arrays(uninterrupted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


OTHERS = {
    "algorithm.alpha: 0.1 in the checkpoint, not 0.2": {"algorithm": fd.algorithms.feddc(0.2, aggregation="paper")},
    'algorithm: "feddc" in the checkpoint, not "fedavg"': {"algorithm": fd.algorithms.fedavg()},
    "cohort_size: 2 in the checkpoint, not 3": {"cohort_size": 3},
    'on_nonfinite: "keep" in the checkpoint, not "drop_client"': {"on_nonfinite": "drop_client"},
    "local.lr: 0.1 in the checkpoint, not 0.3; .*local.optimizer.update: nothing in the checkpoint, not .scale_by": {
        "local": fd.LocalTraining(lr=0.3, optimizer=optax.scale_by_adam(b1=0.5))
    },
    "data.x: .* data.y:": {"data": fd.FederatedData.from_clients(CLIENTS[::-1], test=CLIENTS[0])},
    "data.x_test: .* not null": {"data": fd.FederatedData.from_clients(CLIENTS)},
    'client states: "on the devices" in the checkpoint, not "on the host"': {"bank": "host"},
}


@pytest.mark.parametrize("message", OTHERS)
def test_restoring_with_another_simulation_raises(message, saved) -> None:
    sim = simulation(**OTHERS[message])
    with pytest.raises(OtherRunError, match=f"belong to another simulation: .*{message}"):
        saved.restore(sim)


@pytest.mark.filterwarnings("ignore:.* belong", "ignore:since the checkpoints")
@pytest.mark.parametrize("bank", ["device", *map(thorough, ("host", "files"))])
def test_restoring_with_another_simulation_warns_without_strict(bank, tmp_path) -> None:
    bank = str(tmp_path / "bank") if bank == "files" else bank
    saved, new, sim = fd.Checkpoints(tmp_path / "run"), fd.Checkpoints(tmp_path / "new"), simulation(bank=bank)
    other = simulation(fd.algorithms.feddc(0.2, aggregation="paper"), bank=bank, cohort_size=3)
    state, _ = run(sim, sim.init(KEY), 4, saved)
    states = {4: bits(state)}
    close(state)
    with pytest.raises(OtherRunError, match="cohort_size: 2 in the checkpoint, not 3"):
        saved.restore(other)
    listed = "alpha: 0.1 in the checkpoint, not 0.2; cohort_size: 2 in the checkpoint, not 3: restored nevertheless"
    with pytest.warns(UserWarning, match=f"belong to another simulation: .*{listed}"):
        state, history = saved.restore(other, strict=False)
    assert bits(state) == states[4] and len(history) == 4
    with pytest.raises(OtherRunError, match="belong to another simulation"):
        run(other, state, 1, saved)
    state, _ = run(other, state, 1, new)
    states[5] = bits(state)
    close(state)
    for t in new.rounds:  # with files, this includes round 4, from which the run was resumed
        state, _ = new.restore(other, t)
        assert bits(state) == states[t]
        close(state)
    fewer = fd.FederatedData.from_clients(CLIENTS[:4], test=CLIENTS[0])
    with pytest.raises(
        OtherRunError, match=r"num_clients: 5 in .*, not 4|of 4 clients, got 5|\[5, 30, 20\] .* not .*\[4, "
    ):
        saved.restore(simulation(data=fewer, bank=bank), 4, strict=False)


@pytest.mark.filterwarnings("ignore:.* belong")
def test_restoring_other_arrays_raises_without_strict(device, saved) -> None:
    wider = MODEL._replace(init=lambda key: jnp.ones((30, 2)))
    for misfit, message in [
        (simulation(fd.algorithms.fedavg()), "clients.*: float32.* not nothing"),
        (fd.Simulation(wider, DATA, device.algorithm, cohort_size=2), r"float32\[30, 20\] .* not float32\[30, 2\]"),
        (simulation(bank="host"), r"\['ids'\]: nothing in the checkpoint"),
    ]:
        with pytest.raises(OtherRunError, match=f"have other arrays than this simulation: .*{message}"):
            saved.restore(misfit, strict=False)


def test_checkpoints_of_another_run_are_refused(device, saved) -> None:
    state = saved.restore(device)[0]
    for start, message in [
        (device.init(KEY), "after 0, the round of the state, got round 5 in .*: resume with checkpoints.restore"),
        (saved.restore(device, 4)[0], "after 4, the round of the state, got round 5"),
        (device.init(jax.random.key(4)), r"another simulation: key: \[.*\] in the checkpoint, not \["),
        (device.init(jax.random.key(4))._replace(round=state.round + 3), r"another simulation: key: "),
    ]:
        with pytest.raises(ValueError, match=message):
            run(device, start, 1, saved)
    with pytest.raises(ValueError, match="config.lr: nothing in the checkpoint, not 1"):
        fd.Checkpoints(saved.folder, config={"lr": 1}).restore(device)
    assert saved.rounds == [2, 4, 5]


def test_other_versions_warn_and_another_format_raises(device, saved, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "versions", lambda: {"fedjax_drift": "9.0", "jax": "1.0"})
        with pytest.warns(
            UserWarning, match="written with fedjax_drift .*, now 9.0, jax .*, now 1.0: the run continues"
        ):
            saved.restore(device)
    monkeypatch.setattr(contents, "FORMAT", 6)
    with pytest.raises(ValueError, match="must be of format 6, got 5 in .*: use the version of fedjax_drift"):
        saved.restore(device)


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def replaced_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


FAULTS = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "removed": lambda file: file.unlink(),
    "a folder": replaced_by_folder,
    "of another round": lambda file: shutil.copy(file.parents[1] / "00000004" / file.name, file),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_any_damage_restores_the_previous_checkpoint(fault, device, saved, tmp_path) -> None:
    whole, files = saved.restore(device, 4)[0], sorted(path.name for path in saved.place(5).iterdir())
    assert files == ["about.json", "arrays.0"]
    for file in files:
        broken = fd.Checkpoints(tmp_path / file)
        shutil.copytree(saved.path, broken.path)
        FAULTS[fault](broken.place(5) / file)
        with pytest.warns(UserWarning, match="round 5 in .* is damaged .*: trying the one before"):
            state, history = broken.restore(device)
        assert same(state, whole) and len(history) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:round 6 could not be saved")  # where the pin is a folder
def test_a_damaged_pin_restores_the_previous_checkpoint_and_the_run_goes_on(fault, uninterrupted, tmp_path) -> None:
    sim, saved = simulation(bank=str(tmp_path / "bank")), fd.Checkpoints(tmp_path / "run", every=2)
    close(run(sim, sim.init(KEY), 6, saved)[0])
    pin = tmp_path / "bank/index.6"
    if fault == "of another round":
        shutil.copy(tmp_path / "bank/index.4", pin)
    else:
        FAULTS[fault](pin)
    with pytest.warns(UserWarning, match="round 6 in .* is damaged .*: trying the one before"):
        state, _ = saved.restore(sim)
    assert int(state.round) == 4
    state, _ = run(sim, state, 4, saved)
    assert same(state, uninterrupted[0]) and (saved.path / "00000006.damaged").is_dir()
    close(state)


def test_damaged_checkpoints_are_reported_and_moved_aside(device, saved, uninterrupted) -> None:
    about = saved.place(5) / "about.json"
    about.write_bytes(flipped(about.read_bytes()))
    with pytest.raises(ValueError, match=r"round 5 in .* is damaged .*: choose another of the rounds \[2, 4, 5\]"):
        saved.restore(device, 5)
    with pytest.warns(UserWarning, match="round 5 in .* is damaged .*about.json.*: trying the one before"):
        state, history = saved.restore(device)
    assert sorted(path.name for path in saved.path.iterdir()) == ["00000002", "00000004", "00000005", "lock"]
    state, after = run(device, state, 4, saved)
    assert saved.rounds == [4, 6, 8] and (saved.path / "00000005.damaged/arrays.0").exists()
    assert same(state, uninterrupted[0]) and len(saved.about(8).history) == 8
    for t in saved.rounds:
        (saved.place(t) / "arrays.0").unlink()
    before = sorted(saved.path.rglob("*"))
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(ValueError, match="got 3 damaged ones in"):
        saved.restore(device)
    assert sorted(saved.path.rglob("*")) == before


@pytest.mark.parametrize("dtype", [bool, np.float32, jnp.bfloat16])
def test_checksums_detect_every_flipped_bit_and_do_not_depend_on_devices(dtype) -> None:
    array = np.arange(24).reshape(6, 4).astype(dtype)
    sharded = jax.device_put(array, jax.NamedSharding(fd.clients_mesh(), jax.P("clients")))
    plain = int(contents.checksum(jnp.asarray(array[:5])))
    assert int(jax.jit(contents.checksum, static_argnums=1)(sharded, 5)) == plain
    content = np.frombuffer(array[:5].tobytes(), np.uint8)
    bits = np.arange(0, 8 * len(content), 8 if dtype is bool else 1)
    flips = np.zeros((len(bits), len(content)), np.uint8)
    flips[np.arange(len(bits)), bits // 8] = 1 << bits % 8
    flipped = (content ^ flips).view(dtype).reshape(-1, 5, 4)
    assert plain not in np.asarray(jax.jit(jax.vmap(contents.checksum))(flipped))


def test_the_last_and_the_best_checkpoints_are_kept(device, tmp_path) -> None:
    keeps = saver.rounds_to_keep
    assert keeps({5: 0.1, 1: 0.5, 2: 0.9, 3: None, 4: 0.2}, 2) == {2, 4, 5}
    assert keeps({1: 0.9, 2: 0.9, 3: 0.1}, 1) == {2, 3}  # of equally good rounds, the last one is kept
    assert keeps({1: None, 2: None}, 3) == {1, 2} and keeps({1: None, 2: None}, 1) == {2}
    assert (
        checkpoint.score([{"loss": 0.5}], "loss") == -0.5 and checkpoint.score([{"loss": float("nan")}], "loss") is None
    )
    checkpoints = fd.Checkpoints(tmp_path, every=2, keep=1, best="loss")
    _, history = run(device, device.init(KEY), 8, checkpoints)
    best = min(range(2, 9, 2), key=lambda t: history[t - 1]["loss"])
    assert checkpoints.rounds == sorted({best, 8})
    assert int(checkpoints.restore(device, "best")[0].round) == best
    with pytest.raises(ValueError, match=r"round must be one of the saved rounds \[.*8\], or \"best\", got 3"):
        checkpoints.restore(device, 3)
    for every, ahead, busy, expected in [(None, 61, 0, 1), (None, 59, 0, 0), (None, 61, 1, 0), (7, 0, 1, 1)]:
        one = SimpleNamespace(checkpoints=fd.Checkpoints(tmp_path, every, 60.0), clock=time.monotonic())
        one._is_busy = lambda busy=busy: busy
        assert saver.Saver.due(one, 7, ahead) == expected


@pytest.mark.parametrize("duration, expected", [(60, [1, 2, 3, 4, 5, 6]), (20, [2, 4, 6]), (14, [3, 6])])
def test_a_kill_loses_the_seconds_between_saves_and_one_round(duration, expected, device, tmp_path, monkeypatch):
    """The clock advances by the duration of a round when a round lands. A save starts after 30 s, not a round later."""
    now, saves, catch_up, write = [0.0], [], loop.Loop._catch_up, saver.Saver._write

    def landing(self, behind: int) -> None:
        now[0] += duration * sum(flight.n for flight in list(self._flying)[: len(self._flying) - behind])
        catch_up(self, behind)

    def writing(self, contents, history) -> None:
        saves.append(contents.round)
        write(self, contents, history)

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(loop.Loop, "_catch_up", landing)
    monkeypatch.setattr(saver.Saver, "_write", writing)
    monkeypatch.setattr(saver.Saver, "_is_busy", lambda self: False)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(saver, "time", clock)
    state, _ = run(device, device.init(KEY), 6, fd.Checkpoints(tmp_path, seconds=30, best=None))
    assert saves == expected and same(state, run(device, device.init(KEY), 6)[0])


def test_files_left_by_a_kill_are_deleted(device, saved, monkeypatch) -> None:
    for suffix in ("unfinished", "orbax-checkpoint-tmp-7"):  # of this version, and of earlier ones
        (saved.path / f"00000009.{suffix}").mkdir()
    with monkeypatch.context() as patch:
        # As after a kill that happens before the first file is deleted.
        patch.setattr(saver.shutil, "rmtree", lambda *_, **options: None)
        saver._delete(saved, 2)
    assert saved.rounds == [4, 5] and (saved.path / "00000002.deleted/arrays.0").exists()
    run(device, saved.restore(device)[0], 1, saved)
    assert sorted(path.name for path in saved.path.iterdir()) == ["00000004", "00000005", "00000006", "lock"]


@pytest.mark.parametrize("bank", ["device", "sharded", "host", "files"])
@pytest.mark.parametrize("ends", ["whole", "stopped"])
def test_the_best_evaluated_round_is_kept(bank, ends, tmp_path, monkeypatch) -> None:
    """Rounds 4, 8 and 11 are evaluated, and rounds 3, 6, 9 and 11 are saved.

    Round 8 is the best evaluated round. Its state must be kept too, although round 8 is not one of the saved rounds.
    """
    where = str(tmp_path / "bank") if bank == "files" else bank
    sim = simulation(bank=where)
    scores = iter([0.5, 0.6, 0.4])  # at rounds 4, 8 and 11
    monkeypatch.setattr(sim.executor, "scores", lambda server: {"accuracy": next(scores), "loss": jnp.float32(1)})
    checkpoints = fd.Checkpoints(tmp_path / "run", every=3, keep=1)

    def stop(record: dict) -> None:
        if ends == "stopped" and record["round"] == 10:
            os.kill(os.getpid(), signal.SIGINT)

    state, history = sim.run(
        sim.init(KEY), 11, 4, progress=False, checkpoints=checkpoints, on_round=stop
    )  # fmt: skip
    assert checkpoints.rounds == [8, int(state.round)]
    close(state)
    best, before = checkpoints.restore(sim, "best")
    assert int(best.round) == 8 == len(before) and before[-1]["accuracy"] == 0.6
    plain = simulation()
    expected, _ = run(plain, plain.init(KEY), 8)
    for a, b in zip(arrays(best), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    again = fd.Checkpoints(tmp_path / "run", every=3, keep=1)
    monkeypatch.setattr(sim.executor, "scores", lambda server: {"accuracy": 0.55, "loss": jnp.float32(1)})
    close(best)
    state, history = again.restore(sim)
    state, _ = sim.run(state, 4, 1, progress=False, checkpoints=again)
    assert again.rounds == [8, int(state.round)]  # round 8 is still the best
    if bank == "files":
        assert state.clients.pins == again.rounds


def test_a_kill_before_the_best_state_is_written_loses_at_most_one_interval(device, tmp_path) -> None:
    """The best state is only in memory until the next save.

    After a kill, the lost rounds are repeated. Then the best state is kept again.
    """
    checkpoints = fd.Checkpoints(tmp_path, every=3, keep=1, best="loss")
    kept = []

    class Killed(BaseException):
        pass

    def kill(record: dict) -> None:
        kept.append(checkpoints.rounds)
        if record["round"] == 5:
            raise Killed

    with pytest.raises(Killed):
        device.run(device.init(KEY), 9, 1, progress=False, checkpoints=checkpoints, on_round=kill)
    assert checkpoints.rounds == [3]
    state, before = checkpoints.restore(device)
    _, after = device.run(state, 6, 1, progress=False, checkpoints=checkpoints)
    history = before + after
    best = min(history, key=lambda record: record["loss"])["round"]
    assert checkpoints.rounds == sorted({best, 9})


def test_only_one_run_at_a_time_can_use_a_folder(device, saved) -> None:
    state = saved.restore(device)[0]
    with saver.saving([saved], [device.specification], [state], contextlib.nullcontext):
        for refused in (lambda: saved.restore(device), lambda: run(device, state, 1, saved)):
            with pytest.raises(InUseError, match="must be used by one run at a time, got .*/saved, which is in use"):
                refused()
    run(device, state, 1, saved)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_process_ignores_stays_ignored(number, device, uninterrupted, tmp_path, monkeypatch) -> None:
    """A shell starts the background jobs of a script with SIGINT ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with fd.stop_on_interrupt():
            state, history = run(
                device, device.init(KEY), 8, tmp_path, on_round=lambda record: os.kill(os.getpid(), number)
            )
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert same(state, uninterrupted[0]) and len(history) == 8


def test_unusable_folders_raise(device, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    state = device.init(KEY)
    for folder in (tmp_path / "file", tmp_path / "file/below", "/dev/null/checkpoints"):
        with pytest.raises(ValueError, match="folder must be a folder where files can be written and locked, got "):
            run(device, state, 1, folder)
    message = "must have a checkpoint, got .*, which has none: start the run with sim.init"
    with pytest.raises(fd.errors.NothingToRestoreError, match=message):
        fd.Checkpoints(tmp_path / "none").restore(device)


def test_the_same_script_starts_a_run_and_resumes_it(device, uninterrupted, tmp_path) -> None:
    checkpoints, done = fd.Checkpoints(tmp_path, every=1), []
    for _ in range(2):
        state, history = checkpoints.restore_or_init(device, KEY)
        done.append(len(history))
        state, _ = run(device, state, 8 - len(history) if history else 3, checkpoints)
    assert done == [0, 3] and same(state, uninterrupted[0])
    with pytest.raises(fd.errors.OtherRunError, match=r"key: \[.*\] in the checkpoint, not \["):
        checkpoints.restore_or_init(device, jax.random.key(4))
    with pytest.warns(UserWarning, match="key: .* restored nevertheless"):
        assert same(checkpoints.restore_or_init(device, jax.random.key(4), strict=False)[0], state)
    for number in checkpoints.rounds:
        (checkpoints.place(number) / "about.json").write_text("{")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="an intact checkpoint") as error:
        checkpoints.restore_or_init(device, KEY)
    assert not isinstance(error.value, fd.errors.NothingToRestoreError), "no new run in the place of a damaged one"


# Rounds other than those in ``pytest.warns`` may cause this warning too.
@pytest.mark.filterwarnings("ignore:round . could not be saved")
@pytest.mark.parametrize("ends", ["later", "full"])
def test_a_full_disk_loses_no_round(ends, device, uninterrupted, tmp_path, monkeypatch) -> None:
    """While the disk is full, training continues, and failed saves cause warnings.

    If the disk is still full at the end of the run, the run raises an OSError with the state and the history.
    """
    checkpoints = fd.Checkpoints(tmp_path, every=1)
    run(device, device.init(KEY), 1, checkpoints)
    about = checkpoints.place(1) / "about.json"  # when the disk is full, only this file fits, or nothing
    limit, spoke = file_limit(50 if ends == "later" else about.stat().st_size + 5_000), []
    monkeypatch.setattr(sys, "unraisablehook", spoke.append)

    def filling(record: dict) -> None:
        if record["round"] == 2:
            limit.__enter__()
        if record["round"] == 5 and ends == "later":
            limit.__exit__(None, None, None)

    state = checkpoints.restore(device)[0]
    with pytest.warns(UserWarning, match="round [234] could not be saved in .* the run continues"):
        if ends == "later":
            state, _ = run(device, state, 7, checkpoints, on_round=filling)
        else:
            try:
                with pytest.raises(
                    OSError, match="end of the run, round 8, could not be saved .* of round 1:"
                ) as error:
                    run(device, state, 7, checkpoints, on_round=filling)
            finally:
                limit.__exit__(None, None, None)
            state, history = error.value.state, error.value.history
            assert told(history)[-1] == told(uninterrupted[1])[-1]
    assert same(state, uninterrupted[0])
    assert checkpoints.rounds[-1] == (8 if ends == "later" else 1)
    gc.collect()
    assert not spoke
    if ends == "later":
        assert all(path.name.isdecimal() or path.name == "lock" for path in tmp_path.iterdir())


def test_the_warning_names_the_round_whose_pin_failed(tmp_path, monkeypatch) -> None:
    sim = simulation(bank=tmp_path / "bank")
    pin = client_files.ClientFiles.pin

    def full(store, t: int) -> None:
        if t == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        pin(store, t)

    monkeypatch.setattr(client_files.ClientFiles, "pin", full)
    checkpoints = fd.Checkpoints(tmp_path / "run", every=1, best=None)
    with pytest.warns(UserWarning, match="round 2 could not be saved in .* the run continues, and the next save"):
        state, _ = run(sim, sim.init(KEY), 4, checkpoints)
    assert checkpoints.rounds == [1, 3, 4] == state.clients.pins


def test_a_run_stopped_by_a_signal_can_be_resumed(device, uninterrupted, tmp_path) -> None:
    def send(which: int, at: int):
        return lambda record: record["round"] == at and os.kill(os.getpid(), which)

    before, seen = signal.getsignal(signal.SIGTERM), []
    run(device, device.init(KEY), 1, on_round=lambda record: seen.append(signal.getsignal(signal.SIGTERM)))
    assert seen == [before]  # without checkpoints, the signal handler is not replaced
    with pytest.raises(SystemExit) as ended:
        run(device, device.init(KEY), 8, tmp_path, on_round=send(signal.SIGTERM, 2))
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == before
    state, history = fd.Checkpoints(tmp_path).restore(device)
    assert 2 <= int(state.round) == len(history) < 8
    stopped, more = run(device, state, 8 - len(history), tmp_path, on_round=send(signal.SIGINT, len(history) + 1))
    state, history = fd.Checkpoints(tmp_path).restore(device)
    assert same(state, stopped) and len(history) < 8
    state, more = run(device, state, 8 - len(history), tmp_path)
    assert same(state, uninterrupted[0]) and told(history + more) == told(uninterrupted[1])


@pytest.mark.parametrize("at", [3, 5, 6])
def test_an_error_in_on_round_loses_no_round(at, device, tmp_path) -> None:
    """The last rounds are recorded after the training loop, so they are tested too."""
    checkpoints = fd.Checkpoints(tmp_path, every=4, best=None)
    with pytest.raises(ZeroDivisionError) as error:
        run(device, device.init(KEY), 6, checkpoints, on_round=lambda record: 1 // (record["round"] - at))
    state, history = error.value.state, error.value.history
    assert int(state.round) == len(history) == checkpoints.rounds[-1] >= at
    restored, before = checkpoints.restore(device)
    assert same(restored, state) and told(before) == told(history)


@pytest.mark.thorough
def test_an_error_in_on_round_loses_no_round_of_a_sweep(device, tmp_path) -> None:
    for rounds, at in ((6, 6), (9, 7)):
        with pytest.raises(ZeroDivisionError) as error:
            device.sweep(
                rounds, range(2), 2, progress=False, checkpoints=tmp_path,
                on_round=lambda seed, _, record, at=at: seed and 1 // (record["round"] - at),
            )  # fmt: skip
        done = {int(run.state.round) for run in error.value.runs}
        assert done == {fd.Checkpoints(tmp_path / f"seed-{seed}").rounds[-1] for seed in range(2)} and min(done) >= at
    runs = device.sweep(9, range(2), 2, progress=False, checkpoints=tmp_path)
    assert [len(run.history) for run in runs] == [9, 9]


def test_two_interrupts_in_a_row_lose_no_round(device, tmp_path) -> None:
    def insist(record: dict) -> None:
        if record["round"] == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    saved = fd.Checkpoints(tmp_path, every=1)
    state, history = device.run(device.init(KEY), 20, progress=False, checkpoints=saved, on_round=insist)
    assert 3 <= int(state.round) < 20 and len(history) == int(state.round) == saved.rounds[-1]
    restored, before = saved.restore(device)
    assert same(restored, state) and told(before) == told(history)
    # The history has no record of a call of `round_fn`, and it keeps its earlier records.
    restored, _ = device.round_fn(restored)
    with pytest.warns(UserWarning, match="were run without checkpoints"):
        run(device, restored, 1, tmp_path)
    rounds = [record["round"] for record in saved.restore(device)[1]]
    assert rounds == [*range(1, len(history) + 1), len(history) + 2]


def closed(a):
    return lambda x: x * a


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2.0, 3.0),
        (jnp.float32(2), jnp.float32(3)),
        (np.ones(3), np.array([1, 1, 2.0])),
        ({1, 2}, {1, 3}),
        (len, sum),
        (fd.algorithms.fedprox(jnp.float32(0.1)), fd.algorithms.fedprox(jnp.float32(0.2))),
        (fd.algorithms.partly_shared(fd.algorithms.fedprox(1)), fd.algorithms.partly_shared(fd.algorithms.fedprox(2))),
        (fd.algorithms.fedavg(), fd.algorithms.fedavg()._replace(finish=lambda server, client: client)),
        (fd.aggregation.clipped(1.0), fd.aggregation.clipped(2.0)),
        (fd.models.mnist_2nn(), fd.models.mnist_2nn(num_classes=3)),
        (fd.LocalTraining(optimizer=optax.scale_by_adam()), fd.LocalTraining(optimizer=optax.scale_by_lion())),
        (fd.LocalTraining(augment=fd.augment.crop_and_flip()), fd.LocalTraining(augment=fd.augment.crop_and_flip(3))),
        (jax.random.key(0), jax.random.key(1)),
    ],
)
def test_different_values_give_different_settings(one, other) -> None:
    assert by_name(one, "s") and by_name(one, "s") == by_name(one, "s") != by_name(other, "s")


def test_equal_values_give_equal_settings(tmp_path) -> None:
    assert by_name(1, "s") == by_name(1.0, "s") == by_name(np.float32(1), "s") == {"s": 1}
    assert by_name(np.float32, "s") == by_name(jnp.float32, "s") == by_name(np.dtype("float32"), "s")
    with pytest.raises(ValueError, match="config must be a dict of values that JSON can store"):
        fd.Checkpoints(tmp_path, config={"a": np.float32(1)})


SCRIPT = """
import jax, numpy as np, sys
import fedjax_drift as fd
from fedjax_drift.simulation.description import by_name
fd.use_cpu_devices(int(sys.argv[1]))
data = fd.FederatedData.from_clients([(np.eye(4, dtype="f4").reshape(4, 2, 2, 1), np.arange(4) % 2)] * 4)
local, algorithm = fd.LocalTraining(lr=float(sys.argv[2])), fd.algorithms.fedprox(float(sys.argv[2]))
model = fd.models.mnist_2nn(num_classes=2, input_shape=(2, 2, 1))
sim = fd.Simulation(model, data, algorithm, local=local, cohort_size=2)
print(sim.specification.identity["computation"], by_name((lambda x: x, {'four', 'five', 'six'}), 's'))
"""


@pytest.mark.thorough
def test_the_identity_is_the_same_in_every_process(tmp_path, monkeypatch) -> None:
    """It has neither addresses nor the order of a set. A function has the same name whether its script is run or
    imported. The computation does not depend on learning rates, mu and the devices."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/script.py").write_text(SCRIPT)
    commands, outputs = [["folder/script.py"], ["-m", "folder.script"], ["-c", "import folder.script"]], set()
    for seed, (arguments, devices, value) in enumerate(zip(commands, "121", ("0.1", "0.2", "0.1"), strict=True)):
        paths = os.pathsep.join([str(Path(fd.__file__).parents[1]), str(tmp_path)])
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": paths}
        command = [sys.executable, *arguments, devices, value]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        outputs.add(done.stdout)
    (output,) = outputs
    assert output.startswith(f"jax {jax.__version__}, cpu, crc32 ")
    assert "{'s.0': 'script.<lambda>', 's.1.0': 'five'" in output
    function = closed(1)
    assert by_name(function, "s")["s"] == "test_checkpoint.closed.<locals>.<lambda>"
    function.__module__ = "__main__"  # as in a notebook, whose functions have no file
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert by_name(function, "s")["s"] == "closed.<locals>.<lambda>"
    # The names of functions of libraries do not include the module.
    assert by_name(optax.scale_by_adam(), "s")["s.update"] == "scale_by_adam.<locals>.update_fn"


LOSS = """
import jax.numpy as jnp


def scaled(factor):
    def squared(z, y, power=2):
        # The square by default.
        error = z[:, 0] - y
        return factor * jnp.abs(error) ** power

    return squared
"""


def loss_of(folder: Path, factor: float = 2, module: str = "losses", *edits: tuple[str, str]):
    """Returns the loss function of a user's module, after edits of its text."""
    text = LOSS
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir()
    (folder / f"{module}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.scaled(factor)


# Name: (arguments of loss_of, the effect)
EDITS = {
    "docstring and annotation": (
        (2, "losses", ("z, y,", "z: object, y,"), ("power=2):", "power=2):\n        '''The loss.'''")),
        None,
    ),
    "local variable": ((2, "losses", ("error", "difference")), None),
    "captured variable": ((2, "losses", ("factor", "weight")), None),
    "body": ((2, "losses", ("abs", "sinh")), "warning"),
    "value": ((3,), "warning"),
    "default": ((2, "losses", ("=2", "=3")), "warning"),
    "module": ((2, "errors"), "model.loss: .*losses.scaled.* in the checkpoint, not .*errors.scaled"),
}


def test_an_option_that_a_version_lacks_has_its_default() -> None:
    """A run that was saved before `LocalTraining(augment=)` existed has no augmentation."""
    saved, without = {"local.lr": 0.1}, {"local.lr": 0.1, "local.augment": None}
    with_it = {"local.lr": 0.1, "local.augment": "crop_and_flip.<locals>.augment"}
    assert differences(saved, without) == differences(without, saved) == ({}, False)
    assert list(differences(saved, with_it)[0]) == list(differences(without, with_it)[0]) == ["local.augment"]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("bank", ["device", thorough("files")])
def test_code_that_computes_something_else_causes_a_warning(bank, edit, tmp_path) -> None:
    """What counts is what a round computes, not the text of a function."""
    if bank == "files" and edit not in ("body", "module"):
        pytest.skip("a client store compares the same identity")

    def simulate(loss) -> fd.Simulation:
        where = tmp_path / "bank" if bank == "files" else bank
        return fd.Simulation(MODEL._replace(loss=loss), DATA, fd.algorithms.scaffold(), cohort_size=2, bank=where)

    sim, saved = simulate(loss_of(tmp_path / "a")), fd.Checkpoints(tmp_path / "run")
    close(run(sim, sim.init(KEY), 2, saved)[0])
    arguments, effect = EDITS[edit]
    edited = simulate(loss_of(tmp_path / "b", *arguments))
    if effect is None:
        with warnings.catch_warnings(action="error"):
            close(saved.restore(edited)[0])
    elif effect == "warning":
        with pytest.warns(UserWarning, match="or a value that it captures: the run continues with the new code"):
            close(saved.restore(edited)[0])
    else:
        with pytest.raises(OtherRunError, match=effect):
            saved.restore(edited)


def test_a_run_resumes_only_with_the_same_config(device, tmp_path) -> None:
    configured = fd.Checkpoints(tmp_path, config={"note": 1})
    run(device, device.init(KEY), 2, configured)
    # Without ``config``, the state can be restored, but the run cannot be resumed.
    state, _ = fd.Checkpoints(tmp_path).restore(device)
    with pytest.raises(ValueError, match="config.note: 1 in the checkpoint, not nothing"):
        run(device, state, 1, tmp_path)
    with pytest.raises(ValueError, match="config.note: 1 in the checkpoint, not 2"):
        fd.Checkpoints(tmp_path, config={"note": 2}).restore(device)
    run(device, configured.restore(device)[0], 1, configured)


TINY = ["run", "--dataset", "synthetic:num_clients=6,num_rows=20", "--cohort", "3", "--rounds", "6", "--no-progress"]
TINY += ["--algorithm", "fedavg", "--algorithm", "scaffold", "--checkpoint-every", "2", "--eval-every", "1"]


def lines_of(folder: Path) -> list[dict]:
    return told([json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()])


def test_the_command_line_resumes_a_run(tmp_path, capsys, monkeypatch) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "folder"
    assert cli.main([*TINY, "--rounds", "7", "--output", str(whole)]) == 0

    update = progress.Bar.update

    def terminated(bar, record):
        update(bar, record)
        if record["round"] == 3 and bar.name == "scaffold":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Bar, "update", terminated)
        assert cli.main([*TINY, "--output", str(folder)]) == 143
    said = capsys.readouterr().err
    assert f" rounds; to resume: fedjax-drift run --resume {folder}" in said and "stopped scaffold after " in said
    assert not (folder / "curves.png").exists()
    (folder / "rounds.jsonl").write_text("")  # a kill may leave an incomplete log
    with disk.lock_folder(folder / "checkpoints", "it"):
        assert cli.main(["run", "--resume", str(folder)]) == 2
    assert "--output must be used by one run at a time" in capsys.readouterr().err

    assert cli.main(["run", "--resume", str(folder), "--rounds", "7"]) == 0
    assert lines_of(folder) == lines_of(whole)
    assert re.search("running fedavg: rounds 7 to 7\nrunning scaffold: rounds [456] to 7", capsys.readouterr().out)
    last = [fd.Checkpoints(path / "checkpoints/2-scaffold").about(7) for path in (whole, folder)]
    assert last[0].leaves == last[1].leaves  # they include the checksum of every array
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())

    assert cli.main(["run", "--resume", str(folder)]) == 0  # the run is complete already
    assert "running" not in capsys.readouterr().out and lines_of(folder) == lines_of(whole)
    for arguments, said in [
        ([str(folder), "--lr", "3"], "only --rounds, .* may be changed, got '--lr'"),
        ([str(folder), "--rounds", "6"], "--rounds must be at least 7, as in the resumed run, got 6"),
        ([str(tmp_path)], "--resume must be the output folder of a run"),
    ]:
        capsys.readouterr()
        assert cli.main(["run", "--resume", *arguments]) == 2
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_raises(number, device, tmp_path, monkeypatch) -> None:
    def without_locks(*_) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", without_locks)
    saved, message = (
        tmp_path / "saved",
        f"written and locked, got .* \\({os.strerror(number)}\\): choose another folder",
    )
    with pytest.raises(ValueError, match=message):
        run(device, device.init(KEY), 1, saved)
    with pytest.raises(ValueError, match=message):
        fd.sweep(lambda: device, seeds=[0], rounds=1, checkpoints=saved)
    with pytest.raises(ValueError, match=message):
        client_store.ClientStore.create(np.zeros(2), 3, tmp_path / "bank")


def test_the_command_line_on_a_full_disk(tmp_path, capsys, monkeypatch) -> None:
    """The log after round 2, the models and a figure cannot be written.

    The command warns and leaves no incomplete file. After ``--resume`` everything is written.
    """
    folder, whole = tmp_path / "folder", tmp_path / "whole"
    command = [*TINY[:-4], "--checkpoint-every", "2"]  # only the last round is evaluated
    assert cli.main([*command, "--output", str(whole)]) == 0
    capsys.readouterr()

    def full(path: Path) -> None:
        path.write_text("half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def curves(runs, path: Path, x: str) -> None:
        full(path)

    write = fd.logs.FileIO.write

    class Full(fd.logs.FileIO):
        def write(self, lines: bytes) -> int:
            if b'"round": 3' in bytes(lines):
                write(self, lines[:7])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, lines)

    with monkeypatch.context() as patch:
        patch.setattr(fd.models, "save_params", lambda params, path, data: full(path))
        patch.setattr(fd.plots, "curves", curves)
        patch.setattr(fd.logs, "FileIO", Full)
        assert cli.main([*command, "--output", str(folder)]) == 0
    said = capsys.readouterr().err
    for file in ("fedavg/model.npz", "scaffold/model.npz", "curves.png"):
        assert f"{folder}/{file} could not be written (No space left on device): free some disk space, then" in said
        assert not (folder / file).exists() and (whole / file).exists()
    assert said.count(f"the log in {folder} could not be written (No space left on device): the run continues") == 1
    assert not list(folder.rglob(".*"))
    assert [record["round"] for record in lines_of(folder)] == [1, 2]
    assert cli.main(["run", "--resume", str(folder)]) == 0
    assert lines_of(folder) == lines_of(whole)
    files = [sorted(str(path.relative_to(where)) for path in where.rglob("*.*g")) for where in (folder, whole)]
    assert files[0] == files[1] and (folder / "scaffold/model.npz").exists()


@pytest.mark.thorough
def test_a_killed_run_loses_at_most_one_interval(tmp_path) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("kill.py")), str(tmp_path), "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["moments"] == 6 and counts["in files"] == 4 and counts["bitwise"] and counts["most_lost"] <= 2
