"""The real membership code under millions of random events, at thousands of shards.

``python -m planaria.runtime.membership.simulate --events 1000000 --shards 64`` prints one line.

:class:`~.cluster.Cluster` plays the workers, :class:`~.referee.Referee` checks every transition.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from planaria.errors import ConfigError
from planaria.runtime.membership.cluster import Cluster, ClusterConfig
from planaria.runtime.membership.referee import Referee
from planaria.runtime.membership.rules import step


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulation did and found; a broken rule raises instead."""

    shards: int
    events: int
    """Events fed to :func:`~.rules.step`."""
    seed: int
    seconds: float
    """Wall clock of everything: cluster, membership and referee."""
    step_seconds: float
    """CPU time inside :func:`~.rules.step`, as are the next two."""
    ordinary: float
    """Seconds that 999 of 1,000 events stayed below, of those that changed neither owners nor
    plan (the last one of 1,000 pays for the garbage collector)."""
    slowest_change: float
    """Seconds of the slowest event that did."""
    runs: int
    """Runs begun; a new one begins when the last has ended."""
    epochs: int
    swaps: int
    """Times that all shards had restored after a loss."""
    superseded: int
    """Losses that came before the last one was mended."""
    generations: int
    """Generations committed for all shards."""
    most_redone: int
    """Most steps done again after a single loss."""
    ends: dict[str, int] = field(default_factory=dict)
    """Runs by how they ended."""

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.ends.items()))
        return (
            f"{self.events:,} events at {self.shards:,} shards (seed {self.seed}) in "
            f"{self.seconds:.1f} s, {self.step_seconds:.1f} s of it in step(): no rule broken; "
            f"{self.runs} runs, {self.epochs} epochs, {self.swaps} swaps, {self.superseded} losses "
            f"during a recovery, {self.generations} generations, at most {self.most_redone} steps "
            f"done again after one loss; 99.9 % of the events below {self.ordinary * 1e3:.3f} ms, "
            f"slowest change of owners {self.slowest_change * 1e3:.2f} ms; ended: {ends or 'none'}"
        )


def run(
    *, shards: int, events: int, seed: int = 0, config: ClusterConfig | None = None
) -> SimulationResult:
    """Feed ``events`` random events to the membership of runs with ``shards`` shards.

    Raises ``AssertionError`` as soon as a rule is broken; a note names the event and the epoch.
    """
    if events < 1:
        raise ConfigError(f"events is {events}: give at least 1")
    config = config or ClusterConfig(shards=shards, replicas=1 + (shards % 2 == 0))
    rng = random.Random(seed)
    begin = time.perf_counter()
    inside = slowest_change = 0.0
    ordinary = array("d")
    ends: Counter[str] = Counter()
    referees: list[Referee] = []
    done = 0
    while done < events:
        cluster = Cluster(config, rng=rng)
        referee = Referee(max_redo=config.max_redo)
        referees.append(referee)
        while done < events and cluster.state.phase != "ended":
            event = cluster.next_event()
            if event is None:
                continue
            before = cluster.state
            start = time.thread_time()
            transition = step(before, event)
            took = time.thread_time() - start
            done += 1
            inside += took
            after = transition.state
            if after.epoch != before.epoch or after.plan is not before.plan:
                slowest_change = max(slowest_change, took)
            else:
                ordinary.append(took)
            try:
                referee.check(before, event, transition)
            except AssertionError as error:
                error.add_note(f"event {done} of seed {seed}, in epoch {before.epoch}: {event}")
                raise
            cluster.obey(after, transition.actions)
        if cluster.state.phase == "ended":
            ends[referee.how_it_ended(cluster.state)] += 1
    return SimulationResult(
        shards=shards,
        events=done,
        seed=seed,
        seconds=time.perf_counter() - begin,
        step_seconds=inside,
        ordinary=sorted(ordinary)[len(ordinary) * 999 // 1000] if ordinary else 0.0,
        slowest_change=slowest_change,
        runs=len(referees),
        epochs=sum(referee.epochs for referee in referees),
        swaps=sum(referee.swaps for referee in referees),
        superseded=sum(referee.superseded for referee in referees),
        generations=sum(referee.generations for referee in referees),
        most_redone=max(referee.most_redone for referee in referees),
        ends=dict(ends),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the simulation; prints one line."""
    parser = argparse.ArgumentParser(description="Random events through the membership code.")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        result = run(shards=options.shards, events=options.events, seed=options.seed)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
