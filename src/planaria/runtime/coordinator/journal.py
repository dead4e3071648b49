"""``OUT/journal.jsonl``: one typed event a line, appended and flushed.

Only the coordinator writes it. Times: ``at`` is ``time.time()``; ``mono`` is ``time.monotonic()``
of the coordinator's machine, from which all durations are computed. Seconds and bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import msgspec

from planaria.errors import DataError, RunError
from planaria.runtime.messages import Shard, Worker

JOURNAL_FILE = "journal.jsonl"

_NOT_FINITE: Mapping[str, Literal["nan", "inf", "-inf"]] = MappingProxyType(
    {"nan": "nan", "inf": "inf", "-inf": "-inf"}
)


Numbers = dict[str, float | Literal["nan", "inf", "-inf"]]
"""Numbers by name; what is not finite is text, because JSON has no number for it."""


def as_numbers(values: Mapping[str, float]) -> Numbers:
    """``values`` as a line holds them."""
    return {
        name: value if math.isfinite(value) else _NOT_FINITE[repr(float(value))]
        for name, value in values.items()
    }


def as_floats(values: Numbers) -> dict[str, float]:
    """The numbers that :func:`as_numbers` was given."""
    return {name: float(value) for name, value in values.items()}


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Entry(
    msgspec.Struct, frozen=True, kw_only=True, tag=_snake, tag_field="event", omit_defaults=True
):
    """Base of all lines; the tag is the class name in snake case."""

    at: float = msgspec.field(default_factory=time.time)
    mono: float = msgspec.field(default_factory=time.monotonic)


class Opened(Entry, frozen=True):
    """A coordinator has begun to listen for this run."""

    run: str
    world: int
    spares: int
    address: str
    pid: int
    version: str = ""
    resumed: bool = False
    durable: int | None = None
    """Newest complete checkpoint in the folder at that moment."""


class WorkerAttached(Entry, frozen=True):
    worker: Worker
    node: str
    pid: int
    address: str
    again: bool = False
    """It was attached before this coordinator was started."""


class Refused(Entry, frozen=True):
    """Somebody who was not let in."""

    who: str
    reason: str


class WorkerReady(Entry, frozen=True):
    worker: Worker


class Injected(Entry, frozen=True):
    """A test's fault is about to fire."""

    worker: Worker
    fault: str
    step: int
    phase: str


class Detected(Entry, frozen=True):
    """A worker is taken for lost or hung."""

    worker: Worker
    how: str
    """stream, pidfd, silence or progress."""
    reason: str
    shard: Shard | None = None
    """The shard it owned; None for a spare."""


class ProcessExited(Entry, frozen=True):
    """The launcher's word on how a process ended."""

    worker: Worker
    pid: int
    description: str
    code: int | None = None


class EpochBegun(Entry, frozen=True):
    epoch: int
    phase: str
    reason: str
    lost: tuple[Shard, ...] = ()


class Planned(Entry, frozen=True):
    epoch: int
    generation: int | None
    redone: int
    transfers: int
    reason: str
    lost: tuple[Shard, ...] = ()
    rollback: bool = False


class WorkerRestored(Entry, frozen=True):
    worker: Worker
    epoch: int
    generation: int
    phases: dict[str, float]
    shard: Shard | None = None


class Released(Entry, frozen=True):
    """All owners of the epoch have restored."""

    epoch: int


class Protected(Entry, frozen=True):
    """Every shard of the epoch has its state at ``generation`` twice."""

    epoch: int
    generation: int | None


class Broke(Entry, frozen=True):
    """A communicator failed under a worker."""

    worker: Worker
    epoch: int
    reason: str


class AllCommitted(Entry, frozen=True):
    """A generation is held twice for every shard."""

    epoch: int
    generation: int
    bytes: int = 0
    """Sent to holders since the line before this one, over all shards."""
    step_s: float | None = None
    """The slowest worker's seconds for that step."""
    waited_s: float = 0.0
    """The longest that a training thread waited for protection in that step."""


class Scalars(Entry, frozen=True):
    worker: Worker
    step: int
    values: Numbers
    shard: Shard | None = None


class DurableSaved(Entry, frozen=True):
    generation: int
    path: str
    seconds: float = 0.0


class DurableFailed(Entry, frozen=True):
    generation: int
    reason: str


class ShardFinished(Entry, frozen=True):
    shard: Shard
    worker: Worker
    generation: int
    state_digest: str
    samples_digest: str
    result: Numbers = {}


class Decided(Entry, frozen=True):
    """A decision of membership that has no line of its own."""

    name: str
    fields: dict[str, Any]


class Torn(Entry, frozen=True):
    """What a coordinator had written of a line when it died."""

    text: str


class Ended(Entry, frozen=True):
    exit_code: int
    reason: str


AnyEntry = (
    Opened
    | WorkerAttached
    | Refused
    | WorkerReady
    | Injected
    | Detected
    | ProcessExited
    | EpochBegun
    | Planned
    | WorkerRestored
    | Released
    | Protected
    | Broke
    | AllCommitted
    | Scalars
    | DurableSaved
    | DurableFailed
    | ShardFinished
    | Decided
    | Torn
    | Ended
)


class Journal:
    """Appends to ``path``; a journal that exists is continued, never overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        try:
            torn = _cut_torn_line(path)
            self._stream: IO[bytes] = path.open("ab")
        except OSError as error:
            raise RunError(
                f"journal {path} cannot be opened: {error.strerror}; free the place or choose "
                "another --out"
            ) from None
        if torn:
            self.write(Torn(text=torn))

    def write(self, entry: Entry, *, sync: bool = False) -> None:
        """Append one line and flush it; ``sync`` waits until it is on the disk."""
        try:
            self._stream.write(self._encoder.encode(entry) + b"\n")
            self._stream.flush()
            if sync:
                os.fsync(self._stream.fileno())
        except OSError as error:
            raise RunError(
                f"journal {self.path} cannot be written: {error.strerror}; free space and start "
                "the run again from its durable checkpoint"
            ) from None

    def close(self) -> None:
        self._stream.close()


def _cut_torn_line(path: Path) -> str:
    """Take an unfinished last line off the file; its text, empty where there is none."""
    try:
        stream = path.open("r+b")
    except FileNotFoundError:
        return ""
    with stream:
        end = stream.seek(0, os.SEEK_END)
        # A line is short beside this; only the tail is looked at, whatever the file's size.
        start = max(0, end - (1 << 20))
        stream.seek(start)
        tail = stream.read(end - start)
        if not tail or tail.endswith(b"\n"):
            return ""
        cut = tail.rfind(b"\n") + 1
        stream.truncate(start + cut)
        return tail[cut:].decode("utf-8", errors="replace")


def read(path: Path) -> Iterator[AnyEntry]:
    """The entries of a journal, in order.

    Raises ``DataError`` that names file and line where one cannot be read. An unfinished last line
    is left out: its coordinator is still writing, or was killed and has not come back.
    """
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(
            f"journal {path} cannot be read: {error.strerror}; give the --out folder of a run"
        ) from None
    decoder = msgspec.json.Decoder(AnyEntry)
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise DataError(
                    f"journal {path}, line {number}: {error}; "
                    "the file was changed by something else, so mend or remove that line"
                ) from None
