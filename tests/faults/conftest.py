"""Undisturbed runs, each made once, for the struck ones to be compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.fault_programs import Job
from tests.support.fault_runs import Outcome, run


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """``calm(job, workers=N)``: how ``job`` ends where nothing fails."""
    known: dict[tuple[Job, int], Outcome] = {}

    def undisturbed(job: Job, *, workers: int) -> Outcome:
        key = (job, workers)
        if key not in known:
            made = run(job, tmp_path_factory.mktemp("calm"), workers=workers, spares=0)
            assert made.code == 0
            assert made.summary["steps"] == job.steps
            known[key] = made
        return known[key]

    return undisturbed
