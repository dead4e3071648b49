"""A machine that has no room for a process more: a living run goes on, one that begins says so."""

from __future__ import annotations

import asyncio
import io
import resource
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.control_plane import TOKEN, invitation

from planaria.errors import RunError
from planaria.runtime.control.link import LauncherLink
from planaria.runtime.launch import crew as crew_module
from planaria.runtime.launch.config import LaunchConfig
from planaria.runtime.launch.crew import Crew
from planaria.runtime.launch.screen import Screen

REASON = (
    "{} could not be started: Too many open files; look at the limits of processes and open "
    "files (ulimit -u, ulimit -n) and at the machine's memory"
)


@pytest.fixture
def full() -> Iterator[Callable[[], None]]:
    """Takes the room for further descriptors away; it is given back after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))

    yield take
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Launcher:
    """What a crew needs of one, with a screen that can be read."""

    def __init__(self, out: Path) -> None:
        self.text = io.StringIO()
        self.ended: list[tuple[int, str]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.link = LauncherLink("127.0.0.1:1", token=TOKEN, run="test", node="n0", receive=print)
        console = Console(file=self.text, width=500, highlight=False, soft_wrap=True)
        self.screen = Screen(out=console, err=console)
        self.screen.line("the first line has its imports")
        self.crew = Crew(
            LaunchConfig(script=str(out / "train.py"), out=out, workers=1),
            screen=self.screen,
            finish=lambda code, reason: self.ended.append((code, reason)),
            over=lambda: bool(self.ended),
            spawn=self.spawn,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def close(self) -> None:
        self.crew.fleet.close()
        self.link.close()


def test_a_spare_that_cannot_be_forked_ends_no_run(
    tmp_path: Path, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "_AGAIN", 0.01)
    (tmp_path / "train.py").write_text("pass\n")

    async def run() -> Launcher:
        launcher = Launcher(tmp_path)
        full()
        try:
            launcher.crew.begin(invitation("127.0.0.1:1", ""), link=launcher.link)
            # Who is wanted from the beginning is needed: the launcher ends the run with this line.
            with pytest.raises(RunError) as first:
                await launcher.tasks[0]
            assert str(first.value) == REASON.format("workers")
            launcher.crew.wanted(2)
            await launcher.tasks[1]
        finally:
            launcher.close()
        return launcher

    launcher = asyncio.run(run())
    assert launcher.ended == []
    assert launcher.text.getvalue().splitlines()[1:] == [
        *[f"planaria: {REASON.format(f'worker w{number}')}" for number in (0, 1, 2)],
        "planaria: no more spares are started: 3 failed before they joined",
    ]
