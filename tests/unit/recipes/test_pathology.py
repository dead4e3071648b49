"""Both pathology recipes in one process: features for pixels, AdamS, bf16, moved grids."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import planaria
from planaria.errors import ConfigError, DataError
from planaria.optim import AdamS
from planaria.pathology.bundle import load_bundle
from planaria.pathology.commands import Predict
from planaria.pathology.heat import load_heat
from planaria.recipes import gleason, metastasis
from planaria.recipes.gleason import GleasonConfig
from planaria.recipes.gleason import data as gleason_data
from planaria.recipes.gleason import train as gleason_train
from planaria.recipes.metastasis import MetastasisConfig
from planaria.recipes.metastasis import train as metastasis_train
from tests.support.features import (
    DIM,
    bag,
    biopsies_with_features,
    slides_with_features,
    write_features,
)
from tests.support.slides import coordinates, tissue_pixels, write_pyramid


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # main() sets the threads of its worker; here that is the tests' own process.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slides_with_features(tmp_path_factory.mktemp("slides"), count=120)


@pytest.fixture(scope="module")
def biopsies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return biopsies_with_features(tmp_path_factory.mktemp("biopsies"), count=120)


def results(config: Any) -> dict[str, Any]:
    return json.loads((config.out / "results.json").read_text())


@pytest.mark.parametrize("optimizer", ["adamw", "adams"])
def test_metastasis_from_features_of_slides(slides: Path, tmp_path: Path, optimizer: str) -> None:
    config = MetastasisConfig(
        data=str(slides),
        features=slides.parent / "features",
        out=tmp_path,
        hidden=16,
        bag=24,
        batch=16,
        epochs=20,
        evals=2,
        optimizer=optimizer,
    )
    metastasis_train.main(config)
    found = results(config)
    assert found["test"]["overall"]["auc"] > 0.9
    assert found["split_by"] == "patient"
    assert found["averaged_over"] == 1
    assert any("near-duplicates are not looked for" in line for line in found["remarks"])
    card, _ = load_bundle(tmp_path)
    assert card.features is not None
    assert (card.features.dim, card.features.encoder) == (DIM, "uni_v1")


def test_gleason_from_features_and_a_map_of_a_slide(biopsies: Path, tmp_path: Path) -> None:
    config = GleasonConfig(
        data=str(biopsies),
        features=biopsies / "features",
        out=tmp_path / "run",
        hidden=16,
        batch=16,
        epochs=20,
        evals=2,
        optimizer="adams",
    )
    (biopsies / "features" / "biopsy7.h5").write_bytes(b"broken")
    gleason_train.main(config)
    found = results(config)
    assert found["test"]["overall"]["kappa"] > 0.6
    assert any("1 records left out; biopsy7.h5" in line for line in found["remarks"])

    strong = write_features(
        tmp_path / "features" / "strong.h5",
        np.concatenate([bag(np.random.default_rng(s), strength=2.5, share=1.0) for s in (3, 4)]),
        side=128,
    )
    with h5py.File(strong) as file:
        tiles = len(file["features"])
    for name in ("strong", "other"):
        write_pyramid(tmp_path / f"{name}.tif", coordinates(1100, 1400), mpp=None)
    lines: list[str] = []
    predict = Predict(
        slides=(tmp_path / "strong.tif", tmp_path / "other.tif"),
        model=config.out,
        features=tmp_path / "features",
        out=tmp_path / "out",
        page_px=256,
    )
    assert predict.run(lines.append) == 0
    assert "failed: other.h5: no such file of features; extract them first" in lines[1]
    facts = json.loads((tmp_path / "out" / "strong" / "prediction.json").read_text())
    assert 2.5 < facts["score"] <= 5
    assert facts["rule"] == f"attention over the features of {tiles} tiles"
    heat = load_heat(tmp_path / "out" / "strong" / "heat.npz")
    assert heat.grid.columns == 8
    assert int((~np.isnan(heat.values)).sum()) == tiles
    assert predict.run(lines.append) == 0
    assert "unchanged" in lines[-4]
    # New features are a new result; so are those of another slide or another model.
    write_features(strong, bag(np.random.default_rng(3), strength=0.0), side=512)
    lines.clear()
    assert predict.run(lines.append) == 1
    assert "leave strong.tif (1100 x 1400 px); the features are another slide's" in lines[0]
    write_features(strong, bag(np.random.default_rng(3), strength=0.0), encoder="other")
    predict.run(lines.append)
    assert "by other; the model was trained on 16 by uni_v1" in "".join(lines)
    with pytest.raises(ConfigError, match="the model sees features; give --features, a folder"):
        dataclasses.replace(predict, features=None).run(lines.append)


def pcam(folder: Path, *, count: int) -> Path:
    """PCam's files with blank pixels, and features that tell: the folder."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        stem = folder / f"camelyonpatch_level_2_split_{split}"
        labels = np.arange(count) % 2
        with h5py.File(f"{stem}_x.h5", "w") as file:
            file.create_dataset("x", (count, 96, 96, 3), np.uint8, compression="gzip")
        with h5py.File(f"{stem}_y.h5", "w") as file:
            file["y"] = labels.reshape(-1, 1, 1, 1)
        with Path(f"{stem}_meta.csv").open("w", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["wsi"])
            writer.writerows([f"{split}{i // 8}"] for i in range(count))
        values = rng.normal(size=(count, DIM)).astype(np.float32)
        values[:, 0] += 4 * labels
        write_features(folder / "features" / f"{split}.h5", values, layout="clam")
    return folder


def test_metastasis_from_features_of_patches(tmp_path: Path) -> None:
    folder = pcam(tmp_path / "pcam", count=96)
    config = MetastasisConfig(
        data=str(folder),
        features=folder / "features",
        out=tmp_path / "run",
        hidden=8,
        batch=16,
        epochs=20,
        evals=2,
    )
    metastasis_train.main(config)
    assert results(config)["test"]["overall"]["auc"] > 0.9
    values = np.zeros((20, DIM), np.float32)
    values[:3, 0] = 6
    write_features(tmp_path / "slides" / "a.h5", values, side=64)
    slide = write_pyramid(tmp_path / "a.tif", coordinates(600, 300))
    command = Predict(
        slides=(slide,), model=config.out, features=tmp_path / "slides", out=tmp_path / "out"
    )
    assert command.run(lambda line: None) == 0
    facts = json.loads((tmp_path / "out" / "a" / "prediction.json").read_text())
    assert facts["rule"] == "mean of the 10 highest tile probabilities"
    (folder / "features" / "test.h5").unlink()
    with pytest.raises(DataError, match=r"test\.h5: no such file of features; extract them first"):
        metastasis.prepare(config)


def test_both_train_in_bf16(tmp_path: Path) -> None:
    small: dict[str, Any] = {"width": 0.25, "depth": 0.5, "dtype": "bf16", "optimizer": "adams"}
    patches = MetastasisConfig(
        synthetic=(64, 64, 64),
        out=tmp_path / "m",
        stem_stride=2,
        batch=32,
        epochs=1,
        evals=1,
        **small,
    )
    metastasis_train.main(patches)
    assert 0 <= results(patches)["test"]["overall"]["auc"] <= 1
    boards = GleasonConfig(
        synthetic=12,
        folds=3,
        offsets=1,
        out=tmp_path / "g",
        tiles=4,
        px=32,
        mpp=4,
        batch=4,
        epochs=1,
        evals=1,
        **small,
    )
    gleason_train.main(boards)
    assert len(json.loads((boards.out / "predictions.json").read_text())) > 0
    for config in (patches, boards):
        state = torch.load(config.out / "model.pt", weights_only=True)
        # Autocast: weights and statistics stay what they are, whatever the forward pass computes in.
        assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}
        assert all(bool(torch.isfinite(t).all()) for t in state.values())


def test_bf16_computes_in_bf16_and_differs(tmp_path: Path) -> None:
    import torch.distributed as dist

    logits: list[torch.Tensor] = []
    for dtype in ("fp32", "bf16"):
        config = MetastasisConfig(
            synthetic=(64, 64, 64),
            out=tmp_path,
            width=0.25,
            depth=0.5,
            batch=8,
            dtype=dtype,  # type: ignore[arg-type]
        )
        job = metastasis_train.Job(config, metastasis.prepare(config))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            job.build(planaria.Shard(0, 1))
            assert not isinstance(job.optimizer, AdamS)
            with metastasis_train.autocast(config.dtype):
                logits.append(job.model(job.batch(1)[0]).detach())
        finally:
            dist.destroy_process_group()
    assert [found.dtype for found in logits] == [torch.float32, torch.bfloat16]
    # Eight bits of mantissa over some thirty layers.
    torch.testing.assert_close(logits[1].float(), logits[0], atol=0.02, rtol=0.1)
    assert not torch.equal(logits[1].float(), logits[0])


def panda(folder: Path, *, count: int) -> Path:
    """PANDA's tree with ``count`` small slides of tissue at places of their own."""
    with_features = biopsies_with_features(folder, count=count)
    for index in range(count):
        box = (40 + 3 * index, 60, 700, 480 - 2 * index)
        pixels = tissue_pixels(800, 540, box=box)
        write_pyramid(folder / "train_images" / f"biopsy{index}.tiff", pixels, mpp=1.0)
    return with_features


def test_training_draws_among_moved_grids_and_tests_never_do(tmp_path: Path) -> None:
    (tmp_path / "panda" / "train_images").mkdir(parents=True)
    folder = panda(tmp_path / "panda", count=12)
    config = GleasonConfig(
        data=str(folder),
        out=tmp_path / "run",
        folds=3,
        tiles=4,
        px=64,
        mpp=2.0,
        batch=4,
        offsets=3,
        distance=-1,
    )
    made = gleason.prepare(config).train
    stacks = [np.load(gleason_data.grid_file(made.files[0], grid)) for grid in range(3)]
    assert not any(
        np.array_equal(a, b) for a, b in ((stacks[0], stacks[1]), (stacks[1], stacks[2]))
    )
    ids = np.zeros(1, dtype=np.int64)
    corners = {
        tile.tobytes()
        for seed in range(12)
        for tile in quarters(made.boards(ids, config, seed=seed)[0])
    }
    # Turned eight ways each: tiles of all three grids come up, whole.
    upright = [{turned.tobytes() for tile in stack for turned in turns(tile)} for stack in stacks]
    assert all(corners & tiles for tiles in upright)
    assert corners <= set.union(*upright)
    fixed = made.boards(ids, config, seed=None)[0]
    assert {tile.tobytes() for tile in quarters(fixed)} <= {t.tobytes() for t in stacks[0]}

    still = dataclasses.replace(config, offsets=1)
    files = sorted(p.name for p in made.files[0].parent.iterdir())
    assert gleason.prepare(still).train.files == made.files
    assert sorted(p.name for p in made.files[0].parent.iterdir()) == files


def quarters(board: np.ndarray) -> list[np.ndarray]:
    half = board.shape[0] // 2
    return [board[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]


def turns(tile: np.ndarray) -> list[np.ndarray]:
    four = [np.rot90(tile, k) for k in range(4)]
    return [np.ascontiguousarray(t) for t in (*four, *(t[:, ::-1] for t in four))]


def test_a_slide_that_was_copied_again_is_cut_again(tmp_path: Path) -> None:
    (tmp_path / "panda" / "train_images").mkdir(parents=True)
    folder = panda(tmp_path / "panda", count=12)
    config = GleasonConfig(
        data=str(folder), out=tmp_path / "run", folds=3, tiles=4, px=64, mpp=2.0, distance=-1
    )
    broken = folder / "train_images" / "biopsy3.tiff"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:300])
    found = gleason.prepare(config)
    assert any("1 slides left out; biopsy3" in line for line in found.remarks)
    broken.write_bytes(whole)
    found = gleason.prepare(config)
    assert not any("left out" in line for line in found.remarks)
    parts = (found.train, found.valid, found.test)
    assert sum(len(part.labels) for part in parts) == 12


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    for make, said in (
        (
            lambda: MetastasisConfig(optimizer="lion"),
            "optimizer: 'lion' is unknown; choose one of adamw, adams, sharded, scape",
        ),
        (
            lambda: MetastasisConfig(preset="paper", optimizer="adams"),
            "optimizer: 'adams' is set, and the paper's preset trains with Adam; leave it out, or use "
            "preset = strict",
        ),
        (
            lambda: MetastasisConfig(features=tmp_path),
            "features: synthetic patches have none; give --data a CSV or PCam's folder",
        ),
        (
            lambda: MetastasisConfig(data="a.csv", features=tmp_path, preset="paper"),
            "features: the paper's preset trains on pixels; drop one of both",
        ),
        (
            lambda: MetastasisConfig(data="a.csv", features=tmp_path, pretrained="lite0"),
            "pretrained: features need no backbone; drop one of both",
        ),
        (lambda: MetastasisConfig(bag=0), "bag: 0 is too small; at least 1"),
        (
            lambda: GleasonConfig(optimizer="lion"),
            "optimizer: 'lion' is unknown; choose one of adamw, adams, sharded, scape",
        ),
        (
            lambda: GleasonConfig(features=tmp_path),
            "features: synthetic slides have none; give --data PANDA's folder",
        ),
        (
            lambda: GleasonConfig(data="d", features=tmp_path, pretrained="lite0"),
            "pretrained: features need no backbone; drop one of both",
        ),
        (lambda: GleasonConfig(offsets=0), "offsets: 0 is too small; at least 1"),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        assert str(error.value) == said


def test_kaggles_folder_has_no_features(tmp_path: Path) -> None:
    (tmp_path / "train_labels.csv").write_text("id,label\na,0\n")
    config = MetastasisConfig(data=str(tmp_path), features=tmp_path)
    with pytest.raises(DataError, match="Kaggle's folder is read as pixels; give --data a CSV"):
        metastasis.prepare(config)
