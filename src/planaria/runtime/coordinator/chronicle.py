"""From membership's transitions to lines of the journal, and to lines for the user's screen.

Knows times and volumes that membership does not: seconds of each step, bytes sent for protection.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal
from planaria.runtime.coordinator.summary import Summary
from planaria.runtime.membership.events import AnyEvent, Broadcast, FinishedBy, Record
from planaria.runtime.membership.planning import name_shards
from planaria.runtime.membership.state import Member, State, Transition

_AGAIN = 60.0
"""Seconds until a peer that is turned away gets another line; our choice."""
_PORT = re.compile(r"(?<=.):\d+$")
TYPED = frozenset({"attached", "ready", "epoch", "plan", "restored", "committed", "ended"})
"""Records of membership that have a typed line of their own here."""


class Chronicle:
    """Writes ``book``; ``show(line)`` puts a line before the user."""

    def __init__(self, book: journal.Journal, *, show: Callable[[control.Line], None]) -> None:
        self.book = book
        self._show = show
        self._sent = 0
        self._steps: dict[int, tuple[float, float]] = {}
        self._lost_at: float | None = None
        self._refused: dict[tuple[str, str], float] = {}

    def progress(self, message: messages.Progress) -> None:
        """Keep the slowest worker's seconds of a step until its generation is committed."""
        if message.seconds is None:
            return
        seconds, waited = self._steps.get(message.step, (0.0, 0.0))
        self._steps[message.step] = (max(seconds, message.seconds), max(waited, message.waited))

    def heard(self, worker: str, shard: int | None, message: messages.FromWorker) -> None:
        """A message that membership is told next."""
        match message:
            case messages.Ready():
                self.book.write(journal.WorkerReady(worker=worker))
            case messages.Committed():
                self._sent += message.bytes
            case messages.Restored():
                self.book.write(
                    journal.WorkerRestored(
                        worker=worker,
                        shard=shard,
                        epoch=message.epoch,
                        generation=message.generation,
                        phases=message.phases,
                    )
                )
            case _:
                pass

    def refused(self, who: str, reason: str, *, now: float) -> None:
        """Somebody was turned away: one line for each peer, reason and minute, whatever its port."""
        key = _PORT.sub("", who), reason
        self._refused = {known: at for known, at in self._refused.items() if now - at < _AGAIN}
        if key not in self._refused:
            self._refused[key] = now
            self.book.write(journal.Refused(who=who, reason=reason))

    def injected(self, worker: str, fault: messages.Injected) -> None:
        """A test's fault is about to fire: in the file before this returns."""
        self.book.write(
            journal.Injected(worker=worker, fault=fault.fault, step=fault.step, phase=fault.phase)
        )
        self.say(f"fault {fault.fault} fires on {worker} in step {fault.step}")

    def detected(
        self, worker: str, *, shard: int | None, how: str, reason: str, known_as: str = "spare"
    ) -> None:
        """A worker is about to be taken out; ``known_as``: see :func:`role`."""
        self.book.write(journal.Detected(worker=worker, shard=shard, how=how, reason=reason))
        if shard is not None:
            if self._lost_at is None:
                self._lost_at = time.monotonic()
            self.say(f"shard {shard} lost its owner {worker}: {reason}")
        elif known_as:
            self.say(f"{known_as} {worker} is lost: {reason}")

    def scalars(self, worker: str, shard: int | None, message: messages.Scalar) -> None:
        """Numbers of a committed step."""
        entry = journal.Scalars(
            worker=worker, shard=shard, step=message.step, values=journal.as_numbers(message.values)
        )
        self.book.write(entry)
        if shard == 0:
            values = " ".join(f"{name} {value:.4g}" for name, value in message.values.items())
            self.say(f"step {message.step} {values}", kind="progress")

    def transition(self, before: State, event: AnyEvent, after: Transition) -> None:
        """Write what has changed."""
        state = after.state
        if state.epoch != before.epoch:
            self._epoch(state, after.reason)
        if state.plan is not None and state.plan is not before.plan:
            self._plan(state.plan)
        for action in after.actions:
            if isinstance(action, Broadcast):
                self._broadcast(action.message)
            elif isinstance(action, Record) and action.name not in TYPED:
                self.book.write(journal.Decided(name=action.name, fields=dict(action.fields)))
        if state.protected and not before.protected:
            self.book.write(journal.Protected(epoch=state.epoch, generation=state.committed))
        if isinstance(event, FinishedBy) and state.finished is not before.finished:
            self._finished(event)

    def over(self, summary: Summary) -> None:
        """The run is over; what it ended with where that is well."""
        if summary.exit_code != 0:
            return
        values = " ".join(f"{name} {value:.4g}" for name, value in summary.final.items())
        line = f"finished at step {summary.steps}{values and f' with {values}'}"
        if not summary.steps:
            line = f"finished: {summary.reason}"
        if summary.restarts:
            line += f"; restarts of the whole: {summary.restarts}"
        if summary.swaps:
            line += f"; swaps: {len(summary.swaps)}, steps done again: {summary.steps_redone}"
        self.say(f"{line}; see summary.json", kind="event")

    def say(self, text: str, *, kind: str = "swap") -> None:
        """One line for the user's screen."""
        self._show(control.Line(text=text, kind=kind))

    def _finished(self, event: FinishedBy) -> None:
        message = event.message
        self.book.write(
            journal.ShardFinished(
                shard=message.shard,
                worker=event.worker,
                generation=message.generation,
                state_digest=message.state_digest,
                samples_digest=message.samples_digest,
                result=journal.as_numbers(message.result),
            )
        )

    def _epoch(self, state: State, reason: str) -> None:
        self.book.write(
            journal.EpochBegun(epoch=state.epoch, phase=state.phase, reason=reason, lost=state.lost)
        )
        if state.phase == "waiting":
            self.say(reason)

    def _plan(self, plan: messages.Plan) -> None:
        self.book.write(
            journal.Planned(
                epoch=plan.epoch,
                generation=plan.generation,
                redone=plan.redone,
                transfers=len(plan.transfers),
                reason=plan.reason,
                lost=plan.lost,
                rollback=plan.rollback,
            )
        )
        if plan.lost:
            owners = ", ".join(plan.owners[shard].worker for shard in plan.lost)
            self.say(f"{name_shards(plan.lost)} goes to {owners}: {plan.reason}")

    def _broadcast(self, message: messages.FromCoordinator) -> None:
        if isinstance(message, messages.Released):
            self.book.write(journal.Released(epoch=message.epoch))
            if self._lost_at is not None:
                seconds = time.monotonic() - self._lost_at
                self.say(
                    f"all shards are back {seconds:.2f} s after that was noticed; training goes on"
                )
                self._lost_at = None
        elif isinstance(message, messages.AllCommitted):
            seconds, waited = self._steps.get(message.generation, (None, 0.0))
            self.book.write(
                journal.AllCommitted(
                    epoch=message.epoch,
                    generation=message.generation,
                    bytes=self._sent,
                    step_s=seconds,
                    waited_s=waited,
                )
            )
            self._sent = 0
            self._steps = {
                step: value for step, value in self._steps.items() if step > message.generation
            }


def role(state: State, member: Member) -> str:
    """What the user calls a worker without a shard; empty where the restart of all will name it."""
    if state.joinless and (member.joinless or member.rank is not None):
        return ""
    return "spare" if member.ready or member.rank is None else "worker"
