"""Groups that die and get a new inside, under DDP, FSDP2, DTensor and pipelines.

Real processes, real signals. Each case trains undisturbed and disturbed, and compares every rank's
parameters and moments bit for bit.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.ranks import Ranks

STEPS = 5


def undisturbed(kind: str, world: int) -> list[str]:
    with Ranks(world, kind=kind) as ranks:
        for _ in range(STEPS):
            answers = ranks.all("attempt")
        assert all(state == "done" for state, _ in answers)
        return [digest for _, digest in answers]


def disturbed(kind: str, world: int, *, victim: int, sig: signal.Signals, where: str) -> list[str]:
    with Ranks(world, kind=kind) as ranks:
        for _ in range(3):
            ranks.all("attempt")
        ranks.ranks[victim].ask("state")
        state = ranks.ranks[victim].answer()
        order = ranks.all("order")[0]
        for rank in ranks.ranks:
            rank.ask("attempt", victim, int(sig), where)
        if sig is signal.SIGKILL:
            ranks.ranks[victim].process.join(30)
            assert ranks.ranks[victim].process.exitcode == -signal.SIGKILL
        else:
            assert not ranks.ranks[(victim + 1) % world].pipe.poll(0.5), "nobody waited for it"
        ranks.newest(2)
        spare = ranks.start(victim, solo=True)
        spare.answer()
        for rank in ranks.ranks:
            if rank.rank != victim:
                outcome, seconds = rank.answer()
                assert outcome == "broken"
                assert seconds < 30  # the collective's own time-out is 40 s
        spare.ask("load", state)
        spare.answer()
        lost, ranks.ranks[victim] = ranks.ranks[victim], spare
        for rank in ranks.ranks:
            rank.ask("rebuild", 2, order if rank is spare else ())
        for rank in ranks.ranks:
            assert rank.answer() < 20
        for _ in range(STEPS - 3):
            answers = ranks.all("attempt")
        lost.kill()
        return [digest for _, digest in answers]


@pytest.mark.parametrize(
    ("kind", "world", "victim", "sig", "where"),
    [
        ("ddp", 3, 0, signal.SIGKILL, "backward"),
        ("ddp", 3, 1, signal.SIGSTOP, "forward"),
        ("fsdp", 3, 2, signal.SIGKILL, "clip"),
        ("fsdp", 3, 1, signal.SIGSTOP, "backward"),
        ("hsdp", 4, 3, signal.SIGKILL, "backward"),
        ("tp_fsdp", 4, 1, signal.SIGKILL, "backward"),
        ("gpipe", 3, 1, signal.SIGKILL, "forward"),
        ("1f1b", 3, 0, signal.SIGKILL, "forward"),
    ],
)
def test_training_across_a_rebuild_ends_bit_equal(
    kind: str, world: int, victim: int, sig: signal.Signals, where: str
) -> None:
    wanted = undisturbed(kind, world)
    found = disturbed(kind, world, victim=victim, sig=sig, where=where)
    assert found == wanted


def test_object_collectives_and_barriers_work_before_and_after_a_rebuild() -> None:
    with Ranks(3, kind="ddp") as ranks:
        wanted = [([0, 1, 2], "from zero")] * 3
        assert ranks.all("objects") == wanted
        ranks.newest(2)
        assert all(seconds < 20 for seconds in ranks.all("rebuild", 2))
        assert ranks.all("objects") == wanted


def test_a_broken_worker_raises_in_object_collectives_instead_of_unpickling_garbage() -> None:
    with Ranks(2, kind="ddp") as ranks:
        for rank in ranks.ranks:
            rank.ask("wait_forever", 1, int(signal.SIGKILL))
        assert ranks.ranks[0].answer()[0] == "broken"
        ranks.ranks[0].ask("broken_objects")
        assert ranks.ranks[0].answer().startswith("attempt given up: ")


def test_a_thread_of_an_older_epoch_meets_nobody_in_the_new_groups() -> None:
    with Ranks(2, kind="ddp") as ranks:
        assert all(state == "done" for state, _ in ranks.all("attempt"))
        ranks.newest(2)
        assert ranks.all("stray", 2) == ["epoch 1 is over: epoch 2 exists"] * 2
        assert len({digest for _, digest in ranks.all("attempt")}) == 1


def test_members_come_to_a_new_group_seconds_apart() -> None:
    """gloo's constructor gives up after a third of a rebuild's time, which is 0.5 s here."""
    with Ranks(2, kind="ddp") as ranks:
        for rank, late in zip(ranks.ranks, (0.0, 1.2), strict=True):
            rank.ask("group_after", late)
        assert [rank.answer() for rank in ranks.ranks] == [2.0, 2.0]


def test_a_callers_mistake_is_raised_and_breaks_nothing() -> None:
    with Ranks(2, kind="ddp") as ranks:
        for told in ranks.all("mistake"):
            assert told.endswith("live")
            assert not told.startswith("no error")
        assert all(state == "done" for state, _ in ranks.all("attempt"))


def test_everyone_leaves_a_collective_that_a_stopped_peer_never_enters() -> None:
    with Ranks(3, kind="ddp") as ranks:
        for rank in ranks.ranks:
            rank.ask("wait_forever", 2, int(signal.SIGSTOP))
        assert not ranks.ranks[0].pipe.poll(1.0)
        ranks.newest(2)
        for rank in ranks.ranks[:2]:
            outcome, seconds = rank.answer()
            assert outcome == "broken"
            assert seconds < 15  # 1 s of that was our own waiting; the time-out is 40 s


def test_a_rebuild_that_meets_a_second_failure_is_superseded_at_once() -> None:
    with Ranks(3, kind="ddp") as ranks:
        ranks.newest(2)
        for rank in ranks.ranks[:2]:
            rank.ask("try_rebuild", 2)  # rank 2 never comes
        assert not ranks.ranks[0].pipe.poll(0.5)
        ranks.newest(3)
        for rank in ranks.ranks[:2]:
            name, seconds = rank.answer()
            assert name == "EpochSuperseded"
            assert seconds < 10  # the rebuild's own limit is 20 s
        assert all(seconds < 20 for seconds in ranks.all("rebuild", 3))
        assert all(state == "done" for state, _ in ranks.all("attempt"))
