"""The pathology recipes with a worker killed on the way: no bit is lost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.optim.choice import SparseConfig
from planaria.recipes.gleason import GleasonConfig
from planaria.recipes.gleason import prepare as prepare_gleason
from planaria.recipes.metastasis import MetastasisConfig
from planaria.recipes.metastasis import prepare as prepare_metastasis
from planaria.runtime.launch.config import for_recipe
from planaria.runtime.launch.launcher import launch


def run(recipe: Any, *, module: str, faults: tuple[str, ...]) -> dict[str, Any]:
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
    first = run(calm, module=module, faults=())
    second = run(struck, module=module, faults=(fault,))
    assert second["injected"] == 1
    assert len(second["swaps"]) == 1
    # All parameters, BatchNorm statistics, optimizer states; and every sample in its order.
    assert second["state_digest"] == first["state_digest"]
    assert second["samples_digest"] == first["samples_digest"]
    models = [torch.load(c.out / "model.pt", weights_only=True) for c in (calm, struck)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])
    assert any("running_mean" in k for k in models[0])
    results = [json.loads((c.out / "results.json").read_text()) for c in (calm, struck)]
    assert results[0] == results[1]


@pytest.mark.parametrize("fault", ["kill:worker=1,step=5,phase=backward"])
def test_metastasis(tmp_path: Path, fault: str) -> None:
    recipe = MetastasisConfig(
        synthetic=(192, 64, 64),
        cache=tmp_path / "cache",
        width=0.25,
        depth=0.5,
        stem_stride=2,
        batch=16,
        epochs=2,
        evals=3,
    )
    prepare_metastasis(dataclasses.replace(recipe, out=tmp_path))
    module = "planaria.recipes.metastasis.train"
    compare(recipe, module=module, fault=fault, out=tmp_path)


def test_gleason(tmp_path: Path) -> None:
    """With models that drift apart: the best state is that of their mean."""
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
        optimizer="scape",
        sparse=SparseConfig(unsent="local", density=0.25),
    )
    prepare_gleason(dataclasses.replace(recipe, out=tmp_path))
    module = "planaria.recipes.gleason.train"
    compare(recipe, module=module, fault="kill:worker=0,step=4,phase=forward", out=tmp_path)
