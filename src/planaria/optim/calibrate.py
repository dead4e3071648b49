"""What optimizers' own arithmetic takes on a machine that several workers share.

All workers of the machine do the same at once, and what counts is when the last of them has ended:
between two collectives nobody gets further than that. Three stacks of layers tell apart what a step,
a tensor and a million weights take. A link is left out: whatever a worker would receive is a copy of
what it sends.

``python -m planaria.optim.calibrate JSON`` is one of the workers that ``planaria.optim.measure``
starts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from planaria.optim.adams import AdamS
from planaria.optim.collectives import Done, Pending, Workers
from planaria.optim.groups import param_groups
from planaria.optim.plan_comm import Arithmetic
from planaria.optim.scape import Scape
from planaria.optim.sharded import Sharded

STACKS = ((1, 64), (24, 64), (6, 448))
"""Layers and width of what is measured: little, many tensors, many weights (1.2 million)."""

TURNS = 9

SWEPT = 4 << 20
"""Numbers that are touched before a step, so that it finds as little in the cache as in training."""

Make = Callable[[nn.Module, Workers], Optimizer]
"""An optimizer of a model's parameters."""


class Echo(Workers):
    """Stands in for a link: one of ``size`` workers, who all send what this one does."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.group, self.rank, self.size = None, 0, size

    def exchange(self, received_NS: Tensor, sent_NS: Tensor) -> Pending:
        """Copies what is sent."""
        if received_NS is not sent_NS:
            received_NS.copy_(sent_NS)
        return Done()

    def gather(self, rows_NS: Tensor, row_S: Tensor) -> Pending:
        """Every row becomes the own one."""
        rows_NS.view(self.size, -1).copy_(row_S.view(1, -1))
        return Done()


def stack(layers: int, width: int) -> nn.Sequential:
    """Linear layers with gradients."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator)
        param.grad = torch.randn(param.shape, generator=generator)
    return model


def latency(beside: Workers, *, turns: int = TURNS) -> float:
    """Median seconds of a collective that carries next to nothing."""
    return together(lambda: None, beside, turns=turns, empty=0.0)


def together(
    action: Callable[[], object],
    beside: Workers,
    *,
    turns: int,
    empty: float,
    before: Callable[[], object] | None = None,
) -> float:
    """Median seconds until all workers have ended an action that they begin at once; collective.

    ``empty``: seconds of a collective that carries next to nothing, by which they meet.
    """
    seconds: list[float] = []
    for _ in range(turns + 2):
        if before is not None:
            before()
        beside.table([0.0])
        begin = time.perf_counter()
        action()
        beside.table([0.0])
        seconds.append(time.perf_counter() - begin)
    own = max(0.0, statistics.median(seconds[2:]) - empty)
    return float(beside.table([own]).max())


def arithmetic(
    make: Make, *, workers: int, beside: Workers, empty: float, turns: int = TURNS
) -> Arithmetic:
    """Of an optimizer of one of ``workers``, beside those of this machine; collective."""
    swept = torch.zeros(SWEPT)
    sizes: list[list[float]] = []
    times: list[float] = []
    for layers, width in STACKS:
        model = stack(layers, width)
        optimizer = make(model, Echo(workers))
        times.append(
            together(
                optimizer.step,
                beside,
                turns=turns,
                empty=empty,
                before=lambda: swept.add_(1),
            )
        )
        params = list(model.parameters())
        sizes.append([1.0, len(params), sum(p.numel() for p in params) * 1e-6])
    step, tensor, million = torch.linalg.solve(
        torch.tensor(sizes, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    ).tolist()
    return Arithmetic(step=max(0.0, step), tensor=max(0.0, tensor), million=max(0.0, million))


def planned(method: str, density: float) -> Make:
    """The optimizer of a row of ``plan-comm``."""

    def make(model: nn.Module, workers: Workers) -> Optimizer:
        groups = param_groups(model)
        if method != "dense":
            options: dict[str, Any] = {"density": density, "unsent": method, "check_every": 0}
            return Scape(groups, group=workers, **options)
        for group in groups:
            del group["dense"]
        return Sharded(AdamS, groups, group=workers)

    return make


def work(
    *, rank: int, processes: int, workers: int, rows: Sequence[tuple[str, float]], store: str
) -> dict[str, Any]:
    """One worker's part; every worker finds the same."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    try:
        beside = Workers(None)
        empty = latency(beside)
        found = [
            arithmetic(planned(*row), workers=workers, beside=beside, empty=empty) for row in rows
        ]
    finally:
        dist.destroy_process_group()
    return {"latency": empty, "arithmetic": [vars(one) for one in found]}


def main() -> None:
    """What ``planaria.optim.measure`` starts."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(int(asked.pop("threads")))
    sys.stdout.write(json.dumps(work(**asked)) + "\n")


if __name__ == "__main__":
    main()
