"""A small head over frozen features: gated attention over a slide's tiles.

B bags, K tiles, D numbers per tile, C classes; E = D + 1, the last of which is 1 for a tile and 0
for filling. Source: Ilse et al. 2018 (gated attention), as CLAM uses it; the layer norm is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What :class:`AttentionHead` is built from, and what made the features."""

    dim: int
    """Numbers per tile."""
    classes: int = 1
    """Outputs; 1 for a probability by the sigmoid."""
    hidden: int = 256
    """Width of the head. Source: CLAM's small model has 512, then 256."""
    dropout: float = 0.25
    """Source: CLAM."""
    single: bool = False
    """Trained on single tiles: attention has learnt nothing, so a slide's score is made of its tiles'."""
    encoder: str = "unknown"
    """The foundation model; features of another one are refused."""

    def __post_init__(self) -> None:
        for name in ("dim", "classes", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it must be 0 or more and below 1")


class AttentionHead(nn.Module):
    """Logits of bags: [B, K, E] to [B, C].

    Features of different models differ in scale: each tile's are normalised by themselves first.

    >>> head = AttentionHead(FeatureConfig(dim=8, hidden=4))
    >>> head(torch.ones(2, 5, 9)).shape
    torch.Size([2, 1])
    """

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.embed = nn.Sequential(
            nn.Linear(config.dim, config.hidden), nn.ReLU(), nn.Dropout(config.dropout)
        )
        self.tanh = nn.Linear(config.hidden, config.hidden // 2 + 1)
        self.gate = nn.Linear(config.hidden, config.hidden // 2 + 1)
        self.weigh = nn.Linear(config.hidden // 2 + 1, 1)
        self.classify = nn.Linear(config.hidden, config.classes)

    def forward(self, x_BKE: Tensor) -> Tensor:
        """Logits [B, C]; filling has no part in them."""
        hidden_BKH, weight_BK = self._attend(x_BKE)
        return self.classify((weight_BK[..., None] * hidden_BKH).sum(dim=1))

    def tiles(self, x_BKE: Tensor) -> tuple[Tensor, Tensor]:
        """What each tile says alone: logits [B, K, C], and its attention [B, K], which adds up to 1.

        A bag's logits are the mean of its tiles' logits, weighed by their attention.
        """
        hidden_BKH, weight_BK = self._attend(x_BKE)
        return self.classify(hidden_BKH), weight_BK

    def _attend(self, x_BKE: Tensor) -> tuple[Tensor, Tensor]:
        if x_BKE.ndim != 3 or x_BKE.shape[-1] != self.config.dim + 1:
            raise DataError(
                f"features have shape {tuple(x_BKE.shape)}; expected [bags, tiles, "
                f"{self.config.dim + 1}], the last number telling a tile from filling"
            )
        there_BK = x_BKE[..., -1] > 0
        hidden_BKH = self.embed(self.norm(x_BKE[..., :-1]))
        score_BK = self.weigh(torch.tanh(self.tanh(hidden_BKH)) * self.gate(hidden_BKH).sigmoid())
        score_BK = score_BK.squeeze(-1).float().masked_fill(~there_BK, -math.inf)
        return hidden_BKH, score_BK.softmax(dim=1).to(hidden_BKH.dtype)
