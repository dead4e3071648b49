"""One try at a training step: it commits, or it leaves no trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from planaria.errors import AttemptBroken, CommError, NonFiniteLoss, PlanariaError, UserError
from planaria.runtime.tally import flat

if TYPE_CHECKING:
    from planaria.runtime.run import Run


class SkippedStepError(PlanariaError):
    """The loss is not finite and the run was told to skip such steps; swallowed by the attempt."""


class Attempt:
    """A context manager around the body of one training step; made by :meth:`Run.attempts`.

    Inside it a lost peer raises :class:`~planaria.errors.AttemptBroken` at the next boundary; the
    attempt swallows it, and the loop's next turn tries the same step again. Any other exception
    passes, unless a peer was lost meanwhile: then what a broken collective left in the tensors may
    be its cause.
    """

    def __init__(self, run: Run, step: int) -> None:
        self.step = step
        """Number of the step, from 1; step s makes generation s."""
        self.broken = False
        """Set on leaving: a peer was lost, the step will be tried again."""
        self.skipped = False
        """Set on leaving: the loss was not finite, and the state stayed as it was."""
        self._run = run
        self._begun = 0.0
        self._entered = False
        self._samples: list[Any] = []
        self._scalars: dict[str, float] = {}

    def __enter__(self) -> Attempt:
        self._entered = True
        self._begun = time.perf_counter()
        # Nothing swallows what is raised here. The body is left at its first boundary instead, or at
        # its end.
        with contextlib.suppress(AttemptBroken, CommError):
            self._run._begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._run._leave()
        if error is not None and not isinstance(error, Exception):
            return False
        if isinstance(error, SkippedStepError):
            self.skipped = True
            error = None
        try:
            if error is None:
                self._run._end(self, seconds=time.perf_counter() - self._begun)
                return True
        except (AttemptBroken, CommError):
            self.broken = True
            return True
        if isinstance(error, AttemptBroken | CommError) or self._run._is_broken():
            self.broken = True
            return True
        return False

    def check(self) -> None:
        """A boundary of your own, for example between micro-batches: raises ``AttemptBroken``.

        Root modules' forwards and optimizers' steps are boundaries without it.
        """
        self._run._check()

    def consumed(self, ids: Iterable[Any]) -> None:
        """Say which samples this step has used: numbers or strings, or a tensor or array of them.

        They make the run's ``samples_digest`` and are named when the loss is not finite.
        """
        self._samples.extend(flat(ids))

    def log(self, **values: float | torch.Tensor) -> None:
        """Named numbers of this step; those of shard 0 are told once the step is committed."""
        for name, value in values.items():
            self._scalars[name] = _number(value)

    def finite(self, *scalars: torch.Tensor | float) -> None:
        """Have all workers agree that ``scalars`` are finite on each; call before the optimizer.

        A collective over the default group. Where one is not, the run stops on all workers with
        :class:`~planaria.errors.NonFiniteLoss`, or, with ``on_nonfinite="skip"``, the step counts
        without changing the model: the rest of the attempt's body is left out.

        Raises:
            UserError: an optimizer has stepped in this attempt: too late to leave no trace.
        """
        run = self._run
        if run._dirty:
            raise UserError(
                f"attempt.finite() was called after an optimizer's step (step {self.step}): "
                "call it between backward and optimizer.step()"
            )
        values = [_number(value) for value in scalars]
        own = all(value == value and abs(value) != float("inf") for value in values)
        verdicts = run._agree(own)
        if all(verdicts):
            return
        bad = [shard for shard, good in enumerate(verdicts) if not good]
        if run.on_nonfinite == "skip":
            raise SkippedStepError(f"step {self.step} was skipped: not finite on shards {bad}")
        mine = f"; here it is {values}, from samples {_short(self._samples)}" if not own else ""
        raise NonFiniteLoss(
            f"the loss of step {self.step} is not finite on shard{'s' if len(bad) > 1 else ''} "
            f"{', '.join(map(str, bad))}{mine}; generation {self.step - 1} is the last committed "
            "one: lower the learning rate, look at those samples, or run with on_nonfinite=skip"
        )


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def agree(own: bool, *, world: int) -> list[bool]:
    """What every shard says, by shard: one small collective over the default group."""
    if world == 1:
        return [own]
    votes_W = torch.zeros(world, dtype=torch.int32)
    votes_W[dist.get_rank()] = int(own)
    dist.all_reduce(votes_W)
    return [bool(vote) for vote in votes_W.tolist()]


def _short(samples: list[Any]) -> str:
    text = ", ".join(map(str, samples[:8]))
    return f"{text}, … ({len(samples)})" if len(samples) > 8 else text or "that were not named"
