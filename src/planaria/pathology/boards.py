"""Patch-Based Image Reconstruction (PBIR): a slide's tissue, rebuilt as one small square image.

M tiles of the slide, N of them on a board of sqrt(N) x sqrt(N) places. Training draws tiles, places
and orientations; testing never depends on chance. Source: arXiv 2011.14301 (abstract); the tiling is
the one that the PANDA field shares; variants and defaults are our reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planaria.errors import ConfigError, DataError
from planaria.pathology.regions import read_region, read_tile
from planaria.pathology.resolution import check_tile
from planaria.pathology.slides import Pixels, Slide
from planaria.pathology.tiles import TileConfig, plan_grid
from planaria.pathology.tissue import (
    TissueConfig,
    TissueMap,
    mask_fraction,
    measure_tile,
    tissue_map,
)

MAX_BOARD_PX = 16_384
"""Pixels along a board's side: 800 MB, more than any network takes."""


@dataclass(frozen=True, kw_only=True)
class BoardConfig:
    """How boards are made."""

    tiles: int = 36
    """N, tiles on a board; a square number."""
    px: int = 128
    """Pixels along one side of a tile; a board has sqrt(tiles) times as many."""
    mpp: float = 1.0
    """µm/px of the tiles: 10x. PANDA's middle level is about 2 µm/px."""
    candidates: float = 1.5
    """M / N: training draws N tiles from the M best ones; 1 always takes the best N."""
    turn: bool = True
    """Whether training turns and mirrors each tile (8 ways)."""
    permute: bool = True
    """Whether training shuffles the places."""
    offset: bool = True
    """Whether training moves the grid by a random fraction of a tile (when cut from the slide)."""
    pbir: bool = True
    """False gives the whole slide, resized to the board's size: the ablation's baseline."""

    def __post_init__(self) -> None:
        side = math.isqrt(max(self.tiles, 0))
        if self.tiles < 1 or side * side != self.tiles:
            raise ConfigError(f"tiles is {self.tiles}; a board needs a square number (16, 25, 36)")
        if self.px < 8 or not self.mpp > 0:
            raise ConfigError(f"tiles of {self.px} px at {self.mpp} µm/px: at least 8 px, positive")
        check_tile(self.px, self.mpp)
        if self.board_px > MAX_BOARD_PX:
            raise ConfigError(
                f"a board of {self.side} x {self.side} tiles of {self.px} px is {self.board_px} px "
                f"wide; at most {MAX_BOARD_PX}"
            )
        if self.candidates < 1:
            raise ConfigError(f"candidates is {self.candidates}; M is at least N, so 1 or more")

    @property
    def side(self) -> int:
        """Places along one side of a board."""
        return math.isqrt(self.tiles)

    @property
    def board_px(self) -> int:
        """Pixels along one side of a board."""
        return self.side * self.px


@dataclass(frozen=True, kw_only=True)
class TileStack:
    """The best tiles of one slide, best first."""

    pixels: NDArray[np.uint8]
    """[M, px, px, 3]; M may be smaller than asked for, or 0."""
    xy: NDArray[np.float64]
    """[M, 2], level-0 px of the top left."""
    tissue: NDArray[np.float32]
    """[M], fraction of tissue, falling."""
    side: float
    """Level-0 pixels along one side of a tile."""
    reason: str
    """One sentence: how many there are, or why there are none."""


def cut_tiles(
    slide: Slide,
    *,
    config: BoardConfig,
    tissue_config: TissueConfig | None = None,
    tissue: TissueMap | None = None,
    rng: np.random.Generator | None = None,
) -> TileStack:
    """The M tiles of ``slide`` with most tissue; ties go to the upper, then the left one.

    With ``rng`` the grid is moved by a random fraction (training); without, never. Ink, folds and
    unscanned gaps are no tissue, so the darkest tiles do not win. One tile beyond the M kept is in
    memory at a time.
    """
    tissue_config = tissue_config or TissueConfig()
    tissue = tissue or tissue_map(slide, config=tissue_config)
    wanted = round(config.tiles * config.candidates)
    offset = (0.0, 0.0)
    if rng is not None and config.offset:
        offset = (float(rng.random()), float(rng.random()))
    tile_config = TileConfig(mpp=config.mpp, px=config.px)
    grid = plan_grid(slide.info, config=tile_config, offset=offset)
    bounds = slide.info.bounds
    scored: list[tuple[float, int, float, float]] = []
    for index in range(grid.rows * grid.columns):
        x, y = grid.place(index % grid.columns, index // grid.columns)
        coarse = mask_fraction(tissue, x=x - bounds.x, y=y - bounds.y, side=grid.side)
        if coarse > 0:
            scored.append((-coarse, index, x, y))
    # The mask is too coarse to rank by, but good enough to leave out the hopeless.
    scored = sorted(scored)[: 2 * wanted]
    best: list[tuple[float, int, float, float, Pixels]] = []
    for _, index, x, y in scored:
        rgb = read_tile(slide, x=x, y=y, mpp=config.mpp, px=config.px)
        found = measure_tile(rgb, threshold=tissue.threshold, config=tissue_config)
        if found.tissue > 0:
            best.append((-found.tissue, index, x, y, rgb))
            best.sort(key=lambda entry: entry[:2])
            del best[wanted:]
    pixels = (
        np.stack([entry[4] for entry in best])
        if best
        else np.empty((0, config.px, config.px, 3), dtype=np.uint8)
    )
    return TileStack(
        pixels=pixels,
        xy=np.array([entry[2:4] for entry in best], dtype=np.float64).reshape(-1, 2),
        tissue=np.array([-entry[0] for entry in best], dtype=np.float32),
        side=grid.side,
        reason=f"{len(best)} of {wanted} tiles" if best else tissue.reason,
    )


def random_board(
    stack: NDArray[np.uint8], *, config: BoardConfig, rng: np.random.Generator
) -> Pixels:
    """A board [board_px, board_px, 3] from ``stack`` [M, px, px, 3], best tiles first, by chance.

    N of the M tiles are drawn without replacement; missing ones are white; places are shuffled and
    tiles turned as ``config`` says. The same ``rng`` state gives the same board.
    """
    _check_stack(stack, config=config)
    count = min(config.tiles, len(stack))
    chosen = rng.permutation(len(stack))[:count]
    if not config.permute:
        chosen = np.sort(chosen)
    tiles = [stack[index] for index in chosen]
    if config.turn:
        tiles = [orient(tile, way=int(rng.integers(8))) for tile in tiles]
    places = np.arange(config.tiles)
    if config.permute:
        places = rng.permutation(config.tiles)
    return assemble(tiles, places=places[:count], config=config)


def fixed_board(stack: NDArray[np.uint8], *, config: BoardConfig, shift: int = 0) -> Pixels:
    """The board of the best N tiles in their order: no chance at all.

    ``shift`` rolls the places (0 to N - 1): averaging over several is test-time augmentation.
    """
    _check_stack(stack, config=config)
    tiles = list(stack[: config.tiles])
    places = (np.arange(len(tiles)) + shift) % config.tiles
    return assemble(tiles, places=places, config=config)


def assemble(tiles: list[Pixels], *, places: NDArray[np.int64], config: BoardConfig) -> Pixels:
    """``tiles`` at ``places`` (row by row from the upper left) on a white board."""
    board = np.full((config.board_px, config.board_px, 3), 255, dtype=np.uint8)
    for tile, place in zip(tiles, places.tolist(), strict=True):
        top, left = (place // config.side) * config.px, (place % config.side) * config.px
        board[top : top + config.px, left : left + config.px] = tile
    return board


def orient(pixels: Pixels, *, way: int) -> Pixels:
    """One of the 8 turns and mirrorings of a square [H, W, 3]; 0 is the identity."""
    turned = np.rot90(pixels, k=way % 4)
    return np.ascontiguousarray(turned[:, ::-1] if way >= 4 else turned)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where a whole slide lies on a board."""

    down: float
    """Level-0 pixels per pixel of the board."""
    left: int
    """White columns before the slide."""
    top: int
    """White rows above it."""
    width: int
    """Columns that the slide fills."""
    height: int
    """Rows that it fills."""


def frame(slide: Slide, *, config: BoardConfig) -> Frame:
    """The longer side of the slide's bounds fills the board, the shorter one is centred."""
    bounds = slide.info.bounds
    down = max(bounds.width, bounds.height) / config.board_px
    width = max(round(bounds.width / down), 1)
    height = max(round(bounds.height / down), 1)
    return Frame(
        down=down,
        left=(config.board_px - width) // 2,
        top=(config.board_px - height) // 2,
        width=width,
        height=height,
    )


def whole_board(slide: Slide, *, config: BoardConfig) -> Pixels:
    """The slide's bounds resized onto a white square of the board's size: PBIR switched off.

    The longer side fills the board; nothing is stretched.
    """
    bounds, at = slide.info.bounds, frame(slide, config=config)
    pixels = read_region(
        slide,
        x=bounds.x,
        y=bounds.y,
        extent=(at.width * at.down, at.height * at.down),
        size=(at.width, at.height),
    )
    board = np.full((config.board_px, config.board_px, 3), 255, dtype=np.uint8)
    board[at.top : at.top + at.height, at.left : at.left + at.width] = pixels
    return board


def _check_stack(stack: NDArray[np.uint8], *, config: BoardConfig) -> None:
    wanted = (config.px, config.px, 3)
    if stack.ndim != 4 or stack.shape[1:] != wanted:
        raise DataError(
            f"tiles have shape {stack.shape}; expected [M, {', '.join(map(str, wanted))}]"
        )
