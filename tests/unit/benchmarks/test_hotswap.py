"""The parts of ``benchmarks/hot_swap.py`` that compute: by value, on journals and rows made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hotswap import overhead, report
from hotswap.figures import median_interval, table
from hotswap.paths import PHASES, critical_path
from hotswap.recovery import of_torchft, of_torchrun
from hotswap.rows import Rows
from hotswap.task import Notes, Strike, Task, protects, read_notes

from planaria.runtime.coordinator.journal import (
    JOURNAL_FILE,
    AllCommitted,
    AnyEntry,
    Detected,
    EpochBegun,
    Planned,
    Released,
    WorkerRestored,
    read,
)


def task(folder: Path, **values: Any) -> Task:
    plain: dict[str, Any] = {
        "folder": str(folder),
        "workers": 2,
        "regime": "replicated",
        "width": 64,
        "layers": 2,
        "context": 16,
        "batch": 1,
        "steps": 20,
    }
    return Task(**{**plain, **values})


def journal(at: float = 100.0) -> list[AnyEntry]:
    """A swap whose signal came at ``at``; the spare builds longer than the survivor drains."""
    survivor = {"drain": 0.3, "report": 0.5, "rebuild": 0.1, "load": 0.05, "verify": 0.4}
    spare = {"build": 0.7, "report": 0.1, "rebuild": 0.1, "move": 0.3, "load": 0.1, "verify": 0.05}
    return [
        AllCommitted(mono=at - 1.0, epoch=1, generation=7, step_s=0.5),
        Detected(mono=at + 0.1, worker="w1", how="stream", reason="gone", shard=1),
        EpochBegun(mono=at + 0.2, epoch=2, phase="recovering", reason="w1", lost=(1,)),
        Planned(mono=at + 1.0, epoch=2, generation=7, redone=1, transfers=2, reason="newest"),
        WorkerRestored(mono=at + 1.5, worker="w0", epoch=2, generation=7, phases=survivor),
        WorkerRestored(mono=at + 1.6, worker="w2", epoch=2, generation=7, phases=spare),
        Released(mono=at + 1.6, epoch=2),
        AllCommitted(mono=at + 2.3, epoch=2, generation=8, step_s=0.6),
    ]


def test_the_critical_path_adds_up_and_follows_whom_all_wait_for() -> None:
    path = critical_path(journal(), signal=100.0)
    assert tuple(path) == PHASES
    assert sum(path.values()) == pytest.approx(2.3)
    expected = {
        "detect": 0.2,
        "broken attempt": 0.3,
        "build": 0.4,
        "plan": 0.1,
        "rebuild": 0.1,
        "move": 0.3,
        "load": 0.1,
        "verify": 0.1,
        "step": 0.6,
        "commit": 0.1,
    }
    assert path == pytest.approx(expected)


def test_a_swap_that_did_not_end_is_named() -> None:
    with pytest.raises(LookupError, match="the journal has no Released after the signal"):
        critical_path(journal()[:6], signal=100.0)


def test_the_next_swap_is_not_looked_at() -> None:
    both = [*journal(100.0), *journal(200.0)]
    assert critical_path(both, signal=100.0, until=200.0) == pytest.approx(
        critical_path(journal(), signal=100.0)
    )


def test_protection_alternates_in_pairs_that_begin_in_turns(tmp_path: Path) -> None:
    job = task(tmp_path, steps=14, protection="alternating", undisturbed=3)
    off = [g for g in range(1, 15) if not protects(job, g)]
    assert off == [5, 6, 9, 10, 13]
    assert all(protects(task(tmp_path), g) for g in range(1, 21))


def test_a_period_holds_the_step_after_its_capture(tmp_path: Path) -> None:
    job = task(tmp_path, steps=8, protection="alternating", undisturbed=2)
    mono = {1: 0.0, 2: 1.0, 3: 2.0, 4: 3.5, 5: 4.5, 6: 5.5, 7: 7.5, 8: 9.0}
    lines = [
        {"note": "end", "step": s, "shard": w, "mono": m, "cpu": 2.0 * m, "lo": int(10 * m)}
        for s, m in mono.items()
        for w in (0, 1)
    ]
    job.notes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = overhead.pairs(job)
    assert (first["on"], first["off"]) == (1.5, 1.0)
    assert (second["off"], second["on"]) == (1.0, 2.0)
    assert (first["cpu_on"], first["sent_on"]) == (6.0, 15)


def test_other_systems_are_measured_until_the_interrupted_step_is_done(tmp_path: Path) -> None:
    job = task(tmp_path, strikes=(Strike(step=3, shard=1),), checkpoint_every=2)

    def step(at: float, number: int, rank: int, participants: int = 2) -> dict[str, Any]:
        return {
            "note": "step",
            "mono": at,
            "step": number,
            "rank": rank,
            "participants": participants,
        }

    before = [step(s, s, rank) for s in (1, 2) for rank in (0, 1)]
    signal = {"note": "signal", "mono": 2.5, "step": 3, "shard": 1}
    restart = [
        {"note": note, "mono": 4.0 + i, "rank": rank, "step": 2}
        for i, note in enumerate(("process", "imported", "ready"))
        for rank in (0, 1)
    ]
    again = [step(7.0, 3, 0), step(7.5, 3, 1)]
    _write(job, [*before, signal, *restart, *again])
    (row,) = of_torchrun(job)
    assert (row["seconds"], row["redone"], row["step_s"]) == (5.0, 1, 1.0)
    assert sum(row["path"].values()) == pytest.approx(5.0)
    _write(job, [*before, signal, step(4.5, 3, 0, 1), *again, step(8.0, 4, 0)])
    (row,) = of_torchft(job)
    assert (row["seconds"], row["whole_again"]) == (2.0, 4.5)


def _write(job: Task, lines: list[dict[str, Any]]) -> None:
    job.notes.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_task_and_its_notes_come_back_as_they_were(tmp_path: Path) -> None:
    job = task(tmp_path / "run", strikes=(Strike(step=3, shard=1),))
    assert Task.read(str(job.write())) == job
    Notes(job).write("step", step=1)
    (note,) = read_notes(job, "step")
    assert note["step"] == 1
    assert list(read_notes(job, "signal")) == []


def test_rows_are_kept_and_a_part_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "rows.jsonl"
    rows = Rows(path)
    rows.add("matrix/a", [{"row": "cell", "worker": 1}], seconds=1.0, load=0.5)
    rows.add("recovery/0", [{"row": "kill"}], seconds=1.0, load=0.5)
    again = Rows(path)
    assert again.has("matrix/a")
    assert not again.has("matrix/b")
    assert [row["worker"] for row in again.of("cell")] == [1]
    again.forget(["matrix"])
    assert not Rows(path).has("matrix/a")
    assert Rows(path).has("recovery/0")


@pytest.mark.parametrize(
    "change",
    [{"fired": False}, {"swaps": 2}, {"redone": 3}, {"state": "b"}, {"samples": "b"}],
)
def test_a_cell_is_good_only_in_every_respect(change: dict[str, Any]) -> None:
    calm = {"replicated": {"state": "a", "samples": "a"}}
    cell = {
        "regime": "replicated",
        "fired": True,
        "swaps": 1,
        "redone": 2,
        "state": "a",
        "samples": "a",
    }
    assert report.is_good(cell, calm)
    assert not report.is_good({**cell, **change}, calm)


def test_a_missed_target_is_said(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    pair = {"row": "pair", "regime": "replicated", "on": 1.2, "off": 1.1, "cpu_on": 2.0}
    pair |= {"cpu_off": 1.9, "sent_on": 5, "sent_off": 4}
    run = {"row": "overhead", "regime": "replicated", "state": 30_000_000, "bytes": [9]}
    rows.add("overhead/0", [pair, {**run, "waited_share": [0.002]}], seconds=60.0, load=0.1)
    page = report.report(rows, command="make bench")
    assert "| ≤ 1.01, steps ≥ 1 s | 1.0909 [1.0909, 1.0909] | **no** |" in page
    assert "| ≤ 1% of a step | 0.20% (worst 0.20%) | yes |" in page


def test_a_median_has_an_interval_around_it() -> None:
    found = median_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.low <= found.median == 3.0 <= found.high
    assert median_interval([2.0] * 9).low == 2.0
    with pytest.raises(ValueError, match="a median needs at least one value"):
        median_interval([])


def test_tables_are_markdown() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


@pytest.mark.slow
def test_what_is_switched_off_is_capture_replication_and_commit(tmp_path: Path) -> None:
    size = overhead.Size(
        parts=1, pairs=3, workers=2, width=64, layers=2, context=16, batch=1, sharded_batch=1
    )
    rows = overhead.measure(size, regime="replicated", folder=tmp_path, limit=90.0)
    assert [row["row"] for row in rows] == ["pair"] * 3 + ["overhead"]
    job = Task.read(str(tmp_path / "task.json"))
    entries = read(tmp_path / "run" / JOURNAL_FILE)
    committed = {line.generation for line in entries if isinstance(line, AllCommitted)}
    assert committed == {g for g in range(job.steps + 1) if protects(job, g)}
