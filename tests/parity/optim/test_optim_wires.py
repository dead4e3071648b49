"""The local family with movements of few bits stays near the one with whole floats."""

from __future__ import annotations

from typing import Any

import torch
from optim_worlds import give, good, gradients, parameters, run

from planaria.optim import Scape

WORLD, STEPS, PERIOD, RATE = 3, 60, 5, 1e-2
WIRES = {"float32": 0, "int8": 127, "int4": 7}


def drift(rank: int, world: int) -> Any:
    found: dict[str, Any] = {}
    for wire in WIRES:
        params = parameters()
        optimizer = Scape(
            params,
            lr=RATE,
            density=1 / PERIOD,
            unsent="local",
            wire=wire,
            average_moments=False,
            outer_momentum=0.0,
            weight_decay=0.0,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            # The gradients do not depend on the weights, so errors add up and do not multiply.
            give(params, gradients(step, rank))
            optimizer.step()
        family: Any = optimizer.family
        own = torch.cat([p.detach().view(-1) for p in params])
        with optimizer.mean_model():
            mean = torch.cat([p.detach().view(-1) for p in params]).clone()
        found[wire] = (mean, family.anchor.clone(), own)
    return found


def test_few_bits_move_the_mean_by_no_more_than_their_rounding() -> None:
    found = good(run(drift, WORLD))
    exact, _, start = found[0]["float32"][0], None, parameters()
    travelled = (exact - torch.cat([p.detach().view(-1) for p in start])).abs().max().item()
    for wire, levels in WIRES.items():
        for other in found[1:]:
            # Everybody subtracts the same rounded step from the same anchor.
            assert torch.equal(found[0][wire][1], other[wire][1]), wire
        assert not torch.equal(found[0][wire][2], found[1][wire][2])
        if not levels:
            continue
        off = (found[0][wire][0] - exact).abs().max().item()
        # No weight moves further than |m| / sqrt(nu) <= 1 / sqrt(1 - b2) = 4.5 rates a step. Each
        # averaging rounds twice, by half a unit of the largest movement since the one before.
        bound = STEPS / PERIOD * 2 * 0.5 * (PERIOD * RATE * 4.5) / levels
        assert 0 < off <= bound, wire
        assert bound < travelled or wire == "int4"


def equal_replicas(rank: int, world: int) -> Any:
    found: dict[str, Any] = {}
    for unsent in ("frozen", "moved"):
        for wire in WIRES:
            params = parameters()
            optimizer = Scape(
                params,
                lr=RATE,
                density=1 / PERIOD,
                unsent=unsent,
                wire=wire,
                statistic="cycle",
                weight_decay=0.0,
            )
            for step in range(STEPS):
                optimizer.zero_grad()
                give(params, gradients(step, rank))
                optimizer.step()
            family: Any = optimizer.family
            own = torch.cat([p.detach().view(-1) for p in params])
            found[f"{unsent} {wire}"] = (own, family.left.clone())
    return found


def test_few_bits_keep_replicas_equal_and_the_rest_for_the_next_time() -> None:
    found = good(run(equal_replicas, WORLD))
    start = torch.cat([p.detach().view(-1) for p in parameters()])
    for unsent in ("frozen", "moved"):
        exact, left = found[0][f"{unsent} float32"]
        assert left.numel() == 0
        for wire, levels in WIRES.items():
            weights, left = found[0][f"{unsent} {wire}"]
            for other in found[1:]:
                assert torch.equal(weights, other[f"{unsent} {wire}"][0]), (unsent, wire)
            if levels:
                # Rounding of a moment changes the size of a step only where the moment is small in
                # its block; what is not sent back is sent later. So the ways differ by a few units.
                way, off = (exact - start).norm(), (weights - exact).norm()
                assert 0 < off < 3 * way / levels, (unsent, wire)
                # Half a unit of a movement: at most ten steps' worth of 4.5 rates at once.
                assert 0 < left.abs().max() <= 0.5 * 10 * 4.5 * RATE / levels, (unsent, wire)
