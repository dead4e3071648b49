"""Gradients out and weights back, bucket by bucket, beside backward.

:class:`Buckets` is what the sharded optimizers have in common. A bucket's gradients leave when its
last one has been accumulated, always in the order of the layout, so all workers start the same
collectives in the same order whatever the order of their backward. What backward left out, because
a parameter had no gradient on this worker, leaves as zeros.

Shapes: N owners, S columns of a bucket.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from planaria.errors import CommError
from planaria.optim import checks
from planaria.optim.collectives import Done, Pending, Workers, mean_rows
from planaria.optim.layout import Layout, Slot, pack, unpack

_HALF = (torch.float16, torch.bfloat16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight of ``dtype`` is updated: float32 for the half ones."""
    return torch.float32 if dtype in _HALF else dtype


class Buckets:
    """Flat buffers of one layout over ``workers``, and the collectives on them."""

    def __init__(
        self,
        layout: Layout,
        params: Sequence[Tensor],
        workers: Workers,
        *,
        reduce_dtype: torch.dtype | None = None,
        overlap: bool = True,
    ) -> None:
        self.layout, self.params, self.workers = layout, params, workers
        self.overlap = overlap
        self.active = True
        self._sync = True
        dtypes = [reduce_dtype or master_dtype(bucket.dtype) for bucket in layout.buckets]
        devices = [params[bucket.slots[0].index].device for bucket in layout.buckets]
        self.sent = columns(layout, dtypes, devices)
        self.received = columns(layout, dtypes, devices)
        self._reset()
        self._handles: list[RemovableHandle] = []
        for slot in (slot for bucket in layout.buckets for slot in bucket.slots):
            hook = _Hook(self, slot.index)
            self._handles.append(params[slot.index].register_post_accumulate_grad_hook(hook))

    def _reset(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._works: list[Pending] = []
        self._stale = False

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Inside it, backward only accumulates: for all but the last micro-batch of a step."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def arrived(self, index: int) -> None:
        """Notes an accumulated gradient; sends its bucket and what waited for it, if complete."""
        if not (self._sync and self.overlap and self.active and self.workers.size > 1):
            return
        b, _ = self.layout.place[index]
        if not self._seen:
            # At the end of this backward the rest leaves too, so that a collective which the user
            # starts on this group before step() meets the same one on every worker.
            torch.autograd.Variable._execution_engine.queue_callback(self._send_rest)
        if index in self._seen:
            self._stale = True
            return
        self._seen[index] = (-1, -1)
        self._missing[b] -= 1
        while len(self._works) < len(self._missing) and not self._missing[len(self._works)]:
            self._send(len(self._works))

    def fill(self, b: int) -> None:
        """Copies the gradients of a bucket into its buffer; a missing one counts as zero."""
        for slot in self.layout.buckets[b].slots:
            grad = self.params[slot.index].grad
            if grad is None:
                self._seen[slot.index] = (0, 0)
                pack(None, self.sent[b], slot)
                continue
            checks.no_sparse_gradient(slot.index, grad)
            self._seen[slot.index] = (grad.data_ptr(), grad._version)
            pack(grad.detach().reshape(-1), self.sent[b], slot)

    def _send(self, b: int) -> None:
        self.fill(b)
        self._works.append(self.workers.exchange(self.received[b], self.sent[b]))

    def _send_rest(self) -> None:
        for b in range(len(self._works), len(self.layout.buckets)):
            self._send(b)

    def changed(self) -> bool:
        """Whether a gradient was changed after its bucket had left."""
        if self._stale:
            return True
        for bucket in self.layout.buckets[: len(self._works)]:
            for slot in bucket.slots:
                grad = self.params[slot.index].grad
                now = (0, 0) if grad is None else (grad.data_ptr(), grad._version)
                if self._seen[slot.index] != now:
                    return True
        return False

    def reduced(self) -> list[Tensor]:
        """Sends what has not left and returns this owner's mean gradients, one [S] a bucket.

        The result is only right if no worker's gradients were :meth:`changed` since; the caller
        agrees on that with its other flags and calls :meth:`resend` if one was.
        """
        self._send_rest()
        for work in self._works:
            work.wait()
        return [mean_rows(received) for received in self.received]

    def resend(self) -> list[Tensor]:
        """Sends all buckets once more and returns as :meth:`reduced` does."""
        self._reset()
        return self.reduced()

    def drop(self) -> None:
        """Forgets gradients under way, as after an attempt that was given up."""
        for work in self._works:
            # The result is thrown away, and a communicator that died says so to the next caller.
            with contextlib.suppress(RuntimeError, CommError):
                work.wait()
        self._reset()

    def abandon(self) -> None:
        """Forgets gradients under way without waiting, where the group under them is gone."""
        self._reset()

    def finish(self) -> None:
        """Marks the gradients as used; the next backward starts afresh."""
        self._reset()

    def own(self, slot: Slot) -> Tensor:
        """This owner's part of a parameter, flat and without padding (a view where it can be)."""
        begin, end = slot.part(self.workers.rank)
        return self.params[slot.index].detach().reshape(-1)[begin:end]

    def mean(self, b: int) -> Tensor:
        """Mean of the received rows of one bucket [S], in place in its first row."""
        return mean_rows(self.received[b])

    def refresh(self, masters: Sequence[Tensor]) -> None:
        """Copies this owner's weights into its masters [S], one for each bucket.

        A half-precision weight is copied only where it is not its master, rounded: what the user
        changed, by loading or pruning a model, wins over the master, and nothing else does.
        """
        for bucket, master in zip(self.layout.buckets, masters, strict=True):
            for slot in bucket.slots:
                own = self.own(slot)
                part = master[slot.offset : slot.offset + own.numel()]
                if master.dtype == bucket.dtype:
                    part.copy_(own)
                else:
                    moved = part.to(bucket.dtype) != own
                    part.copy_(torch.where(moved, own.to(part.dtype), part))

    def publish(self, rows: Sequence[Tensor], *, only: Sequence[int] | None = None) -> None:
        """Gathers every owner's new weights [S] of each bucket and writes them into the parameters.

        All buckets leave before the first is written, so writing overlaps with the link.
        """
        chosen = range(len(self.layout.buckets)) if only is None else only
        works: list[tuple[Tensor, Pending]] = []
        for b in chosen:
            scratch, dtype = self.sent[b], self.layout.buckets[b].dtype
            if self.workers.size == 1:
                works.append((rows[b].unsqueeze(0), Done()))
                continue
            whole = scratch if scratch.dtype == dtype else torch.empty_like(scratch, dtype=dtype)
            works.append((whole, self.workers.gather(whole, rows[b].to(dtype))))
        for b, (whole, work) in zip(chosen, works, strict=True):
            work.wait()
            for slot in self.layout.buckets[b].slots:
                write(self.params[slot.index], whole, slot)


def columns(
    layout: Layout, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]
) -> list[Tensor]:
    """One zero buffer [N, S] for each bucket."""
    return [
        torch.zeros((layout.world, bucket.width), dtype=dtype, device=device)
        for bucket, dtype, device in zip(layout.buckets, dtypes, devices, strict=True)
    ]


class _Hook:
    """Tells the buckets of a gradient, as long as they live: a parameter outlives its optimizer."""

    def __init__(self, buckets: Buckets, index: int) -> None:
        self.buckets, self.index = weakref.ref(buckets), index

    def __call__(self, _: Tensor) -> None:
        buckets = self.buckets()
        if buckets is not None:
            buckets.arrived(self.index)


def write(param: Tensor, rows_NS: Tensor, slot: Slot) -> None:
    """Writes a parameter's columns of ``rows`` into it, whatever its memory format."""
    target = param.detach()
    if target.is_contiguous():
        unpack(rows_NS, target.view(-1), slot)
        return
    flat = torch.empty(slot.numel, dtype=rows_NS.dtype, device=rows_NS.device)
    unpack(rows_NS, flat, slot)
    target.copy_(flat.view(slot.shape))
