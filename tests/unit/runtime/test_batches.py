"""A loader that gives its batches back, and one that is positioned anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from planaria import Batches
from planaria.errors import DataError, UserError


def loader(samples: int = 6) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(list(range(samples)), batch_size=None)


def test_it_goes_on_epoch_after_epoch_and_tells_the_sampler() -> None:
    told: list[int] = []
    data = Batches(loader(3), set_epoch=told.append)
    assert [next(data) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert told == [0, 1, 2]


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 6, 7, 11])
def test_batches_of_a_broken_attempt_are_given_again_without_fetching(taken: int) -> None:
    fetched: list[int] = []

    class Counted(StatefulDataLoader[Any]):
        def __iter__(self) -> Any:
            for item in super().__iter__():
                fetched.append(item)
                yield item

    data = Batches(Counted(list(range(5)), batch_size=None))
    for _ in range(taken):
        next(data)
    state = data.state_dict()
    broken = [next(data) for _ in range(3)]
    count = len(fetched)
    data.load_state_dict(state)
    assert [next(data) for _ in range(3)] == broken
    assert len(fetched) == count
    assert next(data) == (taken + 3) % 5


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 13])
def test_a_new_owner_is_positioned_to_the_sample(taken: int) -> None:
    old, new = Batches(loader()), Batches(loader())
    for _ in range(taken):
        next(old)
    state = old.state_dict()
    new.load_state_dict(state)
    assert [next(new) for _ in range(8)] == [next(old) for _ in range(8)]
    assert new.state_dict() == old.state_dict()


def test_a_way_back_beyond_what_is_kept_positions_the_loader_anew() -> None:
    data = Batches(loader(), keep=2)
    next(data)
    state = data.state_dict()
    for _ in range(4):
        next(data)
    data.load_state_dict(state)
    assert [next(data) for _ in range(3)] == [1, 2, 3]


def test_a_loader_that_was_positioned_and_not_begun_is_positioned_again() -> None:
    """Two ways back in a row to the same number, out of different states."""
    first, second = Batches(loader(6)), Batches(loader(3))
    for _ in range(4):
        next(first)
        next(second)
    data = Batches(loader(6))
    data.load_state_dict(first.state_dict())
    state = second.state_dict()
    data.load_state_dict(state)
    assert data.state_dict() == state
    # One sample of the second epoch was taken.
    assert next(data) == 1


def test_the_state_is_not_changed_by_going_on() -> None:
    data = Batches(loader())
    next(data)
    state = data.state_dict()
    before = repr(state)
    for _ in range(9):
        next(data)
    assert repr(state) == before


def test_a_loader_without_state_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        Batches([1, 2, 3])
    assert str(caught.value) == (
        "Batches got a list without state_dict(): use torchdata's StatefulDataLoader, or make the "
        "batch a function of attempt.step and shard"
    )


def test_an_empty_data_set_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError) as caught:
        next(Batches(loader(0)))
    assert str(caught.value) == "the loader gave no batch in epoch 1: its data set is empty"


def test_a_loader_with_forked_workers_is_refused() -> None:
    forked = StatefulDataLoader([1, 2], num_workers=2, multiprocessing_context="fork")
    with pytest.raises(UserError) as caught:
        Batches(forked)
    assert str(caught.value) == (
        "Batches got a StatefulDataLoader whose 2 worker processes are forked from a process with "
        "threads, may hang, and keep its connections open after it has died: give the loader "
        'multiprocessing_context="forkserver"'
    )


OWNER = """
import os, time
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from planaria import Batches

class Pids(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid(), os.environ.get("FIRST", "")

def first(number):
    os.environ["FIRST"] = f"init {number}"

if __name__ == "__main__":
    loader = StatefulDataLoader(
        Pids(), batch_size=None, num_workers=1, worker_init_fn=first,
        multiprocessing_context="forkserver",
    )
    print(*next(Batches(loader)), flush=True)
    time.sleep(60)
"""


def test_workers_of_a_loader_end_with_the_process_that_owns_it(tmp_path: Path) -> None:
    """Nothing else would end them: they and their fork server would keep each other alive."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, said = owner.stdout.readline().strip().split(" ", 1)
    assert said == "init 0"
    process = psutil.Process(int(pid))
    server = process.parent()
    assert server is not None
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gone, alive = psutil.wait_procs([process, server], timeout=20)
    assert {p.pid for p in gone} == {process.pid, server.pid}, alive
