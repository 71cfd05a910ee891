"""The arrays that a round uses: the data set, and the clients."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Rows(NamedTuple):
    """Training examples on the devices, one example per row.

    They are the whole data set, replicated or sharded, or the streamed examples of one cohort.
    """

    x: jax.Array
    """[M, F], every example flattened (`devices.mesh.flat`), otherwise as stored, so images stay uint8. If sharded, M
    includes the padding of every shard."""
    y: jax.Array  # [M, ...]
    offsets: jax.Array | None = None  # int32 [N], the index of client i's first example; None if streamed
    sizes: jax.Array | None = None  # int32 [N], n_i; None if streamed
    places: jax.Array | None = None
    """int32 [M + P], only if examples are redistributed. Example j of a client is then x[places[offset + j]].

    The first M entries are 0..M-1. The other P entries are the indices of the cohort's examples in their new order."""


class Client(NamedTuple):
    """One client of a round, or several clients with leading axes.

    An absent client has id N and no examples. Therefore it does no steps and has weight 0.
    """

    id: jax.Array  # int32
    size: jax.Array  # int32, n_i
    offset: jax.Array  # int32, index of its first example
    steps: jax.Array  # int32, the local steps that it does: K_i, or fewer for a straggler
    place: jax.Array
    """int32, index of its state in ServerState.clients. This is its id unless a client store (`bank=`) keeps the
    states. The personal evaluation uses it as an index of the client's test examples."""
    factor: jax.Array | None = None  # float, multiplies its weight; None if the participation rule has no factors
    version: jax.Array | None = None  # int32, the round in which it started; None if rounds are synchronous
    discount: jax.Array | None = None  # float, multiplies its update, but not its weight; None likewise


class TestRows(NamedTuple):
    """The test set in T batches. The last batches are padded. If it is sharded, T is a multiple of D."""

    x: jax.Array  # [T, B, ...]
    y: jax.Array  # [T, B, ...]
    mask: jax.Array  # bool [T, B], False for padding
    # only if the data are shifted:
    owner: jax.Array | None = None  # int32 [T, B], the client of the example, N for none
    number: jax.Array | None = None  # int32 [T, B], the number of the example among those of its owner
    t: jax.Array | None = None  # int32 [], the round whose shift the examples have


class Arrays(NamedTuple):
    """The data set. It is an argument of the compiled round, not a constant in it."""

    rows: Rows | None  # None if the data set is streamed; each round then receives the examples of its cohort
    test: TestRows | None
    sizes: jax.Array  # int32 [N], n_i of all clients
