"""The arrays of a checkpoint in files. Process i writes the shards on its devices to the file ``arrays.i``.

The first line of a file is JSON with one entry [array, bounds on every axis, number of bytes] per shard. The
bytes of the shards follow, in the same order. Blocks of zeros, such as the states of clients that have never taken
part, are holes in the file and take no disk space.

A checkpoint can be read with another number of processes and devices. A region of an array is then read from all shards
that overlap with it. `contents.read_arrays` compares checksums to detect damaged bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

FILE = "arrays.{}"
BLOCK = 2**20  # bytes
Bounds = list[tuple[int, int]]  # start and stop on every axis


class Part(NamedTuple):
    """A shard of an array, in host memory."""

    array: int  # index of the array, from 0
    bounds: Bounds
    data: np.ndarray  # its bytes, uint8 [n]


def parts_here(arrays: Sequence[jax.Array | np.ndarray]) -> list[Part]:
    """Returns copies of the shards that this process writes. A replicated shard is copied from one device only."""
    arrays_and_shards = [
        (i, array.addressable_shards) for i, array in enumerate(arrays) if isinstance(array, jax.Array)
    ]
    first_copies = [(i, shard) for i, shards in arrays_and_shards for shard in shards if shard.replica_id == 0]
    for _, shard in first_copies:
        shard.data.copy_to_host_async()
    parts = [Part(i, _bounds(shard.index, arrays[i].shape), _bytes(shard.data)) for i, shard in first_copies]
    if jax.process_index() == 0:
        on_host = [(i, array) for i, array in enumerate(arrays) if not isinstance(array, jax.Array)]
        parts += [Part(i, [(0, n) for n in array.shape], _bytes(array)) for i, array in on_host]
    return parts


def write(folder: Path, parts: Sequence[Part]) -> None:
    """Writes this process's file."""
    with open(folder / FILE.format(jax.process_index()), "wb") as file:
        file.write(json.dumps([[array, bounds, len(data)] for array, bounds, data in parts]).encode() + b"\n")
        for _, _, data in parts:
            for start in range(0, len(data), BLOCK):
                block = data[start : start + BLOCK]
                file.write(block.data) if block.any() else file.seek(len(block), 1)
        file.truncate()  # extends the file by a hole at the end
        os.fsync(file.fileno())


class ArrayFiles:
    """The arrays of a folder, read on demand. A damaged file can raise any exception."""

    def __init__(self, folder: Path) -> None:
        self._parts: dict[int, list[tuple[Path, int, int, Bounds]]] = {}  # array -> file, first byte, bytes, bounds
        for path in folder.glob(FILE.format("*")):
            with open(path, "rb") as file:
                listed = json.loads(file.readline())
                at = file.tell()
            for array, bounds, size in listed:
                self._parts.setdefault(array, []).append((path, at, size, bounds))
                at += size

    def read(self, array: int, dtype: Any, bounds: Bounds) -> np.ndarray:
        """Returns this region of the array, with zeros where nothing is stored."""
        region = np.zeros(list(starmap(_length, bounds)), dtype)
        for path, at, size, stored in self._parts.get(array, []):
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, stored, strict=True)]
            if all(start < stop for start, stop in overlap):
                data = np.fromfile(path, np.uint8, size, offset=at).view(dtype).reshape(list(starmap(_length, stored)))
                region[tuple(_inside(overlap, bounds))] = data[tuple(_inside(overlap, stored))]
        return region

    def array(self, array: int, dtype: Any, shape: Sequence[int], sharding: Any = None) -> jax.Array | np.ndarray:
        """Returns the array in this shape, on the devices of ``sharding``, or in host memory if it is None."""
        if sharding is None:
            return self.read(array, dtype, [(0, n) for n in shape])

        def shard(index: Any) -> np.ndarray:
            return self.read(array, dtype, _bounds(index, shape))

        return jax.make_array_from_callback(tuple(shape), sharding, shard)


def _bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns a copy of the bytes, because the array may be overwritten before it has been written to disk."""
    return np.array(array, order="C").reshape(-1).view(np.uint8)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return [axis.indices(n)[:2] for axis, n in zip(index, shape, strict=True)]


def _length(start: int, stop: int) -> int:
    return stop - start


def _inside(region: Bounds, around: Bounds) -> Iterator[slice]:
    """Returns the slices that select ``region`` from an array that holds only the region ``around``.

    Both are bounds in the complete array.
    """
    return (slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, around, strict=True))
