"""FL-bench (github.com/KarhouTam/FL-bench).

Its servers, its trainer and its clients run unchanged. Their networks, their cohorts and their data loaders are ours.
It skips batches of one example, so no client has such a batch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from federation import CLASSES, EQUAL, Federation, Row, compared, difference, main, vector, without, written
from linear import LinearFederation

import fedjax_drift as fd

SIZES = (10, 24, 7, 6, 16, 14)


class Config(dict):
    """Takes the place of an omegaconf.DictConfig."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: Config(value) if isinstance(value, dict) else value for key, value in values.items()})
        self.__dict__ = self


class Data:
    """Takes the place of their dataset, which has the examples of all clients one after the other."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.t = federation, 0
        self.owners = np.repeat(np.arange(len(federation.sizes)), federation.sizes)
        self.targets = np.concatenate([y for _, y in federation.clients])
        self.classes = range(CLASSES)

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Loader:
    """Takes the place of their data loader, which keeps a subset whose indices they change."""

    def __init__(self, subset: Any, **_: Any) -> None:
        self.subset, self.last, self.e = subset, None, 0

    def __iter__(self) -> Any:
        data = self.subset.dataset
        now = data.t, data.owners[self.subset.indices[0]]
        self.e = (self.e + 1) % data.federation.epochs if self.last == now else 0
        self.last = now
        return iter(data.federation.epoch(*now, self.e))


def theirs(federation: Federation, method: str, first: str = "0", **changes: Any) -> tuple[list[np.ndarray], Any]:
    """The global model after every round of one of their methods, and their server after the last one.

    ``first`` is the name of the first layer of their network. ``changes`` are arguments of the method, or "common" and
    "optimizer" with those of the local training.
    """
    without("ray", "ray.actor", "hydra", "hydra.core", "hydra.core.hydra_config", "torchvision", "torchvision.models")
    without("torchvision.transforms", "pynvml", "data", "data.utils", "data.utils.datasets", "omegaconf")
    sys.modules["omegaconf"].DictConfig = Config
    server, client, models = (
        importlib.import_module(f"src.{name}") for name in ("server.fedavg", "client.fedavg", "utils.models")
    )
    file = importlib.import_module(f"src.server.{method}")
    base = next(value for name, value in vars(file).items() if name.lower() == f"{method}server")
    client.DataLoader = Loader

    class Model(models.DecoupledModel):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            network = federation.network()
            self.base = type(network.base)(OrderedDict([(first, network.base[0]), ("tanh", network.base[1])]))
            self.classifier = network.head

    class Server(base):
        def get_dataset(self) -> Data:
            return data

        def train_one_round(self) -> None:
            data.t = len(found)
            super().train_one_round()
            found.append(vector(list(self.public_model_params.values())))

        def display_metrics(self) -> None: ...

    N, data, found = len(federation.sizes), Data(federation), []
    indices = [{"train": list(np.flatnonzero(data.owners == i)), "val": [], "test": []} for i in range(N)]
    separation = {"train": list(range(N)), "val": [], "test": [], "total": N}
    folder = Path("data/ours").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text("{}")
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": indices}))
    server.FLBENCH_ROOT, server.HydraConfig.get.return_value.runtime.output_dir = folder.parent.parent, "out"
    server.MODELS["ours"] = Model
    off = {"interval": -1, "train": False, "val": False, "test": False}
    common = {
        **{"global_epoch": len(federation.cohorts), "local_epoch": federation.epochs, "verbose_gap": 1000},
        **{"batch_size": federation.batch_size, "join_ratio": len(federation.cohorts[0]) / N, "use_cuda": False},
        **{"client_side_evaluation": False, "save_log": False},
        **{"test": {"client": off | {"finetune_epoch": 1}, "server": off}},
    }
    optimizer = {"name": "sgd", "lr": federation.lr, "weight_decay": federation.weight_decay}
    defaults = importlib.import_module("src.utils.constants").DEFAULTS
    options = vars(base.get_hyperparams([])) if hasattr(base, "get_hyperparams") else {}
    arguments = defaults | {
        "common": defaults["common"] | common | changes.pop("common", {}),
        "optimizer": optimizer | changes.pop("optimizer", {}),
        "model": defaults["model"] | {"name": "ours"},
        "dataset": {"name": "ours", "split": "sample"},
        method: options | changes,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        made = Server(args=Config(arguments))
        made.client_sample_stream = [list(cohort) for cohort in federation.cohorts]
        made.train()
    return found, made


def rows() -> Iterator[Row]:
    plain, equal = Federation(sizes=SIZES), Federation(sizes=EQUAL)
    decayed = Federation(sizes=SIZES, weight_decay=0.001)
    linear = LinearFederation(sizes=SIZES)
    examples = {"weighting": "examples"}

    def row(method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        federation, options = more.pop("federation", plain), more.pop("options", {})
        models = theirs(federation, method, **options)[0]
        return compared(federation, name, arguments, models, tuple(f"src/{line}" for line in lines), **more)

    def own(method: str, name: str, arguments: dict, *lines: str, **more: Any) -> Row:
        """The same for the clients' own models. ``of`` is the attribute of their server that has them."""
        federation, options = more.pop("federation", plain), more.pop("options", {})
        of, share = more.pop("of", "clients_personal_model_params"), more.pop("share", 1.0)
        made = theirs(federation, method, **options)[1]
        w, parts = made.public_model_params, getattr(made, of)
        mixed = [{key: share * (w | parts[i])[key] + (1 - share) * w[key] for key in w} for i in sorted(parts)]
        models = [vector(list(model.values())) for model in mixed]

        def to(arguments: dict) -> float:
            return difference(federation.personal(getattr(fd.algorithms, name)(**arguments)), models)

        default = more.pop("default", None)
        default = None if default is None else to(default)
        setting = "; ".join(filter(None, ["the clients' own models", more.pop("setting", "")]))
        lines = tuple(f"src/{line}" for line in lines)
        return Row(written(name, arguments), to(arguments), lines, setting, default, **more)

    yield row("fedavg", "fedavg", {}, "client/fedavg.py#def fit")
    yield row("fedprox", "fedprox", {"mu": 0.1}, "client/fedprox.py#def fit", options={"mu": 0.1})
    cause = "Their server uses Nesterov's momentum. Without it the two agree to 3e-16."
    yield row("fedavgm", "fedavgm", {}, "server/fedavgm.py#nesterov=True", cause=cause)
    cause = "Their v starts at 0; the paper's starts at tau^2."
    for name, b1 in (("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)):
        adam = {"server_lr": 0.1, "b1": b1, "b2": 0.999}
        more = {"default": adam, "cause": cause, "options": {"type": name, "beta1": b1}}
        yield row("fedopt", f"fed{name}", adam | {"v_0": 0.0}, "server/fedopt.py#self.velocities =", **more)
    setting = "clients of equal size, and local_epoch=6: their local_epoch counts batches"
    cause = (
        "The server hands out c_i = 0 in every round, because the new c_i of a client is not kept. If the server adds "
        "the client's change to its c_i, the two agree to 2e-16."
    )
    more = {"federation": equal, "options": {"common": {"local_epoch": 6}}, "setting": setting, "cause": cause}
    lines = "client/scaffold.py#self.c_local = c_plus", 'server/scaffold.py#server_package["c_local"]'
    yield row("scaffold", "scaffold", {}, *lines, **more)
    dyn, line = {"alpha": 0.1} | examples, "client/feddyn.py#loss_correct = torch.sum"
    options, setting = {"optimizer": {"weight_decay": 0.1}}, "their optimizer has weight_decay=alpha"
    yield row("feddyn", "feddyn", dyn, line, options=options, setting=setting, default={"alpha": 0.1})
    cause = (
        "Their gradient has alpha (h_i - w) without alpha theta. FL-Simulator, which this code follows, adds alpha "
        "theta as weight decay of the optimizer, as in the row above."
    )
    yield row("feddyn", "feddyn", dyn, line, cause=cause)
    cause = "The previous model of a new client is the global model, so that its contrastive loss is constant."
    yield row("moon", "moon", {}, "client/moon.py#def fit", options={"mu": 1.0}, cause=cause)
    cause = "They count a class that a client does not have as 1e-8. Its margin of 100 leaves it out of the softmax."
    yield row("fedlc", "fedlc", {}, "client/fedlc.py#counter.get(i, 1e-8)", cause=cause)

    mean, cause = {"new_clients": "mean"}, "A new client starts with the mean of the personal layers."
    more = {"default": {}, "cause": cause}
    yield own("fedper", "fedper", mean, "client/fedper.py#def __init__", **more)
    yield own("fedrep", "fedrep", examples | mean, "client/fedrep.py#def fit", **more)
    yield row("fedbabu", "fedbabu", examples, "client/fedbabu.py#def fit", default={})
    cause = (
        "Their clients share the first layers and keep the last ones, as in FedPer. In the paper they keep the first "
        "ones and share the last."
    )
    lg = {"personal": "classifier"} | examples | mean
    line = "client/lgfedavg.py#personal_layers = trainable_layers["
    yield own("lgfedavg", "lg_fedavg", lg, line, default=examples | mean, cause=cause)
    setting = "the first layer is called bn"
    bn = {"options": {"first": "bn"}, "setting": setting}
    yield own("fedbn", "fedbn", {"personal": "base"} | examples, 'client/fedbn.py#if "bn" in name', **bn)

    ditto = {"options": {"lamda": 0.1, "pers_epoch": plain.epochs}}
    yield row("ditto", "ditto", {"lam": 0.1}, "client/ditto.py#def fit", **ditto)
    of = "clients_personalized_model_params"
    yield own("ditto", "ditto", {"lam": 0.1}, "client/ditto.py#def fit", of=of, **ditto)
    pfedme = {"lam": 2.0, "inner_steps": 3, "beta": 0.9} | examples
    more = {"options": {"lamda": 2.0, "k": 3, "pers_lr": 0.1, "beta": 0.9}, "federation": decayed}
    setting = "weight decay 0.001, which is their mu"
    uniform = pfedme | {"weighting": "uniform"}
    yield row("pfedme", "pfedme", pfedme, "client/pfedme.py#def fit", setting=setting, default=uniform, **more)
    cause = (
        "Their personal models stay the initial model: neither the client nor the server puts the trained parameters "
        "into them. If they are stored after the training of a client, the two agree to 3e-16."
    )
    lines = "client/pfedme.py#for key, param in self.personalized_params_dict", f"server/pfedme.py#self.{of} ="
    yield own("pfedme", "pfedme", pfedme, *lines, of=of, setting=setting, cause=cause, **more)

    apfl, options = {"alpha": 0.5} | examples, {"alpha": 0.5, "adaptive_alpha": 0}
    cause = (
        "One optimizer has both models, and its second step of a batch repeats the gradient of the global model, which "
        "so moves twice as far. With zero_grad before it the two agree to 2e-16."
    )
    lines = "client/apfl.py#self.optimizer.step()#2", "client/apfl.py#self.optimizer.add_param_group"
    yield row("apfl", "apfl", apfl, *lines, options=options, cause=cause)
    cause = (
        "The second step of the global model, as above. The gradient of v_i is computed with the theta after its "
        "step, and in the paper with the one before. With zero_grad they differ by 2e-2; with the earlier theta, too, "
        "by 2e-16."
    )
    more = {"federation": linear, "options": options, "of": "client_local_model_params", "share": 0.5}
    setting = "a linear model, because theirs mixes the outputs of two models"
    yield own("apfl", "apfl", apfl, *lines, "client/apfl.py#logit_p =", setting=setting, cause=cause, **more)


if __name__ == "__main__":
    main(rows)
