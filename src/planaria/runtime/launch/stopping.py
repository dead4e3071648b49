"""The first Ctrl-C or SIGTERM: how long its checkpoint is waited for, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from planaria.runtime.coordinator import publish
from planaria.runtime.launch.config import LaunchConfig
from planaria.runtime.launch.screen import Screen

MOST = 20
"""Time-outs. The checkpoint comes after the steps that have begun, of which nobody here knows how
long they take; that they come to an end at all is the coordinator's care. Our choice, as long as a
first step may take."""
MOST_WITHOUT = 1
"""Time-outs, where a lost worker has no spare: the checkpoint would have to wait for one, too."""


async def wait_saved(
    over: asyncio.Event, *, config: LaunchConfig, phase: str, screen: Screen
) -> str:
    """Wait for the end that follows the checkpoint; the user reads once that it takes long.

    ``phase``: of the run, as its status has it. Returns what is to be added to the reason of the end:
    nothing, or that the checkpoint has not come.
    """
    timeout, out = config.timeout, config.out
    most = (MOST_WITHOUT if phase == "waiting" else MOST) * timeout
    if await _is_set(over, timeout):
        return ""
    if most > timeout:
        screen.line(
            f"the checkpoint waits for the running steps or evaluation, {most - timeout:g} s more at "
            f"most; {newest(out)}; once more stops at once",
            kind="swap",
        )
        if await _is_set(over, most - timeout):
            return ""
    return f"; no checkpoint was written within {most:g} s; {newest(out)}"


async def _is_set(over: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
    return over.is_set()


def newest(out: Path) -> str:
    """The sentence that says what a run that ends now would go on from."""
    found = publish.published(out)
    if not found:
        return f"there is no checkpoint in {out} to go on from"
    return f"the newest checkpoint is {publish.complete_path(out, found[-1])}"
