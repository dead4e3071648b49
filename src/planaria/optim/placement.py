"""Where the parameters lie: whole on every worker, or cut over a node's workers by FSDP2.

The second is the seat between nodes. A mesh has an axis inside the node and one between nodes;
``fully_shard(model, mesh=mesh["shard"])`` keeps a shard of each weight on each worker of a node and
reduces gradients densely there. Workers at the same place of all nodes then hold the same shard:
they are the ``group`` of an optimizer, which works on that shard as on any other weight.

Source: our choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planaria.optim import checks


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor, without history; shares its memory."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def like(held: Tensor, param: Tensor) -> Tensor:
    """What this worker holds of a tensor, placed as a parameter is; shares its memory."""
    if not isinstance(param, DTensor):
        return held
    return DTensor.from_local(
        held,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def seat(
    params: Sequence[tuple[int, int, Tensor]], group: dist.ProcessGroup | None
) -> DeviceMesh | None:
    """The mesh over which FSDP2 cut the parameters ``(index, group, parameter)``; None for plain ones.

    Errors: :class:`planaria.optim.checks.OptionError` where the optimizer's ``group`` is not the
    other axis: the workers that hold the same shards.
    """
    cut = [(index, p) for index, _, p in params if isinstance(p, DTensor)]
    if not cut:
        return None
    if len(cut) < len(params):
        plain = next(index for index, _, p in params if not isinstance(p, DTensor))
        raise checks.OptionError(
            f"parameter {plain} is a plain tensor and parameter {cut[0][0]} a DTensor; pass the "
            "whole model to fully_shard, or build one optimizer for each kind"
        )
    mesh = cut[0][1].device_mesh
    mine = dist.get_rank()
    members = set(dist.get_process_group_ranks(group)) if group is not None else {mine}
    for index, param in cut:
        _require_seat(index, param, members - {mine})
        if param.device_mesh != mesh:
            raise checks.OptionError(
                f"parameter {index} lies on {param.device_mesh} and parameter {cut[0][0]} on "
                f"{mesh}; pass all of the model to fully_shard over one mesh"
            )
    return mesh


def _require_seat(index: int, param: DTensor, others: set[int]) -> None:
    placements, mesh = param.placements, param.device_mesh
    if mesh.ndim == 1 and isinstance(placements[0], Shard):
        if others & set(mesh.mesh.flatten().tolist()):
            raise checks.OptionError(
                f"parameter {index} is cut over workers of this group, which keep no whole copy of "
                "it, so single weights cannot be sent back: cut the model inside a node only, as "
                'fully_shard(model, mesh=mesh["shard"]), and give the optimizer the axis between '
                'nodes, group=mesh["replicate"]'
            )
        return
    if any(isinstance(placement, Replicate) for placement in placements):
        raise checks.OptionError(
            f"parameter {index} is placed as {tuple(placements)} over {mesh}, so FSDP2 itself sends "
            "every gradient between nodes and nothing is saved: use "
            'fully_shard(model, mesh=mesh["shard"]) and group=mesh["replicate"]'
        )
    raise checks.OptionError(
        f"parameter {index} is placed as {tuple(placements)} over {mesh}; only weights that are "
        "whole, or cut over one axis by fully_shard, are trained"
    )
