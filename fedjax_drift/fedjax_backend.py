"""FedJAX's algorithms on our devices and lanes: a backend for `fedjax.for_each_client`.

FedJAX (Ro, Suresh, Wu, arXiv 2108.02117) writes the clients' side of an algorithm as three functions: ``client_init``,
``client_step``, ``client_final``. Its 'jit' backend runs them one client at a time, one batch a program. Here:

    sort      clients by their number of batches, longest first, so that those of a group finish together
    deal      groups of L lanes to D devices, back and forth
    stack     on the host, the batches of as many groups as fit in memory, end to end
    train     in one program: on each device one group after the other, L clients side by side
    hand out  outputs and step results, while the next ones train

>>> import fedjax
>>> with fedjax.for_each_client_backend(EngineBackend()):  # or for good: fedjax.set_for_each_client_backend(...)
...     count = fedjax.for_each_client(lambda shared, start: start, lambda n, batch: n + batch["x"].sum())
>>> clients = [(b"a", [{"x": np.ones(3)}, {"x": np.ones(2)}], jnp.zeros(())), (b"b", [], jnp.ones(()))]
>>> {id: float(n) for id, n in count(None, clients)}
{b'a': 5.0, b'b': 1.0}
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

try:
    from fedjax.core.for_each_client import ForEachClientBackend
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('EngineBackend needs FedJAX: pip install "fedjax-drift[fedjax]"') from error

from fedjax_drift import checks, fit
from fedjax_drift.exchange import back_and_forth
from fedjax_drift.sharding import AXIS, clients_mesh
from fedjax_drift.tree import nbytes
from fedjax_drift.types import PyTree

GROUPS = 8  # for each device: the host reads the clients of these, sorts and deals them, and reads on
ROOM = 2**26  # bytes on each device for the batches of a program, and as many for its clients' states


class EngineBackend(ForEachClientBackend):
    """Trains D * L clients at once: ``fedjax.set_for_each_client_backend(EngineBackend())``.

    What a client gets is what FedJAX's 'jit' backend gives it, up to the rounding of another program: the functions see
    the same batches, unpadded, in the same order. A shape of batch is compiled once, not for each cohort (again when
    eight clients have more than ever, for twice as many). What differs: clients come back in another order, so a sum
    over them rounds differently; all that they return is on the first device; and the host holds the batches of 16 D L
    clients.

    An algorithm asks for its backend when it is made: set it before. FedJAX 0.0.17 calls ``jax.tree_map``, which JAX no
    longer has: ``jax.tree_map = jax.tree.map`` lets it run.

    Args:
      lanes: L, clients side by side on a device; "auto": 1 on a CPU, 16 elsewhere.
      devices: D of them; default: all of this process. On a CPU call `use_cpu_devices` first: a device for each core.

    Raises:
      ValueError: lanes < 1; while it runs: a ``client_step`` that changes the shapes or dtypes of the state.
    """

    def __init__(self, lanes: int | str = "auto", devices: Sequence[jax.Device] | None = None) -> None:
        self.mesh = clients_mesh(jax.local_devices() if devices is None else devices)
        auto = 1 if _on_cpu(self.mesh) else 16
        self.lanes = auto if lanes == "auto" else checks.integer("lanes", lanes, 1, fix='or pass "auto"')

    def __call__(self, client_init: Callable, client_step: Callable, client_final: Callable) -> Callable:
        """``run(shared_input, clients)`` yields (client id, output, step results), as FedJAX expects it."""
        return _ForEachClient(self.mesh, self.lanes, client_init, client_step, client_final)


class Client(NamedTuple):
    """A client that has been read."""

    id: Any
    given: PyTree  # its client_input
    kind: int  # of that: its structure, shapes and dtypes, as `_ForEachClient._kind` numbers them
    runs: list[tuple[int, list[PyTree]]]  # its batches in order, cut where their kind changes
    steps: int


class Trained(NamedTuple):
    """Clients whose training has been started: P places on each device."""

    clients: list[Client | None]  # [D * P], None where there is nobody
    outputs: PyTree  # leaves [D * P, ...]
    results: list[list[tuple[PyTree, int]]]  # [D * P], of each step: leaves [D * T, ...], and which of the device's T


class _ForEachClient:
    """``run(shared_input, clients)`` of one algorithm, and what it has compiled."""

    def __init__(self, mesh: Mesh, lanes: int, init: Callable, step: Callable, final: Callable) -> None:
        self.mesh, self.L, self.functions = mesh, lanes, (init, step, final)
        self.kinds: dict[Hashable, int] = {}
        self.G: dict[int, int] = {}  # for each kind of client_input, groups that train in one program
        self.T: dict[int, int] = {}  # for each kind of batch, how many a device is sent for a program; never shrinks
        self.convolves: dict[tuple[int, int], bool] = {}  # for the kinds of input and batch that were checked
        self.programs: dict[int, tuple[Callable, ...]] = {}  # for each G

    def __call__(self, shared_input: PyTree, clients: Iterable[tuple[Any, Iterable[PyTree], PyTree]]) -> Iterator:
        shared, remaining = jax.device_put(shared_input, NamedSharding(self.mesh, P())), iter(clients)
        before = None
        while window := [self._read(*client) for client in islice(remaining, GROUPS * self.L * self.mesh.size)]:
            for kind in dict.fromkeys(client.kind for client in window):
                alike = [client for client in window if client.kind == kind]
                self._check(shared, alike)
                for dealt in self._deal(alike):
                    trained = self._train(shared, dealt)
                    if before is not None:
                        yield from self._hand_out(before)
                    before = trained
        if before is not None:
            yield from self._hand_out(before)

    def _read(self, id: Any, batches: Iterable[PyTree], given: PyTree) -> Client:
        read = [jax.tree.map(_on_host, batch) for batch in batches]
        runs = [(kind, list(run)) for kind, run in groupby(read, self._kind)]
        return Client(id, given, self._kind(given), runs, len(read))

    def _kind(self, tree: PyTree) -> int:
        """A number for the tree's structure, shapes and dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        kinds = ((a.shape, a.dtype) if isinstance(a, np.ndarray) else jax.typeof(a) for a in leaves)
        return self.kinds.setdefault((structure, *kinds), len(self.kinds))

    def _check(self, shared: PyTree, clients: list[Client]) -> None:
        """Looks at kinds of batches not seen before, with inputs of this kind, and chooses G."""
        client_init, client_step, _ = self.functions
        kind, given = clients[0].kind, clients[0].given
        new = {
            run: batches[0] for client in clients for run, batches in client.runs if (kind, run) not in self.convolves
        }
        if not new and kind in self.G:
            return
        state = jax.eval_shape(client_init, shared, given)
        for run, batch in new.items():
            jaxpr, (after, _) = jax.make_jaxpr(client_step, return_shape=True)(state, batch)
            fit.check_like(after, state, "client_step must return a state of the shapes and dtypes that it gets, got")
            self.convolves[kind, run] = "conv_general_dilated" in str(jaxpr)
        self.G[kind] = 1 if self._alone else min(GROUPS, max(1, ROOM // (self.L * max(1, nbytes(state)))))

    @property
    def _alone(self) -> bool:
        """Whether a program is one step: in a loop, XLA's CPU convolutions take three times as long."""
        return _on_cpu(self.mesh) and any(self.convolves.values())

    def _deal(self, clients: list[Client]) -> Iterator[list[Client | None]]:
        """[D * P] clients, P = G * L for each device; None in empty places."""
        D, L, G = self.mesh.size, self.L, self.G[clients[0].kind]
        # Of clients with as many batches, those whose last ones are alike become neighbours.
        ordered = sorted(clients, key=lambda client: (-client.steps, [kind for kind, _ in client.runs]))
        line = [*ordered, *[None] * (-len(ordered) % (D * G * L))]
        places = back_and_forth(D, len(line) // (D * L), L)
        for g in range(0, places.shape[1], G):
            yield [line[place] for place in places[:, g : g + G].flat]

    def _train(self, shared: PyTree, clients: list[Client | None]) -> Trained:
        """Starts their training. Where there is nobody the first client's input stands in, without batches."""
        D, parts = self.mesh.size, NamedSharding(self.mesh, P(AXIS))
        present = [client for client in clients if client is not None]
        if (G := self.G[present[0].kind]) not in self.programs:
            self.programs[G] = _programs(self.mesh, self.L, G, *self.functions)
        init, steps, final = self.programs[G]
        state = init(shared, jax.device_put(_stacked([(client or present[0]).given for client in clients]), parts))
        results: list[list[tuple[PyTree, int]]] = [[] for _ in clients]
        for k in range(max(len(client.runs) for client in present)):
            now = [client.runs[k] if client and k < len(client.runs) else (-1, []) for client in clients]
            for kind in dict.fromkeys(kind for kind, batches in now if batches):
                left = [batches if kind == of else [] for of, batches in now]
                T = self._batches_at_once(kind, left)
                while any(left):
                    sent, first, count, left = _load(left, D, self.L, T)
                    state, result = steps(T, state, *jax.device_put((sent, first, count), parts))
                    for place, (start, n) in enumerate(zip(first, count, strict=True)):
                        results[place] += [(result, start + j) for j in range(n)]
        return Trained(clients, final(shared, state), results)

    def _batches_at_once(self, kind: int, left: list[list[PyTree]]) -> int:
        """T: what is left if there is room, and a batch for each place, as all clients' last ones may be short."""
        if self._alone:
            return self.L
        longest = np.array([len(batches) for batches in left]).reshape(self.mesh.size, -1, self.L).max(-1)  # [D, G]
        need, T = self.L * int(longest.sum(1).max()), self.T.get(kind, 0)
        if need > T:
            batch = next(batches[0] for batches in left if batches)
            most = ROOM // max(1, sum(getattr(leaf, "nbytes", 8) for leaf in jax.tree.leaves(batch)))
            self.T[kind] = max(self.L, min(most, max(need, 2 * T, len(left) // self.mesh.size)))
        return self.T[kind]

    def _hand_out(self, trained: Trained) -> Iterator[tuple[Any, PyTree, list[PyTree]]]:
        jax.block_until_ready(trained.outputs)  # so that those of two programs at most are in memory
        P = len(trained.clients) // self.mesh.size
        for place, client in enumerate(trained.clients):
            if client is not None:
                device, own = divmod(place, P)
                results = [self._of(device, result, row) for result, row in trained.results[place]]
                yield client.id, self._of(device, trained.outputs, own), results

    def _of(self, device: int, tree: PyTree, row: int) -> PyTree:
        """A row of this device's part of the leaves, on the first device."""
        if not jax.tree.leaves(tree):
            return tree
        own = _row(jax.tree.map(lambda a: a.addressable_data(device), tree), row)
        return own if device == 0 else jax.device_put(own, self.mesh.devices.flat[0])


def _load(left: list[list], D: int, L: int, T: int) -> tuple[PyTree, np.ndarray, np.ndarray, list[list]]:
    """What is sent for a program: of the batches left at each place [D * P] the first ones, up to T for each device.

    Returns leaves [D * T, ...]; where among its device's T each place's first batch is, and how many it has [D * P];
    and what is left after that. Lanes of a group go on together.
    """
    sent: list[list[PyTree]] = [[] for _ in range(D)]
    first, count = np.zeros((2, len(left)), np.int32)
    for group in np.arange(len(left)).reshape(-1, L):
        batches = sent[group[0] * D // len(left)]
        take = min(max(len(left[place]) for place in group), (T - len(batches)) // L)
        for place in group:
            first[place], count[place] = len(batches), min(take, len(left[place]))
            batches += left[place][:take]
    some = next(batches[0] for batches in sent if batches)
    stacked = _stacked([batch for batches in sent for batch in [*batches, *[some] * (T - len(batches))]])
    return stacked, first, count, [batches[n:] for batches, n in zip(left, count, strict=True)]


def _programs(
    mesh: Mesh, L: int, G: int, client_init: Callable, client_step: Callable, client_final: Callable
) -> tuple:
    """``init(shared, given)``, ``steps(T, state, batches, first, count)``, ``final(shared, state)``: of G groups, one
    after the other, on each device."""

    def lanes(function: Callable, *axes: int | None) -> Callable:
        """The function of L clients, leaves [L, ...]."""
        if L > 1:
            return jax.vmap(function, axes)

        def alone(*arguments: PyTree) -> PyTree:
            pairs = zip(arguments, axes, strict=True)
            one = [a if axis is None else jax.tree.map(lambda a: a[0], a) for a, axis in pairs]
            return jax.tree.map(lambda a: jnp.asarray(a)[None], function(*one))

        return alone

    def groups(function: Callable) -> Callable:
        """Of ``function(common, own)``, over groups: leaves of own [G * L, ...]."""
        if G == 1:
            return function

        def all(common: PyTree, own: PyTree) -> PyTree:
            cut = jax.tree.map(lambda a: a.reshape(G, L, *a.shape[1:]), own)
            out = lax.map(lambda own: function(common, own), cut)
            return jax.tree.map(lambda a: a.reshape(G * L, *a.shape[2:]), out)

        return all

    step = lanes(client_step, 0, 0)

    def steps(T: int, state: PyTree, batches: PyTree, first: jax.Array, count: jax.Array) -> tuple[PyTree, PyTree]:
        """Every client's next ``count`` steps, with ``batches[first:]``, leaves [T, ...]; results likewise."""

        def group(results: PyTree, own: tuple) -> tuple[PyTree, PyTree]:
            state, first, count = own

            def one(j: Any, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                state, results = carry
                goes_on = j < count
                new, result = step(state, jax.tree.map(lambda b: b[jnp.where(goes_on, first + j, 0)], batches))

                def select(new: jax.Array, old: jax.Array) -> jax.Array:
                    return jnp.where(goes_on.reshape(L, *[1] * (new.ndim - 1)), new, old)

                to = jnp.where(goes_on, first + j, T)  # T: nowhere
                results = jax.tree.map(lambda all, r: all.at[to].set(r, mode="drop"), results, result)
                return new if L == 1 and loops else jax.tree.map(select, new, state), results

            loops = T > L or G > 1  # else one step at most
            carry = state, results
            state, results = lax.fori_loop(0, count.max(), one, carry) if loops else one(0, carry)
            return results, state

        _, result = jax.eval_shape(step, *jax.tree.map(lambda a: a[:L], (state, batches)))
        results = jax.tree.map(lambda r: jnp.zeros((T, *r.shape[1:]), r.dtype), result)
        if G == 1:
            results, state = group(results, (state, first, count))
            return state, results
        own = jax.tree.map(lambda a: a.reshape(G, L, *a.shape[1:]), (state, first, count))
        results, state = lax.scan(group, results, own)
        return jax.tree.map(lambda a: a.reshape(G * L, *a.shape[2:]), state), results

    def spread(function: Callable, *where: P) -> Callable:
        return jax.shard_map(function, mesh=mesh, in_specs=where, out_specs=P(AXIS), check_vma=False)

    part = P(AXIS)
    return (
        jax.jit(spread(groups(lanes(client_init, None, 0)), P(), part)),
        jax.jit(lambda T, *own: spread(partial(steps, T), *[part] * 4)(*own), static_argnums=0, donate_argnums=1),
        jax.jit(spread(groups(lanes(client_final, None, 0)), P(), part)),
    )


@jax.jit
def _stack(*leaves: Any) -> jax.Array:
    return jnp.stack(leaves)


def _stacked(trees: list[PyTree]) -> PyTree:
    """Leaves [n, ...]; keys stay keys, and Python's numbers weak."""
    return jax.tree.map(lambda *a: np.stack(a) if isinstance(a[0], np.ndarray) else _stack(*a), *trees)


def _on_host(leaf: Any) -> Any:
    """An array, which the host can stack; keys and Python's numbers as they are."""
    if isinstance(leaf, np.ndarray):
        return leaf
    kind = jax.typeof(leaf)
    return leaf if kind.weak_type or jax.dtypes.issubdtype(kind.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


@jax.jit
def _row(tree: PyTree, at: int) -> PyTree:
    return jax.tree.map(lambda a: a[at], tree)


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"
