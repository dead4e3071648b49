"""``OUT/summary.json``: what a run's journal sums up to.

Pure over the entries, except for reading and writing the files; seconds and bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from planaria.errors import DataError
from planaria.runtime.coordinator.journal import (
    JOURNAL_FILE,
    AllCommitted,
    AnyEntry,
    Detected,
    DurableSaved,
    Ended,
    Entry,
    EpochBegun,
    Injected,
    Opened,
    Planned,
    Protected,
    Released,
    Scalars,
    ShardFinished,
    WorkerRestored,
    as_floats,
    read,
)
from planaria.runtime.messages import Shard, Worker

SUMMARY_FILE = "summary.json"

E = TypeVar("E", bound=Entry)


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery, from the signal to the next committed step."""

    epoch: int
    """The epoch in which it came to its end."""
    epochs: int
    """How many it took: more than one where something failed on the way."""
    lost: tuple[Shard, ...]
    workers: tuple[Worker, ...]
    how: tuple[str, ...]
    """How each was noticed: stream, pidfd, silence, progress."""
    reason: str
    injected: bool
    """Whether a test's fault was its cause; else ``detect`` is unknown and 0."""
    generation: int | None
    """The run went on from here."""
    redone: int
    """Steps done again, the interrupted one included."""
    phases: dict[str, float]
    """Seconds: detect (signal to notice), drain, build, report, rebuild, move, load, verify (the
    slowest worker's), resume (all restored to the next commit), protect (all restored until every
    shard is held twice again)."""
    recovery: float | None
    """Seconds from the signal until all had restored."""
    total: float | None
    """Seconds from the signal to the next committed step; None where none came."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``OUT/summary.json``."""

    run: str
    exit_code: int | None
    """None while the run is alive, or where its coordinator was killed."""
    reason: str
    world: int
    steps: int
    """Newest generation committed for all shards."""
    seconds: float
    """From the first line to the last."""
    step_s: float | None
    """Median over committed steps of the slowest worker's seconds."""
    final: dict[str, float]
    """The newest value of each scalar, and what shards gave as their result."""
    state_digest: str | None
    """Over all shards; None where not all have finished."""
    samples_digest: str | None
    swaps: tuple[Swap, ...]
    steps_redone: int
    """Over all swaps, and over the recoveries in which communicators failed and nobody was lost."""
    injected: int
    """Faults that tests let fire."""
    protected_bytes: int
    """Sent to holders over the whole run."""
    protected_bytes_per_step: float
    overhead: float | None
    """Time that training threads waited for protection, as a share of step time; the whole cost
    (memory bandwidth, cores) is only seen in paired runs."""
    durable: int | None
    """Newest durable checkpoint."""


def summarise(entries: Iterable[AnyEntry]) -> Summary:
    """What a journal says of its last run, in one value.

    A folder that was used again holds several; a coordinator that took over goes on with the same.
    """
    lines = list(entries)
    begins = [i for i, x in enumerate(lines) if isinstance(x, Opened) and not x.resumed]
    lines = lines[begins[-1] :] if begins else lines
    opened = _all(lines, Opened)
    if not opened:
        raise DataError("the journal holds no run: its first line, 'opened', is missing")
    world = opened[-1].world
    commits = _all(lines, AllCommitted)
    timed = {c.generation: c for c in commits if c.step_s is not None}
    step_seconds = [c.step_s for c in timed.values() if c.step_s is not None]
    waited = sum(c.waited_s for c in timed.values())
    finished = {f.shard: f for f in _all(lines, ShardFinished)}
    final: dict[str, float] = {}
    for line in _all(lines, Scalars):
        final.update(as_floats(line.values))
    for shard in sorted(finished, reverse=True):
        final.update(as_floats(finished[shard].result))
    swaps = tuple(_swaps(lines))
    steps = max((c.generation for c in commits), default=0)
    ended = _all(lines, Ended)
    saved = _all(lines, DurableSaved)
    volume = sum(c.bytes for c in commits)
    return Summary(
        run=opened[0].run,
        exit_code=ended[-1].exit_code if ended else None,
        reason=ended[-1].reason if ended else "",
        world=world,
        steps=steps,
        seconds=lines[-1].mono - lines[0].mono,
        step_s=statistics.median(step_seconds) if step_seconds else None,
        final=final,
        state_digest=_digest([f.state_digest for _, f in sorted(finished.items())], world),
        samples_digest=_digest([f.samples_digest for _, f in sorted(finished.items())], world),
        swaps=swaps,
        steps_redone=_redone(lines),
        injected=len(_all(lines, Injected)),
        protected_bytes=volume,
        protected_bytes_per_step=volume / steps if steps else 0.0,
        overhead=waited / sum(step_seconds) if step_seconds else None,
        durable=saved[-1].generation if saved else None,
    )


def write_summary(out: Path) -> Summary:
    """Sum up ``OUT/journal.jsonl`` into ``OUT/summary.json``; the file is replaced as a whole."""
    summary = summarise(read(out / JOURNAL_FILE))
    partial = out / (SUMMARY_FILE + ".partial")
    text = json.dumps(msgspec.to_builtins(summary), indent=1, allow_nan=True)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, out / SUMMARY_FILE)
    return summary


def read_summary(out: Path) -> Summary:
    """``OUT/summary.json``; ``DataError`` where there is none or it cannot be read."""
    path = out / SUMMARY_FILE
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Summary)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise DataError(f"summary {path} cannot be read: {error}") from None


def _all(lines: Iterable[AnyEntry], kind: type[E]) -> list[E]:
    return [line for line in lines if isinstance(line, kind)]


def _digest(parts: list[str], world: int) -> str | None:
    if len(parts) < world:
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _recoveries(lines: list[AnyEntry]) -> Iterator[tuple[int, int]]:
    """Cut the journal into recoveries: from the loss of an owner to whatever comes next.

    That is the next loss after all had restored, a regrouping in which nobody was lost, or the end.
    """
    begins: list[int] = []
    restoring = False
    for index, line in enumerate(lines):
        if isinstance(line, Released):
            restoring = False
        elif isinstance(line, Detected) and line.shard is not None:
            if not restoring:
                begins.append(index)
            restoring = True
        elif (
            isinstance(line, EpochBegun)
            and line.phase != "building"  # the beginning of the run is no recovery
            and not line.lost
            and not restoring
        ):
            begins.append(index)
            restoring = True
    yield from itertools.pairwise([*begins, len(lines)])


def _swaps(lines: list[AnyEntry]) -> Iterator[Swap]:
    """The recoveries in which an owner was lost."""
    for begin, end in _recoveries(lines):
        if isinstance(lines[begin], Detected):
            swap = _swap(lines[:begin], lines[begin:end])
            if swap is not None:
                yield swap


def _redone(lines: list[AnyEntry]) -> int:
    """Steps done again over all recoveries; what counts of each is the plan that came to its end."""
    plans = (_all(lines[begin:end], Planned) for begin, end in _recoveries(lines))
    return sum(made[-1].redone for made in plans if made)


def _swap(before: list[AnyEntry], lines: list[AnyEntry]) -> Swap | None:
    detected = [d for d in _all(lines, Detected) if d.shard is not None]
    epochs = _all(lines, EpochBegun)
    if not epochs:
        return None
    plans = _all(lines, Planned)
    plan = plans[-1] if plans else None
    epoch = plan.epoch if plan else epochs[-1].epoch
    released = next((r.mono for r in _all(lines, Released) if r.epoch == epoch), None)
    base = plan.generation if plan is not None and plan.generation is not None else -1
    commits = [] if released is None else [c for c in _all(lines, AllCommitted) if c.epoch >= epoch]
    resumed = next((c.mono for c in commits if c.generation > base), None)
    protected = next((p.mono for p in _all(lines, Protected) if p.epoch >= epoch), None)
    cause = [i for i in _all(before, Injected) if i.worker == detected[0].worker]
    signal = cause[-1].mono if cause else detected[0].mono
    phases = {"detect": detected[0].mono - signal}
    for restored in _all(lines, WorkerRestored):
        if restored.epoch == epoch:
            for name, seconds in restored.phases.items():
                phases[name] = max(phases.get(name, 0.0), seconds)
    if released is not None and resumed is not None:
        phases["resume"] = resumed - released
    if released is not None and protected is not None:
        phases["protect"] = max(0.0, protected - released)
    return Swap(
        epoch=epoch,
        epochs=len(epochs),
        lost=tuple(sorted({d.shard for d in detected if d.shard is not None})),
        workers=tuple(dict.fromkeys(d.worker for d in detected)),
        how=tuple(d.how for d in detected),
        reason=epochs[0].reason,
        injected=bool(cause),
        generation=plan.generation if plan else None,
        redone=plan.redone if plan else 0,
        phases=phases,
        recovery=None if released is None else released - signal,
        total=None if resumed is None else resumed - signal,
    )
