"""Tests of runs that end early: at a target, or after evaluations without improvement."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_drift as fd
from fedjax_drift import cli


@pytest.fixture(scope="module")
def sim() -> fd.Simulation:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (np.eye(3)[y] + 0.1 * rng.normal(size=(60, 3))).astype(np.float32)
    data = fd.FederatedData.from_clients([(x[i::6], y[i::6]) for i in range(6)], test=(x, y))
    local = fd.LocalTraining(lr=0.5)
    mesh = fd.clients_mesh(jax.devices()[:1])
    return fd.Simulation(fd.models.linear((3,), 3), data, fd.algorithms.fedavg(), local=local, cohort_size=3, mesh=mesh)


def records(**metrics) -> list[dict]:
    """Returns one record per round, from the values of each metric. None stands for a round without an evaluation."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    return [{"round": t, **{k: v for k, v in row.items() if v is not None}} for t, row in enumerate(rows, 1)]


def test_reaches_and_stalls() -> None:
    history = records(loss=[2.0, None, 1.0, None, 1.5], accuracy=[0.1, None, 0.6, None, 0.5])
    assert fd.until.reaches(accuracy=0.5)(history) and not fd.until.reaches(accuracy=0.51)(history)
    assert fd.until.reaches(accuracy=0.5, loss=1.5)(history) and not fd.until.reaches(accuracy=0.5, loss=1.4)(history)
    assert [fd.until.stalls("accuracy", 1)(history[:t]) for t in (1, 3, 5)] == [False, False, True]
    assert not fd.until.stalls("loss", 2)(records(loss=[np.nan, 2.0, 1.0, 0.5]))  # NaN is never the best
    assert not fd.until.stalls("loss", 2)(history) and fd.until.stalls("loss", 2, by=1.0)(history)


def test_a_run_ends_with_the_round_that_reaches_the_target(sim) -> None:
    state, history = sim.run(sim.init(jax.random.key(0)), 60, eval_every=2)
    goal = sorted(record["loss"] for record in history if "loss" in record)[20]
    first = next(record["round"] for record in history if record.get("loss", np.inf) <= goal)
    ended, short = sim.run(sim.init(jax.random.key(0)), 60, eval_every=2, until=fd.until.reaches(loss=goal))
    assert 2 < first < 60 and int(ended.round) == first == len(short)
    keep = ("loss", "accuracy", "train_loss")
    assert [[r.get(k) for k in keep] for r in short] == [[r.get(k) for k in keep] for r in history[:first]]
    again, _ = sim.run(ended, 60 - first, eval_every=2)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_a_sweep_ends_when_all_runs_have_ended(sim, tmp_path) -> None:
    alone = {seed: sim.run(sim.init(jax.random.key(seed)), 40, eval_every=1)[1] for seed in (0, 1)}
    goal = max(history[9]["loss"] for history in alone.values())
    firsts = [next(r["round"] for r in history if r["loss"] <= goal * 1.0001) for history in alone.values()]
    rule = fd.until.reaches(loss=goal * 1.0001)
    runs = sim.sweep(40, [0, 1], eval_every=1, until=rule, checkpoints=tmp_path)
    assert [len(run.history) for run in runs] == [max(firsts)] * 2
    again = sim.sweep(40, [0, 1], eval_every=1, until=rule, checkpoints=tmp_path)  # both runs have ended already
    assert [run.history for run in again] == [run.history for run in runs]


def test_the_checkpoint_with_the_best_loss_is_kept(sim, tmp_path) -> None:
    checkpoints = fd.Checkpoints(tmp_path, best="loss", keep=1, every=1)
    rule = fd.until.stalls("loss", 3, by=0.02)
    _, history = sim.run(sim.init(jax.random.key(0)), 200, eval_every=1, until=rule, checkpoints=checkpoints)
    assert 3 < len(history) < 200
    _, until_best = checkpoints.restore(sim, "best")
    assert until_best[-1]["loss"] == min(record["loss"] for record in history)


def test_a_restored_run_ends_where_the_uninterrupted_run_ends(sim, tmp_path) -> None:
    """The rule is also given the records from before the interruption, which the checkpoints have."""

    def rule(history) -> bool:
        return len(history) >= 7

    def fails(record) -> None:
        if record["round"] == 5:
            raise RuntimeError

    checkpoints, start = fd.Checkpoints(tmp_path), sim.init(jax.random.key(0))
    uninterrupted, history = sim.run(start, 20, eval_every=1, until=rule)
    with pytest.raises(RuntimeError):
        sim.run(start, 20, eval_every=1, until=rule, checkpoints=checkpoints, on_round=fails)
    state, before = checkpoints.restore(sim)
    ended, after = sim.run(state, 20 - len(before), eval_every=1, until=rule, checkpoints=checkpoints)
    assert 0 < len(before) < 7 and [r["loss"] for r in before + after] == [r["loss"] for r in history]
    jax.tree.map(np.testing.assert_array_equal, ended.params, uninterrupted.params)
    again, none = sim.run(checkpoints.restore(sim)[0], 13, eval_every=1, until=rule, checkpoints=checkpoints)
    assert none == [] and int(again.round) == 7  # the rule has already ended this run


def test_a_run_that_ended_early_continues_with_more_patience(tmp_path, capsys) -> None:
    folder, data = tmp_path / "run", ["--dataset", "synthetic:num_clients=6,num_rows=20", "--cohort", "3", "--lr", "2"]
    start = ["run", *data, "--rounds", "12", "--algorithm", "fedavg", "--patience", "1", "--output", str(folder)]
    assert cli.main(start) == 0
    first = (folder / "rounds.jsonl").read_text()
    assert 1 < len(first.splitlines()) < 12
    assert cli.main(["run", "--resume", str(folder), "--patience", "12"]) == 0
    both = (folder / "rounds.jsonl").read_text()
    assert both.startswith(first) and len(both.splitlines()) == 12
    assert cli.main(["run", "--resume", str(folder), "--patience", "0"]) == 2
    assert "--patience: must be an integer >= 1, got 0" in capsys.readouterr().err


def test_bad_input(sim) -> None:
    state = sim.init(jax.random.key(0))
    for until, options, message in (
        ("accuracy", {}, r"until must be a function, got 'accuracy': pass fd.until.reaches\(accuracy=0.98\)"),
        (fd.until.reaches, {}, r"until must be a rule, got fd.until.reaches without its arguments"),
        (lambda history: "no", {}, r"until must return True or False, got 'no'"),
        (fd.until.stalls(), {"eval_every": 0}, r"until needs evaluations, got eval_every=0: pass eval_every=10"),
        (fd.until.reaches(acuracy=1), {}, r"until must use a metric of the evaluated records, got 'acuracy': "),
    ):
        with pytest.raises(ValueError, match=message):
            sim.run(state, 3, until=until, **{"eval_every": 1} | options)
    for make, message in (
        (lambda: fd.until.reaches(), "reaches needs at least 1 target, got none"),
        (lambda: fd.until.reaches(accuracy=60), "accuracy must be an accuracy in 0..1, got 60: pass 0.6 for 60 %"),
        (lambda: fd.until.reaches(accuracy="0.9"), "accuracy must be a finite number, got '0.9'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
