"""Who answers and who makes progress: from pongs and progress to suspicions. Times come in.

Three clocks per worker: since when a ping is unanswered, when its training thread last got on (ended
a step, entered a phase, ended a wait for protection, or had state on its way to or from a peer), and
(for all) when the epoch began. Limits come from ``membership.limits``; that of silence follows how
late answers are in this run, so that a machine that is starved loses nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from planaria.runtime import messages
from planaria.runtime.membership.limits import (
    ANSWERS,
    Whereabouts,
    blame,
    silence_limit,
    slowness,
    step_limit,
)
from planaria.runtime.membership.state import State
from planaria.runtime.messages import Shard, Worker

_PINGS = 4096
"""Pings whose time is remembered: all that may be unanswered while a model is built. Our choice."""


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
    called: float
    """When it became an owner; until then, when it attached."""
    unanswered: float | None = None
    """When the oldest ping without an answer was sent."""
    step: int = 0
    collective: int = 0
    inside: bool = False
    waiting: bool = False
    moved: int = 0
    phase: str = "first"
    delays: deque[float] = field(default_factory=lambda: deque[float](maxlen=ANSWERS))
    """Seconds from ping to answer, of the newest ones; not those while it built."""
    built: float = 0.0
    """When it was last seen to build."""


class Watch:
    """Belongs to the coordinator's loop; ``now`` is always ``time.monotonic()``."""

    def __init__(self, *, limits: messages.Limits) -> None:
        self._limits = limits
        self._seen: dict[Worker, _Seen] = {}
        self._history: deque[float] = deque(maxlen=50)
        self._seq = 0
        self._sent: dict[int, float] = {}
        """When each of the newest pings was sent."""
        self._building: set[Worker] = set()
        """Who loads or builds, with long calls that keep the interpreter's lock: it says nothing of
        the machine, and has a limit of its own."""
        self._looked: float | None = None
        self._epoch = 0
        self._phase = ""
        self._planned = False
        self._since = 0.0

    def attach(self, worker: Worker, *, now: float) -> None:
        """``worker`` has opened its stream."""
        self._seen[worker] = _Seen(answered=now, progressed=now, called=now, built=now)
        self._building.add(worker)

    def detach(self, worker: Worker) -> None:
        """The stream of ``worker`` has ended."""
        self._seen.pop(worker, None)
        self._building.discard(worker)

    def pong(self, worker: Worker, message: messages.Pong, *, now: float) -> None:
        """``worker`` has answered."""
        seen = self._seen.get(worker)
        if seen is None:
            return
        seen.answered, seen.unanswered = now, None
        sent = self._sent.get(message.seq)
        if sent is not None and sent > seen.built:
            seen.delays.append(max(0.0, now - sent))
        seen.step, seen.collective, seen.inside = message.step, message.collective, message.inside
        if message.moved > seen.moved:
            # A transfer takes as long as it takes, while bytes of it arrive.
            seen.progressed = now
            if self._phase in ("building", "recovering"):
                self._since = now
        elif seen.waiting and not message.waiting:
            seen.progressed = now  # its step may take as long as any, from here on
        seen.waiting, seen.moved = message.waiting, message.moved

    def follow(self, before: State, state: State, *, now: float) -> None:
        """Somebody owns a shard from now on, whatever it was silent for before."""
        for worker in state.owners.values():
            seen = self._seen.get(worker)
            known = before.members.get(worker)
            if seen is not None and (known is None or known.shard is None):
                seen.called = now

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

    def moved(self, worker: Worker) -> int:
        """Bytes of state that ``worker`` was last heard to have sent and received."""
        seen = self._seen.get(worker)
        return 0 if seen is None else seen.moved

    def silent_spares(self, state: State, *, now: float) -> list[Finding]:
        """Spares that would not hear it if they were called now, so that nobody waits for them."""
        kept = set(state.holders.values())
        found: list[Finding] = []
        for worker in state.spares:
            seen = self._seen.get(worker)
            # In a world of one a spare may keep the only copy that is left.
            if seen is None or seen.unanswered is None or worker in kept:
                continue
            if finding := self._too_long(worker, now - seen.unanswered, now=now):
                found.append(finding)
        return found

    def patience(self, *, now: float) -> float:
        """Seconds of silence, at most ``limits.timeout``, after which whoever is hung is found."""
        found = self._limits_of_silence(self._seen, now).values()
        return max((limit for limit, _ in found), default=self._limits.silence)

    def pings(self, *, now: float) -> Iterator[tuple[Worker, messages.Ping]]:
        """One ping for every attached worker."""
        self._forgive(now)
        self._seq += 1
        self._sent[self._seq] = now
        self._sent.pop(self._seq - _PINGS, None)
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
        self._building = {
            worker
            for worker, member in state.members.items()
            if worker in self._seen
            and (not member.ready or (member.shard is not None and _builds(state, member.shard)))
        }
        for worker in self._building:
            self._seen[worker].built = now
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
            self._sent = {seq: at + pause for seq, at in self._sent.items()}
            for seen in self._seen.values():
                seen.progressed += pause
                seen.called += pause
                seen.built += pause
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
                limit = self._limits.silence
                if _builds(state, member.shard):
                    limit = self._limit_of_a_build(state, seen)
            silence = now - seen.unanswered
            if silence <= limit:
                continue
            if limit > self._limits.silence:
                yield _silence(worker, silence, f"{limit:g} s")
            elif finding := self._too_long(worker, silence, now=now):
                yield finding

    def _too_long(self, worker: Worker, silence: float, *, now: float) -> Finding | None:
        """Whether ``silence`` is more than this run's other answers explain."""
        if silence <= self._limits.silence:
            return None
        limit, why = self._limits_of_silence((worker,), now)[worker]
        return _silence(worker, silence, why) if silence > limit else None

    def _limits_of_silence(
        self, workers: Iterable[Worker], now: float
    ) -> dict[Worker, tuple[float, str]]:
        slow = {
            worker: delay
            for worker, seen in self._seen.items()
            if worker not in self._building
            and (delay := slowness(self._delays(seen, now))) is not None
        }
        return {
            worker: silence_limit(
                slowness(self._seen[worker].delays),
                [delay for name, delay in slow.items() if name != worker],
                limits=self._limits,
            )
            for worker in workers
        }

    def _delays(self, seen: _Seen, now: float) -> list[float]:
        """With those of answers that are still missing: who is silent itself accuses nobody."""
        delays = list(seen.delays)
        if seen.unanswered is not None:
            missing = min(ANSWERS, int((now - seen.unanswered) / self._limits.ping) + 1)
            delays += [now - seen.unanswered - n * self._limits.ping for n in range(missing)]
        return delays

    def _limit_of_a_build(self, state: State, seen: _Seen) -> float:
        assert seen.unanswered is not None
        if seen.unanswered >= seen.called:
            # A build may load files in one long call that keeps the interpreter's lock.
            return self._limits.no_spare
        # It was silent already when it was called. In a world of one it may have the only copy.
        return self._limits.timeout if state.config.world == 1 else self._limits.silence

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
            _, why = self._limit(seen)
            late = now - max(seen.progressed, self._since)
            guilty, reason = blame(self._whereabouts(owners, now), now=now, limits=self._limits)
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
        # they load from disk, as all do that go back to a durable checkpoint.
        loads = state.plan is not None and state.plan.rollback
        builds = state.phase == "building" or all(_builds(state, shard) for shard in missing)
        patient = builds or loads
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
        limit, _ = self._limit(seen)
        return now - max(seen.progressed, self._since) > limit

    def _limit(self, seen: _Seen) -> tuple[float, str]:
        """Seconds that a worker may spend as it is, and why."""
        limit, why = step_limit(self._history, phase=seen.phase, limits=self._limits)
        least = self._limits.transfer
        if seen.waiting and limit < least:
            return least, f"{least:.3g} s: it waits for copies on their way to holders"
        return limit, why

    def _whereabouts(self, workers: list[Worker], now: float) -> dict[Worker, Whereabouts]:
        patience = self._limits_of_silence(workers, now)
        return {
            worker: Whereabouts(
                answered=seen.answered,
                collective=seen.collective,
                inside=seen.inside,
                waiting=seen.waiting,
                patience=patience[worker][0],
            )
            for worker, seen in ((name, self._seen[name]) for name in workers)
        }


def _silence(worker: Worker, seconds: float, limit: str) -> Finding:
    reason = f"it has not answered a ping for {seconds:.1f} s (limit {limit})"
    return Finding(worker=worker, how="silence", reason=reason)


def _builds(state: State, shard: Shard) -> bool:
    """Whether the owner of ``shard`` may still be making its model and optimizer."""
    if state.plan is not None:
        # Nothing is left of any generation: all build again, together.
        return state.plan.generation is None and shard not in state.restored
    if state.phase == "building":
        return True
    return shard in state.lost and shard not in state.reports
