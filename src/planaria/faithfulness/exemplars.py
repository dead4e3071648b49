"""Few-shot examples: faithful chains of different questions, ready to paste."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.errors import ConfigError, DataError
from planaria.faithfulness.scores import ChainScore


def check(k: int) -> None:
    """:class:`~planaria.errors.ConfigError` where ``k`` is no number of examples."""
    if k < 1:
        raise ConfigError(f"-k is {k}: give the number of examples, from 1 on")


def pick(scores: Sequence[ChainScore], k: int) -> list[ChainScore]:
    """The ``k`` best chains, one a question.

    Left out: truncated chains, chains without an answer or with an answer known to be wrong, and
    chains in which a step is held for wrong. Ties in R go to the shorter chain, then to the id.
    Raises :class:`~planaria.errors.DataError` when fewer than ``k`` are left, with how many.
    """
    check(k)
    fit = [
        s
        for s in scores
        if s.reliability is not None
        and s.chain.answer is not None
        and s.chain.labels.correct is not False
        and not s.chain.truncated
        and s.breaks_at is None
    ]
    ranked = sorted(fit, key=lambda s: (-(s.reliability or 0.0), len(s.chain.text), s.chain.id))
    best: dict[str, ChainScore] = {}
    for score in ranked:
        best.setdefault(score.chain.question_id, score)
    if len(best) < k:
        raise DataError(
            f"only {len(best)} of {k} examples can be picked: {len(scores) - len(fit)} of "
            f"{len(scores)} chains are truncated, broken, wrong or without an answer; lower -k"
        )
    return list(best.values())[:k]


def render(scores: Sequence[ChainScore]) -> str:
    """The examples as text: question, steps, answer, with a blank line between."""
    blocks = [
        f"Question: {s.chain.question}\n{s.chain.text}\nAnswer: {s.chain.answer}" for s in scores
    ]
    return "\n\n".join(blocks) + "\n"
