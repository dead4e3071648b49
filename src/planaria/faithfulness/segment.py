"""Text to steps, and thinking apart from the answer.

A step is a line when the text has several, else a sentence. Neither is ever cut inside a formula, a
code block, a number or an abbreviation; a heading or a bare list mark belongs to the step after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PROTECTED = re.compile(
    r"```.*?```"
    r"|\\begin\{(?P<env>[a-zA-Z*]+)\}.*?\\end\{(?P=env)\}"
    r"|\\\[.*?\\\]"
    r"|\$\$.*?\$\$"
    r"|\\\(.*?\\\)"
    r"|(?<![\\\d$])\$(?!\s|\d[\d,.]*(?:\s|$))[^$\n]{1,400}?(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[])(?:e\.g|i\.e|etc|vs|cf|approx|resp|no|nos|fig|eq|eqs|sec|ch|vol|pp|p|mr|mrs|ms|dr"
    r"|prof|st|jr|sr|inc|ltd|co|dept|est|a\.m|p\.m|u\.s|w\.r\.t|[A-Za-z])\.$",
    re.IGNORECASE,
)
_LIST_MARK = re.compile(r"^\s*(?:[-*•–]|\(?(?:\d{1,3}|[a-zA-Z]|[ivx]{1,4})[.)])\s*$")
_HEADING = re.compile(
    r"^\s*(?:#{1,6}\s+\S.*|\*\*[^*\n]{1,80}\*\*:?|(?:step|part|case)\s+\w{1,8}\s*[:.]?)\s*$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?:[\"'”’)\]]*)(?=\s)|[。！？｡؟।](?:[”’」』）]*)")
_THINK_OPEN = re.compile(r"<(think|thinking|reasoning|thought)>", re.IGNORECASE)
_DANGLING = re.compile(r"(?:[=+\-*/×÷,(\[{^_\\]|\b(?:the|a|an|and|or|of|to|is|so|then|which))\s*$")
_HIDDEN = "\ue000"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A completion taken apart."""

    thinking: str
    """What stood between thinking tags; empty when there were none."""
    response: str
    """The rest."""
    unclosed: bool
    """A thinking tag was opened and never closed: the output was cut."""


def split_thinking(text: str) -> Parts:
    """Thinking and response of a completion.

    A closing tag without an opening one counts as closing: chat templates often put the opening tag
    into the prompt.
    """
    opened = _THINK_OPEN.search(text)
    if opened is None:
        closing = re.search(r"</(think|thinking|reasoning|thought)>", text, re.IGNORECASE)
        if closing is None:
            return Parts(thinking="", response=text.strip(), unclosed=False)
        return Parts(
            thinking=text[: closing.start()].strip(),
            response=text[closing.end() :].strip(),
            unclosed=False,
        )
    closed = re.search(rf"</{opened.group(1)}>", text[opened.end() :], re.IGNORECASE)
    before = text[: opened.start()]
    if closed is None:
        return Parts(thinking=text[opened.end() :].strip(), response=before.strip(), unclosed=True)
    start, stop = opened.end(), opened.end() + closed.start()
    rest = text[opened.end() + closed.end() :]
    return Parts(
        thinking=text[start:stop].strip(), response=(before + rest).strip(), unclosed=False
    )


def segment(text: str, *, unit: str = "auto") -> tuple[str, ...]:
    """Steps of a text. ``unit`` is ``line``, ``sentence`` or ``auto`` (lines if several, else
    sentences).

    Empty text gives no step. Raises ``ValueError`` for another unit.
    """
    if unit not in ("auto", "line", "sentence"):
        raise ValueError(f"unit is {unit!r}: it is 'auto', 'line' or 'sentence'")
    blocks: list[str] = []

    def hide(match: re.Match[str]) -> str:
        blocks.append(match.group(0))
        return f"{_HIDDEN}{len(blocks) - 1}{_HIDDEN}"

    hidden = _PROTECTED.sub(hide, text.replace("\r\n", "\n").replace(_HIDDEN, ""))

    def show(piece: str) -> str:
        return re.sub(rf"{_HIDDEN}(\d+){_HIDDEN}", lambda m: blocks[int(m.group(1))], piece).strip()

    lines = _merge_marks([line for line in hidden.split("\n") if line.strip()])
    if unit == "line" or (unit == "auto" and len(lines) > 1):
        pieces = lines
    else:
        pieces = [sentence for line in lines for sentence in _sentences(line)]
    return tuple(step for step in map(show, pieces) if step)


def _merge_marks(lines: list[str]) -> list[str]:
    """Headings and bare list marks go in front of the line after them; a lone formula goes behind
    the line that leads to it with a colon or a comma."""
    out: list[str] = []
    pending = ""
    for line in lines:
        if _HEADING.match(line) or _LIST_MARK.match(line):
            pending = f"{pending} {line.strip()}".strip()
            continue
        formula = re.fullmatch(rf"\s*{_HIDDEN}\d+{_HIDDEN}[.,;]?\s*", line) is not None
        if formula and not pending and out and out[-1].rstrip().endswith((":", ",", "：")):
            out[-1] = f"{out[-1].rstrip()} {line.strip()}"
            continue
        out.append(f"{pending} {line.strip()}".strip() if pending else line)
        pending = ""
    if pending:
        out.append(pending)
    return out


def _sentences(line: str) -> list[str]:
    out: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(line):
        head = line[start : match.end()]
        if match.group(0)[0] == ".":
            # No abbreviation is longer than its last fourteen characters.
            if _ABBREVIATION.search(head[-14:]) or _LIST_MARK.match(head):
                continue
            after = line[match.end() : match.end() + 40].lstrip()
            if after[:1].islower():
                continue
        out.append(head.strip())
        start = match.end()
    tail = line[start:].strip()
    if tail:
        out.append(tail)
    return [sentence for sentence in out if sentence]


def looks_cut(text: str, *, stop_reason: str | None = None) -> str | None:
    """Why the text seems to end too early, as a sentence; None when it does not.

    ``stop_reason`` is what the provider said. Without it only signs inside the text count: an open
    thinking tag, bracket or formula, or a last line that ends on an operator or an article.
    """
    if stop_reason in ("length", "max_tokens", "model_length"):
        return f"the provider stopped it ({stop_reason})"
    if split_thinking(text).unclosed:
        return "a thinking tag is never closed"
    stripped = text.rstrip()
    if not stripped:
        return None
    opened = re.findall(r"\\boxed\s*\{", stripped)
    if opened and stripped.count("{") > stripped.count("}"):
        return "a \\boxed{ is never closed"
    if len(re.findall(r"\\begin\{", stripped)) > len(re.findall(r"\\end\{", stripped)):
        return "a \\begin{ is never ended"
    if stripped.count("```") % 2:
        return "a code block is never closed"
    if _DANGLING.search(stripped.splitlines()[-1]):
        return f"the last line ends on {stripped[-12:]!r}"
    return None
