"""Kills in the middle of a backward pass, under Planaria, ``torchrun`` and torchft, in turns.

One row a kill: seconds from the signal until the interrupted step is committed, by the same rule for
all three, and for Planaria the phases of the way to the next commit.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap import systems
from hotswap.paths import critical_path
from hotswap.task import Regime, Strike, Task, read_notes
from planaria.errors import RunError
from planaria.runtime.coordinator.journal import JOURNAL_FILE, AllCommitted, AnyEntry, read
from planaria.runtime.coordinator.summary import read_summary


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured; the jobs of all systems are the same."""

    rounds: int
    """Each round is one run of every system."""
    kills: int
    """In a run of Planaria."""
    others: int
    """Kills in a run of torchrun and of torchft."""
    workers: int
    width: int
    """Of the replicated job; the sharded one has twice of it, so four times the parameters."""
    layers: int
    context: int
    batch: int
    """Of the replicated job; half of it where all is sharded."""
    sharded_batch: int
    gap: int
    """Steps between two kills: enough for the next spare to be warm."""
    checkpoint_every: int
    """Steps between two of torchrun's checkpoints; its kills fall into the middle."""


FIRST = 8
"""Step of the first kill, after the first steps' warming up and the note on memory."""


def units(size: Size) -> Iterator[tuple[str, str, Regime]]:
    """(name, system, regime) of each run, alternating."""
    for turn in range(size.rounds):
        yield f"recovery/{turn}/planaria/replicated", "planaria", "replicated"
        yield f"recovery/{turn}/torchrun", "torchrun", "replicated"
        yield f"recovery/{turn}/planaria/all-sharded", "planaria", "all sharded"
        yield f"recovery/{turn}/torchft", "torchft", "replicated"


def task_of(
    size: Size, *, system: str, regime: Regime, folder: Path, turn: int, **more: Any
) -> Task:
    """The job of one run, with its kills: shards take turns, shard 0 included."""
    sharded = regime == "all sharded"
    if system == "torchrun":
        every = size.checkpoint_every
        steps = [every * (1 + i) + every // 2 for i in range(size.others)]
    else:
        kills = size.kills if system == "planaria" else size.others
        steps = [FIRST + i * size.gap for i in range(kills)]
    strikes = [Strike(step=step, shard=(i + turn) % size.workers) for i, step in enumerate(steps)]
    values: dict[str, Any] = {
        "folder": str(folder),
        "workers": size.workers,
        "regime": regime,
        "width": size.width * (2 if sharded else 1),
        "layers": size.layers,
        "context": size.context,
        "batch": size.sharded_batch if sharded else size.batch,
        "steps": steps[-1] + 5 if system != "torchft" else 1_000_000,
        "strikes": tuple(strikes),
        "checkpoint_every": size.checkpoint_every if system == "torchrun" else 0,
    }
    return Task(**{**values, **more})


def measure(
    size: Size, *, system: str, regime: Regime, folder: Path, turn: int, limit: float
) -> list[dict[str, Any]]:
    """One run; its rows. Raises :class:`RunError` where not every kill was got over."""
    task = task_of(size, system=system, regime=regime, folder=folder, turn=turn)
    if system == "planaria":
        out = systems.planaria(task, spares=1, limit=limit)
        rows = of_planaria(task, out)
    elif system == "torchrun":
        systems.torchrun(task, limit=limit)
        rows = of_torchrun(task)
    else:
        systems.torchft(task, limit=limit)
        rows = of_torchft(task)
    if len(rows) != len(task.strikes):
        raise RunError(
            f"{len(task.strikes)} kills were due and {len(rows)} rows came; see {folder}"
        )
    memory = list(read_notes(task, "memory"))
    return [
        *({"system": system, "regime": regime, **row} for row in rows),
        *({"row": "memory", "system": system, "regime": regime, **_plain(m)} for m in memory),
    ]


_KEPT = ("shard", "rss", "pss", "state", "buffers")


def _plain(note: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in note.items() if k in _KEPT}


def of_planaria(task: Task, out: Path) -> list[dict[str, Any]]:
    """Rows of a run of Planaria, from its journal."""
    entries = list(read(out / JOURNAL_FILE))
    summary = read_summary(out)
    signals = list(read_notes(task, "signal"))
    if len(summary.swaps) != len(signals):
        raise RunError(f"{len(signals)} kills and {len(summary.swaps)} swaps; see {out}")
    step_s = undisturbed(entries, before=signals[0]["step"])
    rows: list[dict[str, Any]] = []
    for index, (note, swap) in enumerate(zip(signals, summary.swaps, strict=True)):
        until = signals[index + 1]["mono"] if index + 1 < len(signals) else float("inf")
        path = critical_path(entries, signal=note["mono"], until=until)
        rows.append(
            {
                "row": "kill",
                "step": note["step"],
                "shard": note["shard"],
                "seconds": _committed(entries, note) - note["mono"],
                "total": sum(path.values()),
                "path": path,
                "redone": swap.redone,
                "epochs": swap.epochs,
                "how": list(swap.how),
                "step_s": step_s,
                "protect": swap.phases.get("protect"),
            }
        )
    return rows


def undisturbed(entries: list[AnyEntry], *, before: int) -> float:
    """Median seconds of a step before the first kill, the first two left out."""
    seconds = [
        line.step_s
        for line in entries
        if isinstance(line, AllCommitted) and line.step_s and 2 < line.generation < before
    ]
    return statistics.median(seconds)


def _committed(entries: list[AnyEntry], note: dict[str, Any]) -> float:
    return next(
        line.mono
        for line in entries
        if isinstance(line, AllCommitted)
        and line.mono > note["mono"]
        and line.generation >= note["step"]
    )


def of_torchrun(task: Task) -> list[dict[str, Any]]:
    """Rows of a run of ``torchrun``: the step counts as committed once every rank has done it."""
    rows: list[dict[str, Any]] = []
    notes = list(read_notes(task))
    for signal in (note for note in notes if note["note"] == "signal"):
        later = [note for note in notes if note["mono"] > signal["mono"]]
        done = _by_rank(later, signal["step"])
        if len(done) < task.workers:
            continue
        end = max(done.values())
        ready = [n for n in later if n["note"] == "ready"][: task.workers]
        marks = {
            name: max(n["mono"] for n in [m for m in later if m["note"] == name][: task.workers])
            for name in ("process", "imported", "ready")
        }
        rows.append(
            {
                "row": "kill",
                "step": signal["step"],
                "shard": signal["shard"],
                "seconds": end - signal["mono"],
                "path": {
                    "notice and start": marks["process"] - signal["mono"],
                    "imports": marks["imported"] - marks["process"],
                    "rendezvous, build, load": marks["ready"] - marks["imported"],
                    "steps done again": end - marks["ready"],
                },
                "redone": signal["step"] - min(note["step"] for note in ready),
                "step_s": _step_seconds(notes, before=signal["mono"]),
            }
        )
    return rows


def of_torchft(task: Task) -> list[dict[str, Any]]:
    """Rows of a run of torchft: the step counts once every survivor has committed it."""
    rows: list[dict[str, Any]] = []
    notes = list(read_notes(task))
    for signal in (note for note in notes if note["note"] == "signal"):
        later = [note for note in notes if note["mono"] > signal["mono"]]
        done = _by_rank(later, signal["step"])
        survivors = [mono for rank, mono in done.items() if rank != signal["shard"]]
        if len(survivors) < task.workers - 1:
            continue
        end = max(survivors)
        whole = [
            n["mono"]
            for n in later
            if n["note"] == "step" and n["participants"] == task.workers and n["mono"] > end
        ]
        rows.append(
            {
                "row": "kill",
                "step": signal["step"],
                "shard": signal["shard"],
                "seconds": end - signal["mono"],
                "whole_again": min(whole) - signal["mono"] if whole else None,
                "step_s": _step_seconds(notes, before=signal["mono"], workers=task.workers),
            }
        )
    return rows


def _by_rank(notes: list[dict[str, Any]], step: int) -> dict[int, float]:
    """When each rank has first done ``step`` or a later one."""
    done: dict[int, float] = {}
    for note in notes:
        if note["note"] == "step" and note["step"] >= step:
            done.setdefault(note["rank"], note["mono"])
    return done


def _step_seconds(
    notes: list[dict[str, Any]], *, before: float, workers: int | None = None
) -> float:
    """Median seconds between two steps of a rank, before a signal; the newest twenty."""
    times: dict[int, list[float]] = {}
    for note in notes:
        if note["note"] != "step" or note["mono"] >= before:
            continue
        if workers is None or note["participants"] == workers:
            times.setdefault(note["rank"], []).append(note["mono"])
    rank = max(times, key=lambda r: len(times[r]))
    newest = times[rank][-21:]
    return statistics.median(b - a for a, b in itertools.pairwise(newest))
