"""The demo's verdict; the whole demo is run by ``make demo``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria import cli, demo
from planaria.errors import RunError


def summary(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "state_digest": "a" * 64,
        "samples_digest": "b" * 64,
        "final": {"loss": 1.5},
        "injected": 0,
        "swaps": [],
        "steps_redone": 0,
        "step_s": 0.2,
    }
    return {**plain, **changes}


SWAP = {"phases": {"detect": 0.01, "build": 0.1}, "total": 0.5}
STRUCK = {"injected": 1, "swaps": [SWAP], "steps_redone": 1}


def test_equal_runs_are_equal() -> None:
    result = demo.compare(summary(), summary(**STRUCK))
    assert (result.digests_equal, result.samples_equal) == (True, True)
    assert result.recovery_s == {"detect": 0.01, "build": 0.1, "total": 0.5}
    assert (result.steps_redone, result.step_s) == (1, 0.2)


@pytest.mark.parametrize("name", ["state_digest", "samples_digest"])
def test_a_difference_is_seen(name: str) -> None:
    result = demo.compare(summary(), summary(**STRUCK, **{name: "c" * 64}))
    assert (result.digests_equal, result.samples_equal) == (
        name != "state_digest",
        name != "samples_digest",
    )


def test_missing_digests_are_no_equality() -> None:
    result = demo.compare(summary(state_digest=None), summary(**STRUCK, state_digest=None))
    assert not result.digests_equal


def test_a_fault_that_never_fired_shows_nothing() -> None:
    with pytest.raises(RunError) as caught:
        demo.compare(summary(), summary())
    assert str(caught.value) == (
        "0 faults fired and 0 swaps followed, expected one of each; see journal.jsonl"
    )


def test_the_whole_demo(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command, on fewer steps."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", "--out", str(folder), "--json", str(folder / "demo.json"), "--steps", "22"]
    assert cli.main(words) == 0
    result = json.loads((folder / "demo.json").read_text())
    assert result["digests_equal"] is True
    assert result["samples_equal"] is True
    assert result["steps_redone"] in (1, 2)
    assert result["recovery_s"]["total"] > 0
    assert "to next commit" in capsys.readouterr().out
