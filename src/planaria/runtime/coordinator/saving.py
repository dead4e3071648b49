"""Durable checkpoints on the coordinator's side: asked for, published or given up, and told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from planaria.errors import CheckpointError, UserError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal, publish
from planaria.runtime.coordinator.chronicle import Chronicle
from planaria.runtime.coordinator.crowd import Crowd
from planaria.runtime.membership import events
from planaria.runtime.membership.state import State


class Saving:
    """Publishes below ``out``; ``apply`` feeds membership."""

    def __init__(
        self,
        out: Path,
        *,
        run: str,
        world: int,
        keep: int,
        chronicle: Chronicle,
        apply: Callable[[events.AnyEvent], None],
    ) -> None:
        self._out = out
        self._run = run
        self._world = world
        self._keep = keep
        self._chronicle = chronicle
        self._apply = apply
        self._asked: control.SaveCheckpoint | None = None
        """What was asked for and is not yet there."""
        self._seconds: dict[int, float] = {}
        self._after: int | None = None
        """Newest committed generation when owners were asked: any later one is what was asked for.
        None: they were not asked yet."""
        self._publishing = asyncio.Lock()
        """One folder after the other: each publication removes what is older."""

    def ask(self, body: control.SaveCheckpoint, *, state: State, crowd: Crowd) -> control.Done:
        """Have all owners write a checkpoint: after the running attempt, or after the recovery."""
        if state.phase in ("forming", "building", "ended"):
            raise UserError(
                f"the run is {state.phase}: a durable checkpoint can be written while it trains; "
                "ask again then"
            )
        if self._asked is not None:
            # Owners write what they were asked for first; asked anew, some would be past it.
            if body.then_stop:
                self._asked = body
            return control.Done(note="a durable checkpoint was asked for already")
        self._asked, self._after = body, None
        if state.phase != "training":
            return control.Done(note="a durable checkpoint is written after the recovery")
        self._tell(body, state, crowd)
        return control.Done(note="a durable checkpoint is written after the running attempt")

    def follow(self, before: State, state: State, *, crowd: Crowd) -> None:
        """Ask again after a recovery: what was being written is given up with its epoch, and a new
        owner has not heard of it.
        """
        if self._asked is not None and before.phase != "training" and state.phase == "training":
            self._tell(self._asked, state, crowd)

    def _tell(self, body: control.SaveCheckpoint, state: State, crowd: Crowd) -> None:
        # Nothing is committed yet in a run that has just gone on from the disk.
        planned = state.plan.generation if state.plan is not None else None
        after = self._after = max(state.committed or 0, planned or 0)
        message = messages.SaveDurable(
            reason=body.reason,
            then_stop=body.then_stop,
            at=after + messages.MOST_AHEAD,
        )
        for worker in state.owners.values():
            crowd.send(worker, message)

    def wrote(self, message: messages.Durable) -> None:
        """One shard has written its part, or failed to."""
        slowest = self._seconds.get(message.generation, 0.0)
        self._seconds[message.generation] = max(slowest, message.seconds)

    async def publish(self, action: events.Publish) -> None:
        """All parts are there: rename the folder, tell membership."""
        generation, epoch = action.generation, action.epoch
        seconds = self._seconds.pop(generation, 0.0)
        if not publish.partial_path(self._out, generation, epoch=epoch).exists() and (
            generation in publish.published(self._out)
        ):
            # Said again by members to a coordinator that was started again.
            self._apply(events.Published(generation=generation))
            return
        try:
            async with self._publishing:
                path = await asyncio.to_thread(
                    publish.publish,
                    self._out,
                    generation,
                    epoch=epoch,
                    run=self._run,
                    world=self._world,
                    keep=self._keep,
                )
        except CheckpointError as error:
            self._given_up(generation, str(error))
            return
        self._chronicle.book.write(
            journal.DurableSaved(generation=generation, path=str(path), seconds=seconds)
        )
        self._apply(events.Published(generation=generation))
        asked = self._answered(generation)
        if asked is not None and asked.then_stop:
            reason = f"{asked.reason}, after the durable checkpoint of generation {generation}"
            self._apply(events.StopRequested(reason=reason, exit_code=asked.exit_code))

    async def settled(self) -> None:
        """Until every folder has its name whose parts were all there before."""
        async with self._publishing:
            pass

    def _answered(self, generation: int) -> control.SaveCheckpoint | None:
        """What was asked for, where ``generation`` is the answer to it; an older one that was still
        being written then is none."""
        if self._asked is None or self._after is None or generation <= self._after:
            return None
        asked, self._asked = self._asked, None
        return asked

    async def discard(self, action: events.Discard) -> None:
        """It can never be complete: remove what there is of it."""
        generation, reason = action.generation, action.reason
        self._seconds.pop(generation, None)
        await asyncio.to_thread(publish.discard, self._out, generation, epoch=action.epoch)
        if action.superseded:
            self._chronicle.book.write(journal.DurableFailed(generation=generation, reason=reason))
            self._chronicle.say(f"no durable checkpoint of generation {generation}: {reason}")
        else:
            self._given_up(generation, reason)

    def _given_up(self, generation: int, reason: str) -> None:
        self._chronicle.book.write(journal.DurableFailed(generation=generation, reason=reason))
        line = f"no durable checkpoint of generation {generation}: {reason}"
        self._chronicle.say(line, kind="error")
        asked = self._answered(generation)
        if asked is not None and asked.then_stop:
            self._apply(events.StopRequested(reason=f"{asked.reason}; {line}", exit_code=1))
