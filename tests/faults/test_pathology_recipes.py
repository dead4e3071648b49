"""The pathology recipes with a worker killed on the way: no bit is lost.

Metastasis on pixels is what the pathology demo does, in tests/unit/test_demo_pathology.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from planaria.optim.choice import SparseConfig
from planaria.recipes.gleason import GleasonConfig
from planaria.recipes.gleason import prepare as prepare_gleason
from planaria.recipes.metastasis import MetastasisConfig
from planaria.runtime.launch.config import for_recipe
from planaria.runtime.launch.launcher import launch
from tests.support.features import slides_with_features


def run(recipe: Any, *, module: str, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    config = for_recipe(
        recipe,
        module=module,
        preload=("monai.networks.nets.efficientnet",),
        workers=2,
        spares=1,
        refill=False,
        quiet=True,
        timeout=30.0,
        inject=faults,
    )
    assert launch(config) == 0
    return json.loads((recipe.out / "summary.json").read_text())


def compare(recipe: Any, *, module: str, fault: str, out: Path) -> None:
    calm = dataclasses.replace(recipe, out=out / "calm")
    struck = dataclasses.replace(recipe, out=out / "struck")
    first = run(calm, module=module)
    second = run(struck, module=module, faults=(fault,))
    check(calm, first, struck, second)
    assert any("running_mean" in k for k in torch.load(calm.out / "model.pt", weights_only=True))


def check(calm: Any, first: dict[str, Any], struck: Any, second: dict[str, Any]) -> None:
    """Nothing but the swap tells the second run from the first."""
    assert second["injected"] == 1
    assert len(second["swaps"]) == 1
    # All parameters, BatchNorm statistics, optimizer states; and every sample in its order.
    assert second["state_digest"] == first["state_digest"]
    assert second["samples_digest"] == first["samples_digest"]
    models = [torch.load(c.out / "model.pt", weights_only=True) for c in (calm, struck)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])
    results = [json.loads((c.out / "results.json").read_text()) for c in (calm, struck)]
    assert results[0] == results[1]


def test_features_and_an_early_end(tmp_path: Path) -> None:
    """The worker dies in the step whose evaluation ends the training: it ends there all the same."""
    table = slides_with_features(tmp_path / "slides", count=60)
    calm = MetastasisConfig(
        data=str(table),
        features=table.parent / "features",
        out=tmp_path / "calm",
        hidden=16,
        batch=8,
        epochs=30,
        evals=30,
        patience=2,
        optimizer="adams",
    )
    module = "planaria.recipes.metastasis.train"
    first = run(calm, module=module)
    steps = first["steps"]
    assert 3 <= steps < 60
    struck = dataclasses.replace(calm, out=tmp_path / "struck")
    second = run(struck, module=module, faults=(f"kill:worker=1,step={steps},phase=backward",))
    assert second["steps"] == steps
    check(calm, first, struck, second)
    results = json.loads((struck.out / "results.json").read_text())
    assert results["best_step"] < steps


def test_gleason(tmp_path: Path) -> None:
    """In bf16, with boards drawn from two grids, by models that drift apart: the best state is that
    of their mean."""
    recipe = GleasonConfig(
        synthetic=24,
        cache=tmp_path / "cache",
        width=0.25,
        depth=0.5,
        tiles=4,
        px=64,
        mpp=2.0,
        batch=3,
        epochs=4,
        evals=2,
        dtype="bf16",
        optimizer="scape",
        sparse=SparseConfig(unsent="local", density=0.25),
    )
    prepare_gleason(dataclasses.replace(recipe, out=tmp_path))
    module = "planaria.recipes.gleason.train"
    compare(recipe, module=module, fault="kill:worker=0,step=4,phase=forward", out=tmp_path)
