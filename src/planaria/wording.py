"""tyro's words in our manner: its framed errors as one line, its help held back to be completed.

Apart from :mod:`planaria.cli`, which alone uses it.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from typing import Any, get_type_hints

_FRAME = re.compile(r"^[-─╭╮╰╯│|+ ]*[─╭╮╰╯│|+ -]{3,}$|^[│| ]+|[│| ]+$")


class Held(io.StringIO):
    """Keeps what is written, and looks like the real output, by which colours are chosen."""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(sys.__stdout__, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--batch-size": "--batch",
    "--per-device-train-batch-size": "--batch",
    "--gradient-accumulation-steps": "--accumulate",
    "--max-steps": "--steps",
    "--block-size": "--sequence",
    "--seq-length": "--sequence",
    "--output-dir": "--out",
    "--nproc-per-node": "--workers",
    "--num-workers": "--workers",
}
"""What other trainers call our options."""


def renamed(message: str, kind: Any) -> str:
    """``message``, with our name of an option that it knows by another trainer's."""
    if "did you mean" in message or "nrecognized" not in message:
        return message
    known = {f"--{name.replace('_', '-')}" for name in _names(kind)}
    for word in re.findall(r"--[a-z][a-z_-]*", message):
        ours = _ELSEWHERE.get(word.replace("_", "-"))
        if ours in known:
            return f"{message}; did you mean {ours}?"
    return message


def _names(kind: Any) -> set[str]:
    """Fields of a command, those of the dataclasses inside it included."""
    found: set[str] = set()
    for name, hint in get_type_hints(kind).items():
        found |= _names(hint) if dataclasses.is_dataclass(hint) else {name}
    return found


def one_line(box: str) -> str:
    """tyro's framed error, drawn with or without Unicode, as one line."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:
        text = _FRAME.sub("", line)
        if text:
            sections[-1].append(text)
        elif sections[-1]:
            sections.append([])
    message = " ".join(sections[0]) or "the command line is wrong"
    hints: list[str] = []
    for section in sections[1:]:
        text = " ".join(section)
        if text.startswith("Perhaps you meant"):
            found = dict.fromkeys(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*(?! --help)", text))
            found.pop("--help", None)
            hints.append(f"did you mean {' or '.join(list(found)[:3])}?")
        elif text.startswith("Available subcommands"):
            hints.append(f"choose one of {text.partition(':')[2].strip()}")
        elif text.startswith("For full helptext"):
            hints.append(
                text.replace("For full helptext, ", "").replace("run: ", "run ").rstrip(".")
            )
    return "; ".join([message.rstrip("."), *hints])
