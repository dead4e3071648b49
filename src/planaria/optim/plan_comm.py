"""What a step sends and how long it takes, dense and sparse, before anything is trained.

A step takes its computation, the optimizer's own arithmetic, what of the gradients' way out does not
hide behind backward, the way back of the weights and a few small messages. A link is described by
its rate, by the share of it that an all-to-all and an all-gather reach, and by the time of an empty
collective; or by measured times. The constants were measured on gloo with ``benchmarks/links.py``.
How long the arithmetic takes depends on the machine and on how many workers share it, more than
anything else here: ``planaria.optim.measure`` measures it. ``docs/results/links.md`` has the
comparison with measured steps.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planaria.errors import ConfigError

METHODS = ("dense", "frozen", "moved", "local")

CHUNK = 1 << 12
"""Columns that a 12-bit index distinguishes; as in ``planaria.optim.masks``."""

VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
"""Bytes of a value that travels coded, its share of a block's scale included; as in
``planaria.optim.wire``."""


def _positive(name: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "above 0"
        raise ConfigError(f"{name} is {value:g}; give a finite number {least}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between workers, each with the same rate in and out."""

    mbit: float
    """Rate of one worker's link, Mbit/s."""
    latency: float = 1.5e-3
    """Seconds of a collective that carries next to nothing (four gloo workers on two cores)."""
    exchange_share: float = 0.75
    """Share of the rate that an all-to-all reaches: its receivers are hit by several senders."""
    gather_share: float = 0.97
    """Share of the rate that an all-gather reaches."""
    exchanges: tuple[tuple[float, float], ...] = ()
    """Measured all-to-alls, as (bytes that a worker sends, seconds), ascending; they take the place
    of rate and share, and know of bursts that a link lets through at once."""
    gathers: tuple[tuple[float, float], ...] = ()
    """The same of all-gathers."""

    def __post_init__(self) -> None:
        _positive("mbit", self.mbit)
        _positive("latency", self.latency, zero=True)
        for name in ("exchange_share", "gather_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value:g}; give a share of the rate in (0, 1]")

    def exchange(self, sent: float) -> float:
        """Seconds of an all-to-all in which every worker sends so many bytes."""
        if self.exchanges:
            return _between(((0.0, self.latency), *self.exchanges), sent)
        return self.latency + sent * 8e-6 / (self.mbit * self.exchange_share)

    def gather(self, sent: float) -> float:
        """Seconds of an all-gather in which every worker sends so many bytes."""
        if self.gathers:
            return _between(((0.0, self.latency), *self.gathers), sent)
        return self.latency + sent * 8e-6 / (self.mbit * self.gather_share)


def _between(points: Sequence[tuple[float, float]], sent: float) -> float:
    """On the straight line between two measured points, or beyond the last two; never below 0."""
    at = next((i for i, (size, _) in enumerate(points) if size >= sent and i), len(points) - 1)
    (size, time), (larger, longer) = points[at - 1 : at + 1]
    return max(0.0, time + (longer - time) * (sent - size) / (larger - size))


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What an optimizer's own work takes in a step on one worker, beside those on its machine."""

    step: float = 0.0
    """Seconds whatever the model is."""
    tensor: float = 0.0
    """Seconds for each of its tensors."""
    million: float = 0.0
    """Seconds for each million of its weights."""

    def __post_init__(self) -> None:
        for name in ("step", "tensor", "million"):
            _positive(name, getattr(self, name), zero=True)

    def seconds(self, *, tensors: int, params: int) -> float:
        """Seconds of a step for a model."""
        return self.step + self.tensor * tensors + self.million * params * 1e-6


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and where."""

    params: int
    """Weights of the model that are trained."""
    workers: int
    """Workers of the data-parallel group."""
    compute: float = 0.0
    """Seconds of forward and backward of one step on one worker."""
    dense_params: int = 0
    """Weights among them that are always sent whole (norms, biases, embeddings)."""
    gradient_bytes: int = 4
    """Bytes of a gradient on the wire."""
    weight_bytes: int = 4
    """Bytes of a weight on the wire: 4 for float32, 2 for bfloat16."""
    wire: str = "int8"
    """How movements and moments travel in sparse steps."""
    average_moments: bool = True
    """Whether the local family sends moments, too."""
    masked: bool = True
    """Whether masks travel in the frozen and moved families; a cycle is known beforehand."""
    bucket_bytes: int = 8 << 20
    """Size of the buckets in which dense gradients leave during backward."""
    tensors: int = 0
    """Tensors of the model; they count where the arithmetic was measured."""
    dense_arithmetic: Arithmetic = Arithmetic(million=4e-3)
    """Of the dense optimizer, buffers included."""
    sparse_arithmetic: Arithmetic = Arithmetic(million=5e-3)
    """Of a sparse step: every worker updates all of its own first moment."""

    def __post_init__(self) -> None:
        for name in ("params", "workers", "gradient_bytes", "weight_bytes", "bucket_bytes"):
            _positive(name, getattr(self, name))
        for name in ("compute", "dense_params", "tensors"):
            _positive(name, getattr(self, name), zero=True)
        if self.wire not in VALUE_BYTES:
            raise ConfigError(f"wire is {self.wire!r}; choose one of {', '.join(VALUE_BYTES)}")
        if self.dense_params > self.params:
            raise ConfigError(
                f"dense_params is {self.dense_params} and the model has {self.params} weights; "
                "give at most as many"
            )


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one worker sends in one step."""

    exchange: float
    """In all-to-alls."""
    gather: float
    """In all-gathers."""
    mask: float = 0.0
    """In all-gathers of masks, which overlap with the next step."""
    buckets: int = 1
    """Pieces in which the exchange leaves while backward runs."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.exchange + self.gather + self.mask


def mask_bytes(columns: int, chosen: int) -> int:
    """Bytes of the shorter code of ``chosen`` out of ``columns``."""
    return min(math.ceil(columns / 8), 2 * math.ceil(columns / CHUNK) + 3 * math.ceil(chosen / 2))


def volume(job: Job, method: str, density: float) -> Volume:
    """Bytes of one step of a method; at density 1 every method is the dense one."""
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}; choose one of {', '.join(METHODS)}")
    if not 0 < density <= 1:
        raise ConfigError(f"density is {density:g}; give a share of the weights in (0, 1]")
    away = (job.workers - 1) / job.workers
    if method == "dense" or density == 1:
        whole = job.params * away
        buckets = max(1, math.ceil(job.params * job.gradient_bytes / job.bucket_bytes))
        return Volume(
            exchange=whole * job.gradient_bytes, gather=whole * job.weight_bytes, buckets=buckets
        )
    dense, sparse = job.dense_params * away, density * (job.params - job.dense_params) * away
    out, back, coded = job.gradient_bytes, job.weight_bytes, VALUE_BYTES[job.wire]
    if method == "local":
        # Movements, and moments, go both ways; mean gradients of dense ones come back.
        both = sparse * coded * (2 if job.average_moments else 1)
        return Volume(exchange=both + dense * out, gather=both + dense * out)
    columns = math.ceil((job.params - job.dense_params) / job.workers)
    mask = mask_bytes(columns, math.ceil(density * columns)) * (job.workers - 1) * job.masked
    return Volume(
        exchange=sparse * coded + dense * out,
        gather=(sparse / density if method == "moved" else sparse) * min(coded, back)
        + dense * back,
        mask=mask,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One row of the plan."""

    method: str
    """Its name."""
    density: float
    """Share of the weights that is sent."""
    sent: float
    """Bytes that a worker sends in a step."""
    seconds: float
    """Length of a step."""
    speedup: float
    """Length of the dense step divided by it."""


def seconds(job: Job, link: Link, method: str, density: float) -> float:
    """Length of a step."""
    if job.workers == 1:
        return job.compute + job.dense_arithmetic.seconds(tensors=job.tensors, params=job.params)
    v = volume(job, method, density)
    dense = method == "dense" or density == 1
    out = link.exchange(v.exchange)
    # The last bucket is complete when backward ends, and backward is two thirds of the computation.
    hidden = min(out * (v.buckets - 1) / v.buckets, job.compute * 2 / 3) if dense else 0.0
    small = link.latency * (1 if dense else 3)
    mask = max(0.0, link.gather(v.mask) - job.compute) if v.mask else 0.0
    arithmetic = job.dense_arithmetic if dense else job.sparse_arithmetic
    return (
        job.compute
        + (out - hidden)
        + link.gather(v.gather)
        + small
        + mask
        + arithmetic.seconds(tensors=job.tensors, params=job.params)
    )


Measured = Mapping[tuple[str, float], Arithmetic]
"""Arithmetic by method and density."""


def methods(densities: Sequence[float]) -> list[tuple[str, float]]:
    """The dense step, then both sparse families at each density."""
    return [("dense", 1.0)] + [(m, d) for d in densities for m in ("frozen", "local")]


def plan(
    job: Job, link: Link, densities: Sequence[float], measured: Measured | None = None
) -> list[Estimate]:
    """One row for each of :func:`methods`."""
    found: list[Estimate] = []
    for method, density in methods(densities):
        own = (measured or {}).get((method, density))
        what = job if own is None else replace(job, dense_arithmetic=own, sparse_arithmetic=own)
        length = seconds(what, link, method, density)
        found.append(
            Estimate(
                method=method,
                density=density,
                sent=volume(job, method, density).total if job.workers > 1 else 0.0,
                seconds=length,
                speedup=(found[0].seconds if found else length) / length,
            )
        )
    return found


def advice(rows: Sequence[Estimate]) -> str:
    """One sentence: whether sparse communication pays on this link."""
    best = max(rows, key=lambda row: row.speedup)
    if best.speedup < 1.1:
        return (
            "It does not pay here: the best sparse step would be "
            f"{best.speedup:.2f} times as fast as the dense one; train densely."
        )
    return (
        f"It pays: {best.method} at {best.density:.0%} makes a step {best.speedup:.2f} times as "
        "fast; compare its loss at equal steps before you rely on it."
    )


def amount(size: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least one."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.3f} {unit}"
    return f"{size:.0f} B"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan as text."""

    job: Job
    link: Link
    densities: tuple[float, ...] = field(default=(0.1, 0.01))
    measured: Measured = field(default_factory=dict[tuple[str, float], Arithmetic])

    def lines(self) -> list[str]:
        """A table, and the advice."""
        rows = plan(self.job, self.link, self.densities, self.measured)
        head = (
            f"{self.job.params:,} weights, {self.job.workers} workers, {self.link.mbit:g} Mbit/s, "
            f"{self.job.compute:g} s of computation"
        )
        lines = [head, f"{'method':<8} {'density':>8} {'sent':>12} {'step':>10} {'speed-up':>9}"]
        lines += [
            f"{r.method:<8} {r.density:>8.2%} {amount(r.sent):>12} {r.seconds:>8.3f} s "
            f"{r.speedup:>8.2f}x"
            for r in rows
        ]
        return [*lines, advice(rows)]
