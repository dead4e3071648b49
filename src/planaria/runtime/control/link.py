"""The launcher's side of the control plane, also used by ``planaria join`` and the command line."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from planaria.errors import JoinError
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import GRACE, Caller, Duplex
from planaria.runtime.messages import Worker

_LATELY = 5.0
"""Seconds; for as long a stream may look whole after its other end has died."""


class LauncherLink:
    """One launcher's stream to the coordinator at ``address``.

    ``receive(message)`` (Kill, WantSpare, RestartAll, Line or EndRun) runs on the reading thread
    and must not block for long. ``ended(reason)`` is called once on that thread: None after
    ``EndRun`` or :meth:`close`, else why the coordinator is gone. ``spawns``: whether it starts
    fresh workers when asked to.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        run: str,
        node: str,
        receive: Callable[[control.ToLauncher], None],
        ended: Callable[[str | None], None] = lambda reason: None,
        tls: control.Tls | None = None,
        patience: float = 30.0,
        spawns: bool = True,
    ) -> None:
        self.caller = Caller(address, token=token, tls=tls)
        self._hello = control.LauncherHello(run=run, node=node, pid=os.getpid(), spawns=spawns)
        self._receive = receive
        self._ended = ended
        self._patience = patience
        self._living: dict[Worker, control.Spawned] = {}
        self._ended_lately: deque[tuple[float, control.Exited]] = deque(maxlen=64)
        """Told over the present stream, and again over the next."""
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self.gone: str | None = None
        """Why the stream was given up; None while it lives and after a proper end."""
        self._stream = Duplex(
            self.caller,
            control.LAUNCHER,
            incoming=control.ToLauncher,
            greeting=self._greeting,
            receive=self._take,
            ended=self._end,
            patience=lambda: patience,
        )

    def connect(self) -> None:
        """Attach; ``JoinError`` with one line where the coordinator refuses or does not answer."""
        self._stream.start()
        if not self._answered.wait(self._patience + GRACE) or self.gone is not None:
            self.close()
            raise JoinError(self.gone or f"no coordinator answers at {self.caller.address}")

    def spawned(self, worker: Worker, *, pid: int) -> None:
        """Tell that ``worker`` was started; told again if the coordinator comes back."""
        message = control.Spawned(worker=worker, pid=pid)
        with self._lock:
            self._living[worker] = message
        self._stream.send(message, keep=False)

    def exited(self, worker: Worker, *, pid: int, description: str, code: int | None) -> None:
        """Tell that ``worker``'s pidfd has fired."""
        with self._lock:
            self._living.pop(worker, None)
        message = control.Exited(
            worker=worker, pid=pid, description=description, code=code, at=time.time()
        )
        with self._lock:
            self._ended_lately.append((time.monotonic(), message))
        self._stream.send(message)

    def request(self, body: control.Requested, *, timeout: float = 10.0) -> str:
        """Ask for a stop, a durable checkpoint or spares; what the coordinator says to it."""
        return self.caller.call(control.REQUEST, body, control.Done, timeout=timeout).note

    def status(self, *, timeout: float = 10.0) -> control.Status:
        """What the coordinator knows now."""
        return self.caller.call(control.STATUS, control.Look(), control.Status, timeout=timeout)

    def close(self) -> None:
        """End the stream after what is queued has left."""
        self._stream.close()
        self.caller.close()

    def _greeting(self) -> list[control.FromLauncher]:
        with self._lock:
            # What went into a stream whose other end had just died was heard by nobody; what is told
            # twice does no harm.
            since = time.monotonic() - self._patience - _LATELY
            lately = [message for at, message in self._ended_lately if at > since]
            return [self._hello, *self._living.values(), *lately]

    def _take(self, message: control.ToLauncher) -> None:
        if isinstance(message, control.Attached):
            with self._lock:
                self._ended_lately.clear()
            self._answered.set()
            return
        if isinstance(message, control.EndRun):
            self._stream.finish()
        self._receive(message)

    def _end(self, reason: str | None) -> None:
        self.gone = reason
        answered = self._answered.is_set()
        self._answered.set()
        if answered:
            self._ended(reason)
