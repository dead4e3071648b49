"""Probabilities for a part of the data, the same whatever the number of workers, and what they say."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from planaria.pathology.colour import to_unit
from planaria.pathology.datasets.features import Bags
from planaria.pathology.files import atomic
from planaria.pathology.intervals import binary_intervals, per_centre
from planaria.pathology.metrics import binary_report, by_centre
from planaria.pathology.training import autocast, share
from planaria.recipes.metastasis.data import Part

BATCH = 64


def probabilities(
    model: nn.Module, part: Part, *, shard: int, world: int, dtype: str, average: int = 1
) -> NDArray[np.float64]:
    """The probability [N] of tumour for every patch of ``part``; a collective.

    ``average``: 1, or 8 to take the mean over all turns and mirrorings; features have none. Uses no
    random numbers and leaves the model in the mode that it had.
    """
    out = torch.zeros(len(part.labels), dtype=torch.float64)
    mine = share(len(part.labels), shard=shard, world=world)
    training = model.training
    model.eval()
    bags = part.patches if isinstance(part.patches, Bags) else None
    # A slide has thousands of tiles, each a thousand numbers: one slide at a time.
    batch = BATCH if bags is None or bags.single else 1
    try:
        with torch.no_grad(), autocast(dtype):
            for start in range(0, len(mine), batch):
                ids = mine[start : start + batch]
                if bags is None:
                    seen = views(to_unit(torch.from_numpy(part.batch(ids)[0])), average)
                else:
                    seen = [torch.from_numpy(bags.batch(ids))]
                total = sum(
                    (model(view)[:, 0].float().sigmoid().double() for view in seen),
                    start=torch.zeros(len(ids), dtype=torch.float64),
                )
                out[torch.from_numpy(ids)] = total / len(seen)
    finally:
        model.train(training)
    if dist.is_initialized():
        dist.all_reduce(out)
    return out.numpy()


def views(x_B3HW: Tensor, count: int) -> list[Tensor]:
    """The first ``count`` of the 8 turns and mirrorings of a batch."""
    turned = [torch.rot90(x_B3HW, k=k, dims=(2, 3)) for k in range(min(count, 4))]
    return turned + [view.flip(3) for view in turned[: max(count - 4, 0)]]


def measure(part: Part, probability: NDArray[np.float64], *, threshold: float) -> dict[str, Any]:
    """Pooled measures, overall and per centre, each with its interval by slide or patient."""
    found = by_centre(
        lambda y, p: binary_report(y, p, threshold=threshold),
        part.labels,
        probability,
        centres=part.centres,
    )
    intervals = per_centre(
        lambda y, p, g: binary_intervals(y, p, groups=g, threshold=threshold),
        part.labels,
        probability,
        part.groups,
        centres=part.centres,
    )
    return asdict(found) | {"intervals": intervals}


def write_predictions(path: Path, part: Part, *, probability: NDArray[np.float64]) -> None:
    """One row per patch of ``part``: number, group (slide, patient), centre, label, probability."""
    rows = zip(part.groups, part.centres, part.labels.tolist(), probability.tolist(), strict=True)
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "group", "centre", "label", "probability"])
        writer.writerows((number, *row) for number, row in enumerate(rows))
