"""The arrays of a checkpoint in files: ``arrays.0``, ``arrays.1``, ... of process 0, 1, ..., with the parts it holds.

A file is one line of JSON, which says of each part whose it is ([array, its bounds on every axis, bytes]), then the
parts' bytes in that order. Blocks of zeros, as in the states of clients that were never seen, are holes of the file.

Any number of processes and devices reads what any other has written: whoever asks for a region of an array gets it
from the parts that overlap with it. That the bytes are those written is for `checkpoint.checksums` to say.
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
    """A region of an array, in host memory."""

    array: int  # which one, from 0
    bounds: Bounds
    data: np.ndarray  # its bytes, uint8 [n]


def parts_here(arrays: Sequence[jax.Array | np.ndarray]) -> list[Part]:
    """Copies of what this process is to write: every region once, by the first of the devices that hold it."""
    arrays_and_shards = [
        (i, array.addressable_shards) for i, array in enumerate(arrays) if isinstance(array, jax.Array)
    ]
    mine = [(i, shard) for i, shards in arrays_and_shards for shard in shards if shard.replica_id == 0]
    for _, shard in mine:
        shard.data.copy_to_host_async()
    parts = [Part(i, _bounds(shard.index, arrays[i].shape), _bytes(shard.data)) for i, shard in mine]
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
        file.truncate()  # as long as it has come, also after a hole at the end
        os.fsync(file.fileno())


class ArrayFiles:
    """The arrays of a folder, read as they are asked for. What is damaged raises whatever its reading raises."""

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
        """The region of the array; 0 where nothing is stored."""
        found = np.zeros(list(starmap(_length, bounds)), dtype)
        for path, at, size, there in self._parts.get(array, []):
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, there, strict=True)]
            if all(start < stop for start, stop in both):
                data = np.fromfile(path, np.uint8, size, offset=at).view(dtype).reshape(list(starmap(_length, there)))
                found[tuple(_inside(both, bounds))] = data[tuple(_inside(both, there))]
        return found

    def array(self, array: int, dtype: Any, shape: Sequence[int], sharding: Any = None) -> jax.Array | np.ndarray:
        """The array in this shape, on the devices of a sharding or in host memory."""
        if sharding is None:
            return self.read(array, dtype, [(0, n) for n in shape])
        here = lambda index: self.read(array, dtype, _bounds(index, shape))  # noqa: E731
        return jax.make_array_from_callback(tuple(shape), sharding, here)


def _bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """A copy: the array may be overwritten before it is on the disk."""
    return np.array(array, order="C").reshape(-1).view(np.uint8)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return [axis.indices(n)[:2] for axis, n in zip(index, shape, strict=True)]


def _length(start: int, stop: int) -> int:
    return stop - start


def _inside(region: Bounds, around: Bounds) -> Iterator[slice]:
    """The region's place in the one around it."""
    return (slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, around, strict=True))
