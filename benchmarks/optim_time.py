"""Time of the optimizers' own arithmetic against ``torch.optim.AdamW(foreach=True)``.

One process, no link: what a step costs besides communication, as CPU time of one thread. Turns of
all optimizers alternate, so that other load on the machine's caches meets all of them alike. A lone
worker owns every weight; one of four owns a quarter, and whatever it would receive is a copy of
what it sends.

    python benchmarks/optim_time.py --out docs/results/optim_time.md
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planaria.optim import AdamS, Scape, Sharded
from planaria.optim.calibrate import Echo

BASE = "AdamW(foreach=True)"


def parameters(layers: int, width: int) -> list[nn.Parameter]:
    """Matrices and vectors of a stack of layers, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for _ in range(layers) for shape in ((width, width), (width,))]
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def candidates(layers: int, width: int) -> dict[tuple[str, int], Any]:
    """Every optimizer on parameters of its own, by name and number of workers."""

    def fresh() -> list[nn.Parameter]:
        return parameters(layers, width)

    found: dict[tuple[str, int], Any] = {
        (BASE, 1): torch.optim.AdamW(fresh(), foreach=True),
        ("AdamW(fused=True)", 1): torch.optim.AdamW(fresh(), fused=True),
        ("AdamS()", 1): AdamS(fresh()),
        ("AdamS(foreach=False)", 1): AdamS(fresh(), foreach=False),
    }
    for size in (1, 4):
        found["Sharded(AdamS)", size] = Sharded(AdamS, fresh(), group=Echo(size))
        for density in (0.1, 0.01):
            for unsent in ("frozen", "local"):
                name = f"Scape(density={density}, unsent={unsent!r})"
                options = {"density": density, "unsent": unsent, "check_every": 0}
                found[name, size] = Scape(fresh(), group=Echo(size), **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the optimizers' own arithmetic.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizers = candidates(args.layers, args.width)
    # As after a backward of a large model: glibc then keeps what it gets instead of mapping anew.
    for _ in range(2):
        torch.empty(7 << 20)
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in optimizers}
    for turn in range(args.turns + 2):
        for name, optimizer in optimizers.items():
            begin = time.process_time()
            optimizer.step()
            if turn > 1:
                seconds[name].append(time.process_time() - begin)
    millions = args.layers * (args.width + 1) * args.width / 1e6
    base = statistics.median(seconds[BASE, 1])
    lines = [
        "# Time of the optimizers' own arithmetic",
        "",
        f"{millions:.2f} M float32 weights in {args.layers} layers, one thread, no link, medians of "
        f"the CPU time of {args.turns} alternating turns. One of one worker owns every weight, one "
        "of four a quarter. `benchmarks/optim_time.py` makes it.",
        "",
        "| optimizer | one of | ms per million weights | of AdamW(foreach=True) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for (name, size), times in seconds.items():
        middle = statistics.median(times)
        lines.append(f"| `{name}` | {size} | {middle * 1e3 / millions:.2f} | {middle / base:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
