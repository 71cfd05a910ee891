"""The papers' tables with our numbers beside theirs."""

from __future__ import annotations

from pathlib import Path

from fedjax_drift import experiment


def listing(place: Path) -> str:
    """The tables there are."""
    return "\n".join(experiment.names(place))
