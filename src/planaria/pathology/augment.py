"""Random center cropping and the turns of a patch: chance from a generator that the caller owns.

A recipe keeps the generator's state with its training state, so that a replayed step sees the same
images. Source: Cancers 2021, 13(4):661; released code at 24cf3ce (padding 8, flip, crop, flip).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from planaria.errors import ConfigError, DataError

CENTRE = 32
"""Pixels: the square in the middle that alone decides a PCam label."""


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """Random center cropping (RCC)."""

    pad: int = 8
    """Pixels added on each side before a crop of the old size is cut out."""
    fill: str = "reflect"
    """``reflect``, or ``zeros`` as the released code has it."""

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ConfigError(f"pad is {self.pad}; 0 or more pixels")
        if self.fill not in ("reflect", "zeros"):
            raise ConfigError(f"fill is {self.fill!r}; it is 'reflect' or 'zeros'")


def crop_at(x_B3HW: Tensor, *, offsets_B2: Tensor, config: CropConfig) -> Tensor:
    """Each image padded and cropped at its own (row, column) offset of 0 to 2 pad.

    Offset (pad, pad) is the identity. Every offset keeps the central ``CENTRE`` square inside where
    the image's side is at least ``CENTRE + 2 pad``, which is checked.
    """
    batch, _, height, width = x_B3HW.shape
    if min(height, width) < CENTRE + 2 * config.pad:
        raise DataError(
            f"images of {height}x{width} px lose their centre of {CENTRE} px by a crop with pad "
            f"{config.pad}; lower pad"
        )
    if tuple(offsets_B2.shape) != (batch, 2):
        raise DataError(f"offsets are {tuple(offsets_B2.shape)}; expected ({batch}, 2)")
    if batch and not (int(offsets_B2.min()) >= 0 and int(offsets_B2.max()) <= 2 * config.pad):
        raise DataError(f"an offset is outside 0 to {2 * config.pad}")
    mode = "reflect" if config.fill == "reflect" else "constant"
    pad = config.pad
    source = x_B3HW if x_B3HW.is_floating_point() else x_B3HW.to(torch.float32)
    padded = functional.pad(source, (pad, pad, pad, pad), mode=mode).to(x_B3HW.dtype)
    rows = offsets_B2[:, :1] + torch.arange(height)
    columns = offsets_B2[:, 1:] + torch.arange(width)
    index = torch.arange(batch)[:, None, None]
    # Advanced indexing puts channels last.
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def random_center_crop(
    x_B3HW: Tensor, *, generator: torch.Generator, config: CropConfig | None = None
) -> Tensor:
    """RCC of a batch: [B, 3, H, W] to the same shape, offsets uniform over {0 ... 2 pad}^2."""
    config = config or CropConfig()
    offsets = torch.randint(0, 2 * config.pad + 1, (x_B3HW.shape[0], 2), generator=generator)
    return crop_at(x_B3HW, offsets_B2=offsets, config=config)


def turn(x_B3HW: Tensor, *, ways_B: Tensor) -> Tensor:
    """Each square image turned and mirrored in one of 8 ways; 0 is the identity."""
    out = torch.empty_like(x_B3HW)
    for way in ways_B.unique().tolist():
        chosen = ways_B == way
        turned = torch.rot90(x_B3HW[chosen], k=way % 4, dims=(2, 3))
        out[chosen] = turned.flip(3) if way >= 4 else turned
    return out


def random_turn(x_B3HW: Tensor, *, generator: torch.Generator) -> Tensor:
    """A batch of square images, each turned and mirrored by chance (8 ways)."""
    ways = torch.randint(0, 8, (x_B3HW.shape[0],), generator=generator)
    return turn(x_B3HW, ways_B=ways)


def stain_jitter(x_B3HW: Tensor, *, generator: torch.Generator, strength: float = 0.05) -> Tensor:
    """Optical density of each channel scaled by chance: a change of stain, glass stays white.

    Values 0 to 1; factors are uniform in 1 +- ``strength`` per image and channel. Source: our
    choice, after Tellez et al. 2019 without the stain matrix.
    """
    if not 0 <= strength < 1:
        raise ConfigError(f"strength is {strength}; 0 or more and below 1")
    factors = 1 + strength * (2 * torch.rand(x_B3HW.shape[0], 3, 1, 1, generator=generator) - 1)
    return x_B3HW.clamp_min(1 / 255) ** factors
