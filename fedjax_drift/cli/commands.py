"""The commands `fedjax-drift quickstart`, `run`, `tune`, `data` and `plan`.

Before anything is compiled and before the output folder is created, a command checks its options, reads the data and
creates every simulation.

- Invalid input prints one line on stderr, and the exit code is 2.
- If an algorithm cannot continue, one line is printed, the next algorithm runs, and the exit code is 1.
- Ctrl-C keeps the completed rounds and exits with 130. SIGTERM does the same and exits with 143.
- `run --resume FOLDER` and `tune --resume FOLDER` repeat the command that created FOLDER, with the algorithms restored
  from their checkpoints.

With --distributed several processes run the same command. Only the first process prints and writes files. All processes
exit with the same code.

Each command is a module. Its docstring is the help of the command. `add_flags` adds the flags of the command. `start`
checks their values, and returns the function that does the work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

import jax

import fedjax_drift as fd
from fedjax_drift.checks import nearest
from fedjax_drift.cli import data, plan, quickstart, run, tune
from fedjax_drift.cli.flags import Parser
from fedjax_drift.cli.render import show_error, show_warning
from fedjax_drift.cli.resume import resumed
from fedjax_drift.devices.processes import agree
from fedjax_drift.errors import ConfigurationError, MissingPackageError

COMMANDS = {"quickstart": quickstart, "run": run, "tune": tune, "data": data, "plan": plan}
REFUSALS = (ConfigurationError, MissingPackageError, OSError)  # any other exception is a bug and prints a traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns the exit code:

    - 0: success.
    - 1: an algorithm could not continue.
    - 2: invalid input, with one line on stderr.
    - 130: stopped by Ctrl-C.
    - 143: stopped by SIGTERM.
    """
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            if argv is None:  # called from the shell, not from Python
                with contextlib.suppress(OSError):  # without a cache folder every program is compiled
                    fd.use_compilation_cache()
            words, folder = resumed(sys.argv[1:] if argv is None else list(argv))
            args = parse(words if folder is None else [*words, f"--resume={folder}"])
            return _together(args, words) if getattr(args, "distributed", None) else args.command(args, words)()
        except BrokenPipeError:  # the reader of the output has exited, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except REFUSALS as error:
            show_error(error)
            return 2
        except KeyboardInterrupt:
            print("fedjax-drift: interrupted", file=sys.stderr)
            return 130


def _together(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the command as one of several processes. An error that all processes find is printed by the first only."""
    address, num_processes, process_id = args.distributed
    try:
        fd.distributed.initialize(address, num_processes, process_id, cpu_devices=args.devices)
    except RuntimeError as error:
        raise ConfigurationError(f"--distributed: {error}") from error
    mesh, wrong = fd.clients_mesh(), None
    (args.started,), _ = agree(mesh, [args.started])  # for the name of the output folder
    with contextlib.nullcontext() if fd.distributed.is_first() else contextlib.redirect_stdout(None):
        try:
            work = args.command(args, argv)
        except REFUSALS as error:
            wrong = str(error)
        (first_wrong,), (any_wrong,) = agree(mesh, [wrong is not None], [wrong is not None])
        if wrong is not None and (fd.distributed.is_first() or not first_wrong):
            show_error(f"process {jax.process_index()}: {wrong}")
        return 2 if any_wrong else work()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the values of the flags, and the command as `command`."""
    parser = Parser(prog="fedjax-drift", description="Federated learning for the study of drift.")
    parser.add_argument("--version", action="version", version=f"fedjax-drift {fd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers = {}
    for name, module in COMMANDS.items():
        description, examples, epilog = (module.__doc__ or "").partition("examples:\n")
        summary = description.partition("\n")[0]
        subparsers[name] = commands.add_parser(name, help=summary, description=description, epilog=examples + epilog)
        module.add_flags(subparsers[name])
        subparsers[name].set_defaults(command=module.start)
    if not argv:
        parser.print_help()
        parser.exit()
    if argv[0] not in (*subparsers, "-h", "--help", "--version"):
        near = nearest(argv[0], subparsers)
        raise ConfigurationError(f"the command must be one of {', '.join(subparsers)}, got {argv[0]!r}{near}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        subparsers[argv[0]].refuse(unknown[0])
    return args
