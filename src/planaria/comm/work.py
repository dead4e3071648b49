"""The pending result of an operation on a handle."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from planaria.comm.domain import Domain, Mode
from planaria.errors import UserError


class HandleWork(dist.Work):
    """The pending result of one operation on a handle.

    It never fails: where the communicator does, the worker is broken and the result is whatever is in
    the buffers; the attempt is left at its next boundary. ``wait`` raises ``AttemptBroken`` only where
    that is safe (see :meth:`Domain.may_complete`).
    """

    def __init__(self, domain: Domain, future: Future[Any]) -> None:
        super().__init__()
        self._domain = domain
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._finish()
        self._domain.still_member()
        if self._domain.mode is Mode.BROKEN and not self._domain.may_complete():
            self._domain.check()
        return True

    def _finish(self) -> None:
        self._future.wait()

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done()

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        self._finish()
        return self._future.value()

    def synchronize(self) -> None:
        self.wait()


class Pending:
    """An operation under way on the inside of a handle. It ends once: with the inner one, or given up.

    gloo can lose an operation: it takes a send that its peer is ready for off its list and writes it;
    where the peer has just died, that fails, and whoever waits for this send is not told (seen in
    torch 2.13, about once in 300 kills: ``waitSend`` of an all-reduce, until its time-out).
    """

    def __init__(
        self,
        domain: Domain,
        *,
        outputs: list[torch.Tensor],
        stuck: Callable[[], None],
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """``stuck`` is told when it is given up; ``arrived`` brings the result into ``outputs``."""
        self.future: Future[Any] = Future()
        self._domain = domain
        self.epoch = domain.epoch
        self._outputs = outputs
        self._stuck = stuck
        self._arrived = arrived
        self._lock = threading.Lock()
        self._ended = False

    def finish(self, done: Future[Any]) -> None:
        """The inner operation has ended. On gloo's own thread, which must never hold the last
        reference to an inner group: nothing here holds any.
        """
        self.end(done.value)

    def end(self, result: Callable[[], Any]) -> None:
        """It has ended, or will within ``result``, which raises where it has failed."""
        failed = ""  # words: the error itself would keep the operation alive, by its traceback
        try:
            result()
        except Exception as error:
            failed = f"{type(error).__name__}: {first_line(error)}"
        if not self._first():
            return
        try:
            if not failed and self._arrived is not None:
                with torch.no_grad():
                    self._arrived()
        except Exception as error:
            failed = f"{type(error).__name__}: {first_line(error)}"
        try:
            if failed:
                self._domain.fail(self.epoch, failed)
        finally:  # whatever fails here, the training thread must not wait for ever
            self._domain.leave(self.epoch, self)
            self.future.set_result(self._outputs)

    def give_up(self) -> bool:
        """Nobody will end it: whoever waits goes on, with whatever is in the buffers. Any thread.

        False where it has ended meanwhile.
        """
        if not self._first():
            return False
        self._stuck()
        self._domain.leave(self.epoch, self)
        self.future.set_result(self._outputs)
        return True

    def _first(self) -> bool:
        with self._lock:
            first, self._ended = not self._ended, True
            return first


class WaitedWork(HandleWork):
    """For inner works without a future, which end only in ``wait``: gloo's send and recv.

    Another thread stands in that ``wait``, since nobody can be called out of it: gloo may lose these
    operations, too, and the one who waits for them here must be free to go on. One that nobody waits
    for, as a broken schedule leaves them, is not missed.
    """

    def __init__(self, domain: Domain, pending: Pending, work: Any) -> None:
        super().__init__(domain, pending.future)
        self._pending = pending
        self._work = work

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._domain.expect(self._pending)
            # Without a time-out of its own it would have the one of the group's constructor, which
            # is short, for the sake of rebuilds: a stage that waits for a slow one would fail.
            wait = functools.partial(work.wait, timedelta(seconds=self._domain.timeout))
            threading.Thread(
                target=self._pending.end, args=(wait,), name="planaria-wait", daemon=True
            ).start()
        self._future.wait()

    def get_future(self) -> Future[Any]:
        self._finish()
        return self._future

    def is_completed(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self._finish()
        return self._future.done()


def last(works: Sequence[HandleWork]) -> HandleWork:
    """One work for several that were launched in order on one group, which also end in order."""
    if not works:
        raise UserError("a coalesced operation was called without tensors; pass at least one")
    futures = [work.get_future() for work in works]
    collected: Future[Any] = torch.futures.collect_all(futures)
    return HandleWork(works[-1]._domain, collected)


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that gloo appends."""
    lines = str(error).splitlines()
    return lines[0] if lines else "no message"
