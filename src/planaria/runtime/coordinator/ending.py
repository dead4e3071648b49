"""How a run ends on the coordinator's side: everyone is told first, then it is summed up."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal, summary
from planaria.runtime.coordinator.chronicle import Chronicle
from planaria.runtime.coordinator.crowd import Crowd
from planaria.runtime.messages import Worker

QUICK = 1.0
"""Seconds for which launchers are kept, so that the user reads what the run came to before they
leave; a long run's summary takes longer, and nobody waits for it. Our choice."""


class Ending:
    """Ends the run in ``out`` once; belongs to the coordinator's loop."""

    def __init__(
        self,
        out: Path,
        *,
        book: journal.Journal,
        chronicle: Chronicle,
        crowd: Crowd,
        saved: Callable[[], Awaitable[None]],
    ) -> None:
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code, once launchers are told of the end."""
        self._out = out
        self._book = book
        self._chronicle = chronicle
        self._crowd = crowd
        self._saved = saved
        """Waits for durable checkpoints that are being published."""
        self._work: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._work is not None

    def begin(self, *, exit_code: int, reason: str, owners: tuple[Worker, ...]) -> None:
        """Let workers go; then, beside everything else, sum up and let launchers go."""
        if self._work is not None:
            return
        try:
            self._book.write(journal.Ended(exit_code=exit_code, reason=reason), sync=True)
        except Exception as error:
            # Whatever is wrong with journal or summary, the run has to end.
            self._failed(error)
        for worker in list(self._crowd.sessions):
            self._crowd.end(worker)
        self._work = asyncio.create_task(
            self._finish(control.EndRun(exit_code=exit_code, reason=reason, owners=owners))
        )

    async def finished(self, *, seconds: float) -> None:
        """Wait until the summary is written, at most ``seconds``."""
        if self._work is not None:
            await asyncio.wait((self._work,), timeout=seconds)

    async def _finish(self, last: control.EndRun) -> None:
        summing = asyncio.create_task(self._sum_up())
        try:
            await asyncio.wait((summing,), timeout=QUICK)
            if summing.done():
                self._tell(summing)
        finally:
            self._crowd.tell_launchers(last)
            self.over.set_result(last.exit_code)
        if not summing.done():
            await asyncio.wait((summing,))
            self._tell(summing)

    async def _sum_up(self) -> summary.Summary:
        await self._saved()
        return await asyncio.to_thread(summary.write_summary, self._out)

    def _tell(self, summing: asyncio.Task[summary.Summary]) -> None:
        error = summing.exception()
        if isinstance(error, Exception):
            self._failed(error)
        else:
            self._chronicle.over(summing.result())

    def _failed(self, error: Exception) -> None:
        self._chronicle.say(f"no summary was written: {error}", kind="error")
        traceback.print_exception(error)
