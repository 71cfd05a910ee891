"""The records of a client store in host memory."""

from __future__ import annotations

import numpy as np

CHUNK_BYTES = 16 * 2**20  # host memory is allocated in chunks of this size


class ClientMemory:
    """Records in host memory, in chunks that are never moved."""

    def __init__(self, record: int) -> None:
        self.record, self.end = record, 0
        self.chunk_slots = max(1, CHUNK_BYTES // max(record, 1))
        self.chunks: list[np.ndarray] = []  # uint8 [chunk_slots, record]; memory is used when a slot is first written

    @property
    def nbytes(self) -> int:
        return self.end * self.record

    def reserve(self, end: int) -> None:
        """Makes room for slots below ``end``."""
        while len(self.chunks) * self.chunk_slots < end:
            self.chunks.append(np.empty((self.chunk_slots, self.record), np.uint8))
        self.end = max(self.end, end)

    def read(self, slot: int, client: int, into: list[np.ndarray]) -> None:
        record, start = self.chunks[slot // self.chunk_slots][slot % self.chunk_slots], 0
        for part in into:
            part[:] = record[start : start + len(part)]
            start += len(part)

    def write(self, slot: int, client: int, parts: list[np.ndarray]) -> None:
        record, start = self.chunks[slot // self.chunk_slots][slot % self.chunk_slots], 0
        for part in parts:
            record[start : start + len(part)] = part
            start += len(part)

    def close(self) -> None:
        self.chunks = []
