"""The job under ``torchrun``: a checkpoint on disk each few steps, and the newest one at the start."""

from __future__ import annotations

import sys

from hotswap.task import Notes, Striker, Task, memory

if __name__ == "__main__":
    started = Notes(Task.read(sys.argv[1]))
    started.write("process")

import os
from pathlib import Path

import torch
import torch.distributed as dist

from hotswap import model as job

MEMORY_STEP = 5


def main(task: Task, notes: Notes) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    notes.write("imported", rank=rank)
    dist.init_process_group("gloo")
    striker = Striker(task, notes)
    striker.shard = rank
    text = job.corpus()
    network = job.wrap(job.make(task, striker), task)
    optimizer = job.optimizer(network)
    newest = Path(task.folder) / "checkpoint.pt"
    done = 0
    if newest.exists():
        saved = torch.load(newest)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    notes.write("ready", rank=rank, step=done)
    for step in range(done + 1, task.steps + 1):
        striker.step = step
        tokens_BT, _ = job.batch(text, task, step=step, shard=rank)
        job.loss(network, tokens_BT).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.write("step", step=step, rank=rank)
        if step % task.checkpoint_every == 0 and rank == 0:
            partial = newest.with_suffix(".partial")
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, partial)
            os.replace(partial, newest)
        if step == MEMORY_STEP:
            notes.write("memory", shard=rank, **memory())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Task.read(sys.argv[1]), started)
