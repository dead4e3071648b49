"""What models cost. Inspect brings no prices, so the user's are registered with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planaria.errors import DataError

EXAMPLE = "openai/gpt-4o-mini: {input: 0.15, output: 0.60}"
"""A line of such a file."""


def read_prices(path: Path) -> dict[str, tuple[float, float]]:
    """Dollars per million tokens of input and output by model name, from YAML or JSON.

    Takes the files of Inspect's ``--model-cost-config``, too. Raises
    :class:`~planaria.errors.DataError` for a file that is none.
    """
    import yaml

    if not path.is_file():
        raise DataError(f"{path} is no file: give a file of prices with lines like {EXAMPLE}")
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path} is no YAML ({first}): write lines like {EXAMPLE}") from error
    out: dict[str, tuple[float, float]] = {}
    for name, row in data.items() if isinstance(data, dict) else ():
        try:
            price = float(row["input"]), float(row["output"])
        except (TypeError, KeyError, ValueError):
            price = (-1.0, -1.0)
        if min(price) < 0:
            raise DataError(f"the price of {name} is {row!r}: write it like {EXAMPLE}")
        out[str(name)] = price
    if not out:
        raise DataError(f"{path} names no model: write lines like {EXAMPLE}")
    return out


def register(path: Path) -> None:
    """Tell Inspect the prices of a file, so that each answer carries what it cost."""
    from inspect_ai.model import ModelCost, ModelInfo, get_model_info, set_model_info

    for name, (dear, dearer) in read_prices(path).items():
        cost = ModelCost(input=dear, output=dearer, input_cache_write=dear, input_cache_read=dear)
        known = _info(get_model_info, name)
        info = ModelInfo() if known is None else known
        set_model_info(name, info.model_copy(update={"cost": cost}))


def price_of(name: str) -> tuple[float, float] | None:
    """Dollars per million tokens of input and output, as far as Inspect knows them."""
    from inspect_ai.model import get_model_info

    info = _info(get_model_info, name)
    cost = None if info is None else info.cost
    return None if cost is None else (cost.input, cost.output)


def _info(look: Any, name: str) -> Any:
    try:
        return look(name)
    except Exception:  # a provider without its package or key: then nothing is known of its model
        return None
