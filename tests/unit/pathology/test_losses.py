"""Losses that know how far apart grades are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss, one_hot

from planaria.errors import ConfigError, DataError
from planaria.pathology.losses import (
    VARIANTS,
    GradeLoss,
    expected_cost,
    quadratic_weights,
    qwmse,
    qwmse_ordinal,
)

SURE = 60.0
"""Logit whose softmax is one-hot in float32."""


def one_hot_logits(grade: int, classes: int = 6) -> torch.Tensor:
    return SURE * one_hot(torch.tensor([grade]), classes).float()


def test_weights_are_cohens() -> None:
    w = quadratic_weights(6)
    assert (w.diagonal() == 0).all()
    assert w[0, 5] == 1
    assert w[1, 3] == pytest.approx(4 / 25)
    torch.testing.assert_close(w, w.T)


def test_without_strength_it_is_c_times_mse_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 3, 6):
        logits = torch.randn(40, classes, generator=generator)
        grade = torch.randint(0, classes, (40,), generator=generator)
        expected = classes * mse_loss(logits.softmax(1), one_hot(grade, classes).float())
        torch.testing.assert_close(qwmse(logits, grade, strength=0.0), expected)


def test_a_one_hot_error_costs_what_the_note_says() -> None:
    grade = torch.tensor([0])
    costs = [float(qwmse(one_hot_logits(j), grade)) for j in range(6)]
    assert costs[0] < 1e-12
    assert costs[1] == pytest.approx(2.04)
    assert costs[5] == pytest.approx(3.00)


@pytest.mark.parametrize("grade", range(6))
def test_zero_only_when_perfect_and_growing_with_distance(grade: int) -> None:
    truth = torch.tensor([grade])
    losses = {
        "qwmse": [float(qwmse(one_hot_logits(j), truth, strength=10)) for j in range(6)],
        "expected": [float(expected_cost(one_hot_logits(j), truth)) for j in range(6)],
        "ordinal": [
            float(qwmse_ordinal(torch.tensor([float(j)]), truth, classes=6)) for j in range(6)
        ],
    }
    for costs in losses.values():
        assert costs[grade] < 1e-12  # softmax of 60 leaves 1e-26
        for side in (range(grade, 6), range(grade, -1, -1)):
            along = [costs[j] for j in side]
            assert along == sorted(along)
            assert len(set(along)) == len(along)


def test_an_imperfect_prediction_costs_something() -> None:
    truth = torch.tensor([2, 4])
    logits = torch.cat([one_hot_logits(2), torch.zeros(1, 6)])
    for variant in ("qwmse", "expected-cost", "mse", "cross-entropy"):
        assert GradeLoss(variant, classes=6)(logits, truth) > 0.05
    assert qwmse_ordinal(torch.tensor([2.0, 3.9]), truth, classes=6) > 0.004


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(variant: str) -> None:
    torch.manual_seed(0)
    loss = GradeLoss(variant, classes=4)
    x = torch.eye(4).repeat(8, 1)
    y = torch.arange(4).repeat(8)
    layer = torch.nn.Linear(4, loss.outputs)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss(layer(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(loss.score(layer(x)), y.float(), atol=0.15, rtol=0)


def test_the_ordinal_weight_is_detached() -> None:
    score = torch.tensor([0.2], requires_grad=True)
    qwmse_ordinal(score, torch.tensor([3]), classes=6, strength=1.0).backward()
    # d/ds (1 + w)(s - y)^2 with w = 9/25 taken as a constant.
    assert float(score.grad) == pytest.approx(2 * (1 + 9 / 25) * (0.2 - 3))  # type: ignore[arg-type]


def test_expected_cost_is_the_mean_weight() -> None:
    logits = torch.zeros(1, 3)
    assert float(expected_cost(logits, torch.tensor([0]))) == pytest.approx((0 + 0.25 + 1) / 3)


def test_errors() -> None:
    logits = torch.zeros(2, 6)
    with pytest.raises(DataError, match="grade 6 is outside 0 to 5; check the labels"):
        qwmse(logits, torch.tensor([0, 6]))
    with pytest.raises(DataError, match="grade -1 is outside 0 to 5"):
        expected_cost(logits, torch.tensor([0, -1]))
    with pytest.raises(DataError, match=r"outputs \(2, 6\) and grades \(3,\) do not pair"):
        qwmse(logits, torch.tensor([0, 1, 2]))
    with pytest.raises(ConfigError, match="strength is -1; a weight of errors is 0 or more"):
        GradeLoss(classes=6, strength=-1)
    with pytest.raises(ConfigError, match="loss is 'x'; it is one of qwmse, qwmse-ordinal"):
        GradeLoss("x", classes=6)
    with pytest.raises(ConfigError, match="classes is 1; grades need at least 2"):
        GradeLoss(classes=1)
