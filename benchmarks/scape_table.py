"""Loss of dense and sparse optimizers on the language-model recipe, and time to a loss on a link.

Every run is a real group of gloo workers on loopback that trains the recipe's network on its data.
Finished runs are kept as JSON lines and not done again, so the command may be stopped and started:

    python benchmarks/scape_table.py                      about five hours on two cores
    python benchmarks/scape_table.py --plan               say what is left to do
    python benchmarks/scape_table.py --minutes 30         stop before a run would pass 30 minutes
    python benchmarks/scape_table.py --ablate --steps 400 one switch at a time
    python benchmarks/scape_table.py --table              only write the page from the rows

First each method runs with each learning rate and seed 0, then with the other seeds at its best
one. Step times over the link come from ``benchmarks/links.py --raw``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from links import setup

METHODS = (
    "adamw",
    "adams",
    "frozen-0.1",
    "frozen-0.01",
    "local-0.1",
    "local-0.01/outer_momentum=0.5",
    "topk-0.1",
    "topk-0.01",
    "demo-0.1",
    "demo-0.01",
    "powersgd-0.1",
    "powersgd-0.01",
    "steps-0.1",
    "steps-0.01",
)
RATES = (1e-3, 2e-3, 4e-3)
SIGN_RATES = (2e-4, 5e-4, 1e-3)
"""For the DeMo-like method, whose steps are signs."""
SEEDS = (0, 1, 2)
WARM = 0.1
"""Share of dense steps at the start of the sparse methods that have them."""

ABLATIONS = (
    "frozen-0.1",
    "frozen-0.1/step_scale=0",
    "frozen-0.1/step_scale=0.5",
    "frozen-0.1/clamp_after=1000000",
    "frozen-0.1/clamp_after=0",
    "frozen-0.1/after_send=keep",
    "frozen-0.1/buffer=feedback",
    "frozen-0.1/statistic=momentum",
    "frozen-0.1/statistic=gradient",
    "frozen-0.1/statistic=cycle",
    "frozen-0.1/decay=lazy",
    "frozen-0.1/decay=all",
    "frozen-0.1/refresh=4",
    "frozen-0.1/k_scope=bucket",
    "frozen-0.1/k_scope=tensor",
    "frozen-0.1/dense_ndim=-1",
    "frozen-0.1/dense_steps=0",
    "moved-0.1",
    "local-0.1",
    "local-0.1/outer_momentum=0",
    "local-0.1/outer_momentum=0.5",
    "local-0.1/average_moments=false",
    "local-0.1/cycle=contiguous",
    "local-0.1/wire=float32",
    "local-0.1/dense_steps=0",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; the same values are the same run."""

    method: str
    """As :func:`links.setup` reads it."""
    lr: float
    """Highest learning rate."""
    seed: int
    """Of weights and order of samples."""
    steps: int
    """Optimizer steps."""
    model: str
    """Name in the recipe."""
    workers: int
    """Gloo workers."""
    batch: int
    """Samples of one worker and step."""
    sequence: int
    """Tokens of a sample."""
    vocab_size: int
    """Entries of the tokenizer."""
    max_bytes: int
    """Bytes of text."""


def train(rank: int, store: str, run: Run, cache: str, pipe: Any) -> None:
    """One worker of one run; worker 0 sends the curve through ``pipe``."""
    import torch
    import torch.distributed as dist

    from planaria.recipes.llm.config import LlmConfig
    from planaria.recipes.llm.data import Order, prepare
    from planaria.recipes.llm.models import causal_loss, make

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=run.workers,
        timeout=timedelta(seconds=300),
    )
    config = LlmConfig(
        model=run.model,
        cache=Path(cache),
        max_bytes=run.max_bytes,
        vocab_size=run.vocab_size,
        sequence=run.sequence,
        batch=run.batch,
        steps=run.steps,
        warmup=max(1, run.steps // 20),
        lr=run.lr,
        seed=run.seed,
        eval_batches=16,
        held_out=0.05,
    )
    corpus = prepare(config, world=run.workers)
    model = make(config, corpus.vocabulary)
    module, optimizer = setup(
        run.method, model, lr=run.lr, clip=config.clip, dense_steps=round(WARM * run.steps)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: share_of_rate(done, run))
    order = Order(
        samples=corpus.samples, seed=run.seed, world=run.workers, batch=run.batch, accumulate=1
    )
    curve: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for step in range(1, run.steps + 1):
        ids = torch.from_numpy(corpus.batch(order.ids(step, shard=rank, micro=0)))
        optimizer.zero_grad()
        loss = causal_loss(module(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        if not hasattr(optimizer, "max_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        schedule.step()
        if step % max(1, run.steps // 50) == 0 or step == run.steps:
            curve.append((step, held_out(model, config, corpus, rank, run.workers)))
    if rank == 0:
        params = sum(p.numel() for p in model.parameters())
        vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
        seconds = time.perf_counter() - begin
        pipe.send({"curve": curve, "params": params, "vectors": vectors, "seconds": seconds})
    dist.barrier()
    dist.destroy_process_group()


def share_of_rate(done: int, run: Run) -> float:
    """A line up, then half a cosine down to a tenth."""
    warm = max(1, run.steps // 20)
    if done < warm:
        return (done + 1) / warm
    progress = min(1.0, (done - warm) / max(1, run.steps - 1 - warm))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def held_out(model: Any, config: Any, corpus: Any, rank: int, world: int) -> float:
    """Held-out loss of the mean of the workers' models (which is each of them where all agree)."""
    import contextlib

    import torch
    import torch.distributed as dist

    from planaria.recipes.llm.evaluate import evaluate

    kept = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param)
            param.div_(world)
    result = evaluate(
        model,
        config=config,
        corpus=corpus,
        shard=rank,
        world=world,
        autocast=contextlib.nullcontext(),
    )
    model.load_state_dict(kept)
    return result.loss


def execute(run: Run, cache: str, limit: float) -> dict[str, Any]:
    """Trains one run in fresh processes and returns its row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "planaria.optim.scape"])
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = context.Pipe(duplex=False)
        processes = [
            context.Process(target=train, args=(rank, f"{folder}/store", run, cache, theirs))
            for rank in range(run.workers)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            if not mine.poll(limit):
                raise SystemExit(f"{run} takes longer than {limit:g} s; raise --limit")
            found = mine.recv()
        except EOFError:
            raise SystemExit(f"{run} failed; see the traceback above") from None
        finally:
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()
                    process.join()
    return {**asdict(run), **found, "machine": platform.machine(), "cores": os.cpu_count()}


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


def pending(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[Run]:
    """Runs that can be started now and are not done: learning rates first, then seeds."""
    done = {key(row): row for row in rows}
    common: dict[str, Any] = {
        "steps": args.steps,
        "model": args.model,
        "workers": args.workers,
        "batch": args.batch,
        "sequence": args.sequence,
        "vocab_size": args.vocab_size,
        "max_bytes": args.max_bytes,
    }
    if args.ablate:
        runs = [Run(method=m, lr=args.ablate_lr, seed=0, **common) for m in ABLATIONS]
        return [run for run in runs if key(asdict(run)) not in done]
    first, second = [], []
    for method in args.methods:
        rates = SIGN_RATES if method.startswith("demo") else RATES
        tuned = [Run(method=method, lr=lr, seed=SEEDS[0], **common) for lr in rates]
        left = [run for run in tuned if key(asdict(run)) not in done]
        first += left
        if not left:
            best = min(tuned, key=lambda run: final(done[key(asdict(run))]))
            seeds = [Run(method=method, lr=best.lr, seed=s, **common) for s in SEEDS[1:]]
            second += [run for run in seeds if key(asdict(run)) not in done]
    return first + second


def table(rows: list[dict[str, Any]], links: list[dict[str, Any]], mbit: float) -> list[str]:
    """One line for each method, from whatever is done."""
    from planaria.optim.plan_comm import Job, Link, seconds, volume

    grouped: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for row in rows:
        grouped.setdefault(row["method"], {}).setdefault(row["lr"], []).append(row)
    # The rate is chosen by the first seed, which every rate has, so that no rate wins by luck.
    best = {
        method: min(rates.values(), key=lambda rs: min(final(r) for r in rs if r["seed"] == 0))
        for method, rates in grouped.items()
        if all(any(r["seed"] == 0 for r in rs) for rs in rates.values())
    }
    base = statistics.mean(map(final, best["adams"])) if "adams" in best else math.nan
    times = {row["kind"]: row["seconds"] for row in links if row.get("mbit") == mbit}
    lines = [
        f"| method | lr | seeds | loss | against dense AdamS | steps to loss x 1.02 | s a step at "
        f"{mbit:g} Mbit/s | minutes to loss x 1.02 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, runs in best.items():
        losses = [final(r) for r in runs]
        reached = [steps_to(r["curve"], base * 1.02) for r in runs]
        steps = statistics.mean(s for s in reached if s) if all(reached) else None
        name, how = method.split("/")[0], ""
        length = times.get(name)
        family, _, share = name.partition("-")
        plannable = {"adams": "dense", "adamw": "dense", "frozen": "frozen", "local": "local"}
        if length is None and family in plannable:
            row = runs[0]
            job = Job(params=row["params"], workers=row["workers"], dense_params=row["vectors"])
            kind, density = plannable[family], float(share or 1)
            length, how = seconds(job, Link(mbit=mbit), kind, density), " (planned, no computation)"
            assert volume(job, kind, density).total > 0
        minutes = f"{steps * length / 60:.1f}" if steps and length else "–"
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        lines.append(
            f"| {method} | {runs[0]['lr']:g} | {len(runs)} | {statistics.mean(losses):.3f}{spread} | "
            f"{statistics.mean(losses) / base - 1:+.1%} | {steps or 'not reached'} | "
            f"{f'{length:.3f}{how}' if length else '–'} | {minutes} |"
        )
    return lines


def steps_to(curve: list[list[float]], loss: float) -> int | None:
    """First evaluated step with at most this loss."""
    return next((int(step) for step, value in curve if value <= loss), None)


def page(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The results as a Markdown page, with what is still missing."""
    mine = [r for r in rows if r["steps"] == args.steps and r["model"] == args.model]
    left = len(pending(rows, args))
    links = read(args.links) if args.links else []
    state = (
        "All runs are done." if not left else f"{left} runs that can start now are not done yet."
    )
    return "\n".join(
        [
            "# Dense and sparse optimizers on the language-model recipe",
            "",
            f"{args.model}, {args.workers} workers x {args.batch} samples x {args.sequence} tokens, "
            f"{args.steps} steps, the standard library's sources ({args.max_bytes / 1e6:g} MB); "
            f"sparse methods of this package are dense for the first {WARM:.0%} of the steps. "
            f"Learning rates {', '.join(f'{r:g}' for r in RATES)} with seed 0, then the other "
            f"seeds at the best. {state} `benchmarks/scape_table.py` makes this page.",
            "",
            *table([r for r in mine if r["method"] in args.methods], links, args.mbit),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss of dense and sparse optimizers.")
    parser.add_argument("--raw", type=Path, default=Path("docs/results/scape.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scape.md"))
    parser.add_argument("--links", type=Path, help="JSON lines of benchmarks/links.py --raw")
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--cache", default=".cache/scape_table")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--model", default="llama-1m")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-bytes", type=int, default=6_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after them")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one run")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--ablate-lr", type=float, default=2e-3)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.plan:
        for run in pending(read(args.raw), args):
            print(run.method, f"lr {run.lr:g}", f"seed {run.seed}")
        return
    begin, longest = time.monotonic(), 0.0
    while not args.table and (runs := pending(read(args.raw), args)):
        spent = time.monotonic() - begin
        if spent + longest > args.minutes * 60:
            print(f"{len(runs)} runs left after {spent / 60:.0f} minutes", file=sys.stderr)
            break
        started = time.monotonic()
        row = execute(runs[0], args.cache, args.limit)
        longest = max(longest, time.monotonic() - started)
        args.raw.parent.mkdir(parents=True, exist_ok=True)
        with args.raw.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{row['method']} lr {row['lr']:g} seed {row['seed']}: {final(row):.4f} "
            f"({time.monotonic() - started:.0f} s, {len(runs) - 1} left)",
            file=sys.stderr,
            flush=True,
        )
    if args.ablate:
        rows = [r for r in read(args.raw) if r["method"] in ABLATIONS and r["steps"] == args.steps]
        for row in sorted(rows, key=final):
            print(f"{row['method']:<40} {final(row):.4f}")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(read(args.raw), args))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
