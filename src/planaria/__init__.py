"""Planaria: PyTorch jobs that regrow what they lose.

The names here are for training scripts; each is imported when it is first used, so that the command
line and the evaluator start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.errors import PlanariaError
    from planaria.runtime.attempt import Attempt
    from planaria.runtime.batches import Batches
    from planaria.runtime.memory.parts import replicated
    from planaria.runtime.run import Run, Shard, join

__version__ = "0.1.0"
__all__ = ["Attempt", "Batches", "PlanariaError", "Run", "Shard", "join", "replicated"]

_HOMES = {
    "Attempt": "planaria.runtime.attempt",
    "Batches": "planaria.runtime.batches",
    "PlanariaError": "planaria.errors",
    "Run": "planaria.runtime.run",
    "Shard": "planaria.runtime.run",
    "join": "planaria.runtime.run",
    "replicated": "planaria.runtime.memory.parts",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'planaria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
