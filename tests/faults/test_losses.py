"""Losses at awkward moments: while all build, during a recovery, at the very end, with no spare."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_programs import Job
from tests.support.fault_runs import (
    Outcome,
    beside,
    check_equal,
    check_faults,
    check_redone,
    committed,
    hit,
    journal,
    like,
    owners_of,
    run,
    until,
)

STEPS = 10
DDP = Job(kind="ddp", steps=STEPS, final="")
FSDP = Job(kind="fsdp", steps=STEPS, final="")


def begun(out: Path, phase: str, count: int = 1) -> list[dict[str, Any]]:
    """The epochs that have begun in ``phase``, once there are ``count``."""

    def enough() -> list[dict[str, Any]] | None:
        found = [e for e in journal(out) if e["event"] == "epoch_begun" and e["phase"] == phase]
        return found if len(found) >= count else None

    return until(enough)


def newcomer(epoch: dict[str, Any]) -> str:
    """The spare that the coordinator has given the shard of a lost worker."""
    found = re.search(r"(w\d+) steps in", epoch["reason"])
    assert found is not None, epoch
    return found.group(1)


def struck_while(job: Job, out: Path, script: Callable[[Path], None], **settings: Any) -> Outcome:
    with beside(script, out):
        return run(job, out, **{"workers": 3, **settings})


def test_while_everyone_builds(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    def script(out: Path) -> None:
        begun(out, "building")
        # Who was ready first owns a shard; a spare may have been quicker than the worker named w1.
        hit(out, next(e["worker"] for e in journal(out) if e["event"] == "worker_ready"))

    struck = struck_while(like(DDP, slow_build=0.5), tmp_path, script)
    check_equal(struck, calm(DDP, workers=3))
    assert struck.events("epoch_begun")[0]["phase"] == "building"
    assert struck.summary["swaps"][0]["lost"]
    check_redone(struck)


def test_before_anyone_is_ready(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """A loss while the run forms costs a process and no swap."""

    def script(out: Path) -> None:
        until(lambda: any(e["event"] == "worker_attached" for e in journal(out)))
        hit(out, "w0")

    struck = struck_while(DDP, tmp_path, script, spares=0)
    check_equal(struck, calm(DDP, workers=3))
    assert any(e["worker"] == "w0" for e in struck.events("process_exited"))


def test_the_spare_that_steps_in_dies_too(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    fault = "kill:worker=2,step=4,phase=backward"

    def script(out: Path) -> None:
        hit(out, newcomer(begun(out, "recovering")[0]))

    struck = struck_while(like(FSDP, slow_build=0.4), tmp_path, script, inject=(fault,), spares=2)
    check_equal(struck, calm(FSDP, workers=3))
    check_faults(struck, [fault])
    assert len(struck.events("detected")) >= 2
    assert max(swap["epochs"] for swap in struck.summary["swaps"]) >= 2


def test_a_survivor_dies_during_the_recovery(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """In the replicated regime: the holder of what was lost first is another one."""
    fault = "kill:worker=0,step=4,phase=optimizer"

    def script(out: Path) -> None:
        begun(out, "recovering")
        owners = owners_of(out)
        hit(out, owners[2])

    struck = struck_while(
        like(DDP, slow_build=0.4), tmp_path, script, inject=(fault,), workers=4, spares=2
    )
    check_equal(struck, calm(DDP, workers=4))
    check_faults(struck, [fault])
    assert {s for swap in struck.summary["swaps"] for s in swap["lost"]} == {0, 2}


def test_in_the_final_duty(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    def script(out: Path) -> None:
        until(lambda: committed(out) == STEPS)
        hit(out, owners_of(out)[0])

    struck = struck_while(like(FSDP, slow_final=1.0), tmp_path, script)
    check_equal(struck, calm(FSDP, workers=3))
    assert [swap["redone"] for swap in struck.summary["swaps"]] == [0]


def test_a_world_of_one(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    job = Job(
        kind="single", steps=STEPS, final="", pace=0.05
    )  # the spare must have a copy by step 5
    for action, phase in (("kill", "backward"), ("stop", "optimizer"), ("kill", "commit")):
        fault = f"{action}:worker=0,step=5,phase={phase}"
        struck = run(job, tmp_path / f"{action}-{phase}", workers=1, inject=(fault,))
        check_equal(struck, calm(like(job, pace=0.0), workers=1))
        check_faults(struck, [fault])


def test_no_spare_is_the_end_where_it_was_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = run(
        DDP,
        tmp_path,
        workers=2,
        spares=0,
        refill=False,
        on_no_spare="end",
        inject=("kill:worker=1,step=3,phase=forward",),
    )
    assert ended.code == 1
    assert len(ended.events("injected")) == 1
    line = (
        "shard 1 lost the owner and no spare is left; start the run with more --spares, or let it "
        "wait for one with --on-no-spare wait"
    )
    assert capfd.readouterr().err == f"planaria: {line}\n"
    assert ended.summary["exit_code"] == 1
    assert ended.summary["reason"] == line
    assert ended.summary["state_digest"] is None


def test_a_run_without_spares_waits_for_one(
    tmp_path: Path,
    calm: Callable[..., Outcome],
    joined: Callable[..., subprocess.Popen[str]],
) -> None:
    fault = "kill:worker=1,step=6,phase=backward"
    others: list[subprocess.Popen[str]] = []

    def script(out: Path) -> None:
        begun(out, "waiting")
        others.append(joined(out, DDP))

    struck = struck_while(DDP, tmp_path, script, spares=0, refill=False, inject=(fault,))
    said, _ = others[0].communicate(timeout=30)
    assert others[0].returncode == 0, said
    check_equal(struck, calm(DDP, workers=3))
    check_faults(struck, [fault])
    assert any(w.startswith("j") for w in owners_of(tmp_path).values())


def test_owner_and_holder_together_without_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = ("kill:worker=1,step=5,phase=backward", "kill:worker=2,step=5,phase=backward")
    ended = run(FSDP, tmp_path, workers=4, spares=2, inject=faults)
    assert len(ended.events("injected")) == 2
    assert ended.code == 1
    error = capfd.readouterr().err
    assert error.startswith("planaria: shard 1 cannot be brought back: shard 1: no living worker ")
    assert error.count("\n") == 1
    assert "there is no durable checkpoint; start the run again, with workers in more" in error
    assert ended.summary["state_digest"] is None


def test_owner_and_holder_together_go_back_to_the_disk(
    tmp_path: Path, calm: Callable[..., Outcome]
) -> None:
    faults = ("kill:worker=1,step=8,phase=backward", "kill:worker=2,step=8,phase=backward")
    job = like(FSDP, checkpoint_every=3, pace=0.05)
    struck = run(job, tmp_path, workers=4, spares=2, inject=faults)
    check_equal(struck, calm(FSDP, workers=4))
    assert len(struck.events("injected")) == 2
    planned = [e for e in struck.events("planned") if e.get("rollback")]
    assert [e["generation"] % 3 for e in planned] == [0]
