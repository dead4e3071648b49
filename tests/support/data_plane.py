"""Data servers over real sockets, and what tests put into them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planaria.runtime.memory import wire
from planaria.runtime.memory.layout import Layout
from planaria.runtime.memory.parts import Parts, replicated
from planaria.runtime.memory.pusher import Pusher
from planaria.runtime.memory.replicas import DataServer
from planaria.runtime.memory.slots import Buffers, Slot
from planaria.runtime.memory.snapshot import Capture
from planaria.runtime.memory.transfers import fetch, push
from planaria.runtime.memory.wire import Access

TOKEN = "a-secret"


@contextmanager
def servers() -> Generator[Callable[..., DataServer]]:
    """A maker of data servers, which are closed at the end."""
    made: list[DataServer] = []

    def one(token: str = TOKEN, run: str = "run", timeout: float = 5.0) -> DataServer:
        made.append(DataServer(token, run=run, timeout=timeout))
        return made[-1]

    try:
        yield one
    finally:
        for server in made:
            server.close()


def parts(seed: int, shard: int, *, width: int = 8, share: bool = True) -> Parts:
    """A model that both shards hold, and an optimizer whose state they do not."""
    torch.manual_seed(seed)
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.shard_local_state = True
    model(torch.randn(2, width) * (shard + 1)).sum().backward()
    optimizer.step()
    torch.manual_seed(seed)
    with torch.no_grad():
        model.weight.normal_()
    built = {"model": replicated(model) if share else model, "optimizer": optimizer}
    return Parts(built, shard=shard, world=2)


def captured(buffers: Buffers, state: Parts, generation: int) -> Slot:
    capture = Capture(buffers)
    assert capture.capture(state, generation=generation).taken
    capture.close()
    with buffers.reading(generation) as slot:
        assert slot is not None
        return slot


def until(condition: Callable[[], bool], what: str = "nothing happened") -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what} within 10 s"
        time.sleep(0.002)


def put(server: DataServer, owner: DataServer, slot: Slot, epoch: int = 0) -> int:
    sock = wire.connect(server.address, owner.access, epoch)
    try:
        return push(sock, slot, epoch=epoch, access=owner.access, peer=server.address)
    finally:
        owner.access.fence.leave(sock)
        sock.close()


def get(server: DataServer, asker: DataServer, **wanted: Any) -> tuple[Layout, bytes]:
    defaults = {"shard": 0, "generation": 1, "epoch": 0}

    def into(layout: Layout) -> memoryview:
        return memoryview(bytearray(layout.region(wanted.get("shards", ())).nbytes))

    got = fetch(server.address, into=into, access=asker.access, **{**defaults, **wanted})
    return got.layout, bytes(got.data)


class Silent:
    """A peer that proves the token, reads nothing and answers nothing: a stopped process."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.peers: list[socket.socket] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        peer, _ = self.listener.accept()
        assert wire.accept(peer, Access(TOKEN, run="run"))
        self.peers.append(peer)

    def close(self) -> None:
        self.thread.join()
        for sock in (*self.peers, self.listener):
            sock.close()


class Damaging:
    """A network that changes one byte, at ``place``, of each of the first ``times`` connections to
    ``address``; of what the client sends, or (``back``) of what it gets.
    """

    def __init__(self, address: str, *, place: int, times: int, back: bool) -> None:
        self.behind, self.place, self.left, self.back = address, place, times, back
        self.damaged = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = [self.listener]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(wire.split_address(self.behind))
            self.sockets += [near, far]
            damage, self.left = self.left > 0, self.left - 1
            for back, source, sink in ((False, near, far), (True, far, near)):
                place = self.place if damage and back == self.back else None
                threading.Thread(target=self.pump, args=(source, sink, place), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, place: int | None) -> None:
        position = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                if place is not None and position <= place < position + len(data):
                    data[place - position] ^= 1
                    self.damaged += 1
                position += len(data)
                sink.sendall(data)
        except OSError:
            pass
        wire.cut(sink)

    def close(self) -> None:
        for sock in self.sockets:
            wire.cut(sock)
            sock.close()


def pusher(
    server: DataServer, **more: Any
) -> tuple[Pusher, list[Any], list[tuple[int, Exception]]]:
    acks: list[Any] = []
    errors: list[tuple[int, Exception]] = []
    made = Pusher(
        server.buffers,
        server.access,
        on_ack=lambda *told: acks.append(told),
        on_error=lambda epoch, generation, error: errors.append((epoch, error)),
        **more,
    )
    return made, acks, errors
