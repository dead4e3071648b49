"""Measure both pathology recipes on synthetic tissue and write ``docs/results/pathology.md``.

    make bench BENCH=pathology                     # one factor at a time, 3 seeds; both headlines
    python benchmarks/pathology.py --only full     # all combinations, 3 seeds: hours, in the background
    python benchmarks/pathology.py --small         # minutes, to see that it works

Finished rows are kept in ``docs/results/raw/pathology.jsonl``; an interrupted measurement goes on
where it was. The short table's cells are part of the full one. Data and the networks that are
started from lie in ``runs/pathology`` and are made where they are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hotswap.rows import Row, Rows, load
from pathbench import cells, headline, report

PARTS = ("headline", "factors", "full")


@dataclass(frozen=True)
class Unit:
    """One run: measured as a whole, or again."""

    name: str
    measure: Callable[[], list[Row]]


@dataclass(frozen=True)
class Timed:
    """A unit's rows, and what a row of a unit holds besides."""

    rows: list[Row]
    seconds: float
    load: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, writes the page; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="headline,factors", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--recipe", default="metastasis,gleason", help="which recipes' runs")
    parser.add_argument("--seeds", type=int, default=3, help="of each cell")
    parser.add_argument("--jobs", type=int, default=2, help="cells side by side, a core each")
    parser.add_argument("--small", action="store_true", help="tiny sizes, under runs/")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args(arguments)
    os.chdir(Path(__file__).resolve().parents[1])
    only, recipes = options.only.split(","), options.recipe.split(",")
    for value, known in ((only, PARTS), (recipes, tuple(cells.MEASURE))):
        unknown = [part for part in value if part not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is unknown; give some of {', '.join(known)}")
    results = Path("runs/pathology_small") if options.small else Path("docs/results")
    rows = Rows(results / "raw" / "pathology.jsonl")
    base, scale = (results, 0.05) if options.small else (Path("runs/pathology"), 1.0)
    failed: list[str] = []
    if not options.page:
        if "headline" in only and not options.small:
            failed += run(list(headlines(base, recipes)), rows=rows, jobs=1)
        wanted = dict.fromkeys(
            cell
            for kind in ("factors", "full")
            if kind in only
            for seed in range(options.seeds)
            for recipe in recipes
            for cell in (cells.short if kind == "factors" else cells.full)(recipe, seed=seed)
        )
        missing = [cell for cell in wanted if not rows.has(cell.name)]
        if missing:
            ready(missing, base=base, scale=scale)
        units = [
            Unit(cell.name, partial(cells.measure, cell, base=base, scale=scale))
            for cell in missing
        ]
        failed += run(units, rows=rows, jobs=options.jobs)
    page = results / "pathology.md"
    text = report.report(rows, command="make bench BENCH=pathology", seeds=options.seeds)
    page.write_text(text, encoding="utf-8")
    print(text)
    if failed:
        print(f"failed, and measured when called again: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def headlines(base: Path, recipes: Sequence[str]) -> Iterator[Unit]:
    """The launched runs."""
    for line in headline.HEADLINES:
        for which, seed in line.runs if line.recipe in recipes else ():
            name = line.name(which, seed=seed)
            where = {"folder": base / name, "cache": base / "cache" / line.recipe}
            measure = partial(headline.measure, line, which, seed=seed, **where)
            yield Unit(name, measure)


def ready(wanted: Sequence[cells.Cell], *, base: Path, scale: float) -> None:
    """The data of all cells, and the network that Gleason's start from."""
    if any(cell.recipe == "gleason" for cell in wanted):
        source = cells.source_config(base=base, scale=scale)
        if not (source.out / "model.json").is_file():
            print(f"{time.strftime('%H:%M:%S')} the network that Gleason's start from", flush=True)
            cells.train(source)
    for cell in wanted:
        cells.prepare(cells.config_of(cell, base=base, scale=scale))


def run(units: Sequence[Unit], *, rows: Rows, jobs: int) -> list[str]:
    """Measures the units whose rows are missing, ``jobs`` at once; names of those that failed."""
    missing = [unit for unit in units if not rows.has(unit.name)]
    failed: list[str] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Timed], str] = {
            pool.submit(timed, unit.measure): unit.name for unit in missing
        }
        for future in as_completed(running):
            name = running[future]
            try:
                done = future.result()
            except Exception:  # one run that failed must not cost the others
                print(f"{name} failed: {traceback.format_exc()}", file=sys.stderr, flush=True)
                failed.append(name)
                continue
            rows.add(name, done.rows, seconds=done.seconds, load=done.load)
            value = done.rows[0]["value"]
            print(
                f"{time.strftime('%H:%M:%S')} {name}: {value:.4f}, {done.seconds:.0f} s", flush=True
            )
    return failed


def timed(measure: Callable[[], list[Row]]) -> Timed:
    """Runs ``measure`` in a process of the pool."""
    before, began = load(), time.monotonic()
    return Timed(measure(), time.monotonic() - began, before)


if __name__ == "__main__":
    sys.exit(main())
