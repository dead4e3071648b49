"""When to stop asking: a confidence sequence for a mean in [0, 1].

Stopping on an ordinary interval, looked at again and again, breaks its coverage. A confidence
sequence covers the mean at *every* time at once, so one may stop whenever it is narrow enough. Ours
is the hedged capital process of Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS-B 2024, section 4.4): one bets against each candidate mean and rejects
it when the stake has grown by 1/alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

GRID = 401
"""Candidate means."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the sequence covers now."""

    low: float
    """Lower end."""
    high: float
    """Upper end."""
    n: int
    """Observations so far."""

    @property
    def half_width(self) -> float:
        """Half of the width."""
        return (self.high - self.low) / 2


class ConfidenceSequence:
    """Bounds of a mean that hold at all times with probability ``1 - alpha``.

    Observations lie in [0, 1] and have a common mean given the past. Raises ``ValueError`` for an
    observation outside.
    """

    def __init__(self, *, alpha: float = 0.05) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}: it lies between 0 and 1, 0.05 is usual")
        self.alpha = alpha
        self._means = np.linspace(0.0, 1.0, GRID)
        self._up = np.zeros(GRID)  # log of the stake that grows when the mean is higher
        self._down = np.zeros(GRID)
        self._alive = np.ones(GRID, dtype=bool)
        self._n = 0
        self._sum = 0.0
        self._spread = 0.25  # sum of squares around the running mean, with a prior of one
        self._estimate = 0.5

    def add(self, value: float) -> Bounds:
        """Take one observation in; the bounds only ever shrink."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"an observation is {value}: it lies between 0 and 1")
        n = self._n + 1
        variance = self._spread / n
        stake = math.sqrt(2 * math.log(2 / self.alpha) / max(1e-12, variance * n * math.log(1 + n)))
        with np.errstate(divide="ignore"):
            cap = 0.5  # a half keeps each factor above one half
            up = np.minimum(stake, cap / np.maximum(self._means, 1e-12))
            down = np.minimum(stake, cap / np.maximum(1 - self._means, 1e-12))
        self._up += np.log1p(up * (value - self._means))
        self._down += np.log1p(-down * (value - self._means))
        capital = np.maximum(self._up, self._down) + math.log(0.5)
        self._alive &= capital < math.log(1 / self.alpha)
        self._n = n
        self._sum += value
        self._estimate = (0.5 + self._sum) / (n + 1)
        self._spread += (value - self._estimate) ** 2
        return self.bounds()

    def bounds(self) -> Bounds:
        """The bounds now; the grid's step is added on both sides."""
        alive = np.flatnonzero(self._alive)
        step = 1.0 / (GRID - 1)
        if len(alive) == 0:
            # Every candidate was rejected: only possible off the grid; keep to the mean.
            mean = self._sum / max(1, self._n)
            return Bounds(low=max(0.0, mean - step), high=min(1.0, mean + step), n=self._n)
        low = max(0.0, float(self._means[alive[0]]) - step)
        high = min(1.0, float(self._means[alive[-1]]) + step)
        return Bounds(low=low, high=high, n=self._n)


def should_go_on(bounds: Bounds, *, half_width: float, least: int) -> tuple[bool, str]:
    """Whether to ask further, and why."""
    if bounds.n < least:
        return True, f"{bounds.n} of at least {least} contrasts are decided"
    if bounds.half_width > half_width:
        return True, f"half width {bounds.half_width:.3f} is above {half_width:.3f}"
    return False, f"half width {bounds.half_width:.3f} is within {half_width:.3f}"
