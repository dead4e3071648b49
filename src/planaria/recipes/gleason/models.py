"""The network of a Gleason run, made from a seed and wrapped for data-parallel training."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planaria.pathology.attention import FeatureConfig
from planaria.pathology.bundle import ModelCard, build, source_colours
from planaria.pathology.colour import ColourStatistics, statistics, to_unit
from planaria.pathology.networks import NetworkConfig
from planaria.pathology.training import set_momentum
from planaria.pathology.weights import load_weights
from planaria.recipes.gleason.config import GleasonConfig
from planaria.recipes.gleason.data import Part, Prepared

CLASSES = 6
SAMPLES = 64
"""Training slides that the colours are taken from."""


def inputs(
    part: Part,
    ids: NDArray[np.int64],
    config: GleasonConfig,
    *,
    seed: int | None = None,
    shift: int = 0,
) -> Tensor:
    """What the model sees of slides ``ids``: boards [B, 3, px, px] or bags of features [B, K, D + 1].

    By chance from ``seed``; without, the whole bag, or the fixed board with ``shift``.
    """
    if part.bags is not None:
        return torch.from_numpy(part.bags.batch(ids, size=config.bag, seed=seed))
    return to_unit(torch.from_numpy(part.boards(ids, config, seed=seed, shift=shift)))


def colours(data: Prepared, config: GleasonConfig) -> ColourStatistics:
    """The colours of evenly spread training slides' boards."""
    count = len(data.train.labels)
    ids = np.unique(np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64))
    return statistics(
        inputs(data.train, part, config) for part in np.array_split(ids, -(-len(ids) // 8))
    )


def card(data: Prepared, config: GleasonConfig) -> ModelCard:
    """What the model is; cuts are set when training has ended."""
    outputs = 1 if config.loss == "qwmse-ordinal" else CLASSES
    bags = data.train.bags
    if bags is not None:
        head = FeatureConfig(
            dim=bags.dim, classes=outputs, hidden=config.hidden, encoder=bags.encoder
        )
        return ModelCard(
            kind="gleason",
            features=head,
            loss=config.loss,
            classes=CLASSES,
            trained_on=data.name,
        )
    return ModelCard(
        kind="gleason",
        network=NetworkConfig(
            classes=outputs,
            backbone=config.backbone,
            width=config.width,
            depth=config.depth,
            image_px=config.board.board_px,
            lite=config.pretrained == "lite0",
        ),
        target=colours(data, config),
        source=source_colours(config.pretrained),
        dc=config.dc,
        board=config.board,
        loss=config.loss,
        classes=CLASSES,
        trained_on=data.name,
    )


def make(what: ModelCard, config: GleasonConfig) -> nn.Module:
    """The network with the weights of ``config.seed``, or pre-trained ones where asked for."""
    torch.manual_seed(config.seed)
    model = build(what)
    set_momentum(model, config.momentum)
    if config.pretrained:
        network: nn.Module = model.network  # type: ignore[assignment]
        load_weights(network, config.pretrained)  # type: ignore[arg-type]
    return model


def wrap(model: nn.Module) -> DistributedDataParallel:
    """``model`` under DDP on the default group.

    Told to look for unused parameters though there are none, so that its buckets keep the cut of
    the first iteration and a step that is done again adds up in the same order. BatchNorm's
    statistics stay each worker's own until an evaluation averages them.
    """
    return DistributedDataParallel(model, find_unused_parameters=True, forward_sync_buffers=False)
