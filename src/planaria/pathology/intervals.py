"""Bootstrap intervals of every measure of a report at once: whole slides or patients are drawn.

The same draws as :func:`planaria.pathology.metrics.bootstrap` of each measure, which a test compares
to the last digit; here a draw is a row of weights and a measure a product of matrices, so that all
measures of all centres take less time than one did.

D draws, G groups, N samples, C grades.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planaria.errors import ConfigError
from planaria.pathology.metrics import MIN_GROUPS, Interval

Array = NDArray[Any]
Found = dict[str, dict[str, Any]]
"""Intervals as dictionaries by the measure's name. Where there is none, low and high are NaN and
``reason`` says why."""


def binary_intervals(
    truth: ArrayLike,
    probability: ArrayLike,
    *,
    groups: ArrayLike,
    threshold: float,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Found:
    """Intervals of accuracy, AUC, sensitivity, specificity, precision and F1."""
    y, p = np.asarray(truth) == 1, np.asarray(probability)
    weight_DG, code_N = _draw(groups, draws=draws, level=level, seed=seed)
    called = p >= threshold
    kinds = (y & called, ~y & called, ~y & ~called, y & ~called)
    table_GK = np.stack([np.bincount(code_N[k], minlength=weight_DG.shape[1]) for k in kinds], 1)
    tp, fp, tn, fn = (weight_DG @ table_GK).T.astype(np.float64)
    measures = {
        "accuracy": (tp + tn) / (tp + fp + tn + fn),
        "auc": _aucs(y, p, weight_DG, code_N),
        "sensitivity": _share(tp, tp + fn),
        "specificity": _share(tn, tn + fp),
        "precision": _share(tp, tp + fp, empty=0.0),
        "f1": _share(2 * tp, 2 * tp + fp + fn, empty=0.0),
    }
    return {name: _interval(values, weight_DG, level=level) for name, values in measures.items()}


def grade_intervals(
    truth: ArrayLike,
    predicted: ArrayLike,
    *,
    groups: ArrayLike,
    classes: int,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Found:
    """Intervals of accuracy and of quadratic-weighted kappa."""
    y, p = np.asarray(truth, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    weight_DG, code_N = _draw(groups, draws=draws, level=level, seed=seed)
    table_GK = np.zeros((weight_DG.shape[1], classes * classes), dtype=np.int64)
    np.add.at(table_GK, (code_N, y * classes + p), 1)
    seen_DCC = (weight_DG @ table_GK).reshape(-1, classes, classes).astype(np.float64)
    total = seen_DCC.sum(axis=(1, 2))
    grade = np.arange(classes)
    cost_CC = (grade[:, None] - grade[None, :]) ** 2
    chance_DCC = seen_DCC.sum(axis=2)[:, :, None] * seen_DCC.sum(axis=1)[:, None, :]
    worst = (cost_CC * chance_DCC).sum(axis=(1, 2)) / total
    # One grade on both sides leaves nothing to disagree about: 1, as in metrics.kappa.
    kappa = 1 - _share((cost_CC * seen_DCC).sum(axis=(1, 2)), worst, empty=0.0)
    measures = {
        "accuracy": np.trace(seen_DCC, axis1=1, axis2=2) / total,
        "kappa": kappa,
    }
    return {name: _interval(values, weight_DG, level=level) for name, values in measures.items()}


def per_centre(
    function: Callable[..., Found], *samples: ArrayLike, centres: ArrayLike
) -> dict[str, Any]:
    """``function(*samples)`` over everything (``overall``) and for each centre (``centres``)."""
    arrays, where = [np.asarray(sample) for sample in samples], np.asarray(centres)
    each = {
        str(name): function(*(array[where == name] for array in arrays))
        for name in np.unique(where)
    }
    return {"overall": function(*arrays), "centres": each}


def _draw(groups: ArrayLike, *, draws: int, level: float, seed: int) -> tuple[Array, Array]:
    """How often each group is drawn [D + 1, G], the data as they are first, and each sample's group
    [N]."""
    if draws < 10 or not 0 < level < 1:
        raise ConfigError(f"draws is {draws} and level {level}; at least 10, and between 0 and 1")
    names, code_N = np.unique(np.asarray(groups), return_inverse=True)
    count = len(names)
    rng = np.random.default_rng(seed)
    rows = [np.ones(count, dtype=np.int64)]
    for _ in range(draws if count >= MIN_GROUPS else 0):
        rows.append(np.bincount(rng.integers(count, size=count), minlength=count))
    return np.stack(rows), code_N


def _aucs(y: Array, p: Array, weight_DG: Array, code_N: Array) -> Array:
    """The area under the ROC curve for each row of weights, ties counted half; NaN with one class."""
    _, rank = np.unique(p, return_inverse=True)
    out = np.full(len(weight_DG), math.nan)
    for number, weight_G in enumerate(weight_DG):
        weight = weight_G[code_N]
        top = np.bincount(rank, weights=weight * y)
        bottom = np.bincount(rank, weights=weight * ~y)
        if top.sum() > 0 and bottom.sum() > 0:
            below = np.cumsum(bottom) - bottom
            out[number] = (top * (below + bottom / 2)).sum() / (top.sum() * bottom.sum())
    return out


def _share(part: Array, whole: Array, *, empty: float = math.nan) -> Array:
    return np.divide(part, whole, out=np.full(len(part), empty), where=whole > 0)


def _interval(values: Array, weight_DG: Array, *, level: float) -> dict[str, Any]:
    value, drawn = float(values[0]), values[1:]
    groups = weight_DG.shape[1]
    usable = drawn[~np.isnan(drawn)]
    low = high = math.nan
    reason = ""
    if groups < MIN_GROUPS:
        reason = f"{groups} groups are too few for an interval; it needs at least {MIN_GROUPS}"
    elif len(usable) < len(drawn) / 2:
        reason = f"only {len(usable)} of {len(drawn)} bootstrap draws define it"
    else:
        low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    found = Interval(value=value, low=float(low), high=float(high), level=level, groups=groups)
    return asdict(found) | {"reason": reason}
