"""Damages copies of a run's folders at random, and resumes the run from each copy. Prints the outcomes as JSON.

    python tests/damage_checkpoints.py FOLDER [COPIES]

In half of the copies, the client states are in files. These outcomes are correct:

    newest    the newest checkpoint is restored
    older     an older checkpoint is restored, with a warning if the folder of a newer checkpoint still exists
    refused   the library raises ValueError

A restored state must be bitwise identical to the saved state. The run is then resumed for one round. The result must be
bitwise identical to that of an uninterrupted run. All other outcomes are printed and counted as "wrong". "spoke" is the
number of exceptions in threads and destructors.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from damage import cut, empty, flip, zero

import fedjax_drift as fd
from fedjax_drift.storage import client_store

ROUNDS, RNG = 7, random.Random()
LIBRARY = str(Path(fd.__file__).parent)


ROWS = np.random.default_rng(0)
CLIENTS = [(ROWS.normal(size=(4, 30)).astype(np.float32), ROWS.integers(0, 2, 4)) for _ in range(5)]
DATA = fd.FederatedData.from_clients(CLIENTS, test=CLIENTS[0])
MODEL = fd.Model(init=lambda key: jax.random.normal(key, (30, 20)), apply=lambda w, x: x @ w)


def simulation(bank: str) -> fd.Simulation:
    return fd.Simulation(MODEL, DATA, fd.algorithms.scaffold(), cohort_size=2, bank=bank)


def arrays(state: fd.ServerState) -> list[np.ndarray]:
    clients = state.clients
    if isinstance(clients, client_store.ClientStore):
        clients = clients.gather(np.arange(5))
    clients = jax.tree.map(lambda leaf: leaf[:5], clients)  # sharded client states may have padding
    return jax.tree.leaves(jax.device_get((state.round, jax.random.key_data(state.key), state.server, clients)))


def bits(state: fd.ServerState) -> list[bytes]:
    return [array.tobytes() for array in arrays(state)]


def close(state: fd.ServerState | None) -> None:
    if state is not None and isinstance(state.clients, client_store.ClientStore):
        state.clients.close()


def rewrite(way: Callable[[bytes, random.Random], bytes], file: Path, _: Path) -> None:
    file.write_bytes(way(file.read_bytes(), RNG))


def delete(file: Path, _: Path) -> None:
    file.unlink()


def swap(file: Path, other: Path) -> None:
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def to_folder(file: Path, _: Path) -> None:
    file.unlink()
    file.mkdir()


def to_file(file: Path, _: Path) -> None:
    """Replaces the folder of the file by a file, if it is the folder of a checkpoint."""
    if file.parent.name.isdecimal():
        shutil.rmtree(file.parent)
        file.parent.write_text("a file")


def delete_folder(file: Path, _: Path) -> None:
    shutil.rmtree(file.parent)


def foreign(file: Path, _: Path) -> None:
    name = RNG.choice(["00000009", "9", "notes.txt", "index.9", "index.new", "00000003.deleted", "arrays.1", "٣"])
    (file.parent / name).write_bytes(RNG.randbytes(50))


WAYS = (cut, flip, flip, flip, zero, zero, empty)
DAMAGES: list[Callable[[Path, Path], None]] = [
    *(functools.partial(rewrite, way) for way in WAYS), delete, swap, swap, to_folder, to_file, delete_folder, foreign,
]  # fmt: skip


def outcome(run: Path, sim: fd.Simulation, known: dict[int, list[bytes]], newest: int) -> str:
    """Resumes the run in this folder for one round. Returns the outcome."""
    state, checkpoints = None, fd.Checkpoints(run / "checkpoints", every=2)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                state, history = checkpoints.restore(sim)
                done = int(state.round)
                there = sorted(int(path.name) for path in checkpoints.path.iterdir() if path.name.isdecimal())
                if bits(state) != known[done] or len(history) != done:
                    return "different"
                if done < newest <= there[-1] and not any("is damaged" in str(warning.message) for warning in warned):
                    return "older without a warning"
                state, _ = sim.run(state, 1, 2, progress=False, checkpoints=checkpoints)
                if bits(state) != known[done + 1]:
                    return "different after a round"
                return "newest" if done == newest else "older"
            except ValueError as error:
                if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(LIBRARY):
                    return "refused"
                raise
    except Exception:
        return traceback.format_exc()
    finally:
        close(state)


def main(folder: Path, copies: int) -> Counter[str]:
    RNG.seed(0)
    counts: Counter[str] = Counter()
    spoke: list[str] = []
    threading.excepthook = lambda left: spoke.append(f"thread: {left.exc_value!r}")
    sys.unraisablehook = lambda left: spoke.append(f"destructor: {left.exc_value!r}")
    try:
        for bank in ("device", "files"):
            whole = folder / bank
            sim = simulation(str(whole / "bank") if bank == "files" else bank)
            plain, known = simulation("device"), {}
            state = plain.init(jax.random.key(0))
            for done in range(1, ROUNDS + 1):
                state, _ = plain.run(state, 1, 0, progress=False)
                known[done] = bits(state)
            checkpoints = fd.Checkpoints(whole / "checkpoints", every=2)
            state, _ = sim.run(sim.init(jax.random.key(0)), ROUNDS - 1, 2, progress=False, checkpoints=checkpoints)
            close(state)
            for _ in range(copies // 2):
                broken = folder / "broken"
                shutil.copytree(whole, broken)
                where = simulation(str(broken / "bank")) if bank == "files" else sim
                files = sorted(path for path in broken.rglob("*") if path.is_file() and path.name != "lock")
                damage, file, other = RNG.choice(DAMAGES), RNG.choice(files), RNG.choice(files)
                damage(file, other)
                came = outcome(broken, where, known, ROUNDS - 1)
                if came not in ("newest", "older", "refused"):
                    print(bank, damage, file.relative_to(broken), other.relative_to(broken), came)
                    came = "wrong"
                counts[came] += 1
                shutil.rmtree(broken)
    finally:
        threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    counts["spoke"] = len(spoke)
    print(*spoke, sep="\n", end="")
    return counts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 150)))
