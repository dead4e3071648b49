"""Workers of a script that does not join end together: who ended first is the one to name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.control_plane import CoordinatorProcess, coordinator, wait_for
from tests.unit.runtime.test_control import Here
from tests.unit.runtime.test_takeover import Launcher

from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal


@contextmanager
def two(out: Path) -> Iterator[tuple[CoordinatorProcess, Launcher, list[Here]]]:
    """A coordinator that knows of two workers that do not join, and their launcher."""
    with coordinator(out, "--world", "2", "--timeout", "20", "--max-restarts", "2") as process:
        launcher = Launcher(process.ready())
        workers = [Here(process.ready(), name) for name in ("a", "b")]
        for here in workers:
            launcher.link.spawned(here.member.worker, pid=1)
            here.member.send(messages.Joinless())
        wait_for(lambda: [e.name for e in process.entries(journal.Decided)].count("joinless") == 2)
        yield process, launcher, workers
        launcher.link.close()
        for here in workers:
            here.member._end()


def why(launcher: Launcher) -> str:
    told = launcher.first(control.RestartAll)
    assert isinstance(told, control.RestartAll)
    return told.reason


def test_the_killed_worker_is_named_though_its_peer_is_heard_of_first(tmp_path: Path) -> None:
    with two(tmp_path) as (process, launcher, workers):
        workers[0].member._end()  # its stream, without a word
        launcher.link.exited("a", pid=1, description="exit code 5", code=messages.PEER_GONE)
        launcher.link.exited("b", pid=1, description="killed by SIGKILL", code=-9)
        assert why(launcher).startswith("worker b was lost (killed by SIGKILL)")
        (detected,) = process.entries(journal.Detected)
        assert (detected.worker, detected.how) == ("b", "pidfd")


def test_where_nobody_was_killed_who_ended_is_named_all_the_same(tmp_path: Path) -> None:
    with two(tmp_path) as (_, launcher, _):
        launcher.link.exited("a", pid=1, description="exit code 5", code=messages.PEER_GONE)
        assert why(launcher).startswith("worker a was lost (exit code 5)")
