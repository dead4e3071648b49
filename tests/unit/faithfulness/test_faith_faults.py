"""Each fault of the released code, and ours without it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.errors import ConfigError
from planaria.faithfulness.answers import Equality, answers_equal
from planaria.faithfulness.chains import Chain, Labels, Question
from planaria.faithfulness.estimate import score_chain, split_points
from planaria.faithfulness.formats import from_completion
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.models import InspectJudge, ModelSettings
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.prompts import sample_prompt
from planaria.faithfulness.readers import read_chains, read_questions
from planaria.faithfulness.released import released_score, released_steps
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.sampling import sample_chains
from planaria.faithfulness.scores import ChainScore, Settings
from planaria.faithfulness.select import Candidate, expected_accuracy, self_reflection
from planaria.faithfulness.store import Journal, Spending

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <Memory:ResourceWarning"),
]


def scored(chain: Chain, model: object, **settings: int) -> ChainScore:
    return asyncio.run(
        score_chain(
            chain,
            judge=InspectJudge(model),
            perturber=RulePerturber(),
            settings=Settings(trials=1, **settings),
        )
    )


def test_an_answer_comes_with_the_label_that_the_prompt_asks_for() -> None:
    question = Question(text="3 + 4?", reference="7")
    assert '"Answer: "' in sample_prompt(question)
    chain = from_completion(question, "3 + 4 = 7\nAnswer: 7")
    assert (chain.answer, chain.labels.correct) == ("7", True)


def test_k_split_points_are_used(chain: Chain) -> None:
    long = replace(chain, steps=tuple(f"{i} + 1 = {i + 1}" for i in range(9)), id="")
    assert [len(split_points(long, Settings(splits=k))) for k in (1, 3, 8)] == [1, 3, 8]


def test_every_question_of_a_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": "1"}) for i in range(25)))
    assert len(read_questions(path)[0]) == 25
    assert len(read_questions(path, limit=10)[0]) == 10


def test_several_samples_at_temperature_0_are_refused(model_of: Callable) -> None:
    with pytest.raises(ConfigError, match="5 chains at temperature 0 would be 5 times the same"):
        asyncio.run(
            sample_chains(
                [Question(text="q")],
                model=model_of(lambda prompt: "x"),
                n=5,
                settings=ModelSettings(temperature=0.0),
                journal=Journal(None),
                spending=Spending(),
            )
        )


@pytest.mark.parametrize("reply", ["A", "A.", "**A**", "Verdict: A", "Option A"])
def test_a_judge_that_always_says_a_scores_one_half(
    chain: Chain, model_of: Callable, reply: str
) -> None:
    score = scored(chain, model_of(lambda prompt: reply))
    assert (score.win_rate, score.faithfulness) == (0.5, 0.5)
    assert score.counts["compare.decided"] > 0

    async def ask(prompt: str) -> str:
        return "1.0 True" if "Judge:" in prompt else reply if "Option A" in prompt else "other"

    released = asyncio.run(released_score(chain, ask=ask, rng=random.Random(0)))
    assert released.faithfulness == (1.0 if reply in ("A", "Option A") else 0.0)


def test_a_chain_of_one_sentence_can_win(chain: Chain) -> None:
    single = replace(chain, steps=("She sells 16 - 7 = 9 eggs.",), answer="9", id="")
    assert len(released_steps(single.text)) == 1
    judge, rules = CalculatorJudge(), RulePerturber()
    score = asyncio.run(score_chain(single, judge=judge, perturber=rules))
    assert score.faithfulness == 1.0
    assert score.reliability == pytest.approx(0.98)


def test_what_cannot_be_read_is_no_verdict(chain: Chain, model_of: Callable) -> None:
    score = scored(chain, model_of(lambda prompt: "Well, it depends."), splits=1)
    assert (score.consistency, score.faithfulness, score.reliability) == (None, None, None)
    assert score.counts["supports.unparsed"] == 1


@pytest.mark.parametrize(
    ("reply", "c"), [("False, 0.9", 0.0), ("True, 95%", 0.95), ("True, 0.9", 0.9)]
)
def test_probabilities_are_read_with_their_verdict(
    chain: Chain, model_of: Callable, reply: str, c: float
) -> None:
    score = scored(chain, model_of(lambda prompt: reply), splits=1)
    assert score.consistency == pytest.approx(c)


def test_commonsense_questions_keep_their_labels(tmp_path: Path) -> None:
    row = {
        "question": "Where do you put money?",
        "choices": {"label": ["A", "B"], "text": ["bank", "river"]},
        "answerKey": "A",
    }
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row))
    question = read_questions(path)[0][0]
    assert question.reference == "A"
    right, wrong = (
        from_completion(question, f"It is kept safe there.\nAnswer: {a}") for a in ("(A)", "river")
    )
    assert (right.labels.correct, wrong.labels.correct) == (True, False)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("-\\frac{1}{2}", "\\frac{1}{2}", False),
        ("[0,1]", "(0,1)", False),
        ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
        ("10,080", "10080", True),
        ("$70,000", "70000", True),
        ("18 dollars", "18", True),
        ("18.00", "18", True),
    ],
)
def test_answers_are_compared_by_value(one: str, other: str, equal: bool) -> None:
    assert answers_equal(one, other) is (Equality.EQUAL if equal else Equality.DIFFERENT)


def test_a_failure_is_retried_by_the_next_run_and_what_was_paid_is_not(
    tmp_path: Path, chain: Chain, model_of: Callable
) -> None:
    def flaky(prompt: str) -> str:
        if "Continuation A" in prompt:
            raise RuntimeError("gone")
        return "yes" if "lead to the" in prompt else "right"

    def run(reply: Callable[[str], str]) -> tuple[object, object]:
        model = model_of(reply)
        judge = InspectJudge(model, settings=ModelSettings(max_retries=0))
        out = score_chains([chain], judge=judge, perturber=RulePerturber(), out=tmp_path / "r")
        return asyncio.run(out), model

    first, _ = run(flaky)
    second, model = run(lambda prompt: "A" if "Continuation A" in prompt else "right")
    assert (first.scores[0].faithfulness, first.scores[0].consistency) == (None, 1.0)
    assert second.scores[0].faithfulness == 0.5
    assert all("Continuation A" in prompt for prompt in model.prompts)
    assert second.usage.input_tokens == 100 * len(model.prompts) > 0


def test_self_reflection_is_scored_by_the_answer_of_the_chain_that_it_chose(chain: Chain) -> None:
    doubted = Candidate(chain=chain, consistency=0.2)
    other = replace(chain, answer="9", labels=Labels(correct=False), id="other")
    trusted = Candidate(chain=other, consistency=0.9)
    assert expected_accuracy(self_reflection, [doubted, trusted]) == 0.0
    turned = [replace(doubted, consistency=0.95), trusted]
    assert expected_accuracy(self_reflection, turned) == 1.0


def test_read_chains_takes_what_the_package_ships() -> None:
    from planaria.faithfulness.commands import file_named

    read = read_chains(file_named(Path("demo")))
    assert (len(read.chains), read.problems) == (15, ())
    assert all(chain.labels.flawed is not None for chain in read.chains)
    assert {chain.labels.correct for chain in read.chains} == {True, False}
