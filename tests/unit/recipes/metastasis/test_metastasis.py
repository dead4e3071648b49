"""The metastasis recipe: configuration, data in every form, presets."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from planaria.errors import ConfigError, DataError
from planaria.optim.choice import SparseConfig
from planaria.pathology.synthetic.node import patch
from planaria.recipes.metastasis import MetastasisConfig, prepare
from planaria.recipes.metastasis.config import as_toml
from planaria.recipes.metastasis.evaluate import measure, views, write_predictions
from planaria.recipes.metastasis.models import card, make
from planaria.recipes.metastasis.train import Job


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch": 0}, "batch: 0 is too small; at least 1"),
        ({"lr": 0.0}, "lr: 0.0 must be positive"),
        ({"synthetic": (64, 8, 64)}, "synthetic: (64, 8, 64): each part needs at least 64 patches"),
        ({"preset": "paper", "pretrained": "lite0"}, "pretrained: the paper's preset starts from"),
        ({"views": 9}, "views: 9 is outside 1 to 8"),
        ({"sensitivity": 0.0}, "sensitivity: 0.0 must be above 0 and up to 1"),
        ({"data": ""}, "data: '' names nothing; give a folder, a CSV or 'synthetic'"),
        ({"optimizer": "sgd"}, "optimizer: 'sgd' is unknown; choose one of adamw, adams"),
        (
            {"preset": "paper", "optimizer": "scape"},
            "optimizer: 'scape' is set, and the paper's preset trains with Adam; leave it out",
        ),
    ],
)
def test_configuration_errors(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        MetastasisConfig(**values)
    assert str(error.value).startswith(said)


def small(tmp_path: Path, **values: object) -> MetastasisConfig:
    plain = {
        "synthetic": (128, 64, 64),
        "out": tmp_path,
        "width": 0.25,
        "depth": 0.5,
        "stem_stride": 2,
    }
    return MetastasisConfig(**{**plain, **values})


def test_the_configuration_is_written_whole(tmp_path: Path) -> None:
    config = small(tmp_path, optimizer="scape", sparse=SparseConfig(unsent="local"))
    read = tomllib.loads(as_toml(config))["metastasis"]
    assert (read["optimizer"], read["out"]) == ("scape", str(tmp_path))
    assert SparseConfig(**read["sparse"]) == config.sparse


def test_synthetic_parts_share_no_slide(tmp_path: Path) -> None:
    data = prepare(small(tmp_path))
    assert data.test is not None
    groups = [set(p.groups.tolist()) for p in (data.train, data.valid, data.test)]
    assert len(set.union(*groups)) == sum(map(len, groups))
    assert data.name == "synthetic tissue"
    again = prepare(small(tmp_path))
    np.testing.assert_array_equal(
        data.train.batch(np.arange(4))[0], again.train.batch(np.arange(4))[0]
    )


def images(folder: Path, *, slides: int = 30, each: int = 4) -> Path:
    folder.mkdir()
    rows: list[list[str]] = []
    for index in range(slides * each):
        found = patch(index, seed=3)
        Image.fromarray(found.rgb).save(folder / f"{index}.png")
        rows.append([f"{index}.png", str(found.label), f"s{index // each}"])
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "label", "slide"], *rows])
    return folder / "images.csv"


def test_strict_splits_by_slide_and_paper_by_image(tmp_path: Path) -> None:
    table = images(tmp_path / "images")
    strict = prepare(small(tmp_path, data=str(table)))
    assert strict.test is not None
    assert strict.by == "slide"
    assert not set(strict.train.groups.tolist()) & set(strict.test.groups.tolist())
    assert "no near-duplicates within 4 bits" in strict.remarks
    paper = prepare(small(tmp_path, data=str(table), preset="paper"))
    assert paper.test is None
    assert paper.by == "image"
    assert set(paper.train.groups.tolist()) & set(paper.valid.groups.tolist())
    assert "patches of one slide stand on both sides" in paper.remarks[-1]


def test_the_papers_preset(tmp_path: Path) -> None:
    config = small(tmp_path, preset="paper")
    data = prepare(config)
    what = card(data, config)
    assert what.target.mean == (0.70017, 0.54368, 0.69611)
    assert config.fill == "zeros"
    assert (config.largest_norm, config.averaged_over) == (None, 1)
    job = Job(config, data)
    assert job.operating_point(np.zeros(3)) == (0.5, "nothing: it is fixed")
    job.order = type(job).build.__globals__["SampleOrder"](samples=128, seed=0, world=1, batch=32)
    assert [job.rate(done) for done in (0, 15 * 4 - 1, 15 * 4, 23 * 4)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    config = small(tmp_path)
    what = card(prepare(config), config)
    one, two = make(what, config).state_dict(), make(what, config).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert what.trained_on == "synthetic tissue"


def test_unknown_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither PCam's camelyonpatch_level_2_split"):
        prepare(small(tmp_path, data=str(tmp_path)))
    with pytest.raises(DataError, match=r"absent does not exist; give a folder, a CSV or"):
        prepare(small(tmp_path, data=str(tmp_path / "absent")))


def test_views_and_measures(tmp_path: Path) -> None:
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert len({v.numpy().tobytes() for v in views(x, 8)}) == 8
    assert len(views(x, 1)) == 1
    data = prepare(small(tmp_path))
    result = measure(data.valid, data.valid.labels.astype(float), threshold=0.5)
    assert result["overall"]["auc"] == 1.0
    assert (
        result["intervals"]["overall"]["auc"]["reason"]
        == "1 groups are too few for an interval; it needs at least 5"
    )


def test_predictions_are_kept_patch_by_patch(tmp_path: Path) -> None:
    data = prepare(small(tmp_path, laboratories="B"))
    assert set(data.valid.centres.tolist()) == {"B"}
    probability = np.linspace(0, 1, len(data.valid.labels))
    write_predictions(tmp_path / "predictions.csv", data.valid, probability=probability)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["probability"]) for row in rows] == probability.tolist()
    assert [int(row["label"]) for row in rows] == data.valid.labels.tolist()
    assert rows[3] == {
        "number": "3",
        "group": "1-0000",
        "centre": "B",
        "label": "1",
        "probability": str(probability[3]),
    }
