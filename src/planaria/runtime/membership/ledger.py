"""Which generation is committed for which shard, and when it is for all.

Part of :mod:`.rules`; pure. Captures go to the holder in order, none passed over (design/runtime.md,
"Which generation"), so a shard that has committed generation g has committed all before it, too: the
newest of each shard is all there is to know, and what is said of it once more, or not at all because
a coordinator died, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from immutables import Map
from msgspec.structs import replace

from planaria.runtime.membership.events import Broadcast, Record, Send
from planaria.runtime.membership.state import State, Transition
from planaria.runtime.messages import AllCommitted, Report, Shard, Worker


def enter(state: State, shard: Shard, generation: int) -> Transition:
    """``generation`` is committed for ``shard``; it may be the last that was missing for all."""
    floor = max(state.plan.generation or 0 if state.plan is not None else 0, state.committed or 0)
    before = state.ledger.get(shard)
    if generation < floor or (before is not None and generation <= before):
        return Transition(state, (), f"generation {generation} of shard {shard} is known")
    counts = dict(state.tally.items())
    if before is not None:
        counts[before] -= 1
        if not counts[before]:
            del counts[before]
    counts[generation] = counts.get(generation, 0) + 1
    state = replace(state, ledger=state.ledger.set(shard, generation), tally=Map(counts))
    complete = complete_for_all(state)
    if complete is not None and (state.announced is None or complete > state.announced):
        return announce(state, complete)
    missing = state.config.world - sum(n for g, n in counts.items() if g >= generation)
    reason = f"generation {generation} is committed for shard {shard}; {missing} are missing"
    return Transition(state, (), reason)


def complete_for_all(state: State) -> int | None:
    """The newest generation that every shard has committed in this epoch; None before the first."""
    if sum(state.tally.values()) < state.config.world:
        return None
    return min(state.tally.keys())


def announce(state: State, generation: int) -> Transition:
    """``generation`` is committed for every shard: older buffers and slots are free."""
    state = replace(
        state,
        committed=generation,
        announced=generation,
        # A world of one without a spare has its state once only.
        protected=bool(state.holders),
    )
    told = AllCommitted(epoch=state.epoch, generation=generation)
    owners = set(state.owners.values()) if state.config.world == 1 else set[Worker]()
    keepers = [w for w in state.holders.values() if w not in owners] if owners else []
    return Transition(
        state,
        (
            Broadcast(message=told),
            # In a world of one the copy is kept by a spare, whose slots follow the same rule.
            *(Send(worker=keeper, message=told) for keeper in keepers),
            Record(name="committed", fields={"epoch": state.epoch, "generation": generation}),
        ),
        f"generation {generation} is committed for all shards",
    )


def still_held(
    reports: Mapping[Shard, Report],
    holders: Mapping[Shard, Worker],
    owners: Map[Shard, Worker],
    generation: int,
) -> Map[Shard, int]:
    """Shards that need no new copy: captured by the owner and complete at the holder already."""
    shard_of = {worker: shard for shard, worker in owners.items()}
    kept: dict[Shard, int] = {}
    for shard, report in reports.items():
        holder = shard_of.get(holders.get(shard, ""))
        if holder is None or generation not in report.captured:
            continue
        if generation in reports[holder].held.get(shard, ()):
            kept[shard] = generation
    return Map(kept)
