"""The fast optimizers against slow ones, on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_worlds import (
    SHAPES,
    give,
    good,
    gradients,
    mean_gradients,
    parameters,
    run,
)

from planaria.optim import AdamS, Scape, Sharded
from planaria.optim import reference as ref
from planaria.optim.adams import update
from planaria.optim.layout import Layout

oracle_adams = ref.adams


@pytest.fixture(autouse=True)
def _same_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes AdamS from the kernel, which rounds one weight of a thousand otherwise.

    Such a last place would grow through codes of a few bits, and tolerances with it. That the
    kernel is the reference's rule has a test of its own.
    """

    def adams(
        w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, rule: ref.Rule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w, m = w.clone(), m.clone()
        betas = (rule.b1, rule.b2)
        update(w, g, m, lr=rule.lr, betas=betas, eps=rule.eps, weight_decay=rule.wd)
        return w, m

    monkeypatch.setattr(ref, "adams", adams)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_the_rule_within_a_last_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    w, g, m = (torch.randn(100_003, generator=generator, dtype=dtype) for _ in range(3))
    m[:100] = 0
    rule = ref.Rule(lr=1e-2)
    slow, slow_m = oracle_adams(w, g, m, rule)
    fast, fast_m = ref.adams(w, g, m, rule)
    assert torch.equal(fast_m, slow_m)
    # Both divide and multiply three numbers, in another order.
    step = 1e-2 * (slow_m / (0.95 * m * m + 0.05 * g * g).sqrt()).abs()
    unit = torch.finfo(dtype).eps * (slow.abs() + step)
    assert ((fast - slow).abs() <= 2 * unit).all()
    assert (fast != slow).double().mean() < 0.1


FACTORIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "AdamS": (AdamS, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


def train(optimizer: Any, params: Any, rank: int, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        give(params, gradients(step, rank))
        optimizer.step()
    return [p.detach().clone() for p in params]


def unsharded(factory: Any, options: dict[str, Any], world: int, steps: int) -> list[torch.Tensor]:
    params = parameters()
    optimizer = factory(params, **options)
    for step in range(steps):
        for param, grad in zip(params, mean_gradients(step, world), strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


def sharded_worker(rank: int, world: int, names: list[str], overlap: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        factory, options = FACTORIES[name]
        params = parameters()
        optimizer = Sharded(factory, params, overlap=overlap, bucket_bytes=300, **options)
        found[name] = train(optimizer, params, rank, range(12))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_equals_the_unsharded_optimizer_bit_for_bit(world: int) -> None:
    names = list(FACTORIES)
    for found in good(run(sharded_worker, world, names, world != 3)):
        for name in names:
            expected = unsharded(*FACTORIES[name], world, 12)
            for whole, part in zip(expected, found[name], strict=True):
                assert torch.equal(whole, part), name


def density_one_worker(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    found = {}
    for unsent in ("frozen", "local"):
        params = parameters()
        optimizer = Scape(params, lr=1e-2, density=1.0, unsent=unsent, bucket_bytes=300)
        found[unsent] = train(optimizer, params, rank, range(20))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_density_one_is_dense_adams_bit_for_bit(world: int) -> None:
    expected = unsharded(AdamS, {"lr": 1e-2}, world, 20)
    for found in good(run(density_one_worker, world)):
        for weights in found.values():
            assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def forced_worker(rank: int, world: int) -> list[torch.Tensor]:
    params = parameters()
    optimizer = Scape(
        params, lr=1e-2, density=1.0, force_sparse=True, dense_ndim=-1, wire="float32"
    )
    return train(optimizer, params, rank, range(200))


def test_the_sparse_path_at_density_one_is_dense_adams_within_rounding() -> None:
    # Rebuilding g divides a difference of rounded averages by 1 - b1 = .1, so its error is about
    # ten units in the last place of the moment (1e-6 of |g|); nu takes it in at weight .05 and the
    # root halves it. 200 steps of lr .01 then differ by at most 200 * .01 * 1e-6 of a step's size,
    # and about a hundredth of that in practice; weights are of order one.
    expected = unsharded(AdamS, {"lr": 1e-2}, 3, 200)
    for found in good(run(forced_worker, 3)):
        for whole, part in zip(expected, found, strict=True):
            torch.testing.assert_close(whole, part, rtol=0, atol=2e-6)


STARTS = [sum(torch.Size(s).numel() for s in SHAPES[:i]) for i in range(len(SHAPES))]


def coordinates(layout: Layout, dense: bool | None = None) -> list[torch.Tensor]:
    """For each owner, the coordinates of its columns in the concatenation of all parameters."""
    parts = []
    for owner in range(layout.world):
        found = []
        for bucket in layout.buckets:
            if dense is None or bucket.dense == dense:
                for slot in bucket.slots:
                    begin, end = slot.part(owner)
                    found.append(STARTS[slot.index] + torch.arange(begin, end))
        parts.append(torch.cat(found))
    return parts


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def stack(step: int, world: int) -> torch.Tensor:
    return torch.stack([flat(gradients(step, rank)) for rank in range(world)])


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "plain": (
        {
            "step_scale": 0.0,
            "clamp_after": 1_000_000,
            "statistic": "momentum",
            "after_send": "keep",
        },
        {"step_scale": 0.0, "clamp_after": 1_000_000, "aged": False, "clear": False},
    ),
    "clear": ({"after_send": "clear"}, {"clear": True}),
    "feedback": ({"buffer": "feedback"}, {"feedback": True}),
    "lazy": ({"statistic": "momentum", "decay": "lazy"}, {"aged": False, "decay": "lazy"}),
    "decay_all": ({"decay": "all", "step_scale": 0.5}, {"decay": "all", "step_scale": 0.5}),
    "moved": ({"unsent": "moved"}, {"moved": True}),
    "bitmap": ({"mask_code": "bitmap"}, {}),
    "half": ({"wire": "bfloat16"}, {"half_wire": True}),
    "half_feedback": (
        {"wire": "bfloat16", "buffer": "feedback", "decay": "all"},
        {"half_wire": True, "feedback": True, "decay": "all"},
    ),
    "half_moved": ({"wire": "bfloat16", "unsent": "moved"}, {"half_wire": True, "moved": True}),
}


def frozen_worker(rank: int, world: int, names: list[str], steps: int) -> dict[str, Any]:
    found = {}
    for name in names:
        params = parameters()
        choices = {"density": 0.1, "dense_steps": 10, "wire": "float32", **RULES[name][0]}
        optimizer = Scape(params, lr=1e-2, bucket_bytes=600, **choices)
        spans = [range(s, s + 50) for s in range(0, steps, 50)]
        weights = [flat(train(optimizer, params, rank, span)) for span in spans]
        family: Any = optimizer.family
        found[name] = weights, optimizer.buckets.layout, family.count
    return found


def compare_frozen(world: int, names: list[str], steps: int) -> None:
    all_found = good(run(frozen_worker, world, names, steps))
    for name in names:
        found = [mine[name] for mine in all_found]
        _, layout, count = found[0]
        dense = torch.zeros(len(flat(parameters())), dtype=torch.bool)
        for part in coordinates(layout, dense=True):
            dense[part] = True
        rule = ref.Rule(lr=1e-2, **{"half_wire": False, **RULES[name][1]})
        slow = ref.Frozen(flat(parameters()), coordinates(layout), dense, count, rule)
        expected = []
        for step in range(steps):
            grads = stack(step, world)
            slow.dense_step(grads) if step < 10 else slow.sparse_step(grads)
            if step % 50 == 49:
                expected.append(slow.w.clone())
        # The same operations on the same numbers; only pow is computed with other vector lengths,
        # so a last place may differ in the decayed moment and from there in the weights.
        for weights, *_ in found:
            for fast, oracle in zip(weights, expected, strict=True):
                torch.testing.assert_close(fast, oracle, rtol=0, atol=1e-6, msg=name)
        assert all(torch.equal(found[0][0][-1], other[0][-1]) for other in found[1:])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_the_frozen_family_equals_the_reference_on_whole_tensors(world: int) -> None:
    compare_frozen(world, ["default"], 50 if world == 8 else 200)


def test_every_choice_of_the_frozen_family_equals_the_reference() -> None:
    compare_frozen(3, [name for name in RULES if name != "default"], 100)


def local_worker(rank: int, world: int, choices: dict[str, Any], steps: int) -> Any:
    params = parameters()
    options = {"density": 0.1, "dense_steps": 10, "wire": "bfloat16", **choices}
    optimizer = Scape(params, lr=1e-2, unsent="local", **options)
    weights = flat(train(optimizer, params, rank, range(steps)))
    with optimizer.mean_model():
        mean = flat(params)
    assert torch.equal(weights, flat(params))
    family: Any = optimizer.family
    phases = [family.parts(phase) for phase in range(10)]
    return weights, mean, optimizer.buckets.layout, phases


@pytest.mark.parametrize(
    ("world", "choices"),
    [
        *((world, {"cycle_run": run}) for world, run in ((1, 1), (2, 3), (3, 16), (4, 1), (8, 2))),
        (3, {"cycle": "contiguous", "outer_momentum": 0.5, "wire": "float32"}),
    ],
)
def test_the_local_family_equals_the_reference_on_whole_tensors(
    world: int, choices: dict[str, Any]
) -> None:
    steps = 40 if world == 8 else 210
    found = good(run(local_worker, world, choices, steps))
    layout, phases = found[0][2], found[0][3]
    size = len(flat(parameters()))
    dense = torch.zeros(size, dtype=torch.bool)
    for part in coordinates(layout, dense=True):
        dense[part] = True
    everywhere = torch.ones(size, dtype=torch.bool)
    rule = ref.Rule(
        lr=1e-2,
        outer_momentum=choices.get("outer_momentum", 0.3),
        half_wire=choices.get("wire") != "float32",
    )
    slow = ref.Local(flat(parameters()), world, everywhere, rule)
    for step in range(steps):
        if step == 10:
            slow.dense, slow.anchor = dense, slow.w[0].clone()
        sent = torch.zeros(size, dtype=torch.bool)
        if step >= 10:
            for owner in range(world):
                for bucket, part in zip(layout.buckets, phases[step % 10], strict=False):
                    columns = torch.zeros(bucket.width, dtype=torch.bool)
                    part.put(columns, torch.ones(part.count(0, bucket.width), dtype=torch.bool))
                    for slot in bucket.slots:
                        begin, end = slot.part(owner)
                        chosen = columns[slot.offset : slot.offset + end - begin]
                        sent[STARTS[slot.index] + begin : STARTS[slot.index] + end] = chosen
        slow.step(stack(step, world), sent)
    # Same operations and order; only vectors are cut elsewhere, which elementwise ones do not see.
    for rank, (weights, mean, *_) in enumerate(found):
        assert torch.equal(weights, slow.w[rank])
        assert torch.equal(mean, ref.mean(slow.w))
