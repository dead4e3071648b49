"""What a user sees of the logs."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from planaria.runtime.launch.screen import TRACEBACK_MARK, Screen


def screen(*, quiet: bool = False, terminal: bool = False) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False)
    return Screen(quiet=quiet, out=console, err=console), out


def test_lines_carry_the_name_of_their_worker(tmp_path: Path) -> None:
    shown, out = screen()
    logs = [tmp_path / "w0.log", tmp_path / "w1.log"]
    shown.follow("w0", logs[0])
    shown.follow("w1", logs[1])
    shown.poll()
    logs[1].write_text("one\ntwo, not yet en")
    shown.poll()
    assert out.getvalue() == "[w1] one\n"
    with logs[1].open("a") as log:
        log.write("ded\n")
    logs[0].write_bytes(b"caf\xe9 [not markup]\n")
    shown.poll()
    assert out.getvalue() == "[w1] one\n[w0] caf\ufffd [not markup]\n[w1] two, not yet ended\n"


def test_what_was_in_a_log_before_is_not_shown(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("an older run\n")
    shown, out = screen()
    shown.follow("w0", log)
    with log.open("a") as stream:
        stream.write("now")
    shown.close()
    assert out.getvalue() == "[w0] now\n"


def test_a_redrawn_line_is_shown_as_it_ends(tmp_path: Path) -> None:
    shown, out = screen()
    log = tmp_path / "w0.log"
    shown.follow("w0", log)
    log.write_text(" 10%\r 50%\r100%\r\n")
    shown.poll()
    assert out.getvalue() == "[w0] 100%\n"


def test_a_traceback_stays_in_the_log(tmp_path: Path) -> None:
    shown, out = screen()
    log = tmp_path / "w0.log"
    shown.follow("w0", log)
    log.write_text(
        f"before\n{TRACEBACK_MARK}Traceback (most recent call last):\n  File\nValueError\n"
    )
    shown.forget("w0")
    shown.close()
    assert out.getvalue() == "[w0] before\n"


def test_colours_only_on_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    texts: list[str] = []
    for terminal in (False, True):
        shown, out = screen(terminal=terminal)
        log.unlink(missing_ok=True)
        shown.follow("w0", log)
        log.write_text("\x1b[31mred\x1b[0m\n")
        shown.close()
        texts.append(out.getvalue())
    assert texts[0] == "[w0] red\n"
    assert texts[1] == "\x1b[36m[w0]\x1b[0m \x1b[31mred\x1b[0m\n"


def test_quiet_leaves_errors_alone(tmp_path: Path) -> None:
    shown, out = screen(quiet=True)
    log = tmp_path / "w0.log"
    shown.follow("w0", log)
    log.write_text("text\n")
    shown.line("swap", kind="swap")
    shown.line("step 3", kind="progress")
    shown.poll()
    shown.forget("w0")
    shown.line("the run failed", kind="error")
    shown.close()
    assert out.getvalue() == "planaria: the run failed\n"


def test_progress_is_rare_where_there_is_no_terminal() -> None:
    shown, out = screen()
    for step in range(5):
        shown.line(f"step {step}", kind="progress")
    shown.line("worker 1 was lost", kind="swap")
    shown.close()
    assert out.getvalue() == "planaria: step 0\nplanaria: worker 1 was lost\n"


def test_progress_is_redrawn_on_a_terminal() -> None:
    shown, out = screen(terminal=True)
    for step in range(3):
        shown.line(f"step {step}", kind="progress")
    shown.close()
    assert all(f"step {step}" in out.getvalue() for step in range(3))
    assert not out.getvalue().endswith("step 2\n")  # it is taken away at the end


def test_a_bar_that_is_redrawn_for_hours_takes_no_memory(tmp_path: Path) -> None:
    shown, out = screen()
    log = tmp_path / "w0.log"
    shown.follow("w0", log)
    with log.open("ab") as stream:
        for part in range(200):
            stream.write(b"\r" + b"%3d%%" % part * 500)
            stream.flush()
            shown.poll()
        assert len(shown._followers["w0"].rest) <= 2001
        stream.write(b"\rdone\n")
    shown.poll()
    assert out.getvalue() == "[w0] done\n"
