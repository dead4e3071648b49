"""The few statistics of the tables, and the tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""Of a bootstrap (our choice; the interval's third digit is steady then)."""


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}]"


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The median and its 95 % percentile bootstrap interval; resampling is seeded.

    Raises :class:`ValueError` for no values.
    """
    if not values:
        raise ValueError("a median needs at least one value, and there are none")
    rng = np.random.default_rng(seed)
    sample_N = np.asarray(values)
    picks_RN = rng.integers(len(sample_N), size=(RESAMPLES, len(sample_N)))
    low, high = np.percentile(np.median(sample_N[picks_RN], axis=1), [2.5, 97.5])
    return Interval(float(np.median(sample_N)), float(low), float(high), len(sample_N))


def median(values: Iterable[float]) -> float | None:
    """None where there are no values."""
    listed = list(values)
    return statistics.median(listed) if listed else None


def seconds(value: float | None) -> str:
    """Three digits behind the point; a dash for None."""
    return "–" if value is None else f"{value:.3f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
