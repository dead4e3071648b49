"""Slides that tests make: pyramids with a fractional level, and pixels that say where they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "slides"
"""Where the real slide stays between runs; ignored by git."""


def write_pyramid(
    path: Path,
    pixels: NDArray[np.uint8],
    *,
    mpp: float | None = 0.5,
    downsamples: tuple[float, ...] = (4.0,),
    tile: int = 256,
) -> Path:
    """A tiled TIFF that OpenSlide reads: levels are top-level pages with ``subfiletype`` 1."""
    options: dict[str, object] = {"photometric": "rgb", "tile": (tile, tile), "compression": "zlib"}
    if mpp is not None:
        options |= {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as writer:
        writer.write(pixels, **options, metadata=None)
        for down in downsamples:
            size = (round(pixels.shape[1] / down), round(pixels.shape[0] / down))
            small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
            options.pop("resolution", None)
            options.pop("resolutionunit", None)
            writer.write(small, **options, metadata=None, subfiletype=1)
    return path


def coordinates(width: int, height: int) -> NDArray[np.uint8]:
    """Pixels whose red and green tell x and y in steps of 16 px: [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    return np.stack([20 + x // 16, 20 + y // 16, np.full_like(x, 128)], axis=-1).astype(np.uint8)


def tissue_pixels(width: int, height: int, *, box: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Glass with a speckled pink rectangle ``box`` (left, top, right, bottom): [height, width, 3]."""
    rng = np.random.default_rng(0)
    out = np.full((height, width, 3), 244, dtype=np.uint8)
    left, top, right, bottom = box
    shape = (bottom - top, right - left, 1)
    noise = rng.integers(-30, 30, shape)
    out[top:bottom, left:right] = np.clip(np.array([200, 110, 190]) + noise, 0, 255)
    return out
