"""What a user sees while a run goes on: workers' output with a prefix, and the run's own lines.

Each worker writes to its own log; the launcher follows the logs. On a terminal prefixes are
coloured and the progress line stays at the bottom; elsewhere everything is plain text, one line at
a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

TRACEBACK_MARK = "\x1e"
"""A worker writes it before what is for its log and not for the screen: a traceback, or a last word
that the launcher shows in its own way."""

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_STYLES = {"event": "bold", "swap": "bold yellow", "error": "bold red"}
_CHUNK = 1 << 16
_LONGEST = 1 << 16
"""Bytes of a line without an end; our choice."""
_PLAIN_PROGRESS = 10.0
"""Seconds between progress lines where there is no terminal; our choice."""


def _redrawn(rest: bytes) -> bytes:
    """What has to be kept of a line without its end: a progress bar redraws it for hours."""
    shown, mark, _ = rest.partition(TRACEBACK_MARK.encode())
    kept = shown[shown.rstrip(b"\r").rfind(b"\r") + 1 :]
    return kept[-_LONGEST:] + mark


@dataclass
class _Follower:
    path: Path
    colour: str
    offset: int
    rest: bytes = b""
    muted: bool = False

    def lines(self, *, last: bool) -> list[str]:
        """Complete lines that are new; with ``last`` also one without its end."""
        found: list[str] = []
        while (chunk := self._read()) != b"":
            *complete, rest = (self.rest + chunk).split(b"\n")
            self.rest = _redrawn(rest)
            found += [line.decode("utf-8", "replace") for line in complete]
        if last and self.rest:
            found.append(self.rest.decode("utf-8", "replace"))
            self.rest = b""
        return self._shown(found)

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as log:
                log.seek(self.offset)
                chunk = log.read(_CHUNK)
        except OSError:
            return b""  # not there yet, or no descriptor is left for now: it is shown later
        self.offset += len(chunk)
        return chunk

    def _shown(self, lines: list[str]) -> list[str]:
        shown: list[str] = []
        for line in lines:
            before, mark, _ = line.partition(TRACEBACK_MARK)
            if not self.muted and (before or not mark):
                # A carriage return redraws a line: what it ends with is what counts.
                shown.append(before.rstrip("\r").rpartition("\r")[2])
            self.muted = self.muted or bool(mark)
        return shown


@dataclass
class Screen:
    """Prints lines of workers and of the run; call :meth:`poll` every so often.

    ``quiet`` leaves only errors. ``out`` and ``err`` are rich consoles, by default on stdout and
    stderr.
    """

    quiet: bool = False
    out: Console | None = None
    err: Console | None = None
    _followers: dict[str, _Follower] = field(default_factory=dict[str, _Follower])
    _live: Live | None = None
    _progress_at: float = float("-inf")

    def __post_init__(self) -> None:
        from rich.console import Console

        self._out = self.out or Console(highlight=False, soft_wrap=True)
        self._err = self.err or Console(highlight=False, soft_wrap=True, stderr=True)

    def follow(self, worker: str, path: Path) -> None:
        """Show what is appended to ``path`` from now on under the name ``worker``."""
        colour = _COLOURS[len(self._followers) % len(_COLOURS)]
        offset = path.stat().st_size if path.exists() else 0
        self._followers[worker] = _Follower(path=path, colour=colour, offset=offset)

    def poll(self, *, last: bool = False) -> None:
        """Print what the logs have gained; ``last`` also prints lines without an end."""
        if self.quiet:
            return
        for worker, follower in self._followers.items():
            for line in follower.lines(last=last):
                self._print(f"[{worker}]", follower.colour, line)

    def forget(self, worker: str) -> None:
        """Print what is left of the log of ``worker`` and follow it no more."""
        follower = self._followers.pop(worker, None)
        if follower is not None and not self.quiet:
            for line in follower.lines(last=True):
                self._print(f"[{worker}]", follower.colour, line)

    def line(self, text: str, *, kind: str = "event") -> None:
        """A line of the run itself; ``kind`` is event, swap, progress or error."""
        if kind == "error":
            self._print("planaria:", _STYLES["error"], text, console=self._err)
        elif self.quiet:
            return
        elif kind == "progress":
            self._progress(text)
        else:
            self._print("planaria:", _STYLES.get(kind, _STYLES["event"]), text)

    def close(self) -> None:
        """Print the rest and leave the terminal as it was."""
        self.poll(last=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _progress(self, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._out.is_terminal:
            if self._live is None:
                self._live = Live(console=self._out, transient=True, auto_refresh=False)
                self._live.start()
            self._live.update(Text(text), refresh=True)
        elif time.monotonic() - self._progress_at >= _PLAIN_PROGRESS:
            self._progress_at = time.monotonic()
            self._print("planaria:", _STYLES["event"], text)

    def _print(self, prefix: str, style: str, line: str, *, console: Console | None = None) -> None:
        from rich.text import Text

        text = Text.assemble((prefix, style), " ")
        # Colours that a worker prints are kept on a terminal and dropped elsewhere.
        text.append_text(Text.from_ansi(line))
        (console or self._out).print(text)
