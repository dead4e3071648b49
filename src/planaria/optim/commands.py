"""Commands of the optimizers for the command line; imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from planaria.optim import plan_comm


@dataclass(frozen=True, kw_only=True)
class PlanComm:
    """Say, before training, what a step sends and how long it takes, dense and sparse."""

    params: int
    """Weights of the model that are trained."""
    workers: int
    """Workers of the data-parallel group."""
    mbit: float
    """Measured rate of one worker's link, Mbit/s (iperf3, or benchmarks/links.py)."""
    compute: float
    """Seconds of forward and backward of one step on one worker."""
    latency: float = plan_comm.Link.latency
    """Seconds of a collective that carries next to nothing."""
    dense_params: int = 0
    """Weights that are always sent whole: norms, biases, embeddings."""
    half: bool = False
    """The weights are bfloat16 or float16: they come back as two bytes each."""
    densities: tuple[float, ...] = (0.1, 0.01)
    """Shares of the weights to plan for."""

    def lines(self) -> list[str]:
        """The plan as text.

        Errors: :class:`planaria.errors.ConfigError` for a value out of range.
        """
        return plan_comm.Report(
            job=plan_comm.Job(
                params=self.params,
                workers=self.workers,
                compute=self.compute,
                dense_params=self.dense_params,
                weight_bytes=2 if self.half else 4,
            ),
            link=plan_comm.Link(mbit=self.mbit, latency=self.latency),
            densities=self.densities,
        ).lines()

    def run(self) -> int:
        """Prints the plan; returns the exit code."""
        sys.stdout.write("\n".join(self.lines()) + "\n")
        return 0
