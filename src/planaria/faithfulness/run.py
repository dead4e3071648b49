"""A set of chains scored: concurrency, resume, budget, progress and the report."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planaria.errors import ConfigError
from planaria.faithfulness import prompts
from planaria.faithfulness.chains import Chain, chain_to_row
from planaria.faithfulness.control import correct, set_intervals, undecided
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import (
    Judge,
    Outcome,
    Request,
    Usage,
    Verdict,
)
from planaria.faithfulness.perturb import Perturbed, Perturber, Task
from planaria.faithfulness.scores import ChainScore, Contrast, Settings
from planaria.faithfulness.statistics import Interval, mean_interval
from planaria.faithfulness.store import (
    Journal,
    JournaledJudge,
    JournaledPerturber,
    Limits,
    Spending,
)

Progress = Callable[["Tick"], None]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """How far a run is."""

    done: int
    """Chains scored."""
    total: int
    """Chains to score."""
    usage: Usage
    """Spent in this run, what came from the journal not counted."""
    seconds: float
    """Since the start."""

    @property
    def remaining_seconds(self) -> float:
        """At the pace so far; 0 before the first chain."""
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0

    @property
    def remaining_money(self) -> float:
        """US dollars at the rate so far."""
        return self.usage.money / self.done * (self.total - self.done) if self.done else 0.0

    def line(self) -> str:
        """In words; calls and money only where a judge has been called."""
        said = f"{self.done}/{self.total} chains"
        left = f"about {self.remaining_seconds:.0f} s" if self.done < self.total else ""
        if self.usage.calls:
            said += f", {self.usage.calls} calls, ${self.usage.money:.2f} spent"
            left += f" and ${self.remaining_money:.2f}" if left else ""
        return f"{said}, {left} to go" if left else said


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores of a set and what they rest on."""

    scores: tuple[ChainScore, ...] = field(repr=False)
    """One score per chain, in order, corrected by the null control. Not in the ``repr``, which
    ``asyncio.run`` makes of a result and throws away."""
    usage: Usage
    """Spent in this run."""
    counts: dict[str, int] = field(default_factory=dict)
    """Verdicts by question and outcome."""
    states: dict[str, int] = field(default_factory=dict)
    """Chains by state: scored, without C, without F, unscored, truncated, without an answer."""
    means: dict[str, Interval] = field(default_factory=dict)
    """C, F, null, F* and R over the chains that have them, by question."""

    def row(self) -> dict[str, Any]:
        """As JSON, without the chains."""
        return {
            "chains": len(self.scores),
            "states": self.states,
            "counts": self.counts,
            "means": {name: interval.row() for name, interval in self.means.items()},
            "usage": asdict(self.usage),
        }


def report_of(scores: Sequence[ChainScore], usage: Usage) -> Report:
    """Counts and means of corrected scores."""
    states: Counter[str] = Counter()
    for score in scores:
        states["scored"] += score.reliability is not None
        states["unscored"] += score.reliability is None
        states["without consistency"] += score.consistency is None
        states["without faithfulness"] += score.faithfulness is None
        states["truncated"] += score.chain.truncated
        states["without an answer"] += score.chain.answer is None
        states["single step"] += len(score.chain.steps) == 1
        states["without a step"] += not score.chain.steps
    means: dict[str, Interval] = {}
    for name in ("consistency", "win_rate", "null_rate", "faithfulness", "reliability"):
        pairs = [(getattr(s, name), s.chain.question_id) for s in scores]
        kept = [(value, q) for value, q in pairs if value is not None]
        means[name] = mean_interval([v for v, _ in kept], clusters=[q for _, q in kept])
    for name, interval in set_intervals(scores).items():
        # R also has chains without F*, which the null rate has no part in.
        if interval.n == means[name].n:
            means[name] = interval
    return Report(
        scores=tuple(scores),
        usage=usage,
        counts=undecided(scores),
        states=dict(states),
        means=means,
    )


async def score_chains(
    chains: Sequence[Chain],
    *,
    judge: Judge,
    perturber: Perturber,
    settings: Settings | None = None,
    limits: Limits | None = None,
    spending: Spending | None = None,
    out: Path | None = None,
    concurrency: int = 64,
    progress: Progress | None = None,
) -> Report:
    """Score a set. With ``out``, every answer is journaled there as it comes and the run can be
    killed and started again; scores and report are written at the end.

    ``spending`` is an account that goes on from what was spent elsewhere, ``limits`` opens a new
    one. Raises :class:`~planaria.errors.ConfigError` when ``out`` holds a run with other settings.
    """
    settings = settings or Settings()
    if out is not None:
        claim(out, judge=judge.name, perturber=perturber.name, settings=settings)
    journal = Journal(out / "answers.jsonl" if out is not None else None)
    spending = spending or Spending(limits, connections=concurrency)
    kept_judge = journaled(judge, journal, spending)
    if getattr(perturber, "concurrent", False):
        perturber = JournaledPerturber(perturber, journal=journal, spending=spending)
    started = time.monotonic()
    results: list[ChainScore | None] = [None] * len(chains)
    queue = iter(range(len(chains)))
    done = 0

    async def worker() -> None:
        nonlocal done
        for index in queue:
            results[index] = await score_chain(
                chains[index], judge=kept_judge, perturber=perturber, settings=settings
            )
            done += 1
            if progress is not None:
                seconds = time.monotonic() - started
                progress(Tick(done=done, total=len(chains), usage=spending.usage, seconds=seconds))

    workers = min(concurrency, len(chains)) if getattr(judge, "concurrent", False) else 1
    await asyncio.gather(*(worker() for _ in range(max(1, workers))))
    report = report_of(correct([score for score in results if score is not None]), spending.usage)
    if out is not None:
        write_report(report, out)
    return report


def journaled(judge: Judge, journal: Journal, spending: Spending) -> Judge:
    """The judge with its answers kept. Rules are not journaled: they cost less than the disk.

    A panel's members are kept one by one, so that a member can be added without asking the others
    again.
    """
    if isinstance(judge, PanelJudge):
        return PanelJudge([journaled(member, journal, spending) for member in judge.members])
    if judge.name.startswith("calculator/"):
        return judge
    return JournaledJudge(judge, journal=journal, spending=spending)


def claim(out: Path, *, judge: str, perturber: str, settings: Settings, preset: str = "") -> None:
    """Write the resolved configuration and the prompts, or check that they are the same.

    Raises :class:`~planaria.errors.ConfigError` when ``out`` holds a run with another one.
    """
    config: dict[str, Any] = {
        "judge": judge,
        "perturber": perturber,
        "settings": asdict(settings) | {"kinds": [kind.value for kind in settings.kinds]},
        "prompts": prompts.VERSION,
        "planaria": importlib.metadata.version("planaria"),
    }
    if preset:
        config["preset"] = preset
    path = out / "config.json"
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        different = sorted(k for k in {*config, *before} if before.get(k) != config.get(k))
        if different:
            raise ConfigError(
                f"{out} holds a run with another {', '.join(different)}: choose another --out or "
                "remove that folder"
            )
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be made ({error.strerror}): choose another"
        ) from error
    write_json(path, config)
    write_json(out / "prompts.json", prompts.templates())


def write_json(path: Path, value: Any) -> None:
    """Written beside and moved, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_report(report: Report, out: Path) -> None:
    """``scores.jsonl``, one chain a line, and ``report.json``."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".scores.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as stream:
        for score in report.scores:
            stream.write(json.dumps(score_row(score), ensure_ascii=False) + "\n")
    temporary.replace(out / "scores.jsonl")
    write_json(out / "report.json", report.row())


def score_row(score: ChainScore) -> dict[str, Any]:
    """A score as JSON: what the page shows."""
    return {
        "chain": chain_to_row(score.chain),
        "consistency": score.consistency,
        "win_rate": score.win_rate,
        "interval": [score.low, score.high],
        "null_rate": score.null_rate,
        "faithfulness": score.faithfulness,
        "reliability": score.reliability,
        "breaks_at": score.breaks_at,
        "steps": [asdict(step) for step in score.steps],
        "supports": [_said(verdict) for verdict in score.supports],
        "contrasts": [_contrast_row(contrast) for contrast in score.contrasts],
        "counts": score.counts,
        "notes": list(score.notes),
    }


def _contrast_row(contrast: Contrast) -> dict[str, Any]:
    return {
        "split": contrast.split,
        "kind": contrast.kind.value,
        "control_of": contrast.control_of.value if contrast.control_of else None,
        "changes": [asdict(change) for change in contrast.changes],
        "verdicts": [_said(verdict) for verdict in contrast.verdicts],
        "win": contrast.win,
        "reason": contrast.reason,
    }


def _said(verdict: Verdict) -> dict[str, Any]:
    return {"outcome": verdict.outcome.value, "p": verdict.p, "reason": verdict.reason}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would ask, before anything is paid."""

    calls: int
    """Requests to the judge and to a perturber that is a model."""
    input_tokens: int
    """At four characters a token."""
    output_tokens: int
    """20 tokens a verdict, and an alternative's length."""
    money: float | None
    """US dollars; None when the price is not known."""

    def __add__(self, other: Estimate) -> Estimate:
        unknown = self.money is None or other.money is None
        return Estimate(
            calls=self.calls + other.calls,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            money=None if unknown else (self.money or 0.0) + (other.money or 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A judge or perturber that is only counted: neither key nor weights are needed."""

    name: str
    """Its name."""
    answers: frozenset[type] = frozenset()
    """Which questions it answers."""
    order_matters: bool = False
    """Whether both orders are asked."""
    samples: bool = False
    """Whether repeats are asked."""
    concurrent: bool = False
    """Whether it is a model: then what it writes as a perturber is counted."""
    asked: bool = True
    """Whether its verdicts are counted; off to count a perturber alone."""

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """Nothing is asked."""
        return [Verdict(outcome=Outcome.ABSTAINED, reason="dry run") for _ in requests]

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        """Nothing is made; the continuation stands for its alternative."""
        return [Perturbed(steps=task.continuation, reason="dry run") for task in tasks]


class _Counting:
    """A judge or perturber that counts what it would be asked."""

    def __init__(self, judge: Judge, writes: bool) -> None:
        self.name = judge.name
        self.answers = judge.answers
        self.order_matters = judge.order_matters
        self.samples = judge.samples
        self.calls = self.characters = self.written = 0
        self.writes = writes
        self.asked = bool(getattr(judge, "asked", True))

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        for request in requests if self.asked else ():
            self.calls += 1
            self.characters += len(prompts.prompt_of(request))
            self.written += 20
        return [Verdict(outcome=Outcome.ABSTAINED, reason="dry run") for _ in requests]

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        for task in tasks:
            if self.writes:
                self.calls += 1
                self.characters += len(prompts.perturb_prompt(task))
                self.written += sum(map(len, task.continuation)) // 4
        return [Perturbed(steps=task.continuation, reason="dry run") for task in tasks]


async def estimate_cost(
    chains: Sequence[Chain],
    *,
    judge: Judge,
    perturber: Perturber,
    settings: Settings | None = None,
    prices: tuple[float, float] | None = None,
) -> Estimate:
    """What :func:`score_chains` would ask at most, without asking. ``prices`` are dollars per
    million input and output tokens."""
    counting = _Counting(judge, bool(getattr(perturber, "concurrent", False)))
    for chain in chains:
        await score_chain(chain, judge=counting, perturber=counting, settings=settings)
    tokens = counting.characters // 4
    money = None
    if prices is not None:
        money = (tokens * prices[0] + counting.written * prices[1]) / 1e6
    return Estimate(
        calls=counting.calls, input_tokens=tokens, output_tokens=counting.written, money=money
    )


__all__ = [
    "Estimate",
    "Outline",
    "Report",
    "Tick",
    "claim",
    "estimate_cost",
    "journaled",
    "report_of",
    "score_chains",
    "score_row",
    "write_json",
    "write_report",
]
