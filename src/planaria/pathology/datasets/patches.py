"""PatchCamelyon in its two forms: the official HDF5 files, and Kaggle's folder of TIFF files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from planaria.errors import DataError
from planaria.pathology.datasets.records import (
    Contract,
    Record,
    Validation,
    is_name,
    read_label,
    read_table,
    validate,
)
from planaria.pathology.slides import refuse_mode

PX = 96
"""Pixels along one side of a patch."""

SPLITS = {"train": 262_144, "valid": 32_768, "test": 32_768}
"""Patches of each official part, half of them positive."""

KAGGLE = Contract(
    name="Kaggle Histopathologic Cancer Detection",
    licence="CC0 (PCam's), competition rules apply",
    source="PCam without duplicates, Kaggle 2018",
    columns=("id", "label"),
    count=220_025,
    per_label={0: 130_908, 1: 89_117},
)


def pcam_contract(split: str) -> Contract:
    """The contract of one official part."""
    if split not in SPLITS:
        raise DataError(f"split is {split!r}; PCam has {', '.join(SPLITS)}")
    count = SPLITS[split]
    return Contract(
        name=f"PCam {split}",
        licence="CC0",
        source="Veeling et al. 2018, from CAMELYON16",
        columns=("wsi",),
        count=count,
        per_label={0: count // 2, 1: count // 2},
    )


def load_pcam(folder: Path, *, split: str) -> tuple[list[Record], Validation]:
    """The records of one official part: ``camelyonpatch_level_2_split_SPLIT_{x,y}.h5``, ``_meta.csv``.

    DataError for missing files, keys or shapes. Without ``_meta.csv`` slides are unknown, which is a
    remark: a split of such records cannot be by slide.
    """
    contract = pcam_contract(split)
    stem = f"camelyonpatch_level_2_split_{split}"
    path_x, path_y, meta = (folder / f"{stem}_{end}" for end in ("x.h5", "y.h5", "meta.csv"))
    count = len(_array(path_x, key="x", shape=(PX, PX, 3), kinds="u", bits=8))
    labels = np.asarray(_array(path_y, key="y", shape=(1, 1, 1), kinds="iub")).reshape(-1)
    problems: list[str] = []
    if len(labels) != count:
        raise DataError(
            f"{path_y.name}: {len(labels)} labels for {count} patches of {path_x.name}; the files do "
            "not belong together"
        )
    slides: list[str | None] = [None] * count
    remarks: list[str] = []
    if meta.is_file():
        rows = read_table(meta, columns=contract.columns)
        if len(rows) != count:
            problems.append(f"{meta.name}: {len(rows)} rows for {count} patches")
        else:
            slides = [row["wsi"] for row in rows]
    else:
        remarks.append(f"{meta.name} is missing: slides are unknown")
    records = [
        Record(id=f"{split}-{row}", label=int(label), row=row, path=None, slide=slides[row])
        for row, label in enumerate(labels.tolist())
    ]
    found = validate(records, contract=contract, problems=problems)
    return records, Validation(
        contract=contract,
        count=found.count,
        complete=found.complete and not remarks,
        errors=found.errors,
        remarks=(*found.remarks, *remarks),
    )


def load_kaggle(folder: Path) -> tuple[list[Record], Validation]:
    """The records of ``train_labels.csv`` and ``train/ID.tif``.

    ``patch_id_wsi.csv`` (columns id, wsi), where the user has it, names the slides; without it no
    split by slide is possible, which is a remark.
    """
    rows = read_table(folder / "train_labels.csv", columns=KAGGLE.columns)
    slides: dict[str, str] = {}
    remarks: list[str] = []
    table = folder / "patch_id_wsi.csv"
    if table.is_file():
        slides = {row["id"]: row["wsi"] for row in read_table(table, columns=("id", "wsi"))}
    else:
        remarks.append("patch_id_wsi.csv is missing: slides are unknown")
    records = [
        Record(
            id=row["id"] or "",
            label=read_label(row["label"], where=f"train_labels.csv line {number}"),
            path=folder / "train" / f"{row['id']}.tif",
            slide=slides.get(row["id"]),
        )
        for number, row in enumerate(rows, start=2)
    ]
    known = {record.id for record in records}
    unknown = [name for name in slides if name not in known]
    alone = sum(record.slide is None for record in records) if slides else 0
    if alone:
        remarks.append(f"{alone} patches have no slide in patch_id_wsi.csv: each stands for itself")
    problems = (
        [f"patch_id_wsi.csv: id {unknown[0]!r} is not in train_labels.csv"] if unknown else []
    )
    problems += [
        f"train_labels.csv line {number}: id {record.id!r} is no file name"
        for number, record in enumerate(records, start=2)
        if not is_name(record.id)
    ]
    found = validate(records, contract=KAGGLE, problems=problems)
    return records, Validation(
        contract=KAGGLE,
        count=found.count,
        complete=found.complete and not remarks,
        errors=found.errors,
        remarks=(*found.remarks, *remarks),
    )


class H5Patches:
    """Patches of an HDF5 file: (uint8 array [96, 96, 3], label) by index; fits a torch DataLoader.

    The file is opened on first use in each process and never pickled, so loader workers and spawned
    processes each have their own handle.
    """

    def __init__(self, path: Path, *, records: Sequence[Record]) -> None:
        self._path = path
        self._rows = [record.row if record.row is not None else -1 for record in records]
        if -1 in self._rows:
            raise DataError(f"{path.name}: a record without a row; these are records of files")
        self._labels = [record.label for record in records]
        self._file: Any = None
        self._owner = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        if self._file is None or self._owner != os.getpid():
            self._file, self._owner = h5py.File(self._path, "r"), os.getpid()
        pixels: NDArray[np.uint8] = self._file["x"][self._rows[index]]
        return pixels, self._labels[index]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_owner": 0}


class FilePatches:
    """Patches of image files: (uint8 array [px, px, 3], label) by index.

    DataError for an image of another size, or that is grey, 16-bit or CMYK.
    """

    def __init__(self, records: Sequence[Record], *, px: int = PX) -> None:
        self._records = list(records)
        self._px = px

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        record = self._records[index]
        if record.path is None:
            raise DataError(f"{record.id}: a record without a file")
        try:
            with Image.open(record.path) as image:
                refuse_mode(record.path, image.mode)
                pixels = np.array(_on_white(image))
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(
                f"{record.path.name}: cannot be read ({error}); copy it again"
            ) from error
        if pixels.shape != (self._px, self._px, 3):
            raise DataError(
                f"{record.path.name}: {pixels.shape[1]}x{pixels.shape[0]} px; expected {self._px} px"
            )
        return pixels, record.label


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent is glass, and not black."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    over = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")


def _array(
    path: Path, *, key: str, shape: tuple[int, ...], kinds: str, bits: int | None = None
) -> NDArray[Any]:
    """The array ``key`` of an HDF5 file; pixels are not read, labels are."""
    if not path.is_file():
        raise DataError(f"{path.name}: missing; PCam's three files of a part stand in one folder")
    try:
        with h5py.File(path, "r") as file:
            data: Any = file.get(key)
            if not isinstance(data, h5py.Dataset):
                raise DataError(
                    f"{path.name}: holds no array {key!r}, only {', '.join(file) or 'nothing'}"
                )
            if tuple(data.shape[1:]) != shape:
                raise DataError(f"{path.name}: {key} is {tuple(data.shape)}; expected (N, {shape})")
            kind = data.dtype
            if kind.kind not in kinds or (bits is not None and kind.itemsize * 8 != bits):
                wanted = "8-bit pixels" if key == "x" else "whole numbers"
                raise DataError(f"{path.name}: {key} holds {kind}; expected {wanted}")
            return np.empty((data.shape[0], 0)) if key == "x" else data[:]
    except OSError as error:
        raise DataError(f"{path.name}: not an HDF5 file ({error}); copy it again") from error
