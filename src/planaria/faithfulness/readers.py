"""Files to chains and questions.

A table of formats; each is recognised by its fields, so that ``--format`` is rarely needed. A line
that cannot be read becomes a :class:`Problem` with its number and reason, and the rest goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from planaria.errors import DataError
from planaria.faithfulness.chains import Chain, Labels, Question, digest, unique_ids
from planaria.faithfulness.formats import (
    FORMATS,
    Row,
    from_completion,
    question_of,
    recognise,
    text_of,
)

Converter: TypeAlias = Callable[[Row], list[Chain]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row that was left out."""

    line: int
    """1-based line of the file, or number of the row."""
    reason: str
    """Why, with the value."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a file held."""

    chains: tuple[Chain, ...]
    """The chains, in order, with unique ids."""
    problems: tuple[Problem, ...]
    """Rows that were left out."""
    format: str
    """Name of the format that was read; the first one where rows differ."""


def read_chains(path: str | Path, *, format: str = "auto", limit: int = 0) -> Read:
    """Chains of a file.

    ``format`` is one of :data:`~planaria.faithfulness.formats.FORMATS`, ``inspect`` (``.eval`` and
    Inspect's ``.json`` logs) or ``auto``. ``limit`` keeps the first questions only; 0 keeps all.
    Raises :class:`~planaria.errors.DataError` when the file is missing, the format is unknown, or
    no chain at all could be read.
    """
    file = _existing(path)
    if format == "inspect" or (format == "auto" and _is_log(file)):
        chains, problems, name = [], [], "inspect"
        for number, item in enumerate(_log_chains(file), start=1):
            if isinstance(item, str):
                problems.append(Problem(line=number, reason=item))
            else:
                chains.append(item)
    else:
        if format != "auto" and format not in FORMATS:
            raise DataError(
                f"unknown format {format!r}: choose auto, inspect or one of "
                + ", ".join(sorted(FORMATS))
            )
        chains, problems, name = _table(file, format)
    if limit:
        kept = set(list(dict.fromkeys(chain.question_id for chain in chains))[:limit])
        chains = [chain for chain in chains if chain.question_id in kept]
    if not chains:
        first = f"; the first problem is {problems[0]}" if problems else ""
        raise DataError(
            f"{file.name} holds no chain that can be read{first}: give each row a question and "
            "steps, or sample chains from questions with `planaria faith select`"
        )
    return Read(chains=tuple(unique_ids(chains)), problems=tuple(problems), format=name)


def _existing(path: str | Path) -> Path:
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path} is no file: give a .jsonl, .json or .eval file")
    return file


def _table(file: Path, format: str) -> tuple[list[Chain], list[Problem], str]:
    chains: list[Chain] = []
    problems: list[Problem] = []
    first = ""
    for line, row in rows(file):
        if isinstance(row, str):
            problems.append(Problem(line=line, reason=row))
            continue
        name = recognise(row) if format == "auto" else format
        if name is None:
            fields = ", ".join(list(row)[:8])
            problems.append(
                Problem(line=line, reason=f"no known fields among {fields or 'nothing'}")
            )
            continue
        first = first or name
        try:
            found = FORMATS[name].convert(row)
        except (DataError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            problems.append(Problem(line=line, reason=f"not {name}: {_why(error)}"))
            continue
        chains += found
        if not found:
            problems.append(Problem(line=line, reason=f"a {name} row without a chain"))
    return chains, problems, first or "none"


def rows(file: Path) -> Iterator[tuple[int, Row | str]]:
    """Rows of a ``.jsonl`` or ``.json`` file with their number; a string says what is wrong.

    A file is one JSON value (a list, one object, or an object whose one list holds the rows), or
    has an object a line.
    """
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    whole = _whole(text)
    if whole is not None:
        for number, row in enumerate(whole, start=1):
            yield number, (row if isinstance(row, dict) else f"{str(row)[:40]!r} is no object")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"no JSON ({error}): {line[:40]!r}"
            continue
        yield number, (row if isinstance(row, dict) else f"{line[:40]!r} is no object")


def _whole(text: str) -> list[Any] | None:
    """The rows of a text that is one JSON value; None for one that has a value a line."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None  # several lines, or broken: then each line says why
    if isinstance(data, dict):
        lists = [value for value in data.values() if _holds_rows(value)]
        known = recognise(data) is not None
        return lists[0] if len(lists) == 1 and not known else [data]
    return data


def _holds_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def read_questions(path: str | Path, *, limit: int = 0) -> tuple[list[Question], list[Problem]]:
    """Questions to sample chains for: GSM8K, MATH, CommonsenseQA, or ``question`` and ``answer``.

    Raises :class:`~planaria.errors.DataError` when no question could be read.
    """
    file = _existing(path)
    found: dict[str, Question] = {}
    problems: list[Problem] = []
    for line, row in rows(file):
        if isinstance(row, str):
            problems.append(Problem(line=line, reason=row))
            continue
        try:
            question = question_of(row)
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(Problem(line=line, reason=_why(error)))
            continue
        found.setdefault(question.id, question)
        if limit and len(found) >= limit:
            break
    if not found:
        first = f"; the first problem is {problems[0]}" if problems else ""
        raise DataError(f"{file.name} holds no question{first}: give each row a 'question'")
    return list(found.values()), problems


def _is_log(file: Path) -> bool:
    if file.suffix == ".eval":
        return True
    if file.suffix != ".json":
        return False
    with file.open(encoding="utf-8", errors="replace") as stream:
        head = stream.read(4096)
    return head.lstrip().startswith("{") and '"eval"' in head and '"version"' in head


def _log_chains(file: Path) -> Iterator[Chain | str]:
    """Chains of an Inspect log: one per sample and epoch; errors and empty outputs as reasons."""
    try:
        from inspect_ai.log import read_eval_log
    except ImportError as error:
        raise DataError(
            f"{file.name} is an Inspect log and inspect_ai is not installed: "
            "pip install 'planaria[eval]'"
        ) from error
    try:
        log = read_eval_log(str(file))
    except Exception as error:  # a zip, JSON or schema error of whatever kind
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{file.name} is no Inspect log that can be read ({first}): was it written to its end?"
        ) from error
    for sample in log.samples or []:
        name = f"sample {sample.id} epoch {sample.epoch}"
        if sample.error is not None:
            yield f"{name} ended in an error: {sample.error.message[:80]}"
            continue
        chain = chain_of_sample(sample)
        yield chain if chain is not None else f"{name} has no completion"


def chain_of_sample(sample: Any) -> Chain | None:
    """The chain of an Inspect sample (``EvalSample``), reasoning content included."""
    from planaria.faithfulness.judges.models import written

    text = written(sample.output) if sample.output else ""
    if not text.strip():
        return None
    known = sample.metadata or {}
    given = sample.input if isinstance(sample.input, str) else sample.input[-1].text
    question = str(known.get("question") or given)  # our own task keeps it without its prompt
    target = sample.target if isinstance(sample.target, str) else (sample.target or [""])[0]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    options = tuple(zip(letters, sample.choices or [], strict=False))
    options = options or tuple((str(a), str(b)) for a, b in known.get("options") or ())
    asked = Question(text=question, options=options, reference=target or None)
    chain = from_completion(asked, text, stop_reason=sample.output.stop_reason)
    return replace(chain, id=f"{sample.id}/{sample.epoch}", writer=sample.output.model)


__all__ = [
    "Chain",
    "Labels",
    "Problem",
    "Read",
    "chain_of_sample",
    "digest",
    "read_chains",
    "read_questions",
    "rows",
    "text_of",
]


def _why(error: Exception) -> str:
    """The reason in words: our own errors speak for themselves, others need their kind."""
    if isinstance(error, DataError):
        return str(error)
    return f"{type(error).__name__}: {error}"
