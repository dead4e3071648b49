"""Frozen features: what files may hold, what is refused, bags, and the head over them."""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from planaria.errors import ConfigError, DataError
from planaria.pathology.attention import AttentionHead, FeatureConfig
from planaria.pathology.bundle import ModelCard, build
from planaria.pathology.datasets.features import (
    Bags,
    inspect_features,
    read_features,
    read_places,
    with_features,
)
from planaria.pathology.datasets.records import Record
from planaria.pathology.networks import NetworkConfig
from tests.support.features import write_features

VALUES = np.arange(60, dtype=np.float32).reshape(12, 5)


def test_files_of_both_tools_are_read(tmp_path: Path) -> None:
    trident = write_features(tmp_path / "a.h5", VALUES.astype(np.float16), columns=4)
    clam = write_features(tmp_path / "b.h5", VALUES[None], layout="clam", columns=4)
    assert (inspect_features(trident).dim, inspect_features(trident).encoder) == (5, "uni_v1")
    assert (inspect_features(clam).count, inspect_features(clam).encoder) == (12, "unknown")
    for path in (trident, clam):
        np.testing.assert_array_equal(read_features(path), VALUES)
        assert read_features(path).dtype == np.float32
        places = read_places(path)
        assert (places.grid.columns, places.grid.rows) == (4, 3)
        assert (places.grid.side, places.grid.step) == (256, 256)
        assert places.cells[5].tolist() == [1, 1]
        assert places.xy[5].tolist() == [256, 256]


def test_overlapping_tiles_have_a_finer_grid(tmp_path: Path) -> None:
    path = write_features(tmp_path / "a.h5", VALUES, side=512, columns=4)
    with h5py.File(path, "a") as file:
        coords = file["coords"]
        coords[...] = coords[()] // 2
        coords.attrs["overlap"] = 128
    places = read_places(path)
    assert (places.grid.side, places.grid.step, places.grid.columns) == (512, 256, 4)


def test_grids_that_start_anew_at_each_contour_have_their_own_step(tmp_path: Path) -> None:
    one = [(x, y) for y in (0, 256, 512) for x in (0, 256)]
    other = [(x + 1037, y + 3) for x, y in one]
    path = tmp_path / "clam.h5"
    with h5py.File(path, "w") as file:
        file["features"] = VALUES
        file["coords"] = np.array(one + other)
    places = read_places(path)
    assert (places.grid.side, places.grid.step) == (256, 256)
    assert len(np.unique(places.cells, axis=0)) == 12
    with h5py.File(path, "a") as file:
        file["coords"][...] = np.arange(24).reshape(12, 2) * 100
    assert read_places(path).grid.step == 200
    with h5py.File(path, "w") as file:
        file["features"] = VALUES[:1]
        file["coords"] = np.array([(5, 7)])
    assert (read_places(path).grid.step, read_places(path).grid.columns) == (256, 1)


def test_what_is_no_file_of_features(tmp_path: Path) -> None:
    def said(write: object, *, values: np.ndarray | None = None, key: str = "features") -> str:
        path = tmp_path / "x.h5"
        if values is None:
            path.write_bytes(write)  # type: ignore[arg-type]
        else:
            with h5py.File(path, "w") as file:
                file[key] = values
        with pytest.raises(DataError) as error:
            read_features(path)
        return str(error.value)

    assert said(b"no HDF5").startswith("x.h5: not an HDF5 file (")
    assert said(None, values=VALUES, key="feats") == (
        "x.h5: holds no data set 'features', only feats; extract them"
    )
    assert said(None, values=np.zeros((0,), np.float32)) == (
        "x.h5: holds no feature: the slide had no tile"
    )
    assert said(None, values=np.zeros((3, 4), np.int64)) == (
        "x.h5: features are (3, 4) of int64; expected (tiles, numbers) in floating point"
    )
    assert "features are (2, 3, 4) of float32" in said(None, values=np.zeros((2, 3, 4), np.float32))
    broken = VALUES.copy()
    broken[7, 2] = np.inf
    assert said(None, values=broken) == (
        "x.h5: the feature of tile 7 is not finite; extract it again (half precision overflows above "
        "65504)"
    )
    with pytest.raises(DataError, match=r"absent\.h5: no such file of features; extract them"):
        read_features(tmp_path / "absent.h5")


def test_a_truncated_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "features", data=np.ones((64, 64), np.float32), chunks=(8, 64), compression="gzip"
        )
    whole = path.read_bytes()
    damaged = bytearray(whole)
    # Within the first compressed chunk: the header stays readable, the values do not.
    start = whole.index(b"\x78\x5e") if b"\x78\x5e" in whole else whole.index(b"\x78\x9c")
    damaged[start : start + 16] = bytes(16)
    path.write_bytes(bytes(damaged))
    assert inspect_features(path).count == 64
    with pytest.raises(DataError, match=r"x\.h5: cannot be read \(.*\); the file is truncated"):
        read_features(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x\.h5: not an HDF5 file \("):
        read_features(path)


def test_places_that_are_none(tmp_path: Path) -> None:
    path = write_features(tmp_path / "a.h5", VALUES, layout="clam")
    with h5py.File(path, "a") as file:
        del file["coords"]
    with pytest.raises(DataError, match=r"a\.h5: holds no 'coords', so a heat-map has no places"):
        read_places(path)
    with h5py.File(path, "a") as file:
        file["coords"] = np.zeros((3, 2), np.int64)
    with pytest.raises(DataError, match=r"a\.h5: coords are \(3, 2\) for 12 features"):
        read_places(path)
    with h5py.File(path, "a") as file:
        del file["coords"]
        xy = np.arange(24).reshape(12, 2) * 4001
        xy[0] = (8003, 0)
        file["coords"] = xy
    with pytest.raises(DataError, match="cells lie on no grid; write coords with the attribute"):
        read_places(path)


def test_records_without_features_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("a", "c.d"):
        write_features(tmp_path / f"{name}.h5", VALUES)
    (tmp_path / "b.h5").write_bytes(b"broken")
    names = ("a.svs", "b.svs", "c.d", "e.svs")
    records = [Record(id=name, label=0) for name in names]
    kept, remarks = with_features(records, folder=tmp_path)
    assert [(r.id, r.path) for r in kept] == [
        ("a.svs", tmp_path / "a.h5"),
        ("c.d", tmp_path / "c.d.h5"),
    ]
    assert remarks[0].startswith("2 records left out; b.h5: not an HDF5 file")
    with pytest.raises(DataError, match=r"no record of 1 has features; e\.h5: no such file"):
        with_features(records[3:], folder=tmp_path)
    with pytest.raises(DataError, match=r"a\.tiff and a\.svs share a\.h5; rename one"):
        with_features([records[0], Record(id="a.tiff", label=1)], folder=tmp_path)
    with pytest.raises(
        DataError, match=r"features: .*nowhere is no folder; give the one that holds"
    ):
        with_features(records, folder=tmp_path / "nowhere")


def test_bags_tell_tiles_from_filling(tmp_path: Path) -> None:
    files = [write_features(tmp_path / f"{n}.h5", VALUES[:n]) for n in (3, 12)]
    bags = Bags(files)
    assert (len(bags), bags.dim, bags.encoder, bags.single) == (2, 5, "uni_v1", False)
    whole = bags.batch(np.array([0, 1]))
    assert whole.shape == (2, 12, 6)
    assert whole[..., -1].sum(axis=1).tolist() == [3, 12]
    assert (whole[0, 3:] == 0).all()
    np.testing.assert_array_equal(whole[1, :, :-1], VALUES)
    drawn = bags.batch(np.array([1, 0]), size=5, seed=7)
    assert drawn.shape == (2, 5, 6)
    rows = (drawn[0, :, 0] / 5).astype(int).tolist()
    assert rows == sorted(set(rows))
    np.testing.assert_array_equal(drawn, bags.batch(np.array([1, 0]), size=5, seed=7))
    others = [bags.batch(np.array([1]), size=5, seed=seed) for seed in range(5)]
    assert any(not np.array_equal(others[0], other) for other in others)


def test_one_file_of_single_tiles(tmp_path: Path) -> None:
    path = write_features(tmp_path / "train.h5", VALUES)
    bags = Bags([path], rows=range(12))
    assert (len(bags), bags.single) == (12, True)
    batch = bags.batch(np.array([4, 0]), size=1, seed=0)
    np.testing.assert_array_equal(batch[:, 0, :-1], VALUES[[4, 0]])
    again = pickle.loads(pickle.dumps(bags))
    np.testing.assert_array_equal(again.batch(np.array([4, 0])), batch)
    with pytest.raises(DataError, match=r"train\.h5: 12 features for 9 patches; the files do not"):
        Bags([path], rows=range(9))


def test_all_features_come_from_one_model(tmp_path: Path) -> None:
    files = [
        write_features(tmp_path / "a.h5", VALUES),
        write_features(tmp_path / "b.h5", VALUES, encoder="virchow"),
    ]
    with pytest.raises(DataError) as error:
        Bags(files)
    assert str(error.value) == (
        "b.h5: 5 numbers per tile by virchow, but a.h5 has 5 by uni_v1; all must come from one model"
    )


def test_filling_has_no_part_in_the_result() -> None:
    torch.manual_seed(0)
    head = AttentionHead(FeatureConfig(dim=5, hidden=8, classes=3)).eval()
    x = torch.cat([torch.randn(2, 7, 5), torch.ones(2, 7, 1)], dim=2)
    filled = torch.cat([x, torch.cat([torch.randn(2, 4, 5), torch.zeros(2, 4, 1)], dim=2)], dim=1)
    # Sums over 7 and over 11 numbers may be ordered otherwise.
    torch.testing.assert_close(head(filled), head(x), atol=1e-6, rtol=1e-5)
    logits, weight = head.tiles(filled)
    assert logits.shape == (2, 11, 3)
    assert (weight[:, 7:] == 0).all()
    torch.testing.assert_close(weight.sum(dim=1), torch.ones(2))
    # A bag's logits are its tiles', weighed.
    torch.testing.assert_close((weight[..., None] * logits).sum(dim=1), head(filled))
    # The order of tiles means nothing.
    torch.testing.assert_close(head(x.flip(1)), head(x), atol=1e-6, rtol=1e-5)


def test_a_wrong_shape_and_wrong_settings() -> None:
    head = AttentionHead(FeatureConfig(dim=5, hidden=8))
    with pytest.raises(DataError, match=r"shape \(2, 7, 5\); expected \[bags, tiles, 6\]"):
        head(torch.zeros(2, 7, 5))
    with pytest.raises(ConfigError, match="hidden is 0; at least 1"):
        FeatureConfig(dim=5, hidden=0)
    with pytest.raises(ConfigError, match=r"dropout is 1\.5; it must be 0 or more and below 1"):
        FeatureConfig(dim=5, dropout=1.5)


def test_a_card_says_what_the_model_sees() -> None:
    features = FeatureConfig(dim=5)
    assert isinstance(build(ModelCard(kind="metastasis", features=features)), AttentionHead)
    with pytest.raises(ConfigError, match=r"a model sees pixels \(network\) or features, one of"):
        ModelCard(kind="metastasis", features=features, network=NetworkConfig())
    with pytest.raises(ConfigError, match=r"a model sees pixels \(network\) or features, one of"):
        ModelCard(kind="metastasis")
    with pytest.raises(ConfigError, match="needs the colours of its training set"):
        ModelCard(kind="metastasis", network=NetworkConfig())
