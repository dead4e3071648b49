"""Scalars are written once, by whoever owns the shard, and only when they are committed."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from planaria.recipes.llm.scalars import Board, ProgressLine, describe, last_steps


def written(folder: Path) -> list[tuple[str, int, float]]:
    found: list[tuple[str, int, float]] = []
    for file in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.append((value.tag, event.step, round(value.tensor.float_val[0], 3)))
    return sorted(found)


def test_only_committed_steps_are_written(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for step in (1, 2, 3):
        board.add(step, {"loss": step / 10})
    board.write(upto=2, now=True)
    assert written(tmp_path) == [("loss", 1, 0.1), ("loss", 2, 0.2)]
    board.add(3, {"loss": 0.7})
    board.write(upto=3, now=True)
    board.write(upto=3, now=True)
    board.close()
    assert written(tmp_path) == [("loss", 1, 0.1), ("loss", 2, 0.2), ("loss", 3, 0.7)]


def test_nothing_is_made_before_something_is_committed(tmp_path: Path) -> None:
    board = Board(tmp_path / "board")
    board.add(1, {"loss": 1.0})
    board.write(upto=0, now=True)
    board.close()
    assert not (tmp_path / "board").exists()


def test_writes_are_at_most_one_a_second(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add(1, {"loss": 1.0})
    board.write(upto=1)
    assert written(tmp_path) == []
    board.write(upto=1, now=True)
    assert len(written(tmp_path)) == 1
    board.close()


def test_a_successor_writes_nothing_twice(tmp_path: Path) -> None:
    first = Board(tmp_path)
    first.add(1, {"loss": 0.1, "lr": 1.0})
    first.add(2, {"loss": 0.2, "lr": 1.0})
    state = first.state_dict()
    first.write(upto=1, now=True)
    (file,) = tmp_path.glob("events.*")
    # As a SIGKILL between two tags of a step leaves it: the last record is torn.
    whole = file.read_bytes()
    first.write(upto=2, now=True)
    first.close()
    record = (len(file.read_bytes()) - len(whole)) // 2
    file.write_bytes(file.read_bytes()[: len(whole) + record + 5])
    assert last_steps(tmp_path) == {"loss": 2, "lr": 1}

    second = Board(tmp_path)
    second.load_state_dict(state)
    second.add(3, {"loss": 0.3, "lr": 1.0})
    second.write(upto=3, now=True)
    second.close()
    assert written(tmp_path) == [
        ("loss", 1, 0.1),
        ("loss", 2, 0.2),
        ("loss", 3, 0.3),
        ("lr", 1, 1.0),
        ("lr", 2, 1.0),
        ("lr", 3, 1.0),
    ]


def test_state_is_a_copy(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add(1, {"loss": 1.0})
    state = board.state_dict()
    board.add(1, {"loss": 2.0})
    assert state == {"pending": {1: {"loss": 1.0}}, "last": {"loss": 1.0}}
    board.load_state_dict(state)
    assert board.state_dict() == state
    board.add(2, {"lr": 0.5})
    assert board.last == {"loss": 1.0, "lr": 0.5}


VALUES = {
    "loss": 5.1234,
    "lr": 0.003,
    "grad_norm": 0.5,
    "tokens_per_s": 9876.2,
}


def test_line() -> None:
    assert describe(20, 40, VALUES) == (
        "step 20/40  loss 5.1234  lr 3.00e-03  norm 0.50  9,876 tokens/s"
    )
    assert describe(3, 40, {"skipped": 1.0}) == "step 3/40  skipped: the loss is not finite"
    assert describe(40, 40, {"val_loss": 1.0, "perplexity": 2.71828}) == (
        "step 40/40  held-out loss 1.0000  perplexity 2.72"
    )


def test_plain_lines_are_few() -> None:
    text = io.StringIO()
    line = ProgressLine(steps=9, every=3600.0, console=Console(file=text, width=40))
    for step in range(1, 10):
        line.say(step, VALUES | ({"val_loss": 5.0} if step == 4 else {}))
    line.close()
    shown = text.getvalue().splitlines()
    assert [entry.split()[1] for entry in shown] == ["1/9", "4/9", "9/9"]


def test_bar_on_a_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    line = ProgressLine(steps=2, every=1.0, console=console)
    line.say(1, VALUES)
    line.say(2, VALUES)
    line.close()
    assert "step 2/2  loss 5.1234" in text.getvalue()
