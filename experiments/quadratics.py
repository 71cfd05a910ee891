"""Compares simulations with theory on quadratics whose optima and curvatures differ between clients.

    python -m experiments.quadratics [--output FOLDER]

Client i has the loss F_i(w) = 1/2 (w - a_i)' H_i (w - a_i). All clients have the same weight, and each local step uses
the full gradient of the client. A client of FedProx makes K steps with learning rate eta on
F_i(theta) + (mu/2) ||theta - w||^2, starting from the global model w. FedAvg is the case mu = 0. The update is

    D_i = P_i (a_i - w),    P_i = (I - (I - eta A_i)^K) A_i^-1 H_i,    A_i = H_i + mu I,

With all clients in every round, the fixed point of the global model solves sum_i P_i (a_i - w) = 0. The optimum solves
sum_i H_i (a_i - w) = 0. FedAvg with K = 1 has P_i = eta H_i, so both points are equal. With K >= 2 the matrices P_i
are no longer proportional to the curvatures H_i, and the fixed point differs from the optimum (Charles and Konecny,
"Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning", AISTATS 2021, arXiv 2103.05032). Server
momentum (FedADC, FedEve) does not change the fixed point. FedEve approaches it slowly, because its Kalman gain
approaches 0 there. If clients are sampled, FedAvg's models scatter about the fixed point, and their mean over many
rounds is close to it.

The experiment has 20 clients and 10 dimensions. The eigenvalues of H_i are log-uniform in 0.2..3, and the entries of
a_i are normal with mean 1 and standard deviation 2. eta is 0.1 and K is 10. The initial model is w = 0, at distance 3.4
from the optimum. SCAFFOLD, VRL-SGD, FedDyn and FedDC converge to the optimum, with all clients and with 4 of 20 clients
per round.

Of the newer algorithms, FedNova and FedLESAM with FedAvg have FedAvg's fixed point, because all clients do the same
number of steps and the perturbation vanishes with the change of w. FedSAM's is at almost the same distance. FedCM's is
at 0.05, because its local steps mostly follow the momentum of all clients. FedExP with a small eps does not converge:
the mean update vanishes near the fixed point and the updates of the clients do not, so its server learning rate becomes
very large. FedSpeed, FedSMOO and FedLESAM with SCAFFOLD or FedDyn correct drift. They end at a distance from the
optimum that is proportional to rho, the size of their perturbation: FedSpeed at 0.015 for rho = 0.1 and 0.0015 for
rho = 0.01. FedSMOO and FedLESAM oscillate around the optimum, at 0.05 and 0.09 for rho = 0.1.

Of the baselines of 2019 to 2026, FedGamma ends at 0.15 rho, as FedSpeed does. Mime without momentum converges to the
optimum if all clients take part. If clients are sampled, the gradient of the cohort is not that of all clients, and
Mime scatters as FedAvg does. MimeLite and FedMoSWA have a slow momentum and oscillate: after 60 rounds with all
clients, they are at 0.11 and 0.007. MimeLite ends at 0.005, FedMoSWA at the optimum. With all clients, AdaBest ends at
the optimum of f(w) + (1 - beta) mu / 2 ||w - w_0||^2, which depends on the initial model w_0. The momentum of GHBM and
LocalGHBM vanishes at a fixed point, so theirs is that of FedAvg.

FedDyn works best if alpha is about as large as the curvatures. The table shows the round from which on the model is
within 1e-3 of the optimum.

    algorithm                       alpha   all clients   4 of 20 clients per round
    FedDyn                            0.1           160                       > 600
    FedDyn                            0.3            55                         380
    FedDyn                              1            19                         128
    FedDyn                              3            32                          69
    FedDyn                             10           104                         104
    FedDyn                             15           155                         156
    FedDC                             0.1            24                          88
    FedDC                               1            10                          73
    FedDC, variate="last_update"      0.1           206                       > 600
    FedDC, variate="last_update"        1            25                         197
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import fedjax_drift as fd
from fedjax_drift import plots

LR, STEPS = 0.1, 10
SETTINGS = {"All clients": (20, 60), "4 of 20 clients a round": (4, 200)}  # cohort size, number of rounds
ALGORITHMS = {
    "FedAvg": fd.algorithms.fedavg(),
    "FedProx, mu = 1": fd.algorithms.fedprox(mu=1.0),
    "SCAFFOLD": fd.algorithms.scaffold(),
    "FedADC, beta = 0.6": fd.algorithms.fedadc(beta=0.6),
    "FedEve": fd.algorithms.fedeve(),
    "FedDyn, alpha = 1": fd.algorithms.feddyn(alpha=1.0),
    "FedDC, alpha = 1": fd.algorithms.feddc(alpha=1.0),
    "VRL-SGD": fd.algorithms.vrl_sgd(),  # with all clients, its (dashed) curve is that of SCAFFOLD
}

NEWER = {
    "FedAvg": fd.algorithms.fedavg(),
    "FedNova": fd.algorithms.fednova(),  # its (dashed) curve is that of FedAvg
    "FedCM, alpha = 0.1": fd.algorithms.fedcm(alpha=0.1),
    "FedSAM, rho = 0.1": fd.algorithms.fedsam(rho=0.1),
    "FedExP, eps = 0.001": fd.algorithms.fedexp(eps=1e-3),
    "FedSpeed, rho = 0.1": fd.algorithms.fedspeed(rho=0.1, lam=1.0),
    "FedSpeed, rho = 0.01": fd.algorithms.fedspeed(rho=0.01, lam=1.0),
    "FedSMOO, rho = 0.1": fd.algorithms.fedsmoo(rho=0.1, alpha=1.0),
    "FedLESAM-S, rho = 0.1": fd.algorithms.fedlesam(rho=0.1, correction="scaffold"),
}
BASELINES = {
    "FedAvg": fd.algorithms.fedavg(),
    "FedGamma, rho = 0.01": fd.algorithms.fedgamma(rho=0.01),
    "Mime, beta = 0": fd.algorithms.mime(beta=0.0),
    "MimeLite, damped": fd.algorithms.mimelite(damped=True),
    "AdaBest, mu = 0.5": fd.algorithms.adabest(mu=0.5),
    "FedSWA": fd.algorithms.fedswa(),
    "FedMoSWA": fd.algorithms.fedmoswa(),
    "GHBM, tau = 5": fd.algorithms.ghbm(tau=5),
    "LocalGHBM": fd.algorithms.localghbm(beta=0.5),
    "FedHBM, tau = 5": fd.algorithms.fedhbm(tau=5.0),
}
PICTURES = {
    "quadratics.png": ALGORITHMS,
    "quadratics_newer.png": NEWER,
    "quadratics_baselines.png": BASELINES,
}


class Quadratics(NamedTuple):
    """The losses F_i(w) = 1/2 (w - a_i)' H_i (w - a_i) of N clients."""

    H: np.ndarray  # float64 [N, d, d], curvatures, positive definite
    a: np.ndarray  # float64 [N, d], the clients' optima

    @property
    def optimum(self) -> np.ndarray:
        """The minimum of the mean of all F_i, [d]."""
        return balance(self.H, self.a)

    def fixed_point(self, lr: float, steps: int, mu: float = 0.0) -> np.ndarray:
        """Returns the fixed point [d] of FedAvg, or of FedProx if mu > 0, with all clients in every round."""
        eye = np.eye(self.H.shape[-1])
        A = self.H + mu * eye
        P = (eye - np.linalg.matrix_power(eye - lr * A, steps)) @ np.linalg.solve(A, self.H)
        return balance(P, self.a)

    def federation(self) -> fd.FederatedData:
        """Returns the quadratics as least-squares problems.

        Each client has d examples x, y. The mean of (x'w - y)^2 / 2 over these examples is F_i(w).
        """
        roots = np.linalg.cholesky(self.H).transpose(0, 2, 1) * np.sqrt(self.a.shape[1])
        return fd.FederatedData.from_clients(
            [(x.astype(np.float32), (x @ a).astype(np.float32)) for x, a in zip(roots, self.a, strict=True)]
        )


def balance(P: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Returns the solution w [d] of sum_i P_i (a_i - w) = 0, for P [N, d, d] and a [N, d]."""
    return np.linalg.solve(P.sum(0), np.einsum("nij,nj->i", P, a))


def draw(N: int = 20, d: int = 10, seed: int = 0) -> Quadratics:
    """Returns N random quadratics in d dimensions."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(N, d, d)))[0]
    eigenvalues = np.exp(rng.uniform(np.log(0.2), np.log(3.0), (N, 1, d)))
    return Quadratics(axes * eigenvalues @ axes.transpose(0, 2, 1), rng.normal(1.0, 2.0, (N, d)))


def models(
    quadratics: Quadratics, algorithm: fd.Algorithm, cohort_size: int, rounds: int, **options: float
) -> np.ndarray:
    """Returns the global models after rounds 1, 2, ..., float32 [rounds, d]. The initial model is w = 0.

    options: those of `fd.LocalTraining`, if they are not LR and STEPS with plain SGD.
    """
    d = quadratics.a.shape[1]
    model = fd.Model(lambda key: jnp.zeros(d), lambda w, x: x @ w, loss=lambda z, y: (z - y) ** 2 / 2)
    # A batch has all d examples, so an epoch is one step.
    local = fd.LocalTraining(**{"epochs": STEPS, "batch_size": d, "lr": LR} | options)
    sim = fd.Simulation(model, quadratics.federation(), algorithm, local=local, cohort_size=cohort_size)

    def step(state: fd.ServerState, _: None) -> tuple[fd.ServerState, jax.Array]:
        state, info = sim.round_fn(state)
        return state, state.params

    return np.asarray(jax.lax.scan(step, sim.init(jax.random.key(0)), length=rounds)[1])


def distances(models: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Returns the distances of models [T, d] to a point [d], float [T]."""
    return np.linalg.norm(models - point, axis=1)


def arrival(errors: np.ndarray, within: float = 1e-3) -> str:
    """Returns the first round from which on all distances are at most ``within``, as text, or "-" if there is none."""
    far = np.flatnonzero(errors > within)
    last = far[-1] + 1 if far.size else 0
    return str(last + 1) if last < len(errors) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results, help="folder of the plots (PNG)")
    arguments = parser.parse_args()
    fd.use_cpu_devices(1)
    quadratics = draw()
    optimum = quadratics.optimum
    print(f"distance to the optimum: initial model {np.linalg.norm(optimum):.4f}; fixed points in theory: ", end="")
    bias = {mu: float(np.linalg.norm(quadratics.fixed_point(LR, STEPS, mu) - optimum)) for mu in (0.0, 1.0)}
    print(f"FedAvg {bias[0.0]:.4f}, FedProx {bias[1.0]:.4f}")
    for name, algorithms in PICTURES.items():
        draw_picture(quadratics, algorithms, bias[0.0], arguments.output / name)


def draw_picture(quadratics: Quadratics, algorithms: dict[str, fd.Algorithm], bias: float, file: Path) -> None:
    """Prints and plots the distances of the algorithms. bias: that of FedAvg's fixed point."""
    print(f"{'':22}" + "".join(f"{title + f', {rounds} rounds':>38}" for title, (_, rounds) in SETTINGS.items()))
    print(f"{'':22}" + f"{'last distance':>24}{'<= 1e-3 from':>14}" * len(SETTINGS))
    errors = {}
    for name, algorithm in algorithms.items():
        errors[name] = [
            distances(models(quadratics, algorithm, cohort_size, rounds), quadratics.optimum)
            for cohort_size, rounds in SETTINGS.values()
        ]
        print(f"{name:22}" + "".join(f"{of[-1]:24.2e}{arrival(of):>14}" for of in errors[name]), flush=True)
    figure = plots.quadratics({name: [of.tolist() for of in runs] for name, runs in errors.items()}, list(SETTINGS))
    everyone = figure.axes[0]
    everyone.axhline(bias, color="0.4", linestyle=":", linewidth=1.0)
    rounds = len(errors["FedAvg"][0])
    everyone.text(rounds, 0.7 * bias, "FedAvg's fixed point in theory", ha="right", va="top", size=9, color="0.3")
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=110, format="png")
    # The README shows these files. A palette of 64 colours reduces their size to a third.
    Image.open(pixels).convert("RGB").quantize(64).save(file, format="png", optimize=True)


if __name__ == "__main__":
    main()
