"""Intervals and tests behind every printed number (evaluation.md 6).

Accuracy                Wilson score interval, 95 %                     (Wilson 1927)
Difference of two runs  percentile bootstrap over paired documents, B = 2000, seed 0   (Efron 1979)
Same, right or wrong    McNemar's exact two-sided p                      (McNemar 1947; binomial form)
Perplexity              bootstrap over documents of exp(summed NLL / summed token counts)

The unit of resampling is the document, never the token: tokens of one document are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
MIN_DOCUMENTS = 8  # below it a bootstrap over documents says more about luck than about the method
MIN_MCNEMAR = 50


class Estimate(NamedTuple):
    """A value with its interval; `low` and `high` are None where n is too small to give one."""

    value: float
    low: float | None
    high: float | None
    n: int


def wilson(hits: float, n: int, level: float = 0.95) -> Estimate:
    """Share `hits / n` in 0..1 with its Wilson interval, which stays inside 0..1 and is not empty at 0 or n hits.

    `hits` may be fractional (scores such as "share of the values found"); the interval is then conservative, as a
    score in between varies less than a coin of the same mean.
    """
    if n <= 0 or not 0 <= hits <= n:
        raise ValueError(f"wilson: got hits={hits}, n={n}; needs n >= 1 and 0 <= hits <= n")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at 0 or n hits the bound is exactly p; rounding would put it 1e-17 beyond
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)


def _bootstrap(n: int, statistic: Callable, resamples: int, seed: int, level: float) -> tuple[float, float]:
    """Percentile interval of `statistic(index int[b, n]) -> float[b]` over documents drawn with replacement."""
    rng = np.random.default_rng(seed)
    block = max(1, 4_000_000 // n)  # rows per draw: 32 MB of indices at most
    parts = [
        statistic(rng.integers(0, n, size=(min(block, resamples - start), n))) for start in range(0, resamples, block)
    ]
    low, high = np.quantile(np.concatenate(parts), [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    counts: Sequence[float] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Mean of `b - a` over documents, in the unit of a and b; a[i] and b[i] are two runs on document i.

    `counts` weighs the documents (tokens of each, when a and b are NLL per token), so that the result is the
    difference of the two corpus means. One document: the difference without an interval.
    """
    if not len(a) or len({len(x) for x in (a, b, a if counts is None else counts)}) > 1:
        raise ValueError("paired_bootstrap: needs a, b (and counts) of one common length of at least 1")
    diff = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    weight = np.ones_like(diff) if counts is None else np.asarray(counts, dtype=np.float64)
    if not (weight > 0).all():
        raise ValueError("paired_bootstrap: counts must be above 0")
    total = diff * weight
    value = float(total.sum() / weight.sum())
    if diff.size < 2:
        return Estimate(value, None, None, 1)
    low, high = _bootstrap(diff.size, lambda i: total[i].sum(-1) / weight[i].sum(-1), resamples, seed, level)
    return Estimate(value, low, high, int(diff.size))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Exact two-sided p that a and b are right equally often; only documents where they disagree count.

    With m disagreements, k of them won by the rarer winner: p = min(1, 2 P(Binomial(m, 1/2) <= k)).
    """
    if len(a) != len(b):
        raise ValueError(f"mcnemar: {len(a)} and {len(b)} documents are no pairs")
    only_a = sum(bool(x) and not bool(y) for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y) and not bool(x) for x, y in zip(a, b, strict=True))
    m, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(m, i) for i in range(k + 1))  # exact integers: no underflow at large m
    return min(1.0, 2 * tail / 2**m)


def perplexity(
    nll: Sequence[float],
    counts: Sequence[int],
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """exp(sum nll / sum counts); nll in nats summed per document, counts in predicted tokens per document.

    The interval needs at least 8 documents (evaluation.md 6) and is None below.
    """
    total, weight = np.asarray(nll, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if total.ndim != 1 or not total.size or total.shape != weight.shape or not (weight > 0).all():
        raise ValueError("perplexity: needs one summed NLL and one count > 0 per document")
    value = float(np.exp(total.sum() / weight.sum()))
    if total.size < MIN_DOCUMENTS:
        return Estimate(value, None, None, int(total.size))
    low, high = _bootstrap(total.size, lambda i: np.exp(total[i].sum(-1) / weight[i].sum(-1)), resamples, seed, level)
    return Estimate(value, low, high, int(total.size))
