"""What torch's own optimizers promise, asked of AdamS.

Each test has a namesake in torch's test/test_optim.py; the kinds of parameters are those that
``torch.testing._internal.common_optimizers`` lists for Adam.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, StepLR

from planaria.errors import ConfigError
from planaria.optim import AdamS
from planaria.optim.adams import BLOCK, SMALL, update_all

CONFIGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.0},
    {"weight_decay": 0.9},
    {"betas": (0.5, 0.9)},
    {"maximize": True, "weight_decay": 0.1},
    {"foreach": True},
    {"foreach": True, "weight_decay": 0.9, "maximize": True},
    {"lr": torch.tensor(0.001)},
]


def params(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    shapes = ((3, 5), (7,), (), (0,), (2, 3, 4))
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def set_grads(ps: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def run(ps: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(ps, step)
        optimizer.step()


def test_first_steps_have_the_values_of_the_formula() -> None:
    p = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    optimizer = AdamS([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    w, m = [2.0, -1.0], [0.0, 0.0]
    for g in ([1.0, -3.0], [0.5, 2.0], [0.0, 1.0]):
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        for i in range(2):
            nu = 0.95 * m[i] ** 2 + 0.05 * g[i] ** 2
            m[i] = 0.9 * m[i] + 0.1 * g[i]
            w[i] = (1 - 0.1 * 0.1) * w[i] - 0.1 * m[i] / (math.sqrt(nu) + 1e-8)
    torch.testing.assert_close(p.detach(), torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        optimizer.state[p]["exp_avg"], torch.tensor(m, dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        lambda o: StepLR(o, gamma=0.9, step_size=10),
        lambda o: LinearLR(o, start_factor=0.4, end_factor=1, total_iters=4),
        lambda o: ExponentialLR(o, gamma=0.9),
        lambda o: ReduceLROnPlateau(o),
    ],
)
def test_forloop_goes_right_direction(foreach: bool, scheduler: Any) -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))
    x = torch.randn(5)
    optimizer = AdamS([weight, bias], lr=1e-2, foreach=foreach)
    plan = scheduler(optimizer) if scheduler else None

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss.item()

    first = closure()
    for _ in range(20):
        optimizer.step(closure)
        if isinstance(plan, ReduceLROnPlateau):
            plan.step(closure())
        elif plan is not None:
            plan.step()
    assert closure() < first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_foreach_matches_forloop(dtype: torch.dtype) -> None:
    one, many = params(dtype=dtype), params(dtype=dtype)
    a, b = AdamS(one, lr=1e-2, foreach=False), AdamS(many, lr=1e-2, foreach=True)
    run(one, a, range(7))
    run(many, b, range(7))
    assert all(torch.equal(x, y) for x, y in zip(one, many, strict=True))
    assert all(
        torch.equal(a.state[x]["exp_avg"], b.state[y]["exp_avg"])
        for x, y in zip(one, many, strict=True)
    )


def test_blocks_match_the_whole() -> None:
    torch.manual_seed(0)
    # Two blocks and a part of one.
    whole = nn.Parameter(torch.randn(BLOCK // 200, 450))
    turned = nn.Parameter(whole.detach().clone().t().contiguous().t())
    assert not turned.is_contiguous()
    a, b = AdamS([whole], lr=1e-2), AdamS([turned], lr=1e-2)
    run([whole], a, range(3))
    run([turned], b, range(3))
    assert torch.equal(whole, turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_match_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = BLOCK + 4321
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    w, g, m = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(3))
    whole = [w.clone()], [g], [m.clone()]
    update_all(*whole, **options)
    # One that is larger than what is done together, which then fills more than one block of its size.
    small, rest = divmod(size - SMALL - 3, 333)
    mixed = [SMALL + 3, *[333] * small, rest]
    for length in (333, SMALL + 3, BLOCK + 1, mixed):
        part = w.clone(), g, m.clone()
        update_all(*(t.split(length) for t in part), **options)
        assert torch.equal(part[0], whole[0][0])
        assert torch.equal(part[2], whole[2][0])
        assert all(t._version for t in (part[0], part[2]))


def test_a_moment_may_lie_otherwise_in_memory_than_its_weight() -> None:
    a, b = params(), params()
    for p in b:
        if p.ndim > 1:
            p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)
    first, second = AdamS(a, lr=1e-2), AdamS(b, lr=1e-2)
    for p in b:
        second.state[p]["exp_avg"] = second.state[p]["exp_avg"].contiguous()
    run(a, first, range(3))
    run(b, second, range(3))
    assert not b[0].is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_scale_is_that_of_the_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (5, SMALL, SMALL + 1, BLOCK + 7)
    ws, gs, ms = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(3))
    twins = [w.clone() for w in ws], [g * 0.3 for g in gs], [m.clone() for m in ms]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    kept = [g.clone() for g in gs]
    update_all(ws, gs, ms, scale=0.3, **options)
    update_all(*twins, **options)
    for a, b in zip((*ws, *ms), (*twins[0], *twins[2]), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, gs, kept))


@pytest.mark.parametrize("config", CONFIGS)
def test_maximize_goes_the_other_way(config: dict[str, Any]) -> None:
    up, down = params(), params()
    flipped = {**config, "maximize": not config.get("maximize", False)}
    a, b = AdamS(up, **config), AdamS(down, **flipped)
    for step in range(5):
        set_grads(up, step)
        set_grads(down, step)
        for p in down:
            assert p.grad is not None
            p.grad.neg_()
        a.step()
        b.step()
    assert all(torch.equal(x, y) for x, y in zip(up, down, strict=True))


def test_a_tensor_learning_rate_equals_a_number() -> None:
    a, b = params(), params()
    run(a, AdamS(a, lr=torch.tensor(0.01, dtype=torch.float64)), range(4))
    run(b, AdamS(b, lr=0.01), range(4))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_complex_matches_a_pair_of_reals(foreach: bool) -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    whole = nn.Parameter(start.clone())
    pair = nn.Parameter(torch.view_as_real(start.clone()).clone())
    a, b = AdamS([whole], foreach=foreach), AdamS([pair], foreach=foreach)
    for _ in range(3):
        whole.grad, pair.grad = grad.clone(), torch.view_as_real(grad).clone()
        a.step()
        b.step()
    assert torch.equal(torch.view_as_real(whole.detach()), pair.detach())


def test_differentiable_gives_the_gradient_of_the_step() -> None:
    w = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def moved(lr: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        p = w.clone().requires_grad_().clone()
        holder = nn.Parameter(torch.zeros_like(w))
        optimizer = AdamS([holder], lr=0.1, differentiable=True)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[0]["params"] = [p]
        optimizer.state.clear()
        optimizer.state[p]["exp_avg"] = torch.full_like(w, 0.2)
        p.grad = g
        optimizer.step()
        return p

    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([0.5, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moved, (lr, g))


@pytest.mark.parametrize("config", CONFIGS)
def test_state_dict_deterministic(config: dict[str, Any]) -> None:
    ps = params()
    optimizer = AdamS(ps, **config)
    run(ps, optimizer, range(3))
    twin = copy.deepcopy(ps)
    other = AdamS(twin, **config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    run(ps, optimizer, range(3, 6))
    run(twin, other, range(3, 6))
    assert all(torch.equal(x, y) for x, y in zip(ps, twin, strict=True))


def test_can_load_older_state_dict() -> None:
    ps = params()
    optimizer = AdamS(ps)
    old = copy.deepcopy(optimizer.state_dict())
    for key in ("foreach", "maximize", "differentiable", "capturable"):
        del old["param_groups"][0][key]
    optimizer.load_state_dict(old)
    run(ps, optimizer, range(1))
    assert optimizer.param_groups[0]["maximize"] is False


def test_save_load_equality_with_weights_only() -> None:
    ps = params()
    optimizer = AdamS(ps, lr=torch.tensor(0.01))
    run(ps, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    saved = optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for key, entry in saved["state"].items():
        assert torch.equal(loaded["state"][key]["exp_avg"], entry["exp_avg"])


def test_param_groups_have_their_own_options() -> None:
    a, b = params(), params()
    frozen = [p.detach().clone() for p in a[:2]]
    grouped = AdamS([{"params": a[:2], "lr": 0.0}, {"params": a[2:]}], lr=0.01)
    plain = AdamS(b, lr=0.01)
    run(a, grouped, range(3))
    run(b, plain, range(3))
    assert all(torch.equal(x, y) for x, y in zip(a[:2], frozen, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(a[2:], b[2:], strict=True))


def test_weight_decay_is_decoupled() -> None:
    p = nn.Parameter(torch.tensor([4.0]))
    optimizer = AdamS([p], lr=0.5, weight_decay=0.5)
    p.grad = torch.zeros(1)
    optimizer.step()
    assert p.item() == 4.0 * (1 - 0.25)


def test_named_parameters_keep_their_names() -> None:
    layer = nn.Linear(2, 3)
    optimizer = AdamS(layer.named_parameters())
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_add_param_group_makes_state_and_checks_options() -> None:
    ps = params()
    optimizer = AdamS(ps[:2])
    optimizer.add_param_group({"params": ps[2:], "lr": 0.5})
    assert set(optimizer.state) == set(ps)
    with pytest.raises(ConfigError, match=r"^lr is -1; give a number at least 0$"):
        optimizer.add_param_group({"params": params(1), "lr": -1.0})


@pytest.mark.parametrize("foreach", [False, True])
def test_step_is_noop_when_params_have_no_grad(foreach: bool) -> None:
    ps = params()
    before = [p.detach().clone() for p in ps]
    AdamS(ps, foreach=foreach).step()
    assert all(torch.equal(x, y) for x, y in zip(ps, before, strict=True))


def test_step_is_noop_for_zero_grads_without_decay() -> None:
    ps = params()
    before = [p.detach().clone() for p in ps]
    optimizer = AdamS(ps, weight_decay=0.0)
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(ps, before, strict=True))


def test_step_hooks_and_state_dict_hooks_run_in_order() -> None:
    ps = params()
    optimizer = AdamS(ps)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "save", "loaded"]


def test_deepcopy_and_pickle_preserve_state_and_keep_working() -> None:
    ps = params()
    optimizer = AdamS(ps, lr=0.01)
    run(ps, optimizer, range(2))
    copied_params, copied = copy.deepcopy((ps, optimizer))
    pickled_params, pickled = pickle.loads(pickle.dumps((ps, optimizer)))
    run(ps, optimizer, range(2, 4))
    run(copied_params, copied, range(2, 4))
    run(pickled_params, pickled, range(2, 4))
    for x, y, z in zip(ps, copied_params, pickled_params, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)


def test_zero_grad_sets_to_none_or_to_zero() -> None:
    ps = params()
    optimizer = AdamS(ps, foreach=True)
    set_grads(ps, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in ps)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ps)


def test_closure_loss_is_returned() -> None:
    ps = params()
    assert AdamS(ps).step(lambda: 1.5) == 1.5
    assert AdamS(ps).step() is None


def test_all_state_is_made_before_the_first_step() -> None:
    ps = params()
    optimizer = AdamS(ps)
    before = {k: set(v) for k, v in optimizer.state_dict()["state"].items()}
    run(ps, optimizer, range(1))
    assert {k: set(v) for k, v in optimizer.state_dict()["state"].items()} == before
    assert all(set(v) == {"exp_avg"} for v in before.values())


def test_half_of_adamws_state() -> None:
    ps, qs = params(), params()
    ours, theirs = AdamS(ps), torch.optim.AdamW(qs)
    run(ps, ours, range(1))
    run(qs, theirs, range(1))

    def elements(optimizer: torch.optim.Optimizer) -> int:
        return sum(t.numel() for s in optimizer.state.values() for k, t in s.items() if k != "step")

    assert 2 * elements(ours) == elements(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1; give a number at least 0"),
        ({"betas": (1.0, 0.9)}, "betas[0] is 1; give a number in [0, 1)"),
        ({"betas": (0.9, -0.1)}, "betas[1] is -0.1; give a number in [0, 1)"),
        ({"eps": -1e-8}, "eps is -1e-08; give a number at least 0"),
        ({"weight_decay": -1}, "weight_decay is -1; give a number at least 0"),
        (
            {"capturable": True},
            "capturable is True, and AdamS has no CUDA-graph path; leave it False",
        ),
        (
            {"foreach": True, "differentiable": True},
            "foreach and differentiable are both True; the foreach path writes in place, "
            "so set one of them to False",
        ),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements; give it one"),
    ],
)
def test_bad_options_end_in_a_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AdamS(params(), **options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError) as caught:
        AdamS(table.parameters()).step()
    assert str(caught.value) == (
        "the gradient of parameter 0 has a sparse layout; build the embedding with sparse=False"
    )


def test_torch_errors_for_bad_parameters_are_kept() -> None:
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        AdamS(nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        AdamS([])
