"""Which columns of an owner's part are sent, and how a choice travels.

Shapes: N owners, W columns, K chosen columns of each owner, B bytes of one owner's code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Twelve bits name a column within a chunk; two bytes hold a chunk's count.
CHUNK = 1 << 12


def largest(score_W: Tensor, count: int) -> Tensor:
    """The ``count`` columns with the largest scores, ascending; of equal ones the first.

    ``torch.topk`` leaves open which of several equal scores it takes, and a mask must not depend on
    that. Scores must not be NaN.
    """
    if count >= score_W.numel():
        return torch.arange(score_W.numel(), device=score_W.device)
    threshold = _threshold(score_W, count)
    chosen = places(score_W >= threshold)
    surplus = chosen.numel() - count
    if surplus:
        equal = (score_W[chosen] == threshold).nonzero().view(-1)
        keep = torch.ones_like(chosen, dtype=torch.bool)
        keep[equal[equal.numel() - surplus :]] = False
        chosen = chosen[keep]
    return chosen


def places(chosen_W: Tensor) -> Tensor:
    """The columns at which a flat bool tensor is true, ascending."""
    if chosen_W.device.type == "cpu":
        # Fifteen times faster than torch.nonzero on CPU (.8 against 11 ms for a million).
        return torch.from_numpy(chosen_W.numpy().nonzero()[0])
    return chosen_W.nonzero().view(-1)


def _threshold(score_W: Tensor, count: int) -> Tensor:
    if score_W.device.type == "cpu" and score_W.dtype in (torch.float32, torch.float64):
        # numpy's partition of a copy is ten times faster than torch.topk on CPU (1 against 10 ms
        # for a million scores).
        scores = score_W.detach().clone().numpy()
        place = scores.size - count
        scores.partition(place)
        return score_W.new_tensor(float(scores[place]))
    return torch.topk(score_W, count, sorted=False).values.min()


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
        bits = torch.zeros(
            math.ceil(width / 8) * 8, dtype=torch.uint8, device=columns_K.device
        ).index_fill_(0, columns_K, 1)
        weights = _bit_weights(bits)
        return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
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
        bits = codes_NB.unsqueeze(-1) & _bit_weights(codes_NB)
        row = bits.shape[1] * 8
        return (places(bits.view(-1) != 0) % row).view(owners, count)
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


def _bit_weights(like: Tensor) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=like.device)
