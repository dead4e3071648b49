"""What a run has paid for: a journal of verdicts, and a budget.

The journal is one JSON line per answer, written as soon as the answer is there and keyed by the
judge (model, prompt version, sampling parameters), the whole request and the number of its repeat.
A run that was killed goes on without paying again. Failures are never written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from planaria.errors import ConfigError, DataError
from planaria.faithfulness.chains import KEY_DIGITS, digest
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
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written ({error.strerror}): free space, then start the same "
                "command again; what was paid for before is kept"
            ) from error

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
    """What was spent, against the limits, by at most ``connections`` requests at the same time.

    A request under way counts as much as the mean of those that were answered, so that a budget is
    not overrun by what is on its way. Until the first answer says what one costs, a budget in
    tokens or dollars lets a single request out.
    """

    def __init__(self, limits: Limits | None = None, *, connections: int = 64) -> None:
        self.limits = limits or Limits()
        self.usage = Usage()
        self._flying = 0
        probing = bool(self.limits.tokens or self.limits.money)
        self._held_back = connections - 1 if probing else 0
        self._slots = asyncio.Semaphore(1 if probing else connections)

    def refusal(self) -> str | None:
        """Why nothing more may be asked; None when it may."""
        share = (self._flying + 1) / max(1, self.usage.calls)
        tokens = self.usage.input_tokens + self.usage.output_tokens
        for what, spent, next_one, limit in (
            ("calls", self.usage.calls, self._flying + 1, self.limits.calls),
            ("tokens", tokens, tokens * share, self.limits.tokens),
            ("dollars", self.usage.money, self.usage.money * share, self.limits.money),
        ):
            # A hundredth of a call is rounding, not spending.
            if limit and spent + next_one > limit + 0.01 * next_one / (self._flying + 1):
                return f"the budget of {limit:g} {what} is used up"
        return None

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[Turn, None]:
        """A place among the connections. Whoever is not refused asks inside, and says what it
        cost."""
        async with self._slots:
            turn = Turn(refused=self.refusal())
            if turn.refused is not None:
                yield turn
                return
            self._flying += 1
            try:
                yield turn
            finally:
                self._flying -= 1
                self.usage += turn.usage
                if self._held_back and self.usage.calls:
                    for _ in range(self._held_back):
                        self._slots.release()
                    self._held_back = 0


@dataclass
class Turn:
    """Leave to ask once."""

    refused: str | None
    """Why nothing may be asked; None when it may."""
    usage: Usage = field(default_factory=Usage)
    """What it cost; set by whoever asked."""


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
        self.concurrent = bool(getattr(judge, "concurrent", False))

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
        if self.concurrent:
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
        async with self.spending.turn() as turn:
            if turn.refused is not None:
                return [Verdict(outcome=Outcome.FAILED, reason=turn.refused) for _ in requests]
            verdicts = await self.judge.ask(requests)
            turn.usage = sum((verdict.usage for verdict in verdicts), Usage())
            return verdicts


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
        key = digest(
            "perturb", self.name, json.dumps(_task_row(task), sort_keys=True), digits=KEY_DIGITS
        )
        row = self.journal.get(key)
        if row is not None:
            return _perturbed_of_row(row)
        async with self.spending.turn() as turn:
            if turn.refused is not None:
                return Perturbed(steps=None, reason=turn.refused)
            made = (await self.perturber.make([task]))[0]
            turn.usage = made.usage
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
    row = {f.name: getattr(request, f.name) for f in fields(request)}
    return digest(name, type(request).__name__, json.dumps(row, sort_keys=True), digits=KEY_DIGITS)


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
