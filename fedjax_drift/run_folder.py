"""The folder that `fedjax-drift run` leaves, and what it trained, taken out of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_drift import checks, logs
from fedjax_drift.data import files
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.models import MODELS
from fedjax_drift.models.pretrained import load_params
from fedjax_drift.types import Model, Params, Record

CONFIG, MODEL = "config.json", "model.npz"


class LoadedRun(NamedTuple):
    """One run of the command line."""

    algorithm: str  # as it was written, "fedprox:mu=0.1"
    seed: int
    settings: dict[str, Any]  # config.json: all that was set
    history: list[Record]
    model: Model
    params: Params  # the global model at the end, for ``model.apply(params, x)``


def file_name(algorithm: str) -> str:
    """What an algorithm is called where it has a file or a folder."""
    return "".join(c if c.isalnum() else "_" for c in algorithm)


def model_file(output: Path, algorithm: str, seed: int | None = None) -> Path:
    """Where an algorithm's parameters are; of several seeds, each has its own."""
    folder = output / file_name(algorithm)
    return (folder if seed is None else folder / f"seed-{seed}") / MODEL


def load_run(folder: str | os.PathLike[str], algorithm: str | None = None, seed: int | None = None) -> LoadedRun:
    """What `fedjax-drift run` has trained: its settings, history, model and parameters.

    ``state = sim.init(key, params=run.params)`` goes on from the model with anything else; to go on with the run
    itself, with its states and cohorts, use ``fedjax-drift run --resume`` or `Checkpoints`.

    Args:
      folder: the run's output folder.
      algorithm: one of those that it ran, as it was written; may be left out if there is one.
      seed: one of those that it ran; may be left out if there is one.

    Raises:
      ValueError: a folder that is none of a run's; several algorithms or seeds, and none is chosen; one that has not
        come to its end.
    """
    folder = checks.path("folder", folder, "the output folder of fedjax-drift run")
    try:
        with files.opened(folder / CONFIG) as config:
            settings = json.loads(config.read())
            algorithms, seeds = list(map(str, settings["algorithms"])), list(map(int, settings["seeds"]))
            options = {key: _tuples(value) for key, value in settings["model"].items() if key != "parameters"}
            model = MODELS[options.pop("name")](**options)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigurationError(
            f"folder must be the output folder of fedjax-drift run, got {folder}, whose {CONFIG} can't be read "
            f"({error})"
        ) from error
    algorithm = _chosen("algorithm", algorithm, algorithms, folder)
    seed = _chosen("seed", seed, seeds, folder)
    records = [record for record in logs.read(folder) if record.get("algorithm") == algorithm]
    history = [record for record in records if record.get("seed", seed) == seed]
    file = model_file(folder, algorithm, seed if len(seeds) > 1 else None)
    if not file.exists():
        raise ConfigurationError(
            f"{folder} has no {file.relative_to(folder)}, as {algorithm} has not come to its end there: "
            f"fedjax-drift run --resume {folder}"
        )
    return LoadedRun(algorithm, seed, settings, history, model, load_params(model, file))


def _chosen(what: str, value: Any, known: Sequence[Any], folder: Path) -> Any:
    """The value, or the only one there is."""
    if value is None and len(known) == 1:
        return known[0]
    if value not in known:
        raise ConfigurationError(
            f"{what} must be one of those that {folder} has, {', '.join(map(str, known))}, got {value}"
        )
    return value


def _tuples(value: Any) -> Any:
    """As it was before it was JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
