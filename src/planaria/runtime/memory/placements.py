"""Who else holds a tensor: replica sets, derived from how the tensor was placed.

A *replica set* is the sorted tuple of shards that hold the same bytes. It is derived from what
PyTorch itself guarantees, and from nothing else:

- a parameter inside a ``DistributedDataParallel`` module: the ranks of its process group;
- a ``DTensor``: the ranks along the mesh axes on which it is ``Replicate``, the own coordinate on
  every other axis (so HSDP gives one set per position in the sharded axis);
- a ``DTensor`` inside DDP: the ranks of DDP's group alone, which is a part of the truth and safe;
- everything else: only itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from planaria.errors import RunError, UserError

ReplicaShards = tuple[int, ...]


class DTensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """What is needed, beside the local tensor and a mesh, to make a DTensor again: plain data, so
    that equal specifications have equal bytes."""

    placements: tuple[tuple[str, int, int | str], ...]
    """Per mesh axis: class, dim, and what else that class takes."""
    shape: tuple[int, ...]
    """Global."""
    stride: tuple[int, ...]
    """Global."""
    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None

    @staticmethod
    def of(tensor: DTensor) -> DTensorSpec:
        """The specification of ``tensor``; UserError for a placement that PyTorch does not have."""
        mesh = tensor.device_mesh
        return DTensorSpec(
            placements=tuple(_plain(placement) for placement in tensor.placements),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            mesh_shape=tuple(mesh.shape),
            mesh_dim_names=mesh.mesh_dim_names,
        )

    def fits(self, mesh: DeviceMesh) -> bool:
        """Whether ``mesh`` has this specification's axes."""
        return tuple(mesh.shape) == self.mesh_shape and mesh.mesh_dim_names == self.mesh_dim_names

    def wrap(self, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """``local`` as a DTensor over ``mesh``; nothing is communicated."""
        return DTensor.from_local(
            local,
            mesh,
            [_placement(plain) for plain in self.placements],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )


def _plain(placement: Placement) -> tuple[str, int, int | str]:
    # By exact class: a subclass could place otherwise.
    if type(placement) is Replicate:
        return "Replicate", 0, 0
    if type(placement) is Shard:
        return "Shard", placement.dim, 0
    if type(placement) is _StridedShard:
        return "_StridedShard", placement.dim, int(placement.split_factor)
    if type(placement) is Partial:
        return "Partial", 0, placement.reduce_op
    raise UserError(
        f"a DTensor is placed as {placement!r}, which Planaria cannot place again: use Replicate, "
        "Shard or Partial, or leave the part out"
    )


def _placement(plain: tuple[str, int, int | str]) -> Placement:
    name, dim, more = plain
    if name == "Replicate":
        return Replicate()
    if name == "Shard":
        return Shard(dim)
    if name == "_StridedShard":
        return _StridedShard(dim, split_factor=int(more))
    return Partial(str(more))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this process stores: ``tensor`` itself, or the local part of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def device_set(tensor: DTensor, shard: int) -> ReplicaShards:
    """Replica set of a DTensor that lies in no DDP module."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (shard,)
    ranks = mesh.mesh
    # From the last axis on, so that the numbers of the axes before it stay as they are.
    for axis in reversed(range(ranks.ndim)):
        if not isinstance(tensor.placements[axis], Replicate):
            ranks = ranks.select(axis, coordinate[axis])
    members = tuple(sorted(int(rank) for rank in ranks.flatten().tolist()))
    return members if shard in members else (shard,)


def ddp_sets(module: nn.Module, shard: int) -> dict[int, ReplicaShards]:
    """``id(parameter)`` -> ranks, for each parameter of a DDP module in or below ``module``.

    Parameters that DDP was told to ignore are not reduced, so they are not in it.
    """
    sets: dict[int, ReplicaShards] = {}
    for inner in module.modules():
        if not isinstance(inner, DistributedDataParallel):
            continue
        ranks = group_shards(inner.process_group, shard=shard)
        ignored: set[str] = set(inner.parameters_to_ignore)
        for name, parameter in inner.module.named_parameters(remove_duplicate=False):
            if name not in ignored:
                sets.setdefault(id(parameter), ranks)
    return sets


def group_shards(group: Any, *, shard: int) -> ReplicaShards:
    """Sorted global ranks of a process group; raises UserError where ``shard`` is not one."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if shard not in ranks:
        raise UserError(
            f"shard {shard} is no member of the process group with ranks {ranks}: "
            "wrap the model, or mark the part, with a group that this rank is in"
        )
    return ranks


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP2 modules in ``module``, itself included."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            yield inner


def settle(modules: list[FSDPModule]) -> None:
    """Leave whatever a broken iteration has begun in FSDP2: all-gathers, partial reductions and
    gradients of unsharded parameters. Nothing is communicated.
    """
    for module in modules:
        state = module._get_fsdp_state()
        # None before the first forward: there is nothing to leave yet, and nothing to ask for it.
        if state._is_root:
            module.reset_iter_state()
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                # Gradients that were accumulated without a reduction; no public way drops them.
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def find_mesh(spec: DTensorSpec, meshes: list[DeviceMesh], *, what: str) -> DeviceMesh:
    """The mesh among those of the parameters that fits ``spec``; raises RunError where none does.

    Where two fit, both have this process at the same coordinates, and the local bytes are the same.
    """
    for mesh in meshes:
        if spec.fits(mesh):
            return mesh
    raise RunError(
        f"{what} was a DTensor on a mesh of shape {spec.mesh_shape} with axes "
        f"{spec.mesh_dim_names}, and no parameter of this worker lies on such a mesh: "
        "all workers must build the same objects"
    )
