"""Dense inside a node by FSDP2, sharded and sparse between nodes: two nodes of two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_worlds import good, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from planaria.errors import PlanariaError
from planaria.optim import AdamS, Scape, Sharded, sharded


class Net(nn.Module):
    """Ten rows are cut into five and five, these into three and two; one row leaves workers none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.outer(torch.tanh(self.inner(x)))))


def nodes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def cut(mesh: DeviceMesh) -> Net:
    model = Net()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, step: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(31 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    loss.backward()
    return float(loss.detach())


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    return whole(model)


def whole(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        held = p.detach()
        found.append(held.full_tensor() if isinstance(held, DTensor) else held.clone())
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def dense_worker(rank: int, world: int) -> dict[str, Any]:
    mesh = nodes()
    native = cut(mesh)
    expected = train(native, AdamS(native.parameters(), lr=1e-2), rank, range(6))
    between: dict[str, Any] = {"lr": 1e-2, "group": mesh["replicate"]}
    found: dict[str, Any] = {}
    for name, make in {
        "frozen": lambda p: Scape(p, density=1.0, **between),
        "local": lambda p: Scape(p, density=1.0, unsent="local", **between),
        "sharded": lambda p: Sharded(AdamS, p, **between),
    }.items():
        model = cut(mesh["shard"])
        found[name] = equal(train(model, make(model.parameters()), rank, range(6)), expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "LARGE", 1)
        model = cut(mesh["shard"])
        optimizer: Any = Sharded(AdamS, model.parameters(), **between)
        assert any(unit.in_place for unit in optimizer.units)
        found["in place"] = equal(train(model, optimizer, rank, range(6)), expected)

    clipped = cut(mesh)
    plain = AdamS(clipped.parameters(), lr=1e-2)
    model = cut(mesh["shard"])
    optimizer = Scape(model.parameters(), density=1.0, max_norm=0.1, **between)
    for step in range(3):
        plain.zero_grad()
        backward(clipped, step, rank)
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
        plain.step()
        train(model, optimizer, rank, range(step, step + 1))
        assert isinstance(norm, DTensor)
        # The norm is a sum in another order, and the factor follows it.
        torch.testing.assert_close(optimizer.norm, float(norm.full_tensor()), rtol=1e-5, atol=0)
    for a, b in zip(whole(clipped), whole(model), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    return found


def test_density_one_equals_fsdp2s_own_hybrid_sharding_bit_for_bit() -> None:
    # Sums of two and divisions by two are exact in any order, so there is no tolerance.
    for found in good(run(dense_worker, 4)):
        assert found == {"frozen": True, "local": True, "sharded": True, "in place": True}


def sparse_worker(rank: int, world: int, unsent: str) -> Any:
    mesh = nodes()
    options: dict[str, Any] = {"lr": 1e-2, "density": 0.2, "dense_steps": 4, "unsent": unsent}
    options["group"] = mesh["replicate"]
    model = cut(mesh["shard"])
    optimizer = Scape(model.parameters(), **options)
    held = [p.detach().to_local() for p in model.parameters()]
    twins = [nn.Parameter(h.clone()) for h in held if h.numel()]
    twin = Scape(twins, **options)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        losses.append(backward(model, step, rank))
        kept = [
            p.grad.to_local().clone() for p in model.parameters() if isinstance(p.grad, DTensor)
        ]
        for p, grad in zip(twins, [g for g in kept if g.numel()], strict=True):
            p.grad = grad
        optimizer.step()
        twin.step()
    same = equal([h for h in held if h.numel()], [p.detach() for p in twins])
    own = whole(model)
    with optimizer.mean_model():
        mean = whole(model)
    assert equal(own, whole(model))
    return (
        same,
        sum(losses[:5]),
        sum(losses[-5:]),
        own,
        mean,
        optimizer.replica_groups()[0][1] is None,
    )


@pytest.mark.parametrize("unsent", ["frozen", "local"])
def test_between_nodes_a_shard_is_a_weight_like_any_other(unsent: str) -> None:
    found = good(run(sparse_worker, 4, unsent))
    for same, before, after, own, mean, alone in found:
        assert same
        assert after < before / 2
        assert equal(found[0][4], mean)
        # Ranks 0 and 1 are one node, 2 and 3 the other.
        assert equal(found[0][3], own) or unsent == "local"
        assert alone == (unsent == "local")
    assert equal(found[0][3], found[2][3]) == (unsent == "frozen")


def bad_worker(rank: int, world: int) -> Any:
    mesh = nodes()
    model = cut(mesh["shard"])
    optimizer = Scape(model.parameters(), group=mesh["replicate"], density=0.2, dense_steps=1)
    messages = []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, rank)
        before = whole(model)
        if rank == 2:
            grad = model.inner.weight.grad
            assert isinstance(grad, DTensor)
            grad.to_local()[0, 0] = torch.nan
        try:
            optimizer.step()
        except PlanariaError as error:
            messages.append((str(error), equal(before, whole(model))))
        train(model, optimizer, rank, range(step, step + 1))

    def refused(params: Any, group: Any) -> str:
        try:
            Scape(params, group=group)
        except PlanariaError as error:
            return str(error)
        return "accepted"

    mixed = Net()
    fully_shard(mixed, mesh=mesh["shard"], ignored_params={mixed.last.bias})
    odd = cut(mesh["shard"])
    with torch.no_grad():
        if rank == 1:
            odd.inner.weight.to_local().add_(1)
    refusals = [
        refused(cut(init_device_mesh("cpu", (4,))).parameters(), None),
        refused(cut(mesh["shard"]).parameters(), mesh["shard"]),
        refused(cut(mesh).parameters(), mesh["replicate"]),
        refused(mixed.parameters(), mesh["replicate"]),
        refused(odd.parameters(), mesh["replicate"]),
    ]
    return messages, refusals


def test_bad_input_between_nodes_ends_in_one_error_on_every_worker() -> None:
    found = good(run(bad_worker, 4))
    for messages, refusals in found:
        assert [unchanged for _, unchanged in messages] == [True, True]
        # A dense step sees it in the mean, at its owner; a sparse one at the worker that has it.
        dense, sparse = (message for message, _ in messages)
        assert dense.startswith("a gradient is NaN or infinite on worker")
        assert sparse == (
            "a gradient is NaN or infinite on worker 1; nothing was changed: lower the learning "
            "rate, or set nonfinite='skip' to leave such steps out"
        )
        whole_world, inside, hybrid, mixed, odd = refusals
        assert whole_world.startswith(
            "parameter 0 is cut over workers of this group, which keep no"
        )
        assert whole_world.endswith(
            'give the optimizer the axis between nodes, group=mesh["replicate"]'
        )
        assert inside == whole_world
        assert hybrid.startswith("parameter 0 is placed as (Replicate(), Shard(dim=0)) over ")
        assert hybrid.endswith(
            "so FSDP2 itself sends every gradient between nodes and nothing is saved: use "
            'fully_shard(model, mesh=mesh["shard"]) and group=mesh["replicate"]'
        )
        assert mixed == (
            "parameter 5 is a plain tensor and parameter 0 a DTensor; pass the whole model to "
            "fully_shard, or build one optimizer for each kind"
        )
        assert odd.startswith("a weight differs between workers (")
    assert "among those of shard 1" in found[0][1][4]


def save_worker(rank: int, world: int, folder: str) -> Any:
    mesh = nodes()
    states: dict[str, Any] = {}
    for name, model, optimizer in both(mesh, cut(mesh["shard"]), cut(mesh["shard"])):
        train(model, optimizer, rank, range(6))
        states[name] = state_of(model, optimizer)
    dcp.save(states, checkpoint_id=folder)
    return {name: full(state) for name, state in states.items()}


def load_worker(rank: int, world: int, folder: str) -> Any:
    mesh = nodes() if world == 4 else None
    models = (Net(), Net()) if mesh is None else (cut(mesh["shard"]), cut(mesh["shard"]))
    found: dict[str, Any] = {}
    for name, model, optimizer in both(mesh, *models):
        state = {name: state_of(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state[name]["model"])
        if isinstance(optimizer, Scape):
            optimizer.load_portable_state_dict(state[name]["optimizer"])
            assert int(optimizer.count) == 6
        else:
            set_optimizer_state_dict(model, optimizer, state[name]["optimizer"])
        found[name] = full(state_of(model, optimizer))
        train(model, optimizer, rank, range(6, 8))
        assert all(bool(torch.isfinite(w).all()) for w in whole(model))
    return found


def both(mesh: DeviceMesh | None, a: nn.Module, b: nn.Module) -> Any:
    group = None if mesh is None else mesh["replicate"]
    options: dict[str, Any] = {"lr": 1e-2, "group": group}
    return [
        ("scape", a, Scape(a.parameters(), density=0.2, dense_steps=2, **options)),
        ("sharded", b, Sharded(torch.optim.AdamW, b.parameters(), **options)),
    ]


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, Scape):
        return {"model": model.state_dict(), "optimizer": optimizer.portable_state_dict()}
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path, value in sorted(dict(flat(state)).items()):
        found[path] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def flat(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}/{key}")
    elif isinstance(value, torch.Tensor):
        yield path, value


@pytest.mark.parametrize("world", [4, 3])
def test_a_checkpoint_loads_over_other_nodes_and_over_none(tmp_path: Path, world: int) -> None:
    saved = good(run(save_worker, 4, str(tmp_path)))[0]
    for found in good(run(load_worker, world, str(tmp_path))):
        for name in ("scape", "sharded"):
            assert saved[name].keys() == found[name].keys()
            for path, value in saved[name].items():
                # The mean of equal first moments may be off by the rounding of the division by 3.
                torch.testing.assert_close(value, found[name][path], rtol=1e-6, atol=1e-7, msg=path)
