"""Choosing among the chains of a question.

A rule gives each chain a share; shares of a question sum to one. Ties are shared equally, so that
the accuracy is what one would get on average, whatever the order in the file. Which system wrote a
chain is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from planaria.faithfulness.answers import Equality, answers_equal
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.statistics import Interval, mean_interval, paired_interval


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A chain with the scores that rules may use; a score that is unknown is None."""

    chain: Chain
    """The chain."""
    reliability: float | None = None
    """R."""
    consistency: float | None = None
    """C: what a model says of its own chain, when the judge is the model itself."""
    faithfulness: float | None = None
    """F*."""
    certainty: float | None = None
    """Mean log-probability of its tokens, where the provider gave them."""
    combined: float | None = None
    """Probability of being right by the combiner."""


Shares: TypeAlias = list[float]
Rule: TypeAlias = Callable[[Sequence[Candidate]], Shares]


def clusters(candidates: Sequence[Candidate], *, choices: tuple[str, ...] = ()) -> list[list[int]]:
    """Indices of candidates with equal answers; candidates without an answer are in none.

    Equality is no equivalence (0.333 and 0.3333 both stand for 1/3), so whatever a chain of
    equalities connects is one cluster: else the order in the file would decide.
    """
    groups: list[list[int]] = []
    for index, candidate in enumerate(candidates):
        answer = candidate.chain.answer
        if answer is None:
            continue
        alike = [
            group
            for group in groups
            if any(
                answers_equal(answer, candidates[i].chain.answer, choices=choices) is Equality.EQUAL
                for i in group
            )
        ]
        groups = [group for group in groups if group not in alike]
        groups.append(sorted([*(i for group in alike for i in group), index]))
    return sorted(groups)


def first(candidates: Sequence[Candidate]) -> Shares:
    """The first in the file: what one sample would give, if the order is that of sampling."""
    return [1.0 if index == 0 else 0.0 for index in range(len(candidates))]


def uniform(candidates: Sequence[Candidate]) -> Shares:
    """Any, with equal probability."""
    return [1.0 / len(candidates)] * len(candidates)


def oracle(candidates: Sequence[Candidate]) -> Shares:
    """A right one where there is one: the upper bound."""
    return _largest([1.0 if c.chain.labels.correct else 0.0 for c in candidates])


def majority(candidates: Sequence[Candidate]) -> Shares:
    """The most frequent answer; equally frequent ones share."""
    return _votes(candidates, [1.0] * len(candidates))


def argmax_reliability(candidates: Sequence[Candidate]) -> Shares:
    """The largest R. A chain without R stands at the mean of the question's others."""
    return _largest(filled([c.reliability for c in candidates]))


def votes_by_reliability(candidates: Sequence[Candidate]) -> Shares:
    """The answer with the largest sum of R."""
    return _votes(candidates, filled([c.reliability for c in candidates]))


def self_reflection(candidates: Sequence[Candidate]) -> Shares:
    """The largest C: the judge's own opinion of whether the chain leads to its answer."""
    return _largest(filled([c.consistency for c in candidates]))


def self_certainty(candidates: Sequence[Candidate]) -> Shares:
    """The largest mean log-probability of its tokens."""
    return _largest(filled([c.certainty for c in candidates]))


def combined(candidates: Sequence[Candidate]) -> Shares:
    """The answer with the largest sum of the combiner's probabilities."""
    return _votes(candidates, filled([c.combined for c in candidates]))


RULES: dict[str, Rule] = {
    "first": first,
    "random": uniform,
    "majority": majority,
    "argmax_r": argmax_reliability,
    "votes_r": votes_by_reliability,
    "self_reflection": self_reflection,
    "self_certainty": self_certainty,
    "combiner": combined,
    "oracle": oracle,
}
"""Rules by name. A rule whose scores nobody has falls back to equal shares and is left out of
reports."""
NEEDS: dict[str, str] = {
    "argmax_r": "reliability",
    "votes_r": "reliability",
    "self_reflection": "consistency",
    "self_certainty": "certainty",
    "combiner": "combined",
}
"""Which score a rule needs."""


def filled(values: Sequence[float | None]) -> list[float]:
    """Unknown values at the mean of the known ones, 1 for all when none is known: what was not
    scored is neither favoured nor punished."""
    known = [value for value in values if value is not None]
    middle = sum(known) / len(known) if known else 1.0
    return [middle if value is None else value for value in values]


def _largest(values: Sequence[float]) -> Shares:
    top = max(values)
    best = [math.isclose(value, top, rel_tol=1e-9, abs_tol=1e-12) for value in values]
    return [1.0 / sum(best) if good else 0.0 for good in best]


def _votes(candidates: Sequence[Candidate], weights: Sequence[float]) -> Shares:
    groups = clusters(candidates)
    if not groups:
        return uniform(candidates)
    shares = _largest([sum(weights[i] for i in group) for group in groups])
    out = [0.0] * len(candidates)
    for group, share in zip(groups, shares, strict=True):
        for index in group:
            out[index] = share / len(group)
    return out


def by_question(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates grouped by question, in order of first appearance."""
    out: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        out.setdefault(candidate.chain.question_id, []).append(candidate)
    return out


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What one rule comes to on a set of questions."""

    rule: str
    """Its name."""
    accuracy: Interval
    """Expected accuracy over questions whose chosen chains are known to be right or wrong."""
    gain: Interval
    """Paired difference to ``majority`` on the same questions."""
    unknown: int
    """Questions left out because nobody knows whether what was chosen is right."""


def expected_accuracy(rule: Rule, group: Sequence[Candidate]) -> float | None:
    """Probability that the rule chooses a right chain; None when it is not known."""
    right = known = 0.0
    for candidate, share in zip(group, rule(group), strict=True):
        if share and candidate.chain.labels.correct is not None:
            known += share
            right += share * candidate.chain.labels.correct
    return right / known if known > 0 else None


def evaluate(
    candidates: Sequence[Candidate], *, rules: Mapping[str, Rule] | None = None, seed: int = 0
) -> list[Selection]:
    """Accuracy of each rule that has its scores, and its paired gain over the majority vote."""
    groups = by_question(candidates)
    out: list[Selection] = []
    base = {q: expected_accuracy(majority, group) for q, group in groups.items()}
    for name, rule in (rules or RULES).items():
        need = NEEDS.get(name)
        if need and all(getattr(c, need) is None for c in candidates):
            continue
        mine = {q: expected_accuracy(rule, group) for q, group in groups.items()}
        known = [(q, value) for q, value in mine.items() if value is not None]
        both = [(q, value, base[q]) for q, value in known if base[q] is not None]
        out.append(
            Selection(
                rule=name,
                accuracy=mean_interval(
                    [value for _, value in known], clusters=[q for q, _ in known], seed=seed
                ),
                gain=paired_interval(
                    [value for _, value, _ in both],
                    [other or 0.0 for _, _, other in both],
                    clusters=[q for q, _, _ in both],
                    seed=seed,
                ),
                unknown=len(mine) - len(known),
            )
        )
    return out
