"""Random sequences of public operations, compared with a plain Python loop over `round_fn` on one device.

    python tests/sequences.py SECONDS SEED
    python tests/sequences.py --replay SEED [--only INDEX ...]

A sequence draws a `Case` (what is simulated), three `Place`s (where) and about ten operations. The sequences of a run
have the seeds SEED, SEED + 1, ... A difference is reported with its leaf and with the shortest list of operations that
still shows it, and ``--replay`` plays them again. Ctrl-C ends the run. The exit status is 1 if there was a difference.

What must hold is what docs/concepts.md ("What a result depends on") promises:

    if this changes                        a client's loss, update and new state   the server variables
    the other clients of the cohort        bitwise identical                       different
    the number of devices or of lanes      equal up to rounding                    equal up to rounding
    where examples and states are stored   equal up to rounding                    equal up to rounding

and docs/scale.md ("Runs that survive"): "The resumed run is bitwise identical to a run that was never interrupted. On
another number of devices it is equal up to rounding." So there are three kinds of checks:

- Every operation starts from the state that the sequence has reached. The plain loop starts from a copy of this state,
  and its result must be the same up to rounding, see `rounding`.
- The operation `other_cohort` compares bits, as the first row says.
- At the end, the operations are played again without saves, restores, failures, measurements and evaluations, and with
  consecutive runs as one run (`uninterrupted`). They must reach the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_cases import SIZES, Case, K, Place, draw_case, draw_places, precision, simulate

import fedjax_drift as fd
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.measures.drift import MEASURES
from fedjax_drift.simulation.records import record

SHARED = 3  # consecutive seeds with the same case and places, because compilation takes most of the time
TABLE, NUDGES, FACTOR = 1e-6, 3, 30  # of `rounding`
RECENTRED = ("BatchNorm, average", "BatchNorm, local")  # models whose bias before BatchNorm consists of rounding errors
NOT_COMPARED = ("executed_steps", "executed_ratio", "seconds")  # in records and ``info``; they depend on lanes and time
OF_COHORT = ("selected", "update_cosine")  # entries of ``info`` that depend on the other clients


# --- comparisons ------------------------------------------------------------------------------------------------------


class Difference(AssertionError):
    pass


def leaves_of(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def check_bits(what: str, result: Any, expected: Any) -> None:
    for (path, a), b in zip(leaves_of(result).items(), leaves_of(expected).values(), strict=True):
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            raise Difference(f"{what}: {path} must have the same bits, got {a.ravel()[:6]} and {b.ravel()[:6]}")


def check_close(what: str, case: Case, rounds: int, result: Any, expected: Any, *nudged: Any) -> None:
    result, expected, *others = [leaves_of(tree) for tree in (result, expected, *nudged)]
    if result.keys() != expected.keys():
        raise Difference(f"{what}: only one of the results has {sorted(result.keys() ^ expected.keys())}")
    for path, b in expected.items():
        a, inexact = result[path], np.issubdtype(b.dtype, np.inexact)
        same = a.shape == b.shape and ((np.isfinite(a) == np.isfinite(b)) if inexact else a == b).all()
        values = [np.nan_to_num(v.astype(float)) for v in (a, b, *(other[path] for other in others))]
        most = rounding(case, rounds, *values[1:])
        if case.model in RECENTRED and "['hidden']['bias']" in path:  # BatchNorm cancels it: see docs/concepts.md
            most = max(most, FACTOR * rounding(case, rounds, expected[path.replace("'bias'", "'kernel'")]))
        if not same or np.abs(values[0] - values[1]).max(initial=0) > most:
            limit = f"up to {most:.2g}" if same else "exactly"
            raise Difference(f"{what}: {path} must be {b.ravel()[:6]} {limit}, got {a.ravel()[:6]}")


def rounding(case: Case, rounds: int, expected: np.ndarray, *nudged: np.ndarray) -> float:
    """The largest difference that rounding explains.

    It is that of the table, relative to the largest number of the leaf, or FACTOR times the difference that the plain
    loop makes if the last bits of its state are changed (`nudge`), whichever is larger. The second bound covers leaves
    that amplify rounding, such as a difference of two models that is divided by the learning rate.
    """
    table = TABLE * case.epsilon / float(jnp.finfo("float32").eps) * rounds * np.abs(expected).max(initial=0)
    return max([table, *(FACTOR * np.abs(other - expected).max(initial=0) for other in nudged)])


def nudge(case: Case, state: fd.ServerState, seed: int) -> fd.ServerState:
    """The state with another last bit in every floating-point number."""
    rng = np.random.default_rng(seed)

    def leaf(a: np.ndarray) -> np.ndarray:
        step = case.epsilon if np.issubdtype(a.dtype, np.inexact) else 0
        return (a + a * step * rng.choice([-1, 1], a.shape)).astype(a.dtype)

    return state._replace(server=jax.tree.map(leaf, state.server), clients=jax.tree.map(leaf, state.clients))


def on_host(state: fd.ServerState) -> fd.ServerState:
    """A copy of a state in host memory, with the states of all clients."""
    ids, stored = np.arange(len(SIZES)), hasattr(state.clients, "gather")
    clients = state.clients.gather(ids) if stored else jax.tree.map(lambda a: np.array(a)[ids], state.clients)
    key = jax.random.wrap_key_data(np.array(jax.random.key_data(state.key)))  # a round may overwrite the other one
    others = jax.tree.map(np.array, state._replace(key=(), clients=()))
    return others._replace(key=key, clients=clients)


def reached(state: fd.ServerState, told: Any = ()) -> dict[str, Any]:
    """What is compared after rounds. told: ``info``, or records."""
    told = [{name: value for name, value in t.items() if name not in NOT_COMPARED} for t in np.atleast_1d(told)]
    return {"key": jax.random.key_data(state.key), "told": told} | on_host(state)._replace(key=None)._asdict()


# --- operations -------------------------------------------------------------------------------------------------------


class Player:
    """Plays operations: the state that they have reached, and the simulation at the current place."""

    def __init__(self, case: Case, place: Place, seed: int, folder: Path, checked: bool) -> None:
        self.case, self.folder, self.checked, self.saves = case, folder, checked, 0
        self.plain = simulate(case, Place(), folder)
        self.place, self.sim = place, simulate(case, place, folder)
        self.state = self.sim.init(jax.random.key(seed))

    @property
    def overwrites(self) -> bool:
        """Whether a round makes the state before it invalid."""
        return self.place.donate or self.sim.setup.states_on_host

    def checkpoints(self) -> fd.Checkpoints:
        self.saves += 1
        return fd.Checkpoints(self.folder / f"run-{self.saves}", every=2)

    def agrees(self, what: str, before: fd.ServerState, result: Any, plain: Callable, rounds: int = 1) -> None:
        """Compares a result with ``plain(before)``."""
        if self.checked:
            states = [before, *(nudge(self.case, before, seed) for seed in range(NUDGES))]
            check_close(what, self.case, rounds, result, *[plain(state) for state in states])

    def advance(self, what: str, rounds: int, function: Callable[[], tuple], plain: Callable | None = None) -> None:
        """Advances by ``function() -> (state, told)``, and compares with ``plain(state, told)``, the plain loop."""
        before, old, plain = on_host(self.state), self.state, plain or self.loop
        self.state, told = function()
        if int(self.state.round) < before.round + rounds:
            raise KeyboardInterrupt  # the user's, which `run` took for itself
        self.agrees(what, before, reached(self.state, told), lambda state: reached(*plain(state, told)), rounds)
        if self.checked and not self.overwrites:
            check_bits(f"{what}: the state before it", reached(old), reached(before))

    def loop(self, state: fd.ServerState, records: list[dict]) -> tuple[fd.ServerState, list[dict]]:
        """The plain loop over `round_fn`. It evaluates after the rounds whose record has scores."""
        expected = []
        for t, given in enumerate(records, int(state.round) + 1):
            state, info = self.plain.round_fn(state)
            expected.append(record(t, {name: np.asarray(value) for name, value in info.items()}))
            expected[-1] |= self.plain.evaluate(state) if "loss" in given else {}
        return state, expected


def move(p: Player, place: Place) -> None:
    """Another place. If sharded client states have other padding there, they take the way over a checkpoint."""
    sim = simulate(p.case, place, p.folder)
    if sim.setup.engine.state_rows != p.sim.setup.engine.state_rows:
        before, checkpoints = reached(p.state), p.checkpoints()
        p.sim.run(p.state, 0, progress=False, checkpoints=checkpoints)
        p.state, _ = checkpoints.restore(sim)
        check_bits("move", reached(p.state), before)
    p.place, p.sim = place, sim


def takes_cohort(sim: fd.Simulation) -> bool:
    """Whether a cohort may be given."""
    return sim.setup.options.clock.concurrency is None and sim.participation.expected is None


def one_round(p: Player, cohort: list[int] | None) -> None:
    old, cohort = p.state, cohort if takes_cohort(p.sim) else None
    p.advance("round", 1, lambda: p.sim.round_fn(p.state, cohort), lambda state, _: p.plain.round_fn(state, cohort))
    if p.checked and not p.overwrites:
        check_bits("the same round again", reached(p.sim.round_fn(old, cohort)[0]), reached(p.state))


class Planned(Exception):
    pass


FAILURES: dict[str, Any] = {"": None, "exception": Planned(), "KeyboardInterrupt": KeyboardInterrupt(), "Ctrl-C": None}


def run(p: Player, rounds: int, eval_every: int = 0, failure: str = "", after: int = 1) -> None:
    """A run, whose callback may fail after some rounds. The run is then continued."""
    last = int(p.state.round) + rounds

    def on_round(entry: dict) -> None:
        if failure and entry["round"] == last - rounds + after:
            if FAILURES[failure]:
                raise FAILURES[failure]
            signal.raise_signal(signal.SIGINT)

    def function() -> tuple[fd.ServerState, list[dict]]:
        options = {"eval_every": eval_every, "progress": False}
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                state, history = p.sim.run(p.state, rounds, on_round=on_round, **options)
        except Planned as error:
            state, history = error.state, error.history
        left = last - int(state.round) if failure else 0
        state, more = p.sim.run(state, left, **options) if left else (state, [])
        return state, history + more

    p.advance(f"run with {failure or 'no failure'}", rounds, function)


def saved(p: Player, rounds: int, new_process: bool) -> None:
    """Runs one round with checkpoints, and the others after restoring it, in this or in a new process."""

    def function() -> tuple[fd.ServerState, list[dict]]:
        checkpoints = p.checkpoints()
        close(p.sim.run(p.state, 1, 0, progress=False, checkpoints=checkpoints)[0])
        other = in_new_process if new_process else lambda function, *arguments: function(*arguments)
        copies = other(continued, p.case, p.place, p.folder, checkpoints, rounds - 1)
        move(p, p.place)
        state, history = checkpoints.restore(p.sim)
        check_bits("the restored state", reached(state), copies)
        return state, history

    p.advance("run with checkpoints", rounds, function)


def continued(case: Case, place: Place, folder: Path, checkpoints: fd.Checkpoints, rounds: int) -> dict[str, Any]:
    with precision(case):
        sim = simulate(case, place, folder)
        state, _ = sim.run(checkpoints.restore(sim)[0], rounds, 0, progress=False, checkpoints=checkpoints)
        copies = jax.device_get(reached(state))
        close(state)
        return copies


def in_new_process(function: Callable, *arguments: Any) -> Any:
    processes = multiprocessing.get_context("forkserver")  # forks from a process that has imported everything
    processes.set_forkserver_preload(["fedjax_drift", "flax"])
    settings = len(jax.devices()), jax.config.jax_compilation_cache_dir
    with ProcessPoolExecutor(1, processes, prepare, settings) as pool:
        return pool.submit(function, *arguments).result()


def close(state: fd.ServerState) -> None:
    """Closes the files of client states, so that another simulation may open them."""
    if hasattr(state.clients, "close"):
        state.clients.close()


def swept(p: Player, rounds: int, runs: int) -> None:
    """A sweep of runs that all start from the current state, where sweeps are possible."""
    if p.place._replace(devices=1, lanes=1, donate=False) != Place() or p.case.options["on_nonfinite"] == "raise":
        return
    start = [fd.Run(seed, {}, p.state, []) for seed in range(runs)]
    for each in p.sim.sweep(rounds, range(runs), 2, start=start, progress=False):
        p.state = start[0].state
        p.advance("sweep", rounds, lambda each=each: (each.state, each.history))


def asked(p: Player, method: str, *arguments: Any) -> None:
    """A method that does not change the state. What the library refuses (a measure of streamed data) is left out."""
    with contextlib.suppress(ConfigurationError):
        answer = getattr(p.sim, method)(p.state, *arguments)
        p.agrees(method, on_host(p.state), answer, lambda state: getattr(p.plain, method)(state, *arguments))


def other_cohort(p: Player, cohort: list[int]) -> None:
    """The first client of the cohort alone, and with the others."""
    if takes_cohort(p.sim) and p.case.redealt is None and "over_selection" not in p.case.options:
        sim = simulate(p.case, p.place._replace(bank="device", donate=False), p.folder)
        alone, among = [
            of_clients(sim, sim.round_fn(on_host(p.state), ids), cohort[:1]) for ids in (cohort[:1], cohort)
        ]
        check_bits("a client alone, and in a cohort", alone, among)


def of_clients(sim: fd.Simulation, result: tuple[fd.ServerState, dict], ids: list[int]) -> dict[str, Any]:
    """What a round gives for some clients. A state that `Algorithm.finish` completes depends on the whole cohort."""
    state, info = result
    cohort = np.asarray(info["cohort"]).tolist()
    at = [cohort.index(i) for i in ids if i in cohort]
    names = [n for n, value in info.items() if np.shape(value)[:1] == (len(cohort),) and n not in OF_COHORT]
    clients = on_host(state).clients if sim.algorithm.finish is None else ()
    return {"info": {n: np.asarray(info[n])[at] for n in names}, "state": jax.tree.map(lambda a: a[ids], clients)}


# --- sequences --------------------------------------------------------------------------------------------------------

Operation = tuple  # the name of a function, and its arguments after the player
QUESTIONS: list[Callable] = [
    lambda rng: ["evaluate"],
    lambda rng: ["evaluate_clients"],
    lambda rng: ["evaluate_clients", 1],
    lambda rng: ["measure", rng.sample([*MEASURES], 2)],
]
OPERATIONS: dict[Callable, Callable] = {  # and how their arguments are drawn
    one_round: lambda rng, places: [rng.choice([None, rng.sample(range(len(SIZES)), K)])],
    run: lambda rng, places: [rng.randint(1, 4), rng.choice([0, 1, 2]), rng.choice([*FAILURES]), rng.randint(1, 2)],
    saved: lambda rng, places: [rng.randint(2, 4), rng.random() < 0.3],
    swept: lambda rng, places: [rng.randint(1, 3), rng.randint(1, 3)],
    move: lambda rng, places: [rng.choice(places)],
    asked: lambda rng, places: rng.choice(QUESTIONS)(rng),
    other_cohort: lambda rng, places: [rng.sample(range(len(SIZES)), K)],
}
FUNCTIONS = {function.__name__: function for function in OPERATIONS}


def draw(seed: int) -> tuple[Case, list[Place], list[Operation]]:
    rng = random.Random(f"case {seed // SHARED}")
    case = draw_case(rng)
    places, rng = draw_places(rng, case), random.Random(f"operations {seed}")
    functions = rng.choices([*OPERATIONS], k=rng.randint(8, 12))
    return case, places, [(function.__name__, *OPERATIONS[function](rng, places)) for function in functions]


def uninterrupted(operations: list[Operation]) -> list[Operation]:
    """The operations that change the state, with consecutive runs as one run without failures."""
    shorter: list[Operation] = []
    for name, *arguments in operations:
        if name in ("run", "saved"):
            rounds = shorter.pop()[1] if shorter and shorter[-1][0] == "run" else 0
            shorter.append(("run", rounds + arguments[0]))
        elif name in ("one_round", "swept", "move"):
            shorter.append((name, *arguments))
    return shorter


def play(case: Case, place: Place, operations: list[Operation], seed: int) -> None:
    """Plays operations from the initial state of a seed. Raises Difference."""
    ends = []
    with tempfile.TemporaryDirectory() as folder, precision(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for checked, played in ((True, operations), (False, uninterrupted(operations))):
            p = Player(case, place, seed, Path(folder) / str(checked), checked)
            for name, *arguments in played:
                try:
                    FUNCTIONS[name](p, *arguments)
                except Difference:
                    raise
                except Exception as error:
                    raise Difference("".join(traceback.format_exception(error))) from error
            ends.append(reached(p.state))
            close(p.state)
        check_bits("the same without interruptions", *ends)


def tried(seed: int, only: list[int] | None = None) -> int:
    """Plays a sequence and prints what happened. Returns the number of operations, or 0 if there was a difference.

    only: the indices of the operations. Default: all.
    """
    case, places, operations = draw(seed)
    only = [*range(len(operations))] if only is None else only
    print(f"{seed}: {case.algorithm}, {case.model}, {len(only)} operations", end="", flush=True)
    message = ""
    for without in (None, *reversed(only)):  # then without operations that are not needed for the difference
        fewer = [i for i in only if i != without]
        try:
            play(case, places[0], [operations[i] for i in fewer], seed)
        except Difference as error:
            only, message = fewer, str(error)
        if not message:
            print(": agree", flush=True)
            return len(only)
    print(f"\n  {message}\n  {case}\n  {places[0]}", *[operations[i] for i in only], sep="\n  ")
    print(f"  python tests/sequences.py --replay {seed} --only {' '.join(map(str, only))}", flush=True)
    return 0


def prepare(devices: int, cache: str | None) -> None:
    """Sets JAX up in a new process."""
    fd.use_cpu_devices(devices)
    if cache:
        fd.use_compilation_cache(cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--replay", type=int, metavar="SEED", help="play only this sequence")
    parser.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="and only these of its operations")
    arguments = parser.parse_args()
    until, counts = time.monotonic() + arguments.seconds, {}
    with tempfile.TemporaryDirectory() as cache, contextlib.suppress(KeyboardInterrupt):
        prepare(4, cache)
        if arguments.replay is not None:
            sys.exit(not tried(arguments.replay, arguments.only))
        for seed in itertools.count(arguments.seed):
            if time.monotonic() > until:
                break
            if seed % SHARED == 0:
                jax.clear_caches()  # Linux limits the memory maps of a process
            counts[seed] = tried(seed)
    different = [seed for seed, number in counts.items() if not number]
    print(f"{len(counts)} sequences, {sum(counts.values())} operations, differences in {different}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
