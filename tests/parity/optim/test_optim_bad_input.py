"""Bad input ends in one clear error on every worker, and nothing hangs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optim_worlds import Raised, give, good, gradients, parameters, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from planaria.errors import PlanariaError
from planaria.optim import AdamS, Scape, ScapeOptions, Sharded
from planaria.optim.checks import OptionError, StateError


def layer() -> list[nn.Parameter]:
    return list(nn.Linear(8, 8).parameters())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"density": 0.0}, "density is 0; give a share of the weights in (0, 1]"),
        ({"density": 1.5}, "density is 1.5; give a share of the weights in (0, 1]"),
        ({"density": -0.1}, "density is -0.1; give a share of the weights in (0, 1]"),
        ({"density": math.nan}, "density is nan; give a share of the weights in (0, 1]"),
        ({"unsent": "lost"}, "unsent is 'lost'; choose one of frozen, moved, local"),
        (
            {"dense_steps": 2.5},
            "dense_steps is 2.5; give a count of steps or a share of them in [0, 1)",
        ),
        ({"total_steps": 0}, "total_steps is 0; give a number at least 1"),
        (
            {"dense_steps": -1},
            "dense_steps is -1; give a count of steps or a share of them in [0, 1)",
        ),
        ({"lr": -0.1}, "lr is -0.1; give a number at least 0"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'; choose one of raise, skip"),
        ({"refresh": 0}, "refresh is 0; give a number at least 1"),
        ({"cycle_run": 0}, "cycle_run is 0; give a number at least 1"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1; give a number in [0, 1)"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0; give a number at least 1"),
        ({"max_norm": -1.0}, "max_norm is -1; give a number at least 0"),
    ],
)
def test_bad_options_of_scape(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Scape(layer(), **choices)
    assert str(caught.value) == message


def test_a_share_of_dense_steps_is_counted_from_the_run_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Scape(layer(), dense_steps=0.1, total_steps=250).options.dense_steps == 25
    assert Scape(layer(), dense_steps=30, total_steps=250).options.dense_steps == 30
    assert ScapeOptions(density=0.03).period == 33
    assert [ScapeOptions(density=d).run for d in (0.01, 0.05)] == [1, 16]
    assert ScapeOptions(density=0.01, cycle_run=4).run == 4
    assert caplog.messages == []
    # As the quickest example has it, without the length of the run.
    assert Scape(layer(), lr=1e-3, density=0.01, dense_steps=0.1).options.dense_steps == 1000
    assert caplog.messages == [
        "dense_steps is 0.1, a share of the run, and total_steps is not given: the first 1000 "
        "steps are dense; give total_steps=, or the count itself"
    ]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            [nn.Parameter(torch.tensor(1.0))],
            "parameter 0 has no dimension to cut; give it the shape (1,) instead of ()",
        ),
        (
            [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).int(), requires_grad=False)],
            "parameter 1 is of torch.int32; only real floating-point weights are trained",
        ),
        (
            [nn.Parameter(torch.ones(2, dtype=torch.complex64))],
            "parameter 0 is of torch.complex64; only real floating-point weights are trained",
        ),
        (
            [nn.Parameter(torch.ones(2), requires_grad=False)],
            "no parameter has requires_grad=True; give at least one that has",
        ),
    ],
)
@pytest.mark.parametrize("cls", ["scape", "sharded"])
def test_parameters_that_cannot_be_cut(cls: str, params: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Scape(params) if cls == "scape" else Sharded(torch.optim.AdamW, params)
    assert str(caught.value) == message


def test_scape_refuses_mixed_master_dtypes_and_foreign_memory_formats() -> None:
    mixed = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]
    with pytest.raises(OptionError) as caught:
        Scape(mixed)
    assert str(caught.value) == (
        "parameters are updated in torch.float32 and torch.float64; give them one of the two, or "
        "build one optimizer for each"
    )
    with pytest.raises(OptionError) as caught:
        Scape([nn.Parameter(torch.ones(4, 2).t())])
    assert str(caught.value) == (
        "parameter 0 is not contiguous, and single weights are written into it; make it "
        "contiguous before the optimizer is built"
    )
    with pytest.raises(OptionError) as caught:
        Scape([nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))], decay="all")
    assert str(caught.value) == (
        "decay is 'all' and a parameter is of half precision, where a step's decay is rounded "
        "away; use decay='lazy'"
    )


@pytest.mark.parametrize(
    ("factory", "options", "beginning"),
    [
        (torch.optim.Adafactor, {}, "Adafactor with {} cannot be sharded: its update of a tensor"),
        (torch.optim.NAdam, {}, "NAdam with {} cannot be sharded: its first step is special"),
        (torch.optim.Rprop, {}, "Rprop with {} cannot be sharded: its first step is special"),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "dampening": 0.5},
            "SGD with {'momentum': 0.9, 'dampening': 0.5} cannot be sharded: its first step",
        ),
        (
            torch.optim.Muon,
            {},
            "Muon cannot be sharded: with {} it does not run on a flat tensor",
        ),
    ],
)
def test_optimizers_that_do_not_fit_are_found_by_trying(
    factory: Any, options: dict[str, Any], beginning: str
) -> None:
    with pytest.raises(OptionError) as caught:
        Sharded(factory, layer(), **options)
    assert str(caught.value).startswith(beginning)


def test_a_group_that_is_added_later_is_refused() -> None:
    optimizer = Scape(layer())
    with pytest.raises(OptionError) as caught:
        optimizer.add_param_group({"params": layer()})
    assert str(caught.value) == (
        "a parameter group is added to a sharded optimizer that is already laid out; build a new "
        "one with all groups and load the old state into it"
    )


def test_a_state_of_other_parameters_is_refused() -> None:
    saved = copy.deepcopy(Scape(layer()).state_dict())
    with pytest.raises(StateError) as caught:
        Scape(list(nn.Linear(8, 9).parameters())).load_state_dict(saved)
    assert str(caught.value) == (
        "the saved 'moment' has (72,) elements and this model over 1 workers needs (81,); load a "
        "state of the same model and number of workers, or use load_portable_state_dict"
    )
    with pytest.raises(StateError) as caught:
        Scape(layer(), unsent="local").load_state_dict(saved)
    assert str(caught.value) == (
        "the saved state holds ['chosen', 'count', 'first', 'layout', 'left', 'moment', 'since'] "
        "and Scape(unsent='local') needs ['anchor', 'count', 'layout', 'moment', 'velocity']; load "
        "a state that Scape made with the same options"
    )
    turned = Scape([nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))])
    with pytest.raises(StateError) as caught:
        turned.load_state_dict(
            Scape([nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2))]).state_dict()
        )
    assert str(caught.value).startswith(
        "the saved state was laid out for other shapes, groups or bucket_bytes (layout "
    )
    adamw = Sharded(torch.optim.AdamW, layer())
    with pytest.raises(StateError) as caught:
        adamw.load_state_dict(Sharded(torch.optim.AdamW, layer()[:1]).state_dict())
    assert str(caught.value) == (
        "the saved groups hold [1] parameters and this optimizer's hold [2]; load it into an "
        "optimizer with the same parameters in the same groups"
    )
    with pytest.raises(StateError) as caught:
        adamw.load_state_dict(Sharded(torch.optim.SGD, layer(), momentum=0.9).state_dict())
    assert "lacks ['exp_avg', 'exp_avg_sq', 'step']" in str(caught.value)
    small = [nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8))]
    with pytest.raises(StateError) as caught:
        adamw.load_state_dict(Sharded(torch.optim.AdamW, small).state_dict())
    assert "has the shape (4, 8) and this model needs (8, 8)" in str(caught.value)


def test_a_lone_process_without_a_group_trains() -> None:
    for optimizer_class in (Scape, Sharded):
        params = parameters()
        before = [p.detach().clone() for p in params]
        optimizer: Any = (
            Scape(params, lr=1e-2, density=0.1)
            if optimizer_class is Scape
            else Sharded(AdamS, params, lr=1e-2)
        )
        for step in range(3):
            optimizer.zero_grad()
            give(params, gradients(step, 0))
            optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def different_worker(rank: int, world: int) -> list[Raised]:
    def shapes() -> list[nn.Parameter]:
        return list(nn.Linear(8, 8 + rank).parameters())

    def frozen_layers() -> list[nn.Parameter]:
        torch.manual_seed(0)
        params = layer()
        params[1].requires_grad_(rank == 0)
        return params

    def weights() -> list[nn.Parameter]:
        torch.manual_seed(rank)
        return layer()

    found = []
    for make in (shapes, frozen_layers, weights):
        try:
            Scape(make())
        except PlanariaError as error:
            found.append(Raised(type(error).__name__, str(error)))
    return found


def test_workers_that_differ_all_say_so() -> None:
    parts = [
        ("the set of parameters (shapes, dtypes, groups) differs", "on every worker"),
        ("the set of parameters", "frozen layers on every worker"),
        ("a weight differs between workers", "before it is optimized"),
    ]
    for found in good(run(different_worker, 3)):
        assert [raised.name for raised in found] == ["ReplicaError"] * 3
        for raised, (beginning, end) in zip(found, parts, strict=True):
            assert raised.message.startswith(beginning)
            assert raised.message.endswith(end)


def nonfinite_worker(rank: int, world: int, kind: str) -> Any:
    return [nonfinite_step(rank, kind, nonfinite) for nonfinite in ("raise", "skip")]


def nonfinite_step(rank: int, kind: str, nonfinite: str) -> Any:
    params = parameters()
    optimizer: Any = (
        Sharded(AdamS, params, nonfinite=nonfinite)
        if kind == "sharded"
        else Scape(params, density=0.1, unsent=kind, nonfinite=nonfinite)
    )
    give(params, gradients(0, rank))
    optimizer.step()
    optimizer.zero_grad()
    kept = [p.detach().clone() for p in params]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    grads = gradients(1, rank)
    if rank == 1:
        grads[0][0, 0] = math.nan
    give(params, grads)
    message = ""
    try:
        optimizer.step()
    except PlanariaError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(kept, params, strict=True))
    if kind != "sharded":
        now = optimizer.state_dict()["state"]["scape"]
        same = same and all(torch.equal(v, now[k]) for k, v in state["scape"].items())
    optimizer.zero_grad()
    give(params, gradients(2, rank))
    optimizer.step()
    return message, same, all(bool(torch.isfinite(p).all()) for p in params)


@pytest.mark.parametrize("kind", ["sharded", "frozen", "local"])
def test_a_nan_on_one_worker_changes_nothing_anywhere(kind: str) -> None:
    for (message, *raised), skipped in good(run(nonfinite_worker, 3, kind)):
        assert message.startswith("a gradient is NaN or infinite on worker 1; nothing was changed")
        assert message.endswith(
            "; nothing was changed: lower the learning rate, or set nonfinite='skip' to leave "
            "such steps out"
        )
        assert raised == [True, True]
        assert skipped == ("", True, True)


def tampered_worker(rank: int, world: int) -> str:
    params = parameters()
    optimizer = Scape(params, density=0.1, check_every=2)
    for step in range(4):
        optimizer.zero_grad()
        give(params, gradients(step, rank))
        if step == 1 and rank == 1:
            with torch.no_grad():
                params[0][:] += 1
        try:
            optimizer.step()
        except PlanariaError as error:
            return f"{step}: {error}"
    return ""


def test_a_weight_changed_behind_the_optimizer_on_one_worker_is_found() -> None:
    for message in good(run(tampered_worker, 2)):
        assert message.startswith("2: before step 2 masks or weights differ between workers (")
        assert message.endswith(
            "something else than the optimizer changed them: restore a checkpoint"
        )


def refusals(rank: int, world: int) -> dict[str, Any]:
    """What is refused, by a short name; a callable that is to raise on every worker."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    fsdp = nn.Linear(8, 8)
    fully_shard(fsdp, mesh=init_device_mesh("cpu", (world,)))
    other = copy.deepcopy(Scape([nn.Parameter(torch.ones(8, 9))]).state_dict())
    fewer = copy.deepcopy(Sharded(torch.optim.AdamW, [nn.Parameter(torch.ones(8))]).state_dict())
    portable = Scape([nn.Parameter(torch.ones(8, 9))]).portable_state_dict()
    torch.manual_seed(0)
    scape = Scape(layer())
    sharded = Sharded(torch.optim.AdamW, layer())
    own = copy.deepcopy(scape.state_dict())
    integer = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    return {
        "density 0": lambda: Scape(layer(), density=0.0),
        "density above 1": lambda: Scape(layer(), density=1.01),
        "two axes": lambda: Scape(layer(), group=mesh),
        "resharded": lambda: Scape(fsdp.parameters()),
        "resharded, sharded": lambda: Sharded(torch.optim.AdamW, fsdp.parameters()),
        "0-d": lambda: Scape([nn.Parameter(torch.tensor(1.0))]),
        "integer": lambda: Sharded(torch.optim.AdamW, [*layer(), integer]),
        "other set": lambda: scape.load_state_dict(other),
        "other set, sharded": lambda: sharded.load_state_dict(fewer),
        "other set, portable": lambda: scape.load_portable_state_dict(portable),
        "other set on one": lambda: scape.load_state_dict(other if rank == 1 else own),
    }


def refused_worker(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, action in refusals(rank, world).items():
        try:
            action()
        except PlanariaError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


CUT = (
    "OptionError: parameter 0 is cut over workers of this group, which keep no whole copy of it, so "
    "single weights cannot be sent back: cut the model inside a node only, as "
    'fully_shard(model, mesh=mesh["shard"]), and give the optimizer the axis between nodes, '
    'group=mesh["replicate"]'
)
OTHER = (
    "StateError: the saved groups hold [1] parameters and this optimizer's hold [2]; load it into an "
    "optimizer with the same parameters in the same groups"
)
REFUSED = {
    "density 0": "OptionError: density is 0; give a share of the weights in (0, 1]",
    "density above 1": "OptionError: density is 1.01; give a share of the weights in (0, 1]",
    "two axes": "OptionError: group is a mesh of 2 axes; give one axis of it, as mesh['dp']",
    "resharded": CUT,
    "resharded, sharded": CUT,
    "0-d": "OptionError: parameter 0 has no dimension to cut; give it the shape (1,) instead of ()",
    "integer": (
        "OptionError: parameter 2 is of torch.int64; only real floating-point weights are trained"
    ),
    "other set": (
        "StateError: the saved 'first' has (3, 27) elements and this model over 3 workers needs "
        "(3, 24); load a state of the same model and number of workers, or use "
        "load_portable_state_dict"
    ),
    "other set, sharded": OTHER,
    "other set, portable": (
        "StateError: the saved 'moment' of parameter 0 has the shape (8, 9) and this model needs "
        "(8, 8); load a state that was saved from the same model"
    ),
}


def test_every_worker_hears_of_bad_input_and_none_hangs() -> None:
    found = good(run(refused_worker, 3))
    for mine in found:
        for name, message in REFUSED.items():
            assert mine[name] == message, name
    blamed = (
        "the state to be loaded does not fit on worker 1, which says why; let every worker load"
    )
    assert found[0]["other set on one"].startswith(f"StateError: {blamed}")
    assert found[2]["other set on one"] == found[0]["other set on one"]
    assert found[1]["other set on one"] == found[1]["other set"]
