"""Axes that fit the world, and where a shard lies."""

from __future__ import annotations

import itertools

import pytest
import torch

from planaria.comm.mesh import coordinates, fit
from planaria.errors import ConfigError


def test_coordinates_are_those_of_a_row_major_device_mesh() -> None:
    axes = {"pp": 2, "dp": 3, "tp": 4}
    ranks = torch.arange(24).reshape(2, 3, 4)
    for pp, dp, tp in itertools.product(range(2), range(3), range(4)):
        assert coordinates(int(ranks[pp, dp, tp]), axes) == {"pp": pp, "dp": dp, "tp": tp}


def test_an_open_axis_takes_what_is_left() -> None:
    assert fit({"dp": -1, "tp": 4}, world=8) == {"dp": 2, "tp": 4}
    assert fit({"dp": 1}, world=1) == {"dp": 1}


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 3, "tp": 2}, "mesh axes are dp=3 x tp=2, which do not multiply to the 8 shards of "
         "this run: change a size or --workers"),
        ({"dp": -1, "tp": 3}, "mesh axes are dp=-1 x tp=3, which do not multiply to the 8 shards of "
         "this run: change a size or --workers"),
        ({"dp": -1, "tp": -1}, "mesh axes are dp=-1 x tp=-1: only one size may be -1"),
        ({"dp": 0}, "mesh axes are dp=0: give each a name and a size of 1 or more, or -1"),
        ({}, "mesh axes are none: give each a name and a size of 1 or more, or -1"),
    ],
)  # fmt: skip
def test_axes_that_do_not_fit(axes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(axes, world=8)
    assert str(caught.value) == text


def test_a_shard_beyond_the_mesh() -> None:
    with pytest.raises(ConfigError) as caught:
        coordinates(8, {"dp": 8})
    assert str(caught.value) == "shard 8 is not on a mesh of 8 shards"
