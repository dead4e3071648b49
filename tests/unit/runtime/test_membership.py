"""What each event does to a run, case by case: state, actions and words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.support.membership_run import Run, recover, training

from planaria.errors import ConfigError, RunError
from planaria.runtime.membership.events import (
    Attached,
    BecameReady,
    CommittedBy,
    Discard,
    EndRun,
    FailedBy,
    Hung,
    JoinlessSeen,
    Kill,
    Left,
    Lost,
    Publish,
    Published,
    Regroup,
    Reported,
    RestartAll,
    RestoredBy,
    SpareTimedOut,
    StartTimer,
    StopRequested,
    WantSpare,
)
from planaria.runtime.membership.rules import recipients, refusal
from planaria.runtime.membership.state import MembershipConfig, dump, load
from planaria.runtime.messages import (
    AllCommitted,
    Assign,
    Break,
    Committed,
    Failed,
    Fence,
    Hold,
    Plan,
    Released,
    Report,
    Restored,
    Stop,
)


def test_a_run_forms_when_enough_workers_are_ready():
    run = Run(2).attach("w0")
    assert (run.state.phase, run.state.epoch) == ("forming", 0)
    assert run.reason == "worker w0 is ready; 1 more are needed"
    run.attach("w1")
    assert (run.state.phase, run.state.epoch) == ("building", 1)
    assert run.sent(Assign) == [
        ("w0", Assign(epoch=1, shard=0, world=2, fresh=True)),
        ("w1", Assign(epoch=1, shard=1, world=2, fresh=True)),
    ]
    assert run.reason == "2 workers are ready: epoch 1 begins and they build together"
    run.attach("w2")
    assert dict(run.state.spares) == {"w2": 2}


def test_promised_ranks_are_kept():
    run = Run(3)
    for name, rank in [("a", 2), ("b", None), ("c", 0)]:
        run.feed(Attached(name, node="n", address="x", rank=rank)).feed(BecameReady(name))
    assert dict(run.state.owners) == {0: "c", 1: "b", 2: "a"}


def test_the_plan_goes_out_when_all_have_reported_and_training_begins_when_all_have_restored():
    run = Run(2).attach("w0", "w1", "s0").report(0)
    assert run.reason == "shard 0 has reported; 1 have not"
    run.report(1)
    receivers, plan = run.told(Plan)
    assert receivers == ["w0", "w1"]
    assert (plan.epoch, plan.generation, plan.holders) == (1, 0, {0: "w1", 1: "w0"})
    run.restore(0)
    assert run.state.phase == "building"
    run.restore(1)
    assert run.state.phase == "training"
    assert run.told(Released) == (["w0", "w1"], Released(epoch=1))


def test_a_generation_is_announced_once_every_shard_has_committed_it():
    run = training()
    assert run.told(AllCommitted) == (["w0", "w1", "w2"], AllCommitted(epoch=1, generation=4))
    assert (run.state.committed, run.state.protected) == (4, True)
    run.commit(5, 0, 1).commit(5, 1)
    assert (run.actions, run.reason) == ((), "generation 5 of shard 1 is known")
    run.commit(6, 0).commit(5, 2)
    assert run.state.committed == 5
    run.commit(5, 0)
    assert run.actions == ()
    run.commit(6, 1, 2)
    assert run.state.committed == 6


@pytest.mark.parametrize("event", [Lost, Hung])
def test_a_lost_owner_is_fenced_and_a_spare_steps_in(event):
    run = training().feed(event("w1", reason="its stream closed"))
    assert (run.state.phase, run.state.epoch, run.state.owners[1]) == ("recovering", 2, "s0")
    first = run.actions[0]
    assert first.message == Break(epoch=2, reason="its stream closed", lost=(1,))
    assert sorted(recipients(run.state, first)) == ["w0", "w2"]
    assert run.sent(Assign) == [("s0", Assign(epoch=2, shard=1, world=3, fresh=False))]
    assert run.sent(Fence) == [("w1", Fence(reason="its stream closed"))]
    assert run.did(Kill) == [Kill(worker="w1", reason="its stream closed")]
    assert not run.did(WantSpare)  # a start would take processor time from the recovery
    assert run.reason == (
        "shard 1 lost its owner w1 (its stream closed): epoch 2 begins, s0 steps in"
    )
    recover(run)
    plan = run.told(Plan)[1]
    assert (plan.generation, plan.redone, plan.lost, plan.committed) == (5, 1, (1,), 4)
    run.restore()
    assert (run.state.phase, run.state.lost, run.state.protected) == ("training", (), False)
    assert run.did(WantSpare) == [WantSpare(count=1)]


def test_only_new_copies_are_needed_before_the_run_is_protected_again():
    """w0 holds the copy of shard 2 and w2 that of 1: shard 2 has both its copies of 5 already."""
    run = training().feed(Lost("w1", reason="x"))
    recover(run).restore()
    assert dict(run.state.ledger) == {2: 5}
    run.commit(5, 0, 1)
    assert run.told(AllCommitted)[1] == AllCommitted(epoch=2, generation=5)
    assert run.state.protected


def test_a_fenced_worker_is_only_ever_fenced_again():
    run = training().feed(Lost("w1", reason="silent"))
    before = run.state
    report = Report(epoch=2, shard=1, live=5, clean=True)
    for event in [
        Reported("w1", message=report),
        BecameReady("w1"),
        Lost("w1", reason="again"),
        CommittedBy("w1", message=Committed(epoch=2, shard=1, generation=5)),
    ]:
        run.feed(event)
        assert run.state is before
        assert run.sent(Fence) == [("w1", Fence(reason="worker w1 was declared lost: silent"))]
        assert len(run.actions) == 1
    run.feed(Attached("w1", node="n", address="x", config="c1", version="v1"))
    assert run.state is before
    assert run.reason == "worker w1 was declared lost (silent); start one with a new name"
    run.feed(BecameReady("stranger"))
    assert run.state is before
    assert run.reason == "worker stranger is not a member of this run"


def test_a_second_loss_supersedes_the_recovery_and_old_reports_do_not_count():
    run = training().feed(Lost("w1", reason="x")).report(0, live=5, captured=(5,))
    run.feed(Lost("w2", reason="y"))
    assert (run.state.epoch, run.state.lost) == (3, (1, 2))
    assert dict(run.state.owners) == {0: "w0", 1: "s0", 2: "s1"}
    assert run.told(Break)[0] == ["s0", "w0"]
    assert not run.state.reports
    run.feed(Reported("w0", message=Report(epoch=2, shard=0, live=5, clean=True)))
    assert run.reason == "worker w0 speaks of epoch 2, which is not 3"
    assert not run.state.reports


def test_who_was_called_while_away_is_called_again():
    """Its coordinator has just been started again: the first word went to no stream."""
    run = training().feed(Lost("w1", reason="x"))
    assert run.state.owners[1] == "s0"
    run.feed(Attached("s0", node="n9", address="a", config="c1", version="v1"))
    assert run.sent(Assign) == [("s0", Assign(epoch=2, shard=1, world=3, fresh=False))]
    run.feed(Attached("w0", node="n0", address="a", config="c1", version="v1"))
    assert not run.sent(Assign)  # a survivor has its shard


def test_a_founder_that_was_away_when_the_run_formed_is_called_again():
    run = Run(2).attach("w0").attach("w1")
    run.feed(Attached("w1", node="n1", address="a", config="c1", version="v1"))
    assert run.sent(Assign) == [("w1", Assign(epoch=1, shard=1, world=2, fresh=True))]


def test_a_spare_that_was_promoted_may_be_lost_too():
    run = training().feed(Lost("w1", reason="x")).feed(Lost("s0", reason="y"))
    assert (run.state.epoch, run.state.owners[1], run.state.lost) == (3, "s1", (1,))
    recover(run).restore()
    assert run.state.phase == "training"
    assert run.did(WantSpare) == [WantSpare(count=2)]


def test_spares_that_are_owed_are_called_at_once_where_nobody_is_left():
    run = training(spares=("s0",)).feed(Lost("w1", reason="x"))
    assert not run.did(WantSpare)
    run.feed(Lost("w2", reason="y"))
    assert run.state.phase == "waiting"
    assert run.did(WantSpare) == [WantSpare(count=1), WantSpare(count=1)]


def test_a_lost_spare_changes_no_epoch():
    run = training().feed(Lost("s0", reason="x"))
    assert (run.state.phase, run.state.epoch, dict(run.state.spares)) == ("training", 1, {"s1": 4})
    assert run.did(WantSpare) == [WantSpare(count=1)]
    assert run.reason == "a spare, s0, was lost: x"


def test_without_a_spare_the_run_waits_and_then_ends():
    run = training(spares=()).feed(Lost("w1", reason="x"))
    assert (run.state.phase, run.state.vacant) == ("waiting", (1,))
    assert run.did(StartTimer) == [StartTimer(epoch=2, seconds=60.0)]
    assert run.reason == (
        "shard 1 lost its owner w1 (x): epoch 2 begins and waits for a spare, at most 60 s"
    )
    run.feed(SpareTimedOut(1))
    assert run.state.phase == "waiting"
    run.feed(SpareTimedOut(2))
    assert run.did(EndRun) == [
        EndRun(
            reason="shard 1 had no owner for 60 s and no spare came; add one with 'planaria join', "
            "or start the run with more --spares",
            exit_code=1,
        )
    ]
    assert run.told(Stop)[0] == ["w0", "w2"]


def test_a_spare_that_comes_in_time_steps_in_in_the_same_epoch():
    run = training(spares=()).feed(Lost("w1", reason="x")).report(0, live=5, captured=(5,))
    run.attach("late")
    assert run.sent(Assign) == [("late", Assign(epoch=2, shard=1, world=3, fresh=False))]
    assert (run.state.phase, run.state.epoch) == ("recovering", 2)
    assert run.reason == "worker late steps in for shard 1"
    assert 0 in run.state.reports
    run.feed(SpareTimedOut(2))
    assert (run.state.phase, run.reason) == ("recovering", "nobody waits for a spare")


def test_a_run_that_shall_not_wait_ends_unless_a_worker_is_starting():
    run = training(spares=(), on_no_spare="end").feed(Lost("w1", reason="x"))
    assert run.state.phase == "ended"
    assert run.did(EndRun)[0].reason == (
        "shard 1 lost the owner and no spare is left; start the run with more --spares, or let it "
        "wait for one with --on-no-spare wait"
    )
    run = training(spares=(), on_no_spare="end").attach("warming", ready=False)
    run.feed(Lost("w1", reason="x"))
    assert run.state.phase == "waiting"
    run.feed(Lost("warming", reason="y"))
    assert run.state.phase == "ended"


def test_a_spare_on_another_node_is_preferred():
    run = Run(2)
    for name, node in [("w0", "a"), ("w1", "b"), ("near", "b"), ("kin", "a"), ("far", "c")]:
        run.feed(Attached(name, node=node, address="x")).feed(BecameReady(name))
    run.report(0).report(1).restore().commit(0)
    run.feed(Lost("w1", reason="x"))
    assert run.state.owners[1] == "far"


def test_a_step_that_kills_one_shard_again_and_again_ends_the_run():
    run = training(spares=[f"s{i}" for i in range(9)], max_swaps_per_step=3)
    for count in range(1, 5):
        run.feed(Lost(run.state.owners[1], reason="killed"))
        recover(run, attempted=6)
        if count < 4:
            run.restore()
            assert run.state.swaps[1].count == count
    assert run.did(EndRun)[0].reason == (
        "shard 1 lost its owner 4 times in step 6: the step itself or the data of that shard ends "
        "its worker; look at the logs of the workers that owned shard 1"
    )


def test_losses_in_different_steps_or_shards_are_not_a_loop():
    run = training(spares=[f"s{i}" for i in range(9)], max_swaps_per_step=1)
    for shard, attempted in [(1, 6), (0, 6), (1, 7), (0, 7), (1, 8)]:
        run.feed(Lost(run.state.owners[shard], reason="killed"))
        recover(run, attempted=attempted).restore()
        assert run.state.phase == "training"


def test_a_shard_whose_owners_die_before_any_plan_ends_the_run():
    run = training(spares=[f"s{i}" for i in range(9)], max_swaps_per_step=2)
    for _ in range(3):
        run.feed(Lost(run.state.owners[1], reason="killed"))
    assert run.state.phase == "ended"
    assert run.state.end.startswith("shard 1 lost its owner 3 times in step 1: ")


def test_communicators_that_fail_without_a_loss_are_built_anew():
    run = training().feed(Regroup(epoch=1, reason="a communicator failed"))
    assert (run.state.phase, run.state.epoch) == ("recovering", 2)
    assert run.told(Break)[0] == ["w0", "w1", "w2"]
    recover(run)
    assert run.told(AllCommitted)[1] == AllCommitted(epoch=2, generation=5)
    run.restore()
    assert run.state.phase == "training"


def test_a_loss_while_owners_wait_at_the_end_still_recovers():
    run = training().finish(0, 2).feed(Lost("w1", reason="x"))
    assert (run.state.phase, len(run.state.finished)) == ("recovering", 0)
    recover(run).restore().finish(0, 1, 2)
    assert run.did(EndRun) == [
        EndRun(reason="all shards have finished at generation 9", exit_code=0)
    ]
    assert run.told(Stop) == (
        ["s0", "s1", "w0", "w2"],
        Stop(reason="all shards have finished at generation 9", exit_code=0),
    )


def test_what_is_gone_with_all_its_copies_ends_the_run_by_name():
    run = training()
    holder = run.state.holders[1]
    run.feed(Lost("w1", reason="x")).feed(Lost(holder, reason="y"))
    recover(run)
    assert run.state.phase == "ended"
    assert run.did(EndRun)[0].exit_code == 1
    assert run.state.end.startswith("shard 1 cannot be brought back: ")


def test_a_published_checkpoint_saves_what_memory_lost():
    run = training().durable(4, 0, 1)
    assert run.actions == ()
    run.durable(4, 2)
    assert run.did(Publish) == [Publish(generation=4, epoch=1)]
    run.feed(Published(4))
    holder = run.state.holders[1]
    run.feed(Lost("w1", reason="x")).feed(Lost(holder, reason="y"))
    recover(run)
    plan = run.told(Plan)[1]
    assert (plan.generation, plan.rollback, run.state.committed) == (4, True, None)
    assert plan.durable == 4


def test_all_owners_are_told_which_checkpoint_to_go_on_from():
    """Not what each of them finds on a shared disk; and who comes late is told the same."""
    run = Run(2)
    run.state = replace(run.state, durable=40)
    run.attach("w0").attach("w1")
    assert {message.durable for _, message in run.sent(Assign)} == {40}
    run.feed(Attached("w1", node="n1", address="a", config="c1", version="v1"))
    assert [message.durable for _, message in run.sent(Assign)] == [40]


def test_a_durable_checkpoint_that_cannot_be_complete_is_discarded():
    run = training().durable(4, 0).durable(4, 1, error="disk full").durable(4, 2)
    assert run.did(Discard) == [
        Discard(
            generation=4,
            epoch=1,
            reason="shard 1 could not write the durable checkpoint: disk full",
        )
    ]
    run.durable(5, 0).feed(Lost("w1", reason="x"))
    assert run.did(Discard) == [
        Discard(
            generation=5, epoch=1, reason="epoch 2 began before it was complete", superseded=True
        )
    ]
    assert run.state.durable is None


def test_a_world_of_one_keeps_its_copy_with_a_spare():
    run = Run(1).attach("w0", "s0", "s1").report(0)
    assert run.told(Plan)[1].holders == {0: "s0"}
    assert [worker for worker, _ in run.sent(Plan)] == ["s0"]
    run.restore().commit(3).feed(Lost("s0", reason="x"))
    assert [worker for worker, _ in run.sent(Hold)] == ["w0", "s1"]
    assert run.sent(Hold)[0][1].holders == {0: "s1"}
    assert not run.state.protected
    run.commit(3)
    assert run.told(AllCommitted)[1].generation == 3
    assert run.state.protected
    run.feed(Lost("s1", reason="x"))
    assert run.sent(Hold) == [("w0", Hold(epoch=1, holders={}))]
    run.commit(4)
    assert not run.state.protected
    run.attach("s2")
    assert run.sent(Hold)[1][0] == "s2"
    run.commit(4).attach("s3").feed(Lost("w0", reason="x"))
    assert run.state.owners[0] == "s2"


def test_a_script_that_does_not_join_is_restarted_as_a_whole():
    run = Run(2, max_restarts=1).attach("w0", "w1", ready=False, ranks=True)
    run.feed(JoinlessSeen("w0")).feed(JoinlessSeen("w1")).feed(Lost("w1", reason="SIGKILL"))
    reason = (
        "worker w1 was lost (SIGKILL); the script does not join, so all workers start again (1)"
    )
    assert run.did(RestartAll) == [RestartAll(reason=reason, restart=1)]
    assert [worker for worker, _ in run.sent(Fence)] == ["w1", "w0"]
    assert (run.state.phase, run.state.epoch, len(run.state.members)) == ("forming", 1, 0)
    run.attach("w2", "w3", ready=False, ranks=True).feed(JoinlessSeen("w2"))
    run.feed(FailedBy("w3", message=Failed(reason="RuntimeError: no")))
    assert run.did(EndRun)[0].reason == (
        "worker w3 was lost (RuntimeError: no) and the script does not join; it was restarted 1 "
        "times already (--max-restarts)"
    )


def test_a_lost_spare_of_a_script_that_does_not_join_restarts_nobody():
    run = Run(2).attach("w0", "w1", ready=False, ranks=True).attach("s0", ready=False)
    run.feed(JoinlessSeen("w0")).feed(JoinlessSeen("w1")).feed(Lost("s0", reason="SIGKILL"))
    assert run.did(RestartAll) == []
    assert run.did(WantSpare) == [WantSpare(count=1)]
    assert sorted(run.state.members) == ["w0", "w1"]


def test_a_script_that_does_not_join_ends_when_all_its_ranks_have():
    run = Run(2).attach("w0", "w1", ready=False, ranks=True).attach("s0", ready=False)
    run.feed(JoinlessSeen("w0")).feed(Left("s0")).feed(Left("w0"))
    assert run.state.phase == "forming"
    run.feed(Left("w1"))
    assert run.did(EndRun) == [
        EndRun(reason="all 2 workers ended by themselves with exit code 0", exit_code=0)
    ]


def test_an_owner_that_ends_by_itself_ends_the_run():
    run = training().feed(Left("w1"))
    assert run.did(EndRun) == [
        EndRun(
            reason="worker w1 ended by itself while it owned shard 1; let the script go through "
            "run.attempts(until=...) to its end",
            exit_code=1,
        )
    ]


def test_a_late_script_that_does_not_join_is_turned_away():
    run = training().attach("odd", ready=False).feed(JoinlessSeen("odd"))
    assert "odd" in run.state.fenced
    assert (run.state.phase, run.state.epoch, run.did(WantSpare)) == ("training", 1, [])


def test_code_that_raises_ends_the_run_in_an_owner_and_only_itself_in_a_spare():
    failed = Failed(reason="ValueError: bad (train.py:3)", exit_code=1)
    run = training().feed(FailedBy("s0", message=failed))
    assert (run.state.phase, "s0" in run.state.fenced) == ("training", True)
    run.feed(FailedBy("w2", message=failed))
    assert run.did(EndRun) == [EndRun(reason="ValueError: bad (train.py:3)", exit_code=1)]


def test_a_stop_is_told_to_everyone_and_nothing_changes_after_it():
    run = training().feed(StopRequested(reason="Ctrl-C", exit_code=130))
    assert run.told(Stop) == (
        ["s0", "s1", "w0", "w1", "w2"],
        Stop(reason="Ctrl-C", exit_code=130),
    )
    ended = run.state
    run.commit(7).feed(Lost("w1", reason="x"))
    assert run.state is ended
    assert (run.actions, run.reason) == ((), "the run has ended: Ctrl-C")


@pytest.mark.parametrize(
    ("mine", "line"),
    [
        ("script b\narguments --lr 1\nthreads 1", "has another script than its run: its text or "),
        (
            "script a\narguments none\nthreads 1",
            "has arguments none, its run has --lr 1; start it ",
        ),
        (
            "script a\narguments --lr 1\nthreads 4",
            "has threads 4, its run has 1; start it with the ",
        ),
        (
            "function m.main\narguments none\nthreads 1",
            "runs a function, its run a script; start it ",
        ),
    ],
)
def test_who_is_refused_hears_what_differs(mine, line):
    state = replace(training().state, run_config="script a\narguments --lr 1\nthreads 1")
    event = Attached("w9", node="n", address="x", config=mine, version="v1")
    assert refusal(state, event).startswith(f"worker w9 {line}")


def test_a_worker_of_another_configuration_or_version_is_refused():
    run = training()
    event = Attached("w9", node="n", address="x", config="c2", version="v1")
    assert refusal(run.state, event) == (
        "worker w9 has configuration c2, its run has c1; start it with the script, arguments and "
        "versions of the run"
    )
    before = run.state
    run.feed(event)
    assert (run.state is before, len(run.sent(Fence))) == (True, 1)
    event = Attached("w9", node="n", address="x", config="c1", version="v2")
    assert refusal(run.state, event).startswith("worker w9 has version v2, its run has v1; ")
    assert refusal(run.state, Attached("w9", node="n", address="x", config="c1", version="v1")) is (
        None
    )


def test_workers_lost_before_the_run_has_formed():
    run = Run(2, max_swaps_per_step=0).attach("a", "b", ready=False).feed(Lost("a", reason="x"))
    assert run.did(StartTimer) == [StartTimer(epoch=1, seconds=60.0)]
    run.feed(SpareTimedOut(0))
    assert run.state.phase == "forming"
    late = Run(2).attach("a", ready=False).feed(Lost("a", reason="x")).feed(SpareTimedOut(1))
    assert late.state.end == (
        "only 0 of 2 workers were there after 60 s; look at the logs of those that were lost"
    )
    run.attach("c", ready=False).feed(Lost("c", reason="x")).feed(Lost("b", reason="y"))
    assert run.state.end == (
        "3 workers were lost before 2 were ready, the last one, b, for this: y; look at its log"
    )


def test_a_worker_that_restores_elsewhere_ends_the_run():
    run = training().feed(Lost("w1", reason="x"))
    recover(run)
    run.feed(RestoredBy("w0", message=Restored(epoch=2, generation=3, phases={})))
    assert run.state.end == (
        "shard 0 went back to generation 3, the plan of epoch 2 says 5; this is a defect of "
        "planaria, please report it"
    )


def test_step_leaves_its_argument_as_it_was():
    run = training()
    before, stored = run.state, dump(run.state)
    run.feed(Lost("w1", reason="x"))
    recover(run).restore().commit(5)
    assert dump(before) == stored
    assert load(stored) == before
    assert load(dump(run.state)) == run.state


def test_a_stored_membership_that_is_cut_off_is_refused():
    with pytest.raises(RunError) as error:
        load(dump(training().state)[:20])
    assert str(error.value).startswith("the stored membership (20 bytes) cannot be read: ")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"world": 0}, "world is 0: a run needs at least 1 worker"),
        ({"world": 2, "on_no_spare": "cry"}, "on_no_spare is 'cry': give 'wait' or 'end'"),
        ({"world": 2, "no_spare": 0}, "no_spare is 0 seconds: give a number above 0"),
        ({"world": 2, "max_swaps_per_step": -1}, "max_swaps_per_step is -1: give 0 or more"),
        ({"world": 2, "max_restarts": -1}, "max_restarts is -1: give 0 or more"),
    ],
)
def test_rules_out_of_range_are_refused(rules, message):
    with pytest.raises(ConfigError) as error:
        MembershipConfig(**rules)
    assert str(error.value) == message
