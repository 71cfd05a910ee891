"""The papers' headline claims, each with the evidence of our runs and a verdict.

experiments/claims.toml lists them:

    [[claims]]
    paper = "FedDC"
    claim = "FedDC reaches 98 % on MNIST in fewer rounds than {worse}."
    table = "feddc/table1"
    score = "rounds to 98 %"
    better = "FedDC"
    worse = ["SCAFFOLD", "FedDyn"]  # one claim for each
    settings = ["MNIST D1 partial", "MNIST D2 partial"]
    note = "What explains a contradiction."

A claim with `target = 80` instead of `worse` is that the score of ``better`` is at least 80.

The verdict of a claim is that of most of its settings, after Holm's correction for all comparisons of the table:

- supported: the claim holds in at least half of its settings, and does not hold in none
- contradicted: it does not hold in at least half of its settings, and holds in none
- no difference: the methods are equal within a margin in all its settings
- open: otherwise, for example if there are too few seeds
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tables.comparison import CONFIDENCE, LOOKS, Verdict, reaches
from experiments.tables.papers import Table, check_name
from experiments.tables.results import Result

FILE = "claims.toml"
VERDICTS = ("supported", "contradicted", "no difference", "open")
THE_RULE = f"""\
The number of seeds follows a rule. It was written on 26 November 2026, and all later runs follow it. Methods are \
compared by the differences between runs with the same seed, after {LOOKS[0]} seeds. If the question is then open, 3 \
more seeds are run, at most {LOOKS[-1]} in all. A question is no longer open if the difference is significant, or if \
the interval includes 0 and is within a margin: half a percentage point, or a fifth of the rounds or the loss. Then \
the methods count as equal. (A published difference may be smaller.) The rule allows {len(LOOKS)} looks at a \
question, so each look has a quarter of the 5 %. The intervals are {100 * CONFIDENCE:g} % t intervals, and the \
p-values are multiplied by {len(LOOKS)} before Holm's correction. If there are seeds between two looks, the last \
look counts. The rule is the same for all comparisons of a table. A few comparisons had more than {LOOKS[0]} seeds \
before the rule was written, some of them because of a look at the first ones: FedEve and FedAvg at alpha 0.1 (12), \
FedEve and SCAFFOLD at alpha 0.01 (6), FedADC and SlowMo with s = 2 (6), FedGVRGM and FedAvg (5), and FedDC, FedDyn \
and SCAFFOLD with full participation on MNIST (5). There were 5 seeds of FedDC's synthetic data from the start, as \
the table says."""


class Claim(NamedTuple):
    """One headline claim: in these settings, one method is better than another, or its score is at least a target."""

    paper: str
    claim: str
    table: str
    score: str
    better: str
    worse: str  # "" if the claim has a target
    settings: tuple[str, ...]
    note: str = ""  # what explains a contradiction
    target: float = math.nan

    @property
    def short(self) -> str:
        """The claim in a few words, without its settings."""
        return f"{self.paper}: {self.better} " + (f"over {self.worse}" if self.worse else f"at {self.target:g}")


def read(folder: Path, tables: Sequence[Table]) -> list[Claim]:
    """Reads the claims of a folder of tables; none if it has no file. Raises ValueError for unknown names."""
    file = folder / FILE
    if not file.exists():
        return []
    by_name = {table.name: table for table in tables}
    claims = [claim for entry in tomllib.loads(file.read_text())["claims"] for claim in _claims(entry)]
    for claim in claims:
        _check(file, claim, by_name)
    return claims


def _claims(entry: dict[str, Any]) -> list[Claim]:
    """The claims of one entry: one for each method in ``worse``."""
    worse = entry.get("worse", "")
    return [
        Claim(**entry | {"claim": entry["claim"].replace("{worse}", name), "worse": name,
                         "settings": tuple(entry["settings"])})
        for name in ([worse] if isinstance(worse, str) else worse)
    ]  # fmt: skip


def _check(file: Path, claim: Claim, by_name: Mapping[str, Table]) -> None:
    check_name(f"{file}: table", claim.table, by_name)
    table = by_name[claim.table]
    check_name(f"{file}: score", claim.score, table.scores)
    for name in filter(None, (claim.better, claim.worse)):
        check_name(f"{file}: method", name, table.methods)
    for setting in claim.settings:
        check_name(f"{file}: setting", setting, table.settings)
    if bool(claim.worse) == math.isfinite(claim.target):
        raise ValueError(f"{file}: a claim must have either worse or target, got {claim.claim!r}")
    pairs = [chain[i : i + 2] for chain in table.claims for i in range(len(chain))]
    if claim.worse and [claim.better, claim.worse] not in pairs:
        raise ValueError(f"{file}: {claim.better} over {claim.worse} must be among the claims of {table.name}")


def evidence(claim: Claim, verdicts: Sequence[Verdict]) -> dict[str, Verdict]:
    """The comparison in each setting of the claim that has one."""
    return {
        v.setting: v
        for v in verdicts
        if (v.score, v.a, v.b) == (claim.score, claim.better, claim.worse) and v.setting in claim.settings
    }


def targets_met(
    claims: Sequence[Claim], table: Table, ours: Mapping[str, Mapping[str, Mapping[int, Result]]]
) -> list[Verdict]:
    """The answers of the table to the claims with a target, for the settings that were run."""
    verdicts = []
    for claim in claims:
        for name in claim.settings if claim.table == table.name and not claim.worse else ():
            if claim.better in ours.get(name, {}):
                answer = reaches(ours[name][claim.better], table.scores[claim.score], claim.target)
                decided = answer.word != "open"
                verdicts.append(Verdict(name, claim.score, claim.better, "", "-", *answer, survives=decided))
    return verdicts


def verdict(claim: Claim, tested: Mapping[str, Verdict]) -> str:
    """Returns one of `VERDICTS`."""
    words = [v.word for v in tested.values() if v.decided]
    holds, fails, half = words.count("holds"), words.count("does not hold"), len(claim.settings) / 2
    if holds >= half and not fails:
        return "supported"
    if fails >= half and not holds:
        return "contradicted"
    return "no difference" if words.count("equal") == len(claim.settings) else "open"


def section(claims: Sequence[Claim], verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    """Yields the lines of the page about the claims; verdicts: those of each table with results."""
    yield from ("# The papers' claims in our runs", "")
    if not claims:
        return
    yield from (
        "Each line is a claim of a paper, and our verdict. The evidence is by how much the first method is better in "
        f"each setting, with the {100 * CONFIDENCE:g} % confidence interval over seeds. A claim is supported if it "
        "holds in at least half of its settings and fails in none. It is contradicted if it fails in at least half of "
        "its settings and holds in none. Only differences that are significant after Holm's correction for all "
        'comparisons of the table count. "No difference" means that the methods are equal within a margin in all '
        "settings. All other claims are open. The runs of a setting use one partition, unless the evidence counts "
        "partitions. Differences are in rounds or in percentage points. D1 and D2 are Dirichlet(0.6) and "
        "Dirichlet(0.3). With partial participation, every client takes part in a round with probability 0.15.",
        "",
        THE_RULE,
        "",
        "| paper | supported | contradicted | no difference | open |",
        "|---|---:|---:|---:|---:|",
    )
    words = [verdict(claim, evidence(claim, verdicts.get(claim.table, ()))) for claim in claims]
    papers = [claim.paper.partition(",")[0] for claim in claims]
    for paper in dict.fromkeys(papers):
        of_paper = [word for word, of in zip(words, papers, strict=True) if of == paper]
        yield f"| {paper} | " + " | ".join(str(of_paper.count(word)) for word in VERDICTS) + " |"
    yield from (
        "",
        "| paper | claim | evidence | verdict |",
        "|---|---|---|---|",
    )
    contradicted = []
    for claim in claims:
        tested = evidence(claim, verdicts.get(claim.table, ()))
        word = verdict(claim, tested)
        shown = [f"{s}: {tested[s].text}" if s in tested else f"{s}: not run" for s in claim.settings]
        paper = f"[{claim.paper}]({claim.table}.md)" if claim.table in verdicts else claim.paper
        yield f"| {paper} | {claim.claim} | {'; '.join(shown)} | {word} |"
        if word == "contradicted":
            contradicted.append(claim)
    for note in dict.fromkeys(claim.note for claim in contradicted if claim.note):
        where = dict.fromkeys(claim.paper for claim in contradicted if claim.note == note)
        yield from ("", f"**{'; '.join(where)}.** {note.strip()}")
    yield ""
