"""``planaria faith score | select | meta | exemplars | view``.

Each command is a frozen dataclass with a ``run`` that returns lines to print; ``main`` parses with
tyro. The owner of the command line registers :data:`COMMANDS`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from planaria.errors import ConfigError, PlanariaError
from planaria.faithfulness import exemplars as few_shot
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.combine import LEAST_QUESTIONS, cross_fit
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import Compare, Judge
from planaria.faithfulness.meta import judge_pairs, meta_evaluate, pair_accuracy, pairs_of
from planaria.faithfulness.perturb import Perturber, RulePerturber
from planaria.faithfulness.readers import Problem, read_chains, read_questions
from planaria.faithfulness.run import (
    Report,
    Tick,
    estimate_cost,
    journaled,
    score_chains,
    write_json,
)
from planaria.faithfulness.scores import Settings
from planaria.faithfulness.select import Candidate, Selection, evaluate
from planaria.faithfulness.store import Journal, Limits, Spending
from planaria.faithfulness.view import write_page, write_selection

Note = Callable[[str], object]
File = Annotated[Path, tyro.conf.Positional]


@dataclass(frozen=True)
class Judging:
    """Who judges, how, and for how much."""

    judge: str = "calculator"
    """calculator, embedded, likelihood:FOLDER, an Inspect model, or several joined by +."""
    perturber: str = "rules"
    """rules, or an Inspect model, which should not be the judge."""
    preset: str = "default"
    """default, or released: what the published code does, its faults included."""
    splits: int = 3
    """Split points per chain."""
    trials: int = 3
    """Calls per chain for C where answers vary."""
    horizon: int = 0
    """Steps of each continuation that are compared; 0 compares all."""
    half_width: float = 0.0
    """Stop a chain when its confidence sequence is this narrow; 0 asks everything."""
    temperature: float = 1.0
    """Of judges and perturbers that are models."""
    logprobs: bool = False
    """Read verdicts off log-probabilities where the provider returns them."""
    seed: int = 0
    """Of splits, perturbations and resampling."""
    limit: int = 0
    """Only the first so many questions; 0 takes all."""
    budget_calls: int = 0
    """Stop asking after so many calls; 0 means no limit."""
    budget_tokens: int = 0
    """Stop asking after so many tokens."""
    budget: float = 0.0
    """Stop asking after so many US dollars."""
    connections: int = 64
    """Chains scored at the same time where judges are models."""

    def settings(self) -> Settings:
        """What the estimator is told."""
        return Settings(
            splits=self.splits,
            trials=self.trials,
            horizon=self.horizon,
            half_width=self.half_width,
            seed=self.seed,
        )

    def limits(self) -> Limits:
        """What may be spent."""
        return Limits(calls=self.budget_calls, tokens=self.budget_tokens, money=self.budget)


def judge_named(name: str, *, judging: Judging | None = None) -> Judge:
    """A judge by name; see :attr:`Judging.judge`.

    Raises :class:`~planaria.errors.ConfigError` for a name that nobody knows.
    """
    members: list[Judge] = []
    for part in name.split("+"):
        if part == "calculator":
            members.append(CalculatorJudge())
        elif part == "embedded":
            from planaria.faithfulness.judges.embedded import embedded_judge

            members.append(embedded_judge())
        elif part.startswith("likelihood:"):
            from planaria.faithfulness.judges.embedded import local_scorer
            from planaria.faithfulness.judges.likelihood import LikelihoodJudge

            folder = part.removeprefix("likelihood:")
            members.append(LikelihoodJudge(local_scorer(folder), name=Path(folder).name))
        else:
            from planaria.faithfulness.judges.models import (
                InspectJudge,
                ModelSettings,
                model_named,
            )

            options = judging or Judging()
            model = model_named(part)
            settings = ModelSettings(temperature=options.temperature, logprobs=options.logprobs)
            members.append(InspectJudge(model, settings=settings))
    return members[0] if len(members) == 1 else PanelJudge(members)


def perturber_named(name: str, *, judging: Judging) -> Perturber:
    """A perturber by name. Raises :class:`~planaria.errors.ConfigError` when it is the judge."""
    if name == "rules":
        return RulePerturber()
    from planaria.faithfulness.judges.models import ModelPerturber, ModelSettings, model_named

    if name in judging.judge.split("+"):
        raise ConfigError(
            f"{name} is both judge and perturber: what it writes and what it likes would go "
            "together; use --perturber rules or another model"
        )
    settings = ModelSettings(temperature=judging.temperature, max_tokens=1024)
    return ModelPerturber(model_named(name), settings=settings)


async def scored(
    chains: Sequence[Chain], judging: Judging, *, out: Path | None, note: Note
) -> Report:
    """Score chains as the options say."""
    judge = judge_named(judging.judge, judging=judging)
    if judging.preset == "released":
        from planaria.faithfulness.released import released_report

        return await released_report(chains, judge=judge, seed=judging.seed, out=out)
    if judging.preset != "default":
        raise ConfigError(f"unknown preset {judging.preset!r}: choose default or released")
    every = max(1, len(chains) // 20)

    def progress(tick: Tick) -> None:
        if tick.done % every == 0 or tick.done == tick.total:
            note(
                f"{tick.done}/{tick.total} chains, {tick.usage.calls} calls, "
                f"${tick.usage.money:.2f} spent, about {tick.remaining_seconds:.0f} s and "
                f"${tick.remaining_money:.2f} to go"
            )

    return await score_chains(
        chains,
        judge=judge,
        perturber=perturber_named(judging.perturber, judging=judging),
        settings=judging.settings(),
        limits=judging.limits(),
        out=out,
        concurrency=judging.connections,
        progress=progress,
    )


def _problems(problems: Sequence[Problem]) -> list[str]:
    if not problems:
        return []
    lines = [f"{len(problems)} rows were left out:"]
    return lines + [f"  {problem}" for problem in problems[:5]]


def _summary(report: Report) -> list[str]:
    names = {
        "consistency": "C",
        "win_rate": "F",
        "null_rate": "null",
        "faithfulness": "F*",
        "reliability": "R",
    }
    lines = [f"{names[k]:5} {v} over {v.n} chains" for k, v in report.means.items()]
    states = ", ".join(f"{count} {name}" for name, count in report.states.items() if count)
    return [*lines, f"chains: {states}"]


@dataclass(frozen=True)
class Score:
    """Score each chain of a file for faithfulness and consistency."""

    chains: File
    """JSONL, JSON or an Inspect log."""
    out: Path
    """Folder of the run; the same folder goes on with a run that was stopped."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    format: str = "auto"
    """Format of the file; auto goes by its fields."""
    dry_run: bool = False
    """Print calls, tokens and cost, ask nothing."""

    async def run(self, note: Note) -> list[str]:
        """Score, write the run, say what came out."""
        read = read_chains(self.chains, format=self.format, limit=self.judging.limit)
        if self.dry_run:
            return await _dry(read.chains, self.judging)
        report = await scored(read.chains, self.judging, out=self.out, note=note)
        broken = sum(score.breaks_at is not None for score in report.scores)
        return [
            *_problems(read.problems),
            f"{len(read.chains)} chains ({read.format})",
            *_summary(report),
            f"{broken} chains have a step that is held for wrong",
            f"written to {self.out}; see it with: planaria faith view {self.out}",
        ]


async def _dry(chains: Sequence[Chain], judging: Judging) -> list[str]:
    judge = judge_named(judging.judge, judging=judging)
    estimate = await estimate_cost(
        chains,
        judge=judge,
        perturber=perturber_named(judging.perturber, judging=judging),
        settings=judging.settings(),
        prices=_prices(judging.judge),
    )
    money = (
        "unknown: Inspect knows no price" if estimate.money is None else f"${estimate.money:.2f}"
    )
    return [
        f"{len(chains)} chains would ask at most {estimate.calls} calls",
        f"about {estimate.input_tokens} input and {estimate.output_tokens} output tokens",
        f"cost: {money}",
    ]


def _prices(name: str) -> tuple[float, float] | None:
    """Dollars per million tokens of a judge, as far as Inspect knows; 0 for local judges."""
    total = (0.0, 0.0)
    for part in name.split("+"):
        if part in ("calculator", "embedded") or part.startswith("likelihood:"):
            continue
        from inspect_ai.model import get_model_info

        info = get_model_info(part)
        cost = info.cost if info is not None else None
        if cost is None:
            return None
        total = (total[0] + cost.input, total[1] + cost.output)
    return total


@dataclass(frozen=True)
class Select:
    """Choose among the chains of each question, and report accuracy.

    With ``--model``, chains are sampled first; without it, the file holds them.
    """

    questions: File
    """Questions (GSM8K, MATH, CommonsenseQA, question and answer), or chains."""
    out: Path
    """Folder of the run."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    model: str = ""
    """Inspect model to sample from, such as vllm/… or hf/FOLDER; embedded is the one from PyPI."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 5
    """Chains per question."""
    sampling_temperature: float = 0.8
    """Temperature of the samples."""
    max_tokens: int = 1024
    """Longest chain, in tokens."""
    certainty: bool = False
    """Ask the sampled model for log-probabilities, for the rule self_certainty."""

    async def run(self, note: Note) -> list[str]:
        """Sample if asked to, score, choose, write ``selection.json``."""
        lines: list[str] = []
        certainties: dict[str, float] = {}
        if self.model:
            chains, certainties, lines = await self._sample(note)
        else:
            read = read_chains(self.questions, limit=self.judging.limit)
            chains, lines = list(read.chains), _problems(read.problems)
        report = await scored(chains, self.judging, out=self.out, note=note)
        candidates = [
            Candidate(
                chain=score.chain,
                reliability=score.reliability,
                consistency=score.consistency,
                faithfulness=score.faithfulness,
                certainty=certainties.get(score.chain.id),
            )
            for score in report.scores
        ]
        labels = {c.chain.question_id for c in candidates if c.chain.labels.correct is not None}
        truths = {c.chain.labels.correct for c in candidates} - {None}
        if len(labels) >= LEAST_QUESTIONS and len(truths) == 2:
            fitted = cross_fit(candidates, seed=self.judging.seed)
            candidates = list(fitted.candidates)
        else:
            lines.append(
                f"no combiner: it needs {LEAST_QUESTIONS} labelled questions with right and wrong "
                f"chains, here are {len(labels)}"
            )
        found = evaluate(candidates, seed=self.judging.seed)
        write_selection([selection_row(one) for one in found], self.out)
        lines += [f"{one.rule:16} {one.accuracy}  gain {one.gain}" for one in found]
        return [*lines, *_summary(report)]

    async def _sample(self, note: Note) -> tuple[list[Chain], dict[str, float], list[str]]:
        from planaria.faithfulness.judges.models import ModelSettings, model_named
        from planaria.faithfulness.sampling import sample_chains

        questions, problems = read_questions(self.questions, limit=self.judging.limit)
        note(f"sampling {self.n} chains for each of {len(questions)} questions")
        self.out.mkdir(parents=True, exist_ok=True)
        sampled = await sample_chains(
            questions,
            model=model_named(self.model),
            n=self.n,
            settings=ModelSettings(
                temperature=self.sampling_temperature,
                max_tokens=self.max_tokens,
                logprobs=self.certainty,
                timeout=600,
            ),
            journal=Journal(self.out / "samples.jsonl"),
            spending=Spending(self.judging.limits()),
        )
        lines = _problems(problems)
        if sampled.failures:
            lines.append(f"{len(sampled.failures)} chains could not be sampled:")
            lines += [f"  {failure}" for failure in sampled.failures[:5]]
        if not sampled.chains:
            raise ConfigError(
                f"{self.model} gave no chain at all; the first reason is "
                f"{sampled.failures[0] if sampled.failures else 'unknown'}"
            )
        return list(sampled.chains), sampled.certainties, lines


def selection_row(selection: Selection) -> dict[str, Any]:
    """A selection as JSON."""
    return {
        "rule": selection.rule,
        "accuracy": selection.accuracy.row(),
        "gain": selection.gain.row(),
        "unknown": selection.unknown,
    }


@dataclass(frozen=True)
class Meta:
    """Measure how well scores agree with labels."""

    labelled: File
    """Chains with labels: BIG-Bench-Mistake, PRMBench, ProcessBench, or wrong_steps and correct."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    out: Path | None = None
    """Folder of the run, to go on with it later."""
    json: Path | None = None
    """Write the measures to this file."""

    async def run(self, note: Note) -> list[str]:
        """Score and compare with the labels."""
        read = read_chains(self.labelled, limit=self.judging.limit)
        report = await scored(read.chains, self.judging, out=self.out, note=note)
        found = meta_evaluate(report.scores, seed=self.judging.seed)
        row: dict[str, Any] = found.row()
        lines = [
            f"{m.name:28} {m.value} over {m.value.n}, {m.left_out} left out" for m in found.measures
        ]
        pairs, dropped = pairs_of(read.chains)
        judge = judge_named(self.judging.judge, judging=self.judging)
        if pairs and Compare in judge.answers:
            journal = Journal(self.out / "answers.jsonl" if self.out else None)
            kept = journaled(judge, journal, Spending(self.judging.limits()))
            values = await judge_pairs(pairs, judge=kept)
            accuracy = pair_accuracy(pairs, values, seed=self.judging.seed)
            silent = sum(value is None for value in values)
            row["pair_accuracy"] = accuracy.row() | {"left_out": silent, "dropped": dropped}
            lines.append(f"{'pair_accuracy':28} {accuracy} over {accuracy.n}, {silent} left out")
        if found.unexplained:
            lines.append(
                f"{len(found.unexplained)} chains have a wrong answer and no labelled mistake: "
                + ", ".join(found.unexplained[:20])
            )
        if self.json is not None:
            write_json(self.json, row)
        return [*_problems(read.problems), *lines]


@dataclass(frozen=True)
class Exemplars:
    """Pick few-shot examples."""

    chains: File
    """Chains to pick from."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 8
    """How many, one a question."""
    out: Path | None = None
    """Folder of the run, to go on with it later."""

    async def run(self, note: Note) -> list[str]:
        """Score, pick, print."""
        read = read_chains(self.chains, limit=self.judging.limit)
        report = await scored(read.chains, self.judging, out=self.out, note=note)
        return [few_shot.render(few_shot.pick(report.scores, self.k)).rstrip("\n")]


@dataclass(frozen=True)
class View:
    """Write one HTML page of a run."""

    folder: File
    """Folder of a run."""
    out: Path | None = None
    """The page; by default view.html in the folder."""

    async def run(self, note: Note) -> list[str]:
        """Write the page."""
        return [f"written: {write_page(self.folder, out=self.out)}"]


Command = Score | Select | Meta | Exemplars | View
COMMANDS: dict[str, type[Command]] = {
    "score": Score,
    "select": Select,
    "meta": Meta,
    "exemplars": Exemplars,
    "view": View,
}
"""Subcommands by name."""


def execute(command: Command, *, note: Note | None = None) -> list[str]:
    """Run one command; returns the lines to print."""
    return asyncio.run(command.run(note or (lambda line: None)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; errors are one line on standard error. Returns the exit code."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="planaria faith", args=list(sys.argv[1:] if arguments is None else arguments)
    )
    try:
        lines = execute(command, note=lambda line: sys.stderr.write(line + "\n"))
    except PlanariaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


__all__ = ["COMMANDS", "Command", "execute", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
