"""Communicators that failed: mostly the first sign of a loss; else the owners regroup."""

from __future__ import annotations

import time
from typing import Protocol

from planaria.runtime import messages
from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.chores import Chores
from planaria.runtime.coordinator.watch import Watch
from planaria.runtime.membership import events
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Worker


class Desk(Protocol):
    """Who has the membership."""

    state: State

    def apply(self, event: events.AnyEvent) -> None: ...


class Breaks:
    """Gives whoever was lost time to be found, then has ``desk`` regroup the owners."""

    def __init__(
        self,
        book: journal.Journal,
        *,
        limits: messages.Limits,
        watch: Watch,
        chores: Chores,
        desk: Desk,
    ) -> None:
        self._book = book
        self._pings = 2 * limits.ping
        self._longest = limits.no_spare
        self._watch = watch
        self._chores = chores
        self._desk = desk

    def heard(self, worker: Worker, message: messages.Broke) -> None:
        """``worker`` says that a communicator failed."""
        entry = journal.Broke(worker=worker, epoch=message.epoch, reason=message.reason)
        self._book.write(entry)
        self._look_later(
            worker,
            message,
            moved=self._watch.moved(worker),
            until=time.monotonic() + self._longest,
        )

    def _look_later(
        self, worker: Worker, message: messages.Broke, *, moved: int, until: float
    ) -> None:
        def look() -> None:
            state = self._desk.state
            if message.epoch != state.epoch:
                return
            if message.generation is not None:
                # The copy is sent again meanwhile: that may have succeeded, or be on its way.
                member = state.members.get(worker)
                shard = None if member is None else member.shard
                if shard is not None and state.ledger.get(shard, -1) >= message.generation:
                    return
                now = self._watch.moved(worker)
                if now > moved and time.monotonic() < until:
                    self._look_later(worker, message, moved=now, until=until)
                    return
            reason = f"a communicator failed under {worker} and nobody is lost: {message.reason}"
            self._desk.apply(events.Regroup(epoch=message.epoch, reason=reason))

        pause = self._watch.patience(now=time.monotonic()) + self._pings
        self._chores.later(pause, look)
