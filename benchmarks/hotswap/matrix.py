"""Every worker, killed and stopped in every phase of a step, in both regimes.

One run holds one fault for each worker, of one kind in one phase. Each row is a cell: whether its
fault has fired, how the loss was noticed, seconds, steps done again; and whether the run ended with
the digests of the undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotswap import systems
from hotswap.task import Regime, Task
from planaria.errors import RunError
from planaria.runtime.coordinator.journal import JOURNAL_FILE, Injected, read
from planaria.runtime.coordinator.summary import read_summary
from planaria.runtime.inject import PHASES, parse

Action = Literal["kill", "stop"]
REGIMES: tuple[Regime, ...] = ("replicated", "all sharded")
ACTIONS: tuple[Action, ...] = ("kill", "stop")
MAX_REDO = 2
"""The runtime's own default."""


@dataclass(frozen=True, kw_only=True)
class Size:
    workers: int
    phases: tuple[str, ...] = PHASES
    gap: int = 5
    """Steps between two faults."""
    timeout: float = 20.0
    """The run's one time-out: a stopped worker is noticed after a twentieth of it."""


@dataclass(frozen=True)
class Unit:
    """One run: all workers hit once, or none."""

    regime: Regime
    action: Action | None
    phase: str | None

    @property
    def name(self) -> str:
        regime = self.regime.replace(" ", "-")
        if self.action is None:
            return f"matrix/{regime}/undisturbed"
        return f"matrix/{regime}/{self.action}/{self.phase}"


def units(size: Size) -> Iterator[Unit]:
    for regime in REGIMES:
        yield Unit(regime, None, None)
        for phase in size.phases:
            for action in ACTIONS:
                yield Unit(regime, action, phase)


def measure(size: Size, unit: Unit, *, folder: Path, limit: float) -> list[dict[str, Any]]:
    """One run; its rows."""
    faults = _faults(size, unit)
    task = Task(
        folder=str(folder),
        workers=size.workers,
        regime=unit.regime,
        width=64,
        layers=2,
        context=32,
        batch=2,
        steps=size.gap * (size.workers + 1),
    )
    # All spares are there from the start, so that a fault never waits for a fresh one.
    out = systems.planaria(
        task,
        spares=len(faults),
        refill=False,
        timeout=size.timeout,
        inject=faults,
        limit=limit,
    )
    summary = read_summary(out)
    digests = {"state": summary.state_digest, "samples": summary.samples_digest}
    if None in digests.values():
        raise RunError(f"the run in {out} has no digests; see its journal")
    run = {"regime": unit.regime, "step_s": summary.step_s, **digests}
    if not faults:
        return [{"row": "undisturbed", **run}]
    fired = {line.fault for line in read(out / JOURNAL_FILE) if isinstance(line, Injected)}
    rows: list[dict[str, Any]] = []
    for text in faults:
        fault = parse(text)
        swaps = [swap for swap in summary.swaps if fault.worker in swap.lost]
        rows.append(
            {
                "row": "cell",
                "action": unit.action,
                "phase": unit.phase,
                "worker": fault.worker,
                "fired": text in fired,
                "swaps": len(swaps),
                "how": [how for swap in swaps for how in swap.how],
                "redone": max((swap.redone for swap in swaps), default=0),
                "seconds": swaps[0].total if swaps else None,
                **run,
            }
        )
    return rows


def _faults(size: Size, unit: Unit) -> list[str]:
    if unit.action is None:
        return []
    return [
        f"{unit.action}:worker={worker},step={size.gap * (worker + 1)},phase={unit.phase}"
        for worker in range(size.workers)
    ]
