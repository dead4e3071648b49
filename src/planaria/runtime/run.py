"""What a training script sees: :func:`join`, :class:`Run` and the attempts that it gives.

    import planaria

    def build(shard):
        model = DDP(Net())
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    with planaria.join(build) as run:
        for attempt in run.attempts(until=1000):
            with attempt:
                loss = run.model(batch(attempt.step, run.shard)).mean()
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                attempt.log(loss=loss)

Under ``planaria run`` the worker is a member of a run; without it, the same script trains alone in
its process, or as one of ``torchrun``'s, unprotected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import torch.distributed as dist

from planaria.comm.buckets import ddp_modules
from planaria.comm.domain import Mode
from planaria.errors import AttemptBroken, CommError, ConfigError, RunError, UserError
from planaria.runtime.attempt import Attempt, agree
from planaria.runtime.engine import Engine
from planaria.runtime.launch import worker
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.rng import Rng
from planaria.runtime.messages import Finished, Progress, Ready
from planaria.runtime.tally import SAMPLES, Tally

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONG = ("evaluation", "checkpoint", "compile", "data")
"""Phases that a script may name; each has a limit in :mod:`planaria.runtime.membership.limits`."""


@dataclass(frozen=True)
class Shard:
    """The position that this worker owns, known before ``build`` is called."""

    index: int
    """Linear position on the mesh, which is the rank in the default group."""
    world: int
    """Number of shards of the run."""


def join(
    build: Callable[[Shard], Mapping[str, Any]],
    *,
    max_redo: int = 2,
    on_nonfinite: Literal["stop", "skip"] = "stop",
) -> Run:
    """Join the run as a worker or as a spare; returns when this process owns a shard, ready to train.

    A spare waits inside until it is needed; where the run ends without it, the process ends with
    exit code 0.

    Args:
        build: makes model, optimizer and whatever else has a state, once the shard is known, on the
            default process group, as PyTorch's documentation does; returns them by name. A spare
            calls it too, but alone: collectives give it its own data back, and its state comes from
            peers afterwards. So it must make the same objects on every worker, and must not depend
            on what peers send.
        max_redo: how many steps may have to be done again after a loss, the interrupted one
            included. 1: the end of each step waits until its state is held twice. 2: that overlaps
            with the whole next step. More is treated as 2, since two buffers allow no more.
        on_nonfinite: what :meth:`Attempt.finite` does with a NaN: stop the run, or skip the step.

    Raises:
        ConfigError: an argument is out of range.
        UserError: ``build`` returned something without a state.
        RunError: the run was ended while this process waited.
    """
    if max_redo not in (1, 2):
        raise ConfigError(
            f"max_redo is {max_redo}: give 1 or 2; the interrupted step itself counts"
        )
    if on_nonfinite not in ("stop", "skip"):
        raise ConfigError(f"on_nonfinite is {on_nonfinite!r}: give 'stop' or 'skip'")
    context = worker.context()
    if context is None:
        return _alone(build, on_nonfinite)
    engine = Engine(
        context,
        build=lambda index, world: _checked(build(Shard(index, world))),
        max_redo=max_redo,
    )
    context.member.send(Ready())
    if not engine.take_seat():
        _leave_quietly()
    return Run(
        engine.parts, Shard(engine.shard, engine.world), engine=engine, on_nonfinite=on_nonfinite
    )


def _checked(made: Mapping[str, Any]) -> dict[str, Any]:
    """What ``build`` returned, where its names are free."""
    taken = [name for name in made if hasattr(Run, str(name)) or name == "shard"]
    if taken:
        raise UserError(
            f"build() returned a part named {taken[0]!r}, which is a name of the run itself "
            f"(run.{taken[0]}): rename it"
        )
    return dict(made)


def _leave_quietly() -> NoReturn:
    """The run has ended without this spare."""
    raise SystemExit(0)


def _alone(build: Callable[[Shard], Mapping[str, Any]], on_nonfinite: Any) -> Run:
    """A world of one, or one of ``torchrun``'s workers: nothing is protected."""
    shard = Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if not dist.is_initialized():
        if shard.world > 1:
            dist.init_process_group()
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if shard.world > 1 and shard.index == 0:
        log.warning(
            "started without 'planaria run': a lost worker ends this job; start it with "
            "'planaria run --workers %d --spares 1' to have lost workers replaced",
            shard.world,
        )
    made = _checked(build(shard))
    tally = Tally()
    parts = Parts({**made, SAMPLES: tally}, shard=shard.index, world=shard.world)
    for ddp in ddp_modules(parts.modules).values():
        # Attributes go in the order in which they were set, so the group outlives DDP's reducer. A
        # reducer that is the last to let a gloo group go waits for gloo's thread and holds the
        # interpreter's lock, which that thread needs: plain workers hung at their end (torch 2.13).
        vars(ddp)["kept_group"] = ddp.process_group
    return Run(parts, shard, engine=None, on_nonfinite=on_nonfinite, tally=tally)


class Run:
    """This worker's run; the values of ``build``'s dict are its attributes. Made by :func:`join`."""

    def __init__(
        self,
        parts: Parts,
        shard: Shard,
        *,
        engine: Engine | None,
        on_nonfinite: Literal["stop", "skip"],
        tally: Tally | None = None,
    ) -> None:
        self.shard = shard
        self.on_nonfinite = on_nonfinite
        self._parts = parts
        self._engine = engine
        self._tally = tally if engine is None else engine.tally
        assert self._tally is not None
        self._step = 0
        self._dirty_alone = False
        self._buffers: list[tuple[Any, Any]] = []
        self._inside = False
        self._warned = False
        self._checkpoint_every = 0
        self._ended = False
        self._result: dict[str, float] = {}
        self._values = parts.given

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"the run has no part {name!r}; build() returned {', '.join(map(repr, values)) or 'none'}"
        )

    # ------------------------------------------------------------------ what a loop asks

    @property
    def step(self) -> int:
        """Steps that this worker's state has behind it; 0 before the first, N after a resume."""
        return self._step if self._engine is None else (self._engine.generation or 0)

    @property
    def committed(self) -> int:
        """Newest step whose state is held twice for every shard: it will not be done again."""
        return self._step if self._engine is None else max(0, self._engine.seat.committed)

    def attempts(self, *, until: int, checkpoint_every: int = 0) -> Iterator[Attempt]:
        """Attempts at the steps up to ``until``, each to be used as a context manager.

        A step whose attempt was broken by a lost worker is given again, after the swap. Ends when
        step ``until`` is committed for all shards. ``checkpoint_every``: write a durable checkpoint
        every so many steps, also at ``until`` where it is its turn; 0: only when asked to (SIGTERM).

        Raises:
            ConfigError: a number is below 0.
            RunError: the run was ended (no spare, a crash loop, another worker's error).
        """
        if until < 0 or checkpoint_every < 0:
            raise ConfigError(
                f"until is {until} and checkpoint_every is {checkpoint_every}: give 0 or more"
            )
        self._checkpoint_every = checkpoint_every
        while True:
            try:
                if self.step >= until:
                    self._settle(until)
                    return
                self._may_begin(self.step + 1)
            except (AttemptBroken, CommError):
                self._recover()
                continue
            attempt = Attempt(self, self.step + 1)
            yield attempt
            if not attempt._entered:
                raise UserError(
                    f"the attempt of step {attempt.step} was not used: write 'with attempt:' around "
                    "the body of the loop"
                )
            if attempt.broken:
                self._recover()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Say that what follows takes longer than a step by nature: evaluation, checkpoint, compile.

        The limit after which a worker counts as hung is a longer one inside. ``name`` is evaluation,
        checkpoint, compile or data; another one raises :class:`ConfigError`. Between attempts, what is
        drawn from Python's, NumPy's and torch's own generators inside leaves no trace (except in
        data): it would not be drawn again after a swap.
        """
        if name not in _LONG:
            raise ConfigError(f"phase is {name!r}: give {', '.join(_LONG[:-1])} or {_LONG[-1]}")
        engine = self._engine
        epoch = 0 if engine is None else engine.domain.epoch
        generators = None if self._inside or name == "data" else Rng().state_dict()
        if engine is not None:
            engine.member.send(Progress(epoch=epoch, step=engine.attempting, phase=name))
        try:
            yield
        finally:
            if generators is not None:
                Rng().load_state_dict(generators)
            if engine is not None:
                engine.member.send(Progress(epoch=epoch, step=engine.attempting, phase="step"))

    def on_swap(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on this worker after each swap, before training goes on.

        For objects outside the parts that have spoken to peers once and would not again, such as a
        pipeline schedule: ``run.on_swap(lambda: planaria.comm.pipelines.begin_anew(schedule))``.
        """
        if self._engine is not None:
            self._engine.on_swap.append(callback)

    def final(self, duty: Callable[[], T], **result: float) -> T:
        """Do what is left after the last step (evaluation, export), protected, and end the run.

        ``duty`` may use collectives; all workers call it. Where a worker is lost on the way, it is
        replaced and ``duty`` is called again on all, so it must be able to: write files under
        another name and rename them. Returns what it returned, once the whole run is over.
        ``result``: numbers for ``summary.json``.
        """
        self._result = dict(result)
        engine = self._engine
        if engine is None:
            self._ended = True
            return duty()
        reached = engine.generation or 0
        while True:
            try:
                self._check()
                # Again, where a loss has cut it off: a new owner has come by attempts() to here.
                engine.finish_steps(due=self._due)
                # A long evaluation or export is no hang.
                with self.phase("checkpoint"):
                    value = duty()
                engine.domain_check()
                engine.tell()
                engine.settle()
                if self._finish():
                    self._ended = True
                    return value
            except (AttemptBroken, CommError):
                pass
            except Exception:
                if not self._is_broken():
                    raise
            self._recover()
            if (engine.generation or 0) < reached:
                raise RunError(
                    f"the run went back to generation {engine.generation} while it was finishing at "
                    f"{reached}, since copies were lost: start it again, it goes on from there"
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._ended:
                self.final(lambda: None)
        finally:
            if self._engine is not None:
                self._engine.close()
            if dist.is_initialized():
                dist.destroy_process_group()

    # ------------------------------------------------------------------ what an attempt asks

    @property
    def _dirty(self) -> bool:
        """Whether an optimizer has stepped; without one of torch's nobody can tell."""
        known = bool(self._parts.optimizers)
        return known and self._engine is not None and self._engine.dirty

    def _agree(self, own: bool) -> list[bool]:
        return agree(own, world=self.shard.world)

    def _is_broken(self) -> bool:
        return self._engine is not None and self._engine.domain.mode is Mode.BROKEN

    def _check(self) -> None:
        if self._engine is not None:
            self._engine.domain_check()

    def _begin(self, attempt: Attempt) -> None:
        self._inside = True
        if self.on_nonfinite == "skip":
            self._buffers = [
                (buffer, buffer.detach().clone())
                for module in self._parts.modules.values()
                for buffer in module.buffers()
            ]
        engine = self._engine
        if engine is None:
            return
        engine.attempting = attempt.step
        engine.waited, engine.waiting = engine.waiting, 0.0
        if not self._parts.optimizers:
            engine.untouched = False
            # Without an optimizer of torch's nobody tells when the state begins to change.
            engine.dirty = True
            engine.before_change()
        engine.domain_check()
        if not self._warned and engine.drew:
            self._warned = True
            log.warning(
                "random numbers were drawn from the process's own generators before the attempt of "
                "step %d: after a swap they are set back and not drawn again, and the run ends "
                "otherwise than an undisturbed one; draw inside the attempt, from a generator of "
                "your own, or within run.phase('evaluation')",
                attempt.step,
            )
        engine.at("data")

    def _leave(self) -> None:
        """The attempt is over, well or not."""
        self._inside = False

    def _end(self, attempt: Attempt, *, seconds: float) -> None:
        if attempt.skipped:
            self._drop_gradients()
            for buffer, before in self._buffers:
                buffer.copy_(before)
            attempt._scalars.setdefault("skipped", 1.0)
        self._buffers = []
        self._check()
        tally = self._tally
        assert tally is not None
        if attempt._samples:
            tally.consumed(attempt._samples)
        if attempt._scalars and self.shard.index == 0:
            tally.log(attempt.step, attempt._scalars)
        if self._engine is None:
            self._step = attempt.step
            tally.settled(attempt.step)
        else:
            self._engine.commit(attempt.step, seconds=seconds)

    def _drop_gradients(self) -> None:
        for part in self._parts.optimizers.values():
            # Not the gradients alone: an optimizer may have them on their way already.
            part.optimizer.zero_grad()
        for module in self._parts.modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    # ------------------------------------------------------------------ between attempts

    def _may_begin(self, step: int) -> None:
        if self._engine is not None:
            self._engine.domain_check()
            self._engine.may_begin(step, due=self._due)

    def _settle(self, until: int) -> None:
        """Wait until the last step is committed for all, and have it written where it is due."""
        if self._engine is not None:
            self._engine.domain_check()
            # Not beyond it: a new owner passes by what its peers have long left behind them.
            self._engine.finish_steps(due=self._due and self.step == until)

    @property
    def _due(self) -> bool:
        """Whether a durable checkpoint is to be written of the state as it is now."""
        every = self._checkpoint_every
        return bool(every) and self.step > 0 and self.step % every == 0

    def _recover(self) -> None:
        assert self._engine is not None
        self._engine.recover()

    def _finish(self) -> bool:
        """Say that this shard has finished, and wait for all; False where a worker was lost."""
        engine = self._engine
        assert engine is not None
        assert engine.generation is not None
        epoch = engine.domain.epoch
        engine.seat.wait_committed(engine.generation, epoch)
        engine.finished = True
        engine.member.send(
            Finished(
                epoch=epoch,
                shard=engine.shard,
                generation=engine.generation,
                state_digest=engine.parts.digest(),
                samples_digest=engine.tally.digest,
                result=self._result,
            )
        )
        over = engine.seat.wait_end(epoch) is not None
        engine.finished = over
        return over
