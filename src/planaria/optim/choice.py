"""What a training recipe's user may choose of the optimizers; read before any worker exists.

Nothing here imports torch; :mod:`.training` makes of it what a worker needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from planaria.errors import ConfigError
from planaria.optim import checks
from planaria.optim.options import ScapeOptions

OPTIMIZERS: tuple[str, ...] = ("adamw", "adams", "sharded", "scape")
"""torch's AdamW under DDP or FSDP2; AdamS likewise; AdamW cut over the workers; Scape."""

OWNED: tuple[str, ...] = ("sharded", "scape")
"""Those that reduce gradients and clip by themselves, and so take the bare model."""


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Options of Scape; what is not here has the default of :class:`planaria.optim.ScapeOptions`.

    Raises:
        ConfigError: a value is out of range or contradicts another one.
    """

    density: float = 0.01
    """Share of the weights that scape sends each step, in (0, 1]; 1 is dense AdamS."""

    unsent: Literal["frozen", "moved", "local"] = "frozen"
    """A weight that scape does not send: frozen: stays; moved: its owner moves it by its own moment
    and all weights are gathered; local: every worker moves it, and replicas differ until they are
    averaged, part by part."""

    dense_steps: float = 0.1
    """First steps of scape that are dense: a count, or below 1 a share of the run (our choice)."""

    dense_embeddings: bool = False
    """Whether scape always sends embeddings whole, as it does with tensors of one dimension. That is
    most of the traffic then: 4 to 40 % of a language model."""

    statistic: Literal["aged", "momentum", "gradient", "cycle"] | None = None
    """What unsent = frozen and moved send the largest of: aged: the owner's first moment times the
    root of the steps since it was sent; momentum: the moment; gradient: the owner's gradient; cycle:
    nothing, all weights in turn, so no mask travels. Default: Scape's, aged."""

    wire: Literal["float32", "bfloat16", "int8", "int4"] | None = None
    """How a sent number travels; with int4 twice as many fit into the bytes as with int8, eight
    times as many as with float32. Default: Scape's, int8."""

    scale_cap: float | None = None
    """Largest factor of a step for what was skipped, at least 1; with a cycle of many steps a larger
    one than Scape's, 10, did better (50 with a density of 0.077)."""

    outer_rate: float | None = None
    """Rate of the outer Nesterov step of unsent = local; default: Scape's."""

    outer_momentum: float | None = None
    """Momentum of that step, in [0, 1); default: Scape's."""

    def __post_init__(self) -> None:
        checks.steps("dense_steps", self.dense_steps, total=1)
        ScapeOptions(**self.choices())
        for name in ("outer_rate", "outer_momentum"):
            if self.unsent != "local" and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}: {getattr(self, name):g} is set, and unsent is {self.unsent!r}, which "
                    "takes no outer step; leave it out, or use unsent = local"
                )

        for name in ("statistic", "scale_cap"):
            if self.unsent == "local" and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is set, and unsent is 'local', which sends every "
                    "weight in turn; leave it out, or use unsent = frozen"
                )

    def choices(self) -> dict[str, Any]:
        """Keywords of :class:`~planaria.optim.Scape` that are its :class:`ScapeOptions`."""
        names = ("statistic", "wire", "scale_cap", "outer_rate", "outer_momentum")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"density": self.density, "unsent": self.unsent, **given}


def check(optimizer: str, sparse: SparseConfig) -> None:
    """Raises :class:`ConfigError` for an unknown name, or for options that it would not heed."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer: {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}"
        )
    if optimizer == "scape" or sparse == SparseConfig():
        return
    fresh = SparseConfig()
    names = [name for name in vars(fresh) if getattr(sparse, name) != getattr(fresh, name)]
    raise ConfigError(
        f"{names[0]}: {getattr(sparse, names[0])} is set, and optimizer is {optimizer!r}, which "
        "sends everything; leave it out, or use optimizer = scape"
    )
