"""Checkpoints that are asked for, on the coordinator's side, and how long a launcher waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.support.membership_run import Run, recover, training

from planaria.errors import UserError
from planaria.runtime import messages
from planaria.runtime.control import protocol as control
from planaria.runtime.coordinator import journal, publish
from planaria.runtime.coordinator.chronicle import Chronicle
from planaria.runtime.coordinator.crowd import Crowd
from planaria.runtime.coordinator.saving import Saving
from planaria.runtime.launch import stopping
from planaria.runtime.launch.screen import Screen
from planaria.runtime.membership import events

STOP = control.SaveCheckpoint(reason="stopped by SIGTERM", then_stop=True)


class Streams(Crowd):
    """Keeps what workers are sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, messages.SaveDurable]] = []

    def send(self, worker: str, message: messages.FromCoordinator) -> None:
        assert isinstance(message, messages.SaveDurable)
        self.told.append((worker, message))

    @property
    def asked(self) -> list[int]:
        """Generations that the owner of shard 0 was asked for."""
        return [message.at for worker, message in self.told if worker == "w0"]


class Desk:
    """A :class:`Saving` with a journal on disk, and what it has fed to membership."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.crowd = Streams()
        self.fed: list[events.AnyEvent] = []
        self.lines: list[str] = []
        self.book = journal.Journal(out / "journal.jsonl")
        self.saving = Saving(
            out,
            run="r",
            world=3,
            keep=2,
            chronicle=Chronicle(self.book, show=lambda line: self.lines.append(line.text)),
            apply=self.fed.append,
        )

    def ask(self, run: Run, body: control.SaveCheckpoint = STOP) -> str:
        return self.saving.ask(body, state=run.state, crowd=self.crowd).note

    async def publish(self, generation: int) -> None:
        folder = publish.partial_path(self.out, generation, epoch=1)
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"):
            (folder / name).touch()
        await self.saving.publish(events.Publish(generation=generation, epoch=1))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.book.close()


def resumed() -> Run:
    """A run that has gone on from generation 40 on the disk, and has committed nothing since."""
    run = Run(3)
    run.state = replace(run.state, durable=40)
    run.attach("w0", "w1", "w2")
    for shard in range(3):
        run.report(shard, live=40)
    return run.restore()


def test_nobody_is_past_the_generation_that_is_asked_for(desk: Desk) -> None:
    assert desk.ask(training()) == "a durable checkpoint is written after the running attempt"
    assert sorted(worker for worker, _ in desk.crowd.told) == ["w0", "w1", "w2"]
    assert desk.crowd.asked == [6]


def test_a_run_that_has_just_gone_on_from_the_disk_is_asked_for_what_will_come(desk: Desk) -> None:
    run = resumed()
    assert (run.state.committed, run.state.phase) == (None, "training")
    desk.ask(run)
    assert desk.crowd.asked == [42]


def test_who_asks_twice_moves_no_goal(desk: Desk) -> None:
    """A worker may be between the first and the second by now, and another not."""
    run = training()
    desk.ask(run, control.SaveCheckpoint(reason="by request"))
    assert desk.ask(run.commit(5)) == "a durable checkpoint was asked for already"
    assert desk.crowd.asked == [6]
    asyncio.run(desk.publish(6))
    assert events.StopRequested in [type(event) for event in desk.fed]


def test_a_checkpoint_that_was_under_way_is_not_the_one_that_was_asked_for(desk: Desk) -> None:
    desk.ask(training())
    asyncio.run(desk.publish(4))
    assert desk.fed == [events.Published(generation=4)]
    asyncio.run(desk.publish(6))
    assert desk.fed[1:] == [
        events.Published(generation=6),
        events.StopRequested(
            reason="stopped by SIGTERM, after the durable checkpoint of generation 6", exit_code=0
        ),
    ]


def test_what_is_asked_for_in_a_recovery_is_told_after_it(desk: Desk) -> None:
    run = training().feed(events.Lost("w1", reason="x"))
    assert desk.ask(run) == "a durable checkpoint is written after the recovery"
    assert desk.crowd.asked == []
    # The epoch before has still written its own: that is no answer.
    asyncio.run(desk.publish(4))
    before = recover(run).state
    desk.saving.follow(before, run.restore().state, crowd=desk.crowd)
    assert desk.crowd.asked == [run.state.plan.generation + 2]


def test_a_run_that_forms_has_nothing_to_write(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.ask(Run(3))
    assert str(caught.value) == (
        "the run is forming: a durable checkpoint can be written while it trains; ask again then"
    )


def test_the_end_waits_for_the_folder_that_is_being_named(desk: Desk) -> None:
    async def use() -> list[int]:
        saving = asyncio.create_task(desk.publish(4))
        await asyncio.sleep(0)
        await desk.saving.settled()
        found = publish.published(desk.out)
        await saving
        return found

    assert asyncio.run(use()) == [4]


def test_one_that_cannot_be_written_ends_the_run_that_was_to_stop_after_it(desk: Desk) -> None:
    desk.ask(training())
    lost = events.Discard(generation=6, epoch=1, reason="shard 1 could not write: disk full")
    asyncio.run(desk.saving.discard(lost))
    line = "no durable checkpoint of generation 6: shard 1 could not write: disk full"
    assert desk.fed == [events.StopRequested(reason=f"stopped by SIGTERM; {line}", exit_code=1)]
    assert desk.lines == [line]


@pytest.fixture
def wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, list[str]]]:
    """What is added to the reason of the end, and what the user reads meanwhile."""
    config = SimpleNamespace(out=tmp_path, timeout=0.2)  # shorter than a run may have

    def call(*, phase: str = "training", after: float | None = None) -> tuple[str, list[str]]:
        async def use() -> str:
            over = asyncio.Event()
            if after is not None:
                asyncio.get_running_loop().call_later(after, over.set)
            screen = Screen()
            added = await stopping.wait_saved(over, config=config, phase=phase, screen=screen)
            screen.close()
            return added

        added = asyncio.run(use())
        return added, capsys.readouterr().out.splitlines()

    return call


def test_a_long_step_is_waited_for(
    tmp_path: Path, wait: Callable[..., tuple[str, list[str]]]
) -> None:
    assert wait(after=0.01) == ("", [])
    line = (
        "planaria: the checkpoint waits for the running steps or evaluation, 3.8 s more at most; "
        f"there is no checkpoint in {tmp_path} to go on from; once more stops at once"
    )
    assert wait(after=0.4) == ("", [line])


def test_where_no_checkpoint_comes_the_newest_is_named(
    tmp_path: Path, wait: Callable[..., tuple[str, list[str]]]
) -> None:
    folder = publish.complete_path(tmp_path, 40)
    folder.mkdir(parents=True)
    (folder / publish.COMPLETE).touch()
    # For want of a spare: it would be waited for ten times as long as that.
    assert wait(phase="waiting") == (
        f"; no checkpoint was written within 0.2 s; the newest checkpoint is {folder}",
        [],
    )
