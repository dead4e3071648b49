"""Four gloo ranks that take apart and restore what is placed over them.

Run by ``test_parts_ranks.py`` as ``python ranks_parts.py FOLDER``: one process that imports torch
once, and four forks of it. Each rank writes ``FOLDER/rankN.json``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from planaria.errors import UserError
from planaria.optim import Scape, Sharded
from planaria.optim.base import OwnedOptimizer
from planaria.runtime.memory.layout import Layout
from planaria.runtime.memory.parts import Parts, replicated
from planaria.runtime.memory.snapshot import Buffers, Capture

WORLD = 4


def taken(parts: Parts) -> tuple[Layout, torch.Tensor]:
    buffers = Buffers()
    capture = Capture(buffers)
    capture.capture(parts, generation=1)
    capture.close()
    with buffers.reading(1) as slot:
        assert slot is not None
        assert slot.layout is not None
        return slot.layout, slot.memory[: slot.layout.total].clone()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))


def sets(parts: Parts, role: str) -> list[Any]:
    return sorted({leaf.shards for leaf in parts.flatten().leaves if leaf.role == role})


def round_trip(build: Callable[[], tuple[nn.Module, Any, Parts]]) -> dict[str, Any]:
    """Train, capture, train on, restore in place and into a fresh build; what was seen."""
    rank = dist.get_rank()
    torch.manual_seed(11)
    inputs = [torch.randn(4, 8) for _ in range(4)]

    def step(model: nn.Module, optimizer: Any, x_BD: torch.Tensor) -> None:
        optimizer.zero_grad()
        own = isinstance(model, DistributedDataParallel) or isinstance(optimizer, OwnedOptimizer)
        y_BD = model(x_BD * (1 + rank if own else 1))
        y_BD.pow(2).mean().backward()
        optimizer.step()

    model, optimizer, parts = build()
    for x_BD in inputs[:2]:
        step(model, optimizer, x_BD)
    layout, blob = taken(parts)
    digest = parts.digest()
    step(model, optimizer, inputs[2])
    after = parts.digest()
    with torch.no_grad():
        # FSDP2's root keeps its parameters gathered after a forward without backward.
        model(inputs[3])
    parts.restore(layout, blob)
    again = taken(parts)
    fresh_model, fresh_optimizer, fresh = build()
    fresh.restore(Layout.decode(layout.encode()), memoryview(blob.numpy()))
    fresh_again = taken(fresh)
    results = {
        "changed": digest != after,
        "in_place": torch.equal(again[1], blob) and again[0].skeleton == layout.skeleton,
        "fresh": torch.equal(fresh_again[1], blob) and fresh_again[0].skeleton == layout.skeleton,
        "digest": parts.digest() == digest == fresh.digest(),
    }
    step(model, optimizer, inputs[2])
    step(fresh_model, fresh_optimizer, inputs[2])
    results["goes_on"] = parts.digest() == after == fresh.digest()
    name, reason = parts.regime()
    return {
        **results,
        "regime": name,
        "reason": reason,
        "params": sets(parts, "param"),
        "optimizer": sets(parts, "optimizer"),
        "small": layout.small,
        "sent": layout.sent,
        "replicated": [r.bytes for r in layout.replica_sets()],
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# find_unused_parameters keeps DDP from cutting its buckets anew after its first iteration, which
# would change the order of gloo's sums between a model that has trained and a fresh one.
def ddp() -> tuple[nn.Module, Any, Parts]:
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def ddp_with_ema() -> tuple[nn.Module, Any, Parts]:
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer, "ema": AveragedModel(model.module)}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def ddp_with_marked_ema() -> tuple[nn.Module, Any, Parts]:
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = adamw(model)
    ema = replicated(AveragedModel(model.module))
    parts = {"model": model, "optimizer": optimizer, "ema": ema}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def zero() -> tuple[nn.Module, Any, Parts]:
    with warnings.catch_warnings():
        # torch's own package warns of its own use of torch.jit.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def fsdp() -> tuple[nn.Module, Any, Parts]:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def hsdp() -> tuple[nn.Module, Any, Parts]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def tensor_parallel() -> tuple[nn.Module, Any, Parts]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = adamw(model)
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def owned(optimizer: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any, Parts]:
    """A bare model that its optimizer keeps together, or lets drift apart."""
    model = net()
    made = optimizer(model.parameters(), lr=0.01, bucket_bytes=300, **options)
    parts = {"model": model, "optimizer": made}
    return model, made, Parts(parts, shard=dist.get_rank(), world=WORLD)


def owned_sharded() -> tuple[nn.Module, Any, Parts]:
    return owned(partial(Sharded, torch.optim.AdamW))


def owned_frozen() -> tuple[nn.Module, Any, Parts]:
    return owned(Scape, density=0.2)


def owned_local() -> tuple[nn.Module, Any, Parts]:
    return owned(Scape, density=0.2, unsent="local")


class Keeper:
    """A part of the user's own whose state holds a DTensor."""

    def __init__(self, tensor: DTensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def tensor_parallel_and_fsdp() -> tuple[nn.Module, Any, Parts]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adamw(model)
    own = distribute_tensor(torch.arange(6.0), next(model.parameters()).device_mesh, [Shard(0)] * 2)
    parts = {"model": model, "optimizer": optimizer, "own": Keeper(own)}
    return model, optimizer, Parts(parts, shard=dist.get_rank(), world=WORLD)


def accumulated_gradients_are_dropped() -> dict[str, Any]:
    """FSDP2 keeps gradients that were not reduced yet outside of ``.grad``."""
    model, optimizer, parts = fsdp()
    x_BD = torch.ones(2, 8)

    def step() -> None:
        model(x_BD).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    layout, blob = taken(parts)
    step()
    after = parts.digest()
    parts.restore(layout, blob)
    model.set_requires_gradient_sync(False)
    model(x_BD).sum().backward()
    model.set_requires_gradient_sync(True)
    parts.restore(layout, blob, only="small")
    step()
    return {"equal": parts.digest() == after}


def refusals() -> dict[str, str]:
    told: dict[str, str] = {}
    model = fsdp()[0]
    try:
        Parts({"model": model, "ema": replicated(nn.Linear(1, 1))}, shard=dist.get_rank(), world=4)
    except UserError as error:
        told["sharded"] = str(error)
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        given = Parts(
            {"model": model, "ema": replicated(nn.Linear(1, 1), group=half)},
            shard=dist.get_rank(),
            world=WORLD,
        )
        told["given"] = str([leaf.shards for leaf in given.flatten().fixed if leaf.part == "ema"])
    try:
        Parts({"model": replicated(model, group=dist.group.WORLD)}, shard=9, world=WORLD)
    except UserError as error:
        told["stranger"] = str(error)
    return told


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Parts]]] = {
    "ddp": ddp,
    "ddp_with_ema": ddp_with_ema,
    "ddp_with_marked_ema": ddp_with_marked_ema,
    "zero": zero,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor_parallel": tensor_parallel,
    "tensor_parallel_and_fsdp": tensor_parallel_and_fsdp,
    "owned_sharded": owned_sharded,
    "owned_frozen": owned_frozen,
    "owned_local": owned_local,
}


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    results: dict[str, Any] = {name: round_trip(build) for name, build in CASES.items()}
    results["accumulated"] = accumulated_gradients_are_dropped()
    results["refusals"] = refusals()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    children: list[int] = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
