"""Intervals that respect which observations belong together.

Chains of one question are not independent, so sets of chains are resampled by question. Contrasts
of one chain are clustered by split. Every result carries the number of clusters it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 1000
"""Bootstrap resamples; the ends of a 95 % interval then move by about 2 % of its width."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its interval."""

    estimate: float
    """The value on the data as they are; NaN when there are none."""
    low: float
    """Lower end; NaN when it cannot be had."""
    high: float
    """Upper end; NaN when it cannot be had."""
    n: int
    """Observations."""
    clusters: int
    """Independent groups of observations."""
    level: float = 0.95
    """Nominal coverage."""

    def __str__(self) -> str:
        if math.isnan(self.estimate):
            return "n/a"
        if math.isnan(self.low):
            return f"{self.estimate:.3f} [one question: no interval]"
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def contains(self, value: float) -> bool:
        """Whether a value lies inside, ends included."""
        return self.low <= value <= self.high

    def row(self) -> dict[str, float | int | None]:
        """As JSON: NaN becomes null."""
        numbers = {"estimate": self.estimate, "low": self.low, "high": self.high}
        out: dict[str, float | int | None] = {
            k: None if math.isnan(v) else v for k, v in numbers.items()
        }
        return out | {"n": self.n, "clusters": self.clusters, "level": self.level}


def empty() -> Interval:
    """The interval of nothing."""
    return Interval(estimate=math.nan, low=math.nan, high=math.nan, n=0, clusters=0)


def resample(
    statistic: Callable[[Array], float],
    *,
    clusters: Sequence[str],
    seed: int = 0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Percentile bootstrap over clusters.

    ``statistic`` takes a weight per observation (how often its cluster was drawn; all ones for the
    estimate) and may return NaN where a resample does not define it; those are left out.
    """
    names, codes = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    if len(names) == 0:
        return empty()
    estimate = float(statistic(np.ones(len(codes))))
    rng = np.random.default_rng(seed)
    values: list[float] = []
    if len(names) > 1:
        for _ in range(resamples):
            drawn = np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))
            values.append(float(statistic(drawn[codes].astype(np.float64))))
    kept = np.asarray([v for v in values if not math.isnan(v)])
    if len(kept) < 20:
        low = high = math.nan
    else:
        low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return Interval(
        estimate=estimate,
        low=float(low),
        high=float(high),
        n=len(codes),
        clusters=len(names),
        level=level,
    )


def mean_interval(
    values: Sequence[float], *, clusters: Sequence[str], seed: int = 0, level: float = 0.95
) -> Interval:
    """Mean with its interval by clusters."""
    if len(values) == 0:
        return empty()
    data = np.asarray(values, dtype=np.float64)
    names, codes = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    sums, sizes = np.bincount(codes, weights=data), np.bincount(codes).astype(np.float64)
    low = high = math.nan
    if len(names) > 1:
        # The resamples of ``resample``, all at once: a mean needs the clusters' sums and sizes only.
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, len(names), (2000, len(names)))
        means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(
        estimate=float(data.mean()),
        low=float(low),
        high=float(high),
        n=len(data),
        clusters=len(names),
        level=level,
    )


def paired_interval(
    one: Sequence[float], other: Sequence[float], *, clusters: Sequence[str], seed: int = 0
) -> Interval:
    """Mean of ``one - other`` on the same observations, by clusters."""
    if len(one) != len(other):
        raise ValueError(f"{len(one)} values cannot be paired with {len(other)}")
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return mean_interval(differences, clusters=clusters, seed=seed)


def auroc(
    scores: Sequence[float], positive: Sequence[bool], *, weights: Array | None = None
) -> float:
    """Area under the ROC curve of ``scores`` for ``positive``; ties count half. NaN with one class.

    ``sklearn.metrics.roc_auc_score`` gives the same (a test says so); this one takes 0.1 ms, which
    a bootstrap needs.
    """
    s = np.asarray(scores, dtype=np.float64)
    y = np.asarray(positive, dtype=bool)
    w = np.ones(len(s)) if weights is None else weights
    if len(s) == 0 or not (w[y].sum() > 0 and w[~y].sum() > 0):
        return math.nan
    _, code = np.unique(s, return_inverse=True)
    top = np.bincount(code, weights=w * y)
    bottom = np.bincount(code, weights=w * ~y)
    below = np.cumsum(bottom) - bottom
    return float((top * (below + bottom / 2)).sum() / (top.sum() * bottom.sum()))


def average_precision(
    scores: Sequence[float], positive: Sequence[bool], *, weights: Array | None = None
) -> float:
    """Average precision, ties as one threshold; NaN with one class.

    ``sklearn.metrics.average_precision_score`` gives the same (a test says so), too slowly for a
    bootstrap.
    """
    s = np.asarray(scores, dtype=np.float64)
    y = np.asarray(positive, dtype=bool)
    w = np.ones(len(s)) if weights is None else weights
    if len(s) == 0 or not (w[y].sum() > 0 and w[~y].sum() > 0):
        return math.nan
    _, code = np.unique(-s, return_inverse=True)
    top = np.bincount(code, weights=w * y)
    found, seen = np.cumsum(top), np.cumsum(np.bincount(code, weights=w))
    precision = np.divide(found, seen, out=np.zeros_like(found), where=seen > 0)
    return float((precision * top).sum() / top.sum())


def wilson(wins: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a proportion; ``n`` may be an effective size. (0, 1) without data."""
    if n <= 0:
        return 0.0, 1.0
    from statistics import NormalDist

    z = NormalDist().inv_cdf((1 + level) / 2)
    p = wins / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def calibration_error(
    probabilities: Sequence[float], outcomes: Sequence[bool], *, bins: int = 10
) -> float:
    """Expected calibration error over bins of equal width; NaN without data."""
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(outcomes, dtype=np.float64)
    if len(p) == 0:
        return math.nan
    code = np.minimum((p * bins).astype(int), bins - 1)
    error = 0.0
    for b in range(bins):
        inside = code == b
        if inside.any():
            error += float(inside.mean()) * abs(float(p[inside].mean() - y[inside].mean()))
    return error
