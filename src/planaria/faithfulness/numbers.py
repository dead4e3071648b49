"""Numbers in running text: digits of any script, words, percents, fractions.

Used for provenance (where does an operand come from?) and for perturbations. Values are exact
fractions.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_UNITS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
_TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
    "eighty": 80, "ninety": 90,
}  # fmt: skip
MULTIPLES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
"""Words that multiply the number before them."""
_SPECIAL = {
    "half": Fraction(1, 2), "halves": Fraction(1, 2), "third": Fraction(1, 3),
    "thirds": Fraction(1, 3), "quarter": Fraction(1, 4), "quarters": Fraction(1, 4),
    "fourth": Fraction(1, 4), "fifth": Fraction(1, 5), "fifths": Fraction(1, 5),
    "sixth": Fraction(1, 6), "eighth": Fraction(1, 8), "tenth": Fraction(1, 10),
    "twice": Fraction(2), "double": Fraction(2), "doubles": Fraction(2), "doubled": Fraction(2),
    "thrice": Fraction(3), "triple": Fraction(3), "triples": Fraction(3), "tripled": Fraction(3),
    "quadruple": Fraction(4), "dozen": Fraction(12), "dozens": Fraction(12), "pair": Fraction(2),
    "pairs": Fraction(2), "couple": Fraction(2), "both": Fraction(2), "once": Fraction(1),
    "second": Fraction(2), "first": Fraction(1),
}  # fmt: skip
CONSTANTS = {
    "week": (7, 52), "weekly": (7, 52), "day": (24, 7, 365, 30), "daily": (7, 365, 30),
    "hour": (60, 24, 3600), "hourly": (24, 60), "minute": (60,), "second": (60,),
    "year": (12, 365, 52), "yearly": (12, 365), "annual": (12,), "month": (12, 30, 4),
    "monthly": (12, 30), "decade": (10,), "century": (100,), "foot": (12,), "feet": (12, 3),
    "inch": (12,), "yard": (3, 36), "mile": (5280,), "pound": (16,), "ounce": (16,),
    "quart": (4,), "gallon": (4, 16), "pint": (2,), "cup": (16,), "kilometer": (1000,),
    "meter": (100, 1000), "kilogram": (1000,), "gram": (1000,), "liter": (1000,),
    "percent": (100,), "%": (100,), "cent": (100,), "dime": (10,), "nickel": (5,),
    "quarter": (25, 4), "penny": (100,), "dollar": (100,), "weekend": (2,), "weekday": (5,),
    "leg": (2, 4), "wheel": (2, 4), "side": (4, 3), "square": (4, 2), "triangle": (3, 180),
    "angle": (180, 360, 90), "fortnight": (14,), "average": (2,),
}  # fmt: skip
"""Everyday constants that a chain may bring in when the question speaks of the unit."""

_WORD = "|".join([*_UNITS, *_TENS, *MULTIPLES, *_SPECIAL])
_PATTERN = (
    # Only here can a number begin: most positions of a text are left at once.
    r"(?=[\d.bcdefhmnopqstz])(?:"
    r"(?P<mixed>(?<![\d.,/])\d{1,6}\s+\d{1,4}/\d{1,4}(?![\d.,/]))"
    r"|(?P<fraction>(?<![\d.,/])\d{1,9}/\d{1,9}(?![\d/]))"
    r"|(?P<number>(?<![A-Za-z\d_])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\d\w])\.\d+)"
    r"(?P<percent>\s?(?:%|percent\b|per cent\b))?"
    rf"|(?<![A-Za-z])(?P<words>(?:{_WORD})(?:(?:-|\s(?:and\s)?)(?:{_WORD}))*)(?![A-Za-z]))"
)
_FINDER = re.compile(_PATTERN, re.IGNORECASE)
_FINDER_LOWER = re.compile(_PATTERN)
"""For lower-case ASCII: nearly twice as fast, because the engine looks at the first letter of each
word only where case matters."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number found in a text."""

    value: Fraction
    """Its value; of a percent, the number before the sign."""
    start: int
    """Where it begins, in characters of the text after :func:`plain_digits`."""
    end: int
    """Where it ends."""
    percent: bool = False
    """A percent sign or the word stands behind it."""
    word: bool = False
    """It was written in words."""


def plain_digits(text: str) -> str:
    """Digits of every script as ASCII, and the signs that look like minus, times or comma as such.

    The length is kept, so that offsets hold.
    """
    if text.isascii():
        return text
    out: list[str] = []
    for char in text:
        if char.isascii():
            out.append(char)
        elif char.isdecimal():
            out.append(str(unicodedata.decimal(char)))
        else:
            out.append(_SIGNS.get(char, char))
    return "".join(out)


_SIGNS = {
    "−": "-", "–": "-", "‒": "-", "﹣": "-", "－": "-", "＋": "+", "＝": "=", "％": "%", "．": ".",
    "，": ",", "（": "(", "）": ")", "／": "/", "＊": "*", "＄": "$", "\u00a0": " ", "\u202f": " ",
    "\u2009": " ", "［": "[", "］": "]", "：": ":",
}  # fmt: skip


@lru_cache(maxsize=16384)
def find_numbers(text: str) -> tuple[Number, ...]:
    """The numbers of a text in order; ``text`` may hold any script's digits."""
    text = plain_digits(text)
    finder = _FINDER
    if text.isascii():
        text, finder = text.lower(), _FINDER_LOWER
    found: list[Number] = []
    for match in finder.finditer(text):
        value, percent = _value(match)
        if value is None:
            continue
        found.append(
            Number(
                value=value,
                start=match.start(),
                end=match.end(),
                percent=percent,
                word=match.group("words") is not None,
            )
        )
    return tuple(found)


def _value(match: re.Match[str]) -> tuple[Fraction | None, bool]:
    if (mixed := match.group("mixed")) is not None:
        whole, part = mixed.split(maxsplit=1)
        top, bottom = part.split("/")
        return (
            (Fraction(int(whole)) + Fraction(int(top), int(bottom)), False)
            if int(bottom)
            else (None, False)
        )
    if (fraction := match.group("fraction")) is not None:
        top, bottom = fraction.split("/")
        return (Fraction(int(top), int(bottom)), False) if int(bottom) else (None, False)
    if (number := match.group("number")) is not None:
        if len(number) > 40:
            return None, False
        return _literal(number), match.group("percent") is not None
    return words_to_number(match.group("words")), False


@lru_cache(maxsize=4096)
def _literal(text: str) -> Fraction:
    digits = text.replace(",", "")
    # ``Fraction`` reads a text by a regular expression of its own, which takes longer.
    return Fraction(int(digits)) if digits.isdecimal() else Fraction(digits)


@lru_cache(maxsize=4096)
def words_to_number(text: str) -> Fraction | None:
    """The value of a number in English words ("twenty-five", "two hundred", "half"); else None."""
    words = [w for w in re.split(r"[\s-]+", text.lower()) if w and w != "and"]
    if len(words) == 1 and words[0] in _SPECIAL:
        return _SPECIAL[words[0]]
    total, current, seen = Fraction(0), Fraction(0), False
    for word in words:
        if word in _UNITS:
            current += _UNITS[word]
        elif word in _TENS:
            current += _TENS[word]
        elif word == "hundred":
            current = (current or Fraction(1)) * 100
        elif word in MULTIPLES:
            total += (current or Fraction(1)) * MULTIPLES[word]
            current = Fraction(0)
        elif word in _SPECIAL:
            current = (current or Fraction(1)) * _SPECIAL[word]
        else:
            return None
        seen = True
    return total + current if seen else None
