"""Who is told before the script changes what is being copied."""

from __future__ import annotations

import pytest
import torch

from planaria.runtime import hooks


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_tells_also_where_it_leaves_the_step_out(overflows: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = dict(scaler.state_dict())
    told: list[str] = []
    hooks.watch_scalers([scaler, object()], lambda: told.append("scaler"))
    hooks.watch_optimizers([optimizer], lambda: told.append("optimizer"))
    assert scaler.state_dict() == before
    loss = weight.sum() * (float("inf") if overflows else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert told == (["scaler"] if overflows else ["scaler", "optimizer"])
    assert weight.tolist() == ([1.0, 1.0] if overflows else [0.5, 0.5])
    assert scaler.get_scale() == (2.0 if overflows else 4.0)
