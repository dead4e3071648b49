"""What :func:`planaria.runtime.membership.rules.step` is told, and what it wants done.

Everything is an immutable ``msgspec.Struct`` without torch, sockets or clocks, tagged with its
class name, so that events and actions can be journalled, replayed and compared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from planaria.runtime import messages
from planaria.runtime.messages import Worker

Text = str | int | float | bool | None


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events; the tag is the class name."""


class FromMember(Event, frozen=True):
    """Base of the events that are about one worker."""

    worker: Worker


class Attached(FromMember, frozen=True, kw_only=True):
    """A worker has opened its control stream with the right token.

    Ask :func:`planaria.runtime.membership.rules.refusal` first to answer a ``Hello`` with one line; the
    coordinator sends ``Welcome`` itself. A known worker that attaches again (its coordinator was
    restarted) keeps everything it had.
    """

    node: str
    """Failure domain: two workers with the same ``node`` can be lost together."""
    address: str
    """``host:port`` of its data server."""
    config: str = ""
    """Digest of script, arguments and resolved configuration; the first one is the run's."""
    version: str = ""
    """``planaria/torch/python`` versions; the first one is the run's."""
    rank: int | None = None
    """Shard that the launcher promised it (RANK of its environment); None for a spare."""


class BecameReady(FromMember, frozen=True):
    """``Ready`` has come: the script waits in ``planaria.join``."""


class JoinlessSeen(FromMember, frozen=True):
    """``Joinless`` has come: the script makes its process group without joining."""


class Lost(FromMember, frozen=True, kw_only=True):
    """The process is gone: closed stream, pidfd, keep-alive. One such event is enough."""

    reason: str


class Hung(FromMember, frozen=True, kw_only=True):
    """The process is there and does not go on: pings unanswered, or blamed for missing progress."""

    reason: str


class Left(FromMember, frozen=True):
    """The process ended by itself with exit code 0. Feed this *instead of* :class:`Lost`.

    Of a script that never joins this is how its end is known; of an owner it is a failure.
    """


class Reported(FromMember, frozen=True, kw_only=True):
    """``Report`` has come."""

    message: messages.Report


class RestoredBy(FromMember, frozen=True, kw_only=True):
    """``Restored`` has come."""

    message: messages.Restored


class CommittedBy(FromMember, frozen=True, kw_only=True):
    """``Committed`` has come."""

    message: messages.Committed


class FinishedBy(FromMember, frozen=True, kw_only=True):
    """``Finished`` has come."""

    message: messages.Finished


class FailedBy(FromMember, frozen=True, kw_only=True):
    """``Failed`` has come: the user's code raised, or a check failed."""

    message: messages.Failed


class DurableBy(FromMember, frozen=True, kw_only=True):
    """``Durable`` has come: one shard's part of a durable checkpoint is written, or failed."""

    message: messages.Durable


class Published(Event, frozen=True):
    """The coordinator has published the durable checkpoint of ``generation`` (:class:`Publish`)."""

    generation: int


class StopRequested(Event, frozen=True, kw_only=True):
    """The user or the launcher wants the run to end now."""

    reason: str
    exit_code: int = 0


class Regroup(Event, frozen=True, kw_only=True):
    """The communicators of ``epoch`` are not to be relied on, though nobody is lost.

    A communicator failed and no loss was found, or the coordinator was started again in the middle
    of a recovery. Ignored where a newer epoch exists.
    """

    epoch: int
    reason: str


class SpareTimedOut(Event, frozen=True):
    """The timer that :class:`StartTimer` asked for in ``epoch`` has run out."""

    epoch: int


# Actions, to be carried out in the order in which they come.


class Action(msgspec.Struct, frozen=True, tag=True):
    """Base of all actions; the tag is the class name."""


class Send(Action, frozen=True, kw_only=True):
    """Send ``message`` to one worker; where its stream is closed, drop it."""

    worker: Worker
    message: messages.FromCoordinator


class Broadcast(Action, frozen=True, kw_only=True):
    """Send ``message`` to many workers of the transition's new state.

    :func:`planaria.runtime.membership.rules.recipients` lists them; one action instead of thousands keeps
    an event cheap.
    """

    message: messages.FromCoordinator
    to: Literal["owners", "members"] = "owners"
    """Owners of the new epoch, or every worker that is attached (spares, too)."""
    but: tuple[Worker, ...] = ()
    """Workers left out."""


class Kill(Action, frozen=True, kw_only=True):
    """SIGKILL the process of a fenced worker, where it is local; a no-op where it is gone."""

    worker: Worker
    reason: str


class EndRun(Action, frozen=True, kw_only=True):
    """The run is over: let the messages go out, close the streams, end with ``exit_code``."""

    reason: str
    exit_code: int


class RestartAll(Action, frozen=True, kw_only=True):
    """Kill every worker and start the whole set anew (script without ``planaria.join``)."""

    reason: str
    restart: int
    """1 for the first restart; TORCHELASTIC_RESTART_COUNT of the new workers."""


class WantSpare(Action, frozen=True, kw_only=True):
    """Start ``count`` more workers in the place of lost ones."""

    count: int


class StartTimer(Action, frozen=True, kw_only=True):
    """Feed :class:`SpareTimedOut` with ``epoch`` after ``seconds``, unless the run has ended."""

    epoch: int
    seconds: float


class Publish(Action, frozen=True, kw_only=True):
    """All parts of the durable checkpoint are written: publish it, then feed :class:`Published`."""

    generation: int
    epoch: int
    """In which its parts were written."""


class Discard(Action, frozen=True, kw_only=True):
    """Remove the partial durable checkpoint of ``generation``: it can never be complete."""

    generation: int
    epoch: int
    """In which its parts were written."""
    reason: str
    superseded: bool = False
    """A new epoch came in between; False: a shard could not write its part."""


class Record(Action, frozen=True, kw_only=True):
    """One line for the journal."""

    name: str
    """attached, ready, joinless, left, fenced, epoch, plan, restored, committed, durable, restart,
    ended."""
    fields: dict[str, Text]


AnyEvent = (
    Attached
    | BecameReady
    | JoinlessSeen
    | Lost
    | Hung
    | Left
    | Reported
    | RestoredBy
    | CommittedBy
    | FinishedBy
    | FailedBy
    | DurableBy
    | Published
    | StopRequested
    | Regroup
    | SpareTimedOut
)
AnyAction = (
    Send
    | Broadcast
    | Kill
    | EndRun
    | RestartAll
    | WantSpare
    | StartTimer
    | Publish
    | Discard
    | Record
)
