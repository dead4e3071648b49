"""What keeps a worker's state twice: captures, copies at the holder, and the way back.

It joins ``memory.snapshot`` (own host buffers), ``memory.replicas`` (holder) and the control plane
(``Committed``), for :mod:`.engine`. Called by the training thread, except where it says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from planaria.errors import CommError, RunError
from planaria.runtime.control.member import Member
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.replicas import DataServer, Pusher, regrow
from planaria.runtime.memory.slots import Buffers
from planaria.runtime.memory.snapshot import Capture
from planaria.runtime.messages import Broke, Committed, Hold, Plan, ReplicaSet, Shard, Transfer

Event = Callable[[str, int], None]
"""Told (phase, generation) in the middle of captures and sends, and before a commit is said."""


class Protection:
    """Captures and replicates the state of one shard."""

    def __init__(
        self,
        parts: Parts,
        *,
        shard: Shard,
        member: Member,
        data: DataServer,
        on_event: Event | None,
    ) -> None:
        self._parts = parts
        self._shard = shard
        self._member = member
        self._data = data
        data.access.timeout = member.limits.transfer
        self._on_event = on_event
        self._plan: Plan | None = None
        self._hold: Hold | None = None
        """The newest change of keeper; it may come before the plan that it changes is carried out."""
        self._directed = -1
        """Epoch in which copies are sent."""
        self._lock = threading.Lock()
        self._released = -1
        """Epoch in which nothing is held any more but what this worker is the holder of."""
        self._newest = 0
        """Generation whose capture or send is under way, for injected faults."""
        self.waiting = False
        """Whether the training thread may be waiting for a slot, until others have committed."""
        self._start()

    def _start(self) -> None:
        event = None if self._on_event is None else self._event
        self._pusher = Pusher(
            self._data.buffers,
            self._data.access,
            on_ack=self._acknowledged,
            on_error=self._failed,
            on_event=event,
        )
        self._capture = Capture(self._data.buffers, on_complete=self._pusher.notify, on_event=event)

    @property
    def buffers(self) -> Buffers:
        return self._data.buffers

    # ------------------------------------------------------------------ while nothing fails

    def capture(self, generation: int, *, epoch: int) -> float:
        """Begin the capture of the state as it is; the seconds the training thread has spent.

        Waits, without a limit of its own, for a slot until the generation before the last is
        committed for all: a break, a stop or the coordinator's limit of a step ends that. Raises
        EpochSuperseded where ``epoch`` is over, :class:`RunError` where the generation has a slot.
        """
        self._newest = generation
        self.waiting = True
        try:
            taken = self._capture.capture(
                self._parts, generation=generation, epoch=epoch, wait=None
            )
        finally:
            self.waiting = False
        if not taken.taken:
            raise RunError(
                f"generation {generation} of shard {self._shard} was captured before "
                f"({taken.reason}): this is a defect of Planaria; start the run again from its "
                "durable checkpoint"
            )
        return taken.seconds

    def wait_copied(self) -> float:
        """Before anything changes parameters or optimizer state; the seconds waited."""
        return self._capture.wait_copied()

    def _acknowledged(self, epoch: int, generation: int, nbytes: int, address: str | None) -> None:
        """The holder has it, if there is one. Sending thread."""
        if self._on_event is not None:
            self._on_event("commit", generation)
        self._member.send(
            Committed(
                epoch=epoch,
                shard=self._shard,
                generation=generation,
                bytes=nbytes,
                alone=address is None,
            )
        )

    def _failed(self, epoch: int, generation: int, error: Exception) -> None:
        """The holder of ``epoch`` cannot be reached: if it is lost, the coordinator will say so.
        Sending thread.
        """
        if isinstance(error, CommError):
            self._member.send(
                Broke(epoch=epoch, reason=f"replication: {error}", generation=generation)
            )
            return
        self._member.failed(f"shard {self._shard} cannot be protected: {error}")

    def _event(self, name: str) -> None:
        assert self._on_event is not None
        self._on_event(name, self._newest)

    # ------------------------------------------------------------------ when something has failed

    def stand_still(self) -> None:
        """Finish the copy under way, so that what is reported as captured is all there is."""
        self._capture.wait_copied()
        self._capture.close()

    def captured(self) -> tuple[int, ...]:
        return self._data.buffers.captured()

    def held(self) -> dict[Shard, tuple[int, ...]]:
        return self._data.held.held()

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Of the newest capture; of the state as it is where there is none yet."""
        for generation in reversed(self.captured()):
            with self._data.buffers.reading(generation) as slot:
                if slot is not None and slot.layout is not None:
                    return slot.layout.replica_sets()
        sizes: dict[tuple[int, ...], int] = {}
        for leaf in self._parts.flatten().leaves:
            if len(leaf.shards) > 1:
                nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
                sizes[leaf.shards] = sizes.get(leaf.shards, 0) + nbytes
        return tuple(ReplicaSet(shards=shards, bytes=n) for shards, n in sorted(sizes.items()))

    def enter(self, plan: Plan) -> None:
        """A new epoch goes on from the plan's generation; what else is stored is void.

        Before the collective that verifies the swap: a peer that is through with it may already
        send new generations.
        """
        self._plan = plan
        begin_epoch(self._data, plan)

    def release(self) -> None:
        """All shards are committed in the plan's epoch: the copies of those that others hold now
        are no source any more. Where one is just being read, the next call frees it; once all are
        free, calls do nothing. Control thread.
        """
        plan, hold = self._plan, self._hold
        if plan is None or self._released == plan.epoch:
            return
        holders = [plan.holders]
        if hold is not None and hold.epoch == plan.epoch:
            holders.append(hold.holders)
        me = self._member.worker
        mine = {shard for of in holders for shard, worker in of.items() if worker == me}
        if self._data.held.keep(mine):
            self._released = plan.epoch

    def forget(self) -> None:
        """All captures and copies are void: the run goes on from the disk."""
        self._data.buffers.void_after(-1)
        self._data.held.void_after(-1)

    def fetch(self, plan: Plan, transfers: Sequence[Transfer]) -> None:
        """Bring this shard's state into the own buffers, checked."""
        assert plan.generation is not None
        regrow(
            transfers,
            shard=self._shard,
            generation=plan.generation,
            epoch=plan.epoch,
            buffers=self._data.buffers,
            access=self._data.access,
        )

    def restore(self, generation: int, *, only: Literal["small", "all"]) -> None:
        """Put the capture of ``generation`` back into the parts."""
        with self._data.buffers.reading(generation) as slot:
            if slot is None or slot.layout is None:
                raise RunError(
                    f"shard {self._shard} has no capture of generation {generation} to go back to "
                    f"(it has {self.captured()}): this is a defect of Planaria; start the run again "
                    "from its durable checkpoint"
                )
            self._parts.restore(slot.layout, slot.bytes(0, slot.layout.total), only=only)

    def direct(self, plan: Plan) -> None:
        """Send what is captured from the plan's generation on to the plan's holder, or to the one
        that has taken its place since.
        """
        assert plan.generation is not None
        with self._lock:
            self._directed = plan.epoch
            if self._hold is not None and self._hold.epoch == plan.epoch:
                self._follow(self._hold, floor=plan.generation)
                return
            holder = plan.holders.get(self._shard)
            addresses = {owner.worker: owner.address for owner in plan.owners.values()}
            addresses |= {keeper.worker: keeper.address for keeper in plan.keepers}
            self._pusher.direct(
                addresses[holder] if holder is not None else None,
                epoch=plan.epoch,
                floor=plan.generation,
            )

    def hold(self, message: Hold) -> None:
        """A keeper has changed within the epoch (a world of one). Control thread."""
        with self._lock:
            self._hold = message
            plan = self._plan
            if plan is None or plan.generation is None or self._directed != message.epoch:
                return  # direct() comes yet, and follows it
            self._follow(message, floor=max([plan.generation, *self.captured()[-1:]]))

    def _follow(self, message: Hold, *, floor: int) -> None:
        holder = message.holders.get(self._shard)
        addresses = {keeper.worker: keeper.address for keeper in message.keepers}
        self._pusher.direct(
            addresses.get(holder) if holder is not None else None,
            epoch=message.epoch,
            floor=floor,
        )

    def close(self) -> None:
        self._capture.close()
        self._pusher.close()


def begin_epoch(data: DataServer, plan: Plan) -> None:
    """What a worker stores, its own and for others, after ``plan``; also for a spare that holds."""
    assert plan.generation is not None
    committed = -1 if plan.committed is None else plan.committed
    keep = {plan.generation, committed}
    data.set_epoch(plan.epoch)
    data.buffers.begin_epoch(epoch=plan.epoch, keep=keep, committed=committed)
    data.held.begin_epoch(epoch=plan.epoch, keep=keep, committed=committed)
