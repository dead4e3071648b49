"""Local drift: every worker moves all weights by its own moment; a cycle's part is averaged.

Each sparse step averages one part of the weights, and their moments, over the workers and takes an
outer Nesterov step there, so each weight is averaged once in a period. What travels is how far a
weight moved since its last averaging, since that needs fewer digits than the weight itself. Nothing
has to be agreed about what is sent, since the cycle is known beforehand. Replicas differ between
averagings.

A float32 weight is moved where it lies. Half-precision ones have masters with every worker.

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

from planaria.optim import wire
from planaria.optim.adams import update, update_all
from planaria.optim.buckets import Buckets, master_dtype, take_over, write
from planaria.optim.collectives import Pending, checksum, mean_rows
from planaria.optim.frozen import adams_options
from planaria.optim.layout import Comb, Slot, pack, parts, pieces
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
        self.m = torch.zeros(everything, dtype=like.dtype, device=like.device)
        self.half = any(master_dtype(b.dtype) != b.dtype for b in layout.buckets)
        self.master = torch.zeros_like(self.m) if self.half else None
        wide = layout.sparse_width if options.sparse else 0
        self.anchor = torch.zeros(layout.world * wide, dtype=like.dtype, device=like.device)
        self.velocity = torch.zeros(wide, dtype=like.dtype, device=like.device)
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
        return named if self.master is None else {**named, "master": self.master}

    def loaded(self) -> None:
        """Called when the tensors have been written: nothing is derived from them."""

    def abandon(self) -> None:
        """Nothing is ever under way between two steps."""

    def prepare(self) -> None:
        """Nothing has to be known before a step."""

    def digest(self, *, sparse: bool) -> int:
        """A number that is equal on workers which agree on what has to be equal."""
        buckets = self.layout.buckets[self.layout.sparse if sparse else 0 :]
        weights = [self.buckets.weight(s.index) for bucket in buckets for s in bucket.slots]
        return checksum([self.anchor, *weights] if sparse else weights)

    def pull(self) -> None:
        """Takes over weights that were changed outside of the optimizer."""
        if self.master is not None:
            for b, rows in enumerate(self.whole(self.master)):
                self._pull(b, rows)

    def _pull(self, b: int, rows: Tensor) -> None:
        for slot in self.layout.buckets[b].slots:
            flat = self.buckets.weight(slot.index).reshape(-1)
            for held, master in pieces(flat, rows, slot):
                take_over(master, held)

    def _set_anchor(self) -> None:
        if self.master is not None:
            self.anchor.copy_(self.master[: self.anchor.numel()])
            return
        for bucket, rows in zip(self.layout.buckets, self.whole(self.anchor), strict=False):
            for slot in bucket.slots:
                pack(self.buckets.weight(slot.index).view(-1), rows, slot)

    def dense_step(
        self, step: int, grads: Sequence[Tensor], factor: float | None, *, before_sparse: bool
    ) -> None:
        """One step of dense AdamS, done by every worker for all weights from the mean gradients."""
        del step, factor, before_sparse
        every = range(len(self.layout.buckets))
        for work in self._gather(every, grads):
            work.wait()
        self._move(own=(), mean=every, factor=None)

    def _gather(self, which: Sequence[int], grads: Sequence[Tensor]) -> list[Pending]:
        """Begins to gather the mean gradients of these buckets into ``buckets.sent``."""
        return [
            self.workers.gather(self.buckets.sent[b], grad)
            for b, grad in zip(which, grads, strict=True)
        ]

    def _move(self, *, own: Sequence[int], mean: Sequence[int], factor: float | None) -> None:
        """AdamS on the weights of some buckets by the worker's own gradients, clipped by ``factor``,
        and of others by the mean ones in ``buckets.sent``.
        """
        if self.master is not None:
            self._move_masters(own, mean, factor)
            return
        moments = self.whole(self.m)
        for b in (*own, *mean):
            bucket, rows = self.layout.buckets[b], moments[b]
            ws: list[Tensor] = []
            gs: list[Tensor] = []
            ms: list[Tensor] = []
            for slot in bucket.slots:
                pairs = parts(self.buckets.weight(slot.index).view(-1), rows, slot)
                ws += [w for w, _ in pairs]
                ms += [m for _, m in pairs]
                gs += self._parts_of_gradient(slot, None if b in own else self.buckets.sent[b])
            scale = factor if b in own else None
            update_all(ws, gs, ms, scale=scale, **adams_options(self.groups[bucket.group]))

    def _parts_of_gradient(self, slot: Slot, mean_NS: Tensor | None) -> list[Tensor]:
        """A parameter's gradient, cut as its owners' parts."""
        if mean_NS is not None:
            spans = [slot.part(owner) for owner in range(self.layout.world)]
            return [
                mean_NS[owner, slot.offset : slot.offset + end - begin]
                for owner, (begin, end) in enumerate(spans)
                if end > begin
            ]
        grad = self.buckets.grad(slot.index)
        if grad is None:
            grad = self.m.new_zeros(slot.numel)
        return list(grad.split(slot.length)) if slot.length else []

    def _move_masters(self, own: Sequence[int], mean: Sequence[int], factor: float | None) -> None:
        assert self.master is not None
        masters, moments = self.whole(self.master), self.whole(self.m)
        for b in (*own, *mean):
            bucket = self.layout.buckets[b]
            self._pull(b, masters[b])
            if b in own:
                self.buckets.fill(b)
                if factor is not None:
                    self.buckets.sent[b].mul_(factor)
            group = self.groups[bucket.group]
            update(masters[b], self.buckets.sent[b], moments[b], **adams_options(group))
            for slot in bucket.slots:
                write(self.buckets.weight(slot.index), masters[b], slot)

    def sparse_step(self, step: int, factor: float | None) -> None:
        """One step by the worker's own gradients, clipped by ``factor``, then an averaging.

        All workers' gradients of the dense buckets lie in ``buckets.received``, not yet clipped.
        """
        layout = self.layout
        if step == self.options.dense_steps:
            # Only now, so that a model may be loaded after the optimizer was built.
            self.pull()
            self._set_anchor()
        dense = range(layout.sparse, len(layout.buckets))
        works = self._gather(dense, [self.buckets.mean(b, factor) for b in dense])
        self._move(own=range(layout.sparse), mean=(), factor=factor)
        for work in works:
            work.wait()
        self._move(own=(), mean=dense, factor=None)
        self._average((step - self.options.dense_steps) % self.options.period)

    def parts(self, phase: int) -> list[Comb]:
        """The columns of each sparse bucket that are averaged in a phase of the cycle."""
        period, run = self.options.period, self.options.run
        chosen: list[Comb] = []
        for bucket in self.layout.buckets[: self.layout.sparse]:
            if self.options.cycle == "scattered":
                chosen.append(Comb(phase * run, bucket.width, run, period * run))
            else:
                low, high = (bucket.width * p // period for p in (phase, phase + 1))
                chosen.append(Comb(low, high, max(1, high - low), bucket.width))
        return chosen

    def _weights(self, b: int, part: Comb) -> Tensor:
        """This worker's weights of some columns of a bucket [N, K]; a copy, padding is zero."""
        if self.master is not None:
            return part.take(self.whole(self.master)[b])
        width = self.layout.buckets[b].width
        found = self.m.new_zeros(self.layout.world, part.count(0, width))
        for held, place in self._places(b, part, found):
            place.copy_(held)
        return found

    def _set_weights(self, b: int, part: Comb, values_NK: Tensor) -> None:
        if self.master is not None:
            master = self.whole(self.master)[b]
            part.put(master, values_NK)
            for slot in self.layout.buckets[b].slots:
                write(self.buckets.weight(slot.index), master, slot)
            return
        for held, place in self._places(b, part, values_NK):
            held.copy_(place)

    def _places(self, b: int, part: Comb, rows_NK: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views: of the parameters, and of the same weights in ``rows``."""
        found: list[tuple[Tensor, Tensor]] = []
        at = 0
        for slot in self.layout.buckets[b].slots:
            packed = rows_NK[:, at:]
            flat = self.buckets.weight(slot.index).view(-1)
            full, rest = divmod(slot.numel, slot.length) if slot.length else (0, 0)
            if full:
                rows = flat[: full * slot.length].view(full, slot.length)
                found += part.pairs(rows, packed[:full], slot.offset)
            if rest:
                found += part.pairs(flat[full * slot.length :], packed[full], slot.offset)
            at += part.count(slot.offset, slot.offset + slot.length)
        return found

    def _average(self, phase: int) -> None:
        """Averages movements since the last averaging, and moments, of a part of the cycle."""
        if not self.anchor.numel():
            return
        chosen = self.parts(phase)
        anchors = [c.take(rows) for c, rows in zip(chosen, self.whole(self.anchor), strict=False)]
        moved = [anchor - self._weights(b, chosen[b]) for b, anchor in enumerate(anchors)]
        kinds = [moved]
        if self.options.average_moments:
            held = zip(chosen, self.whole(self.m), strict=False)
            kinds.append([c.take(rows) for c, rows in held])
        sent_NB = self._encode([torch.cat(kind, dim=1) for kind in kinds])
        received_NB = torch.empty_like(sent_NB)
        self.workers.exchange(received_NB, sent_NB).wait()
        widths = [rows.shape[1] for rows in moved]
        means = [mean_rows(rows) for rows in self._decode(received_NB, sum(widths))]
        means[0] = self._outer(means[0], chosen)
        back_B = self._encode([mean_K.unsqueeze(0) for mean_K in means]).view(-1)
        self.workers.gather(sent_NB, back_B).wait()
        steps_NK, *moments_NK = self._decode(sent_NB, sum(widths))
        for b, (anchor, step) in enumerate(zip(anchors, steps_NK.split(widths, 1), strict=True)):
            # Every worker subtracts the same rounded step from the same anchor.
            anchor.sub_(step)
            chosen[b].put(self.whole(self.anchor)[b], anchor)
            self._set_weights(b, chosen[b], anchor)
        for mean_NK in moments_NK:
            for b, mean in enumerate(mean_NK.split(widths, 1)):
                chosen[b].put(self.whole(self.m)[b], mean)

    def _encode(self, kinds_NK: Sequence[Tensor]) -> Tensor:
        """Movements, and moments if they travel, as one buffer; each kind has its own scales."""
        return torch.cat([wire.encode(rows, self.options.wire) for rows in kinds_NK], dim=1)

    def _decode(self, sent_NB: Tensor, count: int) -> list[Tensor]:
        kinds = 2 if self.options.average_moments else 1
        return [
            wire.decode(part, count, self.options.wire, dtype=self.m.dtype)
            for part in sent_NB.chunk(kinds, dim=1)
        ]

    def _outer(self, delta_K: Tensor, chosen: Sequence[Comb]) -> Tensor:
        """The owner's Nesterov step; returns what every worker subtracts from its anchor."""
        rate, momentum = self.options.outer_rate, self.options.outer_momentum
        steps: list[Tensor] = []
        begin = 0
        for bucket, part in zip(self.layout.buckets, chosen, strict=False):
            held = self.velocity[bucket.begin : bucket.end]
            velocity = part.take(held)
            delta = delta_K[begin : begin + velocity.numel()]
            begin += velocity.numel()
            velocity.mul_(momentum).add_(delta)
            part.put(held, velocity)
            steps.append(torch.add(delta, velocity, alpha=momentum) * rate)
        return torch.cat(steps)

    def mean_weights(self) -> list[Tensor]:
        """The mean over the workers of every trained weight, as whole tensors; collective.

        One for each slot, in the order of ``layout``; what a user saves or evaluates.
        """
        self.pull()
        found: list[Tensor] = []
        for b, bucket in enumerate(self.layout.buckets):
            if self.master is not None:
                rows = self.whole(self.master)[b]
            else:
                rows = self.m.new_zeros(self.layout.world, bucket.width)
                for slot in bucket.slots:
                    pack(self.buckets.weight(slot.index).view(-1), rows, slot)
            received, whole = torch.empty_like(rows), torch.empty_like(rows)
            self.workers.exchange(received, rows).wait()
            self.workers.gather(whole, mean_rows(received)).wait()
            for slot in bucket.slots:
                mean = torch.empty_like(self.buckets.weight(slot.index))
                write(mean, whole, slot)
                found.append(mean)
        return found
