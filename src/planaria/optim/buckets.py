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
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from planaria.errors import CommError
from planaria.optim import checks
from planaria.optim.collectives import Done, Pending, Workers, mean_rows
from planaria.optim.layout import Layout, Slot, pack, unpack
from planaria.optim.placement import local

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
        active: Callable[[], bool] | None = None,
    ) -> None:
        """``active()`` says, as a backward begins, whether its gradients leave during it."""
        self.layout, self.params, self.workers = layout, params, workers
        # FSDP2 is still at work when it tells of a gradient, and its shards are small.
        self.overlap = overlap and workers.size > 1 and workers.inner is None
        self._active = active
        self._sync = True
        dtypes = [reduce_dtype or master_dtype(bucket.dtype) for bucket in layout.buckets]
        devices = [params[bucket.slots[0].index].device for bucket in layout.buckets]
        self.sent = columns(layout, dtypes, devices)
        # A lone worker receives what it sends.
        self.received = self.sent if workers.size == 1 else columns(layout, dtypes, devices)
        self._reset()
        self._handles: list[RemovableHandle] = []
        if self.overlap:
            for index in layout.place:
                _retire(params[index])
                hook = params[index].register_post_accumulate_grad_hook(_Hook(self, index))
                self._handles.append(hook)

    def _reset(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._works: list[Pending] = []
        self._stale = False

    def weight(self, index: int) -> Tensor:
        """What this worker holds of a parameter, without history."""
        return local(self.params[index])

    def grad(self, index: int) -> Tensor | None:
        """This worker's gradient of it, [numel]; ``None`` where it has none."""
        grad = self.params[index].grad
        if grad is None:
            return None
        checks.no_sparse_gradient(index, grad)
        return local(grad).reshape(-1)

    def grads(self) -> list[Tensor]:
        """This worker's gradients of all parameters that have one."""
        found = (self.grad(index) for index in self.layout.place)
        return [grad for grad in found if grad is not None]

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
        if not (self._sync and self.overlap):
            return
        b, _ = self.layout.place[index]
        if not self._seen:
            if self._active is not None and not self._active():
                return
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
            self._seen[slot.index] = self._mark(slot.index)
            pack(self.grad(slot.index), self.sent[b], slot)

    def _mark(self, index: int) -> tuple[int, int]:
        """Changes whenever the gradient of a parameter does."""
        grad = self.params[index].grad
        if grad is None:
            return 0, 0
        held = local(grad)
        return held.data_ptr(), held._version

    def begin(self, b: int) -> Pending:
        """Sends the gradients of a bucket to their owners."""
        self.fill(b)
        return self.workers.exchange(self.received[b], self.sent[b])

    def _send(self, b: int) -> None:
        self._works.append(self.begin(b))

    def _send_rest(self) -> None:
        for b in range(len(self._works), len(self.layout.buckets)):
            self._send(b)

    def edited(self) -> None:
        """Notes that gradients were changed where their versions may not tell."""
        self._stale = self._stale or bool(self._works)

    def changed(self) -> bool:
        """Whether a gradient was changed after its bucket had left."""
        if self._stale:
            return True
        for bucket in self.layout.buckets[: len(self._works)]:
            for slot in bucket.slots:
                if self._seen[slot.index] != self._mark(slot.index):
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
        return self.weight(slot.index).reshape(-1)[begin:end]

    def mean(self, b: int, factor: float | None) -> Tensor:
        """Mean of the received rows of one bucket [S], ``factor`` times, in place in its first row."""
        mean = mean_rows(self.received[b])
        return mean if factor is None else mean.mul_(factor)

    def refresh(self, b: int, master: Tensor) -> None:
        """Copies this owner's weights of a bucket into its master [S]; see :func:`take_over`."""
        for slot in self.layout.buckets[b].slots:
            own = self.own(slot)
            take_over(master[slot.offset : slot.offset + own.numel()], own)

    def row(self, b: int) -> Tensor:
        """This owner's weights of a bucket [S], in the parameters' dtype; padding is zero."""
        bucket = self.layout.buckets[b]
        row = self.sent[b].new_zeros(bucket.width, dtype=bucket.dtype)
        for slot in bucket.slots:
            own = self.own(slot)
            row[slot.offset : slot.offset + own.numel()] = own
        return row

    def publish(self, rows: dict[int, Tensor]) -> None:
        """Gathers every owner's new weights [S] of some buckets and writes them to the parameters.

        All buckets leave before the first is written, so writing overlaps with the link.
        """
        works: list[tuple[int, Tensor, Pending]] = []
        for b, row in rows.items():
            scratch, dtype = self.sent[b], self.layout.buckets[b].dtype
            if self.workers.size == 1:
                works.append((b, row.unsqueeze(0), Done()))
                continue
            whole = scratch if scratch.dtype == dtype else torch.empty_like(scratch, dtype=dtype)
            works.append((b, whole, self.workers.gather(whole, row.to(dtype))))
        for b, whole, work in works:
            work.wait()
            for slot in self.layout.buckets[b].slots:
                write(self.weight(slot.index), whole, slot)


def take_over(master: Tensor, held: Tensor) -> None:
    """Makes a master hold what a parameter of the same shape holds.

    A half-precision weight is copied only where it is not its master, rounded: what the user
    changed, by loading or pruning a model, wins over the master, and nothing else does.
    """
    if master.dtype == held.dtype:
        master.copy_(held)
    else:
        changed = master.to(held.dtype) != held
        # Only then: masters are state, which may be copied beside what happens between steps.
        if bool(changed.any()):
            master.copy_(torch.where(changed, held.to(master.dtype), master))


def columns(
    layout: Layout, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]
) -> list[Tensor]:
    """One zero buffer [N, S] for each bucket."""
    return [
        torch.zeros((layout.world, bucket.width), dtype=dtype, device=device)
        for bucket, dtype, device in zip(layout.buckets, dtypes, devices, strict=True)
    ]


def _retire(param: Tensor) -> None:
    """Ends the hooks of an earlier optimizer, which then sends in its ``step()`` only.

    One that was dropped may live on until garbage is collected, which happens on each worker at
    another time, and would meanwhile send gradients that the others do not.
    """
    hooks: dict[int, object] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        if isinstance(hook, _Hook):
            hook.retired = True


class _Hook:
    """Tells the buckets of a gradient, as long as they live: a parameter outlives its optimizer."""

    def __init__(self, buckets: Buckets, index: int) -> None:
        self.buckets, self.index = weakref.ref(buckets), index
        self.retired = False

    def __call__(self, _: Tensor) -> None:
        buckets = self.buckets()
        if buckets is not None and not self.retired:
            buckets.arrived(self.index)


def write(target: Tensor, rows_NS: Tensor, slot: Slot) -> None:
    """Writes a parameter's columns of ``rows`` into it, whatever its memory format."""
    if target.is_contiguous():
        unpack(rows_NS, target.view(-1), slot)
        return
    flat = torch.empty(slot.numel, dtype=rows_NS.dtype, device=rows_NS.device)
    unpack(rows_NS, flat, slot)
    target.copy_(flat.view(slot.shape))
