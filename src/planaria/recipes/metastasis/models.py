"""The network of a metastasis run, made from a seed and wrapped for data-parallel training."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planaria.pathology.attention import FeatureConfig
from planaria.pathology.bundle import ModelCard, build, source_colours
from planaria.pathology.colour import ColourStatistics, statistics, to_unit
from planaria.pathology.datasets.features import Bags
from planaria.pathology.networks import NetworkConfig
from planaria.pathology.training import set_momentum
from planaria.pathology.weights import load_weights
from planaria.recipes.metastasis.config import PAPER_MEAN, PAPER_STD, MetastasisConfig
from planaria.recipes.metastasis.data import Prepared

SAMPLES = 2048
"""Patches that the training part's colours are taken from."""


def colours(data: Prepared, config: MetastasisConfig) -> ColourStatistics:
    """The training part's colours: the paper's numbers, or those of evenly spread patches."""
    if config.preset == "paper":
        return ColourStatistics(mean=PAPER_MEAN, std=PAPER_STD)
    count = len(data.train.labels)
    ids = np.unique(np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64))
    parts = np.array_split(ids, -(-len(ids) // 128))
    return statistics(to_unit(torch.from_numpy(data.train.batch(part)[0])) for part in parts)


def card(data: Prepared, config: MetastasisConfig) -> ModelCard:
    """What the model is; the threshold is set when training has ended."""
    bags = data.train.patches
    if isinstance(bags, Bags):
        head = FeatureConfig(
            dim=bags.dim, hidden=config.hidden, single=bags.single, encoder=bags.encoder
        )
        return ModelCard(kind="metastasis", features=head, trained_on=data.name)
    lite = config.pretrained == "lite0"
    return ModelCard(
        kind="metastasis",
        network=NetworkConfig(
            backbone=config.backbone,
            stem_stride=config.stem_stride,
            attention=config.attention,
            fusion=config.fusion,
            width=config.width,
            depth=config.depth,
            lite=lite,
        ),
        target=colours(data, config),
        source=source_colours(config.pretrained),
        dc=config.dc if config.pretrained else "standardise",
        trained_on=data.name,
    )


def make(what: ModelCard, config: MetastasisConfig) -> nn.Module:
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
    statistics stay each worker's own until an evaluation averages them: a broadcast in every
    forward pass would cost a message per step.
    """
    return DistributedDataParallel(model, find_unused_parameters=True, forward_sync_buffers=False)
