"""Frozen features of a foundation model, from the H5 files that CLAM and TRIDENT write.

``features`` [N, D] of N tiles (also [1, N, D], as some versions have it) and ``coords`` [N, 2] in
level-0 pixels. Nothing here imports torch. Source: CLAM's ``extract_features_fp.py``, TRIDENT's
``extract_patch_features``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from planaria.errors import ConfigError, DataError
from planaria.pathology.datasets.records import Record
from planaria.pathology.tiles import Grid

MAX_CELLS = 25_000_000
"""Cells of a grid over a slide's places: 100 MB of values. More means that the places lie on none."""


@dataclass(frozen=True, kw_only=True)
class FeatureFile:
    """What a file says without its values being read."""

    count: int
    """Tiles, N."""
    dim: int
    """Numbers per tile, D."""
    encoder: str
    """The model that made them, as newer TRIDENT versions say; else ``unknown``."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the tiles of a file lie."""

    xy: NDArray[np.int64]
    """[N, 2], level-0 px of the top left."""
    grid: Grid
    """The grid that they lie on."""
    cells: NDArray[np.int64]
    """[N, 2], column and row of each tile on that grid."""


def inspect_features(path: Path) -> FeatureFile:
    """Count, size and origin of a file's features; DataError for anything that is none."""
    with _reading(path) as file:
        return _facts(path, file)


def read_features(path: Path) -> NDArray[np.float32]:
    """The features [N, D] of a file; DataError where one is not finite."""
    with _reading(path) as file:
        _facts(path, file)
        data: Any = file["features"]
        values = np.asarray(data[()], dtype=np.float32)
    return _finite(path, values.reshape(values.shape[-2:]))


def read_places(path: Path) -> Places:
    """Where the tiles of a file lie, and their grid.

    The side comes from TRIDENT's attributes, else it is the most frequent distance of neighbours in
    a row or a column: CLAM starts a new grid at each contour, so the smallest may be one pixel.
    DataError without ``coords``, or where they lie on no grid.
    """
    with _reading(path) as file:
        count = _facts(path, file).count
        if "coords" not in file:
            raise DataError(
                f"{path.name}: holds no 'coords', so a heat-map has no places; write features with "
                "their coordinates"
            )
        data: Any = file["coords"]
        if tuple(data.shape) != (count, 2):
            raise DataError(f"{path.name}: coords are {tuple(data.shape)} for {count} features")
        xy: NDArray[np.int64] = np.asarray(data[()]).astype(np.int64)
        stated = {str(key): value for key, value in data.attrs.items()}
    side = float(stated.get("patch_size_level0", 0))
    step = side * (1 - float(stated.get("overlap", 0)) / float(stated.get("patch_size", 1)))
    if not step > 0:
        step = side = _usual_distance(xy)
    low = xy.min(axis=0)
    cells = np.round((xy - low) / step).astype(np.int64)
    columns, rows = (int(n) + 1 for n in cells.max(axis=0))
    if columns * rows > MAX_CELLS:
        raise DataError(
            f"{path.name}: places {step:g} px apart over {columns} x {rows} cells lie on no grid; "
            "write coords with the attribute patch_size_level0"
        )
    grid = Grid(columns=columns, rows=rows, side=side, step=step, x=float(low[0]), y=float(low[1]))
    return Places(xy=xy, grid=grid, cells=cells)


def _usual_distance(xy: NDArray[np.int64]) -> float:
    """The most frequent distance from a place to the next in its row or column; 256 for one alone."""
    found: list[NDArray[np.int64]] = []
    for along, across in ((0, 1), (1, 0)):
        placed = xy[np.lexsort((xy[:, along], xy[:, across]))]
        step = np.diff(placed, axis=0)
        found.append(step[(step[:, across] == 0) & (step[:, along] > 0), along])
    gaps = np.concatenate(found)
    if len(gaps) == 0:
        # No two share a row or a column: the smallest distance of two columns or rows is left.
        gaps = np.concatenate([np.diff(np.unique(xy[:, axis])) for axis in (0, 1)])
        return float(gaps.min()) if len(gaps) else 256.0
    values, counts = np.unique(gaps, return_counts=True)
    return float(values[np.argmax(counts)])


def find_features(folder: Path, name: str) -> Path:
    """The file of ``folder`` for the slide ``name``, given with or without suffix."""
    whole = folder / f"{Path(name).name}.h5"
    return whole if whole.is_file() else folder / f"{Path(name).stem}.h5"


def with_features(records: Sequence[Record], *, folder: Path) -> tuple[list[Record], list[str]]:
    """``records`` with their H5 as ``path``, and a remark where some had to be left out.

    A missing, empty or broken file leaves its record out. DataError where none is left, two records
    share a file, or files differ in size or in the model that made them.
    """
    if not folder.is_dir():
        raise DataError(f"features: {folder} is no folder; give the one that holds NAME.h5 files")
    kept: list[Record] = []
    broken: list[str] = []
    owner: dict[Path, str] = {}
    for record in records:
        path = find_features(folder, record.id)
        if path in owner:
            raise DataError(f"{record.id} and {owner[path]} share {path.name}; rename one")
        owner[path] = record.id
        try:
            inspect_features(path)
        except DataError as error:
            broken.append(str(error))
            continue
        kept.append(dataclasses.replace(record, path=path, row=None))
    if not kept:
        raise DataError(f"no record of {len(records)} has features; {broken[0]}")
    remarks = [f"{len(broken)} records left out; {broken[0]}"] if broken else []
    return kept, remarks


class Bags:
    """The features of many records: a bag of tiles each, or one tile each of a common file.

    Files are opened when they are read; a common one stays open in each process by itself and is
    never pickled.
    """

    def __init__(self, files: Sequence[Path], *, rows: Sequence[int] | None = None) -> None:
        if rows is not None and len(files) != 1:
            raise ConfigError(f"rows of {len(files)} files; rows count within one file")
        self._files = tuple(files)
        self._rows = None if rows is None else np.asarray(rows, dtype=np.int64)
        self._file: Any = None
        self._owner = 0
        facts = [inspect_features(path) for path in self._files]
        for path, found in zip(self._files, facts, strict=True):
            _same(path, found, self._files[0], facts[0])
        self.dim = facts[0].dim
        """Numbers per tile, D."""
        self.encoder = facts[0].encoder
        """The model that made them."""
        if self._rows is not None and len(self._rows) != facts[0].count:
            raise DataError(
                f"{self._files[0].name}: {facts[0].count} features for {len(self._rows)} patches; "
                "the files do not belong together"
            )

    @property
    def single(self) -> bool:
        """Whether each record is one tile."""
        return self._rows is not None

    def __len__(self) -> int:
        return len(self._files) if self._rows is None else len(self._rows)

    def batch(
        self, ids: NDArray[np.int64], *, size: int | None = None, seed: int | None = None
    ) -> NDArray[np.float32]:
        """The bags of ``ids`` [B, K, D + 1]: the last number is 1 for a tile and 0 for filling.

        With ``seed`` each bag is at most ``size`` of its tiles, drawn by chance; without, all.
        """
        bags = [self._bag(int(index)) for index in ids]
        if seed is not None and size is not None:
            for number, bag in enumerate(bags):
                if len(bag) > size:
                    rng = np.random.default_rng([seed, number])
                    bags[number] = bag[np.sort(rng.permutation(len(bag))[:size])]
        out = np.zeros((len(bags), max(map(len, bags)), self.dim + 1), dtype=np.float32)
        for row, bag in zip(out, bags, strict=True):
            row[: len(bag), :-1] = bag
            row[: len(bag), -1] = 1
        return out

    def _bag(self, index: int) -> NDArray[np.float32]:
        if self._rows is None:
            return read_features(self._files[index])
        path = self._files[0]
        if self._file is None or self._owner != os.getpid():
            self._file, self._owner = _open(path), os.getpid()
        data = self._file["features"]
        row = self._rows[index]
        try:
            values = data[row] if data.ndim == 2 else data[0, row]
        except OSError as error:
            raise DataError(
                f"{path.name}: cannot be read at patch {row} ({error}); copy it again"
            ) from error
        return _finite(path, np.asarray(values, dtype=np.float32)[None])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_owner": 0}


@contextlib.contextmanager
def _reading(path: Path) -> Generator[h5py.File]:
    """The file, closed at the end; one that breaks off is found where it is read."""
    with _open(path) as file:
        try:
            yield file
        except OSError as error:
            raise DataError(
                f"{path.name}: cannot be read ({error}); the file is truncated: copy it again"
            ) from error


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        raise DataError(f"{path.name}: no such file of features; extract them first")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path.name}: not an HDF5 file ({error}); copy it again") from error


def _facts(path: Path, file: h5py.File) -> FeatureFile:
    data: Any = file.get("features")
    if not isinstance(data, h5py.Dataset):
        held = ", ".join(file) or "nothing"
        raise DataError(f"{path.name}: holds no data set 'features', only {held}; extract them")
    shape = tuple(data.shape)
    if 0 in shape:
        raise DataError(f"{path.name}: holds no feature: the slide had no tile")
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if data.dtype.kind != "f" or len(shape) != 2:
        raise DataError(
            f"{path.name}: features are {tuple(data.shape)} of {data.dtype}; expected (tiles, "
            "numbers) in floating point"
        )
    stated = data.attrs.get("encoder", "unknown")
    return FeatureFile(count=shape[0], dim=shape[1], encoder=str(stated))


def _same(path: Path, found: FeatureFile, first_path: Path, first: FeatureFile) -> None:
    if (found.dim, found.encoder) != (first.dim, first.encoder):
        raise DataError(
            f"{path.name}: {found.dim} numbers per tile by {found.encoder}, but {first_path.name} "
            f"has {first.dim} by {first.encoder}; all must come from one model"
        )


def _finite(path: Path, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        bad = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise DataError(
            f"{path.name}: the feature of tile {bad} is not finite; extract it again (half precision "
            "overflows above 65504)"
        )
    return values
