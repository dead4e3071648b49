"""Where a slide has tissue, and where only glass, ink, gaps or blur.

Stained tissue is coloured and glass is not, so saturation separates them (Otsu's threshold, bounded
so that an all-white slide stays empty and a slide full of tissue stays full). Ink is coloured too:
its hues (green, blue, cyan, a strong red) lie outside those of haematoxylin and eosin; black ink,
folds and unscanned gaps are dark without colour. Source: Otsu 1979; the rest our choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage as scipy_ndimage
from skimage.filters import threshold_otsu

from planaria.errors import ConfigError
from planaria.pathology.regions import read_region
from planaria.pathology.slides import Pixels, Slide, brightest, darkest

ndimage: Any = scipy_ndimage
"""Untyped: what scipy's source lets a checker infer is wrong in most calls."""

Mask = NDArray[np.bool_]

_STRIP = 128
"""Rows of an overview that are worked on at once."""


@dataclass(frozen=True, kw_only=True)
class TissueConfig:
    """How tissue is told from the rest. All defaults are our choice, set on H&E."""

    mpp: float = 8.0
    """µm/px at which the slide's mask is made; a gland is some ten pixels wide."""
    max_px: int = 1536
    """Longest side of the mask; a larger slide gets a coarser mask, so memory stays flat."""
    saturation_floor: float = 0.06
    """Otsu's threshold is not taken below this; glass scans at up to 0.05."""
    saturation_ceiling: float = 0.15
    """Nor above this: pale stroma scans at 0.15 to 0.25."""
    dark: int = 45
    """Grey value (0 to 255) below which an uncoloured pixel is ink, a fold or a gap."""
    min_area_um2: float = 10_000.0
    """Smaller islands are dust: 100 x 100 µm."""
    max_hole_um2: float = 10_000.0
    """Smaller holes are lumina and fat, and belong to the tissue."""
    min_sharpness: float = 12.0
    """Variance of the Laplacian of the grey tile (at its own resolution) below which a tile with
    tissue counts as out of focus; sharp H&E at 0.5 µm/px has some hundreds."""
    pen: bool = True
    """Whether ink is taken out."""

    def __post_init__(self) -> None:
        if not 0 <= self.saturation_floor <= self.saturation_ceiling <= 1:
            raise ConfigError(
                f"saturation_floor {self.saturation_floor} and saturation_ceiling "
                f"{self.saturation_ceiling} must be ordered within 0 to 1"
            )
        for name in ("mpp", "max_px", "min_area_um2", "max_hole_um2"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if not (self.mpp <= 1000 and self.max_px <= 8192):
            raise ConfigError(
                f"an overview at {self.mpp:g} µm/px of at most {self.max_px} px; not above 1000 µm/px "
                "and 8192 px"
            )


@dataclass(frozen=True, kw_only=True)
class TissueMap:
    """The tissue of one slide at a coarse resolution."""

    mask: Mask
    """[H, W], True where there is tissue; its top left is the slide's bounds."""
    downsample: float
    """Level-0 pixels per mask pixel."""
    threshold: float
    """Saturation (0 to 1) that separated tissue; tiles are measured with the same one."""
    pen_fraction: float
    """Part of the slide under ink."""
    dark_fraction: float
    """Part of the slide that is dark without colour."""
    reason: str
    """One sentence: how much tissue there is, or why there is none."""

    @property
    def fraction(self) -> float:
        """Part of the slide's bounds that is tissue."""
        return float(self.mask.mean())


@dataclass(frozen=True, kw_only=True)
class TileTissue:
    """What one tile holds."""

    tissue: float
    """Fraction of its pixels, ink and gaps taken out."""
    pen: float
    """Fraction of its pixels under ink."""
    sharpness: float
    """Variance of the Laplacian of its grey values; 0 for a flat tile."""


def saturation(rgb: Pixels) -> NDArray[np.float32]:
    """HSV saturation of [H, W, 3] pixels: [H, W], 0 (grey) to 1."""
    high = brightest(rgb).astype(np.float32)
    low = darkest(rgb).astype(np.float32)
    return ((high - low) / np.maximum(high, 1.0)).astype(np.float32, copy=False)


def pen_mask(rgb: Pixels) -> Mask:
    """True [H, W] where [H, W, 3] pixels bear ink: green, blue, cyan, or a strong red.

    Blue and red need more colour than green does, since haematoxylin is bluish and blood and eosin
    are reddish. Black ink is found by :func:`dark_mask`.
    """
    red, green, blue = (rgb[..., i].astype(np.int16) for i in range(3))
    green_ink = (green > red + 20) & (green > blue + 5)
    cyan_ink = (green > red + 40) & (blue > red + 40)
    blue_ink = (blue > 90) & (blue > red + 70) & (blue > green + 40)
    red_ink = (red > 120) & (red > 2.2 * green) & (red > 2.2 * blue)
    return green_ink | cyan_ink | blue_ink | red_ink


def dark_mask(rgb: Pixels, *, dark: int) -> Mask:
    """True [H, W] where pixels are dark in all channels: black ink, folds, unscanned gaps."""
    return brightest(rgb) < dark


def tissue_map(slide: Slide, *, config: TissueConfig | None = None) -> TissueMap:
    """The tissue of ``slide`` within its bounds; an empty mask with a reason where it has none.

    Needs the slide's resolution (DataError without one). Reads the slide in pieces.
    """
    config = config or TissueConfig()
    info = slide.info
    bounds = info.bounds
    mpp0 = info.resolution.mpp
    down = max(config.mpp / mpp0, bounds.width / config.max_px, bounds.height / config.max_px, 1.0)
    size = (max(round(bounds.width / down), 1), max(round(bounds.height / down), 1))
    extent = (size[0] * down, size[1] * down)
    rgb = read_region(slide, x=bounds.x, y=bounds.y, extent=extent, size=size)
    return map_pixels(rgb, downsample=down, mpp=down * mpp0, config=config)


def map_pixels(rgb: Pixels, *, downsample: float, mpp: float, config: TissueConfig) -> TissueMap:
    """The tissue in an overview ``rgb`` [H, W, 3] of ``mpp`` µm/px. See :func:`tissue_map`."""
    sat = np.empty(rgb.shape[:2], dtype=np.float32)
    dark, pen = np.empty(rgb.shape[:2], dtype=bool), np.zeros(rgb.shape[:2], dtype=bool)
    # In strips: what these make on the way takes ten times the memory of what they give.
    for top in range(0, len(rgb), _STRIP):
        rows = slice(top, top + _STRIP)
        sat[rows] = saturation(rgb[rows])
        dark[rows] = dark_mask(rgb[rows], dark=config.dark)
        if config.pen:
            pen[rows] = pen_mask(rgb[rows])
    if config.pen and pen.any():
        # The rim of a stroke is mixed with glass or tissue and has neither's colour.
        pen = ndimage.binary_dilation(pen, iterations=max(round(24 / mpp), 1))
    usable = ~(dark | pen)
    threshold = choose_threshold(sat[usable], config=config)
    mask = (sat > threshold) & usable
    del sat
    # Beyond the border there may be more tissue: eroding must not eat it from there.
    mask = ndimage.binary_dilation(ndimage.binary_erosion(mask, border_value=1))
    mask = ndimage.binary_dilation(mask, iterations=2)
    mask = ndimage.binary_erosion(mask, iterations=2, border_value=1)
    # In a small crop a piece of tissue is small and no dust.
    mask = drop_small(mask, area=min(config.min_area_um2 / mpp**2, 0.1 * mask.size))
    # A hole is enclosed: glass that reaches the border is none, however little of it there is.
    holes = ndimage.binary_fill_holes(mask) & ~mask
    mask |= holes & ~drop_small(holes, area=config.max_hole_um2 / mpp**2)
    mask &= usable
    pen_part, dark_part = float(pen.mean()), float(dark.mean())
    if mask.any():
        reason = f"{mask.mean():.1%} of the slide is tissue (saturation above {threshold:.3f})"
    elif pen_part + dark_part > 0.2:
        reason = f"no tissue: {pen_part:.0%} of the slide is ink and {dark_part:.0%} is black"
    else:
        reason = f"no tissue: nothing is more saturated than {threshold:.3f}"
    return TissueMap(
        mask=mask,
        downsample=downsample,
        threshold=threshold,
        pen_fraction=pen_part,
        dark_fraction=dark_part,
        reason=reason,
    )


def choose_threshold(values: NDArray[np.float32], *, config: TissueConfig) -> float:
    """Otsu's threshold of saturations, within the configured bounds."""
    if values.size == 0 or float(values.min()) == float(values.max()):
        return config.saturation_floor
    otsu = float(threshold_otsu(values))
    return min(max(otsu, config.saturation_floor), config.saturation_ceiling)


def drop_small(mask: Mask, *, area: float) -> Mask:
    """``mask`` without its connected parts of fewer than ``area`` pixels."""
    labels, count = ndimage.label(mask)
    if count == 0:
        return mask
    sizes = np.zeros(count + 1, dtype=np.int64)
    for top in range(0, len(labels), _STRIP):  # bincount copies what it counts, at twice the width
        sizes += np.bincount(labels[top : top + _STRIP].ravel(), minlength=count + 1)
    keep = sizes >= area
    keep[0] = False
    return keep[labels]


def measure_tile(rgb: Pixels, *, threshold: float, config: TissueConfig) -> TileTissue:
    """Tissue, ink and sharpness of one tile [H, W, 3], by the threshold of its slide."""
    high, low = brightest(rgb), darkest(rgb)
    # (high - low) / high > t without a division.
    coloured = (high - low) > threshold * np.maximum(high, 1)
    mask = coloured & (high >= config.dark)
    pen = 0.0
    if config.pen:
        ink = pen_mask(rgb)
        pen = float(ink.mean())
        if pen > 0:
            mask &= ~ink
    return TileTissue(tissue=float(mask.mean()), pen=pen, sharpness=sharpness(rgb))


def sharpness(rgb: Pixels) -> float:
    """Variance of the four-neighbour Laplacian of the grey values (green channel weighs most)."""
    grey = (rgb[..., 0].astype(np.int32) * 77 + rgb[..., 1] * 151 + rgb[..., 2] * 28) >> 8
    if min(grey.shape) < 3:
        return 0.0
    inner = grey[1:-1, 1:-1]
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
    return float(laplacian.var())


def mask_fraction(tissue: TissueMap, *, x: float, y: float, side: float) -> float:
    """Fraction of tissue under the square at (``x``, ``y``), relative to the bounds, level-0 px.

    Every mask pixel that the square touches counts, so that a tile with a sliver of tissue is not
    missed by the coarse mask.
    """
    down = tissue.downsample
    top, left = max(math.floor(y / down), 0), max(math.floor(x / down), 0)
    # Not below 0, which would count from the mask's other end.
    bottom, right = max(math.ceil((y + side) / down), 0), max(math.ceil((x + side) / down), 0)
    part = tissue.mask[top:bottom, left:right]
    return float(part.mean()) if part.size else 0.0
