"""What protection costs while nothing fails: paired ratios of step times, on against off.

Protection alternates from step to step in one process tree. A *period* goes from the end of one
step's body, where its state is captured, to the end of the next one's: so it holds everything that
is done for that state, on the training thread and beside it. One row a pair of periods.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap import systems
from hotswap.task import Regime, Task, protects, read_notes
from planaria.errors import RunError
from planaria.runtime.coordinator.journal import JOURNAL_FILE, AllCommitted, read


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    parts: int
    """Runs of each regime, in turns."""
    pairs: int
    """In each run."""
    workers: int
    width: int
    """Of the replicated job; the sharded one has twice of it, so four times the parameters."""
    layers: int
    context: int
    batch: int
    """Of the replicated job."""
    sharded_batch: int


UNDISTURBED = 6
"""Steps before the first pair: optimizer state and buckets are made in the first ones."""


def units(size: Size) -> Iterator[tuple[str, Regime]]:
    for part in range(size.parts):
        yield f"overhead/{part}/replicated", "replicated"
        yield f"overhead/{part}/all-sharded", "all sharded"


def measure(size: Size, *, regime: Regime, folder: Path, limit: float) -> list[dict[str, Any]]:
    """One run; a row for each pair, and one for the run."""
    sharded = regime == "all sharded"
    task = Task(
        folder=str(folder),
        workers=size.workers,
        regime=regime,
        width=size.width * (2 if sharded else 1),
        layers=size.layers,
        context=size.context,
        batch=size.sharded_batch if sharded else size.batch,
        # The last period ends with the step after the last pair; the very last one only commits.
        steps=UNDISTURBED + 2 * size.pairs + 2,
        protection="alternating",
        undisturbed=UNDISTURBED,
    )
    out = systems.planaria(task, spares=0, limit=limit)
    return [*pairs(task), run_row(task, out)]


def pairs(task: Task) -> list[dict[str, Any]]:
    """Rows of a run, from what its workers have written down."""
    ends: dict[int, list[float]] = defaultdict(list)
    sent: dict[int, int] = {}
    used: dict[int, float] = defaultdict(float)
    for note in read_notes(task, "end"):
        ends[note["step"]].append(note["mono"])
        used[note["step"]] += note["cpu"]
        if note["shard"] == 0:
            sent[note["step"]] = note["lo"]
    whole = {step: sum(t) / len(t) for step, t in ends.items() if len(t) == task.workers}
    rows: list[dict[str, Any]] = []
    for first in range(task.undisturbed + 1, task.steps - 2, 2):
        row: dict[str, Any] = {"row": "pair", "regime": task.regime, "step": first}
        for step in (first, first + 1):
            if step not in whole or step + 1 not in whole:
                raise RunError(f"step {step} or the one after it left no note in {task.notes}")
            side = "on" if protects(task, step) else "off"
            row[side] = whole[step + 1] - whole[step]
            row[f"cpu_{side}"] = used[step + 1] - used[step]
            row[f"sent_{side}"] = sent[step + 1] - sent[step]
        rows.append(row)
    return rows


def run_row(task: Task, out: Path) -> dict[str, Any]:
    """What the journal says of the whole run: the training threads' waiting, and volumes."""
    commits = [
        line
        for line in read(out / JOURNAL_FILE)
        if isinstance(line, AllCommitted)
        and line.step_s
        and task.undisturbed < line.generation < task.steps
    ]
    memory = list(read_notes(task, "memory"))
    return {
        "row": "overhead",
        "regime": task.regime,
        "workers": task.workers,
        "waited": [line.waited_s for line in commits],
        "waited_share": [line.waited_s / line.step_s for line in commits if line.step_s],
        "bytes": [line.bytes for line in commits],
        "state": max(note["state"] for note in memory),
    }
