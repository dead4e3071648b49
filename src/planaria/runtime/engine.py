"""What runs an owner's training: the objects of one worker and how they meet.

:class:`Engine` is the inside of :class:`~planaria.runtime.run.Run`, which is what users see. It binds
control thread (:mod:`.seat`), communication (:mod:`planaria.comm`), state (``memory.parts``), protection
and recovery; it owns the generation that this worker stands at.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planaria.comm import Domain, GlooTransport, init_default, register
from planaria.comm.buckets import ddp_modules
from planaria.comm.domain import Mode
from planaria.errors import AttemptBroken, CommError, UserError
from planaria.runtime import durable, hooks
from planaria.runtime.control.member import Whereabouts
from planaria.runtime.inject import Injector
from planaria.runtime.launch.worker import WorkerContext
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.rng import Rng
from planaria.runtime.messages import (
    AllCommitted,
    Assign,
    Break,
    Broke,
    Fence,
    Hold,
    Plan,
    Progress,
    Released,
    SaveDurable,
    Scalar,
    Stop,
)
from planaria.runtime.protection import Protection, begin_epoch
from planaria.runtime.recovery import BuildAgain, Clock, Recovery
from planaria.runtime.seat import Seat
from planaria.runtime.tally import SAMPLES, Tally
from planaria.runtime.writing import Writing

FENCED = 1
"""Exit code of a worker that was fenced."""

Build = Callable[[int, int], dict[str, Any]]
"""(shard, world) to the stateful parts."""


class Engine:
    """One owner. Made on the training thread, inside ``join``."""

    def __init__(self, context: WorkerContext, *, build: Build, max_redo: int) -> None:
        self.context = context
        self.member = context.member
        self.limits = context.member.limits
        self.max_redo = context.max_redo or max_redo
        self.seat = Seat()
        self.tally = Tally()
        self.generation: int | None = None
        """The state in the model is that of this generation; None before the first build is done."""
        self.dirty = False
        """An optimizer has begun to change that state."""
        self.untouched = False
        """Nothing has run since ``generation`` was reached, so not even small parts have moved."""
        self.started = False
        """The first plan was carried out: there are captures to go back to."""
        self.finished = False
        """This shard has said that it has finished; the end of the run is awaited."""
        self.attempting = 0
        self.shard = -1
        self.world = context.member.welcome.world
        self.waited = 0.0
        """Seconds that the training thread waited for protection in the running attempt."""
        self.waiting = 0.0
        """The same, before it."""
        self.on_swap: list[Callable[[], None]] = []
        self.protects: Callable[[int], bool] = _always
        """Whether this generation is captured, replicated and committed. For benchmarks alone, which
        set it to measure what those three cost: all workers must answer alike, and say yes to the
        last step. After a loss the run goes back as far as to the newest one that was."""
        self._build = build
        self._broke_at = 0.0
        self._versions: tuple[int, ...] = ()
        self._mark = 0
        self.parts: Parts
        self.protection: Protection
        self.durable: durable.DurableCheckpoints
        host = context.data.address.rpartition(":")[0]
        self.domain = Domain(
            GlooTransport(host=host),
            self.member.kv,
            timeout=self.limits.collective,
            rebuild=self.limits.rebuild,
        )
        self.domain.on_failure = self._on_failure
        # Of an epoch that is over, so that it is written down and nothing follows from it.
        self.domain.on_given_up = self._on_failure
        self.recovery = Recovery(self)
        self.writing = Writing(self)
        self._listen()

    # ------------------------------------------------------------------ control thread

    def _listen(self) -> None:
        member = self.member
        member.whereabouts = self._whereabouts
        member.on(Assign, self.seat.assigned)
        member.on(Break, self._on_break)
        member.on(Plan, self._on_plan)
        member.on(Released, lambda message: None)
        member.on(AllCommitted, self._on_committed)
        member.on(Hold, self._on_hold)
        member.on(SaveDurable, self.seat.asked_to_save)
        member.on(Stop, self._on_stop)
        member.on(Fence, _on_fence)
        member.on_gone(self._on_gone)

    def _whereabouts(self) -> Whereabouts:
        return Whereabouts(
            step=self.attempting,
            collective=self.domain.entered,
            inside=self.domain.outstanding > 0,
            waiting=self.seat.waiting or (hasattr(self, "protection") and self.protection.waiting),
            moved=self.context.data.access.moved.total,
        )

    def _on_failure(self, epoch: int, reason: str) -> None:
        self.member.send(Broke(epoch=epoch, reason=reason))

    def _on_break(self, message: Break) -> None:
        self._broke_at = time.monotonic()
        self._leave_epoch(message.epoch, message.reason)
        self.seat.broke(message)

    def _on_plan(self, message: Plan) -> None:
        if self.seat.assignment is None and message.generation is not None:
            # A spare that keeps the copy, in a world of one; it carries nothing out.
            begin_epoch(self.context.data, message)
            return
        self.seat.planned(message)

    def _on_committed(self, message: AllCommitted) -> None:
        self.context.data.buffers.announce(message.generation, epoch=message.epoch)
        self.context.data.held.announce(message.generation, epoch=message.epoch)
        if hasattr(self, "protection") and message.epoch == self.domain.epoch:
            # Every shard is held twice in this epoch: what was kept for former ones can go.
            self.protection.release()
        self.seat.all_committed(message)

    def _on_hold(self, message: Hold) -> None:
        if hasattr(self, "protection"):
            self.protection.hold(message)

    def _on_stop(self, message: Stop) -> None:
        self.seat.stopped(message)
        if not self.finished:
            self._leave_collectives(message.reason)

    def _on_gone(self, reason: str) -> None:
        self.seat.stopped(Stop(reason=f"the coordinator is gone: {reason}", exit_code=1))
        self._leave_collectives(reason)

    def _leave_collectives(self, reason: str) -> None:
        self._leave_epoch(self.seat.epoch + 1, reason)

    def _leave_epoch(self, epoch: int, reason: str) -> None:
        """Free the training thread from everything older than ``epoch``.

        Before it can hear of the epoch, so that it finds nothing of the old one alive; then sockets
        are shut until it stands still, on a thread of its own: a newer order must not wait for that.
        """
        self.domain.overtake(epoch, reason)
        self.context.data.set_epoch(epoch)
        threading.Thread(
            target=self.domain.supersede, args=(epoch, reason), name="planaria-free", daemon=True
        ).start()

    # ------------------------------------------------------------------ becoming an owner

    def take_seat(self) -> bool:
        """Wait for a shard, build, and carry out the first plan. False: never needed."""
        assignment = self.seat.wait_assignment()
        if assignment is None:
            return False
        register(self.domain)
        self.shard, self.world = assignment.shard, assignment.world
        self.context.place(self.shard, self.world)
        clock = Clock(time.monotonic())
        found = assignment.durable
        if not (assignment.fresh and self._build_together(assignment.epoch, found)):
            self._build_alone(assignment.epoch)
        clock.lap("build")
        while True:
            try:
                self.recovery.settle(clock=clock)
                return True
            except BuildAgain as again:
                plan = again.plan
            self._forget()
            try:
                if self._build_together(plan.epoch, plan.durable):
                    self.recovery.begin(plan, clock)
                    return True
            except (AttemptBroken, CommError):
                self.domain.rest()
            # The keys of that epoch are used: nothing can be built in it again.
            self.seat.wait_newer(plan.epoch, 2 * self.limits.timeout)
            self._forget()
            self._build_alone(self.seat.epoch)

    def _build_together(self, epoch: int, found: int | None) -> bool:
        """Build over living groups, with all other owners, and read checkpoint ``found``; False
        where one was lost meanwhile.
        """
        try:
            self.domain.begin(epoch, rank=self.shard, world=self.world, solo=False)
            self._make()
            self.domain.check()
            if found is not None:
                self.durable.load(found)
                self.domain.check()
        except (AttemptBroken, CommError):
            self.domain.rest()
        except Exception:
            # What a broken collective has left in a tensor may be the cause.
            if self.domain.mode is not Mode.BROKEN:
                raise
            self.domain.rest()
        else:
            self.generation = found or 0
            return True
        self._forget()
        return False

    def _build_alone(self, epoch: int) -> None:
        """Build without anyone, in solo mode; the state comes from peers, or from the disk."""
        self.domain.begin(epoch, rank=self.shard, world=self.world, solo=True)
        self._make()

    def _forget(self) -> None:
        """Drop everything that a build has made."""
        if hasattr(self, "protection"):
            self.protection.close()
            self.protection.forget()
        self.domain.discard()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation = None
        self.tally = Tally()

    @property
    def _out(self) -> Path:
        return Path(self.context.invitation.out)

    def _make(self) -> None:
        init_default(self.domain, seconds=self.limits.timeout)
        saving = durable.default_group(self.world)
        made = self._build(self.shard, self.world)
        if SAMPLES in made:
            raise UserError(
                f"build() returned a part named {SAMPLES!r}, which is the part that Planaria adds to "
                "count samples; rename it"
            )
        self.parts = Parts({**made, SAMPLES: self.tally}, shard=self.shard, world=self.world)
        self.durable = durable.DurableCheckpoints(
            self._out, self.parts, group=saving, member=self.domain.member
        )
        self.protection = Protection(
            self.parts,
            shard=self.shard,
            member=self.member,
            data=self.context.data,
            on_event=self._injector(),
        )
        self._watch()

    def _injector(self) -> Callable[[str, int], None] | None:
        # The shard's first owner, which need not be the worker that the launcher had in mind: a
        # spare that was ready earlier may own it. Who takes over later is not hit again.
        assignment = self.seat.assignment
        first = assignment is not None and assignment.fresh
        injector = Injector(
            self.context.faults,
            shard=self.shard if first else None,
            node=self.context.invitation.node,
            announce=self.member.injected,
        )
        self.injector = injector
        if not injector.waiting:
            return None
        if any(fault.phase == "collective" for fault in injector.waiting):
            self.domain.on_collective = lambda: self.at("collective")

        def told(phase: str, generation: int) -> None:
            injector.at(generation, phase)

        return told

    def _watch(self) -> None:
        hooks.watch_modules(self.parts.modules.values(), self.domain_check)
        optimizers = [face for part in self.parts.optimizers.values() for face in part.faces]
        hooks.watch_optimizers(optimizers, self._before_optimizer)
        hooks.watch_scalers(self.parts.others.values(), self.before_change)
        if self.injector.waiting:
            hooks.watch_phases(self.parts.modules.values(), self.at)

    def at(self, phase: str) -> None:
        """A fault that waits for this phase of the step being attempted fires now."""
        if self.attempting:
            self.injector.at(self.attempting, phase)

    def domain_check(self) -> None:
        """A boundary. Not while a spare builds, whose collectives are its own."""
        self.seat.check()
        if self.domain.mode is Mode.BROKEN:
            self.domain.check()

    def before_change(self) -> None:
        """A boundary after which the script may change what is being copied."""
        if self.started:
            # Also where a peer is lost: a body that is entered nevertheless may change things.
            self.waited += self.protection.wait_copied()
            self.domain_check()

    def _before_optimizer(self) -> None:
        if not self.started:
            return
        self.before_change()
        if not self.dirty and (changed := self.parts.changed_since(self._versions)):
            raise UserError(
                f"{changed[0]} was changed before the optimizer's step of step {self.attempting}, "
                f"while it was being copied ({len(changed)} tensors): change parameters, and parts "
                "such as an EMA, after optimizer.step() and inside the attempt"
            )
        self.dirty = True
        self.at("optimizer")

    @property
    def clean(self) -> bool:
        """Whether the parts still hold ``generation``: nothing has begun to change them."""
        return not self.dirty and self.parts.versions() == self._versions

    # ------------------------------------------------------------------ attempts

    def may_begin(self, step: int, *, due: bool) -> None:
        """Wait until ``max_redo`` allows to attempt ``step``; write a durable checkpoint if ``due``."""
        assert self.generation is not None
        since = time.monotonic()
        self.seat.wait_committed(self._protected_upto(step - self.max_redo), self.domain.epoch)
        self.waiting += time.monotonic() - since
        self.writing.between_steps(due=due)

    def finish_steps(self, *, due: bool) -> None:
        """Wait until the script's last step is committed; write a durable checkpoint if ``due``."""
        assert self.generation is not None
        self.seat.wait_committed(self.generation, self.domain.epoch)
        self.tell()
        self.writing.at_the_end(due=due)

    def _protected_upto(self, generation: int) -> int:
        while generation > 0 and not self.protects(generation):
            generation -= 1
        return generation

    def commit(self, step: int, *, seconds: float) -> None:
        """The attempt of ``step`` has succeeded here: its state is generation ``step``."""
        self.domain_check()
        self.generation, self.dirty, self.untouched = step, False, True
        self._versions = self.parts.versions()
        if self.protects(step):
            self.waited += self.protection.capture(step, epoch=self.domain.epoch)
        self._stand()
        self.member.send(
            Progress(
                epoch=self.domain.epoch,
                step=step,
                phase="first" if step == 1 else "step",
                seconds=seconds,
                waited=self.waited,
            )
        )
        self.tell()

    def tell(self) -> None:
        """Scalars of committed steps, by shard 0."""
        settled = self.tally.settled(self.seat.committed)
        if self.shard == 0:
            for step, values in settled:
                self.member.send(Scalar(step=step, values=values))

    # ------------------------------------------------------------------ recovery

    def recover(self) -> Plan:
        """Come back from a broken attempt; the plan that was carried out."""
        clock = Clock(self._broke_at or time.monotonic())
        self.domain.rest()
        if self.seat.epoch <= self.domain.epoch:
            self.seat.check()
            # Twice: a coordinator that has just been started again gives workers one time-out to
            # come back to it before it takes them for lost.
            self.seat.wait_newer(self.domain.epoch, 2 * self.limits.timeout)
            clock = Clock(self._broke_at)
        clock.lap("drain")
        while True:
            plan = self.recovery.settle(clock=clock)
            self._broke_at = 0.0
            try:
                for callback in self.on_swap:
                    callback()
            except (AttemptBroken, CommError):
                self.domain.rest()
                self.seat.wait_newer(self.domain.epoch, 2 * self.limits.timeout)
                clock = Clock(self._broke_at or time.monotonic())
                continue
            return plan

    def ddp_modules(self) -> dict[str, Any]:
        return ddp_modules(self.parts.modules)

    def stand_at(self, generation: int, plan: Plan) -> None:
        """The parts hold ``generation``; from here on captures go to the plan's holder."""
        self.generation, self.dirty, self.untouched = generation, False, True
        self.attempting = generation
        self.writing.stand_at(generation, plan)
        self.seat.go_back_to(generation)
        self.started = True
        if generation not in self.protection.captured():
            self.protection.capture(generation, epoch=plan.epoch)
            self.protection.wait_copied()
        self._stand()
        self.protection.direct(plan)

    def _stand(self) -> None:
        self._versions = self.parts.versions()
        self._mark = Rng().mark()

    @property
    def drew(self) -> bool:
        """Whether a global generator was used since the state was captured."""
        return Rng().mark() != self._mark

    def settle(self) -> None:
        """Wait until what this epoch writes to the disk is there; a boundary."""
        self.durable.wait(self.domain.epoch, check=self.domain_check)

    def close(self) -> None:
        self.durable.wait(self.domain.epoch)
        self.protection.close()
        self.domain.close()


def _always(generation: int) -> bool:
    return True


def _on_fence(message: Fence) -> None:
    """Declared lost: end at once, so that nothing of this worker is seen any more."""
    os.write(2, f"fenced: {message.reason}\n".encode())
    os._exit(FENCED)
