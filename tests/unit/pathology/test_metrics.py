"""Pooled measures, defined values and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planaria.errors import ConfigError, DataError
from planaria.pathology.intervals import binary_intervals, grade_intervals, per_centre
from planaria.pathology.metrics import (
    OneClassWarning,
    apply_thresholds,
    auc,
    binary_report,
    bootstrap,
    by_centre,
    fit_thresholds,
    grade_report,
    kappa,
    operating_point,
)


def test_specificity_is_the_true_one_and_not_precision() -> None:
    truth = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    probability = [0.9, 0.8, 0.7, 0.2, 0.6, 0.1, 0.1, 0.1, 0.1, 0.1]
    report = binary_report(truth, probability)
    assert report.specificity == pytest.approx(5 / 6)
    assert report.precision == pytest.approx(3 / 4)
    assert report.sensitivity == pytest.approx(3 / 4)
    assert report.accuracy == pytest.approx(8 / 10)
    assert report.f1 == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))


def test_measures_are_pooled_not_averaged_over_batches() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 1000)
    probability = np.clip(truth * 0.2 + rng.random(1000) * 0.8, 0, 1)
    whole = binary_report(truth, probability)
    batches = [slice(0, 10), slice(10, 1000)]
    averaged = np.mean([binary_report(truth[b], probability[b]).accuracy for b in batches])
    assert abs(averaged - whole.accuracy) > 1e-3
    assert whole.accuracy == pytest.approx(((probability >= 0.5) == truth).mean())


def test_one_class_sets_are_defined() -> None:
    with pytest.warns(OneClassWarning, match="AUC of 2 samples of one class is not defined: NaN"):
        report = binary_report([1, 1], [0.9, 0.4])
    assert math.isnan(report.auc)
    assert math.isnan(report.specificity)
    assert (report.sensitivity, report.balanced_accuracy, report.accuracy) == (0.5, 0.5, 0.5)
    with pytest.warns(
        OneClassWarning, match="kappa of 3 samples that all have grade 2 is set to 1.0"
    ):
        assert kappa([2, 2, 2], [2, 2, 2], classes=6) == 1.0
    # One class on one side only: chance agreement exists, and kappa is 0.
    assert kappa([2, 2, 2], [1, 2, 3], classes=6) == 0.0
    with pytest.warns(OneClassWarning):
        assert binary_report([0, 0], [0.1, 0.2]).f1 == 0.0


def test_grade_report() -> None:
    report = grade_report([0, 1, 2, 2], [0, 2, 2, 1], classes=3)
    assert report.confusion == ((1, 0, 0), (0, 0, 1), (0, 1, 1))
    assert report.accuracy == 0.5
    assert 0 < report.kappa < 1


def test_bootstrap_draws_slides() -> None:
    rng = np.random.default_rng(0)
    slides = np.repeat(np.arange(10), 50)
    quality = rng.random(10)[slides]
    truth = np.tile([0, 1], 250)
    correct = rng.random(500) < quality
    called = np.where(correct, truth, 1 - truth)

    def accuracy(y: np.ndarray, c: np.ndarray) -> float:
        return float((y == c).mean())

    by_slide = bootstrap(accuracy, truth, called, groups=slides, draws=300)
    by_patch = bootstrap(accuracy, truth, called, groups=np.arange(500), draws=300)
    assert by_slide.low < by_slide.value < by_slide.high
    assert by_slide.groups == 10
    # Patches of one slide share its quality: drawing patches would flatter by this much.
    assert by_slide.high - by_slide.low > 2 * (by_patch.high - by_patch.low)
    again = bootstrap(accuracy, truth, called, groups=slides, draws=300)
    assert again == by_slide


def test_all_intervals_at_once_are_those_of_one_after_the_other() -> None:
    rng = np.random.default_rng(1)
    slides = rng.integers(0, 12, 300)
    truth = rng.integers(0, 2, 300)
    probability = np.round(np.clip(truth * 0.3 + rng.random(300) * 0.7, 0, 1), 2)
    found = binary_intervals(truth, probability, groups=slides, threshold=0.6, draws=100)
    for name in ("accuracy", "auc", "sensitivity", "specificity", "precision", "f1"):
        single = bootstrap(
            lambda y, p, name=name: getattr(binary_report(y, p, threshold=0.6), name),
            truth,
            probability,
            groups=slides,
            draws=100,
        )
        for part in ("value", "low", "high", "groups"):
            assert found[name][part] == pytest.approx(getattr(single, part), abs=1e-12)
    given, said = rng.integers(0, 6, 300), rng.integers(0, 6, 300)
    grades = grade_intervals(given, said, groups=slides, classes=6, draws=100)
    single = bootstrap(lambda y, p: kappa(y, p, classes=6), given, said, groups=slides, draws=100)
    for part in ("value", "low", "high"):
        assert grades["kappa"][part] == pytest.approx(getattr(single, part), abs=1e-12)


def test_intervals_of_what_is_not_defined() -> None:
    ones = binary_intervals([1] * 6, [0.9] * 6, groups=range(6), threshold=0.5, draws=10)
    assert (ones["sensitivity"]["low"], ones["sensitivity"]["high"]) == (1.0, 1.0)
    assert ones["specificity"]["reason"] == "only 0 of 10 bootstrap draws define it"
    assert math.isnan(ones["auc"]["value"])
    one = grade_intervals([3] * 6, [3] * 6, groups=range(6), classes=6, draws=10)
    assert (one["kappa"]["value"], one["kappa"]["low"]) == (1.0, 1.0)
    split = per_centre(
        lambda y, p, g: binary_intervals(y, p, groups=g, threshold=0.5, draws=10),
        [0, 1] * 6,
        [0.1, 0.9] * 6,
        range(12),
        centres=["a"] * 8 + ["b"] * 4,
    )
    assert split["centres"]["a"]["auc"]["low"] == 1.0
    assert split["centres"]["b"]["auc"]["value"] == 1.0
    assert split["centres"]["b"]["auc"]["reason"] == (
        "4 groups are too few for an interval; it needs at least 5"
    )


def test_too_few_groups_for_an_interval() -> None:
    with pytest.raises(
        DataError, match="2 groups are too few for an interval; it needs at least 5"
    ):
        bootstrap(auc, [0, 0, 1], [0.1, 0.2, 0.3], groups=["a", "a", "b"], draws=100)
    with pytest.raises(
        DataError, match="of 100 bootstrap draws hold both classes; the 5 groups are"
    ):
        bootstrap(lambda y, p: float("nan"), [0] * 5, [0.1] * 5, groups=range(5), draws=100)
    with pytest.raises(ConfigError, match=r"draws is 1 and level 0.95; at least 10"):
        bootstrap(auc, [0, 1], [0, 1], groups=[0, 1], draws=1)


def test_per_centre() -> None:
    found = by_centre(
        binary_report, [0, 1, 0, 1], [0.1, 0.9, 0.8, 0.2], centres=["A", "A", "B", "B"]
    )
    assert found.overall["accuracy"] == 0.5
    assert found.centres["A"]["accuracy"] == 1.0
    assert found.centres["B"]["auc"] == 0.0


def test_thresholds_beat_rounding_and_are_applied() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 6, 400)
    score = 0.6 * truth + 0.9 + rng.normal(0, 0.3, 400)
    cuts = fit_thresholds(truth, score, classes=6)
    assert list(cuts) == sorted(cuts)
    fitted = kappa(truth, apply_thresholds(score, cuts), classes=6)
    rounded = kappa(truth, np.clip(np.round(score), 0, 5).astype(int), classes=6)
    assert fitted > rounded + 0.05
    assert apply_thresholds([0.4, 0.5, 9.0], [0.5, 1.5]).tolist() == [0, 1, 2]


def test_operating_point() -> None:
    probability = np.linspace(0.1, 1.0, 10)
    cut = operating_point(np.ones(10), probability, sensitivity=0.9)
    assert cut == pytest.approx(0.2)
    assert (probability >= cut).mean() == 0.9
    with pytest.raises(DataError, match="no positive sample: a sensitivity cannot be met"):
        operating_point([0, 0], [0.1, 0.2], sensitivity=0.9)


def test_errors() -> None:
    with pytest.raises(DataError, match="a label is 2; labels are 0 or 1"):
        binary_report([0, 2], [0.1, 0.2])
    with pytest.raises(DataError, match="a probability is NaN or outside 0 to 1; pass sigmoid"):
        binary_report([0, 1], [0.1, math.nan])
    with pytest.raises(DataError, match="a predicted grade is 6; grades are 0 to 5"):
        kappa([0, 1], [0, 6], classes=6)
    with pytest.raises(DataError, match=r"shapes \(1,\) and \(2,\); both must be \[N\]"):
        auc([0], [0.1, 0.2])
    with pytest.raises(DataError, match="no samples to measure; the set is empty"):
        auc([], [])
