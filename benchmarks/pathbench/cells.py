"""The cells of both tables: a recipe, the parts that are on, a seed; each is a run in one process.

Networks are scaled down (width 0.25, half the depth), so that a cell takes a minute or two of one
core. Every run uses the recipe itself, unlaunched.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hotswap.rows import Row

from planaria.pathology.metrics import apply_thresholds
from planaria.recipes.gleason import GleasonConfig
from planaria.recipes.metastasis import MetastasisConfig

NETWORK: dict[str, Any] = {"width": 0.25, "depth": 0.5}

METASTASIS = MetastasisConfig(
    **NETWORK,
    synthetic=(512, 512, 2048),
    stem_stride=2,
    attention=False,
    fusion=False,
    rcc=False,
    turns=False,
    epochs=54,
    evals=4,
    lr=4e-3,
)
"""The bare baseline of the metastasis table, of the size of the launched one: few patches, seen
often, never turned. What is not on does not make up for what is left out; with many patches, or few
epochs, runs differ most in when they first find what tells cells apart."""

GLEASON = GleasonConfig(
    **NETWORK,
    synthetic=660,
    slides_seed=0,
    folds=3,
    tiles=16,
    px=32,
    mpp=4.0,
    offsets=1,
    pbir=False,
    dc="none",
    loss="mse",
    epochs=10,
    evals=5,
    lr=4e-3,
)
"""The bare baseline of the Gleason table: both laboratories' slides, a network that knows the colours
of another tissue in A's."""

SOURCE = dataclasses.replace(
    METASTASIS,
    laboratories="A",
    synthetic=(2048, 512, 512),
    turns=True,
    epochs=8,
    views=1,
    seed=100,
)
"""What the Gleason table's networks are pre-trained on, as other people's are on ImageNet: another
tissue in another laboratory's stain."""

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
EXTRAS: dict[str, dict[str, dict[str, Any]]] = {
    "metastasis": {},
    "gleason": {
        "QWMSE λ=10": {"loss": "qwmse", "strength": 10.0},
        "QWMSE λ=25": {"loss": "qwmse", "strength": 25.0},
    },
}
"""Other strengths of a part: in the short table only, each by itself."""

MEASURE = {"metastasis": "AUC", "gleason": "kappa"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a recipe, the parts that are on, a seed."""

    recipe: str
    on: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """The unit of its row."""
        return "/".join(["cell", self.recipe, "+".join(self.on) or "nothing", str(self.seed)])


def short(recipe: str, *, seed: int) -> Iterator[Cell]:
    """One factor at a time, all together, and other strengths; the bare baseline comes first."""
    names = tuple(SWITCHES[recipe])
    for on in ((), *((name,) for name in names), names, *((name,) for name in EXTRAS[recipe])):
        yield Cell(recipe=recipe, on=on, seed=seed)


def full(recipe: str, *, seed: int) -> Iterator[Cell]:
    """All combinations."""
    names = tuple(SWITCHES[recipe])
    for count in range(len(names) + 1):
        for on in itertools.combinations(names, count):
            yield Cell(recipe=recipe, on=on, seed=seed)


def config_of(cell: Cell, *, base: Path, scale: float = 1.0) -> Any:
    """The recipe's configuration of ``cell``, with its folders below ``base``."""
    values: dict[str, Any] = {}
    for name in cell.on:
        values |= {**SWITCHES[cell.recipe], **EXTRAS[cell.recipe]}[name]
    if cell.recipe == "gleason":
        values["pretrained"] = str(base / "source")
    plain: Any = METASTASIS if cell.recipe == "metastasis" else GLEASON
    return smaller(
        dataclasses.replace(
            plain,
            **values,
            seed=cell.seed,
            out=base / cell.name,
            cache=base / "cache" / cell.recipe,
        ),
        scale,
    )


def source_config(*, base: Path, scale: float = 1.0) -> MetastasisConfig:
    """The configuration that the Gleason table's networks are pre-trained with."""
    cache = base / "cache" / "metastasis"
    return smaller(dataclasses.replace(SOURCE, out=base / "source", cache=cache), scale)


def smaller(config: Any, scale: float) -> Any:
    """The same run with ``scale`` of its data and one epoch, to try the command out."""
    if scale == 1.0:
        return config
    if isinstance(config, MetastasisConfig):
        parts = [max(int(n * scale), 64) for n in config.synthetic]
        return dataclasses.replace(config, synthetic=(parts[0], parts[1], parts[2]), epochs=1)
    return dataclasses.replace(config, synthetic=max(int(config.synthetic * scale), 48), epochs=1)


def prepare(config: Any) -> None:
    """Makes the data of ``config`` where they are missing, so that cells side by side find them."""
    if isinstance(config, MetastasisConfig):
        from planaria.recipes.metastasis import prepare as make
    else:
        from planaria.recipes.gleason import prepare as make
    make(config)


def train(config: Any) -> None:
    """The recipe's training in this process."""
    if isinstance(config, MetastasisConfig):
        from planaria.recipes.metastasis.train import main
    else:
        from planaria.recipes.gleason.train import main
    main(config)


def measure(cell: Cell, *, base: Path, scale: float = 1.0) -> list[Row]:
    """Trains the cell; its row, with what it predicted for every test patch or slide."""
    began, config = time.process_time(), config_of(cell, base=base, scale=scale)
    train(config)
    row: Row = {
        "row": "cell",
        "recipe": cell.recipe,
        "on": list(cell.on),
        "seed": cell.seed,
        "cpu_s": round(time.process_time() - began, 1),
        **predictions(config.out, recipe=cell.recipe),
    }
    # The model is of no further use, and forty of them would fill a small disk.
    shutil.rmtree(config.out)
    return [row]


def predictions(out: Path, *, recipe: str) -> Row:
    """What a finished run said of its test part: value, interval, ``groups``, ``truth``, ``said``.

    ``truth`` is a string of one digit per patch or slide; ``said`` logits to a hundredth
    (metastasis) or a string of grades; ``groups`` pairs of a slide and how many of it follow.
    """
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    found: Row = {
        "value": results["test"]["overall"][MEASURE[recipe].lower()],
        "interval": results["test"][f"{MEASURE[recipe].lower()}_interval"],
    }
    if recipe == "metastasis":
        with (out / "predictions.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        p = np.clip(np.array([float(row["probability"]) for row in rows]), 1e-9, 1 - 1e-9)
        return found | {
            "groups": runs([row["group"] for row in rows]),
            "truth": "".join(row["label"] for row in rows),
            "said": np.log(p / (1 - p)).round(2).tolist(),
        }
    slides = json.loads((out / "predictions.json").read_text(encoding="utf-8"))
    grades = apply_thresholds([slide["score"] for slide in slides], results["cuts"])
    return found | {
        "groups": runs([slide["slide"] for slide in slides]),
        "truth": "".join(str(slide["grade"]) for slide in slides),
        "said": "".join(map(str, grades.tolist())),
    }


def runs(names: list[str]) -> list[tuple[str, int]]:
    """Each name with how often it stands in a row."""
    return [(name, len(list(same))) for name, same in itertools.groupby(names)]
