"""Judges: the calculator, models through Inspect, panels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from planaria.errors import ConfigError
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.calculator import CalculatorJudge, report
from planaria.faithfulness.judges.models import (
    InspectJudge,
    ModelPerturber,
    ModelSettings,
    model_named,
)
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import (
    Compare,
    Judge,
    Outcome,
    Supports,
    Verdict,
    Verify,
    swap,
)
from planaria.faithfulness.perturb import Kind, Task
from planaria.faithfulness.prompts import read_confidence, read_verdict

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]
COMPARE = Compare(question="q?", prefix=("p",), a=("one",), b=("two",))
VERIFY = Verify(question="q? 2 and 3", prefix=(), step="2 + 3 = 6")
SUPPORTS = Supports(question="q? 2 and 3", steps=("2 + 3 = 5",), answer="5")


def one(judge: Judge, request: Compare | Verify | Supports) -> Verdict:
    return asyncio.run(judge.ask([request]))[0]


def test_the_calculator_names_what_is_wrong(chain: Chain) -> None:
    verdict = one(CalculatorJudge(), VERIFY)
    assert (verdict.outcome, verdict.p) == (Outcome.DECIDED, 0.02)
    assert verdict.reason == "2+3 = 6, but the left side comes to 5"
    silent = one(CalculatorJudge(), Verify(question="q", prefix=(), step="It follows."))
    assert (silent.outcome, silent.reason) == (Outcome.ABSTAINED, "states no equality")
    found = report(chain.question, chain.steps)
    assert found.first_false is None
    assert found.unused == ()


def test_the_calculator_asks_where_numbers_come_from() -> None:
    sourced = one(CalculatorJudge(), Verify(question="2 and 3", prefix=(), step="2 * 3 = 6"))
    assert sourced.p == 0.98
    stranger = one(CalculatorJudge(), Verify(question="2 and 3", prefix=(), step="2 * 9 = 18"))
    assert stranger.p == pytest.approx(0.74)
    assert stranger.reason == "equalities hold, but 9 comes from nowhere"
    week = one(CalculatorJudge(), Verify(question="3 a week", prefix=(), step="3 * 52 = 156"))
    assert week.p == 0.98
    later = Verify(question="2 and 3", prefix=("2 * 3 = 6",), step="6 * 2 = 12")
    assert one(CalculatorJudge(), later).p == 0.98


def test_the_calculator_supports_the_last_derived_value() -> None:
    judge = CalculatorJudge()
    steps = ("2 + 3 = 5", "5 * 2 = 10")
    p = {
        answer: one(judge, Supports(question="2 and 3", steps=steps, answer=answer)).p
        for answer in ("$10.00", "5", "11", "ten apples", "(B)")
    }
    assert p == {"$10.00": 0.98, "5": 0.6, "11": 0.02, "ten apples": None, "(B)": None}


def test_the_calculator_compares_by_flaws() -> None:
    judge = CalculatorJudge()
    request = Compare(question="2 and 3", prefix=(), a=("2 + 3 = 5",), b=("2 + 3 = 6",))
    assert one(judge, request).p == 0.98
    assert one(judge, swap(request)).p == 0.02
    assert one(judge, COMPARE).outcome is Outcome.ABSTAINED
    same = Compare(question="2 and 3", prefix=(), a=("2 + 3 = 5",), b=("3 + 2 = 5",))
    assert one(judge, same).outcome is Outcome.TIE


@pytest.mark.parametrize(
    ("text", "request_", "expected"),
    [
        ("A", COMPARE, ("A", 1.0)),
        ("A.", COMPARE, ("A", 1.0)),
        ("**B**", COMPARE, ("B", 0.0)),
        ("Option A", COMPARE, ("A", 1.0)),
        ("(B)", COMPARE, ("B", 0.0)),
        ("Verdict: neither", COMPARE, ("neither", 0.5)),
        ('{"verdict": "B"}', COMPARE, ("B", 0.0)),
        ('```json\n{"answer": "A"}\n```', COMPARE, ("A", 1.0)),
        ("I think that continuation B follows.", COMPARE, ("B", 0.0)),
        ("A close look shows nothing.", COMPARE, None),
        ("Both option A and option B are fine.", COMPARE, None),
        ("", COMPARE, None),
        ("Verdict: yes\nConfidence: 95%", SUPPORTS, ("yes", 0.95)),
        ("False, 0.9", SUPPORTS, ("no", pytest.approx(0.1))),
        ("True, 95%", SUPPORTS, ("yes", 0.95)),
        ("Verdict: wrong\nConfidence: 80", VERIFY, ("wrong", pytest.approx(0.2))),
        ("incorrect", VERIFY, ("wrong", 0.0)),
        ("yes and no", SUPPORTS, None),
        ("Verdict: right or wrong", VERIFY, None),
        ("Verdict: A or B", COMPARE, None),
        ("This step is not right.", VERIFY, ("wrong", 0.0)),
        ("It isn't entirely correct.", VERIFY, ("wrong", 0.0)),
        ("Verdict: not right", VERIFY, ("wrong", 0.0)),
        ("Nothing is wrong with this step.", VERIFY, ("right", 1.0)),
        ("It is not clear whether it is right.", VERIFY, None),
        ("Verdict: right\nConfidence: 0", VERIFY, ("right", 0.5)),
        ("Perhaps.", SUPPORTS, None),
    ],
)
def test_verdicts_are_read_in_every_dress(
    text: str, request_: Compare, expected: tuple[str, float] | None
) -> None:
    assert read_verdict(text, request_) == expected


def test_confidence() -> None:
    assert [
        read_confidence(t) for t in ("95%", "Confidence: .5", "no number", "Confidence: 400")
    ] == [
        0.95,
        0.5,
        None,
        None,
    ]


def test_a_model_that_answers_is_read_and_paid(model_of: Callable) -> None:
    judge = InspectJudge(model_of(lambda prompt: "Verdict: A"))
    verdict = one(judge, COMPARE)
    assert (verdict.outcome, verdict.p, verdict.usage.calls) == (Outcome.DECIDED, 1.0, 1)
    assert (verdict.usage.input_tokens, verdict.usage.output_tokens) == (100, 5)
    assert "t1" in judge.name


def test_a_model_that_rambles_is_unparsed_and_one_that_says_nothing_too(model_of: Callable) -> None:
    rambling = one(InspectJudge(model_of(lambda prompt: "Hard to say.")), COMPARE)
    assert (rambling.outcome, rambling.p) == (Outcome.UNPARSED, None)
    assert rambling.reason == "unread: 'Hard to say.'"
    assert one(InspectJudge(model_of(lambda prompt: " ")), COMPARE).outcome is Outcome.UNPARSED


def test_a_model_that_breaks_is_a_failure_with_its_reason(model_of: Callable) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("rate limit reached")

    verdict = one(InspectJudge(model_of(broken), settings=ModelSettings(max_retries=0)), COMPARE)
    assert verdict.outcome is Outcome.FAILED
    assert "rate limit reached" in verdict.reason


def test_log_probabilities_give_the_probability_of_the_verdict() -> None:
    pytest.importorskip("inspect_ai")
    from inspect_ai.model import Logprob, Logprobs, ModelOutput, TopLogprob

    from planaria.faithfulness.judges.models import verdict_of

    output = ModelOutput.from_content("m", "Verdict: yes")
    tops = [TopLogprob(token=" yes", logprob=-0.357), TopLogprob(token=" no", logprob=-1.204)]
    output.choices[0].logprobs = Logprobs(
        content=[
            Logprob(token="Verdict:", logprob=-0.1),
            Logprob(token=" yes", logprob=-0.357, top_logprobs=tops),
        ]
    )
    assert verdict_of(output, SUPPORTS).p == pytest.approx(0.7, abs=0.001)


def test_a_model_perturbs_and_unfit_alternatives_are_named(model_of: Callable) -> None:
    task = Task(question="q", prefix=(), continuation=("2 + 3 = 5",), kind=Kind.OPERATION)
    good = asyncio.run(ModelPerturber(model_of(lambda p: "2 - 3 = -1")).make([task]))[0]
    assert good.steps == ("2 - 3 = -1",)
    assert good.changes[0].after == "2 - 3 = -1"
    same = asyncio.run(ModelPerturber(model_of(lambda p: "2 + 3 = 5")).make([task]))[0]
    assert (same.steps, same.reason) == (None, "the alternative says the same")
    null = replace(task, kind=Kind.PARAPHRASE)
    kept = asyncio.run(ModelPerturber(model_of(lambda p: "3 and 2 make 5")).make([null]))[0]
    assert kept.steps == ("3 and 2 make 5",)
    false = asyncio.run(ModelPerturber(model_of(lambda p: "2 and 3 make 6")).make([null]))[0]
    assert (false.steps, false.reason) == (None, "a paraphrase keeps its numbers, and 5 differs")


def test_a_panel_takes_the_mean_of_who_decided(model_of: Callable) -> None:
    yes = InspectJudge(model_of(lambda p: "Verdict: no\nConfidence: 60"))
    panel = PanelJudge([CalculatorJudge(), yes])
    assert panel.order_matters
    verdict = one(panel, SUPPORTS)
    assert verdict.p == pytest.approx((0.98 + 0.4) / 2)
    assert verdict.reason.startswith("calculator: 5 is the last value derived | model: ")
    unread = PanelJudge([CalculatorJudge(), InspectJudge(model_of(lambda p: "hm"))])
    assert one(unread, COMPARE).outcome is Outcome.UNPARSED
    with pytest.raises(ConfigError, match="a panel has no members: give at least one judge"):
        PanelJudge([])


def test_an_unknown_judge_says_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"no judge or model 'nobody/x' .*use calculator, embedded"
    ):
        model_named("nobody/x")
