"""Durable checkpoints get their names: whatever ends the machine in between, none is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_plane import CoordinatorProcess, coordinator

from planaria.errors import CheckpointError, UserError
from planaria.runtime.coordinator import publish
from planaria.runtime.coordinator.publish import complete_path, partial_path, published


class PowerLossError(BaseException):
    """The machine is gone: no handler of the code that it meets may run."""


def write(out: Path, generation: int, text: str, *, epoch: int = 1, parts: int = 2) -> Path:
    """A partial folder as workers leave it."""
    folder = partial_path(out, generation, epoch=epoch)
    folder.mkdir(parents=True)
    for shard in range(parts):
        (folder / f"__{shard}_0.distcp").write_text(text)
    (folder / ".metadata").write_text(text)
    return folder


def put(out: Path, generation: int, *, epoch: int = 1, keep: int = 2) -> Path:
    return publish.publish(out, generation, epoch=epoch, run="r", world=2, keep=keep)


def names(out: Path) -> set[str]:
    return {entry.name for entry in (out / "checkpoints").iterdir()}


def text_of(out: Path, generation: int) -> str:
    """What the checkpoint holds; the same text is in all of its parts, or it is a mixture."""
    (text,) = {
        path.read_text()
        for path in complete_path(out, generation).iterdir()
        if path.name != publish.COMPLETE
    }
    return text


def test_a_checkpoint_counts_once_it_is_published(tmp_path: Path) -> None:
    assert published(tmp_path) == []
    write(tmp_path, 1, "one")
    assert published(tmp_path) == []
    path = put(tmp_path, 1)
    assert (path, published(tmp_path)) == (complete_path(tmp_path, 1), [1])
    assert '"generation": 1' in (path / publish.COMPLETE).read_text()
    (complete_path(tmp_path, 7)).mkdir()
    assert published(tmp_path) == [1], "a folder without its mark is not complete"
    # What a fenced worker of an older epoch writes goes into a folder of its own.
    assert partial_path(tmp_path, 1, epoch=2) != partial_path(tmp_path, 1, epoch=1)


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    for generation in (2, 4, 6):
        write(tmp_path, generation, str(generation))
        put(tmp_path, generation)
    # The same generation once more, after a recovery: the newer one counts.
    write(tmp_path, 6, "again", epoch=2)
    put(tmp_path, 6, epoch=2)
    assert names(tmp_path) == {"step-4", "step-6"}
    assert (text_of(tmp_path, 4), text_of(tmp_path, 6)) == ("4", "again")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Counts what touches the disk; at the ``at``-th call ``strike`` is raised instead."""
    seen: dict[str, Any] = {"count": 0, "at": None, "strike": PowerLossError, "log": []}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen["count"] += 1
            seen["log"].append(name)
            if seen["count"] == seen["at"]:
                raise seen["strike"]
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(publish.os, "fsync", counted("fsync", os.fsync))
    monkeypatch.setattr(publish.os, "replace", counted("replace", os.replace))
    monkeypatch.setattr(publish.shutil, "rmtree", counted("rmtree", shutil.rmtree))
    return seen


def test_power_may_go_at_any_moment(tmp_path: Path, calls: dict[str, Any]) -> None:
    """Old or new, but whole; and the next start leaves no trace of the interruption."""
    write(tmp_path / "whole", 2, "old")
    write(tmp_path / "whole", 4, "old")
    put(tmp_path / "whole", 2)
    put(tmp_path / "whole", 4)
    write(tmp_path / "whole", 4, "new", epoch=2)
    write(tmp_path / "whole", 6, "new", epoch=2)

    def both(out: Path) -> None:
        put(out, 4, epoch=2)
        put(out, 6, epoch=2)

    calls["count"] = 0
    rehearsal = tmp_path / "rehearsal"
    shutil.copytree(tmp_path / "whole", rehearsal)
    both(rehearsal)
    total = calls["count"]
    assert total >= 12
    for at in range(1, total + 1):
        out = tmp_path / f"struck-{at}"
        shutil.copytree(tmp_path / "whole", out)
        calls["count"], calls["at"] = 0, at
        with pytest.raises(PowerLossError):
            both(out)
        calls["at"] = None
        promised = publish.kept(out)
        publish.sweep(out)
        there = published(out)
        assert promised == there
        assert there[-1] in (4, 6), at
        assert len(there) >= 2, f"struck at call {at}: {there}"
        for generation in there:
            assert text_of(out, generation) in ("old", "new")
        assert names(out) == {f"step-{n}" for n in there}, at


def test_half_of_a_removal_is_never_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 2, "old")
    put(tmp_path, 2)
    write(tmp_path, 4, "new")

    def half(path: Path, ignore_errors: bool = False) -> None:
        del ignore_errors
        (path / "__0_0.distcp").unlink()
        raise PowerLossError

    monkeypatch.setattr(publish.shutil, "rmtree", half)
    with pytest.raises(PowerLossError):
        put(tmp_path, 4, keep=1)
    assert published(tmp_path) == [4]


def test_a_name_is_on_the_disk_before_what_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts, then their folder, then the mark, then the folder's new name, then what is removed."""
    done: list[str] = []
    fsync, replace, rmtree = os.fsync, os.replace, shutil.rmtree

    def base(path: Any) -> str:
        return Path(path).name

    def synced(descriptor: int) -> None:
        done.append(f"sync {base(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        done.append(f"{base(source)} -> {base(target)}")
        replace(source, target)

    def removed(path: Any, ignore_errors: bool = False) -> None:
        done.append(f"remove {base(path)}")
        rmtree(path, ignore_errors=ignore_errors)

    write(tmp_path, 2, "old")
    put(tmp_path, 2)
    write(tmp_path, 4, "new")
    monkeypatch.setattr(publish.os, "fsync", synced)
    monkeypatch.setattr(publish.os, "replace", replaced)
    monkeypatch.setattr(publish.shutil, "rmtree", removed)
    put(tmp_path, 4, keep=1)
    assert done == [
        "sync step-4.e1.partial",
        "sync complete.json",
        "sync step-4.e1.partial",
        "step-4.e1.partial -> step-4",
        "sync checkpoints",
        f"sync {tmp_path.name}",
        "step-2 -> step-2.gone",
        "sync checkpoints",
        "remove step-2.gone",
    ]


def refusal_of(out: Path) -> str | None:
    """What publishing generation 4 anew is refused with."""
    try:
        put(out, 4, epoch=2)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space for the next"),
        (errno.EROFS, "make that folder writable for the next"),
        (errno.EIO, "look after that disk"),
    ],
)
def test_a_disk_that_refuses_costs_the_new_one_only(
    tmp_path: Path, calls: dict[str, Any], number: int, advice: str
) -> None:
    write(tmp_path / "whole", 4, "old")
    put(tmp_path / "whole", 4)
    write(tmp_path / "whole", 4, "new", epoch=2)
    refusal = OSError(number, os.strerror(number), "the-file")
    shutil.copytree(tmp_path / "whole", tmp_path / "rehearsal")
    calls["count"] = 0
    put(tmp_path / "rehearsal", 4, epoch=2)
    until = calls["log"][-calls["count"] :].index("rmtree")
    for at in range(1, until + 1):
        out = tmp_path / f"refused-{at}"
        shutil.copytree(tmp_path / "whole", out)
        calls["count"], calls["at"], calls["strike"] = 0, at, refusal
        refused = refusal_of(out)
        if refused is None:
            assert text_of(out, 4) == "new"
        else:
            assert refused.startswith(
                f"durable checkpoint {out}/checkpoints/step-4 cannot be published: "
                f"{os.strerror(number)} ("
            )
            assert refused.endswith(f"); the older ones are still there, {advice}")
            assert text_of(out, 4) == "old"
        assert published(out) == [4]
        calls["at"] = None
        publish.sweep(out)
        assert names(out) == {"step-4"}


def test_a_file_system_that_cannot_sync_folders_is_good_enough(
    tmp_path: Path, calls: dict[str, Any]
) -> None:
    write(tmp_path, 2, "new")
    calls["at"], calls["strike"] = 1, OSError(errno.EINVAL, "Invalid argument")
    put(tmp_path, 2)
    assert published(tmp_path) == [2]


def test_what_was_removed_by_hand_is_not_published(tmp_path: Path) -> None:
    write(tmp_path, 2, "old")
    put(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError) as caught:
        put(tmp_path, 3)
    assert str(caught.value) == (
        f"durable checkpoint {folder}/step-3 cannot be published: {folder}/step-3.e1.partial was "
        "removed while it was written; the older ones are still there"
    )
    write(tmp_path, 4, "new")
    (folder / "step-4.e1.partial" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError) as caught:
        put(tmp_path, 4)
    assert str(caught.value) == (
        f"durable checkpoint {folder}/step-4 cannot be published: of 2 parts 1 is left in "
        f"{folder}/step-4.e1.partial, the others were removed while it was written; the older ones "
        "are still there"
    )
    write(tmp_path, 6, "new")
    (folder / "step-6.e1.partial" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"partial/\.metadata was removed while it was wri"):
        put(tmp_path, 6)
    assert names(tmp_path) == {"step-2"}


def test_a_publication_that_was_cut_off_is_finished_by_the_next_start(tmp_path: Path) -> None:
    write(tmp_path, 4, "new")
    put(tmp_path, 4)
    folder = tmp_path / "checkpoints"
    os.replace(folder / "step-4", folder / "step-4.e3.partial")
    write(tmp_path, 6, "unmarked")
    write(tmp_path, 8, "of another generation", epoch=2)
    shutil.copy(folder / "step-4.e3.partial" / "complete.json", folder / "step-8.e2.partial")
    write(tmp_path, 10, "torn mark")
    (folder / "step-10.e1.partial" / "complete.json").write_text('{"generation": 1')
    (folder / "notes").mkdir()
    # A launcher looks before anything is changed.
    assert (published(tmp_path), publish.kept(tmp_path)) == ([], [4])
    publish.sweep(tmp_path)
    assert published(tmp_path) == [4]
    assert text_of(tmp_path, 4) == "new"
    assert names(tmp_path) == {"step-4", "notes"}


def test_what_older_epochs_have_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """A thread that still wrote when its folder was discarded has made it again."""
    write(tmp_path, 4, "half", epoch=1)
    write(tmp_path, 6, "new", epoch=3)
    write(tmp_path, 8, "being written", epoch=3)
    put(tmp_path, 6, epoch=3)
    assert names(tmp_path) == {"step-6", "step-8.e3.partial"}


def test_the_folder_may_lie_on_another_disk(tmp_path: Path) -> None:
    """``checkpoints`` is a link: every rename is within it."""
    elsewhere = Path("/dev/shm") / f"planaria-{os.getpid()}-{tmp_path.name}"
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    elsewhere.mkdir()
    try:
        (tmp_path / "checkpoints").symlink_to(elsewhere)
        write(tmp_path, 2, "new")
        put(tmp_path, 2)
        write(tmp_path, 2, "again", epoch=2)
        put(tmp_path, 2, epoch=2)
        publish.sweep(tmp_path)
        assert (published(tmp_path), text_of(tmp_path, 2)) == ([2], "again")
    finally:
        shutil.rmtree(elsewhere)


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ending = "; mend that, or give another folder with --out"
    folder.write_text("a file")
    with pytest.raises(UserError) as caught:
        publish.prepare(tmp_path)
    assert str(caught.value) == (
        f"checkpoints cannot be written to {folder}: it is not a folder{ending}"
    )
    folder.unlink()
    folder.symlink_to(tmp_path / "not-mounted")
    with pytest.raises(UserError, match=r"/checkpoints: it is a link to nowhere; mend that, or "):
        publish.prepare(tmp_path)
    folder.unlink()
    assert publish.prepare(tmp_path) == folder
    assert folder.is_dir()
    # The kernel's own, where nothing can be written, not by root either.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to("/proc/sys")
    with pytest.raises(UserError, match=r"/checkpoints: (Read-only|Permission)"):
        publish.prepare(tmp_path / "other")


def test_two_runs_share_no_folder_of_checkpoints(tmp_path: Path) -> None:
    """Each in an ``--out`` of its own, and both with a link to the large disk."""
    large = tmp_path / "large"
    large.mkdir()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").symlink_to(large)
    with coordinator(tmp_path / "a", "--world", "1") as first:
        first.ready()
        second = CoordinatorProcess(tmp_path / "b", "--world", "1")
        try:
            assert second.process.wait(20) == 2
            said = second.errors()
        finally:
            second.close()
    assert said.strip() == (
        f"a run lives in {tmp_path}/b/checkpoints (pid {first.process.pid}): choose another --out"
    )
