"""The example runs, in a process of its own, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "faith_small_model.py"


def test_a_model_of_ones_own_is_sampled_and_scored() -> None:
    pytest.importorskip("inspect_ai")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "4/4 chains" in done.stderr
    assert "majority" in done.stdout
