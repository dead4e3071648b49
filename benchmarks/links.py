"""Step time and bytes of dense and sparse optimizers over real, slow links.

Every worker lives in a network namespace of its own; its link to a bridge passes a token bucket in
both directions. Bytes are read from the interface's counters, times from the clock. Needs root,
``ip`` and ``tc``; removes what it made.

    python benchmarks/links.py --mbit 100 --steps 5
    python benchmarks/links.py --mbit 50 100 500 1000 --out docs/results/links.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

METHODS = ("adams", "frozen-0.1", "frozen-0.01", "local-0.1", "local-0.01")
SIZES = (16 << 10, 1 << 20, 4 << 20)
SUBNET = "10.213.7"


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(workers: int, mbit: float) -> Generator[list[str]]:
    """One namespace for each worker, all on one bridge, limited to ``mbit`` both ways (0: not)."""
    tag = f"pl{os.getpid() % 100000}"
    hub, names = f"{tag}h", [f"{tag}w{i}" for i in range(workers)]
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "128kb", "limit", "8mb"]
    try:
        sh("ip", "netns", "add", hub)
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
            if mbit > 0:
                sh("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit)
                sh("tc", "-n", hub, "qdisc", "add", "dev", f"p{i}", "root", *limit)
        yield names
    finally:
        for name in [*names, hub]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent_bytes(interface: str) -> int:
    """Bytes that the interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise SystemExit(f"interface {interface} is not in /proc/net/dev")


def timed(action: Any, times: int) -> tuple[float, float]:
    """Median seconds and mean bytes of an action of all workers; the first turn warms up."""
    import torch.distributed as dist

    seconds, sent = [], []
    for _ in range(times + 1):
        dist.barrier()
        before, begin = sent_bytes("eth0"), time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
        sent.append(sent_bytes("eth0") - before)
    return statistics.median(seconds[1:]), statistics.mean(sent[1:])


def setup(
    method: str, model: Any, *, lr: float, clip: float | None = None, dense_steps: int = 0
) -> tuple[Any, Any]:
    """The module to call and the optimizer of a method, as ``family-density/key=value/...``.

    Families: adamw and adams (dense, sharded), frozen, moved and local (Scape), topk, demo, steps
    (local steps), powersgd. Further keys are keywords of Scape.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from planaria.optim import AdamS, Scape, Sharded, param_groups, peers

    name, *choices = method.split("/")
    family, _, share = name.partition("-")
    density = float(share or 1)
    groups = param_groups(model, dense_embeddings=False)
    if family == "adams":
        for group in groups:
            del group["dense"]
        return model, Sharded(AdamS, groups, lr=lr, max_norm=clip)
    if family == "adamw":
        for group in groups:
            del group["dense"]
        return model, Sharded(torch.optim.AdamW, groups, lr=lr, betas=(0.9, 0.95), max_norm=clip)
    if family in ("frozen", "moved", "local"):
        options: dict[str, Any] = {"dense_steps": dense_steps}
        for choice in choices:
            key, _, value = choice.partition("=")
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value
        return model, Scape(
            groups,
            lr=lr,
            density=density,
            unsent=family,
            max_norm=clip,
            check_every=0,
            **options,
        )
    if family == "powersgd":
        ddp = DistributedDataParallel(model)
        shapes = [p.shape for p in model.parameters()]
        state = peers.powersgd(shapes, density=density, dense_steps=dense_steps)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, AdamS(groups, lr=lr)
    classes = {"topk": peers.TopK, "demo": peers.DemoLike, "steps": peers.LocalSteps}
    if family not in classes:
        raise SystemExit(f"method {method} is unknown; see the families in {setup.__name__}()")
    return model, classes[family](groups, lr=lr, density=density)


def work(rank: int, args: argparse.Namespace) -> None:
    """One worker: collectives alone, computation alone, then whole steps of each method."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.store}",
        rank=rank,
        world_size=args.workers,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(0)
    pairs = [(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
    model = nn.Sequential(*(module for pair in pairs for module in pair))
    x = torch.randn(args.batch, args.width)
    rows: list[dict[str, Any]] = []

    def backward() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    for size in SIZES:
        whole, out = torch.zeros(size // 4), torch.zeros(size // 4)
        part = torch.zeros(size // 4 // args.workers)
        actions: dict[str, Any] = {
            "exchange": lambda a=whole, b=out: dist.all_to_all_single(b, a),
            "gather": lambda a=part, b=out: dist.all_gather_single(b, a),
        }
        for name, action in actions.items():
            seconds, sent = timed(action, args.steps)
            rows.append({"kind": name, "size": size, "seconds": seconds, "bytes": sent})
    seconds, _ = timed(backward, args.steps)
    rows.append({"kind": "compute", "seconds": seconds})
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for method in args.methods:
        model.load_state_dict(state)
        module, optimizer = setup(method, model, lr=1e-3)

        def step(module: Any = module, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

        seconds, sent = timed(step, args.steps)
        rows.append({"kind": method, "seconds": seconds, "bytes": sent})
    params = sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    if rank == 0:
        common = {"mbit": args.rate, "workers": args.workers, "params": params, "vectors": vectors}
        print(json.dumps([{**common, **row} for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def measure(mbit: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one rate."""
    with namespaces(args.workers, mbit) as names, tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[str]] = []
        for rank, name in enumerate(names):
            command = [sys.executable, __file__, "--rank", str(rank), "--rate", str(mbit)]
            command += ["--store", f"{folder}/store", "--workers", str(args.workers)]
            command += ["--width", str(args.width), "--layers", str(args.layers)]
            command += ["--batch", str(args.batch), "--steps", str(args.steps)]
            command += ["--methods", *args.methods]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
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
    return json.loads(outputs[0].splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Measured and predicted step times as a Markdown table."""
    from planaria.optim.plan_comm import METHODS as PLANNED
    from planaria.optim.plan_comm import Job, Link, seconds

    lines = [
        "| link, Mbit/s | method | step, ms | predicted, ms | off | sent, kB | faster | less sent |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mbit in sorted({row["mbit"] for row in rows}):
        mine = {row["kind"]: row for row in rows if row["mbit"] == mbit}
        compute, base = mine["compute"]["seconds"], mine.get("adams")
        for kind in (k for k in mine if k not in ("exchange", "gather", "compute")):
            row = mine[kind]
            method, _, density = kind.partition("-")
            job = Job(
                params=row["params"],
                workers=row["workers"],
                compute=compute,
                dense_params=row["vectors"],
            )
            name = "dense" if method in ("adams", "adamw") else method
            guess = float("nan")
            if name in PLANNED:
                guess = seconds(job, Link(mbit=mbit or 20000.0), name, float(density or 1))
            gain = f"{base['seconds'] / row['seconds']:.2f}" if base else "–"
            less = f"{base['bytes'] / row['bytes']:.1f}" if base else "–"
            lines.append(
                f"| {mbit:g} | {kind} | {row['seconds'] * 1e3:.1f} | {guess * 1e3:.1f} | "
                f"{guess / row['seconds'] - 1:+.0%} | {row['bytes'] / 1e3:.1f} | {gain} | {less} |"
            )
        lines.append(f"| {mbit:g} | (computation) | {compute * 1e3:.1f} | | | | | |")
    return lines


def collectives(rows: list[dict[str, Any]]) -> list[str]:
    """Times of single collectives, and the share of the rate that they reach."""
    lines = [
        "| link, Mbit/s | collective | buffer, kB | ms | sent, kB | share of the rate |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["kind"] in ("exchange", "gather"):
            share = row["bytes"] * 8e-6 / row["mbit"] / row["seconds"] if row["mbit"] else 0
            lines.append(
                f"| {row['mbit']:g} | {row['kind']} | {row['size'] / 1e3:.0f} | "
                f"{row['seconds'] * 1e3:.1f} | {row['bytes'] / 1e3:.0f} | {share:.2f} |"
            )
    return lines


def page(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """The results as a Markdown page."""
    model = f"{args.layers} layers of {args.width} x {args.width}, batch {args.batch} a worker"
    return [
        "# Steps over slow links",
        "",
        f"{rows[0]['workers']} gloo workers, each in its own network namespace behind a token "
        f"bucket (128 kB burst) in both directions; {model} ({rows[0]['params']:,} float32 "
        f"weights). Medians of {args.steps} steps; bytes from the interface's counter of one "
        "worker, frame headers and acknowledgements included. `benchmarks/links.py` makes it.",
        "",
        *table(rows),
        "",
        "## Single collectives",
        "",
        *collectives(rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps over slow links in network namespaces.")
    parser.add_argument("--mbit", type=float, nargs="+", default=[50, 100, 500, 1000])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one rate")
    parser.add_argument("--raw", type=Path, help="JSON lines of every row, appended")
    parser.add_argument("--out", type=Path, help="Markdown page of the results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args)
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root; run as root or under sudo")
    rows: list[dict[str, Any]] = []
    for mbit in args.mbit:
        rows += measure(mbit, args)
    if args.raw:
        with args.raw.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    text = "\n".join(page(rows, args)) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
