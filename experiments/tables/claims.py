"""The papers' headline claims, each with the evidence of our runs and a verdict.

experiments/claims.toml lists them:

    [[claims]]
    paper = "FedDC"
    claim = "FedDC reaches 98 % on MNIST in fewer rounds than SCAFFOLD."
    table = "feddc/table1"
    score = "rounds to 98 %"
    better = "FedDC"
    worse = "SCAFFOLD"
    settings = ["MNIST D1 partial", "MNIST D2 partial"]
    note = "What explains a contradiction."

The verdict of a claim is that of most of its settings, after Holm's correction for all comparisons of the table:

- supported: the claim holds in at least half of its settings, and does not hold in none
- contradicted: it does not hold in at least half of its settings, and holds in none
- open: otherwise, for example if there are too few seeds
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.tables.comparison import Verdict
from experiments.tables.papers import Table, check_name

FILE = "claims.toml"
VERDICTS = ("supported", "contradicted", "open")


class Claim(NamedTuple):
    """One headline claim: in these settings, one method is better than another."""

    paper: str
    claim: str
    table: str
    score: str
    better: str
    worse: str
    settings: tuple[str, ...]
    note: str = ""  # what explains a contradiction


def read(folder: Path, tables: Sequence[Table]) -> list[Claim]:
    """Reads the claims of a folder of tables; none if it has no file. Raises ValueError for unknown names."""
    file = folder / FILE
    if not file.exists():
        return []
    by_name = {table.name: table for table in tables}
    claims = [
        Claim(**entry | {"settings": tuple(entry["settings"])}) for entry in tomllib.loads(file.read_text())["claims"]
    ]
    for claim in claims:
        check_name(f"{file}: table", claim.table, by_name)
        table = by_name[claim.table]
        check_name(f"{file}: score", claim.score, table.scores)
        for name, known in ((claim.better, table.methods), (claim.worse, table.methods)):
            check_name(f"{file}: method", name, known)
        for setting in claim.settings:
            check_name(f"{file}: setting", setting, table.settings)
        if [claim.better, claim.worse] not in [chain[i : i + 2] for chain in table.claims for i in range(len(chain))]:
            raise ValueError(f"{file}: {claim.better} over {claim.worse} must be among the claims of {table.name}")
    return claims


def evidence(claim: Claim, verdicts: Sequence[Verdict]) -> dict[str, Verdict]:
    """The comparison in each setting of the claim that has one."""
    return {
        v.setting: v
        for v in verdicts
        if (v.score, v.a, v.b) == (claim.score, claim.better, claim.worse) and v.setting in claim.settings
    }


def verdict(claim: Claim, tested: Mapping[str, Verdict]) -> str:
    """Returns one of `VERDICTS`."""
    words = [v.word for v in tested.values() if v.survives]
    holds, fails, half = words.count("holds"), words.count("does not hold"), len(claim.settings) / 2
    if holds >= half and not fails:
        return "supported"
    return "contradicted" if fails >= half and not holds else "open"


def section(claims: Sequence[Claim], verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    """Yields the lines of the page about the claims; verdicts: those of each table with results."""
    yield from ("# The papers' claims in our runs", "")
    if not claims:
        return
    yield from (
        "Each line is a headline claim of a paper. The evidence is by how much the first method is better in each "
        "setting, with the 95 % confidence interval over seeds. A claim is supported if it holds in at least half of "
        "its settings and fails in none. It is contradicted if it fails in at least half of its settings and holds in "
        "none. Only differences that are significant after Holm's correction for all comparisons of the table count. "
        "All other claims are open. The runs of a setting use one partition, unless the evidence counts partitions. "
        "Differences are in rounds or in percentage points. D1 and D2 are Dirichlet(0.6) and Dirichlet(0.3). With "
        "partial participation, every client takes part in a round with probability 0.15.",
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
    for claim in contradicted:
        yield from ("", f"**{claim.paper}: {claim.claim}** {claim.note.strip()}")
    yield ""
