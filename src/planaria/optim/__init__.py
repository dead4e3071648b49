"""Optimizers that are cut over the workers and send little: AdamS, Sharded and Scape.

Names are loaded on first use, so that the command line may read ``planaria.optim.commands`` without
loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.optim.adams import AdamS
    from planaria.optim.groups import param_groups
    from planaria.optim.options import ScapeOptions
    from planaria.optim.scape import Scape
    from planaria.optim.sharded import Sharded

__all__ = ["AdamS", "Scape", "ScapeOptions", "Sharded", "param_groups"]

_HOMES = {
    "AdamS": "adams",
    "Scape": "scape",
    "ScapeOptions": "options",
    "Sharded": "sharded",
    "param_groups": "groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
