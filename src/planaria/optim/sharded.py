"""Any elementwise optimizer, with its state and its arithmetic cut over the workers (ZeRO-1).

Each worker owns 1/N of every parameter's rows. Gradients are reduced to their owners, the owner
updates its part in the optimizer's own arithmetic, the new weights are gathered. Source: ZeRO
(arXiv 1910.02054), stage 1; the reduce-scatter is an all-to-all and a local sum, because gloo's own
reduce-scatter moves as many bytes as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from planaria.optim import checks, probe
from planaria.optim.base import (
    BUCKET_BYTES,
    OwnedOptimizer,
    as_dtensor,
    building,
    load_groups,
    loading,
    part_for,
    require_groups,
    take_seat,
    trained,
)
from planaria.optim.buckets import Buckets, master_dtype, take_over
from planaria.optim.collectives import Workers
from planaria.optim.layout import Slot, build

# An owner's part of at least so many elements is updated where it lies; smaller ones are updated
# together, in a copy, because a call for each takes longer than copying does.
LARGE = 1 << 12


@dataclass(frozen=True)
class Unit:
    """What the inner optimizer takes for one parameter: some columns of a bucket."""

    bucket: int
    """Position of the bucket."""
    slots: tuple[Slot, ...]
    """The slots in these columns."""
    begin: int
    """First column."""
    end: int
    """Last column, plus one."""
    master: Tensor
    """This owner's weights, flat: a copy with padding, or the parameter's own memory."""
    in_place: bool
    """Whether it is the parameter's own memory."""


class Sharded(OwnedOptimizer):
    """``optimizer_class`` on this worker's part of ``params``: equal to the whole one, bit by bit.

    All workers of ``group`` must build it with the same parameters in the same state; they check
    that. ``step()`` is a collective call. Options of the inner optimizer are given as keywords or
    in parameter groups, and schedulers act on ``param_groups`` as usual.

    - A parameter whose gradient is ``None`` on one worker counts as zero there, and also where it
      is ``None`` on all of them: unlike in torch's optimizers it still decays.
    - ``max_norm`` clips by the norm of the mean gradient. ``norm`` holds the last step's norm.
    - NaN or infinite gradients raise on every worker before anything is changed
      (``nonfinite="raise"``), or the step is left out everywhere (``"skip"``).
    - float16 and bfloat16 weights have a float32 master on their owner.

    Errors: :class:`~planaria.optim.checks.OptionError`,
    :class:`~planaria.optim.checks.ReplicaError`,
    :class:`~planaria.optim.checks.GradientError`. Source: ZeRO stage 1, arXiv 1910.02054.

    >>> layer = torch.nn.Linear(4, 4)
    >>> optimizer = Sharded(torch.optim.AdamW, layer.parameters(), lr=1e-3)
    >>> layer(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params: ParamsT,
        *,
        group: Workers | DeviceMesh | dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        max_norm: float | None = None,
        nonfinite: str = "raise",
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.workers = Workers.of(group)
        with building(self.workers):
            checks.number("bucket_bytes", bucket_bytes, low=1)
            self._set_limits(max_norm, nonfinite)
            super().__init__(params, {})
            self._params, chosen = trained(self)
            layout = build(
                take_seat(self.workers, chosen),
                world=self.workers.size,
                bucket_bytes=bucket_bytes,
                dense=lambda *_: True,
            )
            for own in self.param_groups:
                probe.require_elementwise(optimizer_class, {**options, **_options(own)})
        common = {"optimizer_class": optimizer_class, "reduce_dtype": reduce_dtype}
        self._require_same(layout, {**options, **common, "overlap": overlap})
        self.buckets = Buckets(
            layout, self._params, self.workers, reduce_dtype=reduce_dtype, overlap=overlap
        )
        self._make_inner(optimizer_class, options)
        self.seal()
        self._publish_state()

    def _make_inner(self, factory: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        layout = self.buckets.layout
        self.units = [unit for b in range(len(layout.buckets)) for unit in self._cut(b)]
        with torch.no_grad():
            self._refresh()
        groups: list[dict[str, Any]] = []
        self._inner_of: list[int] = []
        for g, own in enumerate(self.param_groups):
            flats = [u.master for u in self.units if layout.buckets[u.bucket].group == g]
            if flats:
                groups.append({"params": [f.requires_grad_() for f in flats], **_options(own)})
                self._inner_of.append(g)
        self.inner = factory(groups, **options)
        probe.make_state(self.inner)
        self.defaults = dict(self.inner.defaults)
        for g, inner in zip(self._inner_of, self.inner.param_groups, strict=True):
            for key, value in inner.items():
                if key != "params":
                    self.param_groups[g].setdefault(key, value)
        for own in self.param_groups:
            # Schedulers read the rate of every group, also where all of it is frozen.
            for key, value in self.defaults.items():
                own.setdefault(key, value)

    def _cut(self, b: int) -> list[Unit]:
        """The units of a bucket: large slots alone and in place, runs of others in a copy."""
        bucket = self.buckets.layout.buckets[b]
        dtype = master_dtype(bucket.dtype)
        found: list[Unit] = []
        run: list[Slot] = []

        def close() -> None:
            if run:
                begin, end = run[0].offset, run[-1].offset + run[-1].length
                device = self.buckets.weight(run[0].index).device
                flat = torch.zeros(end - begin, dtype=dtype, device=device)
                found.append(Unit(b, tuple(run), begin, end, flat, in_place=False))
                run.clear()

        for slot in bucket.slots:
            weight = self.buckets.weight(slot.index)
            if slot.length >= LARGE and dtype == bucket.dtype and weight.is_contiguous():
                close()
                own = self.buckets.own(slot)
                end = slot.offset + own.numel()
                found.append(Unit(b, (slot,), slot.offset, end, own, in_place=True))
            else:
                run.append(slot)
        close()
        return found

    def _refresh(self) -> None:
        """Makes the masters hold what the parameters do, wherever those lie by now."""
        for unit in self.units:
            if unit.in_place:
                unit.master.data = self.buckets.own(unit.slots[0])
                continue
            for slot in unit.slots:
                own = self.buckets.own(slot)
                at = slot.offset - unit.begin
                take_over(unit.master.detach()[at : at + own.numel()], own)

    def _row(self, b: int) -> Tensor:
        """This owner's weights of a bucket [S] after the step, in the parameters' dtype."""
        bucket = self.buckets.layout.buckets[b]
        row = self.buckets.sent[b].new_zeros(bucket.width, dtype=bucket.dtype)
        for unit in self.units:
            if unit.bucket == b:
                row[unit.begin : unit.end] = unit.master.detach()
        return row

    def _publish(self) -> None:
        lone = self.workers.size == 1
        for unit in self.units:
            if unit.in_place:
                # Written through another tensor, which autograd and the runtime must hear of.
                torch.autograd.graph.increment_version(self.buckets.weight(unit.slots[0].index))
            elif lone:
                for slot in unit.slots:
                    at = slot.offset - unit.begin
                    own = self.buckets.weight(slot.index)
                    own.copy_(unit.master.detach()[at : at + own.numel()].view(own.shape))
        if not lone:
            self.buckets.publish({b: self._row(b) for b in range(len(self.buckets.layout.buckets))})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers; returns the closure's loss, if one is given."""
        loss = self.begin(closure)
        grads = self.buckets.reduced()
        agreed = self.agree(grads)
        if agreed.changed:
            grads = self.buckets.resend()
            agreed = self.agree(grads)
        self.buckets.finish()
        if not self.accept(agreed):
            return loss
        factor = self.clip(agreed.norm)
        if factor is not None:
            for grad in grads:
                grad.mul_(factor)
        self._refresh()
        for unit in self.units:
            grad = grads[unit.bucket][unit.begin : unit.end]
            unit.master.grad = grad.to(unit.master.dtype)
        for g, inner in zip(self._inner_of, self.inner.param_groups, strict=True):
            inner.update(
                {k: v for k, v in self.param_groups[g].items() if k in inner and k != "params"}
            )
        self.inner.step()
        for unit in self.units:
            unit.master.grad = None
        if self._published != self._identities():
            # An optimizer that counts in plain numbers, or makes new tensors: state shows them.
            self._publish_state()
        self._publish()
        return loss

    def _entries(self, unit: Unit, slot: Slot) -> dict[str, Any]:
        """The state of one parameter; tensors are views of this owner's flat state."""
        master, param = unit.master, self._params[slot.index]
        at = slot.offset - unit.begin
        entries: dict[str, Any] = {}
        found: dict[str, Any] = dict(self.inner.state[master])
        if master.dtype != param.dtype:
            found["master"] = master.detach()
        for key, value in found.items():
            if isinstance(value, Tensor) and value.shape == master.shape:
                entries[key] = as_dtensor(value[at:], slot, param, self.workers)
            else:
                entries[key] = value
        return entries

    def _identities(self) -> list[int]:
        states = [dict[str, Any](self.inner.state[unit.master]) for unit in self.units]
        return [id(value) for state in states for value in state.values()]

    def _publish_state(self) -> None:
        self._published = self._identities()
        for unit in self.units:
            for slot in unit.slots:
                self.state[self._params[slot.index]] = self._entries(unit, slot)

    @torch.no_grad()
    def restored(self) -> None:
        """As :meth:`OwnedOptimizer.restored`; numbers that are no tensors go to the inner state."""
        super().restored()
        for unit in self.units:
            inner: dict[str, Any] = self.inner.state[unit.master]
            shown: dict[str, Any] = self.state[self._params[unit.slots[0].index]]
            inner.update({k: v for k, v in shown.items() if not isinstance(v, Tensor)})
        self._published = self._identities()

    def state_dict(self) -> dict[str, Any]:
        """Torch's format; tensors are DTensors of the parameters' shapes over the group.

        ``torch.distributed.checkpoint`` saves and loads them at any number of workers.
        """
        self._publish_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores in place, bit by bit; also takes whole tensors, as an unsharded optimizer saves.

        Collective.

        Errors: :class:`planaria.optim.checks.StateError` if it belongs to other parameters.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        self.buckets.drop()
        with loading(self.workers):
            require_groups(self.param_groups, groups)
            # Keys need not be numbers: torch.distributed.checkpoint loads by the parameters' names.
            keys = [key for group in groups for key in group["params"]]
            found = [
                self._read_unit(unit, [state_dict["state"].get(keys[s.index]) for s in unit.slots])
                for unit in self.units
            ]
        load_groups(self.param_groups, groups)
        for unit, (parts, shared) in zip(self.units, found, strict=True):
            inner: dict[str, Any] = self.inner.state[unit.master]
            for target, part in parts:
                target.copy_(part)
            for key, value in shared.items():
                if isinstance(inner[key], Tensor):
                    inner[key].copy_(torch.as_tensor(value))
                else:
                    inner[key] = value
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _read_unit(
        self, unit: Unit, saved: list[dict[str, Any] | None]
    ) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
        """What of a loaded state goes where in a unit, and what all of its parameters share."""
        parts: list[tuple[Tensor, Tensor]] = []
        shared: dict[str, Any] = {}
        for slot, entries in zip(unit.slots, saved, strict=True):
            here = self._entries(unit, slot)
            lacking = sorted(set(here) - set(entries or {}) - {"master"})
            if entries is None or lacking:
                raise checks.StateError(
                    f"the saved state of parameter {slot.index} lacks {lacking or 'everything'}; "
                    "load a state that was saved from the same optimizer and model"
                )
            for key in here.keys() & entries.keys():
                what = f"the saved {key!r} of parameter {slot.index}"
                target, value = here[key], entries[key]
                if isinstance(target, Tensor) and target.ndim:
                    held = target.to_local() if isinstance(target, DTensor) else target
                    parts.append((held, part_for(held, value, slot, self.workers.rank, what)))
                elif shared.setdefault(key, value) != value:
                    raise checks.StateError(
                        f"{what} is {float(value):g} and that of parameter {unit.slots[0].index}, "
                        f"which is updated with it, {float(shared[key]):g}; load a state in which "
                        "all parameters were updated equally often"
                    )
        return parts, shared


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says of the inner optimizer."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}
