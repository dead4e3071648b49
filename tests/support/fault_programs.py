"""What workers run in the fault tests: small training loops that leave no room for a lucky result.

Each step draws from every generator that a worker has (torch's for dropout and data, NumPy's,
Python's), each kind uses clipping and several micro-batches, and what a worker holds at the end is
written out as tensors, so that a test compares states and not only hashes of them.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planaria
from planaria.comm.work import Pending

Kind = Literal["ddp", "fsdp", "hsdp", "single", "plain"]
"""``plain``: each worker trains a model of its own, half of it frozen by ``build``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of :func:`main`."""

    kind: Kind
    steps: int
    final: str
    """Folder of what each shard holds at the end."""
    seed: int = 0
    micro: int = 2
    """Micro-batches of a step."""
    pace: float = 0.0
    """Seconds that each step sleeps besides."""
    checkpoint_every: int = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    nan_at: tuple[int, int] = (0, 0)
    """(step, shard) whose loss is NaN; step 0: none."""
    raise_at: tuple[int, int] = (0, 0)
    """(step, shard) in which the script itself fails."""
    slow_build: float = 0.0
    """Seconds that ``build`` takes besides."""
    slow_final: float = 0.0
    """Seconds that the duty of ``run.final`` takes."""
    dawdle: bool = False
    """Whether shard 0 takes its time between getting the attempt of step 6 and entering it."""
    gossip: bool = False
    """Whether shards 0 and 2 speak at the end of each step of what shard 1 need not wait for."""
    hook: str = ""
    """Name of a function of this module, called as ``hook(job, run, attempt)`` in each attempt."""


class Curve:
    """The losses so far: a part of the user's own, which a broken attempt must not lengthen."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.pair: Any = None
        """Group of shards 0 and 2, for :func:`gossip`."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Convolutional(nn.Module):
    """BatchNorm, Dropout, LayerNorm and an odd number of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(4 * 16, 24)
        self.third = nn.LayerNorm(24)
        self.last = nn.Linear(24, 1)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        h_BCF = self.drop(torch.relu(self.norm(self.first(x_BF[:, None]))))
        return self.last(torch.tanh(self.third(self.second(h_BCF.flatten(1)))))


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 33),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(33, 24),
        nn.Tanh(),
        nn.Linear(24, 1),
    )


def build(job: Job) -> dict[str, Any]:
    time.sleep(job.slow_build)
    torch.manual_seed(job.seed)
    model: nn.Module
    if job.kind == "plain":
        model = perceptron()
        model[0].requires_grad_(False)
    elif job.kind in ("ddp", "single"):
        model = Convolutional()
        if job.kind == "ddp":
            model = DistributedDataParallel(model)
    else:
        model = perceptron()
        assert isinstance(model, nn.Sequential)
        mesh = None
        if job.kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = Curve()
    if job.gossip:
        curve.pair = dist.new_group([0, 2])
    rank = dist.get_rank()
    # Workers differ in all their generators from here on.
    torch.manual_seed(1000 * job.seed + rank)
    np.random.seed(rank)
    random.seed(rank)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9),
        "curve": curve,
    }


def batch(job: Job, attempt: planaria.Attempt) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets from all three generators, and the ids that say which ones they were."""
    ids = [random.randrange(10**9), int(np.random.randint(10**9)), int(torch.randint(10**9, ()))]
    attempt.consumed(ids)
    x_BF = torch.randn(6, 16) + float(np.random.rand()) * 0.1
    return x_BF, x_BF.sum(1, keepdim=True).sin() + random.random() * 0.01


def main(job: Job) -> None:
    with planaria.join(lambda shard: build(job), on_nonfinite=job.on_nonfinite) as run:
        for attempt in run.attempts(until=job.steps, checkpoint_every=job.checkpoint_every):
            if job.dawdle and attempt.step == 6 and run.shard.index == 0:
                time.sleep(0.5)
            with attempt:
                train(job, run, attempt)
            if attempt.step % 3 == 0 and not attempt.broken:
                look(run)
        run.final(lambda: finish(job, run), answer=42.0)


def look(run: planaria.Run) -> None:
    """An evaluation between attempts, which draws numbers and is not done again after a swap."""
    with run.phase("evaluation"):
        torch.rand(3)
        np.random.rand(3)
        random.random()


def train(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    model, losses = run.model, []
    if job.hook:
        globals()[job.hook](job, run, attempt)
    if job.raise_at == (attempt.step, run.shard.index):
        raise ValueError(f"a mistake of the script's own in step {attempt.step}")
    for micro in range(job.micro):
        last = micro == job.micro - 1
        x_BF, y_B1 = batch(job, attempt)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = last
        loss = nn.functional.mse_loss(model(x_BF), y_B1) / job.micro
        if job.nan_at == (attempt.step, run.shard.index):
            loss = loss * float("nan")
        loss.backward()
        losses.append(float(loss.detach()))
    attempt.finite(sum(losses))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    run.curve.values.append(sum(losses))
    attempt.log(loss=sum(losses))
    if job.gossip and run.shard.index != 1:
        gossip(run, attempt)
    time.sleep(job.pace)


def gossip(run: planaria.Run, attempt: planaria.Attempt) -> None:
    """Shard 0 waits for shard 2, while shard 1 has ended the step and its state is held twice."""
    if attempt.step == 6 and run.shard.index == 2:
        time.sleep(0.5)
    heard = torch.tensor(run.curve.values[-1])
    dist.all_reduce(heard, group=run.curve.pair)
    run.curve.values.append(float(heard))


def finish(job: Job, run: planaria.Run) -> None:
    """Write what this shard holds, atomically; with a collective, as an evaluation would."""
    votes = torch.ones(())
    dist.all_reduce(votes)
    assert int(votes) == run.shard.world
    time.sleep(job.slow_final)
    target = Path(job.final) / f"{run.shard.index}.pt"
    partial = target.with_suffix(f".{os.getpid()}")
    torch.save(holdings(run), partial)
    os.replace(partial, target)


def holdings(run: planaria.Run) -> dict[str, Any]:
    """All that this shard holds, as plain tensors and numbers."""
    optimizer = run.optimizer
    moments = {
        f"{index}.{name}": _plain(value)
        for index, parameter in enumerate(run.model.parameters())
        for name, value in optimizer.state[parameter].items()
    }
    return {
        "model": {k: _plain(v) for k, v in run.model.state_dict().items()},
        "optimizer": moments,
        "lr": optimizer.param_groups[0]["lr"],
        "scheduler": run.scheduler.last_epoch,
        "curve": list(run.curve.values),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=True)[1].tolist(),
        "python": list(random.getstate()[1]),
        "step": run.step,
    }


def die_at_even_steps(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """SIGKILL to the shard whose turn it is, once for each even step, somewhere in it."""
    if attempt.step % 2 or run.shard.index != attempt.step // 2 % run.shard.world:
        return
    mark = Path(job.final) / f"died-{attempt.step}"
    try:
        mark.open("x").close()
    except FileExistsError:
        return
    pid, delay = os.getpid(), attempt.step % 5 * 0.004

    def kill() -> None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def miss_a_failure(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """Shard 1 dies while the others wait for it in an all-reduce, once, in step 6. That it failed
    never reaches shard 0, as gloo has it now and then.
    """
    if attempt.step != 6:
        return
    folder, shard = Path(job.final), run.shard.index
    try:
        (folder / f"met-{shard}").open("x").close()
    except FileExistsError:
        return
    if shard == 1:
        end = time.monotonic() + 60
        while not all((folder / f"met-{other}").exists() for other in (0, 2)):
            assert time.monotonic() < end, "the others did not come"
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    finish = Pending.finish

    def missed(pending: Pending, done: Any) -> None:
        try:
            done.value()
        except RuntimeError:
            Pending.finish = finish  # type: ignore[method-assign]
        else:
            finish(pending, done)

    if shard == 0:
        Pending.finish = missed  # type: ignore[method-assign]
    dist.all_reduce(torch.ones(1))


def wait_for_go(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """Step 3 waits for a file, while something is started beside the run."""
    end = time.monotonic() + 60
    while attempt.step == 3 and not (Path(job.final) / "go").exists():
        assert time.monotonic() < end, "the file 'go' did not come"
        time.sleep(0.01)


def hold_the_interpreter(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """A thread that computes in one call, without ever letting the interpreter go: 0.4 s each."""
    if attempt.step in (4, 6) and run.shard.index != 1:
        number = 3**150_000
        threading.Thread(target=lambda: [str(number) for _ in range(1)], daemon=True).start()


def print_garbage(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    os.write(1, bytes(range(256)) * 4 + b"\x1b[2J\x00 without an end")
    os.write(2, b"\xff\xfe\x00[w0] planaria: {}\n" + b"y" * 70_000)
    print("\udc80", "\x00", "é" * 5000, end="\r")


def evaluate(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """An evaluation inside the attempt, with the model's own collectives."""
    run.model.eval()
    with torch.no_grad():
        score = run.model(torch.ones(6, 16)).sum()
    dist.all_reduce(score)
    run.model.train()
    attempt.log(score=score)


def draw_elsewhere(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """Data of a generator of the user's own, made from the step, beside the global ones."""
    generator = torch.Generator().manual_seed(attempt.step)
    assert torch.rand((), generator=generator) < random.random() + 1


def thaw(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    if attempt.step == 3:
        run.model[0].requires_grad_(True)


def enlarge(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """A module that ``build`` has not made."""
    if attempt.step == 4:
        run.model[1].register_module("extra", nn.Linear(2, 2))


def fill_the_disk(job: Job, run: planaria.Run, attempt: planaria.Attempt) -> None:
    """This process may write no file beyond 600 bytes from now on, until step 6."""
    if run.shard.index == 1 and attempt.step in (2, 6):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (600 if attempt.step == 2 else most, most))


def _plain(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone()
