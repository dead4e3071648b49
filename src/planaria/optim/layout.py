"""Who owns which rows of which parameter, and where they lie in a flat buffer.

Every parameter is cut along its dim 0 as ``torch.chunk`` and DTensor's ``Shard(0)`` cut it, so an
owner's state is a DTensor that ``torch.distributed.checkpoint`` can re-shard. A bucket is a
contiguous buffer of shape [N, S]: row r holds the parts of owner r of all its parameters, one after
another, each padded with zeros to one length. That is also the layout in which FSDP2 hands
gradients to a custom reduce-scatter.

Shapes: N owners, S columns of one bucket, W columns of all buckets together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def fingerprint(text: str) -> int:
    """A number below 2**52, exact in a float64, that differs where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in its bucket."""

    index: int
    """Position of the parameter among all parameters of the optimizer."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    rows: int
    """Rows of dim 0 of one part, rounded up."""
    length: int
    """Elements of one part, padding included."""
    offset: int
    """First column of the parameter in its bucket."""

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return math.prod(self.shape)

    def part(self, owner: int) -> tuple[int, int]:
        """First and last-plus-one flat element of the part of one owner; equal if it is empty."""
        begin = min(owner * self.length, self.numel)
        return begin, min(begin + self.length, self.numel)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group and dtype that travel together."""

    group: int
    """Position of their parameter group."""
    dtype: torch.dtype
    """Dtype of the parameters."""
    dense: bool
    """Whether the bucket is always sent whole."""
    slots: tuple[Slot, ...]
    """Places of the parameters, in the order of their columns."""
    begin: int
    """First column of the bucket among all buckets."""

    @cached_property
    def width(self) -> int:
        """Columns S of the bucket."""
        return sum(slot.length for slot in self.slots)

    @property
    def end(self) -> int:
        """Last column of the bucket among all buckets, plus one."""
        return self.begin + self.width


@dataclass(frozen=True)
class Layout:
    """All buckets, in the order in which they are sent."""

    world: int
    """Owners N."""
    buckets: tuple[Bucket, ...]
    """Buckets in sending order."""

    @cached_property
    def width(self) -> int:
        """Columns W of all buckets: elements of one owner's state, padding included."""
        return sum(bucket.width for bucket in self.buckets)

    @cached_property
    def sparse(self) -> int:
        """Buckets that are not always sent whole; they come first."""
        return sum(not bucket.dense for bucket in self.buckets)

    @cached_property
    def sparse_width(self) -> int:
        """Columns of those buckets."""
        return sum(bucket.width for bucket in self.buckets if not bucket.dense)

    @cached_property
    def spans(self) -> list[list[tuple[Slot, int, int, int]]]:
        """For each owner and sparse slot: the slot, its first column, the column behind the owner's
        part, and what a column is less than the element that lies there.
        """
        found: list[list[tuple[Slot, int, int, int]]] = [[] for _ in range(self.world)]
        for bucket in self.buckets[: self.sparse]:
            for slot in bucket.slots:
                begin = bucket.begin + slot.offset
                for owner, spans in enumerate(found):
                    first, last = slot.part(owner)
                    spans.append((slot, begin, begin + last - first, first - begin))
        return found

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """For each parameter, its bucket and its slot in that bucket."""
        return {
            slot.index: (b, s)
            for b, bucket in enumerate(self.buckets)
            for s, slot in enumerate(bucket.slots)
        }

    def digest(self) -> int:
        """A number below 2**52 that is equal where the layout is (exact in a float64)."""
        return fingerprint(repr((self.world, self.buckets)))


def build(
    params: Sequence[tuple[int, int, Tensor]],
    *,
    world: int,
    bucket_bytes: int,
    dense: Callable[[int, int, Tensor], bool],
) -> Layout:
    """The layout of ``(index, group, parameter)`` triples.

    Parameters are placed last to first, because backward makes gradients in that order and a bucket
    is sent when it is full. ``dense(index, group, parameter)`` says which ones are always sent
    whole; they get buckets of their own, behind all others.
    """
    filling: dict[tuple[int, torch.dtype, bool], list[Slot]] = {}
    closed: list[tuple[tuple[int, torch.dtype, bool], list[Slot]]] = []
    for index, group, param in reversed(params):
        key = (group, param.dtype, dense(index, group, param))
        slots = filling.setdefault(key, [])
        rows = math.ceil(param.shape[0] / world)
        length = rows * math.prod(param.shape[1:])
        offset = slots[-1].offset + slots[-1].length if slots else 0
        slots.append(Slot(index, tuple(param.shape), rows, length, offset))
        if (offset + length) * world * param.element_size() >= bucket_bytes:
            closed.append((key, filling.pop(key)))
    closed.extend(filling.items())
    closed.sort(key=lambda item: item[0][2])
    buckets: list[Bucket] = []
    begin = 0
    for (group, dtype, is_dense), slots in closed:
        bucket = Bucket(group, dtype, is_dense, tuple(slots), begin)
        begin = bucket.end
        buckets.append(bucket)
    return Layout(world, tuple(buckets))


def pieces(flat: Tensor, rows: Tensor, slot: Slot) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views: of a flat tensor [numel], and of the place of the same weights in ``rows``.

    ``rows`` [N, S] is a bucket's. At most two pairs, each of one shape: [F, length] for the owners
    whose part is full, [rest] for the one behind them. Padding is in neither.
    """
    full, rest = divmod(slot.numel, slot.length) if slot.length else (0, 0)
    block = rows[:, slot.offset : slot.offset + slot.length]
    found: list[tuple[Tensor, Tensor]] = []
    if full:
        found.append((flat[: full * slot.length].view(full, slot.length), block[:full]))
    if rest:
        found.append((flat[full * slot.length :], block[full, :rest]))
    return found


def parts(flat: Tensor, rows: Tensor, slot: Slot) -> list[tuple[Tensor, Tensor]]:
    """As :func:`pieces`, one pair for each owner, so that contiguous rows give contiguous views."""
    if not slot.length:
        return []
    return [
        (own, rows[owner, slot.offset : slot.offset + own.numel()])
        for owner, own in enumerate(flat.split(slot.length))
        if own.numel()
    ]


def pack(flat: Tensor | None, rows: Tensor, slot: Slot) -> None:
    """Writes a flat tensor [numel] into its columns of ``rows`` [N, S]; zeros for ``None``."""
    block = rows[:, slot.offset : slot.offset + slot.length]
    if flat is None:
        block.zero_()
        return
    for whole, place in pieces(flat, rows, slot):
        place.copy_(whole)
    if slot.numel < slot.length * rows.shape[0]:
        full, rest = divmod(slot.numel, slot.length)
        block[full, rest:].zero_()
        block[full + 1 :].zero_()


def unpack(rows: Tensor, flat: Tensor, slot: Slot) -> None:
    """Writes the columns of a parameter in ``rows`` [N, S] into a whole flat tensor [numel]."""
    for whole, place in pieces(flat, rows, slot):
        whole.copy_(place)


@dataclass(frozen=True)
class Comb:
    """Runs of neighbouring columns at equal distances: a part of a bucket."""

    begin: int
    """First column of the first run."""
    end: int
    """Column before which the last run ends."""
    run: int
    """Columns of a run."""
    step: int
    """Columns from the beginning of one run to that of the next."""

    def spans(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """What of it lies in the columns ``first`` to ``last``, as (start, runs, columns of a run).

        Starts are counted from ``first``. At most three: a run that begins before, whole runs, and
        one that ends behind.
        """
        last = min(last, self.end)
        start = self.begin + max(0, (first - self.begin - self.run) // self.step + 1) * self.step
        found: list[tuple[int, int, int]] = []
        if start < first:
            found.append((0, 1, min(start + self.run, last) - first))
            start += self.step
        whole = max(0, (last - self.run - start) // self.step + 1)
        if whole:
            found.append((start - first, whole, self.run))
            start += whole * self.step
        found.append((start - first, 1, last - start))
        return [span for span in found if span[2] > 0]

    def count(self, first: int, last: int) -> int:
        """Columns of it among the columns ``first`` to ``last``."""
        return sum(runs * length for _, runs, length in self.spans(first, last))

    def pairs(self, held: Tensor, packed: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views of one shape: of its columns in ``held``, and of these in ``packed``.

        ``held`` [..., L] are the columns from ``first`` on, ``packed`` [..., at least K] only those
        of the comb.
        """
        found: list[tuple[Tensor, Tensor]] = []
        at = 0
        for start, runs, length in self.spans(first, first + held.shape[-1]):
            step = self.step if runs > 1 else length
            wide = held.narrow(-1, start, (runs - 1) * step + length).unfold(-1, length, step)
            narrow = packed.narrow(-1, at, runs * length).unflatten(-1, (runs, length))
            found.append((wide, narrow))
            at += runs * length
        return found

    def take(self, held: Tensor) -> Tensor:
        """A copy of its columns of a whole bucket [..., S], one after another [..., K]."""
        packed = held.new_empty((*held.shape[:-1], self.count(0, held.shape[-1])))
        for wide, narrow in self.pairs(held, packed, 0):
            narrow.copy_(wide)
        return packed

    def put(self, held: Tensor, packed: Tensor) -> None:
        """Writes what :meth:`take` gives."""
        for wide, narrow in self.pairs(held, packed, 0):
            wide.copy_(narrow)


def local_shape(slot: Slot, owner: int) -> tuple[int, ...]:
    """Shape of one owner's part of a parameter, without padding."""
    begin = min(owner * slot.rows, slot.shape[0])
    return (min(begin + slot.rows, slot.shape[0]) - begin, *slot.shape[1:])
