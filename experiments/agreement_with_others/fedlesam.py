"""FedLESAM (github.com/MediaBrain-SJTU/FedLESAM), by the authors of the algorithm.

Their servers and clients run unchanged. Their cohorts and the order of their examples are ours. The code builds on
FL-Simulator, and its other methods are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from federation import EQUAL, Federation, Row, compared, main, without
from fl_simulator import trained


def theirs(federation: Federation, method: str, **changes: Any) -> list[np.ndarray]:
    """The global model after every round of one of their methods."""
    without("torchvision", "torchvision.transforms", "torchvision.models", "torchvision.datasets")
    without("server.FedSpeed", "server.FedGAMMA")  # which the repository does not have
    import server.server

    return trained(federation, method, server.server, mode="normal", **changes)


def rows() -> Iterator[Row]:
    ragged = Federation(lr_decay=0.9, weight_decay=0.01)
    equal = Federation(sizes=EQUAL, lr_decay=0.9, weight_decay=0.01)
    server = {"rho": 0.1, "old": "server"}
    cause = (
        "Their optimizer takes the entries 0, 1, ... of the flat vector of the global update for its tensors, so each "
        "tensor of the perturbation is a single number, and it divides by the sum of the norms, plus 1e-7. With the "
        "tensors and the norm of all of them together, the two agree to {}, and without the 1e-7 to rounding."
    )

    def row(
        federation: Federation, method: str, optimizer: str, arguments: dict[str, Any], agree: str, **more: Any
    ) -> Row:
        lines = f"optimizer/{optimizer}.py#g_update[idx].norm", f"optimizer/{optimizer}.py#e_w=-g_update[idx]"
        lines = (*lines, f"server/{method}.py#self.comm_vecs['global_update']=", *more.pop("lines", ()))
        models = theirs(federation, method, **more.pop("changes", {}))
        away = cause.format(agree) + more.pop("cause", "")
        return compared(federation, "fedlesam", arguments, models, lines, cause=away, **more)

    yield row(ragged, "FedLESAM", "LESAM", server, "4e-9", default={"rho": 0.1})
    arguments = server | {"correction": "feddyn", "feddyn_alpha": 0.1}
    yield row(ragged, "FedLESAM_D", "LESAM_D", arguments, "3e-9", default={"rho": 0.1, "correction": "feddyn"})
    same = "lamb = 1; clients of equal size: their code takes the steps of client 0 for all"
    factor = " Their lamb, whose default is 0.1, multiplies the control variates."
    more = {"changes": {"lamb": 1.0}, "setting": same, "cause": factor, "lines": ("client/fedlesam_s.py#*lamb",)}
    arguments = server | {"correction": "scaffold"}
    yield row(equal, "FedLESAM_S", "LESAM_S", arguments, "6e-9", default={"rho": 0.1, "correction": "scaffold"}, **more)


if __name__ == "__main__":
    main(rows)
