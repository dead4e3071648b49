"""Slides cut into tiles, in three parts. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from planaria.errors import DataError
from planaria.pathology.boards import cut_tiles, fixed_board, random_board, whole_board
from planaria.pathology.datasets.features import Bags, with_features
from planaria.pathology.datasets.panda import CONTRACT, load_panda
from planaria.pathology.datasets.panda import SYNTHETIC as SYNTHETIC_CONTRACT
from planaria.pathology.datasets.records import Record
from planaria.pathology.datasets.splits import (
    Duplicates,
    find_duplicates,
    grouped_folds,
    perceptual_hash,
)
from planaria.pathology.files import atomic
from planaria.pathology.regions import thumbnail
from planaria.pathology.slides import Slide, open_slide
from planaria.pathology.synthetic.prostate import BiopsyConfig
from planaria.pathology.synthetic.tree import write_tree
from planaria.pathology.tissue import TissueConfig, tissue_map
from planaria.recipes.gleason.config import SYNTHETIC, GleasonConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The slides of one part of the split."""

    files: tuple[Path, ...]
    """One file of tiles per slide, or of features."""
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    """[N], ISUP 0 to 5."""
    centres: NDArray[np.str_]
    """[N]"""
    bags: Bags | None = None
    """The slides' frozen features; None where tiles are seen."""

    def boards(
        self, ids: NDArray[np.int64], config: GleasonConfig, *, seed: int | None, shift: int = 0
    ) -> NDArray[np.uint8]:
        """Boards [B, board_px, board_px, 3]: by chance from ``seed``, or fixed with ``shift``."""
        made: list[NDArray[np.uint8]] = []
        for number, index in enumerate(ids.tolist()):
            path = self.files[index]
            if not config.pbir:
                made.append(np.load(path))
            elif seed is None:
                made.append(fixed_board(np.load(path), config=config.board, shift=shift))
            else:
                rng = np.random.default_rng([seed, number])
                grid = int(rng.integers(config.offsets)) if config.offsets > 1 else 0
                tiles = np.load(grid_file(path, grid))
                made.append(random_board(tiles, config=config.board, rng=rng))
        return np.stack(made)


def grid_file(path: Path, grid: int) -> Path:
    """The tiles of a slide on grid ``grid``; ``path`` has those of the grid that stands still."""
    return path if grid == 0 else path.with_name(f"{path.stem}.grid{grid}.npy")


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

    Slides that cannot be read or hold no tissue are left out and counted; a file that has changed is
    cut again. The same in every process once the cache is full, which the launcher sees to before
    workers start.

    Raises:
        DataError: the table is wrong, or too few slides remain.
    """
    if config.features is not None:
        return _of_features(config, config.features)
    records, name, remarks = _records(config)
    cache = config.cache_folder / f"tiles-{_key(config)}"
    index = cache / "index.json"
    facts: dict[str, dict[str, str]] = {}
    if index.is_file():
        facts = json.loads(index.read_text(encoding="utf-8"))
    grids = config.offsets if config.pbir else 1
    stamps = {r.id: _stamp(r) for r in records}
    fresh = [r for r in records if _stale(facts.get(r.id, {}), stamps[r.id], grids)]
    for number, record in enumerate(fresh, start=1):
        made = _cut(record, cache, config, grids=grids)
        facts[record.id] = {"stamp": stamps[record.id], "grids": str(grids), **made}
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
    train, valid, test = (
        _part(chosen, [cache / f"{r.id}.npy" for r in chosen])
        for chosen in _three(kept, config, duplicates=duplicates)
    )
    return Prepared(train=train, valid=valid, test=test, name=name, remarks=tuple(remarks))


def _of_features(config: GleasonConfig, folder: Path) -> Prepared:
    records, found = load_panda(Path(config.data), contract=CONTRACT, pixels=False)
    found.raise_errors()
    kept, left_out = with_features(records, folder=folder)
    parts: list[Part] = []
    for chosen in _three(kept, config, duplicates=None):
        files = [r.path for r in chosen if r.path is not None]
        parts.append(_part(chosen, files, bags=Bags(files)))
    remarks = [*found.remarks, *left_out, "near-duplicates are not looked for among features"]
    return Prepared(
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        name="PANDA, features",
        remarks=tuple(remarks),
    )


def _three(
    records: list[Record], config: GleasonConfig, *, duplicates: Duplicates | None
) -> tuple[list[Record], list[Record], list[Record]]:
    """The records to train on, to validate on and to test on."""
    folds = grouped_folds(records, folds=config.folds, seed=config.seed, duplicates=duplicates)
    valid = (config.fold + 1) % config.folds
    parts: tuple[list[Record], list[Record], list[Record]] = ([], [], [])
    for record, fold in zip(records, folds.tolist(), strict=True):
        parts[2 if fold == config.fold else 1 if fold == valid else 0].append(record)
    return parts


def _records(config: GleasonConfig) -> tuple[list[Record], str, list[str]]:
    if config.data == SYNTHETIC:
        biopsies = _biopsies(config)
        seed = config.seed if config.slides_seed is None else config.slides_seed
        settings = json.dumps([asdict(biopsies), seed, config.synthetic])
        key = hashlib.sha256(settings.encode()).hexdigest()[:12]
        folder = config.cache_folder / f"synthetic-{key}"
        if not (folder / "train.csv").is_file():
            _log.info(
                "making %d synthetic slides in %s, once; --data PANDA_DIR trains on real ones",
                config.synthetic,
                folder,
            )
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


def _stamp(record: Record) -> str:
    assert record.path is not None, "PANDA's records have files"
    status = record.path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _stale(facts: dict[str, str], stamp: str, grids: int) -> bool:
    """Whether a slide has to be cut: never seen, changed since, or on more grids than it was."""
    return facts.get("stamp") != stamp or int(facts["grids"]) < grids


def _cut(record: Record, cache: Path, config: GleasonConfig, *, grids: int) -> dict[str, str]:
    """Writes a slide's tiles on each grid (or its whole board); its hash, or why there is none."""
    assert record.path is not None, "PANDA's records have files"
    try:
        slide = open_slide(record.path)
    except DataError as error:
        return {"error": str(error)}
    try:
        stacks = _tiles(slide, config, name=record.id, grids=grids)
        small, _ = thumbnail(slide, max_px=256)
    except DataError as error:
        return {"error": str(error)}
    finally:
        slide.close()
    if isinstance(stacks, str):
        return {"error": stacks}
    for grid, pixels in enumerate(stacks):
        path = grid_file(cache / f"{record.id}.npy", grid)
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.save(file, pixels)
    return {"hash": str(perceptual_hash(Image.fromarray(small)))}


def _tiles(
    slide: Slide, config: GleasonConfig, *, name: str, grids: int
) -> list[NDArray[np.uint8]] | str:
    """The tiles on each grid, or why there are none."""
    if not config.pbir:
        return [whole_board(slide, config=config.board)]
    settings = TissueConfig()
    tissue = tissue_map(slide, config=settings)
    stacks: list[NDArray[np.uint8]] = []
    for grid in range(grids):
        # A function of the slide alone: runs with other seeds share the cache.
        chance = np.random.default_rng([zlib.crc32(name.encode()), grid])
        found = cut_tiles(
            slide,
            config=config.board,
            tissue_config=settings,
            tissue=tissue,
            rng=chance if grid else None,
        )
        if len(found.pixels) == 0 and not stacks:
            return found.reason
        stacks.append(found.pixels if len(found.pixels) else stacks[0])
    return stacks


def _part(records: Sequence[Record], files: Sequence[Path], *, bags: Bags | None = None) -> Part:
    return Part(
        files=tuple(files),
        bags=bags,
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
    board = asdict(config.board) | {"offset": None}  # grids add to the cache, and change none of it
    settings = [board, asdict(TissueConfig()), data]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
