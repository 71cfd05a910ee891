"""Random simulations, for tests/sequences.py: what is simulated (`Case`), and where (`Place`)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fedjax_drift as fd
from fedjax_drift.algorithms import ALGORITHMS
from fedjax_drift.errors import ConfigurationError

SIZES, FEATURES, CLASSES, K = (3, 6, 2, 5, 1, 4, 7), 6, 3, 4  # K of seven clients train in a round


class Case(NamedTuple):
    """What is simulated. The fields are plain values, so that a case can be printed and sent to another process."""

    algorithm: str
    arguments: dict[str, Any]  # of the algorithm
    model: str  # a name in MODELS
    x64: bool
    images: bool  # whether the examples are uint8
    redealt: float | None  # alpha of `FederatedData.redealt`, 0 for an even split; None: not redistributed
    local: dict[str, Any]
    adam: bool
    augmented: bool
    aggregation: str  # a name in AGGREGATIONS
    options: dict[str, Any]  # further arguments of `Simulation`
    participation: str = "uniform"  # a name in RULES
    shift: str = "none"  # a name in SHIFTS
    codec: str = "none"  # a name in CODECS
    timing: str = "none"  # a name in TIMINGS

    @property
    def epsilon(self) -> float:
        """The relative distance between two numbers, in the dtype in which the model computes."""
        return float(jnp.finfo("bfloat16" if self.model == "bfloat16" else "float64" if self.x64 else "float32").eps)


class Place(NamedTuple):
    """Where it is simulated: fields of `fd.Placement`. The mesh is a number of devices, and "files" is a folder."""

    devices: int = 1
    lanes: int = 1
    bank: str = "device"
    stream: bool = False
    shard_data: bool = False
    donate: bool = False


class Net(nn.Module):
    """A network with all that an algorithm may need: features, a head, an extractor, and logits that are cosines."""

    normalised: bool = False
    dropout: float = 0.0
    cosine = True

    def setup(self) -> None:
        dtype = jnp.result_type(float)
        self.hidden, self.drop = nn.Dense(4, param_dtype=dtype), nn.Dropout(self.dropout)
        # The bias is not 0, because the features of a batch with one example would be 0, where cosines are not smooth.
        # flax's fast variance of one example is a rounding error, which the normalisation amplifies.
        stable = {"use_fast_variance": False, "bias_init": nn.initializers.ones}
        norm = nn.BatchNorm(momentum=0.9, param_dtype=dtype, **stable)
        self.norm = norm if self.normalised else None
        self.classifier = self.param("classifier", lambda key: jax.random.normal(key, (4, CLASSES)))

    def extractor(self, x, train: bool = False):
        return self.hidden(x)

    def features(self, x, train: bool = False):
        z = self.hidden(x)
        return nn.tanh(self.norm(z, use_running_average=not train) if self.normalised else z)

    def head(self, z):
        return fd.models.cosine_logits(z, self.classifier)

    def __call__(self, x, train: bool = False):
        return self.head(self.drop(self.features(x, train), deterministic=not train))


def net(statistics: str | None = None, dropout: float = 0.0) -> fd.Model:
    return fd.Model.from_linen(Net(statistics is not None, dropout), (FEATURES,), statistics=statistics)


def odd_leaves() -> fd.Model:
    """The network with an empty, a scalar and a five-dimensional parameter."""
    model, shapes = net(), {"empty": (0, 3), "scalar": (), "deep": (1, 3, 1, 1, 1)}

    def plain(function: Callable) -> Callable:
        return lambda params, x: function({n: leaf for n, leaf in params.items() if n not in shapes}, x)

    def scaled(function: Callable) -> Callable:
        return lambda params, x: plain(function)(params, x) * params["scalar"] + params["deep"].reshape(1, -1)

    return model._replace(
        init=lambda key: {**model.init(key), **{n: jnp.ones(shape, float) for n, shape in shapes.items()}},
        train_apply=None, apply=scaled(model.apply), head=scaled(model.head),
        features=plain(model.features), extractor=plain(model.extractor),
    )  # fmt: skip


MODELS: dict[str, Callable[[], fd.Model]] = {
    "plain": net,
    "odd leaves": odd_leaves,
    "dropout": lambda: net(dropout=0.5),
    "bfloat16": lambda: net().computing_in(jnp.bfloat16),
    "adapters": lambda: fd.models.lora(net(), rank=1, where="kernel", whole="classifier"),
    "BatchNorm, average": lambda: net("average"),
    "BatchNorm, local": lambda: net("local"),
    "BatchNorm, frozen": lambda: net("frozen"),
}
AGGREGATIONS: dict[str, Callable[[], Any]] = {
    "mean": lambda: None,
    "clipped": lambda: fd.aggregation.clipped(0.3),
    "private": lambda: fd.aggregation.private(0.3, 0.5),
    "trees": lambda: fd.aggregation.private_ftrl(0.3, 0.5, 3),
}


RULES: dict[str, Callable[[], Any]] = {
    "uniform": lambda: fd.participation.uniform(),
    "bernoulli": lambda: fd.participation.bernoulli(),
    "by_size": lambda: fd.participation.by_size(),
    "by_size, replace": lambda: fd.participation.by_size(replace=True),
    "importance": lambda: fd.participation.importance(np.array([0.5, 0.9, 0.3, 0.7, 0.2, 0.6, 0.8])),
    "power_of_choice": lambda: fd.participation.power_of_choice(6),
    "cyclic": lambda: fd.participation.cyclic(2, base=fd.participation.bernoulli()),
    "markov": lambda: fd.participation.markov(0.6, 0.2, base=fd.participation.power_of_choice(5)),
    "diurnal": lambda: fd.participation.diurnal(3.0, floor=0.3),
}
SHIFTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "noise": lambda: fd.shift.gaussian_noise(0.3),
    "labels": lambda: fd.shift.sudden(2, fd.shift.permute_labels(0, [(0, 2)])),
    "domains": lambda: fd.shift.domains(fd.shift.none(), fd.shift.brightness(0.2, by="all")),
}
# The other codecs are not continuous, so that a rounding error may change what they send.
CODECS: dict[str, Callable[[fd.Algorithm], fd.Algorithm]] = {
    "none": lambda algorithm: algorithm,
    "random_k": lambda algorithm: fd.compression.compressed(algorithm, fd.compression.random_k(0.6)),
    "random_k without error feedback": lambda algorithm: fd.compression.compressed(
        algorithm, fd.compression.random_k(0.6), error_feedback=False
    ),
}
SPEEDS = fd.Devices(speed_spread=0.6, up=300.0, down=900.0, seconds_per_step=0.7)
TIMINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "synchronous": {"devices": SPEEDS},
    "asynchronous": {"devices": SPEEDS, "clock": fd.clock.asynchronous(6, "polynomial", max_staleness=2)},
    "all wait": {"clock": fd.clock.asynchronous(K)},
}


def jitter(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(key, x.shape, x.dtype) / 10


@functools.cache  # simulations of the same data share its copy on the devices
def data_of(images: bool, redealt: float | None, x64: bool) -> fd.FederatedData:
    rng, dtype = np.random.default_rng(0), np.uint8 if images else np.float64 if x64 else np.float32
    # Small numbers, also as uint8: large inputs saturate the network, and it then amplifies rounding errors.
    x = rng.integers(0, 4, (sum(SIZES), FEATURES)) if images else rng.normal(size=(sum(SIZES), FEATURES))
    x, y = x.astype(dtype), rng.integers(0, CLASSES, len(x))
    parts = np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])
    data = fd.FederatedData.from_clients([(x[i], y[i]) for i in parts], test_clients=[(x[i], y[i]) for i in parts])
    return data if redealt is None else data.redealt(redealt) if redealt else data.redealt()


def simulate(case: Case, place: Place, folder: Path) -> fd.Simulation:
    """folder: that of the client states, if the place keeps them in files."""
    options = place._asdict() | {"mesh": fd.clients_mesh(jax.devices()[: place.devices])}
    options |= {"bank": folder / "bank"} if options.pop("bank") == "files" else {"bank": place.bank}
    del options["devices"]
    optimizer = {"optimizer": optax.scale_by_adam()} if case.adam else {}
    local = fd.LocalTraining(**case.local, **optimizer, augment=jitter if case.augmented else None)
    algorithm, rule = ALGORITHMS[case.algorithm](**case.arguments), AGGREGATIONS[case.aggregation]()
    algorithm = CODECS[case.codec](algorithm)
    data, shift = data_of(case.images, case.redealt, case.x64), SHIFTS[case.shift]()
    data = data if shift is None else data.shifted(shift, test="both")
    options |= {"aggregation": rule, "participation": RULES[case.participation]()} | TIMINGS[case.timing]
    return fd.Simulation(MODELS[case.model](), data, algorithm, local=local, **options, **case.options)


def draw_case(rng: random.Random) -> Case:
    """Draws an algorithm, and then everything else until the library accepts the combination."""

    def some(**options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if rng.random() < 0.25}

    algorithm = rng.choice([*ALGORITHMS])
    parameters = inspect.signature(ALGORITHMS[algorithm]).parameters.values()
    required = {p.name: 0.1 for p in parameters if p.default is p.empty}
    flags = {p.name: not p.default for p in parameters if isinstance(p.default, bool)}
    while True:
        local = {"epochs": rng.choice([1, 2, 2]), "batch_size": rng.choice([2, 3, 20]), "lr": 0.2}
        local |= some(lr_decay=0.9, momentum=0.5, weight_decay=0.1, clip_norm=0.5)
        options = some(dropout=0.3, stragglers=0.5, over_selection=1.5, deadline=1.5, measure="updates")
        options |= {"speed_spread": 0.5} if {"deadline", "over_selection"} & {*options} else {}
        local = local if rng.random() < 0.8 else {n: v for n, v in local.items() if n != "epochs"} | {"steps": 3}
        options |= {"cohort_size": K, "on_nonfinite": rng.choice(["keep", "drop_client", "raise"])}
        case = Case(
            algorithm, required | some(**flags), rng.choice([*MODELS]), rng.random() < 0.5, rng.random() < 0.3,
            rng.choice([None, None, None, 0, 0.5]), local, rng.random() < 0.1, rng.random() < 0.2,
            rng.choice([*AGGREGATIONS]), options, rng.choice(["uniform", *RULES]), rng.choice(["none"] * 4 + [*SHIFTS]),
            rng.choice(["none"] * 4 + [*CODECS]), rng.choice(["none"] * 4 + [*TIMINGS]),
        )  # fmt: skip
        with contextlib.suppress(ConfigurationError), precision(case):
            simulate(case, Place(), Path())
            return case


def draw_places(rng: random.Random, case: Case) -> list[Place]:
    """Draws places between which a state may move: all on the devices, or all in host memory, or all in files."""
    banks, places = rng.choice([["device", "sharded"]] * 2 + [["host"], ["files"]]), []
    while len(places) < 3:
        flags = [rng.random() < 0.3 for _ in range(3)]
        place = Place(rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 8]), rng.choice(banks), *flags)
        with contextlib.suppress(ConfigurationError), precision(case):
            simulate(case, place, Path())
            places.append(place)
    return places


@contextlib.contextmanager
def precision(case: Case):
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", case.x64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
