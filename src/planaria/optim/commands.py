"""Commands of the optimizers for the command line; imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from planaria.errors import ConfigError
from planaria.optim import measure, plan_comm

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def count(text: str) -> int:
    """A whole number as people write one: 345000000, 345_000_000, 1e6, 345M, 1.8B.

    Errors: :class:`ValueError` for anything else.
    """
    plain = text.strip().replace(",", "")
    factor = _SUFFIXES.get(plain[-1:].lower())
    try:
        value = round(float(plain[:-1] if factor else plain) * (factor or 1.0), 3)
        if value.is_integer():
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r} is no whole number; write it as 345000000, 345M or 3.45e8")


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=lambda words: count(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlanComm:
    """Say, before training, what a step sends and how long it takes, dense and sparse."""

    params: Count
    """Weights of the model that are trained; 345M, 1.8B and 1e6 are understood."""
    workers: int
    """Workers of the data-parallel group."""
    mbit: float
    """Measured rate of one worker's link, Mbit/s (iperf3, or benchmarks/links.py)."""
    compute: float
    """Seconds of forward and backward of one step on one worker."""
    latency: float = plan_comm.Link.latency
    """Seconds of a collective that carries next to nothing."""
    dense_params: Count = 0
    """Weights that are always sent whole: norms, biases, embeddings."""
    half: bool = False
    """The weights are bfloat16 or float16: they come back as two bytes each."""
    densities: tuple[float, ...] = (0.1, 0.01)
    """Shares of the weights to plan for."""
    tensors: int = 100
    """Tensors of the model; they count with --measure."""
    measure: int = 0
    """Measure the optimizers' own arithmetic and the latency here, with so many workers at once: as
    many as will share a machine. 0: take what was measured on two cores."""

    def lines(self) -> list[str]:
        """The plan as text.

        Errors: :class:`planaria.errors.ConfigError` for a value out of range.
        """
        job = plan_comm.Job(
            params=self.params,
            workers=self.workers,
            compute=self.compute,
            dense_params=self.dense_params,
            weight_bytes=2 if self.half else 4,
            tensors=self.tensors,
        )
        link = plan_comm.Link(mbit=self.mbit, latency=self.latency)
        rows = plan_comm.methods(self.densities)
        for method, density in rows:
            plan_comm.volume(job, method, density)
        if not 0 <= self.measure <= self.workers:
            raise ConfigError(
                f"measure is {self.measure} and workers is {self.workers}; give the workers that "
                "share a machine, or 0 to measure nothing"
            )
        measured: plan_comm.Measured = {}
        if self.measure:
            latency, measured = measure.here(self.measure, workers=self.workers, rows=rows)
            link = replace(link, latency=max(self.latency, latency))
        return plan_comm.Report(
            job=job, link=link, densities=self.densities, measured=measured
        ).lines()

    def run(self) -> int:
        """Prints the plan; returns the exit code."""
        sys.stdout.write("\n".join(self.lines()) + "\n")
        return 0
