"""Undisturbed runs, each made once, for the struck ones to be compared with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.fault_runs import Outcome, join_from_outside, run


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """``calm(job, workers=N)``: how ``job`` ends where nothing fails."""
    known: dict[tuple[Any, int], Outcome] = {}

    def undisturbed(job: Any, *, workers: int) -> Outcome:
        key = (job, workers)
        if key not in known:
            made = run(job, tmp_path_factory.mktemp("calm"), workers=workers, spares=0)
            assert made.code == 0
            assert made.summary["steps"] == job.steps
            known[key] = made
        return known[key]

    return undisturbed


@pytest.fixture
def joined() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """:func:`join_from_outside`; what it starts ends with the test."""
    children: list[subprocess.Popen[str]] = []

    def start(*words: object, **more: object) -> subprocess.Popen[str]:
        children.append(join_from_outside(*words, **more))  # type: ignore[arg-type]
        return children[-1]

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()
