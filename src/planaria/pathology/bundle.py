"""A trained model as a folder: ``model.json`` says what it is, ``model.pt`` holds its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError
from planaria.pathology.attention import AttentionHead, FeatureConfig
from planaria.pathology.boards import BoardConfig
from planaria.pathology.colour import ColourStatistics, Corrected, DistributionCorrection
from planaria.pathology.files import atomic
from planaria.pathology.heat import DISCLAIMER
from planaria.pathology.losses import GradeLoss
from planaria.pathology.networks import BoostedEfficientNet, NetworkConfig
from planaria.pathology.weights import IMAGENET_MEAN, IMAGENET_STD

KINDS = ("metastasis", "gleason")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Everything that is needed to use the tensors, and what they were trained on."""

    kind: str
    """``metastasis`` (a probability per tile) or ``gleason`` (a grade per board)."""
    network: NetworkConfig | None = None
    """What sees pixels; None where the model sees features."""
    features: FeatureConfig | None = None
    """What sees frozen features of a foundation model; None where the model sees pixels."""
    target: ColourStatistics | None = None
    """Colours of the training set; needed with ``network``."""
    source: ColourStatistics | None = None
    """Colours that the backbone was pre-trained on; None for random weights."""
    dc: str = "none"
    """Distribution correction; see :mod:`planaria.pathology.colour`."""
    px: int = 96
    """Pixels of a metastasis tile."""
    mpp: float = 0.97
    """µm/px of a metastasis tile: PCam's 10x."""
    threshold: float = 0.5
    """Operating point of metastasis, chosen on the validation part."""
    board: BoardConfig | None = None
    """How Gleason boards are made."""
    loss: str = "qwmse"
    """Gleason loss; says whether the network gives one number or one per grade."""
    classes: int = 6
    """Gleason grades: ISUP 0 to 5."""
    cuts: tuple[float, ...] = ()
    """Cuts of the expected grade, fitted across folds; empty for rounding."""
    trained_on: str = "unknown"
    """The data set, as a reader of a result needs it: ``synthetic tissue``, ``PANDA``."""
    notes: tuple[str, ...] = field(default=(DISCLAIMER,))
    """Printed with every result."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; it is one of {', '.join(KINDS)}")
        if (self.network is None) == (self.features is None):
            raise ConfigError("a model sees pixels (network) or features, one of both")
        if self.network is not None and self.target is None:
            raise ConfigError("a model that sees pixels needs the colours of its training set")
        if self.kind == "gleason" and self.board is None and self.features is None:
            raise ConfigError("a gleason model needs a board configuration")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"threshold is {self.threshold}; between 0 and 1")
        if self.cuts and len(self.cuts) != self.classes - 1:
            raise ConfigError(
                f"{len(self.cuts)} cuts for {self.classes} grades; one fewer is needed"
            )


def build(card: ModelCard) -> nn.Module:
    """The network of ``card`` with fresh weights: pixels [B, 3, H, W] (behind their correction) or
    features [B, K, D + 1] to logits [B, C]."""
    if card.features is not None:
        return AttentionHead(card.features)
    assert card.network is not None, "checked by the card"
    assert card.target is not None, "checked by the card"
    correction = DistributionCorrection(card.dc, target=card.target, source=card.source)
    return Corrected(correction, BoostedEfficientNet(card.network))


def grade_loss(card: ModelCard) -> GradeLoss:
    """The Gleason loss that turns the network's outputs into expected grades."""
    return GradeLoss(card.loss, classes=card.classes)


def save_bundle(folder: Path, *, card: ModelCard, model: nn.Module) -> None:
    """Writes both files; the card comes last, so that a folder with a card is complete."""
    with atomic(folder / "model.pt") as temporary:
        torch.save(model.state_dict(), temporary)
    with atomic(folder / "model.json") as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")


def read_card(folder: Path) -> ModelCard:
    """The card of a finished training's folder; DataError for a folder that holds none."""
    path = folder / "model.json"
    if not path.is_file():
        raise DataError(f"{folder}: no model.json; give the output folder of a finished training")
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelCard)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not a model card ({error}); train it again") from error


def source_colours(pretrained: str) -> ColourStatistics | None:
    """The colours that the weights at ``pretrained`` were trained on; None without weights.

    A run's folder says so itself; every other file is taken for trained on ImageNet.
    """
    if not pretrained:
        return None
    if not Path(pretrained).is_dir():
        return ColourStatistics(mean=IMAGENET_MEAN, std=IMAGENET_STD)
    card = read_card(Path(pretrained))
    as_it_is = card.dc in ("none", "conv1x1") and card.source is not None
    return card.source if as_it_is else card.target


def load_bundle(folder: Path) -> tuple[ModelCard, nn.Module]:
    """The card and the model in ``eval`` mode; DataError for a folder that holds no model."""
    card = read_card(folder)
    model = build(card)
    try:
        state: Any = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors alike
        raise DataError(
            f"{folder / 'model.pt'}: cannot be read ({error}); copy it again"
        ) from error
    _fit(model, state, folder=folder)
    return card, model.eval()


def _fit(model: nn.Module, state: dict[str, Tensor], *, folder: Path) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise DataError(
            f"{folder}: model.pt does not belong to model.json ({first}); copy both again"
        ) from error
