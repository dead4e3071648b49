"""Tiles at a stated resolution: no drift, no gap, no black."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planaria.errors import ConfigError, DataError
from planaria.pathology.regions import best_level, read_region, read_tile, thumbnail
from planaria.pathology.slides import Level, open_slide
from planaria.pathology.tiles import TileConfig, plan_grid
from tests.support.slides import coordinates, write_pyramid


def levels(*downsamples: float) -> tuple[Level, ...]:
    return tuple(Level(width=10, height=10, downsample=d) for d in downsamples)


@pytest.mark.parametrize(
    ("downsample", "level"), [(1.0, 0), (0.5, 0), (1.9, 0), (2.0, 1), (3.99, 1), (16.2, 2)]
)
def test_the_coarsest_level_that_is_fine_enough(downsample: float, level: int) -> None:
    # 2.0005 counts as 2: a level within 1 % is taken for the wished resolution.
    assert best_level(levels(1.0, 2.0005, 16.0), downsample=downsample) == level


def test_tiles_do_not_drift_over_a_fractional_level(tmp_path: Path) -> None:
    width, height = 3601, 401
    path = write_pyramid(
        tmp_path / "a.tif", coordinates(width, height), downsamples=(2.0005,), mpp=0.5
    )
    slide = open_slide(path)
    assert slide.info.levels[1].downsample == pytest.approx(2.0, abs=0.01)
    config = TileConfig(mpp=1.01, px=64)
    grid = plan_grid(slide.info, config=config)
    for column in range(grid.columns - 1):
        x, y = grid.place(column, 1)
        tile = read_tile(slide, x=x, y=y, mpp=config.mpp, px=config.px)
        middle = (tile[32, 32, 0] - 20.0) * 16 + 8
        # Red tells x in steps of 16 level-0 px; a drift of one pixel a tile would be 30 px here.
        assert abs(middle - (x + grid.side / 2)) <= 10
    slide.close()


def test_the_place_of_a_tile_comes_from_its_indices_alone(cmu: Path) -> None:
    slide = open_slide(cmu)
    grid = plan_grid(slide.info, config=TileConfig(mpp=0.5, px=256))
    assert (grid.columns, grid.rows) == (9, 12)
    side = 256 * 0.5 / 0.499
    assert grid.place(8, 11) == (pytest.approx(8 * side), pytest.approx(11 * side))
    dropped = plan_grid(slide.info, config=TileConfig(mpp=0.5, px=256, edge="drop"))
    # A peer gives 77 here; the slide holds 8 x 11 whole tiles.
    assert dropped.columns * dropped.rows == 88
    slide.close()


def test_a_slide_smaller_than_a_tile_is_padded_with_white(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "a.tif", coordinates(100, 60), downsamples=(), tile=16)
    slide = open_slide(path)
    grid = plan_grid(slide.info, config=TileConfig(mpp=0.5, px=256))
    assert (grid.columns, grid.rows) == (1, 1)
    tile = read_tile(slide, x=0, y=0, mpp=0.5, px=256)
    np.testing.assert_array_equal(tile[:60, :100], coordinates(100, 60))
    assert (tile[60:] == 255).all()
    assert (tile[:, 100:] == 255).all()
    assert plan_grid(slide.info, config=TileConfig(mpp=0.5, px=256, edge="drop")).columns == 0
    slide.close()


def test_large_regions_are_read_in_pieces_that_fit_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)
    pixels = np.kron(coarse, np.ones((64, 64, 1), dtype=np.uint8))
    path = write_pyramid(tmp_path / "a.tif", pixels, downsamples=())
    slide = open_slide(path)
    out = read_region(slide, x=0, y=0, extent=(3200, 2560), size=(1600, 1280))
    inner = out[16::32, 16::32].astype(int)
    assert np.abs(inner - np.where(coarse.max(-1, keepdims=True) <= 7, 255, coarse)).max() <= 1
    slide.close()


def test_a_thumbnail_fits_and_says_its_scale(cmu: Path) -> None:
    slide = open_slide(cmu)
    pixels, down = thumbnail(slide, max_px=300)
    assert pixels.shape == (300, 224, 3)
    assert down == pytest.approx(2967 / 300)
    slide.close()


def test_errors(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "a.tif", coordinates(100, 60), mpp=None, downsamples=())
    slide = open_slide(path)
    with pytest.raises(DataError, match=r"a.tif: no usable resolution"):
        read_tile(slide, x=0, y=0, mpp=0.5, px=64)
    with pytest.raises(ConfigError, match=r"a tile of 0 px at 0.5 µm/px: both must be positive"):
        read_tile(slide, x=0, y=0, mpp=0.5, px=0)
    with pytest.raises(ConfigError, match="both must be positive"):
        read_region(slide, x=0, y=0, extent=(0, 1), size=(1, 1))
    slide.close()
