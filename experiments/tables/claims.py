"""The papers' claims, each with the evidence of our runs and a verdict.

experiments/claims.toml lists them:

    [[claims]]
    paper = "FedDC, table 1"
    claim = "FedDC reaches 98 % on MNIST in fewer rounds than {worse}."
    headline = true  # for the first table of docs/papers.md
    data = "MNIST"   # or "stand-in: ... for ..."
    table = "feddc/table1"
    score = "rounds to 98 %"
    better = "FedDC"
    worse = ["SCAFFOLD", "FedDyn"]  # one claim for each
    settings = ["MNIST D1 partial", "MNIST D2 partial"]
    note = "What explains a contradiction."

Other forms of a claim:

- ``target = 80`` instead of ``worse``: the score of ``better`` is at least 80.
- A setting "A over B": the claim is that the difference of the two methods is larger in A than in B, or, without
  ``worse``, that the score of ``better`` is.
- ``without = "neither"``: ``worse`` is a kind of drift that harms, and this is the run without it. The claim only holds
  if the harm is significant, too.

The claims of a table or figure of a paper on the same data are a family (``family`` names another one). Its p-values
are corrected together (Holm), those of comparisons that have not been run as p = 1.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fedjax_drift as fd
from experiments import markdown
from experiments.tables.comparison import Comparison, Runs, Verdict, compare, looks_of, reaches
from experiments.tables.papers import Cell, Table, check_name

FILE = "claims.toml"
VERDICTS = {"holds": "holds", "does not hold": "fails", "equal": "equal", "open": "open", "": "not run"}
Results = Mapping[str, Mapping[str, Runs]]  # of a table: setting -> method -> seed -> result
THE_RULE = """\
Methods are compared by the differences between runs with the same seed. The first look is after the seeds that the \
table fixed beforehand, at least 3. If the question is then open, more seeds are run, with looks at 6, 9 and 12 seeds. \
Each of these four looks has a quarter of the 5 %: the intervals are 98.75 % intervals, and p-values are multiplied by \
4. New questions have 6 seeds, one look, and a 95 % interval. P-values are then corrected (Holm) for a family: all \
claims of one table or figure on the same data, in all their settings. Comparisons that have not been run count, as \
p = 1. A question is no longer open if the difference is significant, or if the interval includes 0 and is within a \
margin. Then the methods count as equal. The margin is half of the published difference, or a tenth of the error rate \
(of the rounds or the loss), whichever is smaller. The rule was written on 26 November 2026, the families and the \
margin on 29 November, when most of the results were known. A few comparisons had more than 3 seeds before the rule, \
some because of a look at the first ones: FedEve and FedAvg at alpha 0.1 (12), FedEve and SCAFFOLD at alpha 0.01 (6), \
FedADC and SlowMo with s = 2 (6), FedGVRGM and FedAvg (5), and FedDC, FedDyn and SCAFFOLD with full participation on \
MNIST (5)."""


class Claim(NamedTuple):
    """A claim of a paper: in these settings, one method is better than another, or its score is at least a target."""

    paper: str
    claim: str  # with {worse} in the place of the other method
    data: str  # the paper's, or "stand-in: ours for the paper's"
    table: str
    score: str
    better: str
    settings: tuple[str, ...]  # "A" or "A over B"
    worse: str = ""  # "" if the claim has a target, or compares settings
    note: str = ""  # what explains a contradiction
    target: float = math.nan
    without: str = ""  # the run without the drift that harms
    family: str = ""  # default: the paper and the data
    headline: bool = False

    @property
    def text(self) -> str:
        """The claim as a sentence."""
        return self.claim.replace("{worse}", self.worse)

    @property
    def short(self) -> str:
        """The claim in a few words, without its settings."""
        return f"{self.paper}: {self.better} " + (
            f"over {self.worse}" if self.worse else "" if math.isnan(self.target) else f"at {self.target:g}"
        )

    @property
    def kind(self) -> str:
        """Whose data it is about."""
        return next((kind for kind in ("stand-in", "identical clients") if kind in self.data), "the paper's")

    @property
    def group(self) -> str:
        """The name of the family whose p-values are corrected together."""
        return self.family or f"{self.paper}, {self.data}"


Tested = dict[str, Verdict]  # the answer in each setting of a claim that has been run


# --- reading ----------------------------------------------------------------------------------------------------------


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
        Claim(**entry | {"worse": name, "settings": tuple(entry["settings"])})
        for name in ([worse] if isinstance(worse, str) else worse)
    ]


def _check(file: Path, claim: Claim, by_name: Mapping[str, Table]) -> None:
    check_name(f"{file}: table", claim.table, by_name)
    table = by_name[claim.table]
    check_name(f"{file}: score", claim.score, table.scores)
    for name in filter(None, (claim.better, claim.worse, claim.without)):
        check_name(f"{file}: method", name, table.methods)
    over = [" over " in entry for entry in claim.settings]
    for name in (part for entry in claim.settings for part in entry.split(" over ")):
        check_name(f"{file}: setting", name, table.settings)
    if (bool(claim.worse) or all(over)) == math.isfinite(claim.target):
        raise ValueError(f"{file}: a claim must have either worse or target, got {claim.text!r}")


def sides(claim: Claim, setting: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The settings and methods whose scores are added, and those whose scores are subtracted."""
    first, _, second = setting.partition(" over ")
    better, worse = [(first, claim.better)], [(first, claim.worse)] if claim.worse else []
    if second:
        worse.append((second, claim.better))
        better += [(second, claim.worse)] if claim.worse else []
    return better, worse


def cells(claim: Claim, setting: str, table: Table) -> list[Cell]:
    """The cells that the claim compares in a setting."""
    names = [each for side in sides(claim, setting) for each in side]
    names += [(setting, claim.without)] if claim.without else []
    return [table.settings[name].cells[method] for name, method in names]


# --- evidence ---------------------------------------------------------------------------------------------------------


def evidence(claims: Sequence[Claim], tables: Sequence[Table], results: Mapping[str, Results]) -> list[Tested]:
    """The answers to each claim, after Holm's correction within its family. results: those of each table."""
    by_name = {table.name: table for table in tables}
    found = [
        {
            setting: answer
            for setting in claim.settings
            if (answer := _answer(claim, setting, by_name[claim.table], results.get(claim.table, {}))) is not None
        }
        for claim in claims
    ]
    families: dict[str, list[tuple[int, str]]] = {}
    for i, claim in enumerate(claims):
        if math.isnan(claim.target):
            families.setdefault(claim.group, []).extend((i, setting) for setting in claim.settings)
    for members in families.values():
        p = [found[i][s].answer.p if s in found[i] else 1.0 for i, s in members]
        corrected = fd.statistics.holm([1.0 if math.isnan(each) else each for each in p])
        for (i, setting), value in zip(members, corrected, strict=True):
            if setting in found[i]:
                found[i][setting] = found[i][setting]._replace(significant=value <= fd.statistics.SIGNIFICANT)
    return found


def _answer(claim: Claim, setting: str, table: Table, ours: Results) -> Verdict | None:
    """The answer to a claim in one setting before Holm's correction; None if it has not been run."""
    better, worse = ([ours.get(name, {}).get(method, {}) for name, method in side] for side in sides(claim, setting))
    if not all([*better, *worse]):
        return None
    score, looks = table.scores[claim.score], looks_of(cells(claim, setting, table))
    if math.isfinite(claim.target):
        answer = reaches(better[0], score, claim.target)
    else:
        alike = table.settings.get(setting)  # None: the claim compares two settings
        gap = math.nan if alike is None else alike.published_gap(claim.score, claim.better, claim.worse)
        answer = compare(better, worse, score, looks, gap)
    if claim.without:
        without = ours[setting].get(claim.without, {})
        answer = _with_harm(answer, compare([without], worse, score, looks) if without else None)
    reached = math.isfinite(claim.target) and answer.word != "open"
    return Verdict(setting, claim.score, claim.better, claim.worse, "-", looks, answer, reached)


def _with_harm(answer: Comparison, harm: Comparison | None) -> Comparison:
    """The answer to a claim about harm, which only holds if there is harm: then the larger p-value counts."""
    text = f"{answer.text} (harm: {'not run' if harm is None else harm.text})"
    if answer.word != "holds":
        return answer._replace(text=text)
    if harm is None or harm.word != "holds":
        return answer._replace(text=text, word="open", p=1.0)
    return answer._replace(text=text, p=max(answer.p, harm.p))


def word(tested: Verdict | None) -> str:
    """The answer in one setting: one of the values of `VERDICTS`."""
    if tested is None:
        return "not run"
    return VERDICTS[tested.word] if tested.decided else "open"


def verdict(claim: Claim, tested: Tested) -> str:
    """In how many of its settings the claim holds, fails, and in how many the methods are equal. One or two are named.

    If there is none: "open", or "not run" if it has not been run in any setting.
    """
    words, names = [word(tested.get(setting)) for setting in claim.settings], short_names(claim.settings)
    said = []
    for each in ("holds", "fails", "equal"):
        where = [name for name, found in zip(names, words, strict=True) if found == each]
        if len(words) == 1 and where:
            said.append(each)
        elif where:
            which = f" ({'; '.join(where)})" if len(where) <= 2 and len(where) < len(words) else ""
            said.append(f"{each} in {len(where)} of {len(words)}{which}")
    return ", ".join(said) or ("open" if tested else "not run")


def short_names(settings: Sequence[str]) -> list[str]:
    """The names of settings without the parts between commas that all of them have at the beginning or at the end."""
    parts = [setting.split(", ") for setting in settings]
    most = min(map(len, parts)) - 1
    first = next((i for i in range(most) if len({each[i] for each in parts}) > 1), most)
    last = next((i for i in range(most - first) if len({each[-1 - i] for each in parts}) > 1), most - first)
    return [", ".join(each[first : len(each) - last]) for each in parts]


def others(methods: Sequence[str]) -> str:
    """The methods that a claim is about: one, two, or "others"."""
    return " and ".join(methods) if len(methods) < 3 else "others"


# --- the page ---------------------------------------------------------------------------------------------------------


def section(claims: Sequence[Claim], tested: Sequence[Tested]) -> Iterator[str]:
    """Yields the lines of the page about the claims."""
    yield from ("# The papers' claims in our runs", "")
    if not claims:
        return
    yield from (
        "Each line is a claim of a paper. The evidence is by how much the first method is better in each setting, with "
        "the confidence interval over seeds. The verdict says in how many settings the claim holds and fails, and in "
        "how many the methods are equal. All other settings are open, or have not been run. The runs of a setting use "
        "one partition, unless the evidence counts partitions. Differences are in rounds or in percentage points. D1 "
        "and D2 are Dirichlet(0.6) and Dirichlet(0.3). With partial participation, every client takes part in a round "
        "with probability 0.15. A stand-in is data that replaces the paper's.",
        "",
        THE_RULE,
        "",
        counted(claims, tested),
        "",
    )
    rows = []
    for claim, answers in zip(claims, tested, strict=True):
        shown = [f"{s}: {answers[s].answer.text}" if s in answers else f"{s}: not run" for s in claim.settings]
        paper = f"[{claim.paper}]({claim.table}.md)" if answers else claim.paper
        rows.append([paper, claim.text, claim.data, "; ".join(shown), verdict(claim, answers)])
    yield markdown.table(["paper", "claim", "data", "evidence", "verdict"], rows, "lllll")
    notes: dict[str, list[str]] = {}
    for claim, answers in zip(claims, tested, strict=True):
        if claim.note and "fails" in verdict(claim, answers):
            notes.setdefault(claim.note, []).append(claim.paper)
    for note, papers in notes.items():
        yield from ("", f"**{'; '.join(dict.fromkeys(papers))}.** {note.strip()}")
    yield ""


def counted(claims: Sequence[Claim], tested: Sequence[Tested]) -> str:
    """A table with the number of comparisons (a claim in a setting) with each answer, by paper and kind of data."""
    counts: dict[tuple[str, str], list[str]] = {}
    for claim, answers in zip(claims, tested, strict=True):
        words = [word(answers.get(setting)) for setting in claim.settings]
        counts.setdefault((claim.paper.partition(",")[0], claim.kind), []).extend(words)
    rows = [[*key, len(words), *map(words.count, VERDICTS.values())] for key, words in counts.items()]
    columns = ["paper", "data", "comparisons", "hold", "fail", "equal", "open", "not run"]
    return markdown.table(columns, rows)
