"""pFedMe (github.com/CharlieDinh/pFedMe), by the authors of the algorithm.

Their servers, users and optimizer run unchanged. Their cohorts and the order of their examples are ours. As in their
code, all users of pFedMe train in every round. A user does as many steps as it has batches in two epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from federation import FULL, Federation, Row, compared, difference, main, vector, without, written

import fedjax_drift as fd

PFEDME = {"lam": 15.0, "inner_steps": 5, "inner_lr": 0.09, "beta": 0.7}


def theirs(federation: Federation, method: str) -> tuple[list[np.ndarray], np.ndarray | None]:
    """The global model after every round, and the models that they evaluate as the personal ones of the last round."""
    without("torchvision", "torchvision.transforms")
    import FLAlgorithms.servers.serveravg as average
    import FLAlgorithms.servers.serverpFedMe as envelopes

    module = {"FedAvg": average, "pFedMe": envelopes}[method]
    cohorts, models, personal = iter(federation.cohorts), [], []
    data = [list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True)) for x, y in federation.clients]

    class Server(getattr(module, method)):
        def send_parameters(self) -> None:
            super().send_parameters()
            for i in federation.cohorts[len(models)]:
                batches = federation.batches(len(models), i)
                self.users[i].iter_trainloader, self.users[i].local_epochs = iter(batches), len(batches)

        def select_users(self, *_: int) -> list[Any]:
            return [self.users[i] for i in next(cohorts)]

        def evaluate_personalized_model(self) -> None:
            super().evaluate_personalized_model()
            personal.append([vector(user.persionalized_model_bar) for user in self.users])

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            models.append(vector(self.model))

        def persionalized_aggregate_parameters(self) -> None:
            super().persionalized_aggregate_parameters()
            models.append(vector(self.model))

        def save_results(self) -> None: ...

        def save_model(self) -> None: ...

    own = {} if method == "FedAvg" else {"K": PFEDME["inner_steps"], "personal_learning_rate": PFEDME["inner_lr"]}
    options = {"batch_size": federation.batch_size, "learning_rate": federation.lr, "beta": PFEDME["beta"]}
    options |= {"lamda": PFEDME["lam"], "num_glob_iters": len(federation.cohorts), "local_epochs": 1, "times": 0}
    users = {"num_users": len(federation.cohorts[0]), "optimizer": "SGD"}
    read = patch.multiple(module, read_data=lambda _: [data], read_user_data=lambda i, *_: (str(i), data[i], data[i]))
    model = federation.network(), "Mclr_CrossEntropy"
    with read:
        Server("cpu", "Mnist", method, model, **options, **users, **own).train()
    return models, np.array(personal[-1]) if personal else None


def rows() -> Iterator[Row]:
    partial = Federation(lr=0.01, weight_decay=0.001)  # the mu of their optimizer
    full = Federation(lr=0.01, weight_decay=0.001, cohorts=FULL)
    examples = {"weighting": "examples"}
    update = "FLAlgorithms/users/userpFedMe.py#def train", "FLAlgorithms/servers/serverbase.py#def persionalized_agg"
    mu = "weight_decay=0.001, which is mu = 0.001 in their optimizer"
    weights = "FLAlgorithms/servers/serverbase.py#user.train_samples / total_train#2"
    decay = "FLAlgorithms/optimizers/fedoptimizer.py#group['mu']"
    cause = (
        "Their optimizer adds mu = 0.001 times the model in (1), which is not in the paper, and their server "
        "weights clients by n_i; the line with the paper's weights is commented out."
    )
    models, _ = theirs(partial, "pFedMe")
    arguments = PFEDME | examples
    yield compared(
        partial, "pfedme", arguments, models, (*update, weights, decay), default=PFEDME, setting=mu, cause=cause
    )

    _, personal = theirs(full, "pFedMe")
    ours = full.personal(fd.algorithms.pfedme(**arguments))
    cause = (
        "Their optimizer returns its live parameters as the personal model, and these get w_i after the last batch, so "
        "their personal accuracy is that of w_i. Ours is that of x, as in the paper. With copies of the parameters, "
        "the two agree to 2e-16."
    )
    alias = "FLAlgorithms/optimizers/fedoptimizer.py#return  group['params'], loss"
    overwritten = "FLAlgorithms/users/userpFedMe.py#self.update_parameters(self.local_model)"
    setting = f"personal models; all clients in the cohort; {mu}"
    yield Row(
        written("pfedme", arguments), difference(ours, personal), (alias, overwritten), setting=setting, cause=cause
    )

    plain = Federation(lr=0.1)
    models, _ = theirs(plain, "FedAvg")
    lines = "FLAlgorithms/users/useravg.py#def train", "FLAlgorithms/servers/serverbase.py#def aggregate_parameters"
    yield compared(plain, "fedavg", {}, models, lines)


if __name__ == "__main__":
    main(rows)
