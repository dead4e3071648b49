"""How long anything may take, derived from one number and from the run's own steps; and whose fault
it is when it takes longer. Pure: times come in as arguments.

Source: method note "hot swap", step 7; the factors are our choice, with reasons beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planaria.errors import ConfigError
from planaria.runtime.messages import Limits, Worker

SHORTEST = 2.0
"""Seconds; below it a rebuild would have less time than the detection of a silent worker takes."""
ENOUGH = 5
"""Steps after which the run's own times are believed."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Every time-out of a run from the one that the user sets.

    ``ping < silence < rebuild < transfer < timeout < no_spare < collective`` for every valid value.
    """

    timeout: float = 30.0
    """Seconds that any single part of a recovery may take; at least 2."""

    def __post_init__(self) -> None:
        if not (SHORTEST <= self.timeout < math.inf):
            raise ConfigError(
                f"timeout is {self.timeout:g} seconds: give a number of at least {SHORTEST:g}"
            )

    def limits(self) -> Limits:
        """The derived time-outs, in seconds.

        ``silence`` is 1/20 (1.5 s of 30), so that a SIGSTOP is noticed within two seconds; not
        below 0.5 s, because a busy machine keeps a control thread waiting for tenths of a second,
        and not above 10 s. Five pings fit into it, so that one late answer is not a silence. A
        rebuild takes a third and a transfer two thirds, so that a failed one leaves time for the
        next epoch. A collective may wait for a peer that compiles or evaluates, and nobody relies
        on its time-out to notice a loss (design.md, decision 2): it is the longest.
        """
        silence = min(10.0, max(0.5, self.timeout / 20))
        return Limits(
            timeout=self.timeout,
            rebuild=self.timeout / 3,
            transfer=self.timeout * 2 / 3,
            collective=self.timeout * 20,
            ping=silence / 5,
            silence=silence,
            no_spare=self.timeout * 10,
        )


def step_limit(history: Sequence[float], *, phase: str, limits: Limits) -> tuple[float, str]:
    """Seconds that all workers together may spend in ``phase`` without progress, and why.

    ``history``: seconds of this run's attempts, oldest first; the newest 50 count. A step may take
    eight medians and ten spreads (the median absolute deviation, scaled to a standard deviation),
    and never less than a third of the time-out: a false alarm costs a swap, a late one seconds.
    Raises :class:`ConfigError` for an unknown phase.
    """
    recent = list(history)[-50:]
    median = statistics.median(recent) if recent else 0.0
    if phase == "idle":
        return math.inf, "an idle worker has no limit"
    if phase in ("first", "compile") or (phase == "step" and len(recent) < ENOUGH):
        seconds = max(limits.timeout * 20, 50 * median)
        return seconds, (
            f"{seconds:.3g} s: {phase} may include compilation, and {len(recent)} steps are known"
        )
    if phase in ("evaluation", "checkpoint"):
        seconds = max(limits.timeout * 20, 200 * median)
        return seconds, f"{seconds:.3g} s for {phase}, which is longer by nature"
    if phase == "data":
        seconds = max(limits.timeout * 4, 20 * median)
        return seconds, f"{seconds:.3g} s for data, which may come from a slow disk"
    if phase != "step":
        raise ConfigError(
            f"phase is {phase!r}: give step, first, compile, evaluation, checkpoint, data or idle"
        )
    spread = 1.4826 * statistics.median(abs(seconds - median) for seconds in recent)
    seconds = max(limits.timeout / 3, 8 * median + 10 * spread)
    return seconds, (
        f"{seconds:.3g} s: the median of {len(recent)} steps is {median:.3g} s, "
        f"their spread {spread:.3g} s"
    )


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What is known of one owner when its run makes no progress."""

    answered: float
    """Time of its last ``Pong``, in seconds of the clock that ``now`` is read from."""
    collective: int
    """Collectives it has entered in this epoch."""
    inside: bool
    """Whether its training thread waits in one."""
    waiting: bool = False
    """Whether its training thread waits for protection, so for others."""


def blame(
    progress: Mapping[Worker, Whereabouts], *, now: float, limits: Limits
) -> tuple[Worker | None, str]:
    """The owner that holds up the others, and why it is thought so; None where nobody stands out.

    First who does not answer pings (the longest silent one), then who is outside of every
    collective while others wait in one, or for protection, then who has entered the fewest. Among
    equals the one that is named first in ``progress``. Who waits for protection waits for others,
    and is never blamed for more than silence.
    """
    if not progress:
        return None, "there are no owners"
    silent = max(progress, key=lambda worker: now - progress[worker].answered)
    silence = now - progress[silent].answered
    if silence > limits.silence:
        return silent, (
            f"{silent} has not answered a ping for {silence:.1f} s (limit {limits.silence:g} s)"
        )
    free = [worker for worker, where in progress.items() if not where.waiting]
    if not free:
        return None, (
            f"all {len(progress)} owners wait for protection and nothing is sent: nobody stands out"
        )
    outside = [worker for worker in free if not progress[worker].inside]
    waiting, idle = len(free) - len(outside), len(progress) - len(free)
    if outside and (waiting or idle):
        last = min(outside, key=lambda worker: progress[worker].collective)
        others = f"{waiting} of {len(progress)} owners wait in one"
        if not waiting:
            others = f"{idle} of {len(progress)} owners wait for its state to be protected"
        return last, (
            f"{last} is in no collective, {others} ({last} has entered {progress[last].collective})"
        )
    last = min(free, key=lambda worker: progress[worker].collective)
    fewest = progress[last].collective
    most = max(where.collective for where in progress.values())
    if fewest < most:
        return last, f"{last} has entered {fewest} collectives, others up to {most}"
    what = "wait in the same collective" if waiting else "compute"
    if idle:
        return None, (
            f"{idle} of {len(progress)} owners wait for protection and the others {what}: nobody "
            "stands out"
        )
    return None, f"all {len(progress)} owners {what}: nobody stands out"
