"""Framing, proof of the token, and the fence of the data plane.

A connection begins with a challenge from the server and a proof from the client, and one back: HMAC
over both nonces and the run's name, so that the token never travels and neither side reads a byte
from somebody who does not know it. After that, each message is one :class:`Frame`: a fixed header,
then ``aux`` bytes (a layout, a list of shards, a reason), then ``length`` bytes of state.

There is no TLS here: the data plane trusts the network that the collectives themselves run over,
which carry the same numbers in the clear. The proof keeps strangers out; it hides nothing.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from planaria.errors import ChecksumError, CommError, EpochSuperseded
from planaria.runtime.memory.layout import MAX_LAYOUT_BYTES

MAGIC = b"PLN1"
HEADER = struct.Struct(">4sB3xqqiIQQ")
"""magic, kind, epoch, generation, shard, bytes of aux, bytes of state, xxh3-64 of both."""
NONCE_BYTES = 32
CHUNK = 1 << 22
"""Bytes moved, and hashed, at a time."""
MAX_STATE_BYTES = 1 << 44
"""Bound of one shard's state."""
HANDSHAKE_SECONDS = 10.0
"""A peer that has not proved the token by then is dropped (our choice)."""


class Kind(enum.IntEnum):
    """What a frame is."""

    PUT = 1
    """Owner to holder: header and layout; the state follows after GO."""
    GET = 2
    """aux: the replica set as big-endian int32s; empty: the sent part."""
    GO = 3
    HAVE = 4
    """The holder has exactly this already."""
    REFUSED = 5
    """aux: a sentence."""
    ACK = 6
    """Complete and checked."""
    DATA = 7
    """aux: the layout; then the state."""
    STALE = 8
    """The sender's epoch is over; ``epoch`` is the present one."""
    CORRUPT = 9
    """The bytes that arrived are not those that were sent."""


@dataclass(frozen=True)
class Frame:
    """One message without its state."""

    kind: Kind
    epoch: int = 0
    generation: int = 0
    shard: int = 0
    aux: bytes = b""
    length: int = 0
    """Bytes of state."""
    checksum: int = 0
    """xxh3-64 over ``aux`` and the state."""


class Fence:
    """The newest epoch that this worker knows, and the sockets that belong to older ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._sockets: dict[socket.socket, int] = {}

    @property
    def epoch(self) -> int:
        """Newest epoch that was announced by :meth:`advance`."""
        return self._epoch

    def advance(self, epoch: int) -> None:
        """Cut every connection of an older epoch: whoever waits on one gets EpochSuperseded."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            old = [sock for sock, of in self._sockets.items() if of < self._epoch]
        for sock in old:
            cut(sock)

    def enter(self, sock: socket.socket, epoch: int) -> None:
        """``sock`` serves ``epoch`` from now on; raises EpochSuperseded where that is over."""
        with self._lock:
            if epoch >= self._epoch:
                self._sockets[sock] = epoch
                return
        self.check(epoch)

    def leave(self, sock: socket.socket) -> None:
        """``sock`` is about to be closed."""
        with self._lock:
            self._sockets.pop(sock, None)

    def check(self, epoch: int) -> None:
        """Raise EpochSuperseded where ``epoch`` is over."""
        if epoch < self._epoch:
            raise EpochSuperseded(
                f"epoch {epoch} was superseded by epoch {self._epoch} during a transfer: "
                "give it up and report to the new one"
            )

    def cut_all(self) -> None:
        """Cut every connection: the worker ends."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            cut(sock)


class Meter:
    """Bytes of state that have gone over the network, both ways; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    @property
    def total(self) -> int:
        """It never falls: who sees it grow knows that a transfer goes on."""
        return self._total

    def add(self, count: int) -> None:
        with self._lock:
            self._total += count


class Access:
    """What a worker needs for talking to data servers of its run."""

    def __init__(self, token: str, *, run: str, timeout: float = 30.0) -> None:
        """``timeout``: seconds without a byte after which a peer counts as gone
        (``Limits.transfer``; may be set later)."""
        self.token = token
        self.run = run
        self.timeout = timeout
        self.fence = Fence()
        self.moved = Meter()

    def proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        """HMAC-SHA256 of both nonces and the run under the token; ``role`` keeps the two apart."""
        message = b"|".join((MAGIC, role, self.run.encode(), first, second))
        return hmac.digest(self.token.encode(), message, "sha256")


def cut(sock: socket.socket) -> None:
    """End a connection under whoever waits on it; the descriptor stays theirs to close."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[host]:port``; raises :class:`~planaria.errors.CommError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CommError(f"{address!r} is no address of a data server: it must be host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """What :func:`split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect(address: str, access: Access, epoch: int) -> socket.socket:
    """A connection to the data server at ``address``, proved both ways, for ``epoch``.

    It is in the fence from its first packet on: whoever closes it leaves the fence before. Raises
    :class:`~planaria.errors.EpochSuperseded` where ``epoch`` is over, before or meanwhile, else
    :class:`~planaria.errors.CommError` where nobody answers, or not with the proof.
    """
    sock = _reach(address, access, epoch)
    try:
        tune(sock)
        sock.settimeout(min(HANDSHAKE_SECONDS, access.timeout))
        _prove(sock, access, address)
        sock.settimeout(access.timeout)
    except BaseException as error:
        access.fence.leave(sock)
        sock.close()
        if not isinstance(error, OSError):
            raise
        access.fence.check(epoch)
        raise CommError(
            f"the data server at {address} did not accept this worker ({error or 'closed'}): "
            "it belongs to another run, or its worker is gone"
        ) from error
    return sock


def _reach(address: str, access: Access, epoch: int) -> socket.socket:
    """The first of the host's addresses that answers."""
    access.fence.check(epoch)
    last: OSError = OSError("the host has no address")
    try:
        found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except OSError as error:
        found, last = [], error
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind, protocol)
        try:
            _join(sock, place, access, epoch)
            return sock
        except BaseException as error:
            access.fence.leave(sock)
            sock.close()
            if not isinstance(error, OSError):
                raise
            access.fence.check(epoch)
            last = error
    raise CommError(
        f"no data server answers at {address} ({last}): its worker is gone or unreachable"
    ) from last


def _join(sock: socket.socket, place: Any, access: Access, epoch: int) -> None:
    """Connect, so that :meth:`Fence.advance` ends it at any moment."""
    sock.setblocking(False)
    code = sock.connect_ex(place)
    # Only now: cutting a socket that has not begun to connect would not keep it from beginning.
    access.fence.enter(sock, epoch)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        if not poller.poll(1000 * access.timeout):
            raise TimeoutError(f"{access.timeout:g} s without an answer")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _prove(sock: socket.socket, access: Access, address: str) -> None:
    """The client's side of the handshake."""
    theirs = _read(sock, len(MAGIC) + NONCE_BYTES)
    mine = secrets.token_bytes(NONCE_BYTES)
    if not theirs.startswith(MAGIC):
        raise CommError(f"what listens at {address} is no data server: check the address")
    challenge = theirs[len(MAGIC) :]
    sock.sendall(mine + access.proof(b"client", challenge, mine))
    wanted = access.proof(b"server", mine, challenge)
    if not hmac.compare_digest(_read(sock, len(wanted)), wanted):
        raise CommError(f"the data server at {address} does not know this run's token")


def accept(sock: socket.socket, access: Access) -> bool:
    """The server's side of :func:`connect`; False where the peer does not know the token."""
    tune(sock)
    sock.settimeout(HANDSHAKE_SECONDS)
    challenge = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + challenge)
    answer = _read(sock, 2 * NONCE_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, access.proof(b"client", challenge, theirs)):
        return False
    sock.sendall(access.proof(b"server", theirs, challenge))
    return True


def tune(sock: socket.socket) -> None:
    """Small frames go out at once; a peer whose machine is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(sock: socket.socket, frame: Frame) -> None:
    """Send a header and its aux; the state is sent by :func:`send_state`."""
    header = HEADER.pack(
        MAGIC,
        frame.kind,
        frame.epoch,
        frame.generation,
        frame.shard,
        len(frame.aux),
        frame.length,
        frame.checksum,
    )
    sock.sendall(header + frame.aux)


def receive(sock: socket.socket) -> Frame:
    """The next header and its aux.

    Raises :class:`~planaria.errors.CommError` for what is no frame of ours, ``ConnectionError``
    where the connection ended.
    """
    magic, kind, epoch, generation, shard, aux, length, checksum = HEADER.unpack(
        _read(sock, HEADER.size)
    )
    if magic != MAGIC or kind not in Kind._value2member_map_:
        raise CommError(
            f"a peer sent a header that begins with {magic!r} and kind {kind}: "
            "start all workers from one version of planaria"
        )
    if aux > MAX_LAYOUT_BYTES or length > MAX_STATE_BYTES:
        raise CommError(
            f"a peer announced {aux} bytes of table and {length} of state, more than "
            f"{MAX_LAYOUT_BYTES} and {MAX_STATE_BYTES}: it is not from a worker of this version"
        )
    return Frame(Kind(kind), epoch, generation, shard, _read(sock, aux), length, checksum)


def send_state(
    sock: socket.socket,
    state: memoryview,
    moved: Meter,
    *,
    between: Callable[[], None] | None = None,
) -> None:
    """Send ``state`` in chunks; ``between`` is called once, before the last of them."""
    for start in range(0, max(len(state), 1), CHUNK):
        if between is not None and start + CHUNK >= len(state):
            between()
        chunk = state[start : start + CHUNK]
        # Not sendall, whose time-out is one for all of a chunk and which tells of no byte before.
        while chunk:
            count = sock.send(chunk)
            moved.add(count)
            chunk = chunk[count:]


def receive_state(sock: socket.socket, into: memoryview, frame: Frame, moved: Meter) -> None:
    """Fill ``into``, hashing chunk by chunk; raises :class:`~planaria.errors.ChecksumError`."""
    hasher = xxhash.xxh3_64(frame.aux)
    for start in range(0, len(into), CHUNK):
        chunk = into[start : start + CHUNK]
        _fill(sock, chunk, moved)
        hasher.update(chunk)
    if hasher.intdigest() != frame.checksum:
        raise ChecksumError(
            f"generation {frame.generation} of shard {frame.shard} arrived with checksum "
            f"{hasher.intdigest():016x} instead of {frame.checksum:016x}: memory or network "
            "changed it; the copy is not used"
        )


@contextmanager
def guarded(sock: socket.socket, access: Access, *, epoch: int, peer: str) -> Generator[None]:
    """Use ``sock`` for ``epoch``: turn what the operating system says into our errors.

    Raises EpochSuperseded where a newer epoch came meanwhile, else
    :class:`~planaria.errors.CommError`.
    """
    access.fence.enter(sock, epoch)
    try:
        yield
    except OSError as error:
        access.fence.check(epoch)
        what = f"{access.timeout:g} s without a byte" if isinstance(error, TimeoutError) else error
        raise CommError(f"the transfer with {peer} ended early ({what}): it is gone") from error
    except CommError:
        access.fence.check(epoch)
        raise


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, into: memoryview, moved: Meter | None = None) -> None:
    position = 0
    while position < len(into):
        count = sock.recv_into(into[position:])
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        position += count
        if moved is not None:
            moved.add(count)
