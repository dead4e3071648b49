"""The worker's side of a swap, and of the beginning: stand still, report, carry out the plan.

The same few lines serve the first start, a survivor, and a spare that was promoted. Whatever fails on
the way means a newer epoch, or that one will come: :meth:`Recovery.settle` then reports again, and
nobody waits for an epoch that is over.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from planaria.comm import buckets
from planaria.comm.domain import Mode
from planaria.errors import AttemptBroken, CommError, EpochSuperseded, RunError
from planaria.runtime.messages import Broke, Plan, Report, Restored

if TYPE_CHECKING:
    from planaria.runtime.engine import Engine


class BuildAgain(Exception):
    """No generation exists for all shards: every owner builds from nothing, together."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.reason)
        self.plan = plan


class Clock:
    """Seconds by phase of one recovery on this worker."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.phases: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now


class Recovery:
    """Brings one worker from standing still to training on in the newest epoch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def settle(self, *, clock: Clock) -> Plan:
        """Report and carry out plans until one has succeeded; the plan that did.

        Raises:
            BuildAgain: the plan says that all owners build from nothing.
            RunError: the run was ended meanwhile.
        """
        engine = self._engine
        while True:
            engine.seat.check()
            epoch = engine.seat.epoch
            try:
                engine.domain.rest()
                engine.protection.stand_still()
                engine.member.send(self._report(epoch))
                plan = engine.seat.wait_plan(epoch, engine.limits.no_spare)
                clock.lap("report")
                self._carry_out(plan, clock)
            except EpochSuperseded:
                clock.lap("superseded")
                continue
            except Exception as error:
                if not isinstance(error, AttemptBroken | CommError) and (
                    engine.domain.mode is not Mode.BROKEN or isinstance(error, BuildAgain)
                ):
                    raise
                # A transfer or a group failed, or what a broken collective has left somewhere made
                # other code fail: the coordinator finds out who is lost, or has all regroup.
                engine.domain.rest()
                engine.member.send(Broke(epoch=epoch, reason=f"recovery: {error}"))
                engine.seat.wait_newer(epoch, 2 * engine.limits.timeout)
                clock.lap("superseded")
                continue
            return plan

    def _report(self, epoch: int) -> Report:
        engine = self._engine
        orders: dict[str, tuple[int, ...]] = {}
        with self._alone():
            for name, ddp in engine.ddp_modules().items():
                buckets.settle(ddp)
                if order := buckets.order(ddp):
                    orders[name] = order
        return Report(
            epoch=epoch,
            shard=engine.shard,
            live=engine.generation,
            clean=engine.clean,
            captured=engine.protection.captured(),
            held=engine.protection.held(),
            replica_sets=engine.protection.replica_sets(),
            bucket_orders=orders,
            groups=tuple(engine.domain.handles),
            max_redo=engine.max_redo,
            attempted=engine.attempting,
        )

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Collectives return at once with the caller's own data, as in a solo build.

        Only where the worker is not live: what DDP says to itself while its buckets are brought into
        order must reach nobody.
        """
        domain = self._engine.domain
        if domain.mode is Mode.LIVE:
            yield
            return
        before = domain.mode
        domain.mode = Mode.SOLO
        try:
            yield
        finally:
            domain.mode = before

    # ------------------------------------------------------------------ the plan

    def _carry_out(self, plan: Plan, clock: Clock) -> None:
        engine = self._engine
        if plan.generation is None:
            raise BuildAgain(plan)
        engine.protection.enter(plan)
        if engine.domain.epoch != plan.epoch or engine.domain.mode is not Mode.LIVE:
            self._align(plan)
            engine.domain.rebuild(plan.epoch)
            for part in engine.parts.optimizers.values():
                # On every worker, also where nothing has to be restored: what was under way on the
                # old groups is begun again by all or by none.
                part.abandon()
        clock.lap("rebuild")
        if plan.rollback:
            engine.protection.forget()
            engine.durable.load(plan.generation)
            clock.lap("load")
        else:
            self._restore(plan, clock)
        self._resume(plan, plan.generation, clock)

    def begin(self, plan: Plan, clock: Clock) -> None:
        """All owners have just built together, as a plan without a generation wanted."""
        first = msgspec.structs.replace(plan, generation=self._engine.generation)
        self._engine.protection.enter(first)
        self._resume(first, self._engine.generation or 0, clock)

    def _resume(self, plan: Plan, generation: int, clock: Clock) -> None:
        engine = self._engine
        engine.stand_at(generation, plan)
        self._verify(plan)
        clock.lap("verify")
        engine.member.send(
            Restored(epoch=plan.epoch, generation=generation, phases=dict(clock.phases))
        )

    def _align(self, plan: Plan) -> None:
        """Bring the buckets of DDP modules to the cut that an undisturbed run has now."""
        with self._alone():
            for name, ddp in self._engine.ddp_modules().items():
                if name in plan.bucket_orders:
                    buckets.align(ddp, plan.bucket_orders[name])
                else:
                    buckets.reset(ddp)

    def _restore(self, plan: Plan, clock: Clock) -> None:
        engine = self._engine
        assert plan.generation is not None
        mine = [t for t in plan.transfers if t.shard == engine.shard]
        if mine:
            engine.protection.fetch(plan, mine)
            clock.lap("move")
            engine.protection.restore(plan.generation, only="all")
        elif engine.started:
            clean = engine.generation == plan.generation and engine.clean
            # Interrupted while its last attempt waited for a buffer: nothing has changed since.
            untouched = engine.untouched and plan.generation not in engine.protection.captured()
            if not (clean and untouched):
                engine.protection.restore(plan.generation, only="small" if clean else "all")
        clock.lap("load")

    def _verify(self, plan: Plan) -> None:
        """Everyone stands at the same generation of the same epoch, over the new groups."""
        engine = self._engine
        if engine.world == 1:
            return
        stand_W2 = torch.zeros(engine.world, 2, dtype=torch.int64)
        stand_W2[engine.shard] = torch.tensor([plan.epoch, engine.generation])
        dist.all_reduce(stand_W2)
        engine.domain.check()
        wrong = [
            shard
            for shard, row in enumerate(stand_W2.tolist())
            if row != [plan.epoch, engine.generation]
        ]
        if wrong:
            raise RunError(
                f"after the swap to epoch {plan.epoch} shards {wrong} stand elsewhere than shard "
                f"{engine.shard} (generation {engine.generation}): this is a defect of Planaria; "
                "start the run again from its durable checkpoint"
            )
