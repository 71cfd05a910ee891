"""The algorithms with the ranges from which their hyper-parameters are drawn, and the federations.

The ranges were written down before any run. Every algorithm gets the same number of settings (`SETTINGS`). Setting j
has the same learning rate for all algorithms that share a range of learning rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import fedjax_drift as fd

Range = fd.tuning.Range

SETTINGS = 8  # settings that are tried per algorithm and federation
TUNING_ROUNDS, ROUNDS = 25, 60
CLIENTS, COHORT, EPOCHS, BATCH_SIZE = 100, 10, 2, 50
EVAL_EVERY = 2
SEEDS = ((0, 1, 2), (3, 4))  # the seeds of the runs on each of the two partitions


class Entrant(NamedTuple):
    """One algorithm of the comparison."""

    factory: Callable[..., fd.Algorithm]
    ranges: dict[str, Range]
    """The hyper-parameters that are drawn, besides the learning rate. All others have their defaults."""
    down: int = 1  # models that a client receives per round
    up: int = 1  # models that a client sends per round
    lr: Range = Range(0.01, 1.0)
    cosine: bool = False  # whether the network ends in cosines, as LfD requires
    sent: str = ""  # regular expression of the leaves that are sent, with any number of models; "": all
    personal: bool = False  # whether clients have models of their own, or share only a part of the model

    def settings(self, federation: str) -> list[dict[str, float]]:
        """The settings to try. They are the same whenever this is called."""
        return fd.tuning.settings({"lr": self.lr}, self.ranges, SETTINGS, federation, self.factory.__name__)


alg = fd.algorithms
MU, ALPHA, RHO, MOMENTUM = Range(1e-4, 1.0), Range(1e-3, 1.0), Range(5e-3, 0.5), Range(0.3, 0.95, log=False)
ADAPTIVE = {"server_lr": Range(1e-3, 1.0), "tau": Range(1e-4, 1e-1)}


@fd.algorithm
def agnostic(domain_lr: float = 0.1) -> fd.Algorithm:
    """Agnostic federated averaging whose domains are the labels, with the step size of FedAvg."""
    return alg.agnostic(10, domain_lr=domain_lr, window=3, scale="batch")


BODY = "^(?!.*classifier)"  # all leaves but those of the classifier
ENTRANTS = {
    "FedAvg": Entrant(alg.fedavg, {}),
    "FedProx": Entrant(alg.fedprox, {"mu": MU}),
    "FedAvgM": Entrant(alg.fedavgm, {"beta": MOMENTUM}),
    "FedAdam": Entrant(alg.fedadam, ADAPTIVE),
    "FedYogi": Entrant(alg.fedyogi, ADAPTIVE),
    "FedAdagrad": Entrant(alg.fedadagrad, ADAPTIVE),
    "SlowMo": Entrant(alg.slowmo, {"beta": MOMENTUM}),
    "FedADC": Entrant(alg.fedadc, {"beta": MOMENTUM}, down=2),
    "SCAFFOLD": Entrant(alg.scaffold, {}, down=2, up=2),
    "VRL-SGD": Entrant(alg.vrl_sgd, {}),
    "FedDyn": Entrant(alg.feddyn, {"alpha": ALPHA}),
    "FedDC": Entrant(alg.feddc, {"alpha": ALPHA}, down=2, up=2),
    "FedEve": Entrant(alg.fedeve, {}),
    "FedGVR": Entrant(alg.fedgvr, {"mu": MU}, down=2, up=2),
    "FedGM": Entrant(alg.fedgm, {"mu": MU, "beta": MOMENTUM}),
    "FedGVRGM": Entrant(alg.fedgvrgm, {"mu": MU, "beta": MOMENTUM}, down=2, up=2),
    "MOON": Entrant(alg.moon, {"mu": Range(1e-2, 10.0)}),
    "LfD": Entrant(alg.lfd, {"temperature": Range(0.05, 0.5), "margin": Range(0.01, 0.3, log=False)}, cosine=True),
    "FedNova": Entrant(alg.fednova, {}),
    "FedCM": Entrant(alg.fedcm, {"alpha": Range(0.03, 0.5)}, down=2),
    "FedSAM": Entrant(alg.fedsam, {"rho": RHO}),
    "MoFedSAM": Entrant(alg.mofedsam, {"rho": RHO, "alpha": Range(0.03, 0.5)}, down=2),
    "FedACG": Entrant(alg.fedacg, {"beta": MU, "lam": MOMENTUM}),
    "FedNTD": Entrant(alg.fedntd, {"beta": Range(0.1, 3.0)}),
    "FedLC": Entrant(alg.fedlc, {"tau": Range(0.1, 3.0)}),
    "FedExP": Entrant(alg.fedexp, {"eps": Range(1e-4, 1.0)}),
    "FedSpeed": Entrant(alg.fedspeed, {"rho": RHO, "lam": ALPHA}),
    "FedSMOO": Entrant(alg.fedsmoo, {"rho": RHO, "alpha": ALPHA}, down=2, up=2),
    "FedLESAM": Entrant(alg.fedlesam, {"rho": RHO}),
    "FedAdamW": Entrant(alg.fedadamw, {"alpha": Range(0.05, 1.0, log=False)}, down=2, lr=Range(1e-4, 1e-2)),
    "FedDecorr": Entrant(alg.feddecorr, {"beta": Range(0.01, 1.0)}),
    "FedGamma": Entrant(alg.fedgamma, {"rho": RHO}, down=2, up=2),
    "Mime": Entrant(alg.mime, {"beta": MOMENTUM}, down=3, up=2),
    "MimeLite": Entrant(alg.mimelite, {"beta": MOMENTUM}, down=2, up=2),
    "AdaBest": Entrant(alg.adabest, {"mu": ALPHA, "beta": Range(0.5, 0.99, log=False)}),
    "FedSWA": Entrant(alg.fedswa, {"rho": Range(0.05, 1.0), "alpha": Range(1.0, 2.0, log=False)}),
    "FedMoSWA": Entrant(alg.fedmoswa, {"rho": Range(0.05, 1.0), "gamma": Range(0.05, 1.0)}, down=2, up=2),
    "GHBM": Entrant(alg.ghbm, {"beta": MOMENTUM}, down=2),
    "LocalGHBM": Entrant(alg.localghbm, {"beta": MOMENTUM}),
    "FedHBM": Entrant(alg.fedhbm, {"beta": MOMENTUM}),
    "FedGMT": Entrant(alg.fedgmt, {"gamma": Range(0.1, 3.0), "beta": Range(1.0, 1000.0)}, down=2),
    "FedSOL": Entrant(alg.fedsol, {"rho": Range(0.1, 3.0)}),
    "q-FedAvg": Entrant(alg.qfedavg, {"q": Range(0.01, 5.0)}),
    "Agnostic": Entrant(agnostic, {"domain_lr": Range(0.01, 1.0)}),
    "Ditto": Entrant(alg.ditto, {"lam": Range(1e-2, 3.0)}, personal=True),
    "pFedMe": Entrant(
        alg.pfedme, {"lam": Range(1.0, 30.0), "inner_lr": Range(1e-2, 0.2)}, lr=Range(1e-3, 0.1), personal=True
    ),
    "APFL": Entrant(alg.apfl, {"alpha": Range(0.1, 0.9, log=False)}, personal=True),
    "Per-FedAvg": Entrant(alg.perfedavg, {"alpha": Range(1e-3, 0.1)}, personal=True),
    "IFCA": Entrant(alg.ifca, {}, down=2, personal=True),
    "HypCluster": Entrant(alg.hypcluster, {}, down=2, personal=True),
    "FedPer": Entrant(alg.fedper, {}, sent=BODY, personal=True),
    "FedRep": Entrant(alg.fedrep, {}, sent=BODY, personal=True),
    "FedBABU": Entrant(alg.fedbabu, {}, sent=BODY, personal=True),
    "LG-FedAvg": Entrant(alg.lg_fedavg, {}, sent="classifier", personal=True),
    "FedReg": Entrant(alg.fedreg, {"gamma": Range(0.25, 0.5, log=False), "eta_s": Range(0.05, 0.5)}),
}


class Federation(NamedTuple):
    """A data set, a network and a partition."""

    dataset: str
    model: Callable[..., fd.Model]
    alpha: float | None  # of the Dirichlet distribution; None: two classes per client
    target: float  # the test accuracy of "rounds to target"

    def data(self, seed: int) -> fd.FederatedData:
        """The federation with one of its partitions. Each client has test examples with its label mix."""
        if self.alpha is None:
            partition = fd.partition.classes(CLIENTS, per_client=2, seed=seed)
        else:
            partition = fd.partition.dirichlet(CLIENTS, alpha=self.alpha, seed=seed)
        return fd.datasets.load(self.dataset, partition=partition).with_client_tests(seed)


NN, CNN = fd.models.mnist_2nn, fd.models.cifar_cnn
FEDERATIONS = {
    "MNIST, Dirichlet 0.1": Federation("mnist", NN, 0.1, 0.93),
    "Fashion-MNIST, Dirichlet 0.1": Federation("fashion_mnist", NN, 0.1, 0.78),
    "MNIST, 2 classes": Federation("mnist", NN, None, 0.93),
    "Fashion-MNIST, 2 classes": Federation("fashion_mnist", NN, None, 0.78),
    "MNIST, Dirichlet 0.6": Federation("mnist", NN, 0.6, 0.96),
    "Fashion-MNIST, Dirichlet 0.6": Federation("fashion_mnist", NN, 0.6, 0.84),
    "CIFAR-10, Dirichlet 0.6": Federation("cifar10", CNN, 0.6, 0.55),
    "CIFAR-10, Dirichlet 0.1": Federation("cifar10", CNN, 0.1, 0.40),
    "CIFAR-10, 2 classes": Federation("cifar10", CNN, None, 0.40),
}
