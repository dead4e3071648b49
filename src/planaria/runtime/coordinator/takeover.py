"""After a coordinator died and another took over: who is to come back, and what they may have missed."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from planaria.runtime import messages
from planaria.runtime.coordinator.chores import Chores
from planaria.runtime.coordinator.crowd import Crowd
from planaria.runtime.membership import events
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Worker


class Desk(Protocol):
    """Who has the membership."""

    state: State

    def apply(self, event: events.AnyEvent) -> None: ...

    def lose(self, worker: Worker, *, how: str, reason: str) -> None: ...

    def want(self, count: int) -> None: ...


class Takeover:
    """Belongs to the coordinator's loop; without :meth:`begin` nobody is missed."""

    def __init__(
        self, *, limits: messages.Limits, spares: int, crowd: Crowd, chores: Chores, desk: Desk
    ) -> None:
        self._limits = limits
        self._spares = spares
        self._crowd = crowd
        self._chores = chores
        self._desk = desk
        self._returning: set[Worker] = set()
        """Members of the coordinator that died that have not come back to this one."""
        self._deserted = False
        """Taken over at its end, and no launcher has come back yet."""
        self._incomplete = False
        """Taken over, and not yet known whether spares are missing."""

    def begin(self) -> None:
        """Take over what the coordinator that died has left."""
        state = self._desk.state
        self._returning = set(state.members)
        if state.phase == "ended":
            self._deserted = True
            return
        self._incomplete = True
        self._chores.later(self._limits.timeout, self._missing)
        if state.phase == "waiting" or (state.phase == "forming" and state.deaths):
            event = events.SpareTimedOut(epoch=state.epoch)
            self._chores.later(state.config.no_spare, lambda: self._desk.apply(event))

    def launcher_back(self, *, spawns: bool) -> None:
        """A launcher is here; ``spawns``: one that can start workers."""
        self._deserted = self._deserted and not spawns
        if self._incomplete and spawns:
            self._incomplete = False
            # It tells next of the processes that it has.
            self._chores.later(self._limits.silence, self._replenish)

    def forget(self, worker: Worker) -> None:
        """``worker`` need not come back."""
        self._returning.discard(worker)

    def back(self, worker: Worker) -> None:
        """Tell a worker that has attached again what it may have missed.

        In the middle of a recovery nobody knows what was still said, and the keys of the epoch are
        gone: once all are back, the owners begin a new epoch.
        """
        state = self._desk.state
        self._returning.discard(worker)
        self._regroup_if_all_are_back()
        member = state.members.get(worker)
        if state.phase != "training" or member is None or member.shard is None:
            return
        self._crowd.send(worker, messages.Released(epoch=state.epoch))
        if state.committed is not None:
            message = messages.AllCommitted(epoch=state.epoch, generation=state.committed)
            self._crowd.send(worker, message)

    async def told(self) -> None:
        """Wait until everyone has come back to hear of the end, at most one time-out.

        They have nobody else to tell them.
        """
        end = time.monotonic() + self._limits.timeout
        while time.monotonic() < end and (
            self._deserted or not self._returning.isdisjoint(self._desk.state.members)
        ):
            await asyncio.sleep(0.02)

    def _replenish(self) -> None:
        """Ask for the spares that the coordinator that died may have been about to ask for."""
        state = self._desk.state
        if not state.config.refill or state.joinless or state.phase in ("forming", "ended"):
            return
        there = {*state.members, *self._crowd.processes()}.difference(state.fenced)
        count = state.config.world + self._spares - len(there) - state.owed
        if count > 0:
            self._desk.want(count)

    def _missing(self) -> None:
        """Who was a member of the coordinator that died and has not come back is lost."""
        for worker in sorted(self._returning):
            reason = "it did not come back to its coordinator"
            self._desk.lose(worker, how="stream", reason=reason)
        self._returning.clear()
        self._regroup_if_all_are_back()

    def _regroup_if_all_are_back(self) -> None:
        state = self._desk.state
        if state.phase not in ("building", "recovering"):
            return
        if self._returning.isdisjoint(state.owners.values()):
            reason = "the coordinator was started again in the middle of a recovery"
            self._desk.apply(events.Regroup(epoch=state.epoch, reason=reason))
