"""The expensive part of benchmarks/faith.py: the embedded model over labelled data, resumable.

    python benchmarks/faith_embedded.py --data FOLDER --questions 40

Appends one JSON line per pair or chain to docs/results/faith/*.jsonl and skips those that are
there. The lines hold ids and numbers, none of the data.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from planaria.faithfulness.chains import Chain
from planaria.faithfulness.estimate import score_chain
from planaria.faithfulness.judges.embedded import NAME, embedded_folder, local_scorer
from planaria.faithfulness.judges.likelihood import (
    LikelihoodJudge,
    LikelihoodSettings,
    Scorer,
)
from planaria.faithfulness.meta import Pair, pairs_of
from planaria.faithfulness.perturb import Kind, RulePerturber
from planaria.faithfulness.readers import read_chains
from planaria.faithfulness.scores import ChainScore, Settings

RAW = Path(__file__).resolve().parent.parent / "docs" / "results" / "faith"
PAIRS = RAW / "prmbench.embedded.jsonl"
CHAINS = RAW / "gsm8k.embedded.jsonl"
SETTINGS = Settings(splits=1, horizon=1, verify_steps=False)
"""What can be afforded on a CPU: one split a chain, the next step only."""


@dataclass(frozen=True)
class Embedded:
    """What to measure."""

    data: Path
    """Folder with the labelled data."""
    questions: int = 40
    """GSM8K questions (four chains each) beside all PRMBench pairs."""
    seconds: float = 1e9
    """Stop after so long; a later call goes on."""


def done(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a raw file by id; a line that was cut is left out."""
    rows: dict[str, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["id"]] = row
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """One line, flushed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, separators=(",", ":")) + "\n")


def measure_pair(pair: Pair, scorer: Scorer) -> None:
    """Mean log-probabilities of both continuations, with and without question and prefix."""
    judge = LikelihoodJudge(scorer, name=NAME)
    alone = LikelihoodJudge(scorer, name=NAME, settings=LikelihoodSettings(context=False))
    request = pair.request
    wanted = []
    for reader in (judge, alone):
        pieces = reader.context(request.question, request.prefix)
        wanted += [(pieces, "\n".join(side)) for side in (request.a, request.b)]
    scored = scorer.score(wanted)
    means = [round(one.mean, 5) for one in scored]
    append(
        PAIRS,
        {
            "id": pair.id,
            "question": pair.question_id,
            "kind": pair.kind,
            "context": means[:2],
            "alone": means[2:],
            "tokens": [one.tokens for one in scored[:2]],
            "characters": [sum(map(len, side)) for side in (request.a, request.b)],
        },
    )


def compact(score: ChainScore) -> dict[str, Any]:
    """A chain's score without its text."""
    return {
        "id": score.chain.id,
        "question": score.chain.question_id,
        "c": None if score.consistency is None else round(score.consistency, 5),
        "contrasts": [
            [
                c.split,
                (c.control_of or c.kind).value,
                int(c.kind is Kind.PARAPHRASE),
                c.win,
                c.longer,
            ]
            for c in score.contrasts
        ],
    }


async def measure_chain(chain: Chain, scorer: Scorer) -> None:
    """C and contrasts of one of GSM8K's graded chains."""
    judge = LikelihoodJudge(scorer, name=NAME)
    score = await score_chain(chain, judge=judge, perturber=RulePerturber(), settings=SETTINGS)
    append(CHAINS, compact(score))


async def measure(config: Embedded) -> None:
    """What is missing, pairs and chains by turns, in an order drawn once: whatever was reached when
    the time is up is a random part."""
    until = time.monotonic() + config.seconds
    scorer = local_scorer(embedded_folder())
    pairs, _ = pairs_of(read_chains(config.data / "prmbench_pairs.jsonl").chains)
    random.Random(0).shuffle(pairs)
    known = done(PAIRS)
    pairs = [pair for pair in pairs if pair.id not in known]
    chains = read_chains(config.data / "gsm8k_graded_chains.jsonl").chains
    questions = sorted({chain.question_id for chain in chains})
    random.Random(0).shuffle(questions)
    known = done(CHAINS)
    left = [
        chain
        for question in questions[: config.questions]
        for chain in chains
        if chain.question_id == question and chain.id not in known
    ]
    for pair, chain in itertools.zip_longest(pairs, left):
        if time.monotonic() > until:
            break
        if pair is not None:
            measure_pair(pair, scorer)
        if chain is not None:
            await measure_chain(chain, scorer)


if __name__ == "__main__":
    asyncio.run(measure(tyro.cli(Embedded)))
