"""Selection shares ties; the combiner never sees its own question; agreement with labels."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from planaria.errors import DataError
from planaria.faithfulness.chains import Chain, Labels, Question
from planaria.faithfulness.combine import FEATURES, cross_fit, features
from planaria.faithfulness.exemplars import pick, render
from planaria.faithfulness.formats import from_completion
from planaria.faithfulness.meta import (
    ShorterJudge,
    corrupt,
    judge_pairs,
    meta_evaluate,
    pair_accuracy,
    pairs_of,
)
from planaria.faithfulness.scores import ChainScore, StepScore
from planaria.faithfulness.select import (
    RULES,
    Candidate,
    evaluate,
    expected_accuracy,
    majority,
    votes_by_reliability,
)
from planaria.faithfulness.statistics import (
    auroc,
    average_precision,
    paired_interval,
    resample,
    wilson,
)


def candidate(answer: str | None, correct: bool | None, r: float | None = None) -> Candidate:
    chain = Chain(question="q", steps=("s",), answer=answer, labels=Labels(correct=correct))
    return Candidate(chain=chain, reliability=r)


def test_ties_are_shared_and_the_order_is_no_leak() -> None:
    group = [candidate("1", False), candidate("2", True), candidate(None, None)]
    assert expected_accuracy(majority, group) == 0.5
    assert expected_accuracy(majority, group[::-1]) == 0.5
    equal = [candidate("18", True), candidate("$18.00", True), candidate("7", False)]
    assert majority(equal) == [0.5, 0.5, 0.0]


def test_what_equalities_connect_is_one_vote_in_any_order() -> None:
    group = [candidate("0.333", True), candidate("0.3333", True), candidate("1/3", True)]
    for order in itertools.permutations([*group, candidate("7", False), candidate("7.0", False)]):
        assert expected_accuracy(majority, list(order)) == 1.0


def test_an_option_by_its_text_and_by_its_letter_is_one_vote() -> None:
    question = Question(text="Where?", options=(("A", "bank"), ("B", "library")), reference="B")
    texts = ("The answer is library.", "Answer: B", "Answer: (B) library", "Answer: A", "Answer: a")
    group = [Candidate(chain=from_completion(question, f"Books.\n{text}")) for text in texts]
    assert [c.chain.answer for c in group] == ["B", "B", "B", "A", "A"]
    assert majority(group) == [1 / 3, 1 / 3, 1 / 3, 0.0, 0.0]
    assert expected_accuracy(majority, group) == 1.0


def test_an_unscored_chain_is_neither_favoured_nor_punished() -> None:
    group = [candidate("1", False, 0.2), candidate("2", True, 0.8), candidate("3", False, None)]
    assert votes_by_reliability(group) == [0.0, 1.0, 0.0]
    assert RULES["argmax_r"]([candidate("1", True, None), candidate("2", False, None)]) == [0.5] * 2


def test_what_nobody_knows_is_left_out() -> None:
    assert expected_accuracy(majority, [candidate("1", None)]) is None
    found = {s.rule: s for s in evaluate([candidate("1", None)])}
    assert found["majority"].unknown == 1
    assert "self_certainty" not in found


def questions(n: int, seed: int = 0) -> list[Candidate]:
    """Three chains a question: the right one uses both numbers, the wrong ones do not; no votes."""
    rng = random.Random(seed)
    out: list[Candidate] = []
    for i in range(n):
        a, b = rng.randint(11, 40), rng.randint(3, 9)
        rows = [
            (f"{a} * {b} = {a * b}", a * b, True),
            (f"{a} * 2 = {a * 2}", a * 2, False),
            (f"{b} * 2 = {b * 2}", b * 2, False),
        ]
        rng.shuffle(rows)
        for step, answer, right in rows:
            chain = Chain(
                question=f"Box {i}: {a} rows of {b}. How many?",
                steps=(step,),
                answer=str(answer),
                labels=Labels(correct=right),
                writer="w" if right else "v",
            )
            out.append(Candidate(chain=chain))
    return out


def test_the_combiner_learns_provenance_on_other_questions() -> None:
    fitted = cross_fit(questions(40), folds=5, repeats=1)
    found = {s.rule: s for s in evaluate(fitted.candidates)}
    assert found["majority"].accuracy.estimate == pytest.approx(1 / 3)
    assert found["combiner"].accuracy.estimate > 0.9
    assert found["combiner"].gain.low > 0.3
    assert fitted.weights["unused quantities"] < 0


def test_the_combiner_is_blind_to_writer_and_order() -> None:
    group = questions(1)
    renamed = [replace(c, chain=replace(c.chain, writer="other", id="")) for c in group]
    assert np.array_equal(features(group), features(renamed))
    assert np.allclose(features(group[::-1])[::-1], features(group))
    assert features(group).shape == (3, len(FEATURES))


def test_the_combiner_lives_with_a_fold_that_holds_a_class_alone() -> None:
    chains = [
        Chain(
            question=f"q{n}",
            steps=(f"{n} + 1 = {n + 1}",),
            answer=str(n),
            labels=Labels(correct=n > 0),
        )
        for n in range(30)
    ]
    fitted = cross_fit([Candidate(chain=chain) for chain in chains], repeats=1)
    assert all(0 <= (c.combined or 0) <= 1 for c in fitted.candidates)
    assert fitted.candidates[0].combined == 1.0


def test_the_combiner_refuses_too_little() -> None:
    with pytest.raises(DataError, match="it needs 30 questions with right and wrong chains"):
        cross_fit(questions(5))


def test_statistics_agree_with_sklearn_and_keep_clusters() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.integers(0, 5, 60).tolist(), (rng.random(60) < 0.4).tolist()
    assert auroc(scores, truth) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    weights = rng.integers(0, 3, 60).astype(float)
    expected = roc_auc_score(truth, scores, sample_weight=weights)
    assert auroc(scores, truth, weights=weights) == pytest.approx(expected, abs=1e-12)
    expected = average_precision_score(truth, scores, sample_weight=weights)
    assert average_precision(scores, truth, weights=weights) == pytest.approx(expected, abs=1e-12)
    data = np.repeat([0.0, 1.0] * 5, 20)
    names = [str(i // 20) for i in range(200)]
    wide = resample(lambda w: float((w * data).sum() / w.sum()), clusters=names)
    narrow = resample(
        lambda w: float((w * data).sum() / w.sum()), clusters=[str(i) for i in range(200)]
    )
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert paired_interval([1, 1], [0, 1], clusters=["a", "b"]).estimate == 0.5
    with pytest.raises(ValueError, match="1 values cannot be paired with 2"):
        paired_interval([1], [0, 1], clusters=["a"])
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(8, 10)[0] == pytest.approx(0.4902, abs=1e-3)


def score(p: list[float | None], first: int | None, correct: bool, q: int) -> ChainScore:
    chain = Chain(
        question=f"q{q}",
        steps=tuple("abcdef"[: len(p)]),
        answer="1",
        labels=Labels(
            first_wrong=first,
            wrong=() if first is None else (first,),
            steps_labelled=True,
            correct=correct,
        ),
    )
    return ChainScore(chain=chain, consistency=0.9, steps=tuple(StepScore(p=v) for v in p))


def test_meta_evaluation_by_hand() -> None:
    scores = [
        score([0.9, 0.1], 1, False, 0),
        score([0.1, 0.9], 1, False, 1),
        score([0.9, 0.9], None, True, 2),
        score([0.9, 0.2], None, True, 3),
        score([0.3, 0.9], 0, True, 4),
        score([0.9, 0.9], None, False, 5),
        score([None, None], 0, False, 6),
    ]
    meta = meta_evaluate(scores)
    assert meta.value("auroc").estimate == pytest.approx(
        auroc([9, 9, 1, 8, 7, 1], [1, 1, 0, 0, 1, 0])
    )
    assert meta.value("first_error_accuracy").estimate == pytest.approx(2 / 3)
    assert meta.value("false_alarm_rate").estimate == pytest.approx(1 / 3)
    assert meta.value("caught_right_answers").estimate == 1.0
    assert meta.value("processbench_f1").estimate == pytest.approx(2 / 3)
    assert meta.unexplained == (scores[5].chain.id,)
    assert next(m for m in meta.measures if m.name == "auroc").left_out == 1
    with pytest.raises(KeyError, match="no measure 'accuracy': auroc, "):
        meta.value("accuracy")


@pytest.mark.parametrize("outcome", ["failed", "unparsed"])
def test_a_step_that_nobody_answered_for_is_no_miss(outcome: str) -> None:
    lost = StepScore(outcome=outcome)
    named = [score([0.1, 0.9], 0, False, 1), score([0.9, 0.9], None, True, 2)]
    before = [replace(s, steps=(lost, *s.steps[1:])) for s in named]
    meta = meta_evaluate([*named, *before])
    for name in ("first_error_accuracy", "false_alarm_rate", "processbench_f1"):
        found = next(m for m in meta.measures if m.name == name)
        assert found.left_out == 2
    assert meta.value("first_error_accuracy").estimate == 1.0
    # Behind the named step it changes nothing.
    after = replace(named[0], steps=(named[0].steps[0], lost))
    assert meta_evaluate([after, named[1]]).value("first_error_accuracy").estimate == 1.0


def test_pairs_leave_out_what_cannot_be_compared() -> None:
    import asyncio

    def pair(name: str, other: str, wrong: tuple[int, ...], question: str = "q") -> list[Chain]:
        original = Chain(
            question="q",
            steps=("a", "bb"),
            pair=name,
            id=f"{name}0",
            labels=Labels(steps_labelled=True),
        )
        labels = Labels(wrong=wrong, first_wrong=wrong[0] if wrong else None, steps_labelled=True)
        return [
            original,
            Chain(question=question, steps=("a", other), pair=name, id=f"{name}1", labels=labels),
        ]

    some = (
        pair("x", "bbb", (1,))
        + pair("y", "b", (1,))
        + pair("z", "c", ())
        + pair("w", "c", (1,), question="other")
    )
    pairs, dropped = pairs_of(some)
    assert ([p.id for p in pairs], dropped) == (["x", "y"], 2)
    assert pairs[0].request.prefix == ("a",)
    values = asyncio.run(judge_pairs(pairs, judge=ShorterJudge()))
    assert values == [1.0, 0.0]
    assert pair_accuracy(pairs, [1.0, None]).n == 1


def test_the_noise_test_labels_what_it_corrupted(chain: Chain) -> None:
    many = [
        replace(chain, question=f"{chain.question} {i}", id="", question_id="") for i in range(40)
    ]
    noisy = corrupt(many, share=0.5)
    flawed = [c for c in noisy if c.labels.flawed]
    assert 10 <= len(flawed) <= 30
    for c in flawed:
        index = c.labels.first_wrong
        assert index is not None
        assert c.steps[index] != chain.steps[index]
        assert c.steps[:index] == chain.steps[:index]
    with pytest.raises(ValueError, match="share is 2: give a number from 0 to 1"):
        corrupt(many, share=2)


def test_exemplars_are_sound_and_one_a_question(chain: Chain) -> None:
    good = ChainScore(chain=chain, consistency=0.9, faithfulness=1.0)
    worse = ChainScore(chain=replace(chain, id="w"), consistency=0.5, faithfulness=1.0)
    wrong = ChainScore(
        chain=replace(chain, id="x", question_id="x", labels=Labels(correct=False)), consistency=1.0
    )
    assert pick([worse, good, wrong], 1) == [good]
    assert render([good]).endswith("Answer: 18\n")
    with pytest.raises(DataError, match="only 1 of 2 examples can be picked: 1 of 3 chains"):
        pick([worse, good, wrong], 2)
    assert not math.isnan(good.reliability or math.nan)
