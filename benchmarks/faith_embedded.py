"""The expensive part of benchmarks/faith.py: the embedded model over labelled data, resumable.

    python benchmarks/faith_embedded.py --data FOLDER --seconds 600

Appends one JSON line per verdict to docs/results/faith/embedded.jsonl, keyed as a run's journal is
(judge, request, repeat), and asks nothing that is there. The lines hold keys and probabilities,
none of the data.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
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
from planaria.faithfulness.judges.protocol import Judge, Request, Verdict, abstain, decide, tie
from planaria.faithfulness.meta import Pair, judge_pairs, pairs_of
from planaria.faithfulness.perturb import RulePerturber
from planaria.faithfulness.readers import read_chains
from planaria.faithfulness.scores import ChainScore, Settings
from planaria.faithfulness.store import request_key

RAW = Path(__file__).resolve().parent.parent / "docs" / "results" / "faith" / "embedded.jsonl"
SETTINGS = Settings(splits=1, horizon=1)
"""What can be afforded on a CPU: one split a chain, the next step only."""


@dataclass(frozen=True)
class Embedded:
    """What to measure."""

    data: Path
    """Folder with the labelled data."""
    questions: int = 400
    """GSM8K questions (four chains each) beside all of mistake_arithmetic and all PRMBench pairs."""
    seconds: float = 1e9
    """Stop after so long; a later call goes on."""


class MissingError(Exception):
    """A verdict is not in the file, and no model is there to ask."""


def kept_key(name: str, request: Request) -> str:
    """The key of a row: twelve digits are enough for two thousand of them."""
    return request_key(name, request)[:12]


class Rows:
    """Lines by key in a file that only grows; a line that was cut is left out."""

    def __init__(self, path: Path = RAW) -> None:
        self.path = path
        self.rows: dict[str, Any] = {}
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            self.rows[row["k"]] = row["p"]

    def put(self, key: str, value: Any) -> None:
        """One line, flushed."""
        self.rows[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"k": key, "p": value}, separators=(",", ":")) + "\n")


class Kept:
    """The likelihood judge, from the file; what is missing is asked of the model, if there is one.

    ``context`` off is the control that sees the continuations alone.
    """

    order_matters = False
    samples = False

    def __init__(self, rows: Rows, *, scorer: Scorer | None = None, context: bool = True) -> None:
        settings = LikelihoodSettings(context=context)
        self.rows, self.scorer = rows, scorer
        self.judge = LikelihoodJudge(scorer, name=NAME, settings=settings)  # type: ignore[arg-type]
        self.name, self.answers = self.judge.name, self.judge.answers
        self.later: list[Request] | None = None

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """Verdicts; raises :class:`MissingError` for one that is neither kept nor askable. While
        ``later`` is a list, what is missing is put there instead."""
        keys = [kept_key(self.name, request) for request in requests]
        missing = [i for i, key in enumerate(keys) if key not in self.rows.rows]
        if missing and self.later is not None:
            self.later += [requests[i] for i in missing]
            return [abstain("later") for _ in requests]
        if missing and self.scorer is None:
            raise MissingError(keys[missing[0]])
        for i, verdict in zip(
            missing, await self.judge.ask([requests[i] for i in missing]) if missing else (),
            strict=True,
        ):  # fmt: skip
            self.rows.put(keys[i], None if verdict.p is None else round(verdict.p, 6))
        return [_verdict(self.rows.rows[key]) for key in keys]


def _verdict(p: float | None) -> Verdict:
    if p is None:
        return abstain("kept")
    return tie("kept") if p == 0.5 else decide(p, "kept")


async def kept_score(chain: Chain, judge: Judge) -> ChainScore | None:
    """A chain's score, or None where the model has not been asked all of it."""
    try:
        return await score_chain(chain, judge=judge, perturber=RulePerturber(), settings=SETTINGS)
    except MissingError:
        return None


async def ask_at_once(chains: Sequence[Chain], judge: Kept) -> None:
    """All that scoring these chains would ask, in one batch: what the chains of a question share is
    computed once. No request depends on an earlier verdict."""
    judge.later = []
    for chain in chains:
        await kept_score(chain, judge)
    wanted, judge.later = list(dict.fromkeys(judge.later)), None
    if wanted:
        await judge.ask(wanted)


def pairs_in(data: Path) -> tuple[list[Pair], int]:
    """PRMBench's pairs, and how many were excluded."""
    return pairs_of(read_chains(data / "prmbench_pairs.jsonl").chains)


async def measure(config: Embedded) -> None:
    """What is missing, the data sets by turns, each in an order drawn once: whatever was reached
    when the time is up is a random part."""
    until = time.monotonic() + config.seconds
    scorer = local_scorer(embedded_folder())
    rows = Rows()
    judges = [Kept(rows, scorer=scorer, context=context) for context in (True, False)]
    pairs, _ = pairs_in(config.data)
    mistakes = list(read_chains(config.data / "mistake_arithmetic.jsonl").chains)
    graded = read_chains(config.data / "gsm8k_graded_chains.jsonl").chains
    questions = sorted({chain.question_id for chain in graded})
    for some in (pairs, mistakes, questions):
        random.Random(0).shuffle(some)
    pairs = [p for p in pairs if any(kept_key(j.name, p.request) not in rows.rows for j in judges)]
    by_question = {q: [c for c in graded if c.question_id == q] for q in questions}
    turns = itertools.zip_longest(pairs, mistakes, questions[: config.questions])
    for pair, mistake, question in turns:
        if time.monotonic() > until:
            break
        if pair is not None:
            for judge in judges:
                await judge_pairs([pair], judge=judge)
        if mistake is not None:
            await ask_at_once([mistake], judges[0])
        await ask_at_once(by_question.get(question or "", ()), judges[0])


if __name__ == "__main__":
    asyncio.run(measure(tyro.cli(Embedded)))
