"""The command line: `commands.py` parses a command, `run.py`, `data.py` and `quickstart.py` do it, `render.py` prints.

`parsed_run.py` is also the Python function `fd.parse_run`. The modules import everything below and public names.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns 0, 1 (an algorithm cannot continue), 2 (bad input, one line on stderr), 130 (Ctrl-C) or 143 (SIGTERM).
    """
    from fedjax_drift.cli.commands import main as run_command  # it needs all of the library, `fd.parse_run` does not

    return run_command(argv)
