"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic(path: Path) -> Generator[Path]:
    """A temporary name beside ``path`` that takes its place when the block ends without an error.

    A run that is killed while it writes leaves the old file or none, which is what makes a folder
    of results resumable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as JSON that any reader takes: NaN and infinities become null."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(_plain(value), indent=2) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
