"""Which columns of an owner's part are sent, and how a choice travels.

Shapes: N owners, W columns, K chosen columns of each owner, B bytes of one owner's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from planaria.optim.collectives import Pending
from planaria.optim.layout import Layout, Slot

# Twelve bits name a column within a chunk; two bytes hold a chunk's count.
CHUNK = 1 << 12


@dataclass(frozen=True)
class Place:
    """Chosen columns of one owner that lie in one parameter."""

    slot: Slot
    """Of the parameter."""
    low: int
    """Position of the first of them among the owner's chosen columns."""
    high: int
    """Position of the last, plus one."""
    elements: Tensor
    """The elements of the flat parameter that they are."""


@dataclass(frozen=True)
class Mask:
    """Every owner's choice, valid for one step."""

    version: int
    """Counter, as torch keeps it for each tensor, of the choice that it was made from."""
    columns: Tensor
    """Each row ascending."""
    _places: dict[int, list[Place]] = field(default_factory=dict[int, list[Place]])

    def addresses(self, width: int) -> Tensor:
        """Where the columns of all owners lie in a flat [N * width] tensor, as [N * K]."""
        owners = self.columns.shape[0]
        if owners == 1:
            return self.columns.reshape(-1)
        starts = torch.arange(owners, device=self.columns.device).unsqueeze(1) * width
        return (self.columns + starts).view(-1)

    def places(self, owner: int, layout: Layout) -> list[Place]:
        """In which parameters an owner's columns lie; those in padding lie in none."""
        if owner not in self._places:
            spans = layout.spans[owner]
            edges = [edge for _, begin, end, _ in spans for edge in (begin, end)]
            columns_K = self.columns[owner]
            found = torch.searchsorted(columns_K, torch.tensor(edges, device=columns_K.device))
            bounds = found.tolist()
            self._places[owner] = [
                Place(slot, low, high, columns_K[low:high] + more)
                for (slot, _, _, more), low, high in zip(
                    spans, bounds[0::2], bounds[1::2], strict=True
                )
                if high > low
            ]
        return self._places[owner]


@dataclass(frozen=True)
class Coming:
    """A mask under way."""

    version: int
    """As the mask's."""
    work: Pending
    """The gather."""
    codes: Tensor
    """What it fills, [N, B]."""


# One score in so many is looked at to guess the smallest one that is chosen: a prime, so that it
# falls on no period of rows.
STRIDE = 61

# Fewer columns than this are sorted out all at once; and so many are looked at at a time.
FEW = BLOCK = 1 << 16


@dataclass(frozen=True)
class Score:
    """What a choice takes the largest of: magnitudes, or squares times an age where there is one.

    A square that is too small for its dtype (in float32 of a number below 1e-19) counts as zero.
    """

    values: Tensor
    """Flat, on all columns."""
    since: Tensor | None = None
    """Numbers of the steps from which on ages count, of the dtype of ``values``."""
    now: int = 0
    """Number of the step to which they count."""

    def at(self, columns: slice, *, rooms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The scores [n] of some columns, in the first of two ``rooms`` of at least n, or new."""
        values = self.values[columns]
        score, ages = (
            (torch.empty_like(values), torch.empty_like(values))
            if rooms is None
            else (rooms[0][: values.numel()], rooms[1][: values.numel()])
        )
        if self.since is None:
            return torch.abs(values, out=score)
        now = torch.tensor(self.now, dtype=values.dtype, device=values.device)
        torch.sub(now, self.since[columns], out=ages)
        return torch.mul(values, values, out=score).mul_(ages)


def largest_by(score: Score, begin: int, end: int, count: int) -> Tensor:
    """As :func:`largest`, of the columns ``begin`` to ``end``.

    Scores are made block by block, and kept only where they may matter: a guess from every 61st
    leaves few candidates, and the choice among them is the choice among all, because each column
    that is not one scores less than ``count`` others. Where the guess was too high, all are kept.
    """
    guess = _guess(score, begin, end, count)
    if guess is not None:
        columns: list[Tensor] = []
        scores: list[Tensor] = []
        rooms = score.values.new_empty(BLOCK), score.values.new_empty(BLOCK)
        for first in range(begin, end, BLOCK):
            score_B = score.at(slice(first, min(first + BLOCK, end)), rooms=rooms)
            hits = _reaching(score_B, guess)
            scores.append(score_B.index_select(0, hits))
            columns.append(hits.add_(first))
        candidates = torch.cat(columns)
        if candidates.numel() >= count:
            return candidates.index_select(0, largest(torch.cat(scores), count))
    return largest(score.at(slice(begin, end)), count).add_(begin)


def _guess(score: Score, begin: int, end: int, count: int) -> float | None:
    """A score that is most likely reached by a few more than ``count`` columns."""
    if end - begin < FEW or 4 * count > end - begin:
        return None
    sample = score.at(slice(begin, end, STRIDE))
    expected = count * sample.numel() / (end - begin)
    # Five standard deviations of a count in a random sample.
    guess = _threshold(sample, math.ceil(expected + 5 * math.sqrt(expected) + 1))
    return guess if guess > 0 else None


def largest(score_W: Tensor, count: int) -> Tensor:
    """The ``count`` columns with the largest scores, ascending; of equal ones the first.

    ``torch.topk`` leaves open which of several equal scores it takes, and a mask must not depend on
    that. Scores must not be NaN.
    """
    if count >= score_W.numel():
        return torch.arange(score_W.numel(), device=score_W.device)
    threshold = _threshold(score_W, count)
    chosen = _reaching(score_W, threshold)
    surplus = chosen.numel() - count
    if surplus:
        equal = (score_W[chosen] == threshold).nonzero().view(-1)
        keep = torch.ones_like(chosen, dtype=torch.bool)
        keep[equal[equal.numel() - surplus :]] = False
        chosen = chosen[keep]
    return chosen


def _reaching(score_W: Tensor, threshold: float) -> Tensor:
    """The columns that score at least ``threshold``, ascending."""
    if score_W.device.type == "cpu":
        # numpy compares eight times, and finds fifteen times, as fast as torch does on CPU.
        return torch.from_numpy((score_W.numpy() >= threshold).nonzero()[0])
    return places(score_W >= threshold)


def places(chosen_W: Tensor) -> Tensor:
    """The columns at which a flat bool tensor is true, ascending."""
    return chosen_W.nonzero().view(-1)


def _threshold(score_W: Tensor, count: int) -> float:
    """The ``count``-th largest score."""
    if score_W.device.type == "cpu":
        # numpy's partition of a copy is ten times faster than torch.topk on CPU (1 against 10 ms
        # for a million scores).
        scores = score_W.numpy().copy()
        scores.partition(scores.size - count)
        return float(scores[scores.size - count])
    return float(torch.topk(score_W, count, sorted=False).values.min())


def every(width: int, count: int, *, phase: int = 0) -> Tensor:
    """``count`` columns spread evenly over ``width``, moved on by ``phase``; ascending."""
    spread = torch.arange(count, dtype=torch.int64) * width // count
    return ((spread + phase) % width).sort().values


def code_name(density: float) -> str:
    """The shorter code for a density: a bit for each column, or 12 bits for each chosen one."""
    return "index" if 12 * density < 1 else "bitmap"


def code_bytes(width: int, count: int, code: str) -> int:
    """Bytes B of one owner's mask."""
    if code == "bitmap":
        return math.ceil(width / 8)
    return 2 * math.ceil(width / CHUNK) + 3 * math.ceil(count / 2)


def encode(columns_K: Tensor, *, width: int, code: str) -> Tensor:
    """Ascending columns as bytes [B]."""
    if code == "bitmap":
        bits = torch.zeros(width, dtype=torch.uint8, device=columns_K.device)
        bits.index_fill_(0, columns_K, 1)
        packed = numpy.packbits(bits.cpu().numpy(), bitorder="little")
        return torch.from_numpy(packed).to(columns_K.device)
    chunks = math.ceil(width / CHUNK)
    counts = torch.bincount(columns_K // CHUNK, minlength=chunks)
    within = columns_K % CHUNK
    if within.numel() % 2:
        within = torch.cat([within, within.new_zeros(1)])
    low, high = within[0::2], within[1::2]
    triples = torch.stack([low & 255, (low >> 8) | ((high & 15) << 4), high >> 4], dim=1)
    head = torch.stack([counts & 255, counts >> 8], dim=1)
    return torch.cat([head.view(-1), triples.view(-1)]).to(torch.uint8)


def decode(codes_NB: Tensor, *, width: int, count: int, code: str) -> Tensor:
    """The columns [N, K] of the codes of all owners, each row ascending."""
    owners = codes_NB.shape[0]
    if code == "bitmap":
        bits = numpy.unpackbits(codes_NB.cpu().numpy(), axis=1, bitorder="little")
        rows = [torch.from_numpy(row.nonzero()[0]) for row in bits.view(bool)]
        return torch.stack(rows).to(codes_NB.device)
    chunks = math.ceil(width / CHUNK)
    head = codes_NB[:, : 2 * chunks].to(torch.int64).view(owners, chunks, 2)
    counts = head[..., 0] + (head[..., 1] << 8)
    body = codes_NB[:, 2 * chunks :].to(torch.int64).view(owners, -1, 3)
    low = body[..., 0] | ((body[..., 1] & 15) << 8)
    high = (body[..., 1] >> 4) | (body[..., 2] << 4)
    within = torch.stack([low, high], dim=-1).view(owners, -1)[:, :count]
    starts = torch.arange(chunks, device=codes_NB.device) * CHUNK
    bases = torch.repeat_interleave(starts.repeat(owners), counts.reshape(-1))
    return within + bases.view(owners, count)
