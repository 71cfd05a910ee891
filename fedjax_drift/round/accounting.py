"""What the privacy accounting of trees over the rounds needs to know of the participation."""

from __future__ import annotations

import numpy as np

from fedjax_drift import checks
from fedjax_drift.participation import Participation, cyclic, schedule
from fedjax_drift.participation.cohorts import short_name


def trees_of_a_client(participation: Participation, N: int, rounds: int, R: int) -> int:
    """The largest number of trees of R rounds in which one of N clients takes part.

    Raises ConfigurationError unless each client takes part at most once in a tree, and the selection does not depend on
    the clients' data, as that of `power_of_choice` does.
    """
    recipe, factory = participation.recipe, None
    if recipe is not None and not recipe.replaced(participation):
        factory, arguments = recipe.factory, recipe.arguments
    if factory is cyclic and arguments["groups"] >= R and (arguments["base"] is None or short_name(arguments["base"])):
        return -(-rounds // int(arguments["groups"]))  # a group is available in every G-th round
    if factory is schedule:
        ids, trees = np.asarray(arguments["ids"]), np.zeros(N, int)
        for first in range(0, rounds, R):
            rows = ids[np.arange(first, min(first + R, rounds)) % len(ids)]
            times = np.bincount(np.concatenate([np.unique(row) for row in rows]), minlength=N)[:N]  # N: an unused entry
            trees += times
            if times.max() > 1:
                break
        else:
            return int(trees.max())
    what = f"the accounting of private_ftrl needs each client at most once in {R} rounds"
    fix = f"pass fd.participation.cyclic(groups={R}) without a base, or a schedule without repetitions"
    checks.refuse(what, repr(participation), fix)
