"""`--resume OUTPUT` of the commands run and tune: repeats the command that created OUTPUT, from its checkpoints."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import fedjax_drift as fd
from fedjax_drift import checks
from fedjax_drift.cli.flags import Parser
from fedjax_drift.cli.output import command_of, resume_words
from fedjax_drift.cli.values import LOCAL_PATH
from fedjax_drift.simulation import sweep

# Options that may be changed with --resume, for each command.
EXECUTION = ("--devices", "--devices-per-client", "--lanes", "--no-progress")
RESUMED = {
    "run": (
        "--rounds", "--target", "--by", "--until-time", "--until-megabytes", "--patience", "--stream", "--bank",
        "--distributed", *EXECUTION,
    ),
    "tune": EXECUTION,
}  # fmt: skip
Restored = tuple[fd.ServerState | None, list[dict[str, Any]]]  # the state, and the history of all seeds


def resumed(argv: Sequence[str]) -> tuple[Sequence[str], Path | None]:
    """Returns (argv, None) without --resume.

    With `run --resume OUTPUT` or `tune --resume OUTPUT`, returns (words, OUTPUT). The words are those of the command
    that created OUTPUT, followed by the options of this command.

    Raises ConfigurationError if the run cannot be resumed.
    """
    command = argv[0] if argv else ""
    if command not in RESUMED or not any(word.partition("=")[0] == "--resume" for word in argv):
        return argv, None
    parser = Parser(prog=f"fedjax-drift {command}", add_help=False)
    parser.add_argument("--resume", type=LOCAL_PATH, required=True)
    args, changes = parser.parse_known_args(argv[1:])
    for flag in (word.partition("=")[0] for word in changes if word.startswith("--")):
        if flag not in RESUMED[command]:
            checks.refuse(
                f"with --resume only {', '.join(RESUMED[command])} may be changed", repr(flag), "leave it out"
            )

    def refuse(why: str, fix: str, cause: Exception | None = None) -> NoReturn:
        checks.refuse(f"--resume must be the output folder of a {command}", f"{args.resume}, {why}", fix, cause)

    try:
        # Without --distributed, because ports and numbers may differ.
        created = re.sub(r" --distributed(?:[ =]\S+:\d+,\d+,\d+)?(?= |$)", "", command_of(args.resume))
        _, *words = shlex.split(created)
    except FileNotFoundError as error:
        fix = f"give the folder that the {command} printed. Paths are relative to {os.getcwd()}"
        refuse("which has no config.json", fix, error)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # RecursionError: thousands of brackets
        refuse("whose config.json can't be read", f"start this {command} again from the beginning", error)
    if words[:1] != [command]:
        other = shlex.join(resume_words(args.resume, words[0])) if words and words[0] in RESUMED else "choose another"
        refuse("which another command has created", other)
    return [*words, *changes], args.resume


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
            _, histories = sweep.restored(sim, kept, seeds, rounds)
            if any(histories):
                pairs = zip(seeds, histories, strict=True)
                found[name] = None, [{"seed": seed, **record} for seed, history in pairs for record in history]
        elif kept.rounds:
            found[name] = kept.restore(sim)
    return found
