"""Copies in peers' memory: sent after every capture, fetched by a spare.

Each worker runs one :class:`DataServer`: others PUT their captures' prefix into its
:class:`~planaria.runtime.memory.slots.Held`, and GET what it holds for a lost shard, or the tensors that
its own capture shares with it. One :class:`Pusher` per worker sends capture after capture to the
present holder (:mod:`.pusher`); :func:`regrow` is the spare's side (:mod:`.transfers`).

The wire, the proof of the token and the fence are in :mod:`.wire`; TLS is not spoken here, and that
module says why.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from planaria.errors import (
    ChecksumError,
    CommError,
    EpochSuperseded,
    PlanariaError,
    RunError,
    UserError,
)
from planaria.runtime.memory import wire
from planaria.runtime.memory.layout import Head, Region
from planaria.runtime.memory.pusher import Pusher
from planaria.runtime.memory.slots import Buffers, Held, Slot
from planaria.runtime.memory.snapshot import prefix_checksum
from planaria.runtime.memory.transfers import Fetched, fetch, push, regrow
from planaria.runtime.memory.wire import Access, Frame, Kind

__all__ = ["Access", "DataServer", "Fetched", "Pusher", "fetch", "push", "regrow"]

MAX_CONNECTIONS = 4096
"""Of one data server, at a time; each has a thread that sleeps (our choice)."""
RETRY_SECONDS = 0.5
"""After a connection that could not be taken, until the next try (our choice)."""


class DataServer:
    """Listens for peers of one run; daemon threads, one per connection.

    Args:
        token: the run's secret.
        run: the run's name; a peer of another run is refused like one with another token.
        host: to listen on, and to be reached by.
        port: 0 takes a free one.
        timeout: seconds without a byte (``access.timeout`` may be set when limits are known).

    Raises:
        UserError: the port is in use, or the host is not this machine's.
    """

    def __init__(
        self,
        token: str,
        *,
        run: str,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 30.0,
        buffers: Buffers | None = None,
        held: Held | None = None,
    ) -> None:
        self.access = Access(token, run=run, timeout=timeout)
        self.buffers = buffers if buffers is not None else Buffers()
        self.held = held if held is not None else Held()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise UserError(
                f"the data server cannot listen on {host} port {port} ({error.strerror}): "
                "choose another port, or an address of this machine"
            ) from error
        self.address = wire.join_address(host, self._listener.getsockname()[1])
        """``host:port``, as peers reach it."""
        self._closed = False
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._listen, name="planaria-data", daemon=True)
        self._thread.start()

    def set_epoch(self, epoch: int) -> None:
        """Older epochs are over: their connections are cut, and whoever waits is freed by
        :class:`~planaria.errors.EpochSuperseded`, on this side and in this worker's own calls.
        """
        self.access.fence.advance(epoch)
        self.held.interrupt(epoch)
        self.buffers.interrupt(epoch)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._closed = True
        wire.cut(self._listener)
        self._listener.close()
        self.access.fence.cut_all()
        self._thread.join(timeout=5.0)

    def _listen(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Too many open files, or a peer that went away at once: others still come.
                if not self._closed:
                    time.sleep(RETRY_SECONDS)
                continue
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="planaria-peer", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                if not wire.accept(sock, self.access):
                    return
                # A connection waits for its next request as long as its peer lives.
                sock.settimeout(None)
                while not self._closed:
                    self._answer(sock, wire.receive(sock))
        # A peer that is gone, or that speaks something else, costs its connection and nothing more.
        except (OSError, MemoryError, PlanariaError):
            pass
        finally:
            self.access.fence.leave(sock)
            self._room.release()

    def _answer(self, sock: socket.socket, frame: Frame) -> None:
        try:
            self.access.fence.enter(sock, frame.epoch)
            sock.settimeout(self.access.timeout)
            if frame.kind == Kind.PUT:
                self._put(sock, frame)
            elif frame.kind == Kind.GET:
                self._get(sock, frame)
            else:
                raise CommError(f"a peer asked with a frame of kind {frame.kind.name}")
            sock.settimeout(None)
        except EpochSuperseded as error:
            present = self.access.fence.epoch
            wire.send(sock, Frame(Kind.STALE, epoch=present, aux=str(error).encode()))

    def _put(self, sock: socket.socket, frame: Frame) -> None:
        # The spare that fetches it checks the rest of the table.
        head = Head.decode(frame.aux)
        told = (head.shard, head.generation, head.prefix)
        if told != (frame.shard, frame.generation, frame.length):
            raise CommError(f"a peer's header and its table differ: {frame} against {told}")
        if self._has(frame):
            wire.send(sock, _reply(Kind.HAVE, frame))
            return
        slot, reason = self.held.begin(
            frame.shard, frame.generation, wait=self.access.timeout, epoch=frame.epoch
        )
        if slot is None:
            wire.send(sock, _reply(Kind.REFUSED, frame, reason))
            return
        try:
            slot.reserve(frame.length)
        # torch says it by a RuntimeError.
        except (MemoryError, RuntimeError) as error:
            self.held.abandon(slot)
            told = f"there is no memory for {frame.length} bytes of shard {frame.shard} ({error})"
            wire.send(sock, _reply(Kind.REFUSED, frame, told))
            return
        try:
            slot.epoch = frame.epoch
            wire.send(sock, _reply(Kind.GO, frame))
            wire.receive_state(sock, slot.bytes(0, frame.length), frame, self.access.moved)
            self.access.fence.check(frame.epoch)
        except ChecksumError as error:
            self.held.abandon(slot)
            wire.send(sock, _reply(Kind.CORRUPT, frame, str(error)))
            return
        except BaseException:
            self.held.abandon(slot)
            raise
        if not self.held.complete(slot, layout=head, encoded=frame.aux, checksum=frame.checksum):
            raise EpochSuperseded(
                f"generation {frame.generation} of shard {frame.shard} was dropped by a newer epoch"
            )
        wire.send(sock, _reply(Kind.ACK, frame))

    def _has(self, frame: Frame) -> bool:
        """Whether the very same bytes are held; what an older epoch left instead is dropped."""
        with self.held.reading(frame.shard, frame.generation) as slot:
            if slot is None:
                return False
            if slot.checksum == frame.checksum:
                return True
            older = slot.epoch < frame.epoch
        if older:
            self.held.drop(frame.shard, frame.generation)
        return False

    def _get(self, sock: socket.socket, frame: Frame) -> None:
        shards = _unpack_shards(frame.aux)
        with contextlib.ExitStack() as stack:
            if not shards:
                slot = stack.enter_context(self.held.reading(frame.shard, frame.generation))
                if slot is not None and slot.head is not None:
                    self._stream(sock, frame, slot, Region((), 0, slot.head.prefix))
                    return
            slot = stack.enter_context(self.buffers.reading(frame.generation))
            layout = slot.layout if slot is not None else None
            if slot is None or layout is None or not (shards or layout.shard == frame.shard):
                reason = (
                    f"generation {frame.generation} of shard {frame.shard} is not here: held are "
                    f"{self.held.held()}, captured are {self.buffers.captured()}"
                )
                wire.send(sock, _reply(Kind.REFUSED, frame, reason))
                return
            try:
                region = layout.region(shards)
            except RunError as error:
                wire.send(sock, _reply(Kind.REFUSED, frame, str(error)))
                return
            self._stream(sock, frame, slot, region)

    def _stream(self, sock: socket.socket, frame: Frame, slot: Slot, region: Region) -> None:
        state = slot.bytes(region.offset, region.offset + region.nbytes)
        checksum = prefix_checksum(slot.encoded, state) if region.shards else slot.checksum
        told = (frame.epoch, frame.generation, frame.shard, slot.encoded, region.nbytes, checksum)
        wire.send(sock, Frame(Kind.DATA, *told))
        wire.send_state(sock, state, self.access.moved)


def _reply(kind: Kind, frame: Frame, told: str = "") -> Frame:
    return Frame(kind, frame.epoch, frame.generation, frame.shard, told.encode())


def _unpack_shards(aux: bytes) -> tuple[int, ...]:
    if len(aux) % 4:
        raise CommError(f"a peer asked for a replica set in {len(aux)} bytes, no multiple of 4")
    return struct.unpack(f">{len(aux) // 4}i", aux)
