"""The membership's rules under schedules that hypothesis makes up, and a referee that sees breaches.

A schedule is a string of bytes; a simulated cluster takes each of its choices from it (what happens
next, to whom, whether it is a loss, a hang, a regrouping or a stray message), so that hypothesis can
shrink a failing one. ``membership.referee.Referee`` checks every rule after every event.
"""

from __future__ import annotations

import random
from dataclasses import replace as changed

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from planaria.runtime.membership import simulate
from planaria.runtime.membership.cluster import Cluster, ClusterConfig
from planaria.runtime.membership.events import (
    Attached,
    Broadcast,
    CommittedBy,
    Lost,
    Reported,
    Send,
)
from planaria.runtime.membership.referee import Referee
from planaria.runtime.membership.rules import step
from planaria.runtime.membership.state import MembershipConfig, Transition, dump, load
from planaria.runtime.messages import AllCommitted, Assign, Plan


class ExhaustedError(Exception):
    """The schedule has no more bytes."""


class Schedule:
    """Stands in for ``random.Random``; all zeros choose the first of everything and no faults."""

    def __init__(self, choices: bytes) -> None:
        self.left = iter(choices)

    def byte(self) -> int:
        try:
            return next(self.left)
        except StopIteration:
            raise ExhaustedError from None

    def random(self) -> float:
        return 1 - self.byte() / 256

    def randrange(self, stop: int) -> int:
        return self.byte() % stop

    def choice(self, options):
        return options[self.byte() % len(options)]


def feed(cluster, referee, *, until=lambda _: False, events=10_000):
    """Let things happen until the schedule or the run has ended; how many events there were."""
    fed = 0
    while fed < events and cluster.state.phase != "ended" and not until(cluster):
        try:
            event = cluster.next_event()
        except ExhaustedError:
            break
        if event is None:
            continue
        transition = step(cluster.state, event)
        referee.check(cluster.state, event, transition)
        cluster.obey(transition.state, transition.actions)
        fed += 1
    return fed


CONFIGS = st.builds(
    lambda shards, spares, per_node, refill, on_no_spare: ClusterConfig(
        shards=shards,
        spares=spares,
        per_node=per_node,
        replicas=2 if shards % 2 == 0 else 1,
        until=6,
        fault=0.04,
        noise=0.05,
        membership=MembershipConfig(
            world=shards, refill=refill, on_no_spare=on_no_spare, no_spare=60.0
        ),
    ),
    shards=st.sampled_from([3, 1, 2, 4]),
    spares=st.integers(0, 3),
    per_node=st.sampled_from([1, 2, 3]),
    refill=st.booleans(),
    on_no_spare=st.sampled_from(["wait", "end"]),
)
RULES = settings(max_examples=2_000, deadline=None)


@RULES
@given(config=CONFIGS, choices=st.binary(max_size=400))
def test_no_schedule_from_the_start_breaks_a_rule(config, choices):
    cluster, referee = Cluster(config, rng=Schedule(choices)), Referee()
    feed(cluster, referee)
    if cluster.state.phase == "ended":
        referee.how_it_ended(cluster.state)
    assert load(dump(cluster.state)) == cluster.state


@RULES
@given(config=CONFIGS, choices=st.binary(max_size=200), seed=st.integers(0, 3))
def test_no_schedule_in_training_breaks_a_rule_and_the_run_then_comes_to_its_end(
    config, choices, seed
):
    """Undisturbed again, every run finishes, or has ended for a reason that a rule allows."""
    rng = random.Random(seed)
    cluster, referee = Cluster(changed(config, fault=0.0, noise=0.0), rng=rng), Referee()
    feed(cluster, referee, until=lambda c: c.state.phase == "training" and c.state.committed == 2)
    assert cluster.state.protected or config.shards == 1
    cluster.config, cluster.rng = config, Schedule(choices)
    feed(cluster, referee)
    cluster.config, cluster.rng = changed(config, fault=0.0, noise=0.0), rng
    feed(cluster, referee, events=2_000)
    assert cluster.state.phase == "ended"
    ends = {"finished", "cannot be brought back", "times in step", "no spare", "no owner"}
    assert referee.how_it_ended(cluster.state) in ends


@settings(max_examples=400, deadline=None)
@given(victim=st.integers(0, 9), moment=st.integers(0, 60), seed=st.integers(0, 10**6))
def test_after_any_single_loss_a_plan_with_a_generation_exists(victim, moment, seed):
    config = ClusterConfig(shards=4, spares=1, replicas=2, until=10**6, fault=0.0, noise=0.0)
    cluster, referee = Cluster(config, rng=random.Random(seed)), Referee()
    feed(cluster, referee, until=lambda c: c.state.protected)
    feed(cluster, referee, events=moment)
    worker = cluster.names[victim % len(cluster.names)]
    shard = cluster.state.members[worker].shard
    before = cluster.state
    transition = step(before, Lost(worker, reason="killed"))
    referee.check(before, Lost(worker, reason="killed"), transition)
    cluster.obey(transition.state, transition.actions)
    if shard is None:
        assert transition.state.epoch == before.epoch
        assert transition.state.phase == "training"
        return
    assert transition.state.epoch == before.epoch + 1
    feed(cluster, referee, until=lambda c: c.state.phase == "training")
    plan = cluster.state.plan
    assert plan.generation >= before.committed
    assert plan.redone <= 2
    assert plan.lost == (shard,)


def broken_by(breach):
    """The real step with something done to its transitions."""

    def wrapped(state, event):
        return breach(state, event, step(state, event))

    return wrapped


def epochs_fall(before, event, transition):
    if transition.state.epoch > 3:
        return Transition(replace(transition.state, epoch=1), transition.actions, "")
    return transition


def two_spares(before, event, transition):
    called = [a for a in transition.actions if isinstance(getattr(a, "message", None), Assign)]
    others = list(transition.state.spares)
    again = [replace(send, worker=other) for send in called for other in others[:1]]
    return Transition(transition.state, (*transition.actions, *again), transition.reason)


def too_early(before, event, transition):
    if isinstance(event, CommittedBy) and transition.state is not before:
        message = AllCommitted(epoch=before.epoch, generation=event.message.generation)
        return Transition(transition.state, (Broadcast(message=message),), transition.reason)
    return transition


def still_there(before, event, transition):
    if isinstance(event, Lost) and event.worker in before.members:
        members = transition.state.members.set(event.worker, before.members[event.worker])
        return Transition(replace(transition.state, members=members), (), "as if nothing")
    return transition


def own_holder(before, event, transition):
    state = transition.state
    if state.plan is not before.plan and state.plan is not None:
        state = replace(state, holders=state.holders.set(0, state.owners[0]))
    return Transition(state, transition.actions, transition.reason)


def changed_plan(**changes):
    def breach(before, event, transition):
        actions = tuple(
            replace(a, message=replace(a.message, **changes))
            if isinstance(a, Broadcast)
            and isinstance(a.message, Plan)
            and a.message.lost
            and before.phase == "recovering"
            and before.committed
            else a
            for a in transition.actions
        )
        return Transition(transition.state, actions, transition.reason)

    return breach


def same_domain(before, event, transition):
    actions = []
    for action in transition.actions:
        if isinstance(action, Broadcast) and isinstance(action.message, Plan):
            nodes = {s: o.node for s, o in action.message.owners.items()}
            twins = [s for s in nodes if s and nodes[s] == nodes[0]]
            if twins and len(set(nodes.values())) > 1:
                holders = {**action.message.holders, 0: action.message.owners[twins[0]].worker}
                action = replace(action, message=replace(action.message, holders=holders))
        actions.append(action)
    return Transition(transition.state, tuple(actions), transition.reason)


def stranger_counts(before, event, transition):
    if event.__class__ is Reported and event.worker not in before.members:
        return Transition(replace(before, step=99), (), "let it in")
    return transition


def fenced_comes_back(before, event, transition):
    if isinstance(event, Attached) and before.fenced:
        worker = next(iter(before.fenced))
        member = replace(transition.state.members[event.worker], worker=worker, ready=True)
        spares = transition.state.spares.set(worker, 0)
        members = transition.state.members.set(worker, member)
        state = replace(transition.state, spares=spares, members=members)
        return Transition(state, (), "back")
    return transition


def tells_the_fenced(before, event, transition):
    if before.fenced and before.phase == "training":
        message = AllCommitted(epoch=before.epoch, generation=0)
        send = Send(worker=next(iter(before.fenced)), message=message)
        return Transition(transition.state, (*transition.actions, send), transition.reason)
    return transition


def forgets_a_shard(before, event, transition):
    if transition.state.owners is not before.owners:
        owners = Map({s: w for s, w in transition.state.owners.items() if s})
        state = replace(transition.state, owners=owners)
        return Transition(state, transition.actions, transition.reason)
    return transition


@pytest.mark.parametrize(
    ("breach", "words"),
    [
        (epochs_fall, "epoch fell from"),
        (two_spares, "two spares for"),
        (too_early, "is announced, 3 shards lack it"),
        (still_there, "is still a member"),
        (own_holder, "shard 0 is held by its own owner"),
        (same_domain, "shard 0 and its copy share a domain"),
        (changed_plan(generation=None), "one loss and nothing is left"),
        (changed_plan(rollback=True), "one loss and the copies in memory did not do"),
        (changed_plan(redone=3), "3 steps are done again"),
        (changed_plan(epoch=0), "a plan of another epoch"),
        (stranger_counts, "of a stranger changed the state"),
        (fenced_comes_back, "a fenced worker is a spare"),
        (tells_the_fenced, "is told AllCommitted"),
        (forgets_a_shard, "a shard is missing"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_referee_sees_each_rule_broken(breach, words, monkeypatch):
    monkeypatch.setattr(simulate, "step", broken_by(breach))
    config = ClusterConfig(shards=4, spares=3, per_node=2, replicas=2, fault=0.01, noise=0.05)
    with pytest.raises(AssertionError) as error:
        simulate.run(shards=4, events=6_000, seed=5, config=config)
    assert words in str(error.value)
