"""Expected grades for a part of the slides, the same whatever the number of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from planaria.errors import DataError
from planaria.pathology.intervals import grade_intervals, per_centre
from planaria.pathology.losses import GradeLoss
from planaria.pathology.metrics import (
    apply_thresholds,
    by_centre,
    fit_thresholds,
    grade_report,
)
from planaria.pathology.training import autocast, share
from planaria.recipes.gleason.config import GleasonConfig
from planaria.recipes.gleason.data import Part
from planaria.recipes.gleason.models import CLASSES, inputs

ROUNDING = tuple(grade + 0.5 for grade in range(CLASSES - 1))


def expected_grades(
    model: nn.Module,
    part: Part,
    *,
    loss: GradeLoss,
    config: GleasonConfig,
    shard: int,
    world: int,
    shifts: int = 1,
) -> NDArray[np.float64]:
    """The expected grade [N] of every slide of ``part``, mean of ``shifts`` boards; a collective.

    Features of a slide are seen once, and one slide at a time: it has thousands of tiles.
    """
    out = torch.zeros(len(part.labels), dtype=torch.float64)
    mine = share(len(part.labels), shard=shard, world=world)
    training = model.training
    model.eval()
    shifts = shifts if config.pbir and part.bags is None else 1
    batch = config.batch if part.bags is None else 1
    try:
        with torch.no_grad(), autocast(config.dtype):
            for start in range(0, len(mine), batch):
                ids = mine[start : start + batch]
                for number in range(shifts):
                    x = inputs(part, ids, config, shift=number * config.tiles // shifts)
                    output = model(x).float()
                    out[torch.from_numpy(ids)] += loss.score(output).double() / shifts
    finally:
        model.train(training)
    if dist.is_initialized():
        dist.all_reduce(out)
    return out.numpy()


def measure(
    part: Part, score: NDArray[np.float64], *, cuts: Sequence[float] = ROUNDING
) -> dict[str, Any]:
    """Accuracy, kappa and confusion at ``cuts``, overall and per centre, with intervals by slide."""
    grade = apply_thresholds(score, cuts)
    result: dict[str, Any] = asdict(
        by_centre(
            lambda y, p: grade_report(y, p, classes=CLASSES),
            part.labels,
            grade,
            centres=part.centres,
        )
    )
    result["intervals"] = per_centre(
        lambda y, p, g: grade_intervals(y, p, groups=g, classes=CLASSES),
        part.labels,
        grade,
        part.names,
        centres=part.centres,
    )
    return result


def fit_across(runs: Sequence[Path]) -> tuple[float, ...]:
    """The cuts that fit the test predictions of several folds' runs best, all taken together.

    No slide was trained on by the run that predicted it. DataError where a slide stands in two.
    """
    labels: list[int] = []
    scores: list[float] = []
    seen: set[str] = set()
    for run in runs:
        path = run / "predictions.json"
        if not path.is_file():
            raise DataError(f"{path}: missing; train every fold first (--fold 0, 1, ...)")
        for row in json.loads(path.read_text(encoding="utf-8")):
            if row["slide"] in seen:
                raise DataError(f"{run}: slide {row['slide']} stands in another fold, too")
            seen.add(row["slide"])
            labels.append(row["grade"])
            scores.append(row["score"])
    return fit_thresholds(labels, scores, classes=CLASSES)
