"""Real gloo groups of a few processes for the tests of the optimizers.

Processes are forked from a server that has torch loaded, which takes .1 s each instead of 3 s.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60.0


@dataclass(frozen=True)
class Raised:
    """An exception that a worker ended with."""

    name: str
    message: str


def _worker(
    pipe: Connection, rank: int, world: int, path: str, function: Callable[..., Any], args: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS / 3),
    )
    try:
        found: Any = function(rank, world, *args)
    except Exception as error:
        found = Raised(type(error).__name__, str(error))
    pipe.send_bytes(pickle.dumps(found))
    pipe.close()
    dist.destroy_process_group()


def run(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes; their results in rank order.

    An exception of a worker is returned as :class:`Raised`; a worker that hangs fails the test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "planaria.optim.scape"])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ends: list[Connection] = []
        processes = []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(theirs, rank, world, path, function, args), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        found: list[Any] = []
        try:
            for rank, end in enumerate(ends):
                if not wait([end], timeout=SECONDS):
                    raise AssertionError(f"worker {rank} of {world} hangs in {function.__name__}")
                try:
                    found.append(pickle.loads(end.recv_bytes()))
                except EOFError:
                    raise AssertionError(f"worker {rank} of {world} died") from None
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
    return found


def good(found: list[Any]) -> list[Any]:
    """The results, after a check that no worker raised."""
    for rank, value in enumerate(found):
        assert not isinstance(value, Raised), f"worker {rank}: {value}"
    return found


SHAPES = ((9, 5), (7,), (4, 3, 2), (1, 6), (16, 8), (3,))
"""Uneven on purpose: rows that do not divide, fewer rows than workers, one dimension, three."""


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """The same random parameters on every worker."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """One worker's random gradients of a step, part common to all and part its own."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1_000_000 + 97 * step + rank)
    return [
        torch.randn(shape, generator=common) + torch.randn(shape, generator=own) for shape in SHAPES
    ]


def mean_gradients(step: int, world: int) -> list[torch.Tensor]:
    """The mean over the workers, summed in their order."""
    totals = gradients(step, 0)
    for rank in range(1, world):
        totals = [t + g for t, g in zip(totals, gradients(step, rank), strict=True)]
    return [t / world for t in totals]


def give(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    """Sets the gradients by a real backward, so that the hooks fire."""
    loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(params, grads, strict=True))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
