"""Held-out loss: the same windows, each once, whatever the number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from planaria.recipes.llm import LlmConfig, models, prepare
from planaria.recipes.llm.evaluate import Evaluation, evaluate, share

MakeConfig = Callable[..., LlmConfig]


@pytest.mark.parametrize(
    ("windows", "world", "batch"), [(10, 1, 4), (10, 4, 4), (3, 8, 2), (64, 4, 4)]
)
def test_every_window_is_scored_once(windows: int, world: int, batch: int) -> None:
    shares = [share(windows, shard=s, world=world, batch=batch) for s in range(world)]
    assert len({len(batches) for batches in shares}) == 1
    scored = [
        int(number)
        for batches in shares
        for numbers, weights in batches
        for number, weight in zip(numbers, weights, strict=True)
        if weight
    ]
    assert sorted(scored) == list(range(windows))
    assert all(len(numbers) == batch for batches in shares for numbers, _ in batches)


def test_loss_is_the_mean_over_windows(make_config: MakeConfig) -> None:
    config = make_config(model="gpt2-tiny", eval_batches=3, batch=4)
    packed = prepare(config)
    model = models.make(config, packed.vocabulary)
    state = torch.get_rng_state()
    result = evaluate(model, config=config, corpus=packed, shard=0, world=1, autocast=nullcontext())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    model.eval()
    windows = torch.arange(min(12, packed.held_out_samples)).numpy()
    ids_BT = torch.from_numpy(packed.held_out_batch(windows))
    with torch.no_grad():
        expected = float(model(input_ids=ids_BT, labels=ids_BT).loss)
    assert result.tokens == len(windows) * 31
    # Sums of at most 372 float32 losses in another grouping.
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_shares_add_up_to_the_whole(make_config: MakeConfig) -> None:
    whole_config = make_config(eval_batches=4, batch=4)
    packed = prepare(whole_config)
    model = models.make(whole_config, packed.vocabulary)
    parts = [
        evaluate(
            model,
            config=make_config(eval_batches=1, batch=4),
            corpus=packed,
            shard=shard,
            world=4,
            autocast=nullcontext(),
        )
        for shard in range(4)
    ]
    whole = evaluate(
        model, config=whole_config, corpus=packed, shard=0, world=1, autocast=nullcontext()
    )
    assert sum(part.tokens for part in parts) == whole.tokens
    mean = sum(part.loss * part.tokens for part in parts) / whole.tokens
    assert mean == pytest.approx(whole.loss, rel=1e-6)


def test_perplexity_beyond_a_double() -> None:
    assert Evaluation(loss=800.0, tokens=1).perplexity == math.inf
