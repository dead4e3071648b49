"""Distribution correction."""

from __future__ import annotations

import pytest
import torch

from planaria.errors import ConfigError, DataError
from planaria.pathology.colour import (
    VARIANTS,
    ColourStatistics,
    Corrected,
    DistributionCorrection,
    RunningStatistics,
    statistics,
    to_unit,
)

TARGET = ColourStatistics(mean=(0.7, 0.5, 0.6), std=(0.2, 0.3, 0.1))
SOURCE = ColourStatistics(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def images() -> torch.Tensor:
    noise = torch.randn(16, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (TARGET.mean, TARGET.std))
    noise = (noise - noise.mean((0, 2, 3), keepdim=True)) / noise.std(
        (0, 2, 3), keepdim=True, correction=0
    )
    return noise * std + mean


@pytest.mark.parametrize("variant", ["conv1x1", "none"])
def test_starts_as_the_identity_of_the_source_normalisation(variant: str) -> None:
    layer = DistributionCorrection(variant, target=TARGET, source=SOURCE).eval()
    x = images()
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (SOURCE.mean, SOURCE.std))
    torch.testing.assert_close(layer(x), (x - mean) / std)


@pytest.mark.parametrize("variant", ["batchnorm", "affine", "standardise"])
@pytest.mark.parametrize("source", [SOURCE, None])
def test_maps_the_target_onto_what_the_backbone_expects(
    variant: str, source: ColourStatistics | None
) -> None:
    layer = DistributionCorrection(variant, target=TARGET, source=source).eval()
    out = layer(images())
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    # BatchNorm adds eps 1e-5 to the variance: relative 1e-4 at the smallest one here.
    torch.testing.assert_close(out.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-3, rtol=0)


def test_every_variant_is_the_identity_where_target_and_source_agree() -> None:
    x = images()
    plain = DistributionCorrection("none", target=SOURCE, source=SOURCE).eval()(x)
    for variant in VARIANTS:
        layer = DistributionCorrection(variant, target=SOURCE, source=SOURCE).eval()
        torch.testing.assert_close(layer(x), plain, atol=1e-4, rtol=1e-4)


def test_what_is_trained() -> None:
    counts = {
        variant: sum(
            p.numel()
            for p in DistributionCorrection(variant, target=TARGET, source=SOURCE).parameters()
        )
        for variant in VARIANTS
    }
    assert counts == {"batchnorm": 6, "affine": 6, "conv1x1": 12, "standardise": 0, "none": 0}


def test_a_blank_batch_is_finite() -> None:
    # A peer's stain normaliser fails on tiles without tissue.
    for variant in VARIANTS:
        layer = DistributionCorrection(variant, target=TARGET, source=SOURCE)
        assert layer(torch.ones(2, 3, 8, 8)).isfinite().all()


def test_statistics_do_not_depend_on_how_batches_are_cut() -> None:
    x = (torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 255).to(torch.uint8)
    whole = statistics([x])
    parts = statistics([x[:3], x[3:4], x[4:]])
    assert whole == parts
    as_float = x.double() / 255
    assert whole.mean == pytest.approx(as_float.mean((0, 2, 3)).tolist())
    assert whole.std == pytest.approx(as_float.std((0, 2, 3), correction=0).tolist())


def test_corrected_network() -> None:
    layer = DistributionCorrection("none", target=TARGET)
    model = Corrected(layer, torch.nn.Flatten())
    assert model(images()).shape == (16, 3 * 24 * 24)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="dc is 'x'; it is one of batchnorm, affine, conv1x1"):
        DistributionCorrection("x", target=TARGET)
    with pytest.raises(DataError, match="a set of flat images cannot be corrected"):
        ColourStatistics(mean=(0, 0, 0), std=(0.1, 0.0, 0.1))
    with pytest.raises(DataError, match="no image was given to take colour statistics from"):
        RunningStatistics().result()
    with pytest.raises(DataError, match=r"images are torch.float32 \(1, 3, 4, 4\); expected uint8"):
        to_unit(torch.zeros(1, 3, 4, 4))
    assert to_unit(torch.full((1, 2, 2, 3), 255, dtype=torch.uint8)).tolist() == [
        [[[1.0] * 2] * 2] * 3
    ]
