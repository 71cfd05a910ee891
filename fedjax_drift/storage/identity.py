"""Compares the identities of two runs: dicts with everything that their results depend on.

`simulation.description.identity` makes them. Two runs are the same if their identities are equal. Otherwise the
entries that differ show why. A difference in the entry `COMPUTATION` alone only causes a warning, because the change
may have no effect. It is compared if both runs have the same version of JAX and the same kind of device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COMPUTATION = "computation"  # the name of the entry with the checksum of the traced updates


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str]], bool]:
    """Returns the entries in which two identities differ, with both values as JSON, and whether only the code or
    captured values of functions have changed."""
    old, new = ({name: json.dumps(value) for name, value in side.items()} for side in (stored, current))
    for one, other in ((old, new), (new, old)):  # an option that one version lacks has its default, None, in the other
        for name in [name for name in one if one[name] == "null" and name not in other]:
            del one[name]
    before, now = (str(side.get(COMPUTATION, "")).rpartition(" ") for side in (stored, current))
    pairs = {name: (old.get(name, "nothing"), new.get(name, "nothing")) for name in {**new, **old}}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name != COMPUTATION}
    return pairs, not pairs and before[0] == now[0] and before[2] != now[2]


def few(items: list[str], most: int = 6) -> str:
    """Returns the first ``most`` items as text, with the number of the remaining items."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
