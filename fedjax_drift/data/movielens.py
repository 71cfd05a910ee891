"""MovieLens as click-through prediction: who watches what next, one client per user.

Every rating counts as a positive row, whatever its stars. A user's latest one is left out for the test; negative rows
are films that the user never rated. All rows carry what the user rated before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_drift.data import files, lines
from fedjax_drift.data.federated import FederatedData, Pair
from fedjax_drift.data.files import Column
from fedjax_drift.errors import ConfigurationError

SIZES = ("1m", "latest-small")
FILENAMES = {"1m": "ml-1m/ratings.dat", "latest-small": "movielens_latest_small.npz"}
HOW = "download MovieLens 1M (ml-1m.zip) from GroupLens' site and unpack it in data_dir"
AGES = (1, 18, 25, 35, 45, 50, 56)  # the youngest of each age group, which ML-1M writes for it
USER = re.compile(rf"([1-9]\d{{0,3}})::([FM])::({'|'.join(map(str, AGES))})::(1?\d|20)::([^:]+)", re.ASCII)
RATING = re.compile(r"([1-9]\d{0,3})::([1-9]\d{0,3})::([1-5])::(\d{1,12})", re.ASCII)
OPENED = 788_918_400  # 1995 in seconds: nobody rated before, and a time of 1997 or later that lacks a digit is less


class Ratings(NamedTuple):
    """Who rated what when, R ratings of U users."""

    user: np.ndarray  # [R], 0..U-1
    item: np.ndarray  # [R], ids >= 1
    time: np.ndarray  # [R]
    profile: np.ndarray  # [U, 5]: ids of user, gender, age, occupation and zip code; 0 where not known
    path: Path  # of the file


class Rows(NamedTuple):
    """The data set, its rows grouped by user; x int16 [..., 6 + H], y int32."""

    train: Pair
    test: Pair  # blocks of 1 + test_negatives rows, the positive one first
    user: np.ndarray  # [M]
    test_user: np.ndarray  # [M_test]


def read(places: Sequence[Path], size: str) -> Ratings:
    """The ratings, from the first folder that has them. Raises FileNotFoundError, and ValueError for damaged files."""
    return _read_1m(places) if size == "1m" else _read_latest_small(places)


def leave_latest_out(ratings: Ratings, history: int, negatives: int, test_negatives: int, seed: int) -> Rows:
    """Each user's latest rating for the test, the others for training, with negative rows drawn with ``seed``.

    A row is [user, gender, age, occupation, zip, candidate, history...]: the last H = ``history`` films rated before
    the candidate was, the newest last, 0 in front where there are fewer; negative rows have their positive one's.
    Ratings of the same second count in the file's order. A user with a single rating is left out.
    """
    rng = np.random.default_rng(seed)
    order = np.lexsort((ratings.time, ratings.user))
    order = order[np.bincount(ratings.user)[ratings.user[order]] > 1]
    if not len(order):
        raise ConfigurationError(
            f"cannot use {ratings.path}: some user must have rated 2 films, got none: download it again"
        )
    user, item = ratings.user[order], ratings.item[order]
    first = np.diff(user, prepend=-1) > 0
    latest = np.append(first[1:], True)
    before = np.arange(len(user)) - np.maximum.accumulate(np.where(first, np.arange(len(user)), 0))
    seen = _histories(item, before, history)
    unrated, free = _unrated(user, item)
    if (short := free[user] < test_negatives).any():
        which = user[short][0]
        raise ConfigurationError(
            f"test_negatives must be at most the {free[which]} films that user {ratings.profile[which, 0]} never "
            f"rated in {ratings.path}, got {test_negatives}: lower it, and the group of fd.ranking.scores with it"
        )

    def rows(at: np.ndarray, drawn: np.ndarray) -> Pair:
        candidates = np.column_stack([item[at], unrated(user[at], drawn)])
        return _rows(ratings.profile[user[at]], candidates, seen[at])

    drawn = rng.integers(0, free[user[~latest], None], ((~latest).sum(), negatives))
    different = [rng.choice(free[u], test_negatives, replace=False, shuffle=False) for u in user[latest]]
    return Rows(
        train=rows(~latest, drawn),
        test=rows(latest, np.stack(different)),
        user=np.repeat(user[~latest], 1 + negatives),
        test_user=np.repeat(user[latest], 1 + test_negatives),
    )


def sizes(data: FederatedData) -> tuple[int, ...]:
    """What `fd.models.din(sizes)` needs for these rows: the highest id of each embedding and 1; items come last.

    Raises ValueError for rows of another kind.
    """
    if data.x.ndim != 2 or data.x.dtype.kind not in "iu" or data.x.shape[1] < 7:
        raise ConfigurationError(
            f"din needs rows of at least 7 integer ids, got {data.x.dtype}{list(data.x.shape[1:])}: load movielens, or "
            "choose another model"
        )
    parts = [x.max(0) for x in (data.x, data.x_test) if x is not None]
    highest = np.max(parts, 0).astype(int)
    return (*(highest[:5] + 1).tolist(), int(highest[5:].max()) + 1)


def _rows(profile: np.ndarray, candidates: np.ndarray, history: np.ndarray) -> Pair:
    """Of profiles [P, 5], candidates [P, n], histories [P, H]: x int16 [P n, 6 + H], y 1 for each first candidate."""
    x = np.empty((*candidates.shape, 6 + history.shape[1]), np.int16)
    x[..., :5] = profile[:, None]
    x[..., 5] = candidates
    x[..., 6:] = history[:, None]
    y = np.zeros(candidates.shape, np.int32)
    y[:, 0] = 1
    return x.reshape(-1, x.shape[-1]), y.reshape(-1)


def _histories(item: np.ndarray, before: np.ndarray, length: int) -> np.ndarray:
    """int16 [R, length]: of ratings sorted by user and time, the items of the ``before`` [R] ratings of that user."""
    padded = np.concatenate([np.zeros(length, np.int16), item.astype(np.int16)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, length)[: len(item)]
    return np.where(np.arange(length)[None] >= length - before[:, None], windows, 0).astype(np.int16)


def _unrated(user: np.ndarray, item: np.ndarray) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], np.ndarray]:
    """``pick(user [P], r [P, n])``: the r-th film, from 0, that this user never rated, of all that anybody rated; and
    how many there are [U]."""
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


def _read_1m(places: Sequence[Path]) -> Ratings:
    path = lines.find(FILENAMES["1m"], places, f"{HOW}, or pass size='latest-small'")
    users = lines.find("ml-1m/users.dat", [path.parent.parent], "it comes with ratings.dat")
    people = _matches(users, USER, "user::gender::age::occupation::zip as in ML-1M")
    ids, genders, ages, occupations, zips = zip(*sorted(people, key=lambda person: int(person[0])), strict=True)
    known = np.array(ids, int)
    if (twice := known[1:][known[1:] == known[:-1]]).size:
        raise ConfigurationError(
            f"cannot use {users}: user {twice[0]} must be on one line, got several: download it again"
        )
    profile = np.column_stack([
        known,
        1 + (np.array(genders) == "M"),
        1 + np.searchsorted(AGES, np.array(ages, int)),
        1 + np.array(occupations, int),
        1 + np.unique(zips, return_inverse=True)[1],
    ])  # fmt: skip
    rated = np.array(_matches(path, RATING, "user::movie::stars::seconds as in ML-1M"), np.int64)
    if (early := rated[:, 3] < OPENED).any():
        line = early.argmax()
        raise ConfigurationError(
            f"cannot use {path}: seconds must be an integer >= {OPENED} (1995), got {rated[line, 3]} in line "
            f"{line + 1}: it is cut short or not MovieLens, download it again"
        )
    user = np.searchsorted(known, rated[:, 0]).clip(max=len(known) - 1)
    if (strange := known[user] != rated[:, 0]).any():
        line = strange.argmax()
        raise ConfigurationError(
            f"cannot use {path}: line {line + 1} is of user {rated[line, 0]}, whom {users} does not list"
        )
    return Ratings(user, rated[:, 1], rated[:, 3], profile, path)


def _matches(path: Path, pattern: re.Pattern[str], wanted: str) -> list[tuple[str, ...]]:
    """The groups of the pattern in every line of the file, at least one."""
    found = []
    with lines.opened(path, "latin-1") as file:
        for number, line in enumerate(file, 1):
            match = pattern.fullmatch(line.rstrip("\r\n"))
            if match is None:
                raise lines.damaged(number, wanted, line)
            found.append(match.groups())
        if not found:
            raise lines.damaged(1, wanted, "an empty file")
    return found


def _read_latest_small(places: Sequence[Path]) -> Ratings:
    how = "write it from ratings.csv of MovieLens ml-latest-small (GroupLens' site) with numpy.savez, arrays user_id, "
    path = lines.find(FILENAMES["latest-small"], places, how + "movie_id and timestamp [R], or pass size='1m'")
    spec = {"user_id": Column(lowest=1), "movie_id": Column(lowest=1), "timestamp": Column(lowest=0)}
    ids, movies, time = files.read_npz(path, spec).values()
    known, user = np.unique(ids, return_inverse=True)
    item = np.unique(movies, return_inverse=True)[1] + 1  # 9,724 of ids up to 193,609
    profile = np.pad(known[:, None], ((0, 0), (0, 4)))
    for name, highest in (("user_id", known.max()), ("movie_id", item.max())):
        if highest >= 2**15:
            raise ConfigurationError(
                f"cannot use {path}: {name} must stay below {2**15}, got {highest}: take a smaller set"
            )
    return Ratings(user, item, time, profile, path)
