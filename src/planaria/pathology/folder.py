"""Many slides, one after the other: what is done stays done, what is broken is reported.

Each slide has a folder of results. Its last file is a marker with the digest of everything that the
result depends on, so a second run redoes a slide whose file or settings have changed, and no other.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.errors import DataError, UserError
from planaria.pathology.files import atomic, read_csv
from planaria.pathology.slides import Slide, open_slide

SUFFIXES = frozenset(
    [
        ".svs",
        ".tif",
        ".tiff",
        ".ndpi",
        ".mrxs",
        ".scn",
        ".bif",
        ".vms",
        ".vmu",
        ".svslide",
        ".dcm",
        ".png",
        ".jpg",
        ".jpeg",
        ".btf",
    ]
)
"""What is taken for a slide in a folder; files that are named on the command line always are."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one slide ended."""

    slide: Path
    status: str
    """``done``, ``unchanged`` (from an earlier run), ``empty`` (no tissue) or ``failed``."""
    detail: str
    """One sentence."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How all slides ended."""

    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Slides per status."""
        return dict(Counter(outcome.status for outcome in self.outcomes))

    @property
    def exit_code(self) -> int:
        """1 where no slide at all could be done, else 0: a broken slide does not fail a folder."""
        return int(all(outcome.status == "failed" for outcome in self.outcomes))

    def line(self) -> str:
        """The counts as a sentence."""
        parts = [f"{self.counts.get(key, 0)} {key}" for key in ("done", "unchanged", "empty")]
        slides = "1 slide" if len(self.outcomes) == 1 else f"{len(self.outcomes)} slides"
        return f"{slides}: {', '.join(parts)}, {self.counts.get('failed', 0)} failed"


def find_slides(paths: Sequence[Path]) -> list[Path]:
    """The slides among ``paths``: files as they are, folders by :data:`SUFFIXES`, sorted.

    The levels of a DICOM slide are files of their own; the first of each series stands for all.

    DataError where nothing is found, a path does not exist, or two slides have one name (their
    results would overwrite each other).
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(
                file
                for file in path.iterdir()
                if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: no such slide or folder; check the path")
    found = _one_per_series(found)
    if not paths:
        raise DataError("no slide is named; give slides, or a folder of them")
    if not found:
        raise DataError(
            f"no slides in {', '.join(map(str, paths))}; expected files such as .svs, .tiff"
        )
    names = Counter(path.stem for path in found)
    for name, count in names.items():
        if count > 1:
            both = [str(path) for path in found if path.stem == name]
            raise DataError(f"{count} slides are named {name!r} ({', '.join(both)}); rename one")
    return found


def _one_per_series(paths: Sequence[Path]) -> list[Path]:
    """``paths`` without DICOM files whose series another one of the same folder stands for."""
    seen: set[tuple[Path, bytes]] = set()
    kept: list[Path] = []
    for path in paths:
        series = _series(path) if path.suffix.lower() == ".dcm" else None
        if series is not None:
            key = (path.parent, series)
            if key in seen:
                continue
            seen.add(key)
        kept.append(path)
    return kept


def _series(path: Path) -> bytes | None:
    """The series of a DICOM file (0020,000E); None where its first 64 KiB do not tell."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return None
    found = head.find(b"\x20\x00\x0e\x00UI")
    if head[128:132] != b"DICM" or found < 0:
        return None
    length = int.from_bytes(head[found + 6 : found + 8], "little")
    return head[found + 8 : found + 8 + length].rstrip(b"\0 ")


def read_mpp_table(path: Path, *, slides: Iterable[Path]) -> tuple[dict[str, float], list[str]]:
    """Resolutions by slide from a CSV with columns ``slide`` and ``mpp``, and what was odd in it.

    ``slide`` is a file name with or without suffix. DataError for missing columns, a slide that
    stands twice, or a value that is no resolution; a name that no slide has is only noted.
    """
    from planaria.pathology.resolution import refuse

    columns, rows = read_csv(path)
    if not {"slide", "mpp"} <= set(columns):
        raise DataError(f"{path.name}: columns are {columns}; needs slide and mpp")
    if len(set(columns)) < len(columns):
        raise DataError(f"{path.name}: columns are {columns}; each once")
    names = {path.name: path.stem for path in slides} | {path.stem: path.stem for path in slides}
    table: dict[str, float] = {}
    notes: list[str] = []
    for number, row in enumerate(rows, start=2):
        name = names.get(row["slide"])
        if name is None:
            notes.append(f"{path.name}: line {number}: no slide is named {row['slide']!r}")
            continue
        if name in table:
            raise DataError(f"{path.name}: line {number}: {row['slide']!r} stands twice; keep one")
        try:
            value = float(row["mpp"])
        except (TypeError, ValueError):
            value = float("nan")
        wrong = refuse(value, value)
        if wrong is not None:
            raise DataError(
                f"{path.name}: line {number}: {row['mpp']!r}: {wrong}; give µm per pixel"
            )
        table[name] = value
    return table, notes


def digest(slide: Path, *, settings: Any) -> str:
    """A short digest of the slide's file (name, size, time) and of ``settings`` (JSON or str)."""
    status = slide.stat()
    text = json.dumps(
        [slide.name, status.st_size, status.st_mtime_ns, settings], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def process(
    slides: Sequence[Path],
    *,
    out: Path,
    marker: str,
    settings: Any,
    mpp: dict[str, float],
    work: Callable[[Slide, Path], tuple[bool, str, dict[str, Any]]],
    say: Callable[[str], None],
    beside: Callable[[Path], Any] = lambda path: None,
    note: str = "",
) -> Summary:
    """Runs ``work(slide, folder)`` for each slide in turn and writes its marker.

    ``beside(path)`` is what its result depends on besides the slide; ``note`` stands in every row of
    the summary. ``work`` returns whether there
    was tissue, a sentence, and facts for the marker ``marker`` (a JSON file). Errors of the user's
    input, broken files above all, end that slide and no other.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: no folder can be made ({error.strerror})") from None
    outcomes: list[Outcome] = []
    for number, path in enumerate(slides, start=1):
        folder = out / path.stem
        try:
            key = digest(path, settings=[settings, mpp.get(path.stem), beside(path)])
            before = _marked(folder / marker, key=key)
            if before is not None:
                outcome = Outcome(slide=path, status="unchanged", detail=before)
            else:
                outcome = _one(path, folder, marker, key, mpp, work)
        except OSError as error:  # a link to nowhere, a disk that is full or gone
            outcome = Outcome(slide=path, status="failed", detail=f"{path.name}: {error}")
        outcomes.append(outcome)
        say(f"[{number}/{len(slides)}] {path.name}: {outcome.status}: {outcome.detail}")
    summary = Summary(outcomes=tuple(outcomes))
    try:
        _write_summary(out / "summary.csv", outcomes, note=note)
    except OSError as error:
        raise UserError(
            f"--out {out}: summary.csv cannot be written ({error.strerror}): free space, then start "
            "the same command again; what is done stays done"
        ) from None
    say(summary.line())
    return summary


def _write_summary(path: Path, outcomes: Sequence[Outcome], *, note: str) -> None:
    with (
        atomic(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="replace") as file,
    ):
        writer = csv.writer(file)
        more = ["note"] if note else []
        writer.writerow(["slide", "status", "detail", *more])
        more = [note] if note else []
        writer.writerows([o.slide.name, o.status, o.detail, *more] for o in outcomes)


def _one(
    path: Path,
    folder: Path,
    marker: str,
    key: str,
    mpp: dict[str, float],
    work: Callable[[Slide, Path], tuple[bool, str, dict[str, Any]]],
) -> Outcome:
    try:
        slide = open_slide(path, mpp=mpp.get(path.stem))
    except UserError as error:
        return Outcome(slide=path, status="failed", detail=str(error))
    try:
        tissue, detail, facts = work(slide, folder)
    except UserError as error:
        return Outcome(slide=path, status="failed", detail=str(error))
    finally:
        slide.close()
    facts = facts | {
        "digest": key,
        "detail": detail,
        "slide": str(path.resolve()),
        "mpp_override": mpp.get(path.stem),
    }
    with atomic(folder / marker) as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return Outcome(slide=path, status="done" if tissue else "empty", detail=detail)


def _marked(path: Path, *, key: str) -> str | None:
    try:
        facts: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    mine = isinstance(facts, dict) and facts.get("digest") == key
    return str(facts.get("detail")) if mine else None
