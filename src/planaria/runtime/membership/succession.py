"""Changes of owners: the first ones, the loss of a worker, spares that step in, restarts.

Part of :mod:`.rules`; pure functions from a :class:`~.state.State` to a
:class:`~.state.Transition`. These are the only events that may look at every shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from immutables import Map
from msgspec.structs import replace

from planaria.errors import PlanariaError
from planaria.runtime.membership import planning
from planaria.runtime.membership.events import (
    AnyAction,
    Broadcast,
    Discard,
    EndRun,
    Kill,
    Record,
    RestartAll,
    Send,
    StartTimer,
    WantSpare,
)
from planaria.runtime.membership.ledger import announce, still_held
from planaria.runtime.membership.state import Member, State, Swaps, Transition
from planaria.runtime.messages import (
    Assign,
    Break,
    Fence,
    Hold,
    Owner,
    Shard,
    Stop,
    Worker,
)

Actions = list[AnyAction]

NOBODY: Shard = -1
"""In place of a shard where communicators failed and nobody was lost."""


def as_owner(member: Member) -> Owner:
    return Owner(worker=member.worker, address=member.address, node=member.node)


def _waiting(state: State) -> list[Owner]:
    """The spares, in the order of their attaching (a map has none of its own)."""
    members = (state.members[worker] for worker in state.spares)
    return [as_owner(member) for member in sorted(members, key=lambda member: member.seq)]


def end(
    state: State, reason: str, *, exit_code: int, actions: Iterable[AnyAction] = ()
) -> Transition:
    """The run is over; everyone who is still attached is told."""
    return Transition(
        replace(state, phase="ended", end=reason, exit_code=exit_code),
        (
            *actions,
            Broadcast(message=Stop(reason=reason, exit_code=exit_code), to="members"),
            Record(name="ended", fields={"reason": reason, "exit_code": exit_code}),
            EndRun(reason=reason, exit_code=exit_code),
        ),
        reason,
    )


def give(state: State, assigned: Mapping[Shard, Worker]) -> State:
    """``state`` with new owners for shards that had none."""
    owners, members, spares = state.owners.mutate(), state.members.mutate(), state.spares.mutate()
    for shard, worker in assigned.items():
        owners[shard] = worker
        members[worker] = replace(members[worker], shard=shard)
        del spares[worker]
    return replace(
        state,
        owners=owners.finish(),
        members=members.finish(),
        spares=spares.finish(),
        vacant=tuple(shard for shard in state.vacant if shard not in assigned),
    )


def form(state: State) -> Transition:
    """Name the first owners: promised ranks first, then the order of attaching."""
    world = state.config.world
    ready = sorted(
        (state.members[worker] for worker in state.spares),
        key=lambda member: (member.rank is None, member.rank or 0, member.seq),
    )
    assigned: dict[Shard, Worker] = {}
    others: list[Worker] = []
    for member in ready:
        if member.rank is not None and 0 <= member.rank < world and member.rank not in assigned:
            assigned[member.rank] = member.worker
        else:
            others.append(member.worker)
    free = (shard for shard in range(world) if shard not in assigned)
    assigned.update(dict(zip(free, others, strict=False)))
    epoch = state.epoch + 1
    state = give(replace(state, phase="building", epoch=epoch), assigned)
    reason = f"{world} workers are ready: epoch {epoch} begins and they build together"
    actions: Actions = [
        Send(
            worker=assigned[shard],
            message=Assign(
                epoch=epoch, shard=shard, world=world, fresh=True, durable=state.durable
            ),
        )
        for shard in range(world)
    ]
    actions.append(Record(name="epoch", fields={"epoch": epoch, "reason": reason}))
    return Transition(state, tuple(actions), reason)


def lose(state: State, worker: Worker, *, reason: str, refill: bool = True) -> Transition:
    """``worker`` will never act again; what follows depends on what it was."""
    member = state.members[worker]
    actions: Actions = [
        Send(worker=worker, message=Fence(reason=reason)),
        Kill(worker=worker, reason=reason),
        Record(name="fenced", fields={"worker": worker, "shard": member.shard, "reason": reason}),
    ]
    state = replace(
        state,
        members=state.members.delete(worker),
        fenced=state.fenced.set(worker, reason),
        spares=state.spares.delete(worker) if worker in state.spares else state.spares,
    )
    wanted: Actions = [WantSpare(count=1)] if refill and state.config.refill else []
    if state.joinless or (state.left and state.phase == "forming"):
        if member.joinless or member.rank is not None:
            return restart(state, f"worker {worker} was lost ({reason})", actions=actions)
        return Transition(state, (*actions, *wanted), f"spare {worker} was lost: {reason}")
    if member.shard is not None:
        return _succeed(state, member, reason=reason, fencing=actions, wanted=wanted)
    if state.phase == "forming":
        return _lose_before_forming(state, member, reason=reason, fencing=actions, wanted=wanted)
    if state.phase == "waiting" and _nobody_will_come(state):
        return end(state, _no_spare(state), exit_code=1, actions=actions)
    if held := state.holders.get(0) == worker:
        state = replace(state, holders=Map())
    state, told = rehold(state, lost=held)
    what = "a spare" if member.ready else "a worker that was starting"
    return Transition(state, (*actions, *told, *wanted), f"{what}, {worker}, was lost: {reason}")


def _lose_before_forming(
    state: State, member: Member, *, reason: str, fencing: Actions, wanted: Actions
) -> Transition:
    config = state.config
    state = replace(state, deaths=state.deaths + 1)
    limit = (config.max_swaps_per_step + 1) * config.world
    if state.deaths > limit:
        return end(
            state,
            f"{state.deaths} workers were lost before {config.world} were ready, the last one, "
            f"{member.worker}, for this: {reason}; look at its log",
            exit_code=1,
            actions=fencing,
        )
    actions = [*fencing, *wanted]
    if len(state.members) < config.world:
        # A number of its own for each shortage keeps an old timer from ending a later one early.
        state = replace(state, epoch=state.epoch + 1)
        actions.append(StartTimer(epoch=state.epoch, seconds=config.no_spare))
    return Transition(state, tuple(actions), f"{member.worker} was lost while starting: {reason}")


def _renew(state: State) -> tuple[State, list[Discard]]:
    """A new epoch that knows nothing of the last one's recovery and commits."""
    epoch = state.epoch + 1
    why = f"epoch {epoch} began before it was complete"
    old = Discard(generation=0, epoch=state.epoch, reason=why, superseded=True)
    discards = [replace(old, generation=g) for g in sorted(state.written)]
    state = replace(
        state,
        epoch=epoch,
        reports=Map(),
        plan=None,
        restored=Map(),
        announced=None,
        protected=False,
        ledger=Map(),
        tally=Map(),
        written=Map(),
        finished=Map(),
    )
    return state, discards


def regroup(state: State, reason: str) -> Transition:
    """A new epoch of the same owners: they stand still, report, and build their groups anew.

    Bounded as losses are: the same step may be interrupted in this way ``max_swaps_per_step`` times.
    """
    count = state.losses.get(NOBODY, 0) + 1
    state, discards = _renew(state)
    state = replace(
        state, phase="recovering", losses=state.losses.set(NOBODY, count), regrouped=reason
    )
    if count > state.config.max_swaps_per_step:
        return end(state, crash_loop(state, NOBODY, count, state.step), exit_code=1)
    why = f"{reason}: epoch {state.epoch} begins with the same owners"
    actions: Actions = [
        Broadcast(message=Break(epoch=state.epoch, reason=reason, lost=state.lost)),
        *discards,
        Record(name="epoch", fields={"epoch": state.epoch, "reason": why}),
    ]
    return Transition(state, tuple(actions), why)


def _succeed(
    state: State, member: Member, *, reason: str, fencing: Actions, wanted: Actions
) -> Transition:
    """The owner of a shard is lost: a new epoch, with a spare if there is one."""
    shard, worker = member.shard, member.worker
    assert shard is not None, "only an owner has a successor"
    losses = state.losses.get(shard, 0) + 1
    state, discards = _renew(state)
    epoch = state.epoch
    state = replace(
        state,
        owners=state.owners.delete(shard),
        vacant=tuple(sorted({*state.vacant, shard})),
        lost=tuple(sorted({*state.lost, shard})),
        holders=Map({s: holder for s, holder in state.holders.items() if holder != worker}),
        losses=state.losses.set(shard, losses),
    )
    if losses > state.config.max_swaps_per_step:
        return end(
            state, crash_loop(state, shard, losses, state.step), exit_code=1, actions=fencing
        )
    state, assigned = fill(state, avoid=member.node)
    if state.vacant and _nobody_will_come(state):
        return end(state, _no_spare(state), exit_code=1, actions=fencing)
    newcomers = tuple(send.worker for send in assigned)
    why = f"shard {shard} lost its owner {worker} ({reason}): epoch {epoch} begins"
    if state.vacant:
        # Nobody is there to step in: who is to come is called at once.
        wanted = [*wanted, *owed(state)]
        state = replace(state, owed=0)
        timer: Actions = [StartTimer(epoch=epoch, seconds=state.config.no_spare)]
        outcome = f"{why} and waits for a spare, at most {state.config.no_spare:g} s"
    else:
        state = replace(state, owed=state.owed + len(wanted))
        wanted, timer = [], []
        outcome = f"{why}, {', '.join(newcomers)} steps in"
    fields = {"epoch": epoch, "shard": shard, "worker": worker, "spare": ",".join(newcomers)}
    return Transition(
        state,
        (
            # Whoever is stuck in a collective is freed before anything else is done.
            Broadcast(message=Break(epoch=epoch, reason=reason, lost=state.lost), but=newcomers),
            *assigned,
            *fencing,
            *wanted,
            *timer,
            *discards,
            Record(name="epoch", fields={**fields, "reason": outcome}),
        ),
        outcome,
    )


def owed(state: State) -> Actions:
    """Asks for the spares that replace those who stepped in."""
    return [WantSpare(count=state.owed)] if state.owed else []


def fill(state: State, *, avoid: str = "") -> tuple[State, list[Send]]:
    """Give vacant shards to spares, in this epoch, as far as they reach.

    In a world of one the spare that holds the copy is taken. Else one that is not on the node
    ``avoid`` (where a worker was just lost) and not on the node of the shard's holder, so that the
    copy can stay where it is; then the one that has waited longest.
    """
    assigned: dict[Shard, Worker] = {}
    free = [state.members[worker] for worker in state.spares]
    for shard in state.vacant:
        if not free:
            break
        holder = state.holders.get(shard)
        at = None if holder is None else state.members.get(holder)
        node = "" if at is None else at.node
        chosen = min(
            free,
            key=lambda spare, node=node, holder=holder: (
                spare.worker != holder,
                spare.node == avoid,
                spare.node == node,
                spare.seq,
            ),
        )
        free.remove(chosen)
        assigned[shard] = chosen.worker
    state = give(state, assigned)
    kept = {s: holder for s, holder in assigned.items() if state.holders.get(s) == holder}
    state = replace(
        state,
        phase="waiting" if state.vacant else "recovering",
        # The keeper of a world of one becomes its owner; nobody is its own holder.
        holders=Map() if kept else state.holders,
    )
    world = state.config.world
    return state, [
        Send(
            worker=worker, message=Assign(epoch=state.epoch, shard=shard, world=world, fresh=False)
        )
        for shard, worker in assigned.items()
    ]


def _nobody_will_come(state: State) -> bool:
    starting = len(state.members) - len(state.owners) - len(state.spares)
    return state.config.on_no_spare == "end" and starting == 0 and not state.owed


def _no_spare(state: State) -> str:
    return (
        f"{planning.name_shards(state.vacant)} lost the owner and no spare is left; start the run "
        "with more --spares, or let it wait for one with --on-no-spare wait"
    )


def crash_loop(state: State, shard: Shard, count: int, step: int) -> str:
    if shard == NOBODY:
        return (
            f"the owners had to regroup {count} times in step {step} though no worker was lost, the "
            f"last time for this: {state.regrouped}; look at the workers' logs and at the network "
            "between their nodes, or give all of it more time with --timeout"
        )
    return (
        f"shard {shard} lost its owner {count} times in step {step}: the step itself or the data "
        f"of that shard ends its worker; look at the logs of the workers that owned shard {shard}"
    )


def rehold(state: State, *, lost: bool = False) -> tuple[State, Actions]:
    """In a world of one: let a spare keep the copy where none does (``lost``: not any more)."""
    if state.config.world > 1 or state.plan is None or state.vacant or state.holders:
        return state, []
    owner = as_owner(state.members[state.owners[0]])
    kept = planning.keeper(owner, spares=_waiting(state))
    if kept is None and not lost:
        return state, []
    message = Hold(
        epoch=state.epoch,
        holders={} if kept is None else {0: kept.worker},
        keepers=() if kept is None else (kept,),
    )
    state = replace(
        state,
        holders=Map(message.holders),
        announced=None,
        protected=False,
        ledger=Map(),
        tally=Map(),
    )
    told = [owner.worker, *message.holders.values()]
    return state, [Send(worker=worker, message=message) for worker in told]


def decide(state: State) -> Transition:
    """All owners have reported: make the plan of this epoch and send it to them."""
    owners = {shard: as_owner(state.members[worker]) for shard, worker in state.owners.items()}
    try:
        plan = planning.plan(
            state.epoch,
            owners=owners,
            reports=state.reports,
            holders=state.holders,
            lost=state.lost,
            committed=state.committed,
            durable=state.durable,
            spares=_waiting(state),
        )
    except PlanariaError as error:
        return end(state, str(error), exit_code=error.exit_code)
    # A worker that was lost before anybody began the next step has interrupted that one.
    attempted = max(report.attempted for report in state.reports.values())
    step = max(attempted, (plan.generation or 0) + 1)
    swaps = _attribute(state, step)
    for shard in state.losses:
        if swaps[shard].count > state.config.max_swaps_per_step:
            return end(state, crash_loop(state, shard, swaps[shard].count, step), exit_code=1)
    ledger: Map[Shard, int] = Map()
    if plan.generation is not None and not plan.rollback:
        ledger = still_held(state.reports, plan.holders, state.owners, plan.generation)
    state = replace(
        state,
        phase="building" if state.phase == "building" else "recovering",
        plan=plan,
        holders=Map(plan.holders),
        reports=Map(),
        committed=plan.committed,
        ledger=ledger,
        tally=Map({plan.generation: len(ledger)}) if ledger else Map(),
        swaps=swaps,
        losses=Map(),
        step=step,
    )
    actions: Actions = [Broadcast(message=plan)]
    actions += [Send(worker=keeper.worker, message=plan) for keeper in plan.keepers]
    actions.append(
        Record(
            name="plan",
            fields={
                "epoch": plan.epoch,
                "generation": plan.generation,
                "redone": plan.redone,
                "rollback": plan.rollback,
                "transfers": len(plan.transfers),
                "reason": plan.reason,
            },
        )
    )
    if plan.generation is None or len(ledger) < state.config.world:
        return Transition(state, tuple(actions), plan.reason)
    complete = announce(state, plan.generation)
    return Transition(complete.state, (*actions, *complete.actions), plan.reason)


def _attribute(state: State, step: int) -> Map[Shard, Swaps]:
    """The losses of this recovery, put to the step that they interrupted."""
    swaps = state.swaps
    for shard, losses in state.losses.items():
        before = swaps.get(shard)
        count = losses + (before.count if before is not None and before.step == step else 0)
        swaps = swaps.set(shard, Swaps(step, count))
    return swaps


def restart(state: State, reason: str, *, actions: Iterable[AnyAction] = ()) -> Transition:
    """Start the whole set anew: its script has not joined, so no state of it can be moved."""
    done = list(actions)
    if state.restarts >= state.config.max_restarts:
        return end(
            state,
            f"{reason} and the script does not join; it was restarted {state.restarts} times "
            "already (--max-restarts)",
            exit_code=1,
            actions=done,
        )
    restarts = state.restarts + 1
    why = f"{reason}; the script does not join, so all workers start again ({restarts})"
    done += [Send(worker=worker, message=Fence(reason=why)) for worker in state.members]
    done.append(RestartAll(reason=why, restart=restarts))
    done.append(Record(name="restart", fields={"restart": restarts, "reason": why}))
    fenced = state.fenced.mutate()
    for worker in state.members:
        fenced[worker] = why
    return Transition(
        State(
            config=state.config,
            epoch=state.epoch + 1,
            attached=state.attached,
            run_config=state.run_config,
            run_version=state.run_version,
            fenced=fenced.finish(),
            durable=state.durable,
            restarts=restarts,
        ),
        tuple(done),
        why,
    )
