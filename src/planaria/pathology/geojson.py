"""Heat-maps as GeoJSON in the form that QuPath reads, and as CSV.

QuPath counts pixels from the slide's bounds (``openslide.bounds-x``), not from level 0; that is the
default origin here. Source: QuPath's ``PathObjectTypeAdapter`` (objectType, classification with name
and colour, measurements as a map, UUIDs), release 0.5.
"""

from __future__ import annotations

import csv
import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy import ndimage as scipy_ndimage
from shapely.geometry.base import BaseGeometry

from planaria.errors import ConfigError
from planaria.pathology.files import atomic
from planaria.pathology.heat import DISCLAIMER, HeatMap, colour_table
from planaria.pathology.slides import SlideInfo

ndimage: Any = scipy_ndimage
"""Untyped: what scipy's source lets a checker infer is wrong in most calls."""

_NAMESPACE = uuid.UUID("6f3c1e5e-61a4-5cf5-9d1e-2b0f5f6a1c77")


def features(
    heat: HeatMap,
    *,
    info: SlideInfo,
    threshold: float,
    name: str = "Tumor",
    origin: str = "bounds",
    tiles: bool = True,
) -> dict[str, Any]:
    """A FeatureCollection of all that :func:`stream` gives; a large slide's is better streamed."""
    found = stream(heat, info=info, threshold=threshold, name=name, origin=origin, tiles=tiles)
    return {"type": "FeatureCollection", "description": DISCLAIMER, "features": list(found)}


def stream(
    heat: HeatMap,
    *,
    info: SlideInfo,
    threshold: float,
    name: str = "Tumor",
    origin: str = "bounds",
    tiles: bool = True,
) -> Iterator[dict[str, Any]]:
    """With ``tiles`` one detection per tile that has a value, then one annotation per connected
    region of tiles from ``threshold`` on; tiles that meet at a corner alone are two regions.

    ``origin`` is ``bounds`` (QuPath) or ``level0``. Ids depend on the slide's name and the place
    alone, so the same result has the same ids. Polygons are closed, valid and clipped to the slide.
    One feature is in memory at a time.
    """
    if origin not in ("bounds", "level0"):
        raise ConfigError(f"origin is {origin!r}; it is 'bounds' or 'level0'")
    cells = _Cells(heat, info=info, shifted=origin == "bounds")
    table = colour_table()
    inside = ~np.isnan(heat.values) & cells.visible()
    for row in range(heat.grid.rows if tiles else 0):
        for column in np.flatnonzero(inside[row]).tolist():
            value = float(heat.values[row, column])
            scaled = min(max((value - heat.low) / (heat.high - heat.low), 0.0), 1.0)
            yield _feature(
                [_ring(*cells.span(row, column, column + 1))],
                kind="detection",
                name=name if value >= threshold else "Other",
                colour=table[int(scaled * 255)].tolist(),
                measurements={heat.label: round(value, 6)},
                key=f"{info.path.name}/tile/{column}/{row}",
            )
    # NaN is never at or above a threshold.
    labels, count = ndimage.label(inside & (heat.values >= threshold))
    for index, window in enumerate(ndimage.find_objects(labels, max_label=count)):
        region, number = _region(labels, index + 1, window, cells)
        yield _feature(
            [_corners(ring) for ring in (region.exterior, *region.interiors)],
            kind="annotation",
            name=name,
            colour=[200, 0, 0],
            measurements={"tiles": number, "area px^2": round(region.area, 1)},
            key=f"{info.path.name}/region/{index}/{threshold}",
        )


class _Cells:
    """Edges of the grid's columns and rows, clipped to the slide, from the chosen origin.

    Both edges of a cell come from indices and are rounded once, so neighbours share them exactly.
    """

    def __init__(self, heat: HeatMap, *, info: SlideInfo, shifted: bool) -> None:
        grid, bounds = heat.grid, info.bounds
        left, top = heat.corner
        self.x = _edges(left, grid.step, grid.columns, bounds.x, bounds.width, shifted)
        self.y = _edges(top, grid.step, grid.rows, bounds.y, bounds.height, shifted)

    def visible(self) -> NDArray[np.bool_]:
        """[rows, columns], True where anything of a cell lies on the slide."""
        return (np.diff(self.y) > 0)[:, None] & (np.diff(self.x) > 0)[None, :]

    def span(self, row: int, first: int, end: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of the cells ``first`` to ``end`` - 1 of a row."""
        return (
            int(self.x[first]),
            int(self.y[row]),
            int(self.x[end]),
            int(self.y[row + 1]),
        )


def _edges(
    start: float, step: float, count: int, low: int, length: int, shifted: bool
) -> NDArray[np.int64]:
    edges = np.round(start + np.arange(count + 1) * step).astype(np.int64)
    return np.clip(edges, low, low + length) - (low if shifted else 0)


def _region(
    labels: NDArray[np.int32], label: int, window: tuple[slice, slice], cells: _Cells
) -> tuple[Any, int]:
    """The outline of one connected region, and its number of tiles; from runs, not from tiles."""
    mask = labels[window] == label
    runs: list[BaseGeometry] = []
    for row in range(len(mask)):
        steps = np.flatnonzero(np.diff(np.concatenate([[0], mask[row].astype(np.int8), [0]])))
        for first, end in steps.reshape(-1, 2).tolist():
            at = cells.span(window[0].start + row, window[1].start + first, window[1].start + end)
            runs.append(shapely.box(*at))
    return shapely.union_all(runs), int(mask.sum())


def _ring(left: int, top: int, right: int, bottom: int) -> list[list[int]]:
    return [[left, top], [left, bottom], [right, bottom], [right, top], [left, top]]


def _corners(ring: Any) -> list[list[int]]:
    return [[round(x), round(y)] for x, y in ring.coords]


def _feature(
    rings: list[list[list[int]]],
    *,
    kind: str,
    name: str,
    colour: list[int],
    measurements: dict[str, float],
    key: str,
) -> dict[str, Any]:
    return {
        "type": "Feature",
        "id": str(uuid.uuid5(_NAMESPACE, key)),
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": {
            "objectType": kind,
            "classification": {"name": name, "color": colour},
            "measurements": measurements,
        },
    }


def write_geojson(path: Path, *, found: Iterable[dict[str, Any]]) -> None:
    """Writes features as a FeatureCollection, one after the other.

    ``description`` is a foreign member (RFC 7946, 6.1), which readers pass over.
    """
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        note = json.dumps(DISCLAIMER)
        file.write(f'{{"type": "FeatureCollection", "description": {note}, "features": [')
        for index, feature in enumerate(found):
            file.write((",\n" if index else "\n") + json.dumps(feature))
        file.write("]}")


def write_heat_csv(path: Path, *, heat: HeatMap, info: SlideInfo) -> None:
    """One row per scored tile: slide, column, row, x, y, side (level-0 px), value, note."""
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "column", "row", "x", "y", "side", heat.label, "note"])
        side = round(heat.grid.side)
        for row in range(heat.grid.rows):
            for column in np.flatnonzero(~np.isnan(heat.values[row])).tolist():
                x, y = heat.grid.place(column, row)
                value = f"{float(heat.values[row, column]):.6f}"
                place = (column, row, round(x), round(y), side)
                writer.writerow([info.path.name, *place, value, DISCLAIMER])
