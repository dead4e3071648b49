"""The stateful parts of a training script: taken apart into tensors, and put back in place.

:class:`Parts` holds what the user's ``build`` returns. :meth:`Parts.flatten` runs on the training
thread at the end of every attempt, so what does not change between steps is found once and then
only checked. :meth:`Parts.restore` writes into the tensors that are there, so that DDP's reducer,
FSDP2's flat buffers and every DTensor keep their views.

What is state: parameters, persistent buffers, optimizer state and ``param_groups``,
``extra_state``, what modules are told to do (:mod:`.modes`), and the ``state_dict()`` of everything
else, the global random generators included.
A non-persistent buffer is not state, as in PyTorch: ``build`` makes it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from planaria.errors import UserError
from planaria.runtime.memory import optstate, placements, restoring, skeleton
from planaria.runtime.memory.finding import Finder, Fixed, Leaf, check_tensor
from planaria.runtime.memory.layout import Layout, Role
from planaria.runtime.memory.modes import Modes
from planaria.runtime.memory.optstate import OptimizerPart
from planaria.runtime.memory.placements import ReplicaShards
from planaria.runtime.memory.rng import Rng

RNG = "rng"
MODES = "modes"
"""Names of the parts that are added by us."""

RegimeName = Literal["replicated", "optimizer sharded", "all sharded"]


@dataclass(frozen=True)
class Replicated:
    """A part with the statement that data-parallel peers hold it bit for bit (see `replicated`)."""

    value: Any
    group: Any = None


def replicated(part: Any, *, group: Any = None) -> Replicated:
    """Mark a part of ``build``'s dict as equal on all data-parallel peers, so that it is not sent.

    For a module outside of DDP that is kept equal nevertheless, as an EMA of a DDP model is.
    ``group``: the process group of the peers; by default that of the only DDP module among the
    parts, or everyone where no model is sharded or cut into stages.

    >>> from torch.optim.swa_utils import AveragedModel
    >>> {"ema": replicated(AveragedModel(nn.Linear(2, 2)))}["ema"].group is None
    True
    """
    return Replicated(part, group)


@dataclass(frozen=True)
class Flat:
    """The state at one moment."""

    fixed: tuple[Leaf, ...]
    """Parameters, buffers and optimizer state; the very same tuple until their set changes."""
    loose: tuple[Leaf, ...]
    """Tensors out of this moment's ``state_dict``s."""
    skeleton: bytes
    """Everything that is not a tensor, pickled; counts the tensors of ``leaves``."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors, in the order that a layout lists them in."""
        return self.fixed + self.loose


class Parts:
    """The parts of one worker.

    Args:
        parts: what ``build`` returned: names to modules (or a list of modules: pipeline stages),
            optimizers (or a list), and anything with ``state_dict`` and ``load_state_dict``. A
            value may be wrapped by :func:`replicated`.
        shard: the own shard, which is the rank in the default group.
        world: number of shards.

    Raises:
        UserError: a value that has no state, a name that is taken, or nothing at all.
    """

    def __init__(self, parts: Mapping[str, Any], *, shard: int = 0, world: int = 1) -> None:
        if not isinstance(cast(object, parts), Mapping) or not parts:
            raise UserError(
                f"build() returned {_kind(parts)}: let it return a dict of what holds state, such "
                'as {"model": model, "optimizer": optimizer}'
            )
        self.shard = shard
        self.world = world
        self.modules: dict[str, nn.Module] = {}
        """By part name; the stages of a pipeline are ``name.0``, ``name.1`` and so on."""
        self.optimizers: dict[str, OptimizerPart] = {}
        self.others: dict[str, Any] = {}
        """Everything that has ``state_dict`` and ``load_state_dict``; ``modes`` and ``rng`` come last."""
        self.given = {
            name: value.value if isinstance(value, Replicated) else value
            for name, value in parts.items()
        }
        """The objects that ``build`` returned, by name."""
        self._declared: dict[str, Replicated] = {}
        for name, value in parts.items():
            self._add(name, value)
        self.others[MODES] = Modes(self.modules)
        self.others[RNG] = Rng()
        self._peers = {
            name: self._declared_set(name, mark) for name, mark in self._declared.items()
        }
        self._sharded = [
            inner for m in self.modules.values() for inner in placements.fsdp_modules(m)
        ]
        self._fixed: Fixed | None = None

    def _add(self, name: Any, value: Any) -> None:
        if not isinstance(name, str) or not name or name in (RNG, MODES):
            raise UserError(
                f"build() returned a part named {name!r}: names are non-empty strings, and {RNG!r} "
                f"and {MODES!r} are parts that Planaria adds for the random generators and for "
                "what modules are told to do; rename it"
            )
        if isinstance(value, Replicated):
            self._declared[name] = value
            value = value.value
        if isinstance(value, list | tuple) and value:
            for position, item in enumerate(value):
                self._add_one(f"{name}.{position}", item, told=name)
        else:
            self._add_one(name, value, told=name)

    def _add_one(self, name: str, value: Any, *, told: str) -> None:
        if name in {**self.modules, **self.optimizers, **self.others}:
            raise UserError(
                f"build() returned two parts named {name!r} (lists number their items): rename one"
            )
        if told in self._declared:
            self._declared.setdefault(name, self._declared[told])
        if isinstance(value, nn.Module):
            self.modules[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = optstate.check(name, value)
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            self.others[name] = value
        else:
            raise UserError(
                f"build() returned {_kind(value)} as part {told!r}: a part is a module, an "
                "optimizer, a list of them, or has state_dict() and load_state_dict(); "
                "leave out what has no state"
            )

    def _declared_set(self, name: str, mark: Replicated) -> ReplicaShards:
        if self.world == 1:
            return (self.shard,)
        if mark.group is not None:
            return placements.group_shards(mark.group, shard=self.shard)
        inner = [m for module in self.modules.values() for m in module.modules()]
        groups = {
            placements.group_shards(m.process_group, shard=self.shard)
            for m in inner
            if isinstance(m, DistributedDataParallel)
        }
        if len(groups) == 1:
            return groups.pop()
        sharded = any(isinstance(p, DTensor) for m in self.modules.values() for p in m.parameters())
        staged = any("." in module for module in self.modules)
        if groups or sharded or staged:
            raise UserError(
                f"part {name!r} is marked replicated(), but the models are sharded, cut into "
                "stages or in several DDP groups, so its peers are not known: say "
                "replicated(part, group=the data-parallel process group)"
            )
        return tuple(range(self.world))

    def flatten(self) -> Flat:
        """All state as tensors (not copies) and a skeleton; about 0.5 ms for 150 AdamW tensors.

        Raises :class:`~planaria.errors.UserError` for a tensor that cannot be copied byte for byte
        and for a ``state_dict`` that cannot be pickled.
        """
        fixed = self._current()
        loose: list[Leaf] = []
        sections: dict[str, bytes] = {}
        first = len(fixed.leaves)
        for name, role, value in self._sections():
            data, tensors = skeleton.pack(value, first=first + len(loose), what=f"part {name!r}")
            shards = self._peers.get(name, (self.shard,))
            for position, tensor in enumerate(tensors):
                # Counted within the part, so that peers name it alike whatever else they have.
                path = f"#{position}"
                check_tensor(name, path, tensor)
                loose.append(Leaf(name, path, tensor, role, False, shards))
            sections[name] = data
        return Flat(fixed.leaves, tuple(loose), pickle.dumps((fixed.encoded, sections), protocol=5))

    def versions(self) -> tuple[int, ...]:
        """Counters that torch raises when a tensor is changed in place, of all that a capture copies
        beside the next step, as of the last :meth:`flatten`; about 0.05 ms for 600 tensors.
        """
        leaves = self._fixed.leaves if self._fixed is not None else ()
        return tuple(leaf.tensor._version for leaf in leaves if leaf.asynchronous)

    def changed_since(self, versions: tuple[int, ...]) -> list[str]:
        """Names of the tensors that were changed in place since ``versions`` were read."""
        leaves = self._fixed.leaves if self._fixed is not None else ()
        later = [leaf for leaf in leaves if leaf.asynchronous]
        return [
            f"{leaf.part}.{leaf.path}"
            for leaf, then in zip(later, versions, strict=False)
            if leaf.tensor._version != then
        ]

    def _sections(self) -> Iterable[tuple[str, Role, Any]]:
        for name, part in self.optimizers.items():
            yield name, "optimizer", (part.numbers(), part.rest())
        for name, module in self.modules.items():
            extra = {path: inner.get_extra_state() for path, inner in _with_extra_state(module)}
            if extra:
                yield name, "other", extra
        for name, other in self.others.items():
            yield name, "other", other.state_dict()

    def _current(self) -> Fixed:
        for module in self._sharded:
            # After an evaluation the root keeps its parameters gathered; state is the shards.
            module.reshard()
        if self._fixed is None or not self._fixed.holds():
            self._fixed = Finder(
                shard=self.shard,
                modules=self.modules,
                optimizers=self.optimizers,
                declared=self._peers,
            ).find()
        return self._fixed

    def restore(
        self,
        layout: Layout,
        blob: memoryview | bytearray | torch.Tensor,
        *,
        only: Literal["small", "all"] = "all",
    ) -> None:
        """Put the state of a capture back, in place; see :mod:`.restoring`.

        Args:
            layout: of the capture.
            blob: its bytes: a buffer, or a uint8 tensor, of at least ``layout.total`` bytes.
            only: ``small`` leaves what is copied beside the next step (parameters, optimizer
                state) alone, for a worker whose optimizer has not begun to change it.

        Gradients are set to None and what a broken iteration left in FSDP2 and GradScaler is
        dropped. Raises :class:`~planaria.errors.RunError`, before anything is changed, where this
        worker's objects are not those of the capture.
        """
        restoring.restore(self, layout, blob, only=only)

    def digest(self) -> str:
        """xxh3-128, as 32 hexadecimal digits, over all module parameters, persistent buffers and
        optimizer state of this shard: names, dtypes, shapes and bytes. Equal across processes.
        """
        hasher = xxhash.xxh3_128()
        for leaf in self._current().leaves:
            tensor = leaf.tensor.detach()
            name = (leaf.part, leaf.path, leaf.role, str(tensor.dtype), tuple(tensor.shape))
            hasher.update(repr(name).encode())
            # An array of bytes even for bf16, which NumPy does not know.
            flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            hasher.update(flat.numpy().data)
        for name, part in self.optimizers.items():
            for owner, values in part.rest().items():
                plain = {k: v for k, v in values.items() if isinstance(v, int | float | str)}
                hasher.update(repr((name, owner, plain)).encode())
        return hasher.hexdigest()

    def regime(self) -> tuple[RegimeName, str]:
        """How much of the state no peer holds, and a sentence that says which tensors decide."""
        return restoring.regime(self)


def _with_extra_state(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for path, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield path, inner


def _kind(value: Any) -> str:
    return "an empty dict" if value == {} else f"an object of type {type(value).__name__}"
