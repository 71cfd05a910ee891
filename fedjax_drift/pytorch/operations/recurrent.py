"""Recurrent layers.

A cell maps (state, W_ih x + b_ih, W_hh, b_hh) to the new state. The first part of the state is the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_drift.pytorch.operations.mode import Mode, kept

Array = jax.Array
State = tuple[Array, ...]


def _lstm_cell(state: State, inputs: Array, weight: Array, bias: Array | float) -> State:
    h, c = state
    i, f, g, o = jnp.split(inputs + h @ weight.T + bias, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_cell(state: State, inputs: Array, weight: Array, bias: Array | float) -> State:
    (h,) = state
    r, z, n = jnp.split(inputs, 3, -1)
    hr, hz, hn = jnp.split(h @ weight.T + bias, 3, -1)
    z = jax.nn.sigmoid(z + hz)
    return ((1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h,)


def _projected(cell: Callable[..., State], projection: Array) -> Callable[..., State]:
    """An LSTM with proj_size: its state h is a projection."""

    def projected(*arguments: Any) -> State:
        h, c = cell(*arguments)
        return h @ projection.T, c

    return projected


def _simple_cell(activation: Callable[[Array], Array]) -> Callable[..., State]:
    return lambda state, inputs, weight, bias: (activation(inputs + state[0] @ weight.T + bias),)


class Layers(NamedTuple):
    """The arguments of a recurrent layer after its weights."""

    biases: bool
    layers: int
    dropout_p: float
    training: bool
    bidirectional: bool
    batch_first: bool


def recurrent(
    cell: Callable[..., State],
    mode: Mode,
    x: Array,
    states: Array | Sequence[Array],
    weights: Sequence[Array],
    *given: Any,
) -> tuple[Array, ...]:
    """Recurrent layers, with dropout between them: the outputs of the last one, and the last states of all."""
    biases, layers, dropout_p, training, bidirectional, batch_first = Layers(*given)
    starts = states if isinstance(states, list | tuple) else [states]
    directions = 2 if bidirectional else 1
    per = len(weights) // (layers * directions)
    y = jnp.swapaxes(x, 0, 1) if batch_first else x
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            w_ih, w_hh, *rest = weights[n * per : (n + 1) * per]
            b_ih, b_hh = rest[:2] if biases else (0.0, 0.0)
            own = _projected(cell, rest[-1]) if per == (5 if biases else 3) else cell
            step = partial(_step, own, w_hh, b_hh)
            end, out = lax.scan(step, tuple(each[n] for each in starts), y @ w_ih.T + b_ih, reverse=direction == 1)
            ends.append(end)
            outputs.append(out)
        y = jnp.concatenate(outputs, -1)
        if training and layer < layers - 1:
            y = kept(mode.part(layer), y, dropout_p)
    last = tuple(jnp.stack(each) for each in zip(*ends, strict=True))
    return (jnp.swapaxes(y, 0, 1) if batch_first else y, *last)


def _step(
    cell: Callable[..., State], weight: Array, bias: Array | float, state: State, inputs: Array
) -> tuple[State, Array]:
    state = cell(state, inputs, weight, bias)
    return state, state[0]


IN_MODE: dict[str, Callable[..., Any]] = {
    "gru.input": partial(recurrent, _gru_cell),
    "lstm.input": partial(recurrent, _lstm_cell),
    "rnn_relu.input": partial(recurrent, _simple_cell(jax.nn.relu)),
    "rnn_tanh.input": partial(recurrent, _simple_cell(jnp.tanh)),
}
