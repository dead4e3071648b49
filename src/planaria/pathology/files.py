"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from planaria.errors import DataError


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


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV in UTF-8, missing cells as empty text; DataError for anything else."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
            return list(reader.fieldnames or []), rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{path.name}: not a CSV in UTF-8 ({error}); save the table as CSV, UTF-8, with commas"
        ) from error


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
