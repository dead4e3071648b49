"""How far a long loop is, told while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

EVERY = 2.0
"""Seconds between two lines."""


def told(
    numbers: range,
    what: str,
    *,
    say: Callable[[str], object],
    every: float = EVERY,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """``numbers`` one by one; every ``every`` seconds says how many are done, and how long the rest
    takes at that pace. Loops shorter than that say nothing."""
    started = said = clock()
    for done, number in enumerate(numbers):
        now = clock()
        if done and now - said >= every:
            said = now
            left = (now - started) / done * (len(numbers) - done)
            say(f"{done:,} of {len(numbers):,} {what}, about {left:.0f} s to go")
        yield number
