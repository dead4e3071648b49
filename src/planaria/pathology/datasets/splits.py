"""Splits that keep together what belongs together, and near-duplicates found before training.

Two images of one patient, of one slide, or of one group of near-duplicates never stand on both sides
of a split; :func:`check_split` asserts it for any split, also one that the user brings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from planaria.errors import ConfigError, DataError
from planaria.pathology.datasets.records import Record
from planaria.pathology.slides import refuse_mode

BLOCK = 2**20
"""Pairs of hashes that are compared at once: 10 MiB."""


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of images that look alike."""

    groups: tuple[tuple[str, ...], ...]
    """Ids of each group of two or more, in order of the records."""
    distance: int
    """Bits (of 64) up to which two hashes count as alike."""
    mixed: int
    """Groups whose images bear different labels."""

    def line(self) -> str:
        """The finding as a sentence, to be shown before training."""
        images = sum(len(group) for group in self.groups)
        if not self.groups:
            return f"no near-duplicates within {self.distance} bits"
        return (
            f"{images} images form {len(self.groups)} groups of near-duplicates (within "
            f"{self.distance} bits), {self.mixed} of them with different labels; each group stays on "
            "one side of a split"
        )


def perceptual_hash(image: Image.Image) -> int:
    """64 bits that near-duplicates share. Source: ``imagehash.phash`` (DCT)."""
    bits = np.asarray(imagehash.phash(image).hash).ravel()
    return int("".join("1" if bit else "0" for bit in bits), 2)


def find_duplicates(
    records: Sequence[Record], *, hashes: Mapping[str, int], distance: int = 6
) -> Duplicates:
    """Groups of records whose hashes differ by at most ``distance`` bits, directly or in a chain.

    Compares all pairs of different hashes in blocks of 10 MiB; the time grows with their square.
    """
    if not 0 <= distance <= 32:
        raise ConfigError(f"distance is {distance}; 0 to 32 of 64 bits")
    missing = [record.id for record in records if record.id not in hashes]
    if missing:
        raise DataError(f"{missing[0]!r} has no hash ({len(missing)} such images)")
    # Equal hashes (thousands of white patches) are one from the start.
    every = np.array([hashes[record.id] for record in records], dtype=np.uint64)
    values, code = np.unique(every, return_inverse=True)
    parent = list(range(len(values)))
    rows = max(BLOCK // max(len(values), 1), 1)
    for start in range(0, len(values), rows):
        block = values[start : start + rows]
        differing = np.bitwise_count(block[:, None] ^ values[None, start:])
        for left, right in np.argwhere(differing <= distance).tolist():
            if left < right:
                _join(parent, start + left, start + right)
    groups: dict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(code.tolist()):
        groups[_root(parent, number)].append(index)
    found = [members for members in groups.values() if len(members) > 1]
    return Duplicates(
        groups=tuple(tuple(records[i].id for i in members) for members in found),
        distance=distance,
        mixed=sum(len({records[i].label for i in members}) > 1 for members in found),
    )


def hash_files(records: Iterable[Record], *, px: int | None = None) -> dict[str, int]:
    """The hash of each record's image file; DataError for one that cannot be read, is no 8-bit
    colour, or whose sides are not ``px``."""
    out: dict[str, int] = {}
    for record in records:
        path: Path | None = record.path
        if path is None:
            raise DataError(f"{record.id}: a record without a file; hash its pixels instead")
        try:
            with Image.open(path) as image:
                refuse_mode(path, image.mode)
                if px is not None and image.size != (px, px):
                    raise DataError(
                        f"{path.name}: {image.size[0]}x{image.size[1]} px; expected {px} px"
                    )
                out[record.id] = perceptual_hash(image)
        except OSError as error:
            raise DataError(f"{path.name}: cannot be read ({error}); copy it again") from error
    return out


def units(records: Sequence[Record], *, duplicates: Duplicates | None = None) -> list[int]:
    """For each record the number of its unit: patient, slide or image, joined by duplicates."""
    parent = list(range(len(records)))
    first: dict[str, int] = {}
    for index, record in enumerate(records):
        _join(parent, first.setdefault(record.unit, index), index)
    where = {record.id: index for index, record in enumerate(records)}
    for group in duplicates.groups if duplicates else ():
        for name in group[1:]:
            _join(parent, where[group[0]], where[name])
    roots = [_root(parent, index) for index in range(len(records))]
    number = {root: n for n, root in enumerate(dict.fromkeys(roots))}
    return [number[root] for root in roots]


def grouped_folds(
    records: Sequence[Record], *, folds: int, seed: int = 0, duplicates: Duplicates | None = None
) -> NDArray[np.int64]:
    """The fold of each record, [N]: whole units, labels and centres spread as evenly as they allow.

    Greedy: the largest units first (ties by chance from ``seed``), each to the fold that is emptiest
    of its labels. DataError where there are fewer units than folds.
    """
    if folds < 2:
        raise ConfigError(f"folds is {folds}; at least 2")
    unit = np.array(units(records, duplicates=duplicates))
    count = int(unit.max()) + 1 if len(unit) else 0
    if count < folds:
        raise DataError(f"{count} patients or slides cannot fill {folds} folds; use fewer folds")
    strata = sorted({(record.label, record.centre or "") for record in records})
    column = {stratum: n for n, stratum in enumerate(strata)}
    table = np.zeros((count, len(strata)))
    for number, record in zip(unit, records, strict=True):
        table[number, column[record.label, record.centre or ""]] += 1
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    order = order[np.argsort(-table[order].sum(axis=1), kind="stable")]
    share = table.sum(axis=0) / folds
    filled = np.zeros((folds, len(strata)))
    fold_of = np.zeros(count, dtype=np.int64)
    for number in order:
        # Squared distance from the even share, after adding the unit to each fold in turn.
        after = ((filled + table[number] - share) ** 2 - (filled - share) ** 2).sum(axis=1)
        size = filled.sum(axis=1)
        best = int(np.lexsort((size, np.round(after, 9)))[0])
        fold_of[number] = best
        filled[best] += table[number]
    out = fold_of[unit]
    check_split(records, parts=out.tolist(), duplicates=duplicates)
    return out


def check_split(
    records: Sequence[Record], *, parts: Sequence[object], duplicates: Duplicates | None = None
) -> None:
    """DataError where a patient, a slide or a group of near-duplicates stands in two parts."""
    if len(parts) != len(records):
        raise DataError(f"{len(parts)} parts for {len(records)} records; one per record")
    where: dict[str, object] = {}
    for record, part in zip(records, parts, strict=True):
        if where.setdefault(record.unit, part) != part:
            raise DataError(
                f"{record.unit} stands in parts {where[record.unit]} and {part}; its images must "
                "stay together"
            )
    part_of = {record.id: part for record, part in zip(records, parts, strict=True)}
    for group in duplicates.groups if duplicates else ():
        found = {str(part_of[name]) for name in group}
        if len(found) > 1:
            raise DataError(
                f"near-duplicates {group[0]} and {len(group) - 1} more stand in parts "
                f"{', '.join(sorted(found))}; they must stay together"
            )


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _join(parent: list[int], left: int, right: int) -> None:
    a, b = _root(parent, left), _root(parent, right)
    parent[max(a, b)] = min(a, b)
