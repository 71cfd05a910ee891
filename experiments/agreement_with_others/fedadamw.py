"""FedAdamW (github.com/junkangLiu0/FedAdamW), by the authors of the algorithm: the scripts for images and for language.

The workers and the functions of the server run unchanged. The loop of a script that calls them is ours: without Ray,
which copies what it passes, and with a constant learning rate. Clients have equal sizes, as theirs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import torch
from federation import EQUAL, Federation, Loader, Network, Row, compared, difference, main, vector, without, written

import fedjax_drift as fd

SERVERS = {  # their function for the server, and the numbers of the results that it gets again in the next round
    "FedAdamW": ("apply_weights_FedLADA", ("m",)),
    "FedCM": ("apply_weights_avg2", ()),
    "SCAFFOLD": ("apply_weights_SCAF", ("m",)),
    "MoFedSWA": ("apply_weights_SCAF", ("m",)),
    "FedAdam": ("apply_weights_adam", ("m", "v")),
    "FedACG": ("apply_weights_avgACG", ("m",)),
    "FedMoment": ("apply_weights_moment", ("m",)),
}


class Model(Network):
    """With the methods of their models."""

    def get_weights(self) -> dict[str, torch.Tensor]:
        return {key: value.cpu() for key, value in self.state_dict().items()}

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.load_state_dict(weights)


class Language(Model):
    """With the input and the output of their language models."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(input_ids))


class Texts(Loader):
    """With batches as those of their texts."""

    def __iter__(self) -> Any:
        return ({"input_ids": x, "attention_mask": x, "label": y} for x, y in super().__iter__())


class Steps:
    """T, of which `to` makes a copy, as it does when the device is another one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def to(self, _: Any) -> torch.Tensor:
        return torch.tensor([self.value])


def copied(value: Any) -> Any:
    """A copy, as Ray makes one."""
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def theirs(
    federation: Federation, method: str, name: str = "main_FedAdamW", gamma: float = 0.85, **changes: Any
) -> list[np.ndarray]:
    """The global model after every round of a method of the script ``name``. ``changes`` are set in the script."""
    without("torchvision", "ray", "tensorboardX", "peft", "dirichlet_data", "model", "vit_model", "dataset")
    without("models", "models.resnet", "models.resnet_bn", "models.DeiTTiny", "transformers", "datasets")
    sys.modules["ray"].remote = lambda **_: lambda worker: worker
    sys.modules["datasets"].tqdm = lambda batches, **_: batches
    script, language = importlib.import_module(name), name == "new_llm"

    def network(*_: Any) -> Model:
        made = federation.network()
        made.__class__ = Language if language else Model
        return made

    N, S, n = len(federation.sizes), len(federation.cohorts[0]), federation.sizes[0]
    K = federation.epochs * -(-n // federation.batch_size)
    values = {"alg": method, "num_workers": N, "selection": S / N, "lr": federation.lr, "lr_decay": 1.0}
    values |= {"batch_size": federation.batch_size, "ci_dict": {}, "c_dict": {}}
    for key, value in (values | changes).items():
        setattr(script, key, value)
    for key, value in {"K": K, "beta1": 0.9, "beta2": 0.999, "gamma": gamma, "CNN": "roberta_base"}.items():
        setattr(script.args, key, value)
    script.ConvNet100, script.model = network, network()
    script.RobertaForSequenceClassification = SimpleNamespace(from_pretrained=network)
    model, rounds = script.model, []
    script.get_data_loader = lambda i, *_: (Texts if language else Loader)(federation, len(rounds), i)
    options = {"lr": federation.lr, "batch_size": federation.batch_size, "alg": method, "data_name": "CIFAR100"}
    options |= {"data_idx": None, "num_workers": N, "selection": S / N, "T_part": None}
    workers = [script.DataWorker(pid, **options) for pid in range(S)]
    function, kept = SERVERS.get(method, ("apply_weights_avg", ()))
    w, m, v = model.state_dict(), {}, {}
    for t, cohort in enumerate(federation.cohorts):
        sent = {"ps_c": m, "v": v, "step": Steps(t * n / federation.batch_size * federation.epochs)}
        results: list[Any] = []
        for worker, i in zip(workers, cohort, strict=True):
            results.append(worker.update_func(method, copied(w), federation.epochs, i, federation.lr, **copied(sent)))
        again = [] if language else [{"m": m, "v": v}[key] for key in kept]
        result = getattr(script, function)(N, results, model, *again)
        w, m, v = (*result, {}, {})[:3] if isinstance(result, tuple) else (result, {}, {})
        model.load_state_dict(w)
        w = copied(w)
        rounds.append(vector(model))
    return rounds


def rows() -> Iterator[Row]:
    federation = Federation(sizes=EQUAL, weight_decay=0.001, clip_norm=10.0)
    adam = Federation(sizes=EQUAL, lr=0.02, clip_norm=10.0)
    uniform = {"weighting": "uniform"}

    def row(
        method: str, name: str, arguments: dict[str, Any], line: str, federation: Federation = federation, **more: Any
    ) -> Row:
        more = {"setting": "" if method.lower() == name else f"their {method}"} | more
        function = SERVERS.get(method, ("apply_weights_avg",))[0]
        lines = f"main_FedAdamW.py#def {line}", f"main_FedAdamW.py#def {function}(", *more.pop("lines", ())
        return compared(federation, name, arguments, theirs(federation, method), lines, **more)

    cause = (
        "Their optimizer counts its steps from T, so that the correction of the first moment, too, is that of step "
        "T + k. In the paper it is that of step k. With this correction the two agree to 1e-15."
    )
    step = "main_FedAdamW.py#self.optimizer.state[p]['step'] = step.to(device)"
    yield row("FedAdamW", "fedadamw", {"blocks": "none"}, "update_FedAdamW", adam, lines=(step,), cause=cause)

    # Theirs decays the weights by 0.01 lr, and Adam has the learning rate lr (1 - gamma).
    half = Federation(sizes=EQUAL, lr=0.01, clip_norm=10.0)
    lines = (
        "new_llm.py#def update_FedAdamW",
        "new_llm.py#def apply_weights_FedLADA(",
        "new_llm.py#self.optimizer.state[p]['step']=#2",
        "new_llm.py#= avg_val.to('cpu')",
    )
    setting = (
        "script for language; gamma = alpha = 0.5; a learning rate of 0.01 is 0.02 there, and weight decay 0.02 is 0.01"
    )
    models = theirs(replace(half, lr=0.02), "FedAdamW", "new_llm", gamma=0.5)
    yield compared(half, "fedadamw", {"weight_decay": 0.02}, models, lines, setting=setting, cause=cause)

    transformations = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01))
    ours = adam.run(fd.algorithms.fedavg(**uniform), local={"optimizer": transformations, "clip_norm": None})
    lines = "main_FedAdamW.py#def update_fedavg_adamw", "main_FedAdamW.py#def apply_weights_avg("
    setting = "their FedAvg_adamw; optimizer AdamW"
    yield Row(written("fedavg", uniform), difference(ours, theirs(adam, "FedAvg_adamw")), lines, setting)

    yield row("FedAvg", "fedavg", uniform, "update_fedavg(")
    yield row("FedCM", "fedcm", {"alpha": 0.15}, "update_FedCM", setting="gamma = 0.85, which is 1 - alpha")
    yield row("FedMoment", "fedavgm", uniform, "update_fedavg(")
    adaptive = {"server_lr": 0.01, "b2": 0.98, "tau": 0.01}
    arguments = adaptive | {"v_0": 0.0} | uniform
    yield row("FedAdam", "fedadam", arguments, "update_fedavg(", default=adaptive, cause="Their v starts at 0.")
    yield row(
        "FedSAM",
        "fedsam",
        {"rho": 0.05},
        "update_SAM",
        Federation(sizes=EQUAL),
        lines=("sam.py#1e-12",),
        cause="Their code adds 1e-12 to the norm of the gradient.",
    )

    without_gradient = (
        "In their code, {} is turned into a number by item() before it is added to the loss, so it has no gradient and "
        "the models are those of {}, with which they agree to rounding."
    )
    item = "main_FedAdamW.py#lg_loss += lossh.item()"
    cause = without_gradient.format("the term of the control variates", "FedAvg")
    yield row("SCAFFOLD", "scaffold", {}, "update_scaf(", lines=(item,), cause=cause)
    yield row("SCAFFOLD", "fedavg", uniform, "update_scaf(", lines=(item,), cause=cause)
    item = "main_FedAdamW.py#loss_cg +=L1.item()"
    cause = without_gradient.format("the proximal term", "FedAvg")
    prox = {"mu": 0.01} | uniform
    yield row("Fedprox", "fedprox", prox, "update_Fedprox", lines=(item,), cause=cause)
    yield row("Fedprox", "fedavg", uniform, "update_Fedprox", lines=(item,), cause=cause)
    item = "main_FedAdamW.py#reg_loss += L1.item()"
    cause = without_gradient.format("the penalty", "FedACG with beta = 0")
    yield row("FedACG", "fedacg", {"beta": 0.02}, "update_FedACG", lines=(item,), cause=cause)
    yield row("FedACG", "fedacg", {"beta": 0.0}, "update_FedACG", lines=(item,), cause=cause)


if __name__ == "__main__":
    main(rows)
