"""The patches of a run in three parts, whatever form they come in. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planaria.errors import DataError
from planaria.pathology.datasets.features import Bags, with_features
from planaria.pathology.datasets.patches import (
    PX,
    FilePatches,
    H5Patches,
    load_kaggle,
    load_pcam,
)
from planaria.pathology.datasets.records import Record, Validation
from planaria.pathology.datasets.splits import (
    Duplicates,
    check_split,
    find_duplicates,
    grouped_folds,
    hash_files,
    units,
)
from planaria.pathology.datasets.table import load_table
from planaria.pathology.files import atomic
from planaria.pathology.synthetic.node import NodeConfig, patch
from planaria.recipes.metastasis.config import SYNTHETIC, MetastasisConfig

_log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]


class Patches(Protocol):
    """(uint8 [px, px, 3], label) by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Pixels, int]: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the split."""

    patches: Patches | Bags
    """Pixels, or frozen features: a row of them for each patch, or a bag for each slide."""
    labels: NDArray[np.int64]
    """[N], 0 or 1."""
    groups: NDArray[np.str_]
    """[N], the patient, slide or image that each patch belongs to."""
    centres: NDArray[np.str_]
    """[N], the laboratory; ``?`` where unknown."""

    def batch(self, ids: NDArray[np.int64]) -> tuple[Pixels, NDArray[np.int64]]:
        """Patches [B, px, px, 3] and labels [B]; of pixels only."""
        assert not isinstance(self.patches, Bags), "features have no pixels"
        rows = [self.patches[int(i)] for i in ids]
        return np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of a run."""

    train: Part
    valid: Part
    test: Part | None
    """None in the paper's preset, which tests on nothing."""
    name: str
    """What the patches are, for everything that is reported: ``synthetic tissue``, ``PCam``."""
    by: str
    """What the split keeps together: ``slide``, ``patient``, ``image``."""
    remarks: tuple[str, ...]
    """What a reader of the results must know."""


class Stored:
    """Synthetic patches from a memory-mapped file, shared by all workers of a machine."""

    def __init__(self, path: Path, *, labels: NDArray[np.int64]) -> None:
        self._pixels: Pixels = np.load(path, mmap_mode="r")
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        return np.array(self._pixels[index]), int(self._labels[index])


def prepare(config: MetastasisConfig) -> Prepared:
    """The parts of ``config.data``, validated; the same in every process.

    Raises:
        DataError: files are missing or wrong, a class is missing, or slides are too few to split.
    """
    if config.data == SYNTHETIC:
        return _synthetic(config)
    path = Path(config.data)
    if not path.exists():
        raise DataError(f"data: {path} does not exist; give a folder, a CSV or 'synthetic'")
    if path.is_file():
        records, found = load_table(path, classes=2, pixels=config.features is None)
        return _split(records, found, config)
    if (path / "train_labels.csv").is_file():
        if config.features is not None:
            raise DataError(
                "features: Kaggle's folder is read as pixels; give --data a CSV with columns file, "
                "label and slide"
            )
        records, found = load_kaggle(path)
        return _split(records, found, config)
    if list(path.glob("camelyonpatch_level_2_split_*_x.h5")):
        return _pcam(path, config.features)
    raise DataError(
        f"data: {path} holds neither PCam's camelyonpatch_level_2_split_*_x.h5 nor Kaggle's "
        "train_labels.csv; give one of these folders, or a CSV with columns file and label"
    )


def _synthetic(config: MetastasisConfig) -> Prepared:
    node = NodeConfig(laboratories=config.laboratories)
    parts: list[Part] = []
    for number, count in enumerate(config.synthetic):
        settings = json.dumps([asdict(node), number, count, config.seed], sort_keys=True)
        key = hashlib.sha256(settings.encode()).hexdigest()[:12]
        path = config.cache_folder / f"synthetic-{key}.npy"
        seed = 1000 * config.seed + number
        if not path.is_file():
            _log.info("making %s synthetic patches", f"{count:,}")
            pixels = np.stack([patch(i, seed=seed, config=node).rgb for i in range(count)])
            with atomic(path) as temporary, temporary.open("wb") as file:
                np.save(file, pixels)
        labels = np.arange(count, dtype=np.int64) % 2
        slide = np.arange(count) // node.patches_per_slide
        parts.append(
            Part(
                patches=Stored(path, labels=labels),
                labels=labels,
                groups=np.array([f"{seed}-{s:04d}" for s in slide]),
                centres=np.array([node.laboratory(int(s)) for s in slide]),
            )
        )
    return Prepared(
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        name="synthetic tissue",
        by="slide",
        remarks=("Synthetic tissue: the numbers say nothing about patients.",),
    )


def _pcam(folder: Path, features: Path | None) -> Prepared:
    parts: list[Part] = []
    remarks: list[str] = []
    everything: list[Record] = []
    where: list[str] = []
    for split in ("train", "valid", "test"):
        records, found = load_pcam(folder, split=split)
        found.raise_errors()
        remarks += found.remarks
        if features is None:
            path = folder / f"camelyonpatch_level_2_split_{split}_x.h5"
            patches = H5Patches(path, records=records)
        else:
            patches = Bags([features / f"{split}.h5"], rows=range(len(records)))
        parts.append(_part(records, patches))
        everything += records
        where += [split] * len(records)
    check_split(everything, parts=where)
    _check_classes(("train", "valid", "test"), parts)
    return Prepared(
        train=parts[0],
        valid=parts[1],
        test=parts[2],
        name="PCam, official split",
        by=_kept_together(everything),
        remarks=tuple(remarks),
    )


def _split(records: list[Record], found: Validation, config: MetastasisConfig) -> Prepared:
    found.raise_errors()
    remarks = list(found.remarks)
    if config.features is not None:
        records, left_out = with_features(records, folder=config.features)
        remarks += left_out
    if config.preset == "paper":
        parts = _by_image(records, seed=config.seed)
        remarks.append(
            "Split by image as in the released code: patches of one slide stand on both sides, and "
            "the split that is reported also chose the model."
        )
        return _prepared(
            records, parts, names=("train", "valid"), by="image", found=found, remarks=remarks
        )
    duplicates: Duplicates | None = None
    if config.features is not None:
        remarks.append("near-duplicates are not looked for among features")
    elif config.distance >= 0:
        duplicates = find_duplicates(
            records, hashes=hash_files(records, px=PX), distance=config.distance
        )
        remarks.append(duplicates.line())
        _log.info("%s", duplicates.line())
    # A tenth each for validation and test; more where there are fewer than ten slides.
    count = max(units(records, duplicates=duplicates)) + 1
    folds = grouped_folds(
        records, folds=min(10, max(3, count)), seed=config.seed, duplicates=duplicates
    )
    parts = np.where(folds == 0, "test", np.where(folds == 1, "valid", "train"))
    return _prepared(
        records,
        parts,
        names=("train", "valid", "test"),
        by=_kept_together(records),
        found=found,
        remarks=remarks,
        features=config.features,
    )


def _kept_together(records: Sequence[Record]) -> str:
    """What a split of ``records`` can keep together: ``slide``; ``image and slide`` where some of
    the slides are unknown."""
    return " and ".join(sorted({record.unit.split(" ")[0] for record in records}))


def _by_image(records: Sequence[Record], *, seed: int) -> NDArray[np.str_]:
    """90 % and 10 % of the images of each label, by chance."""
    rng = np.random.default_rng(seed)
    labels = np.array([record.label for record in records])
    parts = np.full(len(records), "train")
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        parts[members[: max(len(members) // 10, 1)]] = "valid"
    return parts


def _prepared(
    records: list[Record],
    parts: NDArray[np.str_],
    *,
    names: tuple[str, ...],
    by: str,
    found: Validation,
    remarks: list[str],
    features: Path | None = None,
) -> Prepared:
    made = [
        _part(chosen, FilePatches(chosen) if features is None else _bags(chosen))
        for chosen in ([r for r, p in zip(records, parts, strict=True) if p == n] for n in names)
    ]
    _check_classes(names, made)
    return Prepared(
        train=made[0],
        valid=made[1],
        test=made[2] if len(made) > 2 else None,
        name=found.contract.name,
        by=by,
        remarks=tuple(remarks),
    )


def _check_classes(names: Sequence[str], parts: Sequence[Part]) -> None:
    for name, part in zip(names, parts, strict=True):
        if len(np.unique(part.labels)) < 2:
            raise DataError(f"the {name} part holds one class only; more slides are needed")


def _bags(records: Sequence[Record]) -> Bags:
    return Bags([record.path for record in records if record.path is not None])


def _part(records: Sequence[Record], patches: Patches | Bags) -> Part:
    return Part(
        patches=patches,
        labels=np.array([record.label for record in records], dtype=np.int64),
        groups=np.array([record.unit for record in records]),
        centres=np.array([record.centre or "?" for record in records]),
    )
