"""Perturbations differ in meaning, paraphrases do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.calculator import report
from planaria.faithfulness.numbers import find_numbers
from planaria.faithfulness.paraphrase import BOTH_WAYS, ONE_WAY
from planaria.faithfulness.perturb import (
    ERRORS,
    Change,
    Kind,
    RulePerturber,
    Task,
    check,
    diff,
    perturb,
)


def task(chain: Chain, kind: Kind, seed: int = 0) -> Task:
    return Task(
        question=chain.question,
        prefix=chain.steps[:1],
        continuation=chain.steps[1:],
        kind=kind,
        seed=seed,
    )


@pytest.mark.parametrize("kind", ERRORS)
def test_each_kind_changes_the_chain_and_says_what(chain: Chain, kind: Kind) -> None:
    for seed in range(8):
        made = perturb(task(chain, kind, seed))
        assert made.steps is not None, made.reason
        assert len(made.steps) == 2
        assert made.steps != chain.steps[1:]
        assert made.changes
        assert abs(sum(map(len, made.steps)) - sum(map(len, chain.steps[1:]))) <= 40
        assert perturb(task(chain, kind, seed)) == made


def test_an_operation_error_is_carried_on(chain: Chain) -> None:
    made = [perturb(task(chain, Kind.OPERATION, seed)).steps for seed in range(12)]
    assert ("Then 16 + 7 = 23 eggs are left.", chain.steps[2].replace("9 *", "23 *")) in made


def test_a_paraphrase_keeps_every_number_and_every_equality(chain: Chain) -> None:
    for seed in range(20):
        made = perturb(task(chain, Kind.PARAPHRASE, seed))
        assert made.steps is not None
        assert made.steps != chain.steps[1:]
        before = sorted(n.value for n in find_numbers(chain.text) if not n.word)
        after = (chain.steps[0], *made.steps)
        assert sorted(n.value for n in find_numbers("\n".join(after)) if not n.word) == before
        assert report(chain.question, after).first_false is None


def test_a_paraphrase_is_matched_in_length(chain: Chain) -> None:
    base = task(chain, Kind.PARAPHRASE)
    size = sum(map(len, base.continuation))
    short = perturb(replace(base, length=size - 8)).steps or ()
    long = perturb(replace(base, length=size + 8)).steps or ()
    assert sum(map(len, short)) < sum(map(len, long))


def test_no_phrasing_holds_a_digit_or_is_its_own_twin() -> None:
    for one, two in (*BOTH_WAYS, *ONE_WAY):
        assert one != two
        assert not any(char.isdigit() for char in one + two)


def test_nothing_to_change_is_a_reason_and_no_error() -> None:
    empty = Task(question="q", prefix=(), continuation=("",), kind=Kind.SWAP)
    assert perturb(empty).reason == "the continuation is empty"
    bare = Task(question="q", prefix=(), continuation=("Ok.",), kind=Kind.OPERATION)
    made = asyncio.run(RulePerturber().make([bare]))[0]
    assert made.steps is None
    assert made.reason == "no operation is stated"


def test_unfit_alternatives_are_named() -> None:
    assert check(("It is 3.",), ("it  is 3",)) == "the alternative says the same"
    long = ("x" * 100,)
    assert (
        check(("It is 3.",), long) == "the alternative has 100 characters where the original has 8"
    )
    assert check(("It is 3.",), ("It is 4.",)) is None
    assert diff(("a", "b"), ("a", "c", "d")) == (
        Change(step=1, before="b", after="c"),
        Change(step=2, before="", after="d"),
    )
