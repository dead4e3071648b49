"""Captures on their way to the holder: one thread per worker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from planaria.errors import ChecksumError, CommError, EpochSuperseded
from planaria.runtime.memory import wire
from planaria.runtime.memory.slots import Buffers, Slot
from planaria.runtime.memory.transfers import push
from planaria.runtime.memory.wire import Access

RETRY_SECONDS = 0.5
"""After a send that failed, until the next try (our choice)."""


@dataclass(frozen=True)
class _Target:
    address: str | None
    epoch: int
    floor: int


class Pusher:
    """Sends each complete capture to the present holder, oldest first; one thread.

    Args:
        buffers: of this worker; :meth:`notify` says that they have something new.
        access: token, time-out, fence.
        on_ack: called with (epoch, generation, bytes, address) when the holder at ``address`` has it
            complete and checked; address None: nobody holds copies.
        on_error: called with (epoch of the target, generation, what its send failed by), never for a
            target that is another by then. A kept connection that failed, and bytes that arrived changed,
            have been given one more try over a new connection. After a CommError, bytes that
            arrived changed twice included, the send is tried again every :data:`RETRY_SECONDS`,
            until it succeeds or :meth:`direct` names another target, and nothing more is told
            meanwhile.
        on_event: for injected faults: called with ``"replicate"`` in the middle of each send.
    """

    def __init__(
        self,
        buffers: Buffers,
        access: Access,
        *,
        on_ack: Callable[[int, int, int, str | None], None],
        on_error: Callable[[int, int, Exception], None],
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self._buffers = buffers
        self._access = access
        self._on_ack = on_ack
        self._on_error = on_error
        self._on_event = on_event
        self._changed = threading.Condition()
        self._target: _Target | None = None
        self._acknowledged = -1
        self._news = False
        self._told: _Target | None = None
        """For which a lost connection was reported."""
        self._closed = False
        self._sock: socket.socket | None = None
        self._peer: str | None = None
        self._thread = threading.Thread(target=self._run, name="planaria-push", daemon=True)
        self._thread.start()

    def direct(self, address: str | None, *, epoch: int, floor: int) -> None:
        """From ``epoch`` on, captures from generation ``floor`` on go to ``address``.

        ``floor`` is the plan's generation: it is sent again (or found there) so that it counts as
        held. ``address`` None: nobody holds copies; captures are acknowledged with 0 bytes.
        """
        with self._changed:
            self._target = _Target(address, epoch, floor)
            self._acknowledged = floor - 1
            self._news = True
            self._changed.notify_all()

    def notify(self, generation: int) -> None:
        """A capture is complete; to be given to :class:`~planaria.runtime.memory.snapshot.Capture`."""
        del generation
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, cutting what it sends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._sock is not None:
                wire.cut(self._sock)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._news and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                self._news = False
                target = self._target
            if target is not None:
                self._send_all(target)
        self._disconnect()

    def _send_all(self, target: _Target) -> None:
        while True:
            with self._changed:
                due = [g for g in self._buffers.captured() if g > self._acknowledged]
                if self._target is not target or not due or self._closed:
                    return
            try:
                count = self._send(target, due[0])
                if count is None:
                    return
                with self._changed:
                    if self._target is not target:
                        return
                    self._acknowledged = due[0]
                    self._told = None
                self._on_ack(target.epoch, due[0], count, target.address)
            except EpochSuperseded:
                return
            except CommError as error:
                # A holder that is merely slow, or whose connection broke, must not end protection.
                self._tell(error, target, due[0], once=True)
                with self._changed:
                    if not self._changed.wait_for(
                        lambda: self._closed or self._target is not target, RETRY_SECONDS
                    ):
                        self._news = True
                return
            # Also what a callback raises: a thread that ends in silence leaves the run unprotected.
            except Exception as error:
                self._tell(error, target, due[0])
                return

    def _tell(
        self, error: Exception, target: _Target, generation: int, *, once: bool = False
    ) -> None:
        with self._changed:
            # What an old target failed by says nothing about the present one.
            if self._target is not target or self._closed or (once and self._told is target):
                return
            self._told = target if once else None
        self._on_error(target.epoch, generation, error)

    def _send(self, target: _Target, generation: int) -> int | None:
        """Bytes sent; None where the capture was dropped meanwhile."""
        with self._buffers.reading(generation) as slot:
            if slot is None:
                return None
            if target.address is None:
                return 0
            kept = self._sock is not None and self._peer == target.address
            try:
                return self._push(slot, target, target.address)
            except EpochSuperseded:
                raise
            except ChecksumError:
                pass
            except CommError:
                # The kept connection may have been cut with its epoch while nothing was sent.
                if not kept:
                    raise
            try:
                return self._push(slot, target, target.address)
            except ChecksumError as error:
                raise CommError(
                    f"generation {generation} arrived at {target.address} damaged, twice: {error}"
                ) from error

    def _push(self, slot: Slot, target: _Target, address: str) -> int:
        try:
            return push(
                self._connected(address, target.epoch),
                slot,
                epoch=target.epoch,
                access=self._access,
                peer=address,
                on_event=self._on_event,
            )
        except BaseException:
            # Half a transfer may lie on it.
            self._disconnect()
            raise

    def _connected(self, address: str, epoch: int) -> socket.socket:
        """The kept connection where it leads to ``address``, else a new one."""
        if self._sock is not None and self._peer == address:
            return self._sock
        self._disconnect()
        sock = wire.connect(address, self._access, epoch)
        with self._changed:
            self._sock, self._peer = sock, address
        return sock

    def _disconnect(self) -> None:
        with self._changed:
            sock, self._sock, self._peer = self._sock, None, None
        if sock is not None:
            self._access.fence.leave(sock)
            sock.close()
