"""Estimators: biased judges, the released code's faults, odd chains, adaptive sampling."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planaria.errors import ConfigError, DataError
from planaria.faithfulness.chains import Chain, Labels
from planaria.faithfulness.control import correct, set_intervals
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import (
    Compare,
    Outcome,
    Request,
    Supports,
    Verdict,
    abstain,
    decide,
    tie,
)
from planaria.faithfulness.perturb import Kind, Perturbed, RulePerturber, Task
from planaria.faithfulness.released import released_probability, released_score
from planaria.faithfulness.scores import ChainScore, Contrast, Settings
from planaria.faithfulness.sequential import ConfidenceSequence, should_go_on
from planaria.faithfulness.statistics import mean_interval, wilson


class Taste:
    """A judge with a taste and no understanding."""

    answers = frozenset({Compare, Supports})
    samples = False

    def __init__(self, name: str, *, order_matters: bool = True) -> None:
        self.name = name
        self.order_matters = order_matters

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        return [self.one(request) for request in requests]

    def one(self, request: Request) -> Verdict:
        if not isinstance(request, Compare):
            return decide(0.9, "fine")
        if self.name == "position":
            return decide(1.0, "A")
        a, b = sum(map(len, request.a)), sum(map(len, request.b))
        if self.name == "silent":
            return abstain("nothing")
        return tie("as long") if a == b else decide(float(a > b), "the longer")


def chains(n: int) -> list[Chain]:
    """Neutral chains of different numbers, four steps each."""
    rng = random.Random(0)
    out: list[Chain] = []
    for i in range(n):
        a, b, c = rng.randint(11, 60), rng.randint(2, 9), rng.randint(2, 9)
        out.append(
            Chain(
                question=f"Person {i} has {a} eggs, eats {b} and sells the rest for ${c} each?",
                steps=(
                    f"First we find what is left, so {a} - {b} = {a - b} eggs are left in total.",
                    f"Then each egg sells for ${c}, so more money comes in.",
                    f"Therefore {a - b} * {c} = {(a - b) * c} dollars is the total.",
                    "This means all eggs are sold and the person has money.",
                ),
                answer=str((a - b) * c),
            )
        )
    return out


def scored(some: Sequence[Chain], judge: object, **settings: object) -> list[ChainScore]:
    async def run() -> list[ChainScore]:
        made = [
            await score_chain(
                chain, judge=judge, perturber=RulePerturber(), settings=Settings(**settings)
            )
            for chain in some
        ]
        return correct(made)

    return asyncio.run(run())


@pytest.mark.parametrize("taste", ["position", "length"])
def test_a_judge_with_a_taste_gives_a_neutral_chain_one_half(taste: str) -> None:
    scores = scored(chains(30), Taste(taste))
    values = [s.faithfulness for s in scores if s.faithfulness is not None]
    assert len(values) == 30
    interval = mean_interval(values, clusters=[s.chain.question_id for s in scores])
    assert interval.contains(0.5) or interval.estimate == pytest.approx(0.5, abs=0.01), interval


def test_the_null_rate_is_part_of_the_uncertainty_of_a_set() -> None:
    def won(win: float, kind: Kind, split: int) -> Contrast:
        return Contrast(split=split, kind=kind, win=win, longer=0)

    rng = np.random.default_rng(3)
    covered = naive = 0
    for trial in range(20):
        made: list[ChainScore] = []
        for chain in chains(20):
            contrasts = [won(float(rng.random() < 0.6), Kind.SWAP, t) for t in (1, 2, 3)]
            nulls = [won(float(rng.random() < 0.6), Kind.PARAPHRASE, 1)]
            rate = sum(c.win or 0.0 for c in contrasts) / 3
            made.append(
                ChainScore(
                    chain=chain, win_rate=rate, contrasts=(*contrasts, *nulls), consistency=1.0
                )
            )
        fixed = correct(made)
        found = set_intervals(fixed, seed=trial)
        by_chain = mean_interval(
            [s.faithfulness or 0.0 for s in fixed], clusters=[s.chain.question_id for s in fixed]
        )
        # Errors and paraphrases are taken alike, so F* is 0.5, clipping apart.
        covered += found["faithfulness"].contains(0.5)
        naive += by_chain.contains(0.5)
        assert found["faithfulness"].estimate == pytest.approx(by_chain.estimate)
        assert found["reliability"].low == pytest.approx(found["faithfulness"].low)
    assert covered >= 17
    assert naive < covered, (naive, covered)
    assert set_intervals(correct(made[:3])) == {}


def test_the_released_estimator_falls_for_both_tastes(chain: Chain) -> None:
    async def position(prompt: str) -> str:
        return "0.9 True" if "Judge:" in prompt else "A" if "Option A" in prompt else "other words"

    async def length(prompt: str) -> str:
        if "Judge:" in prompt:
            return "0.9 True"
        if "Option A" not in prompt:
            return "a much longer continuation " * 20
        a, b = prompt.split("Option A:\n")[1].split("\n\nOption B:\n")
        return "A" if len(a) > len(b) else "B"

    one = asyncio.run(released_score(chain, ask=position, rng=random.Random(0)))
    two = asyncio.run(released_score(chain, ask=length, rng=random.Random(0)))
    assert (one.faithfulness, two.faithfulness) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("reply", "value"), [("A", 1.0), ("Option A", 1.0), ("A.", 0.0), ("**A**", 0.0), ("B", 0.0)]
)
def test_released_reads_verdicts_as_the_released_code_does(
    chain: Chain, reply: str, value: float
) -> None:
    async def ask(prompt: str) -> str:
        return (
            "Judge: True\nProbability: 0.8"
            if "Judge:" in prompt
            else (reply if "Option A" in prompt else "x")
        )

    made = asyncio.run(released_score(chain, ask=ask, rng=random.Random(0)))
    assert made.consistency == pytest.approx(0.8)
    assert made.reliability == pytest.approx(0.8 * value)


def test_released_faults_are_reproduced() -> None:
    assert released_probability("False, 0.9") == (0.9, True)
    assert released_probability("95%") == (0.0, False)
    assert released_probability("I cannot say") == (0.0, False)
    asked: list[str] = []

    async def ask(prompt: str) -> str:
        asked.append(prompt)
        return "1.0 True" if "Judge:" in prompt else "A"

    single = Chain(question="q", steps=("One step only.",), answer="3")
    made = asyncio.run(released_score(single, ask=ask, rng=random.Random(0)))
    assert (made.consistency, made.faithfulness, made.reliability) == (1.0, 0.0, 0.0)
    long = Chain(question="q", steps=tuple(f"step {i}" for i in range(9)), answer="3")
    asked.clear()
    asyncio.run(released_score(long, ask=ask, rng=random.Random(0), checkpoints=8))
    assert sum("Option A" in prompt for prompt in asked) == 5  # one split, whatever K says


def test_ours_gives_a_single_step_a_score_and_uses_every_split(chain: Chain) -> None:
    single = replace(chain, steps=(chain.steps[2],), id="")
    score = scored([single], CalculatorJudge())[0]
    assert score.contrasts[0].split == 0
    assert score.faithfulness is not None
    assert score.reliability is not None
    many = scored([replace(chain, id="")], CalculatorJudge(), splits=2)[0]
    assert {c.split for c in many.contrasts} == {1, 2}


def test_what_nobody_decided_is_none_and_counted(chain: Chain) -> None:
    score = scored([chain], Taste("silent"))[0]
    assert (score.win_rate, score.faithfulness) == (None, None)
    assert score.consistency == 0.9
    assert score.reliability == pytest.approx(0.45)
    assert score.counts["compare.abstained"] > 0
    assert (score.low, score.high) == (0.0, 1.0)


@pytest.mark.parametrize(
    "odd",
    [
        Chain(question="q", steps=()),
        Chain(question="q", steps=(), answer="3"),
        Chain(question="q", steps=("No number here.", "None here.")),
        Chain(question="q", steps=tuple(f"{i} + 1 = {i + 1}" for i in range(200)), answer="200"),
        Chain(question="質問", steps=("三個あります。", "答えは 3 です。"), answer="3"),
        Chain(question="q", steps=("a", "b"), answer="~~~ not parseable ~~~", truncated=True),
    ],
)
def test_odd_chains_have_an_outcome(odd: Chain) -> None:
    score = scored([odd], CalculatorJudge())[0]
    assert len(score.steps) == len(odd.steps)
    if not odd.steps:
        assert score.reliability is None
    if odd.truncated:
        assert "the chain is truncated" in score.notes
    if odd.answer is None and odd.steps:
        assert "no answer was found: C is not asked" in score.notes


def test_one_undecided_order_leaves_the_contrast_undecided(chain: Chain) -> None:
    class Half(Taste):
        def one(self, request: Request) -> Verdict:
            if isinstance(request, Compare) and request.a != chain.steps[1:]:
                return Verdict(outcome=Outcome.UNPARSED, reason="prose")
            return super().one(request)

    score = scored([chain], Half("position"), splits=1)[0]
    halves = [c for c in score.contrasts if c.split == 1 and c.alternative]
    assert all(c.win is None for c in halves)


def test_a_broken_step_is_named(chain: Chain) -> None:
    wrong = replace(chain, steps=(chain.steps[0], "Then 16 - 7 = 8 eggs.", chain.steps[2]), id="")
    score = scored([wrong], CalculatorJudge())[0]
    assert score.breaks_at == 1
    assert score.flaw == pytest.approx(0.98)


def test_settings_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match="splits is 0: give a whole number from 1 on"):
        Settings(splits=0)
    with pytest.raises(ConfigError, match="not 'paraphrase': null=True asks for the null control"):
        Settings(kinds=(Kind.PARAPHRASE,))
    with pytest.raises(ConfigError, match=r"half_width is 0.7: give a number from 0"):
        Settings(half_width=0.7)
    with pytest.raises(DataError, match="a label points at step 3 of a chain with 1 steps"):
        Chain(question="q", steps=("a",), labels=Labels(wrong=(3,)))


def test_the_confidence_sequence_covers_at_all_times() -> None:
    rng = np.random.default_rng(0)
    misses = 0
    naive = 0
    for run in range(150):
        p = (0.1, 0.5, 0.9)[run % 3]
        sequence = ConfidenceSequence(alpha=0.1)
        draws = (rng.random(120) < p).astype(float)
        outside = loose = False
        for n, value in enumerate(draws, start=1):
            bounds = sequence.add(float(value))
            outside |= not bounds.low <= p <= bounds.high
            mean = draws[:n].mean()
            half = 1.645 * np.sqrt(max(mean * (1 - mean), 1e-9) / n)
            loose |= n >= 5 and abs(mean - p) > half
        misses += outside
        naive += loose
    # Nominal 10 %: 150 runs leave at most 23 with a probability of 97 %.
    assert misses <= 23
    assert naive > 40  # the ordinary interval, looked at again and again, does not hold
    assert bounds.half_width < 0.2


def test_adaptive_sampling_stops_early_and_says_so(chain: Chain) -> None:
    long = replace(
        chain, steps=tuple(f"So {i} + 2 = {i + 2} eggs are more." for i in range(20)), id=""
    )
    full = scored([long], CalculatorJudge(), splits=15)[0]
    early = scored([long], CalculatorJudge(), splits=15, half_width=0.3)[0]
    assert len(early.contrasts) < len(full.contrasts)
    assert any(note.startswith("stopped with ") for note in early.notes)
    # What is reported is the sequence that was stopped by, wider than an interval that did not look.
    sequence = ConfidenceSequence()
    for contrast in early.contrasts:
        if contrast.win is not None:
            sequence.add(contrast.win)
    assert (early.low, early.high) == (sequence.bounds().low, sequence.bounds().high)
    n = sum(contrast.win is not None for contrast in early.contrasts)
    low, high = wilson((early.win_rate or 0) * n, n)
    assert early.low < low
    assert early.high >= high
    with pytest.raises(ValueError, match="an observation is 2: it lies between 0 and 1"):
        ConfidenceSequence().add(2)
    assert should_go_on(ConfidenceSequence().bounds(), half_width=0.1, least=4)[1] == (
        "0 of at least 4 contrasts are decided"
    )


def test_a_perturber_that_gives_nothing_leaves_f_unknown(chain: Chain) -> None:
    class Nothing:
        name = "nothing"

        async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
            return [Perturbed(steps=None, reason="cannot") for _ in tasks]

    score = asyncio.run(score_chain(chain, judge=CalculatorJudge(), perturber=Nothing()))
    assert score.faithfulness is None
    assert score.counts["compare.not_made"] == 10


def test_the_calculator_needs_no_null_control_and_a_panel_with_it_does(chain: Chain) -> None:
    class Asked(CalculatorJudge):
        exact = False

    without = scored([chain], CalculatorJudge())[0]
    with_nulls = scored([chain], Asked())[0]
    assert all(c.kind is not Kind.PARAPHRASE for c in without.contrasts)
    nulls = [c for c in with_nulls.contrasts if c.kind is Kind.PARAPHRASE]
    assert nulls
    assert all(c.win is None for c in nulls)
    assert without.faithfulness == with_nulls.faithfulness
    panel = scored([chain], PanelJudge([CalculatorJudge(), Taste("length")]))[0]
    assert any(c.kind is Kind.PARAPHRASE for c in panel.contrasts)
