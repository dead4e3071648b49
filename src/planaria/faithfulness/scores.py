"""What scoring is told and what it gives: settings, contrasts, scores of steps and chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planaria.errors import ConfigError
from planaria.faithfulness.chains import Chain
from planaria.faithfulness.judges.protocol import Usage, Verdict
from planaria.faithfulness.perturb import ERRORS, Change, Kind


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How chains are scored. The defaults are ours; :mod:`~planaria.faithfulness.released` has the
    released code's behaviour."""

    trials: int = 3
    """Calls per chain for C where the judge's answers vary (T; released code: 3)."""
    splits: int = 3
    """Split points per chain (K; released code means 3 and uses 1)."""
    kinds: tuple[Kind, ...] = ERRORS
    """Kinds of error."""
    horizon: int = 0
    """Steps of each continuation that are compared; 0 compares all that follow."""
    null: bool = True
    """Ask about a paraphrase beside each error."""
    verify_steps: bool = True
    """Ask about each step, where the judge answers that."""
    half_width: float = 0.0
    """Stop a chain when the confidence sequence of its win rate is this narrow; 0 asks about every
    contrast."""
    least: int = 6
    """Contrasts decided before a chain may be stopped."""
    seed: int = 0
    """Seed of split points, perturbations and the order of contrasts."""

    def __post_init__(self) -> None:
        for name, low in (("trials", 1), ("splits", 1), ("horizon", 0), ("least", 1)):
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: give a whole number from {low} on"
                )
        if not self.kinds or Kind.PARAPHRASE in self.kinds:
            raise ConfigError(
                "kinds must name at least one error and not 'paraphrase': null=True asks for the "
                "null control"
            )
        if not 0 <= self.half_width < 0.5:
            raise ConfigError(
                f"half_width is {self.half_width}: give a number from 0 (off) to below 0.5"
            )


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One comparison of a continuation with an alternative."""

    split: int
    """Steps before the continuation."""
    kind: Kind
    """Kind of the alternative."""
    control_of: Kind | None = None
    """For a paraphrase: the kind of error that it controls for."""
    alternative: tuple[str, ...] = ()
    """The alternative's steps; empty when none could be made."""
    changes: tuple[Change, ...] = ()
    """What was changed."""
    verdicts: tuple[Verdict, ...] = ()
    """One verdict per order asked, ``p`` for the original."""
    win: float | None = None
    """1 where the original was taken, 0 where the alternative was, 0.5 where the orders disagree;
    None where it is not decided."""
    longer: int = 0
    """Sign of the alternative's length minus the original's."""
    reason: str = ""
    """Why there is no alternative or no decision."""


@dataclass(frozen=True, kw_only=True)
class StepScore:
    """What is known about one step."""

    p: float | None = None
    """Probability that it is right, by ``verify``; None when the judge abstained or does not
    answer."""
    outcome: str = "not asked"
    """The verdict's outcome."""
    reason: str = ""
    """The judge's reason."""
    win_rate: float | None = None
    """Win rate of the contrasts whose continuation begins at this step."""


@dataclass(frozen=True, kw_only=True)
class ChainScore:
    """The scores of one chain. A score that could not be had is None, never 0."""

    chain: Chain
    """The chain."""
    consistency: float | None = None
    """C: mean probability that the chain leads to its answer; a verdict "does not" counts 0."""
    win_rate: float | None = None
    """F before correction: mean over splits of wins / decided."""
    null_rate: float | None = None
    """The same against paraphrases of this chain."""
    faithfulness: float | None = None
    """F* = clip(0.5 + F - null, 0, 1); set by :func:`correct`."""
    low: float = 0.0
    """Lower end of the 95 % interval of ``win_rate`` over splits, kinds and orders; where sampling
    was adaptive, of the confidence sequence that it was stopped by."""
    high: float = 1.0
    """Upper end."""
    steps: tuple[StepScore, ...] = ()
    """One score per step."""
    contrasts: tuple[Contrast, ...] = ()
    """Every comparison."""
    supports: tuple[Verdict, ...] = ()
    """Every verdict on the answer."""
    counts: dict[str, int] = field(default_factory=dict)
    """Verdicts by question and outcome, such as ``compare.tie``."""
    usage: Usage = field(default_factory=Usage)
    """What it cost."""
    notes: tuple[str, ...] = ()
    """What had to be assumed or left out, one sentence each."""

    @property
    def reliability(self) -> float | None:
        """R = C * F*. Where one of the two is unknown 0.5 stands for it; None where both are."""
        if self.consistency is None and self.faithfulness is None:
            return None
        c = 0.5 if self.consistency is None else self.consistency
        f = 0.5 if self.faithfulness is None else self.faithfulness
        return c * f

    @property
    def breaks_at(self) -> int | None:
        """0-based index of the first step that ``verify`` holds for wrong (p < 0.5)."""
        for index, step in enumerate(self.steps):
            if step.p is not None and step.p < 0.5:
                return index
        return None

    @property
    def flaw(self) -> float | None:
        """Score for "some step is wrong": 1 minus the lowest step probability; None when no step
        was judged."""
        judged = [step.p for step in self.steps if step.p is not None]
        return 1.0 - min(judged) if judged else None


def win_rate(contrasts: Sequence[Contrast]) -> float | None:
    """Mean over splits of wins / decided; None when nothing is decided."""
    rates: list[float] = []
    for split in sorted({c.split for c in contrasts}):
        wins = [c.win for c in contrasts if c.split == split and c.win is not None]
        if wins:
            rates.append(sum(wins) / len(wins))
    return sum(rates) / len(rates) if rates else None
