"""The answer of a chain: finding it, and comparing two.

Equality has three values. ``UNKNOWN`` (one side is missing or cannot be read) is never counted as
wrong. Our own reader takes what people write around numbers (money, thousands, units, percents,
full-width digits, choices, sets, intervals against tuples); everything else, LaTeX above all, goes
to ``math_verify``.
"""

from __future__ import annotations

import logging
import re
import threading
import unicodedata
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import lru_cache

from planaria.faithfulness.arithmetic import NotArithmeticError, evaluate
from planaria.faithfulness.numbers import MULTIPLES, plain_digits, words_to_number


class Equality(Enum):
    """Outcome of a comparison of two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Found:
    """An answer in a text."""

    answer: str | None
    """The answer as written, without its label; None when none was found."""
    reason: str
    """Which form it had, or why none was found."""
    start: int = -1
    """Where the statement begins in the text, -1 without one."""


_LABELS = (
    r"####[ \t]*(?P<value>[^\n]+)",
    r"(?:^|\n)[ \t]*\*{0,2}(?:final answer|answer|ans)\*{0,2}[ \t]*[:：=][ \t]*\*{0,2}"
    r"(?P<value>[^\n]+)",
    r"(?:^|\n)[ \t]*A:[ \t]*(?P<value>[^\n]+)",
    r"\b(?:final answer|correct answer|correct option|answer|correct choice)(?: is| would be|:)"
    r"(?:[ \t]*:)?[ \t]*(?P<value>[^\n]+)",
    r"(?:答案|最终答案)(?:是|为)?[:：]?[ \t]*(?P<value>[^\n。]+)",
)
_LABEL_PATTERNS = tuple(re.compile(label, re.IGNORECASE) for label in _LABELS)


def find_answer(text: str, *, options: bool = False, last_number: bool = False) -> Found:
    """The answer that a text states.

    In order: the last ``\\boxed{…}``, ``#### x``, a line ``Answer: x`` or ``A: x``, a sentence "the
    answer is x", and with ``options`` a single bracketed letter in the last line. ``last_number``
    (off) takes the last number of the text where nothing is labelled; it guesses.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return Found(answer=boxed[0], reason="\\boxed", start=boxed[1])
    for pattern, reason in zip(
        _LABEL_PATTERNS, ("####", "labelled line", "A: line", "sentence", "sentence"), strict=True
    ):
        matches = list(pattern.finditer(text))
        if matches:
            value = _trim(matches[-1].group("value"))
            if value:
                return Found(answer=value, reason=reason, start=matches[-1].start())
    lines = [line for line in text.splitlines() if line.strip()]
    if options and lines:
        letters = set(re.findall(r"\(([A-Z])\)|\b([A-H])[.)](?=\s|$)", lines[-1]))
        if len(letters) == 1:
            pair = letters.pop()
            start = text.rfind(lines[-1])
            return Found(answer=pair[0] or pair[1], reason="letter in the last line", start=start)
    if last_number and (numbers := re.findall(r"-?\$?\d[\d,]*(?:\.\d+)?%?", text)):
        return Found(answer=numbers[-1], reason="last number, unlabelled")
    return Found(answer=None, reason="no labelled answer, no \\boxed")


def _last_boxed(text: str) -> tuple[str, int] | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"), text.rfind("\\boxed {"))
    if start < 0:
        bare = re.findall(r"\\boxed\s+(\S+)", text)
        return (bare[-1].rstrip(".$"), text.rfind("\\boxed")) if bare else None
    opened = text.index("{", start)
    depth = 0
    for index in range(opened, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[opened + 1 : index].strip(), start
    return None


def _trim(value: str) -> str:
    value = value.strip().strip("*").strip()
    # A sentence may go on after the answer: "18. This means …".
    value = re.split(r"(?<=[^\d\s])\.\s|(?<=\d)\.\s+(?=[A-Z])|。", value)[0]
    return value.strip().rstrip(".;,").strip("*").strip()


_UNIT = re.compile(
    r"^(?P<number>[-+]?\s*[$€£¥₹]?\s*[-+]?\(?[\d.,/\s]*\d(?:\.(?!\w))?\)?)"
    r"\s*(?P<percent>%|percent\b|per cent\b)?"
    # Possessive: a long word cannot be tried in every division into five.
    r"\s*(?P<unit>(?:[^\W\d_][^\W_]*+[./²³^'’-]*+\s*+){0,5})\.?$"
)
_CHOICE = re.compile(r"^[\(\[]?\s*([A-Za-z])\s*(?:[\)\]](?:\s*[.:]?\s*\S.*)?|[.:]\s*\S.*|\.)?$")
_FLIP = re.compile(r"^\s*(true|false|yes|no|valid|invalid)\b", re.IGNORECASE)
_COLLECTION = re.compile(r"^(?P<open>[(\[{])(?P<body>.*)(?P<close>[)\]}])$", re.DOTALL)


def answers_equal(
    given: str | None, reference: str | None, *, choices: tuple[str, ...] = ()
) -> Equality:
    """Whether two answers are the same.

    ``choices`` are the texts of the options in order, so that "(B) library", "B" and "library" are
    one answer. A number compares by value: ``18``, ``18.00``, ``$18``, ``18 dollars`` and
    ``\\frac{36}{2}`` are equal; ``-1/2`` and ``1/2``, ``[0,1]`` and ``(0,1)``, ``50%`` and ``50``
    are not. ``50%`` equals ``0.5``. Units of measure are looked at only when both are written: then
    ``$0.50`` is ``50 cents`` and ``60 minutes`` is ``1 hour``.
    """
    if given is None or reference is None or not given.strip() or not reference.strip():
        return Equality.UNKNOWN
    return _equal(given.strip(), reference.strip(), choices)


@lru_cache(maxsize=65536)
def _equal(given: str, reference: str, choices: tuple[str, ...]) -> Equality:
    left, right = clean(given), clean(reference)
    if not left or not right:
        return Equality.UNKNOWN
    if re.sub(r"\s", "", left) == re.sub(r"\s", "", right):
        return Equality.EQUAL
    one, two = _choice(left, choices), _choice(right, choices)
    if two is not None and (choices or one is not None):
        if one is None:
            return Equality.DIFFERENT if choices else Equality.UNKNOWN
        return _bool(one == two)
    structured = _collections(left, right, choices)
    if structured is not None:
        return structured
    a, b = number_of(left), number_of(right)
    if a is not None and b is not None:
        if a[1] and b[1] and a[1] != b[1] and {a[1], b[1]} != {"lb", "$"}:
            return _same_quantity(a, b)
        return _bool(a[0] == b[0] or _close(a[0], b[0], left, right))
    flip = _FLIP.match(left), _FLIP.match(right)
    if flip[0] and flip[1]:
        return _bool(flip[0].group(1).lower() == flip[1].group(1).lower())
    if _plain_text(left) and _plain_text(right):
        return _bool(left.casefold() == right.casefold())
    if (_plain_text(left) and b is not None) or (_plain_text(right) and a is not None):
        return Equality.UNKNOWN  # prose against a number: it cannot be read, which is not wrong
    return _symbolic(left, right)


def _bool(value: bool) -> Equality:
    return Equality.EQUAL if value else Equality.DIFFERENT


def clean(text: str) -> str:
    """An answer without wrapping: dollar signs of LaTeX, ``\\text``, ``\\left``, ``\\boxed``,
    full-width forms, spaces at the ends."""
    text = plain_digits(unicodedata.normalize("NFKC", text)).replace("⁄", "/")
    boxed = _last_boxed(text)
    if boxed is not None:
        text = boxed[0]
    text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\!", "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|:)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox|textnormal|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\{?\\circ\}?|°", " degrees", text)
    if text.count("$") >= 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1]
    text = re.sub(r"\s+", " ", text).strip().strip("`").rstrip(".").strip()
    assigned = re.fullmatch(r"[A-Za-z]\s*=\s*(.+)", text)
    return assigned.group(1) if assigned and "=" not in assigned.group(1) else text


def _choice(text: str, choices: tuple[str, ...]) -> str | None:
    match = _CHOICE.match(text)
    if match:
        letter = match.group(1).upper()
        if not choices or ord(letter) - ord("A") < len(choices):
            return letter
    for index, choice in enumerate(choices):
        if clean(choice).casefold() == text.casefold():
            return chr(ord("A") + index)
    return None


def letter_of(answer: str | None, choices: tuple[str, ...]) -> str | None:
    """The letter of the option that an answer names: "(B) library", "library" and "b" are B. None
    where it names none."""
    return None if answer is None or not choices else _choice(clean(answer.strip()), choices)


MAX_ANSWER_CHARS = 400
"""Longest answer that is read as a number or by ``math_verify``."""


@lru_cache(maxsize=16384)
def number_of(text: str) -> tuple[Fraction, str] | None:
    """Exact value and unit of an answer that is one number; None when it is not."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = clean(text) if "\\" in text else text
    scientific = re.fullmatch(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})", text)
    if scientific:
        return Fraction(scientific.group(1)) * Fraction(10) ** int(scientific.group(2)), ""
    fraction = re.fullmatch(
        r"(?P<sign>-)?\s*(?P<whole>\d+)?\s*\\frac\s*(?:\{(-?\d+)\}\s*\{(-?\d+)\}|(\d)\s*(\d))", text
    )
    if fraction:
        top, bottom = fraction.group(3) or fraction.group(5), fraction.group(4) or fraction.group(6)
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom)) + int(fraction.group("whole") or 0)
        return (-value if fraction.group("sign") else value), ""
    match = _UNIT.match(text)
    if match is None:
        spelled = words_to_number(text)
        return (spelled, "") if spelled is not None else None
    raw = match.group("number")
    negative = "-" in raw
    money = bool(re.search(r"[$€£¥₹]", raw))
    digits = re.sub(r"[$€£¥₹+\-()\s]", " ", raw).strip().rstrip(".")
    value = _digits_value(digits)
    if value is None:
        return None
    if match.group("percent"):
        value /= 100
    words = match.group("unit").lower().split()
    while words and words[0] in MULTIPLES:
        value *= MULTIPLES[words.pop(0)]
    if not words or money:
        return (-value if negative else value), "$" if money else ""
    stem = words[0].rstrip(".")
    if len(stem) < 3 and not (stem in _MEASURES or stem in _SHORT_NOUNS):
        return None  # "2x", "3 i", "2pi": a term, and no number with its unit
    return (-value if negative else value), _unit(words)


def _digits_value(digits: str) -> Fraction | None:
    mixed = re.fullmatch(r"(\d+)\s+(\d+)/(\d+)", digits)
    if mixed:
        whole, top, bottom = (int(part) for part in mixed.groups())
        return Fraction(whole) + Fraction(top, bottom) if bottom else None
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
        digits = digits.replace(",", "")
    if "," in digits or (" " in digits and not re.fullmatch(r"[\d.]+ ?/ ?[\d.]+", digits)):
        return None
    try:
        return evaluate(digits)
    except NotArithmeticError:
        return None


def _unit(words: list[str]) -> str:
    """The unit as a stem. Plain nouns compare as no unit: "18" is "18 eggs"; money and measures,
    where a factor hides, keep theirs."""
    stem = words[0].rstrip(".")
    unit = _MEASURES.get(stem.rstrip("s"), _MEASURES.get(stem, ""))
    return f"{unit} per" if unit and "per" in words else unit


_MEASURES = {
    "cent": "cent", "dollar": "$", "buck": "$", "usd": "$", "euro": "$", "eur": "$", "cm": "cm",
    "centimeter": "cm", "centimetre": "cm", "m": "m", "meter": "m", "metre": "m", "mm": "mm",
    "millimeter": "mm", "millimetre": "mm", "km": "km", "kilometer": "km", "kilometre": "km",
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "ft": "ft", "mile": "mi", "mi": "mi",
    "minute": "min", "min": "min", "hour": "h", "h": "h", "hr": "h", "second": "s", "s": "s",
    "sec": "s", "day": "d", "week": "wk", "gram": "g", "g": "g", "kg": "kg", "kilogram": "kg",
    "mg": "mg", "ounce": "oz", "oz": "oz", "pound": "lb", "lb": "lb", "degree": "deg",
    "radian": "rad", "l": "l", "liter": "l", "litre": "l", "ml": "ml", "yd": "yd", "yard": "yd",
}  # fmt: skip
_SHORT_NOUNS = frozenset(
    {"am", "pm", "c", "f", "cc", "tv", "tvs", "ad", "bc", "gb", "mb", "kb", "mph"}
)
"""Words of fewer than three letters that may stand behind a number and are no algebra."""
_SCALE = {
    "$": ("money", "1"), "cent": ("money", "1/100"), "mm": ("length", "1/1000"),
    "cm": ("length", "1/100"), "m": ("length", "1"), "km": ("length", "1000"),
    "in": ("foot", "1/12"), "ft": ("foot", "1"), "yd": ("foot", "3"), "mi": ("foot", "5280"),
    "s": ("time", "1"), "min": ("time", "60"), "h": ("time", "3600"), "d": ("time", "86400"),
    "wk": ("time", "604800"), "mg": ("mass", "1/1000"), "g": ("mass", "1"), "kg": ("mass", "1000"),
    "oz": ("pound", "1"), "lb": ("pound", "16"), "l": ("volume", "1"), "ml": ("volume", "1/1000"),
}  # fmt: skip
"""What a unit measures and how many of the dimension's own it is. Metric and customary units of one
dimension stand apart: what is between them is rounded."""


def _same_quantity(a: tuple[Fraction, str], b: tuple[Fraction, str]) -> Equality:
    """Equality of two numbers with different units."""
    one, two = _SCALE.get(a[1]), _SCALE.get(b[1])
    if one is None or two is None or one[0] != two[0]:
        return Equality.DIFFERENT
    return _bool(a[0] * Fraction(one[1]) == b[0] * Fraction(two[1]))


def _close(a: Fraction, b: Fraction, left: str, right: str) -> bool:
    """A decimal of at least three places stands for the fraction that rounds to it."""
    for exact, rounded, text in ((a, b, right), (b, a, left)):
        places = re.search(r"\d*\.(\d{3,})", text)
        if (
            places
            and exact.denominator not in (1,)
            and "." not in (left if text is right else right)
        ):
            return abs(exact - rounded) * 2 <= Fraction(1, 10 ** len(places.group(1)))
    return False


def _collections(left: str, right: str, choices: tuple[str, ...]) -> Equality | None:
    """Tuples, intervals and sets: same brackets, same members; a set in any order."""
    normal = [re.sub(r"\\([{}])", r"\1", text).strip() for text in (left, right)]
    matches = [_COLLECTION.match(text) for text in normal]
    if matches[0] is None or matches[1] is None:
        return None
    parts = [_members(match.group("body")) for match in matches if match]
    if len(parts[0]) < 2 and len(parts[1]) < 2 and matches[0].group("open") != "{":
        return None
    kinds = [match.group("open") + match.group("close") for match in matches if match]
    if kinds[0] != kinds[1] or len(parts[0]) != len(parts[1]):
        return Equality.DIFFERENT
    if kinds[0] == "{}":
        rest = list(parts[1])
        for member in parts[0]:
            twin = next((m for m in rest if _equal(member, m, choices) is Equality.EQUAL), None)
            if twin is None:
                return Equality.DIFFERENT
            rest.remove(twin)
        return Equality.EQUAL
    outcomes = {_equal(a, b, choices) for a, b in zip(parts[0], parts[1], strict=True)}
    if Equality.DIFFERENT in outcomes:
        return Equality.DIFFERENT
    return Equality.UNKNOWN if Equality.UNKNOWN in outcomes else Equality.EQUAL


def _members(body: str) -> list[str]:
    out, depth = [""], 0
    for char in body:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            out.append("")
        else:
            out[-1] += char
    return [member.strip() for member in out if member.strip()]


def _plain_text(text: str) -> bool:
    """Words: no sign of mathematics, and a word of at least two letters."""
    if re.search(r"[\\^_=+*/{}<>\d]", text):
        return False
    return re.search(r"[^\W\d_]{2,}", text) is not None


_EXPLOSIVE = re.compile(
    r"\^\s*\{?\s*\d{4,}|(?:\^|\*\*)\s*\{?\s*\d+\s*\}?\s*(?:\^|\*\*)|\d{3,}\s*!|!\s*!|\d{60,}"
)


_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
"""Words that are no LaTeX commands."""


def _symbolic(left: str, right: str) -> Equality:
    """What ``math_verify`` says; sign, bracket kind and number were looked at before.

    Its time-outs use signals and so work in the main thread only; elsewhere, and before, what
    would blow up (towers of powers, large factorials) is turned away as unknown.
    """
    if max(len(left), len(right)) > MAX_ANSWER_CHARS or _EXPLOSIVE.search(f"{left} {right}"):
        return Equality.UNKNOWN
    if any(sum(map(len, _WORDS.findall(text))) > 48 for text in (left, right)):
        return Equality.UNKNOWN  # a sentence with numbers in it: math_verify would try for seconds
    from math_verify import parse, verify  # slow to import, and rarely needed

    seconds = 5 if threading.current_thread() is threading.main_thread() else 0
    if not seconds:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call
    try:
        sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=seconds) for text in (right, left)]
        if not sides[0] or not sides[1]:
            return Equality.UNKNOWN
        return _bool(bool(verify(sides[0], sides[1], timeout_seconds=seconds)))
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError):
        return Equality.UNKNOWN
