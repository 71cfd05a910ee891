"""Compression of the messages of any algorithm, with error feedback.

Client i:  the update of the base algorithm, whose message is m_i
           d_i = decode(encode(m_i + e_i))           the server gets d_i in the place of m_i         (1)
           e_i <- m_i + e_i - d_i                    error feedback only                             (2)
Server:    as the base algorithm

with e_i = 0 before the first participation. The weights of the messages are not compressed. Each leaf of a message is
coded by itself. The messages of a first phase (Mime) go through the codec, too, without error feedback.

Error feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy, Rebjock, Stich, Jaggi,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847, algorithm 2.

Deviations:  error feedback is per client and per message, not per step. The state of a client that rarely participates
has an old residual. With several models (IFCA), the residual of one model is added to the update of the next one that
the client chooses.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift import checks, spec, tree
from fedjax_drift.compression.codec import Codec
from fedjax_drift.message import Coded, decoded, is_like
from fedjax_drift.spec import Fix, Flag
from fedjax_drift.types import THREEFRY, Algorithm, ClientResult, Params, PyTree, Trained, Work, algorithm
from fedjax_drift.wrapping import PHASES, inside

MESSAGE = 2**32 - 2  # fold_in(work.key, MESSAGE) is the key of the codec; `local.OPTIMIZER` is the next number


class Client(NamedTuple):
    base: PyTree  # the state of the base algorithm
    residual: PyTree  # e_i, shaped like a message; () before `complete`


Base = Annotated[Algorithm, spec.instance(Algorithm), Fix("call the factory, such as fd.algorithms.fedavg()")]
Coder = Annotated[Codec, spec.instance(Codec), Fix("pass fd.compression.top_k(0.01), for example")]


@algorithm
def compressed(
    base: Base, codec: Coder, error_feedback: Flag = True, parts: Literal["all", "params"] = "all"
) -> Algorithm:
    """Any algorithm, whose clients send their messages through a codec.

    `info` has the bytes that each client sends, ``uplink_bytes`` [K], and ``compression_error`` [K], which is
    ||m_i + e_i - d_i||^2 / ||m_i + e_i||^2 over the compressed leaves.

    Args:
      base: the algorithm. It may be a compressed one.
      codec: such as ``fd.compression.top_k(0.01)``.
      error_feedback: whether a client keeps what the codec has left out, and adds it to its next message. Its state is
        then larger by the size of a message. Default: True. Use ``random_k(scale=True)`` and `qsgd` with few levels
        without it: their error may exceed the message, and the residual then grows without a bound.
      parts: "all" (default): all leaves of a message with floating-point numbers. "params": those of the parts of a
        message that have the structure of the model's parameters. The others are sent as they are, for example the
        number of steps in FedNova.

    Raises:
      ValueError: the codec does not return (decoded, bits).
    """
    check_codec(codec)

    inner = inside(base, client="base" if error_feedback else None, message=decoded)

    def sent(phase: str, server: Any, client: Any, work: Work) -> ClientResult:
        """The result of one phase of the base algorithm, whose message goes through the codec."""
        result = getattr(inner, phase)(server, client, work)
        wanted = lax.optimization_barrier(decoded(result.message))  # XLA compiles the base algorithm as without a codec
        keeps = error_feedback and phase == "client_update"  # a client has one message per round of the first phase
        if keeps and jax.tree.leaves(client.residual):
            wanted = jax.tree.map(jnp.add, wanted, client.residual)
        # Another phase, and a codec around another one, have other random numbers.
        name = base.name if phase == "client_update" else f"{base.name}, {phase}"
        key = jax.random.fold_in(jax.random.fold_in(work.key, MESSAGE), zlib.crc32(name.encode()))
        is_coded = is_like(server.params) if parts == "params" else lambda part: True
        message, error = send(codec, key, wanted, is_coded)  # (1)
        if keeps:
            result = result._replace(state=Client(result.state.base, tree.subtract(wanted, decoded(message))))  # (2)
        known, metrics = result.metrics, {"compression_error": error}
        with_error = known | metrics if isinstance(known, Trained) else {**known, **metrics}
        return result._replace(message=message, metrics=with_error)

    def init_client(params: Params) -> Client:
        return Client(base.init_client(params), ())

    def complete(client: Client, message: PyTree) -> Client:
        completed = client if inner.complete is None else inner.complete(client, message)
        return completed._replace(residual=tree.zeros_like(decoded(message)))

    coded: dict[str, Any] = {phase: partial(sent, phase) for phase in PHASES if getattr(inner, phase) is not None}
    sending = inner._replace(**coded, name=f"{base.name}+{codec.name}")
    return sending._replace(init_client=init_client, complete=complete) if error_feedback else sending


def send(codec: Codec, key: jax.Array, message: PyTree, is_coded: Callable[[PyTree], bool]) -> tuple[PyTree, jax.Array]:
    """The message with `Coded` arrays, and the relative squared error of all of them.

    is_coded: whether the leaves of a part of the message go through the codec. Integers never do.
    """
    through = jax.tree.map(lambda part: jax.tree.map(lambda leaf: is_coded(part), part), message, is_leaf=is_coded)
    leaves, structure = jax.tree.flatten(message)
    sent, error, square = [], jnp.zeros(()), jnp.zeros(())
    for i, (m, coded) in enumerate(zip(leaves, jax.tree.leaves(through), strict=True)):
        if not (coded and m.size and jnp.issubdtype(m.dtype, jnp.floating)):
            sent.append(m)
            continue
        d, bits = codec.send(jax.random.fold_in(key, i), m)
        sent.append(Coded(d.astype(m.dtype), jnp.asarray(bits, float)))
        difference = m - sent[-1].decoded
        error, square = error + tree.dot(difference, difference), square + tree.dot(m, m)
    return jax.tree.unflatten(structure, sent), jnp.where(square > 0, error / jnp.where(square > 0, square, 1), 0)


def check_codec(codec: Codec) -> None:
    """Checks that the codec returns an array like its argument, and a number of bits."""
    checks.fields(codec, "see fd.compression.Codec")
    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    what = f"send of {codec.name} must be a function (key, x) -> (decoded, bits)"
    # Without a key that exists, which would start JAX's devices.
    result = checks.shapes_of(what, lambda x: codec.send(jax.random.key(0, impl=THREEFRY), x), x)
    if not isinstance(result, tuple) or len(result) != 2:
        checks.refuse(f"send of {codec.name} must return (decoded, bits)", checks.shown(result))
    tree.check_layout(result[0], x, f"what {codec.name} decodes must have the shape of what is sent", dtypes=False)
    if jnp.shape(result[1]):
        checks.refuse(f"bits of {codec.name} must be a scalar", f"the shape {[*jnp.shape(result[1])]}")
