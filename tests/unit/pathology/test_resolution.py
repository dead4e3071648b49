"""Which resolution is believed."""

from __future__ import annotations

import math

import pytest

from planaria.pathology.resolution import (
    choose_resolution,
    openslide_candidates,
    refuse,
    tag_candidates,
)


def test_the_first_usable_value_wins_and_refusals_are_kept() -> None:
    choice = choose_resolution([("tag 72 px/inch", 352.8, 352.8), ("aperio.MPP", 0.25, 0.25)])
    assert choice.resolution is not None
    assert (choice.resolution.mpp, choice.resolution.source) == (0.25, "aperio.MPP")
    assert choice.rejected == ("tag 72 px/inch: 352.8 µm/px is outside 0.05 to 20",)


def test_the_user_wins_over_the_file_and_the_file_is_quoted() -> None:
    choice = choose_resolution([("openslide.mpp-x", 0.5, 0.5)], override=0.25)
    assert choice.resolution is not None
    assert choice.resolution.source == "user"
    assert choice.reason == "0.25 µm/px by the user; the file says 0.5 (openslide.mpp-x)"


def test_a_nonsense_override_is_refused_too() -> None:
    choice = choose_resolution([("openslide.mpp-x", 0.5, 0.5)], override=352.0)
    assert choice.resolution is None
    assert choice.reason == "user: 352 µm/px is outside 0.05 to 20"


def test_nothing_stated() -> None:
    assert choose_resolution([]).reason == "the file states no resolution"


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (0.5, 0.5, None),
        (0.5, 0.52, None),
        (0.5, 0.6, "0.5 x 0.6 µm/px: the axes differ by more than 10 %"),
        (0.0, 0.5, "0 µm/px is outside 0.05 to 20"),
        (-0.5, -0.5, "-0.5 µm/px is outside 0.05 to 20"),
        (math.nan, 0.5, "nan x 0.5 µm/px is not a number"),
    ],
)
def test_refusals(x: float, y: float, reason: str | None) -> None:
    assert refuse(x, y) == reason


def test_the_chain_of_openslide_properties() -> None:
    found = openslide_candidates(
        {
            "aperio.MPP": "0,2520",
            "tiff.XResolution": "40000",
            "tiff.YResolution": "40000",
            "tiff.ResolutionUnit": "centimeter",
            "hamamatsu.XResolution": "not a number",
        }
    )
    assert found == [("aperio.MPP", 0.252, 0.252), ("tag 40000 px/centimeter", 0.25, 0.25)]


def test_tags_without_meaning_give_nothing() -> None:
    assert tag_candidates(0, 0, unit="inch") == []
    assert tag_candidates(300, 300, unit="none") == []
    assert tag_candidates(25400, 25400, unit="inch")[0][1] == pytest.approx(1.0)
