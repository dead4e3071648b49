"""Data sets in miniature: the real trees' names and shapes, right and wrong."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from planaria.errors import DataError
from planaria.pathology.datasets.panda import (
    CONTRACT,
    SYNTHETIC,
    grade_of_score,
    load_panda,
)
from planaria.pathology.datasets.patches import (
    KAGGLE,
    SPLITS,
    FilePatches,
    H5Patches,
    load_kaggle,
    load_pcam,
    pcam_contract,
)
from planaria.pathology.datasets.records import Record, validate
from planaria.pathology.datasets.splits import (
    check_split,
    find_duplicates,
    grouped_folds,
    hash_files,
    units,
)
from planaria.pathology.datasets.table import load_table
from planaria.pathology.slides import open_slide
from planaria.pathology.synthetic.node import patch
from planaria.pathology.synthetic.prostate import BiopsyConfig
from planaria.pathology.synthetic.tree import write_tree
from planaria.recipes.metastasis import MetastasisConfig, prepare

PANDA_ROWS = [
    ("a" * 32, "karolinska", "0", "0+0"),
    ("b" * 32, "radboud", "0", "negative"),
    ("c" * 32, "radboud", "2", "3+4"),
    ("d" * 32, "karolinska", "5", "5+4"),
]


def write_csv(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def panda(folder: Path, rows: list[tuple[str, ...]] = PANDA_ROWS) -> Path:
    (folder / "train_images").mkdir(parents=True, exist_ok=True)
    (folder / "train_label_masks").mkdir(exist_ok=True)
    for name, *_ in rows:
        (folder / "train_images" / f"{name}.tiff").touch()
    (folder / "train_label_masks" / f"{rows[0][0]}_mask.tiff").touch()
    write_csv(folder / "train.csv", CONTRACT.columns, rows)
    return folder


def test_the_contract_of_panda_adds_up() -> None:
    assert CONTRACT.count == 10_616
    assert sum(CONTRACT.per_label.values()) == 10_616
    assert sum(CONTRACT.per_centre.values()) == 10_616
    assert "never shipped" in CONTRACT.licence


def test_panda_in_miniature(tmp_path: Path) -> None:
    records, found = load_panda(panda(tmp_path))
    assert [(r.label, r.centre) for r in records] == [
        (0, "karolinska"),
        (0, "radboud"),
        (2, "radboud"),
        (5, "karolinska"),
    ]
    assert records[0].mask is not None
    assert records[1].mask is None
    assert found.errors == ()
    assert not found.complete
    assert found.remarks[0] == "4 of 10616 images: a subset"
    assert "label 1: 0 of 2666" in found.remarks


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("e", "radboud", "7", "3+4"), "line 6: 3+4 is ISUP 2, the table says 7"),
        (("e", "radboud", "3", "3+4"), "line 6: 3+4 is ISUP 2, the table says 3"),
        (("e", "radboud", "2", "3+9"), "line 6: gleason_score '3+9' is not known"),
        (("e", "utrecht", "2", "3+4"), "line 6: data_provider 'utrecht' is not known"),
        (("c" * 32, "radboud", "2", "3+4"), f"id {'c' * 32!r} stands 2 times; keep one"),
    ],
)
def test_wrong_rows_of_panda(tmp_path: Path, row: tuple[str, ...], said: str) -> None:
    _, found = load_panda(panda(tmp_path, [*PANDA_ROWS, row]))
    assert said in "; ".join(found.errors)
    with pytest.raises(DataError, match="PANDA: "):
        found.raise_errors()


def test_panda_without_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.csv: no such table; check the folder"):
        load_panda(tmp_path)
    folder = panda(tmp_path)
    (folder / "train_images" / f"{'a' * 32}.tiff").unlink()
    (folder / "train_images" / "stray.tiff").touch()
    _, found = load_panda(folder)
    assert found.errors == (f"{'a' * 32}: {'a' * 32}.tiff is missing",)
    assert "1 images without a row, stray first: left out" in found.remarks
    write_csv(folder / "train.csv", ("image_id", "isup_grade"), [("a", "0")])
    with pytest.raises(DataError, match=r"train.csv: column 'data_provider' is missing; it has"):
        load_panda(folder)
    write_csv(folder / "train.csv", CONTRACT.columns, [("a", "radboud", "high", "3+4")])
    with pytest.raises(DataError, match=r"train.csv line 2: label 'high' is not a whole number"):
        load_panda(folder)


def test_the_one_published_inconsistency_is_a_remark(tmp_path: Path) -> None:
    rows = [*PANDA_ROWS, ("e", "karolinska", "2", "4+3")]
    _, found = load_panda(panda(tmp_path, rows))
    assert found.errors == ()
    assert "e: 4+3 graded 2, as published" in found.remarks
    assert [grade_of_score(s) for s in ("3+3", "4+4", "5+5", "x")] == [1, 4, 5, None]


def test_a_synthetic_tree_is_read_as_panda_is_and_opens_as_slides(tmp_path: Path) -> None:
    config = BiopsyConfig(width=512, height=256)
    write_tree(tmp_path, count=6, seed=1, config=config)
    records, found = load_panda(tmp_path, contract=SYNTHETIC)
    assert found.errors == ()
    assert [r.label for r in records] == [0, 1, 2, 3, 4, 5]
    assert {r.centre for r in records} == {"synthetic-A"}
    assert records[0].path is not None
    slide = open_slide(records[0].path)
    assert slide.info.reader == "openslide/generic-tiff"
    assert [round(level.downsample) for level in slide.info.levels] == [1, 4, 16]
    assert slide.info.resolution.mpp == pytest.approx(1.0)
    slide.close()
    before = records[0].path.stat().st_mtime_ns
    write_tree(tmp_path, count=6, seed=1, config=config)
    assert records[0].path.stat().st_mtime_ns == before


def pcam(folder: Path, *, split: str = "train", count: int = 8, meta: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    stem = f"camelyonpatch_level_2_split_{split}"
    patches = [patch(i, seed=9) for i in range(count)]
    with h5py.File(folder / f"{stem}_x.h5", "w") as file:
        file["x"] = np.stack([p.rgb for p in patches])
    with h5py.File(folder / f"{stem}_y.h5", "w") as file:
        file["y"] = np.array([p.label for p in patches], np.uint8).reshape(-1, 1, 1, 1)
    if meta:
        rows = [("0", "0", "0", "0", "0", f"wsi-{split}-{i // 4}") for i in range(count)]
        header = ("", "coord_y", "coord_x", "tumor_patch", "center_tumor_patch", "wsi")
        write_csv(folder / f"{stem}_meta.csv", header, rows)
    return folder


def test_pcam_in_miniature(tmp_path: Path) -> None:
    assert SPLITS == {"train": 262_144, "valid": 32_768, "test": 32_768}
    assert pcam_contract("train").per_label == {0: 131_072, 1: 131_072}
    records, found = load_pcam(pcam(tmp_path), split="train")
    assert [r.label for r in records] == [0, 1] * 4
    assert records[5].slide == "wsi-train-1"
    assert found.errors == ()
    assert found.remarks[0] == "8 of 262144 images: a subset"
    data = H5Patches(tmp_path / "camelyonpatch_level_2_split_train_x.h5", records=records)
    pixels, label = data[3]
    np.testing.assert_array_equal(pixels, patch(3, seed=9).rgb)
    assert label == 1


def test_the_file_is_opened_once_per_worker_and_never_pickled(tmp_path: Path) -> None:
    records, _ = load_pcam(pcam(tmp_path), split="train")
    data = H5Patches(tmp_path / "camelyonpatch_level_2_split_train_x.h5", records=records)
    _ = data[0]
    first = data._file
    _ = data[1]
    assert data._file is first
    # torchvision's PCAM cannot be pickled, so no loader can spawn its workers.
    copy = pickle.loads(pickle.dumps(data))
    assert copy._file is None
    loader = torch.utils.data.DataLoader(
        copy, batch_size=4, num_workers=1, multiprocessing_context="spawn"
    )
    pixels, labels = next(iter(loader))
    assert pixels.shape == (4, 96, 96, 3)
    assert labels.tolist() == [0, 1, 0, 1]


def test_wrong_pcam_files(tmp_path: Path) -> None:
    stem = "camelyonpatch_level_2_split_train"
    with pytest.raises(DataError, match="split is 'dev'; PCam has train, valid, test"):
        load_pcam(tmp_path, split="dev")
    with pytest.raises(DataError, match=f"{stem}_x.h5: missing; PCam's three files of a part"):
        load_pcam(tmp_path, split="train")
    _, found = load_pcam(pcam(tmp_path, meta=False), split="train")
    assert f"{stem}_meta.csv is missing: slides are unknown" in found.remarks
    with h5py.File(tmp_path / f"{stem}_y.h5", "w") as file:
        file["labels"] = np.zeros(3)
    with pytest.raises(DataError, match=f"{stem}_y.h5: holds no array 'y', only labels"):
        load_pcam(tmp_path, split="train")
    with h5py.File(tmp_path / f"{stem}_y.h5", "w") as file:
        file["y"] = np.zeros((3, 1, 1, 1), np.uint8)
    with pytest.raises(DataError, match="3 labels for 8 patches"):
        load_pcam(tmp_path, split="train")
    with h5py.File(tmp_path / f"{stem}_y.h5", "w") as file:
        file["y"] = np.full((8, 1, 1, 1), np.nan)
    with pytest.raises(DataError, match=f"{stem}_y.h5: y holds float64; expected whole numbers"):
        load_pcam(tmp_path, split="train")
    with h5py.File(tmp_path / f"{stem}_y.h5", "w") as file:
        file.create_group("y")
    with pytest.raises(DataError, match=f"{stem}_y.h5: holds no array 'y', only y"):
        load_pcam(tmp_path, split="train")
    with h5py.File(tmp_path / f"{stem}_x.h5", "w") as file:
        file["x"] = np.zeros((8, 96, 96, 3), np.uint16)
    with pytest.raises(DataError, match=f"{stem}_x.h5: x holds uint16; expected 8-bit pixels"):
        load_pcam(tmp_path, split="train")
    (tmp_path / f"{stem}_x.h5").write_text("no")
    with pytest.raises(DataError, match=f"{stem}_x.h5: not an HDF5 file"):
        load_pcam(tmp_path, split="train")


def kaggle(folder: Path, *, slides: bool = True) -> Path:
    (folder / "train").mkdir(parents=True, exist_ok=True)
    names = [f"{i:040x}" for i in range(8)]
    for index, name in enumerate(names):
        Image.fromarray(patch(index, seed=9).rgb).save(folder / "train" / f"{name}.tif")
    rows = [(name, str(i % 2)) for i, name in enumerate(names)]
    write_csv(folder / "train_labels.csv", KAGGLE.columns, rows)
    if slides:
        write_csv(
            folder / "patch_id_wsi.csv",
            ("id", "wsi"),
            [(name, f"camelyon16_train_tumor_{i // 2:03d}") for i, name in enumerate(names)],
        )
    return folder


def test_kaggle_in_miniature(tmp_path: Path) -> None:
    assert sum(KAGGLE.per_label.values()) == KAGGLE.count == 220_025
    records, found = load_kaggle(kaggle(tmp_path))
    assert found.errors == ()
    assert records[3].slide == "camelyon16_train_tumor_001"
    pixels, label = FilePatches(records)[3]
    np.testing.assert_array_equal(pixels, patch(3, seed=9).rgb)
    assert label == 1
    (tmp_path / "patch_id_wsi.csv").unlink()
    assert "patch_id_wsi.csv is missing: slides are unknown" in load_kaggle(tmp_path)[1].remarks
    write_csv(tmp_path / "patch_id_wsi.csv", ("id", "wsi"), [(records[0].id, "s")])
    said = f"{len(records) - 1} patches have no slide in patch_id_wsi.csv: each stands for itself"
    assert said in load_kaggle(tmp_path)[1].remarks


def test_wrong_kaggle_rows(tmp_path: Path) -> None:
    folder = kaggle(tmp_path)
    write_csv(folder / "patch_id_wsi.csv", ("id", "wsi"), [("zebra", "1")])
    _, found = load_kaggle(folder)
    assert found.errors == ("patch_id_wsi.csv: id 'zebra' is not in train_labels.csv",)
    (folder / "patch_id_wsi.csv").unlink()
    rows = [("absent", "1"), (f"{0:040x}", "2")]
    write_csv(folder / "train_labels.csv", KAGGLE.columns, rows)
    _, found = load_kaggle(folder)
    assert found.errors == (
        "absent: absent.tif is missing",
        f"{0:040x}: label 2 is outside 0 to 1",
    )
    Image.new("RGB", (50, 50)).save(folder / "train" / f"{1:040x}.tif")
    small = Record(id="s", label=0, path=folder / "train" / f"{1:040x}.tif")
    with pytest.raises(DataError, match=r"1.tif: 50x50 px; expected 96 px"):
        FilePatches([small])[0]
    with pytest.raises(DataError, match=r"1.tif: 50x50 px; expected 96 px"):
        hash_files([small], px=96)
    write_csv(folder / "train_labels.csv", KAGGLE.columns, [("../up", "1")])
    _, found = load_kaggle(folder)
    assert found.errors[0] == "train_labels.csv line 2: id '../up' is no file name"
    (folder / "train_labels.csv").write_bytes(b"id,label\n\xff,1\n")
    with pytest.raises(DataError, match=r"train_labels\.csv: not a CSV in UTF-8 \("):
        load_kaggle(folder)


def test_a_few_slides_are_split_as_evenly_as_they_allow(tmp_path: Path) -> None:
    names = [f"a{i}" for i in range(48)]
    rng = np.random.default_rng(0)
    (tmp_path / "train").mkdir()
    for name in names:
        noise = rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "train" / f"{name}.tif")
    write_csv(
        tmp_path / "train_labels.csv",
        KAGGLE.columns,
        [(name, str(i % 2)) for i, name in enumerate(names)],
    )
    slides = [(name, f"s{i // 12}") for i, name in enumerate(names)]
    write_csv(tmp_path / "patch_id_wsi.csv", ("id", "wsi"), slides)
    found = prepare(MetastasisConfig(data=str(tmp_path), out=tmp_path / "out"))
    assert found.test is not None
    groups = [set(part.groups) for part in (found.train, found.valid, found.test)]
    assert [len(group) for group in groups] == [2, 1, 1]
    assert len(set.union(*groups)) == 4
    write_csv(tmp_path / "train_labels.csv", KAGGLE.columns, [(name, "1") for name in names])
    with pytest.raises(DataError, match="the train part holds one class only; more slides are"):
        prepare(MetastasisConfig(data=str(tmp_path), out=tmp_path / "out"))


def test_a_table_of_images(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (96, 96)).save(tmp_path / name)
    table = tmp_path / "images.csv"
    rows = [("a.png", "0", "p1"), ("b.png", "1", "p2")]
    write_csv(table, ("file", "label", "patient"), rows)
    records, found = load_table(table, classes=2)
    assert found.errors == ()
    assert [r.unit for r in records] == ["patient p1", "patient p2"]
    write_csv(table, ("file", "label"), [("../secret.png", "0")])
    with pytest.raises(DataError, match=r"images.csv line 2: '../secret.png' is outside"):
        load_table(table, classes=2)


def records(count: int, *, per_unit: int = 4) -> list[Record]:
    return [
        Record(
            id=str(i),
            label=(i // per_unit) % 2,
            slide=f"s{i // per_unit}",
            patient=f"p{i // (2 * per_unit)}" if i % 16 < 8 else None,
            centre="AB"[i % 2],
        )
        for i in range(count)
    ]


def test_folds_keep_patients_and_slides_together_and_labels_even() -> None:
    made = records(800)
    folds = grouped_folds(made, folds=5, seed=3)
    check_split(made, parts=folds.tolist())
    labels = np.array([r.label for r in made])
    for fold in range(5):
        assert 140 <= (folds == fold).sum() <= 180
        assert 0.4 < labels[folds == fold].mean() < 0.6
    np.testing.assert_array_equal(folds, grouped_folds(made, folds=5, seed=3))
    assert not np.array_equal(folds, grouped_folds(made, folds=5, seed=4))
    with pytest.raises(DataError, match="2 patients or slides cannot fill 5 folds; use fewer"):
        grouped_folds(records(8, per_unit=2)[:6], folds=5)


def test_a_split_that_tears_is_refused() -> None:
    made = records(16)
    parts = ["train"] * 8 + ["test"] * 8
    check_split(made, parts=parts)
    parts[0] = "test"
    with pytest.raises(DataError, match="patient p0 stands in parts test and train; its images"):
        check_split(made, parts=parts)


def test_near_duplicates_are_found_joined_and_kept_together(tmp_path: Path) -> None:
    made: list[Record] = []
    rng = np.random.default_rng(0)
    for index in range(20):
        pixels = patch(index, seed=5).rgb
        if index in (7, 13):
            pixels = patch(2, seed=5).rgb.astype(int) + rng.integers(-4, 5, (96, 96, 3))
        path = tmp_path / f"{index}.png"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
        made.append(Record(id=str(index), label=index % 2, path=path))
    found = find_duplicates(made, hashes=hash_files(made), distance=4)
    assert found.groups == (("2", "7", "13"),)
    assert found.mixed == 1
    assert found.line().startswith(
        "3 images form 1 groups of near-duplicates (within 4 bits), 1 of"
    )
    joined = units(made, duplicates=found)
    assert joined[2] == joined[7] == joined[13]
    assert len(set(joined)) == 18
    folds = grouped_folds(made, folds=4, duplicates=found)
    assert folds[2] == folds[7] == folds[13]
    parts = ["a"] * 13 + ["b"] * 7
    with pytest.raises(DataError, match="near-duplicates 2 and 2 more stand in parts a, b; they"):
        check_split(made, parts=parts, duplicates=found)


def test_many_white_patches_are_one_group_in_no_time() -> None:
    made = [Record(id=str(index), label=0) for index in range(20_000)]
    # Twenty thousand equal ones have 200 million pairs; one differs by 2 bits, one by 40.
    hashes = {record.id: 0 for record in made} | {"7": 3, "9": 2**40 - 1}
    found = find_duplicates(made, hashes=hashes, distance=2)
    assert [len(group) for group in found.groups] == [19_999]
    assert "9" not in found.groups[0]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("L", r"x.tif: grey \(mode L\); stains need colour"),
        ("I;16", r"x.tif: pixel mode I;16; convert it to 8-bit RGB"),
        ("CMYK", r"x.tif: CMYK \(a print export\); convert it to sRGB"),
    ],
)
def test_patches_without_colour_are_refused(tmp_path: Path, mode: str, said: str) -> None:
    Image.new(mode, (96, 96)).save(tmp_path / "x.tif")
    record = Record(id="x", label=0, path=tmp_path / "x.tif")
    with pytest.raises(DataError, match=said):
        FilePatches([record])[0]
    with pytest.raises(DataError, match=said):
        hash_files([record])


def test_what_is_transparent_in_a_patch_is_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (96, 96), (10, 20, 30, 255))
    image.paste((0, 0, 0, 0), (0, 0, 96, 48))
    image.save(tmp_path / "x.png")
    pixels, _ = FilePatches([Record(id="x", label=0, path=tmp_path / "x.png")])[0]
    assert (pixels[:48] == 255).all()
    assert (pixels[48:] == (10, 20, 30)).all()


def test_an_empty_set_is_an_error() -> None:
    assert validate([], contract=KAGGLE).errors == ("no image at all; check the folder",)
