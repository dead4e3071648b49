"""A plain loop: no wrapper, gradients are averaged by hand. ``replicated`` says what only you know.

$ planaria run --workers 3 --spares 1 examples/plain.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import planaria

STEPS = 20


def build(shard: planaria.Shard) -> dict[str, Any]:
    """A bare module: without ``replicated`` Planaria would take it for this shard's alone, which is
    as safe, but sends all of it to the holder after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"model": planaria.replicated(model), "optimizer": optimizer}


def batch(step: int, shard: planaria.Shard) -> tuple[Tensor, Tensor]:
    """What this shard sees in this step."""
    generator = torch.Generator().manual_seed(step * shard.world + shard.index)
    x_BD = torch.randn(32, 8, generator=generator)
    return x_BD, x_BD.square().mean(dim=1, keepdim=True)


def main() -> None:
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                x_BD, y_B1 = batch(attempt.step, run.shard)
                run.optimizer.zero_grad()
                loss = mse_loss(run.model(x_BD), y_B1)
                loss.backward()
                for parameter in run.model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= run.shard.world
                run.optimizer.step()
                attempt.log(loss=loss)


if __name__ == "__main__":
    main()
