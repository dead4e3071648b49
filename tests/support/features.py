"""Files of features as CLAM and TRIDENT write them, with a signal that a small head can find."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

DIM = 16
SCORES = ("0+0", "3+3", "3+4", "4+3", "4+4", "4+5")
"""One Gleason score for each ISUP grade."""


def write_features(
    path: Path,
    values: NDArray[np.floating],
    *,
    layout: str = "trident",
    encoder: str | None = "uni_v1",
    side: int = 256,
    columns: int = 8,
) -> Path:
    """``values`` [N, D] on a grid of ``columns``, row by row, in the layout of either tool."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = np.arange(values.shape[-2])
    xy = np.stack([place % columns, place // columns], axis=1) * side
    with h5py.File(path, "w") as file:
        data = file.create_dataset("features", data=values)
        coords = file.create_dataset("coords", data=xy)
        if layout == "trident":
            if encoder is not None:
                data.attrs["encoder"] = encoder
            coords.attrs["patch_size"] = 256
            coords.attrs["patch_size_level0"] = side
            coords.attrs["overlap"] = 0
    return path


def bag(rng: np.random.Generator, *, strength: float, share: float = 0.3) -> NDArray[np.float32]:
    """20 to 40 tiles of noise, ``share`` of which bear ``strength`` of a fixed direction."""
    count = int(rng.integers(20, 41))
    values = rng.normal(size=(count, DIM))
    marked = max(round(share * count), 1)
    values[:marked, : DIM // 2] += strength
    values[:marked, DIM // 2 :] -= strength
    return values[rng.permutation(count)].astype(np.float32)


def slides_with_features(folder: Path, *, count: int, layout: str = "trident") -> Path:
    """A table of slides, half of them positive, and ``features/NAME.h5`` for each: the table's path."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "slides.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "patient"])
        for index in range(count):
            writer.writerow([f"slide{index}.svs", index % 2, f"p{index // 2}"])
            values = bag(rng, strength=1.5 * (index % 2))
            write_features(folder / "features" / f"slide{index}.h5", values, layout=layout)
    return folder / "slides.csv"


def biopsies_with_features(folder: Path, *, count: int) -> Path:
    """PANDA's table and ``features/ID.h5``: the folder's path."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "data_provider", "isup_grade", "gleason_score"])
        for index in range(count):
            grade = index % 6
            centre = ("karolinska", "radboud")[index // 6 % 2]
            writer.writerow([f"biopsy{index}", centre, grade, SCORES[grade]])
            values = bag(rng, strength=0.5 * grade, share=0.8)
            write_features(folder / "features" / f"biopsy{index}.h5", values)
    return folder
