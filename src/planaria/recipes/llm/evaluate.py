"""Loss on held-out text, the same number whatever the number of workers."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from planaria.recipes.llm.config import LlmConfig
from planaria.recipes.llm.data import Corpus, Numbers
from planaria.recipes.llm.models import causal_loss


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result on held-out text, equal on all workers."""

    loss: float
    """Nats per token."""
    tokens: int
    """Labels that were scored."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a double."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def share(windows: int, *, shard: int, world: int, batch: int) -> list[tuple[Numbers, Numbers]]:
    """What ``shard`` scores of ``windows``: batches of (window numbers, weights 0 or 1), each (B,).

    Every shard gets as many batches (FSDP2 forwards together); what is too much has weight 0.
    """
    each = -(-windows // (world * batch)) * batch
    mine = np.arange(shard, shard + world * each, world, dtype=np.int64)
    weights = (mine < windows).astype(np.int64)
    mine = np.where(mine < windows, mine, 0)
    return [(mine[i : i + batch], weights[i : i + batch]) for i in range(0, each, batch)]


def evaluate(
    model: nn.Module,
    *,
    config: LlmConfig,
    corpus: Corpus,
    shard: int,
    world: int,
    autocast: AbstractContextManager[object],
) -> Evaluation:
    """Loss over the first ``world x eval_batches x batch`` held-out windows.

    A collective: every worker calls it at the same step. Uses no random numbers and leaves the
    model in the mode that it had.
    """
    windows = min(corpus.held_out_samples, world * config.eval_batches * config.batch)
    total = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast:
            for numbers, weights in share(windows, shard=shard, world=world, batch=config.batch):
                ids_BT = torch.from_numpy(corpus.held_out_batch(numbers))
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
                losses = causal_loss(logits_BTV, ids_BT, reduction="none").view(len(ids_BT), -1)
                weight_B = torch.from_numpy(weights)
                total[0] += (losses.double().sum(dim=1) * weight_B).sum()
                total[1] += losses.shape[1] * weight_B.sum()
    finally:
        model.train(training)
    if dist.is_initialized():
        dist.all_reduce(total)
    return Evaluation(loss=float(total[0] / total[1]), tokens=int(total[1]))
