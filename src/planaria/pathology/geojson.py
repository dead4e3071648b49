"""Heat-maps as GeoJSON in the form that QuPath reads, and as CSV.

QuPath counts pixels from the slide's bounds (``openslide.bounds-x``), not from level 0; that is the
default origin here. Source: QuPath's ``PathObjectTypeAdapter`` (objectType, classification with name
and colour, measurements as a map, UUIDs), release 0.5.
"""

from __future__ import annotations

import csv
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from planaria.errors import ConfigError
from planaria.pathology.files import atomic
from planaria.pathology.heat import HeatMap, colour_table
from planaria.pathology.slides import SlideInfo

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
    """A FeatureCollection: one annotation per connected region of tiles from ``threshold`` on, and
    with ``tiles`` one detection per tile that has a value.

    ``origin`` is ``bounds`` (QuPath) or ``level0``. Ids depend on the slide's name and the place
    alone, so the same result has the same ids. Polygons are closed, valid and clipped to the slide.
    """
    if origin not in ("bounds", "level0"):
        raise ConfigError(f"origin is {origin!r}; it is 'bounds' or 'level0'")
    bounds = info.bounds
    shift = (bounds.x, bounds.y) if origin == "bounds" else (0, 0)
    frame = shapely.box(
        bounds.x - shift[0],
        bounds.y - shift[1],
        bounds.x + bounds.width - shift[0],
        bounds.y + bounds.height - shift[1],
    )
    found: list[dict[str, Any]] = []
    boxes: list[BaseGeometry] = []
    table = colour_table()
    for row, column in np.argwhere(~np.isnan(heat.values)).tolist():
        value = float(heat.values[row, column])
        box = shapely.intersection(_cell(heat, column, row, shift), frame)
        if box.is_empty or box.area == 0:
            continue
        if value >= threshold:
            boxes.append(box)
        if tiles:
            scaled = min(max((value - heat.low) / (heat.high - heat.low), 0.0), 1.0)
            colour = table[int(scaled * 255)].tolist()
            found.append(
                _feature(
                    box,
                    kind="detection",
                    name=name if value >= threshold else "Other",
                    colour=colour,
                    measurements={heat.label: round(value, 6)},
                    key=f"{info.path.name}/tile/{column}/{row}",
                )
            )
    found += _regions(boxes, name=name, slide=info.path.name, threshold=threshold)
    return {"type": "FeatureCollection", "features": found}


def _regions(
    boxes: list[BaseGeometry], *, name: str, slide: str, threshold: float
) -> list[dict[str, Any]]:
    """One annotation for each connected region of ``boxes``."""
    found: list[dict[str, Any]] = []
    regions = shapely.unary_union(boxes)
    parts = [] if regions.is_empty else list(getattr(regions, "geoms", [regions]))
    centres = shapely.STRtree([box.centroid for box in boxes])
    for index, region in enumerate(parts):
        inside = centres.query(region, predicate="contains")
        found.append(
            _feature(
                region,
                kind="annotation",
                name=name,
                colour=[200, 0, 0],
                measurements={"tiles": len(inside), "area px^2": round(region.area, 1)},
                key=f"{slide}/region/{index}/{threshold}",
            )
        )
    return found


def _cell(heat: HeatMap, column: int, row: int, shift: tuple[int, int]) -> BaseGeometry:
    # Both edges come from indices and are rounded once, so neighbours share them exactly.
    left, top = heat.grid.place(column, row)
    right, bottom = heat.grid.place(column + 1, row + 1)
    return shapely.box(
        round(left) - shift[0],
        round(top) - shift[1],
        round(right) - shift[0],
        round(bottom) - shift[1],
    )


def _feature(
    geometry: BaseGeometry,
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
        "geometry": json.loads(shapely.to_geojson(geometry)),
        "properties": {
            "objectType": kind,
            "classification": {"name": name, "color": colour},
            "measurements": measurements,
        },
    }


def write_geojson(path: Path, *, collection: dict[str, Any]) -> None:
    """Writes a FeatureCollection."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(collection), encoding="utf-8")


def write_heat_csv(path: Path, *, heat: HeatMap, info: SlideInfo) -> None:
    """One row per scored tile: slide, column, row, x, y, side (level-0 px), value."""
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "column", "row", "x", "y", "side", heat.label])
        for row, column in np.argwhere(~np.isnan(heat.values)).tolist():
            x, y = heat.grid.place(column, row)
            value = f"{float(heat.values[row, column]):.6f}"
            side = round(heat.grid.side)
            writer.writerow([info.path.name, column, row, round(x), round(y), side, value])
