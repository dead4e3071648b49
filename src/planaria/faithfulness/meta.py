"""How well scores agree with what people said about steps and answers.

Every number comes with its interval, clustered by question, and with how many chains could not be
judged: those are left out of the number, never counted as wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planaria.faithfulness.chains import Chain, Labels
from planaria.faithfulness.judges.protocol import Compare, Judge, Outcome, Usage, Verdict
from planaria.faithfulness.perturb import ERRORS, Kind, Task, perturb
from planaria.faithfulness.scores import ChainScore
from planaria.faithfulness.statistics import (
    Array,
    Interval,
    auroc,
    average_precision,
    calibration_error,
    mean_interval,
    paired_interval,
    resample,
)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One measure of agreement."""

    name: str
    """What is measured."""
    value: Interval
    """The measure."""
    left_out: int
    """Labelled chains (or pairs, or steps) that the judge said nothing about, or not enough."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """All measures that the labels allow."""

    measures: tuple[Agreement, ...]
    """In the order of :func:`meta_evaluate`."""
    unexplained: tuple[str, ...]
    """Ids of chains whose answer is wrong though no step is labelled wrong."""

    def value(self, name: str) -> Interval:
        """A measure by name. Raises ``KeyError`` with the names there are."""
        for measure in self.measures:
            if measure.name == name:
                return measure.value
        raise KeyError(f"no measure {name!r}: {', '.join(m.name for m in self.measures)}")

    def row(self) -> dict[str, object]:
        """As JSON."""
        return {
            "measures": {m.name: m.value.row() | {"left_out": m.left_out} for m in self.measures},
            "unexplained": list(self.unexplained),
        }


def meta_evaluate(scores: Sequence[ChainScore], *, seed: int = 0) -> Meta:
    """Agreement of flaw scores with labels, as far as the labels go.

    ``auroc`` and ``average_precision``: the flaw score for chains with a wrong step; with
    ``_explained`` the same without chains whose answer is wrong though no step is labelled wrong.
    ``first_error_accuracy``: on flawed chains, the named step is the labelled one.
    ``false_alarm_rate``: chains without a wrong step in which one is named.
    ``caught_right_answers``: chains with a right answer and a wrong step in which one is named.
    ``processbench_f1``: harmonic mean of first-error accuracy and the share of flawless chains
    where none is named.
    ``answer_auroc``: R for right answers. ``step_calibration_error`` and ``step_brier``: step
    probabilities against labels up to the first wrong step.
    """
    labelled = [s for s in scores if s.chain.labels.flawed is not None]
    judged = [s for s in labelled if s.flaw is not None]
    missing = len(labelled) - len(judged)
    unexplained = [s for s in labelled if _unexplained(s)]
    out: list[Agreement] = []
    explained = [s for s in judged if not _unexplained(s)]
    for suffix, some in (("", judged), ("_explained", explained)):
        for name, function in (("auroc", auroc), ("average_precision", average_precision)):
            if not suffix or unexplained:
                out.append(_ranked(name + suffix, some, function, missing, seed))
    out += _named(judged, missing, seed)
    answered = [s for s in scores if s.chain.labels.correct is not None]
    ranked = [s for s in answered if s.reliability is not None]
    if ranked:
        value = _area(
            [s.reliability or 0.0 for s in ranked],
            [bool(s.chain.labels.correct) for s in ranked],
            [s.chain.question_id for s in ranked],
            auroc,
            seed,
        )
        out.append(
            Agreement(name="answer_auroc", value=value, left_out=len(answered) - len(ranked))
        )
    out += _calibration(labelled, seed)
    kept = tuple(a for a in out if not math.isnan(a.value.estimate))
    return Meta(measures=kept, unexplained=tuple(s.chain.id for s in unexplained))


def _unexplained(score: ChainScore) -> bool:
    """A wrong answer though no step is labelled wrong."""
    return score.chain.labels.flawed is False and score.chain.labels.correct is False


def _ranked(
    name: str,
    judged: Sequence[ChainScore],
    function: Callable[..., float],
    missing: int,
    seed: int,
) -> Agreement:
    value = _area(
        [s.flaw or 0.0 for s in judged],
        [bool(s.chain.labels.flawed) for s in judged],
        [s.chain.question_id for s in judged],
        function,
        seed,
    )
    return Agreement(name=name, value=value, left_out=missing)


def _area(
    scores: Sequence[float],
    positive: Sequence[bool],
    clusters: Sequence[str],
    function: Callable[..., float],
    seed: int,
) -> Interval:
    def statistic(weights: Array) -> float:
        return function(scores, positive, weights=weights)

    return resample(statistic, clusters=clusters, seed=seed)


def _named(judged: Sequence[ChainScore], missing: int, seed: int) -> list[Agreement]:
    """Measures that look at which step was named.

    A chain is left out when a step was not scored (failed or unread) that could have been the named
    one: those up to the named step, all where none is named.
    """
    heard = [s for s in judged if not _unheard(s)]
    missing += len(judged) - len(heard)
    judged = heard
    flawed = [s for s in judged if s.chain.labels.flawed]
    clean = [s for s in judged if not s.chain.labels.flawed]
    lucky = [s for s in flawed if s.chain.labels.correct]

    def share(some: Sequence[ChainScore], test: Callable[[ChainScore], bool]) -> Interval:
        return mean_interval(
            [float(test(s)) for s in some], clusters=[s.chain.question_id for s in some], seed=seed
        )

    def exact(s: ChainScore) -> bool:
        return s.breaks_at == s.chain.labels.first_wrong

    both = [*flawed, *clean]

    def f1(weights: Array) -> float:
        w_flawed, w_clean = weights[: len(flawed)], weights[len(flawed) :]
        if not w_flawed.sum() or not w_clean.sum():
            return math.nan
        found = float((w_flawed * [exact(s) for s in flawed]).sum() / w_flawed.sum())
        quiet = float((w_clean * [exact(s) for s in clean]).sum() / w_clean.sum())
        return 2 * found * quiet / (found + quiet) if found + quiet else 0.0

    named = {
        "first_error_accuracy": share(flawed, exact),
        "flawed_chains_found": share(flawed, lambda s: s.breaks_at is not None),
        "false_alarm_rate": share(clean, lambda s: s.breaks_at is not None),
        "caught_right_answers": share(lucky, lambda s: s.breaks_at is not None),
        "processbench_f1": resample(f1, clusters=[s.chain.question_id for s in both], seed=seed),
    }
    return [Agreement(name=n, value=v, left_out=missing) for n, v in named.items()]


def _unheard(score: ChainScore) -> bool:
    stop = len(score.steps) if score.breaks_at is None else score.breaks_at
    lost = (Outcome.FAILED.value, Outcome.UNPARSED.value)
    return any(step.outcome in lost for step in score.steps[:stop])


def _calibration(labelled: Sequence[ChainScore], seed: int) -> list[Agreement]:
    p: list[float] = []
    right: list[bool] = []
    clusters: list[str] = []
    silent = 0
    for score in labelled:
        first = score.chain.labels.first_wrong
        known = score.steps if first is None else score.steps[: first + 1]
        for index, step in enumerate(known):
            if step.p is None:
                silent += 1
                continue
            p.append(step.p)
            right.append(index != first)
            clusters.append(score.chain.question_id)
    if not p:
        return []
    data, truth = np.asarray(p), np.asarray(right, dtype=np.float64)

    def ece(weights: Array) -> float:
        rows = np.repeat(np.arange(len(data)), weights.astype(int))
        return calibration_error(data[rows].tolist(), [bool(t) for t in truth[rows]])

    brier = mean_interval(((data - truth) ** 2).tolist(), clusters=clusters, seed=seed)
    error = resample(ece, clusters=clusters, seed=seed, resamples=200)
    return [
        Agreement(name="step_calibration_error", value=error, left_out=silent),
        Agreement(name="step_brier", value=brier, left_out=silent),
    ]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An original and its modified version."""

    id: str
    """The pair's name in its source."""
    question_id: str
    """Clusters pairs of one question."""
    kind: str
    """Class of the error."""
    request: Compare
    """The comparison: ``a`` is the original's rest, from the first step that differs."""


def pairs_of(chains: Sequence[Chain]) -> tuple[list[Pair], int]:
    """Pairs of a file such as PRMBench's, and how many were left out.

    Left out are pairs whose question was changed too, whose error steps are not labelled, or whose
    two versions are equal.
    """
    by_pair: dict[str, list[Chain]] = {}
    for chain in chains:
        if chain.pair:
            by_pair.setdefault(chain.pair, []).append(chain)
    out: list[Pair] = []
    dropped = 0
    for name, both in by_pair.items():
        if len(both) != 2:
            dropped += 1
            continue
        original, modified = sorted(both, key=lambda c: bool(c.labels.wrong))
        same = 0
        for a, b in zip(original.steps, modified.steps, strict=False):
            if a != b:
                break
            same += 1
        rest = original.steps[same:], modified.steps[same:]
        if not modified.labels.wrong or original.question != modified.question or not all(rest):
            dropped += 1
            continue
        out.append(
            Pair(
                id=name,
                question_id=original.question_id,
                kind=modified.kind,
                request=Compare(
                    question=original.question,
                    prefix=original.steps[:same],
                    a=rest[0],
                    b=rest[1],
                ),
            )
        )
    return out, dropped


def pair_value(verdict: Verdict) -> float | None:
    """1 where the original is preferred, 0 where the other is, 0.5 for a tie, None else."""
    if verdict.outcome is Outcome.TIE:
        return 0.5
    if not verdict.decided or verdict.p is None:
        return None
    return float(verdict.p > 0.5) if verdict.p != 0.5 else 0.5


async def judge_pairs(pairs: Sequence[Pair], *, judge: Judge) -> list[float | None]:
    """What :func:`pair_value` makes of a judge's verdicts; both orders where order matters."""
    requests = [pair.request for pair in pairs]
    values = [pair_value(v) for v in await judge.ask(requests)]
    if not judge.order_matters:
        return values
    turned = [replace(r, a=r.b, b=r.a) for r in requests]
    back = [pair_value(v) for v in await judge.ask(turned)]
    return [
        None if one is None or two is None else (one + 1 - two) / 2
        for one, two in zip(values, back, strict=True)
    ]


class ShorterJudge:
    """The control that always prefers the shorter continuation."""

    name = "shorter/1"
    answers = frozenset({Compare})
    order_matters = False
    samples = False

    async def ask(self, requests: Sequence[object]) -> list[Verdict]:
        """Verdicts by length in characters."""
        out: list[Verdict] = []
        for request in requests:
            if not isinstance(request, Compare):
                out.append(Verdict(outcome=Outcome.ABSTAINED, reason="it compares only"))
                continue
            a, b = sum(map(len, request.a)), sum(map(len, request.b))
            if a == b:
                out.append(Verdict(outcome=Outcome.TIE, p=0.5, reason="equal lengths"))
            else:
                p = 1.0 if a < b else 0.0
                reason = f"{a} and {b} characters"
                out.append(Verdict(outcome=Outcome.DECIDED, p=p, reason=reason, usage=Usage()))
        return out


def pair_accuracy(
    pairs: Sequence[Pair], values: Sequence[float | None], *, seed: int = 0
) -> Interval:
    """Mean of pair values, by question."""
    kept = [(p, v) for p, v in zip(pairs, values, strict=True) if v is not None]
    return mean_interval([v for _, v in kept], clusters=[p.question_id for p, _ in kept], seed=seed)


def pair_gain(
    pairs: Sequence[Pair],
    one: Sequence[float | None],
    other: Sequence[float | None],
    *,
    seed: int = 0,
) -> Interval:
    """Paired difference of two judges on pairs that both decided."""
    kept = [
        (p, a, b)
        for p, a, b in zip(pairs, one, other, strict=True)
        if a is not None and b is not None
    ]
    return paired_interval(
        [a for _, a, _ in kept],
        [b for _, _, b in kept],
        clusters=[p.question_id for p, _, _ in kept],
        seed=seed,
    )


def corrupt(
    chains: Sequence[Chain], *, share: float, kinds: Sequence[Kind] = ERRORS, seed: int = 0
) -> list[Chain]:
    """Noise test: a share of the chains with one known error each, labelled at its first step.

    Chains that a rule cannot change stay as they are. Labels of every chain are set: corrupted or
    not. Raises ``ValueError`` for a share outside of [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}: give a number from 0 to 1")
    rng = random.Random(f"corrupt:{seed}")
    out: list[Chain] = []
    for chain in chains:
        clean = replace(chain, labels=Labels(steps_labelled=True, correct=chain.labels.correct))
        if not chain.steps or rng.random() >= share:
            out.append(clean)
            continue
        start = rng.randrange(len(chain.steps))
        made = None
        for kind in rng.sample(list(kinds), len(kinds)):
            task = Task(
                question=chain.question,
                prefix=chain.steps[:start],
                continuation=chain.steps[start:],
                kind=kind,
                seed=seed,
            )
            made = perturb(task)
            if made.steps is not None:
                break
        if made is None or made.steps is None:
            out.append(clean)
            continue
        index = start + min(change.step for change in made.changes)
        labels = Labels(
            first_wrong=index, wrong=(index,), steps_labelled=True, correct=chain.labels.correct
        )
        out.append(replace(chain, steps=(*chain.steps[:start], *made.steps), labels=labels))
    return out
