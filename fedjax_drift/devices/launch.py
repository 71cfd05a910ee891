"""Starts compiled programs so that their collective operations do not block each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import Mesh

from fedjax_drift.devices.mesh import is_described
from fedjax_drift.errors import ConfigurationError

_launched: list[jax.Array] = []  # one output of the last program that `launch` started


def wait_for_turn(mesh: Mesh) -> None:
    """Waits until the last program that `launch` started has ended, if the mesh has several CPU devices.

    On CPU devices, a program holds threads while its collective operations wait for the other devices. XLA aborts the
    process if no thread is left. Without waiting, a loop over a thousand short rounds would queue a thousand programs.
    Accelerators need no waiting, because they have a queue for each device.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        for array in _launched:
            with suppress(
                jax.errors.JaxRuntimeError
            ):  # The program failed. Reading its outputs raises the error again.
                if not array.is_deleted():
                    array.block_until_ready()
        _launched.clear()


def launch(mesh: Mesh, program: Callable, *arguments: Any) -> Any:
    """Returns ``program(*arguments)``, called after `wait_for_turn`."""
    if is_described(mesh):
        raise ConfigurationError("nothing can run on devices that are only described: use plan(), or leave mesh= out")
    wait_for_turn(mesh)
    outputs = program(*arguments)
    if not traced((arguments, outputs)):
        _launched[:] = [min(jax.tree.leaves(outputs), key=lambda leaf: leaf.size)]
    return outputs


def intact(tree: Any) -> bool:
    """Whether all arrays can be read. Arrays that were donated, and the outputs of a failed program, can't be."""
    try:
        jax.block_until_ready(tree)
    except (RuntimeError, ValueError):  # JAX raises either, depending on the device
        return False
    return True


def traced(tree: Any) -> bool:
    """Whether any leaf is a tracer of `jax.jit`, `jax.vmap` or another transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
