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
from planaria.optim.layout import Layout, Slot, fingerprint, local_shape
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


def building(workers: Workers) -> AbstractContextManager[None]:
    """An error in it, on whichever workers, ends in an error on all of them."""
    return workers.together(
        "the optimizer cannot be built",
        advice="build it alike on every worker",
        kind=checks.OptionError,
    )


def loading(workers: Workers) -> AbstractContextManager[None]:
    """As :func:`building`, for a state that does not fit; inside it nothing is written yet."""
    return workers.together(
        "the state to be loaded does not fit",
        advice="let every worker load a state of the same model",
        kind=checks.StateError,
    )


def require_same_options(
    workers: Workers, options: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Raises on every worker where an option, or one of a parameter group, differs between them."""
    every = dict(options)
    for g, group in enumerate(groups):
        every |= {f"{k} of group {g}": v for k, v in group.items() if not k.startswith("param")}
    texts = {name: repr(_plain(every[name])) for name in sorted(every)}
    advice = "give every worker the same options"
    workers.same("the set of options", fingerprint(repr(list(texts))), advice=advice)
    rows = workers.table([float(fingerprint(text)) for text in texts.values()])
    differ = [
        name for name, column in zip(texts, rows.T.tolist(), strict=True) if len({*column}) > 1
    ]
    what = f"the option {differ[0]} (here {texts[differ[0]]})" if differ else "an option"
    workers.same(what, fingerprint(repr(texts)), advice=advice)
    if workers.inner is not None:
        require_same_options(workers.inner, options, groups)


def _plain(value: Any) -> Any:
    """What a value is on every worker alike: numbers and words, else the name of its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (int, float, str, torch.dtype)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


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


def part_for(target: Tensor, value: Any, slot: Slot, rank: int, what: str) -> Tensor:
    """What of a loaded state belongs into an owner's part ``target``.

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
    return value


def require_groups(groups: Sequence[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raises where saved groups do not hold as many parameters as these."""
    here = [len(group["params"]) for group in groups]
    there = [len(group["params"]) for group in saved]
    if here != there:
        raise checks.StateError(
            f"the saved groups hold {there} parameters and this optimizer's hold {here}; "
            "load it into an optimizer with the same parameters in the same groups"
        )


def load_groups(groups: Sequence[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Takes over the options of saved groups, after the check of :func:`require_groups`."""
    require_groups(groups, saved)
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

    def __init__(
        self,
        workers: Workers,
        *,
        changed: bool,
        stray: int,
        square: float,
        digest: int,
        rates: int,
    ) -> None:
        """``stray``: a parameter that is not trained and has a gradient, or -1; ``square``: sum of
        squares of this worker's part; ``digest``: equal on equal replicas; ``rates``: equal where
        learning rates are.
        """
        first = float(changed + 2 * (stray + 1))
        table = workers.table([first, square, float(digest), float(rates)])
        flags = table[:, 0].to(torch.int64)
        self.changed = bool((flags % 2).any())
        self.stray = int((flags // 2).max()) - 1
        self.square = float(table[:, 1].sum())
        self.bad = [r for r, v in enumerate(table[:, 1].tolist()) if not math.isfinite(v)]
        self.digests = [int(v) for v in table[:, 2].tolist()]
        self.differ = len(set(self.digests)) > 1
        self.rates_differ = len(set(table[:, 3].tolist())) > 1
        if workers.inner is None:
            return
        # The node's other shards decide with this one.
        bad = self.bad[0] if self.bad else -1
        own = [self.changed, self.square, bad, self.differ, self.stray, self.rates_differ]
        rows = workers.inner.table([float(value) for value in own])
        self.changed = bool(rows[:, 0].any())
        self.square = float(rows[:, 1].sum())
        self.bad = sorted({int(v) for v in rows[:, 2].tolist() if v >= 0})
        self.differ = bool(rows[:, 3].any())
        self.stray = int(rows[:, 4].max())
        self.rates_differ = bool(rows[:, 5].any())

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


def _has_gradient(param: Tensor) -> bool:
    return param.requires_grad and param.grad is not None


class OwnedOptimizer(Optimizer):
    """Abstract: an optimizer whose workers each own a part of every parameter.

    A subclass sets ``workers``, ``buckets`` and ``_params`` and calls :meth:`seal` when it is built.

    A runtime that keeps ``state`` twice, by copying its tensors beside the next step and by writing
    them in place, needs to know no more than ``shard_local_state``, :meth:`replica_groups`,
    :meth:`abandon` and :meth:`restored`. No tensor of ``state`` is written outside of ``step()``.
    """

    shard_local_state = True
    """No other worker holds this worker's state."""

    # torch's GradScaler then calls step() in any case, since all workers have to, and leaves
    # ``grad_scale`` and ``found_inf`` here.
    _step_supports_amp_scaling = True

    workers: Workers
    buckets: Buckets
    max_norm: float | None
    nonfinite: str
    norm: float
    """Norm of the last step's gradient, before clipping; NaN before the first step."""
    _params: list[Tensor]
    _untrained: list[int]
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

    def _set_limits(self, max_norm: float | None, nonfinite: str) -> None:
        self.max_norm = None if max_norm is None else checks.number("max_norm", max_norm, low=0.0)
        self.nonfinite = checks.choice("nonfinite", nonfinite, ("raise", "skip"))
        self.norm = math.nan

    def _require_same(self, layout: Layout, options: dict[str, Any]) -> None:
        """Raises on every worker where they begin with other weights, shapes or options."""
        limits = {"max_norm": self.max_norm, "nonfinite": self.nonfinite}
        require_same_start(self.workers, layout, self._params)
        require_same_options(self.workers, options | limits, self.param_groups)

    def seal(self) -> None:
        """From here on the layout is fixed."""
        place = self.buckets.layout.place
        self._untrained = [index for index in range(len(self._params)) if index not in place]
        self._sealed = True

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy would share neither the hooks nor the group.

        Errors: :class:`planaria.optim.checks.OptionError`.
        """
        raise checks.OptionError(
            f"{type(self).__name__} is tied to a process group and cannot be copied or pickled; "
            "build another one and load this one's state_dict() into it"
        )

    def begin(self, closure: Callable[[], float] | None) -> float | None:
        """The loss of a step's closure; afterwards gradients are as they would be without a scaler."""
        loss = read_closure(closure)
        if hasattr(self, "found_inf"):
            # The scaler's kernel changes gradients without counting their versions up (torch 2.13).
            self.buckets.edited()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            # Each worker's scale is its own, so its gradients are unscaled before they are added up.
            factor = 1.0 / float(scale)
            for index, param in enumerate(self._params):
                if param.grad is not None:
                    checks.unscalable(index, param.grad)
                    param.grad.mul_(factor)
        return loss

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
            self.workers,
            changed=self.buckets.changed(),
            stray=max((i for i in self._untrained if _has_gradient(self._params[i])), default=-1),
            square=square(grads),
            digest=digest,
            rates=fingerprint(repr(self._rates())),
        )

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups if "lr" in group]

    def accept(self, agreed: Agreement) -> bool:
        """Whether the step goes on; keeps the norm. Raises where the user asked for that.

        Under a GradScaler a step that is not finite is left out, as the scaler expects.
        """
        self.norm = agreed.norm
        if agreed.stray >= 0:
            raise checks.OptionError(
                f"parameter {agreed.stray} has a gradient, but was frozen when the optimizer was "
                "built and is not trained by it; build a new one when it is no longer frozen"
            )
        if agreed.rates_differ:
            listed = ", ".join(f"{rate:g}" for rate in self._rates())
            raise checks.ReplicaError(
                f"the learning rate differs between workers (here {listed}); step the scheduler on "
                "every worker alike, and where it follows a loss by the loss of all of them"
            )
        if agreed.bad and self.nonfinite == "raise" and not hasattr(self, "found_inf"):
            raise checks.GradientError(
                f"a gradient is NaN or infinite on worker {self._origin(agreed)}; nothing was "
                "changed: lower the learning rate, or set nonfinite='skip' to leave such steps out"
            )
        return not agreed.bad

    def _origin(self, agreed: Agreement) -> int:
        """The first worker whose own gradients are not finite, or who owns a sum that is not."""
        bad = not math.isfinite(square(self.buckets.grads()))
        found = self.workers.table([float(bad)])[:, 0].tolist()
        return found.index(1.0) if 1.0 in found else agreed.bad[0]

    def clip(self, norm: float) -> float | None:
        """The factor that clips a gradient of this norm; ``None`` where nothing is clipped."""
        if self.max_norm is None or norm <= self.max_norm:
            return None
        return self.max_norm / (norm + 1e-6)
