"""A chain of thought as data: question, steps, answer, and what people said about it.

Everything else in the package takes and returns these values. They are frozen, hashable and carry
no reference to where they were read from, except a name for reports.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import Any, overload

from planaria.errors import DataError

KEY_DIGITS = 32
"""Digits of a key under which an answer is kept."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a person, or a reference, says about a chain. Unknown is ``None``, never False."""

    first_wrong: int | None = None
    """0-based index of the first wrong step; None when no step is wrong or nobody looked."""
    wrong: tuple[int, ...] = ()
    """0-based indices of every step that is labelled wrong."""
    steps_labelled: bool = False
    """True when somebody looked at every step, so that ``first_wrong=None`` means "none"."""
    correct: bool | None = None
    """Whether the final answer is right."""

    @property
    def flawed(self) -> bool | None:
        """Whether a step is wrong: None where the steps were not labelled."""
        return (self.first_wrong is not None) if self.steps_labelled else None


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One chain of thought.

    Raises :class:`~planaria.errors.DataError` when the question is empty or a label points outside
    of the steps. A chain without steps or without an answer is legal: it is scored as far as it can
    be and counted in the report.
    """

    question: str
    """The question, with its options if it has any."""
    steps: tuple[str, ...]
    """The reasoning, one step each, without the line that only states the answer."""
    answer: str | None = None
    """The answer that the chain gives; None when none was found."""
    reference: str | None = None
    """The right answer, if known."""
    id: str = ""
    """Unique in a file; made of the content when it is left out."""
    question_id: str = ""
    """Equal for the chains of one question; made of the question when it is left out."""
    truncated: bool = False
    """The text ends before the model was done."""
    labels: Labels = field(default_factory=Labels)
    """What is known about its steps and its answer."""
    writer: str = ""
    """The model or system that wrote it: for reports only, never a feature of a decision."""
    pair: str = ""
    """Equal for an original and its modified version (PRMBench); empty otherwise."""
    kind: str = ""
    """Class of the known error, where the source names one."""
    notes: tuple[str, ...] = ()
    """What the reader had to assume, one sentence each."""

    def __post_init__(self) -> None:
        for name in ("question", "answer", "reference"):
            object.__setattr__(self, name, sound(getattr(self, name)))
        object.__setattr__(self, "steps", tuple(map(sound, self.steps)))
        if not self.question.strip():
            raise DataError(
                "a chain has an empty question: give each chain the question it answers"
            )
        outside = [i for i in self.labels.wrong if not 0 <= i < len(self.steps)]
        if outside:
            raise DataError(
                f"a label points at step {outside[0]} of a chain with {len(self.steps)} steps: "
                "labels are 0-based indices into the steps"
            )
        if not self.question_id:
            object.__setattr__(self, "question_id", digest(self.question))
        if not self.id:
            made = digest(self.question, *self.steps, self.answer or "")
            object.__setattr__(self, "id", made)

    @property
    def text(self) -> str:
        """The steps, one a line."""
        return "\n".join(self.steps)

    def with_steps(self, steps: tuple[str, ...]) -> Chain:
        """A copy with other steps and no labels: what a perturbation makes of it."""
        return replace(self, steps=steps, labels=Labels(), id="")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to sample chains for."""

    text: str
    """What the model is asked, without options."""
    id: str = ""
    """Unique in a file; made of the text when it is left out."""
    reference: str | None = None
    """The right answer, if known; for options, the letter."""
    options: tuple[tuple[str, str], ...] = ()
    """Letter and text of each option."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", sound(self.text))
        if not self.text.strip():
            raise DataError("a question is empty: remove the row or give it its text")
        if not self.id:
            object.__setattr__(self, "id", digest(self.full))

    @property
    def full(self) -> str:
        """The text with its options, one a line."""
        if not self.options:
            return self.text
        return "\n".join([self.text, *(f"({letter}) {text}" for letter, text in self.options)])


@overload
def sound(text: str) -> str: ...
@overload
def sound(text: str | None) -> str | None: ...
def sound(text: str | None) -> str | None:
    """The text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    if text is None or text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def digest(*parts: str, digits: int = 12) -> str:
    """Hexadecimal digits of the SHA-256 of the parts, each with its length before it.

    Twelve name a chain. A key of a cache takes ``KEY_DIGITS``: among a million requests two of
    twelve digits agree once in 600 runs, and one would get the other's answer.
    """
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hashed.update(f"{len(data)}:".encode())
        hashed.update(data)
    return hashed.hexdigest()[:digits]


def chain_to_row(chain: Chain) -> dict[str, Any]:
    """A chain as a JSON object that :func:`~planaria.faithfulness.readers.read_chains` reads."""
    row: dict[str, Any] = {
        "id": chain.id,
        "question_id": chain.question_id,
        "question": chain.question,
        "steps": list(chain.steps),
        "answer": chain.answer,
        "reference": chain.reference,
    }
    if chain.truncated:
        row["truncated"] = True
    for name in ("writer", "pair", "kind"):
        if getattr(chain, name):
            row[name] = getattr(chain, name)
    labels = chain.labels
    if labels.steps_labelled:
        row["wrong_steps"] = list(labels.wrong)
    if labels.correct is not None:
        row["correct"] = labels.correct
    return row


def unique_ids(chains: list[Chain]) -> list[Chain]:
    """The same chains, in order, with ``#2``, ``#3``… behind ids that come more than once."""
    seen: dict[str, int] = {}
    out: list[Chain] = []
    for chain in chains:
        count = seen[chain.id] = seen.get(chain.id, 0) + 1
        out.append(chain if count == 1 else replace(chain, id=f"{chain.id}#{count}"))
    return out
