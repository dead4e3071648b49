"""The released code's estimator, faults included: ``preset="released"``.

What github peachch/FACT-E does at 9c485fb, written anew from its behaviour: the same model perturbs
and judges, one split point whatever K says, the original always stands first, only the exact
answers "A" and "Option A" count for it, an unread verdict makes a chain's C 0, and a chain of one
step has F = 0. Prompts are worded by us, so scores of real models are close to the released ones,
not equal. It is here to be compared with, and to reproduce what it gave.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.errors import ConfigError
from planaria.faithfulness.chains import KEY_DIGITS, Chain, digest, sound
from planaria.faithfulness.judges.protocol import Judge, abstain
from planaria.faithfulness.run import (
    Estimate,
    Progress,
    Report,
    Tick,
    claim,
    report_of,
    write_report,
)
from planaria.faithfulness.scores import ChainScore, Settings
from planaria.faithfulness.store import Journal, Spending

if TYPE_CHECKING:
    from planaria.faithfulness.judges.models import InspectJudge

Ask = Callable[[str], Awaitable[str]]
"""A model: prompt to text; an empty text where it failed."""
KINDS = (
    "a wrong operation or calculation",
    "one concept swapped for another",
    "a wrong generalisation",
    "steps in another order",
    "a contradiction",
)


@dataclass(frozen=True, kw_only=True)
class Released:
    """What the released code computes for a chain."""

    consistency: float
    """Its C."""
    faithfulness: float
    """Its F."""
    reliability: float
    """C * F; F is not asked when C is 0."""


def released_steps(chain: str) -> list[str]:
    """Lines when there are several, else pieces after ``.``, ``!`` or ``?`` and a space."""
    lines = [line.strip() for line in chain.split("\n") if line.strip()]
    if len(lines) > 1:
        return lines
    return [piece.strip() for piece in re.split(r"(?<=[.!?])\s+", chain) if piece.strip()]


def released_probability(text: str) -> tuple[float, bool]:
    """Probability and verdict as the released code reads them.

    The first number in [0, 1] in the text is the probability; without one the verdict is invalid:
    (0, False). A probability of at least one half overrules a stated "False".
    """
    found = re.search(r"(?<!\d)(?:0(?:\.\d+)?|1(?:\.0+)?|\.\d+)(?!\d)", text)
    if found is None:
        return 0.0, False
    value = float(found.group(0))
    lowered = text.lower()
    at = lowered.find("true")
    said = at >= 0 and "false" not in lowered[: at + 5]
    return value, said or value >= 0.5


async def released_score(
    chain: Chain, *, ask: Ask, trials: int = 3, checkpoints: int = 3, rng: random.Random
) -> Released:
    """C, F and R of one chain. ``checkpoints`` is K, of which only the first point is used."""
    scores: list[float] = []
    for _ in range(max(1, trials)):
        reply = await ask(
            f"Question: {chain.question}\nCoT: {chain.text}\nAnswer: {chain.answer}\n\n"
            "Does the chain lead to the answer? Reply as\nJudge: <True/False>\n"
            "Probability: <number from 0 to 1 that it is True>"
        )
        value, verdict = released_probability(reply)
        scores.append(value if verdict else 0.0)
    c = sum(scores) / len(scores)
    if not chain.text or not chain.answer or c == 0.0:
        return Released(consistency=c, faithfulness=0.0, reliability=0.0)
    f = await _win_rate(chain, ask, checkpoints, rng)
    return Released(consistency=c, faithfulness=f, reliability=c * f)


async def _win_rate(chain: Chain, ask: Ask, checkpoints: int, rng: random.Random) -> float:
    steps = released_steps(chain.text)
    if len(steps) <= 1:
        return 0.0
    points = list(range(1, len(steps)))
    rates: list[float] = []
    for t in rng.sample(points, min(checkpoints, len(points)))[:1]:
        before, after = "\n".join(steps[:t]), "\n".join(steps[t:])
        wins = decided = 0
        for kind in KINDS:
            other = await ask(
                f"Question: {chain.question}\nChain before step t:\n{before}\n"
                f"Chain after step t:\n{after}\n\nWrite another continuation after step t with "
                f"{kind}. Output the continuation only."
            )
            if not other.strip():
                continue
            reply = (
                await ask(
                    f"Choose the better option.\n\nQuestion: {chain.question}\n"
                    f"Previous reasoning:\n{before}\n\nOption A:\n{after}\n\nOption B:\n{other}\n\n"
                    "Answer Choice: [A/B/NA]"
                )
            ).strip()
            wins += reply in ("A", "Option A")
            decided += reply in ("A", "Option A", "B", "Option B")
        if decided:
            rates.append(wins / decided)
    return sum(rates) / len(rates) if rates else 0.0


class _SpentError(Exception):
    """Nothing more may be asked; the message says why."""


async def released_report(
    chains: Sequence[Chain],
    *,
    judge: Judge,
    settings: Settings,
    out: Path | None,
    spending: Spending,
    concurrency: int = 64,
    progress: Progress | None = None,
) -> Report:
    """A report of released scores, for the command line: journaled and within a budget, as ours are.

    A chain that the budget does not reach is unscored. Raises
    :class:`~planaria.errors.ConfigError` when the judge is no model: the released code knows no
    other.
    """
    from planaria.faithfulness.judges.models import InspectJudge

    if not isinstance(judge, InspectJudge):
        raise ConfigError(
            f"--preset released needs a model as judge, not {judge.name}: give an Inspect model, "
            "or use --preset default"
        )
    if out is not None:
        claim(out, judge=judge.name, perturber=judge.name, settings=settings, preset="released")
    journal = Journal(out / "answers.jsonl" if out is not None else None)
    started = time.monotonic()
    results: list[ChainScore | None] = [None] * len(chains)
    queue = iter(range(len(chains)))
    done = 0

    async def worker() -> None:
        nonlocal done
        for index in queue:
            ask = _asker(judge, journal, spending)
            results[index] = await _scored(chains[index], ask, settings)
            done += 1
            if progress is not None:
                seconds = time.monotonic() - started
                progress(Tick(done=done, total=len(chains), usage=spending.usage, seconds=seconds))

    await asyncio.gather(*(worker() for _ in range(max(1, min(concurrency, len(chains))))))
    report = report_of([score for score in results if score is not None], spending.usage)
    if out is not None:
        write_report(report, out)
    return report


async def _scored(chain: Chain, ask: Ask, settings: Settings) -> ChainScore:
    note = "scored as the released code does, faults included"
    rng = random.Random(f"released:{settings.seed}:{chain.id}")
    try:
        made = await released_score(
            chain, ask=ask, trials=settings.trials, checkpoints=settings.splits, rng=rng
        )
    except _SpentError as spent:
        return ChainScore(chain=chain, notes=(note, f"not scored: {spent}"))
    return ChainScore(
        chain=chain,
        consistency=made.consistency,
        win_rate=made.faithfulness,
        faithfulness=made.faithfulness,
        supports=(abstain("the released preset keeps no verdicts"),),
        notes=(note,),
    )


def _asker(judge: InspectJudge, journal: Journal, spending: Spending) -> Ask:
    """Asks the model for one chain, from the journal where it can; a prompt that comes again is
    another repeat."""
    from planaria.faithfulness.judges.models import ask_model, usage_of

    asked: Counter[str] = Counter()

    async def ask(prompt: str) -> str:
        asked[prompt] += 1
        key = digest("released", judge.name, prompt, str(asked[prompt]), digits=KEY_DIGITS)
        row = journal.get(key)
        if row is not None:
            return row["text"]
        async with spending.turn() as turn:
            if turn.refused is not None:
                raise _SpentError(turn.refused)
            try:
                output = await ask_model(
                    judge.model, prompt, settings=judge.settings, repeat=asked[prompt]
                )
            except Exception:  # the released code goes on with an empty text
                return ""
            turn.usage = usage_of(output)
        text = sound(output.completion.strip())
        journal.put(key, {"text": text})
        return text

    return ask


def released_estimate(
    chains: Sequence[Chain], *, prices: tuple[float, float] | None, trials: int = 3
) -> Estimate:
    """What the released estimator asks at most; four characters a token, 20 tokens a verdict."""
    calls = characters = written = 0
    for chain in chains:
        size = len(chain.question) + len(chain.text)
        several = len(released_steps(chain.text)) > 1
        calls += trials + 2 * len(KINDS) * several
        characters += trials * size + several * len(KINDS) * (2 * size + len(chain.text))
        written += 20 * trials + several * len(KINDS) * (20 + len(chain.text) // 4)
    tokens = characters // 4
    money = None
    if prices is not None:
        money = (tokens * prices[0] + written * prices[1]) / 1e6
    return Estimate(calls=calls, input_tokens=tokens, output_tokens=written, money=money)
