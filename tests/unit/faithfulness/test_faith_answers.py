"""Finding and comparing answers: every gap that the released code has."""

from __future__ import annotations

import threading

import pytest

from planaria.faithfulness.answers import Equality, answers_equal, find_answer

EQUAL = [
    ("\\dfrac{1}{2}", "1/2"),
    ("10,080", "10080"),
    ("$70,000", "70000"),
    ("18 dollars", "18"),
    ("18.00", "18"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("50%", "0.5"),
    ("(B) library", "B"),
    ("{1,2,3}", "\\{3,2,1\\}"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
    ("p - q", "p-q"),
    ("１８", "18"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("nine", "9"),
    ("3 1/2", "3.5"),
    ("x = 5", "5"),
    ("4x+2", "2(2x+1)"),
    ("\\text{Evelyn}", "evelyn"),
    ("0.333", "1/3"),
    ("$0.50", "50 cents"),
    ("60 minutes", "1 hour"),
    ("120 cm", "1.2 m"),
    ("5 pounds", "£5"),
    ("1.5 million", "1,500,000"),
    ("3 dozen eggs", "36"),
    ("1e3", "1000"),
    ("2x", "x*2"),
    ("9 pm", "9"),
]
DIFFERENT = [
    ("-1/2", "1/2"),
    ("-\\frac12", "\\frac{1}{2}"),
    ("[0,1]", "(0,1)"),
    ("(0,1]", "(0,1)"),
    ("(1,2)", "(2,1)"),
    ("50%", "50"),
    ("5 cm", "5 m"),
    ("q-p", "p - q"),
    ("valid", "invalid"),
    ("18", "81"),
    ("(B)", "(C)"),
    ("50 cents", "$50"),
    ("5 kg", "5 km"),
    ("2 hours per week", "120 minutes per day"),
    ("2x", "2"),
    ("3pi", "3"),
    ("3 i", "3"),
    ("5 million", "5"),
    ("1e3", "1"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal(one: str, other: str) -> None:
    assert answers_equal(one, other) is Equality.EQUAL
    assert answers_equal(other, one) is Equality.EQUAL


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different(one: str, other: str) -> None:
    assert answers_equal(one, other) is Equality.DIFFERENT
    assert answers_equal(other, one) is Equality.DIFFERENT


@pytest.mark.parametrize(
    ("one", "other"), [(None, "3"), ("", "3"), ("I do not know", "3"), ("9^{9^9}", "x^2")]
)
def test_what_cannot_be_read_is_not_wrong(one: str | None, other: str) -> None:
    assert answers_equal(one, other) is Equality.UNKNOWN


def test_options_compare_by_letter_or_text() -> None:
    choices = ("bank", "library", "mall")
    assert answers_equal("library", "B", choices=choices) is Equality.EQUAL
    assert answers_equal("mall", "B", choices=choices) is Equality.DIFFERENT


def test_symbolic_comparison_works_off_the_main_thread() -> None:
    seen: list[Equality] = []
    thread = threading.Thread(target=lambda: seen.append(answers_equal("y+y", "2y")))
    thread.start()
    thread.join(30)
    assert seen == [Equality.EQUAL]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("first \\boxed{1} then \\boxed{\\text{(A)}}", "\\text{(A)}"),
        ("Answer: 18", "18"),
        ("steps\nA: 18", "18"),
        ("So the answer is (D)", "(D)"),
        ("the answer is 18. This is it.", "18"),
        ("#### 1,200", "1,200"),
        ("**Answer:** 7 apples.", "7 apples"),
        ("nothing is labelled 5", None),
        ("\\boxed{1 + ", None),
    ],
)
def test_answers_are_found_where_they_are_labelled(text: str, answer: str | None) -> None:
    found = find_answer(text)
    assert found.answer == answer
    assert found.reason


def test_the_last_number_is_a_guess_that_must_be_asked_for() -> None:
    assert find_answer("it costs 5 or 7").answer is None
    assert find_answer("it costs 5 or 7", last_number=True).answer == "7"


def test_a_letter_in_the_last_line_counts_for_options_only() -> None:
    assert find_answer("It must be (C).", options=True).answer == "C"
    assert find_answer("It is (A) or (C).", options=True).answer is None
