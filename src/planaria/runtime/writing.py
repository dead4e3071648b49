"""When this worker writes a durable checkpoint, so that all workers write the same ones.

Writing is a collective: what one begins and another does not would never end. So nothing here depends
on what a worker has happened to hear by now, only on what all have heard before the same commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.errors import EpochSuperseded
from planaria.runtime.messages import MOST_AHEAD, Durable, Plan, Progress, SaveDurable

if TYPE_CHECKING:
    from planaria.runtime.engine import Engine


class Writing:
    """Begins the durable checkpoints of one engine, on its training thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saved_at = -1
        """Newest generation that this epoch has begun to write, or has found on the disk."""

    def stand_at(self, generation: int, plan: Plan) -> None:
        """The run goes on from ``generation``. By the plan, so alike for a new owner: what was being
        written when the epoch ended is given up and written again, what is on the disk is not.
        """
        self._saved_at = generation if generation == plan.durable else -1

    def between_steps(self, *, due: bool) -> None:
        """Write the present generation if it is ``due``, or was asked for by its number: nobody can
        have begun a step beyond that one before all had heard.
        """
        wanted = self._engine.seat.save
        self._write(due, wanted if wanted is not None and self._at == wanted.at else None)

    def at_the_end(self, *, due: bool) -> None:
        """The same after the script's last step, which is committed.

        What was asked for at a generation that will not come is written here, provided that all have
        heard of it before this one's commit; else the run is as good as over.
        """
        wanted = self._engine.seat.save
        heard = wanted is not None and 0 <= wanted.at - self._at < MOST_AHEAD
        self._write(due, wanted if heard else None)

    @property
    def _at(self) -> int:
        assert self._engine.generation is not None
        return self._engine.generation

    def _write(self, due: bool, wanted: SaveDurable | None) -> None:
        engine = self._engine
        if (due or wanted is not None) and self._at > self._saved_at:
            self._begin()
        if wanted is not None and wanted.then_stop:
            engine.settle()
            if engine.seat.wait_end(engine.domain.epoch) is None:
                raise EpochSuperseded("a worker was lost while the last checkpoint was published")
            engine.seat.check()

    def _begin(self) -> None:
        engine, generation, epoch = self._engine, self._at, self._engine.domain.epoch
        self._saved_at = generation

        def told(written: int, error: str | None, seconds: float) -> None:
            engine.member.send(
                Durable(
                    epoch=epoch,
                    shard=engine.shard,
                    generation=written,
                    error=error,
                    seconds=seconds,
                )
            )

        engine.member.send(Progress(epoch=epoch, step=engine.attempting, phase="checkpoint"))
        engine.durable.save(generation, told, epoch=epoch, check=engine.domain_check)
        engine.member.send(Progress(epoch=epoch, step=engine.attempting, phase="step"))
