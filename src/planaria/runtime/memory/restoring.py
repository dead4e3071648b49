"""Putting a capture back into :class:`~planaria.runtime.memory.parts.Parts`, and naming the regime.

Apart from ``parts`` only for length: these are its methods ``restore`` and ``regime``.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DeviceMesh, DTensor

from planaria.errors import RunError
from planaria.runtime.memory import optstate, placements, skeleton
from planaria.runtime.memory.layout import LeafEntry
from planaria.runtime.memory.optstate import StateTable
from planaria.runtime.memory.placements import DTensorSpec

if TYPE_CHECKING:
    from planaria.runtime.memory.finding import Leaf
    from planaria.runtime.memory.layout import Layout
    from planaria.runtime.memory.parts import Parts, RegimeName

Blob = memoryview | bytearray | torch.Tensor


def view(blob: Blob, entry: LeafEntry) -> torch.Tensor:
    """The leaf's bytes in ``blob`` as a tensor of its dtype and shape; shares memory."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not isinstance(blob, torch.Tensor):
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        count = entry.nbytes // dtype.itemsize
        flat = torch.frombuffer(blob, dtype=dtype, count=count, offset=entry.offset)
        return flat.view(entry.shape)
    return blob[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def restore(
    parts: Parts, layout: Layout, blob: Blob, *, only: Literal["small", "all"] = "all"
) -> None:
    """See :meth:`planaria.runtime.memory.parts.Parts.restore`."""
    size = blob.numel() if isinstance(blob, torch.Tensor) else len(blob)
    if size < layout.total:
        raise RunError(
            f"the capture of generation {layout.generation}, shard {layout.shard} has {size} bytes "
            f"where its table names {layout.total}: fetch it again"
        )
    if not isinstance(blob, torch.Tensor) and memoryview(blob).readonly:
        blob = bytearray(blob)
    leave_iteration(parts)
    _Restorer(parts, layout, blob, everything=only == "all").run()


def leave_iteration(parts: Parts) -> None:
    """Drop what an iteration that was broken off has begun, wherever the state comes from next:
    gradients, also those that FSDP2 accumulates out of sight, and what GradScaler knows of them.
    """
    placements.settle(parts._sharded)
    for module in parts.modules.values():
        for parameter in module.parameters():
            parameter.grad = None
    for part in parts.optimizers.values():
        for parameter in part.parameters():
            parameter.grad = None
    for other in parts.others.values():
        if isinstance(other, torch.amp.GradScaler):
            # It may have unscaled; load_state_dict keeps that, and the next attempt's unscale_()
            # would be refused.
            other._per_optimizer_states.clear()


class _Restorer:
    def __init__(self, parts: Parts, layout: Layout, blob: Blob, *, everything: bool) -> None:
        self.parts = parts
        self.layout = layout
        self.blob = blob
        self.everything = everything
        encoded, self.sections = pickle.loads(layout.skeleton)
        self.table = StateTable.decode(encoded)
        self.fixed = parts._current()
        self.meshes = _meshes(parts)
        self.pairs: list[tuple[int, torch.Tensor]] = []

    def run(self) -> None:
        self._check_parts()
        self._pair_modules()
        read = {
            name: skeleton.unpack(data, get=self._loose, what=f"part {name!r}")
            for name, data in self.sections.items()
        }
        for name, part in self.parts.optimizers.items():
            numbers, rest = read[name]
            optstate.restore_numbers(part, numbers)
            if self.everything:
                self.pairs += optstate.restore_state(
                    part, self.table.refs[name], rest=rest, order=self.table.orders[name]
                )
        self._copy()
        for part in self.parts.optimizers.values():
            part.restored()
        for name, module in self.parts.modules.items():
            for path, extra in read.get(name, {}).items():
                module.get_submodule(path).set_extra_state(extra)
        for name, other in self.parts.others.items():
            other.load_state_dict(read[name])

    def _check_parts(self) -> None:
        known = {*self.parts.modules, *self.parts.optimizers, *self.parts.others}
        captured = {*self.sections, *(leaf.part for leaf in self.layout.leaves)}
        needed = {*self.parts.optimizers, *self.parts.others}
        odd = sorted((captured - known) | (needed - captured))
        if odd:
            raise RunError(
                f"the capture of shard {self.layout.shard} has the parts {sorted(captured)} and "
                f"this worker has {sorted(known)} (first that differs: {odd[0]!r}): "
                "all workers must build the same objects"
            )

    def _pair_modules(self) -> None:
        """Pair the capture's parameters, buffers and master copies with this worker's, by name."""
        stated = {ref.index for refs in self.table.refs.values() for ref in refs}
        mine_stated = {ref.index for refs in self.fixed.table.refs.values() for ref in refs}
        theirs = {
            (leaf.part, leaf.path): (index, leaf)
            for index, leaf in enumerate(self.layout.leaves)
            if index not in stated and not _is_loose(leaf)
        }
        mine = {
            (leaf.part, leaf.path): leaf
            for index, leaf in enumerate(self.fixed.leaves)
            if index not in mine_stated
        }
        for key in sorted(theirs.keys() ^ mine.keys()):
            where = "only the capture has" if key in theirs else "the capture lacks"
            raise RunError(f"{where} {'.'.join(key)}: all workers must build the same objects")
        for key, (index, entry) in theirs.items():
            tensor = mine[key].tensor
            if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{entry.dtype}", entry.shape):
                raise RunError(
                    f"{'.'.join(key)} is {tuple(tensor.shape)} of {tensor.dtype} here and "
                    f"{entry.shape} of torch.{entry.dtype} in the capture: "
                    "all workers must build the same objects"
                )
            if self.everything or not entry.asynchronous:
                self.pairs.append((index, tensor))

    def _loose(self, index: int, device: str, spec: DTensorSpec | None) -> torch.Tensor:
        entry = self.layout.leaves[index]
        made = view(self.blob, entry).to(device, copy=True)
        if spec is None:
            return made
        what = f"{entry.part}.{entry.path}"
        return spec.wrap(made, placements.find_mesh(spec, self.meshes, what=what))

    def _copy(self) -> None:
        targets = [tensor for _, tensor in self.pairs]
        sources = [view(self.blob, self.layout.leaves[index]) for index, _ in self.pairs]
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)


def _is_loose(leaf: LeafEntry) -> bool:
    return leaf.path.startswith("#")


def _meshes(parts: Parts) -> list[DeviceMesh]:
    found: list[DeviceMesh] = []
    for owner in parts._current().owners:
        if isinstance(owner, DTensor) and owner.device_mesh not in found:
            found.append(owner.device_mesh)
    return found


def regime(parts: Parts) -> tuple[RegimeName, str]:
    """See :meth:`planaria.runtime.memory.parts.Parts.regime`."""
    fixed = parts._current()
    if parts.world == 1:
        return "all sharded", "one shard: no peer holds any tensor, so everything is sent"
    trained = {
        id(placements.local(p)) for part in parts.optimizers.values() for p in part.parameters()
    }
    params = [leaf for leaf in fixed.leaves if leaf.role == "param"]
    alone = [leaf for leaf in params if len(leaf.shards) == 1]
    decisive = [leaf for leaf in alone if id(leaf.tensor) in trained or not trained]
    state = [leaf for leaf in fixed.leaves if leaf.role == "optimizer" and len(leaf.shards) == 1]
    local = [name for name, part in parts.optimizers.items() if part.shard_local]
    name: RegimeName
    if decisive:
        name = "all sharded"
        reason = f"no peer holds {_tell(decisive)}; these and their optimizer state are sent"
        drifting = {
            id(placements.local(p))
            for part in parts.optimizers.values()
            if part.replica_sets(parts.shard)
            for p in part.parameters()
        }
        if any(id(leaf.tensor) in drifting for leaf in decisive):
            reason += "; their optimizer lets the weights of peers differ between steps"
        plain = [
            leaf
            for leaf in decisive
            if not _is_dtensor(parts, leaf) and id(leaf.tensor) not in drifting
        ]
        if plain:
            reason += (
                f"; {_tell(plain)} belong to a plain module: wrap it in DistributedDataParallel or "
                "fully_shard, or mark it with replicated() if all peers hold it bit for bit"
            )
    elif state or local:
        name = "optimizer sharded"
        which = f"the state of {', '.join(map(repr, local))}" if local else _tell(state)
        reason = f"peers hold every trained parameter, but {which} is held here alone and is sent"
    else:
        name = "replicated"
        reason = f"peers hold all of {_tell(params)} and the optimizer state; small parts are sent"
    extra = [leaf for leaf in alone if leaf not in decisive]
    if extra:
        reason += (
            f"; besides, no peer is known to hold {_tell(extra)}, which is sent, too: mark the "
            "part with replicated() if all peers hold it bit for bit"
        )
    return name, reason


def _is_dtensor(parts: Parts, leaf: Leaf) -> bool:
    fixed = parts._current()
    return any(
        isinstance(owner, DTensor) and mine is leaf
        for owner, mine in zip(fixed.owners, fixed.leaves, strict=True)
    )


def _tell(leaves: list[Leaf]) -> str:
    if not leaves:
        return "no parameters"
    total = sum(leaf.tensor.nbytes for leaf in leaves)
    first = f"{leaves[0].part}.{leaves[0].path}"
    more = f" and {len(leaves) - 1} more tensors" if len(leaves) > 1 else ""
    return f"{first}{more} ({total / 1e6:.2f} MB)"
