"""A gradient scaler and an averaged model: more parts, and a step that is skipped where it must be.

$ planaria run --workers 3 --spares 1 examples/scaler_ema.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import planaria

STEPS = 20


def build(shard: planaria.Shard) -> dict[str, Any]:
    """The scaler has a ``state_dict``, so it is a part as it is. The averaged model lies outside of
    DDP, yet all peers hold it bit for bit: ``replicated`` says so, and it is not sent."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model = DistributedDataParallel(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torch.manual_seed(1 + shard.index)  # dropout differs from shard to shard
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        # So high that float16 overflows in the first steps: the scaler leaves those out.
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5),
        "average": planaria.replicated(average),
    }


def batch(step: int, shard: planaria.Shard) -> tuple[Tensor, Tensor]:
    """What this shard sees in this step."""
    generator = torch.Generator().manual_seed(step * shard.world + shard.index)
    x_BD = torch.randn(32, 16, generator=generator)
    return x_BD, x_BD[:, :4].argmax(dim=1)


def main() -> None:
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                x_BD, y_B = batch(attempt.step, run.shard)
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(run.model(x_BD), y_B)
                run.scaler.scale(loss).backward()
                run.scaler.step(run.optimizer)
                run.scaler.update()
                run.average.update_parameters(run.model.module)
                run.optimizer.zero_grad()
                attempt.log(loss=loss, scale=run.scaler.get_scale())


if __name__ == "__main__":
    main()
