"""A folder of images with a CSV: columns ``file`` and ``label``, optionally patient, slide, centre."""

from __future__ import annotations

from pathlib import Path

from planaria.errors import DataError
from planaria.pathology.datasets.records import (
    Contract,
    Record,
    Validation,
    read_label,
    read_table,
    validate,
)


def load_table(
    table: Path, *, classes: int, images: Path | None = None, pixels: bool = True
) -> tuple[list[Record], Validation]:
    """The records of ``table``; files are relative to ``images`` (default: the table's folder).

    ``classes`` says which labels exist: 0 to ``classes`` - 1. With ``pixels`` False the files need
    not be there, and records have no path: what is read of them stands elsewhere. Paths that leave
    the folder are refused, so a table from elsewhere cannot name any file of the machine.
    """
    root = (images or table.parent).resolve()
    rows = read_table(table, columns=("file", "label"))
    records: list[Record] = []
    for number, row in enumerate(rows, start=2):
        path = (root / row["file"]).resolve()
        if not path.is_relative_to(root):
            raise DataError(f"{table.name} line {number}: {row['file']!r} is outside {root.name}")
        records.append(
            Record(
                id=row["file"],
                label=read_label(row["label"], where=f"{table.name} line {number}"),
                path=path if pixels else None,
                slide=row.get("slide") or None,
                patient=row.get("patient") or None,
                centre=row.get("centre") or None,
            )
        )
    contract = Contract(
        name=table.name,
        licence="the user's own",
        source="a table of images",
        columns=("file", "label"),
        count=None,
        labels=tuple(range(classes)),
    )
    return records, validate(records, contract=contract)
