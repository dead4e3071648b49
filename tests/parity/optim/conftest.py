"""Ends the processes of the folder's tests."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from optim_worlds import POOL


@pytest.fixture(scope="package", autouse=True)
def _pool() -> Generator[None]:
    yield
    POOL.close()
