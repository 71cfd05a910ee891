"""The command line.

`commands.py` parses a command. `run.py`, `data.py`, `plan.py` and `quickstart.py` execute the commands. `render.py`
formats their output. `parsed_run.py` has the Python function `fd.parse_run`. These modules may import all other modules
of the package.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns the exit code:

    - 0: success.
    - 1: an algorithm could not continue.
    - 2: invalid input, with one line on stderr.
    - 130: stopped by Ctrl-C.
    - 143: stopped by SIGTERM.
    """
    from fedjax_drift.cli.commands import main as run_command  # imported here, because it imports the whole library

    return run_command(argv)
