"""Loss of dense and sparse optimizers on the language-model recipe, and time to a loss on a link.

Every run is a real group of gloo workers on loopback that trains the recipe's network on its data.
Finished runs are kept as JSON lines and not done again, so the command may be stopped and started,
and the page says at any moment what is done and what is missing:

    python benchmarks/scape_table.py                      about five hours on two cores
    python benchmarks/scape_table.py --plan               say what is left to do
    python benchmarks/scape_table.py --minutes 30         stop before a run would pass 30 minutes
    python benchmarks/scape_table.py --ablate             one switch at a time, shorter runs
    python benchmarks/scape_table.py --table              only write the page from the rows

Each method runs with each learning rate of one grid and seed 0, then with the other seeds at its
best rate: first the methods of this package, then those it is compared with. Step times and bytes
over the link come from ``benchmarks/links.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scape_page import page
from scape_runs import Pool, Run

OWN = (
    "adams",
    "adamw",
    "frozen-0.077/wire=int4/statistic=cycle/scale_cap=50",
    "frozen-0.75/wire=int4/statistic=cycle/scale_cap=50",
    "local-0.08/wire=int4/average_moments=false/cycle_run=1",
    "local-0.5/wire=int4/cycle_run=1",
    "frozen-0.1",
    "frozen-0.01",
)
"""The first two sparse ones send 1 % and 10 % of the bytes, as do the local ones; the last two send
10 % and 1 % of the weights, with masks by first moments and age."""
PEERS = (
    "steps-0.1",
    "steps-0.01",
    "powersgd-0.1",
    "powersgd-0.01",
    "topk-0.036",
    "topk-0.0036",
    "demo-0.04",
    "demo-0.004",
)
"""Densities at which a method sends as many bytes as SCAPE at 10 % and 1 %: top-k and DeMo gather
every worker's choice, with its places, at every worker."""
RATES = (5e-4, 1e-3, 2e-3)
SIGN_RATES = (2e-4, 5e-4, 1e-3)
"""For the DeMo-like method, whose steps are signs."""
SEEDS = (0, 1, 2)

ABLATIONS = (
    "adams",
    "frozen-0.1",
    "frozen-0.1/step_scale=0",
    "frozen-0.1/step_scale=0.5",
    "frozen-0.1/clamp_after=1000000",
    "frozen-0.1/after_send=keep",
    "frozen-0.1/buffer=feedback",
    "frozen-0.1/statistic=momentum",
    "frozen-0.1/statistic=gradient",
    "frozen-0.1/statistic=cycle",
    "frozen-0.1/decay=lazy",
    "frozen-0.1/refresh=4",
    "frozen-0.1/k_scope=tensor",
    "frozen-0.1/embeddings=dense",
    "frozen-0.1/dense_steps=0",
    "moved-0.1",
    "local-0.1",
    "local-0.1/outer_momentum=0",
    "local-0.1/outer_momentum=0.5",
    "local-0.1/average_moments=false",
    "local-0.1/cycle=contiguous",
    "local-0.1/wire=float32",
    "local-0.1/embeddings=dense",
    "local-0.1/dense_steps=0",
)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows that are there; a line that was cut off while it was written is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a row the result of a run."""
    return tuple(row[name] for name in Run.__dataclass_fields__)


def final(row: dict[str, Any]) -> float:
    """Loss at the end; infinite where it is not a number."""
    loss = row["curve"][-1][1]
    return loss if math.isfinite(loss) else math.inf


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a command have in common."""
    names = ("model", "workers", "batch", "sequence", "vocab_size", "max_bytes")
    return {name: getattr(args, name) for name in names}


def ablations(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[Run]:
    """Runs of the ablation that are not done."""
    done = {key(row) for row in rows}
    shared = {**common(args), "steps": args.ablate_steps, "seed": SEEDS[0]}
    methods = args.methods or ABLATIONS
    runs = [Run(method=method, lr=lr, **shared) for lr in args.ablate_lr for method in methods]
    return [run for run in runs if key(asdict(run)) not in done]


def pending(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[Run]:
    """Runs of the table that can be started now and are not done.

    This package's methods come before the others, and a method's rates before its other seeds.
    """
    done = {key(row): row for row in rows}
    shared = {**common(args), "steps": args.steps}
    found: list[Run] = []
    for methods in (args.methods,) if args.methods else (OWN, PEERS):
        tuning: list[Run] = []
        repeats: list[Run] = []
        for method in methods:
            rates = SIGN_RATES if method.startswith("demo") else RATES
            tuned = [Run(method=method, lr=lr, seed=SEEDS[0], **shared) for lr in rates]
            left = [run for run in tuned if key(asdict(run)) not in done]
            tuning += left
            if not left:
                best = min(tuned, key=lambda run: final(done[key(asdict(run))]))
                seeds = [Run(method=method, lr=best.lr, seed=s, **shared) for s in SEEDS[1:]]
                repeats += [run for run in seeds if key(asdict(run)) not in done]
        found += tuning + repeats
    return found


def work(args: argparse.Namespace) -> None:
    """Does what is left, one run after the other; each row is kept as soon as it is there."""
    choose = ablations if args.ablate else pending
    if not choose(read(args.raw), args):
        return
    begin, longest = time.monotonic(), 0.0
    with Pool(args.workers, cache=args.cache) as pool:
        while runs := choose(read(args.raw), args):
            spent = time.monotonic() - begin
            if spent + longest > args.minutes * 60:
                print(f"{len(runs)} runs left after {spent / 60:.0f} minutes", file=sys.stderr)
                return
            started = time.monotonic()
            row = pool.execute(runs[0], limit=args.limit)
            took = time.monotonic() - started
            longest = max(longest, took)
            args.raw.parent.mkdir(parents=True, exist_ok=True)
            with args.raw.open("a") as file:
                file.write(json.dumps(row) + "\n")
            args.out.write_text(written(args))
            print(
                f"{row['method']} lr {row['lr']:g} seed {row['seed']}: {final(row):.4f} "
                f"({took:.0f} s, {len(runs) - 1} left)",
                file=sys.stderr,
                flush=True,
            )


def written(args: argparse.Namespace) -> str:
    """The page from whatever rows there are."""
    rows = read(args.raw)
    shared = common(args)
    mine = [row for row in rows if all(row[name] == value for name, value in shared.items())]
    return page(
        [row for row in mine if row["steps"] == args.steps],
        [row for row in mine if row["steps"] == args.ablate_steps and row["steps"] != args.steps],
        read(args.links),
        methods=(*OWN, *PEERS),
        rates={m: SIGN_RATES if m.startswith("demo") else RATES for m in (*OWN, *PEERS)},
        seeds=len(SEEDS),
        mbit=args.mbit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of dense and sparse optimizers.")
    parser.add_argument("--raw", type=Path, default=Path("docs/results/raw/scape.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scape.md"))
    parser.add_argument("--links", type=Path, default=Path("docs/results/raw/links.jsonl"))
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--cache", default=".cache/scape_table")
    parser.add_argument("--methods", nargs="+", default=[], help="only these, in this order")
    parser.add_argument("--model", default="llama-1m")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--max-bytes", type=int, default=6_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after them")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one run")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--ablate-steps", type=int, default=300)
    parser.add_argument("--ablate-lr", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.plan:
        for run in (ablations if args.ablate else pending)(read(args.raw), args):
            print(run.method, f"lr {run.lr:g}", f"seed {run.seed}")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.table:
        work(args)
    args.out.write_text(written(args))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
