"""Differences of AUC and kappa between runs, with intervals by slide.

Both measures follow from sums over slides, so a bootstrap draw is a vector of how often each slide
was drawn, and all draws are a matrix product. Shapes: D draws, G slides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hotswap.rows import Row
from numpy.typing import NDArray

Array = NDArray[np.float64]
DRAWS = 2000
SEEDS = 3
"""Trainings without which nothing is said of a part: two agree by chance every other time."""


@dataclass(frozen=True)
class Gap:
    """A difference with its 95 % interval by slide, and the same for each seed alone."""

    value: float
    low: float
    high: float
    seeds: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """What may be said: only where the interval and every seed agree on a direction."""
        if len(self.seeds) < SEEDS:
            return f"no verdict ({len(self.seeds)} of {SEEDS} seeds)"
        if self.low > 0 and min(self.seeds) > 0:
            return "adds"
        if self.high < 0 and max(self.seeds) < 0:
            return "takes away"
        return "adds nothing that is shown"

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class Measured:
    """A run's test part: its measure under any weights of slides."""

    def __init__(self, row: Row) -> None:
        self.names: list[str] = [name for name, _ in row["groups"]]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"a slide of {row['recipe']} stands in two places")
        slide = np.repeat(np.arange(len(self.names)), [count for _, count in row["groups"]])
        truth = np.array([int(digit) for digit in row["truth"]])
        if isinstance(row["said"], str):
            said = np.array([int(digit) for digit in row["said"]])
            self._at = _kappa(slide, truth, said, slides=len(self.names))
        else:
            self._at = _auc(slide, truth, np.array(row["said"]), slides=len(self.names))

    def at(self, weights_DG: Array) -> Array:
        """The measure [D] where slides count as ``weights_DG`` says."""
        return self._at(weights_DG)

    def plain(self) -> float:
        """The measure with every slide once."""
        return float(self.at(np.ones((1, len(self.names))))[0])


def _auc(slide: Array, truth: Array, score: Array, *, slides: int) -> Any:
    """AUC(w) = w U w / (w p)(w n): U counts pairs that are in order, ties half."""
    higher_GG = np.zeros((slides, slides))
    positive, owner = score[truth == 1], slide[truth == 1]
    for other in range(slides):
        negative = np.sort(score[(slide == other) & (truth == 0)])
        below = np.searchsorted(negative, positive, side="left")
        upto = np.searchsorted(negative, positive, side="right")
        higher_GG[:, other] = np.bincount(owner, (below + upto) / 2, minlength=slides)
    p = np.bincount(slide, truth == 1, minlength=slides)
    n = np.bincount(slide, truth == 0, minlength=slides)

    def at(w_DG: Array) -> Array:
        return ((w_DG @ higher_GG) * w_DG).sum(axis=1) / ((w_DG @ p) * (w_DG @ n))

    return at


def _kappa(slide: Array, truth: Array, said: Array, *, slides: int, classes: int = 6) -> Any:
    """Quadratic-weighted kappa from each slide's part of the confusion matrix."""
    cell = truth * classes + said
    counts_GK = np.zeros((slides, classes**2))
    np.add.at(counts_GK, (slide, cell), 1)
    grade = np.arange(classes)
    cost = ((grade[:, None] - grade) ** 2).astype(np.float64)

    def at(w_DG: Array) -> Array:
        table = (w_DG @ counts_GK).reshape(-1, classes, classes)
        given, told = table.sum(axis=2), table.sum(axis=1)
        chance = (given[:, :, None] * told[:, None, :] * cost).sum(axis=(1, 2))
        return 1 - (table * cost).sum(axis=(1, 2)) * table.sum(axis=(1, 2)) / chance

    return at


Pair = tuple[Row, Row]
"""A run with a part, and the same run without."""


def gap(pairs: Sequence[Pair], *, draws: int = DRAWS) -> Gap:
    """The mean difference over ``pairs``, with its interval: slides are drawn, jointly for all.

    The weights of seeds are equal: the mean over a seed's pairs first, then over seeds.
    """
    made = [(Measured(a), Measured(b), a["seed"]) for a, b in pairs]
    names = sorted({name for run, _, _ in made for name in run.names})
    place = {name: number for number, name in enumerate(names)}
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    weights = np.concatenate([np.ones((1, len(names))), drawn.astype(np.float64)])
    by_seed: dict[int, list[Array]] = {}
    for run, other, seed in made:
        columns = [place[name] for name in run.names]
        if run.names != other.names:
            raise ValueError("two runs that are compared were tested on different slides")
        change = run.at(weights[:, columns]) - other.at(weights[:, columns])
        by_seed.setdefault(seed, []).append(change)
    each = np.array([np.mean(changes, axis=0) for _, changes in sorted(by_seed.items())])
    mean = each.mean(axis=0)
    low, high = np.nanquantile(mean[1:], [0.025, 0.975])
    return Gap(float(mean[0]), float(low), float(high), tuple(each[:, 0].tolist()))


def against_bare(rows: Sequence[Row], on: Sequence[str]) -> Gap | None:
    """The runs with ``on`` against the bare ones of the same seeds; None where there are none."""
    bare = {row["seed"]: row for row in rows if not row["on"]}
    mine = [row for row in rows if row["on"] == list(on) and row["seed"] in bare]
    return gap([(row, bare[row["seed"]]) for row in mine]) if mine and on else None


def main_effect(rows: Sequence[Row], part: str) -> tuple[Gap, int] | None:
    """What ``part`` adds on average over all settings of the others, and from how many pairs."""
    known = {(frozenset(row["on"]), row["seed"]): row for row in rows}
    pairs = [
        (row, known[without, seed])
        for (on, seed), row in known.items()
        if part in on and (without := on - {part}, seed) in known
    ]
    return (gap(pairs), len(pairs)) if pairs else None
