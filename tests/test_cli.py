from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import command_lines
import jax
import numpy as np
import pytest
from PIL import Image
from scipy import stats

import fedjax_drift as fd
from fedjax_drift import cli
from fedjax_drift.cli import commands, quickstart, render
from fedjax_drift.cli.flags import Parser
from fedjax_drift.cli.values import Reader

TINY = ["run", "--dataset", "synthetic:num_clients=6,num_rows=20", "--cohort", "3", "--rounds", "2", "--no-progress"]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_run_compares_algorithms_and_its_command_reproduces_it(tmp_path, capsys):
    folder = tmp_path / "o"
    command = [*TINY, "--algorithm", "fedavg", "--algorithm", "fedprox:mu=0.5", "--momentum", "0.5"]
    command += ["--output", str(folder)]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.replace(str(tmp_path), "").splitlines())) <= 80

    written = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    config, done = json.loads(written["config.json"]), records(folder)
    prox = {"name": "fedprox", "mu": 0.5, "server_lr": 1.0, "weighting": "examples"}
    assert config["algorithms"]["fedprox:mu=0.5"] == prox
    assert config["local"]["momentum"] == 0.5 and config["data"]["clients"] == 6
    assert [(r["algorithm"], r["round"]) for r in done] == [(a, t) for a in config["algorithms"] for t in (1, 2)]
    assert re.search(rf"\nfedprox:mu=0.5 +2 +{100 * done[-1]['accuracy']:.1f} % ", table)
    with Image.open(folder / "curves.png") as picture:
        assert picture.format == "PNG" and picture.width > 800

    assert cli.main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == written

    (folder / "drift.png").touch()  # as if an earlier run with --measure had written it
    assert cli.main([*shlex.split(config["command"])[1:], "--force"]) == 0
    models = {"fedavg", "fedprox_mu_0_5"}
    assert {path.name for path in folder.iterdir()} == {*written, "checkpoints", *models}
    assert [r | {"seconds": 0} for r in records(folder)] == [r | {"seconds": 0} for r in done]
    repeated = json.loads((folder / "config.json").read_text())
    assert repeated | {"command": "", "started": ""} == config | {"command": "", "started": ""}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "fedporx:mu=1"], "got 'fedporx': did you mean 'fedprox'?"),
        (["--algorithm", "fedavg:server_rl=1"], "did you mean 'server_lr'?"),
        (["--algorithm", "fedavgm:damped=yes"], "damped must be true or false, got 'yes'"),
        (["--algorithm", "fedadam"], "needs server_lr, got 'fedadam': write fedadam:server_lr=VALUE"),
        (["--algorithm", "fedprox:mu=-1"], "mu must be a finite number >= 0, got -1"),
        (["--algorithm", "fedavg", "--algorithm", "fedavg"], "got 'fedavg' 2 times"),
        (["--algorithm", "fedprox:mu=1e-1", "--algorithm", "fedprox:mu=1e+1"], "would both be in fedprox_mu_1e_1"),
        (["--algorithm", "fedavg", "--algorithm", "lfd"], "lfd needs a model whose logits are cosines, got linear"),
        (["--algorithm", "fedavg", "--algorithm", "fedadc:0.5", "--momentum", "0.9"], "fedadc needs plain local SGD"),
        (["--algorithm", "fedgvr:literal=step+sing"], "got 'sing': did you mean 'sign'?"),
        (["--algorithm", "fedavg", "--measure", "updates,gradient"], "did you mean 'gradients'?"),
        (["--algorithm", "fedavg", "--measure-every", "2"], "--measure-every needs --measure, got 2"),
        (
            ["--algorithm", "fedavg", "--measure", "labels", "--measure-every", "3"],
            "must be in 1..2, the number of rounds, got 3",
        ),
        (["--algorithm", "fedavg", "--redeal", "even"], "must be evenly or a finite number > 0, got 'even'"),
        (["--algorithm", "fedavg", "--batch-size", "0"], "argument --batch-size: must be an integer >= 1, got 0"),
        (["--algorithm", "fedavg", "--cohort", "7"], "in 1..6, got 7: the federation has 6 clients"),
        (["--algorithm", "fedavg", "--cohrt", "2"], "did you mean '--cohort'?"),
        (["--algorithm", "fedavg", "--rounds", "x"], "must be an integer >= 1, got 'x'"),
        (["--algorithm", "fedavg", "--partition", "dirichlt:1"], "did you mean 'dirichlet'?"),
        (["--algorithm", "fedavg", "--partition", "dirichlet"], "needs alpha"),
        (["--algorithm", "fedavg", "--partition", "iid", "--clients", "999"], "use num_clients <= 120"),
        (["--algorithm", "fedavg", "--clients", "3"], "--clients needs --partition, got 3"),
        (["--algorithm", "fedavg", "--partition", "shards:2", "--size-sigma", "1"], "no effect on shards, got 1.0"),
        (["--algorithm", "fedavg", "--partition", "iid:sizes=liner"], "did you mean 'linear'?"),
        (["--algorithm", "fedavg", "--imbalance", "10"], "--imbalance needs --partition, got 10"),
        (
            ["--algorithm", "fedavg", "--partition", "iid", "--imbalance", "0.1"],
            "imbalance must be a finite number >= 1",
        ),
        (
            ["--algorithm", "fedavg", "--partition", "iid:sizes=60+50", "--clients", "2"],
            "sizes must sum to 120, the number of examples, got 110",
        ),
        (["--algorithm", "fedavg", "--partition", "distribution:nowhere.txt"], "nowhere.txt not found"),
        (["--algorithm", "fedavg", "--model", "lenet5"], "input_shape must be one that CNN accepts, got (30,)"),
        (["--algorithm", "fedavg", "--dataset", "mnits"], "did you mean 'mnist'?"),
        (["--algorithm", "fedavg", "--dataset", "mnist", "--data-dir", "nowhere"], "mnist.npz in nowhere"),
        (["--algorithm", "fedavg", "--dataset", "mnist", "--data-dir", "."], "mnist.npz is damaged, truncated"),
        (["--algorithm", "fedavg", "--validation", "1"], "share must be in (0, 1), got 1.0"),
        (["--algorithm", "fedavg", "--standardize", "yes"], "needs images with a mean and a standard deviation"),
        ([], "required: --algorithm"),
    ],
)
def test_bad_input_prints_one_line_and_writes_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("whole.npz", x_train=np.zeros((5, 28, 28), np.uint8))
    Path("mnist.npz").write_bytes(Path("whole.npz").read_bytes()[:-200])
    assert cli.main([*TINY, *arguments]) == 2
    output, error = capsys.readouterr()
    assert error.startswith("fedjax-drift: error: ") and error.count("\n") == 1 and said in error
    assert not output and not Path("runs").exists()


def test_trained_models_can_be_loaded(tmp_path):
    """`fd.load_run` loads the model. A simulation with the same options can restore the state from a checkpoint."""
    folder = tmp_path / "o"
    command = [*TINY, "--algorithm", "fedavg", "--algorithm", "scaffold", "--lr", "0.3", "--seed", "4"]
    assert cli.main([*command, "--output", str(folder)]) == 0
    run = fd.load_run(folder, "scaffold")
    done = [record for record in records(folder) if record["algorithm"] == "scaffold"]
    assert run.history == done and (run.algorithm, run.seed) == ("scaffold", 4) and run.settings["local"]["lr"] == 0.3
    data = fd.datasets.load("synthetic", num_clients=6, num_rows=20, seed=4)
    logits = run.model.apply(run.params, data.decode(data.x_test))
    assert np.mean(np.argmax(logits, 1) == data.y_test) == pytest.approx(done[-1]["accuracy"])
    local = fd.LocalTraining(lr=0.3)
    sim = fd.Simulation(run.model, data, fd.algorithms.scaffold(), local=local, cohort_size=3)
    state, history = fd.Checkpoints(folder / "checkpoints" / "2-scaffold").restore(sim)
    jax.tree.map(np.testing.assert_array_equal, state.params, run.params)
    assert history == [{k: v for k, v in record.items() if k != "algorithm"} for record in done]
    for arguments, said in (
        ((folder,), "algorithm must be one of the algorithms of the run in .*, fedavg, scaffold, got None"),
        ((folder, "fedavg", 0), "seed must be one of the seeds of the run in .*, 4, got 0"),
        ((tmp_path,), "must be the output folder of fedjax-drift run, got .*config.json can't be read"),
        ((5,), "folder must be a path, got 5"),
    ):
        with pytest.raises(ValueError, match=said):
            fd.load_run(*arguments)
    (folder / "fedavg" / "model.npz").unlink()
    with pytest.raises(ValueError, match="has not finished: use fedjax-drift run --resume"):
        fd.load_run(folder, "fedavg")
    assert cli.main(["run", "--resume", str(folder)]) == 0  # which writes the model again
    assert (folder / "fedavg" / "model.npz").exists()


def test_a_run_records_its_long_tail_and_resumes_with_it(tmp_path):
    folder = tmp_path / "tail"
    words = [*TINY[1:-1], "--algorithm", "fedavg", "--partition", "dirichlet:0.6", "--clients", "6", "--data-seed", "4"]
    assert cli.main(["run", *words, "--imbalance", "9", "--no-progress", "--output", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    recipe = fd.partition.long_tailed(fd.partition.dirichlet(6, alpha=0.6, seed=4), imbalance=9, seed=4)
    assert config["partition"] == repr(recipe)
    whole = fd.datasets.load("synthetic", fd.partition.iid(6), seed=4, num_clients=6, num_rows=20)
    assert config["data"]["rows"] < len(whole.x) and config["data"]["test_rows"] == len(whole.x_test)
    assert cli.main(["run", "--resume", str(folder), "--rounds", "3"]) == 0
    assert [record["round"] for record in records(folder)] == [1, 2, 3]
    assert json.loads((folder / "config.json").read_text())["partition"] == repr(recipe)
    same, other = (fd.parse_run([*words, "--imbalance", n]).simulations["fedavg"] for n in ("9", "8"))
    assert len(same.data.x) == config["data"]["rows"]
    checkpoints = fd.Checkpoints(tmp_path / "checkpoints")
    same.run(same.init(jax.random.key(0)), 1, progress=False, checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"belong to another simulation: data\.sizes"):
        checkpoints.restore(other)


@pytest.mark.thorough
def test_several_seeds_and_a_target(tmp_path, capsys, monkeypatch):
    """Each seed gives the results of a run with this seed alone. Tables, plots and files distinguish the seeds. A run
    that was stopped resumes."""
    folder, alone = tmp_path / f"long;{'x' * 80}", tmp_path / "alone"
    command = [*TINY, "--algorithm", "fedavg", "--algorithm", "fedprox:mu=0.5", "--lr", "0.3", "--data-seed", "1"]
    assert cli.main([*command, "--rounds", "4", "--seed", "3", "--output", str(alone)]) == 0
    sweep = fd.Simulation.sweep

    def stopped(self, rounds, seeds, eval_every, *, on_round, **options):
        def press(seed, setting, record):
            on_round(seed, setting, record)
            if record["round"] == 2:
                signal.raise_signal(signal.SIGINT)

        return sweep(self, rounds, seeds, eval_every, on_round=press, **options)

    several = [*command, "--rounds", "40", "--seed", "2", "--seeds", "3", "--target", "0.5", "--per-client"]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(fd.Simulation, "sweep", stopped)
        assert cli.main([*several, "--output", str(folder)]) == 130
    resume = shlex.split(capsys.readouterr().out.split("\nto resume:\n")[1].replace("\\\n", ""))  # as a shell reads it
    assert 6 <= len(records(folder)) < 120 and resume == ["fedjax-drift", "run", "--resume", str(folder)]
    assert cli.main(resume[1:]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.replace(str(folder), "").splitlines())) <= 80
    done = records(folder)
    seen = sorted((r["algorithm"], r["seed"], r["round"]) for r in done)
    assert seen == [(a, s, t) for a in ("fedavg", "fedprox:mu=0.5") for s in (2, 3, 4) for t in range(1, 41)]
    third = [r for r in done if r["seed"] == 3 and r["round"] <= 4]
    for ours, theirs in zip(third, records(alone), strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5) and ours["algorithm"]
    reached = fd.rounds_to_target(folder, 0.5)
    mean = np.mean([seed.round for seed in reached["fedavg"]])
    final = [r["accuracy"] for r in done if r["algorithm"] == "fedavg" and r["round"] == 40]
    assert re.search(rf"\nfedavg +40 +{100 * np.mean(final):.1f} % .* {mean:.4g}\n", table)
    half = stats.t.ppf(0.975, 2) * np.std(final, ddof=1) / 3**0.5
    assert re.search(rf"\n  3 seeds +± {100 * half:.1f} %  \(95 % interval of the mean\)\n", table)
    for name in ("curves.png", "rounds_to_target.png", "fairness.png"):
        assert (folder / name).stat().st_size > 10_000
    summary = (folder / "summary.csv").read_text()
    assert summary == fd.table(folder, format="csv", target=0.5) and summary.count("\n") == 1 + 2
    run = fd.load_run(folder, "fedprox:mu=0.5", 4)
    assert [record["seed"] for record in run.history] == [4] * 40
    assert len((folder / "clients.csv").read_text().splitlines()) == 1 + 2 * 6  # the scores are means over the seeds
    for wrong, said in (
        (["--seeds", "2", "--on-nonfinite", "raise"], '--seeds 2: on_nonfinite must be "keep" or'),
        (["--target", "97"], "must be an accuracy in 0..1, got 97: pass 0.97 for 97 %"),
        (["--target", "0.5", "--eval-every", "0"], "--target needs evaluations, got 0.5 with --eval-every 0"),
    ):
        assert cli.main([*TINY, "--algorithm", "fedavg", *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--goal", None), ("--trgets", "--target"), ("--eval", "--eval-every"), ("--clint", "--clients"), ("--zz", None)],
)
def test_only_a_similar_option_is_suggested(typed, meant, capsys):
    assert cli.main([*TINY, "--algorithm", "fedavg", typed, "1"]) == 2
    said = capsys.readouterr().err
    assert f"unknown argument '{typed}'" + (f": did you mean {meant!r}?" if meant else " (see") in said


@pytest.mark.thorough
def test_measures_are_written_and_plotted(tmp_path, capsys):
    """Each client lacks some of the classes, and the algorithm reports its gain."""
    folder = tmp_path / "o"
    command = [*TINY, "--rounds", "4", "--algorithm", "fedeve", "--partition", "shards:1", "--clients", "5", "--redeal"]
    command += ["evenly", "--measure", "updates,gradients", "--measure", "predictions,forgetting,labels"]
    assert cli.main([*command, "--measure-every", "2", "--output", str(folder)]) == 0
    pictures = ["curves", "updates", "drift", "agreement", "forgetting", "gain", "label_mix"]
    printed = " ".join(capsys.readouterr().out.split())
    assert ", ".join(["rounds.jsonl", "rounds.csv", "summary.csv", *(f"{name}.png" for name in pictures)]) in printed
    assert {path.stem for path in folder.glob("*.png")} == set(pictures)
    assert json.loads((folder / "config.json").read_text())["redeal"] == "evenly" and ", redeal evenly" in printed
    done = records(folder)
    assert ["kl" in r and "label_mix" in r for r in done] == [False, True, False, True]
    assert all("gain" in r for r in done)


def test_every_kind_of_algorithm_option_can_be_passed(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_drift.cli.run.simulate", lambda config, *_: made.update(config) or 0)
    made: dict = {}
    written = {
        "feddc:alpha=0.1,scale_by_size=true,variate_lr=initial": {"scale_by_size": True, "variate_lr": "initial"},
        "fedadc:0.8,gamma=none": {"beta": 0.8, "gamma": None},
        "fedgvr:literal=step+sign": {"literal": ("step", "sign")},
        "moon:first=none": {"first": "none"},
        "lfd:temperature=0.05": {"temperature": 0.05},
        "scaffold:option=I": {"option": "I"},
    }
    given = [word for text in written for word in ("--algorithm", text)]
    assert cli.main([*TINY, *given, "--cosine", "--output", str(tmp_path / "o")]) == 0
    for text, options in written.items():
        assert made["algorithms"][text].items() >= options.items()
    assert made["model"]["cosine"] is True


@pytest.mark.thorough
def test_examples_and_client_states_on_the_host_give_the_same_results(tmp_path, capsys):
    """Each algorithm has its own folder in the folder of --bank. A folder that is not empty is refused."""
    command = [*TINY, "--algorithm", "scaffold", "--algorithm", "feddyn:alpha=0.1", "--output"]
    elsewhere = ["--stream", "yes", "--bank", str(tmp_path / "bank")]
    assert cli.main([*command, str(tmp_path / "here")]) == 0
    assert cli.main([*command, str(tmp_path / "there"), *elsewhere]) == 0
    for here, there in zip(records(tmp_path / "here"), records(tmp_path / "there"), strict=True):
        assert here["accuracy"] == there["accuracy"] and here["train_loss"] == pytest.approx(there["train_loss"], 1e-5)
    assert {folder.name for folder in (tmp_path / "bank").iterdir()} == {"scaffold", "feddyn_alpha_0_1"}
    capsys.readouterr()
    assert cli.main([*command, str(tmp_path / "again"), *elsewhere]) == 2
    assert "--bank must be a new or empty folder" in capsys.readouterr().err and not (tmp_path / "again").exists()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:round 0. 3 of 3 client updates are not finite")
def test_the_next_algorithm_runs_after_one_that_diverges(tmp_path, capsys):
    folder = tmp_path / "o"
    command = [*TINY, "--algorithm", "fedgvr", "--algorithm", "feddyn:alpha=1", "--lr", "1e38", "--epochs", "3"]
    assert cli.main([*command, "--output", str(folder)]) == 1
    printed, error = capsys.readouterr()
    assert "error: stopped fedgvr after 0 of 2 rounds: round 0: the evaluation that fedgvr uses" in error
    assert "stopped: fedgvr after 0 of 2 rounds" in printed and re.search(r"cohort's mean +\d", printed)
    done = records(folder)
    assert [r["algorithm"] for r in done] == 2 * ["feddyn:alpha=1"] and done[-1]["train_loss"] is None


@pytest.mark.thorough
def test_clients_are_evaluated_on_their_own_test_examples(tmp_path, capsys):
    folder = tmp_path / "o"
    command = ["run", "--dataset", "glyphs:num_writers=5", "--model", "linear", "--cohort", "2", "--rounds", "1"]
    command += ["--per-client", "--no-progress", "--output", str(folder)]
    assert cli.main([*command, "--algorithm", "fedavg", "--algorithm", "fedprox:mu=1"]) == 0
    printed = capsys.readouterr().out
    header, *lines = (folder / "clients.csv").read_text().splitlines()
    assert header == "algorithm,client,accuracy,loss,personal_accuracy,personal_loss" and len(lines) == 2 * 5
    accuracy = np.array([float(line.split(",")[2]) for line in lines if line.startswith("fedavg")])
    found = re.search(r"\nfedavg +5 +([\d.]+) % +([\d.]+) % +[\d.]+ % +[\d.]+ %", printed)
    mean, worst = (float(text) / 100 for text in found.groups())
    assert (mean, worst) == pytest.approx((accuracy.mean(), accuracy.min()), abs=6e-4)
    assert "clients.csv, fairness.png" in " ".join(printed.split())
    assert (folder / "fairness.png").stat().st_size > 10_000
    assert cli.main(["run", "--resume", str(folder)]) == 0  # the run is complete; its clients are evaluated again
    assert len((folder / "clients.csv").read_text().splitlines()) == 1 + 2 * 5
    dealt = [*TINY, "--partition", "dirichlet:1", "--algorithm", "fedavg", "--per-client"]
    assert cli.main([*dealt, "--output", str(tmp_path / "p")]) == 0
    assert len((tmp_path / "p" / "clients.csv").read_text().splitlines()) > 1


def test_a_bug_is_not_reported_as_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(fd.datasets, "load", lambda *_, **__: np.zeros(3).reshape(2, 2))
    with pytest.raises(ValueError, match="cannot reshape"):
        cli.main([*TINY, "--algorithm", "fedavg", "--output", str(tmp_path / "o")])


KILLED = """
import os, signal, sys
import fedjax_drift as fd
from fedjax_drift import cli
sweep, output = fd.sweep, sys.argv[-1]

def killed(*args, **options):
    if not os.path.exists(output + "/tuning.jsonl"):  # the first algorithm
        return sweep(*args, **options)
    kill = lambda seed, setting, record: record["round"] == 5 and os.kill(os.getpid(), signal.SIGKILL)
    return sweep(*args, **options, on_round=kill)

fd.sweep = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.thorough
def test_a_killed_tuning_is_resumed_with_the_same_results(tmp_path, capsys):
    """The second algorithm is killed in its fifth round. It goes on from its checkpoint, and the first one is kept."""
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    words = ["tune", *TINY[1:], "--rounds", "8", "--settings", "2", "--range", "fedprox:mu=0.1:0.1"]
    words += ["--algorithm", "fedavg", "--algorithm", "fedprox:mu=1", "--checkpoint-every", "1"]
    assert cli.main([*words, "--output", whole]) == 0
    process = subprocess.run([sys.executable, "-c", KILLED, *words, "--output", cut], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    first = (tmp_path / "cut" / "tuning.jsonl").read_text().splitlines()
    assert len(first) == 2 and any((tmp_path / "cut" / "checkpoints").rglob("about.json"))
    assert cli.main([*words, "--output", cut]) == 2
    assert f"or resume it: fedjax-drift tune --resume {cut}" in capsys.readouterr().err
    assert cli.main(["run", "--resume", cut]) == 2
    assert f"another command has created: fedjax-drift tune --resume {cut}" in capsys.readouterr().err
    assert cli.main(["tune", "--resume", cut, "--no-progress"]) == 0
    assert "fedavg is tuned\n" in capsys.readouterr().out
    assert (tmp_path / "cut" / "tuning.jsonl").read_bytes() == (tmp_path / "whole" / "tuning.jsonl").read_bytes()


@pytest.mark.thorough
def test_tune_tries_as_many_settings_of_every_algorithm(tmp_path, capsys):
    """The score of a setting is the mean of the last evaluations of two seeds, on held-out examples."""
    folder = tmp_path / "o"
    more = ["--dataset", "synthetic:num_clients=6,num_rows=80,alpha=1,beta=1", "--rounds", "6"]
    command = ["tune", *TINY[1:], *more, "--algorithm", "fedavg", "--algorithm", "fedprox:mu=1"]
    assert cli.main([*command, "--range", "fedprox:mu=1e-3:1", "--settings", "3", "--output", str(folder)]) == 0
    tried = [json.loads(line) for line in (folder / "tuning.jsonl").read_text().splitlines()]
    assert [each["algorithm"] for each in tried] == ["fedavg"] * 3 + ["fedprox:mu=1"] * 3
    rates, again = ([each["setting"]["lr"] for each in tried[i : i + 3]] for i in (0, 3))
    assert rates == again and len(set(rates)) == 3 and all(0.01 <= rate <= 1 for rate in rates)
    words = [*TINY[1:-1], *more, "--algorithm", "fedprox:mu=1", "--validation", "0.1"]
    curves = []  # [settings, seeds, evaluations]
    for each in tried[3:]:
        sim = fd.parse_run(words, values=each["setting"]).simulations["fedprox:mu=1"]
        runs = sim.sweep(6, seeds=fd.tuning.SEEDS, eval_every=1, progress=False)
        curves.append([[record["accuracy"] for record in run.history] for run in runs])
    scores = [each["score"] for each in tried[3:]]
    assert scores == pytest.approx(np.mean(np.array(curves)[:, :, -2:], (1, 2)), abs=1e-4)
    assert scores != pytest.approx(np.mean(np.array(curves)[:, :, -1], 1), abs=1e-3)
    best = max(tried[3:], key=lambda each: each["score"])["setting"]
    printed = capsys.readouterr().out
    assert f"lr {best['lr']:g}, mu {best['mu']:g}\n" in printed
    for name, of in {"fedavg": tried[:3], "fedprox:mu=1": tried[3:]}.items():
        lr = max(of, key=lambda each: each["score"])["setting"]["lr"]
        at_edge = f"{name}: the best lr, {lr:g}, is the" in " ".join(printed.split())
        assert at_edge == (lr in (min(rates), max(rates)))
    to_run = printed.split("to run the best settings")[1].split("\n\n")[0].replace("\\\n", "")
    (options,) = [shlex.split(line)[2:] for line in to_run.splitlines() if "fedprox" in line]
    (sim,) = fd.parse_run([word for word in options if word != "--no-progress"]).simulations.values()
    assert (sim.settings["lr"], sim.settings["mu"]) == pytest.approx((best["lr"], best["mu"]), rel=1e-3)
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    for wrong, said in (
        (["--range", "lr=1"], "--range must be [NAME:]OPTION=LOW:HIGH[:linear], such as lr=0.01:1"),
        (["--range", "lr=0:1"], "shared['lr'] must have 0 < low <= high, or low <= high with log=False, got 0 and 1"),
        (["--range", "fedprox:nu=1:2"], "the option of --range fedprox:nu=1:2 must be one of 'mu'"),
        (["--seeds", "1"], "must be in 2..10000, got 1"),
    ):
        assert cli.main([*command, *wrong]) == 2 and said in capsys.readouterr().err


def test_a_printed_command_breaks_only_between_its_words():
    words = ["fedjax-drift", "run", "--resume", f"two  spaces and {'many words ' * 9}", "--rounds=30", "--patience=4"]
    printed = render.wrapped_command(words)
    assert shlex.split(printed.replace("\\\n", "")) == words and printed.count("\n") == 2
    assert "\n" not in render.wrapped_command(words[:3])


def test_ctrl_c_stops_the_run_and_keeps_the_completed_rounds(tmp_path, monkeypatch, capsys):
    folder, run = tmp_path / "o", fd.Simulation.run

    def interrupted_in_round_2(self, state, rounds, eval_every, *, on_round, **options):
        def press(record):
            on_round(record)
            if record["round"] == 2:
                signal.raise_signal(signal.SIGINT)

        return run(self, state, rounds, eval_every, on_round=press, **options)

    monkeypatch.setattr(fd.Simulation, "run", interrupted_in_round_2)
    two = ["--algorithm", "fedavg", "--algorithm", "fedprox:mu=1"]
    assert cli.main([*TINY, *two, "--rounds", "50", "--output", str(folder)]) == 130
    done = records(folder)
    assert {r["algorithm"] for r in done} == {"fedavg"} and 2 <= len(done) < 10
    assert (folder / "curves.png").exists() and re.search(rf"fedavg +{len(done)} ", capsys.readouterr().out)


def test_quickstart_runs_the_command_that_it_prints(tmp_path, monkeypatch, capsys):
    def trained(self, state, rounds, eval_every, *, on_round, measure_every, **_):
        assert eval_every == 1 and measure_every == rounds == 2
        for t in (1, 2):
            measured = {"client_drift": [9.0, 0.25]} if t == 2 else {}
            on_round({"round": t, "train_loss": 1.0, "seconds": 1.0, "accuracy": 0.4 * t} | measured)
        return state, []

    monkeypatch.setenv("FEDJAX_DRIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(fd.Simulation, "run", trained)
    folder = tmp_path / "o"
    small = ["--clients", "4", "--cohort", "2", "--rounds", "2", "--no-progress"]
    assert cli.main(["quickstart", *small, "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    config = json.loads((folder / "config.json").read_text())
    assert shlex.split(printed.split("\n\n")[1].replace("\\\n", "")) == shlex.split(config["command"])
    assert config["data"]["clients"] == 4 and config["data"]["classes"] == 10
    for name in quickstart.ALGORITHMS:
        assert re.search(rf"\n{name} +2 +60.0 % +0.25\n", printed)
    with Image.open(folder / "drift_story.png") as picture:
        assert picture.width > 1000
    assert cli.main(["quickstart", "--clients", "3", "--cohort", "4"]) == 2
    assert "--cohort must be in 1..3 (all clients), got 4" in capsys.readouterr().err
    assert cli.main(["quickstart", "--writers", "3"]) == 2
    assert "unknown argument '--writers'" in capsys.readouterr().err


def test_the_table_of_quickstart_shows_when_the_target_is_reached():
    runs = {
        "fedavg": [{"round": t, "accuracy": 0.02 * t, "client_drift": [9.0, 0.1 * t]} for t in range(1, 21)],
        "scaffold": [{"round": 1, "accuracy": 0.4}],
        "stopped": [{"round": 1}],
    }
    lines = quickstart.table(runs, 0.3).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["fedavg", "15", "31.0", "%", "1.6"],
        ["scaffold", "1", "40.0", "%", "nan"],
        ["stopped", "-", "nan", "%", "nan"],
    ]
    assert "> 20" in quickstart.table(runs, 0.9) and lines[4].endswith("means of the last 10 rounds.")
    assert " - " in quickstart.table({"stopped": [{"round": 1}]}, 0.3)


def test_the_data_command_lists_data_sets_and_plots_a_federation(tmp_path, capsys):
    assert cli.main(["data", "--data-dir", str(tmp_path)]) == 0
    listing = capsys.readouterr().out
    assert all(name in listing for name in fd.datasets.NAMES) and "To get mnist:" in listing
    look = ["data", "synthetic", "--partition", "shards:2", "--clients", "70", "--output", str(tmp_path / "o")]
    assert cli.main(look) == 0
    assert "56 to 58" in capsys.readouterr().out  # 4,000 examples in 140 shards of 28 or 29
    assert (tmp_path / "o" / "federation.png").stat().st_size > 10_000


def test_the_command_line_runs_as_a_module(tmp_path):
    def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "fedjax_drift.cli", *arguments], capture_output=True, text=True)

    asked = shell("run", "--help")
    assert asked.returncode == 0 and "examples:" in asked.stdout
    assert max(map(len, asked.stdout.splitlines())) <= 80
    wrong = shell(*TINY, "--algorithm", "fedavg", "--partition", "dirichlet:0", "--output", str(tmp_path / "o"))
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.startswith("fedjax-drift: error: alpha must be a finite number > 0, got 0")
    assert wrong.stderr.count("\n") == 1


def test_a_broken_pipe_is_not_reported_as_bad_input(tmp_path, monkeypatch, capfd) -> None:
    def gone(*_) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("fedjax_drift.cli.run.heading", gone)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    options = ["--dataset=synthetic:num_clients=3,num_rows=5", "--cohort=2", f"--output={tmp_path / 'out'}"]
    assert cli.main(["run", "--algorithm=fedavg", *options]) == 141
    assert "error" not in capfd.readouterr().err


def flags_of_all_commands() -> list[tuple[str, str, Reader]]:
    """The commands and the flags whose values are read as they are declared."""
    found = []
    for command, module in commands.COMMANDS.items():
        module.add_flags(parser := Parser(prog=command))
        found += [(command, a.option_strings[0], a.type) for a in parser._actions if isinstance(a.type, Reader)]
    return found


@pytest.mark.parametrize(("command", "flag", "read"), flags_of_all_commands(), ids=lambda value: str(value)[:30])
def test_a_flag_reads_the_values_that_are_declared_and_names_itself_for_others(command, flag, read, capsys):
    """Words that the command line does not know are refused before anything else, in one line."""
    spec, words = read.argument.spec, {True: "yes", False: "no"}
    for value in (*spec.right, *read.words):
        if not isinstance(value, tuple):  # of a value for each client
            assert read(words[value] if isinstance(value, bool) else str(value)) == value
    wrong = [*map(str, spec.wrong), "nan", "", "sometimes", "--"]
    for word in wrong if spec.kind != "path" else [""]:
        assert cli.main([command, f"{flag}={word}"]) == 2
        output, error = capsys.readouterr()
        assert not output and error.count("\n") == 1, word
        assert error.startswith(f"fedjax-drift: error: argument {flag}: ") or word == "--" and flag in error
        assert "must be " in error or word in ("", "--"), error


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.thorough)])
def test_command_lines_keep_their_meaning(step) -> None:
    """Every algorithm, flag and kind of value, as recorded before the flags followed from declarations."""
    assert not command_lines.changed(step)
