"""Why buffers are freed by a rule that all shards share (design.md, decision 9): a pure model.

Each shard has an owner with two buffers; the owner of the next shard is its holder, with two slots
for it. Steps are collective: nobody ends step t+1 before everybody has ended step t. Captures and
transfers take time and spoil what was in their slot as soon as they begin. The coordinator learns of
each complete pair; announcements reach each owner later and one by one. Live state does not count
as a copy: a failure may come in the middle of an optimizer's step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCHEDULES = st.lists(st.integers(0, 30), max_size=80)


@dataclass
class Slots:
    """Two slots; ``writing`` is the generation on its way into the second of them."""

    complete: list[int] = field(default_factory=list)
    writing: int | None = None


@dataclass
class Model:
    """``shared``: a slot is freed by an announcement; else as soon as its own shard is done."""

    shards: int
    shared: bool
    passing_over: bool = False
    """A capture without a free buffer is skipped, each shard for itself, instead of waited for."""

    def __post_init__(self) -> None:
        everyone = range(self.shards)
        self.live = [0] * self.shards
        self.own = [Slots([0]) for _ in everyone]
        self.held = [Slots([0]) for _ in everyone]
        self.sent = [[0] for _ in everyone]
        """Generations of each shard of which both copies were complete."""
        self.heard = [0] * self.shards
        self.heard_by_holder = [0] * self.shards

    @property
    def committed(self) -> int:
        return max(set(self.sent[0]).intersection(*self.sent[1:]))

    def room(self, slots: Slots, shard: int, heard: int) -> bool:
        """Whether a write may begin, spoiling the oldest complete generation if need be."""
        if slots.writing is not None:
            return False
        if len(slots.complete) < 2:
            return True
        oldest = min(slots.complete)
        return oldest < (heard if self.shared else max(self.sent[shard]))

    def actions(self) -> list[tuple[str, int]]:
        """What can happen next."""
        found: list[tuple[str, int]] = []
        for shard in range(self.shards):
            own, held = self.own[shard], self.held[shard]
            done = self.live[shard] in own.complete or own.writing == self.live[shard]
            if self.live[shard] == min(self.live) and (done or self.passing_over):
                found.append(("step", shard))
            if not done and self.room(own, shard, self.heard[shard]):
                found.append(("capture", shard))
            if own.writing is not None:
                found.append(("captured", shard))
            waiting = [g for g in own.complete if g > max(self.sent[shard])]
            if waiting and self.room(held, shard, self.heard_by_holder[shard]):
                found.append(("send", shard))
            if held.writing is not None:
                found.append(("arrived", shard))
            if self.heard[shard] < self.committed:
                found.append(("hear", shard))
            if self.heard_by_holder[shard] < self.committed:
                found.append(("holder hears", shard))
        return found

    def act(self, action: tuple[str, int]) -> None:
        kind, shard = action
        own, held = self.own[shard], self.held[shard]
        if kind == "step":
            self.live[shard] += 1
        elif kind == "capture":
            self.begin(own, self.live[shard])
        elif kind == "captured":
            own.complete.append(own.writing)
            own.writing = None
        elif kind == "send":
            self.begin(held, min(g for g in own.complete if g > max(self.sent[shard])))
        elif kind == "arrived":
            held.complete.append(held.writing)
            self.sent[shard].append(held.writing)
            held.writing = None
        elif kind == "hear":
            self.heard[shard] = self.committed
        elif kind == "holder hears":
            self.heard_by_holder[shard] = self.committed

    @staticmethod
    def begin(slots: Slots, generation: int) -> None:
        if len(slots.complete) == 2:
            slots.complete.remove(min(slots.complete))
        slots.writing = generation

    def unrecoverable(self) -> int | None:
        """A shard whose owner must not be lost now; None where any one may."""
        for lost in range(self.shards):
            copies = [
                set((self.held if shard == lost else self.own)[shard].complete)
                for shard in range(self.shards)
            ]
            if not set.intersection(*copies):
                return lost
        return None


def play(schedule, *, shared, shards=3):
    """The shard that one failure makes unrecoverable, at some moment of the schedule, or None."""
    model = Model(shards, shared=shared)
    for choice in schedule:
        actions = model.actions()
        if not actions:
            break
        model.act(actions[choice % len(actions)])
        shard = model.unrecoverable()
        if shard is not None:
            return shard
    return None


@settings(max_examples=2_000, deadline=None)
@given(schedule=SCHEDULES)
def test_with_the_shared_rule_every_single_failure_is_recoverable(schedule):
    assert play(schedule, shared=True) is None


def test_with_the_local_rule_hypothesis_finds_a_failure_that_is_not():
    schedule = hypothesis.find(
        SCHEDULES,
        lambda schedule: play(schedule, shared=False) is not None,
        settings=settings(max_examples=20_000, deadline=None, database=None),
    )
    assert play(schedule, shared=False) is not None
    assert play(schedule, shared=True) is None


def test_long_schedules_break_the_local_rule_nearly_always_and_the_shared_one_never():
    rng = random.Random(9)
    broken = {True: 0, False: 0}
    for _ in range(60):
        schedule = [rng.randrange(10**6) for _ in range(400)]
        for shared in broken:
            broken[shared] += play(schedule, shared=shared) is not None
    assert broken[True] == 0
    assert broken[False] > 50


def test_generations_go_on_being_committed_where_captures_are_waited_for():
    rng = random.Random(4)
    for _ in range(10):
        model = Model(3, shared=True)
        for _ in range(1_000):
            model.act(rng.choice(model.actions()))
        assert model.committed > 20


def test_shards_that_skip_on_their_own_can_stop_all_commits():
    """One has a generation that the other skipped: neither will ever have a pair of the next."""
    stuck = Model(2, shared=True, passing_over=True)
    for action in [
        *[(kind, shard) for kind in ("step", "capture", "captured", "send") for shard in (0, 1)],
        *[("arrived", 0), ("arrived", 1), ("hear", 0), ("holder hears", 0)],
        # Shard 0 has heard and captures generation 2; shard 1 has not and is one step on.
        *[("step", 0), ("step", 1), ("capture", 0), ("captured", 0), ("send", 0), ("arrived", 0)],
        *[("step", 0), ("step", 1), ("hear", 1), ("holder hears", 1)],
        *[("capture", 1), ("captured", 1), ("send", 1), ("arrived", 1)],
    ]:
        assert action in stuck.actions(), action
        stuck.act(action)
    for _ in range(200):
        for action in stuck.actions():
            stuck.act(action)
            break
        stuck.act(("step", stuck.live.index(min(stuck.live))))
    assert stuck.committed == 1
    assert {name for name, _ in stuck.actions()} == {"step"}


@pytest.mark.parametrize("shards", [2, 5])
def test_the_shared_rule_holds_for_other_worlds(shards):
    rng = random.Random(shards)
    for _ in range(20):
        schedule = [rng.randrange(10**6) for _ in range(400)]
        assert play(schedule, shared=True, shards=shards) is None
