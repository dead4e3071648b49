"""The text of ``--help``: what tyro draws, without frames, and in words instead of Python's values.

tyro's boxes say ``{None}|PATH``, ``(default: None)`` and ``--quiet, --no-quiet``, and keep the
mark-up of docstrings. Here they are taken apart and set anew; what an option is stays tyro's matter.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

DRAWN = 120
"""Columns that tyro draws in: with 130 and more it sets boxes side by side."""
_COLUMN = 24
"""Columns for the names of options; longer ones get a line of their own."""


@dataclass
class _Section:
    title: str
    about: list[str] = field(default_factory=list[str])
    rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@contextlib.contextmanager
def drawn() -> Generator[None]:
    """A terminal of :data:`DRAWN` columns, for what asks the environment for its width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(DRAWN)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def paper() -> io.TextIOWrapper:
    """What tyro writes on: in UTF-8, or it would draw its frames otherwise."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def read(written: io.TextIOWrapper) -> str:
    """What stands on it."""
    written.seek(0)
    return written.read()


def tidy(text: str, *, width: int) -> str:
    """tyro's help ``text`` set anew in ``width`` columns."""
    head, sections = _parts(text)
    lines = [_named(head[0])]
    lines += textwrap.wrap(_plain(" ".join(head[1:])), width)
    if len(lines) > 1:
        lines.insert(1, "")
    for section in sections:
        lines += ["", f"{section.title}:"]
        lines += textwrap.wrap(_plain(" ".join(section.about)), width, **_indents(2))
        for name, said in section.rows:
            lines += _row(*_option(name, _plain(said)), width=width)
    return "\n".join(lines) + "\n"


def missing(box: str) -> list[str]:
    """Names of the arguments that tyro's error ``box`` misses; none where it says something else."""
    inside = [line.strip("│|").rstrip() for line in box.splitlines()[1:]]
    if not inside or not inside[0].strip().startswith("Missing from"):
        return []
    names: list[str] = []
    for line in inside[1:]:
        if not line.strip(" ─-"):
            break
        if len(line) - len(line.lstrip()) <= 5:
            names.append(_named(line.strip()))
    return names


def _parts(text: str) -> tuple[list[str], list[_Section]]:
    """Usage and description, and the boxes."""
    head: list[str] = []
    sections: list[_Section] = []
    for line in text.splitlines():
        framed = re.match(r"[│|] ?(.*?)\s*[│|]?$", line)
        if title := re.match(r"[╭+][─-] (.*?) [─-]+", line):
            sections.append(_Section(title.group(1)))
        elif not sections:
            if line.strip():
                head.append(line.strip())
        elif framed is not None:
            _add(sections[-1], framed.group(1))
    return head or [""], sections


def _add(section: _Section, line: str) -> None:
    if line and not line.strip("─-"):  # what stood above this rule was about the whole section
        section.about = [f"{name} {said}".strip() for name, said in section.rows]
        section.rows = []
    elif line.startswith(" ") and section.rows:
        name, said = section.rows[-1]
        section.rows[-1] = name, f"{said} {line.strip()}".strip()
    elif line.strip():
        name, _, said = re.sub(r"(?<=\S) {2,}", "\0", line, count=1).partition("\0")
        section.rows.append((name, said))


def _option(name: str, said: str) -> tuple[str, str]:
    """Name and help of an option in words."""
    name = _named(name)
    pair = re.fullmatch(r"(?P<yes>--\S+), --(?:\S+\.)?no-\S+", name)
    if pair is not None:
        on = said.endswith("(default: True)")
        said = re.sub(r" ?\(default: (?:True|False)\)$", "", said)
        yes = pair.group("yes")
        path, _, last = yes.removeprefix("--").rpartition(".")
        stem = f"{path}." if path else ""
        return (f"--{stem}[no-]{last}", f"{said} (default: on)") if on else (yes, said)
    return name, re.sub(r" ?\(default: (?:None|''|)\)$", "", said)


def _named(text: str) -> str:
    text = text.replace("{None}|", "")
    return re.sub(r"\[\[(\w+) \[\1 \.\.\.\]\]\]", r"\1 [\1 ...]", text)


def _plain(text: str) -> str:
    """Without the mark-up of docstrings."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    text = re.sub(r"`+([^`]*)`+", r"\1", text)
    return re.sub(r"(?<![\w*])\*(\w[^*]*)\*(?![\w*])", r"\1", text)


def _row(name: str, said: str, *, width: int) -> Iterator[str]:
    lines = textwrap.wrap(said, width, **_indents(_COLUMN)) or [""]
    if len(name) + 4 <= _COLUMN:
        yield f"  {name:<{_COLUMN - 2}}{lines[0].strip()}".rstrip()
        yield from lines[1:]
    else:
        yield f"  {name}"
        yield from filter(None, lines)


def _indents(columns: int) -> dict[str, Any]:
    return {"initial_indent": " " * columns, "subsequent_indent": " " * columns}
