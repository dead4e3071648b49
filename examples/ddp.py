"""DistributedDataParallel. Every peer holds the whole model, so a spare gets it from one of them.

$ planaria run --workers 3 --spares 1 examples/ddp.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import planaria

STEPS = 20


def build(shard: planaria.Shard) -> dict[str, Any]:
    """Everything that has a state, made as PyTorch's documentation makes it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def batch(step: int, shard: planaria.Shard) -> tuple[Tensor, Tensor]:
    """What this shard sees in this step: the same whoever owns it, and however often it is asked."""
    generator = torch.Generator().manual_seed(step * shard.world + shard.index)
    x_BD = torch.randn(32, 16, generator=generator)
    return x_BD, x_BD[:, :4].argmax(dim=1)


def main() -> None:
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                x_BD, y_B = batch(attempt.step, run.shard)
                loss = cross_entropy(run.model(x_BD), y_B)
                loss.backward()
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
                attempt.log(loss=loss)


if __name__ == "__main__":
    main()
