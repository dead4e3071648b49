"""What is on disk: a run that goes on from it, signals, and what is never chosen."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fault_programs import Job
from tests.support.fault_runs import (
    Outcome,
    beside,
    check_equal,
    committed,
    hit,
    journal,
    like,
    owners_of,
    run,
    until,
)

STEPS = 12
DDP = Job(kind="ddp", steps=STEPS, final="")
FSDP = Job(kind="fsdp", steps=STEPS, final="")


def names(out: Path) -> set[str]:
    return {entry.name for entry in (out / "checkpoints").iterdir()}


@pytest.mark.parametrize("job", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_sigterm_writes_a_checkpoint_and_the_run_goes_on_from_it(
    tmp_path: Path, calm: Callable[..., Outcome], job: Job
) -> None:
    def script(out: Path) -> None:
        until(lambda: committed(out) >= 3)
        os.kill(os.getpid(), signal.SIGTERM)

    with beside(script, tmp_path):
        first = run(like(job, pace=0.1), tmp_path, workers=3)
    assert first.code == 143
    assert first.holdings == []
    (saved,) = first.events("durable_saved")
    assert 3 < saved["generation"] < STEPS
    assert first.summary["durable"] == saved["generation"]
    assert first.summary["state_digest"] is None

    second = run(job, tmp_path, workers=3)
    check_equal(second, calm(job, workers=3))
    begun = [e for e in second.events("all_committed") if e["at"] > saved["at"]]
    assert begun[-1]["generation"] == STEPS
    again = [e["generation"] for e in begun if e["at"] > second.events("opened")[-1]["at"]]
    assert again[0] == saved["generation"]
    # What it went on from is not written again.
    assert second.events("durable_saved") == [saved]


def test_a_loss_between_sigterm_and_checkpoint(
    tmp_path: Path, calm: Callable[..., Outcome]
) -> None:
    """The new owner writes its part as well; nobody waits for a part that never comes."""

    def script(out: Path) -> None:
        until(lambda: committed(out) >= 3)
        os.kill(os.getpid(), signal.SIGTERM)
        hit(out, owners_of(out)[1])

    with beside(script, tmp_path):
        first = run(like(FSDP, pace=0.1), tmp_path, workers=3)
    assert first.code == 143
    assert [swap["lost"] for swap in first.summary["swaps"]] == [[1]]
    assert len(first.events("durable_saved")) == 1
    second = run(FSDP, tmp_path, workers=3)
    check_equal(second, calm(FSDP, workers=3))


def test_losses_while_checkpoints_are_written(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """At every generation one is written, so a loss always meets one under way."""
    faults = (
        "kill:worker=0,step=3,phase=data",
        "kill:worker=1,step=6,phase=collective",
        "kill:worker=2,step=9,phase=optimizer",
    )
    struck = run(like(FSDP, checkpoint_every=1), tmp_path, workers=3, inject=faults)
    check_equal(struck, calm(FSDP, workers=3))
    assert len(struck.events("injected")) == 3
    # Nobody has waited for the limit of missing progress.
    assert {e["how"] for e in struck.events("detected")} <= {"stream", "pidfd"}
    assert all(e["reason"].startswith("shard") for e in struck.events("epoch_begun")[1:])
    # The last step's, too; and nothing is left of those that were cut off.
    assert struck.events("durable_saved")[-1]["generation"] == STEPS
    assert struck.summary["durable"] == STEPS
    assert names(tmp_path) == {f"step-{STEPS - 1}", f"step-{STEPS}"}


def test_an_incomplete_checkpoint_is_never_chosen(
    tmp_path: Path, calm: Callable[..., Outcome]
) -> None:
    """Neither a folder that is still being written, nor one without its mark, nor a file."""
    part = like(DDP, steps=6, checkpoint_every=2)
    assert run(part, tmp_path, workers=3).code == 0
    folder = tmp_path / "checkpoints"
    assert names(tmp_path) == {"step-4", "step-6"}
    shutil.copytree(folder / "step-4", folder / "step-90.e2.partial")
    # Epochs begin anew: this is where the second run will write its own generation 8.
    shutil.copytree(folder / "step-4", folder / "step-8.e1.partial")
    (folder / "step-8.e1.partial" / "left_over").write_text("of a run that was killed")
    shutil.copytree(folder / "step-4", folder / "step-80")
    (folder / "step-80" / "complete.json").unlink()
    (folder / "step-70").write_text("not a folder")
    second = run(like(DDP, checkpoint_every=4), tmp_path, workers=3)
    check_equal(second, calm(DDP, workers=3))
    assert names(tmp_path) == {"step-8", "step-12", "step-70", "step-80"}
    assert not (folder / "step-8" / "left_over").exists()
    opened = second.events("opened")[-1]["at"]
    began = [e["generation"] for e in second.events("all_committed") if e["at"] > opened]
    assert began[0] == 6


def test_a_killed_coordinator_is_survived(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """SIGKILL in mid-run, and a worker's loss after the new one has taken over."""
    job = Job(kind="fsdp", steps=30, final="", pace=0.05)

    def script(out: Path) -> None:
        until(lambda: committed(out) >= 3)
        contact = json.loads((out / "coordinator.json").read_text())
        os.kill(contact["pid"], signal.SIGKILL)
        until(lambda: sum(e["event"] == "opened" for e in journal(out)) == 2)
        at = committed(out)
        until(lambda: committed(out) > at + 1)
        hit(out, owners_of(out)[0])

    with beside(script, tmp_path):
        struck = run(job, tmp_path, workers=3)
    check_equal(struck, calm(job, workers=3))
    assert [e.get("resumed", False) for e in struck.events("opened")] == [False, True]
    assert [swap["lost"] for swap in struck.summary["swaps"]] == [[0]]


def test_coordinator_and_worker_at_once(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """Nobody hears of the worker until there is a coordinator again."""
    job = Job(kind="fsdp", steps=30, final="", pace=0.05)

    def script(out: Path) -> None:
        until(lambda: committed(out) >= 3)
        owners = owners_of(out)
        os.kill(json.loads((out / "coordinator.json").read_text())["pid"], signal.SIGKILL)
        hit(out, owners[1])

    with beside(script, tmp_path):
        struck = run(job, tmp_path, workers=3)
    check_equal(struck, calm(job, workers=3))
    assert [e.get("resumed", False) for e in struck.events("opened")] == [False, True]
    assert [swap["lost"] for swap in struck.summary["swaps"]] == [[1]]
