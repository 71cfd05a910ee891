"""Says what to write instead, if a function of the user's fails because JAX traces it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

INSTEAD = {  # the beginning of an error, a regular expression: what to write instead; the first that fits
    "TracerBoolConversionError": "`if`, `while`, `and` and `or` need a value: use jnp.where(condition, a, b), "
    "jax.lax.cond, jax.lax.while_loop, & and |",
    "TracerArrayConversionError": "NumPy needs values: use jnp.mean instead of np.mean, and so on (import jax.numpy as "
    "jnp)",
    "NonConcreteBooleanIndexError": "A boolean mask as an index needs values: use jnp.where(mask, x, 0)",
    "TracerIntegerConversionError": "range() and the index of a list need a value: use jax.lax.fori_loop, and "
    "jnp.asarray(values)[i]",
    "ConcretizationTypeError": "float(), int(), .item() and a shape need a value: compute with the array",
    "UnexpectedTracerError": "One has left its function in a variable, or in a dict that was changed: return a new "
    "dict, and what later rounds need in the state of the client or of the server",
    "AttributeError: .*Tracer": "They have the methods of NumPy arrays, and not those of PyTorch tensors",
    "AttributeError: can't set attribute": "Named tuples do not change: return server._replace(name=value)",
    "TypeError: .*item assignment": "They do not change: use x = x.at[i].set(value)",
    "TypeError: unsupported operand.*'dict'": "Parameters are nested dicts: use jax.tree.map(jnp.subtract, a, b)",
    "TypeError: .*Tracer": "Use the functions of jax.numpy, and jax.debug.print to see values",
}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Adds a note to an error of a function of the user's that JAX cannot trace: what to write instead."""
    try:
        yield
    except Exception as error:
        for each in (error, error.__cause__):  # a check of a function raises ConfigurationError from JAX's error
            raised = f"{type(each).__name__}: {each}"
            instead = next((text for begins, text in INSTEAD.items() if re.match(begins, raised, re.DOTALL)), None)
            if instead and not any(instead in note for note in getattr(error, "__notes__", ())):
                error.add_note(
                    "fedjax_drift compiles the functions that you pass: JAX calls them once, with arrays that have a "
                    f'shape and no values yet. {instead}. See "Functions that JAX cannot trace" in docs/errors.md.'
                )
        raise
