"""The line by which a failed script is known."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from planaria.runtime.launch import worker


def raised(script: Path) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        runpy.run_path(str(script), run_name="__main__")
    return caught.value


def test_the_place_is_in_the_users_own_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\n\ndef load():\n    return json.loads('{')\n\nload()\n")
    line = worker.describe(raised(script), script=str(script))
    assert line == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: "
        f"line 1 column 2 (char 1) ({script}:4)"
    )


def test_a_helper_beside_the_script_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def divide(x):\n    return 1 / x\n")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport helper\nhelper.divide(0)\n"
    )
    line = worker.describe(raised(script), script=str(script))
    assert line == f"ZeroDivisionError: division by zero ({tmp_path / 'helper.py'}:2)"


def test_an_exception_without_text(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise KeyboardInterrupt\n")
    line = worker.describe(raised(script), script=str(script))
    assert line == f"KeyboardInterrupt ({script}:1)"


def test_several_lines_become_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('one\\n  two\\n\\nthree')\n")
    line = worker.describe(raised(script), script=str(script))
    assert line == f"RuntimeError: one two three ({script}:1)"


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert worker.describe(ValueError("x")) == "ValueError: x"


def test_outside_of_a_run_there_is_no_context() -> None:
    assert worker.context() is None
