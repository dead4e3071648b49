"""What every data set is reduced to: records with a label and whatever groups them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planaria.errors import DataError
from planaria.pathology.files import read_csv


@dataclass(frozen=True, kw_only=True)
class Record:
    """One labelled image."""

    id: str
    label: int
    path: Path | None = None
    """The image's file; None where it is a row of an array."""
    row: int | None = None
    """The row of the array that holds it; None where it is a file."""
    slide: str | None = None
    """The slide that a patch was cut from."""
    patient: str | None = None
    centre: str | None = None
    """Laboratory or hospital."""
    mask: Path | None = None
    """Annotation, where there is one."""

    @property
    def unit(self) -> str:
        """What must stand on one side of a split: patient, else slide, else the image itself."""
        if self.patient is not None:
            return f"patient {self.patient}"
        return f"slide {self.slide}" if self.slide is not None else f"image {self.id}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a published data set is known to hold."""

    name: str
    licence: str
    source: str
    """Who publishes it, in words."""
    columns: tuple[str, ...]
    count: int | None
    """Images of the full set; None where there is no fixed one."""
    per_label: dict[int, int] = field(default_factory=dict)
    per_centre: dict[str, int] = field(default_factory=dict)
    labels: tuple[int, ...] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What :func:`validate` found."""

    contract: Contract
    count: int
    complete: bool
    """Whether all counts are those of the full published set."""
    errors: tuple[str, ...]
    """What makes training wrong: unknown or doubled ids, labels out of range, missing files."""
    remarks: tuple[str, ...]
    """What differs from the published set without being wrong (a subset, above all)."""

    def raise_errors(self) -> None:
        """DataError with the first errors, where there are any."""
        if self.errors:
            more = f" (and {len(self.errors) - 3} more)" if len(self.errors) > 3 else ""
            raise DataError(f"{self.contract.name}: {'; '.join(self.errors[:3])}{more}")


def validate(
    records: Sequence[Record], *, contract: Contract, problems: Sequence[str] = ()
) -> Validation:
    """Compares ``records`` with ``contract``; ``problems`` are errors that reading already found."""
    errors = list(problems)
    ids = Counter(record.id for record in records)
    errors += [f"id {name!r} stands {n} times; keep one" for name, n in ids.items() if n > 1]
    for record in records:
        if record.label not in contract.labels:
            errors.append(
                f"{record.id}: label {record.label} is outside {min(contract.labels)} to "
                f"{max(contract.labels)}"
            )
        if record.path is not None and not record.path.is_file():
            errors.append(f"{record.id}: {record.path.name} is missing")
    remarks: list[str] = []
    if not records:
        errors.append("no image at all; check the folder")
    if contract.count is not None and len(records) != contract.count:
        remarks.append(f"{len(records)} of {contract.count} images: a subset")
    for what, wanted, found in (
        ("label", contract.per_label, Counter(r.label for r in records)),
        ("centre", contract.per_centre, Counter(r.centre for r in records)),
    ):
        for key, number in wanted.items():
            if found[key] != number:  # type: ignore[index]
                remarks.append(f"{what} {key}: {found[key]} of {number}")  # type: ignore[index]
    return Validation(
        contract=contract,
        count=len(records),
        complete=not errors and not remarks and contract.count is not None,
        errors=tuple(errors),
        remarks=tuple(remarks),
    )


def read_table(path: Path, *, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV; DataError where the file or one of ``columns`` is missing."""
    if not path.is_file():
        raise DataError(f"{path}: no such table; check the folder")
    held, rows = read_csv(path)
    missing = [name for name in columns if name not in held]
    if missing:
        raise DataError(
            f"{path.name}: column {missing[0]!r} is missing; it has {', '.join(held or ['nothing'])}"
        )
    return rows


def is_name(text: str) -> bool:
    """Whether ``text`` names a file and no folder: files are read and written under such names."""
    return text not in ("", ".", "..") and Path(text).name == text


def read_label(text: str | None, *, where: str) -> int:
    """An integer label; DataError that says ``where`` for anything else."""
    try:
        return int(text or "")
    except ValueError:
        raise DataError(f"{where}: label {text!r} is not a whole number") from None
