"""Ranks as real processes, driven over pipes: for testing ``comm`` without a coordinator.

One fork server with torch imported serves a whole test module. Each rank runs :func:`serve` of
``rank_programs``; the test sends it commands and reads answers. The parent plays the coordinator: it
hosts the keys and names the newest epoch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from tests.support import rank_programs

ANSWER_TIMEOUT = 60.0
"""Seconds; generous, since the machine is shared."""


class Rank:
    """One process and the pipe to it."""

    def __init__(self, process: BaseProcess, pipe: Connection, rank: int) -> None:
        self.process = process
        self.pipe = pipe
        self.rank = rank

    def ask(self, *command: Any) -> None:
        self.pipe.send(command)

    def answer(self) -> Any:
        if not self.pipe.poll(ANSWER_TIMEOUT):
            raise TimeoutError(f"rank {self.rank} did not answer within {ANSWER_TIMEOUT} s")
        kind, value = self.pipe.recv()
        if kind == "error":
            raise AssertionError(f"rank {self.rank}: {value}")
        return value

    def kill(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


class Ranks:
    """A world of ranks; a context manager that leaves no process behind."""

    def __init__(self, world: int, *, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        self.store.set("newest", "1")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
        self.started: list[Rank] = []
        self.ranks = [self.start(rank, solo=False) for rank in range(world)]
        for rank in self.ranks:
            rank.answer()

    def start(self, rank: int, *, solo: bool) -> Rank:
        here, there = self.context.Pipe()
        process = self.context.Process(
            target=rank_programs.serve,
            args=(there, rank, self.world, self.store.port, solo, self.kind),
            daemon=True,
        )
        process.start()
        there.close()
        started = Rank(process, here, rank)
        self.started.append(started)
        return started

    def newest(self, epoch: int) -> None:
        self.store.set("newest", str(epoch))

    def all(self, *command: Any, but: int | None = None) -> list[Any]:
        chosen = [rank for rank in self.ranks if rank.rank != but]
        for rank in chosen:
            rank.ask(*command)
        return [rank.answer() for rank in chosen]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *details: object) -> None:
        for rank in self.started:
            rank.kill()
            rank.pipe.close()
