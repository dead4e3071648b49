"""The only publisher of durable checkpoints: a folder counts once the coordinator has renamed it.

Workers write below ``OUT/checkpoints/step-N.eE.partial``, E being their epoch. When all parts are
there, ``complete.json`` is put in and the folder becomes ``step-N``: a fenced worker can publish
nothing, what was interrupted is never taken for complete, and neither a removal under way nor a
file that a fenced worker still has open can touch what a later epoch writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path

from planaria.errors import CheckpointError

FOLDER, COMPLETE = "checkpoints", "complete.json"
_STEP = re.compile(r"step-(\d+)")


def partial_path(out: Path, generation: int, *, epoch: int) -> Path:
    """Where the members of ``epoch`` write the parts of ``generation``."""
    return out / FOLDER / f"step-{generation}.e{epoch}.partial"


def complete_path(out: Path, generation: int) -> Path:
    """Where ``generation`` is once it is published."""
    return out / FOLDER / f"step-{generation}"


def published(out: Path) -> list[int]:
    """The generations that are published below ``out``, oldest first."""
    folder = out / FOLDER
    if not folder.is_dir():
        return []
    names = (_STEP.fullmatch(entry.name) for entry in folder.iterdir())
    found = (int(name.group(1)) for name in names if name)
    return sorted(n for n in found if (complete_path(out, n) / COMPLETE).is_file())


def publish(out: Path, generation: int, *, epoch: int, run: str, world: int, keep: int) -> Path:
    """Make the partial folder of ``generation`` the newest checkpoint; keep the ``keep`` newest.

    Raises ``CheckpointError`` where the folder is missing or the disk refuses; the partial folder
    is removed then.
    """
    source = partial_path(out, generation, epoch=epoch)
    target = complete_path(out, generation)
    record = {"run": run, "generation": generation, "world": world, "at": time.time()}
    try:
        with (source / COMPLETE).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(record, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            # The same generation once more, written after a recovery: the newer one counts. The
            # mark goes first, so that a half-removed folder is never taken for complete.
            (target / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(target)
        os.replace(source, target)
        _sync_folder(target.parent)
    except OSError as error:
        discard(out, generation, epoch=epoch)
        raise CheckpointError(
            f"durable checkpoint {target} cannot be published: {error.strerror} "
            f"({error.filename}); the older ones are still there, free space for the next"
        ) from None
    for old in published(out)[:-keep]:
        # One that cannot be removed takes place and harms nobody else.
        with contextlib.suppress(OSError):
            (complete_path(out, old) / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(complete_path(out, old), ignore_errors=True)
    return target


def discard(out: Path, generation: int, *, epoch: int) -> None:
    """Remove what ``epoch`` has written of ``generation``; nothing happens where that is nothing."""
    shutil.rmtree(partial_path(out, generation, epoch=epoch), ignore_errors=True)


def sweep(out: Path) -> None:
    """Remove the partial folders that a killed run has left below ``out``.

    For a run that begins and has ``out`` to itself: its epochs begin at 1 again, and it must not
    meet parts that an earlier run has written under the same name.
    """
    for entry in (out / FOLDER).glob("step-*.partial"):
        shutil.rmtree(entry, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
