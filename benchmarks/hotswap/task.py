"""What a benchmarked job is, when it is struck, and what its workers write down. Imports no torch.

The same job runs under three systems: ``planaria run``, ``torchrun`` and torchft. All of them are
struck by the same code, :class:`Striker`, and write the same lines, :class:`Notes`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

Regime = Literal["replicated", "all sharded"]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One SIGKILL, in the middle of a backward pass."""

    step: int
    """It falls into this step, or into the first one after it in which all workers take part."""
    shard: int
    """Rank or shard of the worker that is hit, whoever owns it then."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A byte-level language model of Llama's kind, trained on Python's own sources."""

    folder: str
    """Of this run: notes, marks of strikes, checkpoints."""
    workers: int
    regime: Regime
    width: int
    layers: int
    context: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a step, on each worker."""
    steps: int
    seed: int = 1
    strikes: tuple[Strike, ...] = ()
    checkpoint_every: int = 0
    """Steps between two checkpoints on disk; torchrun's job only."""
    protection: Literal["on", "alternating"] = "on"
    """``alternating``: see :func:`protects`; Planaria's job only."""
    undisturbed: int = 0
    """Steps at the beginning that are always protected, and not measured."""

    def write(self) -> Path:
        """Write ``task.json`` into the folder, which is made."""
        path = Path(self.folder) / "task.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def read(path: str) -> Task:
        """What :meth:`write` wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["strikes"] = tuple(Strike(**strike) for strike in values["strikes"])
        return Task(**values)

    @property
    def notes(self) -> Path:
        return Path(self.folder) / "notes.jsonl"


def protects(task: Task, generation: int) -> bool:
    """Whether ``generation`` is protected where protection alternates.

    In pairs of steps, one with and one without; each pair begins with the state in which the pair
    before it has ended (on, off, off, on, …), so that a drift of the machine falls on both. The last
    step is always protected: a run ends with a commit.
    """
    if task.protection == "on" or generation <= task.undisturbed or generation >= task.steps:
        return True
    pair, second = divmod(generation - task.undisturbed - 1, 2)
    return (pair + second) % 2 == 0


class Notes:
    """Appends lines to a file that several processes share; each line is one write."""

    def __init__(self, task: Task) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(task.notes, flags, 0o644)

    def write(self, note: str, **fields: Any) -> None:
        """One line with the clock that all processes of a machine share."""
        line = {"note": note, "mono": time.monotonic(), "pid": os.getpid(), **fields}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def read_notes(task: Task, note: str | None = None) -> Iterator[dict[str, Any]]:
    """Lines that the workers have written so far, of one kind or of all."""
    if not task.notes.exists():
        return
    for line in task.notes.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if note is None or found["note"] == note:
            yield found


class Striker:
    """Kills the own process where a strike is due; each strike falls once, whoever comes again."""

    def __init__(self, task: Task, notes: Notes) -> None:
        self._task = task
        self._notes = notes
        self._next = 0
        self.step = 0
        """The step that is being attempted."""
        self.shard = -1

    def backward(self) -> None:
        """Called in the middle of the backward pass."""
        strike = self._due()
        if strike is None or self.shard != strike.shard:
            return
        try:
            os.close(os.open(self._mark(self._next), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self._notes.write("signal", step=self.step, shard=self.shard, strike=self._next)
        os.kill(os.getpid(), signal.SIGKILL)

    def _due(self) -> Strike | None:
        strikes = self._task.strikes
        while self._next < len(strikes) and self._mark(self._next).exists():
            self._next += 1
        if self._next == len(strikes) or self.step < strikes[self._next].step:
            return None
        return strikes[self._next]

    def _mark(self, index: int) -> Path:
        return Path(self._task.folder) / f"strike-{index}"


def memory() -> dict[str, int]:
    """Bytes of this process: resident, and its proportional share where pages are shared."""
    info = psutil.Process().memory_full_info()
    return {"rss": info.rss, "pss": info.pss}


def loopback_bytes() -> int:
    """Bytes that this machine has sent over its loopback interface since it was started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent
