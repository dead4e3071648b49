"""The example runs, in a process of its own, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "faith_small_model.py"


@pytest.mark.timeout(300)  # ten seconds; the bound is for a busy machine
def test_what_the_recipe_trained_is_sampled_and_scored() -> None:
    pytest.importorskip("inspect_ai")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held-out loss" in done.stdout + done.stderr
    assert "4/4 chains" in done.stderr
    assert "majority" in done.stdout
