"""A loop that tells how far it is."""

from __future__ import annotations

from planaria.pathology.progress import told


def test_a_long_loop_says_how_far_it_is_and_a_short_one_nothing() -> None:
    lines: list[str] = []
    ticks = iter(range(100))
    numbers = told(
        range(10, 1510, 300), "slides", say=lines.append, every=2, clock=lambda: float(next(ticks))
    )
    assert list(numbers) == [10, 310, 610, 910, 1210]
    assert lines == ["1 of 5 slides, about 8 s to go", "3 of 5 slides, about 3 s to go"]
    assert list(told(range(3), "slides", say=lines.append)) == [0, 1, 2]
    assert len(lines) == 2
