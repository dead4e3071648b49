"""The methods that ours is compared with do what they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_worlds import give, good, gradients, mean_gradients, parameters, run

from planaria.optim import AdamS
from planaria.optim.checks import OptionError, StateError
from planaria.optim.peers import DemoLike, LocalSteps, TopK, powersgd_rank

CLASSES: dict[str, Any] = {"topk": TopK, "demo": DemoLike, "local": LocalSteps}


def dense(world: int, steps: int) -> list[torch.Tensor]:
    params = parameters()
    optimizer = AdamS(params, lr=1e-2)
    for step in range(steps):
        for param, grad in zip(params, mean_gradients(step, world), strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


def steps(optimizer: Any, params: Any, rank: int, span: range) -> list[torch.Tensor]:
    for step in span:
        optimizer.zero_grad()
        give(params, gradients(step, rank))
        optimizer.step()
    return [p.detach().clone() for p in params]


def peer_worker(rank: int, world: int) -> Any:
    found: dict[str, Any] = {}
    params = parameters()
    found["topk_whole"] = steps(TopK(params, lr=1e-2, density=1.0), params, rank, range(5))
    params = parameters()
    optimizer: Any = TopK(params, lr=1e-2, density=0.1)
    found["topk"] = steps(optimizer, params, rank, range(5))
    found["topk_left"] = optimizer.left.clone()
    params = parameters()
    found["local"] = steps(LocalSteps(params, lr=1e-2, density=0.2), params, rank, range(5))
    params = parameters()
    found["demo"] = steps(DemoLike(params, lr=1e-2, density=0.1), params, rank, range(5))
    for name, cls in CLASSES.items():
        params = parameters()
        optimizer = cls(params, lr=1e-2, density=0.25)
        steps(optimizer, params, rank, range(3))
        saved, kept = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
        first = steps(optimizer, params, rank, range(3, 6))
        with torch.no_grad():
            for param, weight in zip(params, kept, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(saved)
        again = steps(optimizer, params, rank, range(3, 6))
        found[f"{name}_resumes"] = all(map(torch.equal, first, again))
    return found


def test_peers_agree_over_workers_resume_and_reduce_to_dense() -> None:
    world = 3
    found = good(run(peer_worker, world))
    for name in ("topk_whole", "topk", "local", "demo"):
        for other in found[1:]:
            assert all(map(torch.equal, found[0][name], other[name])), name
    # The same sums in the same order as dense AdamS on the mean.
    assert all(map(torch.equal, found[0]["topk_whole"], dense(world, 5)))
    count = sum(p.numel() for p in parameters())
    for mine in found:
        assert all(mine[f"{name}_resumes"] for name in CLASSES)
        # A tenth was sent at the last step, so at least nine tenths are held back.
        assert int((mine["topk_left"] != 0).sum()) >= count - -(-count // 10)
    start = parameters()
    moved = [
        (a - b.detach()).abs().max().item() for a, b in zip(found[0]["demo"], start, strict=True)
    ]
    # Five signed steps of .01 and five decays by .1 % of weights below 4.
    assert 0.04 < max(moved) < 5 * (0.01 + 0.001 * 4)


def local_worker(rank: int, world: int) -> list[torch.Tensor]:
    params = parameters()
    plain = LocalSteps(params, lr=1e-2, density=1.0, outer_rate=1.0, outer_momentum=0.0)
    return steps(plain, params, rank, range(1))


def alone(rank: int) -> list[torch.Tensor]:
    params = parameters()
    optimizer = AdamS(params, lr=1e-2)
    for param, grad in zip(params, gradients(0, rank), strict=True):
        param.grad = grad
    optimizer.step()
    return [p.detach() for p in params]


def test_one_local_step_is_the_mean_of_lone_steps() -> None:
    world = 3
    lone = [alone(rank) for rank in range(world)]
    for mine in good(run(local_worker, world)):
        for got, *rows in zip(mine, *lone, strict=True):
            # One rounding of a difference to the anchor, at weights below 4.
            torch.testing.assert_close(got, sum(rows) / world, rtol=0, atol=1e-6)


def test_the_rank_of_powersgd_follows_from_the_bytes() -> None:
    # 64 x 64 and 128 x 32: 8,192 elements, 288 per unit of rank; a tenth is 819 / 288 = 2.8.
    assert powersgd_rank([(64, 64), (128, 32), (64,)], 0.1) == 3
    assert powersgd_rank([(64, 64)], 0.001) == 1
    assert powersgd_rank([(64,)], 0.1) == 1


def test_peers_refuse_what_they_cannot_do() -> None:
    with pytest.raises(OptionError) as caught:
        TopK(parameters(dtype=torch.bfloat16))
    assert str(caught.value) == (
        "TopK trains float32 weights only; convert the model with .float()"
    )
    with pytest.raises(StateError) as state:
        TopK(parameters()).load_state_dict(LocalSteps(parameters()).state_dict())
    assert str(state.value) == (
        "the saved state does not fit TopK on these parameters; load one that it made for the same "
        "model"
    )
