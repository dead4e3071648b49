"""Tiles of a slide: their places, what they hold, and the files that other tools read.

Places are level-0 pixels. Tissue is measured on the tile's own pixels; the slide's coarse mask only
spares reading tiles that lie on glass.
"""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from planaria.errors import ConfigError
from planaria.pathology.files import atomic
from planaria.pathology.regions import read_tile, thumbnail
from planaria.pathology.resolution import check_tile
from planaria.pathology.slides import Pixels, Slide, SlideInfo
from planaria.pathology.tissue import (
    TissueConfig,
    TissueMap,
    mask_fraction,
    measure_tile,
    tissue_map,
)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Which tiles are cut."""

    mpp: float = 0.5
    """µm/px of a tile (20x)."""
    px: int = 256
    """Pixels along one side of a tile."""
    overlap: int = 0
    """Pixels that neighbours share, at ``mpp``."""
    min_tissue: float = 0.25
    """Fraction of tissue from which a tile is kept."""
    max_pen: float = 0.05
    """Fraction of ink up to which a tile is kept."""
    edge: str = "pad"
    """``pad`` fills tiles that leave the slide with white; ``drop`` leaves them out."""

    def __post_init__(self) -> None:
        check_tile(self.px, self.mpp)
        if not 0 <= self.overlap < self.px:
            raise ConfigError(f"overlap is {self.overlap}; it must be 0 to {self.px - 1}")
        if self.edge not in ("pad", "drop"):
            raise ConfigError(f"edge is {self.edge!r}; it is 'pad' or 'drop'")
        for name in ("min_tissue", "max_pen"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a fraction is 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where the tiles of one slide lie."""

    columns: int
    rows: int
    side: float
    """Level-0 pixels along one side of a tile; a fraction."""
    step: float
    """Level-0 pixels from one tile to the next; a fraction."""
    x: float
    """Level-0 place of the first column."""
    y: float
    """Level-0 place of the first row."""

    def place(self, column: int, row: int) -> tuple[float, float]:
        """Level-0 top left of a tile, from its indices alone, so that no error adds up."""
        return self.x + column * self.step, self.y + row * self.step


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile with its pixels."""

    column: int
    row: int
    x: float
    """Level-0 px of its left side."""
    y: float
    """Level-0 px of its upper side."""
    tissue: float
    """Fraction of tissue."""
    pen: float
    """Fraction of ink."""
    sharpness: float
    """See :func:`planaria.pathology.tissue.sharpness`."""
    kept: bool
    reason: str
    """``tissue``, ``little tissue``, ``pen`` or ``blurred``."""
    rgb: Pixels
    """[px, px, 3]."""


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """The tiles that were kept of one slide, without their pixels; may be empty."""

    slide: str
    """File name of the slide, without folder."""
    config: TileConfig
    info: SlideInfo
    grid: Grid
    xy: NDArray[np.int64]
    """[N, 2], level-0 px of the top left."""
    tissue: NDArray[np.float32]
    """[N], fraction of tissue."""
    counts: dict[str, int]
    """How many tiles ended with which reason, ``glass`` for those never read."""


def plan_grid(info: SlideInfo, *, config: TileConfig, offset: tuple[float, float] = (0, 0)) -> Grid:
    """The grid over the slide's bounds; ``offset`` (tile fractions, 0 to 1) moves it up and left.

    A slide smaller than a tile gets one tile with ``edge="pad"`` and none with ``"drop"``.
    """
    if not (0 <= offset[0] < 1 and 0 <= offset[1] < 1):
        raise ConfigError(f"offset is {offset}; both parts must be 0 or more and below 1")
    bounds = info.bounds
    scale = config.mpp / info.resolution.mpp
    side, step = config.px * scale, (config.px - config.overlap) * scale
    shift_x, shift_y = offset[0] * step, offset[1] * step
    counts: list[int] = []
    for length, shift in ((bounds.width, shift_x), (bounds.height, shift_y)):
        # 1e-9: a slide of exactly three tiles must not get a fourth from rounding.
        if config.edge == "drop":
            counts.append(max(int((length + shift - side) / step + 1e-9) + 1, 0))
            if length + shift < side:
                counts[-1] = 0
        else:
            counts.append(max(int(np.ceil((length + shift - (side - step)) / step - 1e-9)), 1))
    return Grid(
        columns=counts[0],
        rows=counts[1],
        side=side,
        step=step,
        x=bounds.x - shift_x,
        y=bounds.y - shift_y,
    )


def judge(
    tissue: float, pen: float, sharp: float, *, config: TileConfig, tissue_config: TissueConfig
) -> tuple[bool, str]:
    """Whether a tile is kept, and the word why."""
    if pen > config.max_pen:
        return False, "pen"
    if tissue < config.min_tissue:
        return False, "little tissue"
    if sharp < tissue_config.min_sharpness:
        return False, "blurred"
    return True, "tissue"


def iterate_tiles(
    slide: Slide,
    *,
    config: TileConfig,
    tissue: TissueMap,
    tissue_config: TissueConfig,
    grid: Grid | None = None,
) -> Iterator[Tile]:
    """Every tile that the coarse mask does not put on glass, kept or not, row by row.

    One tile is in memory at a time.
    """
    grid = grid or plan_grid(slide.info, config=config)
    bounds = slide.info.bounds
    for row in range(grid.rows):
        for column in range(grid.columns):
            x, y = grid.place(column, row)
            if mask_fraction(tissue, x=x - bounds.x, y=y - bounds.y, side=grid.side) == 0:
                continue
            rgb = read_tile(slide, x=x, y=y, mpp=config.mpp, px=config.px)
            found = measure_tile(rgb, threshold=tissue.threshold, config=tissue_config)
            kept, reason = judge(
                found.tissue,
                found.pen,
                found.sharpness,
                config=config,
                tissue_config=tissue_config,
            )
            yield Tile(
                column=column,
                row=row,
                x=x,
                y=y,
                tissue=found.tissue,
                pen=found.pen,
                sharpness=found.sharpness,
                kept=kept,
                reason=reason,
                rgb=rgb,
            )


def tile_slide(
    slide: Slide,
    *,
    config: TileConfig,
    tissue_config: TissueConfig | None = None,
    png_dir: Path | None = None,
) -> tuple[TileTable, TissueMap]:
    """The kept tiles of ``slide``, written as PNG into ``png_dir`` where one is given."""
    tissue_config = tissue_config or TissueConfig()
    tissue = tissue_map(slide, config=tissue_config)
    grid = plan_grid(slide.info, config=config)
    counts = {"tissue": 0, "little tissue": 0, "pen": 0, "blurred": 0, "glass": 0}
    if png_dir is not None and png_dir.is_dir():
        # Those of a run with other settings, or that was broken off, must not stand among ours.
        for old in png_dir.glob(f"{glob.escape(slide.info.path.stem)}_x*_y*.png"):
            old.unlink()
    places: list[tuple[int, int]] = []
    fractions: list[float] = []
    for tile in iterate_tiles(
        slide, config=config, tissue=tissue, tissue_config=tissue_config, grid=grid
    ):
        counts[tile.reason] += 1
        if not tile.kept:
            continue
        places.append((round(tile.x), round(tile.y)))
        fractions.append(tile.tissue)
        if png_dir is not None:
            png_dir.mkdir(parents=True, exist_ok=True)
            name = f"{slide.info.path.stem}_x{places[-1][0]}_y{places[-1][1]}.png"
            # Level 1 is four times as fast as PIL's default and 5 % larger on H&E.
            Image.fromarray(tile.rgb).save(png_dir / name, compress_level=1)
    counts["glass"] = grid.columns * grid.rows - sum(counts.values())
    table = TileTable(
        slide=slide.info.path.name,
        config=config,
        info=slide.info,
        grid=grid,
        xy=np.array(places, dtype=np.int64).reshape(-1, 2),
        tissue=np.array(fractions, dtype=np.float32),
        counts=counts,
    )
    return table, tissue


def write_h5(path: Path, *, table: TileTable, layout: str = "trident") -> None:
    """The coordinates as HDF5 that CLAM or TRIDENT takes: ``coords`` [N, 2] with attributes.

    Both give ``patch_size`` another meaning (pixels of the level that is read, and pixels of the
    finished tile), hence two layouts. An empty table gives an empty data set, never a missing one.
    Source: the attribute names that CLAM's ``Whole_Slide_Bag_FP`` and TRIDENT's ``WSIPatcher`` read.
    """
    if layout not in ("clam", "trident"):
        raise ConfigError(f"layout is {layout!r}; it is 'clam' or 'trident'")
    side = round(table.grid.side)
    mpp0, config = table.info.resolution.mpp, table.config
    common: dict[str, str | int | float] = {
        "name": Path(table.slide).stem,
        "level0_width": table.info.width,
        "level0_height": table.info.height,
        "mpp_level0": mpp0,
        "mpp_level0_source": table.info.resolution.source,
        "mpp": config.mpp,
        "tile_px": config.px,
    }
    if layout == "clam":
        own: dict[str, str | int | float] = {
            "patch_level": 0,
            "patch_size": side,
            "custom_downsample": 1,
            "downsample": 1.0,
        }
    else:
        own = {
            "patch_size": config.px,
            "patch_size_level0": side,
            "level0_magnification": round(10 / mpp0),
            "target_magnification": round(10 / config.mpp),
            "overlap": config.overlap,
        }
    with atomic(path) as temporary, h5py.File(temporary, "w") as file:
        data = file.create_dataset("coords", data=table.xy, maxshape=(None, 2))
        for key, value in (common | own).items():
            data.attrs[key] = value
        file.create_dataset("tissue", data=table.tissue)


def write_csv(path: Path, *, table: TileTable) -> None:
    """One row per kept tile: slide, x, y (level-0 px), side (level-0 px), mpp, tissue."""
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "x", "y", "side", "mpp", "tissue"])
        for (x, y), tissue in zip(table.xy.tolist(), table.tissue.tolist(), strict=True):
            writer.writerow(
                [table.slide, x, y, round(table.grid.side), table.config.mpp, f"{tissue:.4f}"]
            )


def write_preview(path: Path, *, slide: Slide, table: TileTable, max_px: int = 1024) -> None:
    """A PNG of the slide with the kept tiles outlined."""
    pixels, down = thumbnail(slide, max_px=max_px)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    bounds, side = slide.info.bounds, table.grid.side / down
    for x, y in table.xy.tolist():
        left, top = (x - bounds.x) / down, (y - bounds.y) / down
        draw.rectangle((left, top, left + side - 1, top + side - 1), outline=(0, 110, 60))
    with atomic(path) as temporary:
        image.save(temporary, format="PNG")
