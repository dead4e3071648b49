"""``planaria run`` and ``planaria join``: start a run on this machine, watch it, end all of it.

The launcher holds no torch. It starts the coordinator as a process of its own and the workers
(:mod:`.crew`) from a warm server (:mod:`.fleet`), shows their output (:mod:`.screen`), and carries
out what the coordinator wants: kill a fenced worker, start a spare, start the whole set anew, end
the run. Signals to it end the run, softly first.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Generator
from typing import Any

from planaria.errors import PlanariaError
from planaria.runtime.control import protocol as control
from planaria.runtime.control.caller import Caller
from planaria.runtime.control.link import LauncherLink
from planaria.runtime.launch import reuse, stopping
from planaria.runtime.launch.config import (
    JoinConfig,
    LaunchConfig,
    make_logs,
    versions,
    write_config,
)
from planaria.runtime.launch.coordinator_process import CoordinatorProcess
from planaria.runtime.launch.crew import Crew
from planaria.runtime.launch.screen import Screen

_POLL = 0.1
"""Seconds between looks at the logs; what a user takes for at once."""
_LEAVE = 5.0
"""Seconds in which workers leave by themselves when the run has ended well, without a word."""
_HURRY = 0.5
"""The same where the run has failed or was interrupted twice."""
_LINGER = 20
"""What a script does after the run may take so many time-outs."""


def launch(config: LaunchConfig) -> int:
    """Run the script under a coordinator of its own; returns the exit code.

    0: the run finished; 1: it failed; 2: bad input; 130 after Ctrl-C; 143 after SIGTERM. Raises
    :class:`PlanariaError` where nothing could be started. Nothing is left running afterwards.
    """
    return asyncio.run(_Launch(config).run())


def join(config: JoinConfig) -> int:
    """Add warm spares to a living run and stay until they are released; returns the exit code.

    Raises :class:`PlanariaError` where the run refuses them or does not answer.
    """
    return asyncio.run(_Launch(config).run())


class _Launch:
    """One run of the launcher, on one asyncio loop."""

    def __init__(self, config: LaunchConfig | JoinConfig) -> None:
        self.config = config
        self.node = config.node or socket.gethostname()
        self.screen = Screen(quiet=config.quiet)
        self.interrupts = 0
        self.number = 0
        self.code: int | None = None
        self.grace = _HURRY
        """Seconds in which workers may leave by themselves."""
        self.owners: frozenset[str] = frozenset()
        """Who owned a shard when the run ended well."""
        self.told = False
        """Whether it was the coordinator that ended the run."""
        self.link: LauncherLink | None = None
        self.coordinator: CoordinatorProcess | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.hurry = asyncio.Event()
        self.crew = Crew(
            self.config,
            screen=self.screen,
            finish=self._finish,
            over=lambda: self.code is not None,
            spawn=self._spawn,
        )
        self.fleet = self.crew.fleet
        try:
            with self._signals():
                await self._begin()
                self._spawn(self._watch())
                await self.over.wait()
                await self._see_out()
                self._look_for_faults()
        finally:
            await self._clean()
        assert self.code is not None
        return self.code

    # ------------------------------------------------------------------ beginning and end

    async def _begin(self) -> None:
        if isinstance(self.config, LaunchConfig):
            token, run = secrets.token_hex(32), _run_name()
            went_on = await asyncio.to_thread(reuse.settle, self.config)
            write_config(self.config)
            if went_on:
                self.screen.line(went_on, kind="swap")
            self.coordinator = CoordinatorProcess(self.config, run=run, token=token)
            address = await self.coordinator.ready()
            self._spawn(self._keep_coordinator())
        else:
            address, token = self.config.address, self.config.token
            run = await asyncio.to_thread(_run_at, self.config)
            make_logs(self.config)
        invitation = control.Invitation(
            address=address,
            token=token,
            run=run,
            worker="",
            node=self.node,
            config=self.config.digest,
            version=versions(),
            out=str(self.config.out),
            ca=self.config.ca,
            certificate=self.config.client_certificate,
            key=self.config.client_key,
        )
        self.link = LauncherLink(
            address,
            token=token,
            run=run,
            node=self.node,
            receive=lambda message: self._from_thread(self._receive, message),
            ended=lambda reason: self._from_thread(self._link_ended, reason),
            tls=invitation.tls,
            patience=self.config.timeout,
            # A fresh spare comes from the run's own launcher: this one has its own number to add.
            spawns=isinstance(self.config, LaunchConfig),
        )
        await asyncio.to_thread(self.link.connect)
        self.crew.begin(invitation, link=self.link)

    def _finish(self, code: int, reason: str) -> None:
        """The run is over; the first word counts."""
        if self.code is None:
            self.code = code
            if code != 0 and reason:
                self.screen.line(reason, kind="error")
            self.over.set()

    async def _see_out(self) -> None:
        """Workers end by themselves: what a script does after its run is not cut off unsaid."""
        left = await self.fleet.leave(seconds=self.grace, hurry=self.hurry)
        left = sorted(self.owners.intersection(left))
        if left and self.code == 0 and not self.interrupts:
            self.screen.line(
                f"the run is over, {', '.join(left)} still at work; Ctrl-C ends them", kind="swap"
            )
            seconds = _LINGER * self.config.timeout
            if left := await self.fleet.leave(seconds=seconds, hurry=self.hurry, only=self.owners):
                self._fail_after(
                    f"{', '.join(left)} had not ended when the run was over and was killed: what it "
                    "was writing may be incomplete; do such work in run.final"
                )
        if self.code == 0:
            # Perhaps before the run's end was heard of here: an owner at the end has not been lost.
            for name in sorted(self.owners.intersection(self.crew.fallen)):
                child = self.crew.fallen[name]
                self._fail_after(
                    f"{name} failed after the run had finished: {child.description}; "
                    f"see {child.task.invitation.log}"
                )
        await self.fleet.end()

    def _look_for_faults(self) -> None:
        """A fault that never fired has tested nothing, however well the run has ended."""
        if isinstance(self.config, LaunchConfig) and not self.interrupts:
            for fault in reuse.unfired(self.config):
                self.screen.line(
                    f"fault {fault} never fired: no worker that it names came to that phase of that "
                    "step as the first owner of its shard",
                    kind="error",
                )

    def _fail_after(self, reason: str) -> None:
        """Something went wrong after the run had ended well."""
        self.screen.line(reason, kind="error")
        if self.code == 0:
            self.code = 128 + self.number if self.interrupts else 1

    async def _clean(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fleet.close()
        if self.link is not None:
            await asyncio.to_thread(self.link.close)
        if self.coordinator is not None:
            await asyncio.to_thread(self.coordinator.end, over=self.told)
        self.screen.close()

    async def _watch(self) -> None:
        while True:
            self.screen.poll()
            await asyncio.sleep(_POLL)

    async def _keep_coordinator(self) -> None:
        """Start the coordinator again where it dies; workers attach to it by themselves."""
        assert self.coordinator is not None
        while True:
            ended = await self.coordinator.wait()
            if self.code is not None or self.over.is_set():
                return
            await asyncio.sleep(_POLL)
            if not await self.coordinator.restart():
                # Its last word, EndRun, may still be on the way.
                await asyncio.sleep(1.0)
                self._finish(1, f"the coordinator ended with {ended}; see {self.coordinator.log}")
                return
            self.screen.line(f"the coordinator ended with {ended} and was started again")

    # ------------------------------------------------------------------ coordinator

    def _from_thread(self, function: Any, argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: there is nobody to tell
            self.loop.call_soon_threadsafe(function, argument)

    def _receive(self, message: control.ToLauncher) -> None:
        match message:
            case control.Kill():
                self.fleet.kill(message.worker)
            case control.WantSpare() | control.RestartAll() if self.interrupts:
                pass  # the run is being stopped
            case control.WantSpare():
                self.crew.wanted(message.count)
            case control.RestartAll():
                self.crew.restart(message.reason)
            case control.Line():
                self.screen.line(message.text, kind=message.kind)
            case control.EndRun():
                self.told = True
                if message.exit_code == 0 or self.interrupts:
                    self.grace, self.owners = _LEAVE, frozenset(message.owners)
                interrupted = 128 + self.number if self.interrupts else message.exit_code
                self._finish(interrupted, message.reason)
            case control.Attached():  # the link has dealt with it
                pass

    def _link_ended(self, reason: str | None) -> None:
        if reason is not None:
            self._finish(1, reason)

    # ------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            with contextlib.suppress(RuntimeError, ValueError):  # not the main thread
                self.loop.add_signal_handler(number, self._interrupt, number)
        try:
            yield
        finally:
            for number in numbers:
                with contextlib.suppress(RuntimeError, ValueError):
                    self.loop.remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        self.interrupts += 1
        self.number = int(number)
        if self.interrupts == 1 and self.link is not None and self.code is None:
            self._spawn(self._stop_softly(number))
        else:
            self.hurry.set()
            self._finish(128 + number, f"stopped at once by {number.name}")

    async def _stop_softly(self, number: signal.Signals) -> None:
        """A durable checkpoint, then the end (:mod:`.stopping`); else the end at once."""
        assert self.link is not None
        reason = f"stopped by {number.name}"
        code = 128 + number
        if isinstance(self.config, JoinConfig):
            self._finish(code, f"{reason}: the workers started here leave, the run goes on without")
            return
        self.screen.line(
            f"{number.name}: a checkpoint is written first; once more stops at once", kind="swap"
        )
        with contextlib.suppress(PlanariaError):
            # A coordinator that is being started again answers later.
            status = await asyncio.to_thread(self.link.status, timeout=self.config.timeout)
            if status.phase in ("training", "recovering", "waiting"):
                body = control.SaveCheckpoint(reason=reason, then_stop=True, exit_code=code)
                await asyncio.to_thread(self.link.request, body)
                reason += await stopping.wait_saved(
                    self.over, config=self.config, phase=status.phase, screen=self.screen
                )
            elif status.phase == "forming":
                # Perhaps a script that does not join: as under torchrun, it may catch the signal and
                # write its own checkpoint.
                for name in list(self.fleet.living):
                    self.fleet.kill(name, number=signal.SIGTERM)
                await self.fleet.wait(seconds=self.config.timeout)
            if self.code is None:
                body = control.StopRun(reason=reason, exit_code=code)
                await asyncio.to_thread(self.link.request, body, timeout=2.0)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), 2.0)
        self._finish(code, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PlanariaError):
            self._finish(error.exit_code, str(error))
        else:
            self._finish(1, f"the launcher failed: {type(error).__name__}: {error}")


def _run_at(config: JoinConfig) -> str:
    """The id of the run that is to be joined."""
    caller = Caller(config.address, token=config.token, tls=config.tls)
    try:
        body = control.Look()
        return caller.call(control.STATUS, body, control.Status, timeout=config.timeout).run
    finally:
        caller.close()


def _run_name() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
