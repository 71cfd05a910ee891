"""FedEve's figures 6 and 7: period drift beside the noise of SGD, and whether both drifts are normal over the rounds
(arXiv 2508.14539, appendices C.1 and D.1).

    python -m experiments.fedeve_figures [--rounds 200] [--output DIR]
    python -m experiments.fedeve_figures --draw DIR      only draws the pictures again

The setting is small: 6,000 images of MNIST and 100 clients, either iid or split by Dirichlet(alpha). The rest is as in
table 1: LeNet-5, one local epoch, batch size 20, learning rate 0.01. FedAvg trains with cohorts S of 10 clients. In
every round, all clients train from the same global model w. theta_i is the model of client i, theta_S the mean over the
cohort and theta the mean over all clients, both with weights n_i.

Figure 6. The text of C.1 compares gradient directions: period drift is said to give "consistent biases in gradient
direction", and the noise of SGD to average out. (The figure itself shows the labels of one cohort.) Here grad_S is the
gradient of the examples of the cohort at w, grad_B that of a batch of equally many random examples, and grad f that of
all examples. Two things are plotted:

- the cosine of grad_S and of grad_B with grad f;
- ||mean_t e_t|| / sqrt(mean_t ||e_t||^2) over the first T rounds, where e_t is grad_S - grad f or grad_B - grad f. It
  is about T^(-1/2) for independent noise, and does not fall if the direction is the same in all rounds.

Figure 7. The paper traces one random parameter over 1,500 rounds and applies the test of D'Agostino and Pearson
(`scipy.stats.normaltest`): p > 0.05 counts as normal. Period drift is x_S - x_N and client drift is x_k - x_S, where x
are optima of the data of the cohort, of all clients and of one client. Here the models after local training, theta_S,
theta and theta_i with one random client of the cohort, take the place of the optima. The test is applied to 200 random
parameters. If a drift were normal, 95 % of them would pass. The size of a drift changes during the training, and a
mixture of normal distributions with different variances is not normal. So the second half of the rounds is also tested
alone.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy import stats

import fedjax_drift as fd
from experiments import cells
from experiments.fedeve_normality import all_updates, keeping_updates

CLIENTS, COHORT, EXAMPLES, CHUNK, PARAMETERS = 100, 10, 6000, 500, 200
SPLITS = {"iid": None, "alpha = 1": 1.0, "alpha = 0.1": 0.1, "alpha = 0.01": 0.01}


def federation(alpha: float | None) -> fd.FederatedData:
    """100 clients with 6,000 standardised images of MNIST."""
    whole = fd.datasets.load("mnist", partition=fd.partition.iid(60000 // EXAMPLES), standardize=True)
    x, y = whole.client(0)
    kind = {"prior": "class", "min_size": 1, "capped": False}
    split = fd.partition.iid(CLIENTS) if alpha is None else fd.partition.dirichlet(CLIENTS, alpha, **kind)
    return fd.FederatedData.from_partition(np.asarray(whole.decode(x)), y, split(y))


class Gradients:
    """The gradient of the mean loss of any examples at any model, float [d]."""

    def __init__(self, model: fd.Model, data: fd.FederatedData) -> None:
        self.data = data

        def summed(params: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
            return (model.loss(model.apply(params, x), y) * mask).sum()

        self.of_chunk = jax.jit(jax.grad(summed))

    def __call__(self, params: Any, rows: np.ndarray) -> np.ndarray:
        total = 0.0
        for first in range(0, len(rows), CHUNK):
            chunk = np.resize(rows[first : first + CHUNK], CHUNK)  # the last chunk is padded, so all have one shape
            mask = jnp.arange(CHUNK) < len(rows) - first
            grad = self.of_chunk(params, self.data.x[chunk], self.data.y[chunk], mask)
            total = total + np.asarray(ravel_pytree(grad)[0], float)
        return total / len(rows)


def averaged_out(noise: np.ndarray) -> list[float]:
    """||mean_t e_t|| / sqrt(mean_t ||e_t||^2) over the first T rounds, for T = 1, 2, ... and e_t = noise[t], [T, d]."""
    T = np.arange(1, len(noise) + 1)
    sums = np.linalg.norm(np.cumsum(noise, 0), axis=1)
    return (sums / T / np.sqrt(np.cumsum((noise**2).sum(1)) / T)).tolist()


def trace(data: fd.FederatedData, rounds: int) -> dict[str, Any]:
    """Runs FedAvg and returns the values of both figures."""
    model, local = fd.models.simple_fl_lenet(num_classes=10), fd.LocalTraining(epochs=1, batch_size=20, lr=0.01)
    everyone = fd.Simulation(model, data, keeping_updates(), local=local, cohort_size=CLIENTS)
    gradient, rng, n = Gradients(model, data), np.random.default_rng(0), data.sizes.astype(float)
    w = everyone.init(jax.random.key(0)).params
    d = sum(leaf.size for leaf in jax.tree.leaves(w))
    traced = rng.choice(d, PARAMETERS, replace=False)
    cosines: dict[str, list[float]] = {"cohort": [], "batch": []}
    noise: dict[str, list[np.ndarray]] = {"cohort": [], "batch": []}
    drifts: dict[str, list[np.ndarray]] = {"period drift": [], "client drift": []}
    owner = np.repeat(np.arange(CLIENTS), data.sizes)
    for t in range(rounds):
        Delta = all_updates(everyone, w, seed=t)
        S = rng.choice(CLIENTS, COHORT, replace=False)
        Delta_S, k = n[S] @ Delta[S] / n[S].sum(), rng.choice(S)
        drifts["period drift"].append((n @ Delta / n.sum() - Delta_S)[traced])  # theta_S - theta
        drifts["client drift"].append((Delta_S - Delta[k])[traced])  # theta_k - theta_S
        of_all, of_S = gradient(w, np.arange(EXAMPLES)), np.flatnonzero(np.isin(owner, S))
        for name, rows in {"cohort": of_S, "batch": rng.choice(EXAMPLES, len(of_S), replace=False)}.items():
            g = gradient(w, rows)
            cosines[name].append(float(g @ of_all / np.linalg.norm(g) / np.linalg.norm(of_all)))
            noise[name].append((g - of_all).astype(np.float32))
        vector, unravel = ravel_pytree(w)
        w = unravel(jnp.asarray(np.asarray(vector, float) - Delta_S, vector.dtype))
    return {
        "cosine": cosines,
        "averaged out": {name: averaged_out(np.stack(each)) for name, each in noise.items()},
        "drift": {name: normality(np.stack(each)) for name, each in drifts.items()},
    }


def normality(values: np.ndarray) -> dict[str, Any]:
    """The p-values of the parameters that change, and the trace of the first of them. values: float [rounds, p]."""
    values = values[:, values.std(0) > 0]  # no client changes the parameters of a unit that is never active
    tests = {"p": values, "p, second half": values[len(values) // 2 :]}
    return {name: stats.normaltest(v).pvalue.tolist() for name, v in tests.items()} | {"trace": values[:, 0].tolist()}


def compute(rounds: int, split: str) -> cells.Entry:
    if rounds < 40:
        sys.exit(f"--rounds must be at least 40 for the test of normality, got {rounds}")
    return rounded(trace(federation(SPLITS[split]), rounds))


def rounded(value: Any) -> Any:
    """The same with four significant digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [float(f"{each:.4g}") for each in value]


def show(entry: cells.Entry) -> str:
    cosines = ", ".join(f"{np.mean(values):.2f} ({name})" for name, values in entry["cosine"].items())
    left = ", ".join(f"{values[-1]:.3f} ({name})" for name, values in entry["averaged out"].items())
    passed = ", ".join(
        f"{np.mean(np.array(each[key]) > 0.05):.0%} ({name}, {key})"
        for name, each in entry["drift"].items()
        for key in ("p", "p, second half")
    )
    return f"mean cosine {cosines}; left after all rounds {left}; normal {passed}"


def report(found: dict[cells.Cell, cells.Entry]) -> dict[str, Any]:
    """Both figures."""
    import matplotlib.pyplot as plt

    labels = {"cohort": "10 clients", "batch": "random examples, equally many"}
    gradients, axes = plt.subplots(2, len(found), figsize=(13, 5.6), sharex="row", sharey="row", layout="constrained")
    for ((split,), entry), (top, bottom) in zip(found.items(), axes.T, strict=True):
        for n, (name, label) in enumerate(labels.items()):
            top.hist(entry["cosine"][name], np.linspace(-1, 1, 41), color=f"C{n}", alpha=0.6, label=label)
            ratio = entry["averaged out"][name]
            bottom.loglog(np.arange(1, len(ratio) + 1), ratio, color=f"C{n}", label=label)
        T = np.arange(1, len(ratio) + 1)
        bottom.loglog(T, T**-0.5, color="black", linestyle=":", label="independent noise")
        top.set(title=split, xlabel="Cosine with the gradient\nof all examples")
        bottom.set(xlabel="Rounds T")
    axes[0, 0].set_ylabel("Rounds")
    axes[1, 0].set_ylabel("Norm of the mean deviation\n(typical deviation = 1)")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    axes[1, 0].legend(fontsize=8, loc="lower left")

    drifts, axes = plt.subplots(len(found), 2, figsize=(8, 2.1 * len(found)), layout="constrained")
    for ((split,), entry), row in zip(found.items(), axes, strict=True):
        for n, (panel, (drift, each)) in enumerate(zip(row, entry["drift"].items(), strict=True)):
            p = np.array(each["p"])
            panel.hist(each["trace"], 40, color=f"C{n}")
            panel.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
            panel.locator_params(nbins=5)
            panel.set_title(f"{drift.capitalize()}, {split}: p = {p[0]:.2g} ({(p > 0.05).mean():.0%} pass)", fontsize=9)
    drifts.supxlabel("Drift of one random parameter")
    drifts.supylabel("Rounds")
    return {"fedeve_figure6.png": gradients, "fedeve_figure7.png": drifts}


EXPERIMENT = cells.Experiment("fedeve_figures", [(split,) for split in SPLITS], compute, show, report)

if __name__ == "__main__":
    fd.use_cpu_devices()
    cells.main(EXPERIMENT, __doc__, rounds=200)
