"""Generated text for language models: speakers who share a lexicon, and differ in the order of their words.

A speaker's text is a Markov chain of words, each followed by a space. The log-odds that word j follows word i are
2 G_ij + alpha S_ij. G is the same for all speakers and S belongs to one speaker. Their entries are standard normal, and
-infinity on the diagonal, so that no word follows itself. With alpha = 0 all speakers are alike.

The entropy rate is exact, because words and spaces determine each other: the entropy of the next word divided by the
mean number of characters of a word with its space, both under the stationary distribution of the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from fedjax_drift import spec
from fedjax_drift.data.sources import Request, Samples
from fedjax_drift.spec import AmountOrZero, Count

WORDS = (
    "a all and art as be but by come day death dost eyes fair father fear for friend from give good grace hand hath "
    "have he heart heaven her here his honour i in is it king know lady let life light like lord love make man me more "
    "my never night no noble not now of our peace queen say shall she sleep so speak sweet sword tell that the thee "
    "then they thou thy time to tongue true what when which will with word world you"
).split()
CHARACTERS = " abcdefghijklmnopqrstuvwxyz"  # the ids 1, 2, ...; 0 is padding and does not occur


def load(
    request: Request,
    *,
    num_clients: Count = 100,
    num_rows: Annotated[int, spec.integer(2)] = 50,
    length: Count = 64,
    alpha: AmountOrZero = 1.0,
) -> Samples:
    """Generated text of `num_clients` speakers, for language models such as `fd.models.decoder`: 28 character ids.

    An example is a passage of `length` characters, int32 [length]. Its labels are the characters that follow each of
    them, int32 [length]. The ids are 1 for a space and 2..27 for a..z. The id 0 does not occur. A speaker has
    `num_rows` >= 2 passages, of which 10 %, at least one, are the speaker's test examples.

    Speakers use the same 88 words, and order them by Markov chains. The log-odds that word j follows word i are
    2 G_ij + alpha S_ij with standard normal entries, where G is the same for all speakers and S belongs to one.
    alpha >= 0 makes speakers differ. `fd.datasets.dialogue_entropy` gives the entropy rates, which no model's loss can
    be below.
    """
    rng = np.random.default_rng([request.seed, 1])
    texts = [passages(chain, num_rows, length + 1, rng) for chain in speakers(num_clients, alpha, request.seed)]
    rows = np.concatenate(texts)
    writer = np.repeat(np.arange(num_clients, dtype=np.int32), num_rows)
    is_test = np.arange(len(rows)) % num_rows < max(1, num_rows // 10)
    x, y = rows[:, :-1], rows[:, 1:]
    return Samples((x[~is_test], y[~is_test]), (x[is_test], y[is_test]), writer[~is_test], writer[is_test])


def speakers(num_clients: int, alpha: float, seed: int) -> Iterator[np.ndarray]:
    """The transition probabilities of each speaker's words, [words, words] for one speaker after another."""
    rng, words = np.random.default_rng(seed), len(WORDS)
    shared = 2 * rng.standard_normal((words, words))
    np.fill_diagonal(shared, -np.inf)
    for _ in range(num_clients):
        odds = np.exp(shared + alpha * rng.standard_normal((words, words)))
        yield odds / odds.sum(1, keepdims=True)


def stationary(chain: np.ndarray) -> np.ndarray:
    """The stationary distribution of a chain's words."""
    equations = chain.T - np.eye(len(chain))
    equations[-1] = 1  # the probabilities add up to 1
    return np.linalg.solve(equations, np.eye(len(chain))[-1])


def entropy_rate(chain: np.ndarray) -> float:
    """The entropy rate of a speaker's text, in nats per character."""
    share = stationary(chain)
    logs = np.log(chain, where=chain > 0, out=np.zeros_like(chain))
    return float(-share @ (chain * logs).sum(1) / (share @ [len(word) + 1 for word in WORDS]))


def passages(chain: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Passages of a speaker, int32 [rows, length] character ids, each starting somewhere in a text of its own."""
    longest = max(map(len, WORDS)) + 1
    spelled = np.zeros((len(WORDS), longest), np.int32)
    for row, word in zip(spelled, WORDS, strict=True):
        row[: len(word) + 1] = [CHARACTERS.index(character) + 1 for character in f"{word} "]
    share = stationary(chain)
    current = rng.choice(len(WORDS), rows, p=share / share.sum())
    upper = chain.cumsum(1)
    words = [current]
    for _ in range(length // 2 + longest):  # a word has at least two characters with its space
        draws = rng.random((rows, 1))
        current = np.minimum((upper[current] < draws).sum(1), len(WORDS) - 1)
        words.append(current)
    starts = rng.integers(longest, size=rows)
    ids = spelled[np.stack(words, 1)].reshape(rows, -1)
    return np.stack([row[row > 0][start : start + length] for row, start in zip(ids, starts, strict=True)])
