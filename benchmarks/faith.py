"""Measure the faithfulness evaluator on labelled data and write docs/results/faith.md.

    python benchmarks/faith.py --data FOLDER

The embedded model's rows come from benchmarks/faith_embedded.py (docs/results/faith/*.jsonl), which
this adds to with --embedded-seconds. Everything else is computed here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faith_embedded as embedded
import tyro

from planaria.faithfulness.chains import Chain
from planaria.faithfulness.combine import cross_fit
from planaria.faithfulness.control import correct
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.protocol import Verdict, decide
from planaria.faithfulness.meta import (
    Pair,
    ShorterJudge,
    judge_pairs,
    meta_evaluate,
    pair_accuracy,
    pair_gain,
    pairs_of,
)
from planaria.faithfulness.perturb import Kind, RulePerturber
from planaria.faithfulness.readers import read_chains
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.scores import ChainScore, Contrast, Settings
from planaria.faithfulness.select import Candidate, evaluate
from planaria.faithfulness.statistics import Interval, mean_interval

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "faith.md"


@dataclass(frozen=True)
class Faith:
    """What to measure."""

    data: Path
    """Folder with the labelled data."""
    embedded_seconds: float = 0.0
    """Time to add rows of the embedded model; 0 takes those that are there."""
    embedded_questions: int = 400
    """GSM8K questions that the embedded model may get to."""
    speed: bool = True
    """Measure speed, too."""


async def calculated(chains: Sequence[Chain], settings: Settings) -> list[ChainScore]:
    """Scores by the calculator and rules."""
    report = await score_chains(
        chains, judge=CalculatorJudge(), perturber=RulePerturber(), settings=settings
    )
    return list(report.scores)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def percent(value: Interval) -> str:
    """An interval in percent."""
    return f"{100 * value.estimate:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}]"


async def arithmetic(data: Path) -> list[str]:
    """BIG-Bench-Mistake, arithmetic."""
    chains = read_chains(data / "mistake_arithmetic.jsonl").chains
    found = meta_evaluate(await calculated(chains, Settings(splits=1)))
    rows = [(m.name, m.value, m.value.n, m.left_out) for m in found.measures]
    return [
        "## mistake_arithmetic, calculator",
        "",
        f"{len(chains)} chains. `_explained` leaves out the {len(found.unexplained)} chains whose "
        "final answer is wrong though no mistake is labelled.",
        "",
        *table(("measure", "value and 95 % interval", "n", "left out"), rows),
        "Chains with a wrong answer and no labelled mistake: " + ", ".join(found.unexplained) + ".",
        "",
    ]


def rebuilt(chain: Chain, row: dict[str, Any]) -> ChainScore:
    """A score from a raw row."""
    contrasts = tuple(
        Contrast(
            split=split,
            kind=Kind.PARAPHRASE if null else Kind(kind),
            control_of=Kind(kind) if null else None,
            win=win,
            longer=longer,
        )
        for split, kind, null, win, longer in row["contrasts"]
    )
    wins = [c.win for c in contrasts if c.win is not None and c.kind is not Kind.PARAPHRASE]
    return ChainScore(
        chain=chain,
        consistency=row["c"],
        win_rate=sum(wins) / len(wins) if wins else None,
        contrasts=contrasts,
    )


def candidates_of(scores: Sequence[ChainScore]) -> list[Candidate]:
    """Candidates with their scores."""
    return [
        Candidate(
            chain=s.chain,
            reliability=s.reliability,
            consistency=s.consistency,
            faithfulness=s.faithfulness,
        )
        for s in scores
    ]


def selections(title: str, note: str, scores: Sequence[ChainScore], fit: bool) -> list[str]:
    """Selection rules on the same chains."""
    candidates = candidates_of(scores)
    if fit:
        candidates = list(cross_fit(candidates).candidates)
    rows = [
        (s.rule, percent(s.accuracy), percent(s.gain), s.accuracy.n) for s in evaluate(candidates)
    ]
    head = ("rule", "accuracy", "gain over majority, paired", "questions")
    return [f"## {title}", "", note, "", *table(head, rows)]


def panel_of(one: Sequence[ChainScore], other: Sequence[ChainScore]) -> list[ChainScore]:
    """The panel from two judges' scores: means of what is known."""
    out: list[ChainScore] = []
    for a, b in zip(one, other, strict=True):
        values: dict[str, float | None] = {}
        for name in ("consistency", "faithfulness"):
            known = [v for v in (getattr(a, name), getattr(b, name)) if v is not None]
            values[name] = sum(known) / len(known) if known else None
        out.append(
            replace(a, consistency=values["consistency"], faithfulness=values["faithfulness"])
        )
    return out


async def gsm8k(data: Path) -> list[str]:
    """Selection among graded chains, and the null control."""
    chains = read_chains(data / "gsm8k_graded_chains.jsonl").chains
    start = time.process_time()
    scores = await calculated(chains, Settings())
    seconds = time.process_time() - start
    start = time.process_time()
    await calculated(chains, Settings(splits=1, horizon=1))
    quick = time.process_time() - start
    lines = selections(
        "GSM8K graded chains, calculator",
        f"{len(chains)} chains of {len({c.question_id for c in chains})} questions, no model at "
        "all. The combiner's features were written while looking at these questions; folds keep "
        "its weights, not its features, blind to them.",
        scores,
        True,
    )
    lines += [
        f"Scoring all {len(chains)} chains with the calculator took {seconds:.1f} s of processor "
        f"time with three splits and five kinds, {quick:.1f} s with one split and the next step.",
        "",
    ]
    rows = embedded.done(embedded.CHAINS)
    by_question = Counter(row["question"] for row in rows.values())
    whole = {q for q, n in by_question.items() if n == 4}
    some = [c for c in chains if c.question_id in whole and c.id in rows]
    if not some:
        return lines
    model = correct([rebuilt(chain, rows[chain.id]) for chain in some])
    calculator = [s for s in scores if s.chain.id in {c.id for c in some}]
    subset = f"A random {len(whole)} of the 400 questions; the rest was not measured."
    lines += selections("GSM8K, embedded", subset, model, len(whole) >= 30)
    lines += selections(
        "GSM8K, panel of calculator and embedded",
        subset + " Means of the two judges' C and F*.",
        panel_of(calculator, model),
        len(whole) >= 30,
    )
    every = [rebuilt(c, rows[c.id]) for c in chains if c.id in rows]
    return lines + null_control(every)


def null_control(scores: Sequence[ChainScore]) -> list[str]:
    """Paraphrases scored as if they were errors, corrected by those of other questions."""
    raw: list[tuple[float, str]] = []
    held: list[tuple[float, str]] = []
    pretended: list[ChainScore] = []
    for score in scores:
        nulls = [c for c in score.contrasts if c.kind is Kind.PARAPHRASE and c.win is not None]
        raw += [(c.win or 0.0, score.chain.question_id) for c in nulls]
        as_errors = [replace(c, kind=c.control_of or Kind.SWAP) for c in nulls]
        if nulls:
            rate = sum(c.win or 0.0 for c in nulls) / len(nulls)
            pretended.append(replace(score, contrasts=(*as_errors, *nulls), win_rate=rate))
    for score in correct(pretended):
        if score.faithfulness is not None:
            held.append((score.faithfulness, score.chain.question_id))
    rows = [
        (name, mean_interval([v for v, _ in some], clusters=[q for _, q in some]), len(some))
        for name, some in (("raw win rate", raw), ("after correction, held out", held))
    ]
    return [
        "## Null control, embedded",
        "",
        "How often the original is taken over its paraphrase, on GSM8K chains: raw, and after "
        "the correction that the other questions' paraphrases give. One half is no taste. The "
        "corrected score is clipped to [0, 1] for each chain.",
        "",
        *table(("", "value and 95 % interval", "n"), rows),
    ]


async def prmbench(data: Path) -> list[str]:
    """Pairs by the embedded model and its controls."""
    every, dropped = pairs_of(read_chains(data / "prmbench_pairs.jsonl").chains)
    rows = embedded.done(embedded.PAIRS)
    pairs = [pair for pair in every if pair.id in rows]
    if not pairs:
        return []

    def values(field: str) -> list[float]:
        two = [rows[pair.id][field] for pair in pairs]
        return [1.0 if a > b else 0.0 if a < b else 0.5 for a, b in two]

    context, alone = values("context"), values("alone")
    shorter = await judge_pairs(pairs, judge=ShorterJudge())
    calculator = await judge_pairs(pairs, judge=CalculatorJudge())
    panel = [
        a if b is None or b == 0.5 else (a + b) / 2
        for a, b in zip(context, calculator, strict=True)
    ]
    out = [
        ("embedded", pair_accuracy(pairs, context), ""),
        (
            "control: without question and prefix",
            pair_accuracy(pairs, alone),
            gain(pairs, context, alone),
        ),
        ("control: the shorter wins", pair_accuracy(pairs, shorter), gain(pairs, context, shorter)),
        ("calculator (undecided left out)", pair_accuracy(pairs, calculator), ""),
        ("panel of both", pair_accuracy(pairs, panel), ""),
    ]
    by_class: list[tuple[object, ...]] = []
    for kind in sorted({pair.kind for pair in pairs}):
        here = [i for i, pair in enumerate(pairs) if pair.kind == kind]
        some = [pairs[i] for i in here]
        by_class.append(
            (
                kind,
                len(some),
                *(pair_accuracy(some, [v[i] for i in here]) for v in (context, alone, shorter)),
            )
        )
    return [
        "## PRMBench pairs, mean log-probability per token",
        "",
        f"{len(pairs)} of {len(every)} pairs measured (a random order); {dropped} were excluded "
        "because the question was changed too or no error step is labelled. Both continuations "
        "begin at the first step that differs.",
        "",
        *table(("judge", "accuracy", "embedded's paired gain"), out),
        *table(("class", "pairs", "embedded", "without context", "the shorter"), by_class),
    ]


def gain(pairs: Sequence[Pair], one: Sequence[float | None], other: Sequence[float | None]) -> str:
    """A paired gain as text."""
    return str(pair_gain(pairs, one, other))


class Slow(CalculatorJudge):
    """A stub of fixed latency."""

    name = "slow/1"
    concurrent = True

    async def ask(self, requests: Sequence[Any]) -> list[Verdict]:
        """After two seconds."""
        await asyncio.sleep(2.0)
        return [decide(0.9, "slow") for _ in requests]


async def throughput() -> list[str]:
    """What Inspect can send, and what a latency of 2 s at 64 connections allows."""
    from inspect_ai.model import GenerateConfig, ModelOutput, ModelUsage, get_model

    from planaria.faithfulness.judges.models import InspectJudge
    from planaria.faithfulness.judges.protocol import Verify

    latency = {"s": 2.0}

    async def outputs(messages: Any, tools: Any, choice: Any, config: Any) -> ModelOutput:
        if latency["s"]:
            await asyncio.sleep(latency["s"])
        output = ModelOutput.from_content("mockllm/model", "Verdict: right")
        output.usage = ModelUsage(input_tokens=9, output_tokens=3, total_tokens=12)
        return output

    model = get_model(
        "mockllm/model",
        custom_outputs=outputs,
        config=GenerateConfig(max_connections=64),
        memoize=False,
    )
    judge = InspectJudge(model)
    requests = [Verify(question="q", prefix=(), step=f"step {i}") for i in range(640)]
    start = time.monotonic()
    await judge.ask(requests)
    waited = time.monotonic() - start
    latency["s"] = 0.0
    start = time.monotonic()
    await judge.ask(requests)
    bare = len(requests) / (time.monotonic() - start)
    allowed = 2.0 * len(requests) / 64
    return [
        "## Throughput",
        "",
        f"640 calls through Inspect to a stub of 2 s latency with 64 connections: {waited:.1f} s, "
        f"{100 * allowed / waited:.0f} % of what the latency allows ({allowed:.0f} s). Inspect's "
        f"own ceiling, the same calls without latency: {bare:.0f} calls/s. Two shared cores.",
        "",
    ]


async def sharing(data: Path) -> list[str]:
    """The likelihood judge with and without shared prefixes, in processor time."""
    from planaria.faithfulness.judges.embedded import NAME, embedded_folder, local_scorer
    from planaria.faithfulness.judges.likelihood import LikelihoodJudge, Scorer

    fast = local_scorer(embedded_folder())
    slow = Scorer(fast.model, tokenizer=fast.tokenizer, share=False)
    chain = read_chains(data / "gsm8k_questions.jsonl").chains[5]
    rows: list[tuple[object, ...]] = []
    for name, horizon in (("whole continuations", 0), ("the next step only", 1)):
        seconds: list[float] = []
        for scorer in (fast, slow):
            start = time.process_time()
            await score_chain(
                chain,
                judge=LikelihoodJudge(scorer, name=NAME),
                perturber=RulePerturber(),
                settings=Settings(horizon=horizon),
            )
            seconds.append(time.process_time() - start)
        rows.append(
            (name, f"{seconds[0]:.1f} s", f"{seconds[1]:.1f} s", f"{seconds[1] / seconds[0]:.1f}")
        )
    head = ("compared", "shared", "each on its own", "times faster")
    return [
        "## Shared prefixes",
        "",
        "One GSM8K chain, three splits, all kinds and null controls, processor time of one thread.",
        "",
        *table(head, rows),
    ]


async def main(config: Faith) -> None:
    """Measure and write."""
    if config.embedded_seconds:
        await embedded.measure(
            embedded.Embedded(
                data=config.data,
                questions=config.embedded_questions,
                seconds=config.embedded_seconds,
            )
        )
    lines = [
        "# Faithfulness: results",
        "",
        "Written by `python benchmarks/faith.py --data FOLDER`.",
        "",
    ]
    lines += await arithmetic(config.data)
    lines += await gsm8k(config.data)
    lines += await prmbench(config.data)
    if config.speed:
        lines += await throughput()
        lines += await sharing(config.data)
    text = "\n".join(lines).rstrip() + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Faith)))
