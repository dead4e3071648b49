"""What ``--help`` shows: words, not Python's values, in the width of the terminal."""

from __future__ import annotations

import re

import pytest

from planaria import cli, helptext


@pytest.mark.parametrize(
    "words", [command.words for command in cli.commands()], ids=lambda words: " ".join(words)
)
def test_help_is_in_words(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: planaria {' '.join(words)} ")
    for ugly in ("{None}", "(default: None)", "(default: )", "(default: '')", "`", "│", ", --no-"):
        assert ugly not in text
    assert "  -h, --help            show this help message and exit\n" in text
    wide = [line for line in text.splitlines()[1:] if len(line) > 80]
    assert [line for line in wide if " " in line.strip()] == []
    options = re.findall(r"^  (--\S+)", text, flags=re.MULTILINE)
    assert len(options) == len(set(options))


DRAWN = """\
usage: x [-h] [OPTIONS] [[PATH [PATH ...]]]

Says ``what`` is *known*.

╭─ positional arguments ─────────────────────────────╮
│ [[PATH [PATH ...]]]  Slides. (default: )           │
╰────────────────────────────────────────────────────╯
╭─ tissue options ───────────────────────────────────╮
│ How :class:`~a.Tissue` is                          │
│ told.                                              │
│ ────────────────────────────────────────────────── │
│ --mpp {None}|FLOAT   A 3 * 4 grid of               │
│                      `tiles`. (default: None)      │
│ --tissue.pen, --tissue.no-pen                      │
│                      Ink is taken out. (default:   │
│                      True)                         │
│ --json, --no-json    As JSON. (default: False)     │
╰────────────────────────────────────────────────────╯
"""


def test_what_tyro_draws_is_set_anew() -> None:
    assert (
        helptext.tidy(DRAWN, width=50)
        == """\
usage: x [-h] [OPTIONS] PATH [PATH ...]

Says what is known.

positional arguments:
  PATH [PATH ...]       Slides.

tissue options:
  How a.Tissue is told.
  --mpp FLOAT           A 3 * 4 grid of tiles.
  --tissue.[no-]pen     Ink is taken out.
                        (default: on)
  --json                As JSON.
"""
    )
    assert helptext.missing(DRAWN) == []
