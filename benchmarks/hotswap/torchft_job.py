"""The job under torchft: replica groups of one worker each, as torchft's own example is built.

Two departures from that example, both in its favour. The manager's time-out is 5 s, not 30 s: a
survivor hangs that long in a collective that a dead peer has left. And gradients are averaged by
``manager.allreduce`` after the backward pass: the comm hook of torchft 0.2.0's own
``DistributedDataParallel`` asserts that a failed gloo all-reduce has a future, which it has not, so
that every survivor dies, too, and the job begins again at step 0.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torchft

from hotswap import model as job
from hotswap.task import Notes, Striker, Task

TIMEOUT = timedelta(seconds=5)
SETTLED = 5
"""Steps that all replicas have taken together before one of them is killed."""


def average(manager: torchft.Manager, network: torch.nn.Module) -> None:
    """Mean of the gradients over all replicas, in one bucket; a failure is noted by the manager."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    manager.allreduce(flat).wait()
    torch._foreach_copy_(
        gradients,
        [
            part.view_as(g)
            for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
        ],
    )


def main(task: Task) -> None:
    torch.set_num_threads(1)
    notes = Notes(task)
    group = int(os.environ["REPLICA_GROUP_ID"])
    striker = Striker(task, notes)
    text = job.corpus()

    def load_state_dict(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=task.workers - 1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"hot_swap_{group}",
        timeout=TIMEOUT,
    )
    network = job.make(task, striker)
    optimizer = torchft.Optimizer(manager, job.optimizer(network))
    together = 0
    while manager.current_step() < task.steps:
        optimizer.zero_grad()
        before = manager.current_step()
        tokens_BT, _ = job.batch(text, task, step=before + 1, shard=group)
        striker.step = before + 1
        loss = job.loss(network, tokens_BT)
        # A strike falls only where all replicas are in, and have been for a while.
        whole = manager.num_participants() == task.workers and manager.is_participating()
        together = together + 1 if whole else 0
        striker.shard = group if together > SETTLED else -1
        loss.backward()
        average(manager, network)
        optimizer.step()
        if manager.current_step() > before:
            notes.write(
                "step",
                step=manager.current_step(),
                rank=group,
                participants=manager.num_participants(),
            )
    manager.shutdown()


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
