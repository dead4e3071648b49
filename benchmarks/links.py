"""Step time and bytes of dense and sparse optimizers over real, slow links.

Every worker lives in a network namespace of its own; its link to a bridge passes a token bucket in
both directions. Bytes are read from the interface's counters, times from the clock. Needs root,
``ip`` and ``tc``; removes what it made.

    python benchmarks/links.py                            all rates, a plain network
    python benchmarks/links.py --mbit 100 --network llama-1m --methods adams local-0.01
    python benchmarks/links.py --table                    only write the page from the rows

A rate of 0 is loopback: all workers in one namespace, without a limit.
Rows are appended, and of equal ones the last counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

from scape_methods import job, parse, setup

METHODS = (
    "adams",
    "frozen-0.75/wire=int4/statistic=cycle",
    "frozen-0.077/wire=int4/statistic=cycle",
    "frozen-0.1",
    "frozen-0.01",
    "local-0.1",
    "local-0.01",
)
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
PAUSE = 0.03
"""Seconds before a collective that is measured alone: as a computation, it lets the bucket fill."""
SUBNET = "10.213.7"
LOOPBACK = 20_000.0
"""Mbit/s that stand for a link without a limit in a prediction."""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(workers: int, mbit: float) -> Generator[list[str]]:
    """A namespace for each worker, all on one bridge and limited to ``mbit`` both ways.

    At a rate of 0 all workers get one namespace, which has a loopback interface only.
    """
    tag = f"pl{os.getpid() % 100000}"
    hub, names = f"{tag}h", [f"{tag}w{i}" for i in range(workers)]
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "limit", "8mb"]
    try:
        sh("ip", "netns", "add", hub)
        if not mbit:
            sh("ip", "-n", hub, "link", "set", "lo", "up")
            yield [hub] * workers
            return
        sh("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
            peer = ["peer", "name", f"p{i}", "netns", hub]
            sh("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            sh("ip", "-n", name, "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", hub, "link", "set", f"p{i}", "master", "br0", "up")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            sh("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit)
            sh("tc", "-n", hub, "qdisc", "add", "dev", f"p{i}", "root", *limit)
        yield names
    finally:
        for name in [*names, hub]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent_bytes() -> int:
    """Bytes that this worker's interface has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise SystemExit(f"interface {interface} is not in /proc/net/dev")


def timed(action: Any, beside: Any, *, times: int, empty: float) -> tuple[float, float]:
    """Median seconds until all workers have ended a single collective, and mean bytes.

    ``empty``: seconds of a collective that carries next to nothing, by which they meet.
    """
    seconds, sent = [], []
    for _ in range(times + 1):
        time.sleep(PAUSE)
        beside.table([0.0])
        before, begin = sent_bytes(), time.perf_counter()
        action()
        beside.table([0.0])
        seconds.append(time.perf_counter() - begin)
        # Only now, since what was handed over may not have left.
        sent.append(sent_bytes() - before)
    return max(0.0, statistics.median(seconds[1:]) - empty), statistics.mean(sent[1:])


def steady(step: Any, times: int) -> tuple[float, float]:
    """Median seconds and mean bytes of steps that follow each other, as in training.

    Nothing waits between them, so that a mask which is under way at the end of a step costs its
    time in the next one. Two steps warm up.
    """
    import torch.distributed as dist

    step()
    step()
    dist.barrier()
    before, seconds = sent_bytes(), []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    sent = sent_bytes() - before
    dist.barrier()
    return statistics.median(seconds), sent / times


def network(args: argparse.Namespace) -> tuple[Any, Any]:
    """A model and a function of a module that gives its loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if args.network == "mlp":
        pairs = [(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
        x = torch.randn(args.batch, args.width)
        model = nn.Sequential(*(module for pair in pairs for module in pair))
        return model, lambda module: module(x).square().mean()
    from planaria.recipes.llm.config import LlmConfig
    from planaria.recipes.llm.models import causal_loss, make
    from planaria.recipes.llm.tokenizer import Vocabulary

    size = args.vocab_size
    config = LlmConfig(model=args.network, vocab_size=size, sequence=args.sequence)
    model = make(config, Vocabulary(folder=Path(), size=size, end=size - 1, end_text="", digest=""))
    ids = torch.randint(size, (args.batch, args.sequence))
    return model, lambda module: causal_loss(module(input_ids=ids, use_cache=False).logits, ids)


def work(rank: int, args: argparse.Namespace) -> None:
    """One worker: collectives alone, then for each method computation, arithmetic, whole steps."""
    import torch
    import torch.distributed as dist

    from planaria.optim import calibrate
    from planaria.optim.collectives import Workers

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.store}",
        rank=rank,
        world_size=args.workers,
        timeout=timedelta(seconds=120),
    )
    rows: list[dict[str, Any]] = []
    beside = Workers(None)
    latency = calibrate.latency(beside, turns=4 * args.steps)
    for size in SIZES:
        whole, out = torch.zeros(size // 4), torch.zeros(size // 4)
        part = torch.zeros(size // 4 // args.workers)
        actions: dict[str, Any] = {
            "exchange": lambda a=whole, b=out: dist.all_to_all_single(b, a),
            "gather": lambda a=part, b=out: dist.all_gather_single(b, a),
        }
        for name, action in actions.items():
            seconds, sent = timed(action, beside, times=args.steps, empty=latency)
            rows.append({"kind": name, "size": size, "seconds": seconds, "bytes": sent})
    model, loss = network(args)
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def backward() -> None:
        model.zero_grad()
        loss(model).backward()

    for method in args.methods:
        model.load_state_dict(state)
        # Before and after every method, since the machine's speed may drift.
        before = calibrate.together(backward, beside, turns=args.steps, empty=latency)
        found: dict[str, Any] = {"kind": method}
        if plannable(method):
            own = calibrate.arithmetic(
                lambda model, workers, name=method: setup(name, model, lr=1e-3, group=workers)[1],
                workers=args.workers,
                beside=beside,
                empty=latency,
                turns=args.steps,
            )
            found["arithmetic"] = vars(own)
        module, optimizer = setup(method, model, lr=1e-3)

        def step(module: Any = module, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss(module).backward()
            optimizer.step()

        seconds, sent = steady(step, args.steps)
        # The optimizer's hooks go with it; they would send gradients.
        del module, optimizer, step
        gc.collect()
        after = calibrate.together(backward, beside, turns=args.steps, empty=latency)
        found |= {"compute": (before + after) / 2, "seconds": seconds, "bytes": sent}
        rows.append(found)
    params = sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    if rank == 0:
        common = {
            "mbit": args.rate,
            "network": args.network,
            "batch": args.batch,
            "workers": args.workers,
            "params": params,
            "vectors": vectors,
            "tensors": sum(1 for _ in model.parameters()),
            "latency": latency,
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps([{**common, **row} for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def measure(mbit: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one rate."""
    passed = ("workers", "network", "width", "layers", "batch", "sequence", "vocab_size", "steps")
    with namespaces(args.workers, mbit) as names, tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[str]] = []
        for rank, name in enumerate(names):
            command = [sys.executable, __file__, "--rank", str(rank), "--rate", str(mbit)]
            command += ["--store", f"{folder}/store", "--methods", *args.methods]
            for option in passed:
                command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
            interface = "eth0" if mbit else "lo"
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        try:
            outputs = [p.communicate(timeout=args.limit)[0] for p in processes]
        finally:
            for p in processes:
                if p.poll() is None:
                    p.kill()
                    p.wait()
    if any(p.returncode for p in processes):
        raise SystemExit(f"a worker ended with {[p.returncode for p in processes]}")
    rows = json.loads(outputs[0].splitlines()[-1])
    if not mbit:
        # All workers share the loopback interface, whose counter counts them together.
        rows = [{**row, "bytes": row["bytes"] / args.workers} for row in rows]
    return rows


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows about the same thing the last one."""
    found = {
        (r["network"], r["batch"], r["workers"], r["mbit"], r["kind"], r.get("size")): r
        for r in rows
    }
    return list(found.values())


def plannable(method: str) -> str | None:
    """The name by which ``plan-comm`` knows a method; nothing for one that it does not know."""
    from planaria.optim.plan_comm import METHODS as PLANNED

    family, _, _ = parse(method)
    name = "dense" if family in ("adams", "adamw") else family
    return name if name in PLANNED else None


def predicted(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Seconds that ``plan-comm`` says for a row's step, from what was measured apart in the same run.

    That is the computation, the arithmetic on other models, and the times of single collectives.
    """
    from planaria.optim.plan_comm import Link, seconds

    name = plannable(row["kind"])
    if name is None:
        return None
    what = {key: row[key] for key in ("params", "vectors", "workers", "compute")}
    more = {key: row[key] for key in ("tensors", "arithmetic") if key in row}
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    if "arithmetic" in row:
        away = 1 - 1 / row["workers"]
        for kind in ("exchange", "gather"):
            same = ("network", "batch", "workers", "mbit")
            alone = [r for r in rows if r["kind"] == kind and all(r[k] == row[k] for k in same)]
            found = sorted((r["size"] * away, r["seconds"]) for r in alone)
            points[f"{kind}s"] = tuple(found)
    link = Link(mbit=row["mbit"] or LOOPBACK, latency=row["latency"], **points)
    return seconds(job(row["kind"], **what, **more), link, name, parse(row["kind"])[1])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Measured and predicted step times as a Markdown table."""
    lines = [
        "| link, Mbit/s | method | computation, ms | step, ms | predicted, ms | off | sent, kB | "
        "times as fast | times less sent |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    steps = [row for row in rows if row["kind"] not in ("exchange", "gather")]
    for row in sorted(steps, key=lambda row: row["mbit"] or math.inf):
        base = next((r for r in steps if (r["mbit"], r["kind"]) == (row["mbit"], "adams")), row)
        guess = predicted(row, rows)
        cells = [
            f"{row['mbit']:g}" if row["mbit"] else "loopback",
            row["kind"].replace("/", ", "),
            f"{row['compute'] * 1e3:.1f}",
            f"{row['seconds'] * 1e3:.1f}",
            f"{guess * 1e3:.1f}" if guess else "–",
            f"{guess / row['seconds'] - 1:+.0%}" if guess else "–",
            f"{row['bytes'] / 1e3:.1f}",
            f"{base['seconds'] / row['seconds']:.2f}",
            f"{base['bytes'] / row['bytes']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def collectives(rows: list[dict[str, Any]]) -> list[str]:
    """Times of single collectives, and the share of the rate that they reach."""
    lines = [
        "| link, Mbit/s | collective | buffer, kB | ms | sent, kB | share of the rate |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["kind"] in ("exchange", "gather"):
            share = "–"
            if row["mbit"]:
                share = f"{row['bytes'] * 8e-6 / row['mbit'] / row['seconds']:.2f}"
            lines.append(
                f"| {row['mbit']:g} | {row['kind']} | {row['size'] / 1e3:.0f} | "
                f"{row['seconds'] * 1e3:.1f} | {row['bytes'] / 1e3:.0f} | {share} |"
            )
    return lines


def within(rows: list[dict[str, Any]]) -> list[str]:
    """How many steps lie how near to what was predicted, among those with measured arithmetic."""
    pairs = [(row, predicted(row, rows)) for row in rows if "arithmetic" in row]
    offs = sorted(abs(guess / row["seconds"] - 1) for row, guess in pairs if guess)
    if not offs:
        return []
    near = sum(off <= 0.15 for off in offs)
    middle = statistics.median(offs)
    return [
        f"{near} of {len(offs)} steps lie within 15 % of what is predicted; the median is {middle:.0%}, "
        f"the largest {offs[-1]:.0%}.",
        "",
    ]


def page(rows: list[dict[str, Any]]) -> list[str]:
    """The results as a Markdown page."""
    loads = sorted(row.get("load", 0) for row in rows)
    lines = [
        "# Steps over slow links",
        "",
        f"{rows[0]['workers']} gloo workers on two cores, each in its own network namespace behind "
        "a token bucket (128 kB burst) in both directions; loopback is one namespace without a "
        "limit. Medians of steps that follow each other; bytes from the interface's counter, "
        "headers and acknowledgements included. What is predicted is what `planaria plan-comm` "
        "says from what the same run measured apart: the computation until the last worker has ended "
        "it, the optimizer's arithmetic on three other models, and single collectives. "
        "`benchmarks/links.py` makes this page.",
        "",
        *within(rows),
        f"Load averages at these measurements were {loads[0]:g} to {loads[-1]:g}, of which four are "
        "the workers'. Above that, times are those of a busy machine and the plan, which knows "
        "nothing of others, is too short for them; bytes do not depend on it.",
    ]
    for name, batch in dict.fromkeys((row["network"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["batch"]) == (name, batch)]
        what = f"{name}, batch {batch} a worker, {mine[0]['params']:,} float32 weights"
        lines += ["", f"## {what}", "", *table(mine)]
    plain = [row for row in rows if row["network"] == "mlp"]
    return [*lines, "", "## Single collectives", "", *collectives(plain)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps over slow links in network namespaces.")
    parser.add_argument("--mbit", type=float, nargs="+", default=[50, 100, 500, 1000, 0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--network", default="mlp", help="mlp, or a model of the recipe")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one rate")
    parser.add_argument("--raw", type=Path, default=Path("docs/results/raw/links.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/links.md"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args)
        return
    if not args.table and os.geteuid() != 0:
        raise SystemExit("network namespaces need root; run as root or under sudo")
    args.raw.parent.mkdir(parents=True, exist_ok=True)
    for mbit in () if args.table else args.mbit:
        rows = measure(mbit, args)
        with args.raw.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    text = "\n".join(page(newest([json.loads(x) for x in args.raw.read_text().splitlines()])))
    print(text)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
