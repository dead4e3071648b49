"""What an optimizer holds, taken apart and put together without ``Optimizer.load_state_dict``.

``load_state_dict`` casts state to the parameter's dtype and copies every tensor; here tensors keep
their dtype, shape and storage, so that a bf16 model with fp32 state stays exact and the captured
pointers stay valid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planaria.errors import RunError, UserError
from planaria.runtime.memory.placements import DTensorSpec, ReplicaShards, group_shards, local

ParamKey = int | str
"""Position of the parameter over all groups, or the string key of state that no parameter has."""


class StateRef(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an optimizer's state: where it belongs and how to make it."""

    owner: ParamKey
    key: str
    index: int
    """Of the leaf."""
    dtype: str
    shape: tuple[int, ...]
    """Local."""
    stride: tuple[int, ...]
    """Local: ``exp_avg`` keeps the parameter's memory format, and kernels depend on it."""
    device: str
    """Type of the device. Where it is the parameter's own type, the parameter's very device."""
    spec: DTensorSpec | None


class StateTable(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of all optimizers, by part name. Equal tables have equal bytes."""

    refs: dict[str, list[StateRef]]
    orders: dict[str, dict[ParamKey, list[str]]]
    """Keys of each parameter's state, in order, those that are no tensors included."""

    def encode(self) -> bytes:
        """As MessagePack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> StateTable:
        """Raises :class:`~planaria.errors.RunError` where ``data`` is none."""
        try:
            return msgspec.msgpack.decode(data, type=StateTable)
        except msgspec.MsgspecError as error:
            raise RunError(
                f"a capture's table of optimizer state cannot be read ({error}): "
                "start all workers from one version of planaria"
            ) from error


class Portable(Protocol):
    """An optimizer whose state on the disk is another one than in memory: parts that differ between
    workers are saved once, as what the next steps depend on, and load at any number of workers.
    """

    def portable_state_dict(self) -> dict[str, Any]:
        """That state, as DTensors and plain values; a collective of all workers."""
        ...

    def load_portable_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it, after the model's weights; a collective."""
        ...

    def mean_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, what is to be saved of it) where peers differ; a collective."""
        ...


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer among the parts.

    One that reduces gradients and sends weights itself tells of it by four names of its own, each
    of which may be missing: ``shard_local_state``, ``replica_groups``, ``abandon``, ``restored``.
    """

    name: str
    optimizer: Optimizer

    @property
    def stateful(self) -> Optimizer:
        """The optimizer that holds the state: ZeRO's is an inner one."""
        return cast(Any, self.optimizer).optim if is_zero(self.optimizer) else self.optimizer

    @property
    def faces(self) -> tuple[Optimizer, ...]:
        """Every object whose ``param_groups`` hold numbers."""
        if self.stateful is self.optimizer:
            return (self.optimizer,)
        return self.optimizer, self.stateful

    @property
    def shard_local(self) -> bool:
        """Whether its state differs from peer to peer although the parameters are equal."""
        declared = bool(getattr(self.optimizer, "shard_local_state", False))
        return declared or is_zero(self.optimizer)

    @property
    def portable(self) -> Portable | None:
        """The optimizer, where it has a form of its state that fits any number of workers."""
        form = hasattr(self.optimizer, "portable_state_dict")
        return cast(Portable, self.optimizer) if form else None

    def replica_sets(self, shard: int) -> dict[int, ReplicaShards]:
        """``id`` of a parameter to the shards that hold its bits, where the optimizer knows that.

        It does, where it reduces gradients itself, and so keeps weights equal without DDP, or lets
        them drift apart inside of anything. Its method ``replica_groups`` gives (parameter, process
        group of the peers, or None).
        """
        groups = getattr(self.optimizer, "replica_groups", None)
        if groups is None:
            return {}
        known: dict[int, ReplicaShards] = {}
        sets: dict[int, ReplicaShards] = {}
        for parameter, group in groups():
            if id(group) not in known:
                alone = (shard,)
                known[id(group)] = alone if group is None else group_shards(group, shard=shard)
            sets[id(parameter)] = known[id(group)]
        return sets

    def abandon(self) -> None:
        """The groups were made anew: what it has under way on the old ones ends never."""
        if hasattr(self.optimizer, "abandon"):
            cast(Any, self.optimizer).abandon()

    def restored(self) -> None:
        """Its state and its parameters have been written in place."""
        if hasattr(self.optimizer, "restored"):
            cast(Any, self.optimizer).restored()

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, group by group: their positions are what captures name them by."""
        return [p for group in self.stateful.param_groups for p in group["params"]]

    def entries(self) -> Iterator[tuple[ParamKey, dict[str, Any]]]:
        """(position or string key, state) of what has state, in a stable order."""
        state = self.stateful.state
        for position, parameter in enumerate(self.parameters()):
            if parameter in state:
                yield position, state[parameter]
        for key in state:
            if isinstance(key, str):
                yield key, state[key]

    def numbers(self) -> list[list[dict[str, Any]]]:
        """Per face, per group: everything but the parameters. Copied when it is pickled."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in face.param_groups]
            for face in self.faces
        ]

    def rest(self) -> dict[ParamKey, dict[str, Any]]:
        """State values that are no tensors: a step counted in an int, LBFGS's lists."""
        found: dict[ParamKey, dict[str, Any]] = {}
        for owner, entry in self.entries():
            plain = {k: v for k, v in entry.items() if not isinstance(v, torch.Tensor)}
            if plain:
                found[owner] = plain
        return found


def is_zero(optimizer: Optimizer) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, without importing that: its package warns of
    a deprecation in torch itself, and whoever has an instance has imported it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def check(name: str, optimizer: Optimizer) -> OptimizerPart:
    """The part; raises :class:`~planaria.errors.UserError` for what cannot be protected."""
    if is_zero(optimizer) and cast(Any, optimizer)._overlap_with_ddp:
        raise UserError(
            f"part {name!r} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which steps "
            "inside backward, where an attempt can still break: set overlap_with_ddp=False"
        )
    return OptimizerPart(name, optimizer)


def reference(owner: ParamKey, key: str, value: torch.Tensor, *, index: int) -> StateRef:
    """How to make ``value`` again."""
    stored = local(value)
    return StateRef(
        owner=owner,
        key=key,
        index=index,
        dtype=str(stored.dtype).removeprefix("torch."),
        shape=tuple(stored.shape),
        # Of a dense tensor in the same memory format: an expanded one cannot be written to.
        stride=tuple(torch.empty_like(stored, device="meta").stride()),
        device=stored.device.type,
        spec=DTensorSpec.of(value) if isinstance(value, DTensor) else None,
    )


def restore_numbers(part: OptimizerPart, saved: list[list[dict[str, Any]]]) -> None:
    """Set each group's numbers; tensors among them (a capturable ``lr``) keep their storage."""
    if [len(face) for face in saved] != [len(face.param_groups) for face in part.faces]:
        raise RunError(
            f"optimizer {part.name!r} has {[len(face.param_groups) for face in part.faces]} "
            f"parameter groups where its capture has {[len(face) for face in saved]}: "
            "all workers must build the same objects, and add no groups later"
        )
    for face, groups in zip(part.faces, saved, strict=True):
        for group, numbers in zip(face.param_groups, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in numbers]:
                del group[key]
            for key, value in numbers.items():
                existing = group.get(key)
                if (
                    isinstance(value, torch.Tensor)
                    and isinstance(existing, torch.Tensor)
                    and existing.shape == value.shape
                    and existing.dtype == value.dtype
                ):
                    with torch.no_grad():
                        existing.copy_(value)
                else:
                    group[key] = value


def restore_state(
    part: OptimizerPart,
    refs: list[StateRef],
    *,
    rest: dict[ParamKey, dict[str, Any]],
    order: dict[ParamKey, list[str]],
) -> list[tuple[int, torch.Tensor]]:
    """Make the optimizer's state have exactly the captured keys; return (leaf index, local tensor)
    pairs that the caller fills.

    Tensors that are there already, with the right dtype and shape, are kept; others are created on
    the parameter's device, uninitialised.
    """
    # Keyed by parameters, and by strings where an optimizer keeps what belongs to none.
    state = cast(dict[Any, dict[str, Any]], part.stateful.state)
    parameters = part.parameters()
    targets: list[tuple[int, torch.Tensor]] = []
    wanted: dict[ParamKey, dict[str, Any]] = {owner: dict(rest.get(owner, {})) for owner in order}
    for ref in refs:
        parameter = _parameter(part, parameters, ref.owner)
        key = parameter if parameter is not None else ref.owner
        existing: Any = state.get(key, {}).get(ref.key)
        value: torch.Tensor = existing if _fits(existing, ref) else _create(part, parameter, ref)
        wanted[ref.owner][ref.key] = value
        targets.append((ref.index, local(value)))
    for key in list(state):
        if isinstance(key, str) and key not in wanted:
            del state[key]
    for position, parameter in enumerate(parameters):
        if position not in wanted and parameter in state:
            del state[parameter]
    for owner, values in wanted.items():
        parameter = _parameter(part, parameters, owner)
        entry = state[owner if parameter is None else parameter]
        # Interned as the optimizer's own are, so that a later pickle shares them alike.
        ordered = {sys.intern(name): values[name] for name in order[owner]}
        entry.clear()
        entry.update(ordered)
    return targets


def _parameter(
    part: OptimizerPart, parameters: list[torch.Tensor], owner: ParamKey
) -> torch.Tensor | None:
    if isinstance(owner, str):
        return None
    if owner >= len(parameters):
        raise RunError(
            f"optimizer {part.name!r} has {len(parameters)} parameters where its capture has state "
            f"for parameter {owner}: all workers must build the same objects"
        )
    return parameters[owner]


def _fits(value: Any, ref: StateRef) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) != (ref.spec is not None):
        return False
    stored = local(value)
    return tuple(stored.shape) == ref.shape and str(stored.dtype) == f"torch.{ref.dtype}"


def _create(part: OptimizerPart, parameter: torch.Tensor | None, ref: StateRef) -> torch.Tensor:
    same = parameter is not None and parameter.device.type == ref.device
    device = local(parameter).device if same and parameter is not None else ref.device
    made = torch.empty_strided(
        ref.shape, ref.stride, dtype=getattr(torch, ref.dtype), device=device
    )
    if ref.spec is None:
        return made
    if not isinstance(parameter, DTensor):
        raise RunError(
            f"state {ref.key!r} of parameter {ref.owner} of optimizer {part.name!r} was a DTensor "
            "in its capture, and the parameter is none here: all workers must build the same "
            "objects"
        )
    return ref.spec.wrap(made, parameter.device_mesh)
