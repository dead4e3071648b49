"""How the chosen weights of the families "frozen" and "moved" move, by the mean of what was sent.

Shapes: W columns of all buckets, K chosen ones.

Source: arXiv 2607.01678 for the gradient that is rebuilt from one buffer; the rest is our choice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from planaria.optim.adams import second_moment
from planaria.optim.options import ScapeOptions

# Chosen weights that are moved at a time, so that what is made on the way stays inside the cache.
BLOCK = 1 << 16


def move(
    w_K: Tensor,
    m_K: Tensor,
    z_K: Tensor,
    tau_K: Tensor,
    group: dict[str, Any],
    options: ScapeOptions,
) -> None:
    """Moves weights and moments of chosen columns, in place, by the mean ``z`` of what was sent.

    ``m``: moments, faded since; ``tau``: steps since a column was last sent, of the weights' dtype.
    """
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    # After many skipped steps the past has faded and all of z would count as this step's gradient,
    # ten times its size; the limit is where nu equals z^2 without a past.
    if options.buffer == "feedback":
        g = z_K
    elif options.after_send == "clear":
        # The limit is reached by all of these or by none, since g is a multiple of z.
        limit = max(1 - beta1, math.sqrt(1 - beta2))
        g = z_K / torch.where(tau_K >= options.clamp_after, limit, 1 - beta1).to(z_K.dtype)
    else:
        g = (z_K - m_K * beta1).div_(1 - beta1)
        # Others have a limit that nothing reaches: torch.where would take ten times as long.
        young_K = torch.lt(tau_K, options.clamp_after, out=torch.empty_like(z_K))
        limit_K = z_K.abs().div_(math.sqrt(1 - beta2))
        limit_K.add_(young_K, alpha=torch.finfo(z_K.dtype).max)
        g = torch.clamp(g, -limit_K, limit_K)
    denominator = second_moment(m_K, g, beta2=beta2).sqrt_().add_(group["eps"])
    if options.buffer == "feedback":
        m_K.lerp_(z_K, 1 - beta1)
    elif options.after_send == "clear":
        m_K.mul_(beta1).add_(z_K)
    else:
        m_K.copy_(z_K)
    decay = 1 - rate * group["weight_decay"]
    if options.decay == "moved" or options.unsent == "moved":
        w_K.mul_(decay)
    elif options.decay == "lazy":
        w_K.mul_(torch.pow(decay, tau_K + 1))
    scale = tau_K + 1
    if options.step_scale != 1:
        scale.pow_(options.step_scale)
    w_K.addcdiv_(scale.clamp_(max=options.scale_cap).mul_(m_K), denominator, value=-rate)


def faded(m_W: Tensor, own_K: Tensor, tau_K: Tensor, beta1: float, oldest: int) -> Tensor:
    """Moments of chosen columns, ``beta1`` to the power of ``tau`` times; ``tau`` is at most oldest."""
    held_K = m_W.index_select(0, own_K)
    if oldest >= max(tau_K.numel(), 1 << 10):
        return held_K.mul_(torch.pow(beta1, tau_K))
    # The powers of whole numbers, from a table: a power takes ten times as long as a look.
    table = torch.pow(beta1, torch.arange(oldest + 1, dtype=tau_K.dtype, device=tau_K.device))
    return held_K.mul_(table.index_select(0, tau_K.to(torch.int32)))
