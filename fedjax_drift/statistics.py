"""Confidence intervals and tests over seeds. `fd.table` uses them, and so do the pages of the experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from fedjax_drift import checks, spec
from fedjax_drift.records import numbers
from fedjax_drift.spec import AmountOrZero, Probability, checked

__all__ = ["CONFIDENCE", "SIGNIFICANT", "Mean", "holm", "mean", "quantile"]
__dir__ = __all__.copy


CONFIDENCE = 0.95
SIGNIFICANT = 0.05  # the largest p-value of a significant difference


class Mean(NamedTuple):
    """The mean of several values, with its confidence interval and test."""

    value: float  # the mean, NaN without values
    half: float  # half the width of the t interval, NaN with fewer than two values
    p: float  # p-value of the two-sided t test that the true mean is 0, NaN if the test is not defined

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.value - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.value + self.half


@checked
def mean(
    values: Sequence[float] | np.ndarray, rounding: AmountOrZero = 0.0, confidence: Probability = CONFIDENCE
) -> Mean:
    """The mean of some values, with its confidence interval (Student's t) and a t test.

    The values may be the scores of one method, one per seed. If they are the differences of two methods, one per seed,
    the test is the paired t test.

    Args:
      values: [n] numbers, n >= 0. If one is not finite, the results are NaN.
      rounding: values that differ by at most this much are the same, >= 0. The half width is then 0. The p-value is 1
        if they are also 0. Otherwise it is NaN, because the test is not defined. Default: 0.
      confidence: the confidence level of the interval, in 0..1. Default: 0.95.

    Returns:
      A `Mean` (value, half, p).

    >>> print("{:.2f} ± {:.2f}, p = {:.2f}".format(*mean([0.3, 0.1, 0.2])))
    0.20 ± 0.25, p = 0.07
    >>> "{:.2f} ± {:.2f}, p = {:.2f}".format(*mean([0.3, 0.1, 0.2], confidence=0.99))
    '0.20 ± 0.57, p = 0.07'
    """
    values = numbers("values", values)
    if not np.isfinite(values).all():
        return Mean(math.nan, math.nan, math.nan)
    n, average = len(values), float(np.mean(values)) if len(values) else math.nan
    if n < 2:
        return Mean(average, math.nan, math.nan)
    if np.ptp(values) <= rounding:
        return Mean(average, 0.0, 1.0 if abs(average) <= rounding else math.nan)
    from scipy.stats import t

    with np.errstate(over="ignore", invalid="ignore"):
        error = float(values.std(ddof=1)) / math.sqrt(n)
    return Mean(average, quantile(n, confidence) * error, float(2 * t.sf(abs(average) / error, n - 1)))


@checked
def quantile(n: Annotated[int, spec.integer(2)], confidence: Probability = CONFIDENCE) -> float:
    """The quantile of Student's t with n - 1 >= 1 degrees of freedom for a confidence interval, by default of 95 %.

    >>> round(quantile(3), 3)
    4.303
    """
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects the p-values of several tests together (Holm 1979).

    A difference is significant if its corrected p-value is at most 0.05. The probability that at least one of the
    hypotheses is rejected by chance is then at most 5 %.

    Args:
      p_values: [n] numbers in 0..1. NaN is no test.

    Returns:
      The corrected p-values, [n]. NaN stays NaN.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p_values = numbers("p_values", p_values).tolist()
    if wrong := [p for p in p_values if not math.isnan(p) and not 0 <= p <= 1]:
        checks.refuse("p_values must be in 0..1, or NaN without a test", wrong[0])
    tests = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tests):
        largest = max(largest, min(1.0, p * (len(tests) - rank)))
        corrected[i] = largest
    return corrected
