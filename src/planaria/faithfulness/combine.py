"""The combiner: votes, arithmetic and judges in one logistic regression, cross-fitted by question.

Each chain's probability comes from a model that never saw a chain of its question. The features say
nothing about who wrote a chain or where it stood in the file; with labels for a handful of
questions only, it is not worth training. Our choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.errors import DataError
from planaria.faithfulness.answers import number_of
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.calculator import ChainReport, report
from planaria.faithfulness.select import Candidate, by_question, clusters

FEATURES = (
    "vote share",
    "vote share squared",
    "only vote",
    "unanimous",
    "no answer",
    "false equalities",
    "unsourced operands",
    "unused quantities",
    "unused beyond the question's least",
    "unused in the answer's votes, mean",
    "unused in the answer's votes, least",
    "share of quantities unused",
    "quantities used",
    "quantities used twice",
    "derived and never used",
    "derived by the others",
    "answer derived for another answer",
    "answer is last derived",
    "answer is a given quantity",
    "answer is whole",
    "answer has more than two decimals",
    "answer is negative",
    "answer below the least quantity",
    "answer over the largest quantity, log",
    "answer's distance from the median, log",
    "steps minus the mean",
    "equations minus the mean",
    "equations",
    "steps without an equation",
    "equality signs unread",
    "repeated results",
    "fractional results",
    "negative results",
    "longest equation",
    "C",
    "F*",
)
"""Names of the columns of :func:`features`, in order. "Votes" are the chains with the same answer;
"the mean", "the least", "the median" and "the others" are those of the question's chains."""
LEAST_QUESTIONS = 30
"""Labelled questions below which training is refused."""


def features(group: Sequence[Candidate]) -> NDArray[np.float64]:
    """One row per chain of one question; see :data:`FEATURES`. Scores that are unknown are 0.5."""
    reports = [report(candidate.chain.question, candidate.chain.steps) for candidate in group]
    votes = {index: cluster for cluster in clusters(group) for index in cluster}
    values = [
        number[0] if c.chain.answer and (number := number_of(c.chain.answer)) else None
        for c in group
    ]
    columns = (
        _vote_columns(group, reports, votes),
        _derivation_columns(reports, votes, values),
        _answer_columns(reports, values),
        _form_columns(group, reports),
    )
    return np.concatenate(columns, axis=1)


def _vote_columns(
    group: Sequence[Candidate], reports: Sequence[ChainReport], votes: dict[int, list[int]]
) -> NDArray[np.float64]:
    unused = [float(len(found.unused)) for found in reports]
    rows: list[list[float]] = []
    for index, found in enumerate(reports):
        mine = votes.get(index, [])
        with_me = [unused[i] for i in mine or [index]]
        share = len(mine) / len(group)
        rows.append(
            [
                share,
                share**2,
                float(len(mine) == 1),
                float(len(mine) == len(group)),
                float(not mine),
                float(sum(len(step.false) for step in found.steps)),
                math.log1p(sum(len(step.unsourced) for step in found.steps)),
                unused[index],
                unused[index] - min(unused),
                sum(with_me) / len(with_me),
                min(with_me),
                unused[index] / max(1, len(found.given)),
            ]
        )
    return np.asarray(rows, dtype=np.float64)


def _derivation_columns(
    reports: Sequence[ChainReport],
    votes: dict[int, list[int]],
    values: Sequence[Fraction | None],
) -> NDArray[np.float64]:
    derived = [set(found.derived) for found in reports]
    rows: list[list[float]] = []
    for index, found in enumerate(reports):
        operands = [
            value for s in found.steps for e in s.arithmetic.equations for value in e.operands
        ]
        given = set(found.given)
        before = found.derived[:-1]
        others = [other for i, other in enumerate(derived) if i != index]
        rivals = [other for i, other in enumerate(derived) if i not in votes.get(index, [index])]
        agreed = [sum(v in other for other in others) / len(others) for v in before if others]
        value = values[index]
        rows.append(
            [
                float(len(found.given) - len(found.unused)),
                float(sum(operands.count(v) > 1 for v in given & set(operands))),
                float(sum(v not in operands for v in before)),
                sum(agreed) / len(agreed) if agreed else 0.3,
                float(value is not None and any(value in other for other in rivals)),
                float(bool(found.derived) and found.derived[-1] == value),
            ]
        )
    return np.asarray(rows, dtype=np.float64)


def _answer_columns(
    reports: Sequence[ChainReport], values: Sequence[Fraction | None]
) -> NDArray[np.float64]:
    given = [value for value in reports[0].given if value.numerator.bit_length() < 1000]
    least, most = min(given, default=Fraction(0)), max(given, default=Fraction(1))
    sizes = [_log(value) for value in values]
    median = float(np.median(sizes))
    rows: list[list[float]] = []
    for value, size in zip(values, sizes, strict=True):
        rows.append(
            [
                float(value is not None and value in given),
                float(value is not None and value.denominator == 1),
                float(value is not None and (value * 100).denominator != 1),
                float(value is not None and value < 0),
                float(value is not None and abs(value) < least),
                size - _log(most),
                abs(size - median),
            ]
        )
    return np.asarray(rows, dtype=np.float64)


def _log(value: Fraction | None) -> float:
    """log(1 + |value|), without overflow; 0 for none."""
    if value is None:
        return 0.0
    return math.log(value.denominator + abs(value.numerator)) - math.log(value.denominator)


def _form_columns(
    group: Sequence[Candidate], reports: Sequence[ChainReport]
) -> NDArray[np.float64]:
    lengths = [len(candidate.chain.steps) for candidate in group]
    equations = [[e for s in found.steps for e in s.arithmetic.equations] for found in reports]
    mean_steps = sum(lengths) / len(group)
    mean_equations = sum(map(len, equations)) / len(group)
    rows: list[list[float]] = []
    for index, (candidate, found) in enumerate(zip(group, reports, strict=True)):
        derived = found.derived
        rows.append(
            [
                lengths[index] - mean_steps,
                len(equations[index]) - mean_equations,
                float(len(equations[index])),
                math.log1p(sum(not step.arithmetic.equations for step in found.steps)),
                math.log1p(sum(step.arithmetic.unread for step in found.steps)),
                float(len(derived) - len(set(derived))),
                float(sum(value.denominator != 1 for value in derived)),
                float(sum(value < 0 for value in derived)),
                float(max((len(e.operands) for e in equations[index]), default=0)),
                0.5 if candidate.consistency is None else candidate.consistency,
                0.5 if candidate.faithfulness is None else candidate.faithfulness,
            ]
        )
    return np.asarray(rows, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Candidates with the combiner's probabilities, and what it looked at."""

    candidates: tuple[Candidate, ...]
    """The same candidates in the same order, ``combined`` set where it could be."""
    weights: dict[str, float]
    """Mean weight per standardised feature over folds."""
    folds: int
    """Folds, by question."""


def cross_fit(
    candidates: Sequence[Candidate],
    *,
    folds: int = 10,
    repeats: int = 5,
    strength: float = 0.03,
    seed: int = 0,
) -> Fitted:
    """Probability of being right for each chain, by models fitted on other questions only.

    Folds are drawn by question, ``repeats`` times with other draws, and the probabilities averaged.
    ``strength`` is the inverse of the ridge penalty (``C`` of scikit-learn). Raises
    :class:`~planaria.errors.DataError` with fewer than ``LEAST_QUESTIONS`` labelled questions or
    when all labels are equal.
    """
    groups = by_question(candidates)
    labelled = {q for q, g in groups.items() if any(c.chain.labels.correct is not None for c in g)}
    truths = {c.chain.labels.correct for c in candidates} - {None}
    if len(labelled) < LEAST_QUESTIONS or len(truths) < 2:
        raise DataError(
            f"the combiner has {len(labelled)} labelled questions and {len(truths)} kinds of label:"
            f" it needs {LEAST_QUESTIONS} questions with right and wrong chains; use votes_r"
        )
    rows = {q: features(group) for q, group in groups.items()}
    names = sorted(groups)
    chances = {q: np.zeros(len(group)) for q, group in groups.items()}
    weights = np.zeros(len(FEATURES))
    for repeat in range(repeats):
        order = np.random.default_rng([seed, repeat]).permutation(names).tolist()
        for number in range(folds):
            inside = set(order[number::folds])
            x: list[NDArray[np.float64]] = []
            y: list[bool] = []
            for q in names:
                if q in inside or q not in labelled:
                    continue
                for row, candidate in zip(rows[q], groups[q], strict=True):
                    if candidate.chain.labels.correct is not None:
                        x.append(row)
                        y.append(candidate.chain.labels.correct)
            if len(set(y)) < 2:  # all chains of the other class are in this fold
                for q in inside:
                    chances[q] += float(np.mean(y)) / repeats
                continue
            model = _fit(np.asarray(x), np.asarray(y), strength)
            weights += model[-1].coef_[0] / (folds * repeats)
            for q in inside:
                chances[q] += model.predict_proba(rows[q])[:, 1] / repeats
    position = dict.fromkeys(groups, 0)
    out: list[Candidate] = []
    for candidate in candidates:
        q = candidate.chain.question_id
        out.append(replace(candidate, combined=float(chances[q][position[q]])))
        position[q] += 1
    named: dict[str, float] = dict(zip(FEATURES, weights.tolist(), strict=True))
    return Fitted(candidates=tuple(out), weights=named, folds=folds)


def _fit(x: NDArray[np.float64], y: NDArray[np.bool_], strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    return model.fit(x, y)


def plain_candidates(chains: Sequence[Chain]) -> list[Candidate]:
    """Candidates without any score: enough for votes, and for the combiner without judges."""
    return [Candidate(chain=chain) for chain in chains]
