"""Synthetic tissue: seeded, true to its labels, and in two laboratories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planaria.errors import ConfigError
from planaria.pathology.synthetic.node import NodeConfig, node_slide, patch, tumour_mask
from planaria.pathology.synthetic.paint import blobs, draw_stain, ink
from planaria.pathology.synthetic.prostate import PAIRS, BiopsyConfig, biopsy, facts, isup_of
from planaria.pathology.synthetic.tree import write_tree


def test_the_same_arguments_give_the_same_pixels() -> None:
    np.testing.assert_array_equal(patch(5, seed=1).rgb, patch(5, seed=1).rgb)
    assert not np.array_equal(patch(5, seed=1).rgb, patch(5, seed=2).rgb)
    assert not np.array_equal(patch(5, seed=1).rgb, patch(7, seed=1).rgb)


def test_a_patch_is_positive_by_its_centre_alone() -> None:
    around = {0: [], 1: []}
    for index in range(300):
        found = patch(index, seed=4)
        centre = found.tumour[32:64, 32:64]
        assert found.label == int(centre.any())
        outside = found.tumour.copy()
        # A positive patch's own focus may reach out of the centre: count beyond its reach.
        outside[14:82, 14:82] = False
        around[found.label].append(outside.any())
    share = {label: np.mean(values) for label, values in around.items()}
    # Tumour stands outside in both classes with the same chance (300 draws: 2 sigma is 0.11).
    assert 0.3 < share[0] < 0.65
    assert abs(share[0] - share[1]) < 0.12


def test_no_tumour_cell_reaches_into_a_negative_centre() -> None:
    config = NodeConfig(around=1.0, apart=6.0)
    for seed in range(40):
        mask = tumour_mask(0, config=config, rng=np.random.default_rng(seed))
        assert not mask[26:70, 26:70].any()


def test_laboratories_differ_in_colour_and_slides_are_named() -> None:
    first, other = patch(0), patch(64)
    assert (first.laboratory, other.laboratory) == ("A", "B")
    assert first.slide == "synthetic-node-0-0000"
    assert patch(63).slide == first.slide != other.slide
    gap = np.abs(first.rgb.mean((0, 1)) - other.rgb.mean((0, 1)))
    assert gap.max() > 10


def test_slides_come_from_the_laboratories_asked_for() -> None:
    config = NodeConfig(laboratories="B", patches_per_slide=2)
    assert {patch(index, config=config).laboratory for index in range(8)} == {"B"}
    core = BiopsyConfig(width=256, height=128, pen=0.0, laboratories="BBA")
    found = [biopsy(index, config=core).laboratory for index in (0, 6, 12, 18)]
    assert found == ["B", "B", "A", "B"]


def test_tumour_keeps_its_distance_from_a_negative_centre() -> None:
    config = NodeConfig(around=1.0, apart=14.0)
    masks = [tumour_mask(0, config=config, rng=np.random.default_rng(s)) for s in range(20)]
    assert not any(mask[18:78, 18:78].any() for mask in masks)
    assert all(mask.any() for mask in masks)


def test_grades_follow_from_the_regions() -> None:
    for index in range(12):
        found = biopsy(index, seed=2, config=BiopsyConfig(width=640, height=256, pen=0.0))
        counts = {p: int((found.mask == p).sum()) for p in (3, 4, 5)}
        if found.isup == 0:
            assert found.gleason == "negative"
            assert sum(counts.values()) == 0
            continue
        primary, secondary = (int(p) for p in found.gleason.split("+"))
        assert isup_of(primary, secondary) == found.isup == index % 6
        assert counts[primary] > 0
        assert set(np.unique(found.mask)) <= {0, 1, 2, primary, secondary}
        assert "synthetic" in found.name


def test_a_tree_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    config = BiopsyConfig(width=256, height=128)
    for index in range(8):
        known, found = facts(index, seed=3, config=config), biopsy(index, seed=3, config=config)
        assert (known.name, known.isup, known.gleason, known.laboratory) == (
            found.name,
            found.isup,
            found.gleason,
            found.laboratory,
        )
    write_tree(tmp_path / "a", count=3, seed=3, config=config)
    first = sorted((tmp_path / "a" / "train_images").iterdir())
    before = [path.stat().st_mtime_ns for path in first]
    write_tree(tmp_path / "a", count=4, seed=3, config=config)
    assert [path.stat().st_mtime_ns for path in first] == before
    whole = write_tree(tmp_path / "b", count=4, seed=3, config=config)
    assert (tmp_path / "a" / "train.csv").read_text() == (whole / "train.csv").read_text()
    assert len(list((tmp_path / "a" / "train_label_masks").iterdir())) == 4


def test_every_pair_has_a_grade() -> None:
    assert {pair for pairs in PAIRS.values() for pair in pairs} == {
        (a, b) for a in (3, 4, 5) for b in (3, 4, 5)
    }
    with pytest.raises(ConfigError, match=r"Gleason 2\+3: patterns are 3, 4 and 5"):
        isup_of(2, 3)


def test_pen_marks_are_told() -> None:
    found = [biopsy(i, config=BiopsyConfig(width=256, height=128, pen=1.0)).ink for i in range(6)]
    assert set(found) <= {"green", "blue", "black"}
    assert None not in found
    assert biopsy(0, config=BiopsyConfig(width=256, height=128, pen=0.0)).ink is None


def test_a_node_on_glass() -> None:
    rgb, tumour, _ = node_slide(seed=0, size=(512, 384), tumour_fraction=0.2)
    assert rgb.shape == (384, 512, 3)
    assert 0.05 < tumour.mean() < 0.25
    assert (rgb[:20, :20].mean(axis=(0, 1)) > 225).all()
    assert not node_slide(seed=0, size=(512, 384), tumour_fraction=0.0)[1].any()


def test_blobs_cover_what_they_are_asked_to() -> None:
    mask = blobs((200, 300), scale=40, fraction=0.3, rng=np.random.default_rng(0))
    assert mask.mean() == pytest.approx(0.3, abs=0.01)
    assert not blobs((20, 30), scale=4, fraction=0.0, rng=np.random.default_rng(0)).any()


def test_errors() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="laboratory is 'C'; it is one of A, B"):
        draw_stain("C", rng=rng)
    with pytest.raises(ConfigError, match="ink is 'pink'; it is one of green, blue, black, red"):
        ink(np.zeros((8, 8, 3), np.uint8), colour="pink", width_px=2, rng=rng)
    with pytest.raises(ConfigError, match="likeness is 2; 0 to 1"):
        NodeConfig(likeness=2)
    with pytest.raises(ConfigError, match="laboratories is 'AC'; it is made of the letters A, B"):
        NodeConfig(laboratories="AC")
    with pytest.raises(ConfigError, match="laboratories is ''; it is made of the letters A, B"):
        BiopsyConfig(laboratories="")
    with pytest.raises(ConfigError, match=r"apart is -1.0; 0 or more µm"):
        NodeConfig(apart=-1.0)
    with pytest.raises(ConfigError, match="a biopsy of 64x512 px; at least 128x128"):
        BiopsyConfig(width=64)
