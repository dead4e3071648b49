"""One classification network with the switches of both papers, over MONAI's EfficientNet.

Shapes: B batch, C classes, h and w the last feature map's size.

``BoostedEfficientNet`` is MONAI's EfficientNet plus, each as a switch: the stem's stride (2 as
published, 1 for small patches), squeeze-excitation after the last block of stages 2, 3, 5 and 7, and
fusion of those four feature maps in place of the usual head. Source: Cancers 2021, 13(4):661
(arXiv 2010.05027); released code at 24cf3ce; widths for b0 to b2 follow from the same taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from monai.networks.nets.efficientnet import EfficientNet, MBConvBlock
from torch import Tensor, nn
from torch.nn import functional

from planaria.errors import ConfigError

BACKBONES: dict[str, tuple[float, float, float]] = {
    "b0": (1.0, 1.0, 0.2),
    "b1": (1.0, 1.1, 0.2),
    "b2": (1.1, 1.2, 0.3),
    "b3": (1.2, 1.4, 0.3),
}
"""Width factor, depth factor, dropout. Source: EfficientNet, 2019, table of the released code."""

STAGES = (
    "r1_k3_s11_e1_i32_o16",
    "r2_k3_s22_e6_i16_o24",
    "r2_k5_s22_e6_i24_o40",
    "r3_k3_s22_e6_i40_o80",
    "r3_k5_s11_e6_i80_o112",
    "r4_k5_s22_e6_i112_o192",
    "r1_k3_s11_e6_i192_o320",
)
"""MONAI's notation: repeats, kernel, stride, expansion, channels in and out."""

TAPS = (1, 2, 4, 6)
"""Indices of stages 2, 3, 5 and 7, whose last blocks are tapped."""

REDUCTIONS = (8, 8, 8, 16)
"""Reduction of each tap's squeeze-excitation. Source: released code."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What :class:`BoostedEfficientNet` is built from."""

    classes: int = 1
    """Outputs; 1 for a probability by the sigmoid."""
    backbone: str = "b0"
    """``b0`` to ``b3``."""
    stem_stride: int = 2
    """2 as published; 1 keeps twice the resolution throughout (total stride 16 instead of 32)."""
    attention: bool = False
    """Squeeze-excitation on the four taps."""
    fusion: bool = False
    """The four taps, pooled and concatenated, in place of the head convolution."""
    image_px: int = 96
    """Side of the images; MONAI fixes its padding by it."""
    width: float | None = None
    """Width factor; None takes the backbone's. Smaller ones are for tests and ablations."""
    depth: float | None = None
    """Depth factor; None takes the backbone's."""
    dropout: float | None = None
    """None takes 0.3 with fusion (released code), else the backbone's."""
    drop_connect: float = 0.2
    """Largest rate of dropped residual branches."""
    lite: bool = False
    """EfficientNet-lite: no squeeze-excitation in blocks, ReLU6 for swish, stem and head unscaled."""

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES:
            raise ConfigError(f"backbone is {self.backbone!r}; it is one of {', '.join(BACKBONES)}")
        if self.stem_stride not in (1, 2):
            raise ConfigError(f"stem_stride is {self.stem_stride}; it is 1 or 2")
        if self.classes < 1:
            raise ConfigError(f"classes is {self.classes}; at least 1")
        if self.image_px < 32:
            raise ConfigError(f"image_px is {self.image_px}; the network needs at least 32")
        for name in ("width", "depth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive")
        for name in ("dropout", "drop_connect"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"{name} is {value}; it must be 0 or more and below 1")


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from all channels' means: [B, C, h, w] to the same.

    Source: Hu et al. 2018; reductions as in :data:`REDUCTIONS`.
    """

    def __init__(self, channels: int, *, reduction: int) -> None:
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.reduce = nn.Linear(channels, hidden)
        self.expand = nn.Linear(hidden, channels)

    def forward(self, x_BChw: Tensor) -> Tensor:
        """The gated feature map."""
        gate = torch.sigmoid(self.expand(functional.relu(self.reduce(x_BChw.mean(dim=(2, 3))))))
        return x_BChw * gate[:, :, None, None]


class BoostedEfficientNet(nn.Module):
    """EfficientNet with stem stride, attention and fusion as switches: [B, 3, px, px] to [B, C].

    Returns logits. Images of another size than ``image_px`` work where the padding that MONAI fixed
    still fits (both sizes multiples of the total stride).

    >>> net = BoostedEfficientNet(NetworkConfig(width=0.25, stem_stride=1, fusion=True))
    >>> net(torch.zeros(2, 3, 96, 96)).shape
    torch.Size([2, 1])
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width, depth, dropout = BACKBONES[config.backbone]
        stages: list[str] = [*STAGES] if config.lite else [f"{stage}_se0.25" for stage in STAGES]
        self.backbone = EfficientNet(
            blocks_args_str=stages,
            num_classes=config.classes,
            width_coefficient=width if config.width is None else config.width,
            depth_coefficient=depth if config.depth is None else config.depth,
            dropout_rate=dropout,
            # With stride 1 everything behind the stem sees twice the size.
            image_size=config.image_px * (2 if config.stem_stride == 1 else 1),
            drop_connect_rate=config.drop_connect,
        )
        if config.stem_stride == 1:
            stride_one_stem(self.backbone)
        if config.lite:
            use_relu6(self.backbone)
        else:
            # MONAI's memory-saving swish writes over a tensor that a tap still needs.
            self.backbone.set_swish(memory_efficient=False)
        channels = [_out_channels(self.backbone._blocks[stage]) for stage in TAPS]
        self.attention = nn.ModuleList(
            SqueezeExcitation(c, reduction=r) if config.attention else nn.Identity()
            for c, r in zip(channels, REDUCTIONS, strict=True)
        )
        if config.fusion:
            # The released code computes the head convolution and drops it; here it is not built.
            net: Any = self.backbone
            net._conv_head = nn.Identity()
            net._bn1 = nn.Identity()
            self.backbone._fc = nn.Linear(sum(channels), config.classes)
            dropout = 0.3
        # MONAI draws this layer from +-1/sqrt(classes): with one class the first logits are +-10.
        nn.init.normal_(self.backbone._fc.weight, std=0.01)
        nn.init.zeros_(self.backbone._fc.bias)
        rate = dropout if config.dropout is None else config.dropout
        self.backbone._dropout = nn.Dropout(rate)

    @property
    def fused_width(self) -> int:
        """Features that the linear layer sees."""
        return self.backbone._fc.in_features

    def taps(self, x_B3HW: Tensor) -> list[Tensor]:
        """The four tapped feature maps, after attention where it is on, finest first."""
        net = self.backbone
        x = net._conv_stem(net._conv_stem_padding(x_B3HW))
        x = net._swish(net._bn0(x))
        found: list[Tensor] = []
        for stage, blocks in enumerate(net._blocks):
            x = blocks(x)
            if stage in TAPS:
                x = self.attention[TAPS.index(stage)](x)
                found.append(x)
        return found

    def features(self, x_B3HW: Tensor) -> Tensor:
        """Pooled features [B, fused_width] before dropout."""
        if self.config.fusion:
            return torch.cat([tap.mean(dim=(2, 3)) for tap in self.taps(x_B3HW)], dim=1)
        return self._head(self.taps(x_B3HW)[-1]).mean(dim=(2, 3))

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self.backbone._fc(self.backbone._dropout(self.features(x_B3HW)))

    def logit_map(self, x_B3HW: Tensor) -> Tensor:
        """The logits before pooling, [B, C, h, w]; their mean over h and w is ``forward``'s result.

        What each place adds to each grade: the heat-map of a board. In ``eval`` mode only, since
        dropout would break that identity. With fusion the coarser taps are spread over the finest.
        Source: class activation maps (Zhou et al. 2016).
        """
        if self.training:
            raise ConfigError("logit_map needs eval(): dropout would make the map disagree")
        fc = self.backbone._fc
        if not self.config.fusion:
            head = self._head(self.taps(x_B3HW)[-1])
            return functional.conv2d(head, fc.weight[:, :, None, None], fc.bias)
        taps = self.taps(x_B3HW)
        size = taps[0].shape[-2:]
        logits = fc.bias[None, :, None, None]
        start = 0
        for tap in taps:
            part = fc.weight[:, start : start + tap.shape[1], None, None]
            # Nearest keeps each tap's mean where the sizes divide; the rest is rescaled.
            contribution = functional.conv2d(tap, part)
            spread = functional.interpolate(contribution, size=size, mode="nearest")
            shift = contribution.mean(dim=(2, 3)) - spread.mean(dim=(2, 3))
            logits = logits + spread + shift[:, :, None, None]
            start += tap.shape[1]
        return logits

    def _head(self, x: Tensor) -> Tensor:
        net = self.backbone
        return net._swish(net._bn1(net._conv_head(net._conv_head_padding(x))))


def stride_one_stem(net: EfficientNet) -> None:
    """Sets the stem's stride to 1 and its padding to 1 on each side.

    MONAI's own padding for stride 2 is one-sided: left as it is, a 96 px image would give 95 x 95
    features, half a pixel off the centre. The 3x3 kernel is kept, pre-trained or not.
    """
    stem = cast("nn.Conv2d", net._conv_stem)
    stem.stride = (1, 1)
    net._conv_stem_padding = nn.ConstantPad2d(1, 0.0)


def use_relu6(net: EfficientNet) -> None:
    """Replaces every swish by ReLU6, as EfficientNet-lite has it."""
    net._swish = nn.ReLU6()
    for module in net.modules():
        if isinstance(module, MBConvBlock):
            module._swish = nn.ReLU6(inplace=False)


def _out_channels(blocks: Any) -> int:
    last = list(blocks)[-1]
    return int(last.out_channels)
