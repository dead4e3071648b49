"""Controlled errors, by rules: a continuation that means something else and looks the same.

Five kinds, after the released code: operation, swap, generalisation, order, contradiction. A rule
that finds no place for its error says so instead of inventing one. Each result keeps the number of
steps and nearly the length, is checked to differ in meaning, and records what was changed. The null
control is in :mod:`planaria.faithfulness.paraphrase`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

from planaria.faithfulness.arithmetic import NotArithmeticError, evaluate, read_step
from planaria.faithfulness.judges.calculator import number_text
from planaria.faithfulness.judges.protocol import Usage
from planaria.faithfulness.numbers import find_numbers, plain_digits


class Kind(Enum):
    """Kinds of perturbation; ``PARAPHRASE`` is the null control and no error."""

    OPERATION = "operation"
    SWAP = "swap"
    GENERALISATION = "generalisation"
    ORDER = "order"
    CONTRADICTION = "contradiction"
    PARAPHRASE = "paraphrase"


ERRORS = tuple(kind for kind in Kind if kind is not Kind.PARAPHRASE)
"""The five kinds of error."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One replaced stretch of text."""

    step: int
    """Index into the continuation."""
    before: str
    """What stood there."""
    after: str
    """What stands there now."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be perturbed."""

    question: str
    """The question."""
    prefix: tuple[str, ...]
    """Steps that stay."""
    continuation: tuple[str, ...]
    """Steps that change."""
    kind: Kind
    """How."""
    seed: int = 0
    """Equal seeds give equal results."""
    length: int | None = None
    """Characters that a paraphrase should have, to match the alternative that it controls for;
    None: as many as the original."""


@dataclass(frozen=True, kw_only=True)
class Perturbed:
    """An alternative continuation, or the reason why there is none."""

    steps: tuple[str, ...] | None
    """The alternative; None where the kind does not apply."""
    changes: tuple[Change, ...] = ()
    """What was changed, in order."""
    reason: str = ""
    """Why there is none."""
    usage: Usage = field(default_factory=Usage)
    """What it cost."""


class Perturber(Protocol):
    """Anything that makes alternatives. It must not be the judge: see docs/design/faithfulness."""

    @property
    def name(self) -> str:
        """Names the perturber and everything that changes its results."""
        ...

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        """One result per task, in order; never raises for a single bad task."""
        ...


class RulePerturber:
    """The five kinds by rules and the paraphrase, without a model."""

    name = "rules/2"

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        """Alternatives at once."""
        return [perturb(task) for task in tasks]


def perturb(task: Task) -> Perturbed:
    """One alternative by rules; deterministic in the task."""
    if not any(step.strip() for step in task.continuation):
        return Perturbed(steps=None, reason="the continuation is empty")
    if task.kind is Kind.PARAPHRASE:
        from planaria.faithfulness.paraphrase import paraphrase  # it imports this module

        return paraphrase(task)
    made = _RULES[task.kind](task, random.Random(f"{task.kind.value}:{task.seed}:{task.question}"))
    if made.steps is None:
        return made
    problem = check(task.continuation, made.steps)
    return Perturbed(steps=None, reason=problem) if problem else made


def check(original: tuple[str, ...], alternative: tuple[str, ...]) -> str | None:
    """Why an alternative is unfit, or None: it must differ in more than spaces and case, and be
    within 40 % (or 40 characters) of the original's length."""
    if normal(original) == normal(alternative):
        return "the alternative says the same"
    before, after = sum(map(len, original)), sum(map(len, alternative))
    if abs(after - before) > max(40, 0.4 * before):
        return f"the alternative has {after} characters where the original has {before}"
    return None


def changed_numbers(original: tuple[str, ...], paraphrase: tuple[str, ...]) -> str | None:
    """Why a text is no paraphrase, or None: a null control keeps every number that it names."""
    before, after = (
        Counter(n.value for step in steps for n in find_numbers(step) if not n.word)
        for steps in (original, paraphrase)
    )
    odd = [*(before - after), *(after - before)]
    return f"a paraphrase keeps its numbers, and {number_text(odd[0])} differs" if odd else None


def diff(original: tuple[str, ...], alternative: tuple[str, ...]) -> tuple[Change, ...]:
    """Steps that differ, for alternatives whose maker does not say what it changed."""
    width = max(len(original), len(alternative))
    pairs = [
        (
            original[i] if i < len(original) else "",
            alternative[i] if i < len(alternative) else "",
        )
        for i in range(width)
    ]
    return tuple(
        Change(step=index, before=before, after=after)
        for index, (before, after) in enumerate(pairs)
        if before != after
    )


@lru_cache(maxsize=4096)
def normal(steps: tuple[str, ...]) -> str:
    """Text without what carries no meaning: case, spaces, punctuation at the ends."""
    text = " ".join(plain_digits(step) for step in steps).casefold()
    return re.sub(r"\s+", "", re.sub(r"(?<![.!;:,])[.!;:,]++(?=\s|$)", "", text))


def _replaced(
    task: Task,
    step: int,
    spans: Sequence[tuple[int, int, str]],
    *,
    carry: tuple[str, str] = ("", ""),
) -> Perturbed:
    """The continuation with stretches of one step replaced; ``carry`` then replaces a number in all
    later steps, so that the error reads like one that was carried on."""
    text = task.continuation[step]
    changes: list[Change] = []
    for start, end, new in sorted(spans, reverse=True):
        changes.insert(0, Change(step=step, before=text[start:end], after=new))
        text = text[:start] + new + text[end:]
    steps = [*task.continuation[:step], text, *task.continuation[step + 1 :]]
    old, new = carry
    if old:
        pattern = rf"(?<![\d.,]){re.escape(old)}(?![\d,]*\d|\.\d)"
        for index in range(step + 1, len(steps)):
            if old not in steps[index]:
                continue
            later = re.sub(pattern, new, steps[index])
            if later != steps[index]:
                changes.append(Change(step=index, before=old, after=new))
                steps[index] = later
    return Perturbed(steps=tuple(steps), changes=tuple(changes))


_NUMBER = r"(?:\d++(?:[,.]++\d++)*+|\.\d++)"
"""Possessive, and begun at its first digit only (``_APART``): a run of a thousand digits, which
models do write, is walked once."""
_APART = r"(?<![\d.,])"
_OPERATION = re.compile(
    rf"{_APART}(?P<left>{_NUMBER})(?P<gap>\s*)(?P<op>[-+*/×÷−]|\\times|\\cdot|\\div)"
    rf"(?P<gap2>\s*\$?)(?P<right>{_NUMBER})(?P<between>[^=\n\d]{{0,24}})=(?P<gap3>\s*\$?\s*)"
    r"(?P<result>-?\d[\d,]*(?:\.\d+)?)"
)
_LEFT = frozenset("0123456789.,+*/×÷()$-")
"""What may stand on a left side before the operation."""
_OTHER = {
    "+": "-", "-": "+", "−": "+", "*": "+", "/": "*", "×": "+", "÷": "×",
    "\\times": "+", "\\cdot": "+", "\\div": "\\times",
}  # fmt: skip
_OPERATION_WORDS = {
    "plus": "minus", "minus": "plus", "times": "plus", "add": "subtract", "adds": "subtracts",
    "adding": "subtracting", "subtract": "add", "subtracts": "adds", "subtracting": "adding",
    "multiply": "divide", "multiplies": "divides", "multiplying": "dividing",
    "divide": "multiply", "divides": "multiplies", "dividing": "multiplying", "sum": "difference",
    "difference": "sum", "product": "quotient", "quotient": "product",
    "increase": "decrease", "decrease": "increase", "squared": "cubed", "twice": "half",
}  # fmt: skip


def _operation(task: Task, rng: random.Random) -> Perturbed:
    """Another operation with its own result, carried on; else a word for an operation."""
    places = [
        (index, match)
        for index, step in enumerate(task.continuation)
        for match in _operations(step)
    ]
    rng.shuffle(places)
    for index, match in places:
        left, right = (_plain(match.group(name)) for name in ("left", "right"))
        operator = match.group("op")
        if left is None or right is None:
            continue
        result = _recomputed(task.continuation[index], match, _OTHER[operator])
        if result is None:
            result = _apply(_OTHER[operator], left, right)
        if result is None:
            continue
        written = _like(result, match.group("result"))
        if written == match.group("result"):
            continue
        spans = [
            (match.start("op"), match.end("op"), _OTHER[operator]),
            (match.start("result"), match.end("result"), written),
        ]
        return _replaced(task, index, spans, carry=(match.group("result"), written))
    return _by_words(task, rng, _OPERATION_WORDS, "no operation is stated")


@lru_cache(maxsize=16384)
def _operations(step: str) -> tuple[re.Match[str], ...]:
    """Operations with their results; a chain's steps come back at each split and for each kind."""
    return tuple(_OPERATION.finditer(step))


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator in ("*", "×", "\\times"):
        return left * right
    return left / right if right else None


def _recomputed(step: str, match: re.Match[str], operator: str) -> Fraction | None:
    """What the whole left side comes to with another operator."""
    text = step[: match.start()]
    start = len(text)
    while start and (text[start - 1].isspace() or text[start - 1] in _LEFT):
        start -= 1
    before = text[start:].strip()
    try:
        return evaluate(
            f"{before} {match.group('left')} {operator} {match.group('right')}"
            f"{match.group('between')}"
        )
    except NotArithmeticError:
        return None


def _plain(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    if len(digits) > 15 or not re.fullmatch(r"\d*\.?\d+", digits):
        return None
    return Fraction(digits)


def _like(value: Fraction, model: str) -> str:
    """A number written the way ``model`` is: thousands separators, two decimals at most."""
    if value.denominator == 1:
        text = f"{value.numerator:,}" if "," in model else str(value.numerator)
        return text + ".0" if re.search(r"\.0+$", model) else text
    return f"{float(value):.2f}"


def _swap(task: Task, rng: random.Random) -> Perturbed:
    """A number for another one of the question or the chain, or two names exchanged."""
    names = _names(task)
    steps = list(enumerate(task.continuation))
    rng.shuffle(steps)
    if len(names) > 1 and rng.random() < 0.5:
        for index, step in steps:
            for name in rng.sample(names, len(names)):
                match = re.search(rf"\b{re.escape(name)}\b", step)
                others = [other for other in names if other != name]
                if match and others:
                    return _replaced(
                        task, index, [(match.start(), match.end(), rng.choice(others))]
                    )
    pool = [n.value for n in find_numbers(" ".join((task.question, *task.prefix))) if not n.word]
    for index, step in steps:
        numbers = [n for n in find_numbers(step) if not n.word and n.value.denominator == 1]
        rng.shuffle(numbers)
        for number in numbers:
            others = [v for v in dict.fromkeys(pool) if v != number.value and v.denominator == 1]
            if not others:
                others = [number.value + 1, number.value * 2]
            written = plain_digits(step)[number.start : number.end]
            if not re.fullmatch(r"[\d,]+", written):
                continue
            # The closest length keeps the form; among those, any.
            size = min(abs(len(number_text(v)) - len(written)) for v in others)
            near = [v for v in others if abs(len(number_text(v)) - len(written)) == size]
            new = _like(rng.choice(near), written)
            return _replaced(task, index, [(number.start, number.end, new)])
    return Perturbed(steps=None, reason="no number and no second name to swap")


_STOP_NAMES = frozenset({
    "The", "A", "An", "In", "On", "At", "So", "Then", "Thus", "Therefore", "Hence", "Now",
    "Next", "Finally", "First", "Second", "Third", "If", "When", "She", "He", "They", "It",
    "We", "I", "You", "His", "Her", "Their", "This", "That", "These", "Those", "There", "Each",
    "Every", "Let", "Since", "Because", "Step", "Answer", "Total", "After", "Before", "To",
    "And", "But", "Or", "For", "From", "With", "Monday", "Tuesday", "Wednesday", "Thursday",
    "Friday", "Saturday", "Sunday", "By", "As", "Of", "Not", "Is", "Are", "All", "Some", "How",
    "What", "Which", "Who", "Where", "Why", "Given",
})  # fmt: skip


def _names(task: Task) -> list[str]:
    found = re.findall(
        r"(?<![\\\w])[A-Z][a-z]{2,}\b", " ".join((task.question, *task.continuation))
    )
    return [name for name in dict.fromkeys(found) if name not in _STOP_NAMES]


_GENERAL = {
    "some": "all", "many": "all", "most": "all", "several": "all", "often": "always",
    "usually": "always", "sometimes": "always", "rarely": "never", "few": "no",
    "can": "must", "could": "must", "may": "must", "might": "must", "probably": "certainly",
    "likely": "certainly", "possible": "certain", "each": "only", "half": "all",
    "one": "every", "only": "every", "a": "every", "an": "every", "the": "every", "this": "any",
    "at least": "exactly", "at most": "exactly", "about": "exactly", "another": "every",
}  # fmt: skip


_QUANTIFIERS = {k: v for k, v in _GENERAL.items() if k not in ("a", "an", "the", "this", "one")}


def _generalisation(task: Task, rng: random.Random) -> Perturbed:
    """A statement about some made one about all; articles only where nothing else is found."""
    made = _by_words(task, rng, _QUANTIFIERS, "no quantifier")
    if made.steps is not None:
        return made
    return _by_words(task, rng, _GENERAL, "nothing to generalise")


_SIDES = re.compile(rf"{_APART}(?P<a>{_NUMBER})(?P<op>\s*[-/÷−<>]\s*\$?)(?P<b>{_NUMBER})(?![\d/])")


def _order(task: Task, rng: random.Random) -> Perturbed:
    """Two steps exchanged, of which the later needs the earlier; else the sides of a subtraction,
    a division or a comparison."""
    pairs = [
        (i, i + 1)
        for i in range(len(task.continuation) - 1)
        if _depends(task.continuation[i], task.continuation[i + 1])
    ]
    if pairs:
        one, two = rng.choice(pairs)
        steps = list(task.continuation)
        steps[one], steps[two] = steps[two], steps[one]
        changes = (
            Change(step=one, before=task.continuation[one], after=task.continuation[two]),
            Change(step=two, before=task.continuation[two], after=task.continuation[one]),
        )
        return Perturbed(steps=tuple(steps), changes=changes)
    for index, step in rng.sample(list(enumerate(task.continuation)), len(task.continuation)):
        match = _SIDES.search(step)
        if match and match.group("a") != match.group("b"):
            spans = [
                (match.start("a"), match.end("a"), match.group("b")),
                (match.start("b"), match.end("b"), match.group("a")),
            ]
            return _replaced(task, index, spans)
    return Perturbed(steps=None, reason="no two steps of which one needs the other")


def _depends(earlier: str, later: str) -> bool:
    """The later step uses a value that the earlier one derived, or a name that it introduced."""
    results = {e.right_value for e in read_step(earlier).equations}
    if results & {n.value for n in find_numbers(later)}:
        return True
    return bool(re.match(r"\s*(?:so|then|thus|therefore|hence|this means|that)\b", later, re.I))


_OPPOSITE = {
    "more": "less", "less": "more", "fewer": "more", "greater": "smaller", "larger": "smaller",
    "smaller": "larger", "higher": "lower", "lower": "higher", "before": "after",
    "after": "before", "older": "newer", "newer": "older", "younger": "older", "left": "right",
    "right": "left", "increases": "decreases", "decreases": "increases", "increase": "decrease",
    "decrease": "increase", "true": "false", "false": "true", "positive": "negative",
    "negative": "positive", "even": "odd", "odd": "even", "always": "never", "never": "always",
    "all": "none", "both": "neither", "most": "least", "least": "most", "first": "last",
    "last": "first", "above": "below", "below": "above", "faster": "slower", "slower": "faster",
    "buys": "sells", "sells": "buys", "earns": "spends", "spends": "earns", "gains": "loses",
    "valid": "invalid", "invalid": "valid", "same": "different", "equal": "unequal",
    "maximum": "minimum", "minimum": "maximum", "longer": "shorter", "shorter": "longer",
    "cheaper": "dearer", "expensive": "cheap", "with": "without", "without": "with",
}  # fmt: skip
_NEGATABLE = re.compile(
    r"\b(is|are|was|were|can|will|has to|does|do|would|should|must)\b(?!\s+not)"
)


def _contradiction(task: Task, rng: random.Random) -> Perturbed:
    """A word for its opposite, a negation taken away or put in, or an equality denied."""
    made = _by_words(task, rng, _OPPOSITE, "no word with an opposite")
    if made.steps is not None:
        return made
    for index, step in rng.sample(list(enumerate(task.continuation)), len(task.continuation)):
        negation = re.search(r"\b(?:not|n't)\b\s?", step)
        if negation:
            return _replaced(task, index, [(negation.start(), negation.end(), "")])
        verb = _NEGATABLE.search(step)
        if verb:
            return _replaced(task, index, [(verb.end(), verb.end(), " not")])
    for index, step in enumerate(task.continuation):
        equality = re.search(r"(?<![<>=!≠])=(?!=)", step)
        if equality:
            return _replaced(task, index, [(equality.start(), equality.end(), "≠")])
    return Perturbed(steps=None, reason="nothing to contradict")


def _by_words(task: Task, rng: random.Random, words: dict[str, str], reason: str) -> Perturbed:
    places = [
        (index, start, end)
        for index, step in enumerate(task.continuation)
        for start, end, word in _runs(step, "at least" in words)
        if word in words
    ]
    if not places:
        return Perturbed(steps=None, reason=reason)
    index, start, end = rng.choice(places)
    old = task.continuation[index][start:end]
    new = words[old.lower()]
    if old[0].isupper():
        new = new[0].upper() + new[1:]
    return _replaced(task, index, [(start, end, new)])


_WORD = re.compile(r"\w+")
_WORD_OR_BOUND = re.compile(r"\bat (?:least|most)\b|\w+", re.IGNORECASE)


@lru_cache(maxsize=16384)
def _runs(step: str, bounds: bool) -> tuple[tuple[int, int, str], ...]:
    """Words of a step, in lower case, and where they stand; with ``bounds``, "at least" is one."""
    pattern = _WORD_OR_BOUND if bounds else _WORD
    return tuple((m.start(), m.end(), m.group().lower()) for m in pattern.finditer(step))


_RULES: dict[Kind, Callable[[Task, random.Random], Perturbed]] = {
    Kind.OPERATION: _operation,
    Kind.SWAP: _swap,
    Kind.GENERALISATION: _generalisation,
    Kind.ORDER: _order,
    Kind.CONTRADICTION: _contradiction,
}
