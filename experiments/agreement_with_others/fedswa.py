"""FedSWA (github.com/junkangLiu0/FedSWA), by the authors of FedSWA and FedMoSWA.

Their script for images runs as that of FedAdamW does, in `fedadamw.py`. Its other methods are those of that script.
`update_FedMoSWA`, which the script never calls, is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fedadamw import theirs
from federation import EQUAL, Federation, Row, compared, difference, main

import fedjax_drift as fd

SCRIPT = "main_FedSWA"


def mended(federation: Federation) -> list[np.ndarray]:
    """Their models, if every client has a c_i of its own, and the first round is as the others."""
    script = sys.modules[SCRIPT]
    zeros = {name: torch.zeros_like(value) for name, value in script.model.named_parameters()}
    update, states = script.apply_weights_SCAF, {}

    class Worker(script.DataWorker):
        def state_ci_loader(self, index: int) -> None:
            self.ci = dict(states.get(index, zeros))

    changes: dict[str, Any] = {"c_dict": states, "DataWorker": Worker}
    changes |= {"apply_weights_SCAF": lambda N, results, model, m: update(N, results, model, m or dict(zeros))}
    return theirs(federation, "MoFedSWA", SCRIPT, **changes)


def rows() -> Iterator[Row]:
    fed = Federation(sizes=EQUAL, weight_decay=0.001, clip_norm=10.0)
    published = {"rho": 0.0, "alpha": 1.0}
    models = theirs(replace(fed, lr=fed.lr / 2), "FedSWA", SCRIPT)
    lines = (
        f"{SCRIPT}.py#def update_FedSWA",
        f"{SCRIPT}.py#lr=lr*2, weight_decay#2",
        f"{SCRIPT}.py#def apply_weights_avg(",
    )
    setting = "a learning rate of 0.2 is 0.1 there, which their optimizer doubles"
    yield compared(fed, "fedswa", published, models, lines, default={}, setting=setting)

    published = {"rho": 1.0, "alpha": 1.0, "gamma": 0.4}
    models = theirs(fed, "MoFedSWA", SCRIPT)
    lines = "def update_scafplus", "if not ci_dict.get(index)", "ps_c[k]=sum_c[k]", "+ sum_c[k] * 0.4"
    apart = difference(fed.run(fd.algorithms.fedmoswa(**published)), mended(fed))
    cause = (
        "Their learning rate is constant in a round. Their c_i is written to c_dict and read from ci_dict, which stays "
        "empty. So a worker has the c_i of the client that it trained last. In the first round, gamma is 1. With a c_i "
        f"for every client, and 0.4 in the first round, too, the two agree to {apart:.0e}."
    )
    where = tuple(f"{SCRIPT}.py#{line}" for line in lines)
    yield compared(fed, "fedmoswa", published, models, where, default={}, setting="their MoFedSWA", cause=cause)


if __name__ == "__main__":
    main(rows)
