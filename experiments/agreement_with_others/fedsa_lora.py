"""FedSA-LoRA (github.com/Pengxin-Guo/FedSA-LoRA), by the authors of FedSA-LoRA, on FederatedScope.

Their program runs unchanged. It needs the packages grpcio, pympler and wandb. The data and the network are ours, and a
batch has all examples of a client. With `share_local_model`, which their settings have, all clients of the simulation
have one model, so that B goes from a client to the next one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
import torch._dynamo  # before `without`, because it looks for packages
from federation import FULL, RAGGED, Federation, Row, as_vector, difference, main
from fedex_lora import ALPHA, RANK, network

import fedjax_drift as fd


def theirs(federation: Federation, adapters: Any, share: bool) -> list[np.ndarray]:
    """Every client's model after the last round. share: whether all clients have one model in the simulation."""
    os.environ.update(PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python", WANDB_MODE="disabled")
    from federatedscope.core.auxiliaries.runner_builder import get_runner
    from federatedscope.core.configs.config import global_cfg
    from federatedscope.core.data import ClientData
    from federatedscope.core.workers import Client, Server
    from federatedscope.register import register_model

    logging.disable(logging.CRITICAL)

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network(federation, adapters)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # as theirs: what is trained
            return {name: p.data for name, p in self.named_parameters() if p.requires_grad}

        def load_state_dict(self, state: Any, strict: bool = False) -> Any:
            return super().load_state_dict(state, strict=False)

    N = len(federation.sizes)
    register_model("ours", lambda config, shape: Adapted() if config.type == "ours" else None)
    config = global_cfg.clone()
    options = {
        "federate.mode": "standalone", "federate.client_num": N, "federate.sample_client_num": N,
        "federate.total_round_num": len(federation.cohorts), "federate.share_local_model": share,
        "federate.online_aggr": False, "federate.freeze_A": False, "personalization.local_param": ["lora_B"],
        "model.type": "ours", "trainer.type": "general", "data.type": "toy", "dataloader.batch_size": max(RAGGED),
        "dataloader.shuffle": False, "train.local_update_steps": federation.epochs, "train.batch_or_epoch": "epoch",
        "train.optimizer.type": "SGD", "train.optimizer.lr": federation.lr, "criterion.type": "CrossEntropyLoss",
        "use_gpu": False, "eval.freq": 1000, "eval.metrics": ["acc"], "eval.count_flops": False,
        "early_stop.patience": 0, "outdir": ".", "grad.grad_clip": -1.0, "wandb.use": False,
    }  # fmt: skip
    config.merge_from_list([part for option in options.items() for part in option])
    config.freeze(inform=False, save=False)
    data = {}
    for i, examples in enumerate(federation.clients, 1):
        own = torch.utils.data.TensorDataset(*map(torch.from_numpy, examples))
        data[i] = ClientData(config, train=own, val=own, test=own)
    runner = get_runner(data=data, server_class=Server, client_class=Client, config=config.clone())
    runner.run()
    A = {k: v for k, v in runner.server.models[0].named_parameters() if "lora_A" in k}
    models = []
    for i in range(N):
        model = runner.client[i + 1].trainer.ctx.model
        torch.nn.Module.load_state_dict(model, A, strict=False)
        layers = model.layers[0], model.layers[2]
        models.append(np.concatenate([leaf.ravel() for layer in layers for leaf in layer.merged()]))
    return models


def rows() -> Iterator[Row]:
    federation = Federation(cohorts=FULL, batch_size=max(RAGGED))
    model = fd.models.lora(federation.model, RANK, "kernel", alpha=ALPHA, base=federation.initial)
    sim, states = federation.states(fd.algorithms.fedsa_lora(), model=model)
    own = [sim.personal_params(states[-1], i) for i in range(len(federation.sizes))]
    ours = np.array([as_vector(fd.models.merge(model, params)) for params in own])
    adapters = sim.init(jax.random.key(federation.seed)).params
    lines = ("federatedscope/core/aggregators/clients_avg_aggregator.py#def _para_weighted_avg",)
    cause = "All clients have one model in their simulation, so a client starts with the B of the client before it."
    setting = "personal models; all examples in a batch"
    separate, shared = (difference(ours, theirs(federation, adapters, share)) for share in (False, True))
    yield Row("fedsa_lora()", separate, lines, f"{setting}; share_local_model=False")
    yield Row("fedsa_lora()", shared, lines, setting, None, cause)


if __name__ == "__main__":
    main(rows)
