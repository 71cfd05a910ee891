"""FedPer, FedRep, FedBABU, LG-FedAvg, FedBN and FedSA-LoRA: FedAvg of a part of the model. partly_shared.py has the
equations.

FedPer      Arivazhagan, Aggarwal, Singh, Choudhary 2019, arXiv 1912.00818: the classifier is personal.
FedRep      Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, arXiv 2102.07078: a client first trains the classifier,
            which is personal, and then the other layers.
FedBABU     Oh, Kim, Yun, ICLR 2022, arXiv 2106.06042: the classifier keeps its initial value. To personalise the model,
            fine-tune all layers.
LG-FedAvg   Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency 2020, arXiv 2001.01523: all layers but the
            classifier are personal.
FedBN       Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, arXiv 2102.07623: the normalisation layers are personal.
FedSA-LoRA  Guo, Zeng, Wang, Fan, Wang, Qu, ICLR 2025, arXiv 2410.01463: the factors B of adapters are personal.

Deviations:
- FedRep trains the classifier for E - base_epochs epochs and the other layers for base_epochs epochs. Clients have
  weight 1, as in the paper. In the authors' code, the weights differ only on FEMNIST and Sent140, where they are n_i
  (`weighting="examples"`). A client that trains for the first time starts with the mean classifier of the last cohort
  (`new_clients="mean"`), because its first classifier refers to the memory of the global model. So it is in their code
  of FedPer and LG-FedAvg.
- The authors' code of LG-FedAvg starts from a model that FedAvg has trained. Pass such a model to `Simulation.init`.
- FedBN weights clients by 1, as the authors' code does.
- The paper of FedBN uses BatchNorm, whose running statistics also stay with the client. Here, this needs a model with
  ``statistics="local"`` (`Model.from_linen`). The networks of `fd.models` have GroupNorm or LayerNorm.
- The authors' code of FedSA-LoRA weights clients by the examples that they process in a round. These are E n_i for E
  epochs, and about the same for all with the fixed number of batches of its configurations (`weighting="uniform"`).
  With a classifier that is trained whole (GLUE), that one is personal, too (``personal="/b$|classifier"``). Its
  configurations train one model object for all clients. Then a client starts with the factors B of the client before
  it, and not with its own, as in the paper and here.
"""

from __future__ import annotations

from typing import Any

from fedjax_drift.algorithms.fedavg import Weighting, fedavg
from fedjax_drift.algorithms.partly_shared import NewClients, partly_shared
from fedjax_drift.spec import Count
from fedjax_drift.types import Algorithm, Needs, algorithm


@algorithm
def fedper(
    personal: Any = "classifier", weighting: Weighting = "examples", new_clients: NewClients = "initial"
) -> Algorithm:
    """FedAvg with personal classifiers. A client keeps its classifier.

    Args:
      personal: the personal leaves, as in `partly_shared`. Default: the classifier of the models in `fd.models`.
      weighting: the weight of a client in the mean: "examples" (n_i) or "uniform" (1).
      new_clients: as in `partly_shared`.

    Raises:
      ValueError: no leaf is personal.
    """
    return partly_shared(fedavg(weighting=weighting), personal, new_clients=new_clients)._replace(name="fedper")


@algorithm
def fedrep(
    personal: Any = "classifier",
    base_epochs: Count = 1,
    weighting: Weighting = "uniform",
    new_clients: NewClients = "initial",
) -> Algorithm:
    """FedAvg with personal classifiers. In each round, a client first trains its classifier, and then the other layers.

    Args:
      personal, weighting, new_clients: as in `fedper`.
      base_epochs: epochs that train the other layers, in 1..E - 1. So E must be at least 2.

    Raises:
      ValueError: no leaf is personal.
    """
    base = fedavg(weighting=weighting)
    return partly_shared(base, personal, "alternate", base_epochs, new_clients)._replace(name="fedrep")


@algorithm
def fedbabu(personal: Any = "classifier", weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg whose classifier keeps its initial value. Clients keep no state.

    ``sim.evaluate_clients(state, fine_tune=1)`` personalises the model. Arguments and errors as in `fedper`.
    """
    return partly_shared(fedavg(weighting=weighting), personal, "frozen")._replace(name="fedbabu")


@algorithm
def lg_fedavg(
    personal: Any = r"^(?!.*classifier)", weighting: Weighting = "uniform", new_clients: NewClients = "initial"
) -> Algorithm:
    """FedAvg of the classifier. A client keeps all other layers. Arguments and errors as in `fedper`."""
    return partly_shared(fedavg(weighting=weighting), personal, new_clients=new_clients)._replace(name="lg_fedavg")


@algorithm
def fedbn(personal: Any = "(?i)norm", weighting: Weighting = "uniform") -> Algorithm:
    """FedAvg with personal normalisation layers, for clients whose inputs differ. Arguments and errors as in `fedper`.

    By default, the leaves with "norm" in their path are personal.
    """
    return partly_shared(fedavg(weighting=weighting), personal)._replace(name="fedbn")


@algorithm
def fedsa_lora(
    personal: Any = "/b$", weighting: Weighting = "examples", new_clients: NewClients = "initial"
) -> Algorithm:
    """FedAvg of the factors A of low-rank adapters. A client keeps its factors B. Arguments and errors as in `fedper`.

    The model must be one of `fd.models.lora`. By default, the leaves that end in "/b" are personal. Parameters that are
    trained whole are shared. `evaluate` evaluates w, whose factors B stay 0. Use `evaluate_clients`.
    """
    shared = partly_shared(fedavg(weighting=weighting), personal, new_clients=new_clients)
    return shared._replace(requires=shared.requires | Needs(adapters=True), name="fedsa_lora")
