"""How the runs of a sweep share the devices: programs of one run become programs of several runs.

A turn is a group of runs that are trained in one program. If there are at least as many runs as devices, each device
trains different runs (``apart``), and the devices do not communicate. Otherwise all devices train the same runs
together, as in `Simulation.run`. Each device trains ``per_device`` runs of a turn side by side (vmap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_drift.devices.mesh import AXIS, any_device, num_teams
from fedjax_drift.round.engine import Engine
from fedjax_drift.types import PyTree


class Layout(NamedTuple):
    """The placement of the runs of a turn on the devices."""

    mesh: Mesh
    apart: bool  # whether each device trains different runs
    per_device: int  # number of runs that a device trains side by side

    @classmethod
    def of(cls, mesh: Mesh, runs: int, most: int) -> Layout:
        """Splits the runs into turns of about the same size, with at most ``most`` runs per device."""
        D = num_teams(mesh)
        apart = 1 < D <= runs
        on_device = -(-runs // D) if apart else runs
        num_turns = -(-on_device // min(most, on_device))
        return cls(mesh, apart, per_device=-(-on_device // num_turns))

    @property
    def size(self) -> int:
        """The number of runs in a turn."""
        return self.per_device * (num_teams(self.mesh) if self.apart else 1)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of arrays whose first axis is the runs of a turn."""
        return NamedSharding(self.mesh, P(AXIS) if self.apart else P())

    def inside(self, engine: Engine) -> Engine:
        """The engine of one run.

        If the runs are apart, its mesh is one abstract device, which stands for any device. Otherwise it is ``engine``.
        """
        return engine._replace(mesh=any_device()) if self.apart else engine  # type: ignore[arg-type]

    def over_runs(self, program: Callable, per_run: Sequence[int], static: Sequence[int] = ()) -> Callable:
        """Returns the program of a turn. The first axis of its results is the runs.

        program: the program of one run. per_run: the positions of the arguments whose first axis is the runs. static:
        the positions of the arguments that are no arrays. All other arguments are the same for all runs.
        """

        def of_turn(*arguments: Any) -> Any:
            places = [i for i in range(len(arguments)) if i not in static]

            def on_device(*arrays: Any) -> Any:
                if self.per_device > 1:
                    return jax.vmap(one_run, in_axes=[0 if i in per_run else None for i in places])(*arrays)
                own = [jax.tree.map(lambda a: a[0], a) if i in per_run else a for i, a in zip(places, arrays)]  # noqa: B905
                return jax.tree.map(lambda a: a[None], one_run(*own))

            def one_run(*arrays: Any) -> Any:
                own = dict(zip(places, arrays, strict=True))
                return program(*[own.get(i, argument) for i, argument in enumerate(arguments)])

            arrays = [arguments[i] for i in places]
            if not self.apart:
                return on_device(*arrays)
            specs = tuple(P(AXIS) if i in per_run else P() for i in places)
            # check_vma=False for the reason given in `round.engine.on_each_device`.
            return jax.shard_map(
                on_device, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS), axis_names={AXIS}, check_vma=False
            )(*arrays)

        of_turn.__name__ = program.__name__
        return of_turn

    def of_place(self, tree: PyTree, place: int) -> PyTree:
        """Returns the arrays of one run from a tree whose leaves have a first axis of runs.

        The arrays stay on the device that trained the run.
        """
        device, lane = divmod(place, self.per_device)

        def leaf(a: jax.Array) -> jax.Array:
            if not self.apart:
                return a[place]
            shard = next(s for s in a.addressable_shards if (s.index[0].start or 0) == device * self.per_device)
            return shard.data[lane]

        return jax.tree.map(leaf, tree)


class Turn(NamedTuple):
    """Runs that are trained together in one program, and what the program needs to know of each."""

    layout: Layout
    runs: tuple[int, ...]  # positions in the list of runs; the last turn may repeat its last run
    numbers: PyTree  # the numbers of the engines, leaves [runs]
    scoring: PyTree  # those that an evaluation uses, leaves [runs]
    key: jax.Array  # [runs]

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields (index in the turn, run), without the indices that repeat a run."""
        for place, run in enumerate(self.runs):
            if run not in self.runs[:place]:
                yield place, run
