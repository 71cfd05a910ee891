"""Compares the algorithms for low-rank adapters by aggregation drift, perplexity and bytes.

    python -m experiments.low_rank [--rounds 32] [--output DIR]
    python -m experiments.low_rank --draw DIR      only writes the table and the picture again

The results are saved after every algorithm. The same command continues. It takes about 25 minutes on one core.

Model, clients, adapters and the local AdamW are those of FedIT in experiments/language_model.py: a decoder with 0.4
million parameters, pretrained here, rank 8, and 40 clients, of which 8 train for two epochs in each round. The learning
rate is the one with the lowest perplexity after 8 rounds on held-out training examples, with another seed. Then three
seeds are run. They differ in the first factors A, the cohorts and the order of the examples, not in the clients' data.

The scores are those of the global model on the test examples of all clients. FedSA-LoRA has no global model. Its scores
are those of the clients' own models. Aggregation drift is the mean over the rounds. Needs tokenizers.
"""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown
from experiments import language_model as lm

SEEDS, TUNING_ROUNDS, PRETRAINING, CLIENTS = (0, 1, 2), 8, 50, 40
RESULTS = Path(__file__).parent / "results"
ALGORITHMS = {
    "FedIT": fd.algorithms.fedavg,
    "RoLoRA": fd.algorithms.rolora,
    "FedSA-LoRA": fd.algorithms.fedsa_lora,
    "FedEx-LoRA": fd.algorithms.fedex_lora,
    "FLoRA": fd.algorithms.flora,
    "FlexLoRA": fd.algorithms.flexlora,
    "FlexLoRA, ranks 2, 4, 8": partial(fd.algorithms.flexlora, ranks=(2, 4, 8)),
}
COLUMNS = {  # heading of a column -> (key of a run, its format)
    "aggregation drift": ("aggregation drift", ".3f"),
    "perplexity": ("perplexity", ".2f"),
    "exact match (%)": ("exact match", ".1f"),
    "MB sent": ("megabytes sent", ".1f"),
    "MB received": ("megabytes received", ".1f"),
}


@functools.cache
def setting() -> tuple[lm.Method, fd.FederatedData]:
    """The model with adapters, its local optimizer, and the clients."""
    base = lm.pretrained(PRETRAINING)
    return lm.methods(base)["FedIT"], lm.federation(base.tokenizer, CLIENTS)[0]


def simulate(method: lm.Method, data: fd.FederatedData, name: str, lr: float) -> fd.Simulation:
    """The simulation of an algorithm. Its rounds have the aggregation drift, if there are products to average."""
    algorithm = ALGORITHMS[name]()
    return fd.Simulation(
        method.model, data, algorithm, local=method.local(lr), cohort_size=min(lm.COHORT, data.num_clients),
        eval_batch_size=lm.TESTED, measure=() if algorithm.personal else "low_rank",
    )  # fmt: skip


def scores(sim: fd.Simulation, state: fd.ServerState) -> dict[str, float]:
    """The scores of the test examples of all clients, of the clients' own models if they have some."""
    found = sim.evaluate_clients(state)
    own = "personal_" if sim.algorithm.personal else ""
    names = ("accuracy", "nats", "tokens")
    mean = {name: float(np.average(found[own + name], weights=sim.data.test_sizes)) for name in names}
    return {"exact match": 100 * mean["accuracy"], "perplexity": float(lm.perplexity(mean))}


def tuned(method: lm.Method, data: fd.FederatedData, name: str) -> float:
    """The learning rate with the lowest perplexity on a quarter of the training examples, which is held out."""
    build = partial(simulate, method, data.with_validation(0.25), name)
    seeds, rates = fd.tuning.SEEDS[:1], fd.grid(lr=method.rates)
    runs = fd.sweep(build, TUNING_ROUNDS, seeds, rates, eval_every=0, progress=False)
    found = [scores(build(**run.setting), run.state)["perplexity"] for run in runs]
    return float(fd.tuning.best(rates, [-perplexity for perplexity in found])["lr"])


def compute(rounds: int, name: str) -> cells.Entry:
    method, data = setting()
    lr = tuned(method, data, name)
    sim = simulate(method, data, name, lr)
    return {"lr": lr, "runs": [result(sim, run) for run in sim.sweep(rounds, SEEDS, eval_every=0, progress=False)]}


def result(sim: fd.Simulation, run: fd.Run) -> dict[str, Any]:
    """The scores of a run, what its clients have sent and received, and the aggregation drift of its rounds."""
    records = run.history
    return {
        "seed": run.seed, **scores(sim, run.state),
        "megabytes sent": sum(record["uplink_bytes"] for record in records) / 1e6,
        "megabytes received": sum(record["downlink_bytes"] for record in records) / 1e6,
        "aggregation drift": [record["aggregation_drift"] for record in records if "aggregation_drift" in record],
    }  # fmt: skip


def shown(entry: cells.Entry, key: str, form: str) -> str:
    """The mean over the seeds with its confidence interval, which is left out if the seeds agree."""
    values = [np.mean(run[key]) for run in entry["runs"] if run[key] != []]
    if len({f"{value:{form}}" for value in values}) == 1:
        return f"{values[0]:{form}}"
    return markdown.interval(values, form) if values else "-"


def show(entry: cells.Entry) -> str:
    return ", ".join([f"lr {entry['lr']:g}", *(f"{name} {shown(entry, *of)}" for name, of in COLUMNS.items())])


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The table, and the picture of the drift and of the perplexity."""
    results = {name: entry for (name,), entry in found.items()}
    perplexity = {name: np.array([run["perplexity"] for run in entry["runs"]]) for name, entry in results.items()}
    (first, *others), rows = results, []
    gaps = {name: perplexity[name] - perplexity[first] for name in others}
    for name, entry in results.items():
        gap = markdown.interval(gaps[name], "+.2f") if name in gaps else ""
        rows.append([name, f"{entry['lr']:g}", *(shown(entry, *column) for column in COLUMNS.values()), gap])
    p_values = fd.statistics.holm([fd.statistics.mean(gap).p for gap in gaps.values()])
    differ = [name for name, p in zip(gaps, p_values, strict=True) if p < fd.statistics.SIGNIFICANT]
    text = (
        "# Algorithms for low-rank adapters\n\nMeans over three seeds with 95 % confidence intervals. The last column "
        f"is the difference of the perplexities of the same seed. Of these {len(gaps)} differences, the following are "
        f"significant (5 %, corrected by Holm): {'; '.join(differ) or 'none'}. "
        "`experiments/low_rank.py` has the setting.\n\n"
    )
    table = markdown.table(["algorithm", "learning rate", *COLUMNS, f"perplexity minus {first}'s"], rows)
    return {"low_rank.md": text + table, "low_rank.png": draw(results)}


def draw(results: dict[str, cells.Entry]) -> Any:
    """The aggregation drift of each round, mean over the seeds, and perplexity against bytes, a point for each seed."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, (name, entry) in enumerate(results.items()):
        look = {"color": fd.plots.COLOURS[i], "marker": fd.plots.MARKERS[i], "label": name}
        runs = entry["runs"]
        drift = np.mean([run["aggregation drift"] for run in runs], 0)
        # Three lines are at 0. Each has its markers in other rounds, so that all can be seen.
        left.plot(np.arange(1, len(drift) + 1), drift, markersize=6, markevery=(i % 4, 4), **look)
        megabytes = [run["megabytes sent"] + run["megabytes received"] for run in runs]
        right.plot(megabytes, [run["perplexity"] for run in runs], linestyle="", markersize=7, alpha=0.8, **look)
    left.set(xlabel="Round", ylabel="Aggregation drift", ylim=(-0.002, None))
    right.set(xlabel="Megabytes sent and received", ylabel="Perplexity of held-out answers", xscale="log", yscale="log")
    for axis, ticks in ((right.xaxis, (50, 100, 200, 400)), (right.yaxis, (2, 3, 4, 5, 6))):
        axis.set_ticks(ticks, [f"{tick}" for tick in ticks])
        axis.set_ticks([], minor=True)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


EXPERIMENT = cells.Experiment("low_rank", [(name,) for name in ALGORITHMS], compute, show, report)

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=32, output=RESULTS)
