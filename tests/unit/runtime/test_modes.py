"""What modules are told to do survives a broken attempt, and reaches a spare."""

from __future__ import annotations

import copy

import torch
from torch import nn

from planaria.runtime.memory.modes import Modes
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.slots import Buffers
from planaria.runtime.memory.snapshot import Capture


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def test_a_fresh_module_costs_nothing() -> None:
    assert Modes({"m": network()}).state_dict() == {
        "m": {"evaluating": [], "frozen": [], "switches": {}}
    }


def test_evaluation_and_freezing_are_put_back() -> None:
    model = network()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    state = Modes({"m": model}).state_dict()
    assert state["m"]["evaluating"] == ["1"]
    assert state["m"]["frozen"] == ["0.weight"]
    other = network().eval()
    Modes({"m": other, "more": nn.Linear(1, 1)}).load_state_dict(state)
    assert [m.training for m in other.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in other.parameters()] == [False, True, True, True]


def test_a_restore_leaves_an_evaluation() -> None:
    model = network()
    parts = Parts({"model": model})
    buffers = Buffers()
    capture = Capture(buffers)
    capture.capture(parts, generation=0)
    capture.wait_copied()
    capture.close()
    before = copy.deepcopy(model.state_dict())
    model.eval()
    model[2].weight.requires_grad_(False)
    with buffers.reading(0) as slot:
        assert slot is not None
        assert slot.layout is not None
        parts.restore(slot.layout, slot.bytes(0, slot.layout.total), only="small")
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
