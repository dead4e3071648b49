"""Segmentation and thinking tags."""

from __future__ import annotations

import pytest

from planaria.faithfulness.segment import looks_cut, segment, split_thinking


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It is 3.5 m, e.g. for Dr. Lee. Then 4.", ["It is 3.5 m, e.g. for Dr. Lee.", "Then 4."]),
        ("a\n\nb\nc", ["a", "b", "c"]),
        ("第一步。第二步！", ["第一步。", "第二步！"]),
        ("## Step 1\nAdd.\n**Step 2:**\nStop.", ["## Step 1 Add.", "**Step 2:** Stop."]),
        ("1.\nAdd it.\n2.\nStop.", ["1. Add it.", "2. Stop."]),
        ("We get:\n\\[ a.\nb = c. \\]\nDone.", ["We get: \\[ a.\nb = c. \\]", "Done."]),
        ("Let $x. y$ be 1. Then go.", ["Let $x. y$ be 1.", "Then go."]),
        ("It costs $5. He pays $10.", ["It costs $5.", "He pays $10."]),
        ("```\na. b\nc\n```\nDone.", ["```\na. b\nc\n```", "Done."]),
        ("", []),
        ("  \n \n", []),
    ],
)
def test_steps(text: str, steps: list[str]) -> None:
    assert list(segment(text)) == steps


def test_two_hundred_steps_and_bad_unit() -> None:
    assert len(segment("\n".join(f"step number {i}" for i in range(200)))) == 200
    with pytest.raises(ValueError, match="unit is 'word': it is 'auto', 'line' or 'sentence'"):
        segment("a", unit="word")


def test_thinking_tags() -> None:
    both = split_thinking("<think>a\nb</think>\nAnswer: 3")
    assert (both.thinking, both.response, both.unclosed) == ("a\nb", "Answer: 3", False)
    assert split_thinking("a</think>b").thinking == "a"
    assert split_thinking("<THINKING>never ends").unclosed


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        ("fine.", "length", "the provider stopped it (length)"),
        ("<think>x", None, "a thinking tag is never closed"),
        ("so \\boxed{3", None, "a \\boxed{ is never closed"),
        ("so 3 +", None, "the last line ends on 'so 3 +'"),
        ("All done.", None, None),
    ],
)
def test_truncated_output_is_recognised(text: str, reason: str | None, said: str | None) -> None:
    assert looks_cut(text, stop_reason=reason) == said
