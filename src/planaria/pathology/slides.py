"""Whole slides behind one protocol: OpenSlide, tifffile and plain images.

Coordinates are level-0 pixels everywhere, as in OpenSlide; levels may be reduced by a fraction
(2.0005), so nothing here assumes a power of two. Pixels are ``uint8`` RGB in rows, ``[H, W, 3]``;
whatever was not scanned (transparent, outside the file, or filled with zeros) is white.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import openslide
from numpy.typing import NDArray
from openslide import lowlevel
from PIL import Image, UnidentifiedImageError

from planaria.errors import ConfigError, DataError
from planaria.pathology.resolution import (
    Choice,
    Resolution,
    choose_resolution,
    number,
    openslide_candidates,
    tag_candidates,
)

Pixels = NDArray[np.uint8]
"""[H, W, 3], RGB."""

UNSCANNED = 7
"""Largest channel value of pixels that count as never scanned. Scanners fill gaps with zeros and
JPEG blurs them by a few counts; the darkest nuclei of H&E stay above 20."""


_RAW: Any = getattr(lowlevel, "_read_region", None)
"""OpenSlide's own pixels. Its Python image is divided by alpha, copied and converted first, 5 to 8 %
of the time of a read; where a later version hides the function, that image is taken."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One resolution of a pyramid."""

    width: int
    """Pixels of this level."""
    height: int
    """Pixels of this level."""
    downsample: float
    """Level-0 pixels per pixel of this level; 1.0 for level 0, often a fraction."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The scanned rectangle, in level-0 pixels."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class SlideInfo:
    """What a file says about itself; ``choice`` and ``notes`` say what was assumed."""

    path: Path
    reader: str
    """``openslide/VENDOR``, ``tifffile`` or ``image/FORMAT``."""
    levels: tuple[Level, ...]
    """Level 0 first."""
    bounds: Bounds
    choice: Choice
    """The resolution, its source, and what was refused on the way."""
    objective: float | None
    """Nominal magnification, where stated."""
    associated: tuple[str, ...]
    """Names of images beside the pyramid: label, macro, thumbnail."""
    icc: str | None
    """Description of the embedded colour profile; noted, never applied."""
    notes: tuple[str, ...]
    """One sentence each about what is unusual here."""

    @property
    def width(self) -> int:
        """Level-0 pixels."""
        return self.levels[0].width

    @property
    def height(self) -> int:
        """Level-0 pixels."""
        return self.levels[0].height

    @property
    def resolution(self) -> Resolution:
        """The resolution; DataError with the whole chain of refusals where there is none."""
        if self.choice.resolution is not None:
            return self.choice.resolution
        hint = (
            f"; its {self.objective:g}x objective suggests {10 / self.objective:.2g} µm/px"
            if (self.objective)
            else ""
        )
        raise DataError(
            f"{self.path.name}: no usable resolution ({self.choice.reason}){hint}; "
            "state it with --slide-mpp (slide info: --mpp) or in the --mpp-csv table"
        )


class Slide(Protocol):
    """An open slide. Not shared between processes: a worker opens its own (:class:`SlidePool`)."""

    @property
    def info(self) -> SlideInfo:
        """Facts of the file."""
        ...

    def read(self, level: int, *, x: int, y: int, width: int, height: int) -> Pixels:
        """``height`` by ``width`` pixels of ``level`` whose top left is level-0 (``x``, ``y``)."""
        ...

    def associated(self, name: str) -> Pixels:
        """The image called ``name`` of ``info.associated``."""
        ...

    def close(self) -> None:
        """Gives the file handle back; reading afterwards is an error."""
        ...


def whiten(rgba: NDArray[np.uint8]) -> Pixels:
    """Pixels [H, W, 3] with transparent and never-scanned ones turned white.

    ``rgba`` is [H, W, 3] or [H, W, 4]; alpha is laid over white.
    """
    rgb = np.ascontiguousarray(rgba[..., :3])
    if rgba.shape[-1] == 4:
        alpha = rgba[..., 3]
        if alpha.min(initial=255) < 255:
            weight = alpha[..., None].astype(np.uint16)
            rgb = ((rgb * weight + 255 * (255 - weight) + 127) // 255).astype(np.uint8)
    black = brightest(rgb) <= UNSCANNED
    if black.any():
        rgb = np.where(black[..., None], np.uint8(255), rgb)
    return rgb


def flatten(argb: NDArray[np.uint32]) -> Pixels:
    """Pixels [H, W, 3] of OpenSlide's packed ARGB [H, W] (colours times alpha), gaps turned white.

    The same as :func:`whiten` of what OpenSlide's Python image holds, up to that image's rounding.
    """
    bgra = argb.astype("<u4", copy=False).view(np.uint8).reshape(*argb.shape, 4)
    rgb = np.empty((*argb.shape, 3), dtype=np.uint8)
    for channel in range(3):
        rgb[..., channel] = bgra[..., 2 - channel]
    if argb.size and int(argb.min()) < 0xFF000000:
        alpha = bgra[..., 3:]
        rgb = np.minimum(rgb, alpha) + (255 - alpha)
        rgb[brightest(rgb) <= UNSCANNED] = 255
    else:
        # Whole pixels, four bytes at once: a channel of at most UNSCANNED has no bit of 0xF8.
        rgb[(argb & 0xF8F8F8) == 0] = 255
    return rgb


def brightest(rgb: Pixels) -> NDArray[np.uint8]:
    """The largest channel of each pixel, [H, W]; twenty times as fast as ``max`` over an axis of 3."""
    return np.maximum(np.maximum(rgb[..., 0], rgb[..., 1]), rgb[..., 2])


def darkest(rgb: Pixels) -> NDArray[np.uint8]:
    """The smallest channel of each pixel, [H, W]."""
    return np.minimum(np.minimum(rgb[..., 0], rgb[..., 1]), rgb[..., 2])


class OpenSlideSlide:
    """A slide that OpenSlide reads. Use :func:`open_slide`."""

    def __init__(self, path: Path, *, mpp: float | None, notes: tuple[str, ...] = ()) -> None:
        try:
            self._handle = openslide.OpenSlide(path)
        except (openslide.OpenSlideError, OSError) as error:
            said = _odd_dicom(path, error) if is_dicom(_head(path)) else _unreadable(path, error)
            raise DataError(said) from error
        handle = self._handle
        properties = dict(handle.properties)
        levels = tuple(
            Level(width=size[0], height=size[1], downsample=float(down))
            for size, down in zip(handle.level_dimensions, handle.level_downsamples, strict=True)
        )
        objective = number(properties.get("openslide.objective-power"))
        profile: Any = handle.color_profile
        self.info = SlideInfo(
            path=path,
            reader=f"openslide/{properties.get('openslide.vendor', 'unknown')}",
            levels=levels,
            bounds=_openslide_bounds(properties, levels[0]),
            choice=choose_resolution(openslide_candidates(properties), override=mpp),
            objective=objective if objective and 0 < objective < 1000 else None,
            associated=tuple(sorted(handle.associated_images)),
            icc=None if profile is None else str(profile.profile.profile_description),
            notes=notes,
        )

    def read(self, level: int, *, x: int, y: int, width: int, height: int) -> Pixels:
        """See :class:`Slide`."""
        try:
            if _RAW is None:
                image = self._handle.read_region((x, y), level, (width, height))
                return whiten(np.asarray(image))
            argb = np.empty((height, width), dtype=np.uint32)
            pointer = argb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
            _RAW(self._handle._osr, pointer, x, y, level, width, height)
        except openslide.OpenSlideError as error:
            raise DataError(
                f"{self.info.path.name}: cannot read {width}x{height} px at ({x}, {y}) of level "
                f"{level} ({error}); the file is truncated or damaged: copy it again"
            ) from error
        return flatten(argb)

    def associated(self, name: str) -> Pixels:
        """See :class:`Slide`."""
        _check_associated(self.info, name)
        return whiten(np.asarray(self._handle.associated_images[name]))

    def close(self) -> None:
        """See :class:`Slide`."""
        self._handle.close()


class PlainSlide:
    """A photograph or a small export: one level, held in memory. Use :func:`open_slide`."""

    def __init__(self, path: Path, *, mpp: float | None, notes: tuple[str, ...] = ()) -> None:
        try:
            with Image.open(path) as image:
                kind = image.format or "unknown"
                refuse_mode(path, image.mode)
                dpi = image.info.get("dpi")
                icc = image.info.get("icc_profile")
                if image.mode == "P" or "transparency" in image.info:
                    image = image.convert("RGBA")
                self._pixels = whiten(np.asarray(image))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"{path.name}: {error}; convert it to a tiled TIFF, which is read piece by piece"
            ) from error
        except DataError:
            raise
        except Exception as error:  # a damaged file makes PIL's decoders raise what they like
            raise DataError(_unreadable(path, error)) from error
        height, width = self._pixels.shape[:2]
        found = tag_candidates(float(dpi[0]), float(dpi[1]), unit="inch") if dpi else []
        self.info = SlideInfo(
            path=path,
            reader=f"image/{kind.lower()}",
            levels=(Level(width=width, height=height, downsample=1.0),),
            bounds=Bounds(x=0, y=0, width=width, height=height),
            choice=choose_resolution(found, override=mpp),
            objective=None,
            associated=(),
            icc="embedded" if icc else None,
            notes=notes,
        )

    def read(self, level: int, *, x: int, y: int, width: int, height: int) -> Pixels:
        """See :class:`Slide`."""
        if level != 0:
            raise DataError(f"{self.info.path.name}: level {level} of 1; levels count from 0")
        return cut(self._pixels, x=x, y=y, width=width, height=height)

    def associated(self, name: str) -> Pixels:
        """See :class:`Slide`."""
        _check_associated(self.info, name)
        raise AssertionError("a plain image has no associated images")

    def close(self) -> None:
        """See :class:`Slide`."""
        self._pixels = self._pixels[:0]


def cut(pixels: Pixels, *, x: int, y: int, width: int, height: int) -> Pixels:
    """The window of [H, W, 3] ``pixels`` at (``x``, ``y``), white where it leaves the image."""
    out = np.full((height, width, 3), 255, dtype=np.uint8)
    left, top = max(x, 0), max(y, 0)
    right, bottom = min(x + width, pixels.shape[1]), min(y + height, pixels.shape[0])
    if left < right and top < bottom:
        out[top - y : bottom - y, left - x : right - x] = pixels[top:bottom, left:right]
    return out


def open_slide(path: str | os.PathLike[str], *, mpp: float | None = None) -> Slide:
    """The slide at ``path``, by whichever reader its content asks for (never its extension).

    ``mpp`` overrides the file's resolution (µm per level-0 pixel). Raises DataError for a file that
    is missing, damaged, not 8-bit RGB, or of no known kind. A slide without a resolution opens; it
    raises when the resolution is asked for. Source: our choice.
    """
    from planaria.pathology.tiff import TiffSlide, inspect_tiff

    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such slide; check the path")
    if not path.is_file():
        raise DataError(f"{path}: not a file; give the slides inside it")
    head = _head(path)
    if len(head) == 0:
        raise DataError(f"{path.name}: the file is empty; copy it again")
    notes = _extension_note(path, head)
    vendor = openslide.OpenSlide.detect_format(path)
    if vendor is None and is_dicom(head):
        raise DataError(_odd_dicom(path, None))
    if not _is_tiff(head):
        if vendor is not None:
            return OpenSlideSlide(path, mpp=mpp, notes=notes)
        return PlainSlide(path, mpp=mpp, notes=notes)
    if vendor is None or vendor == "generic-tiff":
        facts = inspect_tiff(path)
        if vendor is None or facts.hidden_levels:
            return TiffSlide(path, mpp=mpp, notes=notes)
        try:
            return OpenSlideSlide(path, mpp=mpp, notes=notes)
        except DataError as error:
            if "Unsupported TIFF compression" not in str(error):  # JPEG 2000, WebP: tifffile can
                raise
            return TiffSlide(path, mpp=mpp, notes=notes)
    return OpenSlideSlide(path, mpp=mpp, notes=notes)


class SlidePool:
    """A bounded set of open slides, the least recently used closed first.

    One pool per loader worker: it notices a fork and opens its own handles there, and it is pickled
    without them. ``capacity`` bounds file handles and OpenSlide's caches alike.
    """

    def __init__(self, *, capacity: int = 8, mpp: dict[str, float] | None = None) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; a pool holds at least 1 slide")
        self._capacity = capacity
        self._mpp = dict(mpp or {})
        self._open: OrderedDict[Path, Slide] = OrderedDict()
        self._owner = os.getpid()

    def get(self, path: str | os.PathLike[str]) -> Slide:
        """The open slide at ``path``; it stays valid until ``capacity`` others were asked for."""
        if self._owner != os.getpid():
            # The parent's handles share file offsets and locks with this child: leave them be.
            self._open, self._owner = OrderedDict(), os.getpid()
        key = Path(path)
        slide = self._open.pop(key, None)
        if slide is None:
            while len(self._open) >= self._capacity:
                self._open.popitem(last=False)[1].close()
            slide = open_slide(key, mpp=self._mpp.get(key.stem, self._mpp.get(key.name)))
        self._open[key] = slide
        return slide

    def __len__(self) -> int:
        """How many slides are open now."""
        return len(self._open)

    def close(self) -> None:
        """Closes every slide of this process."""
        if self._owner == os.getpid():
            for slide in self._open.values():
                slide.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "mpp": self._mpp}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._capacity, self._mpp = state["capacity"], state["mpp"]
        self._open, self._owner = OrderedDict(), os.getpid()


def _openslide_bounds(properties: dict[str, str], level: Level) -> Bounds:
    keys = [f"openslide.bounds-{part}" for part in ("x", "y", "width", "height")]
    if all(key in properties for key in keys):
        x, y, width, height = (int(properties[key]) for key in keys)
        return Bounds(x=x, y=y, width=width, height=height)
    return Bounds(x=0, y=0, width=level.width, height=level.height)


def _check_associated(info: SlideInfo, name: str) -> None:
    if name not in info.associated:
        known = ", ".join(info.associated) or "none"
        raise DataError(f"{info.path.name}: no associated image {name!r}; it has: {known}")


def refuse_mode(path: Path, mode: str) -> None:
    """DataError where PIL's ``mode`` of an image is no 8-bit colour."""
    if mode in ("RGB", "RGBA", "P"):
        return
    if mode == "CMYK":
        raise DataError(f"{path.name}: CMYK (a print export); convert it to sRGB")
    if mode in ("L", "1", "LA"):
        raise DataError(f"{path.name}: grey (mode {mode}); stains need colour: export RGB")
    raise DataError(f"{path.name}: pixel mode {mode}; convert it to 8-bit RGB")


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return (
            f"{path.name}: no reader knows this file; slides are SVS, NDPI, MRXS, SCN, BIF, DICOM, "
            "TIFF, PNG or JPEG"
        )
    said = str(error).replace(str(path), path.name)
    return (
        f"{path.name}: cannot be opened ({said}); the file is truncated or damaged: copy it again"
    )


def _odd_dicom(path: Path, error: Exception | None) -> str:
    # OpenSlide's message names the whole path, which a table of many slides has no room for.
    why = "" if error is None else f" ({str(error).replace(str(path), path.name)})"
    return (
        f"{path.name}: DICOM, but not a whole slide that OpenSlide reads{why}; "
        "export a tiled VL Whole Slide Microscopy instance in colour, or a pyramidal TIFF"
    )


def is_dicom(head: bytes) -> bool:
    """Whether a file that begins with ``head`` (132 bytes at least) is DICOM."""
    return head[128:132] == b"DICM"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(132)


def _is_tiff(head: bytes) -> bool:
    return head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def _extension_note(path: Path, head: bytes) -> tuple[str, ...]:
    kinds = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG"}
    kind = next((name for magic, name in kinds.items() if head.startswith(magic)), None)
    kind = "TIFF" if kind is None and _is_tiff(head) else kind
    usual = {
        "PNG": {".png"},
        "JPEG": {".jpg", ".jpeg"},
        "TIFF": {".tif", ".tiff", ".svs", ".ndpi", ".scn", ".bif", ".btf"},
    }
    if kind is None or path.suffix.lower() in usual[kind]:
        return ()
    return (f"named {path.suffix or 'without extension'} but holds {kind}: read as {kind}",)
