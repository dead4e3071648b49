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

import faith_embedded as embedded
import faith_speed as speed
import tyro
from faith_speed import table

from planaria.faithfulness.chains import Chain
from planaria.faithfulness.combine import cross_fit
from planaria.faithfulness.control import correct
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.meta import (
    Pair,
    ShorterJudge,
    judge_pairs,
    meta_evaluate,
    pair_accuracy,
    pair_gain,
)
from planaria.faithfulness.perturb import Kind, RulePerturber
from planaria.faithfulness.readers import read_chains
from planaria.faithfulness.run import score_chains
from planaria.faithfulness.scores import ChainScore, Settings
from planaria.faithfulness.select import Candidate, evaluate
from planaria.faithfulness.statistics import Interval, auroc, mean_interval, resample

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "faith.md"

SPEED = RESULTS.parent / "faith" / "speed.md"
MISSED = SPEED.with_name("missed.md")


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
    """Measure throughput and shared prefixes; off takes what was measured last."""


async def calculated(chains: Sequence[Chain], settings: Settings) -> list[ChainScore]:
    """Scores by the calculator and rules."""
    report = await score_chains(
        chains, judge=CalculatorJudge(), perturber=RulePerturber(), settings=settings
    )
    return list(report.scores)


def percent(value: Interval) -> str:
    """An interval in percent."""
    return f"{100 * value.estimate:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def measures(scores: Sequence[ChainScore]) -> list[tuple[object, ...]]:
    """Rows of a table of agreement with labels."""
    return [(m.name, m.value, m.value.n, m.left_out) for m in meta_evaluate(scores).measures]


MEASURES = ("measure", "value and 95 % interval", "n", "left out")


async def arithmetic(data: Path) -> list[str]:
    """BIG-Bench-Mistake, arithmetic: calculator, embedded, panel."""
    chains = read_chains(data / "mistake_arithmetic.jsonl").chains
    scores = await calculated(chains, Settings(splits=1))
    found = meta_evaluate(scores)
    lines = [
        "## mistake_arithmetic, calculator",
        "",
        f"{len(chains)} chains. `_explained` leaves out the {len(found.unexplained)} chains whose "
        "final answer is wrong though no mistake is labelled.",
        "",
        *table(MEASURES, measures(scores)),
        "Chains with a wrong answer and no labelled mistake: " + ", ".join(found.unexplained) + ".",
        "",
    ]
    model, panel, some = await both(chains, embedded.Rows())
    if not some:
        return lines
    how = (
        f"{len(some)} of {len(chains)} chains (a random order), one split, the next step only. "
        "R = C · F*. The embedded model does not verify steps, so the steps of the panel are the "
        "calculator's."
    )
    judged = {s.chain.id: s for s in scores}
    calculator = [judged[chain.id] for chain in some]
    return [
        *lines,
        "## mistake_arithmetic, embedded and panel",
        "",
        how,
        "",
        *table(
            ("judge", "measure", "value and 95 % interval", "n"),
            [
                *ranking("calculator", calculator),
                *ranking("embedded", model),
                *ranking("panel", panel),
            ],
        ),
    ]


def ranking(name: str, scores: Sequence[ChainScore]) -> list[tuple[object, ...]]:
    """What C, F*, R and, where steps were verified, the flaw score say of flawed chains."""
    out: list[tuple[object, ...]] = []
    for label, of in (
        ("AUROC of flawed chains by 1 - C", lambda s: s.consistency),
        ("AUROC of flawed chains by 1 - F*", lambda s: s.faithfulness),
        ("AUROC of flawed chains by 1 - R", lambda s: s.reliability),
        ("AUROC of flawed chains by steps", lambda s: None if s.flaw is None else 1 - s.flaw),
    ):
        known = [
            (1 - of(s), s)
            for s in scores
            if of(s) is not None and s.chain.labels.flawed is not None
        ]
        if known:
            value = area([v for v, _ in known], [s for _, s in known])
            out.append((name, label, value, value.n))
    flawed = [s for s in scores if s.chain.labels.flawed and s.flaw is not None]
    if flawed:
        right = [float(s.breaks_at == s.chain.labels.first_wrong) for s in flawed]
        value = mean_interval(right, clusters=[s.chain.question_id for s in flawed])
        out.append((name, "first wrong step named", value, value.n))
    return out


def area(values: Sequence[float], scores: Sequence[ChainScore]) -> Interval:
    """AUROC for flawed chains, by question."""
    flawed = [bool(s.chain.labels.flawed) for s in scores]
    return resample(
        lambda weights: auroc(values, flawed, weights=weights),
        clusters=[s.chain.question_id for s in scores],
    )


async def both(
    chains: Sequence[Chain], rows: embedded.Rows
) -> tuple[list[ChainScore], list[ChainScore], list[Chain]]:
    """Embedded and the panel of it and the calculator on the chains that were measured."""
    kept = embedded.Kept(rows)
    panel = PanelJudge([CalculatorJudge(), kept])
    one: list[ChainScore] = []
    two: list[ChainScore] = []
    for chain in chains:
        score = await embedded.kept_score(chain, kept)
        joint = None if score is None else await embedded.kept_score(chain, panel)
        if score is not None and joint is not None:
            one.append(score)
            two.append(joint)
    return correct(one), correct(two), [score.chain for score in one]


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


async def gsm8k(data: Path) -> list[str]:
    """Selection among graded chains, and the null control."""
    chains = read_chains(data / "gsm8k_graded_chains.jsonl").chains
    start = time.process_time()
    scores = await calculated(chains, Settings())
    seconds = time.process_time() - start
    lines = selections(
        "GSM8K graded chains, calculator",
        f"{len(chains)} chains of {len({c.question_id for c in chains})} questions, no model at "
        "all. The combiner's features were written while looking at these questions; folds keep "
        "its weights, not its features, blind to them.",
        scores,
        True,
    )
    lines += [
        f"Scoring all {len(chains)} chains with the calculator (three splits, five kinds, every "
        f"step verified) took {seconds:.1f} s of processor time of one core.",
        "",
    ]
    model, panel, every = await both(chains, embedded.Rows())
    by_question = Counter(chain.question_id for chain in every)
    whole = {q for q, n in by_question.items() if n == 4}
    if not whole:
        return lines
    subset = f"A random {len(whole)} of the 400 questions, one split, the next step only."
    for title, some in (
        ("GSM8K, embedded", model),
        ("GSM8K, panel of calculator and embedded", panel),
    ):
        here = [s for s in some if s.chain.question_id in whole]
        lines += selections(title, subset, here, len(whole) >= 30)
    return lines + null_control(model)


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
        for name, some in (
            ("raw win rate", raw),
            ("after correction, held out", held),
            ("the same of each contrast, not clipped", unclipped(pretended)),
        )
    ]
    return [
        "## Null control, embedded",
        "",
        "How often the original is taken over its paraphrase, on GSM8K chains: raw, and after "
        "the correction that the other questions' paraphrases give. One half is no taste. The "
        "corrected score is clipped to [0, 1] for each chain, which lifts the mean where a judge "
        "takes nearly always the original: a chain that loses all its contrasts would be below 0.",
        "",
        *table(("", "value and 95 % interval", "n"), rows),
    ]


def unclipped(scores: Sequence[ChainScore]) -> list[tuple[float, str]]:
    """0.5 + win - null rate of each paraphrase, the rate that of other questions' of its length."""
    nulls = [
        (s.chain.question_id, c.longer, c.win)
        for s in scores
        for c in s.contrasts
        if c.kind is Kind.PARAPHRASE and c.win is not None
    ]
    tally: dict[tuple[str, int], list[float]] = {}
    for question, longer, win in nulls:
        tally.setdefault((question, longer), []).append(win)
    wins, counts = Counter[int](), Counter[int]()
    for (_, longer), some in tally.items():
        wins[longer] += sum(some)
        counts[longer] += len(some)
    found: list[tuple[float, str]] = []
    for question, longer, win in nulls:
        own = tally[question, longer]
        if others := counts[longer] - len(own):
            found.append((0.5 + win - (wins[longer] - sum(own)) / others, question))
    return found


async def prmbench(data: Path) -> list[str]:
    """Pairs by the embedded model, its controls, and the panel with the calculator."""
    every, dropped = embedded.pairs_in(data)
    rows = embedded.Rows()
    kept, blind = (embedded.Kept(rows, context=context) for context in (True, False))
    pairs = [
        pair
        for pair in every
        if all(embedded.kept_key(k.name, pair.request) in rows.rows for k in (kept, blind))
    ]
    if not pairs:
        return []
    context = await judge_pairs(pairs, judge=kept)
    alone = await judge_pairs(pairs, judge=blind)
    shorter = await judge_pairs(pairs, judge=ShorterJudge())
    calculator = await judge_pairs(pairs, judge=CalculatorJudge())
    panel = await judge_pairs(pairs, judge=PanelJudge([CalculatorJudge(), kept]))
    out = [
        ("embedded", pair_accuracy(pairs, context), ""),
        (
            "control: without question and prefix",
            pair_accuracy(pairs, alone),
            gain(pairs, context, alone),
        ),
        ("control: the shorter wins", pair_accuracy(pairs, shorter), gain(pairs, context, shorter)),
        ("calculator (undecided left out)", pair_accuracy(pairs, calculator), ""),
        ("panel of both", pair_accuracy(pairs, panel), gain(pairs, context, panel)),
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
    lines += MISSED.read_text(encoding="utf-8").split("\n") if MISSED.is_file() else []
    lines += await arithmetic(config.data)
    lines += await gsm8k(config.data)
    lines += await prmbench(config.data)
    lines += SPEED.read_text(encoding="utf-8").split("\n") if SPEED.is_file() else []
    text = "\n".join(lines).rstrip() + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    config = tyro.cli(Faith)
    if config.speed:
        speed.measure(config.data, SPEED)
    asyncio.run(main(config))
