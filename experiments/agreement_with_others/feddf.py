"""FedDF (github.com/epfml/federated-learning-public-code), by the authors of FedDF.

Their solver distils the models of the clients, which a plain loop has trained, into the mean model. It runs unchanged,
on our batches of the unlabelled examples. It returns the best model on a validation set, so every model is better than
the one before. The norms of its gradients stay below 5, at which it clips.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from federation import FEATURES, Federation, Network, Row, difference, main, vector, without, written

import fedjax_drift as fd
from fedjax_drift.types import THREEFRY

UNLABELLED = np.random.default_rng(5).normal(size=(18, FEATURES))
STEPS, BATCH, LR = 7, 4, 0.01


class WithActivations(Network):
    activations = ()


def theirs(federation: Federation) -> list[np.ndarray]:
    """The global model after every round."""
    sys.path.insert(0, f"{sys.path[0]}/codes/FedDF-code")
    without("torchvision", "torchvision.utils", "pcode.master_utils")
    module: Any = importlib.import_module("pcode.aggregation.noise_knowledge_transfer")
    conf = SimpleNamespace(graph=SimpleNamespace(on_cuda=False), fl_aggregate={})

    class Solver(module.NoiseKTSolver):
        validations = 0

        def validate(self, **_: Any) -> dict[str, float]:
            self.validations += 1
            return {"top1": float(self.validations)}

    student: Any = federation.network()
    student.__class__ = WithActivations
    models = []
    for t, cohort in enumerate(federation.cohorts):
        teachers = [federation.trained(student, t, i) for i in cohort]
        with torch.no_grad():
            for parameter, *own in zip(student.parameters(), *(m.parameters() for m in teachers), strict=True):
                parameter.copy_(torch.stack(own).mean(0))
        solver = Solver(
            conf, teachers, student, None, None, BATCH, STEPS, distillation_data_loader=batches(t),
            student_learning_rate=LR, eval_batches_freq=1, log_fn=lambda text: None, update_student_scheme="avg_logits",
        )  # fmt: skip
        solver.distillation()
        student = solver.server_student
        models.append(vector(student))
    return models


def batches(t: int) -> list[tuple[torch.Tensor]]:
    """Our batches of round t, over which their iterator starts again after the last one."""
    key = jax.random.fold_in(jax.random.key(0, impl=THREEFRY), t)
    order = np.asarray(jax.random.permutation(key, len(UNLABELLED)))
    x = torch.from_numpy(UNLABELLED)
    return [(x[order[k : k + BATCH]],) for k in range(0, len(UNLABELLED) - BATCH + 1, BATCH)]


def rows() -> Iterator[Row]:
    federation = Federation()
    arguments = {"steps": STEPS, "lr": LR, "batch_size": BATCH, "weighting": "uniform"}
    ours = federation.run(fd.algorithms.feddf(UNLABELLED, **arguments))
    path = "codes/FedDF-code/pcode/aggregation/noise_knowledge_transfer.py"
    lines = tuple(f"{path}#{line}" for line in ("def distillation", 'elif update_student_scheme == "avg_logits"'))
    called = written("feddf", arguments).replace("(", "(unlabelled, ")
    yield Row(called, difference(ours, theirs(federation)), lines, 'update_student_scheme="avg_logits"')


if __name__ == "__main__":
    main(rows)
