"""PANDA: prostate biopsies with Gleason and ISUP grades, as the challenge's download lays them out.

``train.csv``, ``train_images/ID.tiff`` (levels 1, 4, 16), ``train_label_masks/ID_mask.tiff`` where
there is one. Licence CC BY-NC-SA 4.0.
"""

from __future__ import annotations

from pathlib import Path

from planaria.errors import ConfigError
from planaria.pathology.datasets.records import (
    Contract,
    Record,
    Validation,
    is_name,
    read_label,
    read_table,
    validate,
)
from planaria.pathology.synthetic.prostate import isup_of

CONTRACT = Contract(
    name="PANDA",
    licence="CC BY-NC-SA 4.0: for research, never shipped with anything",
    source="Karolinska Institute and Radboud University Medical Center, 2020",
    columns=("image_id", "data_provider", "isup_grade", "gleason_score"),
    count=10_616,
    per_label={0: 2892, 1: 2666, 2: 1343, 3: 1242, 4: 1249, 5: 1224},
    per_centre={"karolinska": 5456, "radboud": 5160},
    labels=(0, 1, 2, 3, 4, 5),
)


SYNTHETIC = Contract(
    name="synthetic biopsies",
    licence="made by this package",
    source="planaria.pathology.synthetic, in PANDA's layout",
    columns=CONTRACT.columns,
    count=None,
    per_centre={},
    labels=CONTRACT.labels,
)
"""For trees that :func:`planaria.pathology.synthetic.tree.write_tree` made."""


def load_panda(
    folder: Path, *, contract: Contract = CONTRACT, pixels: bool = True
) -> tuple[list[Record], Validation]:
    """The records of ``folder`` and what is wrong with them; nothing is left out or repaired.

    With ``pixels`` False the table alone is read, and records have no path.

    A grade that does not follow from its Gleason score is an error, except for the one case known in
    the published table (4+3 graded 2), which is a remark there and stays as published.
    """
    rows = read_table(folder / "train.csv", columns=contract.columns)
    records: list[Record] = []
    problems: list[str] = []
    remarks: list[str] = []
    for number, row in enumerate(rows, start=2):
        where = f"train.csv line {number}"
        name = row["image_id"] or ""
        if not is_name(name):
            problems.append(f"{where}: image_id {name!r} is no file name")
        grade = read_label(row["isup_grade"], where=where)
        mask = folder / "train_label_masks" / f"{name}_mask.tiff"
        records.append(
            Record(
                id=name,
                label=grade,
                path=folder / "train_images" / f"{name}.tiff" if pixels else None,
                slide=name,
                centre=row["data_provider"],
                mask=mask if mask.is_file() else None,
            )
        )
        expected = grade_of_score(row["gleason_score"])
        if expected is None:
            problems.append(f"{where}: gleason_score {row['gleason_score']!r} is not known")
        elif expected != grade and (row["gleason_score"], grade) == ("4+3", 2):
            remarks.append(f"{name}: 4+3 graded 2, as published")
        elif expected != grade:
            problems.append(
                f"{where}: {row['gleason_score']} is ISUP {expected}, the table says {grade}"
            )
        if contract.per_centre and row["data_provider"] not in contract.per_centre:
            problems.append(f"{where}: data_provider {row['data_provider']!r} is not known")
    images = folder / "train_images"
    known = {record.id for record in records}
    extra = (
        sorted(p.stem for p in images.glob("*.tiff") if p.stem not in known)
        if pixels and images.is_dir()
        else []
    )
    if extra:
        remarks.append(f"{len(extra)} images without a row, {extra[0]} first: left out")
    found = validate(records, contract=contract, problems=problems)
    return records, Validation(
        contract=found.contract,
        count=found.count,
        complete=found.complete,
        errors=found.errors,
        remarks=(*found.remarks, *remarks),
    )


def grade_of_score(score: str) -> int | None:
    """The ISUP grade of a Gleason score as PANDA writes it (``3+4``, ``0+0``, ``negative``)."""
    if score in ("negative", "0+0"):
        return 0
    try:
        primary, secondary = (int(part) for part in score.split("+"))
        return isup_of(primary, secondary)
    except (ValueError, ConfigError):
        return None
