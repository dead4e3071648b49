"""Options of :class:`planaria.optim.Scape`."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.optim import checks

FAMILIES = ("frozen", "moved", "local")
STATISTICS = ("momentum", "aged", "gradient", "cycle")
WIRES = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class ScapeOptions:
    """Every open choice of the method; what the paper leaves open is our choice throughout."""

    density: float = 0.01
    """Share of the weights that is sent each step, in (0, 1]; 1 is dense AdamS."""
    unsent: str = "frozen"
    """What happens to a weight that is not sent: it stays ("frozen"), its owner moves it by the
    owner's own moment and all weights are gathered ("moved"), or every worker moves it by its own
    moment and replicas drift between averagings ("local")."""
    buffer: str = "momentum"
    """What is sent in the frozen and moved families: the first moment, or the gradient with what
    was left out so far ("feedback")."""
    statistic: str = "aged"
    """What the mask takes the largest of: the owner's own buffer, the buffer times the root of the
    steps since it was sent ("aged", compared by squares), the owner's own gradient, or nothing: a
    fixed cycle."""
    after_send: str = "keep"
    """Whether a sent first moment is kept or cleared on the workers. Subtracting what was sent is
    the same as clearing, since each worker sends its own value."""
    decay: str = "moved"
    """When weights decay in the frozen family: when they move, once ("moved") or for all steps
    since ("lazy"), or all of them each step ("all")."""
    refresh: int = 1
    """Steps between two masks."""
    dense_steps: int = 0
    """First steps that are dense."""
    step_scale: float = 1.0
    """Exponent p of the step's factor (1 + tau)^p for a weight that was skipped tau times."""
    scale_cap: float = 10.0
    """Largest such factor."""
    clamp_after: int = 8
    """Skipped steps from which a rebuilt gradient is limited to |z| / sqrt(1 - b2)."""
    k_scope: str = "shard"
    """Whether the share is exact over an owner's whole part, each bucket, or each tensor of it."""
    mask_code: str = "auto"
    """How a mask travels: "bitmap", "index" (12 bits a column), or the shorter of both."""
    cycle: str = "scattered"
    """Order of the averaging cycle of the local family: "scattered" or "contiguous"."""
    cycle_run: int | None = None
    """Neighbouring columns that a scattered cycle averages together. Sixteen float32 numbers are
    what a processor fetches at a time, so one alone takes as long. By default 16 from a density of
    5 % on, else 1: on a toy 16 lost nothing at 10 % and .3 % of the loss at 1 %."""
    average_moments: bool = True
    """Whether the local family averages the first moments together with the weights."""
    wire: str = "int8"
    """How first moments and movements travel: "float32", "bfloat16", or whole numbers with a scale
    for each 256 of them, "int8" and "int4". A movement needs fewer digits than a weight; with
    "float32" the frozen family sends the weights themselves."""
    outer_rate: float = 1.0
    """Rate of the outer Nesterov step of the local family."""
    outer_momentum: float = 0.3
    """Momentum of that step, in [0, 1)."""
    check_every: int = 100
    """Steps between two comparisons of masks and weights over the workers; 0 for never."""
    force_sparse: bool = False
    """Takes the sparse path at density 1 too, for comparisons."""

    def __post_init__(self) -> None:
        checks.density(self.density)
        checks.choice("unsent", self.unsent, FAMILIES)
        checks.choice("buffer", self.buffer, ("momentum", "feedback"))
        checks.choice("statistic", self.statistic, STATISTICS)
        checks.choice("after_send", self.after_send, ("keep", "clear"))
        checks.choice("decay", self.decay, ("moved", "lazy", "all"))
        checks.choice("k_scope", self.k_scope, ("shard", "bucket", "tensor"))
        checks.choice("mask_code", self.mask_code, ("auto", "bitmap", "index"))
        checks.choice("wire", self.wire, WIRES)
        checks.choice("cycle", self.cycle, ("scattered", "contiguous"))
        checks.number("refresh", self.refresh, low=1)
        if self.cycle_run is not None:
            checks.number("cycle_run", self.cycle_run, low=1)
        checks.number("dense_steps", self.dense_steps, low=0)
        checks.number("step_scale", self.step_scale, low=0.0)
        checks.number("scale_cap", self.scale_cap, low=1.0)
        checks.number("clamp_after", self.clamp_after, low=0)
        checks.number("outer_rate", self.outer_rate, low=0.0)
        checks.number("outer_momentum", self.outer_momentum, low=0.0, high=1.0)
        checks.number("check_every", self.check_every, low=0)

    @property
    def sparse(self) -> bool:
        """Whether any step is sparse."""
        return self.density < 1 or self.force_sparse

    @property
    def run(self) -> int:
        """Neighbouring columns that are averaged together."""
        return self.cycle_run or (16 if self.density >= 0.05 else 1)

    @property
    def period(self) -> int:
        """Steps in which the local family's cycle comes round."""
        return max(1, round(1 / self.density))
