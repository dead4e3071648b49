"""The worker processes of one machine: forked from a warm server, watched by pidfd, killed by it.

The server is multiprocessing's forkserver with the heavy imports preloaded, so that a worker costs
a fork and not an import. A worker is not our child but the server's; a pidfd tells of its end all
the same, and a signal through it can never reach another process that got the same number.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import psutil

from planaria.errors import RunError
from planaria.runtime.launch import worker
from planaria.runtime.messages import Worker

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "planaria",
    "planaria.comm",
    "planaria.runtime.control.member",
    "planaria.runtime.run",
    "planaria.runtime.launch.worker",
)
"""What every worker needs; an optimizer's first step imports ``torch._dynamo``, for seconds."""

_PIPES = 6
"""What a fork asks for takes seven descriptors; the others are for the threads beside it."""


@dataclass(eq=False)
class Child:
    """One worker process."""

    task: worker.Task
    process: BaseProcess
    pid: int
    pidfd: int
    code: int | None = None
    """Exit code, negative for a signal; None while it lives."""

    @property
    def name(self) -> Worker:
        return self.task.invitation.worker

    @property
    def description(self) -> str:
        """``exit code 1`` or ``killed by SIGKILL``."""
        return describe_code(self.code)


def _stopped(child: Child) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
    return False  # it has ended, and its pidfd is about to say so


def describe_code(code: int | None) -> str:
    """How a process ended, in words; ``code`` as in :mod:`subprocess`."""
    if code is None:
        return "ended, exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Fleet:
    """Starts, watches and kills workers. Belongs to the running asyncio loop.

    ``exited(child)`` is called on the loop as soon as a worker has ended, whatever the reason.
    ``environment`` is the server's, and so every worker's, where our own does not set it otherwise;
    ``threads`` goes into its OMP_NUM_THREADS.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        threads: int,
        environment: Mapping[str, str],
        exited: Callable[[Child], None],
    ) -> None:
        self._signalled: set[Worker] = set()
        self.living: dict[Worker, Child] = {}
        self._loop = asyncio.get_running_loop()
        self._exited = exited
        self._environment = {
            **{name: os.environ.get(name, value) for name, value in environment.items()},
            "OMP_NUM_THREADS": str(threads),
        }
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        # One thread: the server takes one request at a time, and signal masks are per thread.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planaria-fork")
        self._forking: BaseProcess | None = None

    async def start(self, task: worker.Task) -> Child:
        """Fork a worker for ``task``; the first one also waits for the server's imports.

        Raises ``OSError`` where the machine has no room for a process more, ``EOFError`` where the
        server has ended.
        """
        process, pid = await self._loop.run_in_executor(self._pool, self._fork, task)
        self._forking = None
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            child = Child(task=task, process=process, pid=pid, pidfd=-1)
            self._loop.call_soon(self._end, child)
            return child
        except OSError:
            process.kill()  # nobody would watch it
            raise
        child = Child(task=task, process=process, pid=pid, pidfd=pidfd)
        self.living[child.name] = child
        self._loop.add_reader(pidfd, self._end, child)
        return child

    def kill(self, name: Worker, *, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send ``number`` to a worker; False where it is not here or has ended."""
        child = self.living.get(name)
        if child is None:
            return False
        self._signalled.add(name)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, number)
        return True

    def ended_itself(self, child: Child) -> bool:
        """Whether nothing was sent to it from here."""
        return child.name not in self._signalled

    async def wait(self, *, seconds: float) -> bool:
        """Wait until every worker has ended; False where some have not after ``seconds``."""
        end = self._loop.time() + seconds
        while self.living and self._loop.time() < end:
            await asyncio.sleep(0.01)
        return not self.living

    async def leave(
        self, *, seconds: float, hurry: asyncio.Event, only: frozenset[Worker] | None = None
    ) -> list[Worker]:
        """Wait ``seconds`` for workers that still do something of their own after the run.

        ``only``: who is waited for; None: everyone. Ends when ``hurry`` is set. A worker that is
        stopped (SIGSTOP) does nothing and is not waited for. Returns the names of those of them that
        still live.
        """

        def left() -> list[Child]:
            return [c for c in self.living.values() if only is None or c.name in only]

        end = self._loop.time() + seconds
        while self._loop.time() < end and not hurry.is_set() and not all(map(_stopped, left())):
            await asyncio.sleep(0.05)
        return sorted(child.name for child in left())

    async def end(self) -> None:
        """Kill who is left."""
        if self.living:
            for name in list(self.living):
                self.kill(name)
            if not await self.wait(seconds=10.0):
                left = ", ".join(f"{c.name} (pid {c.pid})" for c in self.living.values())
                raise RunError(f"{left} did not end after SIGKILL; look for it with ps")

    def close(self) -> None:
        """Kill whatever still lives and give the thread back."""
        for child in list(self.living.values()):
            self.kill(child.name)
            self._loop.remove_reader(child.pidfd)
            os.close(child.pidfd)
        self.living.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._forking is not None:
            # Forked while we were being cancelled, so nobody watches it yet.
            self._forking.kill()

    def _fork(self, task: worker.Task) -> tuple[BaseProcess, int]:
        with _without_warning():
            resource_tracker.ensure_running()
        # Inherited by the server: a Ctrl-C during its imports would end it with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        process = self._context.Process(
            target=worker.main, args=(task,), name=task.invitation.worker
        )
        _check_room()
        with _without_main(), _environment(self._environment):
            process.start()
        assert process.pid is not None
        self._forking = process
        return process, process.pid

    def _end(self, child: Child) -> None:
        if child.pidfd >= 0:
            self._loop.remove_reader(child.pidfd)
            os.close(child.pidfd)
            self.living.pop(child.name, None)
        # The server has reaped it, or does so now; its word on the exit code may lag behind.
        child.process.join(1.0)
        child.code = child.process.exitcode
        # Loader workers and alike that it left behind are in its session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        self._exited(child)


def _check_room() -> None:
    """Raise ``OSError`` where no process can be forked and watched now.

    multiprocessing's server ends where a fork of its own fails, or where who asks for one has no
    descriptor left for its pipes; and each worker with it, by its parent-death signal. A folder
    cannot be executed, so what is tried here of a process is the fork before that.
    """
    with contextlib.ExitStack() as held:
        for _ in range(_PIPES):
            for end in os.pipe():
                held.callback(os.close, end)
    with contextlib.suppress(PermissionError):
        os.posix_spawn("/", ["/"], {})


@contextlib.contextmanager
def _without_main() -> Generator[None]:
    """Hide this process's ``__main__`` while a worker is described to the server.

    multiprocessing would run the launcher's own main file (the ``planaria`` script, pytest, a
    user's driver) again in each worker; a worker runs its task and nothing else.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_warning() -> Generator[None]:
    """Have the tracker clean up after killed workers without a word on the user's terminal.

    It takes its warning filters from ours when it is started.
    """
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        yield
    finally:
        sys.warnoptions.pop()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Environment variables for the server, which reads them when it imports torch."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
