"""Layouts, the two-slot rule, and captures beside the training."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import nn

from planaria.errors import CommError, EpochSuperseded, RunError, UserError
from planaria.runtime.memory import slots
from planaria.runtime.memory.layout import MAX_LAYOUT_BYTES, Layout, LeafEntry, LeafSpec, lay_out
from planaria.runtime.memory.parts import Parts
from planaria.runtime.memory.snapshot import Buffers, Capture, Held, Occupancy, Slot, choose


def spec(path: str, shape: tuple[int, ...], *, later: bool = True, shards: Any = (1,)) -> LeafSpec:
    return LeafSpec("m", path, "float32", shape, "param", later, shards)


def example() -> Layout:
    return lay_out(
        [
            spec("a", (5,), shards=(0, 1)),
            spec("b", (3, 2)),
            spec("c", (), later=False),
            spec("d", (0, 4)),
            spec("e", (17,), shards=(0, 1)),
            spec("f", (1,), later=False, shards=(1, 2)),
        ],
        generation=4,
        shard=1,
        skeleton=b"bones",
    )


def test_regions_lie_small_sent_replicated_and_aligned() -> None:
    layout = example()
    offsets = {leaf.path: (leaf.offset, leaf.nbytes) for leaf in layout.leaves}
    assert offsets == {
        "c": (0, 4),
        "b": (64, 24),
        "d": (96, 0),
        "a": (128, 20),
        "e": (160, 68),
        "f": (256, 4),
    }
    assert (layout.small, layout.sent, layout.prefix, layout.total) == (64, 64, 128, 320)
    assert [(r.shards, r.offset, r.nbytes) for r in layout.replicated] == [
        ((0, 1), 128, 128),
        ((1, 2), 256, 64),
    ]
    assert layout.region(()).nbytes == 128
    assert layout.region((1, 2)).offset == 256
    with pytest.raises(
        RunError, match=r"no tensors with the replica set \(1, 3\) \(it has: \(0, 1"
    ):
        layout.region((1, 3))


def test_a_layout_survives_the_wire() -> None:
    assert Layout.decode(example().encode()) == example()


def changed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(example(), **fields))


def moved(index: int, **fields: Any) -> bytes:
    leaves = list(example().leaves)
    leaves[index] = msgspec.structs.replace(leaves[index], **fields)
    return changed(leaves=tuple(leaves))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (example().encode()[:-3], "cannot be read (Input data was truncated)"),
        (changed(generation=-1), "contradicts itself (a negative number)"),
        (changed(small=63), "contradicts itself (a region that is not aligned)"),
        (changed(total=640), "(regions of 320 bytes in a buffer of 640)"),
        (changed(replicated=()), "(regions of 128 bytes in a buffer of 320)"),
        (moved(1, nbytes=28), "(m.b of shape (3, 2) in 28 bytes)"),
        (moved(1, dtype="object"), "(m.b of dtype object and shape (3, 2))"),
        (moved(1, offset=0), "(m.b at 0)"),
        (moved(1, offset=112), "(m.b ends at 136, beyond its region's end 128)"),
        (moved(4, offset=144), "(m.e at 144)"),
        (moved(4, shards=(0, 9)), "(m.e ends at 228, beyond its region's end -1)"),
    ],
)
def test_a_layout_from_a_peer_is_not_believed(data: bytes, message: str) -> None:
    with pytest.raises(CommError) as caught:
        Layout.decode(data)
    assert message in str(caught.value)
    assert "start all workers from one version of planaria" in str(caught.value)


def test_a_layout_is_bounded() -> None:
    with pytest.raises(CommError, match=r"a peer's table of a capture has \d+ bytes, more than"):
        Layout.decode(memoryview(bytearray(MAX_LAYOUT_BYTES + 1)))


def test_a_dtype_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(UserError, match=r"m\.q has dtype qint8, which cannot be protected: keep"):
        lay_out([LeafSpec("m", "q", "qint8", (1,), "param", True, (0,))], generation=0, shard=0)


def test_regions_of_peers_are_compared_leaf_by_leaf() -> None:
    mine = lay_out([spec("a", (2,)), spec("b", (3,), shards=(0, 1))], generation=1, shard=1)
    theirs = lay_out([spec("b", (3,), shards=(0, 1))], generation=1, shard=0)
    mine.same_region(theirs, (0, 1))
    other = lay_out([spec("c", (3,), shards=(0, 1))], generation=1, shard=0)
    with pytest.raises(RunError, match=r"shards 1 and 0 disagree about the tensors that shards"):
        mine.same_region(other, (0, 1))


def test_the_rule_gives_its_reason() -> None:
    empty = Occupancy()
    assert choose([empty, empty], generation=0, announced=-1) == (0, "slot 0 is empty")
    full = [Occupancy(3), Occupancy(4)]
    assert choose(full, generation=5, announced=4) == (
        0,
        "generation 3 is older than 4, committed for all",
    )
    assert choose(full, generation=5, announced=3) == (
        None,
        "the slots hold generation 3, generation 4, and 3 is the newest committed for all",
    )
    read = [Occupancy(3, busy=True), Occupancy(4)]
    assert choose(read, generation=5, announced=4)[1].startswith(
        "the slots hold generation 3 in use, generation 4"
    )
    assert choose(full, generation=4, announced=4) == (None, "generation 4 has a slot already")


def fill(pair: Buffers, generation: int) -> Slot:
    slot = pair.begin(generation)
    assert slot is not None
    assert pair.complete(slot, layout=example())
    return slot


def test_buffers_follow_the_announcements() -> None:
    buffers = Buffers()
    fill(buffers, 0)
    fill(buffers, 1)
    assert buffers.captured() == (0, 1)
    assert buffers.begin(2) is None
    buffers.announce(0, epoch=0)
    assert buffers.begin(2) is None
    buffers.announce(1, epoch=0)
    buffers.announce(0, epoch=0)
    assert buffers.announced == 1
    fill(buffers, 2)
    assert buffers.captured() == (1, 2)


def test_what_is_newer_than_the_target_is_void_and_its_writer_is_told() -> None:
    buffers = Buffers()
    fill(buffers, 4)
    slot = buffers.begin(5)
    assert slot is not None
    buffers.void_after(4)
    # Its memory is still being written, so the next capture may not have it, nor 4's.
    assert buffers.begin(5) is None
    assert not buffers.complete(slot, layout=example())
    assert buffers.captured() == (4,)
    fill(buffers, 5)
    assert buffers.captured() == (4, 5)
    buffers.void_after(3)
    assert buffers.captured() == ()


def test_a_slot_that_is_read_is_not_overwritten() -> None:
    buffers = Buffers()
    fill(buffers, 0)
    fill(buffers, 1)
    buffers.announce(1, epoch=0)
    with buffers.reading(0) as slot:
        assert slot is not None
        assert buffers.begin(2) is None
        assert "generation 0 in use" in buffers.reason
    assert buffers.begin(2) is slot
    with buffers.reading(7) as nothing:
        assert nothing is None


def test_waiting_for_a_slot_ends_by_announcement_or_interruption() -> None:
    buffers = Buffers()
    fill(buffers, 0)
    fill(buffers, 1)
    timer = threading.Timer(0.05, buffers.announce, (1,), {"epoch": 0})
    timer.start()
    slot = buffers.begin(2, wait=10.0)
    assert slot is not None
    buffers.complete(slot, layout=example())
    timer.join()
    timer = threading.Timer(0.05, buffers.interrupt, (2,))
    timer.start()
    with pytest.raises(EpochSuperseded, match=r"generation 3 was not stored \(the slots hold gen"):
        buffers.begin(3, wait=10.0, epoch=1)
    timer.join()
    assert buffers.begin(3, wait=0.01) is None


def test_held_copies_by_shard() -> None:
    held = Held()
    for shard in (2, 5):
        slot, reason = held.begin(shard, 7)
        assert slot is not None
        assert reason == "slot 0 is empty"
        assert held.complete(slot, layout=example())
    slot, _ = held.begin(5, 8)
    assert slot is not None
    assert held.held() == {2: (7,), 5: (7,)}
    held.keep([5])
    assert held.held() == {5: (7,)}
    held.abandon(slot)
    held.drop(5, 7)
    assert held.held() == {}


def test_buffers_grow_and_are_touched() -> None:
    slot = Slot()
    slot.reserve(5)
    assert slot.memory.numel() == slots.GRAIN
    memory = slot.memory
    slot.reserve(100)
    assert slot.memory is memory
    slot.reserve(slots.GRAIN + 1)
    assert slot.memory.numel() == 2 * slots.GRAIN
    assert int(slot.memory.sum()) == 0
    with Buffers(reserve=3)._reading(0, 0) as nothing:
        assert nothing is None


WORLD = 3
KINDS = ("step", "capture", "copied", "push", "pushed", "announce")
Move = tuple[int, int]
SCHEDULE = st.tuples(
    st.lists(
        st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, WORLD - 1)),
        min_size=1,
        max_size=150,
    ),
    st.integers(0, WORLD - 1),
)


@dataclasses.dataclass
class Worker:
    live: int = 0
    tried: int = -1
    """Newest generation whose capture was begun or skipped."""
    buffers: Buffers = dataclasses.field(default_factory=Buffers)
    held: Held = dataclasses.field(default_factory=Held)
    filling: Slot | None = None
    sending: tuple[int, Slot] | None = None
    acknowledged: set[int] = dataclasses.field(default_factory=set)


class Cluster:
    """Workers that step together and do all else in any order; shard s is held by s + 1."""

    def __init__(self) -> None:
        self.workers = [Worker() for _ in range(WORLD)]

    def move(self, kind: str, index: int) -> None:
        getattr(self, f"_{kind}")(self.workers[index], index)

    def _step(self, worker: Worker, index: int) -> None:
        # The step's collective needs everyone at the end of the step before; the optimizer's
        # hook needs the copy to be over.
        ready = all(w.live > worker.live or w.tried == w.live for w in self.workers)
        if ready and min(w.live for w in self.workers) >= worker.live and worker.filling is None:
            worker.live += 1

    def _capture(self, worker: Worker, index: int) -> None:
        if worker.tried == worker.live:
            return
        worker.filling = worker.buffers.begin(worker.live)
        worker.tried = worker.live

    def _copied(self, worker: Worker, index: int) -> None:
        if worker.filling is not None:
            worker.buffers.complete(worker.filling, layout=example())
            worker.filling = None

    def _push(self, worker: Worker, index: int) -> None:
        due = [g for g in worker.buffers.captured() if g not in worker.acknowledged]
        if worker.sending is None and due:
            slot, _ = self.holder(index).held.begin(index, due[0])
            worker.sending = (due[0], slot) if slot is not None else None

    def _pushed(self, worker: Worker, index: int) -> None:
        if worker.sending is not None:
            generation, slot = worker.sending
            self.holder(index).held.complete(slot, layout=example())
            worker.acknowledged.add(generation)
            worker.sending = None

    def _announce(self, worker: Worker, index: int) -> None:
        if self.committed >= 0:
            worker.buffers.announce(self.committed, epoch=0)
            worker.held.announce(self.committed, epoch=0)

    def holder(self, index: int) -> Worker:
        return self.workers[(index + 1) % WORLD]

    @property
    def committed(self) -> int:
        return max(set.intersection(*(w.acknowledged for w in self.workers)), default=-1)

    def recoverable(self, lost: int) -> bool:
        """Whether some generation exists for every shard without worker ``lost``."""
        sets = [
            {*self.holder(lost).held.held().get(lost, ())},
            *({*w.buffers.captured(), w.live} for i, w in enumerate(self.workers) if i != lost),
        ]
        return bool(set.intersection(*sets))


def survives(schedule: tuple[list[Move], int]) -> bool:
    """Whether one loss, after ``schedule``, leaves a generation; before the first commit none is
    promised."""
    moves, lost = schedule
    cluster = Cluster()
    for kind, index in moves:
        cluster.move(KINDS[kind], index)
    return cluster.committed < 0 or cluster.recoverable(lost)


def local_rule(occupied: Any, *, generation: int, announced: int) -> tuple[int | None, str]:
    """ "The free buffer": the older of the two, whatever others have."""
    if any(slot.generation == generation for slot in occupied):
        return None, "there already"
    free = [i for i, slot in enumerate(occupied) if not slot.busy]
    if not free:
        return None, "both are written"
    return min(free, key=lambda i: -1 if (g := occupied[i].generation) is None else g), "older"


def eager() -> st.SearchStrategy[tuple[list[Move], int]]:
    """Schedules in which whole rounds happen, so that commits do."""
    round_ = st.permutations([(k, w) for k in range(len(KINDS)) for w in range(WORLD)])
    rounds = st.lists(round_, min_size=1, max_size=12).map(lambda rs: [m for r in rs for m in r])
    return st.tuples(rounds, st.integers(0, WORLD - 1))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(SCHEDULE, eager()))
def test_with_the_global_rule_any_single_loss_leaves_a_generation(
    schedule: tuple[list[Move], int],
) -> None:
    assert survives(schedule)


def test_the_schedules_reach_commits() -> None:
    """Without commits the property above would say nothing."""
    cluster = Cluster()
    for _ in range(6):
        for kind in KINDS:
            for index in range(WORLD):
                cluster.move(kind, index)
    assert cluster.committed == 5
    assert all(w.live == 5 for w in cluster.workers)


def test_with_the_local_rule_a_loss_can_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "choose", local_rule)
    moves, lost = find(
        eager(),
        lambda schedule: not survives(schedule),
        settings=settings(
            max_examples=3000,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    monkeypatch.undo()
    assert survives((moves, lost))


def test_skipping_one_by_one_ends_all_commits() -> None:
    """Why a capture is waited for: 0 skips generation 2 and 1 does not, and no later generation can
    ever be captured by both."""
    first, second = Buffers(), Buffers()
    for buffers in (first, second):
        fill(buffers, 0)
        fill(buffers, 1)
    second.announce(1, epoch=0)
    assert first.begin(2) is None
    fill(second, 2)
    first.announce(1, epoch=0)
    fill(first, 3)
    assert set(first.captured()) & set(second.captured()) == {1}
    assert first.begin(4) is None
    assert second.begin(4) is None


def job(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer, Parts]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, Parts({"model": model, "optimizer": optimizer})


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 10 s"
        time.sleep(0.001)


def test_captures_go_on_beside_the_training_and_announce_themselves() -> None:
    model, optimizer, parts = job()
    buffers, done, digests = Buffers(), [], {}
    capture = Capture(buffers, on_complete=done.append)

    def before_step(*_: Any) -> None:
        capture.wait_copied()

    optimizer.register_step_pre_hook(before_step)
    for generation in range(4):
        digests[generation] = parts.digest()
        taken = capture.capture(parts, generation=generation, wait=5.0)
        assert taken.taken, taken.reason
        assert taken.prefix == taken.nbytes > 0
        step(model, optimizer)
        until(lambda g=generation: g in done)  # type: ignore[misc]
        buffers.announce(generation, epoch=0)
    assert done == [0, 1, 2, 3]
    assert buffers.captured() == (2, 3)
    for generation in (2, 3):
        with buffers.reading(generation) as slot:
            assert slot is not None
            assert slot.layout is not None
            parts.restore(slot.layout, slot.memory)
            assert parts.digest() == digests[generation]
            hasher = xxhash.xxh3_64(slot.layout.encode())
            hasher.update(slot.bytes(0, slot.layout.prefix))
            assert slot.checksum == hasher.intdigest()
    capture.close()


def test_the_layout_is_kept_while_the_tensors_are() -> None:
    model, optimizer, parts = job()
    capture = Capture(Buffers())
    step(model, optimizer)
    layouts = []
    for generation in (1, 2):
        capture.capture(parts, generation=generation)
        capture.wait_copied()
        plan = capture._plan
        assert plan is not None
        layouts.append(plan.layout)
    assert layouts[0] is layouts[1]
    capture.close()


def test_buffers_that_change_at_once_are_copied_at_once() -> None:
    model, _, parts = job()
    gate = threading.Event()
    buffers = Buffers()
    capture = Capture(buffers, on_event=lambda name: gate.wait(10) and None)
    mean = model[1].running_mean.clone()
    capture.capture(parts, generation=0)
    # The next forward begins while the copying thread is held up in the middle of its copy.
    model(torch.randn(4, 64))
    assert not torch.equal(model[1].running_mean, mean)
    assert buffers.captured() == ()
    gate.set()
    capture.wait_copied()
    until(lambda: buffers.captured() == (0,))
    with buffers.reading(0) as slot:
        assert slot is not None
        assert slot.layout is not None
        parts.restore(slot.layout, slot.memory)
    assert torch.equal(model[1].running_mean, mean)
    capture.close()


def test_the_optimizer_waits_for_the_copy() -> None:
    _, _, parts = job()
    gate = threading.Event()
    names: list[str] = []

    def hold(name: str) -> None:
        names.append(name)
        gate.wait(10)

    capture = Capture(Buffers(), on_event=hold)
    capture.capture(parts, generation=0)
    threading.Timer(0.1, gate.set).start()
    assert capture.wait_copied() > 0.05
    assert capture.wait_copied() == 0.0
    assert names == ["capture"]
    capture.close()


def test_an_error_in_the_copying_thread_reaches_the_training() -> None:
    _, _, parts = job()

    def fail(name: str) -> None:
        raise OSError("no memory left")

    buffers = Buffers()
    capture = Capture(buffers, on_event=fail)
    capture.capture(parts, generation=0)
    with pytest.raises(
        RunError, match=r"could not be captured \(OSError: no memory left\): this worker is not"
    ):
        capture.wait_copied()
    assert buffers.captured() == ()
    assert buffers.begin(0) is not None
    capture.close()


def test_a_capture_without_a_slot_says_why() -> None:
    _, _, parts = job()
    buffers = Buffers()
    capture = Capture(buffers)
    for generation in (0, 1):
        assert capture.capture(parts, generation=generation).taken
    skipped = capture.capture(parts, generation=2, wait=0.01)
    assert not skipped.taken
    assert skipped.waited >= 0.01
    assert (
        skipped.reason
        == ("the slots hold generation 0, generation 1, and -1 is the newest committed for all")
        or "in use" in skipped.reason
    )
    capture.close()


def test_a_state_that_cannot_be_taken_apart_leaves_the_slot_empty() -> None:
    buffers = Buffers()
    capture = Capture(buffers)
    with pytest.raises(UserError, match="is on the meta device"):
        capture.capture(Parts({"m": nn.Linear(1, 1, device="meta")}), generation=0)
    assert buffers.begin(0) is not None
    capture.close()


def test_leaf_entries_are_plain() -> None:
    leaf = example().leaves[0]
    assert isinstance(leaf, LeafEntry)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(leaf), type=LeafEntry) == leaf
