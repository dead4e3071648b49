"""``planaria faith score | select | meta | exemplars | view``.

Each command is a frozen dataclass with a ``run`` that returns lines to print; ``main`` parses with
tyro. The owner of the command line registers :data:`COMMANDS`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tyro

from planaria.errors import ConfigError, DataError, PlanariaError, RunError
from planaria.faithfulness import exemplars as few_shot
from planaria.faithfulness import prices, prompts
from planaria.faithfulness.chains import Chain, Question
from planaria.faithfulness.combine import LEAST_QUESTIONS, cross_fit
from planaria.faithfulness.judges.models import closing
from planaria.faithfulness.judges.protocol import Compare, Outcome
from planaria.faithfulness.judging import (
    Judging,
    Note,
    dry,
    is_model,
    judge_named,
    scored,
)
from planaria.faithfulness.meta import (
    corrupt,
    judge_pairs,
    meta_evaluate,
    pair_accuracy,
    pairs_of,
)
from planaria.faithfulness.readers import Problem, Read, read_chains, read_questions
from planaria.faithfulness.run import Estimate, Report, counted, journaled, write_json
from planaria.faithfulness.select import Candidate, Selection, evaluate
from planaria.faithfulness.store import Journal, Spending, writable
from planaria.faithfulness.view import write_page, write_selection

File = Annotated[Path, tyro.conf.Positional]
DEMO = "demo"
"""The word that stands for the chains that come with the package."""


def file_named(path: Path) -> Path:
    """The file, or the demonstration's where ``path`` is the word ``demo`` and no file."""
    if str(path) != DEMO or path.exists():
        return path
    return Path(str(resources.files("planaria.faithfulness").joinpath("demo.jsonl")))


def _read(path: Path, judging: Judging, *, format: str = "auto") -> Read:
    return read_chains(file_named(path), format=format, limit=judging.limit)


def _problems(problems: Sequence[Problem]) -> list[str]:
    if not problems:
        return []
    lines = [f"{counted(len(problems), 'row')} left out:"]
    return lines + [f"  {problem}" for problem in problems[:5]]


def _summary(report: Report) -> list[str]:
    names = {
        "consistency": "C",
        "win_rate": "F",
        "null_rate": "null",
        "faithfulness": "F*",
        "reliability": "R",
    }
    lines = [
        f"{names[k]:5} {v} over {counted(v.n, 'chain')}" for k, v in report.means.items() if v.n
    ]
    states = ", ".join(f"{count} {name}" for name, count in report.states.items() if count)
    return [*lines, f"chains: {states}", *_troubles(report)]


def _troubles(report: Report) -> list[str]:
    """What did not go well, one line each.

    Raises :class:`~planaria.errors.RunError` where requests failed and nothing at all was scored.
    """
    lines: list[str] = []
    failed = _reasons(report, Outcome.FAILED)
    if failed:
        lines.append(f"{counted(failed.total(), 'request')} failed, {_most(failed)}")
        if not report.states["scored"]:
            raise RunError(
                f"no chain could be scored: {lines[-1]}; mend that and start the same command again"
            )
    unread = _reasons(report, Outcome.UNPARSED)
    if unread:
        lines.append(f"{counted(unread.total(), 'answer')} could not be read, {_most(unread)}")
    if report.dropped:
        lines.append(
            f"{counted(report.dropped, 'line')} of answers.jsonl could not be read; what they said was "
            "asked for again"
        )
    return lines


def _reasons(report: Report, outcome: Outcome) -> Counter[str]:
    """Why requests of a report had this outcome."""
    found: Counter[str] = Counter()
    for score in report.scores:
        verdicts = (*score.supports, *(v for c in score.contrasts for v in c.verdicts))
        found.update(v.reason for v in verdicts if v.outcome is outcome)
        found.update(s.reason for s in score.steps if s.outcome == outcome.value)
    return found


def _most(reasons: Counter[str]) -> str:
    return f"most often for: {reasons.most_common(1)[0][0]}"


@dataclass(frozen=True)
class Score:
    """Score each chain of a file for faithfulness and consistency."""

    chains: File
    """JSONL, JSON or an Inspect log; the word demo takes the chains that come with the package."""
    out: Path
    """Folder of the run; the same folder goes on with a run that was stopped."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    format: str = "auto"
    """Format of the file; auto goes by its fields."""

    async def run(self, note: Note) -> list[str]:
        """Score, write the run, say what came out."""
        read = _read(self.chains, self.judging, format=self.format)
        if self.judging.dry_run:
            return [*_problems(read.problems), *await dry(read.chains, self.judging)]
        report = await scored(read.chains, self.judging, out=self.out, note=note)
        broken = sum(score.breaks_at is not None for score in report.scores)
        return [
            *_problems(read.problems),
            f"{counted(len(read.chains), 'chain')} ({read.format})",
            *_summary(report),
            f"{broken} of {counted(len(read.chains), 'chain')} with a step that is held to be wrong",
            f"written to {self.out}; see it with: planaria faith view {self.out}",
        ]


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

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"-n is {self.n}: give the number of chains per question, from 1 on")

    async def run(self, note: Note) -> list[str]:
        """Sample if asked to, score, choose, write ``selection.json``."""
        spending = self.judging.spending(self.model)
        certainties: dict[str, float] = {}
        if self.model:
            questions, problems = read_questions(
                file_named(self.questions), limit=self.judging.limit
            )
            lines = _problems(problems)
            if self.judging.dry_run:
                return [*lines, *await self._dry(questions)]
            chains, certainties, failures = await self._sample(questions, spending, note)
            lines += failures
        else:
            read = self._chains()
            chains, lines = list(read.chains), _problems(read.problems)
            if self.judging.dry_run:
                return [*lines, *await dry(chains, self.judging)]
        report = await scored(chains, self.judging, out=self.out, note=note, spending=spending)
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

    def _chains(self) -> Read:
        """The chains of the file; one that holds questions only says what is missing."""
        try:
            return _read(self.questions, self.judging)
        except DataError:
            try:
                questions, _ = read_questions(file_named(self.questions))
            except DataError:
                questions = []
            if not questions:
                raise
            raise ConfigError(
                f"{self.questions} holds {counted(len(questions), 'question')} and no chain: name a "
                "model to sample chains from with --model, such as vllm/… or embedded"
            ) from None

    async def _dry(self, questions: Sequence[Question]) -> list[str]:
        """Sampling, and scoring of chains of six steps of eighty characters."""
        asked = [prompts.sample_prompt(question) for question in questions]
        tokens, written = self.n * sum(map(len, asked)) // 4, self.n * len(asked) * self.max_tokens
        if self.judging.prices is not None:
            prices.register(self.judging.prices)
        price = prices.price_of(self.model) if is_model(self.model) else (0.0, 0.0)
        money = None if price is None else (tokens * price[0] + written * price[1]) / 1e6
        before = Estimate(
            calls=self.n * len(asked), input_tokens=tokens, output_tokens=written, money=money
        )
        chains = [
            Chain(question=q.full, steps=("x" * 80,) * 6, answer="0", id=f"{q.id}/{number}")
            for q in questions
            for number in range(self.n)
        ]
        note = "scoring is counted for chains of six steps of eighty characters"
        return [*await dry(chains, self.judging, before=before, model=self.model), note]

    async def _sample(
        self, questions: Sequence[Question], spending: Spending, note: Note
    ) -> tuple[list[Chain], dict[str, float], list[str]]:
        from planaria.faithfulness.judges.models import ModelSettings, model_named
        from planaria.faithfulness.sampling import sample_chains

        note(
            f"sampling {counted(self.n, 'chain')} for each of {counted(len(questions), 'question')}"
        )
        writable(self.out / "samples.jsonl")
        model = model_named(
            self.model,
            connections=self.judging.connections,
            temperature=self.sampling_temperature,
        )
        settings = ModelSettings(
            temperature=self.sampling_temperature,
            max_tokens=self.max_tokens,
            logprobs=self.certainty,
            timeout=max(600, self.judging.timeout),
            max_retries=self.judging.max_retries,
        )
        async with closing(model):
            sampled = await sample_chains(
                questions,
                model=model,
                n=self.n,
                settings=settings,
                journal=Journal(self.out / "samples.jsonl"),
                spending=spending,
            )
        lines: list[str] = []
        if sampled.failures:
            lines.append(f"{counted(len(sampled.failures), 'chain')} could not be sampled:")
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
    """Chains with labels: BIG-Bench-Mistake, PRMBench, ProcessBench, or wrong_steps and correct;
    the word demo takes those that come with the package."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    out: Path | None = None
    """Folder of the run, to go on with it later."""
    json: Path | None = None
    """Write the measures to this file."""
    noise: float = 0.0
    """Noise test: this share of the chains gets one known error each, and those are the labels."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"--noise is {self.noise}: give a share from 0 to 1")

    async def run(self, note: Note) -> list[str]:
        """Score and compare with the labels."""
        read = _read(self.labelled, self.judging)
        chains = self._chains(read)
        if self.judging.dry_run:
            return [*_problems(read.problems), *await dry(chains, self.judging)]
        if self.json is not None:
            writable(self.json)
        spending = self.judging.spending()
        judge = judge_named(self.judging.judge, judging=self.judging)
        async with closing(judge):
            report = await scored(
                chains, self.judging, out=self.out, note=note, judge=judge, spending=spending
            )
            pairs, dropped = pairs_of(chains)
            values: list[float | None] = []
            if pairs and Compare in judge.answers:
                journal = Journal(self.out / "answers.jsonl" if self.out else None)
                kept = journaled(judge, journal, spending)
                values = await judge_pairs(pairs, judge=kept)
        troubles = _troubles(report)
        found = meta_evaluate(report.scores, seed=self.judging.seed)
        row: dict[str, Any] = found.row()
        lines = [
            f"{m.name:28} {m.value} over {m.value.n}, {m.left_out} left out" for m in found.measures
        ]
        if values:
            accuracy = pair_accuracy(pairs, values, seed=self.judging.seed)
            silent = sum(value is None for value in values)
            row["pair_accuracy"] = accuracy.row() | {"left_out": silent, "dropped": dropped}
            lines.append(f"{'pair_accuracy':28} {accuracy} over {accuracy.n}, {silent} left out")
        if found.unexplained:
            lines.append(
                f"wrong answer and no labelled mistake in "
                f"{counted(len(found.unexplained), 'chain')}: " + ", ".join(found.unexplained[:20])
            )
        if self.json is not None:
            write_json(self.json, row)
        return [*_problems(read.problems), *lines, *troubles]

    def _chains(self, read: Read) -> Sequence[Chain]:
        if not self.noise:
            labels = [c.labels for c in read.chains]
            if all(one.flawed is None and one.correct is None for one in labels):
                raise DataError(
                    f"{self.labelled} has no labels to compare with: give rows wrong_steps (a list "
                    "of 0-based indices), correct (true or false) or a reference answer, or use "
                    "--noise 0.3"
                )
            return read.chains
        sound = [c for c in read.chains if not c.labels.flawed and c.labels.correct is not False]
        if not sound:
            raise ConfigError("--noise needs chains that are not wrong already, and there are none")
        return corrupt(sound, share=self.noise, seed=self.judging.seed)


@dataclass(frozen=True)
class Exemplars:
    """Pick few-shot examples."""

    chains: File
    """Chains to pick from; the word demo takes those that come with the package."""
    judging: tyro.conf.OmitArgPrefixes[Judging] = field(default_factory=Judging)
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 8
    """How many, one a question."""
    out: Path | None = None
    """Folder of the run, to go on with it later."""

    def __post_init__(self) -> None:
        few_shot.check(self.k)

    async def run(self, note: Note) -> list[str]:
        """Score, pick, print."""
        read = _read(self.chains, self.judging)
        if self.judging.dry_run:
            return await dry(read.chains, self.judging)
        questions = len({chain.question_id for chain in read.chains})
        if questions < self.k:
            raise DataError(
                f"{self.chains} holds chains of {counted(questions, 'question')}, and each gives one "
                f"example: lower -k, which is {self.k}"
            )
        report = await scored(read.chains, self.judging, out=self.out, note=note)
        _troubles(report)
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="planaria faith", args=words)
        lines = execute(command, note=lambda line: sys.stderr.write(line + "\n"))
    except PlanariaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


__all__ = ["COMMANDS", "Command", "execute", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
