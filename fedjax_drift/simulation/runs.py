"""The runs of a sweep, and the settings that they have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_drift import checks, reprs
from fedjax_drift.simulation.records import SHOWN
from fedjax_drift.types import Record, ServerState

Setting = dict[str, Any]


class Run(NamedTuple):
    """One run of a sweep."""

    seed: int
    setting: Setting  # the arguments of ``build``
    state: ServerState  # the state after the last round
    history: list[Record]
    algorithm: str = ""  # the name of the algorithm

    def __repr__(self) -> str:
        """Returns a short text without the arrays of the state, for notebooks, which show the value of the last
        line."""
        end = reprs.scores(self.history[-1] if self.history else {})
        setting = ", ".join(f"{name!r}: {reprs.short(value)}" for name, value in self.setting.items())
        setting = f", {{{setting}}}" if setting else ""
        return f"Run({self.algorithm}, seed {self.seed}{setting}: {end})"


class Runs(list[Run]):
    """The runs of a sweep: a list, which notebooks show as a table."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for run in self for name in run.setting))
        ends = [run.history[-1] if run.history else {} for run in self]
        metrics = [name for name in SHOWN if any(name in end for end in ends)]
        rows = []
        for run, last in zip(self, ends, strict=True):
            setting = [run.setting.get(name, "") for name in names]
            rows.append([run.algorithm, *setting, run.seed, *(last.get(name, "") for name in metrics)])
        header = ["algorithm", *names, "seed", *metrics]
        return reprs.html_table(header, rows, f"{len(self)} runs, the last round of each")


jax.tree_util.register_pytree_node(Runs, lambda runs: (list(runs), None), lambda _, items: Runs(items))


def grid(**values: Iterable[Any]) -> list[Setting]:
    """Returns all combinations of the values as a list of settings. The last name varies fastest.

    >>> grid(lr=[0.1, 0.3], mu=[0.0, 1.0])[:2]
    [{'lr': 0.1, 'mu': 0.0}, {'lr': 0.1, 'mu': 1.0}]
    """
    lists: dict[str, list[Any]] = {}
    for name, given in values.items():
        if not (listed := checks.items(given)):
            checks.refuse(
                f"{name} must be a list of one or more values", checks.shown(given), f"pass grid({name}=[...])"
            )
        lists[name] = listed
    return [dict(zip(lists, combination, strict=True)) for combination in itertools.product(*lists.values())]


def shown(setting: Mapping[str, Any]) -> str:
    """The text of a setting in a message after a comma, for example ``, lr=0.1``. An empty setting has no text."""
    return "".join(f", {name}={checks.shown(value)}" for name, value in setting.items())
