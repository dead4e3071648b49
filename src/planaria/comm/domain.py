"""The communication state of one worker: mode, epoch, and every handle it has made.

There is one :class:`Domain` per worker and one broken flag per domain, not per group: with a flag per
group, garbage left through the healthy group of a two-dimensional mesh, and a worker elsewhere trained
on it (decision 5 of the design).
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from planaria.comm.store import EpochStore, KeyValue
from planaria.comm.transport import Transport
from planaria.errors import AttemptBroken, CommError, EpochSuperseded

if TYPE_CHECKING:
    from planaria.comm.handle import RebuildableGroup
    from planaria.comm.work import Pending

log = logging.getLogger(__name__)

_OBJECT_COLLECTIVES = frozenset(
    {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
        "barrier",
        "monitored_barrier",
    }
)
_RECEIVING_OBJECTS = frozenset({"broadcast_object_list", "scatter_object_list", "recv_object_list"})
# Files whose functions on the stack mean: inside forward, backward or clipping. They must be allowed
# to complete, since DDP's reducer and FSDP's states cannot be left half-way by an exception.
_MUST_COMPLETE = (
    "torch/nn/modules/module.py",
    "torch/autograd/",
    "torch/nn/utils/clip_grad.py",
    "torch/nn/parallel/distributed.py",
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/",
)
_ROUND = 0.05
"""Seconds between two rounds of shutting sockets."""
_GIVEN_UP = 40
"""Rounds; gloo ends what it has not lost within one. Fewer where a rebuild has less time than they
take, so that who was stuck is free again long before anyone takes it for lost."""


class Mode(enum.Enum):
    """What a collective does.

    LIVE: it runs on the inner group. BROKEN: a peer was lost; it returns at once, with whatever is in
    the buffers, until the attempt has been left. SOLO: a spare builds alone; it returns at once with
    the caller's own data.
    """

    LIVE = "live"
    BROKEN = "broken"
    SOLO = "solo"


class Domain:
    """One worker's groups, their epoch and their one broken flag.

    Thread-safe where it says so: ``fail`` and ``supersede`` are called by the control thread and by
    gloo's threads; everything else by the training thread.
    """

    def __init__(
        self, transport: Transport, kv: KeyValue, *, timeout: float, rebuild: float
    ) -> None:
        """``timeout``: seconds a collective may take; ``rebuild``: seconds a new group may take."""
        self.transport = transport
        self.kv = kv
        self.timeout = timeout
        self.rebuild_timeout = rebuild
        self.mode = Mode.LIVE
        self.epoch = 0
        self.rank = 0
        self.world = 1
        self.reason = ""
        self.handles: dict[str, RebuildableGroup] = {}
        self.entered = 0
        self.outstanding = 0
        self.on_failure: Callable[[int, str], None] = lambda epoch, reason: None
        """Told once per epoch, by any thread, that a communicator failed: (epoch, reason)."""
        self.on_collective: Callable[[], None] | None = None
        """Told by the caller's thread when a collective has been launched (fault injection)."""
        self.on_given_up: Callable[[int, str], None] = lambda epoch, reason: None
        """Told, by any thread, of collectives that had to be given up: (their epoch, what it was)."""
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)
        self._patience = max(10, min(_GIVEN_UP, int(rebuild / _ROUND)))
        self._training_thread = threading.get_ident()
        self._resting = threading.Event()
        self._resting.set()
        self._superseded_below = 0
        self._store: EpochStore | None = None
        self._pending: set[Pending] = set()
        self._speaks = threading.local()
        self.lost: list[Any] = []
        """Inner groups with an operation that was given up: to let one go would wait for it."""

    # ------------------------------------------------------------------ leaving

    def fail(self, epoch: int, reason: str) -> None:
        """A communicator of ``epoch`` failed: break the worker and free whoever is stuck in it.

        Any thread. Older epochs are ignored. The inner groups are not dropped here: gloo's own thread
        may be the caller, and dropping a group from it ends the process.
        """
        with self._lock:
            if epoch != self.epoch or self.mode is not Mode.LIVE:
                return
            self.mode = Mode.BROKEN
            self.reason = reason
            self._free()
        self.on_failure(epoch, reason)

    def _free(self) -> int:
        # A copy: another thread may be making a group, or closing one.
        inners = [handle.inner for handle in list(self.handles.values())]
        return self.transport.free([inner for inner in inners if inner is not None])

    def overtake(self, epoch: int, reason: str) -> bool:
        """The coordinator has made ``epoch``: mark the worker broken and free it once. Any thread.

        To be called before the training thread may hear of the epoch: it must not find a living
        group of the old one. False where the domain is in that epoch already.
        """
        with self._lock:
            self._superseded_below = max(self._superseded_below, epoch)
            if self.epoch >= epoch:
                return False
            if self.mode is Mode.LIVE:
                self.mode = Mode.BROKEN
                self.reason = reason
            self._free()
            return True

    def supersede(self, epoch: int, reason: str) -> None:
        """As :meth:`overtake`, and on until the training thread stands still. Any thread.

        Sockets are shut again and again meanwhile, since a group that is being connected opens new
        ones; a training thread that computes is waited for. A collective that does not end though
        its sockets were shut :data:`_GIVEN_UP` times is one that gloo has lost: it is given up.
        """
        if not self.overtake(epoch, reason):
            return
        rounds = (
            0  # and no clock: a process that stood still has given gloo's threads no time either
        )
        while not self._resting.wait(_ROUND):
            with self._lock:
                if self.epoch >= epoch:
                    return
                self._free()
                rounds += 1
                stuck = list(self._pending) if rounds >= self._patience else []
            self._abandon(stuck, rounds)

    def _abandon(self, stuck: Sequence[Pending], rounds: int) -> None:
        given = [pending for pending in stuck if pending.give_up()]
        if given:
            many = "1 collective" if len(given) == 1 else f"{len(given)} collectives"
            self.on_given_up(
                given[0].epoch,
                f"{many} did not end though its sockets were shut {rounds} times: given up",
            )

    def _drain(self) -> None:
        """Wait until no collective is under way on any thread, or give up what does not end.

        Training thread, at rest, before insides are dropped: to let one go waits for what is under
        way in it, and what gloo has lost ends only with its time-out.
        """
        for _ in range(self._patience):
            with self._left:
                if not self._pending:
                    return
                self._free()
                self._left.wait(_ROUND)
        with self._lock:
            stuck = list(self._pending)
        self._abandon(stuck, self._patience)

    def enter(self, pending: Pending | None = None) -> None:
        """A collective was launched. Training thread, and autograd's."""
        with self._lock:
            self.entered += 1
            self.outstanding += 1
            if pending is not None:
                self._pending.add(pending)

    def expect(self, pending: Pending) -> None:
        """Somebody begins to wait for a collective that was entered before. Any thread."""
        with self._lock:
            self._pending.add(pending)

    def leave(self, epoch: int, pending: Pending | None = None) -> None:
        """A collective of ``epoch`` has ended. Any thread."""
        with self._lock:
            if epoch == self.epoch:
                self.outstanding -= 1
            if pending is not None:
                self._pending.discard(pending)
                self._left.notify_all()

    def rest(self) -> None:
        """The training thread has left every collective of an epoch that is over.

        In a living epoch this says nothing: the thread enters its next collective when it likes, and
        whoever frees it must not think that it stands still. (Once the first report said so for the
        whole first epoch, and an operation that gloo lost in it was never given up.)
        """
        with self._lock:
            if self.mode is not Mode.LIVE:
                self._resting.set()

    def check(self) -> None:
        """A boundary: raises :class:`AttemptBroken` where the worker is broken."""
        if self.mode is Mode.BROKEN:
            raise AttemptBroken(f"attempt given up: {self.reason}")

    def may_complete(self) -> bool:
        """Whether a collective of a broken attempt has to return instead of raising.

        True inside forward, backward and clipping, and on threads other than the training thread
        (autograd's device threads have no Python frames of their own). Never for objects: what is in
        their buffers would be unpickled.
        """
        names, inside = self._stack()
        if names & _OBJECT_COLLECTIVES:
            return False
        return inside or threading.get_ident() != self._training_thread

    def receives_objects(self) -> bool:
        return bool(self._stack()[0] & _RECEIVING_OBJECTS)

    @staticmethod
    def _stack() -> tuple[set[str], bool]:
        """Names of the frames of ``torch.distributed``'s functions; whether a forward is among them.

        Walked only in a broken or solo worker, so it costs a healthy one nothing.
        """
        names: set[str] = set()
        inside = False
        frame = sys._getframe(1)
        while frame is not None:
            code: CodeType = frame.f_code
            if code.co_filename.endswith("distributed_c10d.py"):
                names.add(code.co_name)
            inside = inside or any(part in code.co_filename for part in _MUST_COMPLETE)
            frame = frame.f_back
        return names, inside

    # ------------------------------------------------------------------ threads beside training

    @contextmanager
    def member(self, epoch: int) -> Generator[None]:
        """What this thread says inside, it says as a member of ``epoch``.

        For a thread that goes on beside training, over a rebuild: its collectives raise
        :class:`EpochSuperseded` once that epoch is over, and never meet those of later ones.
        """
        self._speaks.epoch = epoch
        try:
            yield
        finally:
            del self._speaks.epoch

    def still_member(self) -> None:
        """Raises :class:`EpochSuperseded` where this thread speaks for an epoch that is over."""
        epoch = getattr(self._speaks, "epoch", None)
        if epoch is not None and epoch != self.epoch:
            raise EpochSuperseded(f"epoch {epoch} is over: epoch {self.epoch} exists")

    # ------------------------------------------------------------------ epochs

    def begin(self, epoch: int, *, rank: int, world: int, solo: bool) -> None:
        """Bind the domain to a shard; groups made from now on are live, or solo on a spare."""
        with self._lock:
            self.rank, self.world = rank, world
            self._training_thread = threading.get_ident()
            if solo:
                self.mode = Mode.SOLO
                return
        self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        with self._lock:
            if epoch < self._superseded_below:
                raise EpochSuperseded(
                    f"epoch {epoch} is over: epoch {self._superseded_below} exists"
                )
            self.epoch = epoch
            self.mode = Mode.LIVE
            self.reason = ""
            self.entered = 0
            self.outstanding = 0
            self._resting.clear()
        self.kv.put(epoch, f"comm/{self.rank}", self.transport.address.encode())
        keys = [f"comm/{rank}" for rank in range(self.world)]
        found = self.kv.get_many(epoch, keys, self.rebuild_timeout)
        self.transport.meet(value.decode() for value in found)

    def rebuild(self, epoch: int) -> None:
        """Give every handle a new inside in ``epoch``.

        Blocks until all members are there. Raises :class:`EpochSuperseded` as soon as a newer epoch
        is known, :class:`CommError` where a peer fails meanwhile; the domain is broken then.
        """
        with self._lock:
            self._free()  # a group is never dropped with its sockets open
        self._drain()
        for handle in list(self.handles.values()):
            handle.drop()
        try:
            self._enter(epoch)
            for handle in list(self.handles.values()):
                handle.fill()
        except EpochSuperseded:
            self._give_up(epoch, "a newer epoch exists")
            raise
        except (RuntimeError, CommError) as error:
            self._give_up(epoch, str(error).splitlines()[0])
            raise CommError(f"groups of epoch {epoch} could not be rebuilt: {error}") from error

    def _give_up(self, epoch: int, reason: str) -> None:
        with self._lock:
            if self.epoch == epoch:
                self.mode = Mode.BROKEN
                self.reason = reason
        self.rest()

    def store(self, name: str) -> dist.Store:
        """The store in which members of group ``name`` find each other in this epoch."""
        return dist.PrefixStore(f"group/{name}", self.epoch_store())

    def epoch_store(self) -> EpochStore:
        """The store of the present epoch.

        It is kept here: a prefix store holds its C++ half only, and with the Python half gone every
        call ends in "Not implemented".
        """
        if self._store is None or self._store.epoch != self.epoch:
            self._store = EpochStore(self.kv, epoch=self.epoch, timeout=self.rebuild_timeout)
        return self._store

    def close(self) -> None:
        """Free and drop everything; the worker leaves."""
        with self._lock:
            if self.mode is Mode.LIVE:
                self.mode = Mode.BROKEN
                self.reason = "the worker leaves"
            self._free()
        self.rest()
        self._drain()
        for handle in list(self.handles.values()):
            handle.drop()

    def discard(self) -> None:
        """Forget all handles, for a build that has to begin again from nothing."""
        self.close()
        self.handles.clear()
