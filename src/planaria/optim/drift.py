"""Local drift: every worker moves all weights by its own moment; a cycle's part is averaged.

Each sparse step averages one part of the weights, and their moments, over the workers and takes an
outer Nesterov step there, so each weight is averaged once in a period. What travels is how far a
weight moved since its last averaging, since that needs fewer digits than the weight itself. Nothing
has to be agreed about what is sent, since the cycle is known beforehand. Replicas differ between
averagings.

Shapes: N owners, S columns of a bucket, W columns of all buckets, V columns of the sparse ones, K
columns of one part of the cycle.

Source: our choice, in the family of DiLoCo (arXiv 2311.08105) and of sparse
parameter averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planaria.optim.adams import update
from planaria.optim.buckets import Buckets, master_dtype, write
from planaria.optim.collectives import checksum, mean_rows
from planaria.optim.frozen import adams_options
from planaria.optim.layout import pack
from planaria.optim.options import ScapeOptions


class Drift:
    """State and steps of the family "local"."""

    replicas_equal = False

    def __init__(
        self, buckets: Buckets, options: ScapeOptions, groups: Sequence[dict[str, Any]]
    ) -> None:
        self.buckets, self.options, self.groups = buckets, options, groups
        layout = self.layout = buckets.layout
        self.workers = buckets.workers
        like = buckets.sent[0]
        everything = layout.world * layout.width
        self.w = torch.zeros(everything, dtype=like.dtype, device=like.device)
        self.m = torch.zeros_like(self.w)
        self.half = any(master_dtype(b.dtype) != b.dtype for b in layout.buckets)
        wide = layout.sparse_width if options.sparse else 0
        self.anchor = torch.zeros(layout.world * wide, dtype=like.dtype, device=like.device)
        self.velocity = torch.zeros(wide, dtype=like.dtype, device=like.device)
        self.wire = torch.bfloat16 if options.wire == "bfloat16" else like.dtype
        self.pull()

    def whole(self, flat_NW: Tensor) -> list[Tensor]:
        """Views [N, S] of a flat state of all owners, one for each bucket."""
        owners = self.layout.world
        return [
            flat_NW[owners * b.begin : owners * b.end].view(owners, b.width)
            for b in self.layout.buckets
            if owners * b.end <= flat_NW.numel()
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be restored, live."""
        named = {"moment": self.m, "anchor": self.anchor, "velocity": self.velocity}
        return {**named, "master": self.w} if self.half else named

    def loaded(self) -> None:
        """Called when the tensors have been written."""
        if not self.half:
            self.pull()

    def settle(self) -> None:
        """Nothing is ever under way between two steps."""

    def abandon(self) -> None:
        """Nothing is ever under way between two steps."""

    def digest(self) -> int:
        """A number that is equal on workers which agree on what has to be equal."""
        dense = self.layout.buckets[self.layout.sparse :]
        return checksum([self.buckets.params[s.index] for bucket in dense for s in bucket.slots])

    def pull(self) -> None:
        """Takes over weights that were changed outside of the optimizer."""
        for bucket, rows in zip(self.layout.buckets, self.whole(self.w), strict=True):
            for slot in bucket.slots:
                flat = self.buckets.params[slot.index].detach().reshape(-1)
                if rows.dtype == bucket.dtype:
                    pack(flat, rows, slot)
                    continue
                block = rows[:, slot.offset : slot.offset + slot.length]
                now = torch.zeros_like(block, dtype=bucket.dtype)
                pack(flat, now, type(slot)(slot.index, slot.shape, slot.rows, slot.length, 0))
                changed = block.to(bucket.dtype) != now
                # Only then: masters are state, which is not to be written outside of a step.
                if bool(changed.any()):
                    block.copy_(torch.where(changed, now.to(block.dtype), block))

    def _push(self) -> None:
        for bucket, rows in zip(self.layout.buckets, self.whole(self.w), strict=True):
            for slot in bucket.slots:
                write(self.buckets.params[slot.index], rows, slot)

    def _set_anchor(self) -> None:
        self.anchor.copy_(self.w[: self.anchor.numel()])

    def dense_step(
        self, step: int, grads: Sequence[Tensor], factor: float | None, *, before_sparse: bool
    ) -> None:
        """One step of dense AdamS, done by every worker for all weights from the mean gradients."""
        del step, factor, before_sparse
        self.pull()
        self._all_gradients(range(len(self.layout.buckets)), grads)
        self._local_step()
        self._push()

    def _all_gradients(self, which: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Gathers the mean gradients of these buckets into ``buckets.sent``."""
        works = [
            self.workers.gather(self.buckets.sent[b], grad)
            for b, grad in zip(which, grads, strict=True)
        ]
        for work in works:
            work.wait()

    def _local_step(self) -> None:
        w, m = self.whole(self.w), self.whole(self.m)
        for b, bucket in enumerate(self.layout.buckets):
            group = self.groups[bucket.group]
            update(w[b], self.buckets.sent[b], m[b], **adams_options(group))

    def sparse_step(self, step: int) -> None:
        """One step by the worker's own clipped gradients in ``buckets.sent``, then an averaging."""
        layout = self.layout
        self.pull()
        if step == self.options.dense_steps:
            # Only now, so that a model may be loaded after the optimizer was built.
            self._set_anchor()
        dense = range(layout.sparse, len(layout.buckets))
        works = [
            self.workers.exchange(self.buckets.received[b], self.buckets.sent[b]) for b in dense
        ]
        for work in works:
            work.wait()
        self._all_gradients(dense, [self.buckets.mean(b) for b in dense])
        self._local_step()
        self._average((step - self.options.dense_steps) % self.options.period)
        self._push()

    def parts(self, phase: int) -> list[slice]:
        """The columns of each sparse bucket that are averaged in a phase of the cycle."""
        period = self.options.period
        chosen: list[slice] = []
        for bucket in self.layout.buckets[: self.layout.sparse]:
            if self.options.cycle == "scattered":
                chosen.append(slice(phase, bucket.width, period))
            else:
                low, high = (bucket.width * p // period for p in (phase, phase + 1))
                chosen.append(slice(low, high))
        return chosen

    def _average(self, phase: int) -> None:
        """Averages movements since the last averaging, and moments, of a part of the cycle."""
        sparse, parts = self.layout.sparse, self.parts(phase)
        w, m = self.whole(self.w)[:sparse], self.whole(self.m)[:sparse]
        anchor = [rows for rows in self.whole(self.anchor) if rows.numel()]
        moved = [(a - x)[:, part] for a, x, part in zip(anchor, w, parts, strict=True)]
        held = [rows[:, part] for rows, part in zip(m, parts, strict=True)]
        sent = [*moved, *held] if self.options.average_moments else moved
        values_NK = torch.cat(sent, dim=1).to(self.wire)
        received_NK = torch.empty_like(values_NK)
        self.workers.exchange(received_NK, values_NK).wait()
        mean_K = mean_rows(received_NK.to(self.w.dtype))
        count = sum(rows.shape[1] for rows in moved)
        mean_K[:count] = self._outer(mean_K[:count], parts)
        self.workers.gather(values_NK, mean_K.to(self.wire)).wait()
        pieces = values_NK.to(self.w.dtype).split([rows.shape[1] for rows in sent], dim=1)
        for a, x, part, piece in zip(anchor, w, parts, pieces, strict=False):
            # Every worker subtracts the same rounded step from the same anchor.
            a[:, part] -= piece
            x[:, part] = a[:, part]
        for rows, part, piece in zip(m, parts, pieces[len(moved) :], strict=False):
            rows[:, part] = piece

    def _outer(self, delta_K: Tensor, parts: Sequence[slice]) -> Tensor:
        """The owner's Nesterov step; returns what every worker subtracts from its anchor."""
        rate, momentum = self.options.outer_rate, self.options.outer_momentum
        steps: list[Tensor] = []
        begin = 0
        for bucket, part in zip(self.layout.buckets, parts, strict=False):
            velocity = self.velocity[bucket.begin : bucket.end][part]
            delta = delta_K[begin : begin + velocity.numel()]
            begin += velocity.numel()
            velocity.mul_(momentum).add_(delta)
            steps.append(torch.add(delta, velocity, alpha=momentum) * rate)
        return torch.cat(steps)

    def mean_weights(self) -> list[Tensor]:
        """The mean over the workers of every trained weight, as whole tensors; collective.

        One for each slot, in the order of ``layout``; what a user saves or evaluates.
        """
        self.pull()
        found: list[Tensor] = []
        for bucket, rows in zip(self.layout.buckets, self.whole(self.w), strict=True):
            received = torch.empty_like(rows)
            self.workers.exchange(received, rows).wait()
            whole = torch.empty_like(rows)
            self.workers.gather(whole, mean_rows(received)).wait()
            for slot in bucket.slots:
                like = self.buckets.params[slot.index].detach()
                mean = torch.empty_like(like)
                write(mean, whole, slot)
                found.append(mean)
        return found
