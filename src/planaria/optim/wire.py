"""Numbers on the wire: as they are, or as whole numbers of 8 or 4 bits with a scale for each block.

A block's largest magnitude becomes the largest whole number, so nothing is ever cut off and the
error of a value is at most half a unit: 1/254 of its block's largest magnitude with 8 bits, 1/14
with 4. Rounding is to the nearest, so every worker decodes the same bits and nothing depends on
random numbers. Streaming DiLoCo (arXiv 2501.18512) sends outer gradients in 4 bits without loss;
whole numbers with a scale for each block instead of its floating-point code are our choice.

Shapes: N rows, K values of a row, C blocks of a row, B bytes of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale of four bytes; ``plan_comm.VALUE_BYTES`` counts with it."""

_LEVELS = {"int8": 127, "int4": 7}


def encode(values_NK: Tensor, wire: str) -> Tensor:
    """Rows as they travel: [N, K] in a floating dtype, or [N, B] in bytes. Values must be finite."""
    if wire == "float32":
        return values_NK.contiguous()
    if wire == "bfloat16":
        return values_NK.to(torch.bfloat16)
    rows, count = values_NK.shape
    blocks = math.ceil(count / BLOCK)
    padded = torch.nn.functional.pad(values_NK, (0, blocks * BLOCK - count))
    blocks_NCk = padded.view(rows, blocks, BLOCK)
    levels = _LEVELS[wire]
    scales_NC1 = blocks_NCk.abs().amax(-1, keepdim=True).float().div_(levels)
    # A block of zeros has no scale; its values are zero whatever they are divided by.
    units = torch.where(scales_NC1 > 0, scales_NC1, torch.ones_like(scales_NC1))
    # In place, since padding made a copy.
    whole = blocks_NCk.div_(units).round_().clamp_(-levels, levels).view(rows, -1)
    length = count if wire == "int8" else math.ceil(count / 2)
    sent = torch.empty(rows, 4 * blocks + length, dtype=torch.uint8, device=whole.device)
    sent[:, : 4 * blocks] = scales_NC1.view(rows, blocks).view(torch.uint8)
    if wire == "int8":
        sent[:, 4 * blocks :].view(torch.int8).copy_(whole[:, :count])
    else:
        low_high = whole[:, : 2 * length].add_(8).to(torch.uint8)
        torch.bitwise_or(low_high[:, 0::2], low_high[:, 1::2] << 4, out=sent[:, 4 * blocks :])
    return sent


def decode(sent_NB: Tensor, count: int, wire: str, *, dtype: torch.dtype) -> Tensor:
    """The values [N, ``count``] of encoded rows, in ``dtype``."""
    if wire not in _LEVELS:
        return sent_NB.to(dtype)
    rows, blocks = sent_NB.shape[0], math.ceil(count / BLOCK)
    # A copy, since only memory that begins at a multiple of four bytes can be seen as float32.
    scales = sent_NB[:, : 4 * blocks].clone(memory_format=torch.contiguous_format)
    scales_NC = scales.view(-1).view(torch.float32).view(rows, blocks)
    codes = sent_NB[:, 4 * blocks :]
    whole = torch.empty(rows, blocks * BLOCK, dtype=dtype, device=sent_NB.device)
    if wire == "int8":
        whole[:, :count] = codes.view(torch.int8)
        whole[:, count:] = 0
    else:
        pairs = whole[:, : 2 * codes.shape[1]].unflatten(1, (-1, 2))
        pairs[..., 0] = codes & 15
        pairs[..., 1] = codes >> 4
        whole[:, :count].sub_(8)
        whole[:, count:] = 0
    whole.view(rows, blocks, BLOCK).mul_(scales_NC.to(dtype).unsqueeze(-1))
    return whole[:, :count]
