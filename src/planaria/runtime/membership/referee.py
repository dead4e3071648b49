"""The rules that no transition of the membership may break, checked from outside.

Used by :mod:`.simulate` and by the property tests. The referee keeps books of its own (who was
assigned what, which shard has committed what) and does not trust the counters of the state.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from planaria.runtime.membership.events import (
    AnyEvent,
    Broadcast,
    CommittedBy,
    FromMember,
    Hung,
    Lost,
    Reported,
    Send,
)
from planaria.runtime.membership.rules import recipients
from planaria.runtime.membership.state import State, Transition
from planaria.runtime.messages import (
    AllCommitted,
    Assign,
    Fence,
    Message,
    Plan,
    Released,
    Report,
    Shard,
    Worker,
)


@dataclass
class Referee:
    """Checks one run, transition by transition. Raises ``AssertionError`` with what is broken."""

    max_redo: int = 2
    epochs: int = 0
    swaps: int = 0
    superseded: int = 0
    generations: int = 0
    most_redone: int = 0
    assigned: dict[tuple[int, Shard], Worker] = field(default_factory=dict)
    gone: set[Worker] = field(default_factory=set)
    reports: dict[Shard, Report] = field(default_factory=dict)
    copies: dict[Shard, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Per shard: the generations of this epoch whose two copies were complete."""
    told: int | None = None
    """Newest generation that was announced as committed for all."""
    exposed: int = 0
    """Losses since every shard had two copies."""

    def check(self, before: State, event: AnyEvent, transition: Transition) -> None:
        """Every rule that this transition could break."""
        after = transition.state
        assert after.epoch >= before.epoch, f"epoch fell from {before.epoch} to {after.epoch}"
        assert transition.reason, f"{event} has no reason"
        if isinstance(event, FromMember) and event.worker not in before.members:
            self._check_stranger(before, event, transition)
        if isinstance(event, Lost | Hung) and event.worker in before.members:
            self._lose(before, event.worker, after)
        if after.epoch != before.epoch:
            self.epochs += 1
            self.reports.clear()
            self.copies.clear()
        self._keep_books(before, event)
        if after.owners is not before.owners or after.holders is not before.holders:
            self.check_owners(after)
        for action in transition.actions:
            if isinstance(action, Send):
                self._check_addressee(after, action)
                self._check_message(after, action.message, action.worker)
            elif isinstance(action, Broadcast):
                self._check_message(after, action.message, None)
                if not isinstance(action.message, AllCommitted):
                    wrong = self.gone.intersection(recipients(after, action))
                    assert not wrong, f"fenced {wrong} would hear {action.message}"

    def _check_stranger(self, before: State, event: FromMember, transition: Transition) -> None:
        if transition.state is before:
            (action,) = transition.actions
            assert isinstance(action, Send), f"{event} of a stranger led to {action}"
            assert action.worker == event.worker, f"{event} fenced {action.worker}"
            assert isinstance(action.message, Fence), f"{event} was answered {action.message}"
            return
        assert event.worker in transition.state.members, f"{event} of a stranger changed the state"
        assert event.worker not in self.gone, f"fenced {event.worker} is a member again"

    def _lose(self, before: State, worker: Worker, after: State) -> None:
        self.gone.add(worker)
        assert worker not in after.members, f"lost {worker} is still a member"
        assert worker in after.fenced or after.phase == "ended", f"lost {worker} is not fenced"
        if before.members[worker].shard is not None:
            if before.phase in ("recovering", "waiting"):
                self.superseded += 1
            self.exposed += 1
        elif worker in before.holders.values():
            self.exposed += 1

    def _keep_books(self, before: State, event: AnyEvent) -> None:
        if isinstance(event, Reported) and self._counts(before, event.worker, event.message):
            self.reports[event.message.shard] = event.message
        elif isinstance(event, CommittedBy) and self._counts(before, event.worker, event.message):
            self.copies[event.message.shard].add(event.message.generation)

    @staticmethod
    def _counts(before: State, worker: Worker, message: Message) -> bool:
        epoch: int = getattr(message, "epoch")  # noqa: B009 - both kinds have it
        shard: Shard = getattr(message, "shard")  # noqa: B009
        return epoch == before.epoch and before.owners.get(shard) == worker

    def check_owners(self, state: State) -> None:
        """One owner per shard and one shard per owner; holders are someone else, elsewhere."""
        owners = dict(state.owners.items())
        assert len(set(owners.values())) == len(owners), "one worker owns two shards"
        assert not self.gone & set(owners.values()), "a fenced worker owns a shard"
        assert not self.gone & set(state.holders.values()), "a fenced worker is a holder"
        assert not self.gone & set(state.spares), "a fenced worker is a spare"
        for shard, worker in owners.items():
            assert state.members[worker].shard == shard, f"{worker} does not know shard {shard}"
            assert worker not in state.spares, f"owner {worker} is a spare, too"
        if state.phase not in ("forming", "ended"):
            assert {*owners, *state.vacant} == set(range(state.config.world)), "a shard is missing"
            assert not set(owners) & set(state.vacant), "a shard is vacant and owned"
        for shard, holder in state.holders.items():
            assert owners.get(shard) != holder, f"shard {shard} is held by its own owner"

    def _check_addressee(self, after: State, action: Send) -> None:
        if isinstance(action.message, Fence):
            assert action.worker not in after.members, f"member {action.worker} is fenced"
        else:
            assert action.worker in after.members, f"{action.worker} is told {action.message}"
            assert action.worker not in self.gone, f"fenced {action.worker} is told something"

    def _check_message(self, after: State, message: Message, worker: Worker | None) -> None:
        if isinstance(message, Assign):
            assert worker is not None, "Assign goes to one worker"
            key = (message.epoch, message.shard)
            assert self.assigned.get(key, worker) == worker, f"two spares for {key}"
            self.assigned[key] = worker
            assert after.owners[message.shard] == worker, f"{worker} was given another's shard"
        elif isinstance(message, Plan) and worker is None:
            self._check_plan(after, message)
        elif isinstance(message, AllCommitted):
            self._check_announcement(after, message)
        elif isinstance(message, Released):
            self.swaps += bool(self.assigned) and any(
                epoch == after.epoch for epoch, _ in self.assigned
            )
            self.assigned.clear()

    def _check_plan(self, after: State, plan: Plan) -> None:
        assert plan.epoch == after.epoch, "a plan of another epoch"
        assert {shard: owner.worker for shard, owner in plan.owners.items()} == dict(
            after.owners.items()
        ), "the plan has other owners"
        nodes = {owner.worker: owner.node for owner in (*plan.owners.values(), *plan.keepers)}
        domains = {owner.node for owner in plan.owners.values()}
        for shard, holder in plan.holders.items():
            owner = plan.owners[shard]
            assert holder != owner.worker, f"shard {shard} would hold itself"
            if len(domains) > 1:
                assert nodes[holder] != owner.node, f"shard {shard} and its copy share a domain"
        if len(plan.owners) > 1:
            assert plan.holders.keys() == plan.owners.keys(), "a shard has no holder"
        for transfer in plan.transfers:
            assert transfer.source not in self.gone, f"fenced {transfer.source} is a source"
            assert transfer.source in after.members, f"{transfer.source} is no member"
        if self.exposed == 1 and self.told is not None:
            assert plan.generation is not None, "one loss and nothing is left"
            assert not plan.rollback, "one loss and the copies in memory did not do"
            assert plan.generation >= self.told, "a committed generation is gone"
            assert plan.redone <= self.max_redo, f"{plan.redone} steps are done again"
            self.most_redone = max(self.most_redone, plan.redone)
        if plan.generation is None or plan.rollback:
            self.told = None
        else:
            self.told = None if self.told is None else min(self.told, plan.generation)
            self._count_old_copies(plan, plan.generation)

    def _count_old_copies(self, plan: Plan, generation: int) -> None:
        shard_of = {owner.worker: shard for shard, owner in plan.owners.items()}
        for shard, holder in plan.holders.items():
            keeper = self.reports.get(shard_of.get(holder, -1))
            own = self.reports[shard]
            held = () if keeper is None else keeper.held.get(shard, ())
            if generation in own.captured and generation in held:
                self.copies[shard].add(generation)

    def _check_announcement(self, after: State, message: AllCommitted) -> None:
        assert message.epoch == after.epoch, "an announcement of another epoch"
        generation = message.generation
        assert self.told is None or generation >= self.told, (
            f"generation {generation} is announced after {self.told}"
        )
        # Captures go to the holder in order: who has a newer one complete has had this one, too.
        has = sum(max(made) >= generation for made in self.copies.values())
        missing = after.config.world - has
        assert missing == 0, f"generation {generation} is announced, {missing} shards lack it"
        for made in self.copies.values():
            made.difference_update([g for g in made if g < generation and g != max(made)])
        self.generations += 1
        self.told = generation
        # A world of one commits alone while no spare is there to keep a copy.
        self.exposed = 0 if after.holders else 1
        assert after.protected == bool(after.holders), "the state is wrong about its protection"

    def how_it_ended(self, state: State) -> str:
        """The end of a run in a few words; a run must not end over a single loss."""
        for words in (
            "finished",
            "cannot be brought back",
            "times in step",
            "no spare",
            "no owner",
        ):
            if words in state.end:
                if words == "cannot be brought back":
                    assert self.exposed > 1, f"one loss has ended the run: {state.end}"
                return words
        return "otherwise"
