"""A run as one HTML file that needs no network: scores, steps, changes, verdicts, selections."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from planaria.errors import DataError
from planaria.faithfulness.run import write_json
from planaria.faithfulness.store import writable, writing

_NAMES = {
    "reliability": "R = C · F*",
    "consistency": "C, chain to answer",
    "faithfulness": "F*, corrected win rate",
    "win_rate": "F, win rate against errors",
    "null_rate": "win rate against paraphrases",
}


def write_page(run: Path, *, out: Path | None = None) -> Path:
    """Write ``view.html`` of a run folder, or ``out``.

    Text of chains goes in as JSON in a script element, escaped so that no chain can close it, and
    reaches the page as text only. Raises :class:`~planaria.errors.DataError` when the folder holds
    no finished run.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise DataError(
            "the page needs jinja2, which is not installed: pip install 'planaria[eval]'"
        ) from error
    rows, report, config, selection = _read(run)
    source = resources.files("planaria.faithfulness").joinpath("page.html.j2")
    template = Environment(autoescape=True).from_string(source.read_text(encoding="utf-8"))
    from markupsafe import Markup

    safe = json.dumps(rows, ensure_ascii=False)
    for char, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        safe = safe.replace(char, code)
    try:
        states = ", ".join(f"{count} {name}" for name, count in report["states"].items() if count)
        facts: dict[str, Any] = {
            "subtitle": f"Judge {config['judge']}, perturber {config['perturber']}. "
            f"Chains: {states}.",
            "means": [_mean(name, report["means"][key]) for key, name in _NAMES.items()],
            "selection": [_selected(row) for row in selection],
            "counts": list(report["counts"].items()),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{run} holds a run of another version of planaria ({type(error).__name__}: {error}): "
            "run the command that made it again, in another --out"
        ) from error
    text = template.render(
        title=f"Faithfulness of {run.name}",
        data=Markup(safe),  # escaped above
        **facts,
    )
    target = out or run / "view.html"
    writable(target)
    temporary = target.with_name(f".{target.name}.part")
    with writing(target):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    return target


_Rows = list[dict[str, Any]]


def _read(run: Path) -> tuple[_Rows, dict[str, Any], dict[str, Any], _Rows]:
    """Scores, report, configuration and selections of a run."""
    scores, report = run / "scores.jsonl", run / "report.json"
    if not scores.is_file() or not report.is_file():
        raise DataError(
            f"{run} holds no finished run (scores.jsonl, report.json): run `planaria faith score` "
            f"with --out {run} to its end"
        )
    chosen = run / "selection.json"
    try:
        lines = scores.read_text(encoding="utf-8").split("\n")
        return (
            [json.loads(line) for line in lines if line.strip()],
            json.loads(report.read_text(encoding="utf-8")),
            json.loads((run / "config.json").read_text(encoding="utf-8")),
            json.loads(chosen.read_text(encoding="utf-8")) if chosen.is_file() else [],
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run} holds a run that cannot be read ({error}): run the command that made it again"
        ) from error


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _span(row: dict[str, Any]) -> str:
    return f"{_number(row['low'])} to {_number(row['high'])}"


def _mean(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "mean": _number(row["estimate"]),
        "interval": _span(row),
        "n": row["n"],
        "clusters": row["clusters"],
    }


def _selected(row: dict[str, Any]) -> dict[str, str]:
    gain = row["gain"]
    return {
        "rule": row["rule"],
        "accuracy": _number(row["accuracy"]["estimate"]),
        "interval": _span(row["accuracy"]),
        "gain": f"{_number(gain['estimate'])} ({_span(gain)})",
    }


def write_selection(rows: list[dict[str, Any]], run: Path) -> None:
    """``selection.json`` of a run, which the page shows."""
    write_json(run / "selection.json", rows)
