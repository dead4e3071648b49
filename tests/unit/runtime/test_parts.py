"""State comes back bit for bit: into the worker that captured it, and into a fresh one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from planaria.errors import RunError, UserError
from planaria.runtime.memory.layout import Layout
from planaria.runtime.memory.parts import Parts, replicated
from planaria.runtime.memory.snapshot import Buffers, Capture


def taken(parts: Parts, generation: int = 1) -> tuple[Layout, torch.Tensor]:
    """A capture through the real machinery, and a copy of its bytes."""
    buffers = Buffers()
    capture = Capture(buffers)
    assert capture.capture(parts, generation=generation).taken
    capture.wait_copied()
    capture.close()
    with buffers.reading(generation) as slot:
        assert slot is not None
        assert slot.layout is not None
        return slot.layout, slot.memory[: slot.layout.total].clone()


def same(parts: Parts, layout: Layout, blob: torch.Tensor) -> None:
    again, bytes_again = taken(parts, layout.generation)
    assert again.leaves == layout.leaves
    assert torch.equal(bytes_again, blob)
    assert again.skeleton == layout.skeleton


class Fp32Momentum(torch.optim.Optimizer):
    """Momentum in fp32 whatever the parameter is, with a step counted in an int and state that no
    parameter has: what ``Optimizer.load_state_dict`` would cast."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        assert closure is None
        shared = self.state["shared"]
        shared.setdefault("seen", torch.zeros(2, dtype=torch.int64)).add_(1)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                momentum = state.setdefault("m", torch.zeros_like(p, dtype=torch.float32))
                momentum.mul_(0.9).add_(p.grad.float())
                p.data.add_(momentum.to(p.dtype), alpha=-group["lr"])


class Net(nn.Module):
    """Tied weights, BatchNorm, a 0-d and an empty parameter, a non-contiguous one, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.across = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.calls = 0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y_BD = self.out(self.norm(self.embed(x_BD))) * self.scale
        return y_BD.pow(2).mean() + self.none.sum() + (x_BD @ self.across.t()).pow(2).mean()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Cursor:
    """A part of the user's own."""

    def __init__(self) -> None:
        self.position = 0
        self.window = torch.zeros(3, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "nested": [self.window, (self.window,)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.window = state["nested"][0]


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw foreach": adamw(foreach=True),
    "adamw fused": adamw(fused=True),
    "adamw amsgrad": adamw(amsgrad=True),
    "adamw capturable lr": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), foreach=False
    ),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "fp32 momentum": Fp32Momentum,
}


class Job:
    """A script in small: everything that a step touches."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
        torch.manual_seed(7)
        self.dtype = dtype
        self.model = Net().to(dtype)
        self.optimizer = make(self.model.parameters())
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.cursor = Cursor()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.parts = Parts(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "ema": self.ema,
                "data": self.cursor,
            }
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        x_BD = torch.randn(4, 6).to(self.dtype) * random.random() * float(np.random.rand())
        self.model(x_BD).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.cursor.position += 4
        self.cursor.window += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_state_comes_back_bit_for_bit(name: str, dtype: torch.dtype, steps: int) -> None:
    job = Job(OPTIMIZERS[name], dtype)
    for _ in range(steps):
        job.step()
    layout, blob = taken(job.parts)
    digest = job.parts.digest()
    pointers = [p.data_ptr() for p in job.model.parameters()]
    job.step()
    assert job.parts.digest() != digest
    job.parts.restore(layout, blob)
    same(job.parts, layout, blob)
    assert job.parts.digest() == digest
    assert [p.data_ptr() for p in job.model.parameters()] == pointers
    assert all(p.grad is None for p in job.model.parameters())

    fresh = Job(OPTIMIZERS[name], dtype)
    fresh.step()
    fresh.parts.restore(Layout.decode(layout.encode()), memoryview(blob.numpy()))
    same(fresh.parts, layout, blob)
    assert fresh.parts.digest() == digest
    assert fresh.model.calls == steps
    assert fresh.cursor.position == 4 * steps

    # The generators are global, so the two go on one after the other.
    job.parts.restore(layout, blob)
    for _ in range(2):
        job.step()
    expected = taken(job.parts, 3)
    fresh.parts.restore(layout, blob)
    for _ in range(2):
        fresh.step()
    same(fresh.parts, *expected)


def test_a_spare_that_never_stepped_gets_the_exact_state() -> None:
    job = Job(Fp32Momentum, torch.bfloat16)
    job.step()
    layout, blob = taken(job.parts)
    fresh = Job(Fp32Momentum, torch.bfloat16)
    fresh.parts.restore(layout, blob)
    state = fresh.optimizer.state[fresh.model.embed.weight]
    assert list(state) == ["step", "m"]
    assert state["step"] == 1
    assert state["m"].dtype == torch.float32
    assert torch.equal(state["m"], job.optimizer.state[job.model.embed.weight]["m"])
    assert fresh.optimizer.state["shared"]["seen"].tolist() == [1, 1]
    moments = fresh.optimizer.state[fresh.model.across]["m"]
    assert moments.stride() == fresh.model.across.stride()


def test_lbfgs_with_lists_of_tensors_in_its_state() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x_BD, y_B1 = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x_BD) - y_B1).pow(2).mean()
        loss.backward()
        return loss

    parts = Parts({"model": model, "optimizer": optimizer})
    optimizer.step(closure)
    layout, blob = taken(parts)
    assert len(optimizer.state[model.weight]["old_dirs"]) > 0
    optimizer.step(closure)
    after = parts.digest()
    parts.restore(layout, blob)
    same(parts, layout, blob)
    optimizer.step(closure)
    assert parts.digest() == after


def test_small_leaves_parameters_and_optimizer_state_alone() -> None:
    job = Job(adamw(), torch.float32)
    job.step()
    layout, blob = taken(job.parts)
    weight = job.model.embed.weight.detach().clone()
    mean = job.model.norm.running_mean.clone()
    # A broken attempt: forward and backward ran, the optimizer did not.
    job.model(torch.randn(4, 6)).backward()
    job.cursor.position = 99
    job.optimizer.param_groups[0]["lr"] = 7.0
    assert not torch.equal(job.model.norm.running_mean, mean)
    filler = blob.clone()
    filler[layout.small :] = 255
    job.parts.restore(layout, filler, only="small")
    assert torch.equal(job.model.norm.running_mean, mean)
    assert torch.equal(job.model.embed.weight, weight)
    assert job.model.embed.weight.grad is None
    assert job.cursor.position == 4
    same(job.parts, layout, blob)


def test_a_broken_attempt_leaves_no_trace_in_the_scaler() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    parts = Parts({"model": model, "optimizer": optimizer, "scaler": scaler})

    def backward() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)

    backward()
    scaler.step(optimizer)
    scaler.update()
    layout, blob = taken(parts)
    backward()
    parts.restore(layout, blob, only="small")
    # Refused by torch if the first unscale_ were still noted.
    backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    parts.restore(layout, blob)
    assert scaler.get_scale() == 8.0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_as_they_would_have(name: str) -> None:
    def make() -> tuple[Any, Any, Parts]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        return optimizer, scheduler, Parts({"m": model, "o": optimizer, "s": scheduler})

    def rates(optimizer: Any, scheduler: Any, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            group = optimizer.param_groups[0]
            seen.append((group["lr"], group["momentum"]))
        return seen

    optimizer, scheduler, parts = make()
    rates(optimizer, scheduler, 2)
    layout, blob = taken(parts)
    expected = rates(optimizer, scheduler, 4)
    assert len(set(expected)) > 1
    parts.restore(layout, blob, only="small")
    assert rates(optimizer, scheduler, 4) == expected
    other, other_scheduler, other_parts = make()
    other_parts.restore(layout, blob)
    assert rates(other, other_scheduler, 4) == expected


def test_lambda_and_chained_schedulers() -> None:
    def make() -> tuple[Any, Any, Parts]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        chain = torch.optim.lr_scheduler.ChainedScheduler([warm, rest], optimizer)
        return optimizer, chain, Parts({"m": model, "o": optimizer, "s": chain})

    optimizer, chain, parts = make()
    for _ in range(3):
        optimizer.step()
        chain.step()
    layout, blob = taken(parts)
    rate = optimizer.param_groups[0]["lr"]
    other, other_chain, other_parts = make()
    other_parts.restore(layout, blob)
    assert other.param_groups[0]["lr"] == rate
    same(other_parts, layout, blob)
    chain.step()
    other_chain.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_pipeline_stages_and_several_optimizers() -> None:
    def make() -> Parts:
        torch.manual_seed(0)
        stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.Adam(stage.parameters()) for stage in stages]
        for stage, optimizer in zip(stages, optimizers, strict=True):
            stage(torch.randn(1, 2)).sum().backward()
            optimizer.step()
        return Parts({"model": stages, "optimizer": optimizers})

    parts = make()
    layout, blob = taken(parts)
    assert {leaf.part for leaf in layout.leaves} == {
        "model.0",
        "model.1",
        "optimizer.0",
        "optimizer.1",
    }
    other = make()
    with torch.no_grad():
        other.modules["model.1"].weight.zero_()
    other.restore(layout, blob)
    same(other, layout, blob)


def test_flatten_is_kept_until_the_set_of_tensors_changes() -> None:
    job = Job(adamw(), torch.float32)
    empty = job.parts.flatten()
    assert job.parts.flatten().fixed is empty.fixed
    job.step()
    stepped = job.parts.flatten()
    assert stepped.fixed is not empty.fixed
    job.step()
    assert job.parts.flatten().fixed is stepped.fixed
    job.model.out.bias = nn.Parameter(torch.ones(6))
    replaced = job.parts.flatten()
    assert replaced.fixed is not stepped.fixed
    assert any(leaf.tensor is job.model.out.bias for leaf in replaced.fixed)
    job.model.extra = nn.Linear(1, 1)
    grown = job.parts.flatten()
    assert any(leaf.path == "extra.weight" for leaf in grown.fixed)
    job.model.scale.data = torch.ones(2)
    leaf = next(leaf for leaf in job.parts.flatten().fixed if leaf.path == "scale")
    assert leaf.tensor.shape == (2,)


def test_what_is_asynchronous_and_what_is_not() -> None:
    job = Job(adamw(), torch.float32)
    job.step()
    leaves = {(leaf.part, leaf.path): leaf for leaf in job.parts.flatten().leaves}
    assert leaves["model", "embed.weight"].asynchronous
    assert leaves["optimizer", "model.embed.weight.exp_avg"].asynchronous
    assert leaves["optimizer", "model.embed.weight.step"].role == "optimizer"
    assert not leaves["model", "norm.running_mean"].asynchronous
    assert leaves["model", "norm.running_mean"].role == "buffer"
    assert not leaves["data", "#0"].asynchronous
    assert leaves["data", "#0"].role == "other"
    assert ("model", "out.weight") not in leaves
    assert ("model", "table") not in leaves
    assert sum(key[0] == "data" for key in leaves) == 1


def test_random_generators_are_a_part() -> None:
    parts = Parts({"model": nn.Linear(1, 1)})
    layout, blob = taken(parts)
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    parts.restore(layout, blob, only="small")
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == drawn


def test_digest_knows_names_dtypes_and_bytes_and_not_the_generators() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    digest = Parts({"model": model}).digest()
    assert len(digest) == 32
    torch.rand(1)
    assert Parts({"model": copy.deepcopy(model)}).digest() == digest
    assert Parts({"other": model}).digest() != digest
    assert Parts({"model": copy.deepcopy(model).double()}).digest() != digest
    with torch.no_grad():
        model.bias[0] += 1e-7
    assert Parts({"model": model}).digest() != digest


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "build() returned an empty dict: let it return a dict of what holds state"),
        ([nn.Linear(1, 1)], "build() returned an object of type list: let it return a dict"),
        (
            {"scheduler": None},
            "build() returned an object of type NoneType as part 'scheduler': a part is a module",
        ),
        ({"model": [nn.Linear(1, 1), 3]}, "an object of type int as part 'model': a part is a"),
        ({"rng": nn.Linear(1, 1)}, "build() returned a part named 'rng': names are non-empty"),
        ({"modes": nn.Linear(1, 1)}, "'rng' and 'modes' are parts that Planaria adds for the"),
        (
            {"m.0": nn.Linear(1, 1), "m": [nn.Linear(1, 1)]},
            "build() returned two parts named 'm.0' (lists number their items): rename one",
        ),
        ({3: nn.Linear(1, 1)}, "build() returned a part named 3: names are non-empty strings"),
    ],
)
def test_a_value_without_state_is_named(value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Parts(value)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_state_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(UserError, match=r"'weight' of part 'm' is not initialised yet: run one"):
        Parts({"m": nn.LazyLinear(2)}).flatten()
    with pytest.raises(UserError, match=r"'weight' of part 'm' is on the meta device: material"):
        Parts({"m": nn.Linear(1, 1, device="meta")}).flatten()
    cursor = Cursor()
    cursor.position = lambda: 3  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"the state of part 'data' cannot be pickled .*lambda"):
        Parts({"data": cursor}).flatten()
    cursor.position = 0
    cursor.window = torch.eye(2).to_sparse()
    with pytest.raises(UserError, match=r"tensor '#0' of part 'data' is torch.sparse_coo or"):
        Parts({"data": cursor}).flatten()


def test_a_capture_of_other_objects_is_refused_before_anything_changes() -> None:
    model = nn.Linear(2, 2)
    layout, blob = taken(Parts({"model": nn.Linear(2, 2), "data": Cursor()}))
    with pytest.raises(RunError, match=r"first that differs: 'data'\): all workers must build"):
        Parts({"model": model}).restore(layout, blob)
    layout, blob = taken(Parts({"model": nn.Linear(3, 2)}))
    before = model.weight.detach().clone()
    with pytest.raises(
        RunError, match=r"model.weight is \(2, 2\) of torch.float32 here and \(2, 3"
    ):
        Parts({"model": model}).restore(layout, blob)
    layout, blob = taken(Parts({"model": nn.Linear(2, 2, bias=False)}))
    with pytest.raises(RunError, match=r"the capture lacks model.bias: all workers must build"):
        Parts({"model": model}).restore(layout, blob)
    with pytest.raises(RunError, match=r"has 3 bytes where its table names \d+: fetch it again"):
        Parts({"model": model}).restore(layout, blob[:3])
    assert torch.equal(model.weight, before)


def test_regimes_of_plain_modules() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    name, reason = Parts({"model": model, "optimizer": optimizer}).regime()
    assert (name, reason) == (
        "all sharded",
        "one shard: no peer holds any tensor, so everything is sent",
    )
    name, reason = Parts({"model": model, "optimizer": optimizer}, shard=1, world=2).regime()
    assert name == "all sharded"
    assert reason.startswith("no peer holds model.weight and 1 more tensors (0.00 MB)")
    assert "belong to a plain module: wrap it in DistributedDataParallel or fully_shard" in reason
    marked = Parts({"model": replicated(model), "optimizer": optimizer}, shard=1, world=2)
    assert marked.regime()[0] == "replicated"
    assert {leaf.shards for leaf in marked.flatten().fixed} == {(0, 1)}
    optimizer.shard_local_state = True
    name, reason = marked.regime()
    assert name == "optimizer sharded"
    assert "the state of 'optimizer' is held here alone and is sent" in reason


def test_shard_local_state_is_sent_and_its_parameters_are_not() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.shard_local_state = True
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parts = Parts({"model": replicated(model), "optimizer": optimizer}, shard=0, world=2)
    layout, _ = taken(parts)
    sets = {leaf.role: leaf.shards for leaf in layout.leaves}
    assert sets == {"param": (0, 1), "optimizer": (0,)}
    # weight (2, 2) and bias (2,): exp_avg, exp_avg_sq and step, each leaf aligned to 16 bytes.
    assert layout.sent == 2 * (3 * 16) + 32
    assert [(r.shards, r.offset) for r in layout.replicated] == [((0, 1), layout.prefix)]
    assert layout.replica_sets()[0].bytes == 64


def test_replicated_needs_to_know_its_peers() -> None:
    stages = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with pytest.raises(UserError, match=r"part 'ema' is marked replicated\(\), but the models are"):
        Parts({"model": stages, "ema": replicated(nn.Linear(1, 1))}, shard=0, world=2)
