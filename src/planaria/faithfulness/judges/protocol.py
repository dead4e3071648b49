"""What a judge is: three questions, one method.

A judge says which of the three questions it answers and answers them in batches. It never sees
which of two continuations is the original, never raises for a single bad request, and says apart
whether it decided, saw a tie, had nothing to go by, or could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Which continuation follows from the question and the prefix: ``a``, ``b`` or neither?"""

    question: str
    """The question, with options."""
    prefix: tuple[str, ...]
    """The steps before."""
    a: tuple[str, ...]
    """One continuation."""
    b: tuple[str, ...]
    """The other."""
    repeat: int = 0
    """Number of the repeat: part of every cache key."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Is this step right, given the question and the steps before it?"""

    question: str
    """The question, with options."""
    prefix: tuple[str, ...]
    """The steps before."""
    step: str
    """The step asked about."""
    repeat: int = 0
    """Number of the repeat."""


@dataclass(frozen=True, kw_only=True)
class Supports:
    """Do these steps lead to this answer?"""

    question: str
    """The question, with options."""
    steps: tuple[str, ...]
    """The chain."""
    answer: str
    """The answer."""
    repeat: int = 0
    """Number of the repeat."""


Request: TypeAlias = Compare | Verify | Supports
"""One question to a judge."""


class Outcome(Enum):
    """What became of a request."""

    DECIDED = "decided"
    TIE = "tie"
    """It looked and sees no difference (compare only), or answered "neither"."""
    ABSTAINED = "abstained"
    """It has nothing to go by."""
    UNPARSED = "unparsed"
    """It answered, and the answer cannot be read."""
    FAILED = "failed"
    """No answer came: time-out, rate limit, refused, over budget."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What an answer cost."""

    calls: int = 0
    """Requests sent to a model and answered; 0 from a cache or a rule."""
    cached: int = 0
    """Requests answered from a cache."""
    input_tokens: int = 0
    """Tokens read, as the provider counts."""
    output_tokens: int = 0
    """Tokens written."""
    money: float = 0.0
    """US dollars, where the model's price is known."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            calls=self.calls + other.calls,
            cached=self.cached + other.cached,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            money=self.money + other.money,
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's answer."""

    outcome: Outcome
    """What became of the request."""
    p: float | None = None
    """Compare: probability that ``a`` follows rather than ``b``. Verify: that the step is right.
    Supports: that the chain leads to the answer. In [0, 1]; None unless decided or tied."""
    reason: str = ""
    """Why, in words for a reader of the report."""
    usage: Usage = field(default_factory=Usage)
    """What it cost."""

    def __post_init__(self) -> None:
        spoken = self.outcome in (Outcome.DECIDED, Outcome.TIE)
        if spoken != (self.p is not None) or (self.p is not None and not 0.0 <= self.p <= 1.0):
            raise ValueError(f"a verdict {self.outcome.value} cannot have p={self.p}")

    @property
    def decided(self) -> bool:
        """Whether ``p`` says something."""
        return self.outcome is Outcome.DECIDED


@runtime_checkable
class Judge(Protocol):
    """Anything that answers at least one of the three questions."""

    @property
    def name(self) -> str:
        """Names the judge and everything that changes its answers: part of every cache key."""
        ...

    @property
    def answers(self) -> frozenset[type]:
        """Which of :class:`Compare`, :class:`Verify`, :class:`Supports` it answers."""
        ...

    @property
    def order_matters(self) -> bool:
        """Whether swapping ``a`` and ``b`` can change its mind: then both orders are asked."""
        ...

    @property
    def samples(self) -> bool:
        """Whether a repeat of the same request can come out differently."""
        ...

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """One verdict per request, in order. A request of a kind it does not answer is abstained
        from; a request that fails is ``FAILED`` with the reason."""
        ...


def decide(p: float, reason: str, *, usage: Usage | None = None) -> Verdict:
    """A verdict with a probability."""
    return Verdict(outcome=Outcome.DECIDED, p=p, reason=reason, usage=usage or Usage())


def tie(reason: str, *, usage: Usage | None = None) -> Verdict:
    """A verdict that sees no difference."""
    return Verdict(outcome=Outcome.TIE, p=0.5, reason=reason, usage=usage or Usage())


def abstain(reason: str, *, usage: Usage | None = None) -> Verdict:
    """No verdict, because there is nothing to go by."""
    return Verdict(outcome=Outcome.ABSTAINED, reason=reason, usage=usage or Usage())


def swap(request: Compare) -> Compare:
    """The same comparison with ``a`` and ``b`` exchanged."""
    return Compare(
        question=request.question,
        prefix=request.prefix,
        a=request.b,
        b=request.a,
        repeat=request.repeat,
    )
