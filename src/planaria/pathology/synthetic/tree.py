"""Synthetic biopsies as a folder in PANDA's layout: pyramidal TIFF files, masks and ``train.csv``."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image

from planaria.pathology.files import atomic
from planaria.pathology.progress import told
from planaria.pathology.slides import Pixels
from planaria.pathology.synthetic.prostate import BiopsyConfig, biopsy, facts

_log = logging.getLogger(__name__)


def write_tree(
    folder: Path, *, count: int, seed: int = 0, config: BiopsyConfig | None = None, first: int = 0
) -> Path:
    """Writes biopsies ``first`` to ``first + count - 1`` of the set ``seed`` below ``folder``.

    Files that are there stay, so a broken-off call goes on; ``train.csv`` comes last. Laboratories
    are named ``synthetic-A`` and ``synthetic-B``.
    """
    config = config or BiopsyConfig()
    rows: list[list[str | int]] = []
    for index in told(range(first, first + count), "synthetic slides", say=_log.info):
        known = facts(index, seed=seed, config=config)
        image = folder / "train_images" / f"{known.name}.tiff"
        if not image.is_file():
            found = biopsy(index, seed=seed, config=config)
            mask = folder / "train_label_masks" / f"{known.name}_mask.tiff"
            with atomic(mask) as temporary:
                tifffile.imwrite(temporary, found.mask, compression="zlib", metadata=None)
            # The image comes last: where it is, the mask is.
            write_pyramid(image, found.rgb, mpp=config.mpp)
        rows.append([known.name, f"synthetic-{known.laboratory}", known.isup, known.gleason])
    with atomic(folder / "train.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "data_provider", "isup_grade", "gleason_score"])
        writer.writerows(rows)
    return folder


def write_pyramid(
    path: Path, pixels: Pixels, *, mpp: float, downsamples: tuple[float, ...] = (4.0, 16.0)
) -> None:
    """A tiled TIFF that OpenSlide reads: levels are top-level pages, since it ignores SubIFDs."""
    options: dict[str, Any] = {
        "photometric": "rgb",
        "tile": (256, 256),
        "compression": "zlib",
        "metadata": None,
    }
    per_cm = 1e4 / mpp
    with atomic(path) as temporary, tifffile.TiffWriter(temporary) as writer:
        writer.write(pixels, resolution=(per_cm, per_cm), resolutionunit="CENTIMETER", **options)
        for down in downsamples:
            size = (max(round(pixels.shape[1] / down), 1), max(round(pixels.shape[0] / down), 1))
            small = Image.fromarray(pixels).resize(size, Image.Resampling.BOX)
            writer.write(np.asarray(small), subfiletype=1, **options)
