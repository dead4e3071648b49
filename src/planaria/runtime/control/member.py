"""The worker's side of the control plane: a stream and the keys of an epoch, beside the training.

Two threads: one reads the stream and answers pings at once, so that a worker counts as alive while
its handlers are busy; the other runs the handlers in the order of the messages. The training thread
only queues messages and waits for keys. Make a :class:`Member` after any fork.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from planaria.errors import CommError, JoinError, RunError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import GRACE, AwayError, Caller, Duplex

M = TypeVar("M", bound=messages.Message)

STICKY: tuple[type[messages.Message], ...] = (
    messages.Ready,
    messages.Joinless,
    messages.Report,
    messages.Restored,
    messages.Broke,
    messages.Committed,
    messages.Durable,
    messages.Finished,
    messages.Failed,
)
"""Said again, the newest of each kind and in this order, to a coordinator that was started anew.

Membership ignores what it knows already, so that saying it twice does no harm.
"""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where the training thread is, for the answer to a ping."""

    step: int = 0
    """Step it attempts, from 1; 0 before the first."""
    collective: int = 0
    """Collectives it has entered in this epoch."""
    inside: bool = False
    """Whether it waits in one now."""
    waiting: bool = False
    """Whether it waits for protection."""
    moved: int = 0
    """Bytes of state that this worker has sent and received."""


class Keys:
    """Keys and values that the members of one epoch share; torch's ``Store`` is built on it.

    Every method raises ``EpochSuperseded`` when a newer membership exists, at once and also in a
    call that waits already, and ``CommError`` when a wait takes longer than ``timeout`` seconds.
    """

    def __init__(self, caller: Caller, patience: Callable[[], float]) -> None:
        self._caller = caller
        self._patience = patience

    def put(self, epoch: int, key: str, value: bytes) -> None:
        """Set ``key``; who waits for it gets it."""
        body = control.Put(epoch=epoch, key=key, value=value)
        self._call(control.PUT, body, control.Done)

    def get(self, epoch: int, key: str, timeout: float) -> bytes:
        """The value of ``key``, as soon as somebody has put it."""
        body = control.Get(epoch=epoch, key=key, timeout=timeout)
        return self._call(control.GET, body, control.Values, timeout=timeout).values[0]

    def get_many(self, epoch: int, keys: Iterable[str], timeout: float) -> list[bytes]:
        """The values of ``keys`` in their order, as soon as all are there: one round trip."""
        body = control.GetMany(epoch=epoch, keys=tuple(keys), timeout=timeout)
        return list(self._call(control.GET_MANY, body, control.Values, timeout=timeout).values)

    def add(self, epoch: int, key: str, amount: int = 1) -> int:
        """Add to a decimal counter that starts at 0; the new value."""
        body = control.Add(epoch=epoch, key=key, amount=amount)
        return self._call(control.ADD, body, control.Counter).value

    def has(self, epoch: int, keys: Iterable[str]) -> bool:
        """Whether all ``keys`` are there now."""
        body = control.Check(epoch=epoch, keys=tuple(keys))
        return self._call(control.CHECK, body, control.Present).present

    def _call(
        self, method: str, body: msgspec.Struct, reply: type[Any], *, timeout: float = 0.0
    ) -> Any:
        """Call; while the coordinator is away, try again as long as a member is patient."""
        until = time.monotonic() + self._patience()
        while True:
            try:
                wait = max(timeout, self._patience()) + GRACE
                return self._caller.call(method, body, reply, timeout=wait)
            except AwayError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


class Member:
    """One worker's membership in the run that ``invitation`` names; connects at once.

    ``data_address`` is the ``host:port`` of its data server. Raises ``JoinError`` with the
    coordinator's one line where it refuses this worker, or where nobody answers for
    ``attach_timeout`` seconds. Messages that come before their handler is there (:meth:`on`) wait.
    """

    def __init__(
        self,
        invitation: control.Invitation,
        *,
        data_address: str = "",
        attach_timeout: float = 30.0,
    ) -> None:
        self.invitation = invitation
        self.closed = threading.Event()
        """Set when no more messages will come: the run is over, or the coordinator is gone."""
        self.gone: str | None = None
        """Why the coordinator is gone; None while it is there or after a proper end."""
        self.whereabouts: Callable[[], Whereabouts] = Whereabouts
        """Asked on the reading thread for each ping; must return at once. Set it once known."""
        self._hello = messages.Hello(
            token=invitation.token,
            run=invitation.run,
            worker=invitation.worker,
            node=invitation.node,
            pid=os.getpid(),
            version=invitation.version,
            config=invitation.config,
            data_address=data_address,
            rank=invitation.rank,
        )
        self._attach_timeout = attach_timeout
        self._welcome: messages.Welcome | None = None
        self._answered = threading.Event()
        self._sticky: dict[type[messages.Message], messages.Message] = {}
        self._handlers: dict[type[messages.Message], Callable[[Any], None]] = {}
        self._early: dict[type[messages.Message], deque[messages.Message]] = {}
        self._gone_callback: Callable[[str], None] | None = None
        self._told_gone = False
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[messages.Message | None] = SimpleQueue()
        self._control = threading.Thread(target=self._handle, name="planaria-control", daemon=True)
        self._caller = Caller(invitation.address, token=invitation.token, tls=invitation.tls)
        self.kv = Keys(self._caller, self._patience)
        """The keys of an epoch."""
        self._stream = Duplex(
            self._caller,
            control.ATTACH,
            incoming=messages.FromCoordinator,
            greeting=self._greeting,
            receive=self._receive,
            ended=self._lose,
            patience=self._patience,
        )
        self._connect()

    @property
    def worker(self) -> messages.Worker:
        """This worker's name."""
        return self.invitation.worker

    @property
    def welcome(self) -> messages.Welcome:
        """What the coordinator said on attaching: size of the world and limits."""
        assert self._welcome is not None
        return self._welcome

    @property
    def limits(self) -> messages.Limits:
        """Every time-out of the run, in seconds."""
        return self.welcome.limits

    def on(self, kind: type[M], callback: Callable[[M], None]) -> None:
        """Call ``callback(message)`` on the control thread for each message of ``kind``.

        One handler per kind. Messages that came earlier are handled then. A handler that raises
        ends the run: ``Failed`` goes to the coordinator, and :meth:`on_gone`'s callback is called.
        """
        with self._lock:
            self._handlers[kind] = callback
            for message in self._early.pop(kind, ()):
                self._inbox.put(message)

    def on_gone(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` when the coordinator is gone for good.

        On the control thread; where it is gone already, now.
        """
        with self._lock:
            self._gone_callback = callback
            late = self._told_gone
        if late and self.gone is not None:
            callback(self.gone)

    def send(self, message: messages.Message) -> None:
        """Queue ``message`` for the coordinator; returns at once."""
        sticky = isinstance(message, STICKY)
        if sticky:
            with self._lock:
                self._sticky[type(message)] = message
        self._stream.send(message, keep=not sticky and not isinstance(message, messages.Pong))

    def injected(self, fault: messages.Injected) -> None:
        """Have ``fault`` written to the journal, so that it may fire.

        Raises ``RunError`` where that is not acknowledged: what nobody counts must not fire.
        """
        body = control.Inject(worker=self.worker, fault=fault)
        try:
            self._caller.call(control.INJECT, body, control.Done, timeout=self.limits.timeout)
        except CommError as error:
            raise RunError(
                f"fault {fault.fault} was not acknowledged and does not fire: {error}"
            ) from None

    def failed(self, reason: str, *, exit_code: int = 1) -> None:
        """The user's code raised, or a check failed: the run must end with this one line."""
        # The text of an exception may hold what UTF-8 has no place for, such as a file's raw name.
        plain = reason.encode("utf-8", "backslashreplace").decode()
        self.send(messages.Failed(reason=plain, exit_code=exit_code))

    def close(self) -> None:
        """The script has ended: say so, let what is queued leave, end the stream.

        Without :meth:`failed` before it, this means that the script ended well.
        """
        if messages.Failed not in self._sticky:
            self._stream.send(messages.Left(), keep=False)
        self._end()

    def _end(self) -> None:
        self.closed.set()
        self._stream.close()
        self._inbox.put(None)
        self._caller.close()
        if self._control.is_alive() and self._control is not threading.current_thread():
            self._control.join(1.0)

    def _connect(self) -> None:
        self._control.start()
        self._stream.start()
        if not self._answered.wait(self._attach_timeout + GRACE):
            self._end()
            raise JoinError(
                f"worker {self.worker} heard nothing from {self.invitation.address} for "
                f"{self._attach_timeout:g} s; check that the run is alive"
            )
        if self._welcome is None:
            self._end()
            raise JoinError(self.gone or "the coordinator closed the stream without a welcome")

    def _patience(self) -> float:
        return self._attach_timeout if self._welcome is None else self._welcome.limits.timeout

    def _greeting(self) -> list[messages.Message]:
        with self._lock:
            again = [self._sticky[kind] for kind in STICKY if kind in self._sticky]
        return [self._hello, *again]

    def _receive(self, message: messages.Message) -> None:
        if isinstance(message, messages.Ping):
            self._pong(message)
            return
        if isinstance(message, messages.Welcome):
            self._welcome = message
            self._answered.set()
        elif isinstance(message, (messages.Stop, messages.Fence)):
            self._stream.finish()
        self._inbox.put(message)

    def _pong(self, ping: messages.Ping) -> None:
        at = self.whereabouts()
        pong = messages.Pong(
            seq=ping.seq,
            step=at.step,
            collective=at.collective,
            inside=at.inside,
            waiting=at.waiting,
            moved=at.moved,
        )
        self._stream.send(pong, keep=False)

    def _lose(self, reason: str | None) -> None:
        self.gone = self.gone or reason
        self._answered.set()
        self._inbox.put(None)

    def _handle(self) -> None:
        while (message := self._inbox.get()) is not None:
            with self._lock:
                handler = self._handlers.get(type(message))
                if handler is None:
                    early = self._early.setdefault(type(message), deque(maxlen=1000))
                    early.append(message)
                    continue
            try:
                handler(message)
            except Exception as error:
                self.gone = (
                    f"worker {self.worker} could not handle {type(message).__name__}: "
                    f"{type(error).__name__}: {error}"
                )
                self.failed(self.gone)
                break
        self.closed.set()
        with self._lock:
            self._told_gone = True
            callback = self._gone_callback
        if self.gone is not None and callback is not None:
            callback(self.gone)
