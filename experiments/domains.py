"""Compares algorithms on federations with groups of clients, and with rare classes.

    python -m experiments.domains [--rounds 100] [--output DIR]
    python -m experiments.domains --draw DIR      only writes the table again

The results are saved after every algorithm. The same command continues.

"groups": MNIST with 200 clients of equal label mix, in four groups whose images are rotated by 0, 90, 180 and 270
degrees (as in the IFCA paper). The score is the accuracy of each client's own model on its own test examples: the mean
over the clients, and the mean of the worst 10 %. For FedAvg, it is that of the global model, without and with one epoch
of fine-tuning.

"long tail": Fashion-MNIST with 100 clients, Dirichlet(0.6), imbalance factor 100: class 0 has 6,000 training examples
and class 9 has 60. The score is the accuracy on the balanced test set, and that on the worst class.

The model is 2NN. 20 clients take part in a round and train for one epoch with batch size 20. For every algorithm, the
setting is the one with the best mean score in runs with two other seeds, in which 10 % of each client's training
examples are held out (of the long tail: the mean of the accuracies per class). Then three seeds are run, each with its
own partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown

SEEDS, TUNING_SEEDS, HELD_OUT, CLASSES = (0, 1, 2), (100, 101), 0.1, 10
LEARNING_RATES = [0.03, 0.1, 0.3]
alg, MODEL = fd.algorithms, fd.models.mnist_2nn()
Scores = dict[str, float]


class Setting(NamedTuple):
    """A kind of federation, its scores, and the algorithms with the other settings of the search."""

    federation: Callable[[int], fd.FederatedData]
    scores: Callable[[fd.Simulation, fd.ServerState], Scores]
    algorithms: dict[str, tuple[Callable[..., fd.Algorithm], dict[str, list[float]]]]


def groups(seed: int) -> fd.FederatedData:
    rotations = [fd.shift.rotate(degrees, by="all") for degrees in (90, 180, 270)]
    data = fd.datasets.load("mnist", partition=fd.partition.iid(200, seed)).with_client_tests(seed)
    return data.shifted(fd.shift.domains(fd.shift.none(), *rotations))


def long_tail(seed: int) -> fd.FederatedData:
    partition = fd.partition.long_tailed(fd.partition.dirichlet(100, alpha=0.6, seed=seed), imbalance=100, seed=seed)
    return fd.datasets.load("fashion_mnist", partition=partition)


def of_clients(sim: fd.Simulation, state: fd.ServerState) -> Scores:
    found = sim.evaluate_clients(state, fine_tune=None if sim.algorithm.personal else 1)
    own = fd.personal.summary(found["personal_accuracy"])
    both = {"mean": own["mean"], "worst": own["lowest_10"]}
    if sim.algorithm.personal:
        return both
    plain = fd.personal.summary(found["accuracy"])
    return {"mean": plain["mean"], "worst": plain["lowest_10"], "fine-tuned": own["mean"]}


def of_classes(sim: fd.Simulation, state: fd.ServerState) -> Scores:
    assert sim.data.x_test is not None and sim.data.y_test is not None
    logits = jax.jit(sim.model.apply)(state.params, jnp.asarray(sim.data.decoding(jnp.asarray(sim.data.x_test))))
    y = np.asarray(sim.data.y_test)
    right = np.asarray(logits.argmax(-1)) == y
    each = [right[y == c].mean() for c in range(CLASSES) if (y == c).any()]
    return {"mean": float(np.mean(each)), "worst": float(min(each))}


@fd.algorithm
def agnostic(domain_lr: float) -> fd.Algorithm:
    return alg.agnostic(CLASSES, domain_lr=domain_lr, window=3, scale="batch")


SETTINGS = {
    "groups": Setting(groups, of_clients, {
        "FedAvg": (alg.fedavg, {}),
        "IFCA": (partial(alg.ifca, 4), {}),
        "HypCluster": (partial(alg.hypcluster, 4), {}),
        "Per-FedAvg": (alg.perfedavg, {"alpha": [0.01, 0.1]}),
        "Ditto": (alg.ditto, {"lam": [0.1, 1.0]}),
    }),
    "long tail": Setting(long_tail, of_classes, {
        "FedAvg": (alg.fedavg, {}),
        "q-FedAvg": (alg.qfedavg, {"q": [0.1, 1.0]}),
        "Agnostic": (agnostic, {"domain_lr": [0.01, 0.1]}),
        "FedLC": (alg.fedlc, {"tau": [0.3, 1.0]}),
    }),
}  # fmt: skip


def scores(
    setting: Setting,
    factory: Callable[..., fd.Algorithm],
    data: fd.FederatedData,
    rounds: int,
    seed: int,
    **given: float,
) -> Scores:
    """The scores after a run with the settings ``given``: the learning rate, and hyper-parameters of the algorithm."""
    options = dict(given)
    local = fd.LocalTraining(epochs=1, batch_size=20, lr=options.pop("lr"))
    sim = fd.Simulation(MODEL, data, factory(**options), local=local, cohort_size=20)
    state, _ = sim.run(sim.init(jax.random.key(seed)), rounds, eval_every=0, progress=False)
    return setting.scores(sim, state)


def best_setting(
    setting: Setting, factory: Callable[..., fd.Algorithm], others: dict[str, list[float]], rounds: int
) -> dict[str, float]:
    federations = {seed: setting.federation(seed).with_validation(HELD_OUT, 0) for seed in TUNING_SEEDS}

    def score(options: Mapping[str, float]) -> float:
        runs = [scores(setting, factory, data, rounds, seed, **options) for seed, data in federations.items()]
        return float(np.mean([np.nan_to_num(run["mean"]) for run in runs]))

    grid = fd.grid(lr=LEARNING_RATES, **others)
    return fd.tuning.best(grid, [score(options) for options in grid])


def compute(rounds: int, kind: str, name: str) -> cells.Entry:
    setting = SETTINGS[kind]
    factory, others = setting.algorithms[name]
    best = best_setting(setting, factory, others, rounds)
    runs = [scores(setting, factory, setting.federation(seed), rounds, seed, **best) for seed in SEEDS]
    return {"setting": best, "runs": runs}


def show(entry: cells.Entry) -> str:
    means = {key: 100 * np.mean([run[key] for run in entry["runs"]]) for key in entry["runs"][0]}
    return ", ".join([markdown.words(entry["setting"]), *(f"{key} {mean:.1f} %" for key, mean in means.items())])


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The tables: means over the seeds and 95 % confidence intervals, in percent."""
    text = "# Groups of clients, and rare classes\n\n`experiments/domains.py` has the settings."
    for kind, setting in SETTINGS.items():
        entries = {name: found[kind, name] for name in setting.algorithms}
        columns = list(dict.fromkeys(key for entry in entries.values() for key in entry["runs"][0]))
        rows = []
        for name, entry in entries.items():
            values = [[100 * run[key] for run in entry["runs"] if key in run] for key in columns]
            rows.append([name, *(markdown.interval(each, ".1f") if each else "" for each in values)])
            rows[-1].append(markdown.words(entry["setting"], "="))
        text += f"\n\n## {kind.capitalize()}\n\n" + markdown.table(["algorithm", *columns, "setting"], rows)
    return {"domains.md": text}


EXPERIMENT = cells.Experiment(
    "domains", [(kind, name) for kind in SETTINGS for name in SETTINGS[kind].algorithms], compute, show, report
)

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=100, output=Path(__file__).parent / "results")
