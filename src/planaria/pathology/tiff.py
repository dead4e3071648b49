"""TIFF pyramids that OpenSlide does not take: SubIFD levels (OME-TIFF) and stripped files.

Only the segments under a request are read and decoded, so memory does not grow with the slide.
Source: our choice over tifffile's page interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from planaria.errors import DataError
from planaria.pathology.resolution import choose_resolution, tag_candidates
from planaria.pathology.slides import (
    Bounds,
    Level,
    Pixels,
    SlideInfo,
    _check_associated,
    cut,
    whiten,
)

MAX_SEGMENT_PIXELS = 64 * 2**20
"""Pixels of one tile or strip: a larger one (a whole slide in a single strip) would have to be
decoded at once for every tile that is asked for."""


@dataclass(frozen=True, kw_only=True)
class TiffFacts:
    """What has to be known before a reader is chosen."""

    hidden_levels: bool
    """True where levels are SubIFDs, which OpenSlide ignores."""


def inspect_tiff(path: Path) -> TiffFacts:
    """Facts of the first page; DataError where its pixels are not 8-bit RGB."""
    try:
        with path.open("rb") as handle, tifffile.TiffFile(handle) as file:
            page = file.pages.first
            _refuse_page(path, page)
            return TiffFacts(hidden_levels=bool(page.subifds))
    except DataError:
        raise
    except Exception as error:  # a damaged header makes tifffile raise what it likes
        raise DataError(_damaged(path, error)) from error


class TiffSlide:
    """A TIFF pyramid read page by page. Use :func:`planaria.pathology.slides.open_slide`."""

    def __init__(self, path: Path, *, mpp: float | None, notes: tuple[str, ...] = ()) -> None:
        # Opened here: where tifffile fails it leaves a file open that it has opened itself.
        self._handle = path.open("rb")
        try:
            self._file = tifffile.TiffFile(self._handle)
            series = self._file.series[0]
            self._pages = [level.keyframe for level in series.levels]
            for page in self._pages:
                _refuse_page(path, page)
        except Exception as error:  # a damaged header makes tifffile raise what it likes
            self._handle.close()
            if isinstance(error, DataError):
                raise
            raise DataError(_damaged(path, error)) from error
        first = self._pages[0]
        levels = tuple(
            Level(
                width=page.imagewidth,
                height=page.imagelength,
                downsample=math.sqrt(
                    first.imagewidth / page.imagewidth * first.imagelength / page.imagelength
                ),
            )
            for page in self._pages
        )
        self.info = SlideInfo(
            path=path,
            reader="tifffile",
            levels=levels,
            bounds=Bounds(x=0, y=0, width=levels[0].width, height=levels[0].height),
            choice=choose_resolution(_tags(first), override=mpp),
            objective=None,
            associated=(),
            icc="embedded" if first.iccprofile else None,
            notes=notes,
        )

    def read(self, level: int, *, x: int, y: int, width: int, height: int) -> Pixels:
        """See :class:`planaria.pathology.slides.Slide`."""
        if not 0 <= level < len(self._pages):
            raise DataError(f"{self.info.path.name}: level {level} of {len(self._pages)}")
        down = self.info.levels[level].downsample
        left, top = round(x / down), round(y / down)
        page = self._pages[level]
        tile_h = page.tilelength if page.is_tiled else page.rowsperstrip
        tile_w = page.tilewidth if page.is_tiled else page.imagewidth
        across = -(-page.imagewidth // tile_w)
        down_rows = -(-page.imagelength // tile_h)
        rows = range(max(top // tile_h, 0), min(-(-(top + height) // tile_h), down_rows))
        cols = range(max(left // tile_w, 0), min(-(-(left + width) // tile_w), across))
        out = np.full((height, width, 3), 255, dtype=np.uint8)
        for row in rows:
            for col in cols:
                segment = self._segment(page, row * across + col)
                at_x, at_y = col * tile_w - left, row * tile_h - top
                x0, y0 = max(at_x, 0), max(at_y, 0)
                x1 = min(at_x + segment.shape[1], width)
                y1 = min(at_y + segment.shape[0], height)
                if x0 < x1 and y0 < y1:
                    window = cut(segment, x=x0 - at_x, y=y0 - at_y, width=x1 - x0, height=y1 - y0)
                    out[y0:y1, x0:x1] = window
        return out

    def _segment(self, page: tifffile.TiffPage, index: int) -> Pixels:
        """One decoded tile or strip, [h, w, 3]."""
        handle = self._file.filehandle
        try:
            offset, count = page.dataoffsets[index], page.databytecounts[index]
            if count == 0:
                # Writers leave out tiles that were never scanned.
                return np.full((1, 1, 3), 255, dtype=np.uint8)
            handle.seek(offset)
            data = handle.read(count)
            if len(data) != count:
                raise ValueError(f"{len(data)} of {count} bytes")
            decoded, _, shape = page.decode(data, index, jpegtables=page.jpegtables)
        except Exception as error:  # decoders of many libraries raise what they like
            raise DataError(
                f"{self.info.path.name}: segment {index} cannot be decoded ({error}); "
                "the file is truncated or damaged: copy it again"
            ) from error
        if decoded is None:
            return np.full((1, 1, 3), 255, dtype=np.uint8)
        return whiten(decoded[0, : shape[1], : shape[2]])

    def associated(self, name: str) -> Pixels:
        """See :class:`planaria.pathology.slides.Slide`."""
        _check_associated(self.info, name)
        raise AssertionError("this reader lists no associated images")

    def close(self) -> None:
        """See :class:`planaria.pathology.slides.Slide`."""
        self._file.close()
        self._handle.close()


def _refuse_page(path: Path, page: tifffile.TiffPage) -> None:
    name = path.name
    stated: Any = page.bitspersample
    bits = stated if isinstance(stated, int) else stated[0]
    if bits != 8:
        raise DataError(f"{name}: {bits} bits per sample; convert it to 8-bit RGB")
    if page.photometric == tifffile.PHOTOMETRIC.SEPARATED:
        raise DataError(f"{name}: CMYK (a print export); convert it to sRGB")
    if page.samplesperpixel == 1:
        raise DataError(f"{name}: grey (1 channel); stains need colour: export RGB")
    if page.samplesperpixel not in (3, 4):
        raise DataError(f"{name}: {page.samplesperpixel} channels; export the stain as RGB")
    if page.photometric not in (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.YCBCR):
        kind = getattr(page.photometric, "name", page.photometric)
        raise DataError(f"{name}: colours are {kind}; convert it to RGB")
    if page.planarconfig != tifffile.PLANARCONFIG.CONTIG:
        raise DataError(f"{name}: planes stored apart; save it with interleaved RGB")
    sides = (page.imagewidth, page.imagelength) + (
        (page.tilewidth, page.tilelength) if page.is_tiled else (page.rowsperstrip,)
    )
    if min(sides) < 1:
        raise DataError(
            f"{name}: an image of {page.imagewidth}x{page.imagelength} px; the file is damaged: copy "
            "it again"
        )
    segment = (
        page.tilewidth * page.tilelength if page.is_tiled else (page.imagewidth * page.rowsperstrip)
    )
    if segment > MAX_SEGMENT_PIXELS:
        raise DataError(
            f"{name}: stored in pieces of {segment / 2**20:.0f} megapixels; save it as a tiled "
            "TIFF (256 px tiles)"
        )


def _tags(page: tifffile.TiffPage) -> list[tuple[str, float, float]]:
    x, y = page.tags.get("XResolution"), page.tags.get("YResolution")
    unit = page.tags.get("ResolutionUnit")
    if x is None or y is None:
        return []
    names = {2: "inch", 3: "centimeter"}
    name = names.get(int(unit.value) if unit is not None else 2)
    if name is None or x.value[1] == 0 or y.value[1] == 0:
        return []
    return tag_candidates(x.value[0] / x.value[1], y.value[0] / y.value[1], unit=name)


def _damaged(path: Path, error: Exception) -> str:
    return f"{path.name}: not a readable TIFF ({error}); the file is truncated or damaged"
