"""The journal's lines and what they sum up to."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import DataError, RunError
from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.chronicle import Chronicle, role
from planaria.runtime.coordinator.journal import Journal, read
from planaria.runtime.coordinator.summary import read_summary, summarise, write_summary
from planaria.runtime.membership.state import Member, MembershipConfig, State


def opened(**fields: Any) -> journal.Opened:
    values = {"run": "r", "world": 2, "spares": 1, "address": "127.0.0.1:1", "pid": 1, "mono": 0.0}
    return journal.Opened(**{**values, **fields})


def run_with_a_swap() -> list[journal.AnyEntry]:
    """Two shards; w1 is killed at 10.0 in step 4, w2 takes over from generation 3."""
    finished = [
        journal.ShardFinished(
            shard=shard,
            worker=worker,
            generation=5,
            state_digest=f"s{shard}",
            samples_digest=f"d{shard}",
            result={"val_loss": 2.0 + shard},
            mono=20.0,
        )
        for shard, worker in ((0, "w0"), (1, "w2"))
    ]
    return [
        opened(),
        journal.EpochBegun(epoch=1, phase="building", reason="all are there", mono=1.0),
        journal.Planned(
            epoch=1, generation=0, redone=0, transfers=0, reason="fresh", lost=(), mono=2.0
        ),
        journal.Released(epoch=1, mono=3.0),
        journal.Protected(epoch=1, generation=0, mono=3.1),
        journal.AllCommitted(epoch=1, generation=0, bytes=10, mono=3.1),
        journal.AllCommitted(epoch=1, generation=3, bytes=60, step_s=2.0, waited_s=0.02, mono=9.0),
        journal.Injected(worker="w1", fault="kill", step=4, phase="backward", mono=10.0),
        journal.Detected(worker="w1", how="stream", reason="cut", shard=1, mono=10.02),
        journal.EpochBegun(epoch=2, phase="recovering", reason="shard 1", lost=(1,), mono=10.03),
        journal.Planned(
            epoch=2, generation=3, redone=1, transfers=1, reason="newest", lost=(1,), mono=10.2
        ),
        journal.WorkerRestored(
            worker="w0",
            epoch=2,
            generation=3,
            phases={"drain": 0.1, "rebuild": 0.05, "verify": 0.01},
            mono=10.4,
        ),
        journal.WorkerRestored(
            worker="w2",
            epoch=2,
            generation=3,
            phases={"build": 0.07, "rebuild": 0.04, "move": 0.1},
            mono=10.45,
        ),
        journal.Released(epoch=2, mono=10.5),
        journal.Protected(epoch=2, generation=3, mono=10.75),
        journal.AllCommitted(epoch=2, generation=3, bytes=5, mono=10.75),
        journal.AllCommitted(epoch=2, generation=4, bytes=20, step_s=1.0, waited_s=0.01, mono=11.5),
        journal.Scalars(worker="w0", shard=0, step=4, values={"loss": 3.5}, mono=11.6),
        journal.AllCommitted(epoch=2, generation=5, bytes=5, step_s=3.0, mono=13.0),
        journal.Scalars(worker="w0", shard=0, step=5, values={"loss": 3.25}, mono=13.1),
        journal.DurableSaved(generation=4, path="p", mono=14.0),
        *finished,
        journal.Ended(exit_code=0, reason="done", mono=21.0),
    ]


def test_a_summary_tells_each_swap_by_phase() -> None:
    summary = summarise(run_with_a_swap())
    (swap,) = summary.swaps
    assert (swap.epoch, swap.epochs, swap.lost, swap.workers) == (2, 1, (1,), ("w1",))
    assert (swap.how, swap.injected, swap.generation, swap.redone) == (("stream",), True, 3, 1)
    expected = {
        "detect": 0.02,
        "drain": 0.1,
        "build": 0.07,
        "rebuild": 0.05,
        "move": 0.1,
        "verify": 0.01,
        "resume": 1.0,
        "protect": 0.25,
    }
    assert swap.phases == pytest.approx(expected)
    assert swap.recovery == pytest.approx(0.5)
    assert swap.total == pytest.approx(1.5)


def test_a_summary_tells_the_run() -> None:
    summary = summarise(run_with_a_swap())
    assert (summary.run, summary.exit_code, summary.reason, summary.world) == ("r", 0, "done", 2)
    assert (summary.steps, summary.steps_redone, summary.injected, summary.durable) == (5, 1, 1, 4)
    assert summary.seconds == 21.0
    assert summary.step_s == 2.0
    assert summary.final == {"loss": 3.25, "val_loss": 2.0}
    assert summary.state_digest == hashlib.sha256(b"s0\ns1").hexdigest()
    assert summary.samples_digest == hashlib.sha256(b"d0\nd1").hexdigest()
    assert summary.protected_bytes == 100
    assert summary.protected_bytes_per_step == 20.0
    assert summary.overhead == pytest.approx(0.03 / 6.0)


def test_a_second_loss_on_the_way_belongs_to_the_same_swap() -> None:
    lines = run_with_a_swap()
    at = next(i for i, line in enumerate(lines) if isinstance(line, journal.WorkerRestored))
    lines[at:at] = [
        journal.Detected(worker="w2", how="silence", reason="quiet", shard=1, mono=10.25),
        journal.EpochBegun(epoch=3, phase="recovering", reason="again", lost=(1,), mono=10.26),
    ]
    (swap,) = summarise(lines).swaps
    assert (swap.epochs, swap.workers, swap.how) == (2, ("w1", "w2"), ("stream", "silence"))


def test_a_lost_spare_is_no_swap_and_an_open_one_has_no_total() -> None:
    lines: list[journal.AnyEntry] = [
        opened(),
        journal.Released(epoch=1, mono=1.0),
        journal.Detected(worker="w9", how="stream", reason="cut", mono=2.0),
    ]
    assert summarise(lines).swaps == ()
    lines += [
        journal.Detected(worker="w1", how="pidfd", reason="cut", shard=1, mono=3.0),
        journal.EpochBegun(epoch=2, phase="waiting", reason="no spare", lost=(1,), mono=3.1),
    ]
    summary = summarise(lines)
    (swap,) = summary.swaps
    assert (swap.generation, swap.recovery, swap.total, swap.injected) == (None, None, None, False)
    assert (summary.exit_code, summary.state_digest, summary.overhead) == (None, None, None)


def test_a_journal_is_continued_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entries = run_with_a_swap()
    for part in (entries[:3], entries[3:]):
        book = Journal(path)
        for entry in part:
            book.write(entry)
        book.close()
    assert list(read(path)) == entries
    summary = write_summary(tmp_path)
    assert read_summary(tmp_path) == summary
    assert path.read_text().splitlines()[0].startswith('{"event":"opened","run":"r",')


def test_an_infinite_scalar_survives_the_summary(tmp_path: Path) -> None:
    book = Journal(tmp_path / "journal.jsonl")
    book.write(opened())
    book.write(journal.Scalars(worker="w0", shard=0, step=1, values={"loss": 1e300}))
    book.close()
    assert math.isclose(write_summary(tmp_path).final["loss"], 1e300)


def test_a_torn_last_line_is_kept_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    book = Journal(path)
    book.write(opened())
    book.close()
    with path.open("ab") as stream:
        stream.write(b'{"event":"rele')
    assert len(list(read(path))) == 1
    book = Journal(path)
    book.write(journal.Released(epoch=1))
    book.close()
    kinds = [type(entry) for entry in read(path)]
    assert kinds == [journal.Opened, journal.Torn, journal.Released]
    assert [e.text for e in read(path) if isinstance(e, journal.Torn)] == ['{"event":"rele']


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    book = Journal(path)
    book.write(opened())
    book.close()
    with path.open("ab") as stream:
        stream.write(b'{"event":"released"}\n')
    with pytest.raises(DataError) as caught:
        list(read(path))
    assert str(caught.value) == (
        f"journal {path}, line 2: Object missing required field `epoch`; "
        "the file was changed by something else, so mend or remove that line"
    )
    with pytest.raises(DataError) as missing:
        list(read(tmp_path / "none"))
    assert str(missing.value) == (
        f"journal {tmp_path / 'none'} cannot be read: No such file or directory; "
        "give the --out folder of a run"
    )
    with pytest.raises(DataError, match=r"^the journal holds no run: its first line, 'opened'"):
        summarise([])


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        Journal(tmp_path / "no" / "journal.jsonl")
    assert str(caught.value) == (
        f"journal {tmp_path}/no/journal.jsonl cannot be opened: No such file or directory; "
        "free the place or choose another --out"
    )
    book = Journal(Path("/dev/full"))
    with pytest.raises(RunError, match=r"^journal /dev/full cannot be written: No space left on"):
        book.write(opened())
    with pytest.raises(OSError, match="No space left"):
        book.close()


def test_numbers_that_are_not_finite_can_be_read_again(tmp_path: Path) -> None:
    book = Journal(tmp_path / journal.JOURNAL_FILE)
    book.write(opened(world=1))
    values = {"loss": math.nan, "top": math.inf, "low": -math.inf, "lr": 0.5}
    book.write(journal.Scalars(worker="w0", shard=0, step=1, values=journal.as_numbers(values)))
    book.close()
    final = write_summary(tmp_path).final
    assert math.isnan(final["loss"])
    assert (final["top"], final["low"], final["lr"]) == (math.inf, -math.inf, 0.5)
    assert read_summary(tmp_path).final["top"] == math.inf


def test_a_folder_that_is_used_again_tells_of_its_last_run() -> None:
    lines = [*run_with_a_swap(), opened(run="s", mono=30.0), *run_with_a_swap()[1:7]]
    lines.append(opened(run="s", resumed=True, mono=31.0))
    summary = summarise(lines)
    assert (summary.run, summary.steps, summary.swaps, summary.injected) == ("s", 3, (), 0)
    assert (summary.exit_code, summary.state_digest) == (None, None)


def test_a_resumed_run_tells_where_it_began() -> None:
    first = run_with_a_swap()
    second = [
        opened(run="s", durable=5, mono=30.0),
        journal.AllCommitted(epoch=1, generation=5, bytes=0, mono=31.0),
        journal.AllCommitted(epoch=1, generation=7, bytes=60, step_s=2.0, mono=33.0),
    ]
    summary = summarise([*first, *second])
    assert (summary.durable, summary.begun_at, summary.steps) == (5, 5, 7)
    assert summary.seconds == 3.0
    assert summary.protected_bytes_per_step == 30.0
    # A coordinator that takes over has begun nothing.
    over = [*second, opened(run="s", resumed=True, durable=7, mono=34.0)]
    assert summarise(over).begun_at == 5


def test_restarts_of_the_whole_are_counted() -> None:
    fields = {"restart": 1, "reason": "worker w1 was lost"}
    lines = [opened(), journal.Decided(name="restart", fields=fields)]
    assert summarise(lines).restarts == 1


LOST = [
    (Member(worker="w1", node="n", address="a", seq=0), False, "spare w1 is lost: cut"),
    (Member(worker="w1", node="n", address="a", seq=0, rank=1), False, "worker w1 is lost: cut"),
    (
        Member(worker="w1", node="n", address="a", seq=0, rank=1, ready=True),
        False,
        "spare w1 is lost: cut",
    ),
    (Member(worker="w1", node="n", address="a", seq=0, rank=1, joinless=True), True, None),
    (Member(worker="w1", node="n", address="a", seq=0), True, "spare w1 is lost: cut"),
]


@pytest.mark.parametrize(("member", "joinless", "line"), LOST)
def test_a_lost_worker_is_called_what_it_is(
    tmp_path: Path, member: Member, joinless: bool, line: str | None
) -> None:
    """A worker of a script that does not join is no spare; the line of the restart names it."""
    said: list[str] = []
    book = Journal(tmp_path / journal.JOURNAL_FILE)
    chronicle = Chronicle(book, show=lambda shown: said.append(shown.text))
    state = State(config=MembershipConfig(world=2), joinless=joinless)
    known_as = role(state, member)
    chronicle.detected("w1", shard=None, how="stream", reason="cut", known_as=known_as)
    book.close()
    assert said == ([] if line is None else [line])
    assert [entry.worker for entry in read(book.path) if isinstance(entry, journal.Detected)]


def test_a_regrouping_is_no_part_of_the_swap_before_it() -> None:
    lines = run_with_a_swap()
    at = next(i for i, line in enumerate(lines) if isinstance(line, journal.DurableSaved))
    lines[at:at] = [
        journal.EpochBegun(epoch=3, phase="recovering", reason="a communicator failed", mono=14.0),
        journal.Planned(epoch=3, generation=5, redone=1, transfers=0, reason="newest", mono=14.1),
        journal.Released(epoch=3, mono=14.2),
        journal.AllCommitted(epoch=3, generation=6, bytes=5, step_s=3.0, mono=16.0),
    ]
    before, after = summarise(run_with_a_swap()), summarise(lines)
    assert after.swaps == before.swaps
    assert (before.steps_redone, after.steps_redone) == (1, 2)


def test_a_second_loss_before_the_next_commit_is_a_swap_of_its_own() -> None:
    lines = run_with_a_swap()
    at = next(i for i, x in enumerate(lines) if isinstance(x, journal.Protected) and x.epoch == 2)
    lines[at:at] = [
        journal.Detected(worker="w0", how="stream", reason="cut", shard=0, mono=10.6),
        journal.EpochBegun(epoch=3, phase="recovering", reason="shard 0", lost=(0,), mono=10.6),
    ]
    first, second = summarise(lines).swaps
    assert (first.lost, first.total, first.recovery) == ((1,), None, pytest.approx(0.5))
    assert (second.lost, second.epoch) == ((0,), 3)
