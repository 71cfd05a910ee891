"""q-FFL (Li, Sanjabi, Beirami, Smith, ICLR 2020), table 1, the rows of the synthetic data.

    python -m experiments.q_ffl [--rounds 20000] [--output DIR]
    python -m experiments.q_ffl --draw DIR      only writes the table again

Synthetic(1, 1) of FedProx with 100 clients, softmax regression. A round has 10 clients, which are drawn with
probabilities proportional to their sizes and count equally. They train for one epoch with batch 10 and a learning rate
of 0.1, L is its inverse, and there are 20,000 rounds, as in the authors' code and README. q = 0 and q = 1. The scores
are those of the test accuracies of all clients after the last round: their mean weighted by the numbers of examples,
the means of the worst and of the best tenth of the clients, and the variance over the clients (in squared percent).

The paper has five splits of one data set into training, test and validation examples. The authors' generator has no
fixed seed, so their data cannot be had. Here, each of six seeds draws its own data: 90 % of a client's examples are for
training, and 10 % for the test (there 80, 10, and 10 for validation). The results are saved after every run, and the
same command continues.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

import fedjax_drift as fd
from experiments import cells, markdown
from experiments.tables import comparison, papers

SEEDS, QS = range(6), (0, 1)
NAMES = ("accuracy (%)", "worst 10 % (%)", "best 10 % (%)", "variance")
PRINTED = {  # q -> (mean, standard deviation over the splits) of each score
    0: [(80.8, 0.9), (18.8, 5.0), (100.0, 0.0), (724.0, 72.0)],
    1: [(79.0, 1.2), (31.1, 1.8), (100.0, 0.0), (472.0, 14.0)],
}


@cache
def federation(seed: int) -> fd.FederatedData:
    return fd.datasets.synthetic(1.0, 1.0, num_clients=100, variant="fedprox", seed=seed)


def compute(rounds: int, q: int, seed: int) -> cells.Entry:
    data = federation(seed)
    model = fd.models.linear((60,), 10)
    local = fd.LocalTraining(epochs=1, batch_size=10, lr=0.1)
    algorithm, by_size = fd.algorithms.qfedavg(q=float(q)), fd.participation.by_size()
    sim = fd.Simulation(model, data, algorithm, local=local, cohort_size=10, participation=by_size)
    (run,) = sim.sweep(rounds, [seed], 0, progress=False)
    accuracy = np.asarray(sim.evaluate_clients(run.state)["accuracy"], float)
    return {"q": q, "seed": seed, "accuracy": accuracy.round(5).tolist(), "tests": np.asarray(data.test_sizes).tolist()}


def scores(entry: cells.Entry) -> dict[str, float]:
    """The four scores of a run."""
    accuracy, tests = 100 * np.array(entry["accuracy"]), np.array(entry["tests"])
    fair = fd.personal.summary(accuracy)
    mean = float(np.average(accuracy, weights=tests))
    return dict(zip(NAMES, (mean, fair["worst_10"], fair["best_10"], fair["variance"]), strict=True))


def show(entry: cells.Entry) -> str:
    return markdown.words({name: round(value, 1) for name, value in scores(entry).items()})


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """The table of all scores, beside the printed ones."""
    rows = []
    for q in QS:
        runs = [scores(found[q, seed]) for seed in SEEDS]
        for name, (mean, std) in zip(NAMES, PRINTED[q], strict=True):
            values = [run[name] for run in runs]
            agrees = comparison.agrees(values, papers.Printed(mean, std, ""))
            rows.append([q, name, f"{mean:g} ± {std:g}", markdown.interval(values, ".1f"), "yes" if agrees else "no"])
    table = markdown.table(["q", "score", "printed", "ours", "agrees"], rows)
    text = "# q-FFL on synthetic data\n\nPrinted: mean ± standard deviation over five splits. Ours: mean and 95 % "
    text += f"confidence interval over {len(SEEDS)} seeds, each with its own data. `experiments/q_ffl.py` has the "
    text += "setting.\n\n"
    return {"q_ffl.md": text + table}


CELLS = [(q, seed) for seed in SEEDS for q in QS]
EXPERIMENT = cells.Experiment("q_ffl", CELLS, compute, show, report, itemgetter("q", "seed"))

if __name__ == "__main__":
    cells.main(EXPERIMENT, __doc__, rounds=20_000)
