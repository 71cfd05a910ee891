"""`fedjax-drift run --resume OUTPUT`: repeats the command that created OUTPUT, from the checkpoints in OUTPUT."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedjax_drift as fd
from fedjax_drift.cli.flags import Parser
from fedjax_drift.cli.parsed_run import BANKS
from fedjax_drift.cli.values import local_path
from fedjax_drift.devices.processes import spans_processes
from fedjax_drift.disk import unused
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.run_folder import CONFIG
from fedjax_drift.storage.checkpoint import restore_together, split_by_run

# Options that may be changed with --resume.
RESUMED = (
    "--rounds", "--target", "--by", "--until-time", "--until-megabytes", "--patience", "--devices",
    "--devices-per-client", "--lanes", "--stream", "--bank", "--no-progress",
)  # fmt: skip
Restored = tuple[fd.ServerState | None, list[dict[str, Any]]]  # the state, and the history of all seeds


def resumed(argv: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Returns (argv, None) without --resume.

    With `run --resume OUTPUT`, returns (words, OUTPUT). The words are those of the command that created OUTPUT,
    followed by the options of this command.

    Raises ConfigurationError if the run cannot be resumed.
    """
    if argv[:1] != ["run"] or not any(word.partition("=")[0] == "--resume" for word in argv):
        return argv, None
    parser = Parser(prog="fedjax-drift run", add_help=False)
    parser.add_argument("--resume", type=local_path, required=True)
    args, changes = parser.parse_known_args(argv[1:])
    for flag in (word.partition("=")[0] for word in changes if word.startswith("--")):
        if flag not in (*RESUMED, "--distributed"):
            raise ConfigurationError(
                f"with --resume only {', '.join(RESUMED)} and --distributed may be changed, got {flag!r}: leave it out"
            )
    try:
        command = str(json.loads((args.resume / CONFIG).read_text())["command"])
        # Without --distributed, because ports and numbers may differ.
        words = shlex.split(re.sub(r" --distributed(?:[ =]\S+:\d+,\d+,\d+)?(?= |$)", "", command))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--resume must be the output folder of a run, got {args.resume}, which has no config.json: give the "
            f"folder that the run printed. Paths are relative to {os.getcwd()}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # RecursionError: thousands of brackets
        raise ConfigurationError(
            f"--resume must be the output folder of a run, got {args.resume}, whose config.json can't be read: start "
            "this run again from the beginning"
        ) from error
    return [*words[1:], *changes], args.resume


def resume_words(output: Path) -> list[str]:
    """Returns the words of the command that resumes the run in this folder."""
    return ["fedjax-drift", "run", "--resume", str(output)]


def absolute_paths(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command with absolute paths, so that it can be repeated in another folder."""
    words, flags = [], ("--init", "--data-dir")
    for before, word in zip(["", *argv], argv, strict=False):
        flag, _, path = word.partition("=")
        if flag in flags and path:
            word = f"{flag}={os.path.abspath(os.path.expanduser(path))}"
        words.append(os.path.abspath(os.path.expanduser(word)) if before in flags else word)
    return words


def restored(
    simulations: Mapping[str, fd.Simulation],
    checkpoints: Mapping[str, fd.Checkpoints],
    seeds: Sequence[int],
    rounds: int,
) -> dict[str, Restored]:
    """Returns the newest state and the history of each algorithm that has a checkpoint.

    With several seeds the state is None, because the sweep restores the states itself.
    """
    found: dict[str, Restored] = {}
    for name, sim in simulations.items():
        kept = checkpoints[name]
        if len(seeds) > 1:
            each = split_by_run(kept, [f"seed-{seed}" for seed in seeds])
            _, histories = restore_together(each, [sim.specification] * len(seeds), rounds)
            if any(histories):
                pairs = zip(seeds, histories, strict=True)
                found[name] = None, [{"seed": seed, **record} for seed, history in pairs for record in history]
        elif kept.rounds:
            found[name] = kept.restore(sim)
        elif sim.bank not in BANKS and Path(sim.bank).is_dir() and not spans_processes(sim.mesh):
            bank = Path(sim.bank)  # of a run that ended before its first checkpoint
            bank.rename(unused(bank.with_name(bank.name + ".left")))
    return found
