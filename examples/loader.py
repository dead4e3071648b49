"""A loader with worker processes, as a part: it goes on to the sample, whoever owns the shard.

$ planaria run --workers 2 --spares 1 examples/loader.py
"""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import planaria

STEPS = 20


class Sines(Dataset[tuple[int, Tensor, Tensor]]):
    """Numbered points of a sine; the number tells which samples a step has used."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x_1 = torch.tensor([index / 16.0])
        return index, x_1, torch.sin(x_1)


def build(shard: planaria.Shard) -> dict[str, Any]:
    """Workers of a loader are never forked from a process that has threads: ``forkserver``."""
    torch.manual_seed(0)
    data = Sines()
    sampler = StatefulDistributedSampler(
        data, num_replicas=shard.world, rank=shard.index, shuffle=True, seed=0
    )
    loader = StatefulDataLoader(
        data, batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context="forkserver"
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": planaria.Batches(loader, set_epoch=sampler.set_epoch),
    }


def main() -> None:
    forkserver.ensure_running()  # before join: a spare's loader starts at once when it is needed
    with planaria.join(build) as run:
        for attempt in run.attempts(until=STEPS):
            with attempt:
                ids_B, x_B1, y_B1 = next(run.data)
                attempt.consumed(ids_B)
                loss = mse_loss(run.model(x_B1), y_B1)
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                attempt.log(loss=loss)


if __name__ == "__main__":
    main()
