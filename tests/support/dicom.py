"""DICOM whole slides, written byte by byte: what OpenSlide's DICOM reader needs and no more.

Explicit VR, little endian; JPEG frames in encapsulated pixel data, tiled in full, one file per
level, all of one series. Source: DICOM PS3.5 (encoding), PS3.3 A.32.8 (whole-slide images).
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
CT = "1.2.840.10008.5.1.4.1.1.2"
JPEG = "1.2.840.10008.1.2.4.50"
SERIES = "1.2.826.0.1.3680043.10.1338.1"

_LONG = ("OB", "OW", "SQ", "UN", "UT")


def element(group: int, number: int, vr: str, value: bytes | str | int | list[str]) -> bytes:
    """One data element; text is padded to an even length."""
    if isinstance(value, list):
        value = "\\".join(value)
    if isinstance(value, str):
        raw = value.encode()
        raw += (b"\0" if vr == "UI" else b" ") * (len(raw) % 2)
    elif isinstance(value, int):
        raw = struct.pack({"US": "<H", "UL": "<I"}[vr], value)
    else:
        raw = value
    head = struct.pack("<HH", group, number) + vr.encode()
    if vr in _LONG:
        return head + struct.pack("<HI", 0, len(raw)) + raw
    return head + struct.pack("<H", len(raw)) + raw


def item(data: bytes) -> bytes:
    """One item of a sequence, or one fragment of pixel data."""
    return struct.pack("<HHI", 0xFFFE, 0xE000, len(data)) + data


def write_dicom(
    folder: Path,
    pixels: NDArray[np.uint8],
    *,
    mpp: float = 0.5,
    downsamples: tuple[int, ...] = (1, 4),
    tile: int = 128,
    series: str = SERIES,
    sop: str = WHOLE_SLIDE,
    name: str = "level",
) -> list[Path]:
    """``pixels`` [H, W, 3] as one file per level; the first is the finest."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for index, down in enumerate(downsamples):
        size = (pixels.shape[1] // down, pixels.shape[0] // down)
        level = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
        path = folder / f"{name}-{index}.dcm"
        path.write_bytes(_file(level, mpp * down, tile, series, sop, index))
        written.append(path)
    return written


def _file(
    pixels: NDArray[np.uint8], mpp: float, tile: int, series: str, sop: str, index: int
) -> bytes:
    instance = f"{series}.{index + 1}"
    meta = (
        element(0x0002, 0x0001, "OB", b"\0\1")
        + element(0x0002, 0x0002, "UI", sop)
        + element(0x0002, 0x0003, "UI", instance)
        + element(0x0002, 0x0010, "UI", JPEG)
        + element(0x0002, 0x0012, "UI", "1.2.826.0.1.3680043.10.1338")
    )
    frames = _frames(pixels, tile)
    kind = "ORIGINAL" if index == 0 else "DERIVED"
    last = "NONE" if index == 0 else "RESAMPLED"
    spacing = f"{mpp / 1000:.6f}"
    measures = item(element(0x0028, 0x0030, "DS", [spacing, spacing]))
    shared = item(element(0x0028, 0x9110, "SQ", measures))
    path = item(element(0x0048, 0x0112, "DS", "20"))
    height, width = pixels.shape[:2]
    body = (
        element(0x0008, 0x0008, "CS", [kind, "PRIMARY", "VOLUME", last])
        + element(0x0008, 0x0016, "UI", sop)
        + element(0x0008, 0x0018, "UI", instance)
        + element(0x0008, 0x0060, "CS", "SM")
        + element(0x0020, 0x000D, "UI", f"{series}.0")
        + element(0x0020, 0x000E, "UI", series)
        + element(0x0020, 0x9311, "CS", "TILED_FULL")
        + element(0x0028, 0x0002, "US", 3)
        + element(0x0028, 0x0004, "CS", "YBR_FULL_422")
        + element(0x0028, 0x0006, "US", 0)
        + element(0x0028, 0x0008, "IS", str(len(frames)))
        + element(0x0028, 0x0010, "US", tile)
        + element(0x0028, 0x0011, "US", tile)
        + element(0x0028, 0x0100, "US", 8)
        + element(0x0028, 0x0101, "US", 8)
        + element(0x0028, 0x0102, "US", 7)
        + element(0x0028, 0x0103, "US", 0)
        + element(0x0048, 0x0006, "UL", width)
        + element(0x0048, 0x0007, "UL", height)
        + element(0x0048, 0x0105, "SQ", path)
        + element(0x0048, 0x0303, "UL", 1)
        + element(0x5200, 0x9229, "SQ", shared)
    )
    data = struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF) + item(b"")
    data += b"".join(item(frame) for frame in frames)
    data += struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    length = element(0x0002, 0x0000, "UL", len(meta))
    return b"\0" * 128 + b"DICM" + length + meta + body + data


def _frames(pixels: NDArray[np.uint8], tile: int) -> list[bytes]:
    frames: list[bytes] = []
    for top in range(0, pixels.shape[0], tile):
        for left in range(0, pixels.shape[1], tile):
            piece = np.full((tile, tile, 3), 255, dtype=np.uint8)
            part = pixels[top : top + tile, left : left + tile]
            piece[: part.shape[0], : part.shape[1]] = part
            out = io.BytesIO()
            Image.fromarray(piece).save(out, format="JPEG", quality=95, subsampling=1)
            frames.append(out.getvalue() + b"\0" * (len(out.getvalue()) % 2))
    return frames
