"""Finding all tensors of modules and optimizers once, and checking cheaply that they still hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from planaria.errors import UserError
from planaria.runtime.memory import optstate, placements
from planaria.runtime.memory.layout import Role
from planaria.runtime.memory.optstate import OptimizerPart, StateRef, StateTable
from planaria.runtime.memory.placements import ReplicaShards


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the state."""

    part: str
    path: str
    tensor: torch.Tensor
    """What this process stores: the local part of a DTensor. Not a copy."""
    role: Role
    asynchronous: bool
    """True where nothing changes it before the optimizer's next step."""
    shards: ReplicaShards
    """Shards that hold the same bytes, the own one included."""


@dataclass(frozen=True)
class Fixed:
    """What :meth:`Parts.flatten` keeps from step to step, and what it checks it by."""

    leaves: tuple[Leaf, ...]
    owners: tuple[torch.Tensor, ...]
    """Per leaf the tensor that modules and optimizers know: a DTensor, or the leaf's own."""
    dicts: tuple[tuple[dict[Any, Any], tuple[Any, ...]], ...]
    """Of modules and optimizers, with the values they had."""
    lists: tuple[tuple[list[Any], tuple[Any, ...]], ...]
    """``param_groups`` and their parameters."""
    mixed: tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...]
    """State with values that are no tensors: these change with each step, so only the keys and the
    tensors are compared."""
    shapes: tuple[torch.Size, ...]
    table: StateTable
    encoded: bytes
    """The table, as it goes into every skeleton."""

    def holds(self) -> bool:
        """Whether every tensor is still where it was. Compares identities: about 0.2 ms."""
        return (
            all(
                len(now) == len(then) and not any(map(is_not, now.values(), then))
                for now, then in self.dicts
            )
            and all(
                len(now) == len(then) and not any(map(is_not, now, then))
                for now, then in self.lists
            )
            and all(
                tuple(now) == keys
                and not any(
                    then is not None and now[key] is not then
                    for key, then in zip(keys, values, strict=True)
                )
                for now, keys, values in self.mixed
            )
            and all(
                owner is leaf.tensor or placements.local(owner) is leaf.tensor
                for owner, leaf in zip(self.owners, self.leaves, strict=True)
            )
            and all(
                leaf.tensor.shape == shape
                for leaf, shape in zip(self.leaves, self.shapes, strict=True)
            )
        )


class Finder:
    """Walks modules and optimizers once, for :class:`Fixed`."""

    def __init__(
        self,
        *,
        shard: int,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, OptimizerPart],
        declared: Mapping[str, ReplicaShards],
    ) -> None:
        self.shard = shard
        self.own: ReplicaShards = (shard,)
        self.modules = modules
        self.optimizers = optimizers
        self.declared = declared
        self.told: dict[int, ReplicaShards] = {}
        """What optimizers say of their parameters."""
        for part in optimizers.values():
            self.told |= part.replica_sets(shard)
        self.leaves: list[Leaf] = []
        self.owners: list[torch.Tensor] = []
        self.seen: dict[int, int] = {}
        """``id`` of a tensor to its leaf: tied weights are one leaf."""
        self.dicts: list[tuple[dict[Any, Any], tuple[Any, ...]]] = []
        self.lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self.mixed: list[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = []

    def find(self) -> Fixed:
        """Walk everything; raises UserError for a tensor that cannot be copied byte for byte."""
        for name, module in self.modules.items():
            self._module(name, module)
        refs: dict[str, list[StateRef]] = {}
        orders: dict[str, dict[optstate.ParamKey, list[str]]] = {}
        for name, part in self.optimizers.items():
            refs[name], orders[name] = self._optimizer(name, part)
        table = StateTable(refs, orders)
        return Fixed(
            leaves=tuple(self.leaves),
            owners=tuple(self.owners),
            dicts=tuple(self.dicts),
            lists=tuple(self.lists),
            mixed=tuple(self.mixed),
            shapes=tuple(leaf.tensor.shape for leaf in self.leaves),
            table=table,
            encoded=table.encode(),
        )

    def _leaf(
        self,
        part: str,
        path: str,
        tensor: torch.Tensor,
        *,
        role: Role,
        asynchronous: bool,
        shards: ReplicaShards,
    ) -> int:
        index = self.seen.get(id(tensor))
        if index is not None:
            return index
        stored = placements.local(tensor)
        check_tensor(part, path, stored)
        index = self.seen[id(tensor)] = len(self.leaves)
        self.leaves.append(Leaf(part, path, stored, role, asynchronous, shards))
        self.owners.append(tensor)
        return index

    def _set_of(
        self, tensor: torch.Tensor, name: str, ddp: dict[int, ReplicaShards]
    ) -> ReplicaShards:
        if name in self.declared:
            return self.declared[name]
        if id(tensor) in self.told:
            return self.told[id(tensor)]
        found = ddp.get(id(tensor))
        if found is None and isinstance(tensor, DTensor):
            found = placements.device_set(tensor, self.shard)
        return found or self.own

    def _module(self, name: str, module: nn.Module) -> None:
        ddp = placements.ddp_sets(module, self.shard)
        for prefix, inner in module.named_modules():
            stem = f"{prefix}." if prefix else ""
            for kept in (inner._parameters, inner._buffers, inner._modules):
                self.dicts.append((kept, tuple(kept.values())))
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    self._leaf(
                        name,
                        stem + key,
                        parameter,
                        role="param",
                        asynchronous=True,
                        shards=self._set_of(parameter, name, ddp),
                    )
            for key, buffer in inner._buffers.items():
                if buffer is not None and key not in inner._non_persistent_buffers_set:
                    declared = self.declared.get(name, self.own)
                    self._leaf(
                        name, stem + key, buffer, role="buffer", asynchronous=False, shards=declared
                    )

    def _optimizer(
        self, name: str, part: OptimizerPart
    ) -> tuple[list[StateRef], dict[optstate.ParamKey, list[str]]]:
        optimizer = part.stateful
        self.lists.append((optimizer.param_groups, tuple(optimizer.param_groups)))
        for group in optimizer.param_groups:
            self.lists.append((group["params"], tuple(group["params"])))
        names: list[str] = []
        sets: list[ReplicaShards] = []
        for position, parameter in enumerate(part.parameters()):
            index = self.seen.get(id(parameter))
            if index is None:
                # A master copy, say: state like any other, though no module knows it.
                shards = self._set_of(parameter, name, {})
                index = self._leaf(
                    name,
                    f"params.{position}",
                    parameter,
                    role="optimizer",
                    asynchronous=True,
                    shards=self.own if part.shard_local else shards,
                )
            names.append(f"{self.leaves[index].part}.{self.leaves[index].path}")
            sets.append(self.own if part.shard_local else self.leaves[index].shards)
        self.dicts.append((optimizer.state, tuple(optimizer.state.values())))
        refs: list[StateRef] = []
        order: dict[optstate.ParamKey, list[str]] = {}
        for owner, entry in part.entries():
            order[owner] = list(entry)
            tensors = {k: v for k, v in entry.items() if isinstance(v, torch.Tensor)}
            if len(tensors) == len(entry):
                self.dicts.append((entry, tuple(entry.values())))
            else:
                self.mixed.append((entry, tuple(entry), tuple(map(tensors.get, entry))))
            stem = names[owner] if isinstance(owner, int) else owner
            for key, value in tensors.items():
                shards = sets[owner] if isinstance(owner, int) else self.own
                index = self._leaf(
                    name,
                    f"{stem}.{key}",
                    value,
                    role="optimizer",
                    asynchronous=True,
                    shards=self._state_set(value, part, owner, shards),
                )
                refs.append(optstate.reference(owner, key, value, index=index))
        return refs, order

    def _state_set(
        self, value: torch.Tensor, part: OptimizerPart, owner: optstate.ParamKey, own: ReplicaShards
    ) -> ReplicaShards:
        """The parameter's set, unless the state was placed otherwise than its parameter."""
        if not isinstance(value, DTensor) or isinstance(owner, str) or len(own) == 1:
            return own
        parameter = part.parameters()[owner]
        if isinstance(parameter, DTensor) and parameter.placements == value.placements:
            return own
        mine = placements.device_set(value, self.shard)
        return mine if set(mine) <= set(own) else self.own


def check_tensor(part: str, path: str, tensor: torch.Tensor) -> None:
    """Raise :class:`~planaria.errors.UserError` for a tensor whose bytes are not all there is."""
    what = None
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        what = "not initialised yet: run one forward pass in build()"
    elif tensor.is_meta:
        what = "on the meta device: materialise it in build()"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        what = f"{tensor.layout} or quantized, not plain: make it dense, or leave the part out"
    elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        what = f"a {type(tensor).__name__}, a tensor class that Planaria cannot copy: leave it out"
    if what is not None:
        raise UserError(f"tensor {path!r} of part {part!r} is {what}")
