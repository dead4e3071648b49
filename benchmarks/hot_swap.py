"""Measure the hot-swap runtime and write ``docs/results/hot_swap.md``.

    make bench                                     # everything, about 25 minutes on two quiet cores
    python benchmarks/hot_swap.py --only matrix    # recovery, overhead, matrix, simulation
    python benchmarks/hot_swap.py --small          # two minutes, to see that it works

Finished rows are kept in ``docs/results/raw/hot_swap.jsonl``; an interrupted measurement goes on
where it was. Compares with torchft, so ``pip install -e '.[bench]'`` first (``make bench`` does).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hotswap import matrix, overhead, recovery, report
from hotswap.rows import Row, Rows, load

from planaria.errors import PlanariaError
from planaria.runtime.inject import PHASES
from planaria.runtime.membership import simulate

PARTS = ("simulation", "recovery", "overhead", "matrix")
QUIET = 1.0
"""Load above which a unit is announced as disturbed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    recovery: recovery.Size
    overhead: overhead.Size
    matrix: matrix.Size
    events: int
    shards: int


FULL = Plan(
    recovery=recovery.Size(
        rounds=2,
        kills=10,
        others=3,
        workers=4,
        width=256,
        layers=3,
        context=128,
        batch=1,
        sharded_batch=1,
        gap=10,
        checkpoint_every=20,
    ),
    overhead=overhead.Size(
        parts=2,
        pairs=40,
        workers=4,
        width=256,
        layers=3,
        context=256,
        batch=14,
        sharded_batch=4,
    ),
    matrix=matrix.Size(workers=4),
    events=1_000_000,
    shards=64,
)
SMALL = Plan(
    recovery=recovery.Size(
        rounds=1,
        kills=1,
        others=1,
        workers=2,
        width=64,
        layers=2,
        context=32,
        batch=2,
        sharded_batch=2,
        gap=12,
        checkpoint_every=4,
    ),
    overhead=overhead.Size(
        parts=1, pairs=8, workers=2, width=64, layers=2, context=32, batch=2, sharded_batch=2
    ),
    matrix=matrix.Size(workers=2, phases=PHASES[2:3]),
    events=10_000,
    shards=16,
)


@dataclass(frozen=True)
class Unit:
    """One run: measured as a whole, or again."""

    name: str
    measure: Callable[[Path, float], list[Row]]
    """Takes a folder of its own and the most seconds it may take."""
    limit: float = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the page; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes, under runs/")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of --only first")
    options = parser.parse_args(arguments)
    os.chdir(Path(__file__).resolve().parents[1])
    only = options.only.split(",")
    unknown = [part for part in only if part not in PARTS]
    if unknown:
        parser.error(f"--only has {unknown[0]!r}: give some of {', '.join(PARTS)}")
    base = Path("runs/hot_swap_small") if options.small else Path("docs/results")
    rows = Rows(base / "raw" / "hot_swap.jsonl")
    if options.fresh:
        rows.forget(only)
    plan = SMALL if options.small else FULL
    failed = [unit.name for unit in units(plan) if _wanted(unit, only) and not _done(unit, rows)]
    page = base / "hot_swap.md"
    command = "make bench" if not options.small else "python benchmarks/hot_swap.py --small"
    page.write_text(report.report(rows, command=command), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))
    if failed:
        print(f"failed, and measured when called again: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _wanted(unit: Unit, only: Sequence[str]) -> bool:
    return unit.name.split("/")[0] in only


def _done(unit: Unit, rows: Rows) -> bool:
    """Measure ``unit`` unless its rows are there; False where it failed."""
    if rows.has(unit.name):
        return True
    folder = Path("runs/hot_swap") / unit.name
    shutil.rmtree(folder, ignore_errors=True)
    before, begin = load(), time.monotonic()
    busy = f" (the load is {before:.1f})" if before > QUIET else ""
    print(f"{time.strftime('%H:%M:%S')} {unit.name}{busy}", flush=True)
    try:
        found = unit.measure(folder, unit.limit)
    except Exception as error:  # one run that failed must not cost the others
        reason = str(error) if isinstance(error, PlanariaError) else traceback.format_exc()
        print(f"  failed: {reason}", file=sys.stderr, flush=True)
        return False
    seconds = time.monotonic() - begin
    rows.add(unit.name, found, seconds=seconds, load=before)
    print(f"  {seconds:.0f} s", flush=True)
    # What failed is kept to be looked at; of what is measured the rows are enough.
    shutil.rmtree(folder, ignore_errors=True)
    return True


def units(plan: Plan) -> Iterator[Unit]:
    """All runs, in the order in which they are made."""
    yield Unit("simulation", lambda folder, limit: [_simulation(plan)])
    for name, system, regime in recovery.units(plan.recovery):
        turn = int(name.split("/")[1])
        yield Unit(
            name, _bound(recovery.measure, plan.recovery, system=system, regime=regime, turn=turn)
        )
    for name, regime in overhead.units(plan.overhead):
        yield Unit(name, _bound(overhead.measure, plan.overhead, regime=regime), limit=600.0)
    for unit in matrix.units(plan.matrix):
        yield Unit(unit.name, _bound(matrix.measure, plan.matrix, unit), limit=120.0)


def _bound(
    measure: Callable[..., list[Row]], *arguments: Any, **named: Any
) -> Callable[[Path, float], list[Row]]:
    return lambda folder, limit: measure(*arguments, **named, folder=folder, limit=limit)


def _simulation(plan: Plan) -> Row:
    result = simulate.run(shards=plan.shards, events=plan.events)
    return {
        "row": "simulation",
        "events": result.events,
        "seconds": result.seconds,
        "step_seconds": result.step_seconds,
        "text": str(result),
    }


if __name__ == "__main__":
    sys.exit(main())
