"""The table of test_trajectories.py: every algorithm, its arguments, and what it equals.

A row of `CASES` equals the slow loop of the same name with the same arguments. A row of `LIMITS` is a limit in which
the algorithm is another one, so it equals the slow loop of that one.
"""

from __future__ import annotations

from typing import Any

import optax

SIZES, FEATURES, CLASSES = (3, 10, 7, 25, 1, 16), 5, 3
COHORTS = [(5, 1, 4), (0, 3, 2), (3, 1, 0), (4, 2, 5), (1, 3, 5), (0, 4, 3)]  # given cohorts compile faster
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.2, "lr_decay": 0.9}
BITES: dict[str, Any] = {"weight_decay": 0.1, "clip_norm": 0.4}
MOMENTUM: dict[str, Any] = {"momentum": 0.5, "lr": 0.1}
ADAM: dict[str, Any] = {"optimizer": optax.scale_by_adam(), "lr": 0.02}
SLOW: dict[str, Any] = {"lr": 0.02}  # the accuracy grows slowly, so that eps of FedGVR is between 0 and 1
ONE_STEP: dict[str, Any] = {"epochs": 1, "batch_size": 25}
CONSTANT: dict[str, Any] = {"lr_decay": 1.0}
# Changes to the federation, in the same column as those to the local training.
EVERYONE: dict[str, Any] = {"cohorts": [range(6)] * 3}
EQUAL: dict[str, Any] = {"equal": True}  # all clients have 8 examples
# Client 2 is away for ten rounds, and client 0 after its first ones. The cohorts have different sizes.
AWAY: dict[str, Any] = {
    "cohorts": [
        (0, 1, 3),
        (0, 2),
        (1, 3, 4),
        (5,),
        (1, 3),
        (4, 3),
        (1,),
        (1, 4),
        (3, 5, 1),
        (4,),
        (1, 3),
        (2, 0),
        (2, 5),
    ]
}
FIRST: dict[str, Any] = {"cohorts": COHORTS[:1]}  # one round
CODE: dict[str, Any] = {"scale_by_size": True, "variate_lr": "initial", "variate_steps": "mean"}  # as in FedDC's code
UNIFORM: dict[str, Any] = {"weighting": "uniform"}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # algorithm, its arguments, changes to LOCAL and to the federation
Limit = tuple[str, dict[str, Any], dict[str, Any], str, dict[str, Any]]  # and the other algorithm, with its arguments


def sign_of_the_first_input(x: Any, y: Any) -> Any:
    return (x[:, 0] > 0) * 1


def the_same(x: Any, y: Any) -> Any:
    return 0 * y


def nothing(path: str) -> bool:
    return False


CASES: list[Case] = [
    ("fedavg", {}, {}),
    ("fedavg", {"server_lr": 0.7, **UNIFORM}, MOMENTUM | {"momentum": 0.9}),
    ("fedprox", {"mu": 0.3}, {}),
    ("fedprox", {"mu": 1.0, "server_lr": 1.3}, MOMENTUM | {"weight_decay": 0.1, "clip_norm": 0.5}),
    ("fedavgm", {"server_lr": 0.5}, {}),
    ("fedavgm", {"beta": 0.7, "damped": True, **UNIFORM}, BITES),
    ("fedadam", {"server_lr": 0.1, "tau": 1e-2}, {}),
    ("fedadam", {"server_lr": 0.1, "tau": 1e-2, "v_0": 0.0}, {}),  # as in the library of FedEve's authors
    ("fedyogi", {"server_lr": 0.1, "tau": 1e-2, "b1": 0.5, "b2": 0.8, **UNIFORM}, {}),
    ("fedadagrad", {"server_lr": 0.1, "tau": 1e-2}, ADAM),
    ("scaffold", {}, BITES),
    ("scaffold", {"server_lr": 0.7, "option": "I", "scale_by_size": True}, {}),
    ("scaffold", {"corrects": "model", "weighting": "examples"}, MOMENTUM | {"weight_decay": 0.1}),
    ("scaffold", CODE | {"weighting": "examples"}, MOMENTUM),
    ("feddyn", {"alpha": 0.3}, BITES),
    ("feddyn", {"alpha": 0.1, "scale_by_size": True, "weighting": "examples"}, ADAM),
    ("feddc", {"alpha": 0.3}, BITES),
    ("feddc", {"alpha": 0.1, **CODE}, MOMENTUM),
    ("feddc", {"alpha": 0.1, "variate": "last_update", "scale_by_size": True, "variate_lr": "initial"}, {}),
    ("feddc", {"alpha": 0.1, "variate": "none"}, {}),
    ("feddc", {"alpha": 0.1, "aggregation": "paper"}, BITES),
    ("feddc", {"alpha": 0.1, "aggregation": "cohort", "variate": "last_update"}, {}),
    ("slowmo", {"beta": 0.7, "alpha": 0.8}, BITES),
    ("fedadc", {"beta": 0.7}, BITES),
    ("fedadc", {"beta": 0.6, "alpha": 0.8, "gamma": 0.5}, {}),
    ("fedadc", {"beta": 0.7, "gamma": 0.8, "variant": "heavy_ball"}, BITES),
    ("vrl_sgd", {}, {}),
    ("vrl_sgd", {}, BITES | EVERYONE),
    ("vrl_sgd", {}, EQUAL),
    ("fedeve", {}, BITES),
    ("fedeve", {"server_lr": 0.7, "period_variance": "code", "centre": "uniform"}, ADAM),
    ("fedgvr", {"window": 2}, BITES | SLOW),
    ("fedgvr", {"mu": 0.3, "window": 2, "server_lr": 0.7, "recursion": "exact"}, {"momentum": 0.5, "lr": 0.01}),
    ("fedgvr", {"window": 2, "literal": ("step", "sign", "scale", "accuracy")}, {}),
    ("fedgm", {}, MOMENTUM),
    ("fedgm", {"mu": 0.3, "beta": 0.5, "scale": "one_minus_beta", "server_lr": 0.7}, BITES),
    ("fedgm", {"beta": 0.1, "literal": ("momentum",)}, {}),
    ("fedgvrgm", {"window": 2}, BITES | SLOW),
    ("fedgvrgm", {"server_lr": 0.7, "window": 2, "recursion": "exact", "variate_momentum": False}, BITES | SLOW),
    ("fedgvrgm", {"mu": 0.3, "beta": 0.5, "window": 2, "scale": "one", "literal": ("sign",)}, ADAM | {"lr": 0.005}),
    ("lfd", {}, BITES | {"lr": 0.05}),
    ("lfd", {"temperature": 0.3, "margin": 0.1, "label_temperature": 0.5, "first": "uniform"}, MOMENTUM),
    ("lfd", {"temperature": 0.3, "regularizer": False}, {}),
    ("moon", {}, BITES),
    ("moon", {"mu": 5.0, "temperature": 0.2, "first": "initial", "weighting": "uniform"}, MOMENTUM),
    # The first case of FedReg also runs in float32, so it has few pseudo steps. With many steps the pseudo labels are
    # confident, and the differences of float32 softmaxes are mostly rounding errors.
    ("fedreg", {"gamma": 0.6, "eta_s": 0.1, "eta_p": 0.01, "pseudo_steps": 3}, MOMENTUM),
    ("fedreg", {}, BITES),
    ("fedreg", {"eta_s": 0.3, "pseudo_steps": 4, "pseudo_data": "descent"}, BITES),
    ("constrained", {"mu": 0.3}, BITES),
    ("constrained", {"mu": 0.3, "kind": "feature", "part": "classifier"}, {}),
    ("fednova", {}, MOMENTUM | {"weight_decay": 0.1}),
    ("fednova", {"mu": 0.3, "server_lr": 0.7}, BITES),
    ("fednova", {"mu": 1e-9}, {}),  # the closed form of the coefficients must not cancel
    ("fedcm", {}, BITES),
    ("fedcm", {"alpha": 0.3, "server_lr": 0.7, "steps": "own"}, {}),
    ("fedsam", {}, BITES),
    ("fedsam", {"rho": 0.5, "server_lr": 0.7, "weighting": "examples"}, MOMENTUM),
    ("mofedsam", {"rho": 0.5, "alpha": 0.3}, BITES),
    ("mofedsam", {"steps": "own"}, {}),
    ("fedacg", {"beta": 0.3}, BITES | MOMENTUM),
    ("fedntd", {}, BITES),
    ("fedntd", {"beta": 0.7, "temperature": 2.0, "weighting": "uniform"}, MOMENTUM),
    ("fedlc", {}, BITES),
    ("fedlc", {"tau": 0.5, "denominator": "others", "missing": "floor", "weighting": "uniform"}, {"lr": 0.02}),
    ("fedexp", {}, EVERYONE | {"epochs": 5, "lr": 0.5}),
    ("fedexp", {"eps": 1e-6, "weighting": "examples"}, {"epochs": 5, "lr": 0.5}),
    ("fedspeed", {}, BITES),
    ("fedspeed", {"alpha": 0.5, "normalise": False, "aggregation": "cohort"}, {}),
    ("fedsmoo", {}, BITES),
    ("fedsmoo", {"rho": 0.5, "alpha": 0.3, "upload": "mu"}, {}),
    ("fedlesam", {"rho": 0.5}, BITES),
    ("fedlesam", {"rho": 0.5, "first": "initial", "correction": "scaffold"}, {}),
    ("fedlesam", {"rho": 0.5, "old": "server", "correction": "feddyn"}, MOMENTUM),
    ("fedadamw", {}, {"clip_norm": 0.4, "lr": 0.02}),
    ("fedadamw", {"alpha": 0.3, "b1": 0.5, "blocks": "none"}, {"lr": 0.02}),
    ("feddecorr", {}, BITES | MOMENTUM),
    ("feddecorr", {"beta": 3.0, "scale": "correlation", "weighting": "uniform"}, {}),
    ("fedgamma", {}, BITES),
    ("fedgamma", {"rho": 0.5, "server_lr": 0.7}, MOMENTUM),
    ("mime", {}, BITES | SLOW),
    ("mime", {"beta": 0.6, "server_lr": 0.7, "damped": True, "weighting": "examples"}, {}),
    ("mimelite", {}, BITES | SLOW),
    ("mimelite", {"beta": 0.6, "server_lr": 0.7, "damped": True, "weighting": "examples"}, {}),
    ("adabest", {}, BITES | MOMENTUM),
    ("adabest", {"mu": 0.5, "beta": 0.7}, {}),
    ("fedswa", {}, BITES),
    ("fedswa", {"rho": 0.4, "alpha": 0.8}, {}),
    ("fedmoswa", {}, BITES),
    ("fedmoswa", {"rho": 0.4, "alpha": 0.8, "gamma": 0.6}, {}),
    ("ghbm", {"tau": 2}, BITES | MOMENTUM),
    ("ghbm", {"tau": 3, "beta": 0.6, "nesterov": True, "weighting": "uniform"}, BITES),
    ("localghbm", {}, BITES | MOMENTUM),
    ("localghbm", {"tau": 2.5, "beta": 0.6, "nesterov": True, "weighting": "uniform"}, BITES),
    ("fedhbm", {"tau": 4.0}, BITES | MOMENTUM),
    ("fedhbm", {"tau": 2.5, "beta": 0.6, "weighting": "uniform"}, {}),
    ("fedgmt", {}, BITES | MOMENTUM),
    ("fedgmt", {"gamma": 0.5, "temperature": 2.0, "alpha": 0.5, "beta": 3.0, "weighting": "examples"}, {}),
    ("fedgmt", {"aggregation": "cohort"}, {}),
    ("fedgmt", {"aggregation": "cohort", "weighting": "examples"}, BITES),
    ("fedsol", {}, BITES | MOMENTUM),
    ("fedsol", {"rho": 0.3, "temperature": 1.0, "adaptive": False, "weighting": "uniform"}, {}),
    ("qfedavg", {}, BITES | MOMENTUM),
    ("qfedavg", {"q": 3.0, "lipschitz": 2.0}, {}),
    ("agnostic", {"domains": 3}, BITES | MOMENTUM),
    ("agnostic", {"domains": 4, "window": 3, "scale": "batch", "counts0": (10.0, 20.0, 5.0, 0.0)}, {"clip_norm": 0.4}),
    ("agnostic", {"domains": 3, "update": "projection", "domain_lr": 0.3, "lambda0": (0.2, 0.7, 0.1)}, {}),
    ("agnostic", {"domains": 3, "update": "none", "scale": "batch", "lambda0": (0.0, 0.7, 0.3)}, {}),
    ("agnostic", {"domains": 2, "domain": sign_of_the_first_input, "window": 2}, {}),
    ("fedvarp", {}, BITES | MOMENTUM),
    ("fedvarp", {"server_lr": 0.7}, AWAY),
    ("mifa", {}, BITES | MOMENTUM),
    ("mifa", {"server_lr": 0.7}, AWAY),
    ("mifa", {}, {"cohorts": [range(6), *COHORTS]}),  # the first round of the paper
    ("fedau", {}, BITES | MOMENTUM),
    ("fedau", {"cutoff": 3, "server_lr": 0.7}, AWAY),
    ("fedau", {"cutoff": None}, AWAY),
    ("feddf", {"unlabelled": 11, "steps": 7, "lr": 0.05, "batch_size": 4}, BITES),
    ("feddf", {"unlabelled": 5, "steps": 3, "lr": 0.1, "seed": 3}, ADAM),
    ("fedproto", {"classes": CLASSES, "features": 4}, BITES | MOMENTUM),
    ("fedproto", {"classes": CLASSES, "features": 4, "lam": 3.0, "weighting": "uniform"}, {}),
    ("ditto", {"lam": 0.3}, BITES | MOMENTUM),
    ("ditto", {"personal_epochs": 3, "weighting": "uniform"}, {}),
    ("pfedme", {"lam": 3.0}, BITES),
    ("pfedme", {"lam": 2.0, "inner_steps": 2, "beta": 1.5, "inner_start": "local", "weighting": "examples"}, {}),
    ("apfl", {"alpha": 0.3}, BITES),
    ("apfl", {"adaptive": True, "alpha_decay": 0.02, "weighting": "examples"}, {}),
    ("apfl", {"adaptive": True, "alpha_every": "round"}, {}),
    ("partly_shared", {}, BITES | MOMENTUM),
    ("partly_shared", {"base": "scaffold"}, BITES),
    ("partly_shared", {"schedule": "alternate"}, BITES | MOMENTUM | {"epochs": 3}),
    ("partly_shared", {"base": "scaffold", "schedule": "alternate", "base_epochs": 2}, {"epochs": 3}),
    ("partly_shared", {"schedule": "frozen"}, BITES | MOMENTUM),
    ("partly_shared", {"new_clients": "mean"}, BITES),
    ("partly_shared", {"base": "scaffold", "new_clients": "mean", "schedule": "alternate"}, {"epochs": 2}),
    ("perfedavg", {"alpha": 0.1}, BITES | MOMENTUM),
    ("perfedavg", {"alpha": 0.3, "delta": None, "weighting": "examples"}, {}),
    ("perfedavg", {"alpha": 0.3, "variant": "first_order"}, BITES),
    ("perfedavg", {"alpha": 0.3, "batches": "same"}, {}),
    ("ifca", {"models": 3}, BITES | MOMENTUM),
    ("ifca", {"models": 2, "weighting": "examples", "server_lr": 0.7}, {}),
    ("hypcluster", {"models": 3, "server_lr": 0.7}, BITES),
]
LIMITS: list[Limit] = [
    *((name, arguments, BITES, "fedavg", {}) for name, arguments in (
        ("fedprox", {"mu": 0.0}), ("fedavgm", {"beta": 0.0}), ("fedntd", {"beta": 0.0}), ("fedlc", {"tau": 0.0}),
        ("feddecorr", {"beta": 0.0}), ("fedsol", {"rho": 0.0}), ("moon", {"mu": 0.0}), ("hypcluster", {"models": 1}),
        ("ghbm", {"beta": 0.0}), ("ghbm", {"tau": 10}), ("localghbm", {"beta": 0.0}), ("fedhbm", {"beta": 0.0}),
        ("agnostic", {"domains": 1, "domain": the_same, "scale": "batch"}), ("partly_shared", {"personal": nothing}),
        ("feddf", {"unlabelled": 11, "steps": 0}),
    )),
    *((name, arguments, BITES, "fedavg", UNIFORM) for name, arguments in (
        ("slowmo", {"beta": 0.0}), ("fedcm", {"alpha": 1.0}), ("fedsam", {"rho": 0.0}), ("fedexp", {"eps": 1e9}),
        ("fedlesam", {"rho": 0.0}), ("mimelite", {"beta": 0.0}), ("adabest", {"mu": 0.0, "beta": 0.0}),
        ("fedswa", {"rho": 1.0, "alpha": 1.0}), ("perfedavg", {"alpha": 0.0}), ("qfedavg", {"q": 0.0}),
        ("qfedavg", {"q": 0.0, "lipschitz": 3.0}), ("ifca", {"models": 1}), ("apfl", {"alpha": 0.0}),
    )),
    *((name, {"server_lr": 0.7}, BITES | EVERYONE, "fedavg", {"server_lr": 0.7, **UNIFORM}) for name in (
        "fedvarp", "mifa", "fedau",
    )),
    ("fedvarp", {}, FIRST, "fedavg", UNIFORM),
    ("fedau", {"cutoff": 1, "server_lr": 2.0}, BITES, "fedavg", UNIFORM),  # omega is 1, and N / |S| is 2
    ("fedswa", {"rho": 1.0, "alpha": 1.5}, BITES, "fedavg", {"server_lr": 1.5, **UNIFORM}),
    ("fednova", {}, EQUAL | MOMENTUM, "fedavg", {}),
    # The mean of linear models has the mean of their logits, so there is nothing to distil. With more steps, Adam
    # enlarges rounding errors of the gradient.
    ("feddf", {"unlabelled": 11, "steps": 1, **UNIFORM}, BITES, "fedavg", UNIFORM),
    ("moon", {"mu": 5.0}, FIRST, "fedavg", {}),
    ("moon", {"mu": 5.0, "first": "random_init"}, FIRST, "fedavg", {}),
    ("fedlesam", {"rho": 2.0}, FIRST, "fedavg", UNIFORM),
    ("constrained", {"mu": 0.3}, {}, "fedprox", {"mu": 0.3}),
    ("fedacg", {"beta": 0.3, "lam": 0.0}, BITES, "fedprox", {"mu": 0.3, **UNIFORM}),
    ("fedgm", {"mu": 0.3, "beta": 0.0, "scale": "one"}, BITES, "fedprox", {"mu": 0.3, **UNIFORM}),
    ("fedgvrgm", {"mu": 0.3, "beta": 0.0, "scale": "one", "window": 10}, BITES, "fedgvr", {"mu": 0.3, "window": 10}),
    ("fedgvr", {"mu": 0.0, "window": 10}, BITES, "scaffold", {}),
    ("fedgamma", {"rho": 0.0}, BITES, "scaffold", {}),
    ("fedgamma", {}, FIRST, "fedsam", {}),
    ("mofedsam", {"rho": 0.0}, BITES, "fedcm", {}),
    ("mofedsam", {"alpha": 1.0}, BITES, "fedsam", {}),
    ("fedcm", {"steps": "own"}, EQUAL, "fedcm", {}),
    ("fedadc", {"beta": 0.7, "gamma": 0}, BITES, "slowmo", {"beta": 0.7}),
    ("fedadc", {"beta": 0.7, "gamma": 0, "variant": "heavy_ball"}, BITES, "slowmo", {"beta": 0.7}),
    ("feddc", {"alpha": 0.2, "variate": "none"}, BITES, "feddyn", {"alpha": 0.2}),
    ("feddc", {"alpha": 0.1, "aggregation": "cohort"}, EVERYONE, "feddc", {"alpha": 0.1, "aggregation": "paper"}),
    ("feddc", {"alpha": 0.1, "aggregation": "paper"}, EVERYONE | EQUAL, "feddc", {"alpha": 0.1}),
    ("fedspeed", {"alpha": 0.0, "lam": 0.3}, BITES, "feddyn", {"alpha": 0.3}),
    ("fedspeed", {"aggregation": "cohort"}, EVERYONE, "fedspeed", {}),
    ("fedsmoo", {"rho": 0.0, "alpha": 0.3}, BITES, "feddyn", {"alpha": 0.3}),
    ("fedsmoo", {"alpha": 0.3}, ONE_STEP | FIRST, "fedspeed", {"lam": 0.3}),
    ("fedlesam", {"old": "server"}, EVERYONE, "fedlesam", {}),
    ("fedntd", {"beta": 3.0}, ONE_STEP, "fedavg", {}),
    ("fedsol", {"rho": 3.0}, ONE_STEP, "fedavg", {}),
    ("fedsol", {"rho": 3.0, "adaptive": False}, ONE_STEP, "fedavg", {}),
    ("fedacg", {"beta": 3.0, "lam": 0.5}, ONE_STEP, "fedacg", {"beta": 0.0, "lam": 0.5}),
    ("fedswa", {"rho": 0.1}, ONE_STEP, "fedavg", {"server_lr": 1.5, **UNIFORM}),
    ("fedmoswa", {}, FIRST, "fedswa", {}),
    ("fedmoswa", {"rho": 0.1}, ONE_STEP, "fedmoswa", {"rho": 1.0}),
    ("fedmoswa", {"rho": 1.0, "alpha": 1.0, "gamma": 1.0}, EVERYONE, "scaffold", {}),
    ("fedgmt", {"gamma": 0.0}, ONE_STEP, "feddyn", {"alpha": 0.1}),
    ("fedgmt", {"gamma": 2.0, "alpha": 0.0}, ONE_STEP, "feddyn", {"alpha": 0.1}),
    ("fedgmt", {"aggregation": "cohort"}, EVERYONE, "fedgmt", {}),
    ("fedgmt", {"weighting": "examples"}, EQUAL, "fedgmt", {}),
    ("localghbm", {"beta": 0.5}, EVERYONE, "ghbm", {"tau": 1, "beta": 0.5}),
    # One full-batch step of all clients is a step of the centralised heavy ball: m <- m / 2 + c, w <- w - eta m.
    ("mime", {"beta": 0.5}, EVERYONE | ONE_STEP | CONSTANT, "fedavgm", {"beta": 0.5, **UNIFORM}),
    ("mimelite", {"beta": 0.5}, EVERYONE | ONE_STEP | CONSTANT, "fedavgm", {"beta": 0.5, **UNIFORM}),
    ("mime", {"weighting": "examples"}, EQUAL, "mime", {}),
    # One client with one batch: c is the gradient of the batch at w.
    ("mime", {}, ONE_STEP | {"epochs": 3, "cohorts": [[3], [5], [2]]}, "mimelite", {}),
]  # fmt: skip
# The first case of each of these algorithms also runs in float32. Most of them lose more precision than others, because
# they compute variances, accuracies or differences of softmaxes.
DELICATE = ("fedavg", "fedadam", "fedeve", "fedgvrgm", "lfd", "moon", "fedreg", "fedntd", "fedsmoo", "fedadamw")
FLOAT32 = {case[0]: case for case in reversed(CASES) if case[0] in DELICATE}.values()


def case_id(algorithm: str, arguments: dict[str, Any], changes: dict[str, Any]) -> str:
    shown = arguments | changes | ({"optimizer": "adam"} if "optimizer" in changes else {})
    values = {name: getattr(value, "__name__", value) for name, value in shown.items()}
    return "-".join([algorithm, *(f"{name}={value}" for name, value in values.items())])
