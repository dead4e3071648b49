"""What the coordinator knows about its run, as one immutable value.

:class:`State` is a frozen struct whose large fields are persistent maps (hash tries of the
``immutables`` package): an update makes a new state that shares all but a few small nodes with the
old one, so an event costs about as much at 16,384 shards as at four. ``dump`` and ``load`` turn it
into bytes and back, for a coordinator that has to be started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from immutables import Map

from planaria.errors import ConfigError, RunError
from planaria.runtime.membership.events import AnyAction
from planaria.runtime.messages import Finished, Plan, Report, Shard, Worker

Phase = Literal["forming", "building", "recovering", "training", "waiting", "ended"]
"""forming: too few workers are ready. building: the first owners build together. recovering: every
shard has an owner, not all have restored. training. waiting: a shard has no owner and no spare is
there. ended."""


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Rules of a run that its members never change."""

    world: int
    """Number of shards, at least 1."""
    on_no_spare: Literal["wait", "end"] = "wait"
    """What to do when an owner is lost and no spare is there: wait for one, or end the run. In both
    cases a worker that is still starting is waited for."""
    no_spare: float = 300.0
    """Seconds to wait for a spare (``Limits.no_spare``)."""
    max_swaps_per_step: int = 3
    """How often the same step may be interrupted by the loss of the same shard's owner; one more
    ends the run. Our choice: a fault of the machine rarely comes three times to one place."""
    max_restarts: int = 3
    """How often a script that does not join may be restarted as a whole (torchrun's term)."""
    refill: bool = True
    """Whether each lost worker is replaced by a fresh one (:class:`~.events.WantSpare`)."""

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ConfigError(f"world is {self.world}: a run needs at least 1 worker")
        if self.on_no_spare not in ("wait", "end"):
            raise ConfigError(f"on_no_spare is {self.on_no_spare!r}: give 'wait' or 'end'")
        if not self.no_spare > 0:
            raise ConfigError(f"no_spare is {self.no_spare} seconds: give a number above 0")
        if self.max_swaps_per_step < 0:
            raise ConfigError(f"max_swaps_per_step is {self.max_swaps_per_step}: give 0 or more")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}: give 0 or more")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is attached and not fenced."""

    worker: Worker
    node: str
    address: str
    seq: int
    """Order of attaching in this run, from 0."""
    rank: int | None = None
    ready: bool = False
    joinless: bool = False
    shard: Shard | None = None
    """The shard it owns in this epoch; None for a spare."""


class Swaps(msgspec.Struct, frozen=True):
    """How often the loss of one shard's owner has interrupted one step."""

    step: int
    count: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Membership, ledger and recovery of a run at one moment."""

    config: MembershipConfig
    phase: Phase = "forming"
    epoch: int = 0
    """0 until the first owners are named; grows by 1 with each change of owners."""
    attached: int = 0
    """Workers that ever attached; gives ``Member.seq``."""
    run_config: str = ""
    run_version: str = ""
    members: Map[Worker, Member] = Map()
    spares: Map[Worker, int] = Map()
    """Ready members without a shard, with their ``seq``."""
    fenced: Map[Worker, str] = Map()
    """Workers that were members and never will be again, with the reason."""
    owners: Map[Shard, Worker] = Map()
    vacant: tuple[Shard, ...] = ()
    """Shards without an owner (waiting)."""
    holders: Map[Shard, Worker] = Map()
    """Who keeps the copy of each shard; a lost holder is taken out at once."""
    lost: tuple[Shard, ...] = ()
    """Shards whose owner was lost since the last time all had restored."""
    reports: Map[Shard, Report] = Map()
    """Reports of this epoch; dropped when the plan is made."""
    plan: Plan | None = None
    """Plan of this epoch."""
    restored: Map[Shard, int] = Map()
    """Owners that have carried out the plan of this epoch, with the generation they stand at."""
    committed: int | None = None
    """Newest generation committed for every shard; never decreases, except by a plan that starts
    below it (from disk, or because copies were lost): then it is that plan's, or None."""
    announced: int | None = None
    """Newest generation for which ``AllCommitted`` was sent to the present holders' owners."""
    protected: bool = False
    """Whether every shard of this epoch has its state at a generation twice."""
    ledger: Map[Shard, int] = Map()
    """Newest generation that each shard has committed in this epoch; all before it are, too."""
    tally: Map[int, int] = Map()
    """For how many shards a generation is that newest one; none is there for none."""
    durable: int | None = None
    """Newest published durable checkpoint."""
    written: Map[int, Map[Shard, str]] = Map()
    """Durable checkpoints under way: the shards that have answered in this epoch, and whether they
    have written their part."""
    finished: Map[Shard, Finished] = Map()
    step: int = 0
    """The step that the newest loss interrupted, as far as it is known; for messages."""
    losses: Map[Shard, int] = Map()
    """Losses of a shard's owner that no plan has yet put to a step."""
    swaps: Map[Shard, Swaps] = Map()
    regrouped: str = ""
    """Why the owners last regrouped though nobody was lost; for messages."""
    owed: int = 0
    """Fresh spares to ask for once this recovery is over: their start would take processor time
    from it."""
    deaths: int = 0
    """Workers lost while forming."""
    joinless: bool = False
    """Whether a worker of this set has made its process group without joining."""
    left: int = 0
    """Workers of this set that ended by themselves with exit code 0."""
    restarts: int = 0
    end: str = ""
    """Why the run has ended."""
    exit_code: int = 0
    """What it has ended with."""


class Transition(msgspec.Struct, frozen=True):
    """The new state, what is to be done, in this order, and why, as a sentence."""

    state: State
    actions: tuple[AnyAction, ...]
    reason: str


def _encode_map(value: Any) -> Any:
    if isinstance(value, Map):
        return dict(value.items())
    raise TypeError(f"{type(value).__name__} is not part of a State")


def _decode_map(kind: Any, value: Any) -> Any:
    key, item = get_args(kind)
    plain = msgspec.convert(
        value, dict[key, item], strict=False, str_keys=True, dec_hook=_decode_map
    )
    return Map(plain)


def dump(state: State) -> bytes:
    """``state`` as MessagePack."""
    return msgspec.msgpack.encode(state, enc_hook=_encode_map)


def load(data: bytes) -> State:
    """The state that :func:`dump` wrote. Raises :class:`RunError` where it is not one."""
    try:
        return msgspec.msgpack.decode(data, type=State, dec_hook=_decode_map)
    except (msgspec.DecodeError, ConfigError) as error:
        raise RunError(
            f"the stored membership ({len(data)} bytes) cannot be read: {error}; "
            "start the run again from its durable checkpoint"
        ) from error
