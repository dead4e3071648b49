"""Which samples a worker takes at a step, and the chance they meet: pure functions of the step.

A step that is done again after a loss sees the same samples, the same crops and the same turns,
because nothing here remembers anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planaria.errors import DataError


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Which samples a shard consumes: a pure function of (seed, step, shard).

    Each epoch is a new permutation; a step lies within one epoch, and the remainder that fills no
    step is left out, another one each time. The samples of a step depend on the number of workers
    and the batch only through their product.
    """

    samples: int
    seed: int
    world: int
    batch: int
    """Samples per shard and step."""

    def __post_init__(self) -> None:
        if self.samples < self.per_step:
            raise DataError(
                f"{self.samples} training samples, but a step of {self.world} workers x "
                f"{self.batch} takes {self.per_step}; lower batch, or give more data"
            )

    @property
    def per_step(self) -> int:
        """Samples that all shards together consume in a step."""
        return self.world * self.batch

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch."""
        return self.samples // self.per_step

    def ids(self, step: int, *, shard: int) -> NDArray[np.int64]:
        """Indices [batch] of the samples of ``shard`` at ``step`` (from 1)."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        first = index * self.per_step + shard * self.batch
        return _permutation(self.samples, self.seed, epoch)[first : first + self.batch]

    def epoch(self, step: int) -> int:
        """Epochs that are complete after ``step``."""
        return step // self.steps_per_epoch

    def chance(self, step: int, *, shard: int) -> int:
        """A 63-bit seed for the augmentation of ``shard`` at ``step``."""
        sequence = np.random.SeedSequence([self.seed, step, shard, 0xA06])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)


# Two epochs meet at a step's edge; each permutation of PCam's 262,144 patches takes 2 MiB.
@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch, 0x0DE]).permutation(samples)
