"""Heat-maps: values, colours, GeoJSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely

from planaria.errors import ConfigError, DataError
from planaria.pathology.geojson import features, stream, write_geojson, write_heat_csv
from planaria.pathology.heat import HeatMap, load_heat, over_thumbnail, save_heat
from planaria.pathology.resolution import choose_resolution
from planaria.pathology.slides import Bounds, Level, SlideInfo
from planaria.pathology.tiles import Grid

INFO = SlideInfo(
    path=Path("a.svs"),
    reader="openslide/test",
    levels=(Level(width=4000, height=3000, downsample=1.0),),
    bounds=Bounds(x=1000, y=500, width=1100, height=800),
    choice=choose_resolution([("test", 0.5, 0.5)]),
    objective=None,
    associated=(),
    icc=None,
    notes=(),
)
GRID = Grid(columns=5, rows=3, side=256.5, step=256.5, x=1000.0, y=500.0)
NAN = np.nan


def heat() -> HeatMap:
    values = np.array(
        [[0.9, 0.8, NAN, 0.1, 0.9], [0.9, 0.9, NAN, 0.2, NAN], [NAN, NAN, 0.7, NAN, 0.6]],
        dtype=np.float32,
    )
    return HeatMap(values=values, grid=GRID, low=0.0, high=1.0, label="probability of tumour")


def check_qupath(feature: dict[str, Any]) -> None:
    """What QuPath's reader asks of a feature."""
    assert feature["type"] == "Feature"
    assert str(uuid.UUID(feature["id"])) == feature["id"]
    properties = feature["properties"]
    assert properties["objectType"] in ("annotation", "detection")
    assert isinstance(properties["classification"]["name"], str)
    colour = properties["classification"]["color"]
    assert len(colour) == 3
    assert all(isinstance(c, int) and 0 <= c <= 255 for c in colour)
    assert all(isinstance(v, int | float) for v in properties["measurements"].values())
    shape = shapely.from_geojson(str(feature["geometry"]).replace("'", '"'))
    assert shape.geom_type == "Polygon"
    assert shape.is_valid
    for ring in feature["geometry"]["coordinates"]:
        assert ring[0] == ring[-1]
        assert len(ring) >= 4


def test_geojson_in_the_form_of_qupath() -> None:
    found = features(heat(), info=INFO, threshold=0.5)
    assert found["type"] == "FeatureCollection"
    kinds = [f["properties"]["objectType"] for f in found["features"]]
    assert (kinds.count("detection"), kinds.count("annotation")) == (9, 4)
    for feature in found["features"]:
        check_qupath(feature)
    ids = [f["id"] for f in found["features"]]
    assert len(set(ids)) == len(ids)
    assert features(heat(), info=INFO, threshold=0.5) == found


def test_the_origin_is_the_slides_bounds_by_default() -> None:
    def corner(origin: str) -> tuple[float, float]:
        found = features(heat(), info=INFO, threshold=0.5, origin=origin)
        region = max(
            (
                shapely.Polygon(f["geometry"]["coordinates"][0])
                for f in found["features"]
                if f["properties"]["objectType"] == "annotation"
            ),
            key=lambda p: p.area,
        )
        return region.bounds[:2]

    assert corner("bounds") == (0, 0)
    assert corner("level0") == (1000, 500)
    with pytest.raises(ConfigError, match="origin is 'x'; it is 'bounds' or 'level0'"):
        features(heat(), info=INFO, threshold=0.5, origin="x")


def test_polygons_are_clipped_to_the_slide_and_count_their_tiles() -> None:
    found = features(heat(), info=INFO, threshold=0.5, tiles=False)
    for feature in found["features"]:
        ring = np.array(feature["geometry"]["coordinates"][0])
        assert ring.min() >= 0
        assert ring[:, 0].max() <= 1100
        assert ring[:, 1].max() <= 800
    counts = sorted(f["properties"]["measurements"]["tiles"] for f in found["features"])
    assert counts == [1, 1, 1, 4]


def test_neighbours_share_their_edge_though_tiles_are_fractions() -> None:
    found = features(heat(), info=INFO, threshold=0.5)
    boxes = [
        shapely.Polygon(f["geometry"]["coordinates"][0])
        for f in found["features"]
        if f["properties"]["objectType"] == "detection"
    ]
    first, second = boxes[0], boxes[1]
    assert first.bounds[2] == second.bounds[0]
    assert first.intersection(second).area == 0


def test_nothing_above_the_threshold(tmp_path: Path) -> None:
    empty = HeatMap(
        values=np.full((3, 5), NAN, dtype=np.float32), grid=GRID, low=0, high=1, label="p"
    )
    assert features(empty, info=INFO, threshold=0.5)["features"] == []
    write_geojson(tmp_path / "a.geojson", found=stream(empty, info=INFO, threshold=0.5))
    found = json.loads((tmp_path / "a.geojson").read_text())
    assert found == {
        "type": "FeatureCollection",
        "description": "Research software. Not for diagnosis.",
        "features": [],
    }


def test_what_is_streamed_is_the_collection(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", found=stream(heat(), info=INFO, threshold=0.5))
    found = json.loads((tmp_path / "a.geojson").read_text())
    assert found == features(heat(), info=INFO, threshold=0.5)


def test_a_region_with_a_hole_keeps_it() -> None:
    values = np.full((3, 3), 0.9, dtype=np.float32)
    values[1, 1] = 0.1
    grid = Grid(columns=3, rows=3, side=256.5, step=256.5, x=1000.0, y=500.0)
    ring = HeatMap(values=values, grid=grid, low=0.0, high=1.0, label="p")
    (found,) = features(ring, info=INFO, threshold=0.5, tiles=False)["features"]
    check_qupath(found)
    outer, hole = (shapely.Polygon(r) for r in found["geometry"]["coordinates"])
    assert outer.bounds == (0, 0, 770, 770)
    assert hole.bounds == (256, 256, 513, 513)
    assert found["properties"]["measurements"] == {"tiles": 8, "area px^2": 770**2 - 257**2}


def test_value_at_a_place() -> None:
    found = heat()
    assert found.at(1010, 510) == pytest.approx(0.9)
    assert found.at(1000 + 256.5 * 3.5, 500 + 256.5 * 1.5) == pytest.approx(0.2)
    assert found.at(1000 + 256.5 * 2.5, 510) is None
    assert found.at(0, 0) is None


def test_where_tiles_overlap_a_value_stands_in_the_middle_of_its_tile() -> None:
    grid = Grid(columns=5, rows=3, side=200.0, step=100.0, x=1000.0, y=500.0)
    found = dataclasses.replace(heat(), grid=grid)
    assert found.corner == (1050.0, 550.0)
    assert heat().corner == (1000.0, 500.0)
    assert found.at(1040, 600) is None
    for row, column in np.ndindex(3, 5):
        x, y = grid.place(column, row)
        value = found.values[row, column]
        expected = None if np.isnan(value) else pytest.approx(float(value))
        assert found.at(x + 100, y + 100) == expected
    ring = features(found, info=INFO, threshold=0.5)["features"][0]["geometry"]["coordinates"][0]
    assert ring[0] == [50, 50]
    white = np.full((40, 60, 3), 255, np.uint8)
    tinted = over_thumbnail(white, heat=found, origin=(1000.0, 500.0), down=10.0) < 255
    assert np.argwhere(tinted.any(axis=2)).min(axis=0).tolist() == [5, 5]


def test_colours_and_transparency() -> None:
    rgba = heat().rgba()
    assert rgba[0, 2].tolist() == [0, 0, 0, 0]
    red, blue = rgba[0, 0], rgba[0, 3]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert red[3] == blue[3] == 255


def test_only_scored_tiles_are_tinted() -> None:
    thumb = np.full((80, 110, 3), 200, dtype=np.uint8)
    out = over_thumbnail(thumb, heat=heat(), origin=(1000, 500), down=10.0)
    known = ~np.isnan(heat().values)
    for row in range(3):
        for column in range(4):
            y, x = int(25.65 * (row + 0.5)), int(25.65 * (column + 0.5))
            assert (out[y, x].tolist() != [200, 200, 200]) == known[row, column]


def test_round_trip_and_csv(tmp_path: Path) -> None:
    save_heat(tmp_path / "h.npz", heat=heat())
    back = load_heat(tmp_path / "h.npz")
    np.testing.assert_array_equal(back.values, heat().values)
    assert (back.grid, back.label, back.low, back.high) == (GRID, "probability of tumour", 0.0, 1.0)
    write_heat_csv(tmp_path / "h.csv", heat=heat(), info=INFO)
    with (tmp_path / "h.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert rows[1] == {
        "slide": "a.svs",
        "column": "1",
        "row": "0",
        "x": "1256",
        "y": "500",
        "side": "256",
        "probability of tumour": "0.800000",
        "note": "Research software. Not for diagnosis.",
    }
    (tmp_path / "x.npz").write_text("no")
    with pytest.raises(DataError, match=r"x.npz: not a heat-map"):
        load_heat(tmp_path / "x.npz")
    with pytest.raises(DataError, match=r"values are \(1, 1\); the grid has \(3, 5\)"):
        HeatMap(values=np.zeros((1, 1), np.float32), grid=GRID, low=0, high=1, label="p")
