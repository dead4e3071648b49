"""Who is connected to the coordinator: streams of workers and launchers, and how to reach them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator.service import Outbox
from planaria.runtime.messages import Worker


@dataclass(eq=False)
class Session:
    """One attached worker."""

    hello: messages.Hello
    outbox: Outbox
    left: bool = False
    """It has said that its script has ended: the stream that closes then is no loss."""


@dataclass(eq=False)
class Launcher:
    """One attached launcher."""

    hello: control.LauncherHello
    outbox: Outbox

    def tell(self, message: control.ToLauncher) -> None:
        """Queue ``message`` for it."""
        self.outbox.put(control.encode(message))


class Crowd:
    """Streams by worker, launchers in the order in which they came, processes by worker."""

    def __init__(self) -> None:
        self.sessions: dict[Worker, Session] = {}
        self.launchers: list[Launcher] = []
        self.had_launcher = False
        """Whether a launcher that can start workers was ever here."""
        self._processes: dict[Worker, tuple[int, Launcher]] = {}

    def send(self, worker: Worker, message: messages.FromCoordinator) -> None:
        """Queue ``message``; dropped where ``worker`` has no stream."""
        self.send_encoded(worker, control.encode(message))

    def send_encoded(self, worker: Worker, data: bytes) -> None:
        """As :meth:`send`, for a message that many get: encoded once."""
        session = self.sessions.get(worker)
        if session is not None:
            session.outbox.put(data)

    def end(self, worker: Worker) -> None:
        """Close the stream of ``worker`` once everything queued is out."""
        session = self.sessions.get(worker)
        if session is not None:
            session.outbox.end()

    def tell_launchers(self, message: control.ToLauncher) -> None:
        """Queue ``message`` for every launcher."""
        for launcher in self.launchers:
            launcher.tell(message)

    def add_launcher(self, hello: control.LauncherHello, outbox: Outbox) -> Launcher:
        launcher = Launcher(hello, outbox)
        self.launchers.append(launcher)
        self.had_launcher = self.had_launcher or hello.spawns
        return launcher

    def launcher_of(self, outbox: Outbox) -> Launcher:
        """The launcher whose stream this is."""
        return next(one for one in self.launchers if one.outbox is outbox)

    def drop_launcher(self, outbox: Outbox) -> None:
        self.launchers = [one for one in self.launchers if one.outbox is not outbox]

    def spawned(self, worker: Worker, *, pid: int, launcher: Launcher) -> None:
        """``launcher`` has started ``worker``."""
        self._processes[worker] = (pid, launcher)

    def exited(self, worker: Worker) -> None:
        """The process of ``worker`` has ended."""
        self._processes.pop(worker, None)

    def processes(self) -> frozenset[Worker]:
        """Workers whose processes launchers have started and not seen the end of."""
        return frozenset(self._processes)

    def spawner(self) -> Launcher | None:
        """A launcher that starts workers; None where there is none."""
        return next((one for one in self.launchers if one.hello.spawns), None)

    def kill(self, worker: Worker, *, node: str, reason: str) -> bool:
        """Have the process of ``worker`` killed by the launcher that can; whether there is one.

        The one that started it; else, after the coordinator has been started again, one on the same
        node, if the worker's own word on its pid is still there.
        """
        pid, launcher = self._processes.get(worker, (0, None))
        if launcher is None or launcher not in self.launchers:
            launcher = next((one for one in self.launchers if one.hello.node == node), None)
        session = self.sessions.get(worker)
        pid = pid or (session.hello.pid if session is not None else 0)
        if launcher is None or pid == 0:
            return False
        launcher.tell(control.Kill(worker=worker, pid=pid, reason=reason))
        return True


class Encoded:
    """Encodes each message of a transition once, however many workers it goes to."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def of(self, message: msgspec.Struct) -> bytes:
        key = id(message)
        if key not in self._known:
            self._known[key] = control.encode(message)
        return self._known[key]
