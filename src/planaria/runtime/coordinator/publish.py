"""The only publisher of durable checkpoints: a folder counts once the coordinator has renamed it.

Workers write below ``OUT/checkpoints/step-N.partial``. When all parts are there, ``complete.json``
is put in and the folder becomes ``step-N``: a fenced worker can publish nothing, and what was
interrupted is never taken for complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

from planaria.errors import CheckpointError

FOLDER, COMPLETE = "checkpoints", "complete.json"
_STEP = re.compile(r"step-(\d+)")


def partial_path(out: Path, generation: int) -> Path:
    """Where the parts of ``generation`` are written."""
    return out / FOLDER / f"step-{generation}.partial"


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


def publish(out: Path, generation: int, *, run: str, world: int, keep: int) -> Path:
    """Make the partial folder of ``generation`` the newest checkpoint; keep the ``keep`` newest.

    Raises ``CheckpointError`` where the folder is missing or the disk refuses; the partial folder
    is removed then.
    """
    source, target = partial_path(out, generation), complete_path(out, generation)
    record = {"run": run, "generation": generation, "world": world, "at": time.time()}
    try:
        with (source / COMPLETE).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(record, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            # The same generation once more, written after a recovery: the newer one counts.
            shutil.rmtree(target)
        os.replace(source, target)
        _sync_folder(target.parent)
    except OSError as error:
        discard(out, generation)
        raise CheckpointError(
            f"durable checkpoint {target} cannot be published: {error.strerror} "
            f"({error.filename}); the older ones are still there, free space for the next"
        ) from None
    for old in published(out)[:-keep]:
        # Without its mark first, so that a half-removed one is never chosen.
        (complete_path(out, old) / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(complete_path(out, old), ignore_errors=True)
    return target


def discard(out: Path, generation: int) -> None:
    """Remove the partial folder of ``generation``; nothing happens where there is none."""
    shutil.rmtree(partial_path(out, generation), ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
