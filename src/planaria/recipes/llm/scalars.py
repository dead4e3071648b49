"""What a run says while it trains: TensorBoard scalars, each written once, and a progress line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

_FLUSH = 1.0
"""Seconds between two writes to disk."""


class Board:
    """TensorBoard scalars of the steps that can no longer be done again.

    A stateful part of the run: what is not on disk yet belongs to the state, so the scalars of a
    worker that dies are written by the one that takes its shard over. That one reads from the
    event files what its predecessor had written, and writes nothing twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.last: dict[str, float] = {}
        """Scalars of the newest step, and of the newest evaluation."""
        self._pending: dict[int, dict[str, float]] = {}
        self._writer: SummaryWriter | None = None
        self._written: dict[str, int] = {}
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` of ``step`` until it is known to be committed; replaces an older try."""
        self._pending[step] = dict(values)
        self.last = {**self.last, **values}

    def write(self, *, upto: int, now: bool = False) -> None:
        """Write every kept step that is not above ``upto``; at most once a second unless ``now``."""
        ready = sorted(step for step in self._pending if step <= upto)
        if not ready or (not now and time.monotonic() - self._flushed < _FLUSH):
            return
        if self._writer is None:
            self._written = last_steps(self._folder)
            self._writer = SummaryWriter(log_dir=str(self._folder))
        for step in ready:
            for tag, value in self._pending.pop(step).items():
                if step > self._written.get(tag, 0):
                    self._writer.add_scalar(tag, value, global_step=step)
                    self._written[tag] = step
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the event file; what was not committed is not written."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "pending": {step: dict(values) for step, values in self._pending.items()},
            "last": dict(self.last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = {int(step): dict(values) for step, values in state["pending"].items()}
        self.last = dict(state["last"])


def last_steps(folder: Path) -> dict[str, int]:
    """The newest step of each tag in the event files of ``folder``; a torn last record is left out."""
    newest: dict[str, int] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                newest[value.tag] = max(newest.get(value.tag, 0), event.step)
    return newest


class ProgressLine:
    """A bar on a terminal; elsewhere a plain line now and then."""

    def __init__(self, *, steps: int, every: float, console: Console | None = None) -> None:
        self._steps = steps
        self._every = every
        self._console = console or Console()
        self._said: float | None = None
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps)
            self._bar.start()

    def say(self, step: int, values: Mapping[str, float]) -> None:
        """Show ``step`` and its scalars; a plain line at the first step, the last, and with news."""
        text = describe(step, self._steps, values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        now = time.monotonic()
        due = self._said is None or now - self._said >= self._every
        if due or step == self._steps or {"val_loss", "skipped"} & values.keys():
            self._said = now
            self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


_FORMS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "skipped": "skipped: the loss is not finite",
    "val_loss": "held-out loss {:.4f}",
    "perplexity": "perplexity {:.2f}",
}


def describe(step: int, steps: int, values: Mapping[str, float]) -> str:
    """One line about a step, as in ``step 20/40  loss 5.1234  lr 3.00e-03  9,876 tokens/s``."""
    shown = [form.format(values[tag]) for tag, form in _FORMS.items() if tag in values]
    return "  ".join([f"step {step}/{steps}", *shown])
