"""Fuzz test of the public interface: calls functions with awkward arguments, and checks how the library reacts.

Each call draws a public function, one of its arguments and an awkward value for this argument. A family is a group of
calls of similar functions. ``python experiments/benchmarks/wrong_calls.py`` makes many calls, and counts the outcomes.

The `Kind` of an argument lists invalid values, unusual values that are valid, and values that may be accepted or
rejected. Four outcomes are wrong:

    raw                 an error that the library did not raise itself
    accepted nonsense   an invalid value is accepted
    refused             a valid value is rejected
    hangs               the call does not return
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import linecache
import math
import os
import random
import re
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fedjax_drift as fd
from fedjax_drift import cli, spec
from fedjax_drift.checks import shown
from fedjax_drift.data.datasets import RECORDS as DATA_SETS
from fedjax_drift.measures.drift import MEASURES

HANG_SECONDS = 300
OURS = (ValueError, OSError, ImportError, FloatingPointError, MemoryError)


class Kind(NamedTuple):
    """The values to try for an argument."""

    nonsense: Sequence[Any] = ()  # invalid: the library must raise an error
    odd: Sequence[Any] = ()  # unusual but valid: must be accepted
    either: Sequence[Any] = ()  # may be accepted or rejected, but the error must not be raw
    like: Any = None  # as ``either``: this value with one part replaced by an awkward value


class Call(NamedTuple):
    name: str
    function: Callable[..., Any]
    valid: dict[str, Any]  # arguments with which the call succeeds
    kinds: dict[str, Kind]


# --- awkward values ---------------------------------------------------------------------------------------------------

NOTHING: list[Any] = [None]
RAGGED = [[1], [1, 2]]
TEXTS: list[Any] = ["", "adam", "yes", "0.1", b"1", np.str_("a")]
THINGS: list[Any] = [object(), ..., int, float, lambda: 0, open, np, 1j, np.datetime64(0, "s")]
CONTAINERS: list[Any] = [RAGGED, [], (), {}, set(), {"a": 1}, [1], (1, 2), {1}, [None], range(2)]
CONTAINERS += [np.zeros(2), jnp.zeros(2)]
DONATED, KEY = jnp.zeros(()), jax.random.key(0)
DONATED.delete()
ARRAYS: list[Any] = [np.array("a"), np.array(None), np.ma.masked, np.zeros((0,)), np.array([object()], object)]
ARRAYS += [DONATED, KEY]
BOOLS: list[Any] = [True, False, np.True_]
HUGE = 10**400  # too large for a float
UNREAL: list[Any] = [float("nan"), float("inf"), -float("inf"), np.float32("nan"), jnp.inf, HUGE]
WHOLE: list[Any] = [0, 1, -1, 2**31, 2**63, 2**70, -(2**40), np.uint8(200), np.int64(2**32)]
HALVES: list[Any] = [0.5, -0.5, 1.5, 1e-50, 1e39, -1e39, np.float64(1e300)]
NO_NUMBER = NOTHING + TEXTS + THINGS + CONTAINERS + ARRAYS + BOOLS + UNREAL
ANYTHING = NO_NUMBER + WHOLE + HALVES


INTEGERS = (np.int64(2), np.uint8(2), np.array(2), jnp.int32(2))


def integer(low: int = 1, high: int | None = None, sound: Sequence[Any] = INTEGERS) -> Kind:
    high_ones = [] if high is None else [high + 1, 2**31 + 1, 2**70]
    return Kind([*NO_NUMBER, low - 1, low - 2**40, 1.5, 1.0, np.float32(2), *high_ones], sound)


def flag() -> Kind:
    return Kind([*NOTHING, *TEXTS, *THINGS, *CONTAINERS, *ARRAYS, 0, 1, 0.5, "True", "no"], BOOLS)


def choice(*names: str) -> Kind:
    return Kind([*ANYTHING, *[name.upper() + "x" for name in names]], [np.str_(name) for name in names])


def only(*fine: type) -> Kind:
    """The kind of an argument of these types. All other values are invalid."""
    return Kind([value for value in ANYTHING if not isinstance(value, fine)])


def optional(kind: Kind, *words: Any) -> Kind:
    """The kind that also accepts None and ``words``."""
    free = (None, *words)
    nonsense = [v for v in kind.nonsense if not any(v is f or (isinstance(v, str) and v == f) for f in free)]
    return kind._replace(nonsense=nonsense, odd=[*kind.odd, *free])


def path(either: Sequence[Any] = ("", ".", "no/such/folder", "a\0b", Path(), "~no_such_user/x", "x" * 300)) -> Kind:
    return Kind([v for v in ANYTHING if not isinstance(v, str)], [], [*either, "nothing_here"])


def declared(function: Callable[..., Any]) -> dict[str, Kind]:
    """The kinds of the arguments that a function or a class declares (`fedjax_drift.spec`)."""
    found = {name: kind_of(argument) for name, argument in spec.Declared(function).arguments.items()}
    return {name: kind for name, kind in found.items() if kind.nonsense or kind.odd}


def kind_of(argument: spec.Argument) -> Kind:
    """The values that a declaration allows and refuses: those of its kind, and those at the edges of its range."""
    if argument.spec is None:
        return Kind()
    right, wrong = argument.spec.right, argument.spec.wrong
    numbers = [value for value in right if isinstance(value, int | float) and abs(value) < 2**31]
    beyond = [HUGE] if argument.spec.kind == "integer" and numbers != [*right] else []  # it has no upper bound
    by_kind = {
        "number": Kind([*NO_NUMBER, *wrong], [*right, *map(np.float32, numbers), *map(np.array, numbers)]),
        "integer": Kind(
            [*(v for v in NO_NUMBER if not any(v is each for each in beyond)), 1.5, 1.0, np.float32(2), *wrong],
            [*right, *map(np.int64, numbers)],
        ),
        "flag": flag(),
        "word": Kind([*ANYTHING, *[f"{word.upper()}x" for word in right if isinstance(word, str)]], right),
        "words": Kind([*TEXTS, *THINGS, 0.5, [1], {"a": 1}, None], right),
        "text": only(str),
        "instance": Kind([*NOTHING, *THINGS, *UNREAL]),
        "array": Kind([v for v in NO_ARRAY if not isinstance(v, str | int | np.number)]),
        "function": Kind([*(v for v in ANYTHING if not callable(v)), int, dict]),
        "path": path(),
        "pair": Kind([*(v for v in ANYTHING if not isinstance(v, tuple)), (1,), ("a", 1)]),
        "shape": shape(),
    }
    kind = by_kind.get(argument.spec.kind, Kind([*wrong]))
    free = argument.others
    nonsense = [v for v in kind.nonsense if not (v is None and None in free) and not (isinstance(v, str) and v in free)]
    return kind._replace(nonsense=nonsense, odd=[*kind.odd, *free])


def of(
    function: Callable[..., Any], valid: dict[str, Any] | None = None, odd: dict[str, list] | None = None, **kinds: Kind
) -> Call:
    """A call of a function with the kinds that it declares.

    odd: more valid values of its arguments. kinds: of its other arguments, or in place of those that it declares.
    """
    all_kinds = declared(function) | kinds
    for name, values in (odd or {}).items():
        kind = all_kinds.get(name, Kind())
        all_kinds[name] = kind._replace(odd=[*kind.odd, *values])
    kept = {name: kind for name, kind in all_kinds.items() if any(kind[:3]) or kind.like is not None}
    return Call(f"fd.{function.__qualname__}", function, valid or {}, kept)


def public(name: str, module: Any) -> Iterator[tuple[str, Callable]]:
    """Yields the public functions and classes of a module, and the methods of its classes, with their names."""
    for attribute, value in inspect.getmembers(module):
        if attribute.startswith("_") or not getattr(value, "__module__", module.__name__).startswith("fedjax_drift"):
            continue
        if inspect.ismodule(value) and value.__name__.startswith("fedjax_drift"):
            yield from public(f"{name}.{attribute}", value)
        elif inspect.isclass(value) or inspect.isfunction(value):
            yield f"{name}.{attribute}", value
            if inspect.isclass(value):
                methods = inspect.getmembers(value, inspect.isfunction)
                yield from ((f"{name}.{attribute}.{m}", method) for m, method in methods if not m.startswith("_"))


def accepts(pairs: int, rng: random.Random) -> Iterator[str]:
    """Calls every public function that checks its declared arguments with each value that is nonsense for one of them,
    and ``pairs`` times with two. Yields the calls that are accepted, and those whose error does not say what the
    argument must be and what it got.

    The declared arguments are checked before the function begins, so the others need no sensible value.
    """
    known = VALID | {
        "data": DATA, "model": MODEL, "name": "synthetic", "shared": {}, "own": {}, "ylabel": "y",
        **dict.fromkeys(("folder", "train", "path"), "nowhere"),
        "plane": fd.measures.LossPlane(X, X, X, None, np.eye(3, 2), ("a", "b", "c")),
        "settings": [fd.plots.Compared("t", {"a": [([1, 2], [0.1, 0.2])]}, {})],
    }  # fmt: skip
    functions = {function: name for name, function in public("fd", fd) if hasattr(function, "declared")}
    calls = []
    for function, name in functions.items():
        kinds = {argument: kind_of(of) for argument, of in function.declared.arguments.items()}
        parameters = inspect.signature(function).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        odd = {n: kinds[n].odd[0] if n in kinds and kinds[n].odd else None for n in required}
        valid = odd | {n: value for n, value in known.items() if n in required} | NEED.get(function.__name__, {})
        call = (function, name, valid)
        tries = [(argument, value) for argument, kind in kinds.items() for value in kind.nonsense]
        calls += [(*call, {argument: value}) for argument, value in tries]
        if len(kinds) > 1:
            calls += [(*call, dict(rng.sample(tries, 2))) for _ in range(pairs)]
    for call in calls:
        yield from _unless_refused(*call)


def _unless_refused(function: Callable, name: str, valid: dict[str, Any], wrong: dict[str, Any]) -> Iterator[str]:
    said = "accepted"
    try:
        function(**(valid | wrong))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        form = r"\b{}\b.* must .*, got "
        if isinstance(error, ValueError) and any(re.search(form.format(name), said, re.DOTALL) for name in wrong):
            return
    yield f"{name}({', '.join(f'{argument}={shown(value)[:60]}' for argument, value in wrong.items())}): {said[:200]}"


OF_ARGUMENTS: list[Any] = [lambda: 0, lambda a: 0, lambda a, b: 0, lambda a, b, c: 0, lambda a, b, c, d: 0]
OF_ARGUMENTS += [lambda a, b, c, d, e: 0, lambda a, b, c, d, e, f: 0]


def function(takes: int = 1) -> Kind:
    """The kind of a function of so many arguments. A class such as int is none."""
    others = [each for number, each in enumerate(OF_ARGUMENTS) if number != takes]
    return Kind([*(v for v in ANYTHING if not callable(v)), int, dict, *others])


def dtype(*fine: Any, allow: Sequence[Any] = ()) -> Kind:
    wrong = [*ANYTHING, np, jnp, [0.5], {"a": 1}, "bfloat", "f4,f4", "S3", b"f4", np.zeros(2), "O", object]
    free = (None, int, float, *allow)
    return Kind([v for v in wrong if not any(v is each for each in free)], [*fine, float])


def shape() -> Kind:
    nonsense = [*NOTHING, *TEXTS, *THINGS, *BOOLS, *UNREAL, 784, -1, 0.5, (0,), (-3,), (1.5,), ("a",), {"a": 1}, {1}]
    return Kind(nonsense)


def mutated(value: Any, rng: random.Random) -> Any:
    """Returns the value with one random part, at any depth, replaced by an awkward value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice([*value])
        return value | {key: mutated(value[key], rng)}
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.8:
        at, items = rng.randrange(len(value)), list(value)
        items[at] = mutated(items[at], rng)
        return items if isinstance(value, list) else value._make(items) if hasattr(value, "_make") else tuple(items)
    return rng.choice(ANYTHING)


# --- the calls --------------------------------------------------------------------------------------------------------

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.array([0, 1, 2, 1, 0, 1, 2, 1])
FEWER, NO_SECOND = Y[:7], [8, 0]
PARTS = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5, 6, 7])]
PAIRS = [(X[part], Y[part]) for part in PARTS]
HISTORY = [
    {
        **dict.fromkeys(("round", "clients", "steps", "executed_steps"), t),
        **dict.fromkeys(("train_loss", "loss", "accuracy", "lr", "seconds", "gain", "period_drift"), 0.5 / t),
        **dict.fromkeys(
            ("dissimilarity", "gradient_variance", "lp_present", "lp_absent", "period_variance", "client_variance"),
            0.1 * t,
        ),
        **dict.fromkeys(("cka", "kl", "client_drift", "update_norm", "update_cosine"), [0.5, 0.6]),
        "label_mix": [0.5, 0.25, 0.25],
    }
    for t in (1, 2, 3)
]
RECORDS = {"FedAvg": HISTORY, "FedEve": [HISTORY, HISTORY]}
DATA = fd.FederatedData.from_clients(PAIRS, test_clients=PAIRS)
MODEL = fd.models.linear((3,), 3)
SWAP = fd.shift.permute_labels(0, [(0, 2)])

NO_ARRAY = [*NOTHING, *TEXTS, *THINGS, *ARRAYS, {"a": 1}, {1}, [None], 3, np.float32(3)]
ROWS = Kind(
    [*NO_ARRAY, [["a"] * 3] * 8, X * 1j, X[:0], X[:7], X / np.nan, np.ma.masked_array(X, X > 5), np.full((8, 3), None),
     [[1.0], [1.0, 2.0]] * 4, X.astype("S"), X.astype(np.longdouble)],
    [X.tolist(), jnp.asarray(X), X.astype(np.float16), X.astype(np.int64), X.astype(">f4"), X[:, ::-1], X > 3,
     X.astype(np.uint8), np.zeros((8, 2, 2), np.uint8)],
)  # fmt: skip
LABELS = Kind(
    [*NO_ARRAY, ["a"] * 8, Y * 1j, Y[:0], FEWER, Y / np.nan, np.ma.masked_array(Y, Y > 1), np.full(8, None),
     [[1], [1, 2]] * 4],
    [Y.tolist(), jnp.asarray(Y), Y.astype(np.uint8), Y.astype(">i4")],
)  # fmt: skip
SIZES = Kind(
    [*NO_ARRAY, [], NO_SECOND, [9, -1], [2.5, 5.5], [8.0], [1.9, 1.9, 2.0, 2.2], [[8]], [True] * 8, [2**32 + 8], ["8"],
     np.ma.masked_array([4, 4], [0, 1])],
    [[4, 4], (8,), np.array([1, 7], np.uint8), jnp.array([3, 5])],
)  # fmt: skip
PAIR = optional(
    Kind(
        [*ANYTHING, (X,), (X, Y, Y), (X, Y[:3]), ("a", "b"), (None, None), (X[:, :2], Y), (X * 1j, Y)],
        [(X, Y), [X, Y], (X.tolist(), Y.tolist())],
        like=(X, Y),
    )
)
NO_NAMES = [value for value in ANYTHING if not isinstance(value, range | tuple)]
NAMES = optional(Kind([*NO_NAMES, ["a"], ["a", "a"], "ab"], [["a", "b"], ("a", "b"), [1, 2]]))
OF_ALL_DATA = {"mean": optional(Kind(ANYTHING)), "std": optional(Kind(ANYTHING)), "name": only(str)}


# --- functions whose arguments are all declared: the valid values are accepted ----------------------------------------

# Valid values by the names of arguments, for those that a function requires.
VALID: dict[str, Any] = {
    "N": 3, "W": [[1]], "alpha": 0.5, "amount": 1.0, "at": 1, "available": [[True]], "begin": 1.0, "beta": 0.5,
    "candidates": 2, "clip_norm": 1.0, "concurrency": 3, "degrees": 1.0, "degrees_per_round": 1.0, "down": 0.5,
    "attack": fd.adversaries.nan(), "classes": 3, "end": 2**30, "f": 1, "factor": 2.0, "features": 5,
    "rule": fd.robust.median(), "share": 0.2, "target": 1, "tau": 1.0, "fraction": 0.5, "groups": 2, "ids": [[1]],
    "levels": 4, "mu": 0.1, "noise_multiplier": 1.0,
    "norm": 1.0, "num_clients": 2, "of": [0, 1], "p": [0.5], "pairs": [(0, 1)], "per_client": 2, "period": 2.0,
    "restart_every": 4, "rows": 2, "columns": 3, "server_lr": 0.1, "shift": SWAP, "sigma": 1.0, "up": 0.5,
    "weights": np.ones((2, 3)), "base": fd.algorithms.fedavg(), "codec": fd.compression.none(),
    "partition": fd.partition.iid(2),
}  # fmt: skip
# More valid values of arguments whose declaration has no examples, such as arrays.
ODD: dict[str, list] = {
    "p": [[0.5, 1], (0.5,), jnp.ones(3)],
    "ids": [[[1, 2]], np.ones((2, 3), int)],
    "phases": [[0.5], (0, 1), jnp.ones(3)],
    "available": [[[True, False]], np.ones((2, 3), bool)],
    "at": [3, [2, 5], np.int64(2), jnp.array([1])],
    "pairs": [[(0, 2)], ((0, 1),)],
    "of": [[0, 1, 0], np.array([1, 0, 1], np.uint8), (0,), jnp.array([0, 1])],
    "W": [np.eye(2), [[0.5, 0.5], [0.5, 0.5]], np.eye(3)[None], [[1]], jnp.eye(2)],
    "hinge": [(1, 2), [0, 0.5]],
}
# The kinds of arguments that are not declared, or whose declaration says less.
PER_DOMAIN = optional(Kind([*NO_NUMBER, *WHOLE, [1, -1], [0.5, np.nan]], [[0.1] * 10, np.full(10, 0.1)]))
SPEED = Kind(
    [*NOTHING, *TEXTS, *THINGS, *BOOLS, *ARRAYS, RAGGED, 0, -1, math.nan, -math.inf, [-1.0], [np.nan], [[0.5]],
     ["a"], [True], np.zeros(2), {1}],
    [np.float32(0.5), np.int64(1), np.array(0.5), Fraction(1, 2), 2**20, [0.5, 1.0, 2], (1, 2, 3), np.ones(3)],
)  # fmt: skip
SHIFT = Kind([*function(5).nonsense, int, fd.shift.rotate, fd.shift.none], [lambda key, t, i, x, y: (x, y)])
KINDS: dict[str, Kind] = {
    "personal": Kind([value for value in ANYTHING if not isinstance(value, str) and not callable(value)]),
    **dict.fromkeys(("lambda0", "counts0"), PER_DOMAIN),
    "models": Kind([value for value in NO_NUMBER if not isinstance(value, list | tuple)] + [0, -1, 1.5], [1, 2]),
    "shift": SHIFT,
    "sizes": optional(
        Kind(
            [v for v in ANYTHING if v is not None and not isinstance(v, tuple)],
            ["linear", np.str_("square"), (3, 5), np.array([4, 4])],
        )
    ),
    "weights": Kind(
        [*ANYTHING, np.ones((3, 2)), np.zeros((2, 3)), [[1, -1], [1, 1]], [[np.nan, 1], [1, 1]]],
        [np.ones((2, 3)), [[1, 0], [0, 1]], jnp.ones((2, 1))],
    ),
    "partition": Kind(
        [*ANYTHING, fd.partition.iid, lambda y, writer: [[0]]], [fd.partition.by_writer(), fd.partition.iid(2)]
    ),
}
# What a function does not share with the others. Kind(): not tried, because it needs another argument.
EXCEPTIONS: dict[str, dict[str, Kind]] = {
    "distribution": {"num_clients": Kind()},  # as many as there are weights
    "gradual": {"end": Kind(declared(fd.shift.gradual)["end"].nonsense)},  # later than it begins
    "private": {"count_stddev": Kind()},
    "reaches": {"targets": Kind()},
    "LocalTraining": {"direction": optional(Kind(ANYTHING))},  # it needs an optimizer
    "Failures": {"speed_spread": Kind(declared(fd.Failures)["speed_spread"].nonsense, [0, 0.0])},
    "Placement": {"bank": Kind([value for value in ANYTHING if not isinstance(value, str)], ["device", "host"])},
    "noisy_labels": {
        "rate": Kind(
            [
                *NOTHING,
                *TEXTS,
                *THINGS,
                *BOOLS,
                *ARRAYS,
                RAGGED,
                -1,
                1.5,
                math.nan,
                [-1.0],
                [np.nan],
                [[0.5]],
                ["a"],
                [2],
            ],
            [0, 1, np.float32(0.5), Fraction(1, 2), [0.5, 1, 0], (0.5,), np.zeros(2), jnp.ones(3), range(2)],
        )
    },
    "Devices": dict.fromkeys(("up", "down", "seconds_per_step"), SPEED),
}
NEED: dict[str, dict[str, Any]] = {  # other valid arguments
    "erdos_renyi": {"p": 0.5},
    "feddf": {"unlabelled": np.ones((2, 3))},
    "noisy_labels": {"rate": 0.5},
    "clients": {"ids": [1]},
    "best": {"settings": [{"lr": 0.1}], "scores": [0.5]},
    **dict.fromkeys(("vit", "encoder", "decoder"), {"depth": 1, "width": 12, "heads": 1}),
}


def factories() -> Iterator[Call]:
    """The functions and classes that only make a value."""
    modules = (fd.participation, fd.shift, fd.compression, fd.clock, fd.topology, fd.aggregation, fd.until)
    modules += (fd.robust, fd.adversaries)
    made = [getattr(module, name) for module in (*modules, fd.partition) for name in module.__all__]
    made += [*fd.algorithms.ALGORITHMS.values(), *fd.models.MODELS.values(), fd.plots.Style]
    made += [fd.LocalTraining, fd.Failures, fd.Placement, fd.Devices]
    for function in made:
        if not hasattr(function, "declared") or function is fd.aggregation.epsilon:
            continue
        arguments = spec.Declared(function).arguments
        takes = inspect.signature(function).parameters
        valid = {name: VALID[name] for name, p in takes.items() if name in VALID and p.default is p.empty}
        odd = {name: ODD[name] for name in takes if name in ODD and arguments[name].spec}
        others = {name: KINDS[name] for name in takes if name in KINDS}
        name = function.__name__
        yield of(function, valid | NEED.get(name, {}), odd, **others | EXCEPTIONS.get(name, {}))


# --- functions that also check what is not declared, or several arguments together ------------------------------------

SCHEDULES: list[Any] = [
    0.1,
    optax.linear_schedule(0.0, 0.1, 5),
    optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 1000),
    optax.join_schedules([optax.constant_schedule(0.0), optax.cosine_decay_schedule(0.1, 50)], [3]),
    optax.piecewise_constant_schedule(0.1, {2: 0.5}),
]
DESCENDING = [
    make(schedule)
    for make in (optax.sgd, optax.adam, optax.adamw, optax.lion, optax.rmsprop, optax.nadam, optax.yogi, optax.adagrad)
    for schedule in SCHEDULES
]
DESCENDING += [optax.noisy_sgd(0.1, key=seed) for seed in range(4)] + [optax.scale(-1.0), optax.contrib.muon(0.1)]
DESCENDING += [optax.chain(optax.clip(1.0), optax.apply_every(3), optax.sgd(0.1)), optax.fromage(0.1)]
ASCENDING = [
    optax.chain(optimizer, *([] if schedule == 0.1 else [optax.scale_by_schedule(schedule)]))
    for optimizer in (optax.identity(), optax.scale_by_adam(), optax.scale_by_lion(), optax.trace(0.9), optax.clip(1.0))
    for schedule in SCHEDULES
]
ASCENDING += [optax.add_noise(10.0**k, 0.5, key=k) for k in range(4)] + [optax.add_decayed_weights(100.0)]
NEED_THE_LOSS = [optax.polyak_sgd(), optax.contrib.momo(), optax.lbfgs(), optax.contrib.sophia(0.1)]
NEED_THE_LOSS += [optax.scale_by_backtracking_linesearch(3), optax.contrib.reduce_on_plateau()]
IDLE = [optax.set_to_zero(), optax.sgd(optax.linear_schedule(0.0, 1.0, 5, transition_begin=100))]


def fits() -> Iterator[Call]:
    """Values that are valid alone, and that only fit to the model or the data, or do not fit."""
    kinds = {"optimizer": Kind([*DESCENDING, *NEED_THE_LOSS, *IDLE], ASCENDING)}
    yield Call("an optimizer", of_optimizer, {}, kinds)
    kinds = {"optimizer": Kind(NEED_THE_LOSS, [*DESCENDING, *IDLE])}
    yield Call("an optimizer that descends", of_optimizer, {"direction": "descent"}, kinds)


def of_optimizer(optimizer: Any = None, direction: str | None = None) -> fd.Simulation:
    local = fd.LocalTraining(optimizer=optimizer, direction=direction, lr=1)
    return fd.Simulation(MODEL, DATA, fd.algorithms.fedavg(), local=local, cohort_size=2)


def simulation() -> Iterator[Call]:
    failures, placement = (declared(of) | EXCEPTIONS[of.__name__] for of in (fd.Failures, fd.Placement))
    placement["mesh"] = optional(only(jax.sharding.Mesh))
    too_many = failures["over_selection"].nonsense + [7.0]
    of_types = {
        "model": fd.Model, "data": fd.FederatedData, "algorithm": fd.Algorithm, "failures": fd.Failures,
        "placement": fd.Placement, "local": fd.LocalTraining, "aggregation": fd.aggregation.Aggregation,
        "participation": fd.participation.Participation, "clock": fd.clock.Clock, "devices": fd.Devices,
        "topology": fd.topology.Topology,
    }  # fmt: skip
    kinds = failures | placement | {name: only(kind) for name, kind in of_types.items()}
    kinds |= {name: optional(kinds[name]) for name in of_types if name not in ("model", "data", "algorithm")}
    kinds |= {
        "over_selection": failures["over_selection"]._replace(nonsense=too_many),
        "cohort_size": integer(1, 3),
        "sampling": choice("uniform", "bernoulli"),
        "on_nonfinite": choice("keep", "drop_client", "raise"),
        "measure": measures(),
        "sources": Kind([*TEXTS, *THINGS, *BOOLS, 3, [1], {}], [[], ()]),
    }
    valid = {"model": MODEL, "data": DATA, "algorithm": fd.algorithms.fedavg(), "cohort_size": 2}
    yield Call("fd.Simulation", fd.Simulation, valid, kinds)
    fields = dict.fromkeys(("features", "head", "extractor", "scores"), optional(function(2)))
    fields |= {"train_apply": optional(function(3)), "init": function(), "apply": function(2), "loss": function(2)}
    fields |= {"merged": optional(function()), "vocabulary": optional(only(int, range, np.ndarray, list, tuple))}
    fields["vocabulary"] = Kind([RAGGED, [], "a", 0, -1, 0.5, np.array(None), KEY, DONATED], [None, 9, (9, 9), [9]])
    valid = {"init": MODEL.init, "apply": MODEL.apply}
    yield Call("fd.Simulation of fd.Model", of_model, valid, fields | {"cosine": flag()})


def of_model(**fields: Any) -> fd.Simulation:
    return fd.Simulation(fd.Model(**fields), DATA, fd.algorithms.fedavg(), cohort_size=2)


def measures() -> Kind:
    nonsense = [*NOTHING, *THINGS, *ARRAYS[:3], DONATED, KEY, np.array(0.5), jnp.zeros(2)]
    nonsense += [0.5, 3, "adam", ["adam"], [1], {"a": 1}, {}, ["labels", "adam"]]
    return Kind(nonsense, [*MEASURES, True, False, (), [*MEASURES], np.True_])


def methods() -> Iterator[Call]:
    sim = fd.Simulation(MODEL, DATA, fd.algorithms.fedavg(), cohort_size=2)
    state = sim.init(jax.random.key(0))
    cohort = Kind(
        [*TEXTS, *THINGS, *ARRAYS, *BOOLS, *UNREAL, [], (), {}, [3], [-1], [0, 0], [0.5], [[0]], ["a"], [None], 0,
         {"a": 1}, np.zeros(2), [2**40], [True, False]],
        [None, [0, 1], (2,), range(2), np.array([0, 2], np.uint8), jnp.array([1])],
    )  # fmt: skip
    kinds = {
        "state": only(fd.ServerState),
        "key": Kind([value for value in ANYTHING if value is not KEY], [jax.random.key(1), jax.random.PRNGKey(1)]),
        "params": optional(Kind(ANYTHING, [state.params], like=jax.device_get(state.params))),
        "cohort": cohort,
        "fine_tune": optional(integer()),
        "names": measures(),
        **of_runs(),
    }
    valid = {"state": state, "key": jax.random.key(0), "rounds": 1, "progress": False}
    rows = [[value] for value in [*cohort.nonsense, None]]  # `run` takes a table of cohorts
    cohorts = Kind([*cohort.nonsense, *rows], [None, [[0, 1]], np.array([[0, 2], [1, 2]]), ([2],), lambda t: [t]])
    for name in ("init", "round_fn", "evaluate", "evaluate_clients", "evaluate_receivers", "measure", "run"):
        method = getattr(sim, name)
        takes = inspect.signature(method).parameters
        kinds |= {"cohort": cohorts} if name == "run" else {}
        given, asked = ({name: of[name] for name in takes if name in of} for of in (valid, kinds))
        yield Call(f"sim.{name}", method, given, asked)


def of_runs() -> dict[str, Kind]:
    return {
        "rounds": integer(0, 2**31 - 1, sound=[np.int64(2), np.uint8(2), 0])._replace(nonsense=[*NO_NUMBER, -1, 1.0]),
        "eval_every": integer(0, sound=[0, np.int64(1)]),
        "measure_every": integer(),
        "progress": optional(flag())._replace(odd=[False, np.False_]),
        "on_round": optional(function())._replace(odd=[None, print]),
        "until": optional(Kind(function().nonsense + [fd.until.reaches, fd.until.time], [fd.until.stalls()])),
        "checkpoints": optional(only(str, fd.Checkpoints))._replace(either=["", "a\0b"]),
    }


def sweeps() -> Iterator[Call]:
    seeds = Kind(
        [*NOTHING, *TEXTS, *THINGS, *ARRAYS, *BOOLS, *UNREAL, np.array(1)]
        + [[], (), 3, [0, 0], [-1], [2**32], [0.5], ["a"], [None], [True]],
        [[0, 1], range(2), np.arange(2), {0, 1}, (np.int64(3),), jnp.arange(2)],
    )
    values = Kind(
        [*NOTHING, *TEXTS, *THINGS, *BOOLS, *UNREAL, *HALVES, 3, (), [], {}, {"a": 1}],
        [[0.1], (0.1, 0.2), np.array([0.1]), range(1, 3), {0.1}, jnp.ones(2)],
    )
    yield Call("fd.grid", fd.grid, {"lr": [0.1]}, {"lr": values, "mu": values})
    settings = Kind(
        [*ANYTHING, [{"lr": "a"}], [{"epochs": 1}], [{"lr": 1.0}, {"mu": 1.0}], [{"lr": [1]}], [[]], [{"lr": 0.1}, 1]],
        [[{}], [{"lr": 0.1}, {"lr": 0.2}], ({"mu": np.float32(1)},), fd.grid(lr=[0.1])],
        like=[{"lr": 0.1, "mu": 0.1}, {"lr": 0.2, "mu": 0.1}],
    )
    kinds = {
        "build": function(),
        "settings": settings,
        "seeds": seeds,
        "params": optional(Kind(ANYTHING)),
        "start": optional(Kind(ANYTHING)),
        "together": Kind(integer().nonsense, ["auto", np.int64(1)]),
        **of_runs(),
        "on_round": optional(function(3))._replace(odd=[None, print]),
    }
    yield Call("fd.sweep", fd.sweep, {"build": built, "rounds": 1, "progress": False}, kinds)
    kinds = {name: kind for name, kind in kinds.items() if name not in ("build", "settings")}
    yield Call("sim.sweep", built().sweep, {"rounds": 1, "seeds": [0], "progress": False}, kinds)


def built(lr: Any = 0.1, mu: Any = 0.1) -> fd.Simulation:
    local = fd.LocalTraining(lr=lr)
    return fd.Simulation(MODEL, DATA, fd.algorithms.fedprox(mu), local=local, cohort_size=2)


def federated_data() -> Iterator[Call]:
    of_all, data = OF_ALL_DATA, fd.FederatedData
    redeal = optional(dealing(), "evenly")
    kinds = {"x": ROWS, "y": LABELS, "sizes": SIZES, "redeal": redeal, "client_names": NAMES, **of_all}
    valid = {"x": X, "y": Y, "sizes": [4, 4]}
    yield Call("fd.FederatedData", data, valid, kinds)
    x_test = ROWS._replace(odd=[jnp.asarray(X), X[:, ::-1], X.astype(">f4")])  # test inputs must have the dtype of X
    nonsense = [value for value in SIZES.nonsense if value is not NO_SECOND]
    test_sizes = optional(Kind(nonsense, [[4, 4], NO_SECOND]))
    kinds = {"x_test": x_test, "y_test": LABELS, "test_sizes": test_sizes}
    yield Call("fd.FederatedData with tests", data, valid | {"x_test": X, "y_test": Y}, kinds)
    two = [(X, Y), (X, Y)]
    of_other_dtypes = [(X, Y.astype(dtype)) for dtype in ("u1", "i2", "u8", ">i8", "?")]
    clients = Kind(
        [*ANYTHING, {"a": X}],
        [[(X, Y)], ((X, Y), (X, Y)), {"a": (X, Y)}, {1: (X, Y)}, [[X, Y]], [(X.tolist(), Y.tolist())],
         *([(X, Y), other] for other in of_other_dtypes), [(X, Y / 2), (X, Y.astype("f4"))]],
        like=two,
    )  # fmt: skip
    empty = [([], []), (X[:0], Y[:0]), (np.zeros(0, object), ()), (np.zeros((0, 9)), np.zeros((0, 1)))]
    sound = [[(X, Y), pair] for pair in (*empty, *of_other_dtypes)] + [[pair, (X, Y)] for pair in empty]
    tests = optional(Kind([*ANYTHING, [empty[0]] * 2, [(X, Y), ([], [1])]], sound, like=two))
    test = PAIR._replace(odd=[(X, Y), [jnp.asarray(X), Y.tolist()]])  # test inputs must have the dtype of X
    of_clients = {"clients": clients, "test": test, "test_clients": tests, **of_all}
    yield Call("fd.FederatedData.from_clients", data.from_clients, {"clients": two}, of_clients)
    none = [v for v in ANYTHING if not isinstance(v, (np.ndarray, jax.Array, range)) and v is not RAGGED]
    parts = Kind(
        [*none, [[8]], [[0.5]], [[-1]], [["a"]], [[]], fd.partition.iid(2)],
        [PARTS, tuple(PARTS), [[0], [1]], [range(2), range(3)]],
        like=PARTS,
    )
    of_parts = {"x": ROWS, "y": LABELS, "parts": parts, "test": test, **of_all}
    valid = {"x": X, "y": Y, "parts": PARTS}
    yield Call("fd.FederatedData.from_partition", data.from_partition, valid, of_parts)
    test_parts = optional(parts._replace(odd=[PARTS, tuple(PARTS)]))
    with_test = valid | {"test": (X, Y)}
    yield Call("from_partition with tests", data.from_partition, with_test, {"test_parts": test_parts})
    client = Kind([*NO_NUMBER, 3, -1, 2**40, "anna"], [0, np.int64(1), np.uint8(2)])
    yield Call("data.client", DATA.client, {}, {"i": client})
    yield Call("data.id_of", DATA.id_of, {}, {"name": Kind(ANYTHING)})
    for method in (DATA.redealt, DATA.with_client_tests, DATA.with_validation_clients):
        yield of(method)
    yield of(DATA.with_validation, {"share": 0.5})
    yield Call("data.decode", DATA.decode, {}, {"x": Kind(TEXTS, [X, X.tolist(), jnp.asarray(X)], NO_ARRAY)})
    regimes = {"x": ROWS, "y": LABELS, "num_clients": integer(1, 8), "seed": seed(), "test": PAIR, **of_all}
    yield of(fd.drift_regimes, {"x": X, "y": Y, "num_clients": 2, "alpha": 0.5}, **regimes)


def seed() -> Kind:
    return Kind([value for value in integer(0).nonsense if value is not HUGE], [0, np.int64(2), np.uint8(2), 2**80])


def dealing() -> Kind:
    """The kind of a number > 0 of NumPy, which may be 1e-50 or 1e39. These are 0 and infinity in float32."""
    return Kind([*NO_NUMBER, 0, -1, -0.5], [1e-50, 1e39, np.float32(0.5), Fraction(1, 2)])


def partitions() -> Iterator[Call]:
    y = Kind([*(value for value in LABELS.nonsense if value is not FEWER), Y / 2, Y[None]], LABELS.odd)
    any_writer = Kind(either=ANYTHING)
    writers = Kind([*ANYTHING, [0.5] * 8, [None] * 8, Y[:3]], [Y, Y.tolist(), list("abcdabcd")])
    for name in ("iid", "dirichlet", "shards", "classes", "distribution", "by_writer", "long_tailed"):
        make = getattr(fd.partition, name)
        given = {n: VALID[n] for n in inspect.signature(make).parameters if n in VALID}
        writer = writers if make is fd.partition.by_writer else any_writer
        yield Call(f"{name}(...)(y)", make(**given), {"y": Y, "writer": Y}, {"y": y, "writer": writer})


def datasets() -> Iterator[Call]:
    recipes = [open, object, int, lambda y, writer: [[0]], lambda y, writer: 3]
    factories, few = [fd.partition.iid, fd.partition.long_tailed], fd.partition.iid(2)
    nonsense = [*(value for value in ANYTHING if not callable(value)), *factories]
    kinds = {
        "name": choice("synthetic"),
        "partition": optional(Kind(nonsense, [None, few, fd.partition.long_tailed(few)], recipes)),
        "data_dir": optional(path()),
        "download": Kind(flag().nonsense, [False]),
    }
    synthetic, glyphs = (declared(DATA_SETS[name].read) for name in ("synthetic", "glyphs"))
    yield of(fd.datasets.load, {"name": "synthetic", "num_clients": 3}, **synthetic | kinds)
    yield Call("load glyphs", fd.datasets.load, {"name": "glyphs", "num_writers": 2}, glyphs)
    yield of(fd.datasets.locate, {"name": "mnist"}, name=choice("mnist"), data_dir=optional(path()))
    yield of(fd.datasets.num_classes, name=choice("mnist"))
    yield of(fd.datasets.describe, data_dir=optional(path()))
    for read_folder in (fd.datasets.from_leaf, fd.datasets.from_pfllib, fd.datasets.from_niid_bench):
        yield of(read_folder, {"folder": "nowhere"})
    for read in (fd.datasets.from_fedjax, fd.datasets.from_tff):
        yield of(read, {"train": "nowhere"}, test=Kind(path().nonsense[1:]))


def checkpoints() -> Iterator[Call]:
    config = Kind([*TEXTS, *THINGS, 3, 0.5, [1], {"a": object()}, {1}], [None, {}, {"a": 1}])
    yield of(fd.Checkpoints, {"folder": "checkpoints"}, config=config)
    sim, saved = built(), fd.Checkpoints("saved")
    sim.run(sim.init(jax.random.key(0)), 2, progress=False, checkpoints=saved)
    rounds = optional(Kind([*NO_NUMBER, 7, -1, 0.5], [2, np.int64(2), "best"]))
    yield Call("checkpoints.restore", saved.restore, {"sim": sim}, {"sim": only(fd.Simulation), "round": rounds})
    yield of(fd.load_run, {"folder": "nowhere"}, algorithm=Kind(either=ANYTHING), seed=Kind(either=ANYTHING))


def logs() -> Iterator[Call]:
    before = Kind([*TEXTS, *THINGS, 3, [1], [None], 0.5, {"a": 1}], [[], HISTORY], [None], like=HISTORY)
    yield Call("fd.logs.Log", logged, {"folder": "log", "before": []}, {"folder": path(), "before": before})
    kinds = {"before": before, "tracker": only(str)}
    kinds["config"] = Kind([*TEXTS, *THINGS, 3, 0.5, [1]], [None, {}, {"a": {"b": object()}}])
    yield of(fd.logs.Track, {"tracker": "tensorboard", "folder": "log"}, **kinds)
    record = Kind([value for value in ANYTHING if not isinstance(value, dict)], [HISTORY[0]], like=HISTORY[0])
    setting = optional(Kind([v for v in ANYTHING if not isinstance(v, dict)], [{}, {"lr": 0.1}]))
    kinds = {"seed": optional(integer(0, sound=[0, np.int64(3)])), "setting": setting}
    yield Call("track.start", started, {}, kinds | {"status": choice("failed")})
    records = Kind([*record.nonsense, {}, {"round": "1"}, {"round": True}], [HISTORY[0], {"round": 3}])
    yield Call("track(seed, setting, record)", tracked, {}, kinds | {"record": records})
    yield Call("log(record)", logged, {"folder": "log", "before": []}, {"record": record})
    yield of(fd.logs.read)


def logged(record: Any = HISTORY[0], **given: Any) -> None:
    with fd.logs.Log(**given) as log:
        log(record)


def started(seed: Any = None, setting: Any = None, status: Any = "finished") -> None:
    track = fd.logs.Track("tensorboard", "log")
    track.start(seed, setting)
    track.close(status)


def tracked(seed: Any = 0, setting: Any = None, record: Any = HISTORY[0]) -> None:
    with fd.logs.Track("tensorboard", "log") as track:
        track(seed, setting, record)


def plots() -> Iterator[Call]:
    no_text = [value for value in ANYTHING if not isinstance(value, str)]
    runs = Kind(no_text, [HISTORY, tuple(HISTORY), {"a": HISTORY}], ["nowhere"], like=RECORDS)
    file = optional(Kind(no_text, [], ["", "no/such/folder/x.png", "x.nope", ".", "a\0b.png"]))
    of_plot = {"records": runs, "path": file}
    for draw in (fd.plots.curves, fd.plots.drift, fd.plots.updates, fd.plots.agreement, fd.plots.gain):
        yield of(draw, {"records": RECORDS}, **of_plot, x=Kind(), y=Kind())
    target = Kind([*NO_NUMBER, 95, 1.5], [0.5, np.float32(0.5), Fraction(1, 2), 0])
    of_target = {"target": target, "key": Kind([*no_text, "adam"], ["train_loss", "accuracy"]), "by": choice("round")}
    valid = {"records": RECORDS, "target": 0.5}
    yield of(fd.plots.rounds_to_target, valid, **of_plot, **of_target)
    yield of(fd.rounds_to_target, valid, records=runs, **of_target)
    of_target |= {"target": optional(target), "baseline": optional(choice("FedAvg", "FedEve"))}
    yield of(fd.table, {"records": RECORDS}, records=runs, **of_target)
    no_list = [*NOTHING, *TEXTS, *THINGS, RAGGED, {}, {1}, ["a"], [object()], [[1, 2]], 0.5, KEY]
    values = Kind(no_list, [[], (1, 2), [0.5, None], np.ones(3), range(3)], [[HUGE, 1e300]], like=[0.5, 1, 0.25])
    yield of(fd.statistics.mean, {"values": [1, 2]}, values=values)
    p_values = Kind([*no_list, [2.0], [-0.1], [np.inf]], [[], (0, 1), [0.5, None], np.ones(3)], like=[0.5, 1, 0.25])
    yield of(fd.statistics.holm, {"p_values": [0.5]}, p_values=p_values)
    interval = fd.tuning.Range(0.1, 1.0)
    no_ranges = [*NOTHING, *TEXTS, *THINGS, [1], {"lr": 1}, {"lr": interval._replace(low=0.0)}]
    no_ranges += [{"lr": interval._replace(low=low)} for low in (2.0, "a", None, float("nan"))]
    no_ranges += [{"lr": interval._replace(log=log)} for log in flag().nonsense]
    of_ranges = Kind(no_ranges, [{}, {"lr": interval}, {"lr": fd.tuning.Range(-1, 1, log=False)}])
    valid_draw = {"shared": {"lr": interval}, "own": {}, "number": 2, "name": "a", "algorithm": "b"}
    yield of(fd.tuning.settings, valid_draw, shared=of_ranges, own=of_ranges)
    sim = built()
    scored = {"sim": sim, "runs": sim.sweep(1, seeds=[0], progress=False)}
    yield of(fd.tuning.score, scored, sim=only(fd.Simulation), runs=Kind([*ANYTHING, [HISTORY]]))
    tried = Kind([*NOTHING, *TEXTS, *THINGS, {}, [], [1], [[1]]], [({"lr": 1}, {}), [{"lr": "a"}, {}]])
    yield of(fd.tuning.best, {"settings": [{"lr": 0.1}, {"lr": 0.2}], "scores": [0.5, np.nan]}, settings=tried)
    yield of(fd.statistics.quantile, {"n": 2})
    yield of(fd.plots.drift_story, valid | {"data": DATA}, **of_plot, target=target)
    scores = {"accuracy": np.array([0.5, 0.7, np.nan]), "loss": np.ones(3)}
    of_scores = Kind(ANYTHING, [scores], like={"a": {"accuracy": [0.5, 0.7]}})
    yield of(fd.plots.fairness, {"scores": scores}, scores=of_scores, path=file)
    yield of(fd.plots.label_mix, {"history": HISTORY}, history=runs, path=file)
    yield of(fd.plots.federation, {"data": DATA}, path=file)
    taken = [[0, 1], {"cohort": [2, -1]}]
    cohorts = Kind([v for v in ANYTHING if v is not RAGGED], [taken, np.ones((2, 3), int)], like=taken)
    number = integer(3, sound=[np.int64(20)])
    yield of(fd.plots.participation, {"cohorts": taken, "num_clients": 3}, cohorts=cohorts, num_clients=number)
    errors, titles = {"a": [[1.0, 0.5], []], "b": [[2.0, 0.5], [1.0]]}, ["a", "b"]
    kinds = {"errors": Kind(ANYTHING, [errors], like=errors), "titles": Kind(ANYTHING, [titles], like=titles)}
    yield of(fd.plots.quadratics, {"errors": errors, "titles": titles}, **kinds)
    compared = [fd.plots.Compared("t", {"a": [([1, 2], [0.1, 0.2])]}, {"a": [(None, 0.3), (1, 0.2)]})]
    settings = Kind(ANYTHING, [compared], like=compared)
    yield of(fd.plots.compared, {"settings": compared, "ylabel": "y"}, settings=settings)
    sound = [[0.5], np.ones(3), (1, 2), jnp.ones(2)]
    yield of(fd.personal.summary, {"values": [0.5]}, values=Kind(NO_ARRAY, sound, ANYTHING))
    yield from of_models_and_clients()


def of_models_and_clients() -> Iterator[Call]:
    """The functions of `fd.measures`, and the plot of a plane."""
    sim = built()
    shape = sim.init(jax.random.key(0)).params
    models = [
        jax.tree.map(lambda a, seed=seed: jax.random.normal(jax.random.key(seed), a.shape), shape) for seed in (1, 2, 3)
    ]
    states = [sim.init(jax.random.key(0), params) for params in models]
    named = dict(zip("abc", [states[0], *(state.params for state in states[1:])], strict=True))
    kinds = {
        "sim": only(fd.Simulation),
        "states": Kind([*ANYTHING, states[:2], states[0], [states[0]] * 3], [named, tuple(states)], like=named),
        "examples": Kind([v for v in ANYTHING if v is not None], [None, (X, Y), DATA.client(0)]),
    }
    valid = {"sim": sim, "states": states, "points": 2}
    yield of(fd.measures.loss_plane, valid, **kinds)
    yield of(fd.plots.loss_plane, {"plane": fd.measures.loss_plane(**valid)})
    metric = 1 - np.eye(3)
    ground = [*TEXTS, *THINGS, *BOOLS, -metric, np.ones((3, 3)), metric[:2]]
    kinds = {
        "ground": Kind(ground, [None, metric, metric.tolist()]),
        "embedding": Kind([*TEXTS, *BOOLS, X[:3], X / np.nan], [None, X, lambda x: x]),
    }
    yield of(fd.measures.distances, {"data": DATA}, **kinds)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3)(x)


def models() -> Iterator[Call]:
    params = jax.device_get(MODEL.init(jax.random.key(0)))
    fd.models.save_params(params, "params.npz")
    of_params = {"params": Kind([*TEXTS, *THINGS, *ARRAYS[:2], None], [params], like=params), "path": path()}
    of_params["data"] = only(fd.FederatedData, type(None))
    yield Call("fd.models.save_params", fd.models.save_params, {"params": params, "path": "some.npz"}, of_params)
    paths = {"classifier/dense/kernel": "kernel", "classifier/dense/bias": ("bias", np.asarray)}
    names = Kind(
        [*TEXTS, *THINGS, *ARRAYS[:2], 3, [1], {}, {"a": 3}, {"a": ()}, {"a": "("}, {1: "a"}], [None], like=paths
    )
    fresh = Kind(["(", "nowhere", 3, [], lambda path: 3], [None, ".", lambda path: True])
    of_file = {"model": only(fd.Model), "path": path(), "names": names, "fresh": fresh}
    yield Call("fd.models.load_params", fd.models.load_params, {"model": MODEL, "path": "params.npz"}, of_file)
    floats = dtype(jnp.float32, "bfloat16", np.float16)
    floats = floats._replace(nonsense=[*floats.nonsense, int, None, "int32"])
    yield Call("model.computing_in", MODEL.computing_in, {}, {"dtype": floats})
    yield Call("fd.models.to_torch", fd.models.to_torch, {"params": params}, {"params": of_params["params"]})
    no_modules = only()._replace(nonsense=[v for v in ANYTHING if v is not None])
    yield Call("to_torch with a module", fd.models.to_torch, {"params": params}, {"module": no_modules})
    kinds = {
        "module": Kind([*ANYTHING, Net, nnx.Rngs(0)], [Net()]),
        "input_shape": shape()._replace(odd=[(3,), [3]]),
        "input_dtype": dtype(jnp.float32, "float32", allow=[1j])._replace(either=[int]),
        "statistics": Kind([3, object(), "adam", [], {}, "average"], [None]),  # the module has no running statistics
    }
    yield Call("fd.Model.from_linen", fd.Model.from_linen, {"module": Net(), "input_shape": (3,)}, kinds)
    make = lambda rngs: nnx.Linear(3, 3, rngs=rngs)  # noqa: E731
    kinds = kinds | {"module": Kind([*ANYTHING, Net()], [make]), "input_shape": optional(kinds["input_shape"])}
    yield Call("fd.Model.from_nnx", fd.Model.from_nnx, {"module": make}, kinds)


def rules() -> Iterator[Call]:
    """Rules, codecs, shifts and clocks, as a simulation uses them."""
    fields = {"select": function(5), "most": function(2), "init": function(2), "distinct": flag(), "name": only(str)}
    fields |= {"observe": optional(function(3)), "available": optional(function(4)), "expected": optional(function(2))}
    fields["weights"] = choice("algorithm", "uniform")
    yield Call("a rule", with_rule, {}, {name: kind for name, kind in fields.items() if kind.nonsense})
    shift, compression = fd.shift, fd.compression
    weights = Kind([*TEXTS, 3, [1.0, 2.0], [-1.0], [0.0], [np.nan]], [[1], (0.5,), jnp.ones(1), lambda t: [t]])
    yield Call("fd.shift.mixture", lambda weights: shift.mixture(weights, SWAP), {"weights": [1]}, {"weights": weights})
    domains = Kind([*TEXTS, *THINGS, 3, [1.0], [-1], [2], [True]], [None, [1, 0], jnp.zeros(3, int)])
    yield Call("fd.shift.domains", lambda of: shift.domains(SWAP, SWAP, of=of), {"of": None}, {"of": domains})
    kinds = {"shift": function(5), "test": optional(choice("present", "first", "both")), "seed": integer(0)}
    yield Call("data.shifted", DATA.shifted, {"shift": SWAP}, kinds)
    yield Call("data.examples", DATA.shifted(SWAP).examples, {"client": 0}, {"round": integer(0)})
    floats = dtype("float16", jnp.bfloat16, np.dtype("f4"))
    yield of(compression.cast, dtype=floats._replace(nonsense=[*floats.nonsense, int, None, "int8"]))
    wrong = [lambda key, x: x, lambda key, x: (x, x), lambda key, x: (x[:1], 1), lambda x: (x, 1)]
    send = {"send": Kind([*[v for v in ANYTHING if not callable(v)], *wrong], [lambda key, x: (x / 2, 1)])}
    yield Call("a codec", with_codec, {"send": compression.top_k(0.5).send}, send)
    kinds = {"concurrency": integer(2, 3, [2, np.int64(3)]), "up": Kind([[1.0], np.ones(2)], [np.ones(3)])}
    yield Call("asynchronous rounds", with_clock, {}, kinds | {"discount": function()})
    target = Kind([*NO_NUMBER, 255, 95, 1.5, -1], [0, 1, np.float32(0.5)])
    of_targets = {"accuracy": target, "personal_accuracy": target, "loss": target._replace(nonsense=NO_NUMBER)}
    yield of(fd.until.reaches, **of_targets, targets=Kind())


def with_rule(**fields: Any) -> fd.Simulation:
    rule = fd.participation.uniform()._replace(**fields)
    return fd.Simulation(MODEL, DATA, fd.algorithms.fedavg(), cohort_size=2, participation=rule)


def with_codec(send: Callable) -> fd.Algorithm:
    return fd.compression.compressed(fd.algorithms.fedavg(), fd.compression.Codec(send))


def with_clock(concurrency: Any = 3, up: Any = 1.0, **fields: Any) -> fd.Simulation:
    options = {"clock": fd.clock.asynchronous(concurrency)._replace(**fields), "devices": fd.Devices(up=up)}
    return fd.Simulation(MODEL, DATA, fd.algorithms.fedavg(), cohort_size=2, **options)


def others() -> Iterator[Call]:
    private = {"sampling": "bernoulli", "aggregation": fd.aggregation.private(clip_norm=1.0, noise_multiplier=1.0)}
    sim = fd.Simulation(MODEL, DATA, fd.algorithms.fedavg(), cohort_size=2, **private)
    yield of(fd.aggregation.epsilon, {"sim": sim, "rounds": 2, "delta": 1e-3}, sim=only(fd.Simulation))
    ks = Kind([*NOTHING, *TEXTS[1:], *THINGS, *BOOLS, 3, [0], [101], [0.5], ["a"]], [[1], (5,), np.array([5])])
    ks = ks._replace(nonsense=[*ks.nonsense, *ARRAYS[:3], KEY, DONATED, np.array(5), RAGGED])
    yield of(fd.ranking.scores, group=integer(2, sound=[np.int64(20)]), ks=ks)
    yield of(fd.clients_mesh, devices=optional(Kind(ANYTHING, [jax.devices()])))
    address = optional(Kind([*ANYTHING, "host", "host:0", "host:70000", ":1"]))._replace(odd=[])
    kinds = {"num_processes": integer(), "process_id": integer(0), "cpu_devices": integer(1, 256)}
    kinds = {name: optional(kind)._replace(odd=[]) for name, kind in kinds.items()}
    kinds |= {"coordinator_address": address, "timeout_seconds": integer()._replace(odd=[])}
    yield Call("fd.distributed.initialize", fd.distributed.initialize, {}, kinds)
    yield Call("fd.use_cpu_devices", fd.use_cpu_devices, {}, {"n": kinds["cpu_devices"]})


WORDS = """
    -- - = : , a nan inf -1 0 1e400 1e-50 0.5 fedavg fedprox fedprox:mu= fedprox:mu=a fedavg:=, adam:b1=2
    adam:b1=a sgd dirichlet dirichlet:0 dirichlet:a dirichlet:0.1:prior=x iid:3 shards:0 lenet5
    linear:input_shape=3 host None true no/such [1] {} evenly auto labels,x synthetic:alpha=x
    synthetic:num_clients=0 glyphs:num_writers=-1
""".split()
WORDS += ["", "a\0b", "\n", "é" * 50, "9" * 30]
FLAGS = """
    dataset algorithm partition clients size-sigma imbalance data-dir seed data-seed model init rounds cohort
    sampling participation shift shift-test redeal compress error-feedback downlink network clock seconds-per-step up
    down
    epochs batch-size lr lr-decay
    lr-schedule momentum weight-decay clip-norm optimizer on-nonfinite dropout stragglers over-selection
    deadline speed-spread clip-updates noise-multiplier target-quantile restart-every
    measure measure-every eval-every devices lanes stream bank seeds
    target by until-time until-megabytes resume checkpoint-every checkpoint-seconds keep output
""".split()


def command_line() -> Iterator[Call]:
    run = "run --dataset synthetic:num_clients=3 --algorithm fedavg --rounds 1 --cohort 2 --no-progress".split()
    words = {"word": Kind(either=WORDS)}
    for name in FLAGS:
        yield Call(
            f"run --{name}", lambda word, name=name: typed([*run, "--output=out", f"--{name}={word}"]), {}, words
        )
    text = "--dataset synthetic:num_clients=3 --algorithm fedprox:mu=0.1 --cohort 2"
    split, more = text.split(), [f"{text} {word}" for word in WORDS]
    no_values = [value for value in ANYTHING if not isinstance(value, dict)]
    values = Kind(
        [*no_values, {"a": 1}, {"alpha": 1}, {1: 1}, {"lr": "a"}, {"mu": -1}],
        [{}, {"lr": 1}, {"mu": np.float32(1)}, {"epochs": 2}],
        like={"lr": 1, "mu": 0.1},
    )
    kinds = {"words": Kind(ANYTHING, [split, tuple(split)], more, split), "values": optional(values)}
    kinds["data"] = optional(only(fd.FederatedData))
    yield Call("fd.parse_run", fd.parse_run, {"words": text}, kinds)
    yield Call("data", lambda word: typed(["data", word, "--output=out"]), {}, words)
    yield Call("a command", lambda word: typed([word]), {}, {"word": Kind(either=[word for word in WORDS if word])})


def typed(words: list[str]) -> None:
    """Runs a command line. Raises ValueError if it exits with code 2 and a one-line error message.

    Raises AssertionError for every other exit code except 0 and 1.
    """
    said = io.StringIO()
    shutil.rmtree("out", ignore_errors=True)
    with contextlib.redirect_stderr(said):
        try:
            code = cli.main(words)
        except SystemExit as error:  # for example after --help
            code = error.code
    errors = [line for line in said.getvalue().splitlines() if line.startswith("fedjax-drift: error:")]
    if code == 2 and len(errors) == 1:
        raise ValueError(errors[0])
    if code not in (0, 1):
        raise AssertionError(f"code {code}: {said.getvalue()!r}")


FAMILIES: dict[str, Callable[[], Iterator[Call]]] = {
    "factories": factories,
    "Simulation": simulation,
    "what fits": fits,
    "its methods": methods,
    "sweep and grid": sweeps,
    "FederatedData": federated_data,
    "partitions": partitions,
    "datasets": datasets,
    "checkpoints": checkpoints,
    "logs": logs,
    "plots": plots,
    "models": models,
    "rules": rules,
    "others": others,
    "command line": command_line,
}


# --- calling ----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    call: str
    wrong: str  # "raw", "accepted nonsense", "refused" or "hangs"; "" if the outcome is correct
    said: str  # the error message

    def __str__(self) -> str:
        return f"{self.wrong}: {self.call}: {self.said}"


def abused(family: str, number: int, seed: int = 0) -> Iterator[Outcome]:
    """Makes ``number`` random calls of a family in a temporary working directory, and yields their outcomes."""
    rng, here = random.Random(f"{family} {seed}"), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            calls = [call for call in FAMILIES[family]() if call.kinds]
            weights = [len(call.kinds) for call in calls]
            for call in rng.choices(calls, weights, k=number):
                argument = rng.choice([*call.kinds])
                value, asked = drawn(call.kinds[argument], rng)
                yield Outcome(f"{call.name}({argument}={shown(value)[:100]})", *once(call, {argument: value}, asked))
        finally:
            os.chdir(here)


def drawn(kind: Kind, rng: random.Random) -> tuple[Any, str]:
    """Returns a random value, and its field in the kind: "nonsense", "odd" or "either"."""
    values = [(value, name) for name in ("nonsense", "odd", "either") for value in getattr(kind, name)]
    if kind.like is not None and (not values or rng.random() < 0.5):
        return mutated(copy.copy(kind.like), rng), "either"
    return rng.choice(values)


def once(call: Call, given: dict[str, Any], asked: str) -> tuple[str, str]:
    """Makes the call. Returns the name of the wrong outcome, or "" if the outcome is correct, and the error message."""
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(HANG_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            call.function(**(call.valid | given))
    except Hang:
        return "hangs", ""
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:300]}"
        return "raw" if not ours(error) else "refused" if asked == "odd" else "", said
    finally:
        signal.alarm(0)
    return "accepted nonsense" if asked == "nonsense" else "", ""


class Hang(BaseException):
    pass


def too_long(signum: int, frame: Any) -> None:
    raise Hang


def ours(error: Exception) -> bool:
    """Whether the library raised the error itself, on a line that begins with "raise".

    This file raises the errors of the command line. An OSError with a file name also counts.
    """
    if not isinstance(error, OURS):
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return True  # the message names the file
    frame, number = list(traceback.walk_tb(error.__traceback__))[-1]
    name = frame.f_code.co_filename
    return ("fedjax_drift" in name or name == __file__) and linecache.getline(name, number).strip().startswith("raise ")
