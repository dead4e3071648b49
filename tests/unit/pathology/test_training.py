"""What both recipes share in training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from planaria.errors import ConfigError, DataError
from planaria.pathology.order import SampleOrder
from planaria.pathology.plots import calibration
from planaria.pathology.training import (
    Ahead,
    Best,
    autocast,
    class_weights,
    rate,
    set_momentum,
    share,
    step_rate,
)


def order(world: int, batch: int) -> SampleOrder:
    return SampleOrder(samples=50, seed=3, world=world, batch=batch)


def test_an_epoch_sees_every_sample_at_most_once_whatever_the_workers() -> None:
    for world, batch in ((1, 8), (2, 4), (4, 2)):
        made = order(world, batch)
        assert made.steps_per_epoch == 6
        steps = [
            np.concatenate([made.ids(step, shard=shard) for shard in range(world)])
            for step in range(1, 13)
        ]
        first = np.concatenate(steps[:6])
        assert len(set(first.tolist())) == 48
        if world > 1:
            alone = order(1, 8)
            for step, ids in enumerate(steps, start=1):
                np.testing.assert_array_equal(ids, alone.ids(step, shard=0))
        assert not np.array_equal(steps[0], steps[6])


def test_chance_differs_by_step_and_shard_and_comes_again() -> None:
    made = order(2, 4)
    seeds = [made.chance(step, shard=shard) for step in range(50) for shard in range(2)]
    assert len(set(seeds)) == 100
    assert seeds[0] == made.chance(0, shard=0)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_too_few_samples() -> None:
    with pytest.raises(
        DataError, match="50 training samples, but a step of 8 workers x 8 takes 64"
    ):
        order(8, 8)


def test_rates() -> None:
    rates = [rate(done, steps=100, warmup=10, floor=0.1) for done in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [step_rate(e, milestones=(15, 23)) for e in (0, 14, 15, 23)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )


def test_class_weights() -> None:
    labels = np.array([0, 0, 0, 1])
    weights = class_weights(labels, classes=2)
    assert weights.tolist() == pytest.approx([4 / 6, 2.0])
    assert float(weights[torch.from_numpy(labels)].mean()) == pytest.approx(1.0)
    with pytest.raises(DataError, match="label 2 does not occur among 4 training samples; switch"):
        class_weights(labels, classes=3)


def test_the_best_state_is_kept_and_carried_over() -> None:
    model = torch.nn.BatchNorm2d(2)
    best = Best(patience=2)
    assert best.add(math.nan, step=1, model=model)
    assert best.add(0.5, step=2, model=model)
    model.running_mean += 1
    assert not best.add(0.4, step=3, model=model)
    assert not best.stop
    copy = Best(patience=2)
    copy.load_state_dict(best.state_dict())
    assert not copy.add(0.5, step=4, model=model)
    assert (copy.stop, copy.value, copy.step) == (True, 0.5, 2)
    assert copy.state["running_mean"].tolist() == [0.0, 0.0]


def test_ahead_gives_every_batch_also_after_a_way_back() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * 10

    ahead = Ahead(make, last=5)
    assert [ahead(step) for step in (1, 2, 3, 2, 3, 4, 5)] == [10, 20, 30, 20, 30, 40, 50]
    ahead.close()
    assert max(made) == 5


def test_small_things() -> None:
    assert share(7, shard=1, world=3).tolist() == [1, 4]
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2))
    set_momentum(model, 0.3)
    assert model[0].momentum == 0.3
    with pytest.raises(ConfigError, match="dtype is 'fp16'; it is 'fp32' or 'bf16'"):
        autocast("fp16")
    with autocast("bf16"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_calibration() -> None:
    mean, share_, count, error = calibration([0, 1, 1, 1], [0.05, 0.95, 0.95, 0.05], bins=10)
    assert count.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert (mean[0], share_[0]) == (pytest.approx(0.05), 0.5)
    assert math.isnan(mean[4])
    assert error == pytest.approx((0.45 * 2 + 0.05 * 2) / 4)
