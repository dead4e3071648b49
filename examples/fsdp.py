"""FSDP2. No peer holds a shard's parameters, so each is sent to a holder, and a spare gets it there.

$ planaria run --workers 3 --spares 1 examples/fsdp.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import planaria

STEPS = 20
MICRO_BATCHES = 2


def build(shard: planaria.Shard) -> dict[str, Any]:
    """Blocks first, then the root, on the default process group."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3)], nn.Linear(24, 6)
    )
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def batch(step: int, micro: int, shard: planaria.Shard) -> tuple[Tensor, Tensor]:
    """What this shard sees in this micro-batch."""
    seed = (step * MICRO_BATCHES + micro) * shard.world + shard.index
    x_BD = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
    return x_BD, x_BD[:, :6].argmax(dim=1)


def main() -> None:
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                for micro in range(MICRO_BATCHES):
                    x_BD, y_B = batch(attempt.step, micro, run.shard)
                    loss = cross_entropy(run.model(x_BD), y_B) / MICRO_BATCHES
                    loss.backward()
                nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1.0)
                run.optimizer.step()
                run.optimizer.zero_grad()
                attempt.log(loss=loss * MICRO_BATCHES)


if __name__ == "__main__":
    main()
