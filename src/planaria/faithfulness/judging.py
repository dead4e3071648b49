"""Who judges, how, and for how much: the options that all commands share, and what they name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.errors import ConfigError
from planaria.faithfulness import prices
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.calculator import CalculatorJudge
from planaria.faithfulness.judges.models import closing
from planaria.faithfulness.judges.panel import PanelJudge
from planaria.faithfulness.judges.protocol import Compare, Judge, Supports, Verify
from planaria.faithfulness.perturb import Perturber, RulePerturber
from planaria.faithfulness.run import (
    Estimate,
    Outline,
    Report,
    Tick,
    counted,
    estimate_cost,
    score_chains,
)
from planaria.faithfulness.scores import Settings
from planaria.faithfulness.store import Limits, Spending

Note = Callable[[str], object]


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
    timeout: int = 120
    """Seconds for one request to a model, its retries included."""
    max_retries: int = 5
    """Tries after the first one, when a provider limits the rate or is out of order."""
    seed: int = 0
    """Of splits, perturbations and resampling."""
    limit: int = 0
    """Only the first so many questions; 0 takes all."""
    dry_run: bool = False
    """Print calls, tokens and cost, ask nothing."""
    budget_calls: int = 0
    """Stop asking after so many calls; 0 means no limit."""
    budget_tokens: int = 0
    """Stop asking after so many tokens."""
    budget: float = 0.0
    """Stop asking after so many US dollars; needs --prices."""
    prices: Path | None = None
    """YAML or JSON: model to dollars per million tokens of input and output."""
    connections: int = 64
    """Requests to a model at the same time, and chains scored at the same time."""

    def __post_init__(self) -> None:
        self.settings()
        _known_preset(self)
        whole = ("limit", "max_retries", "budget_calls", "budget_tokens")
        for name, low in (*((name, 0) for name in whole), ("connections", 1), ("timeout", 1)):
            if getattr(self, name) < low:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: give a number from {low} "
                    "on"
                )
        for name, high in (("budget", math.inf), ("temperature", 2.0)):
            if not 0 <= getattr(self, name) <= high:
                raise ConfigError(
                    f"--{name} is {getattr(self, name)}: give a number from 0 "
                    + ("on" if high == math.inf else f"to {high:g}")
                )
        if not all(part.strip() for part in (*self.judge.split("+"), self.perturber)):
            raise ConfigError(
                f"--judge {self.judge!r} with --perturber {self.perturber!r} has an empty name: use "
                "calculator, embedded, likelihood:FOLDER, an Inspect model, or several joined by +"
            )

    def settings(self) -> Settings:
        """What the estimator is told."""
        return Settings(
            splits=self.splits,
            trials=self.trials,
            horizon=self.horizon,
            half_width=self.half_width,
            seed=self.seed,
        )

    def spending(self, *models: str) -> Spending:
        """What may be spent on the judge, the perturber and further ``models``.

        Prices are registered with Inspect. Raises :class:`~planaria.errors.ConfigError` for a
        budget in dollars that includes a model without a price: it would never be used up.
        """
        names = [*self.judge.split("+"), self.perturber, *models]
        if self.prices is not None:
            prices.register(self.prices)
        if self.budget:
            for name in filter(is_model, names):
                if prices.price_of(name) is None:
                    raise ConfigError(
                        f"--budget is in dollars and {name} has no price: give it in a file with "
                        f"--prices ({prices.EXAMPLE}), or use --budget-calls or --budget-tokens"
                    )
        limits = Limits(calls=self.budget_calls, tokens=self.budget_tokens, money=self.budget)
        return Spending(limits, connections=self.connections)


def is_model(name: str) -> bool:
    """Whether a name of a judge, perturber or model goes to Inspect."""
    return name not in ("", "calculator", "embedded", "rules") and not name.startswith(
        "likelihood:"
    )


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
            settings = ModelSettings(
                temperature=options.temperature,
                logprobs=options.logprobs,
                timeout=options.timeout,
                max_retries=options.max_retries,
            )
            model = model_named(
                part, connections=options.connections, temperature=options.temperature
            )
            members.append(InspectJudge(model, settings=settings))
    return members[0] if len(members) == 1 else PanelJudge(members)


def perturber_named(*, judging: Judging) -> Perturber:
    """The perturber. Raises :class:`~planaria.errors.ConfigError` when it is the judge."""
    name = judging.perturber
    if name == "rules":
        return RulePerturber()
    if name in judging.judge.split("+"):
        raise ConfigError(
            f"{name} is both judge and perturber: what it writes and what it likes would go "
            "together; use --perturber rules or another model"
        )
    from planaria.faithfulness.judges.models import ModelPerturber, ModelSettings, model_named

    settings = ModelSettings(
        temperature=judging.temperature,
        max_tokens=1024,
        timeout=judging.timeout,
        max_retries=judging.max_retries,
    )
    model = model_named(name, connections=judging.connections, temperature=judging.temperature)
    return ModelPerturber(model, settings=settings)


async def scored(
    chains: Sequence[Chain],
    judging: Judging,
    *,
    out: Path | None,
    note: Note,
    judge: Judge | None = None,
    spending: Spending | None = None,
) -> Report:
    """Score chains as the options say; ``judge`` where it is there already, and then left open."""
    spending = spending or judging.spending()
    mine = judge_named(judging.judge, judging=judging) if judge is None else None
    judge = judge or mine
    assert judge is not None
    perturber = None if judging.preset == "released" else perturber_named(judging=judging)
    every = max(1, len(chains) // 20)
    said = time.monotonic()

    def progress(tick: Tick) -> None:
        nonlocal said
        now = time.monotonic()
        if tick.done == tick.total or (tick.done % every == 0 and now - said > 1):
            said = now
            note(tick.line())

    async with closing(mine, perturber):
        if perturber is None:
            from planaria.faithfulness.released import released_report

            return await released_report(
                chains,
                judge=judge,
                settings=judging.settings(),
                out=out,
                spending=spending,
                concurrency=judging.connections,
                progress=progress,
            )
        return await score_chains(
            chains,
            judge=judge,
            perturber=perturber,
            settings=judging.settings(),
            spending=spending,
            out=out,
            concurrency=judging.connections,
            progress=progress,
        )


def _known_preset(judging: Judging) -> None:
    if judging.preset not in ("default", "released"):
        raise ConfigError(f"unknown preset {judging.preset!r}: choose default or released")


def outline_of(name: str) -> Outline:
    """What can be said of a judge's calls from its name alone: no key, no weights."""
    model = is_model(name)
    return Outline(
        name=name,
        answers=frozenset({Compare, Verify, Supports} if model else {Compare, Supports}),
        order_matters=model,
        samples=model,
        concurrent=model,
    )


async def dry(
    chains: Sequence[Chain], judging: Judging, *, before: Estimate | None = None, model: str = ""
) -> list[str]:
    """What scoring would cost at most, as lines; ``before`` is what sampling from ``model`` would.

    Nothing is asked and nothing is loaded.
    """
    judging.spending(model)
    total = before or Estimate(calls=0, input_tokens=0, output_tokens=0, money=0.0)
    for name in judging.judge.split("+"):
        if name == "calculator":
            continue
        price = prices.price_of(name) if is_model(name) else (0.0, 0.0)
        if judging.preset == "released":
            from planaria.faithfulness.released import released_estimate

            total += released_estimate(chains, prices=price)
            continue
        total += await estimate_cost(
            chains,
            judge=outline_of(name),
            perturber=RulePerturber(),
            settings=judging.settings(),
            prices=price,
        )
    if is_model(judging.perturber) and judging.preset == "default":
        silent = Outline(name="none", answers=frozenset({Compare}), asked=False)
        total += await estimate_cost(
            chains,
            judge=silent,
            perturber=outline_of(judging.perturber),
            settings=judging.settings(),
            prices=prices.price_of(judging.perturber),
        )
    money = (
        "unknown: give --prices, a file of dollars per million tokens"
        if total.money is None
        else f"${total.money:.2f}"
    )
    return [
        f"{counted(len(chains), 'chain')} would ask at most {counted(total.calls, 'call')}",
        f"about {total.input_tokens} input and {total.output_tokens} output tokens",
        f"cost: {money}",
    ]


__all__ = [
    "Judging",
    "Note",
    "dry",
    "is_model",
    "judge_named",
    "outline_of",
    "perturber_named",
    "scored",
]
