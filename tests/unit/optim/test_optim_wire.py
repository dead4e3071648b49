"""Numbers on the wire in few bits: error bounds, sizes, blocks of zeros."""

from __future__ import annotations

import pytest
import torch

from planaria.optim import wire
from planaria.optim.options import WIRES
from planaria.optim.plan_comm import VALUE_BYTES


def numbers(rows: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    # Scales that differ by a million within a row show whether blocks keep their own.
    size = torch.logspace(-6, 0, count)
    return torch.randn(rows, count, generator=generator) * size


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_each_value_is_off_by_at_most_half_a_unit_of_its_block(
    kind: str, levels: int, count: int
) -> None:
    values = numbers(3, count)
    sent = wire.encode(values, kind)
    found = wire.decode(sent, count, kind, dtype=torch.float32)
    assert found.shape == values.shape
    for begin in range(0, count, wire.BLOCK):
        block = values[:, begin : begin + wire.BLOCK]
        largest = block.abs().amax(1, keepdim=True)
        # Half a unit, and the rounding of a product in float32.
        bound = largest / levels * (0.5 + 1e-5)
        assert ((found[:, begin : begin + wire.BLOCK] - block).abs() <= bound).all()


@pytest.mark.parametrize("count", [1, 7, 256, 1001])
def test_bytes_are_those_that_the_plan_counts(count: int) -> None:
    values = numbers(2, count)
    blocks = -(-count // wire.BLOCK)
    assert wire.encode(values, "int8").shape == (2, count + 4 * blocks)
    assert wire.encode(values, "int4").shape == (2, -(-count // 2) + 4 * blocks)
    assert set(VALUE_BYTES) == set(WIRES)
    for kind in WIRES:
        sent = wire.encode(numbers(2, 1 << 14), kind)
        assert sent.numel() * sent.element_size() == 2 * (1 << 14) * VALUE_BYTES[kind]


@pytest.mark.parametrize("kind", WIRES)
def test_zeros_stay_zeros_beside_a_block_that_is_not(kind: str) -> None:
    values = torch.zeros(2, 600)
    values[1, 300] = -3.5
    found = wire.decode(wire.encode(values, kind), 600, kind, dtype=torch.float32)
    assert torch.equal(found, values)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_encoding_what_was_decoded_changes_nothing(kind: str) -> None:
    once = wire.decode(wire.encode(numbers(4, 900), kind), 900, kind, dtype=torch.float32)
    twice = wire.decode(wire.encode(once, kind), 900, kind, dtype=torch.float32)
    # The scale is computed anew from a product, which rounds.
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)


def test_plain_wires_are_the_values() -> None:
    values = numbers(2, 300)
    same = wire.decode(wire.encode(values, "float32"), 300, "float32", dtype=torch.float32)
    assert torch.equal(same, values)
    half = wire.decode(wire.encode(values, "bfloat16"), 300, "bfloat16", dtype=torch.float32)
    assert torch.equal(half, values.bfloat16().float())


@pytest.mark.parametrize("kind", WIRES)
def test_rows_may_lie_side_by_side_anywhere_in_memory(kind: str) -> None:
    one, two = numbers(1, 333), numbers(1, 333) * 2
    sent = [wire.encode(values, kind) for values in (one, two)]
    # An odd number of bytes before the first, as where several kinds share a buffer.
    buffer = torch.cat([sent[0][:, :1], *sent], dim=1)
    for values, part, alone in zip((one, two), buffer[:, 1:].chunk(2, dim=1), sent, strict=True):
        found = wire.decode(part, 333, kind, dtype=torch.float32)
        assert torch.equal(found, wire.decode(alone, 333, kind, dtype=torch.float32))
        assert torch.allclose(found, values, rtol=0, atol=values.abs().max().item() / 14)
