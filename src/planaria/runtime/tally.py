"""What a run counts beside its model: samples consumed, and scalars not yet told.

It is a stateful part like any other, so that a broken attempt leaves no trace in it either, and the
duty of telling scalars moves with shard 0 to a new owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

SAMPLES = "samples"
"""Name of the part that is added by us."""


def flat(ids: Iterable[Any]) -> list[Any]:
    """Sample ids as plain Python values: equal for a list, an array and a tensor of the same ids."""
    if hasattr(ids, "tolist"):
        return list(np.asarray(ids).reshape(-1).tolist())
    return [item.item() if isinstance(item, np.generic) else item for item in ids]


class Tally:
    """Digest of the order of samples, and the scalars of steps that are not yet committed."""

    def __init__(self) -> None:
        self.digest = ""
        """xxh3-128 over the digest before and the newest ids; equal for equal orders of samples."""
        self.count = 0
        self.scalars: list[tuple[int, dict[str, float]]] = []

    def consumed(self, ids: Iterable[Any]) -> None:
        """Add samples in the order in which they were consumed."""
        listed = flat(ids)
        text = f"{self.digest}\0{listed!r}"
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())
        self.count += len(listed)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.scalars.append((step, values))

    def settled(self, committed: int) -> list[tuple[int, dict[str, float]]]:
        """Scalars of committed steps, oldest first; they are not given again."""
        told = [(step, values) for step, values in self.scalars if step <= committed]
        self.scalars = [(step, values) for step, values in self.scalars if step > committed]
        return told

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "count": self.count, "scalars": list(self.scalars)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.digest = state["digest"]
        self.count = state["count"]
        self.scalars = [(int(step), dict(values)) for step, values in state["scalars"]]
