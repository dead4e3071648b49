"""What the control thread tells the training thread.

A :class:`Seat` is the worker's place in the run as it is known now: newest epoch, assignment, plan,
newest generation that is committed for all, and whether it is over. The control thread writes, the
training thread waits; nothing else is shared between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from planaria.errors import CommError, EpochSuperseded, RunError
from planaria.runtime.messages import AllCommitted, Assign, Break, Plan, SaveDurable, Stop


class Seat:
    """Thread-safe; every wait of the training thread ends when the run does: by :class:`RunError`
    with the reason, or by ``SystemExit`` where it was ended on purpose.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.epoch = 0
        """Newest epoch that this worker has heard of."""
        self.assignment: Assign | None = None
        self.plan: Plan | None = None
        self.committed = -1
        """Newest generation that is committed for all shards."""
        self.stop: Stop | None = None
        self.save: SaveDurable | None = None
        self.waiting = False
        """Whether the training thread waits for a generation to be committed for all."""

    # ------------------------------------------------------------------ control thread

    def assigned(self, message: Assign) -> None:
        with self._changed:
            self.assignment = message
            self.epoch = max(self.epoch, message.epoch)
            self._changed.notify_all()

    def broke(self, message: Break) -> None:
        with self._changed:
            self.epoch = max(self.epoch, message.epoch)
            self._changed.notify_all()

    def planned(self, message: Plan) -> None:
        with self._changed:
            self.plan = message
            self._changed.notify_all()

    def all_committed(self, message: AllCommitted) -> None:
        with self._changed:
            self.committed = max(self.committed, message.generation)
            self._changed.notify_all()

    def stopped(self, message: Stop) -> None:
        with self._changed:
            self.stop = message
            self._changed.notify_all()

    def asked_to_save(self, message: SaveDurable) -> None:
        with self._changed:
            self.save = message

    # ------------------------------------------------------------------ training thread

    def wait_assignment(self) -> Assign | None:
        """The first assignment; None where the run ends well without this worker being needed."""
        self._wait(lambda: self.assignment is not None or self._over(), None)
        return self.assignment if self.stop is None else None

    def go_back_to(self, generation: int) -> None:
        """A plan goes on from ``generation``: nothing newer is committed, if something was.

        A checkpoint that was asked for is forgotten: the coordinator asks again once all have
        restored, the new owner too, and names another generation.
        """
        with self._changed:
            self.save = None
            self.committed = min(self.committed, generation)

    def wait_plan(self, epoch: int, timeout: float) -> Plan:
        """The plan of ``epoch``; raises :class:`EpochSuperseded` where a newer epoch exists."""

        def ready() -> bool:
            return self.epoch > epoch or (self.plan is not None and self.plan.epoch >= epoch)

        # No time-out of its own: the coordinator waits for spares, and ends the run if none comes.
        self._wait(ready, None)
        if self.epoch > epoch or self.plan is None or self.plan.epoch != epoch:
            raise EpochSuperseded(f"epoch {epoch} is over: epoch {self.epoch} exists")
        return self.plan

    def wait_newer(self, epoch: int, timeout: float) -> None:
        """Until an epoch after ``epoch`` is known: a communicator failed, the coordinator will say
        who was lost.

        Raises :class:`CommError` where it knows of nobody within ``timeout`` seconds.
        """
        if not self._wait(lambda: self.epoch > epoch, timeout):
            raise CommError(
                f"a communicator failed in epoch {epoch}, and within {timeout:g} s no worker was "
                "found to be lost: a network fault between living workers; look at the journal"
            )

    def wait_committed(self, generation: int, epoch: int) -> None:
        """Until ``generation`` is committed for all; raises :class:`EpochSuperseded` on a break."""
        self.waiting = self.committed < generation
        try:
            self._wait(lambda: self.committed >= generation or self.epoch > epoch, None)
        finally:
            self.waiting = False
        if self.committed < generation:
            raise EpochSuperseded(f"epoch {epoch} is over: epoch {self.epoch} exists")

    def wait_end(self, epoch: int) -> Stop | None:
        """Until the run is over, which gives its ``Stop``, or a newer epoch exists: None."""
        self._wait(lambda: self.epoch > epoch or self._over(), None)
        return self.stop

    def _over(self) -> bool:
        return self.stop is not None

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._over(), timeout)
            if ready() and not (self.stop is not None and self.stop.exit_code != 0):
                return True
            self.check()
            return ready()

    def check(self) -> None:
        """Raises where the run is over: RunError with its reason, or SystemExit where all is well."""
        if self.stop is None:
            return
        if not self.stop.wished:
            raise RunError(self.stop.reason)
        raise SystemExit(0)
