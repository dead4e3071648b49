"""Chains sampled from a model through Inspect, kept in the run's journal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planaria.errors import ConfigError
from planaria.faithfulness import prompts
from planaria.faithfulness.chains import KEY_DIGITS, Chain, Question, digest, sound
from planaria.faithfulness.formats import from_completion
from planaria.faithfulness.judges.models import (
    ModelSettings,
    ask_model,
    failure,
    usage_of,
    written,
)
from planaria.faithfulness.store import Journal, Spending

if TYPE_CHECKING:
    from inspect_ai.model import Model


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Chains of some questions."""

    chains: tuple[Chain, ...]
    """By question, then by number."""
    failures: tuple[str, ...]
    """Why chains are missing, one line each."""
    certainties: dict[str, float]
    """Mean log-probability of a chain's tokens by chain id, where the provider gave them."""


async def sample_chains(
    questions: Sequence[Question],
    *,
    model: Model,
    n: int,
    settings: ModelSettings,
    journal: Journal,
    spending: Spending,
) -> Sampled:
    """``n`` chains for each question; what the journal has is not sampled again.

    Longer than sixty lines: journal, budget, call and reading of one chain stand in one place.

    Raises :class:`~planaria.errors.ConfigError` for several chains at temperature 0, which would
    all be the same.
    """
    if n > 1 and settings.temperature == 0:
        raise ConfigError(
            f"{n} chains at temperature 0 would be {n} times the same chain: raise --temperature "
            "or use -n 1"
        )
    failures: list[str] = []
    certainties: dict[str, float] = {}

    async def one(question: Question, number: int) -> Chain | None:
        name = f"{question.id}/{number}"
        prompt = prompts.sample_prompt(question)
        key = digest("sample", str(model), prompt, repr(settings), str(number), digits=KEY_DIGITS)
        row = journal.get(key)
        if row is None:
            async with spending.turn() as turn:
                if turn.refused is not None:
                    failures.append(f"{name}: {turn.refused}")
                    return None
                try:
                    output = await ask_model(
                        model, prompt, settings=settings, repeat=number, logprobs=settings.logprobs
                    )
                except Exception as error:  # one chain less; the run goes on
                    failures.append(f"{name}: {failure(error)}")
                    return None
                turn.usage = usage_of(output)
            logprobs = output.choices[0].logprobs if output.choices else None
            values = [token.logprob for token in logprobs.content] if logprobs else []
            fresh: dict[str, Any] = {
                "text": sound(written(output)),
                "stop": output.stop_reason,
                "certainty": sum(values) / len(values) if values else None,
            }
            journal.put(key, fresh)
            row = fresh
        if not row["text"].strip():
            failures.append(f"{name}: an empty completion ({row['stop']})")
            return None
        if row["certainty"] is not None:
            certainties[name] = row["certainty"]
        chain = from_completion(question, row["text"], stop_reason=row["stop"], writer=str(model))
        return replace(chain, id=name)

    made = await asyncio.gather(*(one(q, number) for q in questions for number in range(n)))
    chains = tuple(chain for chain in made if chain is not None)
    return Sampled(chains=chains, failures=tuple(failures), certainties=certainties)
