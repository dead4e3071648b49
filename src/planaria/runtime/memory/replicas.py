"""Copies in peers' memory: sent after every capture, fetched by a spare.

Each worker runs one :class:`DataServer`: others PUT their captures' prefix into its
:class:`~planaria.runtime.memory.slots.Held`, and GET what it holds for a lost shard, or the tensors that
its own capture shares with it. One :class:`Pusher` per worker sends capture after capture to the
present holder. :func:`regrow` is the spare's side.

The wire, the proof of the token and the fence are in :mod:`.wire`; TLS is not spoken here, and that
module says why.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from planaria.errors import (
    ChecksumError,
    CommError,
    EpochSuperseded,
    PlanariaError,
    RunError,
    UserError,
)
from planaria.runtime.memory import wire
from planaria.runtime.memory.layout import Head, Layout, Region
from planaria.runtime.memory.slots import Buffers, Held, Slot
from planaria.runtime.memory.snapshot import prefix_checksum
from planaria.runtime.memory.transfers import Fetched, fetch, push
from planaria.runtime.memory.wire import Access, Frame, Kind
from planaria.runtime.messages import Transfer

__all__ = ["Access", "DataServer", "Fetched", "Pusher", "fetch", "push", "regrow"]

MAX_CONNECTIONS = 4096
"""Of one data server, at a time; each has a thread that sleeps (our choice)."""
RETRY_SECONDS = 0.5
"""After a send that failed, until the next try (our choice)."""
PARALLEL_FETCHES = 4
"""Sources a spare reads from at a time (our choice)."""


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
                return
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
        except (OSError, PlanariaError):
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
            slot.epoch = frame.epoch
            wire.send(sock, _reply(Kind.GO, frame))
            wire.receive_state(sock, slot.bytes(0, frame.length), frame)
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
        wire.send_state(sock, state)


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
        on_error: called with what a send failed by, after one more try over a new connection. Where
            that is a CommError, it is called once for each target, and the send is tried again
            every :data:`RETRY_SECONDS` until it succeeds or :meth:`direct` names another target.
        on_event: for injected faults: called with ``"replicate"`` in the middle of each send.
    """

    def __init__(
        self,
        buffers: Buffers,
        access: Access,
        *,
        on_ack: Callable[[int, int, int, str | None], None],
        on_error: Callable[[Exception], None],
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
                self._tell(error, once_for=target)
                with self._changed:
                    if not self._changed.wait_for(
                        lambda: self._closed or self._target is not target, RETRY_SECONDS
                    ):
                        self._news = True
                return
            # Also what a callback raises: a thread that ends in silence leaves the run unprotected.
            except Exception as error:
                self._tell(error)
                return

    def _tell(self, error: Exception, *, once_for: _Target | None = None) -> None:
        if self._closed or (once_for is not None and self._told is once_for):
            return
        self._told = once_for
        self._on_error(error)

    def _send(self, target: _Target, generation: int) -> int | None:
        """Bytes sent; None where the capture was dropped meanwhile."""
        with self._buffers.reading(generation) as slot:
            if slot is None:
                return None
            if target.address is None:
                return 0
            fresh = self._connect(target.address)
            try:
                return self._push(slot, target, target.address)
            except EpochSuperseded:
                self._disconnect()
                raise
            except (CommError, ChecksumError):
                self._disconnect()
                if fresh:
                    raise
                # The kept connection may have been cut with its epoch while nothing was sent.
                self._connect(target.address)
                return self._push(slot, target, target.address)

    def _push(self, slot: Slot, target: _Target, address: str) -> int:
        if self._sock is None:
            raise CommError(f"there is no connection to the holder at {address}")
        return push(
            self._sock,
            slot,
            epoch=target.epoch,
            access=self._access,
            peer=address,
            on_event=self._on_event,
        )

    def _connect(self, address: str) -> bool:
        """Whether a connection was made; False: the kept one serves."""
        if self._sock is not None and self._peer == address:
            return False
        self._disconnect()
        sock = wire.connect(address, self._access)
        with self._changed:
            self._sock, self._peer = sock, address
        return True

    def _disconnect(self) -> None:
        with self._changed:
            sock, self._sock, self._peer = self._sock, None, None
        if sock is not None:
            self._access.fence.leave(sock)
            sock.close()


def regrow(
    transfers: Sequence[Transfer],
    *,
    shard: int,
    generation: int,
    epoch: int,
    buffers: Buffers,
    access: Access,
) -> Layout:
    """Fetch all of ``shard``'s state at ``generation``, checked, into the worker's own buffers.

    The sent part first, since its layout says where the rest goes; then the replicated regions from
    their sources, several at a time. Afterwards ``buffers`` holds the generation as if it had been
    captured here: ``Parts.restore`` reads it, and the :class:`Pusher` sends it to the new holder.

    Raises as :func:`fetch` does, and :class:`~planaria.errors.RunError` where the plan does not
    cover the layout; the slot is then empty again.
    """
    mine = [transfer for transfer in transfers if transfer.shard == shard]
    sent = next((transfer for transfer in mine if not transfer.shards), None)
    if sent is None:
        raise RunError(
            f"the plan of epoch {epoch} names no source for the sent part of shard {shard}: "
            "its state cannot be fetched"
        )
    slot = buffers.begin(generation, wait=access.timeout, epoch=epoch)
    if slot is None:
        raise RunError(
            f"generation {generation} cannot be received, {buffers.reason}: call "
            "buffers.void_after(generation) before it is fetched"
        )
    try:
        head = fetch(
            sent.address,
            shard=shard,
            generation=generation,
            epoch=epoch,
            into=slot.open,
            access=access,
        )
        _check_head(head.layout, mine, shard=shard, generation=generation)

        def one(transfer: Transfer) -> None:
            def into(theirs: Layout) -> memoryview:
                head.layout.same_region(theirs, transfer.shards)
                region = head.layout.region(transfer.shards)
                return slot.bytes(region.offset, region.offset + region.nbytes)

            fetch(
                transfer.address,
                shard=shard,
                generation=generation,
                epoch=epoch,
                into=into,
                access=access,
                shards=transfer.shards,
            )

        rest = [transfer for transfer in mine if transfer.shards]
        if rest:
            with ThreadPoolExecutor(min(len(rest), PARALLEL_FETCHES)) as pool:
                for _ in pool.map(one, rest):
                    pass
    except BaseException:
        buffers.abandon(slot)
        raise
    if not buffers.complete(slot, layout=head.layout, encoded=head.encoded, checksum=head.checksum):
        raise EpochSuperseded(f"generation {generation} was dropped while it was fetched")
    return head.layout


def _check_head(
    layout: Layout, transfers: Sequence[Transfer], *, shard: int, generation: int
) -> None:
    if (layout.shard, layout.generation) != (shard, generation):
        raise RunError(
            f"the holder sent generation {layout.generation} of shard {layout.shard} where "
            f"generation {generation} of shard {shard} was asked for"
        )
    needed = {region.shards for region in layout.replicated}
    named = {transfer.shards for transfer in transfers if transfer.shards}
    if needed != named:
        raise RunError(
            f"shard {shard} shares tensors with {sorted(needed)}, and the plan names sources for "
            f"{sorted(named)}: all workers must build the same objects"
        )


def _reply(kind: Kind, frame: Frame, told: str = "") -> Frame:
    return Frame(kind, frame.epoch, frame.generation, frame.shard, told.encode())


def _unpack_shards(aux: bytes) -> tuple[int, ...]:
    if len(aux) % 4:
        raise CommError(f"a peer asked for a replica set in {len(aux)} bytes, no multiple of 4")
    return struct.unpack(f">{len(aux) // 4}i", aux)
