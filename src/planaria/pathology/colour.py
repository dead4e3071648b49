"""Distribution correction (DC): what stands between the pixels and a pre-trained network.

A network that was pre-trained elsewhere expects inputs of the mean and deviation that it was trained
on; stains of another laboratory have others. Every variant here starts as that input's plain
normalisation or the identity and, trained or fitted, moves the target's distribution onto the
source's. Source: arXiv 2011.14301 (abstract); variants and defaults are our reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError

VARIANTS = ("batchnorm", "affine", "conv1x1", "standardise", "none")


@dataclass(frozen=True, kw_only=True)
class ColourStatistics:
    """Mean and deviation per channel of a set of images with values 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise DataError(
                f"the images' deviation is {self.std}; a set of flat images cannot be corrected"
            )


class RunningStatistics:
    """Sums over batches from which mean and deviation follow.

    The sums of uint8 images are whole numbers and exact, so the cut into batches does not matter.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sum = torch.zeros(3, dtype=torch.float64)
        self._square = torch.zeros(3, dtype=torch.float64)

    def add(self, x_B3HW: Tensor) -> None:
        """Adds a batch [B, 3, H, W], uint8 or float 0 to 1."""
        x = x_B3HW.to(torch.float64)
        if x_B3HW.is_floating_point():
            x = x * 255
        self._count += x.numel() // 3
        self._sum += x.sum(dim=(0, 2, 3))
        self._square += (x * x).sum(dim=(0, 2, 3))

    def result(self) -> ColourStatistics:
        """The statistics so far; DataError where nothing was added."""
        if self._count == 0:
            raise DataError("no image was given to take colour statistics from")
        mean = self._sum / self._count / 255
        variance = (self._square / self._count / 255**2 - mean * mean).clamp_min(0)
        m, s = mean.tolist(), variance.sqrt().tolist()
        return ColourStatistics(mean=(m[0], m[1], m[2]), std=(s[0], s[1], s[2]))


def statistics(batches: Iterable[Tensor]) -> ColourStatistics:
    """The colour statistics of all images in ``batches`` of [B, 3, H, W]."""
    running = RunningStatistics()
    for batch in batches:
        running.add(batch)
    return running.result()


class DistributionCorrection(nn.Module):
    """Images [B, 3, H, W] with values 0 to 1, corrected for the backbone: the same shape.

    ``target`` describes the data at hand, ``source`` the data that the backbone was pre-trained on
    (None: the backbone expects mean 0 and deviation 1).

    - ``batchnorm`` (default): the source's normalisation of the data as it is, then BatchNorm2d(3)
      whose running statistics come from ``target``, gamma 1, beta 0; trainable.
    - ``affine``: a x + b that maps the target's mean and deviation onto the source's; trainable.
    - ``conv1x1``: source's normalisation, then a 3x3 matrix per pixel that starts as the identity.
    - ``standardise``: the target's mean and deviation, fixed.
    - ``none``: the source's normalisation only, fixed.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        variant: str = "batchnorm",
        *,
        target: ColourStatistics,
        source: ColourStatistics | None = None,
    ) -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ConfigError(f"dc is {variant!r}; it is one of {', '.join(VARIANTS)}")
        self.variant = variant
        source = source or target
        src_mean, src_std = torch.tensor(source.mean), torch.tensor(source.std)
        tgt_mean, tgt_std = torch.tensor(target.mean), torch.tensor(target.std)
        plain = variant in ("batchnorm", "conv1x1", "none")
        shift, scale = (src_mean, src_std) if plain else (tgt_mean, tgt_std)
        self.register_buffer("shift", shift[None, :, None, None].clone())
        self.register_buffer("scale", scale[None, :, None, None].clone())
        self.layer: nn.Module = nn.Identity()
        if variant == "batchnorm":
            norm = nn.BatchNorm2d(3)
            norm.running_mean = (tgt_mean - src_mean) / src_std
            norm.running_var = (tgt_std / src_std) ** 2
            self.layer = norm
        elif variant == "affine":
            self.layer = ChannelAffine()
        elif variant == "conv1x1":
            conv = nn.Conv2d(3, 3, kernel_size=1)
            with torch.no_grad():
                conv.weight.copy_(torch.eye(3)[:, :, None, None])
                nn.init.zeros_(conv.bias) if conv.bias is not None else None
            self.layer = conv

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """The corrected images."""
        return self.layer((x_B3HW - self.shift) / self.scale)


class ChannelAffine(nn.Module):
    """a x + b per channel, starting as the identity: [B, 3, H, W] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 3, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, 3, 1, 1))

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """The scaled and shifted images."""
        return x_B3HW * self.gain + self.bias


class Corrected(nn.Module):
    """A network behind a correction: [B, 3, H, W] of 0 to 1 to the network's output."""

    def __init__(self, correction: DistributionCorrection, network: nn.Module) -> None:
        super().__init__()
        self.correction = correction
        self.network = network

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """The network's output for the corrected images."""
        return self.network(self.correction(x_B3HW))


def to_unit(images: Tensor | Sequence[Tensor]) -> Tensor:
    """uint8 images [B, H, W, 3] as float [B, 3, H, W], 0 to 1."""
    stacked = images if isinstance(images, Tensor) else torch.stack(list(images))
    if stacked.dtype != torch.uint8 or stacked.ndim != 4 or stacked.shape[-1] != 3:
        raise DataError(
            f"images are {stacked.dtype} {tuple(stacked.shape)}; expected uint8 [B, H, W, 3]"
        )
    # Contiguous: channels-last gradients would not have the strides of DDP's buckets.
    return stacked.permute(0, 3, 1, 2).contiguous().to(torch.float32) / 255
