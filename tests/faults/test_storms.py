"""Many losses in one run, and workers that come back from the dead."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.fault_programs import Job
from tests.support.fault_runs import (
    Outcome,
    beside,
    check_equal,
    check_redone,
    committed,
    hit,
    journal,
    like,
    owners_of,
    pid_of,
    run,
    until,
    whole,
)


def test_a_kill_at_every_second_step(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """By the workers themselves, in whatever phase they are: 20 kills in 40 steps."""
    job = Job(kind="ddp", steps=40, final="")
    struck = run(like(job, hook="die_at_even_steps"), tmp_path, workers=3, spares=3)
    check_equal(struck, calm(job, workers=3))
    died = [e for e in struck.events("process_exited") if e.get("code") == -signal.SIGKILL]
    assert len(died) >= 18
    check_redone(struck)


def test_rapid_kills_from_outside(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """Random workers and spares, also while the last loss is being recovered from."""
    job = Job(kind="fsdp", steps=40, final="")
    kills = 0

    def script(out: Path) -> None:
        nonlocal kills
        generator = random.Random(0)
        until(lambda: committed(out) >= 2)
        while committed(out) < job.steps - 8 and kills < 15:
            before = epochs(out)
            living = [
                w for w in sorted(owners_of(out).values()) if psutil.pid_exists(pid_of(out, w))
            ]
            hit(out, generator.choice(living))
            kills += 1
            # Not the holder of what was just lost before there is another copy of it; and some
            # progress, or so many losses in one step are taken for the step's own fault.
            until(lambda before=before: epochs(out) > before and whole(out))
            if kills % 3 == 0:
                at = committed(out)
                until(lambda at=at: committed(out) > at)

    with beside(script, tmp_path):
        struck = run(job, tmp_path, workers=3, spares=2)
    check_equal(struck, calm(job, workers=3))
    assert kills >= 10
    check_redone(struck)


def epochs(out: Path) -> int:
    return sum(e["event"] == "epoch_begun" for e in journal(out))


def test_a_stopped_worker_that_comes_back_does_nothing(
    tmp_path: Path,
    calm: Callable[..., Outcome],
    joined: Callable[..., subprocess.Popen[str]],
) -> None:
    """Its launcher is stopped, too, so that nobody kills it: as after a partition of the network."""
    job = Job(kind="ddp", steps=40, final="", pace=0.05, hook="wait_for_go")
    ghosts: list[psutil.Process] = []

    def script(out: Path) -> None:
        until(lambda: committed(out) >= 1)
        launcher = joined(out, job)
        until(
            lambda: any(
                e["event"] == "worker_ready" and e["worker"][0] == "j" for e in journal(out)
            )
        )
        (out / "final" / "go").touch()
        hit(out, owners_of(out)[1])
        name = until(lambda: next((w for w in owners_of(out).values() if w[0] == "j"), None))
        at = committed(out)
        until(lambda: committed(out) > at + 1)
        ghosts.append(psutil.Process(pid_of(out, name)))
        launcher.send_signal(signal.SIGSTOP)
        ghosts[0].suspend()
        until(lambda: owners_of(out)[1] != name)
        at = committed(out)
        until(lambda: committed(out) > at + 1)
        assert ghosts[0].status() == psutil.STATUS_STOPPED
        ghosts[0].resume()
        # It hears that it was fenced as soon as it listens; it cannot even finish its step.
        until(lambda: not ghosts[0].is_running() or ghosts[0].status() == "zombie", seconds=10)
        launcher.send_signal(signal.SIGCONT)

    with beside(script, tmp_path):
        struck = run(job, tmp_path, workers=3, spares=0)
    check_equal(struck, calm(like(job, hook="", pace=0.0), workers=3))
    (log,) = (tmp_path.parent / f"joined-{tmp_path.name}" / "logs").glob("j*-0.log")
    assert "fenced: worker j" in log.read_text() or "fenced: it has not answered" in log.read_text()
    check_redone(struck)
