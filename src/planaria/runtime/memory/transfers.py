"""One transfer of state: asked for (:func:`fetch`) or offered (:func:`push`); and all that a spare
asks for (:func:`regrow`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from planaria.errors import ChecksumError, CommError, EpochSuperseded, RunError
from planaria.runtime.memory import wire
from planaria.runtime.memory.layout import Layout
from planaria.runtime.memory.slots import Buffers, Slot
from planaria.runtime.memory.wire import Access, Frame, Kind
from planaria.runtime.messages import Transfer

PARALLEL_FETCHES = 4
"""Sources a spare reads from at a time (our choice)."""


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
    """Read state of ``shard`` at ``generation`` from the data server at ``address``; once more where
    it arrives changed, since the network may have done that.

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
        EpochSuperseded: a newer epoch came, here or there.
        CommError: the peer is gone, silent for ``access.timeout``, or has not got it; or what
            arrived is twice not what was captured, so that another source is needed.
    """
    wanted = {"shard": shard, "generation": generation, "epoch": epoch}
    try:
        return _fetch(address, **wanted, into=into, access=access, shards=shards)
    except ChecksumError:
        pass
    try:
        return _fetch(address, **wanted, into=into, access=access, shards=shards)
    except ChecksumError as error:
        raise CommError(f"what {address} sent is damaged, twice: {error}") from error


def _fetch(
    address: str,
    *,
    shard: int,
    generation: int,
    epoch: int,
    into: Callable[[Layout], memoryview],
    access: Access,
    shards: Sequence[int],
) -> Fetched:
    sock = wire.connect(address, access, epoch)
    try:
        with wire.guarded(sock, access, epoch=epoch, peer=address):
            aux = struct.pack(f">{len(shards)}i", *shards)
            request = Frame(Kind.GET, epoch, generation, shard, aux)
            wire.send(sock, request)
            frame = wire.receive(sock)
            _expect(frame, {Kind.DATA}, request, address)
            layout = Layout.decode(frame.aux)
            region = layout.region(shards)
            data = into(layout)
            if not frame.length == region.nbytes == len(data):
                raise CommError(
                    f"the data server at {address} offers {frame.length} bytes for a region of "
                    f"{region.nbytes} and a buffer of {len(data)}: start all workers from one "
                    "version of planaria"
                )
            wire.receive_state(sock, data, frame, access.moved)
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

    ``on_event`` is called with ``"replicate"`` before the last chunk. Raises as :func:`fetch` does,
    EpochSuperseded also where the capture was dropped, and ChecksumError at once where the holder
    got other bytes. The connection is of no more use after any of them.
    """
    layout = slot.layout
    if slot.void:
        raise EpochSuperseded(
            f"the capture that was to be sent to {peer} in epoch {epoch} was dropped by a newer one"
        )
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
        _expect(reply, {Kind.GO, Kind.HAVE}, frame, peer)
        if reply.kind == Kind.HAVE:
            return 0
        between = None if on_event is None else (lambda: on_event("replicate"))
        wire.send_state(sock, slot.bytes(0, layout.prefix), access.moved, between=between)
        _expect(wire.receive(sock), {Kind.ACK}, frame, peer)
        return layout.prefix + len(slot.encoded)


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
    captured here: ``Parts.restore`` reads it, and the ``Pusher`` sends it to the new holder.

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


def _expect(reply: Frame, kinds: set[Kind], request: Frame, peer: str) -> None:
    """Turn an answer that refuses, or that answers something else, into the error that it means."""
    told = reply.aux.decode(errors="replace") if reply.kind not in kinds else ""
    if reply.kind == Kind.STALE:
        raise EpochSuperseded(f"{peer} is in epoch {reply.epoch} already: {told}")
    if (reply.shard, reply.generation) != (request.shard, request.generation):
        raise CommError(
            f"{peer} answered for generation {reply.generation} of shard {reply.shard} where "
            f"generation {request.generation} of shard {request.shard} was due: the connection is "
            "out of step, and is given up"
        )
    if reply.kind in kinds:
        return
    if reply.kind == Kind.CORRUPT:
        raise ChecksumError(told)
    if reply.kind == Kind.REFUSED:
        raise CommError(f"{peer} refused: {told}")
    due = " or ".join(kind.name for kind in sorted(kinds))
    raise CommError(f"{peer} answered with {reply.kind.name} where {due} was due")
