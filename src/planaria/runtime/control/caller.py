"""The client's side of the control plane: one call, and one stream that finds its way back.

:class:`Caller` turns gRPC's status codes into Planaria's errors. :class:`Duplex` keeps a
bidirectional stream open beside the program: it attaches again by itself when the coordinator comes
back, and says so once when it does not. Both make their gRPC objects in the process that uses them;
make them after any fork.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import grpc
import msgspec

from planaria.errors import CommError, EpochSuperseded, JoinError, UserError
from planaria.runtime.control import protocol as control

T = TypeVar("T")

_Item = tuple[bytes, bool]
"""A message, and whether it is kept for the next stream where this one does not take it."""

GRACE = 2.0
"""Seconds that a call may take beyond the wait it asks the coordinator for; our choice."""
BACKOFF = (0.05, 0.5)
"""First and longest pause between attempts to attach again, seconds; our choice."""
UNSENT = 10_000
"""How many messages are kept while there is no stream; older ones are dropped first."""
REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""What does not get better by trying again."""


class AwayError(CommError):
    """Nobody answers at the coordinator's address; it may be started again."""


class Caller:
    """Calls of one coordinator at ``address`` (``host:port``) with the run's ``token``."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: control.Tls | None = None,
        max_message: int = control.MAX_MESSAGE,
    ) -> None:
        self.address = address
        self.metadata = control.metadata(token)
        self.max_message = max_message
        self.channel = control.channel(address, tls=tls, max_message=max_message)

    def call(
        self, method: str, body: msgspec.Struct, reply: type[T], *, timeout: float = 10.0
    ) -> T:
        """The answer to ``body``, at most ``timeout`` seconds later.

        Raises ``EpochSuperseded``, ``JoinError`` (wrong token), ``UserError`` (a body that the
        coordinator does not accept) or ``CommError`` (nobody there, too late, too big).
        """
        data = control.encode(body)
        if len(data) > self.max_message:
            raise CommError(
                f"{method} of {len(data)} bytes is over the bound of {self.max_message}; "
                "state goes through the data plane"
            )
        remote = self.channel.unary_unary(control.path_of(method))
        try:
            answer = remote(data, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise self.explain(error, method) from None
        return control.decode(answer, reply)

    def explain(self, error: grpc.RpcError, method: str) -> Exception:
        """Our error for gRPC's."""
        code, details = status_of(error)
        if code is grpc.StatusCode.ABORTED:
            return EpochSuperseded(details)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return JoinError(details)
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            return UserError(details)
        if code is grpc.StatusCode.UNAVAILABLE:
            return AwayError(
                f"no coordinator answers at {self.address} ({details}); is the run still alive?"
            )
        return CommError(f"{method} at {self.address} failed: {code.name}: {details}")

    def close(self) -> None:
        """Give the connection back; calls that wait end with ``CommError``."""
        self.channel.close()


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and one line of an error that gRPC raised."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return code or grpc.StatusCode.UNKNOWN, " ".join((details or "no details").split())


class Duplex:
    """A bidirectional stream with a reading thread, attached again when the other side comes back.

    ``greeting()`` is said first on every attachment. ``receive(message)`` runs on the reading
    thread and must not block. ``ended(reason)`` is called once, on the reading thread: None after
    :meth:`finish` or :meth:`close`, else why the stream is given up (refused by the coordinator, or
    nobody there for ``patience()`` seconds).
    """

    def __init__(
        self,
        caller: Caller,
        method: str,
        *,
        incoming: Any,
        greeting: Callable[[], Sequence[msgspec.Struct]],
        receive: Callable[[Any], None],
        ended: Callable[[str | None], None],
        patience: Callable[[], float],
    ) -> None:
        self._caller = caller
        self._method = method
        self._incoming = incoming
        self._greeting = greeting
        self._receive = receive
        self._ended = ended
        self._patience = patience
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Item | None] | None = None
        self._unsent: deque[bytes] = deque(maxlen=UNSENT)
        self._call: Any = None
        self._finished = threading.Event()
        self._heard = False
        self.attachments = 0
        self.thread = threading.Thread(target=self._run, name=f"planaria-{method}", daemon=True)

    def start(self) -> None:
        """Attach, on a thread of its own."""
        self.thread.start()

    def send(self, message: msgspec.Struct, *, keep: bool = True) -> None:
        """Queue ``message``; without a stream it is kept for the next one, unless not ``keep``."""
        data = control.encode(message)
        if len(data) > self._caller.max_message:
            raise CommError(
                f"{type(message).__name__} of {len(data)} bytes is over the bound of "
                f"{self._caller.max_message}; state goes through the data plane"
            )
        with self._lock:
            if self._queue is not None:
                self._queue.put((data, keep))
            elif keep:
                self._unsent.append(data)

    def finish(self) -> None:
        """What comes now is the end: a stream that closes is not to be opened again."""
        self._finished.set()

    def close(self, *, timeout: float = 1.0) -> None:
        """Half-close, wait up to ``timeout`` seconds for what is queued to leave, and end."""
        self._finished.set()
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(timeout)
            if self.thread.is_alive() and self._call is not None:
                self._call.cancel()
                self.thread.join(timeout)

    def _run(self) -> None:
        self._ended(self._keep_attached())

    def _keep_attached(self) -> str | None:
        """Attach again and again; the reason for giving up, None after a proper end."""
        lost_at = time.monotonic()
        pause = BACKOFF[0]
        while True:
            self._heard = False
            reason, refused = self._attach()
            if self._finished.is_set():
                return None
            if refused:
                return reason
            if self._heard:
                lost_at, pause = time.monotonic(), BACKOFF[0]
            patience = self._patience()
            if time.monotonic() - lost_at + pause > patience:
                address = self._caller.address
                return f"no coordinator answered at {address} for {patience:g} s: {reason}"
            if self._finished.wait(pause):
                return None
            pause = min(2 * pause, BACKOFF[1])

    def _attach(self) -> tuple[str, bool]:
        """One stream from greeting to end; why it ended and whether that was a refusal."""
        queue: SimpleQueue[_Item | None] = SimpleQueue()
        taken: list[bytes] = []
        remote = self._caller.channel.stream_stream(control.path_of(self._method))
        try:
            with self._lock:
                # In one section: what is said between greeting and queue would be heard by nobody.
                for message in self._greeting():
                    queue.put((control.encode(message), False))
                while self._unsent:
                    queue.put((self._unsent.popleft(), True))
                self._queue = queue
            self._call = remote(_drain(queue, taken), metadata=self._caller.metadata)
            for data in self._call:
                if not self._heard:
                    self._heard = True
                    self.attachments += 1
                self._receive(control.decode(data, self._incoming))
        except grpc.RpcError as error:
            code, details = status_of(error)
            return details, code in REFUSALS
        except ValueError as error:
            # A coordinator of another version, or a closed channel: both are final.
            return " ".join(str(error).split()), True
        finally:
            with self._lock:
                self._queue = None
                left = [] if self._heard else taken
                self._unsent.extendleft(reversed([*left, *_rest(queue)]))
            queue.put(None)
        return "the coordinator closed the stream", False


def _drain(queue: SimpleQueue[_Item | None], taken: list[bytes]) -> Iterator[bytes]:
    """What gRPC sends; ``taken`` gets what is to be kept of it."""
    while (item := queue.get()) is not None:
        data, keep = item
        if keep:
            taken.append(data)
        yield data


def _rest(queue: SimpleQueue[_Item | None]) -> Iterator[bytes]:
    """What is left in ``queue`` and is to be kept."""
    with contextlib.suppress(Empty):
        while True:
            item = queue.get_nowait()
            if item is not None and item[1]:
                yield item[0]
