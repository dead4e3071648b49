"""Suspicions out of pongs and progress, with times given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from planaria.runtime import messages
from planaria.runtime.coordinator.watch import Finding, Watch
from planaria.runtime.membership.events import (
    AnyEvent,
    Attached,
    BecameReady,
    CommittedBy,
    Lost,
    Regroup,
    Reported,
    RestoredBy,
)
from planaria.runtime.membership.limits import Timeouts
from planaria.runtime.membership.rules import MembershipConfig, State, step

LIMITS = Timeouts(timeout=20.0).limits()
"""silence 1 s, ping .2 s; a known step may take 6.7 s at least."""


def building(world: int = 3) -> State:
    state = State(config=MembershipConfig(world=world))
    for rank in range(world):
        name = f"w{rank}"
        state = step(state, Attached(worker=name, node="n", address="a", rank=rank)).state
    for rank in range(world):
        state = step(state, BecameReady(worker=f"w{rank}")).state
    assert state.phase == "building"
    return state


def training(world: int = 3) -> State:
    state = building(world)
    for shard in range(world):
        report = messages.Report(epoch=1, shard=shard, live=0, clean=True, captured=(0,))
        state = step(state, Reported(worker=f"w{shard}", message=report)).state
    for shard in range(world):
        restored = messages.Restored(epoch=1, generation=0, phases={})
        state = step(state, RestoredBy(worker=f"w{shard}", message=restored)).state
        commit = messages.Committed(epoch=1, shard=shard, generation=0)
        state = step(state, CommittedBy(worker=f"w{shard}", message=commit)).state
    assert state.phase == "training"
    return state


class Clock:
    """Drives a watch as the coordinator does: a ping each .2 s, answers from who is awake."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.now = 100.0
        self.watch = Watch(limits=LIMITS)
        self.asleep: set[str] = set()
        self.late: dict[str, float] = {}
        """Seconds after a ping at which who is named answers it; others answer at once."""
        self._unanswered: list[tuple[float, str, messages.Ping]] = []
        self.collective = dict.fromkeys(state.members, 0)
        self.inside: set[str] = set()
        self.waiting: set[str] = set()
        self.sending: set[str] = set()
        self.moved = dict.fromkeys(state.members, 0)
        for worker in state.members:
            self.watch.attach(worker, now=self.now)

    def run(self, seconds: float) -> list[Finding]:
        for _ in range(round(seconds / LIMITS.ping)):
            self.now += LIMITS.ping
            waiting, self._unanswered = self._unanswered, []
            for due, worker, ping in waiting:
                self._answer(worker, ping, due=due)
            for worker, ping in list(self.watch.pings(now=self.now)):
                self.moved[worker] += 1000 * (worker in self.sending)
                due = self.now + self.late.get(worker, 0.001)
                self._answer(worker, ping, due=due)
            found = self.watch.findings(self.state, now=self.now + 0.002)
            if found:
                return found
        return []

    def _answer(self, worker: str, ping: messages.Ping, *, due: float) -> None:
        """Now, or once it is awake and the time has come."""
        if worker in self.asleep or due > self.now + 0.002:
            self._unanswered.append((due, worker, ping))
            return
        pong = messages.Pong(
            seq=ping.seq,
            step=1,
            collective=self.collective[worker],
            inside=worker in self.inside,
            waiting=worker in self.waiting,
            moved=self.moved[worker],
        )
        self.watch.pong(worker, pong, now=max(due, self.now))

    def feed(self, event: AnyEvent) -> None:
        """As the coordinator does: membership first, then the watch hears of new owners."""
        before, self.state = self.state, step(self.state, event).state
        self.watch.follow(before, self.state, now=self.now)

    def step(self, seconds: float = 0.1) -> None:
        for worker in self.state.members:
            message = messages.Progress(epoch=1, step=1, seconds=seconds)
            self.watch.progress(worker, message, now=self.now)


def test_a_silent_owner_is_found_after_the_limit() -> None:
    clock = Clock(training())
    assert clock.run(5.0) == []
    clock.asleep = {"w1"}
    began = clock.now
    (found,) = clock.run(5.0)
    assert (found.worker, found.how) == ("w1", "silence")
    assert found.reason == "it has not answered a ping for 1.0 s (limit 1 s)"
    assert 1.0 <= clock.now - began <= 1.5


def test_an_owner_that_builds_and_a_spare_may_be_silent_for_longer() -> None:
    clock = Clock(building())
    clock.asleep = {"w1"}
    began = clock.now
    (found,) = clock.run(LIMITS.no_spare + 2)
    assert found.worker == "w1"
    assert clock.now - began >= LIMITS.no_spare


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    clock = Clock(training())
    clock.asleep = {"w1"}
    assert clock.run(0.4) == []
    clock.now += 60.0
    assert clock.run(0.2) == []
    clock.asleep = set()
    assert clock.run(2.0) == []


def test_who_is_in_no_collective_holds_the_others_up() -> None:
    clock = Clock(training())
    for _ in range(6):
        clock.step()
        assert clock.run(0.2) == []
    clock.inside = {"w0", "w2"}
    clock.collective = {"w0": 8, "w1": 7, "w2": 8}
    began = clock.now
    (found,) = clock.run(20.0)
    assert (found.worker, found.how) == ("w1", "progress")
    assert "w1 is in no collective, 2 of 3 owners wait in one" in found.reason
    assert 6.6 < clock.now - began < 7.1
    # It is not said again before the limit has passed once more.
    assert clock.run(3.0) == []


def test_when_nobody_stands_out_the_owners_regroup() -> None:
    clock = Clock(training())
    for _ in range(6):
        clock.step()
        clock.run(0.2)
    clock.inside = {"w0", "w1", "w2"}
    (found,) = clock.run(20.0)
    assert found.worker is None
    assert "all 3 owners wait in the same collective: nobody stands out" in found.reason


def test_longer_phases_have_longer_limits() -> None:
    clock = Clock(training())
    for _ in range(6):
        clock.step()
        clock.run(0.2)
    for worker in clock.state.members:
        message = messages.Progress(epoch=1, step=7, phase="evaluation")
        clock.watch.progress(worker, message, now=clock.now)
    assert clock.run(60.0) == []


def test_who_does_not_report_is_found() -> None:
    state = training()
    state = step(state, Regroup(epoch=1, reason="r")).state
    for shard in (0, 2):
        report = messages.Report(epoch=2, shard=shard, live=0, clean=True, captured=(0,))
        state = step(state, Reported(worker=f"w{shard}", message=report)).state
    clock = Clock(state)
    began = clock.now
    (found,) = clock.run(60.0)
    assert (found.worker, found.how) == ("w1", "progress")
    assert found.reason.endswith("s old and shard 1 has not reported")
    assert 2 * LIMITS.timeout <= clock.now - began < 2 * LIMITS.timeout + 1


def test_a_build_that_gets_stuck_is_found_with_patience() -> None:
    clock = Clock(building())
    began = clock.now
    (found,) = clock.run(LIMITS.no_spare + 2)
    assert (found.worker, found.how) == (None, "progress")
    assert clock.now - began > LIMITS.no_spare


def test_a_promoted_spare_that_builds_may_be_silent() -> None:
    state = step(training(), Attached(worker="s0", node="n", address="a")).state
    state = step(state, BecameReady(worker="s0")).state
    state = step(state, Lost(worker="w1", reason="r")).state
    assert state.owners[1] == "s0"
    for shard in (0, 2):
        held = {1: (0,)} if state.holders[1] == f"w{shard}" else {}
        report = messages.Report(epoch=2, shard=shard, live=0, clean=True, captured=(0,), held=held)
        state = step(state, Reported(worker=f"w{shard}", message=report)).state
    clock = Clock(state)
    clock.asleep = {"s0"}
    assert clock.run(LIMITS.no_spare - 1) == []
    report = messages.Report(epoch=2, shard=1, live=None, clean=False, captured=())
    clock.state = step(state, Reported(worker="s0", message=report)).state
    assert clock.state.plan is not None
    clock.asleep = set()
    # The plan has a time of its own, from when it was made.
    assert clock.run(2 * LIMITS.timeout - 1) == []
    (found,) = clock.run(2.0)
    assert found.reason.endswith("has not restored")


def test_who_evaluates_is_not_blamed_by_those_who_wait() -> None:
    clock = Clock(training())
    for _ in range(6):
        clock.step()
        clock.run(0.2)
    message = messages.Progress(epoch=1, step=7, phase="evaluation")
    clock.watch.progress("w1", message, now=clock.now)
    clock.inside = {"w0", "w2"}
    clock.collective = {"w0": 8, "w1": 7, "w2": 8}
    assert clock.run(60.0) == []
    (found,) = clock.run(LIMITS.timeout * 20)
    assert found.worker == "w1"


def busy(clock: Clock) -> None:
    for _ in range(6):
        clock.step()
        assert clock.run(0.2) == []


def test_a_commit_may_take_as_long_as_its_bytes_arrive() -> None:
    """w1 sends for a minute; w0 waits for a slot, w2 is in the next step's collective already."""
    clock = Clock(training())
    busy(clock)
    clock.waiting, clock.inside, clock.sending = {"w0", "w1"}, {"w2"}, {"w1"}
    clock.collective = {"w0": 7, "w1": 7, "w2": 8}
    assert clock.run(60.0) == []
    # Nothing arrives any more: nobody stands out, and all begin anew.
    clock.sending = set()
    began = clock.now
    (found,) = clock.run(60.0)
    assert found.worker is None
    assert found.reason.endswith(
        "2 of 3 owners wait for protection and the others wait in the same collective: nobody "
        "stands out"
    )
    assert LIMITS.transfer <= clock.now - began < LIMITS.transfer + 1


def test_a_wait_for_protection_is_not_part_of_the_step_after_it() -> None:
    clock = Clock(training())
    busy(clock)
    clock.waiting, clock.sending = {"w0", "w1", "w2"}, {"w1"}
    assert clock.run(30.0) == []
    clock.waiting, clock.sending = set(), set()
    assert clock.run(6.5) == []
    (found,) = clock.run(1.0)
    assert "compute: nobody stands out" in found.reason


def test_who_is_stuck_while_others_wait_for_its_state_is_found() -> None:
    clock = Clock(training())
    busy(clock)
    clock.waiting = {"w0", "w2"}
    (found,) = clock.run(20.0)
    assert found.worker == "w1"
    assert "2 of 3 owners wait for its state to be protected" in found.reason


def moving(state: State, *, rollback: bool = False) -> Clock:
    """A recovery whose plan is made: shard 1 fetches its state, or all load it from the disk."""
    state = step(state, Attached(worker="s0", node="n", address="a")).state
    state = step(state, BecameReady(worker="s0")).state
    state = step(state, Lost(worker="w1", reason="r")).state
    if rollback:
        state = replace(state, durable=0)
    for shard in range(3):
        held = {1: (0,)} if state.holders[1] == f"w{shard}" and not rollback else {}
        live = None if shard == 1 else 0
        captured = () if shard == 1 else (0,)
        report = messages.Report(
            epoch=2, shard=shard, live=live, clean=True, captured=captured, held=held
        )
        state = step(state, Reported(worker=state.owners[shard], message=report)).state
    assert state.plan is not None
    assert state.plan.rollback == rollback
    return Clock(state)


def test_a_recovery_may_take_as_long_as_its_bytes_arrive() -> None:
    clock = moving(training())
    clock.sending = {"s0"}
    assert clock.run(5 * LIMITS.timeout) == []
    clock.sending = set()
    began = clock.now
    (found,) = clock.run(5 * LIMITS.timeout)
    assert (found.worker, found.how) == (None, "progress")
    assert 2 * LIMITS.timeout - 0.1 <= clock.now - began < 2 * LIMITS.timeout + 1


def test_loading_from_the_disk_is_waited_for_with_patience() -> None:
    clock = moving(training(), rollback=True)
    assert clock.run(LIMITS.no_spare - 1) == []
    (found,) = clock.run(3.0)
    assert found.reason.endswith("has not restored")


def test_a_spare_that_was_silent_before_it_was_called_is_given_up_soon() -> None:
    """It is stopped, and builds nothing; who falls silent later may be loading a file."""
    state = step(training(), Attached(worker="s0", node="n", address="a")).state
    clock = Clock(step(state, BecameReady(worker="s0")).state)
    clock.asleep = {"s0"}
    assert clock.run(0.6) == []
    assert clock.watch.silent_spares(clock.state, now=clock.now) == []
    clock.feed(Lost(worker="w1", reason="r"))
    assert clock.state.owners[1] == "s0"
    (found,) = clock.run(3.0)
    assert (found.worker, found.how) == ("s0", "silence")
    assert found.reason == "it has not answered a ping for 1.0 s (limit 1 s)"


def test_spares_that_are_silent_are_known() -> None:
    state = step(training(), Attached(worker="s0", node="n", address="a")).state
    clock = Clock(step(state, BecameReady(worker="s0")).state)
    clock.asleep = {"s0", "w1"}
    assert [found.worker for found in clock.run(1.2)] == ["w1"]
    (found,) = clock.watch.silent_spares(clock.state, now=clock.now)
    assert (found.worker, found.how) == ("s0", "silence")


def test_a_starved_machine_is_patient_and_a_quiet_one_is_not_for_long() -> None:
    clock = Clock(training())
    assert clock.run(5.0) == []
    clock.late = {"w0": 0.6, "w1": 0.8, "w2": 0.6}
    assert clock.run(9.0) == []
    # Not scheduled for four seconds: no wonder here.
    clock.asleep = {"w1"}
    assert clock.run(4.0) == []
    clock.asleep = set()
    assert clock.run(9.0) == []
    clock.asleep = {"w1"}
    began = clock.now
    (found,) = clock.run(20.0)
    assert (found.worker, found.how) == ("w1", "silence")
    assert found.reason.endswith(
        "(limit 4.8 s: nine of ten of its own last answers took up to 0.8 s)"
    )
    assert 4.0 < clock.now - began < 5.0
    # A worker that is new has no answers of its own: the others' count.
    clock.watch.attach("w1", now=clock.now)
    assert clock.run(1.0) == []
    (found,) = clock.run(20.0)
    assert found.reason.endswith(
        "(limit 3.6 s: nine of ten of the others' last answers took up to 0.6 s)"
    )
    # Quiet again: what was is forgotten.
    clock.late, clock.asleep = {}, set()
    assert clock.run(9.0) == []
    clock.asleep = {"w1"}
    (found,) = clock.run(5.0)
    assert found.reason == "it has not answered a ping for 1.0 s (limit 1 s)"


def test_a_machine_that_is_starved_from_one_moment_on_loses_nobody() -> None:
    clock = Clock(training())
    assert clock.run(9.0) == []
    clock.asleep = {"w0", "w1", "w2"}
    assert clock.run(3.0) == []
    clock.asleep = {"w1"}
    assert clock.run(1.0) == []
    clock.asleep = set()
    assert clock.run(5.0) == []


def test_one_slow_worker_makes_the_run_patient_with_itself_only() -> None:
    clock = Clock(training())
    clock.late = {"w0": 0.8}
    assert clock.run(9.0) == []
    clock.asleep = {"w1"}
    (found,) = clock.run(5.0)
    assert (found.worker, "(limit 1 s)" in found.reason) == ("w1", True)
    assert clock.watch.patience(now=clock.now) == pytest.approx(4.8)


def test_answers_during_a_build_say_nothing_of_the_machine() -> None:
    clock = Clock(building())
    clock.late = {"w0": 3.0, "w1": 3.0, "w2": 3.0}
    assert clock.run(20.0) == []
    clock.state, clock.late = training(), {}
    assert clock.run(0.4) == []
    clock.asleep = {"w1"}
    (found,) = clock.run(5.0)
    assert found.reason == "it has not answered a ping for 1.0 s (limit 1 s)"
