"""A heat-map: one number per tile of a slide's grid, and its colours."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from planaria.errors import DataError
from planaria.pathology.files import atomic
from planaria.pathology.slides import Pixels
from planaria.pathology.tiles import Grid

DISCLAIMER = "Research software. Not for diagnosis."


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Values on a slide's grid of tiles; NaN where no tile was scored."""

    values: NDArray[np.float32]
    """[rows, columns]."""
    grid: Grid
    """Where the tiles lie, in level-0 pixels."""
    low: float
    """Value that gets the first colour."""
    high: float
    """Value that gets the last colour."""
    label: str
    """What the values are, for people: ``probability of tumour``."""

    def __post_init__(self) -> None:
        wanted = (self.grid.rows, self.grid.columns)
        if self.values.shape != wanted:
            raise DataError(f"values are {self.values.shape}; the grid has {wanted}")
        if not self.low < self.high:
            raise DataError(f"low {self.low} must be below high {self.high}")

    @property
    def corner(self) -> tuple[float, float]:
        """Level-0 top left of the first cell.

        A value belongs to the middle of its tile: where tiles overlap, cells are as wide as their
        distance and begin inside the first tile, or the map would lie off its slide.
        """
        inset = (self.grid.side - self.grid.step) / 2
        return self.grid.x + inset, self.grid.y + inset

    def at(self, x: float, y: float) -> float | None:
        """The value at level-0 (``x``, ``y``), or None where there is none."""
        left, top = self.corner
        column = int((x - left) // self.grid.step)
        row = int((y - top) // self.grid.step)
        if not (0 <= row < self.grid.rows and 0 <= column < self.grid.columns):
            return None
        value = float(self.values[row, column])
        return None if np.isnan(value) else value

    def rgba(self) -> NDArray[np.uint8]:
        """[rows, columns, 4]: the colour map over ``low`` to ``high``, transparent without value."""
        scaled = np.clip((self.values - self.low) / (self.high - self.low), 0, 1)
        known = ~np.isnan(self.values)
        index = np.where(known, np.nan_to_num(scaled) * 255, 0).astype(np.uint8)
        out = np.zeros((*self.values.shape, 4), dtype=np.uint8)
        out[..., :3] = colour_table()[index]
        out[..., 3] = np.where(known, 255, 0)
        out[~known] = 0
        return out


def colour_table() -> Pixels:
    """256 colours [256, 3], blue over white to red: readable over pink and purple tissue.

    Source: matplotlib's ``coolwarm`` (Moreland 2009).
    """
    from matplotlib import colormaps

    return (colormaps["coolwarm"](np.arange(256))[:, :3] * 255).round().astype(np.uint8)


def over_thumbnail(
    thumb: Pixels, *, heat: HeatMap, origin: tuple[float, float], down: float, opacity: float = 0.5
) -> Pixels:
    """The thumbnail [H, W, 3] of ``down`` level-0 px per pixel with the heat-map laid over it.

    ``origin`` is the thumbnail's level-0 top left. Pixels without a value keep their colour exactly.
    """
    height, width = thumb.shape[:2]
    corner = heat.corner
    columns = ((np.arange(width) + 0.5) * down + origin[0] - corner[0]) // heat.grid.step
    rows = ((np.arange(height) + 0.5) * down + origin[1] - corner[1]) // heat.grid.step
    inside_x = (columns >= 0) & (columns < heat.grid.columns)
    inside_y = (rows >= 0) & (rows < heat.grid.rows)
    column = np.clip(columns, 0, heat.grid.columns - 1).astype(np.int64)
    row = np.clip(rows, 0, heat.grid.rows - 1).astype(np.int64)
    table = heat.rgba()
    out = np.empty_like(thumb)
    for top in range(0, height, 64):  # in strips: blending takes twenty times a strip's memory
        part = slice(top, top + 64)
        rgba = table[row[part, None], column[None, :]]
        shown = inside_y[part, None] & inside_x[None, :]
        alpha = rgba[..., 3:] / 255 * opacity * shown[..., None]
        out[part] = (thumb[part] * (1 - alpha) + rgba[..., :3] * alpha).round().astype(np.uint8)
    return out


def save_heat(path: Path, *, heat: HeatMap) -> None:
    """Writes the heat-map as ``.npz``: ``values`` and a JSON of everything else."""
    facts = {"grid": asdict(heat.grid), "low": heat.low, "high": heat.high, "label": heat.label}
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, values=heat.values, facts=np.array(json.dumps(facts)))


def load_heat(path: Path) -> HeatMap:
    """The heat-map that :func:`save_heat` wrote; DataError for anything else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values, facts = file["values"], json.loads(str(file["facts"]))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: not a heat-map ({error}); make it with 'slide predict'"
        ) from error
    grid: dict[str, Any] = facts.pop("grid")
    return HeatMap(values=values, grid=Grid(**grid), **facts)


def save_overview(path: Path, *, pixels: Pixels) -> None:
    """Writes [H, W, 3] pixels as PNG, what they are not for in its description."""
    text = PngInfo()
    text.add_text("Description", DISCLAIMER)
    with atomic(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG", pnginfo=text)
