"""Measures over whole sets, never averaged over batches; defined also where a class is missing.

Counts and curves are scikit-learn's; this module decides what a set of one class means and draws
the bootstrap by slide or patient. Every function takes arrays of one entry per sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn import metrics as sk

from planaria.errors import ConfigError, DataError

Array = NDArray[Any]

MIN_GROUPS = 5
"""Slides or patients below which an interval would pretend to know what it cannot (our choice)."""


class OneClassWarning(UserWarning):
    """A measure was asked for on a set in which only one class occurs."""


@dataclass(frozen=True, kw_only=True)
class BinaryReport:
    """How well probabilities tell positive from negative samples."""

    samples: int
    positives: int
    threshold: float
    """Probability from which a sample is called positive."""
    accuracy: float
    balanced_accuracy: float
    """Mean of sensitivity and specificity; the one that is defined where a class is missing."""
    auc: float
    """Area under the ROC curve; NaN where only one class occurs."""
    sensitivity: float
    """TP / (TP + FN); NaN without positives."""
    specificity: float
    """TN / (TN + FP), the true one; NaN without negatives."""
    precision: float
    """TP / (TP + FP); 0 where nothing is called positive. The released code prints it as
    "specificity"."""
    f1: float
    """0 where nothing is called positive and nothing is."""


@dataclass(frozen=True, kw_only=True)
class GradeReport:
    """How well predicted grades agree with the given ones."""

    samples: int
    accuracy: float
    kappa: float
    """Quadratic-weighted; 1.0 where one and the same grade is all there is."""
    confusion: tuple[tuple[int, ...], ...]
    """Rows: given grades; columns: predicted ones."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A measure with its bootstrap interval."""

    value: float
    low: float
    high: float
    level: float
    """Coverage, 0.95 unless asked for otherwise."""
    groups: int
    """Slides or patients that were drawn from."""


@dataclass(frozen=True, kw_only=True)
class Centres:
    """One report for all samples and one per centre."""

    overall: dict[str, Any]
    centres: dict[str, dict[str, Any]] = field(default_factory=dict)


def binary_report(
    truth: ArrayLike, probability: ArrayLike, *, threshold: float = 0.5
) -> BinaryReport:
    """The measures of ``probability`` (0 to 1) against ``truth`` (0 or 1), pooled over samples."""
    y, p = _pair(truth, probability)
    if not np.isin(y, (0, 1)).all():
        raise DataError(f"a label is {y[~np.isin(y, (0, 1))][0]}; labels are 0 or 1")
    if not ((p >= 0) & (p <= 1)).all():
        raise DataError("a probability is NaN or outside 0 to 1; pass sigmoid outputs")
    called = (p >= threshold).astype(np.int64)
    (tn, fp), (fn, tp) = sk.confusion_matrix(y, called, labels=[0, 1]).tolist()
    sensitivity = tp / (tp + fn) if tp + fn else math.nan
    specificity = tn / (tn + fp) if tn + fp else math.nan
    both = [value for value in (sensitivity, specificity) if not math.isnan(value)]
    return BinaryReport(
        samples=len(y),
        positives=int(y.sum()),
        threshold=threshold,
        accuracy=(tp + tn) / len(y),
        balanced_accuracy=sum(both) / len(both),
        auc=auc(y, p),
        sensitivity=sensitivity,
        specificity=specificity,
        precision=tp / (tp + fp) if tp + fp else 0.0,
        f1=2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0,
    )


def auc(truth: ArrayLike, score: ArrayLike) -> float:
    """Area under the ROC curve; NaN with a :class:`OneClassWarning` where one class is missing."""
    y, s = _pair(truth, score)
    if len(np.unique(y)) < 2:
        warnings.warn(
            f"AUC of {len(y)} samples of one class is not defined: NaN",
            OneClassWarning,
            stacklevel=2,
        )
        return math.nan
    return float(sk.roc_auc_score(y, s))


def kappa(truth: ArrayLike, predicted: ArrayLike, *, classes: int) -> float:
    """Quadratic-weighted kappa, 1 - sum(w O) / sum(w E).

    Where one and the same grade is all that occurs on both sides, E leaves nothing to disagree
    about: 1.0 with a :class:`OneClassWarning`, never NaN.
    """
    y, p = _pair(truth, predicted)
    for name, grades in (("given", y), ("predicted", p)):
        if grades.min() < 0 or grades.max() >= classes:
            raise DataError(
                f"a {name} grade is {grades.min() if grades.min() < 0 else grades.max()}; grades are "
                f"0 to {classes - 1}"
            )
    if len(np.unique(np.concatenate([y, p]))) == 1:
        warnings.warn(
            f"kappa of {len(y)} samples that all have grade {y[0]} is set to 1.0",
            OneClassWarning,
            stacklevel=2,
        )
        return 1.0
    return float(sk.cohen_kappa_score(y, p, labels=list(range(classes)), weights="quadratic"))


def grade_report(truth: ArrayLike, predicted: ArrayLike, *, classes: int) -> GradeReport:
    """Accuracy, kappa and confusion of predicted grades, 0 to ``classes`` - 1."""
    y, p = _pair(truth, predicted)
    agreement = kappa(y, p, classes=classes)
    confusion = sk.confusion_matrix(y, p, labels=list(range(classes)))
    return GradeReport(
        samples=len(y),
        accuracy=float((y == p).mean()),
        kappa=agreement,
        confusion=tuple(tuple(int(v) for v in row) for row in confusion),
    )


def bootstrap(
    measure: Callable[..., float],
    *samples: ArrayLike,
    groups: ArrayLike,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The percentile interval of ``measure(*samples)`` when whole groups are drawn again.

    Patches of one slide resemble each other, so slides (or patients) are drawn, not patches. Draws
    in which the measure is NaN (one class only) are left out; DataError where fewer than half remain.
    Source: cluster bootstrap, Field and Welsh 2007.
    """
    if draws < 10 or not 0 < level < 1:
        raise ConfigError(f"draws is {draws} and level {level}; at least 10, and between 0 and 1")
    arrays = [np.asarray(sample) for sample in samples]
    names, code = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < MIN_GROUPS:
        raise DataError(
            f"{len(names)} groups are too few for an interval; it needs at least {MIN_GROUPS}"
        )
    members = [np.flatnonzero(code == index) for index in range(len(names))]
    rng = np.random.default_rng(seed)
    values: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneClassWarning)
        value = measure(*arrays)
        for _ in range(draws):
            drawn = rng.integers(len(names), size=len(names))
            rows = np.concatenate([members[index] for index in drawn])
            values.append(measure(*(array[rows] for array in arrays)))
    usable = np.array([v for v in values if not math.isnan(v)])
    if len(usable) < draws / 2:
        raise DataError(
            f"only {len(usable)} of {draws} bootstrap draws hold both classes; the {len(names)} "
            "groups are too few for an interval"
        )
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value=value, low=float(low), high=float(high), level=level, groups=len(names))


def by_centre(report: Callable[..., Any], *samples: ArrayLike, centres: ArrayLike) -> Centres:
    """``report(*samples)`` over everything and for each centre, as dictionaries."""
    arrays = [np.asarray(sample) for sample in samples]
    where = np.asarray(centres)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneClassWarning)
        each = {
            str(name): asdict(report(*(array[where == name] for array in arrays)))
            for name in np.unique(where)
        }
        return Centres(overall=asdict(report(*arrays)), centres=each)


def fit_thresholds(truth: ArrayLike, score: ArrayLike, *, classes: int) -> tuple[float, ...]:
    """The ``classes`` - 1 rising cuts of ``score`` that give the best kappa, by coordinate ascent.

    Meant for scores that were predicted across folds, so that no slide helps to set its own cut.
    Cuts lie midway between neighbouring scores; ties keep the cut nearest to its start at 0.5, 1.5 ...
    Source: the PANDA winners' practice, our search.
    """
    y, s = _pair(truth, score)
    cuts = np.arange(classes - 1) + 0.5
    values = np.unique(s)
    middles = (values[1:] + values[:-1]) / 2
    if len(middles) > 200:
        middles = np.quantile(middles, np.linspace(0, 1, 200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneClassWarning)
        best = kappa(y, apply_thresholds(s, cuts), classes=classes)
        for _ in range(10):
            before = best
            for index in range(classes - 1):
                low = cuts[index - 1] if index else -math.inf
                high = cuts[index + 1] if index + 1 < classes - 1 else math.inf
                inside = middles[(middles > low) & (middles < high)]
                start = index + 0.5
                for cut in inside[np.argsort(np.abs(inside - start), kind="stable")]:
                    trial = cuts.copy()
                    trial[index] = cut
                    found = kappa(y, apply_thresholds(s, trial), classes=classes)
                    if found > best + 1e-12:
                        best, cuts = found, trial
            if best <= before + 1e-12:
                break
    return tuple(float(cut) for cut in cuts)


def apply_thresholds(score: ArrayLike, cuts: ArrayLike) -> NDArray[np.int64]:
    """The grade of each score: how many cuts it reaches."""
    return np.searchsorted(np.asarray(cuts), np.asarray(score), side="right").astype(np.int64)


def operating_point(truth: ArrayLike, probability: ArrayLike, *, sensitivity: float) -> float:
    """The highest threshold whose sensitivity on this set is at least ``sensitivity``.

    To be chosen on validation slides and stated with every result. DataError without positives.
    """
    y, p = _pair(truth, probability)
    if not 0 < sensitivity <= 1:
        raise ConfigError(f"sensitivity is {sensitivity}; above 0 and up to 1")
    positive = np.sort(p[y == 1])[::-1]
    if len(positive) == 0:
        raise DataError("no positive sample: a sensitivity cannot be met; validate on more slides")
    # 1e-9: 0.9 * 10 must need nine positives, not ten.
    return float(positive[math.ceil(sensitivity * len(positive) - 1e-9) - 1])


def _pair(truth: ArrayLike, other: ArrayLike) -> tuple[Array, Array]:
    y, p = np.asarray(truth), np.asarray(other)
    if y.shape != p.shape or y.ndim != 1:
        raise DataError(f"shapes {y.shape} and {p.shape}; both must be [N]")
    if len(y) == 0:
        raise DataError("no samples to measure; the set is empty")
    return y, p
