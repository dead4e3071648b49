"""Any elementwise optimizer, with its state and its arithmetic cut over the workers (ZeRO-1).

Each worker owns 1/N of every parameter's rows. Gradients are reduced to their owners, the owner
updates its part in the optimizer's own arithmetic, the new weights are gathered. Source: ZeRO
(arXiv 1910.02054), stage 1; the reduce-scatter is an all-to-all and a local sum, because gloo's own
reduce-scatter moves as many bytes as an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    copy_part,
    load_groups,
    read_closure,
    require_same_start,
    trained,
)
from planaria.optim.buckets import Buckets, master_dtype
from planaria.optim.collectives import Workers
from planaria.optim.layout import Slot, build, local_shape


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
        group: DeviceMesh | dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        max_norm: float | None = None,
        nonfinite: str = "raise",
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        checks.number("bucket_bytes", bucket_bytes, low=1)
        self.max_norm = None if max_norm is None else checks.number("max_norm", max_norm, low=0.0)
        self.nonfinite = checks.choice("nonfinite", nonfinite, ("raise", "skip"))
        self.norm = math.nan
        super().__init__(params, {})
        self.workers = Workers(group)
        self._params, chosen = trained(self)
        layout = build(
            chosen,
            world=self.workers.size,
            bucket_bytes=bucket_bytes,
            dense=lambda *_: True,
        )
        require_same_start(self.workers, layout, self._params)
        for own in self.param_groups:
            given = {k: v for k, v in own.items() if k not in ("params", "param_names")}
            probe.require_elementwise(optimizer_class, {**options, **given})
        self.buckets = Buckets(
            layout, self._params, self.workers, reduce_dtype=reduce_dtype, overlap=overlap
        )
        self._make_inner(optimizer_class, options)
        self.seal()
        self._publish_state()

    def _make_inner(self, factory: Callable[..., Optimizer], options: dict[str, Any]) -> None:
        layout = self.buckets.layout
        self.masters: list[Tensor] = []
        for bucket in layout.buckets:
            device = self._params[bucket.slots[0].index].device
            dtype = master_dtype(bucket.dtype)
            self.masters.append(torch.zeros(bucket.width, dtype=dtype, device=device))
        with torch.no_grad():
            self.buckets.refresh(self.masters)
        groups: list[dict[str, Any]] = []
        self._inner_of: list[int] = []
        for g, own in enumerate(self.param_groups):
            flats = [m for m, b in zip(self.masters, layout.buckets, strict=True) if b.group == g]
            if flats:
                given = {k: v for k, v in own.items() if k not in ("params", "param_names")}
                groups.append({"params": [f.requires_grad_() for f in flats], **given})
                self._inner_of.append(g)
        self.inner = factory(groups, **options)
        probe.make_state(self.inner)
        self.defaults = dict(self.inner.defaults)
        for g, inner in zip(self._inner_of, self.inner.param_groups, strict=True):
            for key, value in inner.items():
                if key != "params":
                    self.param_groups[g].setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on all workers; returns the closure's loss, if one is given."""
        loss = read_closure(closure)
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
        self.buckets.refresh(self.masters)
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.to(master.dtype)
        for g, inner in zip(self._inner_of, self.inner.param_groups, strict=True):
            inner.update(
                {k: v for k, v in self.param_groups[g].items() if k in inner and k != "params"}
            )
        self.inner.step()
        for master in self.masters:
            master.grad = None
        if self._published != self._identities():
            # An optimizer that counts in plain numbers, or makes new tensors: state shows them.
            self._publish_state()
        self.buckets.publish([m.detach() for m in self.masters])
        return loss

    def _entries(self, bucket: int, slot: Slot) -> dict[str, Any]:
        """The state of one parameter; tensors are views of this owner's flat state."""
        master = self.masters[bucket]
        shape = local_shape(slot, self.workers.rank)
        count = math.prod(shape)
        mesh = self.workers.mesh(master.device.type)
        entries: dict[str, Any] = {}
        found: dict[str, Any] = dict(self.inner.state[master])
        if master.dtype != self.buckets.layout.buckets[bucket].dtype:
            found["master"] = master.detach()
        for key, value in found.items():
            if isinstance(value, Tensor) and value.shape == master.shape:
                local = value[slot.offset : slot.offset + count].view(shape)
                entries[key] = as_dtensor(local, slot, mesh)
            else:
                entries[key] = value
        return entries

    def _identities(self) -> list[int]:
        return [id(v) for m in self.masters for v in dict[str, Any](self.inner.state[m]).values()]

    def _publish_state(self) -> None:
        self._published = self._identities()
        for b, bucket in enumerate(self.buckets.layout.buckets):
            for slot in bucket.slots:
                self.state[self._params[slot.index]] = self._entries(b, slot)

    @torch.no_grad()
    def restored(self) -> None:
        """As :meth:`OwnedOptimizer.restored`; numbers that are no tensors go to the inner state."""
        super().restored()
        for b, bucket in enumerate(self.buckets.layout.buckets):
            inner: dict[str, Any] = self.inner.state[self.masters[b]]
            shown: dict[str, Any] = self.state[self._params[bucket.slots[0].index]]
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

        Errors: :class:`planaria.optim.checks.StateError` if it belongs to other parameters.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        load_groups(self.param_groups, groups)
        # Keys need not be numbers: torch.distributed.checkpoint loads by the parameters' names.
        keys = [key for group in groups for key in group["params"]]
        self.buckets.drop()
        for b, bucket in enumerate(self.buckets.layout.buckets):
            for slot in bucket.slots:
                self._load_slot(b, slot, state_dict["state"].get(keys[slot.index]))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_slot(self, b: int, slot: Slot, saved: dict[str, Any] | None) -> None:
        here = self._entries(b, slot)
        lacking = sorted(set(here) - set(saved or {}) - {"master"})
        if saved is None or lacking:
            raise checks.StateError(
                f"the saved state of parameter {slot.index} lacks {lacking or 'everything'}; "
                "load a state that was saved from the same optimizer and model"
            )
        for key, target in here.items():
            what = f"the saved {key!r} of parameter {slot.index}"
            if isinstance(target, Tensor) and target.ndim and key in saved:
                local = target.to_local() if isinstance(target, DTensor) else target
                copy_part(local, saved[key], slot, self.workers.rank, what)
            elif isinstance(target, Tensor) and key in saved:
                target.copy_(torch.as_tensor(saved[key]))
            elif key in saved:
                self.inner.state[self.masters[b]][key] = saved[key]
