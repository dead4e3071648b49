"""What workers, coordinator and launcher say to each other.

One ``msgspec.Struct`` per message, encoded as MessagePack with a ``type`` tag, so that decoding
validates. Everything here is immutable plain data without torch: the coordinator and the pure
functions (``membership.rules``, ``membership.planning``) import nothing else of the runtime.

Units: seconds and bytes. A *shard* is an integer, the linear position on the mesh, which is also
the rank of its owner in the default group. A *worker* is a string that no other process of the run
ever has again. A *generation* g is the state after g committed training steps; generation 0 is what
``build`` made.
"""

from __future__ import annotations

import msgspec

Shard = int
Worker = str


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the tag is the class name."""


# --------------------------------------------------------------------------- worker -> coordinator


class Hello(Message, frozen=True):
    """First message of a stream. Wrong token, version or config digest: refused with one line."""

    token: str
    run: str
    worker: Worker
    node: str
    """Failure domain: two workers with the same ``node`` can be lost together."""
    pid: int
    version: str
    """``planaria/torch/python`` versions; equal on all workers of a run."""
    config: str
    """Digest of the script, its arguments and its resolved configuration."""
    data_address: str
    """``host:port`` of this worker's data server (see :mod:`planaria.runtime.memory.replicas`)."""
    rank: int | None = None
    """Shard that the launcher promised it (RANK of its environment); None for a spare."""


class Ready(Message, frozen=True):
    """The script has reached ``planaria.join``: imports are done, the worker is warm."""


PEER_GONE = 5
"""Exit code of a worker of a script that does not join, where it ended because a peer had."""


class Joinless(Message, frozen=True):
    """The script called ``init_process_group`` without joining: restarted if lost, not swapped."""


class ReplicaSet(Message, frozen=True):
    """Tensors of one shard that the owners of the other ``shards`` hold bit for bit, too."""

    shards: tuple[Shard, ...]
    bytes: int


class Report(Message, frozen=True):
    """What a worker holds, said when it stands still in ``epoch``."""

    epoch: int
    shard: Shard
    live: int | None
    """Generation of the state in the model; None where there is none yet (a new owner)."""
    clean: bool
    """False where an optimizer has begun to change that state in the broken attempt."""
    captured: tuple[int, ...] = ()
    """Generations whose full copy is complete in this worker's own host buffers."""
    held: dict[Shard, tuple[int, ...]] = {}
    """Generations held complete for other shards (the sent part only)."""
    replica_sets: tuple[ReplicaSet, ...] = ()
    """Empty until the worker has parts."""
    unsent_bytes: int = 0
    bucket_orders: dict[str, tuple[int, ...]] = {}
    """Per DDP module that has re-cut its buckets: order of parameter indices."""
    groups: tuple[str, ...] = ()
    """Names of the process groups this worker is a member of, in order of creation."""
    max_redo: int = 2
    """Steps that this worker lets be done again: it begins step t only when generation
    t - max_redo is committed for all."""
    attempted: int = 0
    """Newest step this worker has begun to attempt (1-based; step s makes generation s) since it
    carried out a plan; the generation of that plan where it has begun none."""


class Restored(Message, frozen=True):
    """This worker has finished the plan of ``epoch`` and trains on."""

    epoch: int
    generation: int
    phases: dict[str, float]
    """Seconds by phase on this worker: drain, build, report, rebuild, move, load, verify."""


class Committed(Message, frozen=True):
    """Own copy and holder's copy of ``generation`` are complete and checked for ``shard``."""

    epoch: int
    shard: Shard
    generation: int
    bytes: int = 0
    """Bytes sent to the holder for this generation."""
    alone: bool = False
    """True where nobody holds a copy: a world of one without a spare."""


class Progress(Message, frozen=True):
    """End of an attempt (``seconds`` set) or entry into a phase that is longer by nature."""

    epoch: int
    step: int
    phase: str = "step"
    """step, first, evaluation, checkpoint, compile, data, idle."""
    seconds: float | None = None
    waited: float = 0.0
    """Seconds the training thread waited for protection in that attempt."""


class Pong(Message, frozen=True):
    """Answer to :class:`Ping` by the control thread, with the training thread's whereabouts."""

    seq: int
    step: int
    collective: int
    """How many collectives this worker has entered in this epoch."""
    inside: bool
    """Whether the training thread waits in one."""
    waiting: bool = False
    """Whether it waits for protection: until older generations are committed for all."""
    moved: int = 0
    """Bytes of state that this worker has sent and received; grows while a transfer goes on."""


class Broke(Message, frozen=True):
    """A communicator failed under this worker (the coordinator finds out who is lost)."""

    epoch: int
    reason: str
    generation: int | None = None
    """Its copy could not be sent to the holder, which is tried again; None: a group failed."""


class Injected(Message, frozen=True):
    """A test's fault is about to fire on this worker; the journal counts it."""

    fault: str
    step: int
    phase: str


class Durable(Message, frozen=True):
    """``shard`` has written its part of the durable checkpoint of ``generation``, or failed to."""

    epoch: int
    shard: Shard
    generation: int
    error: str | None = None
    seconds: float = 0.0


class Finished(Message, frozen=True):
    """The owner of ``shard`` has reached the last step and that generation is committed."""

    epoch: int
    shard: Shard
    generation: int
    state_digest: str
    samples_digest: str
    result: dict[str, float] = {}


class Failed(Message, frozen=True):
    """The user's code raised, or a check failed: the run must end. One line."""

    reason: str
    exit_code: int = 1


class Left(Message, frozen=True):
    """The script has ended by itself; the stream that closes after this is no loss.

    Only for a worker that never joined, or whose run is over: an owner that leaves before has ended
    too early, which ends the run.
    """

    exit_code: int = 0


class Scalar(Message, frozen=True):
    """Named numbers of a committed step, for journal, progress line and summary."""

    step: int
    values: dict[str, float]


FromWorker = (
    Hello
    | Ready
    | Joinless
    | Report
    | Restored
    | Committed
    | Progress
    | Pong
    | Broke
    | Injected
    | Durable
    | Finished
    | Failed
    | Left
    | Scalar
)

# --------------------------------------------------------------------------- coordinator -> worker


class Limits(Message, frozen=True):
    """Every time-out of the run, derived from the user's one (see ``membership.limits``); seconds."""

    timeout: float
    rebuild: float
    transfer: float
    collective: float
    ping: float
    silence: float
    no_spare: float


class Welcome(Message, frozen=True):
    """Answer to :class:`Hello`."""

    worker: Worker
    world: int
    limits: Limits


class Assign(Message, frozen=True):
    """Own ``shard`` from ``epoch`` on.

    ``fresh``: all owners build together, over living groups; else build alone, and the state comes
    from peers afterwards.
    """

    epoch: int
    shard: Shard
    world: int
    fresh: bool
    durable: int | None = None
    """Newest durable checkpoint, from which owners that build together go on. Not what each of them
    finds: a shared file system shows a new folder to one machine before another."""


class Break(Message, frozen=True):
    """Leave every collective now, stand still, and report for ``epoch``."""

    epoch: int
    reason: str
    lost: tuple[Shard, ...] = ()


class Owner(Message, frozen=True):
    """Who owns a shard in a plan, and where its data server is."""

    worker: Worker
    address: str
    node: str


class Transfer(Message, frozen=True):
    """Fetch for ``shard`` at the plan's generation from the data server at ``address``.

    ``shards`` empty: the part that was sent to the holder. Else: the tensors whose replica set is
    exactly ``shards``, out of the own capture of the source.
    """

    shard: Shard
    source: Worker
    address: str
    shards: tuple[Shard, ...] = ()


class Plan(Message, frozen=True):
    """How the run goes on in ``epoch``; the same for everyone."""

    epoch: int
    generation: int | None
    """None: no generation exists for all shards; build afresh, together."""
    owners: dict[Shard, Owner]
    holders: dict[Shard, Worker]
    """Who keeps the copy of each shard from now on; empty in a world of one without spares."""
    transfers: tuple[Transfer, ...]
    bucket_orders: dict[str, tuple[int, ...]]
    """Of each DDP module that has re-cut its buckets at ``generation``; the others have the cut that
    they were built with."""
    lost: tuple[Shard, ...]
    redone: int
    """Steps that are done again, the interrupted one included."""
    reason: str
    rollback: bool = False
    """True where ``generation`` must be read from the durable checkpoint on disk."""
    keepers: tuple[Owner, ...] = ()
    """Holders that own no shard: in a world of one, the spare that keeps the copy."""
    committed: int | None = None
    """Newest generation committed for every shard, never above ``generation``. Buffers and slots
    with any other generation than these two are void: nothing of them will be committed now."""
    durable: int | None = None
    """Newest durable checkpoint."""


class Hold(Message, frozen=True):
    """A spare that kept the copy (world of one) has changed: keep to these holders from now on.

    The epoch, the attempt under way and everything else of the plan stay as they are. ``holders``
    empty: there is none; a capture is committed by its owner alone.
    """

    epoch: int
    holders: dict[Shard, Worker]
    keepers: tuple[Owner, ...] = ()


class Released(Message, frozen=True):
    """All shards of ``epoch`` have restored: the swap is over."""

    epoch: int


class AllCommitted(Message, frozen=True):
    """``generation`` is committed for every shard: older buffers and slots may be overwritten."""

    epoch: int
    generation: int


class Ping(Message, frozen=True):
    seq: int


class Fence(Message, frozen=True):
    """You are no longer a member: end at once and publish nothing."""

    reason: str


class Stop(Message, frozen=True):
    """The run is over. ``exit_code`` 0: finished; above 128: ended by a signal; else it failed."""

    reason: str
    exit_code: int

    @property
    def wished(self) -> bool:
        """Whether it ended as somebody wished, so that spares and owners leave quietly."""
        return self.exit_code == 0 or self.exit_code > 128


MOST_AHEAD = 2
"""Steps that a worker can be ahead of the newest commit: there are two host buffers."""


class SaveDurable(Message, frozen=True):
    """Write a durable checkpoint at the end of the next attempt (SIGTERM, or by request)."""

    reason: str
    then_stop: bool = False
    at: int = 0
    """Generation to write: newest committed + MOST_AHEAD, the newest step that anyone can be
    attempting, so that nobody is past it; or the script's last one, where that comes before."""


FromCoordinator = (
    Welcome
    | Assign
    | Break
    | Plan
    | Hold
    | Released
    | AllCommitted
    | Ping
    | Fence
    | Stop
    | SaveDurable
)
