"""Workers of one machine measure an optimizer's own arithmetic together."""

from __future__ import annotations

import time
from typing import Any

from optim_worlds import good, run

from planaria.optim import calibrate
from planaria.optim.collectives import Workers


def measured(rank: int, _: int) -> Any:
    beside = Workers(None)
    slow = calibrate.together(lambda: time.sleep(0.05 if rank else 0.0), beside, turns=3, empty=0.0)
    own = calibrate.arithmetic(
        calibrate.planned("frozen", 0.1), workers=4, beside=beside, empty=0.0, turns=3
    )
    return slow, vars(own)


def test_all_find_the_same_and_wait_for_the_slowest() -> None:
    first, second = good(run(measured, 2))
    assert first == second
    slow, own = first
    assert slow >= 0.05
    assert 0 < own["million"] < 10
