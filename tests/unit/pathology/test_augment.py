"""Random center cropping and turns."""

from __future__ import annotations

import pytest
import torch

from planaria.errors import ConfigError, DataError
from planaria.pathology.augment import (
    CropConfig,
    crop_at,
    random_center_crop,
    random_turn,
    stain_jitter,
    turn,
)


@pytest.mark.parametrize("fill", ["reflect", "zeros"])
def test_all_289_offsets_keep_the_centre(fill: str) -> None:
    image = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    centre = image[0, :, 32:64, 32:64]
    offsets = torch.cartesian_prod(torch.arange(17), torch.arange(17))
    assert len(offsets) == 289
    crops = crop_at(image.expand(289, -1, -1, -1), offsets_B2=offsets, config=CropConfig(fill=fill))
    assert crops.shape == (289, 3, 96, 96)
    for crop, (row, column) in zip(crops, offsets.tolist(), strict=True):
        top, left = 32 + 8 - row, 32 + 8 - column
        torch.testing.assert_close(crop[:, top : top + 32, left : left + 32], centre)
    torch.testing.assert_close(crops[8 * 17 + 8], image[0])
    assert len({crop.numpy().tobytes() for crop in crops}) == 289


def test_fill() -> None:
    image = torch.rand(1, 3, 96, 96) + 0.1
    corner = torch.tensor([[0, 0]])
    zeros = crop_at(image, offsets_B2=corner, config=CropConfig(fill="zeros"))
    assert (zeros[0, :, :8] == 0).all()
    assert (zeros[0, :, 8:, 8:] > 0).all()
    reflected = crop_at(image, offsets_B2=corner, config=CropConfig())
    torch.testing.assert_close(reflected[0, :, 7, 8:], image[0, :, 1, :88])


def test_chance_comes_from_the_generator_alone() -> None:
    x = torch.rand(64, 3, 96, 96)
    first = random_center_crop(x, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    second = random_center_crop(x, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, second)
    assert not torch.equal(first, random_center_crop(x, generator=torch.Generator().manual_seed(4)))


def test_bytes_stay_bytes() -> None:
    x = (torch.rand(2, 3, 96, 96) * 255).to(torch.uint8)
    assert random_center_crop(x, generator=torch.Generator()).dtype == torch.uint8


def test_eight_turns() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4).expand(8, -1, -1, -1)
    ways = turn(image, ways_B=torch.arange(8))
    assert len({way.numpy().tobytes() for way in ways}) == 8
    assert torch.equal(ways[0], image[0])
    many = random_turn(
        image[:1].expand(500, -1, -1, -1), generator=torch.Generator().manual_seed(0)
    )
    assert len({way.numpy().tobytes() for way in many}) == 8


def test_a_change_of_stain_leaves_glass_white() -> None:
    x = torch.ones(4, 3, 2, 2)
    x[:, :, 0, 0] = 0.5
    out = stain_jitter(x, generator=torch.Generator().manual_seed(0), strength=0.2)
    assert (out[:, :, 1, 1] == 1).all()
    assert len(out[:, :, 0, 0].unique()) == 12
    assert (out > 0).all()


def test_errors() -> None:
    x = torch.zeros(2, 3, 40, 40)
    with pytest.raises(
        DataError, match="images of 40x40 px lose their centre of 32 px by a crop with"
    ):
        crop_at(x, offsets_B2=torch.zeros(2, 2, dtype=torch.long), config=CropConfig())
    x = torch.zeros(2, 3, 96, 96)
    with pytest.raises(DataError, match=r"offsets are \(1, 2\); expected \(2, 2\)"):
        crop_at(x, offsets_B2=torch.zeros(1, 2, dtype=torch.long), config=CropConfig())
    with pytest.raises(DataError, match="an offset is outside 0 to 16"):
        crop_at(x, offsets_B2=torch.full((2, 2), 17), config=CropConfig())
    with pytest.raises(ConfigError, match="fill is 'x'; it is 'reflect' or 'zeros'"):
        CropConfig(fill="x")
    with pytest.raises(ConfigError, match="pad is -1; 0 or more pixels"):
        CropConfig(pad=-1)
    with pytest.raises(ConfigError, match="strength is 1; 0 or more and below 1"):
        stain_jitter(x, generator=torch.Generator(), strength=1)
