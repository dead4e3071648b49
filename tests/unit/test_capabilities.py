"""What a capability prints, where it cannot be printed, and how it is stopped."""

from __future__ import annotations

import io
import os

import pytest

from planaria import capabilities, cli
from planaria.errors import DataError
from planaria.faithfulness import commands


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(command: object, *, note: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "execute", stopped)
    assert cli.main(["faith", "score", "demo", "--out", "runs/f"]) == 130
    assert capsys.readouterr().err == (
        "planaria: stopped; the answers are in runs/f; the same command goes on\n"
    )
    assert cli.main(["faith", "meta", "demo"]) == 130
    assert capsys.readouterr().err == "planaria: stopped; nothing is kept\n"


def test_an_output_that_cannot_be_written_or_spells_less() -> None:
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        pytest.raises(
            DataError,
            match=r"the output cannot be written \(No space left on device\): free space, then",
        ),
    ):
        capabilities._say("x" * 10000, to=full)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    capabilities._say("答案 7", to=ascii_only)
    assert ascii_only.buffer.getvalue() == b"?? 7\n"


def test_a_reader_that_has_seen_enough_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        capabilities._say("first", to=pipe)
        capabilities._say("second", to=pipe)
        # What is written from now on goes nowhere, and Python's own last flush, too.
        assert os.fstat(pipe.fileno()).st_rdev == os.stat(os.devnull).st_rdev
