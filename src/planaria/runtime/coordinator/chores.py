"""Timers and tasks of one event loop, whose errors are never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Chores:
    """``failed(error)`` gets whatever a timer or task raises; ``over()`` says when none may run."""

    def __init__(self, *, failed: Callable[[Exception], None], over: Callable[[], bool]) -> None:
        self._failed = failed
        self._over = over
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function`` after ``seconds``, unless it is over by then."""

        def guarded() -> None:
            if self._over():
                return
            try:
                function()
            except Exception as error:
                self._failed(error)

        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timers = [t for t in self._timers if not t.cancelled() and t.when() > now]
        self._timers.append(loop.call_later(seconds, guarded))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def close(self) -> None:
        """Drop what has not begun, cancel what has."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)
