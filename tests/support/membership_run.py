"""A run of the pure membership, driven event by event, for the tests of single cases."""

from __future__ import annotations

from planaria.runtime.membership.events import (
    Attached,
    BecameReady,
    Broadcast,
    CommittedBy,
    DurableBy,
    FinishedBy,
    Reported,
    RestoredBy,
    Send,
)
from planaria.runtime.membership.rules import recipients, step
from planaria.runtime.membership.state import MembershipConfig, State
from planaria.runtime.messages import Committed, Durable, Finished, Report, Restored


class Run:
    """A run under test: its state, and what the last event led to."""

    def __init__(self, world=3, **rules):
        self.world = world
        self.state = State(config=MembershipConfig(world=world, no_spare=60.0, **rules))
        self.actions, self.reason = (), ""

    def feed(self, event):
        transition = step(self.state, event)
        self.state, self.actions, self.reason = (
            transition.state,
            transition.actions,
            transition.reason,
        )
        return self

    def attach(self, *names, ready=True, ranks=False):
        for index, name in enumerate(names):
            self.feed(
                Attached(
                    name,
                    node=f"n-{name}",
                    address=f"{name}:1",
                    config="c1",
                    version="v1",
                    rank=index if ranks else None,
                )
            )
            if ready:
                self.feed(BecameReady(name))
        return self

    def sent(self, kind):
        """(worker, message) of each Send of this kind in the last actions."""
        sends = [a for a in self.actions if isinstance(a, Send) and isinstance(a.message, kind)]
        return [(send.worker, send.message) for send in sends]

    def told(self, kind):
        """(receivers, message) of the one Broadcast of this kind in the last actions."""
        (found,) = (
            a for a in self.actions if isinstance(a, Broadcast) and isinstance(a.message, kind)
        )
        return sorted(recipients(self.state, found)), found.message

    def did(self, kind):
        return [a for a in self.actions if isinstance(a, kind)]

    def report(self, shard, **holds):
        holds = {"live": 0, "clean": True, **holds}
        message = Report(epoch=self.state.epoch, shard=shard, **holds)
        return self.feed(Reported(self.state.owners[shard], message=message))

    def restore(self, *shards):
        target = self.state.plan.generation or 0
        message = Restored(epoch=self.state.epoch, generation=target, phases={})
        for shard in shards or range(self.world):
            self.feed(RestoredBy(self.state.owners[shard], message=message))
        return self

    def commit(self, generation, *shards, epoch=None):
        for shard in shards or range(self.world):
            message = Committed(
                epoch=self.state.epoch if epoch is None else epoch,
                shard=shard,
                generation=generation,
            )
            self.feed(CommittedBy(self.state.owners[shard], message=message))
        return self

    def finish(self, *shards, generation=9):
        for shard in shards:
            message = Finished(
                epoch=self.state.epoch,
                shard=shard,
                generation=generation,
                state_digest="d",
                samples_digest="e",
            )
            self.feed(FinishedBy(self.state.owners[shard], message=message))
        return self

    def durable(self, generation, *shards, error=None):
        for shard in shards:
            message = Durable(
                epoch=self.state.epoch, shard=shard, generation=generation, error=error
            )
            self.feed(DurableBy(self.state.owners[shard], message=message))
        return self


def training(world=3, *, spares=("s0", "s1"), **rules):
    """A run in which generation 4 is committed and every owner has 5 captured."""
    run = Run(world, **rules).attach(*(f"w{i}" for i in range(world)), *spares)
    for shard in range(world):
        run.report(shard)
    return run.restore().commit(4)


def recover(run, *, attempted=6):
    """Reports of survivors that hold 4 and 5 for themselves and whom they keep; of others, none."""
    shard_of = {worker: shard for shard, worker in run.state.owners.items()}
    held = {}
    for shard, holder in run.state.holders.items():
        held.setdefault(shard_of.get(holder), {})[shard] = (4, 5)
    for shard in range(run.world):
        if shard in run.state.lost:
            run.report(shard, live=None)
        else:
            run.report(
                shard,
                live=5,
                clean=False,
                captured=(4, 5),
                held=held.get(shard, {}),
                attempted=attempted,
            )
    return run
