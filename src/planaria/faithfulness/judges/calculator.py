"""The judge that needs no model: arithmetic, and where numbers come from.

``verify`` evaluates each equality that a step states and asks whence each operand comes.
``supports`` asks whether the answer is the last value that the chain derives. ``compare`` counts
flaws on both sides. It abstains wherever a text states nothing that it can check, so its silence is
never taken for approval. Our choice throughout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from planaria.faithfulness.answers import number_of
from planaria.faithfulness.arithmetic import StepArithmetic, read_step
from planaria.faithfulness.judges.protocol import (
    Compare,
    Request,
    Supports,
    Verdict,
    Verify,
    abstain,
    decide,
    tie,
)
from planaria.faithfulness.numbers import CONSTANTS, MULTIPLES, Number, find_numbers

Exact: TypeAlias = int | Fraction
"""A value in a set: whole numbers as ``int``, which hashes ten times as fast as its equal
``Fraction``."""
ALWAYS: frozenset[Exact] = frozenset((0, 1, 2, 100))
"""Numbers that need no source."""


def exact(value: Fraction) -> Exact:
    """The same value, whole numbers as ``int``."""
    return value.numerator if value.denominator == 1 else value


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the calculator found in one step."""

    arithmetic: StepArithmetic
    """The equations."""
    false: tuple[str, ...]
    """Each equality that does not hold, as "left = right, but left comes to x"."""
    operands: int
    """Operands on left sides."""
    unsourced: tuple[Fraction, ...]
    """Operands found neither in the question, nor in earlier steps, nor among constants."""
    derived: tuple[Fraction, ...]
    """Values that the step derives, in order."""


@dataclass(frozen=True, kw_only=True)
class ChainReport:
    """What the calculator found in a chain."""

    steps: tuple[StepReport, ...]
    """One report per step."""
    given: tuple[Fraction, ...]
    """Quantities of the question, each once."""
    unused: tuple[Fraction, ...]
    """Quantities of the question that no step names."""

    @property
    def derived(self) -> tuple[Fraction, ...]:
        """All derived values in order."""
        return tuple(value for step in self.steps for value in step.derived)

    @property
    def first_false(self) -> int | None:
        """0-based index of the first step with a false equality."""
        return next((i for i, step in enumerate(self.steps) if step.false), None)


@lru_cache(maxsize=4096)
def given_values(question: str) -> tuple[tuple[Fraction, ...], frozenset[Exact]]:
    """Quantities of a question, and every value that may be used without deriving it: those
    quantities, percents also as fractions and as what remains, and constants of its units."""
    numbers = find_numbers(question)
    quantities: list[Fraction] = []
    allowed: set[Exact] = set(ALWAYS)
    for number in numbers:
        if number.value not in quantities:
            quantities.append(number.value)
        allowed |= _forms(number)
    for word in set(re.findall(r"[a-z]+|%", question.lower())):
        for form in (word, word.rstrip("s"), word.removesuffix("es")):
            allowed.update(CONSTANTS.get(form, ()))
    return tuple(quantities), frozenset(allowed)


def _forms(number: Number) -> set[Exact]:
    if not number.percent and number.value.denominator == 1:
        return {number.value.numerator}
    forms = {number.value}
    if number.percent:
        share = number.value / 100
        forms |= {share, 1 - share, 1 + share, 100 - number.value, 100 + number.value}
    if 0 < number.value < 1:
        forms |= {
            1 - number.value,
            Fraction(number.value.numerator),
            Fraction(number.value.denominator),
        }
    return {exact(form) for form in forms}


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a step says by itself, whatever may be used in it."""

    arithmetic: StepArithmetic
    false: tuple[str, ...]
    derived: tuple[Fraction, ...]
    sources: tuple[tuple[tuple[Fraction, Exact, Exact], ...], ...]
    """For each equation and each operand: the operand, its size, and a hundredth of it."""
    known: tuple[tuple[Exact, Exact], ...]
    """For each equation the values that later ones may use."""


@lru_cache(maxsize=16384)
def _facts(text: str, variables: tuple[tuple[str, Fraction], ...]) -> _Facts:
    arithmetic = read_step(text, variables=dict(variables))
    equations = arithmetic.equations
    return _Facts(
        arithmetic=arithmetic,
        false=tuple(
            f"{show(e.left)} = {show(e.right)}, but the left side comes to "
            f"{number_text(e.left_value)}"
            for e in equations
            if not e.holds
        ),
        derived=tuple(e.right_value for e in equations),
        sources=tuple(
            tuple((value, exact(abs(value)), exact(value / 100)) for value in e.operands)
            for e in equations
        ),
        known=tuple((exact(abs(e.right_value)), exact(abs(e.left_value))) for e in equations),
    )


@dataclass
class _Reading:
    """State while a chain is read: what may be used, and what variables hold.

    What a step names is looked for when the next one is read: nobody needs it of the last.
    """

    allowed: frozenset[Exact]
    bindings: Mapping[str, Fraction]
    pending: str = ""

    def copy(self) -> _Reading:
        self.settle()
        return _Reading(allowed=self.allowed, bindings=self.bindings)

    def settle(self) -> None:
        if self.pending:
            self.allowed = self.allowed | _mentioned(self.pending)
            self.pending = ""

    def step(self, text: str) -> StepReport:
        self.settle()
        facts = _facts(text, tuple(sorted(self.bindings.items())))
        fresh: set[Exact] = set()
        unsourced: list[Fraction] = []
        operands = 0
        for sources, known in zip(facts.sources, facts.known, strict=True):
            for value, size, hundredth in sources:
                operands += 1
                if not (
                    size in self.allowed
                    or size in fresh
                    or hundredth in self.allowed
                    or hundredth in fresh
                ):
                    unsourced.append(value)
            fresh.update(known)
        self.bindings = facts.arithmetic.bindings
        self.allowed = self.allowed | fresh if fresh else self.allowed
        self.pending = text
        return StepReport(
            arithmetic=facts.arithmetic,
            false=facts.false,
            operands=operands,
            unsourced=tuple(unsourced),
            derived=facts.derived,
        )


@lru_cache(maxsize=16384)
def _mentioned(text: str) -> frozenset[Exact]:
    """Values that a step names; later steps may use them. Calculator marks are left out."""
    plain = re.sub(r"<<[^<>]*>>", "", text) if "<<" in text else text
    return frozenset(form for number in find_numbers(plain) for form in _forms(number))


def report(question: str, steps: Sequence[str]) -> ChainReport:
    """Everything that the calculator knows about a chain."""
    quantities, allowed = given_values(question)
    reading = _Reading(allowed=allowed, bindings={})
    reports = tuple(reading.step(step) for step in steps)
    named = {form for step in steps for form in _mentioned(step)}
    named |= {value for step in reports for e in step.arithmetic.equations for value in e.operands}
    unused = tuple(
        value
        for value in quantities
        if value not in named and not ({value / 100, 1 - value / 100, 1 - value} & named)
    )
    return ChainReport(steps=reports, given=quantities, unused=unused)


class CalculatorJudge:
    """Arithmetic and provenance. Answers all three questions; never samples; order is indifferent;
    ``exact``: it reads numbers only, so that no null control is asked of it.

    ``p`` of ``verify`` is 0.02 for a false equality and else falls from 0.98 with the share of
    operands without a source, to 0.5 when none has one.
    """

    name = "calculator/1"
    answers = frozenset({Compare, Verify, Supports})
    order_matters = False
    samples = False
    exact = True

    def __init__(self) -> None:
        self._prefixes: dict[tuple[str, tuple[str, ...]], _Reading] = {}
        self._penalties: dict[tuple[str, tuple[str, ...], tuple[str, ...]], float | None] = {}

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """Verdicts at once, without a model."""
        return [self.judge(request) for request in requests]

    def judge(self, request: Request) -> Verdict:
        """One verdict, without an event loop."""
        if isinstance(request, Verify):
            return self._verify(request)
        if isinstance(request, Supports):
            return supports(request)
        return self._compare(request)

    def _after(self, question: str, prefix: tuple[str, ...]) -> _Reading:
        """The state after a prefix; kept, because the next request mostly goes on from it."""
        if len(self._prefixes) > 512:
            self._prefixes.clear()
        known = self._prefixes.get((question, prefix))
        if known is None:
            if prefix:
                known = self._after(question, prefix[:-1])
                known.step(prefix[-1])
            else:
                known = _Reading(allowed=given_values(question)[1], bindings={})
            self._prefixes[question, prefix] = known
        return known.copy()

    def _verify(self, request: Verify) -> Verdict:
        return step_verdict(self._after(request.question, request.prefix).step(request.step))

    def _compare(self, request: Compare) -> Verdict:
        one, two = (
            self._penalty(request.question, request.prefix, side) for side in (request.a, request.b)
        )
        if one is None or two is None:
            return abstain("a continuation states no equality to check")
        if one == two:
            return tie(f"both continuations have penalty {one:.2f}")
        return decide(
            0.98 if one < two else 0.02, f"penalty {one:.2f} for the first, {two:.2f} for the other"
        )

    def _penalty(
        self, question: str, prefix: tuple[str, ...], side: tuple[str, ...]
    ) -> float | None:
        key = (question, prefix, side)
        if key in self._penalties:
            return self._penalties[key]
        if len(self._penalties) > 512:
            self._penalties.clear()
        reading = self._after(question, prefix)
        reports = [reading.step(step) for step in side]
        penalty = self._penalties[key] = _penalty(reports)
        return penalty


def _penalty(reports: Sequence[StepReport]) -> float | None:
    """One for each false equality, a quarter for each number from nowhere; None without any."""
    if not any(report.arithmetic.equations for report in reports):
        return None
    return float(sum(len(report.false) + 0.25 * len(report.unsourced) for report in reports))


def step_verdict(found: StepReport) -> Verdict:
    """The verdict on one step from what was found in it."""
    if found.false:
        return decide(0.02, "; ".join(found.false))
    if not found.arithmetic.equations:
        unread = found.arithmetic.unread
        return abstain(
            f"{unread} equality signs, none of which can be computed"
            if unread
            else "states no equality"
        )
    if found.unsourced:
        share = len(found.unsourced) / max(1, found.operands)
        names = ", ".join(number_text(value) for value in found.unsourced)
        return decide(0.98 - 0.48 * share, f"equalities hold, but {names} comes from nowhere")
    return decide(0.98, f"{len(found.arithmetic.equations)} equalities hold, all numbers sourced")


def supports(request: Supports, *, found: ChainReport | None = None) -> Verdict:
    """Whether the answer is what the chain derives: 0.98 for the last derived value, 0.6 for an
    earlier one, 0.02 for none of them; abstains for an answer that is no number."""
    wanted = number_of(request.answer)
    if wanted is None:
        return abstain(f"the answer {request.answer[:40]!r} is no number")
    found = found or report(request.question, request.steps)
    derived = found.derived
    if not derived:
        return abstain("the chain derives no value")
    value = wanted[0]
    same = [i for i, one in enumerate(derived) if _same(one, value, request.answer)]
    if same and same[-1] == len(derived) - 1:
        return decide(0.98, f"{number_text(value)} is the last value derived")
    if same:
        return decide(0.6, f"{number_text(value)} is derived, but not last")
    return decide(
        0.02, f"{number_text(value)} is never derived; the last value is {number_text(derived[-1])}"
    )


def _same(one: Fraction, value: Fraction, written: str) -> bool:
    if one == value or ("%" in written and one == value * 100):
        return True
    words = written.lower().split()
    if any(word in MULTIPLES and one * MULTIPLES[word] == value for word in words):
        return True  # "2 + 3 = 5 million" derives 5
    return one.denominator > 10**6 and abs(one - value) <= abs(value) * Fraction(1, 10**4)


def number_text(value: Fraction) -> str:
    """A value for a reader: whole numbers and short decimals as such, others to six digits."""
    if value.denominator == 1 and value.numerator.bit_length() < 200:
        return str(value.numerator)
    return f"{float(value):.6g}" if value.numerator.bit_length() < 1000 else "a huge number"


def show(source: str) -> str:
    """An expression as read, without the quotients that stand for decimals."""
    return re.sub(
        r"\((\d+)/(10+)\)",
        lambda m: number_text(Fraction(int(m.group(1)), int(m.group(2)))),
        source,
    )
