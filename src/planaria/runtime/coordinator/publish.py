"""The only publisher of durable checkpoints: a folder counts once the coordinator has renamed it.

Workers write below ``OUT/checkpoints/step-N.eE.partial``, E being their epoch. When all parts are
there, ``complete.json`` is put in and the folder becomes ``step-N``: a fenced worker can publish
nothing, what was interrupted is never taken for complete, and neither a removal under way nor a
file that a fenced worker still has open can touch what a later epoch writes.

A machine may stop between any two lines here. A published folder leaves its name by one rename, to
``step-N.old`` where a newer one of the same generation is about to take it, which :func:`sweep`
undoes, or to ``step-N.gone`` where it is removed. Each name is on the disk before anything that
relies on it happens; the parts themselves are, since ``torch.distributed.checkpoint`` syncs them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from types import MappingProxyType

from planaria.errors import CheckpointError, UserError

FOLDER, COMPLETE = "checkpoints", "complete.json"
_STEP = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"step-(\d+)\.e(\d+)\.partial")
_PART = re.compile(r"__(\d+)_\d+\.distcp")
_METADATA = ".metadata"
"""Names that ``torch.distributed.checkpoint`` gives: files of a shard, and what is written last."""
_ASIDE, _GONE = ".old", ".gone"
_NO_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
"""What file systems say that sync files only."""
_ADVICE = MappingProxyType(
    {
        errno.ENOSPC: "free space for the next",
        errno.EDQUOT: "free space for the next",
        errno.EROFS: "make that folder writable for the next",
        errno.EACCES: "make that folder writable for the next",
    }
)


def partial_path(out: Path, generation: int, *, epoch: int) -> Path:
    """Where the members of ``epoch`` write the parts of ``generation``."""
    return out / FOLDER / f"step-{generation}.e{epoch}.partial"


def complete_path(out: Path, generation: int) -> Path:
    """Where ``generation`` is once it is published."""
    return out / FOLDER / f"step-{generation}"


def prepare(out: Path) -> Path:
    """Make the folder of checkpoints, before a run has computed anything that it could not keep.

    Raises ``UserError`` where it cannot be written.
    """
    folder = out / FOLDER
    reason = ""
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        reason = "it is a link to nowhere" if folder.is_symlink() else "it is not a folder"
    except OSError as error:
        reason = str(error.strerror)
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(
            errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        )
    if reason:
        raise UserError(
            f"checkpoints cannot be written to {folder}: {reason}; mend that, or give another folder "
            "with --out"
        )
    return folder


def published(out: Path) -> list[int]:
    """The generations that are published below ``out``, oldest first."""
    folder = out / FOLDER
    if not folder.is_dir():
        return []
    names = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    found = (int(name.group(1)) for name in names if name)
    return sorted(n for n in found if (complete_path(out, n) / COMPLETE).is_file())


def kept(out: Path) -> list[int]:
    """What :func:`published` will give once :func:`sweep` has run; changes nothing."""
    cut_off = [partial for partial, _ in _partials(out)]
    cut_off += (out / FOLDER).glob(f"step-*{_ASIDE}")
    found = {_target(folder) for folder in cut_off if _is_complete(folder)}
    return sorted({*published(out), *(int(target.name[len("step-") :]) for target in found)})


def publish(out: Path, generation: int, *, epoch: int, run: str, world: int, keep: int) -> Path:
    """Make the partial folder of ``generation`` the newest checkpoint; keep the ``keep`` newest.

    Whatever happens, a checkpoint that was published before is there as long as the new one has not
    its name. What members of older epochs have left is removed, too.

    Raises ``CheckpointError`` where the folder or one of the ``world`` parts is missing, or the disk
    refuses; the partial folder is removed then.
    """
    source = partial_path(out, generation, epoch=epoch)
    target = complete_path(out, generation)
    failed = f"durable checkpoint {target} cannot be published: "
    if missing := _missing(source, world):
        discard(out, generation, epoch=epoch)
        raise CheckpointError(f"{failed}{missing}; the older ones are still there")
    record = {"run": run, "generation": generation, "world": world, "at": time.time()}
    try:
        _sync(source)
        _write_mark(source / COMPLETE, record)
        _sync(source)
        _install(source, target)
    except OSError as error:
        discard(out, generation, epoch=epoch)
        raise CheckpointError(
            f"{failed}{error.strerror} ({error.filename}); the older ones are still there, "
            f"{_ADVICE.get(error.errno or 0, 'look after that disk')}"
        ) from None
    try:
        _sync(target.parent)
        # The folder of checkpoints may be as new as its first one.
        _sync(out)
    except OSError:
        return target  # it has its name, perhaps not for long: nothing older is removed
    # What cannot be removed takes place and harms nobody else.
    _remove(_beside(target, _ASIDE))
    for old in published(out)[:-keep]:
        _remove(complete_path(out, old))
    for left, of in _partials(out):
        if of < epoch:
            _remove(left)
    return target


def discard(out: Path, generation: int, *, epoch: int) -> None:
    """Remove what ``epoch`` has written of ``generation``; nothing happens where that is nothing."""
    shutil.rmtree(partial_path(out, generation, epoch=epoch), ignore_errors=True)


def sweep(out: Path) -> None:
    """Bring to an end what a killed run has left half-done below ``out``.

    A publication that was cut off is finished, or undone; other partial folders are removed. For a
    run that begins and has ``out`` to itself: its epochs begin at 1 again, and it must not meet
    parts that an earlier run has written under the same name.
    """
    for partial, _ in _partials(out):
        target = _target(partial)
        if _is_complete(partial) and not (target / COMPLETE).is_file():
            with contextlib.suppress(OSError):
                _install(partial, target)
        _remove(partial)
    for aside in (out / FOLDER).glob(f"step-*{_ASIDE}"):
        target = _target(aside)
        if _is_complete(aside) and not (target / COMPLETE).is_file():
            with contextlib.suppress(OSError):
                _install(aside, target)
        _remove(aside)
    for gone in (out / FOLDER).glob(f"step-*{_GONE}"):
        shutil.rmtree(gone, ignore_errors=True)


def _missing(source: Path, world: int) -> str:
    """What is not there of what all shards have said that they have written; empty: nothing."""
    if not source.is_dir():
        return f"{source} was removed while it was written"
    files = (_PART.fullmatch(entry.name) for entry in source.iterdir())
    parts = len({file.group(1) for file in files if file})
    if parts < world:
        return (
            f"of {world} parts {parts} {'is' if parts == 1 else 'are'} left in {source}, the others "
            "were removed while it was written"
        )
    if not (source / _METADATA).is_file():
        return f"{source / _METADATA} was removed while it was written"
    return ""


def _write_mark(path: Path, record: dict[str, str | int | float]) -> None:
    try:
        with path.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(record, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # which names no file where it was written or synced
        raise OSError(error.errno, error.strerror, str(path)) from None


def _install(source: Path, target: Path) -> None:
    """``source``, complete, takes the name ``target``; what bore it stays aside until then."""
    aside = _beside(target, _ASIDE)
    if target.exists():
        _remove(aside)
        os.replace(target, aside)
    try:
        os.replace(source, target)
    except OSError:
        if aside.exists():
            os.replace(aside, target)
        raise


def _remove(folder: Path) -> None:
    """Take ``folder`` out of sight by one rename, and remove it then."""
    gone = _beside(folder, _GONE)
    with contextlib.suppress(OSError):
        if not folder.is_dir():
            return
        if gone.exists():
            shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)
        _sync(gone.parent)
        shutil.rmtree(gone, ignore_errors=True)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)


def _partials(out: Path) -> list[tuple[Path, int]]:
    """Partial folders and their epochs, newest epoch first."""
    found: list[tuple[Path, int]] = []
    for entry in (out / FOLDER).glob("step-*.partial"):
        if name := _PARTIAL.fullmatch(entry.name):
            found.append((entry, int(name.group(2))))
    return sorted(found, key=lambda one: -one[1])


def _target(folder: Path) -> Path:
    """Whose name a partial folder, or one put aside, was about to take."""
    return folder.with_name(folder.name.partition(".")[0])


def _is_complete(folder: Path) -> bool:
    """Whether ``folder`` bears a whole mark of the generation that its name says."""
    name = re.match(_STEP, folder.name)
    try:
        record = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        return name is not None and record["generation"] == int(name.group(1))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(descriptor)
