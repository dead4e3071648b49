"""Who is in the run and who owns what: a pure function from an event to the next state.

:func:`step` opens no socket, reads no clock and keeps nothing between calls. Purity is kept by the
types: a :class:`~.state.State` is a frozen struct of plain values and persistent maps, so every
update makes a new one that shares almost everything with the old, and the old one stays valid.
Events other than changes of owners touch one shard only; what concerns all shards (committed,
restored, finished) is counted as it comes.

Events and actions are in :mod:`.events`, :class:`State` and :class:`Transition` in :mod:`.state`,
changes of owners in :mod:`.succession`, the plan in :mod:`.planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from immutables import Map
from msgspec.structs import replace

from planaria.runtime.membership.events import (
    AnyAction,
    AnyEvent,
    Attached,
    BecameReady,
    Broadcast,
    CommittedBy,
    Discard,
    DurableBy,
    FailedBy,
    FinishedBy,
    FromMember,
    Hung,
    JoinlessSeen,
    Left,
    Lost,
    Publish,
    Published,
    Record,
    Regroup,
    Reported,
    RestoredBy,
    Send,
    SpareTimedOut,
    StopRequested,
)
from planaria.runtime.membership.ledger import enter
from planaria.runtime.membership.planning import name_shards
from planaria.runtime.membership.state import Member, MembershipConfig, State, Transition
from planaria.runtime.membership.succession import (
    decide,
    end,
    fill,
    form,
    lose,
    owed,
    regroup,
    rehold,
)
from planaria.runtime.messages import Assign, Break, Fence, Released, Shard, Worker

__all__ = ["MembershipConfig", "State", "Transition", "recipients", "refusal", "step"]


def step(state: State, event: AnyEvent) -> Transition:
    """The state after ``event``, what is to be done now, in this order, and why.

    An event of a worker that is unknown or fenced changes nothing and has it fenced (again). After
    the end nothing changes any more.
    """
    if isinstance(event, FromMember) and event.worker not in state.members:
        if isinstance(event, Attached):
            return _attached(state, event)
        known = state.fenced.get(event.worker)
        reason = (
            f"worker {event.worker} is not a member of this run"
            if known is None
            else f"worker {event.worker} was declared lost: {known}"
        )
        return _fence(state, event.worker, reason)
    if state.phase == "ended":
        return Transition(state, (), f"the run has ended: {state.end}")
    return _HANDLERS[type(event)](state, event)


def recipients(state: State, broadcast: Broadcast) -> Iterator[Worker]:
    """The workers of ``state`` that ``broadcast`` goes to."""
    everyone = state.owners.values() if broadcast.to == "owners" else state.members.keys()
    return (worker for worker in everyone if worker not in broadcast.but)


def refusal(state: State, event: Attached) -> str | None:
    """Why this worker may not attach, as one line for its ``Hello``; None where it may."""
    if state.phase == "ended":
        return f"the run has ended: {state.end}"
    fenced = state.fenced.get(event.worker)
    if fenced is not None:
        return f"worker {event.worker} was declared lost ({fenced}); start one with a new name"
    for what, mine, theirs in (
        ("configuration", event.config, state.run_config),
        ("version", event.version, state.run_version),
    ):
        if theirs and mine != theirs:
            return (
                f"worker {event.worker} {_unlike(what, mine, theirs)}; "
                "start it with the script, arguments and versions of the run"
            )
    return None


def _unlike(what: str, mine: str, theirs: str) -> str:
    """What a worker has and what its run has. Of several lines, ``name value`` each, the first that
    differs is told, under its own name.
    """
    lines = zip(mine.splitlines(), theirs.splitlines(), strict=False)
    one, other = next((pair for pair in lines if pair[0] != pair[1]), (mine, theirs))
    (name, _, value), (known, _, wanted) = one.partition(" "), other.partition(" ")
    if not value or not wanted:
        return f"has {what} {mine or 'none'}, its run has {theirs}"
    if name != known:
        return f"runs a {name}, its run a {known}"
    if name in ("script", "function"):
        return f"has another {name} than its run: its text or argument differs"
    return f"has {name} {value}, its run has {wanted}"


def _unchanged(state: State, reason: str) -> Transition:
    return Transition(state, (), reason)


def _fence(state: State, worker: Worker, reason: str) -> Transition:
    return Transition(state, (Send(worker=worker, message=Fence(reason=reason)),), reason)


def _attached(state: State, event: Attached) -> Transition:
    refused = refusal(state, event)
    if refused is not None:
        return _fence(state, event.worker, refused)
    known = state.members.get(event.worker)
    if known is not None:
        member = replace(known, address=event.address)
        return Transition(
            replace(state, members=state.members.set(event.worker, member)),
            tuple(Send(worker=event.worker, message=word) for word in _missed(state, known)),
            f"worker {event.worker} is attached again",
        )
    member = Member(
        worker=event.worker,
        node=event.node,
        address=event.address,
        seq=state.attached,
        rank=event.rank,
    )
    state = replace(
        state,
        members=state.members.set(event.worker, member),
        attached=state.attached + 1,
        run_config=state.run_config or event.config,
        run_version=state.run_version or event.version,
    )
    record = Record(name="attached", fields={"worker": event.worker, "node": event.node})
    return Transition(state, (record,), f"worker {event.worker} on {event.node} is attached")


def _missed(state: State, member: Member) -> Iterator[Assign | Break]:
    """What an owner that attaches again may have been told while it had no stream.

    It would wait for that word for ever; who has heard it loses nothing by hearing it twice.
    """
    if member.shard is None:
        return
    fresh = state.phase == "building"
    if fresh or member.shard in state.lost:
        yield Assign(
            epoch=state.epoch,
            shard=member.shard,
            world=state.config.world,
            fresh=fresh,
            durable=state.durable if fresh else None,
        )
    elif state.phase in ("recovering", "waiting"):
        reason = f"epoch {state.epoch} began while {member.worker} had no stream"
        yield Break(epoch=state.epoch, reason=reason, lost=state.lost)


def _became_ready(state: State, event: BecameReady) -> Transition:
    member = state.members[event.worker]
    if member.ready:
        return _unchanged(state, f"worker {event.worker} was ready before")
    state = replace(
        state,
        members=state.members.set(event.worker, replace(member, ready=True)),
        spares=state.spares.set(event.worker, member.seq),
    )
    actions: list[AnyAction] = [Record(name="ready", fields={"worker": event.worker})]
    if state.phase == "forming":
        missing = state.config.world - len(state.spares)
        if missing > 0:
            reason = f"worker {event.worker} is ready; {missing} more are needed"
            return Transition(state, tuple(actions), reason)
        formed = form(state)
        return Transition(formed.state, (*actions, *formed.actions), formed.reason)
    if state.phase == "waiting":
        state, assigned = fill(state)
        actions += assigned
        taken = name_shards(
            shard for send in assigned if (shard := state.members[send.worker].shard) is not None
        )
        return Transition(state, tuple(actions), f"worker {event.worker} steps in for {taken}")
    state, more = rehold(state)
    return Transition(state, (*actions, *more), f"worker {event.worker} is ready, a spare")


def _joinless_seen(state: State, event: JoinlessSeen) -> Transition:
    if state.phase != "forming":
        return lose(
            state,
            event.worker,
            reason="its script does not join, and this run has workers that joined",
            refill=False,
        )
    member = replace(state.members[event.worker], joinless=True)
    state = replace(state, joinless=True, members=state.members.set(event.worker, member))
    return Transition(
        state,
        (Record(name="joinless", fields={"worker": event.worker}),),
        f"worker {event.worker} makes its process group without joining: a loss restarts all",
    )


def _lost(state: State, event: Lost | Hung) -> Transition:
    return lose(state, event.worker, reason=event.reason)


def _left(state: State, event: Left) -> Transition:
    member = state.members[event.worker]
    worker = event.worker
    if member.shard is not None:
        return end(
            state,
            f"worker {worker} ended by itself while it owned shard {member.shard}; let the script "
            "go through run.attempts(until=...) to its end",
            exit_code=1,
        )
    if state.phase != "forming" or member.ready:
        return lose(state, worker, reason="it ended by itself", refill=False)
    # Spares of a script that never joins have no rank and their end says nothing.
    counts = member.rank is not None or all(m.rank is None for m in state.members.values())
    state = replace(
        state,
        members=state.members.delete(worker),
        fenced=state.fenced.set(worker, "it ended by itself"),
        left=state.left + counts,
    )
    record = Record(name="left", fields={"worker": worker})
    if state.left < state.config.world:
        return Transition(state, (record,), f"worker {worker} ended by itself with exit code 0")
    return end(
        state,
        f"all {state.config.world} workers ended by themselves with exit code 0",
        exit_code=0,
        actions=[record],
    )


def _reported(state: State, event: Reported) -> Transition:
    report = event.message
    stale = _stale(state, event.worker, report.epoch, report.shard)
    if stale is not None:
        return _unchanged(state, stale)
    if state.plan is not None:
        return _unchanged(state, f"epoch {state.epoch} has its plan already")
    state = replace(
        state,
        reports=state.reports.set(report.shard, report),
        step=max(state.step, report.attempted),
    )
    missing = state.config.world - len(state.reports)
    if missing:
        return _unchanged(state, f"shard {report.shard} has reported; {missing} have not")
    return decide(state)


def _stale(state: State, worker: Worker, epoch: int, shard: Shard) -> str | None:
    """Why a message about ``shard`` in ``epoch`` does not count; None where it does."""
    if epoch != state.epoch:
        return f"worker {worker} speaks of epoch {epoch}, which is not {state.epoch}"
    if state.owners.get(shard) != worker:
        return f"worker {worker} does not own shard {shard}"
    return None


def _restored(state: State, event: RestoredBy) -> Transition:
    shard = state.members[event.worker].shard
    if shard is None:
        return _unchanged(state, f"worker {event.worker} owns no shard")
    stale = _stale(state, event.worker, event.message.epoch, shard)
    if stale is not None:
        return _unchanged(state, stale)
    if state.plan is None or state.phase not in ("building", "recovering"):
        return _unchanged(state, f"epoch {state.epoch} is not recovering")
    target = state.plan.generation or 0
    if event.message.generation != target:
        return end(
            state,
            f"shard {shard} went back to generation {event.message.generation}, the plan of epoch "
            f"{state.epoch} says {target}; this is a defect of planaria, please report it",
            exit_code=1,
        )
    state = replace(state, restored=state.restored.set(shard, target))
    missing = state.config.world - len(state.restored)
    if missing:
        return _unchanged(state, f"shard {shard} has restored; {missing} have not")
    reason = f"all shards of epoch {state.epoch} stand at generation {target}: training goes on"
    record = Record(
        name="restored",
        fields={"epoch": state.epoch, "generation": target, "lost": len(state.lost)},
    )
    return Transition(
        replace(state, phase="training", lost=(), owed=0),
        (Broadcast(message=Released(epoch=state.epoch)), record, *owed(state)),
        reason,
    )


def _committed(state: State, event: CommittedBy) -> Transition:
    shard, generation = event.message.shard, event.message.generation
    stale = _stale(state, event.worker, event.message.epoch, shard)
    if stale is not None:
        return _unchanged(state, stale)
    if state.plan is None:
        return _unchanged(state, f"epoch {state.epoch} has no plan yet")
    if event.message.alone and shard in state.holders:
        return _unchanged(state, f"shard {shard} has a holder now, which has not got {generation}")
    return enter(state, shard, generation)


def _durable(state: State, event: DurableBy) -> Transition:
    part = event.message
    stale = _stale(state, event.worker, part.epoch, part.shard)
    if stale is not None:
        return _unchanged(state, stale)
    answers = state.written.get(part.generation, Map()).set(part.shard, part.error or "")
    missing = state.config.world - len(answers)
    record: tuple[AnyAction, ...] = ()
    if part.error is not None:
        record = (
            Record(
                name="durable",
                fields={
                    "generation": part.generation,
                    "shard": part.shard,
                    "error": part.error,
                },
            ),
        )
    if missing:
        return Transition(
            replace(state, written=state.written.set(part.generation, answers)),
            record,
            f"shard {part.shard} has answered for the durable checkpoint of generation "
            f"{part.generation}; {missing} have not",
        )
    if part.generation in state.written:
        state = replace(state, written=state.written.delete(part.generation))
    failed = {shard: error for shard, error in answers.items() if error}
    if failed:
        # One full disk fails everyone: what it says stands beside them.
        first = failed[min(failed)]
        reason = f"{name_shards(failed)} could not write the durable checkpoint: {first}"
        action = Discard(generation=part.generation, epoch=part.epoch, reason=reason)
    else:
        reason = f"all parts of the durable checkpoint of generation {part.generation} are written"
        action = Publish(generation=part.generation, epoch=part.epoch)
    return Transition(state, (*record, action), reason)


def _published(state: State, event: Published) -> Transition:
    newest = event.generation if state.durable is None else max(state.durable, event.generation)
    return _unchanged(
        replace(state, durable=newest),
        f"the durable checkpoint of generation {event.generation} is published",
    )


def _finished(state: State, event: FinishedBy) -> Transition:
    shard = event.message.shard
    stale = _stale(state, event.worker, event.message.epoch, shard)
    if stale is not None:
        return _unchanged(state, stale)
    if state.plan is None:
        return _unchanged(state, f"epoch {state.epoch} has no plan yet")
    # Not only while training: a quick owner has finished before a slow one has restored.
    state = replace(state, finished=state.finished.set(shard, event.message))
    missing = state.config.world - len(state.finished)
    if missing:
        return _unchanged(state, f"shard {shard} has finished; {missing} have not")
    return end(
        state, f"all shards have finished at generation {event.message.generation}", exit_code=0
    )


def _failed(state: State, event: FailedBy) -> Transition:
    member = state.members[event.worker]
    reason = event.message.reason
    if state.joinless:
        return lose(state, event.worker, reason=reason)
    if member.shard is None and state.phase != "forming":
        return lose(state, event.worker, reason=reason, refill=False)
    return end(state, reason, exit_code=event.message.exit_code)


def _stop_requested(state: State, event: StopRequested) -> Transition:
    return end(state, event.reason, exit_code=event.exit_code)


def _regroup(state: State, event: Regroup) -> Transition:
    if event.epoch != state.epoch or state.phase not in ("building", "recovering", "training"):
        return _unchanged(state, f"epoch {event.epoch} needs no regrouping any more")
    return regroup(state, event.reason)


def _spare_timed_out(state: State, event: SpareTimedOut) -> Transition:
    config = state.config
    if event.epoch != state.epoch:
        return _unchanged(state, f"the timer of epoch {event.epoch} is not of {state.epoch}")
    if state.phase == "waiting":
        return end(
            state,
            f"{name_shards(state.vacant)} had no owner for {config.no_spare:g} s and no spare "
            "came; add one with 'planaria join', or start the run with more --spares",
            exit_code=1,
        )
    if state.phase == "forming" and len(state.members) < config.world:
        return end(
            state,
            f"only {len(state.members)} of {config.world} workers were there after "
            f"{config.no_spare:g} s; look at the logs of those that were lost",
            exit_code=1,
        )
    return _unchanged(state, "nobody waits for a spare")


_HANDLERS: Mapping[type[Any], Callable[[State, Any], Transition]] = MappingProxyType(
    {
        Attached: _attached,
        BecameReady: _became_ready,
        JoinlessSeen: _joinless_seen,
        Lost: _lost,
        Hung: _lost,
        Left: _left,
        Reported: _reported,
        RestoredBy: _restored,
        CommittedBy: _committed,
        FinishedBy: _finished,
        FailedBy: _failed,
        DurableBy: _durable,
        Published: _published,
        StopRequested: _stop_requested,
        Regroup: _regroup,
        SpareTimedOut: _spare_timed_out,
    }
)
