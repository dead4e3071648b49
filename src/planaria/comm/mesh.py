"""Meshes by axis names, and where a shard lies on one.

The group of every axis is made by ``torch.distributed`` on the default group, and so is a handle whose
inside is rebuilt: a lost shard's successor has the same coordinates and is in the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planaria.errors import ConfigError


def build_mesh(axes: Mapping[str, int], *, device: str = "cpu") -> DeviceMesh:
    """A mesh over all shards, row-major: the last axis is the one whose neighbours are adjacent.

    ``axes``: names to sizes, such as ``{"dp": 2, "tp": 4}``; one size may be -1, which takes what is
    left. Raises :class:`ConfigError` where the sizes do not multiply to the number of shards.
    """
    sizes = fit(axes, world=dist.get_world_size())
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def fit(axes: Mapping[str, int], *, world: int) -> dict[str, int]:
    """``axes`` with the size -1 replaced; their product is ``world``. Pure.

    >>> fit({"dp": -1, "tp": 2}, world=8)
    {'dp': 4, 'tp': 2}
    """
    sizes = dict(axes)
    shown = " x ".join(f"{name}={size}" for name, size in sizes.items()) or "none"
    if not sizes or any(size == 0 or size < -1 for size in sizes.values()):
        raise ConfigError(f"mesh axes are {shown}: give each a name and a size of 1 or more, or -1")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"mesh axes are {shown}: only one size may be -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = max(1, world // known)
    if math.prod(sizes.values()) != world:
        raise ConfigError(
            f"mesh axes are {shown}, which do not multiply to the {world} shards of this run: "
            "change a size or --workers"
        )
    return sizes


def coordinates(shard: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Position of ``shard`` along each axis of a row-major mesh. Pure.

    >>> coordinates(5, {"dp": 2, "tp": 4})
    {'dp': 1, 'tp': 1}
    """
    if not 0 <= shard < math.prod(axes.values()):
        raise ConfigError(f"shard {shard} is not on a mesh of {math.prod(axes.values())} shards")
    found: dict[str, int] = {}
    left = shard
    for name, size in reversed(list(axes.items())):
        left, found[name] = divmod(left, size)
    return dict(reversed(list(found.items())))
