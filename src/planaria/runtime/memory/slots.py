"""Two host buffers for each shard, and the global rule by which one may be overwritten.

A worker keeps two captures of its own state (:class:`Buffers`) and two of each shard that it holds a
copy for (:class:`Held`). *Global rule:* a slot may be taken when it is empty, or when its generation
is older than the newest one that is announced as committed for all shards. With the local rule
("take the free one") there are schedules after which one loss leaves no generation that exists for
every shard; ``tests/unit/runtime/test_snapshot.py`` finds one, and none under the global rule.

The rule has a consequence for whoever calls: a worker that *skips* a capture because no slot is
free, while a peer does not, leaves the two with different generations, neither of which can ever be
committed. So either all workers wait, or all skip the same generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from planaria.errors import EpochSuperseded
from planaria.runtime.memory.layout import Head, Layout

GRAIN = 1 << 21
"""Buffers are whole multiples of this, in bytes: the size of a huge page."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the rule needs to know of a slot."""

    generation: int | None = None
    """None: empty or void."""
    busy: bool = False
    """Being written, or read by a transfer."""


def choose(
    slots: Sequence[Occupancy], *, generation: int, announced: int
) -> tuple[int | None, str]:
    """Index of the slot that ``generation`` may go into, or None, and the reason. Pure.

    ``announced``: newest generation that this worker knows to be committed for all shards; -1 where
    none is.
    """
    if any(slot.generation == generation for slot in slots):
        return None, f"generation {generation} has a slot already"
    free = [i for i, slot in enumerate(slots) if slot.generation is None and not slot.busy]
    if free:
        return free[0], f"slot {free[0]} is empty"
    old = [
        (slot.generation, i)
        for i, slot in enumerate(slots)
        if slot.generation is not None and slot.generation < announced and not slot.busy
    ]
    if old:
        oldest, index = min(old)
        return index, f"generation {oldest} is older than {announced}, committed for all"
    told = ", ".join(
        f"generation {slot.generation}{' in use' if slot.busy else ''}" for slot in slots
    )
    return None, f"the slots hold {told}, and {announced} is the newest committed for all"


class Slot:
    """A host buffer and what is in it. Made by :class:`Buffers` and :class:`Held`."""

    def __init__(self) -> None:
        self.generation: int | None = None
        self.complete = False
        self.void = False
        """Set where its generation was dropped while it was written or read: who does that goes on
        with memory that nobody changes, and empties it at the end."""
        self.writing = False
        self.readers = 0
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.layout: Layout | None = None
        """Of a worker's own capture."""
        self.head: Head | None = None
        """Of a copy that is held for another shard."""
        self.encoded = b""
        """The layout as it travels."""
        self.checksum = 0
        """xxh3-64 over ``encoded`` and the prefix, made by the owner and checked by all others."""
        self.epoch = 0
        """In which a peer sent it; of :class:`Held` only."""
        self.views: tuple[object, list[torch.Tensor]] | None = None
        """Typed views of ``memory`` for a list of leaves, kept by :class:`.snapshot.Capture`."""

    @property
    def occupancy(self) -> Occupancy:
        """For :func:`choose`."""
        return Occupancy(self.generation, self.writing or self.readers > 0)

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least ``nbytes`` long; its pages are touched. Contents are lost."""
        if self.memory.numel() >= nbytes:
            return
        size = -(-nbytes // GRAIN) * GRAIN
        self.views = None
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.memory.zero_()

    def bytes(self, start: int, stop: int) -> memoryview:
        """``memory[start:stop]``, writable, without a copy."""
        return self.memory.numpy().data[start:stop]

    def open(self, layout: Layout) -> memoryview:
        """Make room for all of ``layout``; the writable bytes of its prefix."""
        self.reserve(layout.total)
        self.layout = layout
        return self.bytes(0, layout.prefix)

    def empty(self) -> None:
        """Forget the contents and keep the memory."""
        self.generation, self.complete, self.void = None, False, False
        self.layout, self.head, self.encoded, self.checksum = None, None, b"", 0


class _Pairs:
    """Pairs of slots by key, under one lock and one announcement."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pairs: dict[int, tuple[Slot, Slot]] = {}
        self._announced = -1
        self._told = (0, -1)
        """The newest epoch that was begun or announced in, and the newest generation that is
        committed in it."""
        self._newest = 0
        """Epoch of the newest interrupt."""

    @property
    def announced(self) -> int:
        """Newest generation known to be committed for all shards; -1 before the first."""
        return self._announced

    def announce(self, generation: int, *, epoch: int) -> None:
        """``generation`` is committed for all shards in ``epoch``: older slots may be taken.

        Never goes back, and means nothing where ``epoch`` is over. It may come before the plan of
        ``epoch`` is carried out here, and is then kept through :meth:`begin_epoch`.
        """
        with self._changed:
            known, newest = self._told
            if epoch < known:
                return
            self._told = epoch, generation if epoch > known else max(newest, generation)
            self._announced = max(self._announced, generation)
            self._changed.notify_all()

    def void_after(self, generation: int) -> None:
        """Drop all generations newer than ``generation``."""
        self._void(lambda kept: kept > generation)

    def begin_epoch(self, *, epoch: int, keep: Iterable[int], committed: int) -> None:
        """A plan was made: drop all but the generations in ``keep``, and go on from ``committed``,
        or from what was announced in this very ``epoch`` already.

        What the plan does not go on from will never be committed, so it would hold its slot for
        ever; and a plan may start below what was announced before (from the disk). A plan of an
        epoch that is over changes nothing.
        """
        kept_ones = set(keep)
        with self._changed:
            known, newest = self._told
            if epoch < known:
                return
            self._announced = max(committed, newest) if epoch == known else committed
            self._told = epoch, self._announced
            self._drop_all(lambda kept: kept not in kept_ones)

    def _void(self, over: Callable[[int], bool]) -> None:
        with self._changed:
            self._drop_all(over)

    def _drop_all(self, over: Callable[[int], bool]) -> None:
        for slot in self._slots():
            if slot.generation is not None and over(slot.generation):
                self._drop(slot)
        self._changed.notify_all()

    def interrupt(self, epoch: int) -> None:
        """Epochs before ``epoch`` are over: whoever is in ``begin`` for one of them, or calls it
        later, gets :class:`~planaria.errors.EpochSuperseded`.
        """
        with self._changed:
            self._newest = max(self._newest, epoch)
            self._changed.notify_all()

    def complete(
        self, slot: Slot, *, layout: Layout | Head, encoded: bytes = b"", checksum: int = 0
    ) -> bool:
        """The slot holds all bytes of ``layout``. False where it was made void meanwhile."""
        with self._changed:
            slot.writing = False
            valid = not slot.void and slot.generation is not None
            if valid:
                slot.layout = layout if isinstance(layout, Layout) else None
                slot.head = layout if isinstance(layout, Head) else None
                slot.encoded, slot.checksum = encoded, checksum
                slot.complete = True
            else:
                slot.empty()
            self._changed.notify_all()
            return valid

    def abandon(self, slot: Slot) -> None:
        """Writing failed: the slot is empty again."""
        with self._changed:
            slot.writing = False
            slot.empty()
            self._changed.notify_all()

    def _slots(self) -> Iterator[Slot]:
        for pair in self._pairs.values():
            yield from pair

    def _drop(self, slot: Slot) -> None:
        if slot.writing or slot.readers:
            # Its writer is told by complete(), its last reader empties it; until then nobody else
            # may have the memory, and what readers hold of it must stay whole.
            slot.void = True
            slot.generation, slot.complete = None, False
        else:
            slot.empty()

    def _begin(
        self, key: int, generation: int, *, wait: float | None, epoch: int
    ) -> tuple[Slot | None, str]:
        with self._changed:
            pair = self._pairs.setdefault(key, (Slot(), Slot()))
            deadline = None if wait is None else time.monotonic() + wait
            while True:
                index, reason = choose(
                    [slot.occupancy for slot in pair],
                    generation=generation,
                    announced=self._announced,
                )
                # A level, not an edge: it may have changed between the caller's own look and here.
                if 0 < epoch < self._newest:
                    raise EpochSuperseded(
                        f"generation {generation} was not stored ({reason}): epoch {epoch} was "
                        f"superseded by epoch {self._newest}; report to it"
                    )
                if index is not None:
                    slot = pair[index]
                    slot.empty()
                    slot.generation, slot.writing = generation, True
                    return slot, reason
                left = None if deadline is None else deadline - time.monotonic()
                # Waiting helps against one that is being written, and may be abandoned.
                there = any(s.complete and s.generation == generation for s in pair)
                if there or (left is not None and left <= 0):
                    return None, reason
                self._changed.wait(left)

    def _generations(self, key: int) -> tuple[int, ...]:
        pair = self._pairs.get(key, ())
        return tuple(sorted(s.generation for s in pair if s.complete and s.generation is not None))

    @contextmanager
    def _reading(self, key: int, generation: int) -> Generator[Slot | None]:
        with self._changed:
            found = next(
                (
                    slot
                    for slot in self._pairs.get(key, ())
                    if slot.complete and slot.generation == generation
                ),
                None,
            )
            if found is not None:
                found.readers += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._changed:
                    found.readers -= 1
                    if found.void and not found.readers:
                        found.empty()
                    self._changed.notify_all()


class Buffers(_Pairs):
    """A worker's two captures of its own state.

    >>> buffers = Buffers()
    >>> slot = buffers.begin(0)
    >>> buffers.captured()
    ()
    """

    def __init__(self, *, reserve: int = 0) -> None:
        """``reserve``: bytes that both buffers have from the start; they grow when needed."""
        super().__init__()
        self._pairs[0] = (Slot(), Slot())
        self.reason = "nothing was captured yet"
        """Why the last :meth:`begin` gave the slot that it gave, or none."""
        for slot in self._pairs[0]:
            slot.reserve(reserve)

    def begin(self, generation: int, *, wait: float | None = 0.0, epoch: int = 0) -> Slot | None:
        """A slot for ``generation``, or None where the rule allows none within ``wait`` seconds
        (None: without limit).

        Raises :class:`~planaria.errors.EpochSuperseded` where ``epoch`` is over, before or while it
        waits. Epoch 0 is never over: for who has no coordinator.
        """
        slot, self.reason = self._begin(0, generation, wait=wait, epoch=epoch)
        return slot

    def captured(self) -> tuple[int, ...]:
        """Generations that are complete, oldest first."""
        with self._changed:
            return self._generations(0)

    @contextmanager
    def reading(self, generation: int) -> Generator[Slot | None]:
        """The complete slot of ``generation``, not overwritten inside the block; None: not there."""
        with self._reading(0, generation) as slot:
            yield slot


class Held(_Pairs):
    """What a holder keeps for other shards: two slots each, under the same rule."""

    def begin(
        self, shard: int, generation: int, *, wait: float | None = 0.0, epoch: int = 0
    ) -> tuple[Slot | None, str]:
        """A slot for ``generation`` of ``shard``, or None, and the reason; as
        :meth:`Buffers.begin`."""
        return self._begin(shard, generation, wait=wait, epoch=epoch)

    def held(self) -> dict[int, tuple[int, ...]]:
        """Complete generations by shard, for a :class:`~planaria.runtime.messages.Report`."""
        with self._changed:
            found = {shard: self._generations(shard) for shard in self._pairs}
            return {shard: generations for shard, generations in found.items() if generations}

    def drop(self, shard: int, generation: int) -> None:
        """Forget one generation: its owner has made it anew in a later epoch."""
        with self._changed:
            for slot in self._pairs.get(shard, ()):
                if slot.generation == generation:
                    self._drop(slot)
            self._changed.notify_all()

    def keep(self, shards: Iterable[int]) -> bool:
        """Free the memory of all other shards: only when their new holders have them.

        False where one of them is being written or read, so that it has to be asked for again.
        """
        kept, all_free = set(shards), True
        with self._changed:
            for shard in [shard for shard in self._pairs if shard not in kept]:
                if any(slot.writing or slot.readers for slot in self._pairs[shard]):
                    all_free = False
                else:
                    del self._pairs[shard]
        return all_free

    @contextmanager
    def reading(self, shard: int, generation: int) -> Generator[Slot | None]:
        """As :meth:`Buffers.reading`."""
        with self._reading(shard, generation) as slot:
            yield slot


Callback = Callable[[int], None]
"""Called with a generation."""
