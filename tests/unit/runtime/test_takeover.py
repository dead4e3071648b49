"""A coordinator is killed between deciding and telling; the next one has to make up for it.

What was decided is in the folder before anyone is told. So the moment between the two is made here by
killing a coordinator and deciding in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.control_plane import TOKEN, CoordinatorProcess, wait_for
from tests.unit.runtime.test_control import Here, train

from planaria.errors import JoinError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.control.link import LauncherLink
from planaria.runtime.coordinator import journal, store
from planaria.runtime.coordinator.status import status
from planaria.runtime.coordinator.summary import read_summary
from planaria.runtime.membership import events, rules


@pytest.fixture
def process(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator of two shards and a spare, whose time-out no test may wait for."""
    one = CoordinatorProcess(tmp_path, "--world", "2", "--spares", "1", "--timeout", "20")
    yield one
    one.close()


class Launcher:
    """A launcher that notes what it is told."""

    def __init__(self, address: str) -> None:
        self.told: list[control.ToLauncher] = []
        self.link = LauncherLink(
            address, token=TOKEN, run="test", node="n0", receive=self.told.append, patience=20.0
        )
        self.link.connect()

    def first(self, kind: type[control.ToLauncher]) -> control.ToLauncher:
        return wait_for(lambda: [m for m in self.told if isinstance(m, kind)])[0]


def decide(process: CoordinatorProcess, *decided: events.AnyEvent) -> None:
    """Kill the coordinator, and leave what it would have left once it had decided on these events."""
    process.kill()
    header, state = store.read(process.out)
    for event in decided:
        before, state = state, rules.step(state, event).state
        store.Store(process.out, header).update(before, state)


@pytest.mark.parametrize("heard", ["nobody", "one"])
def test_a_coordinator_that_dies_while_it_ends_the_run_ends_it_again(
    process: CoordinatorProcess, heard: str
) -> None:
    address = process.ready()
    launcher, a, b = Launcher(address), Here(address, "a"), Here(address, "b")
    for name in ("a", "b"):
        launcher.link.spawned(name, pid=1)
    epoch = train(a, b)
    last = [
        messages.Finished(
            epoch=epoch, shard=shard, generation=0, state_digest="s", samples_digest="d"
        )
        for shard in range(2)
    ]
    decide(
        process, *(events.FinishedBy(worker=w, message=m) for w, m in zip("ab", last, strict=True))
    )
    if heard == "one":
        # It was told, has left, and its launcher has seen it go.
        a.member._end()
        launcher.link.exited("a", pid=1, description="exit code 0", code=0)
    process.resume()
    end = launcher.first(control.EndRun)
    assert (end.exit_code, end.reason, end.owners) == (
        0,
        "all shards have finished at generation 0",
        ("a", "b"),
    )
    for one in (b,) if heard == "one" else (a, b):
        stop = one.first(messages.Stop)
        assert (stop.exit_code, stop.reason) == (0, end.reason)
        one.member.close()
    launcher.link.close()
    assert process.process.wait(10) == 0
    assert read_summary(process.out).exit_code == 0
    assert [e.exit_code for e in process.entries(journal.Ended)] == [0]
    assert not (process.out / store.STATE_FILE).exists()


def test_a_coordinator_that_dies_in_waiting_calls_survivors_and_a_spare(
    process: CoordinatorProcess,
) -> None:
    address = process.ready()
    launcher, a, b = Launcher(address), Here(address, "a"), Here(address, "b")
    for name in ("a", "b"):
        launcher.link.spawned(name, pid=1)
    epoch = train(a, b)
    decide(process, events.Lost(worker="b", reason="killed by SIGKILL"))
    b.member._end()
    launcher.link.exited("b", pid=1, description="killed by SIGKILL", code=-9)
    assert not [m for m in a.told if isinstance(m, messages.Break)]
    process.resume()
    process.ready()
    told = a.first(messages.Break)
    assert (told.epoch, told.lost) == (epoch + 1, (1,))
    # The shard and the spare that there was to be.
    assert launcher.first(control.WantSpare).count == 2
    with pytest.raises(JoinError, match=r"^worker b was declared lost \(killed by SIGKILL\); "):
        Here(address, "b")
    c = Here(address, "c")
    c.ready()
    assert c.first(messages.Assign).shard == 1
    for shard, one in enumerate((a, c)):
        one.report(epoch + 1, shard)
    for shard, one in enumerate((a, c)):
        one.first(messages.Plan, epoch=epoch + 1)
        one.restored(epoch + 1, shard)
    a.first(messages.Released, epoch=epoch + 1)
    assert [row.owner for row in status(process.out).shards] == ["a", "c"]
    for one in (a, c):
        one.member._end()
    launcher.link.close()


def test_what_broke_under_a_coordinator_that_died_is_heard_by_the_next(
    process: CoordinatorProcess,
) -> None:
    address = process.ready()
    a, b = Here(address, "a"), Here(address, "b")
    epoch = train(a, b)
    a.member.send(messages.Broke(epoch=epoch, reason="connection reset"))
    wait_for(lambda: process.entries(journal.Broke))
    process.kill()
    process.resume()
    process.ready()
    told = b.first(messages.Break)
    assert (told.epoch, told.reason) == (
        epoch + 1,
        "a communicator failed under a and nobody is lost: connection reset",
    )
    for one in (a, b):
        one.member._end()
