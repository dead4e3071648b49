"""The data plane over real sockets: copies, fetches, forgers, corruption, epochs, silent peers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.data_plane import (
    TOKEN,
    Silent,
    captured,
    get,
    parts,
    pusher,
    put,
    servers,
    until,
)

from planaria.errors import ChecksumError, CommError, EpochSuperseded, RunError, UserError
from planaria.runtime.memory import wire
from planaria.runtime.memory.replicas import Access, DataServer, push, regrow
from planaria.runtime.memory.snapshot import Capture, Slot
from planaria.runtime.memory.wire import Frame, Kind
from planaria.runtime.messages import Transfer


@pytest.fixture
def serve() -> Iterator[Callable[..., DataServer]]:
    with servers() as one:
        yield one


def test_a_copy_goes_to_the_holder_and_comes_back(serve: Callable[..., DataServer]) -> None:
    owner, holder, spare = serve(), serve(), serve()
    slot = captured(owner.buffers, parts(1, 0, width=1200), 1)
    assert slot.layout is not None
    assert slot.layout.prefix > wire.CHUNK
    sent = put(holder, owner, slot)
    assert sent == slot.layout.prefix + len(slot.encoded)
    assert holder.held.held() == {0: (1,)}
    layout, data = get(holder, spare)
    assert layout == slot.layout
    assert data == bytes(slot.bytes(0, layout.prefix))
    assert put(holder, owner, slot) == 0


def test_what_is_not_there_is_refused_with_a_list(serve: Callable[..., DataServer]) -> None:
    holder, spare = serve(), serve()
    with pytest.raises(CommError, match=r"refused: generation 3 of shard 7 is not here: held are"):
        get(holder, spare, shard=7, generation=3)
    captured(holder.buffers, parts(1, 1), 1)
    with pytest.raises(CommError, match=r"no tensors with the replica set \(1, 5\) \(it has: \(0"):
        get(holder, spare, shards=(1, 5))
    with pytest.raises(CommError, match=r"generation 1 of shard 0 is not here"):
        get(holder, spare)
    assert get(holder, spare, shard=1)[0].shard == 1


@pytest.mark.parametrize(("token", "run"), [("another", "run"), (TOKEN, "other")])
def test_a_stranger_gets_no_byte(serve: Callable[..., DataServer], token: str, run: str) -> None:
    holder, stranger = serve(), serve(token, run)
    with pytest.raises(CommError, match=r"did not accept this worker .* belongs to another run"):
        get(holder, stranger)
    assert TOKEN not in stranger.access.proof(b"client", b"", b"").hex()


def test_a_forged_server_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def forge() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
                peer.recv(64)
                peer.sendall(bytes(32))
                peer.recv(1)

        thread = threading.Thread(target=forge)
        thread.start()
        with pytest.raises(CommError, match=r"at 127.0.0.1:\d+ does not know this run's token"):
            wire.connect(address, Access(TOKEN, run="run"), 0)
        thread.join()


def test_nothing_is_said_before_the_proof(serve: Callable[..., DataServer]) -> None:
    holder = serve()
    host, port = wire.split_address(holder.address)
    with socket.create_connection((host, port), timeout=5) as sock:
        assert len(sock.recv(100)) == len(wire.MAGIC) + wire.NONCE_BYTES
        header = wire.HEADER.pack(wire.MAGIC, Kind.GET, 0, 1, 0, 0, 0, 0)
        sock.sendall(header + bytes(64 - len(header) % 64))
        assert sock.recv(100) == b""


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((b"HTTP", 1, 0, 0, 0, 0, 0, 0), "a header that begins with b'HTTP' and kind 1"),
        ((wire.MAGIC, 99, 0, 0, 0, 0, 0, 0), "begins with b'PLN1' and kind 99: start all"),
        ((wire.MAGIC, 1, 0, 0, 0, 2**31, 0, 0), "announced 2147483648 bytes of table and 0"),
        ((wire.MAGIC, 1, 0, 0, 0, 0, 2**50, 0), "1125899906842624 of state, more than"),
    ],
)
def test_headers_are_bounded(header: tuple[Any, ...], message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.HEADER.pack(*header))
        with pytest.raises(CommError) as caught:
            wire.receive(ours)
    assert message in str(caught.value)


def test_a_changed_byte_is_noticed_by_the_holder(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    slot.memory[7] += 1
    with pytest.raises(
        ChecksumError, match=r"generation 1 of shard 0 arrived with checksum [0-9a-f]{16} "
    ):
        put(holder, owner, slot)
    assert holder.held.held() == {}
    slot.memory[7] -= 1
    put(holder, owner, slot)
    assert holder.held.held() == {0: (1,)}


def test_a_changed_byte_in_the_holders_memory_is_noticed_by_the_spare(
    serve: Callable[..., DataServer],
) -> None:
    owner, holder, spare = serve(), serve(), serve()
    put(holder, owner, captured(owner.buffers, parts(1, 0), 1))
    with holder.held.reading(0, 1) as slot:
        assert slot is not None
        slot.memory[3] += 1
    with pytest.raises(
        CommError,
        match=r"^what 127.0.0.1:\d+ sent is damaged, twice: .* memory or network changed it; the copy",
    ):
        get(holder, spare)


def test_an_older_epoch_is_refused(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    holder.set_epoch(4)
    with pytest.raises(EpochSuperseded, match=r"is in epoch 4 already: epoch 3 was superseded by"):
        put(holder, owner, slot, epoch=3)
    put(holder, owner, slot, epoch=4)
    # And a call that this worker itself knows to be late is not even made.
    owner.set_epoch(5)
    with pytest.raises(EpochSuperseded, match=r"epoch 4 was superseded by epoch 5 during a trans"):
        get(holder, owner, epoch=4)


@pytest.fixture
def silent() -> Iterator[Silent]:
    peer = Silent()
    yield peer
    peer.close()


def test_a_silent_peer_costs_the_time_out(serve: Callable[..., DataServer], silent: Silent) -> None:
    asker = serve(timeout=0.2)
    with pytest.raises(CommError, match=r"the transfer with .* ended early \(0.2 s without a byte"):
        get(silent, asker)  # type: ignore[arg-type]


def test_a_new_epoch_frees_who_waits_on_a_silent_peer(
    serve: Callable[..., DataServer], silent: Silent
) -> None:
    asker = serve(timeout=60.0)
    threading.Timer(0.1, asker.set_epoch, (1,)).start()
    started = time.monotonic()
    with pytest.raises(EpochSuperseded, match=r"epoch 0 was superseded by epoch 1"):
        get(silent, asker)  # type: ignore[arg-type]
    assert time.monotonic() - started < 5


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(CommError, match=r"no data server answers at 127.0.0.1:\d+ \(.*refused\)"):
        wire.connect(address, Access(TOKEN, run="run"), 0)
    with pytest.raises(CommError, match=r"'nowhere' is no address of a data server: it must be"):
        wire.connect("nowhere", Access(TOKEN, run="run"), 0)


def test_a_port_in_use_is_named(serve: Callable[..., DataServer]) -> None:
    port = int(serve().address.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1 port {port} \(Address alr"):
        DataServer(TOKEN, run="run", port=port)


def test_the_holder_waits_for_the_announcement(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    for generation in (1, 2):
        put(holder, owner, captured(owner.buffers, parts(generation, 0), generation))
    owner.buffers.announce(2, epoch=0)
    slot = captured(owner.buffers, parts(3, 0), 3)
    threading.Timer(0.2, holder.held.announce, (2,), {"epoch": 0}).start()
    put(holder, owner, slot)
    assert holder.held.held() == {0: (2, 3)}
    holder.access.timeout = 0.1
    owner.buffers.announce(3, epoch=0)
    slot = captured(owner.buffers, parts(4, 0), 4)
    with pytest.raises(CommError, match=r"refused: the slots hold generation 3, generation 2, and"):
        put(holder, owner, slot)


def test_a_generation_made_anew_replaces_that_of_an_older_epoch(
    serve: Callable[..., DataServer],
) -> None:
    owner, again, holder = serve(), serve(), serve()
    put(holder, owner, captured(owner.buffers, parts(1, 0), 1), epoch=1)
    anew = captured(again.buffers, parts(2, 0), 1)
    with pytest.raises(CommError, match=r"refused: generation 1 has a slot already"):
        put(holder, again, anew, epoch=1)
    assert put(holder, again, anew, epoch=2) > 0
    assert get(holder, owner)[1] == bytes(anew.bytes(0, len(get(holder, owner)[1])))


def test_the_pusher_sends_capture_after_capture(serve: Callable[..., DataServer]) -> None:
    owner, holder, second = serve(), serve(), serve()
    names: list[str] = []
    sender, acks, errors = pusher(owner, on_event=names.append)
    capture = Capture(owner.buffers, on_complete=sender.notify)
    state = parts(1, 0)
    assert capture.capture(state, generation=0).taken
    sender.direct(holder.address, epoch=1, floor=0)
    assert capture.capture(state, generation=1).taken
    until(lambda: len(acks) == 2, "two acknowledgements did not come")
    assert [ack[:2] for ack in acks] == [(1, 0), (1, 1)]
    assert all(ack[2] > 0 for ack in acks)
    assert names == ["replicate", "replicate"]
    # A new epoch: the kept connection is cut, the plan's generation is found or sent again.
    for server in (owner, holder, second):
        server.set_epoch(2)
    sender.direct(holder.address, epoch=2, floor=1)
    until(lambda: len(acks) == 3, "the acknowledgement of epoch 2 did not come")
    assert acks[2] == (2, 1, 0, holder.address)
    sender.direct(second.address, epoch=2, floor=1)
    until(lambda: len(acks) == 4, "the new holder did not acknowledge")
    assert acks[3][:2] == (2, 1)
    assert acks[3][2] > 0
    assert second.held.held() == {0: (1,)}
    sender.direct(None, epoch=3, floor=1)
    until(lambda: len(acks) == 5, "a generation without a holder was not told")
    assert acks[4] == (3, 1, 0, None)
    assert errors == []
    capture.close()
    sender.close()


def test_the_pusher_tells_of_a_dead_holder_and_goes_on_with_the_next(
    serve: Callable[..., DataServer],
) -> None:
    owner, holder, second = serve(), serve(), serve()
    sender, acks, errors = pusher(owner)
    capture = Capture(owner.buffers, on_complete=sender.notify)
    sender.direct(holder.address, epoch=0, floor=0)
    capture.capture(parts(1, 0), generation=0)
    until(lambda: len(acks) == 1)
    holder.close()
    capture.capture(parts(2, 0), generation=1)
    until(lambda: len(errors) == 1, "the error did not come")
    assert isinstance(errors[0][1], CommError)
    assert "no data server answers at" in str(errors[0][1])
    sender.direct(second.address, epoch=1, floor=1)
    until(lambda: len(acks) == 2)
    assert acks[1][:2] == (1, 1)
    capture.close()
    sender.close()


def test_the_pusher_tries_again_and_tells_once(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve(timeout=0.05)
    sender, acks, errors = pusher(owner)
    for generation in (1, 2):
        put(holder, owner, captured(owner.buffers, parts(generation, 0), generation))
    owner.buffers.announce(2, epoch=0)
    captured(owner.buffers, parts(3, 0), 3)
    # The holder has not heard of the announcement, and refuses until it has.
    sender.direct(holder.address, epoch=0, floor=3)
    until(lambda: len(errors) == 1, "the refusal was not told")
    assert "refused: the slots hold generation 1, generation 2, and -1" in str(errors[0][1])
    time.sleep(0.7)
    assert (acks, len(errors)) == ([], 1)
    holder.held.announce(2, epoch=0)
    until(lambda: len(acks) == 1, "the send was not tried again")
    assert acks[0][:2] == (0, 3)
    assert len(errors) == 1
    sender.close()


def test_a_new_epoch_frees_the_pusher(serve: Callable[..., DataServer], silent: Silent) -> None:
    owner, holder = serve(timeout=60.0), serve()
    sender, acks, errors = pusher(owner)
    captured(owner.buffers, parts(1, 0), 1)
    sender.direct(silent.address, epoch=1, floor=1)
    until(lambda: bool(silent.peers), "the pusher did not connect")
    time.sleep(0.05)
    owner.set_epoch(2)
    sender.direct(holder.address, epoch=2, floor=1)
    until(lambda: len(acks) == 1, "the pusher stayed with the silent peer")
    assert acks[0][:2] == (2, 1)
    assert errors == []
    sender.close()


def test_what_a_callback_raises_is_told(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()

    def fail(name: str) -> None:
        raise ValueError(name)

    sender, acks, errors = pusher(owner, on_event=fail)
    captured(owner.buffers, parts(1, 0), 1)
    sender.direct(holder.address, epoch=0, floor=0)
    until(lambda: len(errors) == 1)
    assert repr(errors[0][1]) == "ValueError('replicate')"
    assert acks == []
    sender.close()


def plan(holder: DataServer, peer: DataServer) -> list[Transfer]:
    return [
        Transfer(shard=1, source="x", address="127.0.0.1:1"),
        Transfer(shard=0, source="p", address=peer.address, shards=(0, 1)),
        Transfer(shard=0, source="h", address=holder.address),
    ]


def test_a_spare_regrows_a_lost_shard(serve: Callable[..., DataServer]) -> None:
    owner, holder, spare = serve(), serve(), serve()
    lost = parts(1, 0)
    put(holder, owner, captured(owner.buffers, lost, 1))
    captured(holder.buffers, parts(1, 1), 1)
    digest = lost.digest()
    layout = regrow(
        plan(holder, holder),
        shard=0,
        generation=1,
        epoch=2,
        buffers=spare.buffers,
        access=spare.access,
    )
    assert spare.buffers.captured() == (1,)
    fresh = parts(9, 0)
    assert fresh.digest() != digest
    with spare.buffers.reading(1) as slot:
        assert slot is not None
        fresh.restore(layout, slot.memory)
    assert fresh.digest() == digest
    # What was regrown goes on as if it had been captured here.
    second = serve()
    with spare.buffers.reading(1) as slot:
        assert slot is not None
        assert put(second, spare, slot, epoch=2) > 0
    assert get(second, owner)[0] == layout


def test_a_plan_that_does_not_cover_the_state_is_refused(
    serve: Callable[..., DataServer],
) -> None:
    owner, holder, spare = serve(), serve(), serve()
    put(holder, owner, captured(owner.buffers, parts(1, 0), 1))
    options: dict[str, Any] = {
        "shard": 0,
        "generation": 1,
        "epoch": 0,
        "buffers": spare.buffers,
        "access": spare.access,
    }
    with pytest.raises(RunError, match=r"epoch 0 names no source for the sent part of shard 0"):
        regrow(plan(holder, holder)[:2], **options)
    with pytest.raises(
        RunError, match=r"shard 0 shares tensors with \[\(0, 1\)\], and the plan na"
    ):
        regrow(plan(holder, holder)[2:], **options)
    # The peer built something else.
    captured(holder.buffers, parts(1, 1, width=4), 1)
    with pytest.raises(RunError, match=r"shards 0 and 1 disagree about the tensors that shards"):
        regrow(plan(holder, holder), **options)
    assert spare.buffers.captured() == ()
    slot = spare.buffers.begin(1)
    assert slot is not None


def test_closing_cuts_connections(serve: Callable[..., DataServer]) -> None:
    owner, holder = serve(), serve()
    slot = captured(owner.buffers, parts(1, 0), 1)
    sock = wire.connect(holder.address, owner.access, 0)
    push(sock, slot, epoch=0, access=owner.access, peer="holder")
    holder.close()
    with pytest.raises(CommError, match=r"the transfer with holder ended early"):
        push(sock, slot, epoch=0, access=owner.access, peer="holder")
    sock.close()


def test_a_frame_that_is_no_request_costs_the_connection(
    serve: Callable[..., DataServer],
) -> None:
    holder = serve()
    sock = wire.connect(holder.address, holder.access, 0)
    wire.send(sock, Frame(Kind.ACK))
    assert sock.recv(1) == b""
    sock.close()


def test_only_complete_captures_are_sent(serve: Callable[..., DataServer]) -> None:
    holder = serve()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RunError, match="only a complete capture can be sent"):
        push(ours, Slot(), epoch=0, access=holder.access, peer="holder")


def test_a_table_that_is_none_costs_the_connection(serve: Callable[..., DataServer]) -> None:
    holder, owner = serve(), serve()
    sock = wire.connect(holder.address, owner.access, 0)
    wire.send(sock, Frame(Kind.PUT, 0, 1, 0, b"no table", 8, 0))
    assert sock.recv(1) == b""
    sock.close()
    sock = wire.connect(holder.address, owner.access, 0)
    slot = captured(owner.buffers, parts(1, 0), 1)
    # Another shard in the header than in the table.
    wire.send(sock, Frame(Kind.PUT, 0, 1, 3, slot.encoded, 64, slot.checksum))
    assert sock.recv(1) == b""
    sock.close()
    assert holder.held.held() == {}
