"""Tests of the table for a paper, against numbers by hand and of scipy."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from scipy import stats

import fedjax_drift as fd


def run(*accuracies: float, loss: float = 1.0) -> list[dict]:
    return [{"round": 10 * t, "accuracy": value, "loss": loss} for t, value in enumerate(accuracies, 1)]


def of_seeds(seeds: dict[int, list[dict]]) -> list[fd.Run]:
    return [fd.Run(seed, {}, None, history) for seed, history in seeds.items()]


A = {0: run(0.1, 0.5, 0.6), 1: run(0.1, 0.5, 0.7), 2: run(0.2, 0.6, 0.6), 3: run(0.3, 0.4, 0.5)}
B = {1: run(0.4, 0.8, 0.8), 2: run(0.4, 0.7, 0.7), 3: run(0.4, 0.8, 0.9), 9: run(0.1, 0.1, 0.1)}
C = {0: run(0.1, 0.6, 0.6), 1: run(0.2, 0.6, 0.7), 2: run(0.1, 0.7, 0.5), 3: run(0.1, 0.4, 0.6)}
D = {0: run(0.1, 0.1, 0.1), 1: run(0.1, 0.1, 0.1, loss=math.nan)}
RUNS = {"Fed_Avg": of_seeds(A), "B & Co": of_seeds(B), "C": of_seeds(C), "D": of_seeds(D), "one": A[0]}


def rows(**options) -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in csv.DictReader(fd.table(RUNS, 2, "csv", **options).splitlines())}


def scores(seeds: dict[int, list[dict]]) -> dict[int, float]:
    return {seed: np.mean([record["accuracy"] for record in history[-2:]]) for seed, history in seeds.items()}


def numbers(row: dict[str, str], *names: str) -> list[float]:
    return [float(row[name]) for name in names]


def test_scores_intervals_and_paired_tests_are_those_of_scipy():
    a, b, c = map(scores, (A, B, C))
    table = rows()
    for name, values in (("Fed_Avg", a), ("B & Co", b), ("C", c)):
        of = [*values.values()]
        expected = [4, np.mean(of), *stats.t.interval(0.95, 3, np.mean(of), stats.sem(of))]
        shown = numbers(table[name], "seeds", "accuracy", "accuracy_low_95", "accuracy_high_95")
        assert shown == pytest.approx(expected, rel=1e-5)
    # B has no seed 0, and the baseline has no seed 9.
    tests = [stats.ttest_rel(*([of[s] for s in common] for of in (x, a))) for x, common in ((b, (1, 2, 3)), (c, a))]
    assert tests[1].pvalue < tests[0].pvalue < 2 * tests[1].pvalue + 0.01  # so Holm doubles that of C
    larger = max(tests[0].pvalue, 2 * tests[1].pvalue)
    for name, test, pairs, corrected in (("B & Co", tests[0], 3, larger), ("C", tests[1], 4, 2 * tests[1].pvalue)):
        low, high = test.confidence_interval(0.95)
        shown = numbers(table[name], "pairs", "difference_low_95", "difference_high_95", "p", "p_holm")
        assert shown == pytest.approx([pairs, low, high, test.pvalue, corrected], rel=1e-4)
    assert table["one"]["pairs"] == "0" and table["one"]["difference"] == table["one"]["accuracy_low_95"] == ""
    assert table["Fed_Avg"]["difference"] == "" and rows(baseline="C")["Fed_Avg"]["p"] == table["C"]["p"]


def test_diverged_runs_and_missed_targets_are_shown():
    table = rows(target=0.7)
    assert numbers(table["D"], "seeds", "diverged", "accuracy", "reached") == [2, 1, 0.1, 0]
    assert table["D"]["difference"] == table["D"]["rounds_to_target"] == table["Fed_Avg"]["rounds_to_target"] == ""
    text = {line.split("|")[1].strip(): line for line in fd.table(RUNS, 2, target=0.7).splitlines() if "|" in line}
    assert " 10.00 (1 of 2 diverged) |" in text["D"] and "not reached" in text["D"]
    assert "> 30 (1 of 4)" in text["Fed_Avg"]
    assert "(3 pairs)" in text["B & Co"] and len(set(map(len, text.values()))) == 1
    assert "> 22.5 (3 of 4)" in text["B & Co"]
    lost = fd.table({"C": [run(math.nan), run(math.nan)], "short": run(0.5, 0.5, 0.5)})
    assert "diverged |" in lost and "Fewer evaluations: C 1." in lost and "C 10, short 30" in lost
    one = fd.table(A[0], 1)
    assert "±" not in one and "vs " not in one and "| run    |        60.00 |     1 |" in one


def test_seeds_are_paired_by_their_number_and_lists_by_position(tmp_path):
    every = [(name, seed, history) for name, seeds in (("a", A), ("b", B)) for seed, history in seeds.items()]
    records = [{"algorithm": name, "seed": seed, **record} for name, seed, history in every for record in history]
    with fd.logs.Log(tmp_path) as log:
        for record in records:
            log(record)
    loaded = [fd.run_folder.LoadedRun(name, seed, {}, history, None, None) for name, seed, history in every]
    swept = {"a": of_seeds(A), "b": of_seeds(B)}
    assert fd.table(tmp_path) == fd.table(records) == fd.table(loaded) == fd.table(swept)
    assert "(3 pairs)" in fd.table(swept)
    by_place = fd.table({"a": list(A.values()), "b": list(B.values())})
    assert "pairs)" not in by_place and by_place != fd.table(swept)
    assert fd.table(list(A.values())).splitlines()[2].split("|")[3].strip() == "4"


def test_latex_uses_booktabs_and_escapes_names():
    lines = fd.table(RUNS, 2, "latex", target=0.7).splitlines()
    assert lines[0].startswith("% accuracy: mean of the last 2 evaluations")
    begin = lines.index(r"\begin{tabular}{lrrrrr}")
    assert lines[begin + 1] == r"\toprule" and lines[begin + 3] == r"\midrule" and lines[-2] == r"\bottomrule"
    assert r"vs Fed\_Avg, 95 \% interval" in lines[begin + 2]
    assert lines[begin + 5].startswith(r"B \& Co & ") and r" $\pm$ " in lines[begin + 5] and "& $+$" in lines[begin + 5]
    assert all(line.count(" & ") == 5 and line.endswith(r" \\") for line in lines[begin + 4 : -2])


def test_holms_correction_and_equal_differences():
    """The smallest of m p-values is multiplied by m, the next one by m - 1, and so on. The order stays."""
    corrected = fd.statistics.holm([0.01, 0.04, math.nan, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True)
    assert fd.statistics.holm([]) == []
    seeds = {"a": (0.5, 0.6, 0.7), "b": (0.4, 0.5, 0.6), "c": (0.5, 0.6, 0.7)}
    above = fd.table({name: [*map(run, values)] for name, values in seeds.items()})
    b, c = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in above.splitlines()[3:5]]
    assert b == ["-10.00 ± 0.00", "-"] and c == ["+0.00 ± 0.00", "1.000"]  # rounding is no spread


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"last": 0}, "last must be an integer >= 1, got 0"),
        ({"format": "html"}, "format must be one of 'markdown', 'latex', 'csv', got 'html'"),
        ({"baseline": "fed_avg"}, "baseline must be one of .*did you mean 'Fed_Avg'"),
        ({"target": 95}, "target must be an accuracy in 0..1, got 95: pass 0.95 for 95 %"),
        ({"key": "cka"}, "table needs at least 1 round with 'cka', got none"),
    ],
)
def test_wrong_arguments_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        fd.table(RUNS, **options)
