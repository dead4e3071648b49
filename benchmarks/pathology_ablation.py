"""What each part of both pathology papers adds, on synthetic tissue: one resumable command.

    python benchmarks/pathology_ablation.py --out runs/ablation             # one factor at a time
    python benchmarks/pathology_ablation.py --out runs/ablation --full      # all combinations, 3 seeds

Every cell is a run of the recipe in this process, with a scaled-down network; its result is a file,
so a broken-off call goes on where it stopped, and several calls with other ``--part I/N`` share the
work. The table goes to ``docs/results/pathology.md`` when all cells are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planaria.recipes.gleason import GleasonConfig
from planaria.recipes.metastasis import MetastasisConfig

METASTASIS = MetastasisConfig(
    synthetic=(2048, 512, 2048),
    width=0.25,
    stem_stride=2,
    attention=False,
    fusion=False,
    rcc=False,
    epochs=8,
    evals=4,
    lr=4e-3,
)
"""The bare baseline of the metastasis table."""

GLEASON = GleasonConfig(
    synthetic=600,
    width=0.25,
    depth=0.5,
    tiles=16,
    px=64,
    mpp=2.0,
    pbir=False,
    dc="standardise",
    loss="mse",
    epochs=10,
    evals=5,
    lr=4e-3,
)
"""The bare baseline of the Gleason table."""

SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "metastasis": {
        "RCC": {"rcc": True},
        "stem": {"stem_stride": 1},
        "attention": {"attention": True},
        "fusion": {"fusion": True},
    },
    "gleason": {
        "PBIR": {"pbir": True},
        "DC": {"dc": "batchnorm"},
        "QWMSE": {"loss": "qwmse"},
    },
}
MEASURE = {"metastasis": "auc", "gleason": "kappa"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a recipe, the switches that are on, a seed."""

    recipe: str
    on: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        return "-".join([self.recipe, *(self.on or ("bare",)), str(self.seed)])


def cells(*, full: bool, seeds: int) -> Iterator[Cell]:
    """The cells of the short or the full table; the bare baseline comes first."""
    for seed in range(seeds):
        for recipe, switches in SWITCHES.items():
            names = tuple(switches)
            chosen = (
                [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
                if full
                else [(), *((name,) for name in names), names]
            )
            for on in chosen:
                yield Cell(recipe=recipe, on=on, seed=seed)


def run(cell: Cell, *, out: Path, scale: float) -> dict[str, Any]:
    """Trains the cell and returns its measure with interval."""
    base: Any = METASTASIS if cell.recipe == "metastasis" else GLEASON
    values: dict[str, Any] = {}
    for name in cell.on:
        values |= SWITCHES[cell.recipe][name]
    shared = out / "cache" / f"{cell.recipe}-{cell.seed}"
    config = dataclasses.replace(base, **values, seed=cell.seed, out=out / cell.name, cache=shared)
    if scale != 1.0:
        config = smaller(config, scale)
    if cell.recipe == "metastasis":
        from planaria.recipes.metastasis.train import main
    else:
        from planaria.recipes.gleason.train import main
    main(config)
    results = json.loads((config.out / "results.json").read_text(encoding="utf-8"))
    measure = MEASURE[cell.recipe]
    return {
        "recipe": cell.recipe,
        "on": list(cell.on),
        "seed": cell.seed,
        "value": results["test"]["overall"][measure],
        "interval": results["test"][f"{measure}_interval"],
    }


def smaller(config: Any, scale: float) -> Any:
    """The same run with ``scale`` of its data, for trying the command out."""
    if isinstance(config, MetastasisConfig):
        parts = [max(int(n * scale), 64) for n in config.synthetic]
        return dataclasses.replace(config, synthetic=(parts[0], parts[1], parts[2]), epochs=1)
    return dataclasses.replace(config, synthetic=max(int(config.synthetic * scale), 48), epochs=1)


def table(found: list[dict[str, Any]]) -> str:
    """The results as Markdown: mean over seeds, and the difference to the bare baseline."""
    lines = [
        "# What each part adds, on synthetic tissue",
        "",
        "Synthetic tissue: the numbers say nothing about patients; they compare settings. Each cell",
        "is a scaled-down network (width 0.25) on held-out slides. *Difference*: to the bare",
        "baseline of the same seed; its interval is the mean plus and minus 1.96 standard errors",
        "over seeds, or, with one seed, none.",
    ]
    for recipe, measure in MEASURE.items():
        rows = [row for row in found if row["recipe"] == recipe]
        bare = {row["seed"]: row["value"] for row in rows if not row["on"]}
        lines += ["", f"## {recipe.capitalize()}", ""]
        lines += [
            f"| on | {measure} | seeds | difference | verdict |",
            "| --- | --- | --- | --- | --- |",
        ]
        for on in dict.fromkeys(tuple(row["on"]) for row in rows):
            mine = {row["seed"]: row["value"] for row in rows if tuple(row["on"]) == on}
            gaps = np.array([mine[seed] - bare[seed] for seed in mine if seed in bare])
            lines.append(_row(on, np.array(list(mine.values())), gaps))
    return "\n".join(lines) + "\n"


def _row(on: tuple[str, ...], values: np.ndarray, gaps: np.ndarray) -> str:
    if not on:
        return f"| nothing | {values.mean():.3f} | {len(values)} | | baseline |"
    gap = gaps.mean()
    text, verdict = f"{gap:+.3f}", "one seed: no verdict"
    if len(gaps) > 1:
        error = 1.96 * gaps.std(ddof=1) / np.sqrt(len(gaps))
        text = f"{gap:+.3f} ({gap - error:+.3f} to {gap + error:+.3f})"
        verdict = "adds" if gap > error else "takes" if gap < -error else "adds nothing shown"
    return f"| {' + '.join(on)} | {values.mean():.3f} | {len(values)} | {text} | {verdict} |"


def main() -> int:
    """Runs what is missing of this part, then writes the table if everything is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seeds", type=int, default=None, help="default: 1, or 3 with --full")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th cell, from the I-th")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the data, to try it out")
    parser.add_argument("--table", type=Path, default=Path("docs/results/pathology.md"))
    options = parser.parse_args()
    seeds = options.seeds or (3 if options.full else 1)
    index, count = (int(part) for part in options.part.split("/"))
    wanted = list(cells(full=options.full, seeds=seeds))
    for number, cell in enumerate(wanted):
        file = options.out / "cells" / f"{cell.name}.json"
        if number % count != index - 1 or file.is_file():
            continue
        result = run(cell, out=options.out, scale=options.scale)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(f"{cell.name}: {result['value']:.4f}", flush=True)
    files = [options.out / "cells" / f"{cell.name}.json" for cell in wanted]
    missing = [file.stem for file in files if not file.is_file()]
    if missing:
        print(f"{len(missing)} cells are missing, {missing[0]} first")
        return 0
    text = table([json.loads(file.read_text(encoding="utf-8")) for file in files])
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
