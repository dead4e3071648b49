"""Who is still waited for when a run is over."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from planaria.runtime.launch.fleet import Child, Fleet


def waited_for(process: subprocess.Popen[bytes], then: Callable[[Fleet], object]) -> list[str]:
    """Who is left after 20 s; ``then`` is called with the fleet after 0.2 s."""

    async def leave() -> list[str]:
        fleet = Fleet(preload=(), threads=1, environment={}, exited=lambda child: None)
        task = SimpleNamespace(invitation=SimpleNamespace(worker="w0"))
        unused = cast(Any, None)
        fleet.living["w0"] = Child(
            task=cast(Any, task), process=unused, pid=process.pid, pidfd=unused
        )
        asyncio.get_running_loop().call_later(0.2, then, fleet)
        return await fleet.leave(seconds=20, hurry=asyncio.Event())

    return asyncio.run(leave())


def test_who_has_ended_and_whose_word_is_not_here_yet_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert waited_for(process, lambda fleet: fleet.living.clear()) == []


def test_who_is_stopped_is_not_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGSTOP)
    try:
        assert waited_for(process, lambda fleet: None) == ["w0"]
    finally:
        process.kill()
        process.wait()
