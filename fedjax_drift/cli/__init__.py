"""The command line.

`commands.py` parses a command. `run.py`, `resume.py`, `tune.py`, `data.py`, `plan.py` and `quickstart.py` execute the
commands. `flags.py` has the flags of a simulation, and `values.py` reads their values. `render.py` formats the printed
output, and `output.py` writes the files. `parsed_run.py` has the Python function `fd.parse_run`.

These modules may import all other modules of the package, and the package imports them only when they are used.
"""

from fedjax_drift.cli.commands import main as main
