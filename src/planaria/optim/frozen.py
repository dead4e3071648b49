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

from planaria.optim import masks
from planaria.optim.adams import second_moment, update
from planaria.optim.buckets import Buckets, master_dtype
from planaria.optim.collectives import Pending, checksum, mean_rows
from planaria.optim.layout import Layout
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
    """State and steps of the families "frozen" and "moved"."""

    replicas_equal = True

    def __init__(
        self, buckets: Buckets, options: ScapeOptions, groups: Sequence[dict[str, Any]]
    ) -> None:
        self.buckets, self.options, self.groups = buckets, options, groups
        layout = self.layout = buckets.layout
        self.workers = buckets.workers
        like = buckets.sent[0]
        owners, width = layout.world, layout.width
        self.w = torch.zeros(width, dtype=like.dtype, device=like.device)
        self.m = torch.zeros_like(self.w)
        self.half = any(master_dtype(b.dtype) != b.dtype for b in layout.buckets)
        self.segments = segments(layout, options) if options.sparse else []
        self.count = sum(count for _, _, count in self.segments)
        self.sparse_wide = layout.sparse_width if options.sparse else 0
        self.a = torch.zeros(owners * self.sparse_wide, dtype=like.dtype, device=like.device)
        self.tau = torch.zeros(self.sparse_wide, dtype=torch.int32, device=like.device)
        # State is what an owner has chosen itself. The mask, which is what all have chosen, is on
        # its way at the end of a step, and nobody must wait for it in order to keep the state.
        self.chosen = torch.zeros(self.count, dtype=torch.int64, device=like.device)
        self.mask = torch.zeros(owners, self.count, dtype=torch.int64, device=like.device)
        self.code = (
            masks.code_name(options.density) if options.mask_code == "auto" else options.mask_code
        )
        size = masks.code_bytes(self.sparse_wide, self.count, self.code) if self.count else 0
        self._codes = torch.zeros(owners, size, dtype=torch.uint8, device=like.device)
        self._coming: Pending | None = None
        self._known = True
        self._addresses: Tensor | None = None
        if self.count:
            self._take(self._cycle(0))
        self.pull()

    # The flat state as one view for each bucket.
    def own(self, flat_W: Tensor) -> list[Tensor]:
        """Views [S] of an owner's flat state."""
        return [flat_W[b.begin : b.end] for b in self.layout.buckets if b.end <= flat_W.numel()]

    def whole(self, flat_NV: Tensor) -> list[Tensor]:
        """Views [N, S] of a worker's flat state of all owners' sparse columns."""
        owners = self.layout.world
        return [
            flat_NV[owners * b.begin : owners * b.end].view(owners, b.width)
            for b in self.layout.buckets[: self.layout.sparse]
            if flat_NV.numel()
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be restored, live; written only inside a step."""
        named = {"moment": self.m, "first": self.a, "skipped": self.tau, "chosen": self.chosen}
        return {**named, "master": self.w} if self.half else named

    def loaded(self) -> None:
        """Called when the tensors have been written: what was derived from them is dropped."""
        if self._coming is not None:
            self._coming.wait()
        self.abandon()
        if not self.half:
            self.pull()

    def abandon(self) -> None:
        """Forgets the mask under way without waiting for it; the next step gathers it again."""
        self._coming = self._addresses = None
        self._known = not self.count

    def digest(self) -> int:
        """A number that is equal on workers which agree on mask and weights."""
        self.settle()
        return checksum([self.mask, *(self.buckets.params[i] for i in self.layout.place)])

    def pull(self) -> None:
        """Takes over weights that were changed outside of the optimizer."""
        self.buckets.refresh(self.own(self.w))

    def dense_step(
        self, step: int, grads: Sequence[Tensor], factor: float | None, *, before_sparse: bool
    ) -> None:
        """One step of dense AdamS from the mean gradients [S] of each bucket.

        ``factor`` clips the workers' own gradients, as it already clipped the mean.
        """
        self.pull()
        row = self._own_row(self.buckets.sent)
        if self.options.buffer == "momentum":
            for b, a_b in enumerate(self.whole(self.a)):
                sent = self.buckets.sent[b]
                a_b.lerp_(sent if factor is None else sent * factor, 1 - self._betas(b)[0])
        self._adams(range(len(self.layout.buckets)), grads)
        self.buckets.publish(self.own(self.w))
        self.tau.zero_()
        if before_sparse:
            self._choose(step + 1, row)

    def sparse_step(self, step: int) -> None:
        """One sparse step; the workers' clipped gradients lie in ``buckets.sent``."""
        self.pull()
        layout, sent = self.layout, self.buckets.sent
        dense = range(layout.sparse, len(layout.buckets))
        works = [self.workers.exchange(self.buckets.received[b], sent[b]) for b in dense]
        moved = self._moved() if self.options.unsent == "moved" else None
        for b, a_b in enumerate(self.whole(self.a)):
            if self.options.buffer == "momentum":
                a_b.lerp_(sent[b], 1 - self._betas(b)[0])
            else:
                a_b.add_(sent[b])
        row = self._own_row(sent)
        self.settle()
        self._send_and_move(moved)
        for work in works:
            work.wait()
        self._adams(dense, [self.buckets.mean(b) for b in dense])
        self._return_weights(dense)
        if (step + 1) % self.options.refresh == 0:
            self._choose(step + 1, row)

    def _send_and_move(self, moved_V: Tensor | None) -> None:
        addresses_NK = self._addresses_of(self.mask)
        values_NK = self.a[addresses_NK]
        received_NK = torch.empty_like(values_NK)
        self.workers.exchange(received_NK, values_NK).wait()
        z_K = mean_rows(received_NK)
        if self.options.after_send == "clear" or self.options.buffer == "feedback":
            self.a[addresses_NK.view(-1)] = 0.0
        own_K = self.mask[self.workers.rank]
        if self.options.decay == "all" and self.options.unsent == "frozen":
            self._decay_everywhere()
        new_K = self._move(own_K, z_K)
        if moved_V is not None:
            self.w[: moved_V.numel()].copy_(moved_V)
        self.w[own_K] = new_K
        self.tau.add_(1)
        self.tau[own_K] = 0

    def _move(self, own_K: Tensor, z_K: Tensor) -> Tensor:
        """New weights of the chosen columns of this owner; also writes their moments."""
        moved: list[Tensor] = []
        bounds = torch.tensor([b.end for b in self.layout.buckets[: self.layout.sparse]])
        ends = torch.searchsorted(own_K, bounds.to(own_K.device)).tolist()
        begin = 0
        for b, end in enumerate(ends):
            columns, z = own_K[begin:end], z_K[begin:end]
            group = self.groups[self.layout.buckets[b].group]
            w, m = move(self.w[columns], self.m[columns], z, self.tau[columns], group, self.options)
            self.m[columns] = m
            moved.append(w)
            begin = end
        return torch.cat(moved)

    def _moved(self) -> Tensor:
        """This owner's sparse weights after a step by its own moment and its own gradient."""
        moved = self.w[: self.sparse_wide].clone()
        first = torch.cat([a_b[self.workers.rank] for a_b in self.whole(self.a)])
        rank = self.workers.rank
        for b, (w_b, m_b) in enumerate(zip(self.own(moved), self.own(first), strict=True)):
            update(w_b, self.buckets.sent[b][rank], m_b, **self._adams_options(b))
        return moved

    def _decay_everywhere(self) -> None:
        for b, bucket in enumerate(self.layout.buckets[: self.layout.sparse]):
            group = self._adams_options(b)
            factor = 1 - float(group["lr"]) * group["weight_decay"]
            self.w[bucket.begin : bucket.end].mul_(factor)
            for slot in bucket.slots:
                self.buckets.params[slot.index].detach().mul_(factor)

    def _adams(self, which: Sequence[int], grads: Sequence[Tensor]) -> None:
        w, m = self.own(self.w), self.own(self.m)
        for b, grad in zip(which, grads, strict=True):
            update(w[b], grad, m[b], **self._adams_options(b))

    def _return_weights(self, dense: Sequence[int]) -> None:
        layout = self.layout
        rows = self.own(self.w)
        if self.options.unsent == "moved":
            self.buckets.publish(rows)
            return
        dtypes = {bucket.dtype for bucket in layout.buckets[: layout.sparse]}
        wire = dtypes.pop() if len(dtypes) == 1 else self.w.dtype
        new_K = self.w[self.mask[self.workers.rank]].to(wire)
        all_NK = new_K.new_empty(layout.world, self.count)
        work = self.workers.gather(all_NK, new_K)
        self.buckets.publish(rows, only=dense)
        work.wait()
        self._scatter(all_NK)

    def _scatter(self, values_NK: Tensor) -> None:
        """Writes the chosen weights of all owners into the parameters."""
        slots = [
            (bucket.begin + slot.offset, slot)
            for bucket in self.layout.buckets[: self.layout.sparse]
            for slot in bucket.slots
        ]
        for owner in range(self.layout.world):
            edges: list[int] = []
            for begin, slot in slots:
                first, last = slot.part(owner)
                edges += [begin, begin + last - first]
            columns = self.mask[owner]
            places = torch.searchsorted(columns, torch.tensor(edges, device=columns.device))
            bounds = places.tolist()
            for (begin, slot), low, high in zip(slots, bounds[0::2], bounds[1::2], strict=True):
                if high > low:
                    target = self.buckets.params[slot.index].detach().view(-1)
                    places_K = columns[low:high] + (slot.part(owner)[0] - begin)
                    target.index_copy_(0, places_K, values_NK[owner, low:high].to(target.dtype))

    def _addresses_of(self, mask_NK: Tensor) -> Tensor:
        """Places of the columns in a flat state of all owners."""
        if self._addresses is None:
            buckets = self.layout.buckets[: self.layout.sparse]
            begins = torch.tensor([b.begin for b in buckets], device=mask_NK.device)
            widths = torch.tensor([b.width for b in buckets], device=mask_NK.device)
            which = torch.searchsorted(begins, mask_NK, right=True) - 1
            owner = torch.arange(self.layout.world, device=mask_NK.device).unsqueeze(1)
            first = (self.layout.world - 1) * begins[which] + owner * widths[which]
            self._addresses = first + mask_NK
        return self._addresses

    def _own_row(self, sent: Sequence[Tensor]) -> Tensor | None:
        if self.options.statistic != "gradient" or not self.count:
            return None
        rows = [sent[b][self.workers.rank] for b in range(self.layout.sparse)]
        return torch.cat(rows).abs()

    def _score(self, grad_V: Tensor | None) -> Tensor:
        if grad_V is not None:
            return grad_V
        score = torch.cat([a_b[self.workers.rank] for a_b in self.whole(self.a)]).abs_()
        if self.options.statistic == "aged":
            score.mul_((self.tau + 1).to(score.dtype).sqrt())
        return score

    def _cycle(self, step: int) -> Tensor:
        return torch.cat(
            [
                begin + masks.every(end - begin, count, phase=step)
                for begin, end, count in self.segments
            ]
        ).to(self.w.device)

    def _choose(self, step: int, grad_V: Tensor | None) -> None:
        """Makes this owner's next mask and starts sending it; it is needed at the next step."""
        if self.options.statistic == "cycle":
            self._take(self._cycle(step))
            return
        score = self._score(grad_V)
        chosen = torch.cat(
            [begin + masks.largest(score[begin:end], count) for begin, end, count in self.segments]
        )
        if self.workers.size == 1:
            self._take(chosen)
            return
        self.chosen.copy_(chosen)
        self._known = False
        self._gather()

    def _take(self, chosen_K: Tensor) -> None:
        """Makes these columns the mask of every owner; nothing has to be sent for that."""
        self.chosen.copy_(chosen_K)
        self.mask.copy_(chosen_K.expand(self.layout.world, -1))
        self._known, self._addresses = True, None

    def _gather(self) -> None:
        code = masks.encode(self.chosen, width=self.sparse_wide, code=self.code)
        self._coming = self.workers.gather(self._codes, code)

    def choose_again(self, step: int) -> None:
        """Chooses a mask from a restored state, whose own mask fits another number of workers."""
        if self.options.statistic == "gradient":
            self._take(self._cycle(step))
            return
        self._choose(step, None)

    def settle(self) -> None:
        """Brings the mask that all owners have chosen, sending for it where nobody has; collective.

        Nobody has after a load, or where the group under it was made anew: then on no worker.
        """
        if self._known:
            return
        if self.options.statistic == "cycle" or self.workers.size == 1:
            self._take(self.chosen)
            return
        if self._coming is None:
            self._gather()
        assert self._coming is not None
        self._coming.wait()
        self._coming = self._addresses = None
        self.mask.copy_(
            masks.decode(self._codes, width=self.sparse_wide, count=self.count, code=self.code)
        )
        self._known = True

    def _betas(self, b: int) -> tuple[float, float]:
        return self.groups[self.layout.buckets[b].group]["betas"]

    def _adams_options(self, b: int) -> dict[str, Any]:
        return adams_options(self.groups[self.layout.buckets[b].group])


def move(
    w_K: Tensor,
    m_K: Tensor,
    z_K: Tensor,
    tau_K: Tensor,
    group: dict[str, Any],
    options: ScapeOptions,
) -> tuple[Tensor, Tensor]:
    """New weights and moments of chosen columns from the mean ``z`` of what was sent for them."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    skipped = tau_K.to(w_K.dtype)
    past = m_K * torch.pow(beta1, skipped)
    if options.buffer == "feedback":
        g, m = z_K, torch.lerp(past, z_K, 1 - beta1)
    elif options.after_send == "clear":
        g, m = z_K / (1 - beta1), past * beta1 + z_K
    else:
        g, m = (z_K - past * beta1) / (1 - beta1), z_K
    if options.buffer == "momentum":
        # After many skipped steps the past has faded and all of z would count as this step's
        # gradient, ten times its size; the limit is where nu equals z^2 without a past.
        limit = z_K.abs() / math.sqrt(1 - beta2)
        g = torch.where(tau_K >= options.clamp_after, g.clamp(-limit, limit), g)
    denominator = second_moment(past, g, beta2=beta2).sqrt_().add_(group["eps"])
    scale = (skipped + 1).pow(options.step_scale).clamp(max=options.scale_cap)
    decay = 1 - rate * group["weight_decay"]
    if options.decay == "moved" or options.unsent == "moved":
        w_K = w_K * decay
    elif options.decay == "lazy":
        w_K = w_K * torch.pow(decay, skipped + 1)
    return w_K.addcdiv(m * scale, denominator, value=-rate), m.clone()
