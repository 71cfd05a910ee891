"""Robust rules beside ByzFL (pip: byzfl), and what they cost. Writes experiments/results/robust_rules.json.

    python -m experiments.robust_rules

ByzFL computes with NumPy, in float64. The costs are those of one aggregation on one CPU device, interleaved with the
mean: medians of the ratios of five turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_drift as fd
from fedjax_drift.robust.rule import Stack

OUTPUT = Path(__file__).parent / "results/robust_rules.json"
R = fd.robust
SHAPES = [(n, f, d) for n, f in ((4, 1), (7, 2), (10, 3), (11, 5), (25, 8)) for d in (1, 7, 400)]
COSTS = [(20, 61_706), (100, 61_706), (100, 1_000_000)]  # K and d; LeNet-5 has 61,706 parameters


def rules(f: int) -> dict[str, tuple[Any, list[Any], Callable[[Any], Callable]]]:
    """Each rule, what is done before it, and ByzFL's."""
    return {
        "median": (R.median(), [], lambda b: b.Median()),
        "trimmed_mean": (R.trimmed_mean(f), [], lambda b: b.TrMean(f)),
        "meamed": (R.meamed(f), [], lambda b: b.Meamed(f)),
        "geometric_median": (R.geometric_median(0.1, 3), [], lambda b: centred(b.GeometricMedian(0.1, 3))),
        "krum": (R.krum(f), [], lambda b: b.Krum(f)),
        "multi_krum": (R.multi_krum(f), [], lambda b: b.MultiKrum(f)),
        "centered_clipping": (R.centered_clipping(1.0, 2), [], lambda b: b.CenteredClipping(None, 2, 1.0)),
        "nnm, median": (R.median(), [R.nnm(f)], lambda b: after(b.NNM(f), b.Median())),
        "arc, median": (R.median(), [R.arc(f)], lambda b: after(b.ARC(f), b.Median())),
    }


def after(before: Callable, rule: Callable) -> Callable:
    return lambda x: rule(np.asarray(before([*x])))


def centred(rule: Callable) -> Callable:
    """ByzFL's geometric median starts at 0, and ours at the mean."""
    return lambda x: rule(x - x.mean(0)) + x.mean(0)


def aggregate(rule: Any, before: Any) -> Callable[[jax.Array], jax.Array]:
    """The aggregate [d] of the messages [n, d]."""
    joint = fd.aggregation.robust(rule, before).joint
    assert joint is not None

    def combine(x: jax.Array) -> jax.Array:
        stack = Stack(x, jnp.ones(len(x), bool), jnp.arange(len(x)))
        return joint.combine(joint.init(jnp.zeros_like(x[0])), stack, jax.random.key(0))[0]

    return jax.jit(combine)


def messages(n: int, f: int, d: int, ties: bool) -> np.ndarray:
    """f of them are far away. ties: some of the others are equal."""
    x = np.random.default_rng(n + d).normal(size=(n, d))
    x[:f] += 5
    if ties:
        x[-2:] = x[-3]
    return x


def agreement() -> list[dict[str, Any]]:
    import byzfl

    rows = []
    with jax.enable_x64(True):
        for name in rules(1):
            worst = 0.0
            for n, f, d in SHAPES:
                for ties in (False, True):
                    x = messages(n, f, d, ties)
                    rule, before, theirs = rules(f)[name]
                    ours, other = aggregate(rule, before)(jnp.asarray(x)), theirs(byzfl)(x.copy())
                    worst = max(worst, float(np.abs(ours - other).max() / np.abs(ours).max()))
            rows.append({"rule": name, "inputs": 2 * len(SHAPES), "largest relative difference": worst})
            print(rows[-1], flush=True)
    return rows


def costs() -> list[dict[str, Any]]:
    rows = []
    mean = jax.jit(lambda x: x.mean(0))
    for K, d in COSTS:
        x = jnp.asarray(messages(K, K // 5, d, False), jnp.float32)
        for name, (rule, before, _) in rules(K // 5).items():
            combine, ratios = aggregate(rule, before), []
            memory = combine.lower(x).compile().memory_analysis()
            for turn in range(6):
                seconds = [timed(mean, x), timed(combine, x)]
                ratios += [seconds[1] / seconds[0]] if turn else []
            row = {"rule": name, "K": K, "d": d, "seconds": seconds[1], "times the mean": float(np.median(ratios))}
            rows.append({**row, "temporary memory, in messages": memory.temp_size_in_bytes / (4 * d)})
            print(rows[-1], flush=True)
    return rows


def timed(function: Callable, x: jax.Array) -> float:
    begin = time.process_time()
    jax.block_until_ready(function(x))
    return time.process_time() - begin


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps({"agreement": agreement(), "costs": costs()}, indent=1) + "\n")
