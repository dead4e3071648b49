"""A slide with its heat-map as a page: one file with everything inside, or served tile by tile."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from planaria.errors import DataError
from planaria.pathology import vendor
from planaria.pathology.files import atomic
from planaria.pathology.heat import DISCLAIMER, HeatMap, colour_table
from planaria.pathology.regions import read_region
from planaria.pathology.slides import Pixels, Slide

TILE = 256
"""Pixels along one side of a DeepZoom tile."""


@dataclass(frozen=True, kw_only=True)
class Pyramid:
    """A slide's bounds as DeepZoom levels; level ``max_level`` has ``width`` x ``height`` px."""

    width: int
    height: int
    down: float
    """Level-0 pixels per pixel of the finest level shown."""

    @property
    def max_level(self) -> int:
        """The finest level; level 0 is one pixel."""
        return max(math.ceil(math.log2(max(self.width, self.height))), 0)

    @property
    def min_level(self) -> int:
        """The finest level that is still a single tile: coarser ones are not needed."""
        shrink = math.ceil(math.log2(max(self.width, self.height) / TILE))
        return self.max_level - max(shrink, 0)

    def size(self, level: int) -> tuple[int, int]:
        """Pixels (width, height) of a level."""
        scale = 2 ** (self.max_level - level)
        return math.ceil(self.width / scale), math.ceil(self.height / scale)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Every (level, column, row)."""
        for level in range(self.min_level, self.max_level + 1):
            width, height = self.size(level)
            for row in range(math.ceil(height / TILE)):
                for column in range(math.ceil(width / TILE)):
                    yield level, column, row


def plan_pyramid(slide: Slide, *, max_px: int | None = None) -> Pyramid:
    """The pyramid of the slide's bounds, at most ``max_px`` on its longer side (None: in full)."""
    bounds = slide.info.bounds
    longest = max(bounds.width, bounds.height)
    down = max(longest / max_px, 1.0) if max_px else 1.0
    return Pyramid(
        width=max(round(bounds.width / down), 1),
        height=max(round(bounds.height / down), 1),
        down=down,
    )


def pyramid_tile(slide: Slide, *, pyramid: Pyramid, level: int, column: int, row: int) -> Pixels:
    """One DeepZoom tile, [h, w, 3]; DataError for a place that the pyramid does not have."""
    if not pyramid.min_level <= level <= pyramid.max_level:
        raise DataError(
            f"level {level} is outside {pyramid.min_level} to {pyramid.max_level} of the page"
        )
    width, height = pyramid.size(level)
    left, top = column * TILE, row * TILE
    if not (0 <= left < width and 0 <= top < height):
        raise DataError(f"tile ({column}, {row}) is outside level {level} of {width}x{height} px")
    size = (min(TILE, width - left), min(TILE, height - top))
    scale = pyramid.down * 2 ** (pyramid.max_level - level)
    bounds = slide.info.bounds
    return read_region(
        slide,
        x=bounds.x + left * scale,
        y=bounds.y + top * scale,
        extent=(size[0] * scale, size[1] * scale),
        size=size,
    )


def jpeg(pixels: Pixels, *, quality: int = 80) -> bytes:
    """[H, W, 3] pixels as JPEG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="JPEG", quality=quality)
    return out.getvalue()


def render_page(
    slide: Slide,
    *,
    heat: HeatMap,
    call: str,
    notes: tuple[str, ...] = (DISCLAIMER,),
    inline_px: int | None = 2048,
) -> str:
    """The page as HTML. With ``inline_px`` it holds its tiles (up to that many pixels) and opens
    from a file; with None it asks its server for ``tiles/LEVEL/COLUMN_ROW.jpg`` in full resolution.
    """
    pyramid = plan_pyramid(slide, max_px=inline_px)
    tiles: dict[str, str] | None = None
    if inline_px is not None:
        tiles = {
            f"{level}/{column}_{row}": _data_url(
                jpeg(pyramid_tile(slide, pyramid=pyramid, level=level, column=column, row=row)),
                kind="jpeg",
            )
            for level, column, row in pyramid.places()
        }
    bounds = slide.info.bounds
    facts: dict[str, Any] = {
        "name": slide.info.path.name,
        "call": call,
        "notes": list(notes),
        "width": pyramid.width,
        "height": pyramid.height,
        "tile": TILE,
        "minLevel": pyramid.min_level,
        "maxLevel": pyramid.max_level,
        "tiles": tiles,
        "heat": {
            "image": _heat_image(heat),
            "columns": heat.grid.columns,
            "rows": heat.grid.rows,
            "x": (heat.corner[0] - bounds.x) / pyramid.down,
            "y": (heat.corner[1] - bounds.y) / pyramid.down,
            "step": heat.grid.step / pyramid.down,
            "values": [
                None if math.isnan(v) else round(v, 4) for v in heat.values.ravel().tolist()
            ],
            "low": heat.low,
            "high": heat.high,
            "label": heat.label,
            "colours": [f"rgb({r},{g},{b})" for r, g, b in colour_table()[::32].tolist()],
        },
    }
    # "<" would let a slide's name end the script element.
    text = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    template = (vendor.folder() / "viewer.html").read_text(encoding="utf-8")
    script = vendor.openseadragon().replace("</script", "<\\/script")
    before, rest = template.split("@FACTS@")
    middle, after = rest.split("@OPENSEADRAGON@")
    return before + text + middle + script + after


def write_page(path: Path, *, html: str) -> None:
    """Writes the page."""
    with atomic(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def _heat_image(heat: HeatMap) -> str | None:
    if np.isnan(heat.values).all():
        return None
    # The browser smooths when it enlarges: cells of several pixels keep their edges.
    repeat = max(min(16, 2048 // max(heat.values.shape)), 1)
    size = (heat.grid.columns * repeat, heat.grid.rows * repeat)
    out = io.BytesIO()
    image = Image.fromarray(heat.rgba()).resize(size, Image.Resampling.NEAREST)
    image.save(out, format="PNG")
    return _data_url(out.getvalue(), kind="png")


def _data_url(data: bytes, *, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
