"""Slides through a model, in a stream: tiles come, are scored in batches, and are forgotten.

Only the grid of scores grows with the slide (4 bytes per tile), so memory stays flat.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError
from planaria.pathology.attention import AttentionHead, FeatureConfig
from planaria.pathology.boards import (
    BoardConfig,
    assemble,
    cut_tiles,
    fixed_board,
    frame,
    whole_board,
)
from planaria.pathology.bundle import ModelCard, grade_loss
from planaria.pathology.colour import to_unit
from planaria.pathology.datasets.features import Bags, Places, inspect_features, read_places
from planaria.pathology.heat import HeatMap
from planaria.pathology.metrics import apply_thresholds
from planaria.pathology.networks import BoostedEfficientNet
from planaria.pathology.slides import Slide
from planaria.pathology.tiles import Grid, Tile, TileConfig, iterate_tiles, plan_grid
from planaria.pathology.tissue import TissueConfig, TissueMap, mask_fraction, tissue_map

TOP_TILES = 10
"""Tiles whose mean probability is the slide's: one false tile does not make a slide positive.
Source: our choice."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """How slides are scored."""

    batch: int = 32
    """Tiles per forward pass."""
    overlap: float = 0.0
    """Fraction of a tile that neighbours share; 0.5 gives a heat-map twice as fine."""
    min_tissue: float = 0.1
    """Fraction of tissue from which a tile is scored."""
    shifts: int = 4
    """Boards that a Gleason grade is averaged over; chance plays no part."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.shifts < 1:
            raise ConfigError(f"batch is {self.batch} and shifts {self.shifts}; at least 1 each")
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"overlap is {self.overlap}; 0 or more and below 1")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about one slide."""

    heat: HeatMap
    score: float | None
    """Probability of tumour, or expected grade; None for a slide without tissue."""
    call: str
    """``tumour``, ``no tumour``, ``ISUP 3`` or ``no tissue``."""
    rule: str
    """How tiles became the slide's score."""
    tiles: int
    """Tiles that were scored."""
    reason: str
    """What the tissue search found."""
    seconds: float


def predict_slide(
    slide: Slide,
    *,
    card: ModelCard,
    model: nn.Module,
    config: PredictConfig | None = None,
    tissue_config: TissueConfig | None = None,
) -> Prediction:
    """The prediction for one slide; a slide without tissue gets one, too, that says so."""
    config = config or PredictConfig()
    tissue_config = tissue_config or TissueConfig()
    began = time.monotonic()
    tissue = tissue_map(slide, config=tissue_config)
    score = _metastasis if card.kind == "metastasis" else _gleason
    if card.board is not None and not card.board.pbir:
        score = _whole
    with torch.inference_mode():
        heat, value, tiles, rule = score(slide, card, model, config, tissue_config, tissue)
    return Prediction(
        heat=heat,
        score=value,
        call=decide(value, card=card),
        rule=rule,
        tiles=tiles,
        reason=tissue.reason,
        seconds=time.monotonic() - began,
    )


def predict_features(slide: Slide, *, card: ModelCard, model: nn.Module, path: Path) -> Prediction:
    """The prediction for one slide from the features in ``path`` (H5 with coordinates).

    The map shows what each tile says alone. DataError where the features are another model's or
    another slide's.
    """
    began = time.monotonic()
    config = cast("FeatureConfig", card.features)
    found = inspect_features(path)
    if found.dim != config.dim or not _same_encoder(config.encoder, found.encoder):
        raise DataError(
            f"{path.name}: {found.dim} numbers per tile by {found.encoder}; the model was trained on "
            f"{config.dim} by {config.encoder}"
        )
    places = read_places(path)
    _check_places(path, places, slide)
    head = cast("AttentionHead", model)
    x = torch.from_numpy(Bags([path]).batch(np.zeros(1, dtype=np.int64)))
    with torch.inference_mode():
        logits_KC = head.tiles(x)[0][0]
        whole = model(x)
        if card.kind == "metastasis":
            each = logits_KC[:, 0].sigmoid()
            value = float(whole.sigmoid())
        else:
            loss = grade_loss(card)
            each, value = loss.score(logits_KC), float(loss.score(whole)[0])
    tiles = _finite(each).numpy().astype(np.float32)
    rule = f"attention over the features of {found.count} tiles"
    if config.single:
        value = slide_probability(tiles)
        rule = f"mean of the {TOP_TILES} highest tile probabilities"
    values = np.full((places.grid.rows, places.grid.columns), np.nan, dtype=np.float32)
    values[places.cells[:, 1], places.cells[:, 0]] = tiles
    metastasis = card.kind == "metastasis"
    heat = HeatMap(
        values=values,
        grid=places.grid,
        low=0.0,
        high=1.0 if metastasis else float(card.classes - 1),
        label="probability of tumour" if metastasis else "expected ISUP grade",
    )
    return Prediction(
        heat=heat,
        score=value,
        call=decide(value, card=card),
        rule=rule,
        tiles=found.count,
        reason=f"features by {found.encoder}",
        seconds=time.monotonic() - began,
    )


def _same_encoder(left: str, right: str) -> bool:
    """Whether both may be one model: older files do not say which they come from."""
    return left == right or "unknown" in (left, right)


def _check_places(path: Path, places: Places, slide: Slide) -> None:
    # One tile may hang over the edge; a whole one outside belongs to another slide.
    low, high = places.xy.min(axis=0), places.xy.max(axis=0)
    info = slide.info
    outside = high[0] >= info.width or high[1] >= info.height
    if outside or (low < -places.grid.side).any():
        raise DataError(
            f"{path.name}: tiles at {tuple(low.tolist())} to {tuple(high.tolist())} leave "
            f"{info.path.name} ({info.width} x {info.height} px); the features are another slide's"
        )


def decide(score: float | None, *, card: ModelCard) -> str:
    """The word for a slide's score at the card's operating point."""
    if score is None:
        return "no tissue"
    if card.kind == "metastasis":
        return "tumour" if score >= card.threshold else "no tumour"
    cuts = card.cuts or tuple(grade + 0.5 for grade in range(card.classes - 1))
    return f"ISUP {int(apply_thresholds([score], cuts)[0])}"


def slide_probability(tiles: NDArray[np.float32]) -> float:
    """The mean of the :data:`TOP_TILES` highest probabilities, of all where there are fewer."""
    return float(np.sort(tiles)[::-1][:TOP_TILES].mean())


def _metastasis(
    slide: Slide,
    card: ModelCard,
    model: nn.Module,
    config: PredictConfig,
    tissue_config: TissueConfig,
    tissue: TissueMap,
) -> tuple[HeatMap, float | None, int, str]:
    cut = TileConfig(
        mpp=card.mpp,
        px=card.px,
        overlap=round(config.overlap * card.px),
        min_tissue=config.min_tissue,
    )
    grid = plan_grid(slide.info, config=cut)
    values = np.full((grid.rows, grid.columns), np.nan, dtype=np.float32)
    stream = iterate_tiles(slide, config=cut, tissue=tissue, tissue_config=tissue_config, grid=grid)
    for batch in batched((tile for tile in stream if tile.kept), config.batch):
        pixels = torch.from_numpy(np.stack([tile.rgb for tile in batch]))
        probability = model(to_unit(pixels)).sigmoid().reshape(-1)
        for tile, value in zip(batch, _finite(probability).tolist(), strict=True):
            values[tile.row, tile.column] = value
    found = values[~np.isnan(values)]
    heat = HeatMap(values=values, grid=grid, low=0.0, high=1.0, label="probability of tumour")
    rule = f"mean of the {TOP_TILES} highest tile probabilities"
    return heat, slide_probability(found) if len(found) else None, len(found), rule


def _gleason(
    slide: Slide,
    card: ModelCard,
    model: nn.Module,
    config: PredictConfig,
    tissue_config: TissueConfig,
    tissue: TissueMap,
) -> tuple[HeatMap, float | None, int, str]:
    board = cast("BoardConfig", card.board)
    cut = TileConfig(mpp=board.mpp, px=board.px, min_tissue=config.min_tissue)
    grid = plan_grid(slide.info, config=cut)
    values = np.full((grid.rows, grid.columns), np.nan, dtype=np.float32)
    stream = iterate_tiles(slide, config=cut, tissue=tissue, tissue_config=tissue_config, grid=grid)
    for tiles in batched((tile for tile in stream if tile.kept), board.tiles):
        for tile, value in zip(tiles, _tile_grades(tiles, card, model, board), strict=True):
            values[tile.row, tile.column] = value
    count = int((~np.isnan(values)).sum())
    heat = _grade_map(values, grid=grid, card=card)
    rule = f"expected grade of the best {board.tiles} tiles, mean of {config.shifts} boards"
    stack = cut_tiles(slide, config=board, tissue_config=tissue_config, tissue=tissue)
    if len(stack.pixels) == 0:
        return heat, None, count, rule
    loss = grade_loss(card)
    scores: list[float] = []
    for index in range(config.shifts):
        shift = index * board.tiles // config.shifts
        pixels = fixed_board(stack.pixels, config=board, shift=shift)
        scores.append(float(_finite(loss.score(model(_batch(pixels))))[0]))
    return heat, float(np.mean(scores)), count, rule


def _whole(
    slide: Slide,
    card: ModelCard,
    model: nn.Module,
    config: PredictConfig,
    tissue_config: TissueConfig,
    tissue: TissueMap,
) -> tuple[HeatMap, float | None, int, str]:
    """A model that was trained without PBIR sees the whole slide on one board, here as there."""
    board = cast("BoardConfig", card.board)
    at, bounds = frame(slide, config=board), slide.info.bounds
    pixels = _batch(whole_board(slide, config=board))
    inner: Any = model
    network = cast("BoostedEfficientNet", inner.network)
    logits = network.logit_map(inner.correction(pixels))[0]
    rows, columns = logits.shape[1:]
    step = at.down * board.board_px / columns
    grid = Grid(
        columns=columns,
        rows=rows,
        side=step,
        step=step,
        x=bounds.x - at.left * at.down,
        y=bounds.y - at.top * at.down,
    )
    loss = grade_loss(card)
    values = _finite(loss.score(logits.flatten(1).T)).numpy().astype(np.float32)
    values = values.reshape(rows, columns)
    for row, column in np.ndindex(rows, columns):
        x, y = grid.place(column, row)
        part = mask_fraction(tissue, x=x - bounds.x, y=y - bounds.y, side=step)
        if part == 0 or part < config.min_tissue:
            values[row, column] = np.nan
    heat = _grade_map(values, grid=grid, card=card)
    count = int((~np.isnan(values)).sum())
    rule = "expected grade of the whole slide on one board"
    if not tissue.mask.any():
        return heat, None, count, rule
    return heat, float(_finite(loss.score(model(pixels)))[0]), count, rule


def _grade_map(values: NDArray[np.float32], *, grid: Grid, card: ModelCard) -> HeatMap:
    high = float(card.classes - 1)
    return HeatMap(values=values, grid=grid, low=0.0, high=high, label="expected ISUP grade")


def _tile_grades(
    tiles: list[Tile], card: ModelCard, model: nn.Module, board: BoardConfig
) -> Iterator[float]:
    """The expected grade of each tile on one board, from the logits before pooling."""
    pixels = assemble([tile.rgb for tile in tiles], places=np.arange(len(tiles)), config=board)
    inner: Any = model
    network = cast("BoostedEfficientNet", inner.network)
    logits = network.logit_map(inner.correction(_batch(pixels)))
    # One average per place on the board.
    places = nn.functional.adaptive_avg_pool2d(logits, board.side)[0].flatten(1).T
    grades = _finite(grade_loss(card).score(places))
    return iter(grades[: len(tiles)].tolist())


def _finite(scores: Tensor) -> Tensor:
    """``scores`` as they are; DataError where one is NaN, which a map would show as glass."""
    if not bool(torch.isfinite(scores).all()):
        raise DataError(
            "the model's scores are not finite: its weights are damaged, or its training diverged; "
            "train it again"
        )
    return scores


def _batch(pixels: NDArray[np.uint8]) -> Tensor:
    return to_unit(torch.from_numpy(pixels)[None])


def batched(items: Iterator[Tile], size: int) -> Iterator[list[Tile]]:
    """Lists of ``size`` items, the last one shorter; Python 3.12 has it in itertools."""
    while batch := list(islice(items, size)):
        yield batch
