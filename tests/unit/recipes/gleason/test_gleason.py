"""The Gleason recipe: configuration, tiles, broken slides, cuts across folds."""

from __future__ import annotations

import csv
import json
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from planaria.errors import ConfigError, DataError
from planaria.optim.choice import SparseConfig
from planaria.pathology.datasets.panda import CONTRACT
from planaria.pathology.synthetic.prostate import BiopsyConfig, biopsy
from planaria.pathology.synthetic.tree import write_pyramid
from planaria.recipes.gleason import GleasonConfig, prepare
from planaria.recipes.gleason.config import as_toml
from planaria.recipes.gleason.evaluate import fit_across


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": "x"}, "loss: 'x' is unknown; choose one of qwmse, qwmse-ordinal"),
        ({"dc": "x"}, "dc: 'x' is unknown; choose one of batchnorm, affine"),
        ({"tiles": 10}, "tiles is 10; a board needs a square number"),
        ({"fold": 5}, "fold: 5 of 5; at least 3 folds, counted from 0"),
        ({"strength": -1.0}, "strength: -1.0 is negative; 0 or more"),
        ({"synthetic": 3}, "synthetic: 3 slides; at least 12"),
        ({"optimizer": "sgd"}, "optimizer: 'sgd' is unknown; choose one of adamw, adams"),
    ],
)
def test_configuration_errors(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        GleasonConfig(**values)
    assert str(error.value).startswith(said)


def test_the_configuration_is_written_whole(tmp_path: Path) -> None:
    config = GleasonConfig(out=tmp_path, optimizer="scape", sparse=SparseConfig(density=0.1))
    read = tomllib.loads(as_toml(config))["gleason"]
    assert (read["optimizer"], read["out"]) == ("scape", str(tmp_path))
    assert SparseConfig(**read["sparse"]) == config.sparse


def panda(folder: Path, count: int = 12) -> Path:
    """A small tree of real pyramids in PANDA's layout, one slide white and one cut short."""
    (folder / "train_images").mkdir(parents=True)
    rows: list[list[str]] = []
    for index in range(count):
        found = biopsy(index, seed=8, config=BiopsyConfig(width=384, height=192, pen=0.0))
        name = f"{index:032x}"
        pixels = found.rgb if index != 3 else np.full((192, 384, 3), 245, np.uint8)
        path = folder / "train_images" / f"{name}.tiff"
        write_pyramid(path, pixels, mpp=1.0)
        if index == 4:
            path.write_bytes(path.read_bytes()[:3000])
        rows.append([name, "radboud", str(found.isup), found.gleason])
    with (folder / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([CONTRACT.columns, *rows])
    return folder


def test_broken_and_empty_slides_are_left_out_and_counted(tmp_path: Path) -> None:
    config = GleasonConfig(
        data=str(panda(tmp_path / "panda")),
        out=tmp_path / "run",
        tiles=4,
        px=32,
        folds=3,
        mpp=2.0,
    )
    data = prepare(config)
    sizes = [len(p.labels) for p in (data.train, data.valid, data.test)]
    assert sum(sizes) == 10
    assert min(sizes) >= 1
    assert any(r.startswith("2 slides left out; ") and "no tissue" in r for r in data.remarks)
    names = [set(p.names) for p in (data.train, data.valid, data.test)]
    assert len(set.union(*names)) == sum(map(len, names))
    before = {f: f.stat().st_mtime_ns for f in data.train.files}
    assert prepare(config).train.names == data.train.names
    assert {f: f.stat().st_mtime_ns for f in data.train.files} == before
    boards = data.train.boards(np.arange(2), config, seed=None)
    assert boards.shape == (2, 64, 64, 3)
    np.testing.assert_array_equal(boards, data.train.boards(np.arange(2), config, seed=None))
    drawn = [data.train.boards(np.arange(2), config, seed=s) for s in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_cuts_across_folds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    runs: list[Path] = []
    for fold in range(2):
        grades = rng.integers(0, 6, 60)
        scores = 0.5 * grades + 1.2 + rng.normal(0, 0.1, 60)
        rows = [
            {"slide": f"{fold}-{i}", "grade": int(g), "score": float(s)}
            for i, (g, s) in enumerate(zip(grades, scores, strict=True))
        ]
        runs.append(tmp_path / str(fold))
        runs[-1].mkdir()
        (runs[-1] / "predictions.json").write_text(json.dumps(rows))
    cuts = fit_across(runs)
    assert cuts == pytest.approx([1.45, 1.95, 2.45, 2.95, 3.45], abs=0.15)
    with pytest.raises(DataError, match="slide 0-0 stands in another fold, too"):
        fit_across([runs[0], runs[0]])
    with pytest.raises(DataError, match=r"predictions.json: missing; train every fold first"):
        fit_across([tmp_path / "absent"])


def test_tiles_of_other_laboratories_and_seeds_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(BiopsyConfig, width=384, height=192)
    monkeypatch.setattr("planaria.recipes.gleason.data.BiopsyConfig", small)
    plain = {
        "synthetic": 12,
        "cache": tmp_path / "cache",
        "tiles": 1,
        "px": 64,
        "mpp": 4.0,
        "folds": 3,
        "distance": -1,
    }

    def tiles(**values: object) -> tuple[list[str], dict[str, bytes]]:
        data = prepare(GleasonConfig(**{**plain, **values}))
        parts = (data.train, data.valid, data.test)
        files = {n: f for p in parts for n, f in zip(p.names, p.files, strict=True)}
        found = {name: np.load(file).tobytes() for name, file in files.items()}
        return sorted(data.test.names), found

    test, first = tiles(seed=1)
    assert sorted(first) == [f"synthetic-biopsy-1-{number:05d}" for number in range(12)]
    # The same slides under another seed, split in another way.
    other, again = tiles(seed=2, slides_seed=1)
    assert again == first
    assert other != test
    assert not set(tiles(seed=2)[1]) & set(first)
    stained = tiles(seed=1, laboratories="B")[1]
    assert sorted(stained) == sorted(first)
    same = [stained[name] == first[name] for name in sorted(first)]
    # The second six of both come from laboratory B.
    assert same == [False] * 6 + [True] * 6
