"""Loads a model and its history from the output folder of ``fedjax-drift run``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from fedjax_drift import checks, logs, reprs, spec
from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.model import Model
from fedjax_drift.models import MODELS, TRAINED
from fedjax_drift.models.pretrained import load_params
from fedjax_drift.spec import Fix, checked
from fedjax_drift.types import Params, Record

CONFIG, MODEL = "config.json", "model.npz"


class LoadedRun(NamedTuple):
    """One run of the command line."""

    algorithm: str  # as on the command line, for example "fedprox:mu=0.1"
    seed: int
    settings: dict[str, Any]  # the content of config.json: all settings of the run
    history: list[Record]
    model: Model
    params: Params  # the global model after the last round, for ``model.apply(params, x)``

    def __repr__(self) -> str:
        return reprs.fields(self)


def file_name(algorithm: str) -> str:
    """The name of an algorithm in file and folder names."""
    return "".join(c if c.isalnum() else "_" for c in algorithm)


def model_file(output: Path, algorithm: str, seed: int | None = None) -> Path:
    """The path of an algorithm's parameters. seed: needed if the run has several seeds, which have one file each."""
    folder = output / file_name(algorithm)
    return (folder if seed is None else folder / f"seed-{seed}") / MODEL


@checked
def load_run(
    folder: Annotated[str | os.PathLike[str], spec.GIVEN_PATH, Fix("the output folder of fedjax-drift run")],
    algorithm: str | None = None,
    seed: int | None = None,
) -> LoadedRun:
    """Loads the settings, history, model and parameters of a run of ``fedjax-drift run``.

    To train the model further in your own simulation, use ``state = sim.init(key, params=run.params)``. To resume the
    run itself, with its client states and cohorts, use ``fedjax-drift run --resume`` or `Checkpoints`.

    Args:
      folder: the output folder of the run.
      algorithm: one of the run's algorithms, as on the command line. Not needed if the run has only one algorithm.
      seed: one of the run's seeds. Not needed if the run has only one seed.

    Raises:
      ValueError: the folder is not the output folder of a run; ``algorithm`` or ``seed`` is missing although the run
        has several of them; the run does not have this algorithm or seed; or the algorithm has not finished.
    """
    folder = Path(folder)
    try:
        with files.opened(folder / CONFIG) as config:
            settings = json.loads(config.read())
            algorithms, seeds = list(map(str, settings["algorithms"])), list(map(int, settings["seeds"]))
            model = _made(MODELS, settings["model"])
    except (ValueError, FileNotFoundError) as error:
        checks.refuse(
            "folder must be the output folder of fedjax-drift run",
            f"{folder}, whose {CONFIG} can't be read",
            str(error),
            error,
        )
    if settings.get("train"):  # settings of earlier versions do not have it
        model = _with_base(model, settings, folder)
    algorithm = _chosen("algorithm", algorithm, algorithms, folder)
    seed = _chosen("seed", seed, seeds, folder)
    records = [record for record in logs.read(folder) if record.get("algorithm") == algorithm]
    history = [record for record in records if record.get("seed", seed) == seed]
    file = model_file(folder, algorithm, seed if len(seeds) > 1 else None)
    if not file.exists():
        raise ConfigurationError(
            f"{folder} has no {file.relative_to(folder)}, because the run of {algorithm} has not finished: use "
            f"fedjax-drift run --resume {folder}"
        )
    return LoadedRun(algorithm, seed, settings, history, model, load_params(model, file))


def _with_base(model: Model, settings: dict[str, Any], folder: Path) -> Model:
    """The model of which a part was trained. Its other parameters are in the file of --init."""
    part, init = settings["train"], settings["init"]
    base = None if init is None else load_params(model, init)
    model = _made(TRAINED, part, model, base=base, frozen_dtype=jnp.bfloat16 if settings["bfloat16"] else None)
    if model.frozen[0].checksum != part["base"]:
        checks.refuse(
            f"{init or 'the initial model'} must have the parameters with which the run in {folder} was started",
            f"others (checksum {model.frozen[0].checksum} instead of {part['base']})",
            "restore the file of --init",
        )
    return model


def _made(factories: dict[str, Any], settings: dict[str, Any], *arguments: Any, **more: Any) -> Model:
    """The model that the settings of a run describe."""
    options = {key: _tuples(value) for key, value in settings.items() if key not in ("name", "parameters", "base")}
    return factories[settings["name"]](*arguments, **options, **more)


def _chosen(name: str, value: Any, allowed: Sequence[Any], folder: Path) -> Any:
    """Returns the value, or the only allowed value if the value is None."""
    if value is None and len(allowed) == 1:
        return allowed[0]
    if value not in allowed:
        checks.refuse(f"{name} must be one of the {name}s of the run in {folder}, {checks.listed(allowed)}", value)
    return value


def _tuples(value: Any) -> Any:
    """Returns the value with tuples in place of lists, because JSON has no tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
