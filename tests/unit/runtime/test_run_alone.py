"""``planaria.join`` without a launcher: the same script trains in its process alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import planaria
from planaria.errors import ConfigError, NonFiniteLoss, UserError
from planaria.runtime.membership.limits import Timeouts, step_limit
from planaria.runtime.memory.rng import Rng
from planaria.runtime.tally import Tally


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def build(shard: planaria.Shard) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def take(run: planaria.Run, attempt: planaria.Attempt, poison: float = 0.0) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(attempt.step))
    loss = run.model(x).pow(2).mean() + poison
    loss.backward()
    attempt.finite(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()


def test_steps_are_counted_and_parts_are_attributes() -> None:
    with planaria.join(build) as run:
        assert run.shard == planaria.Shard(0, 1)
        seen = []
        for attempt in run.attempts(until=3):
            with attempt:
                take(run, attempt)
            seen.append((attempt.step, run.step, run.committed))
        assert seen == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
        with pytest.raises(AttributeError) as caught:
            _ = run.modle
        assert "the run has no part 'modle'; build() returned 'model', 'optimizer'" in str(
            caught.value
        )


def test_an_error_of_the_user_passes_through() -> None:
    with planaria.join(build) as run, pytest.raises(ZeroDivisionError):
        for attempt in run.attempts(until=1):
            with attempt:
                _ = 1 / 0


def test_a_loop_that_forgets_the_with_is_told() -> None:
    with planaria.join(build) as run, pytest.raises(UserError) as caught:
        for _ in run.attempts(until=1):
            pass
    assert str(caught.value) == (
        "the attempt of step 1 was not used: write 'with attempt:' around the body of the loop"
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_with_step_shard_and_samples(poison: float) -> None:
    with planaria.join(build) as run, pytest.raises(NonFiniteLoss) as caught:
        for attempt in run.attempts(until=3):
            with attempt:
                attempt.consumed([10 * attempt.step, 10 * attempt.step + 1])
                take(run, attempt, poison if attempt.step == 2 else 0.0)
    text = str(caught.value)
    assert text.startswith("the loss of step 2 is not finite on shard 0; here it is [")
    assert "from samples 20, 21; generation 1 is the last committed one" in text


def test_a_skipped_step_counts_and_changes_neither_weights_nor_statistics() -> None:
    with planaria.join(build, on_nonfinite="skip") as run:
        states: list[dict[str, torch.Tensor]] = []
        for attempt in run.attempts(until=3):
            with attempt:
                take(run, attempt, math.nan if attempt.step == 2 else 0.0)
            assert attempt.skipped == (attempt.step == 2)
            states.append({k: v.clone() for k, v in run.model.state_dict().items()})
        assert all(p.grad is None for p in run.model.parameters())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert not torch.equal(states[1]["0.weight"], states[2]["0.weight"])


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"max_redo": 0}, "max_redo is 0: give 1 or 2; the interrupted step itself counts"),
        ({"max_redo": 3}, "max_redo is 3: give 1 or 2; the interrupted step itself counts"),
        ({"on_nonfinite": "no"}, "on_nonfinite is 'no': give 'stop' or 'skip'"),
    ],
)
def test_bad_keywords_of_join(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planaria.join(build, **keywords)
    assert str(caught.value) == text


def test_bad_numbers_of_attempts() -> None:
    with planaria.join(build) as run, pytest.raises(ConfigError) as caught:
        list(run.attempts(until=-1))
    assert str(caught.value) == "until is -1 and checkpoint_every is 0: give 0 or more"


def test_final_gives_what_its_duty_returned() -> None:
    with planaria.join(build) as run:
        assert run.final(lambda: 7, score=0.5) == 7


def test_the_digest_of_samples_depends_on_their_order_and_is_rolled_back() -> None:
    one, two = Tally(), Tally()
    one.consumed([1, 2])
    two.consumed(torch.tensor([2, 1]))
    assert one.digest != two.digest
    state = one.state_dict()
    digest = one.digest
    one.consumed(["x"])
    assert one.digest != digest
    one.load_state_dict(state)
    assert (one.digest, one.count) == (digest, 2)


def test_scalars_are_told_once_and_only_when_committed() -> None:
    tally = Tally()
    for step in (1, 2, 3):
        tally.log(step, {"loss": float(step)})
    assert tally.settled(2) == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert tally.settled(2) == []
    assert tally.settled(3) == [(3, {"loss": 3.0})]


@pytest.mark.parametrize("name", ["evaluation", "checkpoint", "compile", "data"])
def test_a_long_phase_has_a_limit(name: str) -> None:
    seconds, _ = step_limit([1.0] * 9, phase=name, limits=Timeouts().limits())
    with planaria.join(build) as run, run.phase(name):
        assert seconds >= 120


def test_what_an_evaluation_between_attempts_draws_leaves_no_trace() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def one(attempts: int, *, look: str, inside: bool) -> list[tuple[float, float, float]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        found = []
        with planaria.join(build) as run:
            for attempt in run.attempts(until=attempts):
                with attempt:
                    found.append(drawn())
                    if inside:
                        with run.phase(look):
                            drawn()
                if not inside:
                    with run.phase(look):
                        drawn()
        return found

    calm = one(3, look="compile", inside=False)
    assert len(set(calm)) == 3
    assert one(3, look="evaluation", inside=False) == calm
    assert one(3, look="evaluation", inside=True) != calm  # a part of the step, done again with it
    assert one(3, look="data", inside=False) != calm  # what is drawn for training counts


def test_a_mark_tells_each_generator_that_was_used() -> None:
    marks = [Rng().mark()]
    assert Rng().mark() == marks[0]
    for draw in (lambda: torch.rand(()), random.random, np.random.rand, np.random.randn):
        draw()
        marks.append(Rng().mark())
    assert len(set(marks)) == 5


def test_an_unknown_phase_is_refused_before_the_coordinator_hears_of_it() -> None:
    with planaria.join(build) as run, pytest.raises(ConfigError) as caught, run.phase("dinner"):
        pass
    assert str(caught.value) == "phase is 'dinner': give evaluation, checkpoint, compile or data"
