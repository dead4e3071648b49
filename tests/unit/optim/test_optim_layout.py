"""Who owns what, how masks travel, what a step costs: the pure parts of the optimizers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planaria.errors import CommError, ConfigError
from planaria.optim import masks, measure, param_groups
from planaria.optim.collectives import checksum
from planaria.optim.commands import PlanComm
from planaria.optim.layout import Comb, build, local_shape, pack, parts, unpack
from planaria.optim.options import ScapeOptions
from planaria.optim.plan_comm import (
    CHUNK,
    Arithmetic,
    Job,
    Link,
    advice,
    mask_bytes,
    plan,
    seconds,
    volume,
)

SHAPES = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, world=st.integers(1, 5), bucket_bytes=st.integers(1, 400))
def test_every_weight_has_one_owner_and_comes_back(
    shapes: list[tuple[int, ...]], world: int, bucket_bytes: int
) -> None:
    params = [torch.randn(shape) for shape in shapes]
    layout = build(
        [(i, 0, p) for i, p in enumerate(params)],
        world=world,
        bucket_bytes=bucket_bytes,
        dense=lambda _, __, p: p.ndim <= 1,
    )
    assert sorted(layout.place) == list(range(len(params)))
    assert [b.begin for b in layout.buckets] == [
        sum(b.width for b in layout.buckets[:i]) for i in range(len(layout.buckets))
    ]
    assert [b.dense for b in layout.buckets] == sorted(b.dense for b in layout.buckets)
    for bucket in layout.buckets:
        rows = torch.full((world, bucket.width), torch.nan)
        for slot in bucket.slots:
            whole = params[slot.index]
            pack(whole.reshape(-1), rows, slot)
            back = torch.empty(slot.numel)
            unpack(rows, back, slot)
            assert torch.equal(back, whole.reshape(-1))
            chunks = list(torch.chunk(whole, world))
            for owner in range(world):
                begin, end = slot.part(owner)
                own = chunks[owner] if owner < len(chunks) else whole[:0]
                assert torch.equal(whole.reshape(-1)[begin:end], own.reshape(-1))
                assert local_shape(slot, owner) == tuple(own.shape)
                place = rows[owner, slot.offset : slot.offset + slot.length]
                assert torch.equal(place[: end - begin], own.reshape(-1))
                assert not place[end - begin :].any()
            for own, place in parts(whole.reshape(-1), rows, slot):
                assert torch.equal(own, place)
            pack(None, rows, slot)
            assert not rows[:, slot.offset : slot.offset + slot.length].any()


@settings(max_examples=80, deadline=None)
@given(
    width=st.integers(1, 9000), share=st.floats(0.0, 1.0), seed=st.integers(0, 99), data=st.data()
)
def test_masks_are_exact_deterministic_and_survive_their_codes(
    width: int, share: float, seed: int, data: Any
) -> None:
    count = max(1, round(share * width))
    # Few distinct values, so that ties are the rule.
    score = torch.randint(0, 5, (width,), generator=torch.Generator().manual_seed(seed)).to(
        torch.float32
    )
    chosen = masks.largest(score, count)
    expected = torch.argsort(score, descending=True, stable=True)[:count].sort().values
    assert torch.equal(chosen, expected)
    other = masks.every(width, count, phase=data.draw(st.integers(0, 50)))
    assert len(other.unique()) == count
    for code in ("bitmap", "index"):
        codes = torch.stack([masks.encode(c, width=width, code=code) for c in (chosen, other)])
        assert codes.shape == (2, masks.code_bytes(width, count, code))
        back = masks.decode(codes, width=width, count=count, code=code)
        assert torch.equal(back, torch.stack([chosen, other]))


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(70_000, 90_000),
    share=st.sampled_from([0.0001, 0.01, 0.1, 0.24, 0.5]),
    kind=st.sampled_from(["normal", "ties", "zeros", "ramp", "late", "tiny", "huge"]),
    begin=st.integers(0, 5000),
)
def test_a_choice_by_blocks_is_the_choice_of_all(
    width: int, share: float, kind: str, begin: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    score = torch.rand(width, generator=generator)
    if kind == "ties":
        score = (score * 7).floor()
    elif kind == "zeros":
        score[score < 0.99] = 0.0
    elif kind == "ramp":
        score = torch.arange(width, dtype=torch.float32)
    elif kind == "late":
        # Every column that the sample sees has a high score, so that the guess is too high.
        score[begin :: masks.STRIDE] += 10
    elif kind == "tiny":
        score *= 1e-25
    elif kind == "huge":
        score *= 1e25
    count = max(1, round(share * (width - begin)))
    score *= torch.rand(width, generator=generator).sub(0.5).sign()
    chosen = masks.largest_by(masks.Score(score), begin, width, count)
    assert torch.equal(chosen, begin + masks.largest(score[begin:].abs(), count))
    since = torch.randint(0, 30, (width,), generator=generator).to(torch.float32)
    aged = score.square() * (31 - since)
    chosen = masks.largest_by(masks.Score(score, since, 31), begin, width, count)
    assert torch.equal(chosen, begin + masks.largest(aged[begin:], count))


@settings(max_examples=200, deadline=None)
@given(
    begin=st.integers(0, 40),
    end=st.integers(0, 60),
    run=st.integers(1, 9),
    gap=st.integers(0, 9),
    first=st.integers(0, 50),
    length=st.integers(0, 40),
)
def test_a_comb_finds_its_columns(
    begin: int, end: int, run: int, gap: int, first: int, length: int
) -> None:
    comb = Comb(begin, end, run, run + gap)
    tooth = [c >= begin and c < end and (c - begin) % (run + gap) < run for c in range(120)]
    expected = [c for c in range(first, first + length) if tooth[c]]
    assert comb.count(first, first + length) == len(expected)
    held = torch.arange(first, first + length).repeat(2, 1)
    packed = torch.full((2, len(expected) + 1), -1)
    for wide, narrow in comb.pairs(held, packed, first):
        narrow.copy_(wide)
    assert packed.tolist() == [[*expected, -1]] * 2
    whole = torch.arange(60)
    taken = comb.take(whole)
    assert taken.tolist() == [c for c in range(60) if tooth[c]]
    comb.put(whole, -taken)
    assert whole.tolist() == [-c if tooth[c] else c for c in range(60)]


def test_the_shorter_code_is_taken() -> None:
    assert CHUNK == masks.CHUNK
    for share in (0.01, 0.05, 0.08, 0.09, 0.1, 0.5):
        width, count = 1 << 20, round(share * (1 << 20))
        sizes = {code: masks.code_bytes(width, count, code) for code in ("bitmap", "index")}
        assert masks.code_name(share) == min(sizes, key=lambda code: sizes[code])
        assert mask_bytes(width, count) == min(sizes.values())


def test_a_checksum_depends_on_every_bit_and_on_order() -> None:
    a, b = torch.arange(7.0), torch.arange(5, dtype=torch.bfloat16)
    base = checksum([a, b])
    assert 0 <= base < 2**52
    assert checksum([a.clone(), b]) == base
    assert checksum([b, a]) != base
    assert checksum([a.flip(0), b]) != base
    changed = a.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    assert checksum([changed, b]) != base


def test_param_groups_tell_embeddings_and_vectors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)
            self.inner = nn.Linear(4, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight
            self.inner.bias.requires_grad_(False)

    model = Model()
    groups = param_groups(model, weight_decay=0.2, dense_embeddings=True)
    found = {(g["weight_decay"], g["dense"]): g["params"] for g in groups}
    assert found.keys() == {(0.2, True), (0.0, False), (0.2, False)}
    assert [p is model.table.weight for p in found[0.2, True]] == [True]
    assert [p is model.inner.weight for p in found[0.2, False]] == [True]
    assert len(found[0.0, False]) == 2
    flat = param_groups(model, decay_vectors=True)
    assert [(g["weight_decay"], g["dense"], len(g["params"])) for g in flat] == [(0.1, False, 4)]


def test_volumes_by_hand() -> None:
    job = Job(params=1_000_000, workers=4, dense_params=0, wire="float32")
    dense = volume(job, "dense", 1.0)
    assert (dense.exchange, dense.gather, dense.mask) == (3e6, 3e6, 0)
    frozen = volume(job, "frozen", 0.01)
    assert (frozen.exchange, frozen.gather) == (3e4, 3e4)
    # 250,000 columns: 62 chunks of two bytes and 1,250 pairs of three, to three others.
    assert frozen.mask == 3 * (2 * 62 + 3 * 1250)
    assert dense.total / frozen.total > 60
    coded = Job(params=1_000_000, workers=4, wire="int8")
    # A byte for each value, and four for each 256 of them.
    assert volume(coded, "frozen", 0.01).exchange == 7.5e3 + 4 * 7.5e3 / 256
    assert volume(coded, "moved", 0.01).gather == 7.5e5 + 4 * 7.5e5 / 256
    known = Job(params=1_000_000, workers=4, masked=False)
    assert volume(known, "frozen", 0.01).mask == 0
    assert Job.wire == ScapeOptions.wire
    assert Job.average_moments == ScapeOptions.average_moments
    assert dense.total / volume(job, "frozen", 0.1).total > 8
    assert dense.total / volume(coded, "local", 0.1).total > 8
    assert dense.total / volume(coded, "local", 0.01).total > 60


def test_a_slow_link_pays_and_a_fast_one_does_not() -> None:
    job = Job(params=1_000_000, workers=4, compute=0.1)
    slow = plan(job, Link(mbit=100), (0.1, 0.01))
    assert [(r.method, r.density) for r in slow] == [
        ("dense", 1.0),
        ("frozen", 0.1),
        ("local", 0.1),
        ("frozen", 0.01),
        ("local", 0.01),
    ]
    assert slow[3].speedup > 3.26
    assert advice(slow).startswith("It pays: ")
    fast = plan(Job(params=1_000_000, workers=4, compute=2.0), Link(mbit=100_000), (0.1, 0.01))
    assert advice(fast).startswith("It does not pay here: the best sparse step would be ")
    assert advice(fast).endswith(" times as fast as the dense one; train densely.")
    assert seconds(Job(params=1, workers=1, compute=0.5), Link(mbit=1), "frozen", 0.1) < 0.51


def test_measured_times_take_the_place_of_rates() -> None:
    points = ((1e3, 2e-3), (1e5, 4e-3), (1e6, 94e-3))
    link = Link(mbit=1, latency=1e-3, exchanges=points, gathers=((1e3, 2e-3),))
    # Between the empty collective and the first point, two points, and beyond the last ones.
    assert link.exchange(500) == pytest.approx(1.5e-3)
    assert link.exchange(1e5) == pytest.approx(4e-3)
    assert link.exchange(5.5e5) == pytest.approx(49e-3)
    assert link.exchange(2e6) == pytest.approx(194e-3)
    assert link.gather(2e3) == pytest.approx(3e-3)
    job = Job(params=2_000_000, workers=4, compute=0.1, tensors=10)
    own = Arithmetic(step=1e-3, tensor=1e-4, million=3e-3)
    assert own.seconds(tensors=10, params=2_000_000) == pytest.approx(8e-3)
    fast = Link(mbit=1e9, latency=0)
    rows = plan(job, fast, (0.1,), {("dense", 1.0): own, ("local", 0.1): Arithmetic(million=1e-3)})
    assert [round(row.seconds, 3) for row in rows] == [0.108, 0.11, 0.102]
    assert rows[2].speedup == pytest.approx(0.108 / 0.102, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arithmetic(tensor=-1), "tensor is -1; give a finite number at least 0"),
        (
            lambda: PlanComm(params=1, workers=2, mbit=1, compute=0, measure=3).lines(),
            "measure is 3 and workers is 2; give the workers that share a machine, or 0 to measure "
            "nothing",
        ),
        (lambda: Link(mbit=0), "mbit is 0; give a finite number above 0"),
        (lambda: Link(mbit=1, latency=-1), "latency is -1; give a finite number at least 0"),
        (
            lambda: Link(mbit=1, gather_share=2),
            "gather_share is 2; give a share of the rate in (0, 1]",
        ),
        (lambda: Job(params=0, workers=2), "params is 0; give a finite number above 0"),
        (
            lambda: Job(params=5, workers=2, dense_params=6),
            "dense_params is 6 and the model has 5 weights; give at most as many",
        ),
        (
            lambda: volume(Job(params=5, workers=2), "frozen", 0.0),
            "density is 0; give a share of the weights in (0, 1]",
        ),
        (
            lambda: volume(Job(params=5, workers=2), "lost", 0.5),
            "method is 'lost'; choose one of dense, frozen, moved, local",
        ),
    ],
)
def test_bad_plans_end_in_a_clear_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


def test_the_command_prints_a_table_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    command = PlanComm(params=1_000_000, workers=4, mbit=100, compute=0.2)
    assert command.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,000,000 weights, 4 workers, 100 Mbit/s, 0.2 s of computation"
    assert lines[1].split() == ["method", "density", "sent", "step", "speed-up"]
    assert lines[2].split()[:4] == ["dense", "100.00%", "6.000", "MB"]
    assert len(lines) == 8
    assert lines[-1].startswith("It pays: ")


def test_a_measurement_on_this_machine_enters_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = PlanComm(params=1_000_000, workers=2, mbit=1e6, compute=1e-3, densities=(), measure=1)
    assert command.run() == 0
    lines = capsys.readouterr().out.splitlines()
    dense = lines[2].split()
    assert dense[0] == "dense"
    # Computation, arithmetic and a few messages; the constant is 4 ms.
    assert 0.001 < float(dense[4]) < 1


def test_a_measurement_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(CommError) as caught:
        measure.here(2, workers=2, rows=[("dense", 1.0)])
    assert str(caught.value) == (
        "worker 0 of the measurement failed (it said nothing); leave --measure out, or see planaria "
        "doctor"
    )


def test_commands_and_plan_load_no_torch() -> None:
    code = "import sys, planaria.optim.commands; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_unknown_names_of_the_package_are_refused() -> None:
    import planaria.optim

    with pytest.raises(AttributeError) as caught:
        _ = planaria.optim.Lion
    assert str(caught.value) == "module 'planaria.optim' has no attribute 'Lion'"
    for name in planaria.optim.__all__:
        assert getattr(planaria.optim, name).__name__ == name
