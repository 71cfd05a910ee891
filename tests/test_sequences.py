"""A short run of the random sequences of operations in sequences.py, and a test that it finds planted faults."""

from __future__ import annotations

import jax
import pytest
import sequences
from random_cases import Case, Place

from fedjax_drift.simulation import programs
from fedjax_drift.storage.client_store import ClientStore

pytestmark = pytest.mark.thorough

CASE = Case(
    "scaffold", {}, "plain", False, False, None, {"epochs": 1, "batch_size": 3}, False, False, "mean",
    {"cohort_size": 3, "on_nonfinite": "keep"},
)  # fmt: skip


@pytest.mark.as_users
def test_short_sequences_agree() -> None:
    for seed in (0,):
        case, places, operations = sequences.draw(seed)
        sequences.play(case, places[0], operations, seed)


def folds_the_key_in_twice(monkeypatch) -> None:
    rounds = programs.rounds

    def folded(engine, most, state, arrays, n):
        new, infos = rounds(engine, most, state._replace(key=jax.random.fold_in(state.key, 0)), arrays, n)
        return new._replace(key=state.key), infos

    monkeypatch.setattr(programs, "rounds", folded)


def stores_states_a_round_late(monkeypatch) -> None:
    commit, waiting = ClientStore.commit, []

    def late(store, ids, states, t, keep=None) -> None:
        waiting.append((ids, states, keep))
        ids, states, keep = waiting.pop(0) if len(waiting) > 1 else (ids, store.gather(ids), keep)
        commit(store, ids, states, t, keep)

    monkeypatch.setattr(ClientStore, "commit", late)


@pytest.mark.parametrize(
    "plant, place",
    [
        (folds_the_key_in_twice, Place(devices=2)),
        (stores_states_a_round_late, Place(bank="host")),
    ],
)
def test_planted_faults_are_found(plant, place, monkeypatch) -> None:
    operations = [("run", 2)]
    programs._compiled.cache_clear()
    sequences.play(CASE, place, operations, 0)
    programs._compiled.cache_clear()  # the programs are traced again, with the fault
    plant(monkeypatch)
    with pytest.raises(sequences.Difference):
        sequences.play(CASE, place, operations, 0)
    programs._compiled.cache_clear()
