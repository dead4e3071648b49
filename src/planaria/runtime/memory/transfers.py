"""One transfer of state: asked for (:func:`fetch`) or offered (:func:`push`)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planaria.errors import ChecksumError, CommError, EpochSuperseded, RunError
from planaria.runtime.memory import wire
from planaria.runtime.memory.layout import Layout
from planaria.runtime.memory.slots import Slot
from planaria.runtime.memory.wire import Access, Frame, Kind


@dataclass(frozen=True)
class Fetched:
    """State that has arrived and was checked."""

    layout: Layout
    data: memoryview
    encoded: bytes
    """The layout as it travelled."""
    checksum: int
    """xxh3-64 over ``encoded`` and ``data``."""


def fetch(
    address: str,
    *,
    shard: int,
    generation: int,
    epoch: int,
    into: Callable[[Layout], memoryview],
    access: Access,
    shards: Sequence[int] = (),
) -> Fetched:
    """Read state of ``shard`` at ``generation`` from the data server at ``address``.

    Args:
        address: ``host:port``.
        shard: whose state is wanted.
        generation: of it.
        epoch: in which it is wanted.
        into: given the layout that arrived, returns the writable bytes to fill.
        access: token, time-out and fence.
        shards: empty: the sent part, out of what the server holds. Else the tensors with exactly
            that replica set, out of the server's own capture (whose layout comes with them).

    Raises:
        ChecksumError: what arrived is not what was captured.
        EpochSuperseded: a newer epoch came, here or there.
        CommError: the peer is gone, silent for ``access.timeout``, or has not got it.
    """
    sock = wire.connect(address, access)
    try:
        with wire.guarded(sock, access, epoch=epoch, peer=address):
            aux = struct.pack(f">{len(shards)}i", *shards)
            wire.send(sock, Frame(Kind.GET, epoch, generation, shard, aux))
            frame = wire.receive(sock)
            _expect(frame, {Kind.DATA}, address)
            layout = Layout.decode(frame.aux)
            region = layout.region(shards)
            data = into(layout)
            if not frame.length == region.nbytes == len(data):
                raise CommError(
                    f"the data server at {address} offers {frame.length} bytes for a region of "
                    f"{region.nbytes} and a buffer of {len(data)}: start all workers from one "
                    "version of planaria"
                )
            wire.receive_state(sock, data, frame)
            return Fetched(layout, data, frame.aux, frame.checksum)
    finally:
        access.fence.leave(sock)
        sock.close()


def push(
    sock: socket.socket,
    slot: Slot,
    *,
    epoch: int,
    access: Access,
    peer: str,
    on_event: Callable[[str], None] | None = None,
) -> int:
    """Send the prefix of a complete capture over a connection of :func:`.wire.connect` and return
    the bytes sent (0 where the holder has them) when the holder has acknowledged it.

    ``on_event`` is called with ``"replicate"`` before the last chunk. Raises as :func:`fetch` does.
    """
    layout = slot.layout
    if layout is None or not slot.complete:
        raise RunError("only a complete capture can be sent: wait for on_complete")
    frame = Frame(
        Kind.PUT,
        epoch,
        layout.generation,
        layout.shard,
        slot.encoded,
        layout.prefix,
        slot.checksum,
    )
    with wire.guarded(sock, access, epoch=epoch, peer=peer):
        # The holder may wait as long as that for its slot, and answers then.
        sock.settimeout(2 * access.timeout)
        wire.send(sock, frame)
        reply = wire.receive(sock)
        sock.settimeout(access.timeout)
        _expect(reply, {Kind.GO, Kind.HAVE}, peer)
        if reply.kind == Kind.HAVE:
            return 0
        between = None if on_event is None else (lambda: on_event("replicate"))
        wire.send_state(sock, slot.bytes(0, layout.prefix), between=between)
        _expect(wire.receive(sock), {Kind.ACK}, peer)
        return layout.prefix + len(slot.encoded)


def _expect(frame: Frame, kinds: set[Kind], peer: str) -> None:
    """Turn an answer that refuses into the error that it means."""
    if frame.kind in kinds:
        return
    told = frame.aux.decode(errors="replace")
    if frame.kind == Kind.STALE:
        raise EpochSuperseded(f"{peer} is in epoch {frame.epoch} already: {told}")
    if frame.kind == Kind.CORRUPT:
        raise ChecksumError(told)
    if frame.kind == Kind.REFUSED:
        raise CommError(f"{peer} refused: {told}")
    raise CommError(f"{peer} answered with {frame.kind.name} where one of {kinds} was due")
