"""What membership makes of words that were lost with a coordinator, and of time that ran out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from tests.support.membership_run import training

from planaria.runtime.membership.events import Attached, Lost, Regroup
from planaria.runtime.membership.state import dump, load
from planaria.runtime.messages import AllCommitted, Assign, Break


def back(worker):
    return Attached(worker, node="n", address="a", config="c1", version="v1")


def test_a_newer_commit_counts_for_the_older_generations_too():
    """A coordinator that died while it told of 5 hears only the newest of each worker again."""
    run = training().commit(6, 0).commit(5, 1)
    assert (run.state.committed, dict(run.state.ledger)) == (4, {0: 6, 1: 5, 2: 4})
    run.commit(5, 2)
    assert run.told(AllCommitted)[1] == AllCommitted(epoch=1, generation=5)
    run.commit(6, 1)
    assert run.reason == "generation 6 is committed for shard 1; 1 are missing"
    # One shard may be two behind: both are announced as it comes up.
    run.commit(7, 0, 1).commit(7, 2)
    assert (run.state.committed, run.state.announced) == (7, 7)
    run.commit(6, 2)
    assert (run.actions, run.reason) == ((), "generation 6 of shard 2 is known")


@given(
    st.lists(st.tuples(st.integers(5, 12), st.sets(st.integers(5, 12))), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_what_each_shard_committed_last_is_all_that_counts(shards, order: random.Random):
    """Of what was said, anything but each shard's newest may be lost, and come in any order."""
    words = [(shard, newest) for shard, (newest, _) in enumerate(shards)]
    words += [
        (shard, generation)
        for shard, (newest, heard) in enumerate(shards)
        for generation in heard
        if generation < newest
    ]
    order.shuffle(words)
    run = training()
    for shard, generation in words:
        run.commit(generation, shard)
    assert run.state.committed == min(newest for newest, _ in shards)
    # Said again to the coordinator that takes over, none of it changes anything.
    run.state = load(dump(run.state))
    before = run.state
    for shard, generation in words:
        run.commit(generation, shard)
        assert run.actions == ()
    assert run.state == before


def test_an_owner_that_comes_back_hears_of_the_epoch_that_it_missed():
    run = training(spares=()).feed(Lost("w1", reason="x"))
    assert run.state.phase == "waiting"
    run.feed(back("w0"))
    told = Break(epoch=2, reason="epoch 2 began while w0 had no stream", lost=(1,))
    assert run.sent(Break) == [("w0", told)]
    run.attach("s0")
    assert run.state.phase == "recovering"
    run.feed(back("w2"))
    assert [worker for worker, _ in run.sent(Break)] == ["w2"]
    # Who is new there is told what it is to own; a spare, nothing.
    run.feed(back("s0"))
    assert run.sent(Assign) == [("s0", Assign(epoch=2, shard=1, world=3, fresh=False))]
    assert run.sent(Break) == []
    assert training().feed(back("w0")).actions == ()


def test_owners_that_regroup_too_often_are_told_why():
    run = training(max_swaps_per_step=2)
    for count in range(3):
        run.feed(Regroup(epoch=run.state.epoch, reason=f"reason {count}"))
    assert (run.state.phase, run.state.exit_code) == ("ended", 1)
    assert run.state.end == (
        "the owners had to regroup 3 times in step 1 though no worker was lost, the last time for "
        "this: reason 2; look at the workers' logs and at the network between their nodes, or give "
        "all of it more time with --timeout"
    )
    assert load(dump(run.state)) == run.state
