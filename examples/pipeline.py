"""A pipeline of two stages. No peer holds a stage, and schedules begin anew after a swap.

$ planaria run --workers 2 --spares 1 examples/pipeline.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import planaria
from planaria.comm.pipelines import begin_anew

STEPS = 20
MICRO_BATCHES = 4
WIDTHS = (16, 32, 4)
"""Of what goes into stage 0, from there into stage 1, and out of it."""


def build(shard: planaria.Shard) -> dict[str, Any]:
    """Each worker makes its own half of the network."""
    torch.manual_seed(shard.index)
    before, after = WIDTHS[shard.index : shard.index + 2]
    stage = nn.Sequential(nn.Linear(before, 64), nn.ReLU(), nn.Linear(64, after))
    return {"stage": stage, "optimizer": torch.optim.AdamW(stage.parameters(), lr=1e-2)}


def schedule_for(run: planaria.Run) -> ScheduleGPipe:
    """No part, since it has no state. Shapes are declared: else it would ask its neighbours."""
    index = run.shard.index
    before, after = WIDTHS[index : index + 2]
    stage = PipelineStage(
        run.stage,
        index,
        run.shard.world,
        torch.device("cpu"),
        input_args=torch.empty(8, before, requires_grad=index > 0),
        output_args=torch.empty(8, after, requires_grad=True),
    )
    return ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=cross_entropy)


def main() -> None:
    with planaria.join(build) as run:
        schedule = schedule_for(run)
        run.on_swap(lambda: begin_anew(schedule))
        for attempt in run.attempts(until=STEPS):
            with attempt:
                generator = torch.Generator().manual_seed(attempt.step)
                x_BD = torch.randn(32, 16, generator=generator)
                if run.shard.index == 0:
                    schedule.step(x_BD)
                else:
                    losses: list[Tensor] = []
                    schedule.step(target=x_BD[:, :4].argmax(dim=1), losses=losses)
                run.optimizer.step()
                run.optimizer.zero_grad()


if __name__ == "__main__":
    main()
