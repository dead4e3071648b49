"""The coordinator's centre: single writer of the membership, on one event loop, without torch.

What comes in over :mod:`.service` becomes an event; ``membership.rules.step`` decides; the actions go
out to workers, launchers, journal and timers. Nothing here decides by itself except who is told.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any, assert_never

import msgspec

import planaria
from planaria.errors import JoinError, PlanariaError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.breaks import Breaks
from planaria.runtime.coordinator.chores import Chores
from planaria.runtime.coordinator.chronicle import Chronicle, role
from planaria.runtime.coordinator.crowd import Crowd, Encoded, Session
from planaria.runtime.coordinator.ending import Ending
from planaria.runtime.coordinator.inbound import event_of
from planaria.runtime.coordinator.keys import EpochKeys, answer
from planaria.runtime.coordinator.saving import Saving
from planaria.runtime.coordinator.service import Outbox
from planaria.runtime.coordinator.standing import standing
from planaria.runtime.coordinator.store import Store
from planaria.runtime.coordinator.takeover import Takeover
from planaria.runtime.coordinator.watch import Watch
from planaria.runtime.membership import events
from planaria.runtime.membership import rules as membership
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Worker

STILLBORN = 3
"""Spares in a row that end before they attach, until no more are asked for; our choice."""

FIRST = 1.0
"""Seconds in which whoever ended first may be told of, where the others end because of it."""


class ControlDesk:
    """Implements :class:`.service.Desk` around the membership ``state``."""

    def __init__(
        self,
        state: State,
        *,
        run: str,
        token: str,
        out: Path,
        spares: int,
        keep: int,
        limits: messages.Limits,
        book: journal.Journal,
        store: Store,
    ) -> None:
        self.state = state
        self.run = run
        self.out = out
        self.limits = limits
        self.keys = EpochKeys(epoch=state.epoch)
        self.watch = Watch(limits=limits)
        self.crowd = Crowd()
        self.reason = "the coordinator has just begun"
        self._token = token
        self._spares = spares
        self._store = store
        self._book = book
        self._chronicle = Chronicle(book, show=self.crowd.tell_launchers)
        self._stillborn = 0
        self._saving = Saving(
            out,
            run=run,
            world=state.config.world,
            keep=keep,
            chronicle=self._chronicle,
            apply=self.apply,
        )
        self.ending = Ending(
            out,
            book=book,
            chronicle=self._chronicle,
            crowd=self.crowd,
            saved=self._saving.settled,
        )
        self.over = self.ending.over
        """The exit code, once the run is over and launchers are told so."""
        self._swaps = 0
        self._chores = Chores(failed=self.fail, over=self.over.done)
        self._breaks = Breaks(book, limits=limits, watch=self.watch, chores=self._chores, desk=self)
        self._takeover = Takeover(
            limits=limits, spares=spares, crowd=self.crowd, chores=self._chores, desk=self
        )

    # What the service hands on.

    def admit(self, hello: messages.Hello, outbox: Outbox) -> None:
        """Let a worker in, or raise ``JoinError`` with the one line that it is told."""
        event = events.Attached(
            worker=hello.worker,
            node=hello.node,
            address=hello.data_address,
            config=hello.config,
            version=hello.version,
            rank=hello.rank,
        )
        again = hello.worker in self.state.members
        ended = again and self.state.phase == "ended"
        reason = self._refusal(hello)
        if reason is None and not ended:
            reason = membership.refusal(self.state, event)
        if reason is not None:
            raise JoinError(reason)
        self.crowd.sessions[hello.worker] = Session(hello, outbox)
        self._book.write(
            journal.WorkerAttached(
                worker=hello.worker,
                node=hello.node,
                pid=hello.pid,
                address=hello.data_address,
                again=again,
            )
        )
        self.watch.attach(hello.worker, now=time.monotonic())
        self.crowd.send(
            hello.worker,
            messages.Welcome(
                worker=hello.worker, world=self.state.config.world, limits=self.limits
            ),
        )
        if ended:
            # Who told the others of the end died before it could tell this one.
            self._takeover.forget(hello.worker)
            stop = messages.Stop(reason=self.state.end, exit_code=self.state.exit_code)
            self.crowd.send(hello.worker, stop)
            self.crowd.end(hello.worker)
            return
        self.apply(event)
        if again:
            self._takeover.back(hello.worker)

    def hear(self, worker: Worker, message: messages.FromWorker) -> None:
        """One message of a worker's stream."""
        if worker not in self.state.members and not isinstance(
            message, (messages.Left, messages.Pong)
        ):
            return  # it is fenced, and what it says concerns nobody any more
        match message:
            case messages.Pong():
                self.watch.pong(worker, message, now=time.monotonic())
            case messages.Progress():
                self._chronicle.progress(message)
                self.watch.progress(worker, message, now=time.monotonic())
            case messages.Scalar():
                self._chronicle.scalars(worker, self._shard(worker), message)
            case messages.Injected():
                self._chronicle.injected(worker, message)
            case messages.Broke():
                self._breaks.heard(worker, message)
            case messages.Left():
                self._leave(worker, message)
            case messages.Hello():
                raise ValueError("Hello comes once, as the first message of a stream")
            case _:
                if isinstance(message, messages.Ready):
                    self._stillborn = 0
                elif isinstance(message, messages.Durable):
                    self._saving.wrote(message)
                self._chronicle.heard(worker, self._shard(worker), message)
                self.apply(event_of(worker, message))

    def gone(self, worker: Worker, outbox: Outbox, reason: str) -> None:
        """The stream of ``worker`` has ended."""
        session = self.crowd.sessions.get(worker)
        if session is None or session.outbox is not outbox:
            return
        del self.crowd.sessions[worker]
        self.watch.detach(worker)
        if not session.left:
            self._ended(worker, how="stream", reason=reason)

    def admit_launcher(self, hello: control.LauncherHello, outbox: Outbox) -> None:
        """Let a launcher in, or raise ``JoinError``."""
        if hello.run != self.run:
            raise JoinError(f"the launcher is for run {hello.run}, this is run {self.run}")
        launcher = self.crowd.add_launcher(hello, outbox)
        launcher.tell(control.Attached(run=self.run))
        self._takeover.launcher_back(spawns=hello.spawns)
        if self.over.done():
            code, reason = self.over.result(), self.state.end
            launcher.tell(control.EndRun(exit_code=code, reason=reason, owners=self._owners()))

    def hear_launcher(self, message: control.FromLauncher, outbox: Outbox) -> None:
        """One message of a launcher's stream."""
        launcher = self.crowd.launcher_of(outbox)
        match message:
            case control.Spawned():
                self.crowd.spawned(message.worker, pid=message.pid, launcher=launcher)
            case control.Exited():
                self._exited(message)
            case control.LauncherHello():
                raise ValueError("LauncherHello comes once, as the first message of a stream")
            case _:
                assert_never(message)

    def gone_launcher(self, outbox: Outbox, *, cut: bool) -> None:
        """The stream of a launcher has ended; the last one that could start workers ends the run.

        ``cut``: not by the launcher's own decision. It may be stopped (Ctrl-Z) or starved, and come
        back within the time-out.
        """
        self.crowd.drop_launcher(outbox)
        patience = self.limits.timeout if cut else self.limits.silence
        self._chores.later(patience, self._without_launcher)

    async def answer(self, body: Any) -> msgspec.Struct:
        """Answer Put, Get, GetMany, Add or Check."""
        return await answer(self.keys, body)

    def inject(self, body: control.Inject) -> control.Done:
        """Write a fault to the journal before it fires."""
        self._chronicle.injected(body.worker, body.fault)
        return control.Done()

    def request(self, body: control.Requested) -> control.Done:
        """What launcher or command line want."""
        match body:
            case control.StopRun():
                self.apply(events.StopRequested(reason=body.reason, exit_code=body.exit_code))
                return control.Done(note=f"the run ends: {body.reason}")
            case control.SaveCheckpoint():
                return self._saving.ask(body, state=self.state, crowd=self.crowd)
            case _:
                assert_never(body)

    def status(self) -> control.Status:
        """What is known now."""
        return standing(
            self.state,
            run=self.run,
            step_of=self.watch.step_of,
            swaps=self._swaps,
            reason=self.reason,
            exit_code=self.over.result() if self.over.done() else None,
        )

    def refused(self, who: str, reason: str) -> None:
        """Somebody was turned away."""
        self._chronicle.refused(who, reason, now=time.monotonic())

    def fail(self, error: Exception) -> None:
        """A defect of our own, or a journal that cannot be written: the run ends, loudly."""
        if isinstance(error, PlanariaError):
            reason, code = str(error), error.exit_code
        else:
            traceback.print_exception(error)
            reason, code = f"the coordinator failed: {type(error).__name__}: {error}", 1
        if not self.ending.begun:
            self.state = msgspec.structs.replace(
                self.state, phase="ended", end=reason, exit_code=code
            )
            for worker in list(self.crowd.sessions):
                self.crowd.send(worker, messages.Stop(reason=reason, exit_code=code))
            self.ending.begin(exit_code=code, reason=reason, owners=self._owners())

    # Events.

    def apply(self, event: events.AnyEvent) -> None:
        """One event through membership, and its actions."""
        before = self.state
        after = membership.step(before, event)
        self.state = state = after.state
        if state is not before:
            self.reason = after.reason
        if state.epoch != before.epoch:
            self.keys.begin(state.epoch)
        if state.owners is not before.owners:
            self.watch.follow(before, state, now=time.monotonic())
        if state.plan is not before.plan and state.plan is not None and state.plan.lost:
            self._swaps += 1
        # Before anyone is told: a coordinator that is started again knows at least as much.
        self._store.update(before, state)
        self._chronicle.transition(before, event, after)
        encoded = Encoded()
        for action in after.actions:
            self._act(action, encoded)
        self._saving.follow(before, state, crowd=self.crowd)

    def _ended(self, worker: Worker, *, how: str, reason: str, code: int | None = None) -> None:
        """``worker`` has ended. Where the script does not join, all end as soon as one has, and are
        heard of in any order: who went only because a peer had is not the one to name.
        """
        if self.state.joinless and code in (None, messages.PEER_GONE):
            self._chores.later(FIRST, lambda: self.lose(worker, how=how, reason=reason))
        else:
            self.lose(worker, how=how, reason=reason)

    def lose(self, worker: Worker, *, how: str, reason: str) -> None:
        """``worker`` is gone or hung; nothing happens where that is known."""
        member = self.state.members.get(worker)
        if member is None or self.state.phase == "ended":
            return
        if member.shard is not None:
            # Nobody is called who would not hear it.
            for spare in self.watch.silent_spares(self.state, now=time.monotonic()):
                assert spare.worker is not None
                self.lose(spare.worker, how=spare.how, reason=spare.reason)
        self._chronicle.detected(
            worker, shard=member.shard, how=how, reason=reason, known_as=role(self.state, member)
        )
        if how in ("stream", "pidfd"):
            self.apply(events.Lost(worker=worker, reason=reason))
        else:
            self.apply(events.Hung(worker=worker, reason=reason))

    def look(self) -> None:
        """To be called every ``limits.ping`` seconds: send pings, look for who is silent."""
        for worker, ping in self.watch.pings(now=time.monotonic()):
            self.crowd.send(worker, ping)
        for finding in self.watch.findings(self.state, now=time.monotonic()):
            if finding.worker is not None:
                self.lose(finding.worker, how=finding.how, reason=finding.reason)
            else:
                self.apply(events.Regroup(epoch=self.state.epoch, reason=finding.reason))
        self._store.flush(self.state)

    def begin(self, *, address: str, resumed: bool) -> None:
        """The server listens: say so; after a resumption, wait for those who were members."""
        state = self.state
        self._book.write(
            journal.Opened(
                run=self.run,
                world=state.config.world,
                spares=self._spares,
                address=address,
                pid=os.getpid(),
                version=planaria.__version__,
                resumed=resumed,
                durable=state.durable,
            )
        )
        self._store.flush(state)
        if resumed:
            self._takeover.begin()
            if state.phase == "ended":
                self.ending.begin(
                    exit_code=state.exit_code, reason=state.end, owners=self._owners()
                )

    def interrupt(self, number: signal.Signals) -> None:
        """SIGTERM or SIGINT to this process."""
        reason = f"the coordinator was told to end by {number.name}"
        event = events.StopRequested(reason=reason, exit_code=128 + number)
        self._chores.later(0.0, lambda: self.apply(event))

    async def emptied(self, *, seconds: float) -> None:
        """Wait until everyone has heard of the end and left, at most ``seconds``.

        At most one time-out more where members of a coordinator that died are still to come back:
        they have nobody else to tell them.
        """
        await self._takeover.told()
        end = time.monotonic() + seconds
        while (self.crowd.sessions or self.crowd.launchers) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Drop timers and tasks."""
        self._chores.close()

    def _refusal(self, hello: messages.Hello) -> str | None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "wrong token: give the token of this run (OUT/coordinator.token)"
        if hello.run != self.run:
            return f"worker {hello.worker} is for run {hello.run}, this is run {self.run}"
        if hello.worker in self.crowd.sessions:
            return f"worker {hello.worker} is attached already; start one with a new name"
        return None

    def _shard(self, worker: Worker) -> int | None:
        member = self.state.members.get(worker)
        return None if member is None else member.shard

    def _leave(self, worker: Worker, message: messages.Left) -> None:
        session = self.crowd.sessions.get(worker)
        if session is not None:
            session.left = True
        if worker not in self.state.members:
            return
        if message.exit_code == 0:
            self.apply(events.Left(worker=worker))
        else:
            reason = f"the script of {worker} ended with exit code {message.exit_code}"
            failed = messages.Failed(reason=reason, exit_code=message.exit_code)
            self.apply(events.FailedBy(worker=worker, message=failed))

    def _exited(self, message: control.Exited) -> None:
        """The launcher's pidfd has fired; the stream may have told before."""
        worker = message.worker
        entry = journal.ProcessExited(
            worker=worker,
            pid=message.pid,
            description=message.description,
            code=message.code,
        )
        self._book.write(entry)
        self.crowd.exited(worker)
        if self.state.phase == "ended":
            self._takeover.forget(worker)
        session = self.crowd.sessions.get(worker)
        if session is not None and session.left:
            return
        if worker in self.state.members:
            self._ended(worker, how="pidfd", reason=message.description, code=message.code)
        elif worker not in self.state.fenced and self.state.phase != "ended":
            self._never_attached(worker, message.description)

    def _never_attached(self, worker: Worker, description: str) -> None:
        self._stillborn += 1
        line = f"{worker} ended before it joined the run: {description}; look at its log"
        if self.state.phase == "forming" and self._stillborn > self._spares:
            self.apply(events.StopRequested(reason=line, exit_code=1))
            return
        self._chronicle.say(line)
        if self.state.phase != "forming" and self._stillborn <= STILLBORN:
            self.want(1)

    def _without_launcher(self) -> None:
        if self.crowd.had_launcher and self.crowd.spawner() is None:
            reason = "the launcher is gone, and its workers with it"
            self.apply(events.StopRequested(reason=reason, exit_code=1))

    # Actions.

    def _act(self, action: events.AnyAction, encoded: Encoded) -> None:
        match action:
            case events.Send():
                self.crowd.send_encoded(action.worker, encoded.of(action.message))
                if isinstance(action.message, (messages.Fence, messages.Stop)):
                    self.crowd.end(action.worker)
            case events.Broadcast():
                data = encoded.of(action.message)
                for worker in membership.recipients(self.state, action):
                    self.crowd.send_encoded(worker, data)
            case events.Kill():
                session = self.crowd.sessions.get(action.worker)
                node = session.hello.node if session is not None else ""
                self.crowd.kill(action.worker, node=node, reason=action.reason)
            case events.EndRun():
                self.ending.begin(
                    exit_code=action.exit_code, reason=action.reason, owners=self._owners()
                )
            case events.RestartAll():
                self.crowd.tell_launchers(control.RestartAll(reason=action.reason))
            case events.WantSpare():
                self.want(action.count)
            case events.StartTimer():
                epoch = action.epoch
                self._chores.later(
                    action.seconds, lambda: self.apply(events.SpareTimedOut(epoch=epoch))
                )
            case events.Publish():
                self._chores.spawn(self._saving.publish(action))
            case events.Discard():
                self._chores.spawn(self._saving.discard(action))
            case events.Record():
                pass  # the chronicle has written it
            case _:
                assert_never(action)

    def want(self, count: int) -> None:
        """Ask for ``count`` fresh spares."""
        launcher = self.crowd.spawner()
        if launcher is not None:
            launcher.tell(control.WantSpare(count=count))

    def _owners(self) -> tuple[Worker, ...]:
        return tuple(worker for _, worker in sorted(self.state.owners.items()))
