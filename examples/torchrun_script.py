"""A script for ``torchrun``: it has never heard of Planaria, and starts under it as it is.

$ torchrun --nproc-per-node 2 examples/torchrun_script.py checkpoint.pt
$ planaria run --workers 2 examples/torchrun_script.py checkpoint.pt
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 40


def main() -> None:
    checkpoint = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]
    print(f"rank {rank} of {world} begins at step {begin}")
    for step in range(begin, STEPS):
        generator = torch.Generator().manual_seed(step * world + rank)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            partial = checkpoint.with_suffix(".partial")
            torch.save({**state, "step": step + 1}, partial)
            os.replace(partial, checkpoint)
        dist.barrier()
        time.sleep(0.05)
    if rank == 0:
        total = sum(p.detach().double().sum().item() for p in model.parameters())
        print(f"sum of all parameters after {STEPS} steps: {total!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
