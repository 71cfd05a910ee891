"""Makes the record and the warnings of a round from its ``info``. `Simulation.run` returns the records as history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_drift import reprs
from fedjax_drift.simulation.setup import Setup
from fedjax_drift.types import Record

SUMMARISED = ("cohort", "size", "weight", "finite", "loss", "lr", "steps", "executed_steps", "client_steps",
              "bad_leaf", "selected", "uplink_bytes", "downlink_bytes")  # fmt: skip
"""Entries of ``info`` that `record` summarises or leaves out. All other entries go into the record."""
NOT_OF_CLIENTS = ("label_mix", "matrix_drift", "sharpness")  # arrays in ``info`` that have no axis of clients
SHOWN = ("round", "clients", "train_loss", "loss", "accuracy")  # entries of records that notebooks show


class History(list[Record]):
    """The records of a run, one per round: a list, which is shown by its length and its last record.

    As a pytree it is a list, too.
    """

    def __repr__(self) -> str:
        return f"History({len(self)} records: {reprs.scores(self[-1])})" if self else "History()"

    def _repr_html_(self) -> str:
        """A table of the last ten records with scores, or of the last ten records if none has scores."""
        scored = [entry for entry in self if "loss" in entry] or self
        names = [name for name in SHOWN if any(name in entry for entry in scored)]
        rows = [[entry.get(name, "") for name in names] for entry in scored[-10:]]
        what = f"{len(self)} records" + (f", the last {len(rows)} evaluations" if len(rows) < len(self) else "")
        return reprs.html_table(names, rows, what)


jax.tree_util.register_pytree_node(History, lambda history: (list(history), None), lambda _, items: History(items))


def record(done: int, info: dict[str, np.ndarray]) -> Record:
    """Returns the record after ``done`` rounds: Python numbers.

    - ``round``: the number of completed rounds. ``seconds``: the duration of the round.
    - ``clients``: the number of aggregated clients.
    - ``train_loss``: the mean of ``loss`` over the aggregated clients, weighted by their numbers of examples.
    - ``lr``, ``steps``, ``executed_steps``, ``executed_ratio``, ``time``, ``too_stale``: as in `Info`.
    - ``uplink_bytes``, ``downlink_bytes``: the sums over the clients of the round.
    - The results of `Simulation.evaluate`, if the model was evaluated after this round.
    - The metrics of the algorithm and the drift measures. A scalar is stored as it is, and of a value per client the
      mean over the cohort. A measure with one value per local epoch is a list of length E.
    """
    counted = info["weight"] != 0  # the aggregated clients
    sizes = np.where(counted, info["size"], 0)
    selected = info.get("selected", info["cohort"]) >= 0
    loss = {}
    if "loss" in info:
        share = sizes / sizes.sum() if counted.any() else np.full(len(sizes), np.nan)
        loss["train_loss"] = float(np.where(counted, info["loss"], 0) @ share)
    return {
        "round": done,
        **loss,
        "clients": int(counted.sum()),
        "lr": float(str(info["lr"])),  # the shortest decimal number with the same float32 value
        "steps": int(info["steps"]),
        "executed_steps": int(info["executed_steps"]),
        "uplink_bytes": float(info["uplink_bytes"].sum(dtype=float)),
        "downlink_bytes": float(info["downlink_bytes"]) * int(selected.sum()),
        **{name: _recorded(name, value, counted) for name, value in info.items() if name not in SUMMARISED},
    }


def _recorded(name: str, value: np.ndarray, counted: np.ndarray) -> float | list[float]:
    """Returns a scalar unchanged, and values per client as their mean over the cohort, as Python numbers for JSON."""
    if value.ndim and name not in NOT_OF_CLIENTS:
        value = value[counted]
        known = ~np.isnan(value)
        value = np.where(known, value, 0).sum(0) / np.maximum(known.sum(0), 1) + np.where(known.any(0), 0, np.nan)
    return value.tolist()


def complaints(t: int, info: Mapping[str, Any], entry: Record, setup: Setup) -> dict[str, str]:
    """Returns the warnings about round t, as a dict from the kind of a warning to its text."""
    warnings = {}
    if not info["finite"].all():
        warnings["not finite"] = nonfinite_message(t, info, setup)
    elif not np.isfinite(entry.get("loss", 0.0)):
        warnings["test loss"] = f"round {t}: {loss_message(entry['loss'])}"
    if not entry["clients"]:
        warnings["nobody"] = f"round {t}: no client reported, so there is nothing to average"
    return warnings


def loss_message(got: object) -> str:
    """Returns the message about a test loss that is not finite."""
    return (
        f"the test loss must be finite, got {got}: lower lr or set clip_norm, start from an earlier state, and check "
        "that Model.loss accepts the labels"
    )


def nonfinite_message(t: int, info: Mapping[str, Any], setup: Setup) -> str:
    """Returns a message with the clients of round t whose updates are not finite, each with its first bad leaf."""
    cohort, bad_leaf = np.asarray(info["cohort"]), np.asarray(info["bad_leaf"])
    names, bad = setup.update_leaves(), np.flatnonzero(bad_leaf >= 0)
    some = ", ".join(f"client {cohort[k]} in {names[bad_leaf[k]]}" for k in bad[:5]) + (", ..." if len(bad) > 5 else "")
    fix = 'lower lr, set clip_norm, or pass on_nonfinite="drop_client"'
    if all(names[bad_leaf[k]].startswith("metrics") for k in bad):
        fix = "the updates are finite, so check that Model.loss accepts these labels and inputs"
    elif setup.data.x.dtype.kind in "iu" and setup.data.x.dtype != np.uint8 and setup.model.vocabulary is None:
        fix += "; if the inputs are token ids, check that the model has a row for each (Model.vocabulary does)"
    return f"round {t}: {len(bad)} of {len(bad_leaf)} client updates are not finite ({some}): {fix}"
