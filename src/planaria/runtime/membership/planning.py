"""From what is left to how the run goes on: a pure function over the reports of an epoch.

Source: method note "hot swap", steps 4 and 5; the choices of sources and holders are ours.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planaria.errors import NotRecoverable, PlanariaError
from planaria.runtime.messages import Owner, Plan, Report, Shard, Transfer, Worker

NAMED = 8
"""How many shards a message lists before it only counts the rest."""


def name_shards(shards: Iterable[Shard]) -> str:
    """``shard 3`` or ``shards 3, 5 and 9``; the first eight of a long list."""
    listed = sorted(shards)
    if len(listed) == 1:
        return f"shard {listed[0]}"
    shown = [str(shard) for shard in listed[:NAMED]]
    if len(listed) > NAMED:
        return f"shards {', '.join(shown)} and {len(listed) - NAMED} more"
    return f"shards {', '.join(shown[:-1])} and {shown[-1]}"


@dataclass(frozen=True, kw_only=True)
class _Stock:
    """What exists, by shard and generation."""

    reports: Mapping[Shard, Report]
    held: Mapping[Shard, Mapping[int, Sequence[Shard]]]
    """Per shard and generation: the shards whose owners hold a complete copy of the sent part."""
    sets: Mapping[Shard, Mapping[tuple[Shard, ...], int]]
    """Bytes of each replica set that a shard is a member of, with at least one other member."""
    generations: tuple[int, ...] = field(default=())
    """Every generation that anyone has anything of, newest first."""

    def has_own(self, shard: Shard, generation: int) -> bool:
        report = self.reports[shard]
        return generation in report.captured or (report.clean and report.live == generation)

    def givers(self, shard: Shard, members: tuple[Shard, ...], generation: int) -> list[Shard]:
        """Members of a replica set that can give its tensors, nearest after ``shard`` first."""
        able = (
            member
            for member in members
            if member != shard
            and member in self.reports
            and generation in self.reports[member].captured
        )
        return sorted(able, key=lambda member: (member <= shard, member))

    def missing(self, shard: Shard, generation: int) -> str | None:
        """What keeps ``shard`` from standing at ``generation``; None where nothing does."""
        if self.has_own(shard, generation):
            return None
        if not self.held.get(shard, {}).get(generation):
            return "no living worker holds a complete copy"
        for members in self.sets.get(shard, {}):
            if not any(
                generation in self.reports[member].captured
                for member in members
                if member != shard and member in self.reports
            ):
                return f"no living member of its replica set {members} has a capture"
        return None


def _take_stock(reports: Mapping[Shard, Report]) -> _Stock:
    held: dict[Shard, dict[int, list[Shard]]] = defaultdict(lambda: defaultdict(list))
    sets: dict[Shard, dict[tuple[Shard, ...], int]] = defaultdict(dict)
    generations: set[int] = set()
    newcomers = {s for s, report in reports.items() if not report.captured or not report.clean}
    for holder, report in reports.items():
        generations.update(report.captured)
        if report.clean and report.live is not None:
            generations.add(report.live)
        for shard, kept in report.held.items():
            generations.update(kept)
            for generation in kept:
                held[shard][generation].append(holder)
        for replicas in report.replica_sets:
            members = tuple(sorted(replicas.shards))
            if len(members) < 2:
                continue
            sets[holder][members] = max(replicas.bytes, sets[holder].get(members, 0))
            # A new owner may not know its sets yet; its peers do.
            for member in members:
                if member in newcomers:
                    sets[member].setdefault(members, replicas.bytes)
    return _Stock(
        reports=reports,
        held=held,
        sets=sets,
        generations=tuple(sorted(generations, reverse=True)),
    )


def _target(stock: _Stock) -> int | None:
    for generation in stock.generations:
        if all(stock.missing(shard, generation) is None for shard in stock.reports):
            return generation
    return None


def _decide(
    stock: _Stock, *, committed: int | None, durable: int | None
) -> tuple[int | None, bool, str]:
    """Target generation, whether it comes from disk, and why."""
    target = _target(stock)
    # Memory goes before a slightly newer disk, which takes seconds to read; disk goes before memory
    # at the start of a run that is resumed, and where memory has lost what was committed.
    if durable is not None and (
        target is None or (durable > target and (committed is None or target < committed))
    ):
        return durable, True, f"generation {durable} is read from the durable checkpoint"
    if target is not None:
        return target, False, f"generation {target} is the newest that every shard has"
    if committed is None:
        return None, False, "no generation was committed yet: all owners build afresh"
    raise _not_recoverable(stock)


def _transfers(
    stock: _Stock, *, target: int, owners: Mapping[Shard, Owner], holders: Mapping[Shard, Worker]
) -> tuple[Transfer, ...]:
    """One source for each part that an owner lacks; the least used giver, then the nearest."""
    load: Counter[Shard] = Counter()
    transfers: list[Transfer] = []
    for shard in sorted(stock.reports):
        if stock.has_own(shard, target):
            continue
        keepers = stock.held[shard][target]
        source = min(
            keepers, key=lambda keeper: (owners[keeper].worker != holders.get(shard), keeper)
        )
        transfers.append(_transfer(shard, owners[source], ()))
        for members, size in sorted(stock.sets.get(shard, {}).items()):
            source = min(stock.givers(shard, members, target), key=lambda giver: load[giver])
            load[source] += max(size, 1)
            transfers.append(_transfer(shard, owners[source], members))
    return tuple(transfers)


def _transfer(shard: Shard, source: Owner, members: tuple[Shard, ...]) -> Transfer:
    return Transfer(shard=shard, source=source.worker, address=source.address, shards=members)


def keeper(
    owner: Owner, *, spares: Sequence[Owner], previous: Worker | None = None
) -> Owner | None:
    """The spare that holds the only shard of a world of one; None where there is no spare.

    The previous one is kept, because a new one has no copy yet; else one in another failure domain
    than the owner's goes before one in the same.
    """
    return min(
        spares,
        key=lambda spare: (spare.worker != previous, spare.node == owner.node),
        default=None,
    )


def choose_holders(
    owners: Mapping[Shard, Owner], *, previous: Mapping[Shard, Worker]
) -> dict[Shard, Worker]:
    """Who keeps the copy of each shard, among the owners of the others; empty in a world of one.

    A previous holder that still owns another shard, in another failure domain where one is to be
    had, is kept. The others come from a ring over the failure domains (owners sorted by node,
    shifted by the size of the largest node), and, where the ring's one is taken or wrong, from the
    least loaded owner of another domain. Time: O(N log N).
    """
    if len(owners) < 2:
        return {}
    shard_of = {owner.worker: shard for shard, owner in owners.items()}
    node_of = {owner.worker: owner.node for owner in owners.values()}
    nodes = Counter(node_of.values())
    apart = len(nodes) > 1

    def right(shard: Shard, worker: Worker) -> bool:
        owner = owners[shard]
        return worker != owner.worker and not (apart and node_of[worker] == owner.node)

    chosen: dict[Shard, Worker] = {}
    load: Counter[Worker] = Counter()
    for shard, worker in previous.items():
        if worker in shard_of and shard in owners and right(shard, worker):
            chosen[shard] = worker
            load[worker] += 1
    ring = sorted(owners, key=lambda shard: (owners[shard].node, shard))
    shift = max(nodes.values()) if apart else 1
    left: list[Shard] = []
    for position, shard in enumerate(ring):
        if shard in chosen:
            continue
        worker = owners[ring[(position + shift) % len(ring)]].worker
        if right(shard, worker) and load[worker] == 0:
            chosen[shard] = worker
            load[worker] += 1
        else:
            left.append(shard)
    _repair(left, chosen=chosen, load=load, owners=owners, apart=apart)
    return dict(sorted(chosen.items()))


def _holders(
    owners: Mapping[Shard, Owner], *, previous: Mapping[Shard, Worker], spares: Sequence[Owner]
) -> tuple[dict[Shard, Worker], tuple[Owner, ...]]:
    """Holders, and those of them that own no shard (world of one)."""
    if len(owners) > 1:
        return choose_holders(owners, previous=previous), ()
    ((shard, owner),) = owners.items()
    kept = keeper(owner, spares=spares, previous=previous.get(shard))
    return ({}, ()) if kept is None else ({shard: kept.worker}, (kept,))


def _repair(
    left: Sequence[Shard],
    *,
    chosen: dict[Shard, Worker],
    load: Mapping[Worker, int],
    owners: Mapping[Shard, Owner],
    apart: bool,
) -> None:
    """Give each shard of ``left`` the least loaded right holder.

    Two levels of heaps (workers of a domain, domains by their best worker), so that passing over
    one's own domain costs one step however many workers it has. Without other domains each worker
    counts as a domain of its own.
    """
    heaps: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    for shard, owner in owners.items():
        heaps[owner.node if apart else owner.worker].append((load[owner.worker], shard))
    for heap in heaps.values():
        heapq.heapify(heap)
    best = [(heap[0], domain) for domain, heap in heaps.items()]
    heapq.heapify(best)
    for shard in left:
        own = owners[shard].node if apart else owners[shard].worker
        passed = heapq.heappop(best) if best[0][1] == own else None
        (count, taken), domain = heapq.heappop(best)
        chosen[shard] = owners[taken].worker
        heapq.heapreplace(heaps[domain], (count + 1, taken))
        heapq.heappush(best, (heaps[domain][0], domain))
        if passed is not None:
            heapq.heappush(best, passed)


def merge_bucket_orders(reports: Mapping[Shard, Report]) -> dict[str, tuple[int, ...]]:
    """The one order of each DDP module that has re-cut its buckets.

    Raises :class:`PlanariaError` where two shards differ: gloo would add up the wrong parameters
    without an error (design.md, decision 6).
    """
    merged: dict[str, tuple[int, ...]] = {}
    first: dict[str, Shard] = {}
    for shard in sorted(reports):
        for module, order in reports[shard].bucket_orders.items():
            if not order:
                continue
            known = merged.setdefault(module, order)
            first.setdefault(module, shard)
            if known != order:
                raise PlanariaError(
                    f"the DDP module {module!r} has its parameters in the bucket order "
                    f"{_brief(known)} on shard {first[module]} and {_brief(order)} on shard "
                    f"{shard}, so their gradients cannot be added up; build it with "
                    "find_unused_parameters=True, which keeps the first order"
                )
    return merged


def _brief(order: tuple[int, ...]) -> str:
    shown = ", ".join(str(index) for index in order[:NAMED])
    return f"({shown}, … {len(order)} in all)" if len(order) > NAMED else f"({shown})"


def _not_recoverable(stock: _Stock) -> NotRecoverable:
    """Name the shards that have nothing; where each has something, those without the newest."""
    gone = {
        shard: why
        for shard in sorted(stock.reports)
        if (why := _why_nothing(stock, shard)) is not None
    }
    if not gone and stock.generations:
        newest = stock.generations[0]
        gone = {
            shard: f"{why} of generation {newest}"
            for shard in sorted(stock.reports)
            if (why := stock.missing(shard, newest)) is not None
        }
    details = "; ".join(f"shard {shard}: {why}" for shard, why in list(gone.items())[:NAMED])
    return NotRecoverable(
        f"{name_shards(gone)} cannot be brought back: {details}; and there is no durable "
        "checkpoint; start the run again, with workers in more failure domains or with durable "
        "checkpoints"
    )


def _why_nothing(stock: _Stock, shard: Shard) -> str | None:
    why = "no living worker holds a complete copy"
    for generation in stock.generations:
        missing = stock.missing(shard, generation)
        if missing is None:
            return None
        if missing != "no living worker holds a complete copy":
            why = f"{missing} of generation {generation}"
    return why


def plan(
    epoch: int,
    *,
    owners: Mapping[Shard, Owner],
    reports: Mapping[Shard, Report],
    holders: Mapping[Shard, Worker],
    lost: tuple[Shard, ...] = (),
    committed: int | None = None,
    durable: int | None = None,
    spares: Sequence[Owner] = (),
) -> Plan:
    """How the run goes on in ``epoch``, given what every owner reports.

    ``holders`` are those of the epoch before, ``committed`` the newest generation committed for
    all shards (None: none ever was), ``durable`` the newest one on disk; ``spares`` matter in a
    world of one only, where one of them keeps the copy. The target is the newest generation that
    exists for every shard: as the owner's live state if clean, as its own capture, or as the sent
    part at a holder together with a capture by a living member of each of its replica sets. A newer
    one on disk goes before it where nothing was committed in memory or what was is gone.

    Raises :class:`NotRecoverable` where a shard is gone with all its copies, and
    :class:`PlanariaError` where DDP modules disagree about their buckets.
    """
    assert set(owners) == set(reports), "plan() needs one report of each owner"
    stock = _take_stock(reports)
    target, rollback, reason = _decide(stock, committed=committed, durable=durable)
    transfers: tuple[Transfer, ...] = ()
    if target is not None and not rollback:
        transfers = _transfers(stock, target=target, owners=owners, holders=holders)
    if rollback or target is None:
        committed = None
    elif committed is not None:
        committed = min(committed, target)
    attempted = max(report.attempted for report in reports.values())
    redone = max(0, attempted - (target or 0))
    moved = {transfer.shard for transfer in transfers}
    if moved:
        reason += f"; {name_shards(moved)} from {len({t.source for t in transfers})} peers"
    chosen, keepers = _holders(owners, previous=holders, spares=spares)
    return Plan(
        epoch=epoch,
        generation=target,
        committed=committed,
        owners=dict(sorted(owners.items())),
        holders=chosen,
        transfers=transfers,
        # Before the first step no DDP module has re-cut its buckets yet.
        bucket_orders=merge_bucket_orders(reports) if target else {},
        lost=lost,
        redone=redone,
        reason=f"{reason}; {redone} step{'s' * (redone != 1)} to do again",
        rollback=rollback,
        keepers=keepers,
        durable=durable,
    )
