"""The way down, coded: the model that clients get has gone through a codec, too."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_drift import tree
from fedjax_drift.compression.compressed import Coder, check_codec, send
from fedjax_drift.message import coded_bits, decoded
from fedjax_drift.recipes import recorded
from fedjax_drift.round.arrays import Client
from fedjax_drift.round.sources import Moment, Outcome, Source, Start
from fedjax_drift.spec import Flag
from fedjax_drift.types import Metrics, Params, PyTree


class Copy(NamedTuple):
    """The state of `downlink`."""

    params: Params  # the model that the clients have, w_hat
    bits: jax.Array  # float [], sent to each client before the next round


@recorded
def downlink(codec: Coder, memory: Flag = True) -> Source:
    """A source of drift: clients train from a copy w_hat of the global model w that has gone through a codec.

    After a round, the server sends what its model differs by from the copy, and all clients add what they decode:

        w_hat <- w_hat + C(w - w_hat)

    So what a codec leaves out is sent later (Tang et al. 2019, arXiv 1905.05957; Liu et al. 2020, arXiv 1910.07561).
    The clients' messages are updates from w_hat, and the server adds them to w. Round 0 starts with the whole model.
    ``info["downlink_bytes"]`` and the virtual time of ``devices=`` follow the codec. The other variables of the server
    that clients need, such as SCAFFOLD's c, are sent as they are. ``info`` has ``downlink_error``, which is
    ||w - w_hat||^2 / ||w||^2 after the round.

    All clients hear what the server sends, also those that do not take part in a round. It needs one server and
    synchronous rounds.

    Args:
      codec: such as ``fd.compression.qsgd(15)``. Integer parameters do not go through it.
      memory: whether the difference from the copy is sent. False: w_hat <- C(w), which needs an unbiased codec (Caldas
        et al. 2018, arXiv 1812.07210).
    """
    check_codec(codec)

    def init(moment: Moment) -> Copy:
        params = moment.server.params
        return Copy(params, jnp.asarray(8.0 * tree.nbytes(params)))

    def receive(copy: Copy, start: Start, client: Client, moment: Moment) -> Start:
        return start._replace(server=start.server._replace(params=copy.params))

    def after(copy: Copy, outcome: Outcome, moment: Moment) -> tuple[Copy, Metrics]:
        w = outcome.after.server.params
        base = copy.params if memory else tree.zeros_like(copy.params)
        coded, _ = send(codec, moment.key, tree.subtract(w, base), lambda part: True)
        arrived = jax.tree.map(lambda b, d, w: (b + d).astype(w.dtype), base, decoded(coded), w)
        uncoded = [m for m in jax.tree.leaves(w) if not jnp.issubdtype(m.dtype, jnp.floating)]
        error, square = tree.subtract(w, arrived), tree.dot(w, w)
        error = jnp.where(square > 0, tree.dot(error, error) / jnp.where(square > 0, square, 1), 0)
        bits = coded_bits(coded) + 8.0 * tree.nbytes(uncoded)
        return Copy(arrived, bits.astype(copy.bits.dtype)), {"downlink_error": error}

    def down(copy: Copy) -> jax.Array:
        return copy.bits

    one: PyTree = {"one_server": True, "kind": "downlink", "title": codec.name}
    return Source("downlink", init, receive=receive, after=after, down=down, **one)
