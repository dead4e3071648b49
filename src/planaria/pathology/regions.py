"""Regions of a slide at a stated resolution, without drift.

A tile's place is computed from its column and row in floating point and rounded once, so the last
tile of a row is as right as the first; the level that is read, and the fraction by which it is
reduced, never enter the coordinates (a heat-map that drifts against its slide adds the rounding of
each tile to that of the one before).
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from planaria.errors import ConfigError
from planaria.pathology.slides import Level, Pixels, Slide

MAX_READ = 1024
"""Pixels along one side of what is read from a level at once: bounds memory at some 4 MiB and a few
copies of it, whatever the slide's size."""
SAME = 1.01
"""A level within 1 % of the wished resolution is taken for it: scanners state 0.499 for 0.5."""


def best_level(levels: tuple[Level, ...], *, downsample: float) -> int:
    """The coarsest level that is not coarser than ``downsample`` level-0 pixels per pixel."""
    fitting = [i for i, level in enumerate(levels) if level.downsample <= downsample * SAME]
    return max(fitting, key=lambda i: levels[i].downsample, default=0)


def read_region(
    slide: Slide, *, x: float, y: float, extent: tuple[float, float], size: tuple[int, int]
) -> Pixels:
    """The level-0 rectangle at (``x``, ``y``) of ``extent`` (width, height), as ``size`` pixels.

    Returns [size[1], size[0], 3]. Large requests are read in pieces of at most ``MAX_READ`` px.
    """
    if min(size) < 1 or min(extent) <= 0:
        raise ConfigError(f"a region of {extent} level-0 px as {size} px: both must be positive")
    down = min(extent[0] / size[0], extent[1] / size[1])
    level = best_level(slide.info.levels, downsample=down)
    scale = slide.info.levels[level].downsample
    step = max(int(MAX_READ * scale / max(extent[0] / size[0], extent[1] / size[1])), 1)
    if size[0] <= step and size[1] <= step:
        return _read_piece(slide, level, (x, y), extent, size)
    out = np.empty((size[1], size[0], 3), dtype=np.uint8)
    per_x, per_y = extent[0] / size[0], extent[1] / size[1]
    for top in range(0, size[1], step):
        for left in range(0, size[0], step):
            w, h = min(step, size[0] - left), min(step, size[1] - top)
            at = (x + left * per_x, y + top * per_y)
            out[top : top + h, left : left + w] = _read_piece(
                slide, level, at, (w * per_x, h * per_y), (w, h)
            )
    return out


def _read_piece(
    slide: Slide,
    level: int,
    at: tuple[float, float],
    extent: tuple[float, float],
    size: tuple[int, int],
) -> Pixels:
    scale = slide.info.levels[level].downsample
    x0, y0 = math.floor(at[0]), math.floor(at[1])
    width, height = extent[0] / scale, extent[1] / scale
    if abs(width - size[0]) <= 0.01 * size[0] and abs(height - size[1]) <= 0.01 * size[1]:
        # Within SAME of the level's own resolution: pixels as scanned, no resampling.
        return slide.read(level, x=round(at[0]), y=round(at[1]), width=size[0], height=size[1])
    off_x, off_y = (at[0] - x0) / scale, (at[1] - y0) / scale
    pixels = slide.read(
        level,
        x=x0,
        y=y0,
        width=math.ceil(width + off_x),
        height=math.ceil(height + off_y),
    )
    box = (off_x, off_y, off_x + width, off_y + height)
    # reducing_gap lets PIL average whole pixels first: several times faster for thumbnails.
    image = Image.fromarray(pixels).resize(
        size, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0
    )
    # A copy: PIL's memory is read-only, which torch refuses to share.
    return np.array(image)


def read_tile(slide: Slide, *, x: float, y: float, mpp: float, px: int) -> Pixels:
    """A square tile of ``px`` pixels at ``mpp`` µm/px whose top left is level-0 (``x``, ``y``).

    Returns [px, px, 3]; white where the tile leaves the slide, also when the tile is larger than the
    slide. Raises DataError where the slide has no usable resolution.
    """
    if px < 1 or not mpp > 0:
        raise ConfigError(f"a tile of {px} px at {mpp} µm/px: both must be positive")
    side = px * mpp / slide.info.resolution.mpp
    return read_region(slide, x=x, y=y, extent=(side, side), size=(px, px))


def thumbnail(slide: Slide, *, max_px: int = 1024) -> tuple[Pixels, float]:
    """The slide's bounds as an image whose longer side is at most ``max_px``.

    Returns the pixels [H, W, 3] and the level-0 pixels per pixel of it.
    """
    bounds = slide.info.bounds
    down = max(bounds.width / max_px, bounds.height / max_px, 1.0)
    size = (max(round(bounds.width / down), 1), max(round(bounds.height / down), 1))
    extent = (size[0] * down, size[1] * down)
    return read_region(slide, x=bounds.x, y=bounds.y, extent=extent, size=size), down
