"""What command lines of `fedjax-drift run` mean: their settings, and what their results depend on.

python tests/command_lines.py          prints those of command_lines.txt whose meaning has changed
python tests/command_lines.py --write  writes what the lines of the file mean now
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import fedjax_drift as fd
from fedjax_drift.storage.identity import COMPUTATION

FILE = Path(__file__).with_name("command_lines.txt")
ELSEWHERE = ("source", "lanes", "devices", "processes", "versions")  # settings that depend on the machine


def recorded() -> list[tuple[str, str]]:
    """The checksums and the lines of the file."""
    return [(line[:12], line[13:]) for line in FILE.read_text().splitlines()]


def meaning(words: str) -> str:
    """A checksum of all settings of a command line, and of the identity of its simulations."""
    run = fd.parse_run(words)
    settings = {name: value for name, value in run.config.items() if name not in ELSEWHERE}
    if settings["train"]:
        del settings["train"]["base"]  # a checksum of random parameters, which depend on XLA's options
    what = {
        "config": settings,
        "identities": {name: _plain(sim.specification.identity) for name, sim in run.simulations.items()},
        "rounds": [run.rounds, run.eval_every, run.measure_every, run.seed],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _plain(identity: dict[str, Any]) -> dict[str, Any]:
    """The entries without checksums of arrays and names of other packages. (The settings have the model.)"""
    left_out = (COMPUTATION, "model", "local.optimizer")
    kept = {k: v for k, v in identity.items() if not k.startswith(left_out)}
    return {k: v.partition(", crc32")[0] if isinstance(v, str) else v for k, v in kept.items()}


def changed(step: int = 1) -> list[str]:
    """The lines whose meaning has changed, of every ``step``-th."""
    return [words for known, words in recorded()[::step] if meaning(words) != known]


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text("".join(f"{meaning(words)} {words}\n" for _, words in recorded()))
    else:
        print(*changed(), sep="\n")
