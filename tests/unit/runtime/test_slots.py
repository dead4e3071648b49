"""Schedules between the threads of one worker: breaks, announcements, plans, readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.data_plane import captured, get, parts, put, servers, until

from planaria.errors import EpochSuperseded
from planaria.runtime.memory.replicas import DataServer
from planaria.runtime.memory.slots import Buffers, Held, Slot
from planaria.runtime.memory.transfers import push
from planaria.runtime.memory.wire import connect


@pytest.fixture
def serve() -> Iterator[Callable[..., DataServer]]:
    with servers() as one:
        yield one


def full() -> Buffers:
    """Two captures, none of them committed."""
    buffers = Buffers()
    for generation in (0, 1):
        captured(buffers, parts(1, 0), generation)
    return buffers


def test_a_break_just_before_a_wait_is_not_lost() -> None:
    """The training thread has looked and seen no break; the break comes; only then it waits."""
    buffers, held = full(), Held()
    buffers.interrupt(2)
    held.interrupt(2)
    started = time.monotonic()
    with pytest.raises(EpochSuperseded) as caught:
        buffers.begin(2, wait=None, epoch=1)
    assert str(caught.value) == (
        "generation 2 was not stored (the slots hold generation 0, generation 1, and -1 is the "
        "newest committed for all): epoch 1 was superseded by epoch 2; report to it"
    )
    # Also where a slot is free: what an epoch that is over captures can never be committed.
    with pytest.raises(EpochSuperseded, match=r"\(slot 0 is empty\): epoch 1 was superseded by"):
        held.begin(0, 2, wait=30.0, epoch=1)
    assert time.monotonic() - started < 5
    assert held.begin(0, 2, epoch=2)[0] is not None
    assert held.begin(0, 3)[0] is not None


def test_only_a_newer_epoch_ends_a_wait() -> None:
    buffers = full()
    got: list[Slot | EpochSuperseded | None] = []

    def wait(epoch: int) -> None:
        try:
            got.append(buffers.begin(2, wait=None, epoch=epoch))
        except EpochSuperseded as error:
            got.append(error)

    thread = threading.Thread(target=wait, args=(3,))
    thread.start()
    for epoch in (3, 2, 1):
        buffers.interrupt(epoch)
    thread.join(0.1)
    assert thread.is_alive()
    buffers.interrupt(4)
    thread.join(10)
    assert isinstance(got[0], EpochSuperseded)
    # An older interrupt that comes late does not make an epoch current again.
    buffers.interrupt(3)
    wait(3)
    assert isinstance(got[1], EpochSuperseded)
    thread = threading.Thread(target=wait, args=(4,))
    thread.start()
    buffers.announce(1, epoch=4)
    thread.join(10)
    assert isinstance(got[2], Slot)


@pytest.mark.parametrize("make", [Buffers, Held])
def test_a_plan_carried_out_late_keeps_what_its_epoch_has_announced(
    make: type[Buffers] | type[Held],
) -> None:
    """AllCommitted(6) of epoch 2 is handled before the training thread carries out plan 2."""
    kept = make()
    kept.announce(7, epoch=1)
    kept.announce(6, epoch=2)
    assert kept.announced == 7
    kept.begin_epoch(epoch=2, keep=(5,), committed=5)
    assert kept.announced == 6
    # From an epoch that is over: generation 7 was made anew since, and is not committed.
    kept.announce(7, epoch=1)
    assert kept.announced == 6
    kept.begin_epoch(epoch=1, keep=(), committed=0)
    assert kept.announced == 6
    kept.begin_epoch(epoch=3, keep=(2,), committed=2)
    assert kept.announced == 2


EPOCHS = st.lists(
    st.tuples(st.integers(-1, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4
)


@given(EPOCHS, st.data())
def test_announcements_and_plans_in_any_order(
    epochs: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """The control thread hears announcements epoch by epoch; the training thread begins the epochs
    in order, at any time. Whatever the order, an epoch's announcements count from its plan on."""
    buffers = Buffers()
    heard = [(epoch, g) for epoch, (_, said) in enumerate(epochs, start=1) for g in said]
    plans = list(range(1, len(epochs) + 1))
    told: dict[int, list[int]] = {}
    begun = 0
    while heard or plans:
        if heard and (not plans or data.draw(st.booleans())):
            epoch, generation = heard.pop(0)
            told.setdefault(epoch, []).append(generation)
            before = buffers.announced
            buffers.announce(generation, epoch=epoch)
            over = begun > epoch or max(told) > epoch
            assert buffers.announced == (before if over else max(before, generation))
        else:
            epoch = begun = plans.pop(0)
            committed = epochs[epoch - 1][0]
            buffers.begin_epoch(epoch=epoch, keep=(committed,), committed=committed)
            if not any(newer > epoch for newer in told):
                assert buffers.announced == max([committed, *told.get(epoch, [])])
    committed, said = epochs[-1]
    assert buffers.announced == max([committed, *said])


def test_a_plan_leaves_a_dropped_slot_whole_for_its_readers() -> None:
    buffers = full()
    with buffers.reading(1) as slot, buffers.reading(1) as again:
        assert slot is not None
        assert again is slot
        told = (slot.layout, slot.encoded, slot.checksum)
        buffers.begin_epoch(epoch=2, keep=(0,), committed=0)
        assert buffers.captured() == (0,)
        assert (slot.layout, slot.encoded, slot.checksum) == told
        assert told[0] is not None
        # Nobody gets the memory that is still read.
        assert buffers.begin(1) is None
    assert (slot.layout, slot.encoded, slot.void) == (None, b"", False)
    assert buffers.begin(1) is slot


def test_the_last_of_two_readers_empties_a_dropped_slot() -> None:
    buffers = full()
    first, second = buffers.reading(0), buffers.reading(0)
    slot = first.__enter__()
    assert slot is not None
    assert second.__enter__() is slot
    buffers.void_after(-1)
    first.__exit__(None, None, None)
    assert slot.layout is not None
    second.__exit__(None, None, None)
    assert slot.layout is None
    assert buffers.begin(0) is not None


def test_a_dropped_capture_is_not_sent(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    captured(owner.buffers, parts(1, 0), 1)
    sock = connect(holder.address, owner.access, 1)
    with owner.buffers.reading(1) as slot:
        assert slot is not None
        owner.buffers.begin_epoch(epoch=2, keep=(), committed=-1)
        with pytest.raises(EpochSuperseded) as caught:
            push(sock, slot, epoch=1, access=owner.access, peer="the holder")
    assert str(caught.value) == (
        "the capture that was to be sent to the holder in epoch 1 was dropped by a newer one"
    )
    owner.access.fence.leave(sock)
    sock.close()
    assert holder.held.held() == {}


def test_what_is_dropped_in_the_middle_of_a_send_arrives_whole_or_not_at_all(
    serve: Callable[..., DataServer],
) -> None:
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    assert slot.layout is not None
    layout, state = slot.layout, bytes(slot.bytes(0, slot.layout.prefix))
    dropped: list[str] = []

    def drop(name: str) -> None:
        dropped.append(name)
        owner.buffers.begin_epoch(epoch=2, keep=(), committed=-1)
        assert owner.buffers.captured() == ()

    sock = connect(holder.address, owner.access, 1)
    with owner.buffers.reading(1) as slot:
        assert slot is not None
        push(sock, slot, epoch=1, access=owner.access, peer="the holder", on_event=drop)
    owner.access.fence.leave(sock)
    sock.close()
    assert dropped == ["replicate"]
    assert slot.layout is None
    assert get(holder, owner, epoch=1) == (layout, state)


def test_a_copy_that_is_read_is_replaced_in_the_other_slot(
    serve: Callable[..., DataServer],
) -> None:
    owner, again, holder = serve(), serve(), serve()
    put(holder, owner, captured(owner.buffers, parts(1, 0), 1), epoch=1)
    with holder.held.reading(0, 1) as slot:
        assert slot is not None
        assert slot.head is not None
        anew = captured(again.buffers, parts(2, 0), 1)
        assert put(holder, again, anew, epoch=2) > 0
        assert slot.head is not None
        assert holder.held.keep([]) is False
    assert slot.head is None
    assert anew.layout is not None
    assert get(holder, owner, epoch=2)[1] == bytes(anew.bytes(0, anew.layout.prefix))
    # Whoever serves it lets go of it after the last byte, perhaps after we have that.
    until(lambda: holder.held.keep([]))
    assert holder.held.held() == {}
