"""What a worker tells of itself while it waits: bytes on their way, and for what it waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.data_plane import captured, get, parts, put, servers, until

from planaria.errors import EpochSuperseded
from planaria.runtime.memory import wire
from planaria.runtime.memory.replicas import DataServer
from planaria.runtime.memory.wire import Frame, Kind, Meter
from planaria.runtime.messages import AllCommitted, Plan
from planaria.runtime.protection import Protection
from planaria.runtime.seat import Seat


@pytest.fixture
def serve() -> Iterator[Callable[..., DataServer]]:
    with servers() as one:
        yield one


def test_bytes_of_state_are_counted_on_both_sides(serve: Callable[..., DataServer]) -> None:
    owner, holder, spare = serve(), serve(), serve()
    slot = captured(owner.buffers, parts(1, 0, width=1200), 1)
    assert slot.layout is not None
    put(holder, owner, slot)
    prefix = slot.layout.prefix
    assert prefix > wire.CHUNK
    assert (owner.access.moved.total, holder.access.moved.total) == (prefix, prefix)
    get(holder, spare)
    assert spare.access.moved.total == prefix
    # The holder counts a piece once the kernel took it: the last one possibly after its arrival.
    until(lambda: holder.access.moved.total == 2 * prefix)


def test_a_slow_link_is_seen_to_move_before_a_chunk_is_sent() -> None:
    """A chunk takes seconds over a slow link; each byte counts as soon as the kernel took it."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5.0)
        sent = Meter()

        def send() -> None:
            with suppress(OSError):
                wire.send_state(here, memoryview(bytearray(wire.CHUNK)), sent)

        sender = threading.Thread(target=send)
        sender.start()
        until(lambda: sent.total > 0)
        assert sent.total < wire.CHUNK  # nobody reads: the socket's buffer is all that fits
        here.shutdown(socket.SHUT_RDWR)
        sender.join()


def test_a_slow_link_is_seen_to_move_before_a_chunk_has_arrived() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(5.0)
        received = Meter()
        into = memoryview(bytearray(wire.CHUNK))

        def receive() -> None:
            with suppress(OSError):
                wire.receive_state(there, into, Frame(Kind.DATA, length=len(into)), received)

        receiver = threading.Thread(target=receive)
        receiver.start()
        here.sendall(bytes(1000))
        until(lambda: received.total == 1000)  # and the rest never comes
        here.shutdown(socket.SHUT_RDWR)
        receiver.join()
        assert received.total == 1000


def test_who_waits_for_a_slot_says_so(serve: Callable[..., DataServer]) -> None:
    data = serve()
    member = SimpleNamespace(
        worker="w0", limits=SimpleNamespace(transfer=7.5), send=lambda message: None
    )
    kept = Protection(parts(1, 0), shard=0, member=cast(Any, member), data=data, on_event=None)
    kept.enter(
        Plan(
            epoch=1,
            generation=0,
            owners={},
            holders={},
            transfers=(),
            bucket_orders={},
            lost=(),
            redone=0,
            reason="r",
        )
    )
    for generation in (1, 2):
        kept.capture(generation, epoch=1)
    assert not kept.waiting
    seen: list[bool] = []

    def look() -> None:
        until(lambda: kept.waiting)
        time.sleep(0.05)
        seen.append(kept.waiting)
        data.set_epoch(2)

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(EpochSuperseded):
        kept.capture(3, epoch=1)
    looking.join()
    assert (seen, kept.waiting) == ([True], False)
    kept.close()


def test_who_waits_for_a_commit_says_so() -> None:
    seat = Seat()
    seat.all_committed(AllCommitted(epoch=1, generation=1))
    seat.wait_committed(1, 1)
    waiting = threading.Thread(target=seat.wait_committed, args=(2, 1))
    waiting.start()
    until(lambda: seat.waiting)
    seat.all_committed(AllCommitted(epoch=1, generation=2))
    waiting.join()
    assert not seat.waiting
