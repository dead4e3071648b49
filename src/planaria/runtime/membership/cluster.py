"""A simulated cluster for :mod:`.simulate`: workers, spares and holders of one run.

They keep the two-slot rule (design.md, decision 9) and answer what the coordinator tells them, in
random order; faults, late and stray messages are thrown in. Messages arrive at once: lost and late
ones are the business of the tests with real processes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planaria.errors import ConfigError
from planaria.runtime.membership.events import (
    AnyAction,
    AnyEvent,
    Attached,
    BecameReady,
    Broadcast,
    CommittedBy,
    DurableBy,
    FinishedBy,
    Hung,
    Kill,
    Lost,
    Publish,
    Published,
    Regroup,
    Reported,
    RestoredBy,
    Send,
    SpareTimedOut,
    StartTimer,
    WantSpare,
)
from planaria.runtime.membership.rules import recipients, step
from planaria.runtime.membership.state import MembershipConfig, State
from planaria.runtime.messages import (
    AllCommitted,
    Assign,
    Break,
    Committed,
    Durable,
    Finished,
    Hold,
    Message,
    Plan,
    Released,
    ReplicaSet,
    Report,
    Restored,
    Shard,
    Worker,
)


@dataclass(kw_only=True)
class _Process:
    """One simulated worker."""

    name: Worker
    node: str
    shard: Shard | None = None
    epoch: int = 0
    live: int | None = None
    clean: bool = True
    attempted: int = 0
    captured: list[int] = field(default_factory=list)
    """At most two generations, oldest first."""
    unsent: list[int] = field(default_factory=list)
    """Captures that the holder has yet to get, oldest first; none is passed over, because the other
    shards' slots wait for it."""
    held: dict[Shard, list[int]] = field(default_factory=dict)
    """At most two generations for each shard it keeps the copy of."""


Token = tuple[str, Worker, int]
"""What a worker is about to do, who, and in which epoch; dropped when that epoch is over."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A simulated cluster and what befalls it."""

    shards: int
    spares: int = 3
    per_node: int = 4
    """Workers on one node."""
    replicas: int = 1
    """Shards that hold the same parameters; 1: everything is sent to the holder."""
    max_redo: int = 2
    until: int = 200
    """Generation at which a run is finished."""
    fault: float | None = None
    """Chance that an event is a loss; None: about one in the time that a recovery takes and a few
    steps more."""
    noise: float = 0.02
    """Chance that an event is a late, repeated or stray message."""
    membership: MembershipConfig | None = None

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"shards is {self.shards}: a simulation needs at least 1")
        if self.per_node < 1:
            raise ConfigError(f"per_node is {self.per_node}: give at least 1 worker for a node")
        if self.replicas < 1 or self.shards % self.replicas:
            raise ConfigError(
                f"replicas is {self.replicas}: give a divisor of the {self.shards} shards"
            )


class Cluster:
    """Workers, spares and holders of one run, driven by the actions of the membership."""

    def __init__(self, config: ClusterConfig, *, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.state = State(
            config=config.membership or MembershipConfig(world=config.shards, no_spare=60.0)
        )
        self.processes: dict[Worker, _Process] = {}
        self.names: list[Worker] = []
        self.gone: list[Worker] = []
        self.holders: dict[Shard, Worker] = {}
        self.announced: int | None = None
        self.tokens: list[Token] = []
        self.blocked: list[Token] = []
        """Tokens that wait for an announcement."""
        self.begun: Counter[int] = Counter()
        """How many owners have begun an attempt, by step, in this epoch."""
        self.timers: list[int] = []
        self.started = 0
        for _ in range(config.shards + config.spares):
            self._start()

    def _start(self) -> None:
        name = f"w{self.started}"
        node = f"n{self.started // self.config.per_node}"
        self.started += 1
        self.processes[name] = _Process(name=name, node=node)
        self.tokens.append(("attach", name, 0))

    def next_event(self) -> AnyEvent | None:
        """Something that happens now; None where only the workers' own state has changed."""
        if self.names and self.rng.random() < self._fault_chance():
            return self._fault()
        if self.rng.random() < self.config.noise:
            return self._noise()
        if not self.tokens:
            return self._nothing_left()
        index = self.rng.randrange(len(self.tokens))
        self.tokens[index], self.tokens[-1] = self.tokens[-1], self.tokens[index]
        kind, name, epoch = self.tokens.pop()
        process = self.processes.get(name)
        if process is None or epoch != process.epoch:
            return None
        return _TOKENS[kind](self, process)

    def _fault_chance(self) -> float:
        if self.config.fault is not None:
            return self.config.fault
        return 1 / (12 * self.config.shards + 100)

    def _nothing_left(self) -> AnyEvent:
        """Everybody waits: only a time-out, or a defect, can end that."""
        if self.timers:
            return SpareTimedOut(self.timers.pop())
        state = self.state
        raise AssertionError(
            f"nothing can happen any more in phase {state.phase}, epoch {state.epoch}, with "
            f"{state.committed} committed: {self.blocked[:8]} wait"
        )

    def _fault(self) -> AnyEvent:
        name = self.rng.choice(self.names)
        kind = self.rng.random()
        if kind < 0.1:
            return Regroup(epoch=self.state.epoch, reason="a communicator failed")
        if kind < 0.4:
            return Hung(name, reason="pings unanswered")
        return Lost(name, reason="its stream closed")

    def _noise(self) -> AnyEvent:
        """A message that must change nothing of importance."""
        rng = self.rng
        shard = rng.randrange(self.config.shards)
        stray = rng.choice(self.gone) if self.gone and rng.random() < 0.5 else "stranger"
        late = rng.choice(self.names) if self.names else stray
        name = rng.choice((stray, late))
        old = self.state.epoch - 1 if name == late else self.state.epoch
        pick = rng.randrange(7)
        if pick == 0:
            return CommittedBy(
                name, message=Committed(epoch=old, shard=shard, generation=rng.randrange(9))
            )
        if pick == 1:
            message = Report(epoch=old, shard=shard, live=10**6, clean=True)
            return Reported(name, message=message)
        if pick == 2:
            return RestoredBy(name, message=Restored(epoch=old, generation=0, phases={}))
        if pick == 3:
            return BecameReady(stray)
        if pick == 4:
            return Lost(stray, reason="again")
        if pick == 5:
            return SpareTimedOut(self.state.epoch - 1)
        durable = Durable(epoch=old, shard=shard, generation=5)
        return DurableBy(name, message=durable)

    # What the tokens do. Each gives the event that the coordinator sees, if any.

    def attach(self, process: _Process) -> AnyEvent:
        self.tokens.append(("ready", process.name, process.epoch))
        self.names.append(process.name)
        return Attached(process.name, node=process.node, address=f"{process.name}:1", config="c")

    def ready(self, process: _Process) -> AnyEvent:
        return BecameReady(process.name)

    def build(self, process: _Process) -> AnyEvent | None:
        """The first owners build together; generation 0 is in the model."""
        process.live, process.clean = 0, True
        return self.report(process)

    def report(self, process: _Process) -> AnyEvent:
        assert process.shard is not None, "only an owner reports"
        replicas = self.config.replicas
        sets: tuple[ReplicaSet, ...] = ()
        if replicas > 1:
            stride = self.config.shards // replicas
            first = process.shard % stride
            members = tuple(first + stride * index for index in range(replicas))
            sets = (ReplicaSet(shards=members, bytes=100),)
        message = Report(
            epoch=process.epoch,
            shard=process.shard,
            live=process.live,
            clean=process.clean,
            captured=tuple(process.captured),
            held={shard: tuple(kept) for shard, kept in process.held.items()},
            replica_sets=sets,
            attempted=process.attempted,
        )
        return Reported(process.name, message=message)

    def restore(self, process: _Process) -> AnyEvent:
        """Carry out the plan: stand at its generation, then capture it."""
        plan = self.state.plan
        assert plan is not None, "a plan was sent in this epoch"
        target = plan.generation or 0
        process.live, process.clean, process.attempted = target, True, target
        process.unsent.clear()
        self._later("capture", process)
        return RestoredBy(
            process.name, message=Restored(epoch=process.epoch, generation=target, phases={})
        )

    def _void(self, process: _Process, plan: Plan) -> None:
        """Drop what will never be committed, before any owner can send what comes after the plan.

        Real workers do so before the collective that verifies the plan.
        """
        fresh = plan.generation is None or plan.rollback
        valid = () if fresh else (plan.generation, plan.committed)
        process.captured = [g for g in process.captured if g in valid]
        process.held = {
            shard: [g for g in kept if g in valid] for shard, kept in process.held.items()
        }

    def capture(self, process: _Process) -> AnyEvent | None:
        """Copy the live state to a slot that the global rule frees, or wait for one."""
        generation = process.live
        assert generation is not None, "an owner that captures has state"
        if generation not in process.captured:
            if not self._free(process.captured):
                self.blocked.append(("capture", process.name, process.epoch))
                return None
            process.captured.append(generation)
        process.unsent.append(generation)
        self._later("send", process)
        if generation < self.config.until:
            self._later("attempt", process)
        return None

    def send(self, process: _Process) -> AnyEvent | None:
        """The oldest unsent capture goes to the holder, which may have to wait for a slot, too."""
        shard = process.shard
        assert shard is not None, "only an owner sends"
        if not process.unsent:
            return None
        generation = process.unsent[0]
        holder = self.processes.get(self.holders.get(shard, ""))
        if holder is not None:
            kept = holder.held.setdefault(shard, [])
            if generation not in kept:
                if not self._free(kept):
                    self.blocked.append(("send", process.name, process.epoch))
                    return None
                kept.append(generation)
        elif shard in self.holders:
            return None
        del process.unsent[0]
        return CommittedBy(
            process.name,
            message=Committed(epoch=process.epoch, shard=shard, generation=generation),
        )

    def _free(self, slots: list[int]) -> bool:
        """The global rule; frees the oldest slot where it may be overwritten."""
        if len(slots) < 2:
            return True
        if self.announced is not None and slots[0] < self.announced:
            del slots[0]
            return True
        return False

    def attempt(self, process: _Process) -> AnyEvent | None:
        """Begin the next step, unless too many would have to be done again."""
        assert process.live is not None, "an owner that attempts has state"
        target = process.live + 1
        if (
            self.state.phase != "training"
            or self.announced is None
            or target - self.announced > self.config.max_redo
        ):
            self.blocked.append(("attempt", process.name, process.epoch))
            return None
        process.attempted = max(process.attempted, target)
        self.begun[target] += 1
        if self.begun[target] == self.config.shards:
            # The last one lets the gradients' collective end for all.
            del self.begun[target]
            for worker in self.state.owners.values():
                self._later("optimize", self.processes[worker])
        return None

    def optimize(self, process: _Process) -> AnyEvent | None:
        process.clean = False
        self._later("finish", process)
        return None

    def finish(self, process: _Process) -> AnyEvent | None:
        assert process.live is not None, "an owner that ends an attempt has state"
        process.live, process.clean = process.live + 1, True
        self._later("capture", process)
        if process.live % 50 == 0 and process.shard is not None:
            durable = Durable(epoch=process.epoch, shard=process.shard, generation=process.live)
            return DurableBy(process.name, message=durable)
        return None

    def finished(self, process: _Process) -> AnyEvent:
        assert process.shard is not None, "only an owner finishes"
        message = Finished(
            epoch=process.epoch,
            shard=process.shard,
            generation=self.config.until,
            state_digest="",
            samples_digest="",
        )
        return FinishedBy(process.name, message=message)

    def _later(self, kind: str, process: _Process) -> None:
        self.tokens.append((kind, process.name, process.epoch))

    # What the coordinator's actions do to the workers.

    def obey(self, state: State, actions: Sequence[AnyAction]) -> None:
        """Take the new state and carry the actions out at once."""
        self.state = state
        for action in actions:
            if isinstance(action, Send):
                self._hear(action.worker, action.message)
            elif isinstance(action, Broadcast):
                self._once(action.message)
                for worker in recipients(state, action):
                    self._hear(worker, action.message)
            elif isinstance(action, Kill):
                self._kill(action.worker)
            elif isinstance(action, WantSpare):
                for _ in range(action.count):
                    self._start()
            elif isinstance(action, StartTimer):
                self.timers.append(action.epoch)
            elif isinstance(action, Publish):
                self.state = step(self.state, Published(action.generation)).state

    def _kill(self, worker: Worker) -> None:
        if self.processes.pop(worker, None) is not None:
            self.names.remove(worker)
            self.gone.append(worker)
            del self.gone[:-100]

    def _once(self, message: Message) -> None:
        if isinstance(message, Break):
            self.blocked.clear()
            self.begun.clear()
        elif isinstance(message, Plan):
            self.holders = dict(message.holders)
            self.announced = message.committed
        elif isinstance(message, AllCommitted):
            self.announced = message.generation
            self._unblock()
        elif isinstance(message, Released):
            self._unblock()

    def _unblock(self) -> None:
        self.tokens += self.blocked
        self.blocked.clear()

    def _hear(self, worker: Worker, message: Message) -> None:
        process = self.processes.get(worker)
        if process is None:
            return
        if isinstance(message, Assign):
            process.shard, process.epoch = message.shard, message.epoch
            self._later("build" if message.fresh else "report", process)
        elif isinstance(message, Break):
            process.epoch = message.epoch
            self._later("report", process)
        elif isinstance(message, Plan):
            self._void(process, message)
            if process.shard is not None:
                self._later("restore", process)
        elif isinstance(message, Released):
            # A former holder may be the only source of a lost shard until all have restored.
            for shard in list(process.held):
                if self.holders.get(shard) != process.name:
                    del process.held[shard]
        elif isinstance(message, Hold):
            self.holders = dict(message.holders)
            if process.shard is not None and process.captured:
                process.unsent = process.unsent or process.captured[-1:]
                self.tokens += [("send", process.name, process.epoch)] * len(process.unsent)
        elif (
            isinstance(message, AllCommitted)
            and message.generation == self.config.until
            and process.shard is not None  # else a spare that keeps the copy
        ):
            self._later("finished", process)


_TOKENS: dict[str, Callable[[Cluster, _Process], AnyEvent | None]] = {
    "attach": Cluster.attach,
    "ready": Cluster.ready,
    "build": Cluster.build,
    "report": Cluster.report,
    "restore": Cluster.restore,
    "capture": Cluster.capture,
    "send": Cluster.send,
    "attempt": Cluster.attempt,
    "optimize": Cluster.optimize,
    "finish": Cluster.finish,
    "finished": Cluster.finished,
}
