"""Where the text comes from: files, the standard library's sources, or a hub, as documents.

A *document* is a text that stands for itself: a file, a paragraph, a line, a JSON line's field or a
Parquet row. Documents come in a fixed order (sources as given, the files of a folder or glob by
name), so everything made from them is the same in every process.
"""

from __future__ import annotations

import glob
import importlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from planaria.errors import DataError
from planaria.recipes.llm.config import HUB_PREFIX, STDLIB, LlmConfig

_log = logging.getLogger(__name__)

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".py"})
"""Plain text files that a folder contributes; a file that is named itself may have any suffix."""

LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".parquet"})

_STDLIB_SKIPS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of the corpus, or one name on a hub."""

    name: str
    """What errors and the fingerprint call it: the path, or ``datasets:NAME``."""
    path: Path | None
    """None for a hub."""
    kind: str
    """text, lines, table or hub."""
    size: int = 0
    """Bytes on disk."""
    modified: int = 0
    """Time of the last change in nanoseconds since 1970."""
    lenient: bool = False
    """Files that are not UTF-8 are left out (the standard library has a few), not refused."""


def sources(config: LlmConfig) -> tuple[Source, ...]:
    """Every source of ``config.data``, in a fixed order, without reading them.

    Raises:
        DataError: an entry names nothing that exists, or a folder without text.
    """
    found: list[Source] = []
    seen: set[str] = set()
    for entry in config.data:
        for source in _resolve(entry):
            if source.name not in seen:
                seen.add(source.name)
                found.append(source)
    return tuple(found)


def fingerprint(config: LlmConfig) -> str:
    """Names the documents that :func:`read` would give: 32 hex digits.

    Made of names, sizes and times of change, not of contents, so that every worker of a large run
    has it at once.
    """
    digest = xxhash.xxh3_128()
    for source in sources(config):
        digest.update(f"{source.name}\0{source.size}\0{source.modified}\0".encode())
    digest.update(f"{config.text_field}\0{config.documents}\0{config.max_bytes}".encode())
    return digest.hexdigest()


def read(config: LlmConfig) -> Iterator[str]:
    """Every document that holds more than white space, up to ``config.max_bytes`` of UTF-8.

    Raises:
        DataError: a source cannot be read, with file and line.
    """
    left = config.max_bytes
    for source in sources(config):
        for text in _READERS[source.kind](source, config):
            if not text.strip():
                continue
            if left is not None:
                left -= len(text.encode())
                if left < 0:
                    return
            yield text


_ENOUGH = 8
"""Bytes of text per token of a sample that surely make one: tokens have 3 to 5 (our choice)."""

_SMALL_SHARE = 0.1
"""Held-out share of a corpus too small for ``config.held_out`` of it (our choice)."""


def settle(config: LlmConfig) -> LlmConfig:
    """``config`` with ``documents`` other than auto: the coarsest cut with a held-out part.

    Whole files if they do; else paragraphs, then a larger held-out share, then lines. Reads no
    more than it takes to find one sample of either part. What it chose goes to the logger.
    """
    if config.documents != "auto":
        return config
    share = max(config.held_out, _SMALL_SHARE)
    whole = replace(config, documents="file")
    if _parts_suffice(whole):
        return whole
    for choice in (
        replace(config, documents="paragraph"),
        replace(config, documents="paragraph", held_out=share),
        replace(config, documents="line", held_out=share),
    ):
        if _parts_suffice(choice):
            _log.info(
                "data: too few files to hold some out, so they are cut by %s and %g %% is held "
                "out; --documents and --held-out say otherwise",
                choice.documents,
                100 * choice.held_out,
            )
            return choice
    return whole


def _parts_suffice(config: LlmConfig) -> bool:
    """Whether training and held-out text surely make a sample each."""
    enough = _ENOUGH * config.sequence
    sizes = [0, 0]
    for text in read(config):
        sizes[held_out(text, config.held_out)] += len(text.encode())
        if min(sizes) >= enough:
            return True
    return False


def held_out(text: str, share: float) -> bool:
    """Whether a document is never trained on: decided by a hash of its text alone."""
    return xxhash.xxh3_64_intdigest(text.encode()) < share * 2**64


def _resolve(entry: str) -> list[Source]:
    if entry == STDLIB:
        return _stdlib()
    if entry.startswith(HUB_PREFIX):
        name = entry.removeprefix(HUB_PREFIX)
        if not name:
            raise DataError("data: 'datasets:' names no data set; write datasets:NAME")
        return [Source(name=entry, path=None, kind="hub")]
    path = Path(entry).expanduser()
    if path.is_dir():
        inside = [p for p in sorted(path.rglob("*")) if p.is_file() and _kind(p) is not None]
        if not inside:
            raise DataError(
                f"data: folder {entry} holds no .txt, .md, .rst, .py, .jsonl or .parquet file; "
                "give a folder of text, or the files themselves"
            )
        return [_file(p) for p in inside]
    if path.is_file():
        return [_file(path)]
    if glob.has_magic(entry):
        matched = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        files = [p for p in matched if p.is_file()]
        if not files:
            raise DataError(f"data: no file matches {entry}; check the pattern (and quote it)")
        return [_file(p) for p in files]
    raise DataError(
        f"data: {entry} does not exist; give a file, a folder, a glob, datasets:NAME or stdlib"
    )


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        # site-packages alone may hold more files than everything else together.
        inside[:] = [name for name in inside if name not in _STDLIB_SKIPS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"data: stdlib: this Python has no sources below {root}; give files with --data"
        )
    return [_file(p, lenient=True) for p in sorted(files)]


def _kind(path: Path) -> str | None:
    suffix = path.suffix.lower()
    if suffix in LINE_SUFFIXES:
        return "lines"
    if suffix in TABLE_SUFFIXES:
        return "table"
    return "text" if suffix in TEXT_SUFFIXES else None


def _file(path: Path, *, lenient: bool = False) -> Source:
    stat = path.stat()
    return Source(
        name=str(path),
        path=path,
        kind=_kind(path) or "text",
        size=stat.st_size,
        modified=stat.st_mtime_ns,
        lenient=lenient,
    )


def _read_text(source: Source, config: LlmConfig) -> Iterator[str]:
    assert source.path is not None
    try:
        text = source.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        if source.lenient:
            return
        raise DataError(
            f"data: {source.name} is not UTF-8 at byte {error.start}; convert it "
            "(iconv -f latin1 -t utf-8) or leave it out"
        ) from None
    except OSError as error:
        raise _unreadable(source, error) from None
    if config.documents in ("file", "auto"):
        yield text
    elif config.documents == "line":
        yield from text.splitlines()
    else:
        yield from _paragraphs(text)


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines)
            lines = []
    if lines:
        yield "".join(lines)


def _read_lines(source: Source, config: LlmConfig) -> Iterator[str]:
    assert source.path is not None
    try:
        with source.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_text(source, number, line, config.text_field)
    except OSError as error:
        raise _unreadable(source, error) from None


def _json_text(source: Source, number: int, line: bytes, field: str) -> str:
    where = f"data: {source.name}, line {number}"
    try:
        row: Any = json.loads(line)
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8; mend or delete the line") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}); mend or delete the line") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise DataError(f"{where}: a JSON {kind}, not an object; each line must be one object")
    if field not in row:
        names = ", ".join(sorted(map(str, row))) or "none"
        raise DataError(f"{where}: no field {field!r} (fields: {names}); name it with --text-field")
    if not isinstance(row[field], str):
        kind = type(row[field]).__name__
        raise DataError(f"{where}: field {field!r} is {kind}, not text; name it with --text-field")
    return row[field]


def _read_table(source: Source, config: LlmConfig) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = config.text_field
    try:
        with pq.ParquetFile(source.path) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                names = ", ".join(sorted(schema.names)) or "none"
                raise DataError(
                    f"data: {source.name}: no column {field!r} (columns: {names}); "
                    "name it with --text-field"
                )
            kind = schema.field(field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(
                    f"data: {source.name}: column {field!r} is {kind}, not text; "
                    "name it with --text-field"
                )
            for rows in table.iter_batches(batch_size=1024, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if text is not None:
                        yield text
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(source, error) from None


def _read_hub(source: Source, config: LlmConfig) -> Iterator[str]:
    name = source.name.removeprefix(HUB_PREFIX)
    try:
        hub: Any = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise DataError(
            f"data: {source.name} needs the package datasets; run pip install datasets, "
            "or give files"
        ) from None
    try:
        rows = hub.load_dataset(name, split="train")
    except Exception as error:  # the package has no error type of its own
        raise _unreadable(source, error) from None
    if config.text_field not in rows.column_names:
        names = ", ".join(sorted(rows.column_names)) or "none"
        raise DataError(
            f"data: {source.name}: no column {config.text_field!r} (columns: {names}); "
            "name it with --text-field"
        )
    for row in rows:
        if isinstance(row[config.text_field], str):
            yield row[config.text_field]


def _unreadable(source: Source, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
    return DataError(f"data: cannot read {source.name}: {reason}; check the file or leave it out")


_READERS = {
    "text": _read_text,
    "lines": _read_lines,
    "table": _read_table,
    "hub": _read_hub,
}
