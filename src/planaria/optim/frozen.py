"""The paper's family: first moments are sent where the mask says, replicas stay equal.

Shapes: N owners, S columns of a bucket, W columns of all buckets, V columns of the sparse ones, K
chosen columns of each owner.

Source: arXiv 2607.01678 for delayed and partitioned masks taken from the first moment and for the
second moment rebuilt from one sparse buffer; the rest is our reading of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planaria.optim import masks, wire
from planaria.optim.adams import update, update_all
from planaria.optim.buckets import Buckets, master_dtype, take_over
from planaria.optim.collectives import checksum, mean_rows
from planaria.optim.layout import Layout, pieces
from planaria.optim.masks import Coming, Mask, Score
from planaria.optim.moving import BLOCK, faded, move
from planaria.optim.options import ScapeOptions


def adams_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that the update takes."""
    return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}


def segments(layout: Layout, options: ScapeOptions) -> list[tuple[int, int, int]]:
    """First column, last column plus one and count of chosen columns of each unit of the choice."""
    sparse = layout.buckets[: layout.sparse]
    if options.k_scope == "shard":
        bounds = [(0, layout.sparse_width)]
    elif options.k_scope == "bucket":
        bounds = [(bucket.begin, bucket.end) for bucket in sparse]
    else:
        bounds = [
            (bucket.begin + slot.offset, bucket.begin + slot.offset + slot.length)
            for bucket in sparse
            for slot in bucket.slots
        ]
    return [
        (begin, end, max(1, math.ceil(options.density * (end - begin))))
        for begin, end in bounds
        if end > begin
    ]


class Frozen:
    """State and steps of the families "frozen" and "moved".

    ``chosen`` is this owner's choice, made at the end of a step for the next one. The mask, which
    is every owner's choice, is gathered from it and is no state: who restores ``chosen`` has it
    gathered once more.
    """

    replicas_equal = True

    def __init__(
        self, buckets: Buckets, options: ScapeOptions, groups: Sequence[dict[str, Any]]
    ) -> None:
        self.buckets, self.options, self.groups = buckets, options, groups
        layout = self.layout = buckets.layout
        self.workers = buckets.workers
        like = buckets.sent[0]
        owners, width = layout.world, layout.width
        self.m = torch.zeros(width, dtype=like.dtype, device=like.device)
        self.half = any(master_dtype(b.dtype) != b.dtype for b in layout.buckets)
        self.master = torch.zeros_like(self.m) if self.half else None
        self.segments = segments(layout, options) if options.sparse else []
        self.count = sum(count for _, _, count in self.segments)
        self.wide = layout.sparse_width if options.sparse else 0
        self.a_NV = torch.zeros(owners, self.wide, dtype=like.dtype, device=like.device)
        # A step's number, exact below 2^24 also in float32, which the scores are made in.
        self.since = torch.zeros(self.wide, dtype=like.dtype, device=like.device)
        # Where weights are rounded too, a sum of rounded movements would drift from its master.
        self.coded = options.sparse and options.wire != "float32" and self.master is None
        self.left = torch.zeros(self.wide if self.coded else 0, dtype=like.dtype)
        self.left = self.left.to(like.device)
        self.chosen = torch.zeros(self.count, dtype=torch.int32, device=like.device)
        self.code = (
            masks.code_name(options.density) if options.mask_code == "auto" else options.mask_code
        )
        self._mask: Mask | None = None
        self._coming: Coming | None = None
        if self.count:
            self.chosen.copy_(self._cycle(0))
        self.pull()

    # The flat state as one view for each bucket.
    def own(self, flat_W: Tensor) -> list[Tensor]:
        """Views [S] of an owner's flat state."""
        return [flat_W[b.begin : b.end] for b in self.layout.buckets if b.end <= flat_W.numel()]

    def whole(self, rows_NV: Tensor) -> list[Tensor]:
        """Views [N, S] of a worker's state of all owners' sparse columns."""
        sparse = self.layout.buckets[: self.layout.sparse]
        return [rows_NV[:, b.begin : b.end] for b in sparse if rows_NV.numel()]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be restored, live."""
        named = {"moment": self.m, "first": self.a_NV, "since": self.since, "chosen": self.chosen}
        if self.coded:
            named["left"] = self.left
        return named if self.master is None else {**named, "master": self.master}

    def loaded(self) -> None:
        """Called when the tensors have been written: what was derived from them is dropped."""
        if self._coming is not None:
            self._coming.work.wait()
        self.abandon()

    def abandon(self) -> None:
        """Forgets the mask, also one under way, without waiting; the next step gathers it again."""
        self._coming = self._mask = None

    def digest(self, *, sparse: bool) -> int:
        """A number that is equal on workers which agree on weights and, if ``sparse``, on mask."""
        weights = [self.buckets.weight(index) for index in self.layout.place]
        return checksum([self.mask().columns, *weights] if sparse else weights)

    def pull(self) -> None:
        """Takes over weights that were changed outside of the optimizer."""
        if self.master is not None:
            for b, master in enumerate(self.own(self.master)):
                self.buckets.refresh(b, master)

    def dense_step(
        self, step: int, grads: Sequence[Tensor], factor: float | None, *, before_sparse: bool
    ) -> None:
        """One step of dense AdamS from the mean gradients [S] of each bucket.

        ``factor`` clips the workers' own gradients, as it already clipped the mean.
        """
        row = self._own_gradients(factor) if self._by_gradient and before_sparse else None
        if self.options.buffer == "momentum":
            self._take_in(factor)
        every = range(len(self.layout.buckets))
        self._adams(every, grads)
        self._publish(every)
        self.since.fill_(step + 1)
        if before_sparse:
            self._choose(step + 1, row)

    def prepare(self) -> None:
        """Begins to gather the mask where that was not begun at the end of the step before.

        All workers are alike in this: after a load, and where the group under it was made anew.
        """
        if self.count and not self._holds(self._mask) and not self._holds(self._coming):
            self._call_mask()

    def sparse_step(self, step: int, factor: float | None) -> None:
        """One sparse step from this worker's gradients, clipped by ``factor``.

        All workers' gradients of the dense buckets lie in ``buckets.received``, not yet clipped.
        """
        dense = range(self.layout.sparse, len(self.layout.buckets))
        if self.options.unsent == "moved" or self._by_gradient:
            row = self._own_gradients(factor)
        else:
            row = None
        moved = self._moved(row) if self.options.unsent == "moved" and row is not None else None
        self._take_in(factor)
        moves = self._send_and_move(step) if self.count else None
        self._adams(dense, [self.buckets.mean(b, factor) for b in dense])
        self._return_weights(dense, moves, moved)
        if self.count and (step + 1) % self.options.refresh == 0:
            self._choose(step + 1, row if self._by_gradient else None)

    @property
    def _by_gradient(self) -> bool:
        return self.options.statistic == "gradient" and self.count > 0

    def _take_in(self, factor: float | None) -> None:
        """Takes this worker's gradients into its first moments, or sums them up."""
        for b, rows in enumerate(self.whole(self.a_NV)):
            weight = 1 - self._betas(b)[0]
            for slot in self.layout.buckets[b].slots:
                grad = self.buckets.grad(slot.index)
                if grad is None:
                    grad = rows.new_zeros(()).expand(slot.numel)
                elif factor is not None:
                    grad = grad.to(rows.dtype) * factor
                else:
                    grad = grad.to(rows.dtype)
                for part, a in pieces(grad, rows, slot):
                    if self.options.buffer == "momentum":
                        a.lerp_(part, weight)
                    else:
                        a.add_(part)

    def _own_gradients(self, factor: float | None) -> Tensor:
        """This worker's gradients of its own sparse columns [V]."""
        row = self.a_NV.new_zeros(self.wide)
        for bucket in self.layout.buckets[: self.layout.sparse]:
            for slot in bucket.slots:
                grad = self.buckets.grad(slot.index)
                if grad is not None:
                    begin, end = slot.part(self.workers.rank)
                    at = bucket.begin + slot.offset
                    row[at : at + end - begin] = grad[begin:end]
        return row if factor is None else row.mul_(factor)

    def _send_and_move(self, step: int) -> tuple[Tensor, Tensor]:
        """Exchanges the chosen first moments; returns this owner's new and old chosen weights [K]."""
        mask = self.mask()
        addresses = mask.addresses(self.wide)
        flat = self.a_NV.view(-1)
        values_NK = flat.index_select(0, addresses).view(mask.columns.shape)
        sent_NB = wire.encode(values_NK, self.options.wire)
        received_NB = torch.empty_like(sent_NB)
        self.workers.exchange(received_NB, sent_NB).wait()
        z_K = mean_rows(self._decode(received_NB, self.count))
        if self.options.after_send == "clear" or self.options.buffer == "feedback":
            if self.options.wire == "float32":
                flat.index_fill_(0, addresses, 0.0)
            else:
                # What rounding left out stays with its worker and is sent the next time.
                rest_NK = values_NK - self._decode(sent_NB, self.count)
                flat.index_copy_(0, addresses, rest_NK.view(-1))
        own_K = mask.columns[self.workers.rank]
        if self.options.decay == "all" and self.options.unsent == "frozen":
            self._decay_everywhere()
        old_K = self._weights_at(mask)
        new_K = old_K.clone()
        self._move(own_K, new_K, z_K, step)
        if self.master is not None:
            self.master.index_copy_(0, own_K, new_K)
        self.since.index_fill_(0, own_K, step + 1)
        return new_K, old_K

    def _weights_at(self, mask: Mask) -> Tensor:
        """This owner's chosen weights [K]; masters where there are some."""
        own_K = mask.columns[self.workers.rank]
        held_K = self.m.new_zeros(own_K.numel())
        for place in mask.places(self.workers.rank, self.layout):
            weight = self.buckets.weight(place.slot.index).view(-1)
            held_K[place.low : place.high] = weight.index_select(0, place.elements)
        if self.master is None:
            return held_K
        found_K = self.master[own_K]
        for b, begin, end in self._bounds(own_K):
            dtype = self.layout.buckets[b].dtype
            take_over(found_K[begin:end], held_K[begin:end].to(dtype))
        return found_K

    def _bounds(self, own_K: Tensor) -> list[tuple[int, int, int]]:
        """Each sparse bucket with the first and last-plus-one of the columns that lie in it."""
        ends = torch.tensor([b.end for b in self.layout.buckets[: self.layout.sparse]])
        found = torch.searchsorted(own_K, ends.to(own_K.device)).tolist()
        edges = zip([0, *found[:-1]], found, strict=True)
        return [(b, begin, end) for b, (begin, end) in enumerate(edges)]

    def _move(self, own_K: Tensor, w_K: Tensor, z_K: Tensor, step: int) -> None:
        """Moves the chosen weights ``w`` of this owner in place, and their moments."""
        tau_K = torch.rsub(self.since.index_select(0, own_K), step)
        oldest = int(tau_K.max())
        for b, first, last in self._bounds(own_K):
            group = self.groups[self.layout.buckets[b].group]
            for begin in range(first, last, BLOCK):
                part = slice(begin, min(begin + BLOCK, last))
                columns, tau = own_K[part], tau_K[part]
                m = faded(self.m, columns, tau, group["betas"][0], oldest)
                move(w_K[part], m, z_K[part], tau, group, self.options)
                self.m.index_copy_(0, columns, m)

    def _moved(self, grads_V: Tensor) -> Tensor:
        """This owner's sparse weights after a step by its own moment and its own gradient."""
        self.pull()
        rows = [self.buckets.row(b).to(self.m.dtype) for b in range(self.layout.sparse)]
        moved = torch.cat(rows) if self.master is None else self.master[: self.wide].clone()
        first = self.a_NV[self.workers.rank].clone()
        for b, (w_b, m_b) in enumerate(zip(self.own(moved), self.own(first), strict=True)):
            bucket = self.layout.buckets[b]
            update(w_b, grads_V[bucket.begin : bucket.end], m_b, **self._adams_options(b))
        return moved

    def _decay_everywhere(self) -> None:
        for b, bucket in enumerate(self.layout.buckets[: self.layout.sparse]):
            group = self._adams_options(b)
            factor = 1 - float(group["lr"]) * group["weight_decay"]
            for slot in bucket.slots:
                self.buckets.weight(slot.index).mul_(factor)

    def _adams(self, which: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Dense AdamS on this owner's part of some buckets."""
        moments = self.own(self.m)
        masters = None if self.master is None else self.own(self.master)
        for b, grad in zip(which, grads, strict=True):
            if masters is not None:
                self.buckets.refresh(b, masters[b])
                update(masters[b], grad, moments[b], **self._adams_options(b))
                continue
            slots = self.layout.buckets[b].slots
            owns = [self.buckets.own(slot) for slot in slots]
            spans = [
                slice(slot.offset, slot.offset + own.numel())
                for slot, own in zip(slots, owns, strict=True)
            ]
            update_all(
                owns,
                [grad[span] for span in spans],
                [moments[b][span] for span in spans],
                **self._adams_options(b),
            )

    def _publish(self, which: Sequence[int]) -> None:
        """Gathers the new weights of some buckets."""
        if self.master is not None:
            masters = self.own(self.master)
            self.buckets.publish({b: masters[b] for b in which})
        elif self.workers.size > 1:
            self.buckets.publish({b: self.buckets.row(b) for b in which})

    def _return_weights(
        self,
        dense: Sequence[int],
        moves: tuple[Tensor, Tensor] | None,
        moved_V: Tensor | None,
    ) -> None:
        layout = self.layout
        if moves is None or self._mask is None:
            self._publish(dense)
            return
        new_K, old_K = moves
        own_K = self._mask.columns[self.workers.rank]
        if moved_V is not None:
            moved_V[own_K] = new_K
            if self.coded:
                self._return_all_movements(dense, moved_V)
                return
            if self.master is not None:
                self.master[: self.wide] = moved_V
            self.buckets.publish(dict(enumerate(self.own(moved_V)[: layout.sparse])))
            self._publish(dense)
            return
        if self.coded:
            sent = self._code(new_K - old_K, own_K)
        else:
            dtypes = {bucket.dtype for bucket in layout.buckets[: layout.sparse]}
            sent = new_K.to(dtypes.pop() if len(dtypes) == 1 else self.m.dtype)
        found = sent.new_empty(layout.world, sent.numel())
        work = self.workers.gather(found, sent)
        self._publish(dense)
        work.wait()
        found_NK = self._decode(found, self.count) if self.coded else found
        for owner in range(layout.world):
            for place in self._mask.places(owner, layout):
                target = self.buckets.weight(place.slot.index).view(-1)
                values = found_NK[owner, place.low : place.high].to(target.dtype)
                if self.coded:
                    target.index_add_(0, place.elements, values)
                else:
                    target.index_copy_(0, place.elements, values)

    def _return_all_movements(self, dense: Sequence[int], moved_V: Tensor) -> None:
        """Gathers how far all sparse weights moved and adds it to the parameters."""
        rows = [self.buckets.row(b) for b in range(self.layout.sparse)]
        sent_B = self._code(moved_V - torch.cat(rows), None)
        found_NB = sent_B.new_empty(self.layout.world, sent_B.numel())
        work = self.workers.gather(found_NB, sent_B)
        self._publish(dense)
        work.wait()
        found_NV = self._decode(found_NB, self.wide)
        for bucket in self.layout.buckets[: self.layout.sparse]:
            columns = found_NV[:, bucket.begin : bucket.end]
            for slot in bucket.slots:
                flat = self.buckets.weight(slot.index).view(-1)
                for held, movement in pieces(flat, columns, slot):
                    held.add_(movement)

    def _code(self, movement: Tensor, which: Tensor | None) -> Tensor:
        """How far these columns of the owner, or all of them, moved, as it travels.

        What rounding leaves out is added to their next movement.
        """
        # Reading and writing by an index tensor in brackets takes half as long again.
        whole = movement.add_(self.left if which is None else self.left.index_select(0, which))
        sent = wire.encode(whole.unsqueeze(0), self.options.wire)
        rest = torch.sub(whole, self._decode(sent, whole.numel())[0])
        self.left.copy_(rest) if which is None else self.left.index_copy_(0, which, rest)
        return sent.view(-1)

    def _decode(self, sent_NB: Tensor, count: int) -> Tensor:
        return wire.decode(sent_NB, count, self.options.wire, dtype=self.m.dtype)

    def _score(self, step: int, row_V: Tensor | None) -> Score:
        """What the mask of a step takes the largest of."""
        if row_V is not None:
            return Score(row_V)
        own_V = self.a_NV[self.workers.rank]
        return (
            Score(own_V, self.since, step + 1) if self.options.statistic == "aged" else Score(own_V)
        )

    def _cycle(self, step: int) -> Tensor:
        # One phase after the other, whatever the distance of two masks: in larger strides some
        # columns would never have their turn.
        phase = step // self.options.refresh
        return torch.cat(
            [
                begin + masks.every(end - begin, count, phase=phase)
                for begin, end, count in self.segments
            ]
        ).to(self.m.device)

    def _choose(self, step: int, row_V: Tensor | None) -> None:
        """Makes this owner's choice for a step and begins to gather all of them."""
        if not self.count:
            return
        if self.options.statistic == "cycle":
            self.chosen.copy_(self._cycle(step))
        else:
            score = self._score(step, row_V)
            found = [
                masks.largest_by(score, begin, end, count) for begin, end, count in self.segments
            ]
            self.chosen.copy_(torch.cat(found))
        self._mask = self._coming = None
        self._call_mask()

    def choose_again(self, step: int) -> None:
        """Chooses from a restored state, whose own choice fits another number of workers."""
        if not self.count:
            return
        if self.options.statistic == "gradient":
            self.chosen.copy_(self._cycle(step))
            self._mask = self._coming = None
        else:
            self._choose(step, None)

    def _holds(self, held: Mask | Coming | None) -> bool:
        # A state may be written in place without a word.
        return held is not None and held.version == self.chosen._version

    def _call_mask(self) -> None:
        own = self.chosen.to(torch.int64)
        if self.workers.size == 1 or self.options.statistic == "cycle":
            self._mask = Mask(self.chosen._version, own.expand(self.layout.world, -1))
            return
        code = masks.encode(own, width=self.wide, code=self.code)
        # New at each call: what a group that has died had under way may still be written.
        codes = code.new_empty(self.layout.world, code.numel())
        self._coming = Coming(self.chosen._version, self.workers.gather(codes, code), codes)

    def mask(self) -> Mask:
        """Every owner's choice for this step; waits for it."""
        self.prepare()
        if not self._holds(self._mask):
            coming, self._coming = self._coming, None
            assert coming is not None
            coming.work.wait()
            columns = masks.decode(coming.codes, width=self.wide, count=self.count, code=self.code)
            self._mask = Mask(coming.version, columns)
        assert self._mask is not None
        return self._mask

    def _betas(self, b: int) -> tuple[float, float]:
        return self.groups[self.layout.buckets[b].group]["betas"]

    def _adams_options(self, b: int) -> dict[str, Any]:
        return adams_options(self.groups[self.layout.buckets[b].group])
