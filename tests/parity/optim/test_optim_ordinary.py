"""What torch's own optimizers can do, done by those that are cut over workers."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_worlds import give, good, gradients, parameters, run
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from planaria.errors import PlanariaError
from planaria.optim import AdamS, Scape, Sharded
from planaria.optim.checks import OptionError, StateError

FACTORS = (1.0, 0.0, 0.5, 1.0, 2.0, 0.0)


def groups(*, foreign: bool) -> list[dict[str, Any]]:
    """Odd weights in groups of their own rates; ``foreign``: with one that is not contiguous."""
    generator = torch.Generator().manual_seed(3)
    square = torch.randn(6, 6, generator=generator)
    ps = [
        nn.Parameter(square.t() if foreign else square),
        nn.Parameter(torch.randn(0, 3)),
        nn.Parameter(torch.randn(5, 6, generator=generator)),
        nn.Parameter(torch.randn(7, generator=generator)),
        nn.Parameter(torch.ones(3), requires_grad=False),
    ]
    return [
        {"params": ps[:2], "lr": 1e-2},
        {"params": ps[2:4], "weight_decay": 0.0},
        {"params": ps[4:]},
    ]


def backward(params: list[nn.Parameter], step: int, rank: int) -> float:
    """The first weight is used twice, as one that two layers share is."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    square, empty, wide, vector, fixed = params
    x = torch.randn(4, 6, generator=generator)
    y = torch.tanh(torch.tanh(x @ square) @ square) @ wide.t()
    loss = y.square().sum() + (vector * fixed[0]).sum() * step + empty.sum()
    loss.backward()
    return float(loss.detach())


def ordinary(
    make: Callable[[Any], Any], rank: int, world: int, *, foreign: bool, alone: bool, load: Any
) -> Any:
    """Six steps with a schedule and a closure; ``alone``: by an optimizer that is not cut.

    Returns the weights and the state after three; ``load`` is such a state, taken on from there.
    """
    made = groups(foreign=foreign)
    params = [p for group in made for p in group["params"]]
    optimizer = make(made)
    plan = LambdaLR(optimizer, lambda step: FACTORS[step])

    def closure() -> float:
        optimizer.zero_grad()
        return backward(params, optimizer_step, rank)

    kept = None
    for optimizer_step in range(6):
        if alone:
            means = [torch.zeros_like(p) for p in params]
            for who in range(world):
                optimizer.zero_grad()
                backward(params, optimizer_step, who)
                for mean, p in zip(means, params, strict=True):
                    mean += torch.zeros_like(p) if p.grad is None else p.grad
            for mean, p in zip(means, params, strict=True):
                p.grad = mean / world if p.requires_grad else None
            optimizer.step()
        else:
            assert isinstance(optimizer.step(closure), float)
        plan.step() if optimizer_step < 5 else None
        if optimizer_step == 2:
            kept = copy.deepcopy(optimizer.state_dict())
            if load is not None:
                optimizer = make(made)
                optimizer.load_state_dict(load)
                plan = LambdaLR(optimizer, lambda step: FACTORS[step], last_epoch=2)
    return [p.detach().clone() for p in params], kept


def ordinary_worker(rank: int, world: int, name: str) -> bool:
    rules: dict[str, tuple[Any, Any]] = {
        "sharded adamw": (
            lambda p: torch.optim.AdamW(p, lr=3e-3),
            lambda p: Sharded(torch.optim.AdamW, p, lr=3e-3),
        ),
        "maximize": (
            lambda p: AdamS(p, lr=3e-3, maximize=True),
            lambda p: Sharded(AdamS, p, lr=3e-3, maximize=True),
        ),
        "scape": (
            lambda p: AdamS(p, lr=3e-3),
            lambda p: Scape(p, lr=3e-3, density=1.0),
        ),
    }
    whole, cut = rules[name]
    foreign = name != "scape"
    options: dict[str, Any] = {"foreign": foreign, "rank": rank, "world": world}
    expected, state = ordinary(whole, alone=True, load=None, **options)
    # torch's state of the whole optimizer is what the cut one goes on from.
    load = state if name == "sharded adamw" else None
    found, _ = ordinary(cut, alone=False, load=load, **options)
    return all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["sharded adamw", "maximize", "scape"])
def test_groups_schedules_closures_and_odd_weights_are_as_in_the_whole_optimizer(name: str) -> None:
    assert good(run(ordinary_worker, 2, name)) == [True, True]


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except PlanariaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unlike_worker(rank: int, world: int) -> dict[str, str]:
    def train(optimizer: Any, params: Any) -> None:
        give(params, gradients(0, rank))
        optimizer.step()

    unfrozen = parameters()
    unfrozen[2].requires_grad_(False)
    late = Scape(unfrozen, density=0.1)
    unfrozen[2].requires_grad_(rank == 1)
    drifting = parameters()
    scheduled = Sharded(AdamS, drifting, lr=1e-2)
    scheduled.param_groups[0]["lr"] = (1e-2, 5e-3)[rank]
    used = [1, 2, 3, 4, 5]
    return {
        "density": attempt(lambda: Scape(parameters(), density=(0.1, 0.3)[rank])),
        "rate": attempt(lambda: Sharded(AdamS, [{"params": parameters(), "lr": (0.1, 0.3)[rank]}])),
        "names": attempt(
            lambda: Sharded(torch.optim.AdamW, parameters(), **({} if rank else {"lr": 1e-3}))
        ),
        "one bad": attempt(lambda: Scape(parameters(), density=(0.1, 0.0)[rank])),
        "unfrozen": attempt(
            lambda: (
                train(late, unfrozen)
                if rank
                else (
                    give(
                        [unfrozen[i] for i in used if i != 2],
                        [gradients(0, 0)[i] for i in used if i != 2],
                    ),
                    late.step(),
                )
            )
        ),
        "schedule": attempt(lambda: train(scheduled, drifting)),
    }


def test_workers_that_are_not_alike_all_hear_of_it() -> None:
    first, second = good(run(unlike_worker, 2))
    same = "; give every worker the same options"
    for found, density, rate in ((first, "0.1", "0.1"), (second, "0.3", "0.3")):
        assert found["density"].startswith(
            f"ReplicaError: the option density (here {density}) differs between workers ("
        )
        assert found["rate"].startswith(
            f"ReplicaError: the option lr of group 0 (here {rate}) differs"
        )
        assert found["names"].startswith(
            "ReplicaError: the set of options differs between workers ("
        )
        assert all(found[name].endswith(same) for name in ("density", "rate", "names"))
        assert found["unfrozen"] == (
            "OptionError: parameter 2 has a gradient, but was frozen when the optimizer was built "
            "and is not trained by it; build a new one when it is no longer frozen"
        )
        assert found["schedule"] == (
            "ReplicaError: the learning rate differs between workers (here "
            f"{'0.01' if found is first else '0.005'}); step the scheduler on every worker alike, "
            "and where it follows a loss by the loss of all of them"
        )
    assert first["one bad"] == (
        "OptionError: the optimizer cannot be built on worker 1, which says why; build it alike on "
        "every worker"
    )
    assert second["one bad"] == ("OptionError: density is 0; give a share of the weights in (0, 1]")


def rebuilt_worker(rank: int, world: int) -> list[torch.Tensor]:
    """Garbage is collected on one worker only, so on the other the old optimizer may live on."""
    params = parameters()
    options: dict[str, Any] = {"density": 0.1, "dense_steps": 9, "bucket_bytes": 300}
    optimizer = Scape(params, **options)
    give(params, gradients(0, rank))
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [optimizer]
        cycle.append(cycle)
        optimizer.step()
        state = optimizer.portable_state_dict()
        del optimizer, cycle
        if rank == 0:
            gc.collect()
        optimizer = Scape(params, **options)
        optimizer.load_portable_state_dict(state)
        for step in range(1, 4):
            optimizer.zero_grad()
            give(params, gradients(step, rank))
            optimizer.step()
    finally:
        gc.enable()
    return [p.detach() for p in params]


def test_an_optimizer_that_was_dropped_sends_nothing_any_more() -> None:
    params = parameters()
    optimizer = AdamS(params)
    for step in range(4):
        for param, *rows in zip(params, gradients(step, 0), gradients(step, 1), strict=True):
            param.grad = (rows[0] + rows[1]) / 2
        optimizer.step()
    for found in good(run(rebuilt_worker, 2)):
        assert all(map(torch.equal, found, params))


def neighbours_worker(rank: int, world: int) -> list[float]:
    """Two optimizers over one group, and a weight of the first that one worker does not use."""
    first = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    second = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "overlap": False}
    pair = [Sharded(torch.optim.SGD, ps, **options) for ps in (first, second)]
    loss = sum((p * 100).sum() for p in second) + sum(p.sum() for p in first[rank:])
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    for optimizer in pair:
        optimizer.step()
    return [float(p.detach()[0, 0]) for p in (*first, *second)]


def test_two_optimizers_over_one_group_do_not_meet_without_overlap() -> None:
    assert good(run(neighbours_worker, 2)) == [[0.5, 0.0, -99.0, -99.0]] * 2


def scaled_worker(rank: int, world: int, kind: str) -> Any:
    """With torch's scaler, and without it; one worker's gradient is infinite at the second step."""

    def train(scaled: bool) -> tuple[list[torch.Tensor], int]:
        params = parameters()
        options: dict[str, Any] = {} if scaled else {"nonfinite": "skip"}
        optimizer: Any = (
            Sharded(AdamS, params, max_norm=1.0, **options)
            if kind == "sharded"
            else Scape(params, density=0.1, dense_steps=2, max_norm=1.0, **options)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        for step in range(5):
            optimizer.zero_grad()
            grads = gradients(step, rank)
            if rank == 1 and step in (1, 4):
                grads[0][0, 0] = math.inf
            loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in params], int(scaler.get_scale())

    (with_scaler, scale), (without, _) = train(True), train(False)
    return all(map(torch.equal, with_scaler, without)), scale


@pytest.mark.parametrize("kind", ["sharded", "scape"])
def test_a_scaler_that_finds_infinity_on_one_worker_leaves_the_step_out_on_all(kind: str) -> None:
    # Scales are powers of two, so unscaling is exact. Each worker has its own.
    assert good(run(scaled_worker, 2, kind)) == [(True, 64), (True, 16)]


def test_a_scaled_gradient_of_half_precision_is_refused() -> None:
    params = parameters(dtype=torch.float16)
    optimizer = Scape(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(params[0].sum()).backward()
    with pytest.raises(OptionError) as caught:
        scaler.step(optimizer)
    assert str(caught.value) == (
        "the gradient of parameter 0 is of torch.float16 and scaled by a GradScaler, and unscaling "
        "would round it away; keep the weights in float32 and use autocast, or train in bfloat16 "
        "without a scaler"
    )


def refused_load_worker(rank: int, world: int) -> Any:
    found = []
    for kind in ("sharded", "scape"):
        params = parameters()
        make: Any = (
            (lambda lr, p=params: Sharded(torch.optim.AdamW, p, lr=lr))
            if kind == "sharded"
            else (lambda lr, p=params: Scape(p, lr=lr, density=0.1))
        )
        optimizer = make(1e-2)
        give(params, gradients(0, rank))
        optimizer.step()
        state = optimizer.state_dict() if kind == "sharded" else optimizer.portable_state_dict()
        state = copy.deepcopy(state)
        if rank == 1:
            del state["state"][0 if kind == "sharded" else "0"]
        fresh = make(5e-2)
        before = copy.deepcopy(fresh.state_dict())
        load = fresh.load_state_dict if kind == "sharded" else fresh.load_portable_state_dict
        message = attempt(lambda load=load, state=state: load(state))
        after = fresh.state_dict()
        same = after["param_groups"] == before["param_groups"] and all(
            bool((value == after["state"][key][name]).all())
            for key, entries in before["state"].items()
            for name, value in entries.items()
        )
        found.append((message.startswith("StateError: the s"), same))
    return found


def test_a_load_that_one_worker_refuses_changes_nothing_on_any() -> None:
    assert good(run(refused_load_worker, 2)) == [[(True, True)] * 2] * 2


def test_a_state_of_parameters_that_were_updated_unequally_often_is_refused() -> None:
    params = parameters()
    plain = torch.optim.AdamW(params)
    for step in range(3):
        plain.zero_grad()
        chosen = slice(0 if step else 1, None)
        give(params[chosen], gradients(step, 0)[chosen])
        plain.step()
    with pytest.raises(StateError) as caught:
        Sharded(torch.optim.AdamW, params).load_state_dict(plain.state_dict())
    assert str(caught.value) == (
        "the saved 'step' of parameter 0 is 2 and that of parameter 5, which is updated with it, 3; "
        "load a state in which all parameters were updated equally often"
    )


def anchors_worker(rank: int, world: int) -> list[str]:
    params = parameters()
    optimizer: Any = Scape(params, density=0.1, unsent="local", check_every=2)
    give(params, gradients(0, rank))
    optimizer.step()
    with optimizer.mean_model():
        inside = attempt(optimizer.step)
    optimizer.step()
    if rank == 1:
        optimizer.family.anchor[3] += 1
    return [inside, attempt(optimizer.step)]


def test_anchors_are_compared_and_a_lent_model_is_not_trained() -> None:
    for inside, differing in good(run(anchors_worker, 2)):
        assert inside == (
            "OptionError: step() is called inside mean_model(), whose end puts the weights back "
            "that this worker had before; leave it first"
        )
        assert differing.startswith("ReplicaError: before step 2 masks or weights differ between")


def test_a_cycle_reaches_every_weight_whatever_the_distance_of_two_masks() -> None:
    param = nn.Parameter(torch.ones(20, 20))
    optimizer = Scape([param], density=0.1, statistic="cycle", refresh=5, wire="float32")
    for _ in range(50):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()
    assert not bool((param == 1).any())


@pytest.mark.parametrize("name", ["density", "wire", "maximize"])
def test_what_is_for_all_groups_is_refused_in_one(name: str) -> None:
    value = {"density": 0.5, "wire": "int4", "maximize": True}[name]
    with pytest.raises(OptionError) as caught:
        Scape([{"params": parameters()[:1]}, {"params": parameters()[1:], name: value}])
    assert str(caught.value) == (
        f"parameter group 1 has {name}={value!r}, and groups have their own lr, betas, eps, "
        "weight_decay and dense only; give what is for all groups to Scape itself, and build one "
        "optimizer for each otherwise"
    )


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_and_not_half_made(copying: Callable[[Any], Any]) -> None:
    for optimizer in (Scape(parameters()), Sharded(AdamS, parameters())):
        with pytest.raises(OptionError) as caught:
            copying(optimizer)
        assert str(caught.value) == (
            f"{type(optimizer).__name__} is tied to a process group and cannot be copied or "
            "pickled; build another one and load this one's state_dict() into it"
        )


RARE: tuple[dict[str, Any], ...] = (
    {"k_scope": "bucket", "refresh": 2},
    {"k_scope": "tensor", "wire": "int4", "after_send": "clear"},
    {"statistic": "gradient"},
    {"statistic": "gradient", "refresh": 3, "buffer": "feedback", "k_scope": "tensor"},
    {"statistic": "cycle", "refresh": 3, "scale_cap": 50.0},
    {"unsent": "moved", "wire": "int4", "statistic": "momentum"},
    {"unsent": "local", "average_moments": False, "wire": "int4"},
)


def rare_worker(rank: int, world: int) -> list[bool]:
    """Replicas are compared before each step; the state goes on in another optimizer."""

    def train(optimizer: Any, params: list[nn.Parameter], span: range) -> list[torch.Tensor]:
        for step in span:
            optimizer.zero_grad()
            give(params, gradients(step, rank))
            optimizer.step()
        return [p.detach().clone() for p in params]

    found = []
    for choices in RARE:
        options = {"density": 0.1, "dense_steps": 2, "check_every": 1, "bucket_bytes": 300}
        pair = []
        for _ in range(2):
            params = parameters()
            pair.append((Scape(params, lr=1e-2, **options, **choices), params))
        (first, params), (second, others) = pair
        train(first, params, range(4))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        with torch.no_grad():
            for other, param in zip(others, params, strict=True):
                other.copy_(param)
        span = range(4, 9)
        found.append(all(map(torch.equal, train(first, params, span), train(second, others, span))))
    return found


def test_rare_choices_keep_replicas_equal_and_resume_to_the_bit() -> None:
    assert good(run(rare_worker, 2)) == [[True] * len(RARE)] * 2


def dense_group_worker(rank: int, world: int) -> Any:
    params = parameters()
    optimizer = Scape([{"params": params[:1], "dense": True}, {"params": params[1:]}], density=0.1)
    give(params, gradients(0, rank))
    optimizer.step()
    coarse = parameters()
    other = Sharded(torch.optim.SGD, coarse, lr=1.0, reduce_dtype=torch.bfloat16)
    give(coarse, gradients(0, rank))
    other.step()
    return params[0].detach(), params[4].detach(), [p.detach() for p in coarse]


def test_a_dense_group_moves_densely_and_gradients_may_be_reduced_in_few_bits() -> None:
    means = [(a + b) / 2 for a, b in zip(gradients(0, 0), gradients(0, 1), strict=True)]
    dense = parameters()
    for param, mean in zip(dense, means, strict=True):
        param.grad = mean
    AdamS(dense).step()
    for whole, sparse, coarse in good(run(dense_group_worker, 2)):
        assert torch.equal(whole, dense[0])
        changed = float((sparse != parameters()[4]).float().mean())
        assert 0 < changed < 0.5
        for found, start, mean in zip(coarse, parameters(), means, strict=True):
            # Two gradients, a sum and a mean are rounded to 8 bits: 2^-9 of sizes below 16 each.
            torch.testing.assert_close(found, start.detach() - mean, rtol=0, atol=4 * 16 * 2**-9)
            assert not torch.equal(found, start.detach() - mean)
