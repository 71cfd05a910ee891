"""A small federation in float64 that our library and the code of others train on.

Both start from the same model, train the same cohorts, and read each client's examples in the same order. What then
remains between the two is rounding, or a difference between the algorithms.

    fed = Federation()                       # six clients with 5 to 25 examples, a cohort of three
    ours = fed.run(fd.algorithms.fedavg())   # the global model [P] after each round
    fed.batches(t, i)                        # the batches of client i in round t, as torch tensors
    fed.network()                            # the initial model as a torch.nn.Module
    fed.vector(fed.network())                # its parameters in the order of `ours`
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import fedjax_drift as fd

jax.config.update("jax_enable_x64", True)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

FEATURES, HIDDEN, CLASSES = 6, 5, 4
RAGGED = (10, 25, 7, 5, 16, 13)
EQUAL = (12,) * 6
PARTIAL = ((5, 1, 4), (0, 3, 2), (3, 1, 0), (4, 2, 5), (1, 3, 5), (0, 4, 3))
FULL = (tuple(range(6)),) * 4


class Network(nn.Module):
    """Two dense layers with a tanh between them. ``head`` is the classifier, ``base`` the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


def as_vector(params: Any) -> np.ndarray:
    """Our parameters as one vector, in the order of ``Network().parameters()``."""
    base, classifier = params["base"], params["classifier"]
    kernels = [base["kernel"].T, base["bias"], classifier["kernel"].T, classifier["bias"]]
    return np.concatenate([np.asarray(leaf).ravel() for leaf in kernels])


@dataclass(frozen=True)
class Federation:
    """The data, the cohorts and the local training. Its fields are those of `fd.LocalTraining` and `fd.Simulation`.

    Every client has at least two classes, and no client has all of them in equal parts. ``cohorts`` lists the client
    ids of each round.
    """

    sizes: tuple[int, ...] = RAGGED
    cohorts: tuple[tuple[int, ...], ...] = PARTIAL
    epochs: int = 2
    batch_size: int = 4
    lr: float = 0.2
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    seed: int = 0
    shuffles: int = 1  # of the examples in an epoch; `perfedavg` has three

    @functools.cached_property
    def clients(self) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(self.seed)
        centres = rng.normal(size=(CLASSES, FEATURES))
        clients = []
        for i, n in enumerate(self.sizes):
            common = np.array([i, i + 1]) % CLASSES
            y = np.concatenate(
                [
                    common,
                    np.where(rng.random(n - 2) < 0.7, rng.choice(common, n - 2), rng.integers(CLASSES, size=n - 2)),
                ]
            )
            clients.append((centres[y] + rng.normal(size=(n, FEATURES)), y))
        return clients

    @property
    def initial(self) -> dict[str, dict[str, np.ndarray]]:
        rng = np.random.default_rng(self.seed + 1)
        shapes = {"base": (FEATURES, HIDDEN), "classifier": (HIDDEN, CLASSES)}
        return {
            name: {"kernel": rng.normal(size=shape) / np.sqrt(shape[0]), "bias": 0.1 * rng.normal(size=shape[1])}
            for name, shape in shapes.items()
        }

    @property
    def model(self) -> fd.Model:
        def features(params: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ params["base"]["kernel"] + params["base"]["bias"])

        def head(params: Any, z: jax.Array) -> jax.Array:
            return z @ params["classifier"]["kernel"] + params["classifier"]["bias"]

        return fd.Model(
            init=lambda key: jax.tree.map(jnp.asarray, self.initial),
            apply=lambda params, x: head(params, features(params, x)),
            features=features,
            head=head,
        )

    def simulation(self, algorithm: fd.Algorithm, model: fd.Model | None = None, **options: Any) -> fd.Simulation:
        names = ("epochs", "batch_size", "lr", "lr_decay", "momentum", "weight_decay", "clip_norm")
        local = {name: getattr(self, name) for name in names} | options.pop("local", {})
        data = options.pop("data", None) or fd.FederatedData.from_clients(self.clients)
        cohort = len(self.cohorts[0])
        return fd.Simulation(
            model or self.model, data, algorithm, local=fd.LocalTraining(**local), cohort_size=cohort, **options
        )

    def states(self, algorithm: fd.Algorithm, **options: Any) -> tuple[fd.Simulation, list[fd.ServerState]]:
        """The simulation, and its state after every round."""
        sim = self.simulation(algorithm, **options)
        state, states = sim.init(jax.random.key(self.seed)), []
        for cohort in self.cohorts:
            state, _ = sim.round_fn(state, cohort=cohort)
            states.append(state)
        return sim, states

    def run(self, algorithm: fd.Algorithm, **options: Any) -> np.ndarray:
        """The global model after every round, [rounds, P]."""
        return np.array([as_vector(state.params) for state in self.states(algorithm, **options)[1]])

    def personal(self, algorithm: fd.Algorithm, **options: Any) -> np.ndarray:
        """Every client's own model after the last round, [clients, P]."""
        sim, states = self.states(algorithm, **options)
        return np.array([as_vector(sim.personal_params(states[-1], i)) for i in range(len(self.sizes))])

    @functools.cached_property
    def orders(self) -> list[dict[int, np.ndarray]]:
        """For every round and client of the cohort, the order of its examples, [epochs * shuffles, n_i].

        An algorithm of ours that trains nothing writes it down: the examples of its data are their own numbers.
        """
        longest = max(self.sizes)

        def client_update(server: Any, client: Any, work: fd.Work) -> fd.ClientResult:
            epochs = []
            for e in range(self.epochs):
                key = jax.random.split(jax.random.fold_in(work.key, e))[0]
                for j in range(self.shuffles):
                    batch = work.epoch(jax.random.fold_in(key, j) if j else key)
                    rows = [batch(jnp.int32(k)) for k in range(work.most_batches)]
                    seen = [jnp.where(row.mask, row.x[:, 0].astype(int), -1) for row in rows]
                    epochs.append(jnp.concatenate(seen)[:longest])
            none = jax.tree.map(jnp.zeros_like, server.params)
            return fd.ClientResult(none, jnp.ones(()), jnp.array(epochs), {"loss": jnp.zeros(())})

        shape = self.epochs * self.shuffles, longest
        probe = fd.algorithms.fedavg()._replace(
            client_update=client_update, init_client=lambda params: jnp.zeros(shape, int), name="probe"
        )
        numbered = [(np.repeat(np.arange(len(y), dtype=float)[:, None], FEATURES, 1), y) for _, y in self.clients]
        _, states = self.states(probe, data=fd.FederatedData.from_clients(numbered))
        return [
            {i: np.asarray(state.clients)[i][:, : self.sizes[i]] for i in cohort}
            for state, cohort in zip(states, self.cohorts, strict=True)
        ]

    def epoch(self, t: int, i: int, e: int, j: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of client i in epoch e of round t, after shuffle j."""
        x, y = self.clients[i]
        order = self.orders[t][i][e * self.shuffles + j]
        assert sorted(order) == list(range(self.sizes[i]))
        rows = [order[k : k + self.batch_size] for k in range(0, len(order), self.batch_size)]
        return [(torch.from_numpy(x[row]), torch.from_numpy(y[row])) for row in rows]

    def batches(self, t: int, i: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of client i in round t, of all epochs."""
        return [batch for e in range(self.epochs) for batch in self.epoch(t, i, e)]

    def loader(self, t: int, i: int) -> Loader:
        return Loader(self, t, i)

    def network(self) -> Network:
        """The initial model in PyTorch."""
        made = Network()
        with torch.no_grad():
            for layer, name in ((made.base[0], "base"), (made.head, "classifier")):
                layer.weight.copy_(torch.from_numpy(self.initial[name]["kernel"].T))
                layer.bias.copy_(torch.from_numpy(self.initial[name]["bias"]))
        return made

    def trained(self, start: nn.Module, t: int, i: int) -> Any:
        """A copy of a network after the training of client i in round t, in a plain loop."""
        network = copy.deepcopy(start)
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], self.lr)
        for x, y in self.batches(t, i):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
        return network


class Loader:
    """Takes the place of a `torch.utils.data.DataLoader`: its n-th pass has the batches of epoch n of a round."""

    def __init__(self, federation: Federation, t: int, i: int) -> None:
        self.federation, self.t, self.i, self.e = federation, t, i, 0
        x, y = federation.clients[i]
        self.dataset = list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True))
        self.batch_size = federation.batch_size

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Any:
        batches = self.federation.epoch(self.t, self.i, self.e % self.federation.epochs)
        self.e += 1
        return iter(batches)


def vector(network: nn.Module | Sequence[torch.Tensor]) -> np.ndarray:
    """The parameters of a network in PyTorch as one vector."""
    leaves = network.parameters() if isinstance(network, nn.Module) else network
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves]).numpy().copy()


def difference(ours: np.ndarray, theirs: np.ndarray | Sequence[np.ndarray]) -> float:
    """The largest relative difference of a row (a round or a client): ||ours - theirs|| / ||ours||."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert np.isfinite(ours).all() and np.isfinite(theirs).all()
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(ours, axis=-1)).max())


@dataclass(frozen=True)
class Row:
    """A comparison of one algorithm of ours with one implementation of others.

    Attributes:
      algorithm: our call, such as "scaffold(weighting='examples')".
      difference: the largest relative difference, from `difference`.
      lines: where the update is in the other code, as "path#text" for the first line of a file with this text, or
        "path#text#2" for the second. `main` replaces them with "path:line".
      setting: what is set in the other code and in the local training of both. "" for its defaults.
      default: the difference with our default arguments, where `algorithm` has others and these are the reason.
      cause: what makes the difference, if it is larger than rounding; otherwise what to know of the setting.
    """

    algorithm: str
    difference: float
    lines: tuple[str, ...]
    setting: str = ""
    default: float | None = None
    cause: str = ""


def compared(
    federation: Federation,
    name: str,
    arguments: dict[str, Any],
    theirs: np.ndarray | Sequence[np.ndarray],
    lines: str | tuple[str, ...],
    *,
    default: dict[str, Any] | None = None,
    setting: str = "",
    cause: str = "",
) -> Row:
    """The row of an algorithm of ours against the global models of others, one per round.

    ``default`` has the arguments of our default call, where it is to be compared, too.
    """

    def to(arguments: dict[str, Any]) -> float:
        return difference(federation.run(getattr(fd.algorithms, name)(**arguments)), theirs)

    lines = (lines,) if isinstance(lines, str) else lines
    other = None if default is None else to(default)
    return Row(written(name, arguments), to(arguments), lines, setting, other, cause)


def written(name: str, arguments: dict[str, Any]) -> str:
    """Our call, as one types it."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def line_of(checkout: Path, place: str) -> str:
    """ "path:line" of "path#text" or "path#text#2"."""
    path, text, *rest = place.split("#")
    lines = (checkout / path).read_text(errors="replace").splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line]
    if len(found) < int(rest[0] if rest else 1):
        raise ValueError(f"{path} has {len(found)} lines with {text!r}")
    return f"{path}:{found[int(rest[0] if rest else 1) - 1]}"


def without(*names: str) -> None:
    """Lets the other code import packages that its updates don't need, such as "torchvision", "torchvision.models"."""
    for name in names:
        sys.modules[name] = MagicMock(__path__=[], __spec__=None, __name__=name)


def main(rows: Callable[[], Iterable[Row]]) -> None:
    """The command of a script: ``python SCRIPT CHECKOUT OUTPUT`` writes its rows as JSON to OUTPUT.

    The checkout is the first folder that Python imports from. What the other code writes to relative paths goes to a
    temporary folder.
    """
    checkout, output = (Path(argument).resolve() for argument in sys.argv[1:3])
    sys.argv = sys.argv[:1]  # the other code may read its own options
    sys.path.insert(0, str(checkout))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        results = [asdict(row) for row in rows()]
    for result in results:
        result["lines"] = [line_of(checkout, line) for line in result["lines"]]
        print(f"{result['difference']:.1e}  {result['algorithm']}  {result['setting']}  {result['lines']}")
    output.write_text(json.dumps(results, indent=1) + "\n")
