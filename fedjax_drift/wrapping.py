"""Algorithms around other algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedjax_drift.types import Algorithm, ClientResult, PyTree, Round, Work

Lens = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
PHASES = ("survey", "client_update")  # the functions of an algorithm whose results have a message


def _same(value: Any) -> Any:
    return value


def inside(
    base: Algorithm,
    *,
    server: str | Lens | None = None,
    client: str | None = None,
    received: Callable[[Any, PyTree, Work], tuple[Any, Work]] | None = None,
    message: Callable[[PyTree], PyTree] = _same,
    surveyed: Callable[[PyTree], PyTree] | None = None,
    sends: Callable[[Any, PyTree], PyTree] = lambda server, m: m,
) -> Algorithm:
    """Returns an algorithm around ``base``. Each of its functions calls that of the base with the base's variables.

    The variables of the new algorithm contain those of the base. The caller replaces the functions that it changes,
    among them ``init_server`` and ``init_client`` if there are more variables. All others are passed on.

    Args:
      server, client: the field of the outer variables that contains those of the base. None: they are the same. Or for
        the server the functions ``(outer) -> base`` and ``(outer, new base) -> new outer``.
      received: ``received(server, client, work) -> (server, work)`` of the base, on a client. Default: the base's part
        of the server's variables, and the same work.
      message: ``message(m)`` returns the base's part of a message, or of a mean of messages. Default: all of it.
      surveyed: the same for messages of `Algorithm.survey`.
      sends: ``sends(server, m)`` returns what a client sends in the place of the message m of the base, in both phases.
    """

    def part(variables: Any, field: str | Lens | None) -> Any:
        if isinstance(field, tuple):
            return field[0](variables)
        return variables if field is None else getattr(variables, field)

    def put(variables: Any, field: str | Lens | None, new: Any) -> Any:
        if isinstance(field, tuple):
            return field[1](variables, new)
        return new if field is None else variables._replace(**{field: new})

    def seen(of_round: Any) -> Any:
        """The `Work` or the `Round` of the base."""
        return of_round if surveyed is None else of_round._replace(surveyed=surveyed(of_round.surveyed))

    def on_client(function: Callable) -> Callable:
        def call(s: Any, c: PyTree, work: Work) -> Any:
            of_base, work = (part(s, server), work) if received is None else received(s, c, work)
            result = function(of_base, part(c, client), seen(work))
            if not isinstance(result, ClientResult):
                return result
            return result._replace(message=sends(s, result.message), state=put(c, client, result.state))

        return call

    def on_server(function: Callable, s: Any, mean: PyTree, context: Round) -> Any:
        return function(part(s, server), message(mean), seen(context))

    lifted: dict[str, Callable[[Callable], Callable]] = {
        "client_update": on_client,
        "survey": on_client,
        "personal": on_client,
        "adapt": on_client,
        "server_update": lambda f: lambda s, mean, context: put(s, server, on_server(f, s, mean, context)),
        "report": lambda f: lambda s, mean, context: on_server(f, s, mean, context),
        "finish": lambda f: lambda s, c: put(c, client, f(part(s, server), part(c, client))),
        "complete": lambda f: lambda c, m: put(c, client, f(part(c, client), message(m))),
        "observe": lambda f: lambda s, metrics: put(s, server, f(part(s, server), metrics)),
        "models": lambda f: lambda s: f(part(s, server)),
    }
    functions = {name: f for name in lifted if (f := getattr(base, name)) is not None}
    changes: dict[str, Any] = {name: lifted[name](function) for name, function in functions.items()}
    return base._replace(**changes)
