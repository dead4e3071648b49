"""Scape's state in the parameters' shapes, so that it can be loaded at any number of workers.

What is saved for a weight does not depend on the number of workers: the owner's moment, the mean of
the workers' first moments, the steps since it was sent, the outer step's state. The mask is chosen
anew after loading.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from planaria.optim import checks
from planaria.optim.base import as_dtensor, copy_part, load_groups
from planaria.optim.buckets import Buckets
from planaria.optim.collectives import Workers, mean_rows
from planaria.optim.drift import Drift
from planaria.optim.frozen import Frozen
from planaria.optim.layout import local_shape

Columns = dict[str, list[Tensor]]


class Owner(Protocol):
    """What :class:`planaria.optim.Scape` offers for saving and loading."""

    workers: Workers
    buckets: Buckets
    family: Drift | Frozen
    count: Tensor
    param_groups: list[dict[str, Any]]

    def is_dense(self, step: int) -> bool:
        """Whether a step, counted from 0, is dense."""
        ...


def save(optimizer: Owner) -> dict[str, Any]:
    """``{"state": {index: {name: DTensor}}, "param_groups": ..., "count": ...}``; collective."""
    layout, rank = optimizer.buckets.layout, optimizer.workers.rank
    state: dict[str, dict[str, Tensor]] = {}
    for name, columns in _columns(optimizer, mean=True).items():
        for bucket, flat in zip(layout.buckets, columns, strict=False):
            mesh = optimizer.workers.mesh(flat.device.type)
            for slot in bucket.slots:
                shape = local_shape(slot, rank)
                local = flat[slot.offset : slot.offset + math.prod(shape)].view(shape)
                state.setdefault(str(slot.index), {})[name] = as_dtensor(local, slot, mesh)
    groups = [
        {k: v for k, v in group.items() if k != "params"} | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups, "count": optimizer.count.clone()}


def load(optimizer: Owner, saved: dict[str, Any]) -> None:
    """Loads what :func:`save` gave; collective."""
    layout, rank = optimizer.buckets.layout, optimizer.workers.rank
    columns = _columns(optimizer, mean=False)
    for name, flats in columns.items():
        for bucket, flat in zip(layout.buckets, flats, strict=False):
            for slot in bucket.slots:
                entry = saved["state"].get(str(slot.index), {})
                if name not in entry:
                    raise checks.StateError(
                        f"the saved state of parameter {slot.index} lacks {name!r}; load a state "
                        "that was saved from the same model, family and options"
                    )
                shape = local_shape(slot, rank)
                target = flat[slot.offset : slot.offset + math.prod(shape)].view(shape)
                what = f"the saved {name!r} of parameter {slot.index}"
                copy_part(target, entry[name], slot, rank, what)
    groups = [{**g, "params": [None] * g["params"]} for g in saved["param_groups"]]
    load_groups(optimizer.param_groups, groups)
    optimizer.count.copy_(torch.as_tensor(saved["count"]))
    _spread(optimizer, columns)


def _columns(optimizer: Owner, *, mean: bool) -> Columns:
    """This owner's part of every kind of state, one flat tensor for each bucket that has it.

    What every worker holds for all owners is replaced by its mean (for saving) or by zeros that
    are to be filled (for loading).
    """
    family = optimizer.family
    if isinstance(family, Drift):
        sparse = family.layout.sparse if family.velocity.numel() else 0
        full = _replicated(family)
        flats = {
            "velocity": [family.velocity[b.begin : b.end] for b in family.layout.buckets[:sparse]]
        }
    else:
        full = _replicated(family)
        flats = {"moment": family.own(family.m), "skipped": family.own(family.tau)}
        if family.half:
            flats["master"] = family.own(family.w)
    for name, rows in full.items():
        if mean:
            flats[name] = [_mean(optimizer, r) for r in rows]
        else:
            flats[name] = [torch.zeros_like(r[0]) for r in rows]
    return flats


def _replicated(family: Drift | Frozen) -> dict[str, list[Tensor]]:
    """What every worker holds for all owners, as [N, S] of each bucket."""
    if not isinstance(family, Drift):
        return {"first": family.whole(family.a)}
    full = {"moment": family.whole(family.m), "anchor": family.whole(family.anchor)}
    return {**full, "master": family.whole(family.w)} if family.half else full


def _mean(optimizer: Owner, rows_NS: Tensor) -> Tensor:
    received = torch.empty_like(rows_NS)
    optimizer.workers.exchange(received, rows_NS).wait()
    return mean_rows(received)


def _spread(optimizer: Owner, columns: Columns) -> None:
    """Gives every worker the whole of what it holds for all owners."""
    family = optimizer.family
    full = _replicated(family)
    for name, rows in full.items():
        for target, own in zip(rows, columns[name], strict=True):
            optimizer.workers.gather(target, own).wait()
    if not isinstance(family, Drift) and not optimizer.is_dense(int(optimizer.count)):
        family.choose_again(int(optimizer.count))
