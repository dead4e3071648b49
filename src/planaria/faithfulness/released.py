"""The released code's estimator, faults included: ``preset="released"``.

What github peachch/FACT-E does at 9c485fb, written anew from its behaviour: the same model perturbs
and judges, one split point whatever K says, the original always stands first, only the exact
answers "A" and "Option A" count for it, an unread verdict makes a chain's C 0, and a chain of one
step has F = 0. Prompts are worded by us, so scores of real models are close to the released ones,
not equal. It is here to be compared with, and to reproduce what it gave.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.errors import ConfigError
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.protocol import Judge, Usage, abstain
from planaria.faithfulness.run import Report, report_of, write_json, write_report
from planaria.faithfulness.scores import ChainScore

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


async def released_report(
    chains: Sequence[Chain], *, judge: Judge, seed: int, out: Path | None
) -> Report:
    """A report of released scores, for the command line.

    Raises :class:`~planaria.errors.ConfigError` when the judge is no model: the released code knows
    no other.
    """
    from planaria.faithfulness.judges.models import InspectJudge, ask_model

    if not isinstance(judge, InspectJudge):
        raise ConfigError(
            f"--preset released needs a model as judge, not {judge.name}: give an Inspect model, "
            "or use --preset default"
        )
    calls = 0

    async def ask(prompt: str) -> str:
        nonlocal calls
        calls += 1
        try:
            output = await ask_model(judge.model, prompt, settings=judge.settings, repeat=calls)
        except Exception:  # the released code goes on with an empty text
            return ""
        return output.completion.strip()

    rng = random.Random(seed)
    scores: list[ChainScore] = []
    for chain in chains:
        made = await released_score(chain, ask=ask, rng=rng)
        scores.append(
            ChainScore(
                chain=chain,
                consistency=made.consistency,
                win_rate=made.faithfulness,
                faithfulness=made.faithfulness,
                supports=(abstain("the released preset keeps no verdicts"),),
                notes=("scored as the released code does, faults included",),
            )
        )
    report = report_of(scores, Usage(calls=calls))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(
            out / "config.json",
            {"judge": judge.name, "perturber": judge.name, "preset": "released", "seed": seed},
        )
        write_report(report, out)
    return report
