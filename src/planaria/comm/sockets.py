"""How a stuck gloo collective is left: its sockets are shut under it.

``abort()`` and ``shutdown()`` of a gloo group free nobody who waits for a stopped peer. Shutting the
sockets (``shutdown(SHUT_RDWR)``) does, within milliseconds, and lets the group be dropped at once
(decisions 2 and 3 of the design). Three kinds of sockets must be spared: listeners (shutting gloo's
kills the process), gRPC's, and whatever the user has open. So gloo's own are told by the port of its
listener, on which peers were accepted, and by the published ports of the peers that it dialled.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Set
from typing import TypeVar

Address = tuple[str, int]
T = TypeVar("T")


def _own_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's internet stream sockets; each is closed after its turn."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile by another thread
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and (
                duplicate.type == socket.SOCK_STREAM
            ):
                yield duplicate


def _is_listener(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _plain(address: tuple[object, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:"), int(str(address[1]))


def listeners() -> set[Address]:
    """Addresses on which this process listens now."""
    found: set[Address] = set()
    for sock in _own_sockets():
        try:
            if _is_listener(sock):
                found.add(_plain(sock.getsockname()))
        except OSError:
            continue
    return found


def opened_listener(make: Callable[[], T]) -> tuple[T, Address]:
    """Run ``make`` and return its result with the one listener that it opened.

    Nothing else may open listeners meanwhile; a worker makes its transport before its other servers.
    """
    before = listeners()
    made = make()
    new = listeners() - before
    assert len(new) == 1, f"expected one new listener, found {sorted(new)}"
    return made, new.pop()


def shut(listener: Address, peers: Set[Address]) -> int:
    """Shut every connection that came in on ``listener`` or goes out to one of ``peers``.

    Returns how many were shut. Listeners and all other sockets are spared.
    """
    count = 0
    for sock in _own_sockets():
        try:
            if _is_listener(sock):
                continue
            here = _plain(sock.getsockname())
            try:
                there = _plain(sock.getpeername())
            except OSError:  # still connecting, or gone: the local side may tell
                there = None
            if here[1] == listener[1] or there in peers:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            continue
    return count
