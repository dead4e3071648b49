"""SIGKILL and SIGSTOP in every phase of a step, to every worker, in every regime: no trace is left.

Four faults to a run, one for each shard's first owner, so that a start is paid four times less often.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fault_programs import Job, Kind
from tests.support.fault_runs import Outcome, check_equal, check_faults, run

STEPS = 14
# (worker, step, phase): each phase once, and each worker in an early and in a late one.
EARLY = ((2, 3, "data"), (0, 6, "forward"), (3, 9, "backward"), (1, 12, "collective"))
LATE = ((1, 3, "optimizer"), (3, 6, "capture"), (0, 9, "replicate"), (2, 12, "commit"))
# Worker 0 where it hurts most, and the first and the last step.
EDGES = ((0, 1, "backward"), (3, 5, "optimizer"), (1, 10, "commit"), (2, STEPS, "optimizer"))


def faults(action: str, places: tuple[tuple[int, int, str], ...]) -> tuple[str, ...]:
    return tuple(f"{action}:worker={w},step={s},phase={p}" for w, s, p in places)


@pytest.mark.parametrize(
    ("kind", "action", "places"),
    [
        pytest.param("ddp", "kill", EARLY, id="ddp-kill-early"),
        pytest.param("ddp", "kill", LATE, id="ddp-kill-late"),
        pytest.param("fsdp", "kill", EARLY, id="fsdp-kill-early"),
        pytest.param("fsdp", "kill", LATE, id="fsdp-kill-late"),
        pytest.param("ddp", "stop", LATE, id="ddp-stop-late"),
        pytest.param("fsdp", "stop", EARLY, id="fsdp-stop-early"),
    ],
)
def test_every_phase(
    tmp_path: Path,
    calm: Callable[..., Outcome],
    kind: Kind,
    action: str,
    places: tuple[tuple[int, int, str], ...],
) -> None:
    """A stop takes seconds to be noticed: half of them here, all in the benchmark's matrix."""
    struck_by = faults(action, places)
    job = Job(kind=kind, steps=STEPS, final="")
    struck = run(job, tmp_path, workers=4, inject=struck_by)
    check_equal(struck, calm(job, workers=4))
    check_faults(struck, struck_by)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_first_and_last_step(tmp_path: Path, calm: Callable[..., Outcome], kind: Kind) -> None:
    struck_by = faults("kill", EDGES)
    job = Job(kind=kind, steps=STEPS, final="")
    struck = run(job, tmp_path, workers=4, inject=struck_by)
    check_equal(struck, calm(job, workers=4))
    check_faults(struck, struck_by)


def test_hsdp_with_stops(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    struck_by = (*faults("stop", EARLY[:2]), *faults("kill", EARLY[2:]))
    job = Job(kind="hsdp", steps=STEPS, final="")
    struck = run(job, tmp_path, workers=4, inject=struck_by)
    check_equal(struck, calm(job, workers=4))
    check_faults(struck, struck_by)


def test_max_redo_of_one_is_kept(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    struck_by = faults("kill", LATE)
    job = Job(kind="ddp", steps=STEPS, final="")
    struck = run(job, tmp_path, workers=4, inject=struck_by, max_redo=1)
    check_equal(struck, calm(job, workers=4))
    check_faults(struck, struck_by, max_redo=1)


def test_two_workers_at_once(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """Neither holds the other's copy; both in the same phase of the same step."""
    struck_by = faults("kill", ((0, 5, "backward"), (2, 5, "backward")))
    job = Job(kind="fsdp", steps=STEPS, final="")
    struck = run(job, tmp_path, workers=4, spares=2, inject=struck_by)
    check_equal(struck, calm(job, workers=4))
    check_faults(struck, struck_by)


def test_a_loss_between_two_attempts(tmp_path: Path, calm: Callable[..., Outcome]) -> None:
    """Where a script has got its attempt and not yet entered it, no error may reach the script."""
    fault = "kill:worker=1,step=6,phase=data"
    job = Job(kind="ddp", steps=10, final="", dawdle=True)
    struck = run(job, tmp_path, workers=3, inject=(fault,))
    check_equal(struck, calm(job, workers=3))
    check_faults(struck, [fault])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_a_broken_collective_has_left_is_never_committed(
    tmp_path: Path, calm: Callable[..., Outcome], kind: Kind
) -> None:
    """The lost worker has ended its step, and its holder has that state; shard 0 waits for shard 2
    and is freed with garbage in its hands: step 6 exists for shard 1 alone, and must not be taken.
    """
    fault = "kill:worker=1,step=6,phase=commit"
    job = Job(kind=kind, steps=10, final="", gossip=True)
    struck = run(job, tmp_path, workers=3, inject=(fault,))
    check_equal(struck, calm(job, workers=3))
    check_faults(struck, [fault])
    (swap,) = struck.summary["swaps"]
    assert (swap["generation"], swap["redone"]) == (5, 1)


def test_runs_differ_where_they_should(calm: Callable[..., Outcome]) -> None:
    """The digests hash something: another seed, other shards, another step give others."""
    one = calm(Job(kind="ddp", steps=STEPS, final=""), workers=4)
    other = calm(Job(kind="ddp", steps=STEPS, final="", seed=1), workers=4)
    sharded = calm(Job(kind="fsdp", steps=STEPS, final=""), workers=4)
    for name in ("state_digest", "samples_digest"):
        assert len({run.summary[name] for run in (one, other)}) == 2
    assert len({run.summary["state_digest"] for run in (one, other, sharded)}) == 3
    of_shards = [line["state_digest"] for line in sharded.events("shard_finished")]
    assert len(set(of_shards)) == 4
    # In DDP all shards hold the same, with statistics of BatchNorm from the shared buffers.
    assert one.summary["samples_digest"] != sharded.summary["state_digest"]
    ids = [line["samples_digest"] for line in one.events("shard_finished")]
    assert len(set(ids)) == 4
