"""Tissue against glass, ink, gaps and blur."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from planaria.errors import ConfigError
from planaria.pathology.slides import open_slide
from planaria.pathology.synthetic.paint import INKS, ink
from planaria.pathology.synthetic.prostate import BiopsyConfig, biopsy
from planaria.pathology.tissue import (
    TissueConfig,
    drop_small,
    map_pixels,
    mask_fraction,
    measure_tile,
    pen_mask,
    saturation,
    sharpness,
    tissue_map,
)
from tests.support.slides import tissue_pixels, write_pyramid

CONFIG = TissueConfig()


def test_saturation_is_that_of_hsv() -> None:
    rgb = np.array([[[200, 100, 150], [7, 7, 7], [0, 0, 0]]], dtype=np.uint8)
    np.testing.assert_allclose(saturation(rgb), [[0.5, 0.0, 0.0]])


def test_the_real_slide(cmu: Path) -> None:
    slide = open_slide(cmu)
    found = tissue_map(slide)
    assert 0.28 < found.fraction < 0.40
    assert found.pen_fraction < 0.01  # flecks of surgical ink at the margin
    assert not found.mask[:, -20:].any()
    assert found.mask[-30:, 50:65].all()
    slide.close()


def test_a_synthetic_biopsy_is_found_but_for_its_rim() -> None:
    truth = biopsy(4, seed=3, config=BiopsyConfig(pen=0.0))
    small = truth.rgb[::8, ::8]
    found = map_pixels(small, downsample=8, mpp=8.0, config=CONFIG)
    real = truth.mask[::8, ::8] > 0
    overlap = (found.mask & real).sum() / (found.mask | real).sum()
    assert overlap > 0.93


def test_an_all_white_slide_has_no_tissue_and_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    glass = rng.integers(238, 246, (600, 800, 3)).astype(np.uint8)
    slide = open_slide(write_pyramid(tmp_path / "white.tif", glass, downsamples=()))
    found = tissue_map(slide)
    assert found.fraction == 0
    assert found.reason == "no tissue: nothing is more saturated than 0.060"
    slide.close()


@pytest.mark.parametrize("colour", sorted(INKS))
def test_ink_is_not_tissue(colour: str) -> None:
    rgb = tissue_pixels(1200, 800, box=(200, 200, 1000, 600))
    stroke = ink(rgb, colour=colour, width_px=120, rng=np.random.default_rng(5))
    stroke = ndimage.binary_erosion(stroke, iterations=8)
    assert stroke.sum() > 10_000
    found = map_pixels(rgb, downsample=1, mpp=4.0, config=CONFIG)
    assert found.mask[stroke].mean() < 0.01
    assert found.mask[300:500, 300:900].mean() > 0.6


def test_a_slide_that_is_all_pen(tmp_path: Path) -> None:
    rgb = np.full((600, 600, 3), INKS["green"], dtype=np.uint8)
    found = map_pixels(rgb, downsample=1, mpp=8.0, config=CONFIG)
    assert not found.mask.any()
    assert found.reason == "no tissue: 100% of the slide is ink and 0% is black"


def test_stained_nuclei_are_not_ink() -> None:
    for laboratory_index in (0, 6):
        found = pen_mask(biopsy(laboratory_index + 3, seed=1, config=BiopsyConfig(pen=0.0)).rgb)
        assert found.mean() < 0.001


def test_unscanned_gaps_are_white(tmp_path: Path) -> None:
    rgb = tissue_pixels(1200, 800, box=(0, 0, 600, 800))
    rgb[:, 600:] = 0
    slide = open_slide(write_pyramid(tmp_path / "gap.tif", rgb, downsamples=()))
    found = tissue_map(slide)
    half = round(600 / found.downsample)
    assert found.mask[:, : half - 2].mean() > 0.95
    assert not found.mask[:, half + 2 :].any()
    slide.close()


def test_blur_lowers_sharpness() -> None:
    rgb = tissue_pixels(256, 256, box=(0, 0, 256, 256))
    blurred = ndimage.gaussian_filter(rgb, (6, 6, 0))
    assert sharpness(rgb) > 100 * sharpness(blurred)
    assert sharpness(blurred) < CONFIG.min_sharpness < sharpness(rgb)
    assert sharpness(rgb[:2]) == 0.0


def test_a_tile_is_measured_by_its_own_pixels() -> None:
    rgb = tissue_pixels(100, 100, box=(0, 0, 50, 100))
    found = measure_tile(rgb, threshold=0.1, config=CONFIG)
    assert found.tissue == pytest.approx(0.5, abs=0.01)
    assert found.pen == 0.0


def test_small_islands_are_dropped() -> None:
    mask = np.zeros((20, 20), dtype=bool)
    mask[1:3, 1:3] = True
    mask[10:15, 10:15] = True
    kept = drop_small(mask, area=5)
    assert (kept.sum(), kept[1, 1], kept[12, 12]) == (25, False, True)


def test_a_sliver_of_tissue_under_a_tile_counts() -> None:
    mask = np.zeros((10, 10), dtype=bool)
    mask[5, 5] = True
    found = map_pixels(
        np.full((10, 10, 3), 240, dtype=np.uint8), downsample=8, mpp=8, config=CONFIG
    )
    assert not found.mask.any()
    found = dataclasses.replace(found, mask=mask)
    assert mask_fraction(found, x=41.0, y=41.0, side=1.5) == 1.0
    assert mask_fraction(found, x=39.0, y=39.0, side=1.5) == 0.25
    assert mask_fraction(found, x=0, y=0, side=32) == 0.0
    assert mask_fraction(found, x=800, y=0, side=32) == 0.0
    assert mask_fraction(found, x=-64, y=0, side=32) == 0.0


def test_configuration_errors() -> None:
    with pytest.raises(
        ConfigError, match=r"saturation_floor 0.3 and saturation_ceiling 0.15 must be"
    ):
        TissueConfig(saturation_floor=0.3)
    with pytest.raises(ConfigError, match="mpp is 0; it must be positive"):
        TissueConfig(mpp=0)
