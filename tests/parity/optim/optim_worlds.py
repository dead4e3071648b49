"""Real gloo groups of a few processes for the tests of the optimizers.

Processes are forked from a server that has torch loaded, which takes .1 s each instead of 3 s, and
do one case after the other, each in a process group of its own.
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


def _worker(pipe: Connection) -> None:
    """Does one case after the other, each in a process group of its own, until the pipe ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            function, rank, world, path, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
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
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(found))


class Pool:
    """Processes that are started once for all cases; ended where one of them hangs or dies."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """As :func:`run`."""
        self._grow(world)
        ends = [end for _, end in self._workers[:world]]
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "store")
            for rank, end in enumerate(ends):
                end.send_bytes(pickle.dumps((function, rank, world, path, args)))
            found: list[Any] = []
            try:
                for rank, end in enumerate(ends):
                    if not wait([end], timeout=SECONDS):
                        raise AssertionError(
                            f"worker {rank} of {world} hangs in {function.__name__}"
                        )
                    try:
                        found.append(pickle.loads(end.recv_bytes()))
                    except (EOFError, ConnectionResetError):
                        raise AssertionError(f"worker {rank} of {world} died") from None
            except BaseException:
                self.close()
                raise
        return found

    def _grow(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "planaria.optim.scape", "planaria.optim.sharded"]
        )
        while len(self._workers) < world:
            mine, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def close(self) -> None:
        """Ends the processes."""
        for process, end in self._workers:
            end.close()
            process.kill()
            process.join()
        self._workers.clear()


POOL = Pool()


def run(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes; their results in rank order.

    An exception of a worker is returned as :class:`Raised`; a worker that hangs fails the test.
    """
    return POOL.run(function, world, *args)


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
