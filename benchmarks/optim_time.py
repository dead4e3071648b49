"""Time of the optimizers' own arithmetic against ``torch.optim.AdamW(foreach=True)``.

One process, no link: what a step costs besides communication, as CPU time of one thread. Turns of
all optimizers alternate, so that other load on the machine's caches meets all of them alike.

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

BASE = "AdamW(foreach=True)"


def parameters(layers: int, width: int) -> list[nn.Parameter]:
    """Matrices and vectors of a stack of layers, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for _ in range(layers) for shape in ((width, width), (width,))]
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def candidates(layers: int, width: int) -> dict[str, Any]:
    """Every optimizer on parameters of its own."""

    def fresh() -> list[nn.Parameter]:
        return parameters(layers, width)

    return {
        BASE: torch.optim.AdamW(fresh(), foreach=True),
        "AdamW(fused=True)": torch.optim.AdamW(fresh(), fused=True),
        "AdamS()": AdamS(fresh()),
        "AdamS(foreach=True)": AdamS(fresh(), foreach=True),
        "Sharded(AdamS)": Sharded(AdamS, fresh()),
        "Scape(density=0.1)": Scape(fresh(), density=0.1, check_every=0),
        "Scape(density=0.01)": Scape(fresh(), density=0.01, check_every=0),
        "Scape(density=0.01, unsent='local')": Scape(
            fresh(), density=0.01, unsent="local", check_every=0
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of the optimizers' own arithmetic.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizers = candidates(args.layers, args.width)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(args.turns + 2):
        for name, optimizer in optimizers.items():
            begin = time.process_time()
            optimizer.step()
            if turn > 1:
                seconds[name].append(time.process_time() - begin)
    millions = args.layers * (args.width + 1) * args.width / 1e6
    base = statistics.median(seconds[BASE])
    lines = [
        "# Time of the optimizers' own arithmetic",
        "",
        f"{millions:.2f} M float32 weights in {args.layers} layers, one thread, one worker (so one "
        "owner has all of it), medians of the CPU time of "
        f"{args.turns} alternating turns. `benchmarks/optim_time.py` makes it.",
        "",
        "| optimizer | ms per million weights | of AdamW(foreach=True) |",
        "| --- | ---: | ---: |",
    ]
    for name, times in seconds.items():
        middle = statistics.median(times)
        lines.append(f"| `{name}` | {middle * 1e3 / millions:.2f} | {middle / base:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
