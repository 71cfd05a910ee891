"""FedDC (github.com/gaoliang13/FedDC), by the authors of FedDC.

Its functions run in float64, as those of FedDyn in `feddyn.py`. They clip at norm 10. The data, the cohorts and the
order of the examples are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from feddyn import SAME_STEPS, load, theirs
from federation import Federation, Row, compared, main, without


def rows() -> Iterator[Row]:
    without("tensorboardX", "torch.utils.tensorboard")
    load("utils_general", "utils_methods", "utils_methods_FedDC")
    ragged = Federation(lr_decay=0.9, weight_decay=1e-3, clip_norm=10.0)
    same = Federation(lr_decay=0.9, weight_decay=1e-3, clip_norm=10.0, sizes=SAME_STEPS)
    equal = Federation(lr_decay=0.9, weight_decay=1e-3, clip_norm=10.0, sizes=(16,) * 6)

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
    mean = ragged.epochs * -(-sum(ragged.sizes) // len(ragged.sizes) // ragged.batch_size)
    changes = {"alpha_coef": 0.1, "n_minibatch": mean}
    yield row(ragged, "FedDC", alpha | options, lines, 1, default=alpha, changes=changes)
    lines = (
        "utils_methods.py#alpha_coef_adpt = ",
        "utils_methods.py#hist_params_diffs[clnt] +=",
        "utils_general.py#loss_algo = alpha_coef",
    )
    scaled = alpha | {"scale_by_size": True}
    yield row(ragged, "FedDyn", scaled, lines, 1, default=alpha, changes={"alpha_coef": 0.1})
    yield row(ragged, "FedAvg", {}, ("utils_methods.py#avg_model = set_client_from_params(model_func(), np.sum",))
    cause = "Their penalty is 1e-4 ||theta - w||^2, whatever mu is."
    yield row(
        ragged, "FedProx", {"mu": 2e-4}, ("utils_general.py#loss_algo = 0.0001",), changes={"mu": 1e-4}, cause=cause
    )
    lines = "utils_methods.py#state_params_diff_curr =", "utils_methods.py#new_c ="
    scaled, options = {"scale_by_size": True, "variate_lr": "initial"}, {"changes": {"n_minibatch": 8}}
    number = "as many batches for all clients, because their code takes the same number of steps for all"
    yield row(
        equal, "SCAFFOLD", {"variate_lr": "initial"}, lines, setting="clients of equal size", default={}, **options
    )
    cause = "Their c_i+ subtracts c, and ours c / q_i, as in the step. With c the two agree to 3e-16."
    yield row(same, "SCAFFOLD", scaled, lines, setting=number, cause=cause, **options)


if __name__ == "__main__":
    main(rows)
