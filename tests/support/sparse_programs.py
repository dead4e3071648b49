"""What workers run in the fault tests of the sharded and sparse optimizers: a bare model that only
the optimizer keeps together, evaluated and written as the mean of all workers' models.

Which samples a step sees does not depend on the number of workers, so that a run may be resumed at
another one and follow the same curve.
"""

from __future__ import annotations

import os
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import planaria
from planaria.optim import Scape, Sharded, param_groups

Kind = Literal["sharded", "frozen", "moved", "local"]

SAMPLES = 240
"""Of a step, over all workers: they divide by 1, 2, 3 and 4 workers with 2 micro-batches."""
DENSE_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class SparseJob:
    """One run of :func:`main`."""

    kind: Kind
    steps: int
    final: str
    """Folder of what each shard holds at the end."""
    noise: bool = True
    """Whether each worker drops features by its own generator, as a language model would, gradients
    are clipped, in sparse steps by the workers' own norms, and step 7 is skipped for a NaN."""
    seat: bool = False
    """Whether FSDP2 cuts the model inside each of two nodes, and the optimizer sits between them."""
    half: bool = False
    """Whether weights are bfloat16, with float32 masters."""
    checkpoint_every: int = 0


class Curve:
    """Losses of each step and of each evaluation so far."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.evaluations: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "evaluations": list(self.evaluations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.evaluations = list(state["steps"]), list(state["evaluations"])


def model_of(job: SparseJob) -> nn.Sequential:
    """An embedding, odd shapes, norms; about 6,000 weights in several buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(40, 18),
        nn.Linear(18, 67),
        nn.LayerNorm(67),
        nn.GELU(),
        nn.Dropout(0.2 if job.noise else 0.0),
        nn.Linear(67, 50, bias=False),
        nn.Tanh(),
        nn.Linear(50, 3),
    )
    return model.to(torch.bfloat16) if job.half else model


def build(job: SparseJob) -> dict[str, Any]:
    model = model_of(job)
    common: dict[str, Any] = {"lr": 3e-3, "bucket_bytes": 6000}
    common["max_norm"] = 0.5 if job.noise else None
    if job.seat:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model[5], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        common["group"] = mesh["replicate"]
    optimizer: torch.optim.Optimizer
    if job.kind == "sharded":
        optimizer = Sharded(torch.optim.AdamW, model.parameters(), **common)
    else:
        choices: dict[str, Any] = {"density": 0.1, "dense_steps": DENSE_STEPS, "check_every": 2}
        optimizer = Scape(param_groups(model), unsent=job.kind, **common, **choices)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.9),
        "curve": Curve(),
    }


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, for all workers together."""
    generator = torch.Generator().manual_seed(step)
    tokens_B = torch.randint(40, (SAMPLES,), generator=generator)
    noise_B3 = torch.randn(SAMPLES, 3, generator=generator)
    angle_B1 = tokens_B.float().unsqueeze(1) / 5
    return tokens_B, torch.cat([angle_B1.sin(), angle_B1.cos(), angle_B1], 1) + 0.05 * noise_B3


def loss_of(model: nn.Module, step: int, part: slice) -> Tensor:
    tokens_B, targets_B3 = samples(step)
    return nn.functional.mse_loss(model(tokens_B[part]).float(), targets_B3[part])


def main(job: SparseJob) -> None:
    with planaria.join(lambda shard: build(job), on_nonfinite="skip") as run:
        for attempt in run.attempts(until=job.steps, checkpoint_every=job.checkpoint_every):
            with attempt:
                train(job, run, attempt)
        run.final(lambda: finish(job, run), answer=42.0)


def train(job: SparseJob, run: planaria.Run, attempt: planaria.Attempt) -> None:
    own = SAMPLES // run.shard.world // 2
    total = 0.0
    for micro in range(2):
        first = (2 * run.shard.index + micro) * own
        attempt.consumed(SAMPLES * attempt.step + i for i in range(first, first + own))
        with run.optimizer.no_sync() if micro == 0 else nullcontext():
            loss = loss_of(run.model, attempt.step, slice(first, first + own)) / 2
            if job.noise and (attempt.step, run.shard.index) == (7, 1):
                loss = loss * float("nan")
            loss.backward()
        total += float(loss.detach())
    attempt.finite(total)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    mean = torch.tensor(total)
    dist.all_reduce(mean)
    run.curve.steps.append(float(mean) / run.shard.world)
    if attempt.step % 3 == 0:
        run.curve.evaluations.append(evaluate(run))
    attempt.log(loss=total + 0.0 * random.random())


def averaged(optimizer: Any) -> AbstractContextManager[None]:
    return optimizer.mean_model() if isinstance(optimizer, Scape) else nullcontext()


def evaluate(run: planaria.Run) -> float:
    """Loss of the mean model on samples that no step sees; equal on all workers."""
    run.model.eval()
    with torch.no_grad(), averaged(run.optimizer):
        loss = float(loss_of(run.model, 10**6, slice(SAMPLES)))
    run.model.train()
    return loss


def finish(job: SparseJob, run: planaria.Run) -> None:
    """Write what this shard holds, its own model and the mean one."""
    own = {name: plain(value) for name, value in run.model.state_dict().items()}
    with averaged(run.optimizer):
        mean = {name: plain(value) for name, value in run.model.state_dict().items()}
    entries = {
        f"{position}.{name}": plain(value)
        for position, entry in enumerate(run.optimizer.state.values())
        for name, value in entry.items()
    }
    holdings = {
        "own": own,
        "mean": mean,
        "optimizer": entries,
        "lr": [group["lr"] for group in run.optimizer.param_groups],
        "curve": run.curve.state_dict(),
        "torch": torch.get_rng_state(),
        "regime": run._parts.regime(),
    }
    target = Path(job.final) / f"{run.shard.index}.pt"
    partial = target.with_suffix(f".{os.getpid()}")
    torch.save(holdings, partial)
    os.replace(partial, target)


def plain(value: Any) -> Any:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone() if isinstance(local, Tensor) else local
