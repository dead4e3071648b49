"""Transfers that fail, and what a worker keeps for others, over real sockets."""

from __future__ import annotations

import dataclasses
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.data_plane import (
    Damaging,
    Silent,
    captured,
    get,
    parts,
    pusher,
    put,
    servers,
    until,
)

from planaria.errors import CommError, EpochSuperseded
from planaria.runtime.memory import wire
from planaria.runtime.memory.replicas import DataServer
from planaria.runtime.memory.slots import Slot
from planaria.runtime.memory.transfers import push
from planaria.runtime.memory.wire import Frame, Kind
from planaria.runtime.messages import Broke, Plan
from planaria.runtime.protection import Protection


@pytest.fixture
def serve() -> Iterator[Callable[..., DataServer]]:
    with servers() as one:
        yield one


@pytest.fixture
def silent() -> Iterator[Silent]:
    peer = Silent()
    yield peer
    peer.close()


def place(slot: Slot, *, back: bool) -> int:
    """Of the fifth byte of the state, in what travels after the handshake."""
    handshake = len(wire.MAGIC) + 2 * wire.NONCE_BYTES if back else 2 * wire.NONCE_BYTES
    return handshake + wire.HEADER.size + len(slot.encoded) + 5


@pytest.mark.parametrize("times", [1, 2])
def test_a_fetch_that_arrives_changed_is_tried_once_more(
    serve: Callable[..., DataServer], times: int
) -> None:
    owner, holder, spare = serve(), serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    put(holder, owner, slot)
    network = Damaging(holder.address, place=place(slot, back=True), times=times, back=True)
    if times == 1:
        assert get(cast(Any, network), spare)[1] == get(holder, spare)[1]
    else:
        with pytest.raises(CommError) as caught:
            get(cast(Any, network), spare)
        assert str(caught.value).startswith(
            f"what {network.address} sent is damaged, twice: generation 1 of shard 0 arrived with "
        )
    assert network.damaged == times
    network.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_that_arrives_changed_is_sent_again(
    serve: Callable[..., DataServer], times: int
) -> None:
    """Twice changed, it is told as a lost connection, never as the end of the run."""
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    network = Damaging(holder.address, place=place(slot, back=False), times=times, back=False)
    sender, acks, errors = pusher(owner)
    sender.direct(network.address, epoch=4, floor=1)
    until(lambda: len(acks) == 1, "the capture did not arrive")
    assert network.damaged == times
    assert acks[0][:2] == (4, 1)
    assert [epoch for epoch, _ in errors] == [4] * (times - 1)
    for _, error in errors:
        assert isinstance(error, CommError)
        assert str(error).startswith(f"generation 1 arrived at {network.address} damaged, twice: ")
    sender.close()
    network.close()


def test_what_an_old_target_failed_by_is_not_told(
    serve: Callable[..., DataServer], silent: Silent
) -> None:
    """The send to the lost holder fails after the new plan has named another."""
    owner, holder = serve(timeout=0.2), serve()
    captured(owner.buffers, parts(1, 0), 1)
    sender, acks, errors = pusher(owner)
    sender.direct(silent.address, epoch=1, floor=1)
    until(lambda: bool(silent.peers), "the pusher did not connect")
    sender.direct(holder.address, epoch=2, floor=1)
    until(lambda: len(acks) == 1, "the pusher stayed with the silent peer")
    assert acks[0][:2] == (2, 1)
    assert errors == []
    sender.close()


def test_a_new_epoch_frees_who_connects(serve: Callable[..., DataServer]) -> None:
    """To a machine whose queue is full, so that nothing answers its SYN."""
    asker = serve(timeout=60.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            assert filler.connect_ex(place) in (0, errno.EINPROGRESS)
        threading.Timer(0.2, asker.set_epoch, (2,)).start()
        started = time.monotonic()
        with pytest.raises(EpochSuperseded, match=r"epoch 1 was superseded by epoch 2 during a tr"):
            wire.connect(f"127.0.0.1:{place[1]}", asker.access, 1)
        assert 0.1 < time.monotonic() - started < 5
        for filler in fillers:
            filler.close()


def test_a_new_epoch_frees_who_shakes_hands(serve: Callable[..., DataServer]) -> None:
    """With a stopped process: its kernel accepts, and nobody speaks."""
    asker = serve(timeout=60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Timer(0.2, asker.set_epoch, (2,)).start()
        started = time.monotonic()
        with pytest.raises(EpochSuperseded, match=r"epoch 1 was superseded by epoch 2 during a tr"):
            wire.connect(address, asker.access, 1)
        assert 0.1 < time.monotonic() - started < 5
        with pytest.raises(EpochSuperseded, match=r"epoch 1 was superseded by epoch 2"):
            wire.connect(address, asker.access, 1)
    assert asker.access.fence._sockets == {}


def test_an_answer_to_something_else_is_noticed(serve: Callable[..., DataServer]) -> None:
    owner = serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(theirs, Frame(Kind.GO, 0, 7, 3))
        with pytest.raises(CommError) as caught:
            push(ours, slot, epoch=0, access=owner.access, peer="the holder")
    assert str(caught.value) == (
        "the holder answered for generation 7 of shard 3 where generation 1 of shard 0 was due: the "
        "connection is out of step, and is given up"
    )
    owner.access.fence.leave(ours)


def test_a_connection_with_half_a_transfer_is_not_kept(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    fails = [True]

    def fail(name: str) -> None:
        if fails:
            raise ValueError(name)

    sender, acks, errors = pusher(owner, on_event=fail)
    captured(owner.buffers, parts(1, 0), 1)
    sender.direct(holder.address, epoch=1, floor=1)
    until(lambda: len(errors) == 1)
    assert (errors[0][0], repr(errors[0][1])) == (1, "ValueError('replicate')")
    assert sender._sock is None
    fails.clear()
    sender.notify(1)
    until(lambda: len(acks) == 1, "the send was not tried again")
    sender.close()


def test_a_server_that_cannot_take_one_connection_takes_the_next(
    serve: Callable[..., DataServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.socket.accept
    failed: list[int] = []

    def accept(sock: socket.socket) -> Any:
        if not failed:
            failed.append(errno.EMFILE)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    holder, owner = serve(), serve()
    put(holder, owner, captured(owner.buffers, parts(1, 0), 1))
    assert failed == [errno.EMFILE]
    assert holder.held.held() == {0: (1,)}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_holder_without_memory_refuses(
    serve: Callable[..., DataServer], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)

    def reserve(slot: Slot, nbytes: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "reserve", reserve)
        with pytest.raises(
            CommError, match=r"refused: there is no memory for \d+ bytes of shard 0"
        ):
            put(holder, owner, slot)
    assert put(holder, owner, slot) > 0


def plan(epoch: int, holders: dict[int, str]) -> Plan:
    return Plan(
        epoch=epoch,
        generation=1,
        owners={},
        holders=holders,
        transfers=(),
        bucket_orders={},
        lost=(),
        redone=0,
        reason="a test",
        committed=1,
    )


@dataclasses.dataclass
class Coordinated:
    """What Protection uses of a Member; records what is said to the coordinator."""

    worker: str = "w0"
    said: list[Any] = dataclasses.field(default_factory=list)
    ended: list[str] = dataclasses.field(default_factory=list)
    limits: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(transfer=7.5))

    def send(self, message: Any) -> None:
        self.said.append(message)

    def failed(self, reason: str) -> None:
        self.ended.append(reason)


def test_copies_for_others_are_freed_when_they_are_no_source_any_more(
    serve: Callable[..., DataServer],
) -> None:
    owner, holder = serve(), serve()
    for shard in (0, 1):
        put(holder, owner, captured(serve().buffers, parts(1, shard), 1), epoch=1)
    member = Coordinated()
    kept = Protection(parts(1, 2), shard=2, member=cast(Any, member), data=holder, on_event=None)
    assert holder.access.timeout == 7.5
    kept.release()
    assert holder.held.held() == {0: (1,), 1: (1,)}
    kept.enter(plan(2, {0: "w0", 1: "w1"}))
    with holder.held.reading(1, 1) as slot:
        assert slot is not None
        kept.release()
        assert holder.held.held() == {0: (1,), 1: (1,)}
    kept.release()
    assert holder.held.held() == {0: (1,)}
    kept.release()
    assert holder.held.held() == {0: (1,)}
    kept.close()


def test_an_unreachable_holder_is_told_with_the_epoch_of_its_plan(
    serve: Callable[..., DataServer],
) -> None:
    data, member = serve(), Coordinated()
    kept = Protection(parts(1, 0), shard=0, member=cast(Any, member), data=data, on_event=None)
    kept._failed(3, 7, CommError("gone"))
    assert member.said == [Broke(epoch=3, reason="replication: gone", generation=7)]
    kept._failed(3, 7, ValueError("a defect"))
    assert member.ended == ["shard 0 cannot be protected: a defect"]
    kept.close()


def test_a_capture_ends_by_a_break_and_not_by_a_limit(serve: Callable[..., DataServer]) -> None:
    data, member = serve(), Coordinated()
    state = parts(1, 0)
    kept = Protection(state, shard=0, member=cast(Any, member), data=data, on_event=None)
    kept.enter(plan(1, {}))
    for generation in (1, 2):
        assert kept.capture(generation, epoch=1) >= 0
    kept.wait_copied()
    until(lambda: data.buffers.captured() == (1, 2))
    threading.Timer(0.1, data.set_epoch, (2,)).start()
    with pytest.raises(
        EpochSuperseded, match=r"generation 3 was not stored .* superseded by epoch"
    ):
        kept.capture(3, epoch=1)
    kept.close()
