"""The papers' claims and their verdicts, and the numbers of the pages."""

from __future__ import annotations

import json
import re
import runpy
import shutil

import pytest

import fedjax_drift as fd
from experiments import pages
from experiments.tables import claims, comparison, papers, report
from experiments.tables.claims import Claim
from experiments.tables.papers import Cell, Score, Series, Setting, Table
from experiments.tables.results import Result

SCORE = Score("score", take="last")
WORDS = {"+": "holds", "-": "does not hold", "=": "equal", "?": "open"}


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return papers.read_tables(papers.EXPERIMENTS, papers.table_names(papers.EXPERIMENTS))


@pytest.fixture(scope="module")
def known(tables) -> list[Claim]:
    return claims.read(papers.EXPERIMENTS, tables)


def verdict_of(word: str, significant: bool = True) -> comparison.Verdict:
    looks = comparison.Looks((3, 6, 9, 12), False)
    answer = comparison.Comparison(word, "+1.0 [+0.5, +1.5], 3 seeds", 0.01, 3, fd.statistics.Mean(1.0, 0.5, 0.01))
    return comparison.Verdict("", "score", "A", "B", "-", looks, answer, significant)


def a_claim(**options) -> Claim:
    made = Claim("Nobody, table 1", "A beats B.", "stand-in: ours for theirs", "t", "score", "A", ("s", "u", "v"), "B")
    return made._replace(**options)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("+??", "holds in 1 of 3 (s)"), ("+-?", "holds in 1 of 3 (s), fails in 1 of 3 (u)"),
        ("--=", "fails in 2 of 3 (s; u), equal in 1 of 3 (v)"), ("===", "equal in 3 of 3"), ("???", "open"),
        ("+", "holds"), ("", "not run"),
    ],
)  # fmt: skip
def test_a_verdict_says_in_how_many_settings_and_in_which_the_claim_holds(words: str, expected: str) -> None:
    claim = a_claim(settings=tuple("suv"[: max(1, len(words))]))
    tested = {setting: verdict_of(WORDS[word]) for setting, word in zip("suv", words, strict=False)}
    assert claims.verdict(claim, tested) == expected
    weak = {setting: verdict._replace(significant=False) for setting, verdict in tested.items()}
    equal = f"equal in {words.count('=')} of 3" + " (v)" * (words.count("=") == 1)
    assert claims.verdict(claim, weak) == (equal if "=" in words else "open" if words else "not run")
    page = "\n".join(claims.section([claim._replace(note="Why not.")], [tested]))
    assert f"| stand-in: ours for theirs | {'s: ' if words else ''}" in page and f"| {expected} |" in page
    assert ("Why not." in page) == ("fails" in expected)


def test_a_verdict_names_what_differs_between_the_settings() -> None:
    settings = ["MNIST writers, alpha 1, own", "MNIST writers, alpha 0.1, own"]
    assert claims.short_names(settings) == ["alpha 1", "alpha 0.1"]
    assert claims.short_names(["MNIST D1, s = 2", "MNIST D1"]) == ["MNIST D1, s = 2", "MNIST D1"]


def runs(*values: float) -> dict[int, Result]:
    one = Result("s", "m", 0, 50, False, 1.0, 1, "", {}, None, "", {}, "", {})
    return {
        seed: one._replace(seed=seed, series={"accuracy": Series([50], [value])}) for seed, value in enumerate(values)
    }


def a_table(**options) -> Table:
    methods = ["A", "B", "none"]
    cells = {method: Cell("t", "s", method, {}) for method in methods}
    settings = {name: Setting(name, cells, {}, {}, "") for name in "suv"}
    return Table("t", "", "", "", settings, methods, {"score": SCORE}, [], {}, "")._replace(**options)


def test_a_family_is_counted_in_full_whether_it_has_been_run_or_not() -> None:
    """p = 0.02 after four looks: significant for two comparisons, and not for three. Other data are another family."""
    ours = {"t": {"s": {"A": runs(0.8, 0.81, 0.82), "B": runs(0.70, 0.7224, 0.7076)}}}

    def word(*others: Claim) -> str:
        first = a_claim(settings=("s",))
        return claims.word(claims.evidence([first, *others], [a_table()], ours)[0].get("s"))

    p = claims.evidence([a_claim(settings=("s",))], [a_table()], ours)[0]["s"].answer.p
    assert 0.05 / 3 < p < 0.05 / 2
    assert word() == word(a_claim(settings=("u",))) == "holds"
    assert word(a_claim(settings=("u", "v"))) == "open"
    assert (
        word(a_claim(settings=("u", "v"), data="others")) == word(a_claim(settings=("u", "v"), family="f")) == "holds"
    )
    assert word(a_claim(settings=("u", "v"), worse="", target=0.5)) == "holds"  # a target has no p-value


def test_a_drift_that_is_said_to_harm_is_compared_with_the_run_without_it() -> None:
    """Client drift is better than period drift, and that is no harm of period drift if no drift is worse still."""
    a, b = runs(0.8, 0.81, 0.82), runs(0.7, 0.711, 0.72)
    claim = a_claim(settings=("s",), without="none")
    for none, expected in ((runs(0.9, 0.915, 0.92), "holds"), (runs(0.5, 0.51, 0.53), "open"), (runs(0.7), "open")):
        tested = claims.evidence([claim], [a_table()], {"t": {"s": {"A": a, "B": b, "none": none}}})[0]
        assert claims.word(tested["s"]) == expected and "(harm: " in tested["s"].answer.text
    unknown = claims.evidence([claim], [a_table()], {"t": {"s": {"A": a, "B": b}}})[0]
    assert claims.word(unknown["s"]) == "open" and unknown["s"].answer.text.endswith("(harm: not run)")


def test_settings_are_compared_with_over() -> None:
    one = a_claim(worse="", settings=("s over u",))
    assert claims.sides(one, "s over u") == ([("s", "A")], [("u", "A")])
    two = a_claim(settings=("s over u",))
    assert claims.sides(two, "s over u") == ([("s", "A"), ("u", "B")], [("s", "B"), ("u", "A")])
    ours = {"t": {"s": {"A": runs(0.8, 0.81, 0.82)}, "u": {"A": runs(0.7, 0.711, 0.72)}}}
    assert claims.word(claims.evidence([one], [a_table()], ours)[0]["s over u"]) == "holds"


def test_claims_may_only_use_names_of_the_tables(tables, known, tmp_path) -> None:
    """The committed claims can be read. A wrong name raises an error."""
    assert {claim.paper.partition(",")[0] for claim in known} == {"FedDC", "LfD", "FedEve", "FedADC", "FedGVRGM"}
    text = (papers.EXPERIMENTS / claims.FILE).read_text()
    (tmp_path / claims.FILE).write_text(text.replace('better = "LfD"', 'better = "LfDD"'))
    with pytest.raises(ValueError, match=r"claims.toml: method must be one of .*, got 'LfDD': did you mean 'LfD'"):
        claims.read(tmp_path, tables)


def test_a_stand_in_has_the_published_differences_of_the_setting_that_it_is_like(tables) -> None:
    (table,) = [table for table in tables if table.name == "fedeve/table1"]
    stand_in, paper = table.settings["MNIST writers, natural"], table.settings["FEMNIST, natural"]
    assert not stand_in.printed and stand_in.published == paper.printed == paper.published
    (other,) = [table for table in tables if table.name == "feddc/partitions"]
    assert other.settings["MNIST iid partial"].published["rounds to 98 %"]["FedDC"].value == 46


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def functions() -> dict:
    return pages.functions_of()


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_shows_the_results(name, functions) -> None:
    page = (pages.ROOT / name).read_text()
    found = pages.changes(page, pages.rendered(page, functions))
    assert not found, "write it again: python -m experiments.pages"


def test_every_page_has_numbers_of_results() -> None:
    counts = {name: len(pages.MARK.findall((pages.ROOT / name).read_text())) for name in pages.PAGES}
    assert counts["docs/papers.md"] > 25 and counts["docs/performance.md"] > 50 and all(counts.values()), counts


def test_a_changed_result_is_seen_on_its_pages(tmp_path) -> None:
    """One number of a benchmark and one accuracy in the results of a table are changed in a copy."""
    for folder in ("results", "benchmarks/results"):
        shutil.copytree(papers.EXPERIMENTS / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.png"))
    for file in [*papers.EXPERIMENTS.glob("*/*.toml"), papers.EXPERIMENTS / claims.FILE]:
        (tmp_path / file.relative_to(papers.EXPERIMENTS)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(papers.EXPERIMENTS))
    changed = tmp_path / "benchmarks/results/accelerator.gpu.json"
    changed.write_text(changed.read_text().replace("0.244962", "0.254962"))
    runs_of_fedeve = tmp_path / "results/fedeve/table3/MNIST-writers-natural-E-=-3/FedEve.jsonl"
    entry = json.loads(runs_of_fedeve.read_text())
    (series,) = [columns for columns in entry["series"] if "accuracy" in columns]
    series["accuracy"][-1] -= 0.02
    runs_of_fedeve.write_text(json.dumps(entry) + "\n")
    functions = pages.functions_of(tmp_path)
    found = {
        name: pages.changes(page, pages.rendered(page, functions))
        for name in pages.PAGES
        if (page := (pages.ROOT / name).read_text())
    }
    assert "0.255" in "".join(found["README.md"]) and "0.255" in "".join(found["docs/performance.md"])
    (old, new) = found["docs/papers.md"]
    assert old.startswith("-| MNIST writers, natural, E = 3 | 97.98") and new.startswith(
        "+| MNIST writers, natural, E = 3 | 96.9"
    )
    assert not found["BUILD_NOTES.md"]


def test_other_code_computes_the_same_claims_and_numbers() -> None:
    """experiments/recompute_claims.py shares no code with experiments/tables and experiments/pages.py."""
    other = runpy.run_path(str(papers.EXPERIMENTS / "recompute_claims.py"))
    page = other["PAGE"].read_text()
    assert len(other["rows"]()) > 90 and other["differences"](page) == []
    verdict = re.sub(r" \| holds in 1 of 3 \([^)]*\) \|\n", " | open |\n", page, count=1)
    number = page.replace(": +", ": -", 1)
    assert len(other["differences"](verdict)) == len(other["differences"](number)) == 2  # one row of each
    papers_page, known_page = (page.read_text() for page in other["PAGES"])
    assert other["wrong_numbers"](papers_page) == other["wrong_numbers"](known_page) == []
    assert len(other["wrong_numbers"](papers_page.replace("6.1** (2.4", "6.2** (2.4", 1))) == 1
    assert len(other["wrong_numbers"](papers_page.replace("fails", "holds", 1))) == 1


def test_no_cell_of_a_table_counts_twice(tables) -> None:
    results = {table.name: report.results_of(table, papers.EXPERIMENTS / "results") for table in tables}
    assert report.coverage(tables, results).splitlines()[-1].startswith("| all | 456 |")
