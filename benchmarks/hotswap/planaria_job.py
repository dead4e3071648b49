"""The job under ``planaria run``: :func:`main` runs in every worker and spare."""

from __future__ import annotations

import time
from typing import Any

import torch

import planaria
from hotswap import model as job
from hotswap.task import Notes, Striker, Task, loopback_bytes, memory, protects

MEMORY_STEP = 5
"""Step after which a worker writes down its memory: buffers, optimizer and buckets exist then."""


def main(task: Task) -> None:
    torch.set_num_threads(1)
    notes = Notes(task)
    striker = Striker(task, notes)
    text = job.corpus()

    def build(shard: planaria.Shard) -> dict[str, Any]:
        striker.shard = shard.index
        network = job.wrap(job.make(task, striker), task)
        return {"model": network, "optimizer": job.optimizer(network)}

    with planaria.join(build) as run:
        if task.protection == "alternating":
            # The runtime's seam for benchmarks; see Engine.protects.
            run._engine.protects = lambda generation: protects(task, generation)
        for attempt in run.attempts(until=task.steps):
            with attempt:
                striker.step = attempt.step
                tokens_BT, begins = job.batch(text, task, step=attempt.step, shard=run.shard.index)
                attempt.consumed(begins)
                job.loss(run.model, tokens_BT).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if task.protection == "alternating":
                    notes.write(
                        "end",
                        step=attempt.step,
                        shard=run.shard.index,
                        lo=loopback_bytes(),
                        cpu=time.process_time(),
                    )
            if attempt.step == MEMORY_STEP and not attempt.broken:
                state, _ = run._parts.regime()
                notes.write(
                    "memory",
                    shard=run.shard.index,
                    regime=state,
                    state=_bytes(run),
                    buffers=_buffers(run),
                    **memory(),
                )


def _bytes(run: planaria.Run) -> int:
    """Bytes of this worker's state."""
    return sum(leaf.tensor.nbytes for leaf in run._parts.flatten().leaves)


def _buffers(run: planaria.Run) -> int:
    """Bytes of host memory for protection: own captures, and copies held for others."""
    data = run._engine.context.data
    return sum(slot.memory.nbytes for pairs in (data.buffers, data.held) for slot in pairs._slots())
