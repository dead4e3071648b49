"""Judges and perturbers that are language models, through Inspect.

Inspect brings the providers, their connection limits, retries and cache. Where a provider returns
log-probabilities the verdict's probability is read off them; elsewhere a verdict is sampled, and
repeats are told apart in the cache by their number.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.errors import ConfigError
from planaria.faithfulness import prompts
from planaria.faithfulness.chains import sound
from planaria.faithfulness.judges.protocol import (
    Compare,
    Outcome,
    Request,
    Supports,
    Usage,
    Verdict,
    Verify,
)
from planaria.faithfulness.perturb import Kind, Perturbed, Task, changed_numbers, check, diff
from planaria.faithfulness.segment import segment

if TYPE_CHECKING:
    from inspect_ai.model import Model, ModelOutput


LOCAL = ("hf/", "planaria/")
"""Providers that hold the model in this process."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How a model is asked."""

    temperature: float = 1.0
    """Sampling temperature; at 0 repeats are not asked."""
    max_tokens: int = 256
    """Longest answer, in tokens."""
    logprobs: bool = False
    """Ask for log-probabilities of the verdict's token, where the provider has them."""
    timeout: int = 120
    """Seconds for one request, retries included."""
    max_retries: int = 5
    """Tries after the first one."""
    cache: bool = False
    """Use Inspect's cache, which is shared by all runs of this user. A run's own journal does
    without it."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2 or self.max_tokens < 1 or self.timeout < 1:
            raise ConfigError(
                f"temperature {self.temperature}, max_tokens {self.max_tokens}, timeout "
                f"{self.timeout}: they lie in 0 to 2, from 1 on, from 1 s on"
            )


def usage_of(output: ModelOutput) -> Usage:
    """What a call cost, as Inspect counts it."""
    usage = output.usage
    if usage is None:
        return Usage(calls=1)
    return Usage(
        calls=1,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        money=getattr(usage, "total_cost", None) or 0.0,
    )


def written(output: ModelOutput) -> str:
    """What a model wrote; reasoning that its provider returns apart stands between thinking tags
    before it, or its summary where the provider keeps the reasoning to itself."""
    from inspect_ai.model import ContentReasoning

    content = output.choices[0].message.content if output.choices else ""
    parts = [] if isinstance(content, str) else content
    thoughts = [
        (part.summary or "") if part.redacted else part.reasoning
        for part in parts
        if isinstance(part, ContentReasoning)
    ]
    thinking = "\n".join(thought for thought in thoughts if thought.strip())
    text = output.completion
    return f"<think>{thinking}</think>\n{text}" if thinking else text


async def ask_model(
    model: Model, prompt: str, *, settings: ModelSettings, repeat: int, logprobs: bool = False
) -> ModelOutput:
    """One call. The repeat's number is part of the cache key; errors are never cached."""
    from inspect_ai.model import CachePolicy, ChatMessageUser, GenerateConfig

    config = GenerateConfig(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        timeout=settings.timeout,
        # ``timeout`` is looked at between tries only; this one ends a try that hangs.
        attempt_timeout=settings.timeout,
        max_retries=settings.max_retries,
        logprobs=True if logprobs else None,
        top_logprobs=5 if logprobs else None,
    )
    # The repeat tells answers apart, not the epoch of the task: `inspect score` has none.
    policy = CachePolicy(expiry=None, per_epoch=False, scopes={"trial": str(repeat)})
    return await model.generate(
        [ChatMessageUser(content=prompt)],
        config=config,
        cache=policy if settings.cache else False,
    )


def failure(error: BaseException) -> str:
    """Why no answer came, in one line: the last try's error where there were several."""
    last = getattr(error, "last_attempt", None)
    if last is not None:  # tenacity's RetryError, which only names a future
        error = last.exception() or error
    first = str(error).strip().splitlines() or ["no answer in time"]
    return f"{type(error).__name__}: {first[0][:160]}"


class InspectJudge:
    """A language model that answers all three questions. ``concurrent``: its requests are sent one
    by one, as many at a time as the provider's connection limit allows."""

    answers = frozenset({Compare, Verify, Supports})
    order_matters = True
    concurrent = True

    def __init__(self, model: Model, *, settings: ModelSettings | None = None) -> None:
        self.model = model
        self.settings = settings or ModelSettings()
        s = self.settings
        self.name = f"model/{prompts.VERSION}:{model}:t{s.temperature:g}:n{s.max_tokens}" + (
            ":logprobs" if s.logprobs else ""
        )
        self.samples = s.temperature > 0

    async def ask(self, requests: Sequence[Request]) -> list[Verdict]:
        """One verdict per request, as many at once as the model has connections.

        Inspect would queue the rest itself, but only after it has prepared all of them, and the
        first answers would wait for that.
        """
        slots = asyncio.Semaphore(self.model.config.max_connections or len(requests) or 1)

        async def one(request: Request) -> Verdict:
            async with slots:
                return await self._one(request)

        return list(await asyncio.gather(*map(one, requests)))

    async def _one(self, request: Request) -> Verdict:
        from inspect_ai.util import LimitExceededError

        try:
            output = await ask_model(
                self.model,
                prompts.prompt_of(request),
                settings=self.settings,
                repeat=request.repeat,
                logprobs=self.settings.logprobs,
            )
        except LimitExceededError:
            raise
        except Exception as error:  # a provider may raise anything; the run goes on without it
            return Verdict(outcome=Outcome.FAILED, reason=failure(error))
        return verdict_of(output, request)


def verdict_of(output: ModelOutput, request: Request) -> Verdict:
    """The verdict in a model's output: by log-probabilities when they are there, else by text."""
    usage = usage_of(output)
    text = sound(output.completion.strip())
    if not text:
        why = f"an empty answer ({output.stop_reason})"
        return Verdict(outcome=Outcome.UNPARSED, reason=why, usage=usage)
    read = prompts.read_verdict(text, request)
    if read is None:
        return Verdict(outcome=Outcome.UNPARSED, reason=f"unread: {text[:120]!r}", usage=usage)
    label, p = read
    if label == "neither":
        return Verdict(outcome=Outcome.TIE, p=0.5, reason=text[:200], usage=usage)
    measured = _from_logprobs(output, prompts.LABELS[type(request)][:2], label)
    if measured is not None:
        p, how = measured, "log-probability"
    else:
        how = "verdict"
    return Verdict(outcome=Outcome.DECIDED, p=p, reason=f"{how}: {text[:200]}", usage=usage)


def _from_logprobs(output: ModelOutput, labels: Sequence[str], said: str) -> float | None:
    """Share of the first label among both, at the token that states the verdict."""
    logprobs = output.choices[0].logprobs if output.choices else None
    if logprobs is None:
        return None
    for token in reversed(logprobs.content):
        if token.token.strip().lower() != said.lower():
            continue
        mass = dict.fromkeys((label.lower() for label in labels), 0.0)
        seen = {token.token: token.logprob}
        seen |= {top.token: top.logprob for top in token.top_logprobs or []}
        for text, value in seen.items():
            key = text.strip().lower()
            if key in mass:
                mass[key] += math.exp(value)
        total = sum(mass.values())
        return mass[labels[0].lower()] / total if total else None
    return None


class ModelPerturber:
    """A language model that writes alternatives; each is checked like one made by rules."""

    concurrent = True

    def __init__(self, model: Model, *, settings: ModelSettings | None = None) -> None:
        self.model = model
        self.settings = settings or ModelSettings(max_tokens=1024)
        self.name = f"model/{prompts.VERSION}:{model}:t{self.settings.temperature:g}"

    async def make(self, tasks: Sequence[Task]) -> list[Perturbed]:
        """One alternative per task; None with the reason where the model's is unfit."""
        return list(await asyncio.gather(*(self._one(task) for task in tasks)))

    async def _one(self, task: Task) -> Perturbed:
        from inspect_ai.util import LimitExceededError

        try:
            output = await ask_model(
                self.model,
                prompts.perturb_prompt(task),
                settings=self.settings,
                repeat=task.seed,
            )
        except LimitExceededError:
            raise
        except Exception as error:  # as above: one alternative less
            return Perturbed(steps=None, reason=f"failed: {failure(error)}")
        steps = segment(sound(output.completion), unit="line")
        usage = usage_of(output)
        if not steps:
            return Perturbed(steps=None, reason="the model wrote nothing", usage=usage)
        problem = check(task.continuation, steps)
        if task.kind is Kind.PARAPHRASE and not problem:
            problem = changed_numbers(task.continuation, steps)
        if problem:
            return Perturbed(steps=None, reason=problem, usage=usage)
        return Perturbed(steps=steps, changes=diff(task.continuation, steps), usage=usage)


@asynccontextmanager
async def closing(*actors: object) -> AsyncGenerator[None, None]:
    """Close the connections of judges, perturbers and models at the end, those of a panel's members
    among them. A model in this process has none and stays."""
    try:
        yield
    finally:
        for actor in actors:
            for one in getattr(actor, "members", (actor,)):
                model: Any = getattr(one, "model", one)
                if not str(model).startswith(LOCAL) and hasattr(model, "api"):
                    await model.api.aclose()


def model_named(
    name: str, *, connections: int | None = None, temperature: float = 1.0, **arguments: Any
) -> Model:
    """An Inspect model by name, which takes ``connections`` requests at the same time; a model in
    this process is kept and asked in batches of its provider's size.

    ``embedded`` is the model that comes from PyPI; ``hf/OUT`` takes the model that ``planaria train
    llm`` left in ``OUT``. Raises :class:`~planaria.errors.ConfigError` when Inspect does not know
    the name or the provider's package or key is missing.
    """
    try:
        from inspect_ai.model import GenerateConfig, get_model
    except ImportError as error:
        raise ConfigError(
            f"{name} needs inspect_ai, which is not installed: pip install 'planaria[eval]'"
        ) from error
    if name == "embedded":
        from planaria.faithfulness.judges.embedded import embedded_folder

        name = f"hf/{embedded_folder()}"
    trained = Path(name.removeprefix("hf/"), "model")
    if name.startswith("hf/") and (trained / "config.json").is_file():
        name = f"hf/{trained}"
    local = name.startswith(LOCAL)
    # A client of an API belongs to one event loop, so it is not kept for the next one.
    arguments = {"memoize": local, **arguments}
    if local and temperature == 0:
        arguments.setdefault("do_sample", False)  # transformers refuses to sample at 0
    try:
        config = GenerateConfig(max_connections=None if local else connections)
        return get_model(name, config=config, **arguments)
    except Exception as error:  # providers raise their own kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = re.sub(r"\[/?[a-z ]+\]", "", " ".join(lines[:4]) or type(error).__name__)
        raise ConfigError(
            f"no judge or model {name!r} ({why[:240]}): use calculator, embedded, "
            "likelihood:FOLDER, several joined by +, or an Inspect model such as openai/gpt-4o-mini"
        ) from error
