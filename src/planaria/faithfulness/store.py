"""What a run has paid for: a journal of verdicts, and a budget.

The journal is one JSON line per answer, written as soon as the answer is there and keyed by the
judge (model, prompt version, sampling parameters), the whole request and the number of its repeat.
A run that was killed goes on without paying again. Failures are never written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from planaria.errors import ConfigError
from planaria.faithfulness.chains import digest
from planaria.faithfulness.judges.protocol import Judge, Outcome, Request, Usage, Verdict
from planaria.faithfulness.perturb import Change, Perturbed, Perturber, Task


class Journal:
    """Rows by key in a file that only grows; a last line that was cut is dropped."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.dropped = 0
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            for line in text.split("\n"):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    self._rows[row["key"]] = row
                except (json.JSONDecodeError, KeyError, TypeError):
                    self.dropped += 1
            if text and not text.endswith("\n"):
                with path.open("a", encoding="utf-8") as stream:
                    stream.write("\n")

    def get(self, key: str) -> dict[str, Any] | None:
        """The row, or None."""
        return self._rows.get(key)

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Write a row; the line is in the file when this returns."""
        row = {"key": key, **row}
        self._rows[key] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run may cost; 0 means no limit."""

    calls: int = 0
    """Answered requests."""
    tokens: int = 0
    """Input and output tokens together."""
    money: float = 0.0
    """US dollars. Needs a model whose price Inspect knows."""

    def __post_init__(self) -> None:
        if min(self.calls, self.tokens, self.money) < 0:
            raise ConfigError(
                f"a budget of {self.calls} calls, {self.tokens} tokens, {self.money} dollars has a "
                "negative part: give 0 for no limit"
            )


class Spending:
    """What was spent, against the limits. Requests under way are counted as calls."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.usage = Usage()
        self._flying = 0

    def refusal(self) -> str | None:
        """Why nothing more may be asked; None when it may."""
        calls = self.usage.calls + self._flying
        tokens = self.usage.input_tokens + self.usage.output_tokens
        for what, spent, limit in (
            ("calls", calls, self.limits.calls),
            ("tokens", tokens, self.limits.tokens),
            ("dollars", self.usage.money, self.limits.money),
        ):
            if limit and spent >= limit:
                return f"the budget of {limit:g} {what} is used up"
        return None

    def start(self, count: int) -> None:
        """Requests set out."""
        self._flying += count

    def end(self, count: int, usage: Usage) -> None:
        """Requests came back."""
        self._flying -= count
        self.usage += usage


class JournaledJudge:
    """A judge whose answers are kept and counted. Answers from the journal cost nothing."""

    def __init__(self, judge: Judge, *, journal: Journal, spending: Spending | None = None) -> None:
        self.judge = judge
        self.journal = journal
        self.spending = spending or Spending()
        self.name = judge.name
        self.answers = judge.answers
        self.order_matters = judge.order_matters
        self.samples = judge.samples

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """Verdicts from the journal, the others from the judge; one by one where it is
        ``concurrent``, so that a kill loses only what is under way."""
        keys = [request_key(self.judge.name, request) for request in requests]
        out: dict[int, Verdict] = {}
        missing: list[int] = []
        for index, key in enumerate(keys):
            row = self.journal.get(key)
            if row is None:
                missing.append(index)
            else:
                out[index] = _verdict_of_row(row)
        if getattr(self.judge, "concurrent", False):
            parts = [[index] for index in missing]
        else:
            parts = [missing] if missing else []

        async def part(indices: list[int]) -> None:
            verdicts = await self._paid([requests[i] for i in indices])
            for index, verdict in zip(indices, verdicts, strict=True):
                out[index] = verdict
                if verdict.outcome is not Outcome.FAILED:
                    self.journal.put(keys[index], _row_of_verdict(verdict))

        await asyncio.gather(*(part(indices) for indices in parts))
        return [out[index] for index in range(len(requests))]

    async def _paid(self, requests: list[Request]) -> list[Verdict]:
        reason = self.spending.refusal()
        if reason is not None:
            return [Verdict(outcome=Outcome.FAILED, reason=reason) for _ in requests]
        self.spending.start(len(requests))
        usage = Usage()
        try:
            verdicts = await self.judge.ask(requests)
            usage = sum((verdict.usage for verdict in verdicts), Usage())
            return verdicts
        finally:
            self.spending.end(len(requests), usage)


class JournaledPerturber:
    """A perturber whose alternatives are kept and counted."""

    def __init__(
        self, perturber: Perturber, *, journal: Journal, spending: Spending | None = None
    ) -> None:
        self.perturber = perturber
        self.journal = journal
        self.spending = spending or Spending()
        self.name = perturber.name

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        """Alternatives from the journal, the others made now."""
        return list(await asyncio.gather(*(self._one(task) for task in tasks)))

    async def _one(self, task: Task) -> Perturbed:
        key = digest("perturb", self.name, json.dumps(_task_row(task), sort_keys=True))
        row = self.journal.get(key)
        if row is not None:
            return _perturbed_of_row(row)
        reason = self.spending.refusal()
        if reason is not None:
            return Perturbed(steps=None, reason=reason)
        self.spending.start(1)
        usage = Usage()
        try:
            made = (await self.perturber.make([task]))[0]
            usage = made.usage
        finally:
            self.spending.end(1, usage)
        if not made.reason.startswith("failed"):
            self.journal.put(key, asdict(made))
        return made


def _task_row(task: Task) -> dict[str, Any]:
    return asdict(task) | {"kind": task.kind.value}


def _perturbed_of_row(row: dict[str, Any]) -> Perturbed:
    steps = row["steps"]
    return Perturbed(
        steps=None if steps is None else tuple(steps),
        changes=tuple(Change(**change) for change in row["changes"]),
        reason=row["reason"],
        usage=Usage(cached=1),
    )


def request_key(name: str, request: Request) -> str:
    """Key of a request to a judge: everything that can change the answer."""
    row = {field.name: getattr(request, field.name) for field in fields(request)}
    return digest(name, type(request).__name__, json.dumps(row, sort_keys=True))


def _row_of_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "p": verdict.p,
        "reason": verdict.reason,
        "usage": asdict(verdict.usage),
    }


def _verdict_of_row(row: dict[str, Any]) -> Verdict:
    return Verdict(
        outcome=Outcome(row["outcome"]),
        p=row["p"],
        reason=row["reason"],
        usage=Usage(cached=row["usage"]["calls"]),
    )
