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
"""Steps, or answers to pings, after which the run's own times are believed."""
ANSWERS = 40
"""Answers to pings of each worker that count; with the default time-out those of 12 s."""
PATIENCE = 6.0
"""Times the delay that nine of ten answers keep: where delays are exponential, as in a queue, one
answer in a million takes longer. Our choice."""


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


def slowness(delays: Sequence[float]) -> float | None:
    """The seconds that nine of ten of the newest 40 ``delays`` keep; None where under 5 are known.

    ``delays``: seconds from ping to answer, of one worker, oldest first.
    """
    recent = sorted(list(delays)[-ANSWERS:])
    return recent[math.ceil(0.9 * len(recent)) - 1] if len(recent) >= ENOUGH else None


def silence_limit(
    own: float | None, others: Sequence[float], *, limits: Limits
) -> tuple[float, str]:
    """Seconds that a worker may leave a ping unanswered, and why.

    ``own`` and ``others``: :func:`slowness` of this worker and of each other one. On a machine that
    is starved everybody's answers are late, so the middle one of the others speaks for it; one that
    is slow by itself makes the run patient with nobody else. Six times the larger of the two is
    allowed, at least ``limits.silence``, which is all that a quiet machine gives, and at most the
    time-out. Source: our choice.
    """
    mine, theirs = own or 0.0, statistics.median_low(others) if others else 0.0
    delay, whose = max((mine, "its own"), (theirs, "the others'"))
    seconds = min(limits.timeout, PATIENCE * delay)
    if seconds <= limits.silence:
        return limits.silence, f"{limits.silence:g} s"
    return seconds, f"{seconds:.3g} s: nine of ten of {whose} last answers took up to {delay:.2g} s"


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
    patience: float = 0.0
    """Seconds without an answer that it may have; never less than ``limits.silence``."""


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
    silences = {worker: now - where.answered for worker, where in progress.items()}
    allowed = {w: max(limits.silence, where.patience) for w, where in progress.items()}
    if mute := [worker for worker, silence in silences.items() if silence > allowed[worker]]:
        silent = max(mute, key=lambda worker: silences[worker])
        return silent, (
            f"{silent} has not answered a ping for {silences[silent]:.1f} s (limit "
            f"{allowed[silent]:.3g} s)"
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
