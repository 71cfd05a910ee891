"""FedDC (github.com/gaoliang13/FedDC), by the authors of FedDC.

Its functions run in float64, as those of FedDyn in `feddyn.py`. They clip at norm 10. The data, the cohorts and the
order of the examples are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from feddyn import RAGGED, load, scaffold_rows, theirs
from federation import Federation, Row, compared, main, without


def rows() -> Iterator[Row]:
    without("tensorboardX", "torch.utils.tensorboard")
    load("utils_general", "utils_methods", "utils_methods_FedDC")

    def row(federation: Federation, function: str, arguments: dict, lines: tuple, index: int = 0, **more: Any) -> Row:
        changes = {"sch_step": 1, "sch_gamma": 1} | more.pop("changes", {})
        module = "utils_methods_FedDC" if function == "FedDC" else "utils_methods"
        made = theirs(federation, module, f"train_{function}", index, **changes)
        return compared(federation, function.lower(), arguments, made, lines, **more)

    alpha = {"alpha": 0.1}
    path = "utils_methods_FedDC.py"
    lines = (
        f"{path}#parameter_drifts[clnt] +=",
        f"{path}#state_g =",
        f"{path}#cld_mdl_param = avg",
        "utils_general.py#loss_cp =",
    )
    options = {"scale_by_size": True, "variate_lr": "initial", "variate_steps": "mean"}
    mean = RAGGED.epochs * -(-sum(RAGGED.sizes) // len(RAGGED.sizes) // RAGGED.batch_size)
    changes = {"alpha_coef": 0.1, "n_minibatch": mean}
    yield row(RAGGED, "FedDC", alpha | options, lines, 1, default=alpha, changes=changes)
    lines = (
        "utils_methods.py#alpha_coef_adpt = ",
        "utils_methods.py#hist_params_diffs[clnt] +=",
        "utils_general.py#loss_algo = alpha_coef",
    )
    scaled = alpha | {"scale_by_size": True}
    yield row(RAGGED, "FedDyn", scaled, lines, 1, default=alpha, changes={"alpha_coef": 0.1})
    yield row(RAGGED, "FedAvg", {}, ("utils_methods.py#avg_model = set_client_from_params(model_func(), np.sum",))
    cause = "Their penalty is 1e-4 ||theta - w||^2, whatever mu is."
    yield row(
        RAGGED, "FedProx", {"mu": 2e-4}, ("utils_general.py#loss_algo = 0.0001",), changes={"mu": 1e-4}, cause=cause
    )
    yield from scaffold_rows(row)


if __name__ == "__main__":
    main(rows)
