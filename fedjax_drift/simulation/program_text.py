"""Reads the text of a compiled program (HLO): its collective operations, and XLA's estimates of cycles on a TPU."""

from __future__ import annotations

import re
from collections import Counter

NO_ESTIMATE = 2**63 - 1  # libtpu 0.0.50 writes this for lookups in embeddings on a v6e
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(text: str) -> dict[str, int]:
    """How often each kind of collective operation occurs."""
    return dict(Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)))


def estimated_cycles(text: str) -> list[int]:
    """XLA's estimate of cycles for each operation that has one."""
    numbers = map(int, re.findall(r'estimated_cycles":"?(\d+)', text))
    return [cycles for cycles in numbers if cycles < NO_ESTIMATE]


def cycles_of_loop(text: str, depth: int) -> int:
    """The estimated cycles of one iteration of the costliest loop with gradients. 0 if there are no estimates.

    depth: 0 for loops that are not inside of another one, 1 for those inside of the costliest of these, and so on. If
      there are fewer nested loops, the innermost one counts. Loops inside of the loop count with one iteration.
    """
    alone, inside, gradients, entry = {}, {}, set(), ""
    for header, body in re.findall(r"(?m)^((?:ENTRY )?%?[\w.-]+) \(.*\{\n((?:.*\n)*?)\}", text):
        name = header.removeprefix("ENTRY ").removeprefix("%")
        entry = name if header.startswith("ENTRY ") else entry
        alone[name] = sum(estimated_cycles(body))
        inside[name] = re.findall(r" while\(.*body=%?([\w.-]+)", body)
        if "transpose(jvp(" in body:  # in the names of operations of a backward pass
            gradients.add(name)

    def cycles(name: str) -> int:
        return alone.get(name, 0) + sum(map(cycles, inside.get(name, [])))

    def trains(name: str) -> bool:
        return name in gradients or any(map(trains, inside.get(name, [])))

    loop = entry
    for _ in range(depth + 1):
        loop = max(filter(trains, inside.get(loop, [])), key=cycles, default=loop)
    return 0 if loop == entry else cycles(loop)
