"""Tiles and the files that other tools read."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from planaria.errors import ConfigError
from planaria.pathology.slides import open_slide
from planaria.pathology.tiles import (
    TileConfig,
    judge,
    plan_grid,
    tile_slide,
    write_csv,
    write_h5,
    write_preview,
)
from planaria.pathology.tissue import TissueConfig
from tests.support.slides import tissue_pixels, write_pyramid


def test_the_real_slide_from_file_to_tiles(cmu: Path, tmp_path: Path) -> None:
    slide = open_slide(cmu)
    table, tissue = tile_slide(slide, config=TileConfig(), png_dir=tmp_path / "png")
    assert sum(table.counts.values()) == 9 * 12
    assert len(table.xy) == table.counts["tissue"] == len(list((tmp_path / "png").iterdir()))
    assert 35 <= len(table.xy) <= 50
    assert table.tissue.min() >= 0.25
    x, y = table.xy[len(table.xy) // 2].tolist()
    saved = np.asarray(Image.open(tmp_path / "png" / f"{cmu.stem}_x{x}_y{y}.png"))
    np.testing.assert_array_equal(saved, slide.read(0, x=x, y=y, width=256, height=256))
    write_preview(tmp_path / "preview.png", slide=slide, table=table)
    with Image.open(tmp_path / "preview.png") as preview:
        assert preview.size == (766, 1024)
    assert tissue.fraction > 0.25
    slide.close()


def test_h5_for_clam_and_for_trident(cmu: Path, tmp_path: Path) -> None:
    slide = open_slide(cmu)
    table, _ = tile_slide(slide, config=TileConfig(mpp=1.0, px=256))
    slide.close()
    write_h5(tmp_path / "t.h5", table=table)
    write_h5(tmp_path / "c.h5", table=table, layout="clam")
    with h5py.File(tmp_path / "t.h5") as file:
        attributes = dict(file["coords"].attrs)
        np.testing.assert_array_equal(file["coords"][:], table.xy)
        assert file["coords"].dtype == np.int64
        assert (attributes["patch_size"], attributes["patch_size_level0"]) == (256, 513)
        assert (attributes["level0_magnification"], attributes["target_magnification"]) == (20, 10)
        assert attributes["overlap"] == 0
        assert attributes["name"] == cmu.stem
        assert (attributes["level0_width"], attributes["level0_height"]) == (2220, 2967)
    with h5py.File(tmp_path / "c.h5") as file:
        attributes = dict(file["coords"].attrs)
        # CLAM reads `patch_size` pixels of level `patch_level` at each coordinate.
        assert (attributes["patch_level"], attributes["patch_size"]) == (0, 513)
        assert attributes["mpp_level0_source"] == "openslide.mpp-x"
    with pytest.raises(ConfigError, match="layout is 'x'; it is 'clam' or 'trident'"):
        write_h5(tmp_path / "x.h5", table=table, layout="x")


def test_no_tissue_gives_an_empty_table_and_whole_files(tmp_path: Path) -> None:
    glass = np.full((600, 600, 3), 240, dtype=np.uint8)
    slide = open_slide(write_pyramid(tmp_path / "white.tif", glass, downsamples=()))
    table, tissue = tile_slide(slide, config=TileConfig())
    assert table.counts == {"tissue": 0, "little tissue": 0, "pen": 0, "blurred": 0, "glass": 9}
    assert tissue.reason.startswith("no tissue")
    write_h5(tmp_path / "a.h5", table=table)
    write_csv(tmp_path / "a.csv", table=table)
    write_preview(tmp_path / "a.png", slide=slide, table=table)
    with h5py.File(tmp_path / "a.h5") as file:
        # A peer leaves the data set out here and crashes in its next step.
        assert file["coords"].shape == (0, 2)
    assert (tmp_path / "a.csv").read_text() == "slide,x,y,side,mpp,tissue\n"
    slide.close()


def test_csv_rows(tmp_path: Path) -> None:
    pixels = tissue_pixels(600, 300, box=(0, 0, 300, 300))
    slide = open_slide(write_pyramid(tmp_path / "a.tif", pixels, downsamples=()))
    table, _ = tile_slide(slide, config=TileConfig(px=128))
    write_csv(tmp_path / "a.csv", table=table)
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "slide": "a.tif",
        "x": "0",
        "y": "0",
        "side": "128",
        "mpp": "0.5",
        "tissue": "1.0000",
    }
    assert len(rows) == 8  # 3 x 3 tiles on 300 px of tissue, the corner with 12 % left out
    slide.close()


@pytest.mark.parametrize(
    ("length", "overlap", "edge", "count"),
    [
        (768, 0, "pad", 3),
        (769, 0, "pad", 4),
        (767, 0, "drop", 2),
        (768, 0, "drop", 3),
        (768, 128, "pad", 5),
        (768, 128, "drop", 5),
        (255, 0, "drop", 0),
        (1, 0, "pad", 1),
    ],
)
def test_how_many_tiles_fit(
    tmp_path: Path, length: int, overlap: int, edge: str, count: int
) -> None:
    pixels = np.full((16, length, 3), 200, dtype=np.uint8)
    slide = open_slide(write_pyramid(tmp_path / "a.tif", pixels, downsamples=(), tile=16))
    config = TileConfig(px=256, overlap=overlap, edge=edge)
    assert plan_grid(slide.info, config=config).columns == count
    slide.close()


def test_an_offset_moves_the_grid_and_still_covers(cmu: Path) -> None:
    slide = open_slide(cmu)
    grid = plan_grid(slide.info, config=TileConfig(), offset=(0.5, 0.25))
    assert grid.x == pytest.approx(-0.5 * grid.step)
    assert grid.x + grid.columns * grid.step >= 2220
    assert grid.y + grid.rows * grid.step >= 2967
    with pytest.raises(
        ConfigError, match=r"offset is .*; both parts must be 0 or more and below 1"
    ):
        plan_grid(slide.info, config=TileConfig(), offset=(1.0, 0))
    slide.close()


@pytest.mark.parametrize(
    ("tissue", "pen", "sharp", "word"),
    [
        (0.9, 0.0, 300, "tissue"),
        (0.9, 0.2, 300, "pen"),
        (0.1, 0.0, 300, "little tissue"),
        (0.9, 0.0, 2, "blurred"),
    ],
)
def test_why_a_tile_is_kept(tissue: float, pen: float, sharp: float, word: str) -> None:
    kept, reason = judge(tissue, pen, sharp, config=TileConfig(), tissue_config=TissueConfig())
    assert (kept, reason) == (word == "tissue", word)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"px": 0}, "tiles of 0 px at 0.5 µm/px: both must be positive"),
        ({"overlap": 256}, "overlap is 256; it must be 0 to 255"),
        ({"edge": "wrap"}, "edge is 'wrap'; it is 'pad' or 'drop'"),
        ({"min_tissue": 2}, "min_tissue is 2; a fraction is 0 to 1"),
    ],
)
def test_configuration_errors(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        TileConfig(**values)
    assert str(error.value) == said
