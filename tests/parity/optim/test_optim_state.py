"""State that is saved, restored, re-sharded; gradients that come late, twice or not at all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_worlds import give, good, gradients, parameters, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from planaria.optim import AdamS, Scape, Sharded

KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"density": 0.1, "dense_steps": 3},
    "moved": {"density": 0.1, "unsent": "moved"},
    "feedback": {"density": 0.1, "buffer": "feedback"},
    "local": {"density": 0.1, "unsent": "local", "dense_steps": 3},
}


def build(kind: str, params: Any) -> Any:
    if kind == "sharded":
        return Sharded(torch.optim.AdamW, params, lr=1e-2, bucket_bytes=600)
    return Scape(params, lr=1e-2, bucket_bytes=600, **KINDS[kind])


def steps(optimizer: Any, params: Any, rank: int, span: range) -> None:
    for step in span:
        optimizer.zero_grad()
        give(params, gradients(step, rank))
        optimizer.step()


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def locals_of(state: Any) -> list[torch.Tensor]:
    found = []
    for entry in state["state"].values():
        for value in entry.values():
            found.append(value.to_local() if isinstance(value, DTensor) else value)
    return [torch.as_tensor(v).clone() for v in found]


def resume_worker(rank: int, world: int) -> dict[str, bool]:
    found = {}
    for kind in ("sharded", *KINDS):
        params = parameters(dtype=torch.bfloat16 if kind in ("moved", "sharded") else torch.float32)
        optimizer = build(kind, params)
        keys = {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}
        steps(optimizer, params, rank, range(5))
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in params]
        steps(optimizer, params, rank, range(5, 9))
        after = [p.detach().clone() for p in params], locals_of(optimizer.state_dict())
        same_keys = keys == {k: sorted(v) for k, v in saved["state"].items()}

        steps(optimizer, params, rank, range(20, 22))
        give(params, gradients(99, rank))
        pointers = [t.data_ptr() for t in live(optimizer)]
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(saved)
        in_place = pointers == [t.data_ptr() for t in live(optimizer)]
        steps(optimizer, params, rank, range(5, 9))
        again = [p.detach().clone() for p in params], locals_of(optimizer.state_dict())
        found[kind] = (
            same_keys and in_place and equal(after[0], again[0]) and equal(after[1], again[1])
        )
    return found


def live(optimizer: Any) -> list[torch.Tensor]:
    if isinstance(optimizer, Sharded):
        masters = [unit.master for unit in optimizer.units]
        return [t for m in masters for t in (m, optimizer.inner.state[m]["exp_avg"])]
    return list(optimizer.family.tensors().values())


@pytest.mark.parametrize("world", [1, 3])
def test_a_restored_state_continues_to_the_bit_and_in_place(world: int) -> None:
    for found in good(run(resume_worker, world)):
        assert found == dict.fromkeys(("sharded", *KINDS), True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(9, 4, generator=generator))
        self.b = nn.Parameter(torch.randn(5, generator=generator))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.c = nn.Parameter(torch.randn(2, 3, 2, generator=generator))


def train_model(model: Model, optimizer: Any, world: int, span: range) -> None:
    """The same gradients on every worker, so that runs of different sizes may be compared."""
    for step in span:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for p in (model.a, model.b, model.c):
            loss = loss + (p * torch.randn(p.shape, generator=generator)).sum()
        loss.backward()
        optimizer.step()


def save_worker(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    model = Model()
    optimizer = Sharded(torch.optim.AdamW, model.parameters(), lr=1e-2)
    train_model(model, optimizer, world, range(4))
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    train_model(model, optimizer, world, range(4, 7))
    return [p.detach() for p in model.parameters()]


def load_worker(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    model = Model()
    optimizer = Sharded(torch.optim.AdamW, model.parameters(), lr=1e-2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train_model(model, optimizer, world, range(4, 7))
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_a_checkpoint_of_sharded_loads_at_another_world_size(
    tmp_path: Path, before: int, after: int
) -> None:
    expected = good(run(save_worker, before, str(tmp_path)))[0]
    for found in good(run(load_worker, after, str(tmp_path))):
        # Means of equal gradients over 2, 3 or 4 workers differ by a rounding of the division by 3.
        for x, y in zip(expected, found, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def portable_worker(rank: int, world: int, folder: str, kind: str, load: bool) -> Any:
    model = Model()
    optimizer = Scape(model.parameters(), lr=1e-2, **KINDS[kind])
    if load:
        with optimizer.mean_model():
            state = {"model": model.state_dict(), "optimizer": optimizer.portable_state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_portable_state_dict(state["optimizer"])
        loaded = optimizer.portable_state_dict()
        assert int(loaded["count"]) == 6
        full = {
            f"{index}.{name}": value.full_tensor()
            for index, entry in loaded["state"].items()
            for name, value in entry.items()
        }
        train_model(model, optimizer, world, range(6, 9))
        return [p.detach() for p in model.parameters()], full
    train_model(model, optimizer, world, range(6))
    with optimizer.mean_model():
        saved = optimizer.portable_state_dict()
        dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=folder)
    full = {
        f"{index}.{name}": value.full_tensor()
        for index, entry in saved["state"].items()
        for name, value in entry.items()
    }
    train_model(model, optimizer, world, range(6, 9))
    return [p.detach() for p in model.parameters()], full


@pytest.mark.parametrize("kind", ["frozen", "local"])
def test_a_portable_state_of_scape_loads_at_another_world_size(tmp_path: Path, kind: str) -> None:
    _, saved = good(run(portable_worker, 2, str(tmp_path), kind, False))[0]
    for weights, loaded in good(run(portable_worker, 3, str(tmp_path), kind, True)):
        assert saved.keys() == loaded.keys()
        for name, value in saved.items():
            # The mean of three equal first moments may be off by the rounding of the division.
            torch.testing.assert_close(value, loaded[name], rtol=1e-6, atol=1e-7, msg=name)
        assert all(torch.isfinite(w).all() for w in weights)


def gradient_worker(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def pair() -> Any:
        params = parameters()
        return params, Sharded(AdamS, params, lr=1e-2, bucket_bytes=300)

    def ends(change: Any) -> list[torch.Tensor]:
        params, optimizer = pair()
        for step in range(3):
            optimizer.zero_grad()
            change(params, optimizer, step)
            optimizer.step()
        return [p.detach() for p in params]

    def plain(params: Any, optimizer: Any, step: int) -> None:
        give(params, [2 * g for g in gradients(step, rank)])

    def twice(params: Any, optimizer: Any, step: int) -> None:
        give(params, gradients(step, rank))
        give(params, gradients(step, rank))

    def accumulated(params: Any, optimizer: Any, step: int) -> None:
        with optimizer.no_sync():
            give(params, gradients(step, rank))
        give(params, gradients(step, rank))

    def edited(params: Any, optimizer: Any, step: int) -> None:
        give(params, gradients(step, rank))
        if rank == 0:
            for p in params:
                p.grad.mul_(2)
        else:
            for p in params:
                p.grad = p.grad * 2

    def given_up(params: Any, optimizer: Any, step: int) -> None:
        give(params, gradients(step + 50, rank))
        optimizer.zero_grad()
        give(params, [2 * g for g in gradients(step, rank)])

    expected = ends(plain)
    for change in (twice, accumulated, edited, given_up):
        found[change.__name__] = equal(expected, ends(change))
    return found


def test_gradients_that_change_after_they_left_are_sent_again() -> None:
    for found in good(run(gradient_worker, 3)):
        assert found == {"twice": True, "accumulated": True, "edited": True, "given_up": True}


def unused_worker(rank: int, world: int, kind: str) -> list[torch.Tensor]:
    params = parameters()
    optimizer = build(kind, params)
    for step in range(4):
        optimizer.zero_grad()
        grads = gradients(step, rank)
        used = [i for i in range(len(params)) if (i + rank + step) % 3]
        give([params[i] for i in used], [grads[i] for i in used])
        loss = torch.ones(1)
        dist.all_reduce(loss)  # a collective of the user's, between backward and step
        assert loss.item() == world
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind", ["sharded", "frozen"])
def test_a_gradient_that_is_none_on_one_worker_counts_as_zero(kind: str) -> None:
    world = 3
    found = good(run(unused_worker, world, kind))
    assert all(equal(found[0], other) for other in found[1:])
    if kind == "sharded":
        params = parameters()
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        for step in range(4):
            for i, p in enumerate(params):
                total = torch.zeros_like(p)
                for rank in range(world):
                    if (i + rank + step) % 3:
                        total = total + gradients(step, rank)[i]
                p.grad = total / world
            optimizer.step()
        assert equal(found[0], [p.detach() for p in params])


def clip_worker(rank: int, world: int) -> Any:
    params = parameters()
    optimizer = Sharded(AdamS, params, lr=1e-2, max_norm=0.5)
    steps(optimizer, params, rank, range(3))
    sparse_params = parameters()
    sparse = Scape(sparse_params, lr=1e-2, density=0.1, max_norm=0.5)
    steps(sparse, sparse_params, rank, range(1))
    return [p.detach() for p in params], optimizer.norm, sparse.norm


def test_clipping_uses_the_norm_of_the_mean_and_the_root_mean_square_of_norms() -> None:
    world = 2
    params = parameters()
    reference = AdamS(params, lr=1e-2)
    norm = torch.zeros(())
    for step in range(3):
        for p, g, h in zip(params, gradients(step, 0), gradients(step, 1), strict=True):
            p.grad = (g + h) / 2
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        reference.step()
    squares = [sum(float(g.double().square().sum()) for g in gradients(0, r)) for r in range(2)]
    for found, dense_norm, sparse_norm in good(run(clip_worker, world)):
        for x, y in zip(found, params, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-5, atol=1e-6)
        assert dense_norm == pytest.approx(float(norm), rel=1e-5)
        assert sparse_norm == pytest.approx((sum(squares) / 2) ** 0.5, rel=1e-5)


def user_edit_worker(rank: int, world: int) -> bool:
    params = parameters(dtype=torch.bfloat16)
    optimizer = Sharded(AdamS, params, lr=0.0, weight_decay=0.0)
    with torch.no_grad():
        for p in params:
            p.fill_(3.0)
    steps(optimizer, params, rank, range(1))
    return all(bool((p == 3.0).all()) for p in params)


def test_weights_that_the_user_loads_win_over_their_masters() -> None:
    assert good(run(user_edit_worker, 2)) == [True, True]


def raw_worker(rank: int, world: int) -> dict[str, bool]:
    """As the runtime does: state is copied, and written in place, tensor by tensor."""
    found = {}
    for kind in ("sharded", *KINDS):
        params = parameters()
        optimizer = build(kind, params)
        steps(optimizer, params, rank, range(5))
        live = state_tensors(optimizer)
        kept = [t.clone() for t in live], [p.detach().clone() for p in params]
        versions = [t._version for t in live]
        if rank == 0:
            # Only here: nothing of it may be a collective, or wait for the mask under way.
            optimizer.state_dict()
        optimizer.zero_grad()
        give(params, gradients(98, rank))
        quiet = versions == [t._version for t in live]
        optimizer.step()
        steps(optimizer, params, rank, range(5, 9))
        after = [p.detach().clone() for p in params]

        give(params, gradients(99, rank))
        optimizer.abandon()
        with torch.no_grad():
            torch._foreach_copy_(live, kept[0])
            torch._foreach_copy_([p.detach() for p in params], kept[1])
        optimizer.restored()
        optimizer.zero_grad()
        give(params, gradients(98, rank))
        optimizer.step()
        steps(optimizer, params, rank, range(5, 9))
        found[kind] = quiet and equal(after, [p.detach() for p in params])
    return found


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for entry in optimizer.state.values():
        for value in entry.values():
            held = value.to_local() if isinstance(value, DTensor) else value
            found.setdefault(held.data_ptr(), held)
    return list(found.values())


def test_state_that_is_copied_and_written_in_place_continues_to_the_bit() -> None:
    for found in good(run(raw_worker, 3)):
        assert found == dict.fromkeys(("sharded", *KINDS), True)


LARGE = ((130, 100), (3,), (64, 129))


def large_worker(rank: int, world: int) -> Any:
    """Parts that are updated where they lie, beside small ones that are not."""

    def grads(step: int, who: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7 * step + who)
        return [torch.randn(shape, generator=generator) for shape in LARGE]

    def fresh() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in LARGE]

    plain = fresh()
    unsharded = torch.optim.AdamW(plain, lr=1e-2)
    params = fresh()
    optimizer = Sharded(torch.optim.AdamW, params, lr=1e-2)
    moved = []
    for step in range(4):
        for i, p in enumerate(plain):
            total = grads(step, 0)[i]
            for who in range(1, world):
                total = total + grads(step, who)[i]
            p.grad = total / world
        unsharded.step()
        optimizer.zero_grad()
        give(params, grads(step, rank))
        versions = [p._version for p in params]
        optimizer.step()
        moved.append(all(p._version > v for p, v in zip(params, versions, strict=True)))
        if step == 1:
            # The user gives a weight another memory, and another value.
            for p in (plain[0], params[0]):
                p.data = p.detach().clone() + 1
    return equal([p.detach() for p in plain], [p.detach() for p in params]), moved


@pytest.mark.parametrize("world", [1, 3])
def test_large_parts_are_updated_where_they_lie(world: int) -> None:
    for same, moved in good(run(large_worker, world)):
        assert same
        assert all(moved)


def vectors_worker(rank: int, world: int) -> Any:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    plain = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    sparse: Any = Scape(params, lr=1e-2, density=0.1)
    dense = Sharded(AdamS, plain, lr=1e-2)
    for step in range(4):
        for optimizer, those in ((sparse, params), (dense, plain)):
            optimizer.zero_grad()
            give(those, [torch.full((n,), float(rank + step)) for n in (5, 3)])
            optimizer.step()
    return equal([p.detach() for p in params], [p.detach() for p in plain])


def test_a_model_of_vectors_only_is_sent_whole() -> None:
    assert good(run(vectors_worker, 2)) == [True, True]


def as_documented(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = Model()
    optimizer = Scape(model.parameters(), lr=1e-2, group=mesh["dp"], density=0.01, dense_steps=0.1)
    train_model(model, optimizer, world, range(3))
    groups = {group for _, group in optimizer.replica_groups()}
    return [p.detach() for p in model.parameters()], groups == {mesh["dp"].get_group()}


def test_the_line_that_the_documentation_begins_with() -> None:
    """Without the length of the run; every trained parameter is held by all of the axis."""
    found = good(run(as_documented, 2))
    for weights, held in found:
        assert held
        assert all(torch.equal(x, y) for x, y in zip(weights, found[0][0], strict=True))
        assert not torch.equal(weights[0], Model().a)
