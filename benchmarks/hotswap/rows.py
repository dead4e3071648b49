"""Rows of measurements as JSON lines: what is finished is kept, and a second run goes on there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

Row = dict[str, Any]


class Rows:
    """The rows of one benchmark, grouped in units that were measured as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]

    def has(self, unit: str) -> bool:
        """Whether the unit is finished."""
        return any(row["row"] == "done" and row["unit"] == unit for row in self.rows)

    def add(self, unit: str, rows: Iterable[Row], *, seconds: float, load: float) -> None:
        """Append a finished unit, in one piece."""
        done = {
            "row": "done",
            "seconds": seconds,
            "load": load,
            "commit": commit(),
            "machine": machine(),
            "at": time.strftime("%Y-%m-%d %H:%M"),
        }
        added = [{"unit": unit, **row} for row in (*rows, done)]
        with self.path.open("ab") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in added).encode())
            os.fsync(stream.fileno())
        self.rows += added

    def forget(self, parts: Iterable[str]) -> None:
        """Drop the rows of units that begin with one of ``parts``."""
        dropped = tuple(parts)
        self.rows = [row for row in self.rows if row["unit"].split("/")[0] not in dropped]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(partial, self.path)

    def of(self, kind: str, **values: Any) -> list[Row]:
        """Rows of a kind with these values."""
        return [
            row
            for row in self.rows
            if row["row"] == kind and all(row.get(k) == v for k, v in values.items())
        ]


def load() -> float:
    """Processes that ran or wanted to, over the last minute, before a unit begins."""
    return os.getloadavg()[0]


def commit() -> str:
    """Short hash of the working tree's commit, with a mark where what is measured was changed."""
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/src", ":/benchmarks")
    return f"{head}{' with changes' if changed else ''}" if head else "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def machine() -> str:
    """Processor, cores, memory, and the versions that matter, in one line."""
    cores = psutil.cpu_count(logical=True)
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{_processor()}, {cores} cores, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()
