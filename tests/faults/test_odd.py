"""What nobody thinks of: scripts and machines that behave oddly, alone or together with a loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.fault_programs import Job
from tests.support.fault_runs import (
    Outcome,
    check_equal,
    check_faults,
    committed,
    journal,
    like,
    of_run,
    run,
    until,
)

STEPS = 10
DDP = Job(kind="ddp", steps=STEPS, final="")
FSDP = Job(kind="fsdp", steps=STEPS, final="")
FAULT = "kill:worker=1,step=6,phase=backward"


def struck(job: Job, out: Path, **settings: object) -> Outcome:
    return run(job, out, **{"workers": 3, "inject": (FAULT,), **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hook",
    [
        "hold_the_interpreter",  # a user's thread in one long call that keeps the GIL
        "print_garbage",  # bytes that are no text, a line without an end, NULs, colour codes
        "evaluate",  # eval() and no_grad between the steps, through DDP
        "draw_elsewhere",  # generators are drawn from outside of attempts, too
    ],
)
def test_a_script_of_its_own_ways(tmp_path: Path, calm: Callable[..., Outcome], hook: str) -> None:
    job = like(DDP, hook=hook)
    ended = struck(job, tmp_path)
    check_equal(ended, calm(job, workers=3))
    check_faults(ended, [FAULT])


def test_a_failure_that_is_never_heard_of_is_no_second_loss(
    tmp_path: Path, calm: Callable[..., Outcome]
) -> None:
    """A survivor that gloo has forgotten is freed all the same, in the first epoch, too."""
    ended = run(like(DDP, hook="miss_a_failure"), tmp_path, workers=3)
    check_equal(ended, calm(DDP, workers=3))
    assert [event["worker"] for event in ended.events("detected")] == ["w1"]
    (said,) = [e for e in ended.events("broke") if e["reason"].endswith("given up")]
    assert (said["worker"], said["epoch"]) == ("w0", 1)
    assert said["reason"].startswith("1 collective did not end though its sockets were shut ")


def test_unfreezing_reaches_a_spare(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """The loop thaws a layer at step 3; the spare that comes at step 6 has built it frozen."""
    job = like(Job(kind="plain", steps=STEPS, final=""), hook="thaw")
    ended = struck(job, tmp_path)
    check_equal(ended, calm(job, workers=3))
    check_faults(ended, [FAULT])
    frozen = calm(Job(kind="plain", steps=STEPS, final=""), workers=3)
    assert ended.summary["state_digest"] != frozen.summary["state_digest"]


def test_a_model_that_the_loop_has_enlarged_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What only the loop has built cannot be moved to a spare: an error, and no guess."""
    ended = struck(like(FSDP, hook="enlarge"), tmp_path)
    assert ended.code == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "all workers must build the same objects" in error
    assert "model.1.extra" in error


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nan_stops_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    job = Job(kind=kind, steps=STEPS, final="", nan_at=(4, 1))  # type: ignore[arg-type]
    ended = run(job, tmp_path, workers=3)
    assert ended.code == 1
    error = capfd.readouterr().err
    assert error.startswith("planaria: the loss of step 4 is not finite on shard 1")
    assert error.count("\n") == 1
    assert ended.summary["steps"] == 3
    assert ended.events("all_committed")[-1]["generation"] == 3


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nan_is_skipped_and_a_loss_changes_nothing(
    tmp_path: Path, calm: Callable[..., Outcome], kind: str
) -> None:
    job = Job(  # type: ignore[arg-type]
        kind=kind, steps=STEPS, final="", nan_at=(6, 2), on_nonfinite="skip"
    )
    ended = struck(job, tmp_path)
    check_equal(ended, calm(job, workers=3))
    check_faults(ended, [FAULT])
    assert len(ended.holdings[0]["curve"]) == STEPS - 1


def test_a_mistake_of_the_script_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = run(like(DDP, raise_at=(5, 0)), tmp_path, workers=3)
    assert ended.code == 1
    error = capfd.readouterr().err
    assert error.startswith("planaria: ValueError: a mistake of the script's own in step 5 (")
    assert error.count("\n") == 1
    assert ended.summary["steps"] <= 4
    assert ended.summary["swaps"] == []


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, calm: Callable[..., Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    """Shard 1 cannot write more than some kilobytes, as on a disk that fills up."""
    job = like(FSDP, checkpoint_every=4, hook="fill_the_disk")
    ended = run(job, tmp_path, workers=3)
    check_equal(ended, calm(FSDP, workers=3))
    line = (
        "planaria: no durable checkpoint of generation 4: shards 0, 1 and 2 could not write the "
        "durable checkpoint: OSError: [Errno 27] File too large\n"
    )
    assert capfd.readouterr().err == line
    errors = [e["fields"] for e in ended.events("decided") if e["name"] == "durable"]
    assert {e["shard"] for e in errors} == {0, 1, 2}
    assert all("File too large" in e["error"] for e in errors)
    assert [e["generation"] for e in ended.events("durable_saved")] == [8]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-8"}


def test_sigkill_of_the_fork_server(tmp_path: Path) -> None:
    """All workers die with it, the launcher says so and ends; nothing is left."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.support.fault_programs import Job\nfrom tests.support.fault_runs import run\n"
        "job = Job(kind='ddp', steps=100000, final='', pace=0.05)\n"
        f"sys.exit(run(job, Path({str(tmp_path)!r}), workers=2, timeout=5.0).code)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        until(lambda: committed(tmp_path) >= 2)
        (attached, *_) = [e for e in journal(tmp_path) if e["event"] == "worker_attached"]
        server = psutil.Process(attached["pid"]).ppid()
        os.kill(server, signal.SIGKILL)
        said, _ = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    assert child.returncode == 1, said
    assert "Traceback" not in said
    assert of_run(tmp_path) == []
