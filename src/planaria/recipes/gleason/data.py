"""Slides cut into tiles, in three parts. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from planaria.errors import DataError
from planaria.pathology.boards import cut_tiles, fixed_board, random_board, whole_board
from planaria.pathology.datasets.panda import CONTRACT, load_panda
from planaria.pathology.datasets.panda import SYNTHETIC as SYNTHETIC_CONTRACT
from planaria.pathology.datasets.records import Record
from planaria.pathology.datasets.splits import find_duplicates, grouped_folds, perceptual_hash
from planaria.pathology.files import atomic
from planaria.pathology.regions import thumbnail
from planaria.pathology.slides import Slide, open_slide
from planaria.pathology.synthetic.prostate import BiopsyConfig
from planaria.pathology.synthetic.tree import write_tree
from planaria.pathology.tissue import TissueConfig
from planaria.recipes.gleason.config import SYNTHETIC, GleasonConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The slides of one part of the split."""

    files: tuple[Path, ...]
    """One file of tiles per slide."""
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    """[N], ISUP 0 to 5."""
    centres: NDArray[np.str_]
    """[N]"""

    def boards(
        self, ids: NDArray[np.int64], config: GleasonConfig, *, seed: int | None, shift: int = 0
    ) -> NDArray[np.uint8]:
        """Boards [B, board_px, board_px, 3]: by chance from ``seed``, or fixed with ``shift``."""
        made: list[NDArray[np.uint8]] = []
        for number, index in enumerate(ids.tolist()):
            tiles = np.load(self.files[index])
            if not config.pbir:
                made.append(tiles)
            elif seed is None:
                made.append(fixed_board(tiles, config=config.board, shift=shift))
            else:
                rng = np.random.default_rng([seed, number])
                made.append(random_board(tiles, config=config.board, rng=rng))
        return np.stack(made)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of a run."""

    train: Part
    valid: Part
    test: Part
    name: str
    """What the slides are, for everything that is reported."""
    remarks: tuple[str, ...]
    """What a reader of the results must know: duplicates, slides that were left out."""


def prepare(config: GleasonConfig) -> Prepared:
    """The parts of ``config.data``; cuts every slide's tiles once into the cache.

    Slides that cannot be read or hold no tissue are left out and counted. The same in every process
    once the cache is full, which the launcher sees to before workers start.

    Raises:
        DataError: the table is wrong, or too few slides remain.
    """
    records, name, remarks = _records(config)
    cache = config.cache_folder / f"tiles-{_key(config)}"
    index = cache / "index.json"
    facts: dict[str, dict[str, str]] = {}
    if index.is_file():
        facts = json.loads(index.read_text(encoding="utf-8"))
    fresh = [r for r in records if r.id not in facts]
    for number, record in enumerate(fresh, start=1):
        facts[record.id] = _cut(record, cache, config)
        if number % 100 == 0:
            _log.info("cut %d of %d slides", number, len(fresh))
    if fresh:
        with atomic(index) as temporary:
            temporary.write_text(json.dumps(facts), encoding="utf-8")
    left_out = [r for r in records if "hash" not in facts[r.id]]
    if left_out:
        first = left_out[0]
        remarks.append(f"{len(left_out)} slides left out; {first.id}: {facts[first.id]['error']}")
    kept = [r for r in records if "hash" in facts[r.id]]
    if not kept:
        raise DataError(f"no slide of {len(records)} could be used: {remarks[-1]}")
    duplicates = None
    if config.distance >= 0:
        hashes = {r.id: int(facts[r.id]["hash"]) for r in kept}
        duplicates = find_duplicates(kept, hashes=hashes, distance=config.distance)
        remarks.append(duplicates.line())
    folds = grouped_folds(kept, folds=config.folds, seed=config.seed, duplicates=duplicates)
    valid = (config.fold + 1) % config.folds
    parts = [
        _part([r for r, f in zip(kept, folds, strict=True) if wanted(int(f))], cache)
        for wanted in (
            lambda f: f not in (config.fold, valid),
            lambda f: f == valid,
            lambda f: f == config.fold,
        )
    ]
    return Prepared(
        train=parts[0], valid=parts[1], test=parts[2], name=name, remarks=tuple(remarks)
    )


def _records(config: GleasonConfig) -> tuple[list[Record], str, list[str]]:
    if config.data == SYNTHETIC:
        biopsies = _biopsies(config)
        seed = config.seed if config.slides_seed is None else config.slides_seed
        settings = json.dumps([asdict(biopsies), seed, config.synthetic])
        key = hashlib.sha256(settings.encode()).hexdigest()[:12]
        folder = config.cache_folder / f"synthetic-{key}"
        if not (folder / "train.csv").is_file():
            _log.info("making %d synthetic slides", config.synthetic)
            write_tree(folder, count=config.synthetic, seed=seed, config=biopsies)
        records, found = load_panda(folder, contract=SYNTHETIC_CONTRACT)
        remarks = ["Synthetic tissue: the numbers say nothing about patients."]
    else:
        records, found = load_panda(Path(config.data), contract=CONTRACT)
        remarks = list(found.remarks)
    found.raise_errors()
    name = "synthetic tissue" if config.data == SYNTHETIC else "PANDA"
    return records, name, remarks


def _biopsies(config: GleasonConfig) -> BiopsyConfig:
    return BiopsyConfig(laboratories=config.laboratories)


def _cut(record: Record, cache: Path, config: GleasonConfig) -> dict[str, str]:
    """Writes a slide's tiles (or its whole board); its hash, or why there is none."""
    assert record.path is not None, "PANDA's records have files"
    try:
        slide = open_slide(record.path)
    except DataError as error:
        return {"error": str(error)}
    try:
        pixels, reason = _tiles(slide, config)
        small, _ = thumbnail(slide, max_px=256)
    except DataError as error:
        return {"error": str(error)}
    finally:
        slide.close()
    if len(pixels) == 0:
        return {"error": reason}
    with atomic(cache / f"{record.id}.npy") as temporary, temporary.open("wb") as file:
        np.save(file, pixels)
    return {"hash": str(perceptual_hash(Image.fromarray(small)))}


def _tiles(slide: Slide, config: GleasonConfig) -> tuple[NDArray[np.uint8], str]:
    if not config.pbir:
        return whole_board(slide, config=config.board), "whole slide"
    found = cut_tiles(slide, config=config.board, tissue_config=TissueConfig())
    return found.pixels, found.reason


def _part(records: Sequence[Record], cache: Path) -> Part:
    return Part(
        files=tuple(cache / f"{record.id}.npy" for record in records),
        names=tuple(record.id for record in records),
        labels=np.array([record.label for record in records], dtype=np.int64),
        centres=np.array([record.centre or "?" for record in records]),
    )


def _key(config: GleasonConfig) -> str:
    """Names the tiles: everything that they depend on but the slides, whose names are unique in a
    data set (the names of synthetic ones hold their seed)."""
    data: object = config.data
    if config.data == SYNTHETIC:
        data = asdict(_biopsies(config))
    settings = [asdict(config.board), asdict(TissueConfig()), data]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
