"""What the optimizers that are cut over the workers have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer

from planaria.optim import checks
from planaria.optim.buckets import Buckets
from planaria.optim.collectives import Workers, checksum
from planaria.optim.layout import Layout, Slot, local_shape
from planaria.optim.placement import local, seat

BUCKET_BYTES = 8 << 20


def trained(optimizer: Optimizer) -> tuple[list[Tensor], list[tuple[int, int, Tensor]]]:
    """All parameters of an optimizer, and ``(index, group, parameter)`` of those that are trained.

    A parameter with ``requires_grad=False`` keeps its place in the numbering and is left alone.
    """
    params: list[Tensor] = []
    chosen: list[tuple[int, int, Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if not param.is_floating_point() or param.requires_grad:
                checks.shardable(len(params), param)
            if param.requires_grad:
                chosen.append((len(params), g, param))
            params.append(param)
    if not chosen:
        raise checks.OptionError("no parameter has requires_grad=True; give at least one that has")
    return params, chosen


def take_seat(
    workers: Workers, chosen: Sequence[tuple[int, int, Tensor]]
) -> list[tuple[int, int, Tensor]]:
    """``(index, group, what this worker holds)`` of the trained parameters.

    Where FSDP2 cut them inside a node, the workers of that node are made known to ``workers``.
    """
    workers.seat(seat(chosen, workers.group))
    return [(index, group, local(param)) for index, group, param in chosen]


def require_same_start(workers: Workers, layout: Layout, params: Sequence[Tensor]) -> None:
    """Raises on every worker where layout or weights differ between workers."""
    workers.same(
        "the set of parameters (shapes, dtypes, groups)",
        layout.digest(),
        advice="build the same model with the same groups and frozen layers on every worker",
    )
    workers.same(
        "a weight",
        checksum([local(params[index]) for index in layout.place]),
        advice="seed the model alike on every worker, or broadcast it, before it is optimized",
    )


def as_dtensor(own: Tensor, slot: Slot, param: Tensor, workers: Workers) -> Tensor:
    """An owner's part as a DTensor of the parameter's shape; the part itself without a group.

    ``own`` is flat, with padding behind it. Where FSDP2 cut the parameter, the DTensor lies over
    the node's axis first and the optimizer's group second.
    """
    shape = local_shape(slot, workers.rank)
    part = own[: math.prod(shape)].view(shape)
    mesh = workers.grid(own.device.type)
    if mesh is None:
        return part
    # The same memory under a storage of its own: torch 2.13 cannot deep-copy a DTensor whose local
    # tensor begins inside a storage.
    part = torch.from_dlpack(part) if part.numel() else torch.empty_like(part)
    whole = param.shape
    inner = tuple(param.placements) if isinstance(param, DTensor) else ()
    return DTensor.from_local(
        part,
        mesh,
        [*inner, Shard(0)],
        run_check=False,
        shape=whole,
        stride=tuple(math.prod(whole[d + 1 :]) for d in range(len(whole))),
    )


def copy_part(target: Tensor, value: Any, slot: Slot, rank: int, what: str) -> None:
    """Copies a loaded state into an owner's part.

    ``value`` is a DTensor of the parameter's shape, the whole tensor, or this owner's part.
    """
    shape = tuple(getattr(value, "shape", ()))
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor):
        raise checks.StateError(
            f"{what} is a {type(value).__name__}, not a tensor; load one that this class made"
        )
    if tuple(value.shape) == slot.shape and tuple(target.shape) != slot.shape:
        begin = min(rank * slot.rows, slot.shape[0])
        value = value[begin : begin + target.shape[0]]
    if value.shape != target.shape:
        raise checks.StateError(
            f"{what} has the shape {shape} and this model needs {slot.shape}; "
            "load a state that was saved from the same model"
        )
    target.copy_(value)


def load_groups(groups: Sequence[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Takes over the options of saved groups, after a check that they hold as many parameters."""
    here = [len(group["params"]) for group in groups]
    there = [len(group["params"]) for group in saved]
    if here != there:
        raise checks.StateError(
            f"the saved groups hold {there} parameters and this optimizer's hold {here}; "
            "load it into an optimizer with the same parameters in the same groups"
        )
    for group, new in zip(groups, saved, strict=True):
        group.update({k: v for k, v in new.items() if k not in ("params", "param_names")})


def read_closure(closure: Callable[[], float] | None) -> float | None:
    """The closure's loss, evaluated with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Agreement:
    """What all workers found about their gradients before anything is changed."""

    def __init__(self, workers: Workers, *, changed: bool, square: float, digest: int) -> None:
        """``square``: sum of squares of this worker's part; ``digest``: equal on equal replicas."""
        table = workers.table([float(changed), square, float(digest)])
        self.changed = bool((table[:, 0] > 0).any())
        self.square = float(table[:, 1].sum())
        self.bad = [r for r, v in enumerate(table[:, 1].tolist()) if not math.isfinite(v)]
        self.digests = [int(v) for v in table[:, 2].tolist()]
        self.differ = len(set(self.digests)) > 1
        if workers.inner is None:
            return
        # The node's other shards decide with this one.
        own = [self.changed, self.square, self.bad[0] if self.bad else -1, self.differ]
        rows = workers.inner.table([float(value) for value in own])
        self.changed = bool(rows[:, 0].any())
        self.square = float(rows[:, 1].sum())
        self.bad = sorted({int(v) for v in rows[:, 2].tolist() if v >= 0})
        self.differ = bool(rows[:, 3].any())

    @property
    def norm(self) -> float:
        """Root of the summed squares."""
        return math.sqrt(self.square)


def square(tensors: Sequence[Tensor]) -> float:
    """Sum of the squares; infinite or NaN exactly if an element is."""
    held = [t for t in tensors if t.numel()]
    if not held:
        return 0.0
    norms = [
        torch.linalg.vector_norm(t, dtype=torch.float32 if t.itemsize < 4 else None) for t in held
    ]
    total = float(torch.stack([norm.double() for norm in norms]).square().sum())
    if not math.isfinite(total):
        # float32 overflows from 1.8e19 on although every element may still be finite.
        total = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in held)
    return total


class OwnedOptimizer(Optimizer):
    """Abstract: an optimizer whose workers each own a part of every parameter.

    A subclass sets ``workers``, ``buckets`` and ``_params`` and calls :meth:`seal` when it is built.

    A runtime that keeps ``state`` twice, by copying its tensors beside the next step and by writing
    them in place, needs to know no more than ``shard_local_state``, :meth:`replica_groups`,
    :meth:`abandon` and :meth:`restored`. No tensor of ``state`` is written outside of ``step()``.
    """

    shard_local_state = True
    """No other worker holds this worker's state."""

    workers: Workers
    buckets: Buckets
    max_norm: float | None
    nonfinite: str
    norm: float
    """Norm of the last step's gradient, before clipping; NaN before the first step."""
    _params: list[Tensor]
    _sealed: bool = False

    @property
    def replicas_equal(self) -> bool:
        """Whether all workers hold the same weights between steps."""
        return True

    def replica_groups(self) -> list[tuple[Tensor, dist.ProcessGroup | None]]:
        """Every trained parameter with the group whose members hold the same bits between steps.

        ``None`` where no other worker does.
        """
        group = self.workers.group if self.replicas_equal else None
        return [(self._params[index], group) for index in self.buckets.layout.place]

    def abandon(self) -> None:
        """Forgets collectives under way without waiting: the group under them was made anew.

        To be called on all workers; they go on from the same state, and send again what is missing.
        """
        self.buckets.abandon()

    def restored(self) -> None:
        """Called on all workers when the tensors of ``state`` have been written in place."""
        self.buckets.drop()

    def seal(self) -> None:
        """From here on the layout is fixed."""
        self._sealed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only used while the optimizer is built; later groups are refused."""
        if self._sealed:
            raise checks.OptionError(
                "a parameter group is added to a sharded optimizer that is already laid out; "
                "build a new one with all groups and load the old state into it"
            )
        super().add_param_group(param_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward accumulates only: for all but the last micro-batch."""
        return self.buckets.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, those under way included."""
        self.buckets.drop()
        super().zero_grad(set_to_none=set_to_none)

    def agree(self, grads: Sequence[Tensor], *, digest: int = 0) -> Agreement:
        """One small collective: whether gradients changed, their summed squares, a digest."""
        return Agreement(
            self.workers, changed=self.buckets.changed(), square=square(grads), digest=digest
        )

    def accept(self, agreed: Agreement) -> bool:
        """Whether the step goes on; keeps the norm. Raises where the user asked for that."""
        self.norm = agreed.norm
        if agreed.bad and self.nonfinite == "raise":
            raise checks.GradientError(
                f"a gradient is NaN or infinite on worker {agreed.bad[0]}; nothing was changed: "
                "lower the learning rate, or set nonfinite='skip' to leave such steps out"
            )
        return not agreed.bad

    def clip(self, norm: float) -> float | None:
        """The factor that clips a gradient of this norm; ``None`` where nothing is clipped."""
        if self.max_norm is None or norm <= self.max_norm:
            return None
        return self.max_norm / (norm + 1e-6)
