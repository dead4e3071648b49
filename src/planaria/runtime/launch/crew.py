"""The workers and spares of one launcher: who is started when, and what the end of one means.

The launcher decides when the run begins and ends; how a process is forked and watched is
:mod:`.fleet`'s part.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import msgspec

from planaria.errors import CommError, RunError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.control.link import LauncherLink
from planaria.runtime.launch import worker
from planaria.runtime.launch.config import JoinConfig, LaunchConfig
from planaria.runtime.launch.fleet import PRELOAD, Child, Fleet
from planaria.runtime.launch.screen import TRACEBACK_MARK, Screen

_ASK = 0.1
"""Seconds between questions while the coordinator is away; our choice."""
_LAST_WORD = 0.5
"""Seconds in which a run that has ended may say so, before a refusal is taken for its end."""
_AGAIN = 2.0
"""Seconds until a spare that could not be forked is tried once more; our choice."""
_ORDINARY = (None, 0, worker.REFUSED, worker.SPARE_FAILED)
"""Exit codes of a worker that has not failed."""
_SPARE_FAILURES = 3
"""After so many spares that failed before they joined, no more are started; our choice."""


class Crew:
    """Starts workers and spares and reads their ends; belongs to the launcher's loop.

    ``finish(code, reason)`` ends the run, ``over()`` says whether it has ended, ``spawn(work)`` runs
    a coroutine beside everything else. Nothing can be started before :meth:`begin`.
    """

    def __init__(
        self,
        config: LaunchConfig | JoinConfig,
        *,
        screen: Screen,
        finish: Callable[[int, str], None],
        over: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.fallen: dict[str, Child] = {}
        """Workers that have ended otherwise than well, by themselves."""
        self.fleet = Fleet(
            preload=(*PRELOAD, *config.preload),
            threads=config.threads,
            environment=config.environment,
            exited=self._exited,
        )
        self._config = config
        self._screen = screen
        self._finish = finish
        self._over = over
        self._spawn = spawn
        self._invitation: control.Invitation | None = None
        self._link: LauncherLink | None = None
        self._started = 0
        self._restarts = 0
        self._failed_spares = 0
        self._vacant: list[int] = []
        """Ranks of initial workers that were lost."""
        self._starting = asyncio.Lock()

    def begin(self, invitation: control.Invitation, *, link: LauncherLink) -> None:
        """Start all workers and spares of this launcher, workers first, beside everything else."""
        self._invitation, self._link = invitation, link
        self._spawn(self._start_set())

    def wanted(self, count: int) -> None:
        """The coordinator asks for ``count`` fresh spares."""
        self._spawn(self._spares(count))

    def restart(self, reason: str) -> None:
        """The whole set anew, for a script that cannot be swapped."""
        self._spawn(self._restart(reason))

    async def _start_set(self) -> None:
        async with self._starting:
            await self._fork_set()

    async def _fork_set(self) -> None:
        with _room("workers"):
            environment = self._environment()
        mine = self._restarts
        for rank in [*range(self._config.workers), *[None] * self._config.spares]:
            if self._restarts != mine:
                return  # a restart waits for us
            await self._start(rank, environment)

    async def _start(self, rank: int | None, environment: dict[str, str] | None = None) -> None:
        """Start one. Raises :class:`RunError` with one line where the machine has no room for it."""
        if self._over():
            return
        number = self._started
        self._started += 1
        name = f"{self._config.prefix}{number}"
        with _room(f"worker {name}"):
            values = environment or self._environment()
            task = self._task(name, number=number, rank=rank, environment=values)
            self._screen.follow(name, Path(task.invitation.log))
            try:
                child = await self.fleet.start(task)
            except BaseException:
                self._screen.forget(name)
                raise
        if self._link is not None:
            self._link.spawned(name, pid=child.pid)

    def _task(
        self, name: messages.Worker, *, number: int, rank: int | None, environment: dict[str, str]
    ) -> worker.Task:
        assert self._invitation is not None, "the run has begun"
        config = self._config
        log = config.logs / f"{name}.log"
        local = number % max(1, config.workers + config.spares)
        values = {**config.environment, **environment, "LOCAL_RANK": str(local)}
        if rank is not None:
            values["RANK"] = str(rank)
        return worker.Task(
            invitation=msgspec.structs.replace(
                self._invitation, worker=name, rank=rank, log=str(log.absolute())
            ),
            script=config.script,
            function=config.function,
            argument=config.argument,
            arguments=config.arguments,
            environment=values,
            threads=config.threads,
            faults=config.faults,
            max_redo=config.max_redo,
            rank=rank,
            world=config.workers,
        )

    def _environment(self) -> dict[str, str]:
        """What torchrun sets, the same for all workers of one start."""
        config = self._config
        if isinstance(config, JoinConfig):
            return {}
        assert self._invitation is not None, "the run has begun"
        return {
            "WORLD_SIZE": str(config.workers),
            "LOCAL_WORLD_SIZE": str(config.workers),
            "MASTER_ADDR": config.host,
            "MASTER_PORT": str(_free_port(config.host)),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": self._invitation.run,
        }

    def _exited(self, child: Child) -> None:
        assert self._link is not None
        if child.code != worker.REFUSED:  # the coordinator never took it for a worker
            self._link.exited(
                child.name, pid=child.pid, description=child.description, code=child.code
            )
        self._screen.forget(child.name)
        if child.code not in _ORDINARY and self.fleet.ended_itself(child):
            self.fallen[child.name] = child
        if self._over():
            return
        rank = child.task.rank
        if rank is not None and child.code != 0:
            self._vacant.append(rank)
        if child.code == worker.REFUSED:
            self._spawn(self._refused(child))
        elif child.code == worker.SPARE_FAILED:
            self._spare_failed(child)
        elif isinstance(self._config, JoinConfig) and not self.fleet.living:
            self._finish(0 if child.code == 0 else 1, f"{child.name} ended: {child.description}")

    async def _refused(self, child: Child) -> None:
        """The coordinator let a worker not in: the end of a run that has not begun.

        A spare that is refused later, perhaps because the script was changed, harms nobody.
        """
        await asyncio.sleep(_LAST_WORD)
        if self._over():
            return
        late = isinstance(self._config, LaunchConfig) and child.task.rank is None
        if late and not await self._forming():
            self._spare_failed(child)
        else:
            self._finish(2, _last_line(Path(child.task.invitation.log)))

    def _spare_failed(self, child: Child) -> None:
        self._failed_spares += 1
        reason = _last_line(Path(child.task.invitation.log))
        line = f"spare {child.name} could not start: {reason}"
        self._screen.line(line, kind="swap")
        if isinstance(self._config, JoinConfig):
            self._finish(1, line)

    async def _spares(self, count: int) -> None:
        forming = bool(self._vacant) and await self._forming()
        for _ in range(count):
            # Before the run is formed a lost worker is not a shard yet: its place is simply free.
            rank = self._vacant.pop(0) if forming and self._vacant else None
            if not await self._start_spare(rank):
                self._screen.line(
                    f"no more spares are started: {self._failed_spares} failed before they joined",
                    kind="swap",
                )
                return

    async def _start_spare(self, rank: int | None) -> bool:
        """Start one; False where too many have failed. A machine that is full harms no living run."""
        while self._failed_spares < _SPARE_FAILURES:
            try:
                await self._start(rank)
                return True
            except RunError as error:
                self._failed_spares += 1
                self._screen.line(str(error), kind="swap")
            if self._failed_spares < _SPARE_FAILURES:
                await asyncio.sleep(_AGAIN)
        return False

    async def _forming(self) -> bool:
        """Whether the run has not begun; asked again while the coordinator is away."""
        assert self._link is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.timeout
        while True:
            try:
                return (await asyncio.to_thread(self._link.status)).phase == "forming"
            except CommError:
                if loop.time() > end:
                    raise
                await asyncio.sleep(_ASK)

    async def _restart(self, reason: str) -> None:
        self._screen.line(reason, kind="swap")
        self._restarts += 1
        async with self._starting:  # whoever was still being started belongs to the old set
            for name in list(self.fleet.living):
                self.fleet.kill(name)
            await self.fleet.wait(seconds=self._config.timeout)
            self._vacant.clear()
            first = self._started
            await self._fork_set()
        ranks = [f"{self._config.prefix}{first + rank}" for rank in range(self._config.workers)]
        self._screen.line(f"ranks from 0 on are now {', '.join(ranks)}", kind="swap")


@contextlib.contextmanager
def _room(who: str) -> Generator[None]:
    """Errors of a machine that is full become one line."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "the server that forks has ended"
        raise RunError(
            f"{who} could not be started: {reason}; look at the limits of processes and open files "
            "(ulimit -u, ulimit -n) and at the machine's memory"
        ) from None


def _free_port(host: str) -> int:
    """A port that was free a moment ago, for a script that makes its own store."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].rpartition(TRACEBACK_MARK)[2] if lines else f"{log} says nothing"
