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
from planaria.optim.base import as_dtensor, load_groups, loading, part_for, require_groups
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
    layout, params = optimizer.buckets.layout, optimizer.buckets.params
    state: dict[str, dict[str, Tensor]] = {}
    for name, columns in _columns(optimizer, mean=True).items():
        for bucket, flat in zip(layout.buckets, columns, strict=False):
            for slot in bucket.slots:
                own = as_dtensor(flat[slot.offset :], slot, params[slot.index], optimizer.workers)
                state.setdefault(str(slot.index), {})[name] = own
    groups = [
        {k: v for k, v in group.items() if k != "params"} | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups, "count": optimizer.count.clone()}


def load(optimizer: Owner, saved: dict[str, Any]) -> None:
    """Loads what :func:`save` gave; collective."""
    columns = _columns(optimizer, mean=False)
    groups = [{**g, "params": [None] * g["params"]} for g in saved["param_groups"]]
    with loading(optimizer.workers):
        found = _read(optimizer, columns, saved)
        require_groups(optimizer.param_groups, groups)
    for target, part in found:
        target.copy_(part)
    load_groups(optimizer.param_groups, groups)
    optimizer.count.copy_(torch.as_tensor(saved["count"]))
    _spread(optimizer, columns)


def _read(optimizer: Owner, columns: Columns, saved: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what is loaded: where it goes, and it."""
    found: list[tuple[Tensor, Tensor]] = []
    layout, rank = optimizer.buckets.layout, optimizer.workers.rank
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
                found.append((target, part_for(target, entry[name], slot, rank, what)))
    return found


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
        flats = {"moment": family.own(family.m), "since": family.own(family.since)}
        if family.coded:
            flats["left"] = family.own(family.left)
        if family.master is not None:
            flats["master"] = family.own(family.master)
    for name, rows in full.items():
        if mean:
            flats[name] = [_mean(optimizer, r) for r in rows]
        else:
            flats[name] = [torch.zeros_like(r[0]) for r in rows]
    return flats


def _replicated(family: Drift | Frozen) -> dict[str, list[Tensor]]:
    """What every worker holds for all owners, as [N, S] of each bucket."""
    if not isinstance(family, Drift):
        return {"first": family.whole(family.a_NV)}
    full = {"moment": family.whole(family.m), "anchor": family.whole(family.anchor)}
    return full if family.master is None else {**full, "master": family.whole(family.master)}


def _mean(optimizer: Owner, rows_NS: Tensor) -> Tensor:
    sent = rows_NS.contiguous()
    received = torch.empty_like(sent)
    optimizer.workers.exchange(received, sent).wait()
    return mean_rows(received)


def _spread(optimizer: Owner, columns: Columns) -> None:
    """Gives every worker the whole of what it holds for all owners."""
    family = optimizer.family
    full = _replicated(family)
    for name, rows in full.items():
        for target, own in zip(rows, columns[name], strict=True):
            whole = torch.empty_like(target, memory_format=torch.contiguous_format)
            optimizer.workers.gather(whole, own).wait()
            target.copy_(whole)
    if not isinstance(family, Drift) and not optimizer.is_dense(int(optimizer.count)):
        family.choose_again(int(optimizer.count))
