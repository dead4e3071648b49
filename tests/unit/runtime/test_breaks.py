"""When a communicator that failed makes the owners regroup, on a real loop with short limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.membership_run import training

from planaria.runtime import messages
from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.breaks import Breaks
from planaria.runtime.coordinator.chores import Chores
from planaria.runtime.coordinator.watch import Watch
from planaria.runtime.membership import events, rules
from planaria.runtime.membership.limits import Timeouts

LIMITS = replace(Timeouts().limits(), silence=0.05, ping=0.01, no_spare=60.0)
"""So that a failure waits .07 s for whoever was lost to be found."""


class Desk:
    """The membership alone; notes the reasons for which it regrouped."""

    def __init__(self) -> None:
        self.state = training().state
        self.regrouped: list[str] = []

    def apply(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.Regroup):
            self.regrouped.append(event.reason)
        self.state = rules.step(self.state, event).state


def play(out: Path, scene: Callable[[Desk, Breaks, Watch], None], *, regroups: bool) -> Desk:
    """Run ``scene`` until the owners regroup, or for long enough to see that they do not."""

    async def run() -> Desk:
        desk, watch = Desk(), Watch(limits=LIMITS)
        failures: list[Exception] = []
        chores = Chores(failed=failures.append, over=lambda: False)
        book = journal.Journal(out / journal.JOURNAL_FILE)
        breaks = Breaks(book, limits=LIMITS, watch=watch, chores=chores, desk=desk)
        watch.attach("w0", now=time.monotonic())
        scene(desk, breaks, watch)
        end = time.monotonic() + (20.0 if regroups else 0.5)
        while not desk.regrouped and time.monotonic() < end:
            await asyncio.sleep(0.01)
        chores.close()
        book.close()
        assert failures == []
        return desk

    return asyncio.run(run())


def committed(desk: Desk, generation: int) -> None:
    message = messages.Committed(epoch=1, shard=0, generation=generation)
    desk.apply(events.CommittedBy(worker="w0", message=message))


def pong(watch: Watch, moved: int) -> None:
    message = messages.Pong(seq=1, step=1, collective=0, inside=False, moved=moved)
    watch.pong("w0", message, now=time.monotonic())


@pytest.mark.parametrize(
    ("epoch", "generation", "reached", "regroups"),
    [
        pytest.param(1, None, None, True, id="a collective"),
        pytest.param(0, None, None, False, id="of an epoch that is over"),
        pytest.param(1, 5, 4, True, id="a copy that did not arrive"),
        pytest.param(1, 5, 5, False, id="a copy that arrived the second time"),
    ],
)
def test_owners_regroup_where_a_failure_stands(
    tmp_path: Path, epoch: int, generation: int | None, reached: int | None, regroups: bool
) -> None:
    def scene(desk: Desk, breaks: Breaks, watch: Watch) -> None:
        broke = messages.Broke(epoch=epoch, reason="connection reset", generation=generation)
        breaks.heard("w0", broke)
        if reached is not None:
            committed(desk, reached)

    desk = play(tmp_path, scene, regroups=regroups)
    reason = "a communicator failed under w0 and nobody is lost: connection reset"
    assert desk.regrouped == [reason] * regroups
    assert desk.state.epoch == 1 + regroups
    (entry,) = journal.read(tmp_path / journal.JOURNAL_FILE)
    assert entry == journal.Broke(
        worker="w0", epoch=epoch, reason="connection reset", at=entry.at, mono=entry.mono
    )


@pytest.mark.parametrize("arrives", [True, False])
def test_a_copy_that_is_sent_again_is_waited_for_while_bytes_of_it_move(
    tmp_path: Path, arrives: bool
) -> None:
    def scene(desk: Desk, breaks: Breaks, watch: Watch) -> None:
        breaks.heard("w0", messages.Broke(epoch=1, reason="reset", generation=5))
        loop = asyncio.get_running_loop()
        # Often enough that each look at it, one in .07 s, finds more.
        for n in range(1, 15):
            loop.call_later(n * 0.02, pong, watch, n * 1000)
        if arrives:
            loop.call_later(0.28, committed, desk, 5)
        loop.call_later(0.2, lambda: seen.append(list(desk.regrouped)))

    seen: list[list[str]] = []
    desk = play(tmp_path, scene, regroups=not arrives)
    assert seen == [[]]
    assert len(desk.regrouped) == (0 if arrives else 1)
