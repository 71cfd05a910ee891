"""MovieLens as click-through prediction: which film a user rates next. One client per user.

Every rating is a positive example, with any number of stars. The latest rating of each user is a test example. Negative
examples are films that the user never rated. Every example includes the films that the user rated before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedjax_drift import checks
from fedjax_drift.data import files
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.files import Column
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.errors import ConfigurationError
from fedjax_drift.spec import Count

FILENAMES = {"1m": "ml-1m/ratings.dat", "latest-small": "movielens_latest_small.npz"}
AGES = (1, 18, 25, 35, 45, 50, 56)  # ML-1M names an age group by its lowest age
USER = re.compile(rf"([1-9]\d{{0,3}})::([FM])::({'|'.join(map(str, AGES))})::(1?\d|20)::([^:]+)", re.ASCII)
RATING = re.compile(r"([1-9]\d{0,3})::([1-9]\d{0,3})::([1-5])::(\d{9,10})", re.ASCII)  # a shorter time is truncated


class Ratings(NamedTuple):
    """R ratings of U users."""

    user: np.ndarray  # [R], 0..U-1
    item: np.ndarray  # [R], ids of the films, >= 1
    time: np.ndarray  # [R], in seconds
    profile: np.ndarray  # [U, 5]: ids of user, gender, age, occupation and zip code; 0 if unknown
    path: Path  # the file


def load(
    request: Request,
    *,
    size: Literal["1m", "latest-small"] = "1m",
    history: Count = 30,
    negatives: Count = 4,
    test_negatives: Count = 99,
) -> Samples:
    """MovieLens as click-through prediction: 2 classes, int16 [6 + history], one client per user. For `fd.models.din`.

    An example has the ids of user, gender, age, occupation, zip code and candidate film, and those of the `history`
    films that the user rated before the candidate. 0 means none or unknown.

    Every rating is an example with label 1. For each rating, `negatives` films that the user never rated are added as
    examples with label 0. The latest rating of each user is a test example, followed by `test_negatives` distinct
    films with label 0, in the order that `fd.ranking` expects. These films are drawn with `seed` from all rated films.

    size: "1m" is MovieLens 1M (`ml-1m/ratings.dat` and `users.dat`, as published by GroupLens; 6,040 users).
        "latest-small" is `movielens_latest_small.npz` with user_id, movie_id and timestamp [R] (610 users without
        profiles). (Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 2015. The protocol is
        that of FedEve.)
    """
    read = _read_1m if size == "1m" else _read_latest_small
    return leave_latest_out(read(request.path()), history, negatives, test_negatives, request.seed)


def leave_latest_out(ratings: Ratings, history: int, negatives: int, test_negatives: int, seed: int) -> Samples:
    """Splits the ratings: the latest rating of each user is for test. Negative examples are drawn with ``seed``.

    An example is [user, gender, age, occupation, zip, candidate, history...]. The history has the last H = ``history``
    films that the user rated before the candidate, the newest last. A shorter history is padded with 0 in front. A
    negative example has the history of its positive example. Ratings of the same second keep the order of the file. A
    user with a single rating is left out.
    """
    rng = np.random.default_rng(seed)
    order = np.lexsort((ratings.time, ratings.user))
    order = order[np.bincount(ratings.user)[ratings.user[order]] > 1]
    if not len(order):
        what = f"cannot use {ratings.path}: at least 1 user must have rated 2 films"
        checks.refuse(what, "none", "download it again")
    user, item = ratings.user[order], ratings.item[order]
    first = np.diff(user, prepend=-1) > 0
    latest = np.append(first[1:], True)
    before = np.arange(len(user)) - np.maximum.accumulate(np.where(first, np.arange(len(user)), 0))
    seen = _histories(item, before, history)
    unrated, free = _unrated(user, item)
    if (short := free[user] < test_negatives).any():
        first_short = user[short][0]
        who = f"user {ratings.profile[first_short, 0]} never rated in {ratings.path}"
        what = f"test_negatives must be at most {free[first_short]}, the number of films that {who}"
        checks.refuse(what, test_negatives, "use a smaller number, also for group of fd.ranking.scores")

    def examples(at: np.ndarray, drawn: np.ndarray) -> Pair:
        """For each of the ratings ``at``: an example with its film, and one for each film that was drawn."""
        candidates = np.column_stack([item[at], unrated(user[at], drawn)])
        x, y = np.empty((*candidates.shape, 6 + history), np.int16), np.zeros(candidates.shape, np.int32)
        x[..., :5] = ratings.profile[user[at], None]
        x[..., 5] = candidates
        x[..., 6:] = seen[at, None]
        y[:, 0] = 1
        return x.reshape(-1, 6 + history), y.reshape(-1)

    drawn = rng.integers(0, free[user[~latest], None], ((~latest).sum(), negatives))
    different = [rng.choice(free[u], test_negatives, replace=False, shuffle=False) for u in user[latest]]
    return Samples(
        train=examples(~latest, drawn),
        test=examples(latest, np.stack(different)),
        writer=np.repeat(user[~latest], 1 + negatives),
        test_writer=np.repeat(user[latest], 1 + test_negatives),
    )


def sizes(data: FederatedData) -> tuple[int, ...]:
    """Returns the vocabulary sizes for `fd.models.din(sizes)`: the highest id plus 1 of each of the six columns.

    The last size is that of the films. Raises ValueError for data of another kind.
    """
    if data.x.ndim != 2 or data.x.dtype.kind not in "iu" or data.x.shape[1] < 7:
        got = f"{data.x.dtype}{list(data.x.shape[1:])}"
        checks.refuse("din needs examples of at least 7 integer ids", got, "load movielens, or use another model")
    parts = [x.max(0) for x in (data.x, data.x_test) if x is not None]
    highest = np.max(parts, 0).astype(int)
    return (*(highest[:5] + 1).tolist(), int(highest[5:].max()) + 1)


def _histories(item: np.ndarray, before: np.ndarray, length: int) -> np.ndarray:
    """Returns the history of each rating, int16 [R, length], padded with 0 in front.

    The history of rating r has the films of the last ``before[r]`` ratings that precede it, at most ``length``. item:
    the film of each rating, sorted by user and time.
    """
    padded = np.concatenate([np.zeros(length, np.int16), item.astype(np.int16)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)[: len(item)]
    return np.where(np.arange(length)[None] >= length - before[:, None], windows, 0).astype(np.int16)


def _unrated(user: np.ndarray, item: np.ndarray) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], np.ndarray]:
    """Returns a function ``pick(user [P], r [P, n])`` and the number of unrated films of each user, [U].

    ``pick`` returns film number r (from 0) among the films that the user never rated. Only films that at least one user
    rated are used.
    """
    catalogue, column = np.unique(item, return_inverse=True)
    films = len(catalogue)
    owner, rated = np.divmod(np.unique(user.astype(np.int64) * films + column), films)
    counts = np.bincount(owner)
    start = np.cumsum(counts) - counts
    gaps = rated - (np.arange(len(rated)) - start[owner])  # unrated films in front of each rated one
    keys = owner * (films + 1) + gaps

    def pick(user: np.ndarray, r: np.ndarray) -> np.ndarray:
        passed = np.searchsorted(keys, user[:, None] * (films + 1) + r, side="right") - start[user, None]
        return catalogue[r + passed]

    return pick, films - counts


def _read_1m(path: Path) -> Ratings:
    users = path.with_name("users.dat")
    wanted = "user::gender::age::occupation::zip as in ML-1M"
    people = [match.groups() for match in files.parsed_lines(users, USER.fullmatch, wanted, "latin-1")]
    ids, genders, ages, occupations, zips = zip(*sorted(people, key=lambda person: int(person[0])), strict=True)
    known = np.array(ids, int)
    with files.plain_errors(users):
        if (twice := known[1:][known[1:] == known[:-1]]).size:
            checks.refuse(f"user {twice[0]} must have one line", "several", "download it again")
    profile = np.column_stack([
        known,
        1 + (np.array(genders) == "M"),
        1 + np.searchsorted(AGES, np.array(ages, int)),
        1 + np.array(occupations, int),
        1 + np.unique(zips, return_inverse=True)[1],
    ])  # fmt: skip
    wanted = "user::movie::stars::seconds as in ML-1M"
    lines = files.parsed_lines(path, RATING.fullmatch, wanted, "latin-1")
    rated = np.array([match.groups() for match in lines], np.int64)
    user = np.searchsorted(known, rated[:, 0]).clip(max=len(known) - 1)
    with files.plain_errors(path):
        if (strange := known[user] != rated[:, 0]).any():
            line = strange.argmax()
            why = f"the user {rated[line, 0]} of line {line + 1} is not in {users}: download both again"
            raise ConfigurationError(why)
    return Ratings(user, rated[:, 1], rated[:, 3], profile, path)


def _read_latest_small(path: Path) -> Ratings:
    ids, movies, time = files.read_npz(path, dict.fromkeys(("user_id", "movie_id", "timestamp"), Column())).values()
    known, user = np.unique(ids, return_inverse=True)
    item = np.unique(movies, return_inverse=True)[1] + 1  # 9,724 films, whose original ids go up to 193,609
    for what, numbers in (("user_id must be", known), ("the number of films must be", item)):
        if not 0 < numbers.min() <= numbers.max() < 2**15:
            got = f"{numbers.min()}..{numbers.max()}"
            checks.refuse(f"cannot use {path}: {what} in 1..{2**15 - 1}", got, "use a smaller data set")
    return Ratings(user, item, time, np.pad(known[:, None], ((0, 0), (0, 4))), path)
