"""Where the time of one swap goes: phases along the critical path, which add up to the whole.

The runtime's journal gives each worker's laps; those of different workers overlap (a survivor's
``report`` lasts as long as the spare still builds). Here every second between the signal and the
next committed step belongs to exactly one phase: that of the worker for which all others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from planaria.runtime.coordinator.journal import (
    AllCommitted,
    AnyEntry,
    Detected,
    Entry,
    EpochBegun,
    Planned,
    Released,
    WorkerRestored,
)

PHASES = (
    "detect",
    "broken attempt",
    "build",
    "plan",
    "rebuild",
    "move",
    "load",
    "verify",
    "step",
    "commit",
)
"""In the order in which they come:

detect: from the signal until the coordinator knows, and has ordered everyone out;
broken attempt: until the slowest survivor has left the rest of its attempt;
build: what the spare needs beyond that to build model and optimizer;
plan: reports, the plan, and their ways;
rebuild, move, load, verify: of the worker that comes last into ``verify``, which all enter together;
step: the slowest worker's next step; commit: the rest until it is held twice for every shard.
"""
_OWN = ("rebuild", "move", "load")
"""What a worker does of the plan before it meets the others in ``verify``."""

E = TypeVar("E", bound=Entry)


def critical_path(
    entries: Sequence[AnyEntry], *, signal: float, until: float = float("inf")
) -> dict[str, float]:
    """Seconds by phase, in the order of :data:`PHASES`, of the swap that ``signal`` has caused.

    ``signal`` and ``until`` (that of the next swap) are times of the journal's ``mono``. The values
    sum up to the time from the signal to the first commit after all have restored. Raises
    :class:`LookupError` where the journal has no complete swap there.
    """
    lines = [line for line in entries if signal <= line.mono < until]
    detected = _some(lines, Detected)[0]
    begun = _some([line for line in lines if line.mono >= detected.mono], EpochBegun)[0]
    planned = _some(lines, Planned)[-1]
    of_epoch = [line for line in lines if getattr(line, "epoch", None) == planned.epoch]
    restored = _some(of_epoch, WorkerRestored)
    released = _some(of_epoch, Released)[0]
    committed = _some([line for line in lines if line.mono > released.mono], AllCommitted)[0]
    last = max(restored, key=lambda line: sum(line.phases.get(p, 0.0) for p in _OWN))
    to_plan = planned.mono - begun.mono
    drained, built = (
        max(line.phases.get(phase, 0.0) for line in restored) for phase in ("drain", "build")
    )
    path = {"detect": begun.mono - signal}
    path["broken attempt"] = min(drained, to_plan)
    path["build"] = min(max(0.0, built - drained), to_plan - path["broken attempt"])
    path["plan"] = to_plan - path["broken attempt"] - path["build"]
    for phase in _OWN:
        path[phase] = last.phases.get(phase, 0.0)
    # What is left of it is the common collective, and the way of the last word on it.
    path["verify"] = released.mono - planned.mono - sum(path[p] for p in _OWN)
    resumed = committed.mono - released.mono
    path["step"] = min(committed.step_s or 0.0, resumed)
    path["commit"] = resumed - path["step"]
    return path


def _some(lines: Iterable[AnyEntry], kind: type[E]) -> list[E]:
    found = [line for line in lines if isinstance(line, kind)]
    if not found:
        raise LookupError(f"the journal has no {kind.__name__} after the signal")
    return found
