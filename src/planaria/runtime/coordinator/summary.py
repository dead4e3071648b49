"""``OUT/summary.json``: what a run's journal sums up to.

Pure over the entries, except for reading and writing the files; seconds and bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

from planaria.errors import DataError
from planaria.runtime.coordinator.journal import (
    JOURNAL_FILE,
    AllCommitted,
    AnyEntry,
    Decided,
    Detected,
    DurableSaved,
    Ended,
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
    """Of this start, from its first line to the last; what came before a resume is not in it."""
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
    """Newest durable checkpoint, one that an earlier start wrote included."""
    begun_at: int = 0
    """Generation of the checkpoint from which this start went on; 0: from the beginning."""
    restarts: int = 0
    """How often the whole set was started again, for a script that does not join."""


def summarise(entries: Iterable[AnyEntry]) -> Summary:
    """What a journal says of its last run, in one value.

    A folder that was used again holds several; a coordinator that took over goes on with the same.
    One pass, which keeps two numbers for each step and a handful for each recovery: the journal of
    a long run does not fit into memory.
    """
    account = _Account()
    for entry in entries:
        if isinstance(entry, Opened) and not entry.resumed:
            account = _Account()
        account.add(entry)
    return account.summary()


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


def _digest(parts: list[str], world: int) -> str | None:
    if len(parts) < world:
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Steps:
    """Seconds of each step and of its wait for protection, the newest word on each."""

    def __init__(self) -> None:
        self._first = 0
        self._seconds = array("d")
        self._waited = array("d")

    def put(self, step: int, seconds: float, waited: float) -> None:
        if not self._seconds:
            self._first = step
        if (missing := self._first - step) > 0:  # a run that went back below where it began
            empty = array("d", [math.nan]) * missing
            self._seconds, self._waited = empty + self._seconds, empty + self._waited
            self._first = step
        if (missing := step - self._first + 1 - len(self._seconds)) > 0:
            empty = array("d", [math.nan]) * missing
            self._seconds += empty
            self._waited += empty
        self._seconds[step - self._first] = seconds
        self._waited[step - self._first] = waited

    def known(self) -> list[float]:
        return [seconds for seconds in self._seconds if not math.isnan(seconds)]

    def waited(self) -> float:
        return sum(waited for waited in self._waited if not math.isnan(waited))


class _Recovery:
    """From the loss of an owner, or a regrouping without one, to whatever comes next.

    That is the next loss after all had restored, the next regrouping, or the end of the run.
    """

    def __init__(self, *, lost: Detected | None, injected: float | None) -> None:
        self._lost = lost
        self._injected = injected
        self._detected: list[Detected] = []
        self._epochs: list[EpochBegun] = []
        self._plan: Planned | None = None
        self._phases: dict[str, float] = {}
        self._released: float | None = None
        self._resumed: float | None = None
        self._protected: float | None = None

    @property
    def redone(self) -> int:
        """Steps done again; what counts is the plan that came to its end."""
        return 0 if self._plan is None else self._plan.redone

    def add(self, line: AnyEntry) -> None:
        plan = self._plan
        match line:
            case Detected() if line.shard is not None:
                self._detected.append(line)
            case EpochBegun():
                self._epochs.append(line)
            case Planned():
                self._plan, self._phases = line, {}
                self._released = self._resumed = self._protected = None
            case WorkerRestored() if plan is not None and line.epoch == plan.epoch:
                for name, seconds in line.phases.items():
                    self._phases[name] = max(self._phases.get(name, 0.0), seconds)
            case Released() if plan is not None and line.epoch == plan.epoch:
                self._released = self._released or line.mono
            case AllCommitted() if plan is not None and line.epoch >= plan.epoch:
                base = -1 if plan.generation is None else plan.generation
                if line.generation > base and self._resumed is None:
                    self._resumed = line.mono
            case Protected() if plan is not None and line.epoch >= plan.epoch:
                self._protected = self._protected or line.mono
            case _:
                pass

    def swap(self) -> Swap | None:
        """None where no owner was lost, or where that was before the run had begun."""
        if self._lost is None or not self._epochs:
            return None
        plan, released = self._plan, self._released
        resumed = None if released is None else self._resumed
        signal = self._lost.mono if self._injected is None else self._injected
        phases = {"detect": self._lost.mono - signal, **self._phases}
        if released is not None and resumed is not None:
            phases["resume"] = resumed - released
        if released is not None and self._protected is not None:
            phases["protect"] = max(0.0, self._protected - released)
        return Swap(
            epoch=plan.epoch if plan else self._epochs[-1].epoch,
            epochs=len(self._epochs),
            lost=tuple(sorted({d.shard for d in self._detected if d.shard is not None})),
            workers=tuple(dict.fromkeys(d.worker for d in self._detected)),
            how=tuple(d.how for d in self._detected),
            reason=self._epochs[0].reason,
            injected=self._injected is not None,
            generation=plan.generation if plan else None,
            redone=self.redone,
            phases=phases,
            recovery=None if released is None else released - signal,
            total=None if resumed is None else resumed - signal,
        )


class _Account:
    """One run, line by line."""

    def __init__(self) -> None:
        self._first: AnyEntry | None = None
        self._last: AnyEntry | None = None
        self._run = ""
        self._opened: Opened | None = None
        self._ended: Ended | None = None
        self._durable: int | None = None
        self._injected: dict[Worker, float] = {}
        self._faults = 0
        self._restarts = 0
        self._begun_at = 0
        self._scalars: dict[str, float] = {}
        self._finished: dict[Shard, ShardFinished] = {}
        self._generation = 0
        self._bytes = 0
        self._steps = _Steps()
        self._swaps: list[Swap] = []
        self._redone = 0
        self._recovery: _Recovery | None = None
        self._restoring = False

    def add(self, line: AnyEntry) -> None:
        self._first, self._last = self._first or line, line
        self._cut(line)
        if self._recovery is not None:
            self._recovery.add(line)
        match line:
            case Opened():
                self._run = self._run or line.run
                self._opened = line
                if not line.resumed:
                    self._durable = line.durable
                    self._begun_at = line.durable or 0
            case AllCommitted():
                self._generation = max(self._generation, line.generation)
                self._bytes += line.bytes
                if line.step_s is not None:
                    self._steps.put(line.generation, line.step_s, line.waited_s)
            case Scalars():
                self._scalars.update(as_floats(line.values))
            case Injected():
                self._injected[line.worker] = line.mono
                self._faults += 1
            case ShardFinished():
                self._finished[line.shard] = line
            case Decided() if line.name == "restart":
                self._restarts += 1
            case DurableSaved():
                self._durable = line.generation
            case Ended():
                self._ended = line
            case _:
                pass

    def _cut(self, line: AnyEntry) -> None:
        """Begin a new recovery where ``line`` is the first of one."""
        if isinstance(line, Released):
            self._restoring = False
        elif isinstance(line, Detected) and line.shard is not None:
            if not self._restoring:
                self._begin(_Recovery(lost=line, injected=self._injected.get(line.worker)))
        elif (
            isinstance(line, EpochBegun)
            and line.phase != "building"  # the beginning of the run is no recovery
            and not line.lost
            and not self._restoring
        ):
            self._begin(_Recovery(lost=None, injected=None))

    def _begin(self, recovery: _Recovery | None) -> None:
        if self._recovery is not None:
            self._redone += self._recovery.redone
            swap = self._recovery.swap()
            self._swaps += [] if swap is None else [swap]
        self._recovery = recovery
        self._restoring = True

    def summary(self) -> Summary:
        self._begin(None)
        if self._opened is None or self._first is None or self._last is None:
            raise DataError("the journal holds no run: its first line, 'opened', is missing")
        finished, world, steps = self._finished, self._opened.world, self._generation
        final = dict(self._scalars)
        for shard in sorted(finished, reverse=True):
            final.update(as_floats(finished[shard].result))
        seconds = self._steps.known()
        taken = steps - self._begun_at
        return Summary(
            run=self._run,
            exit_code=self._ended.exit_code if self._ended else None,
            reason=self._ended.reason if self._ended else "",
            world=world,
            steps=steps,
            seconds=self._last.mono - self._first.mono,
            step_s=statistics.median(seconds) if seconds else None,
            final=final,
            state_digest=_digest([f.state_digest for _, f in sorted(finished.items())], world),
            samples_digest=_digest([f.samples_digest for _, f in sorted(finished.items())], world),
            swaps=tuple(self._swaps),
            steps_redone=self._redone,
            injected=self._faults,
            protected_bytes=self._bytes,
            protected_bytes_per_step=self._bytes / taken if taken > 0 else 0.0,
            overhead=self._steps.waited() / sum(seconds) if seconds else None,
            durable=self._durable,
            begun_at=self._begun_at,
            restarts=self._restarts,
        )
