"""Calls the public functions with invalid arguments, and counts the calls that do not raise the right error.

    python experiments/benchmarks/wrong_calls.py [--calls 10500] [--seed 0]

tests/abuse.py generates the calls. A family is a group of calls of similar functions. A call is counted if it raises an
internal error, if it accepts an invalid value, if it rejects a valid value, or if it hangs. The tests of the project
make 80 calls per family.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import measure

sys.path.insert(0, str(measure.HERE.parents[1] / "tests"))
import abuse


def rows(arguments: argparse.Namespace) -> Iterator[measure.Row]:
    for family in abuse.FAMILIES:
        each = arguments.calls // len(abuse.FAMILIES)
        outcomes = list(abuse.abused(family, each, arguments.seed))
        counts = Counter(outcome.wrong for outcome in outcomes)
        for outcome in {outcome.call.partition("=")[0]: outcome for outcome in outcomes if outcome.wrong}.values():
            print(str(outcome)[:300], flush=True)
        found = ", ".join(f"{count} {wrong}" for wrong, count in counts.items() if wrong)
        yield measure.row(f"{family}, {each} calls", each - counts[""], "wrong", at_most=0, note=found)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--calls", type=int, default=10_500, help="total number of calls")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.calls = 5 * len(abuse.FAMILIES)
    measure.save("wrong_calls", rows(arguments), arguments)


if __name__ == "__main__":
    main()
