"""Who answers and who makes progress: from pongs and progress to suspicions. Times come in.

Three clocks per worker: since when a ping is unanswered, when its training thread last ended a step
or entered a phase, and (for all) when the epoch began. Limits come from ``membership.limits``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from planaria.runtime import messages
from planaria.runtime.membership.limits import Whereabouts, blame, step_limit
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Shard, Worker


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A suspicion that is strong enough to act upon."""

    worker: Worker | None
    """None: nobody stands out, so the owners are to regroup."""
    how: str
    """silence or progress."""
    reason: str


@dataclass(eq=False)
class _Seen:
    """What is known of one attached worker; times are of the monotonic clock."""

    answered: float
    progressed: float
    unanswered: float | None = None
    """When the oldest ping without an answer was sent."""
    step: int = 0
    collective: int = 0
    inside: bool = False
    phase: str = "first"


class Watch:
    """Belongs to the coordinator's loop; ``now`` is always ``time.monotonic()``."""

    def __init__(self, *, limits: messages.Limits) -> None:
        self._limits = limits
        self._seen: dict[Worker, _Seen] = {}
        self._history: deque[float] = deque(maxlen=50)
        self._seq = 0
        self._looked: float | None = None
        self._epoch = 0
        self._phase = ""
        self._planned = False
        self._since = 0.0

    def attach(self, worker: Worker, *, now: float) -> None:
        """``worker`` has opened its stream."""
        self._seen[worker] = _Seen(answered=now, progressed=now)

    def detach(self, worker: Worker) -> None:
        """The stream of ``worker`` has ended."""
        self._seen.pop(worker, None)

    def pong(self, worker: Worker, message: messages.Pong, *, now: float) -> None:
        """``worker`` has answered."""
        seen = self._seen.get(worker)
        if seen is None:
            return
        seen.answered, seen.unanswered = now, None
        seen.step, seen.collective, seen.inside = message.step, message.collective, message.inside

    def progress(self, worker: Worker, message: messages.Progress, *, now: float) -> None:
        """``worker`` has ended a step, or entered a phase that is longer by nature."""
        seen = self._seen.get(worker)
        if seen is None:
            return
        seen.progressed, seen.step = now, max(seen.step, message.step)
        if message.seconds is None:
            seen.phase = message.phase
        else:
            seen.phase = "step"
            self._history.append(message.seconds)

    def step_of(self, worker: Worker) -> int:
        """The step that ``worker`` was last heard to attempt; 0 where unknown."""
        seen = self._seen.get(worker)
        return 0 if seen is None else seen.step

    def pings(self, *, now: float) -> Iterator[tuple[Worker, messages.Ping]]:
        """One ping for every attached worker."""
        self._forgive(now)
        self._seq += 1
        ping = messages.Ping(seq=self._seq)
        for worker, seen in self._seen.items():
            if seen.unanswered is None:
                seen.unanswered = now
            yield worker, ping

    def findings(self, state: State, *, now: float) -> list[Finding]:
        """Who is to be taken for hung; silence first, because it explains missing progress."""
        # Reporting and carrying out the plan have a time each.
        seen, planned = (self._epoch, self._phase, self._planned), state.plan is not None
        if (state.epoch, state.phase, planned) != seen:
            self._epoch, self._phase, self._planned = state.epoch, state.phase, planned
            self._since = now
        silent = list(self._silent(state, now))
        if silent:
            return silent
        late = None
        if state.phase == "training":
            late = self._stuck_in_training(state, now)
        elif state.phase in ("building", "recovering"):
            late = self._stuck_in_recovery(state, now)
        return [] if late is None else [late]

    def _forgive(self, now: float) -> None:
        """Where this process itself stood still (stopped, starved), nobody else is to blame."""
        if self._looked is not None and (gap := now - self._looked) > 3 * self._limits.ping:
            pause = gap - self._limits.ping
            self._since += pause
            for seen in self._seen.values():
                seen.progressed += pause
                if seen.unanswered is not None:
                    seen.unanswered += pause
        self._looked = now

    def _silent(self, state: State, now: float) -> Iterator[Finding]:
        for worker, seen in self._seen.items():
            member = state.members.get(worker)
            if member is None or seen.unanswered is None:
                continue
            limit = self._limits.timeout
            if member.shard is not None:
                # A build may load files in one long call that keeps the interpreter's lock.
                patient = _builds(state, member.shard)
                limit = self._limits.no_spare if patient else self._limits.silence
            silence = now - seen.unanswered
            if silence > limit:
                reason = f"it has not answered a ping for {silence:.1f} s (limit {limit:g} s)"
                yield Finding(worker=worker, how="silence", reason=reason)

    def _stuck_in_training(self, state: State, now: float) -> Finding | None:
        owners = [
            worker
            for shard, worker in state.owners.items()
            if shard not in state.finished and worker in self._seen
        ]
        for worker in owners:
            if not self._late(worker, now):
                continue
            seen = self._seen[worker]
            _, why = step_limit(self._history, phase=seen.phase, limits=self._limits)
            late = now - max(seen.progressed, self._since)
            guilty, reason = blame(
                {name: self._whereabouts(name) for name in owners}, now=now, limits=self._limits
            )
            # Who is waited for may be in a phase that is longer by nature, such as evaluation.
            if not all(self._late(name, now) for name in ([guilty] if guilty else owners)):
                return None
            line = f"no progress of {worker} for {late:.1f} s (limit {why}): {reason}"
            # Once more only after the limit has passed again.
            for name in owners:
                self._seen[name].progressed = now
            return Finding(worker=guilty, how="progress", reason=line)
        return None

    def _stuck_in_recovery(self, state: State, now: float) -> Finding | None:
        """Who keeps a recovery waiting: has not reported, or has not carried out the plan."""
        waited = now - self._since
        done, what = state.reports, "reported"
        if state.plan is not None:
            done, what = state.restored, "restored"
        missing = [shard for shard in state.owners if shard not in done]
        # A new owner builds its model first, which takes what it takes; so do the first ones, and
        # they load from disk.
        patient = state.phase == "building" or all(_builds(state, shard) for shard in missing)
        limit = self._limits.no_spare if patient else 2 * self._limits.timeout
        if not missing or waited <= limit:
            return None
        self._since = now
        reason = f"epoch {state.epoch} is {waited:.1f} s old and shard {missing[0]} has not {what}"
        guilty = None if len(missing) == len(state.owners) else state.owners[missing[0]]
        return Finding(worker=guilty, how="progress", reason=reason)

    def _late(self, worker: Worker, now: float) -> bool:
        """Whether ``worker`` is over the limit of the phase that it is in itself."""
        seen = self._seen[worker]
        limit, _ = step_limit(self._history, phase=seen.phase, limits=self._limits)
        return now - max(seen.progressed, self._since) > limit

    def _whereabouts(self, worker: Worker) -> Whereabouts:
        seen = self._seen[worker]
        return Whereabouts(answered=seen.answered, collective=seen.collective, inside=seen.inside)


def _builds(state: State, shard: Shard) -> bool:
    """Whether the owner of ``shard`` may still be making its model and optimizer."""
    if state.phase == "building":
        return state.plan is None
    return state.plan is None and shard in state.lost and shard not in state.reports
